"""Which releases of vLLM the adapter was written for."""

import re

SUPPORTED = ((0, 32),)
"""Major and minor numbers of the releases whose connector API it follows."""


def check_release(version: str) -> None:
    """Refuses a release whose connector API may be another.

    >>> check_release("0.32.1+cpu")

    Raises:
        ImportError: names the release found and those that fit.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) not in SUPPORTED:
        fitting = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise ImportError(
            f"kvferry.integrations.vllm: this is vLLM {version}, and vLLM's connector API changes "
            f"between releases; this kvferry is made for vLLM {fitting}: install that, or a "
            f"kvferry that knows {version}"
        )
