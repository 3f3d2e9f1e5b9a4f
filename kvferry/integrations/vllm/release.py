"""Which releases of vLLM the adapter knows, and what becomes of the others."""

import logging
import re

from kvferry.integrations.vllm import contract

logger = logging.getLogger(__name__)

KNOWN = ((0, 28), (0, 29), (0, 30), (0, 31), (0, 32))
"""Major and minor numbers of the releases that it was tested with; each has a module in
``compat/``."""


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


FITTING = f"vLLM {_text(KNOWN[0])} to {_text(KNOWN[-1])}"
"""The known ones in words."""


def check_release(version: str) -> None:
    """Refuses a release that is older than those known, or newer and without what is needed.

    A newer one that has it all is tried, with a warning.

    Raises:
        ImportError: names the release found, those that fit, and what a newer one lacks.
    """
    found = _numbers(version)
    if found is None or found < KNOWN[0]:
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
    logger.warning(
        "vLLM %s is newer than %s, the newest release that this kvferry was tested with; it is "
        "tried, as all %d names, fields and methods that kvferry uses are there, methods with the "
        "same parameters. What they do was not tested: compare answers before you rely on them",
        version,
        _text(KNOWN[-1]),
        contract.num_needed(),
    )


def module_of(version: str) -> str:
    """The module of ``compat/`` for a release that passed :func:`check_release`.

    >>> module_of("0.30.1+cpu"), module_of("0.40.0")
    ('v0_30', 'v0_32')
    """
    found = _numbers(version)
    assert found is not None  # it was checked
    major, minor = min(found, KNOWN[-1])
    return f"v{major}_{minor}"


def _numbers(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return None if match is None else (int(match[1]), int(match[2]))
