"""The releases of SGLang known to the backend, and the treatment of all other releases."""

from kvferry.integrations import contract
from kvferry.integrations.releases import SGLANG, numbers, range_text, warn_of_newer
from kvferry.integrations.sglang.needed import NEEDED

KNOWN: tuple[tuple[int, ...], ...] = SGLANG
"""Numbers of the releases that the backend was tested with."""
FITTING = f"SGLang {range_text(KNOWN)}"
"""The known releases in words."""


def check_release(version: str) -> None:
    """Refuses a release that is older than the known releases, or that lacks a needed name.

    A newer release with all needed names is tried, with a warning.

    Raises:
        ImportError: names the release found, the fitting releases, and the missing names.
    """
    found = numbers(version, 3)
    if found < KNOWN[0]:
        raise ImportError(
            f"kvferry.integrations.sglang: this is SGLang {version}; this kvferry is made for "
            f"{FITTING}: install it"
        )
    gone = contract.gone(NEEDED)
    if gone:
        raise ImportError(
            f"kvferry.integrations.sglang: this is SGLang {version}, and this kvferry is made for "
            f"{FITTING}; of what it needs, these are gone: {'; '.join(gone)}. Install that "
            f"release, or a kvferry that knows {version}"
        )
    if found > KNOWN[-1]:
        warn_of_newer("SGLang", version, contract.num_needed(NEEDED))
