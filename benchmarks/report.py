"""What a benchmark leaves behind: a page, shown and written, the results as JSON, a picture.

A command makes a :class:`Run` first, which says what goes on meanwhile. Its results extend
:class:`Results`, and a page begins with what all of them have.
"""

import contextlib
import importlib.metadata
import io
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import typer
from rich.console import Console

import kvferry

Rounds = Annotated[int, typer.Option(min=1, help="Times that everything is measured.")]
Out = Annotated[Path, typer.Option(help="Folder for the results.")]
Quick = Annotated[bool, typer.Option(help="A test of the benchmark: as little as possible.")]
RESULTS = Path("benchmarks/results")

Cells: TypeAlias = Iterable[tuple[str, ...]]
"""A table, its header first."""

_PACKAGES = ("numpy", "numba", "pyzmq", "torch", "nixl", "nixl-cu12")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the machine and what runs on it. Figures mean little without them."""

    date: str
    """UTC, at the start."""
    cpu: str
    cores: int
    """Cores that this process may run on."""
    memory_gib: float
    kernel: str
    python: str
    versions: dict[str, str]
    load_before: float
    """Processes that ran or wanted to, over the last minute, before the benchmark began."""


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All that one run measured. Each benchmark adds what it has found."""

    command: str
    machine: Machine
    rounds: int = 1
    load_after: float = 0.0
    """The load average at the end; the run itself makes 1 to 2 of it."""
    quick: bool = False
    """Whether this was only a test of the benchmark."""


Found = TypeVar("Found", bound=Results)
Item = TypeVar("Item")


class Run:
    """One call of a benchmark: where it runs, what it was asked for, what is said meanwhile."""

    def __init__(
        self, module: str, out: Path, *, rounds: int = 1, quick: bool = False, width: int = 180
    ) -> None:
        """Looks at the machine as it is before the benchmark begins.

        Args:
            module: the name after ``python -m``.
            out: the folder for the results.
            rounds: times that everything is measured.
            quick: whether this is only a test of the benchmark.
            width: columns of what is printed to something else than a terminal.
        """
        self.console = Console()
        if not self.console.is_terminal:
            self.console.width = width  # nothing else could say how wide a log file is
        self.command = command_of(module)
        self.machine = describe_machine()
        self.out = out
        self.rounds = rounds
        self.quick = quick

    def say(self, text: str) -> None:
        """Prints what goes on."""
        self.console.print(text, highlight=False, markup=False)

    def results(self, kind: type[Found], **found: Any) -> Found:
        """The results of this run, which has just measured its last."""
        return kind(
            command=self.command,
            machine=self.machine,
            rounds=self.rounds,
            load_after=load_average(),
            quick=self.quick,
            **found,
        )

    def publish(
        self,
        name: str,
        results: Found,
        page: Callable[[Found], str],
        draw: Callable[[Found, Path], object] | None = None,
    ) -> None:
        """Prints the page; writes it, the results and a picture into the folder.

        Args:
            name: the files are ``<name>.json``, ``<NAME>.md`` and ``<name>.png``.
            results: all that was measured.
            page: makes the page for people of the results.
            draw: writes the picture to a path; left out for none.
        """
        text = self.write(name, results, page)
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        if draw is not None:
            draw(results, self.out / f"{name}.png")
        self.console.print(f"written to {self.out}")

    def write(self, name: str, results: Found, page: Callable[[Found], str]) -> str:
        """Writes the page and the results alone, as :meth:`publish` does; returns the page."""
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"{name}.json").write_bytes(msgspec.json.encode(results) + b"\n")
        text = page(results)
        (self.out / f"{name.upper()}.md").write_text(text)
        return text


def start(main: Callable[..., object]) -> None:
    """Runs a function as the command line says."""
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()


# ---- where and when --------------------------------------------------------------------------


def load_average() -> float:
    """Processes that ran or wanted to, over the last minute."""
    return round(os.getloadavg()[0], 2)


def command_of(module: str) -> str:
    """The command that started this process: ``python -m module`` and its arguments, of paths of
    this machine the names.
    """
    arguments = [Path(each).name if each.startswith("/") else each for each in sys.argv[1:]]
    return shlex.join(["python", "-m", module, *arguments])


def describe_machine() -> Machine:
    """Reads the facts off this machine."""
    versions = {"kvferry": kvferry.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return Machine(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        kernel=platform.release(),
        python=platform.python_version(),
        versions=versions,
        load_before=load_average(),
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


# ---- figures ---------------------------------------------------------------------------------


class TimedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One case: seconds by round of each contender."""

    seconds: dict[str, tuple[float, ...]]
    nbytes: int = 0
    """Bytes that every contender moves."""

    def median(self, contender: str) -> float:
        """Seconds of a contender: the median over the rounds."""
        return statistics.median(self.seconds[contender])

    def gbps(self, contender: str) -> float:
        """Bytes of the case over the median time, in GB/s."""
        return self.nbytes / self.median(contender) / 1e9

    def ratios(self, other: str, contender: str = "kvferry") -> list[float]:
        """How many times faster than the other a contender is, by round."""
        pairs = zip(self.seconds[other], self.seconds[contender], strict=True)
        return [theirs / ours for theirs, ours in pairs]


def in_turn(contenders: Sequence[Item], number: int) -> list[Item]:
    """The contenders of a round, in each of which another one begins: none is always behind the
    same neighbour.

    >>> in_turn("abc", 4)
    ['b', 'c', 'a']
    """
    first = number % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def take_turns(
    contenders: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, tuple[float, ...]]:
    """Has each contender measure itself once in each round; the round before the first warms up.

    Args:
        contenders: name → what measures it and returns seconds.
        rounds: times that everything is measured.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name in in_turn(list(contenders), number):
            took = contenders[name]()
            if number > 0:
                seconds[name].append(took)
    return {name: tuple(each) for name, each in seconds.items()}


# ---- the page --------------------------------------------------------------------------------


def page(
    title: str,
    results: Results,
    about: str,
    body: Iterable[str],
    caveats: Iterable[str] = (),
) -> str:
    """The page for people.

    Args:
        title: its heading.
        results: whose command, machine and load are told.
        about: more about what was measured, in the same paragraph.
        body: lines of Markdown.
        caveats: sentences in bold before the body.
    """
    lines = [f"# {title}", "", f"{_made(results)} {about}".rstrip(), ""]
    for caveat in (*_caveats(results), *caveats):
        lines += [f"**{caveat}**", ""]
    lines += body
    return "\n".join(lines).rstrip() + "\n"


def _made(results: Results) -> str:
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return (
        f"Made by `{results.command}` on {machine.date}: {machine.cpu}, {machine.cores} cores, "
        f"{machine.memory_gib} GiB, Linux {machine.kernel}, Python {machine.python}, {versions}. "
        f"Rounds: {results.rounds}. Load average {machine.load_before} before, "
        f"{results.load_after} after."
    )


def _caveats(results: Results) -> Iterator[str]:
    if results.quick:
        yield "A quick run: its figures say nothing."
    elif results.machine.load_before > 0.5 * results.machine.cores:
        yield (
            f"Other work was running (load average {results.machine.load_before} before the "
            "benchmark began): the figures are noisy."
        )


def table(cells: Cells, left: int = 1) -> list[str]:
    """Lines of a table in Markdown, its first ``left`` columns flush left.

    >>> table([("case", "ms"), ("short", "2")])
    ['| case | ms |', '| --- | ---: |', '| short | 2 |']
    """
    header, *rows = cells
    rule = "|" + " --- |" * left + " ---: |" * (len(header) - left)
    first, *lines = ("| " + " | ".join(row) + " |" for row in (header, *rows))
    return [first, rule, *lines]


def bullets(lines: Iterable[str]) -> list[str]:
    """A list in Markdown."""
    return [f"- {line}" for line in lines]


def ratio_cell(ratios: Sequence[float], goal: float | None = None) -> str:
    """Median, lowest and highest, goal; in bold where the goal is missed.

    >>> ratio_cell([2.0, 1.0, 4.0], 1.5)
    '2.00 (1.00–4.00) ≥ 1.5'
    """
    middle = statistics.median(ratios)
    text = f"{middle:.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
    if goal is None:
        return text
    text = f"{text} ≥ {goal:g}"
    return text if middle >= goal else f"**{text}**"


# ---- the picture -----------------------------------------------------------------------------


@contextlib.contextmanager
def picture(
    path: Path, rows: int, columns: int, size: tuple[float, float], **options: Any
) -> Iterator[Any]:
    """A grid of axes to draw on, which is written to a path when the context ends."""
    import matplotlib as mpl
    from PIL import Image

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, **options)
    yield grid
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110)
    plt.close(figure)
    # A palette makes a third of the bytes, and git keeps them all.
    Image.open(drawn).convert("RGB").quantize(128).save(path, "PNG", optimize=True)
