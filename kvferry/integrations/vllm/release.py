"""The release of vLLM that is installed: whether it fits, and the module that knows it."""

from kvferry.integrations import releases
from kvferry.integrations.releases import VLLM, numbers
from kvferry.integrations.vllm.contract import BASE, NEEDED


def check_release(version: str) -> None:
    """Refuses a release that does not fit; known releases are not searched for needed names.

    Raises:
        ImportError: see :func:`kvferry.integrations.releases.check_release`.
    """
    releases.check_release("vLLM", version, NEEDED, base=BASE)


def module_of(version: str) -> str:
    """The module of ``compat/`` for a release that passed :func:`check_release`.

    >>> module_of("0.30.1+cpu"), module_of("0.40.0")
    ('v0_30', 'v0_33')
    """
    major, minor = min(numbers(version, 2), VLLM[-1])
    return f"v{major}_{minor}"
