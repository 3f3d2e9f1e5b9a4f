"""The releases of vLLM known to the adapter, and the treatment of all other releases."""

from kvferry.integrations.releases import VLLM, numbers, range_text, warn_of_newer
from kvferry.integrations.vllm import contract

KNOWN = VLLM
"""Major and minor numbers of the releases that the adapter was tested with."""
FITTING = f"vLLM {range_text(KNOWN)}"
"""The known releases in words."""


def check_release(version: str) -> None:
    """Refuses a release that is older than the known releases, or newer and incomplete.

    A newer release with all needed names is tried, with a warning.

    Raises:
        ImportError: names the release found, the fitting releases, and the names missing in a
            newer release.
    """
    found = numbers(version, 2)
    if found < KNOWN[0]:
        raise ImportError(
            f"kvferry.integrations.vllm: this is vLLM {version}; this kvferry is made for "
            f"{FITTING}: install one of these"
        )
    if found <= KNOWN[-1]:
        return
    gone = contract.gone()
    if gone:
        raise ImportError(
            f"kvferry.integrations.vllm: this is vLLM {version}, newer than this kvferry, which "
            f"is made for {FITTING}; of what it needs, these are gone: {'; '.join(gone)}. Install "
            f"one of those releases, or a kvferry that knows {version}"
        )
    warn_of_newer("vLLM", version, contract.num_needed())


def module_of(version: str) -> str:
    """The module of ``compat/`` for a release that passed :func:`check_release`.

    >>> module_of("0.30.1+cpu"), module_of("0.40.0")
    ('v0_30', 'v0_33')
    """
    major, minor = min(numbers(version, 2), KNOWN[-1])
    return f"v{major}_{minor}"
