"""The releases of serving engines that the adapters were tested with; imports no engine."""

import logging
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions, version

from kvferry.integrations import contract

logger = logging.getLogger(__name__)

VLLM = ((0, 28), (0, 29), (0, 30), (0, 31), (0, 32), (0, 33))
"""Major and minor numbers of the releases of vLLM; each has a module in ``vllm/compat/``."""

SGLANG = ((0, 5, 23),)
"""Numbers of the releases of SGLang. In 0.5.22, its classes for backends do not poll or send."""

ENGINES: Mapping[str, tuple[str, tuple[tuple[int, ...], ...]]] = {
    "vLLM": ("vllm", VLLM),
    "SGLang": ("sglang", SGLANG),
}
"""Name of an engine → its import package, and the known releases, oldest first."""


def range_text(releases: tuple[tuple[int, ...], ...]) -> str:
    """A range of releases in words.

    >>> range_text(((0, 28), (0, 29), (0, 30))), range_text(((0, 5),))
    ('0.28 to 0.30', '0.5')
    """
    ends = [".".join(map(str, release)) for release in (releases[0], releases[-1])]
    return " to ".join(dict.fromkeys(ends))


def fitting(engine: str) -> str:
    """The known releases of an engine, a key of :data:`ENGINES`, in words."""
    return f"{engine} {range_text(ENGINES[engine][1])}"


def numbers(release: str, count: int) -> tuple[int, ...]:
    """The first ``count`` numbers of a release; ``()`` for a text that is no release.

    >>> numbers("0.5.23.post1", 3), numbers("0.30.1+cpu", 2), numbers("dev", 2)
    ((0, 5, 23), (0, 30), ())
    """
    match = re.match(r"\.".join([r"(\d+)"] * count), release)
    return tuple(map(int, match.groups())) if match else ()


def check_release(
    engine: str,
    release: str,
    needed: Mapping[str, tuple[str, ...]],
    *,
    base: str = "",
    also_known: bool = False,
) -> None:
    """Refuses a release that is older than the known releases, or that lacks a needed name.

    A newer release with all needed names is tried, with a warning.

    Args:
        engine: name of the engine, a key of :data:`ENGINES`.
        release: the release found.
        needed: see :func:`kvferry.integrations.contract.gone`.
        base: see :func:`kvferry.integrations.contract.gone`.
        also_known: the names are looked for in a known release too, not only in a newer one.

    Raises:
        ImportError: names the release found, the fitting releases, and the missing names.
    """
    package, known = ENGINES[engine]
    found, is_one = numbers(release, len(known[0])), len(known) == 1
    here = f"kvferry.integrations.{package}: this is {engine} {release}"
    if found < known[0]:
        remedy = "install it" if is_one else "install one of these"
        raise ImportError(f"{here}; this kvferry is made for {fitting(engine)}: {remedy}")
    is_newer = found > known[-1]
    if not (is_newer or also_known):
        return
    if gone := contract.gone(needed, base):
        ours = "and this kvferry is" if also_known else "newer than this kvferry, which is"
        remedy = "Install that release" if is_one else "Install one of those releases"
        raise ImportError(
            f"{here}, {ours} made for {fitting(engine)}; of what it needs, these are gone: "
            f"{'; '.join(gone)}. {remedy}, or a kvferry that knows {release}"
        )
    if is_newer:
        logger.warning(
            "%s %s is newer than %s, the newest release that this kvferry was tested with; it is "
            "tried, as all %d names, fields and methods that kvferry uses are there, methods with "
            "the same parameters. What they do was not tested: compare answers before you rely on "
            "them",
            engine,
            release,
            range_text(known[-1:]),
            contract.num_needed(needed),
        )


def engine_lines() -> Iterator[str]:
    """A line per engine: the known releases, and the installed release, if there is one."""
    distributions = packages_distributions()
    for engine, (package, _) in ENGINES.items():
        here = [f"{name} {version(name)}" for name in sorted(set(distributions.get(package, ())))]
        told = f"; here: {', '.join(here)}" if here else "; not installed here"
        yield f"{fitting(engine)}{told}"
