"""Output of the commands: console, JSON, durations and progress."""

import re
from types import TracebackType
from typing import Self

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvferry.config import printable

PIPE_WIDTH = 120
"""Width of the console in columns if no terminal gives a width: tables keep their numbers whole."""


def make_console() -> Console:
    """The console of a command's ordinary output."""
    # With emojis, parts of IPv6 addresses such as ":b:" would be shown as pictures.
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal and console.width < PIPE_WIDTH:
        console.width = PIPE_WIDTH
    return console


def print_json(document: object) -> None:
    """Prints JSON for other programs on standard output."""
    typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def plain(text: str) -> str:
    """``text`` for a message with markup; names and errors of other machines may look like it."""
    return escape(printable(text))


def add_plain_row(table: Table, *cells: str) -> None:
    """Adds a row without markup; names and errors of other machines may look like it."""
    table.add_row(*(Text(printable(cell)) for cell in cells))


def seconds_text(seconds: float) -> str:
    """Text of a duration.

    >>> seconds_text(0.0042), seconds_text(7.25), seconds_text(80), seconds_text(7300)
    ('4.2 ms', '7.2 s', '1 min 20 s', '2 h 1 min')
    """
    if abs(seconds) < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60} s"
    return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60} min"


class PartProgress:
    """One line per part of the cluster: a live bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, str] = {}
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.fields[part]:<12}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
        )

    def __call__(self, part: str, doing: str, done: float) -> None:
        """Shows the action of a part, with the finished share ``done`` (0 to 1)."""
        if self._console.is_terminal:
            if part not in self._tasks:
                self._tasks[part] = self._progress.add_task(doing, total=1.0, part=part)
            self._progress.update(self._tasks[part], description=doing, completed=done)
            return
        # After "tensor 4 of 272", the line "tensor 5 of 272" is no news.
        kind = re.sub(r"\d+", "#", doing)
        if self._said.get(part) != kind:
            self._said[part] = kind
            self._console.print(f"{part}: {doing}", highlight=False, markup=False)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._progress.stop()
