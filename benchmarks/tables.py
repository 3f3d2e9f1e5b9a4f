"""How results are shown and written: a table on the terminal, JSON, a page for people."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

Cells = Iterable[tuple[str, ...]]
"""A table, its header first."""


def ratio_cell(ratios: Sequence[float], goal: float) -> str:
    """Median, lowest and highest, goal.

    >>> ratio_cell([2.0, 1.0, 4.0], 1.5)
    '2.00 (1.00–4.00) ≥ 1.5'
    """
    middle = statistics.median(ratios)
    return f"{middle:.2f} ({min(ratios):.2f}–{max(ratios):.2f}) ≥ {goal:g}"


def show(
    console: Console, title: str, cells: Cells, lines: Iterable[str], *, left: int = 1
) -> None:
    """Prints a table, its first ``left`` columns flush left, and lines below it."""
    table = Table(title=title)
    header, *rows = cells
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index < left else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for line in lines:
        console.print(line, highlight=False, markup=False)


def write(
    folder: Path, name: str, results: msgspec.Struct, page: str, page_name: str | None = None
) -> None:
    """Writes ``<name>.json`` and ``<NAME>.md``, or another page, into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.format(msgspec.json.encode(results), indent=1)
    (folder / f"{name}.json").write_bytes(encoded + b"\n")
    (folder / f"{page_name or name.upper()}.md").write_text(page)


def markdown(cells: Cells, left: int = 1) -> Iterator[str]:
    """Lines of a table in Markdown, its first ``left`` columns flush left.

    >>> list(markdown([("case", "ms"), ("short", "2")]))
    ['| case | ms |', '| --- | ---: |', '| short | 2 |']
    """
    header, *rows = cells
    yield "| " + " | ".join(header) + " |"
    yield "|" + " --- |" * left + " ---: |" * (len(header) - left)
    yield from ("| " + " | ".join(row) + " |" for row in rows)


def bullets(lines: Iterable[str]) -> list[str]:
    """A list in Markdown."""
    return [f"- {line}" for line in lines]


def page(
    title: str,
    made: str,
    caveats: Iterable[str],
    cells: Cells,
    notes: Iterable[str],
    missed: list[str],
    *,
    quick: bool,
    left: int = 1,
) -> str:
    """The page for people: the table below its caveats, lines of notes, what was missed."""
    met = "Not judged: this was a quick run." if quick else "All are met."
    lines = [
        f"# {title}",
        "",
        made,
        "",
        *(f"**{caveat}**\n" for caveat in caveats),
        *markdown(cells, left),
        "",
        *notes,
        "",
        "## Goals",
        "",
        *bullets(missed or [met]),
    ]
    return "\n".join(lines) + "\n"
