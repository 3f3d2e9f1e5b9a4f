"""``python -m benchmarks.beside BASE``: this commit's speed beside an older one's, in one run.

Both checkouts run their own ``python -m benchmarks`` in turn, one round each, and change places
after every round. A row is what both measure under one name. Its figure is the median over the
rounds of *old seconds / new seconds*: above 1 the new one is faster.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from benchmarks.machine import Machine, command_of, describe_machine, load_average

LOWEST = 0.95
"""Below it a row is named."""
PARTS = ("transports", "bind", "confirm", "postprocess", "planning")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What both measure under one name."""

    family: str
    case: str
    ratios: tuple[float, ...]
    """Old seconds / new seconds, a round each."""

    @property
    def median(self) -> float:
        """Over the rounds."""
        return statistics.median(self.ratios)


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All that ``beside.json`` holds."""

    command: str
    machine: Machine
    base: str
    """The older commit."""
    rounds: int
    loads: tuple[float, ...]
    """Load averages after each round."""
    rows: tuple[Row, ...]


def main(
    base: Annotated[Path, typer.Argument(help="Checkout of the older commit.")],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of both.")] = 10,
    only: Annotated[list[str] | None, typer.Option(help="Measure this alone; repeatable.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("benchmarks/results"),
) -> None:
    """Runs the benchmarks of two checkouts in turn, and writes how they compare."""
    console = Console(width=120)
    here, base = Path.cwd(), base.resolve()
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    loads = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            pair: dict[Path, dict[tuple[str, str], float]] = {}
            for tree in (base, here) if number % 2 == 0 else (here, base):
                pair[tree] = _measure(tree, only or list(PARTS), Path(folder) / "results")
            for key in pair[base].keys() & pair[here].keys():
                found[key].append(pair[base][key] / pair[here][key])
            loads.append(load_average())
            console.print(f"round {number + 1} of {rounds}", style="dim")
    results = Results(
        command=command_of("benchmarks.beside"),
        machine=describe_machine(),
        base=_commit(base),
        rounds=rounds,
        loads=tuple(loads),
        rows=tuple(
            Row(family=family, case=case, ratios=tuple(round(ratio, 3) for ratio in ratios))
            for (family, case), ratios in sorted(found.items())
        ),
    )
    text = _text(results)
    console.print(text, markup=False, highlight=False)
    (out / "beside.json").write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    (out / "BESIDE.md").write_text(text, encoding="utf-8")


def _measure(tree: Path, parts: list[str], out: Path) -> dict[tuple[str, str], float]:
    """One round of a checkout: (family, case) → seconds."""
    arguments = [argument for part in parts for argument in ("--only", part)]
    subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks", "--rounds", "1", "--no-nixl"),
            *("--out", str(out), *arguments),
        ],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    found: dict[tuple[str, str], float] = {}
    for file in out.glob("*.json"):
        document = json.loads(file.read_bytes())
        found |= {(family, case): seconds for family, case, seconds in _seconds(document)}
        file.unlink()
    return found


def _seconds(document: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """(family, case, seconds) of one file of results."""
    for group in document.get("transports", ()):
        for row in group["rows"]:
            seconds = [sample["seconds"] for sample in row["samples"]]
            yield f"transport {row['contender']}", _words(group["case"]), statistics.median(seconds)
    for row in document.get("bind", ()):
        yield "bind", f"{row['tokens']} tokens", row["median_seconds"]
    for row in document.get("confirm", ()):
        yield "confirm", row["case"], row["median_seconds"]
    for row in document.get("rows", ()):
        yield "postprocess", _words(row["case"]), statistics.median(row["seconds"]["kvferry"])
    for row in document.get("plans", ()):
        yield "planning", f"{row['case']}, {row['ranks']} ranks", row["seconds"]
    for row in document.get("binds", ()):
        yield "planning, bind", f"{row['case']}, {row['tokens']} tokens", row["seconds"]


def _words(case: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in case.items())


def _commit(tree: Path) -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(
        command, cwd=tree, capture_output=True, text=True, check=True
    ).stdout.strip()


def _text(results: Results) -> str:
    machine = results.machine
    lines = [
        f"# Beside {results.base}",
        "",
        (
            f"`{results.command}`: {results.rounds} rounds on {machine.cpu}, "
            f"{machine.cores} cores, {machine.date}. Load averages after the rounds: "
            f"{', '.join(f'{load:.1f}' for load in results.loads)}."
        ),
        "",
        (
            "Old seconds / new seconds, the median over the rounds; above 1 this commit is faster. "
            "`memmove` and `torch copy` are nobody's code here: how far they are from 1 is noise."
        ),
        "",
        "| | rows | geometric mean | lowest row |",
        "|---|---|---|---|",
    ]
    families: dict[str, list[Row]] = defaultdict(list)
    for row in results.rows:
        families[row.family].append(row)
    for family, rows in families.items():
        medians = [row.median for row in rows]
        mean = statistics.geometric_mean(medians)
        lines.append(f"| {family} | {len(rows)} | {mean:.2f} | {min(medians):.2f} |")
    slow = [row for row in results.rows if row.median < LOWEST]
    lines += ["", f"Rows below {LOWEST}: {len(slow) or 'none'}.", ""]
    if slow:
        lines += ["| | case | median | least and most of the rounds |", "|---|---|---|---|"]
        lines += [
            f"| {row.family} | {row.case} | {row.median:.2f} | "
            f"{min(row.ratios):.2f}, {max(row.ratios):.2f} |"
            for row in slow
        ]
    return "\n".join([*lines, ""]) if slow else "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
