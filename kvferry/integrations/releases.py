"""The releases of serving engines that the adapters were tested with; imports no engine."""

import logging
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions, version

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


def numbers(release: str, count: int) -> tuple[int, ...]:
    """The first ``count`` numbers of a release; ``()`` for a text that is no release.

    >>> numbers("0.5.23.post1", 3), numbers("0.30.1+cpu", 2), numbers("dev", 2)
    ((0, 5, 23), (0, 30), ())
    """
    match = re.match(r"\.".join([r"(\d+)"] * count), release)
    return tuple(map(int, match.groups())) if match else ()


def warn_of_newer(engine: str, release: str, num_needed: int) -> None:
    """Warns of a release that is newer than all known ones, and that lacks no needed name.

    Args:
        engine: name of the engine, a key of :data:`ENGINES`.
        release: the release found.
        num_needed: number of names, fields and methods that were looked for.
    """
    _, known = ENGINES[engine]
    logger.warning(
        "%s %s is newer than %s, the newest release that this kvferry was tested with; it is "
        "tried, as all %d names, fields and methods that kvferry uses are there, methods with the "
        "same parameters. What they do was not tested: compare answers before you rely on them",
        engine,
        release,
        range_text(known[-1:]),
        num_needed,
    )


def engine_lines() -> Iterator[str]:
    """A line per engine: the known releases, and the installed release, if there is one."""
    distributions = packages_distributions()
    for engine, (package, known) in ENGINES.items():
        here = [f"{name} {version(name)}" for name in sorted(set(distributions.get(package, ())))]
        told = f"; here: {', '.join(here)}" if here else "; not installed here"
        yield f"{engine} {range_text(known)}{told}"
