"""``kvferry trace``: a request's life over several engines, as a table and as a picture."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvferry.cli.console import add_plain_row, make_console, plain, print_json, seconds_text
from kvferry.cli.options import AsJson, Keys, Timeout, load_keys, parse_address
from kvferry.config import printable
from kvferry.control.client import asking_client
from kvferry.control.messages import MAX_ID_CHARS, RequestTrace, TracePart
from kvferry.errors import ConfigError, KVFerryError
from kvferry.explain.sentences import bytes_text
from kvferry.observe.timeline import EngineAnswer, Row, Stretch, gather, handover, rows_of
from kvferry.zeromq import join_address

BAR_CHARS = 64
"""Number of characters in the picture's time axis."""
NOT_DRAWN = "answer"
"""Name of the last part, which may take any time and would leave no room for other parts."""


def trace(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID",
            help="The id in an answer's header x-request-id, or in a log.",
            show_default=False,
        ),
    ],
    addresses: Annotated[
        list[str],
        typer.Argument(
            metavar="HOST:PORT...",
            help="Control channels (kv_port) of the engines to ask.",
            show_default=False,
        ),
    ],
    keys: Keys = None,
    timeout_s: Timeout = 5.0,
    as_json: AsJson = False,
) -> None:
    """Prints the actions of the engines at ``addresses`` for a request.

    Raises:
        ConfigError: the id, an address or the keys cannot be used.
        KVFerryError: an engine gave no answer, and no other engine knows the request.
        SystemExit: 1 if all engines answered, and none knows the request.
    """
    if not 0 < len(request_id) <= MAX_ID_CHARS:
        raise ConfigError(f"REQUEST_ID: an id has 1 to {MAX_ID_CHARS} characters")
    plain = [join_address(*parse_address(one)) for one in addresses]
    with asking_client("trace", timeout_s, load_keys(keys)) as client:
        answers = gather(client, plain, request_id)
    if as_json:
        found = handover(answers)
        print_json({"request_id": request_id, "engines": answers, "handover": found})
    else:
        show(request_id, answers, make_console())
    if any(answer.requests for answer in answers):
        return
    if silent := [answer.address for answer in answers if answer.error]:
        raise KVFerryError(
            f"{request_id} was not found, but {len(silent)} of {len(answers)} engines gave no "
            f"answer: {', '.join(silent)}"
        )
    raise typer.Exit(1)


def show(request_id: str, answers: Sequence[EngineAnswer], console: Console) -> None:
    """Prints a request's trace for people."""
    for answer in answers:
        _show_engine(request_id, answer, console)
    rows = rows_of(answers)
    if not rows:
        return
    begin = rows[0].started
    console.print(_table(rows, begin))
    for line in picture(rows):
        console.print(Text(line), soft_wrap=True)
    if stretches := handover(answers):
        console.print(_handover_table(stretches))


def _show_engine(request_id: str, answer: EngineAnswer, console: Console) -> None:
    """Prints an engine's lines above the table."""
    name = f"[bold]{plain(answer.engine_id or answer.address)}[/]"
    if answer.error:
        console.print(f"{name}: {plain(answer.error)}")
        return
    if not answer.requests:
        console.print(
            f"{name} ({plain(answer.address)}): knows nothing of {plain(request_id)}: none of "
            f"the last {answer.remembered} requests that loaded or lent KV here"
        )
        return
    ahead = answer.clock_ahead_s
    way = "ahead of" if ahead > 0 else "behind"
    clock = f"is {seconds_text(abs(ahead))} {way}" if ahead else "agrees with"
    console.print(
        f"{name} ({plain(answer.address)}): its clock {clock} this machine's, "
        f"to ±{seconds_text(answer.clock_unsure_s)}" + (", which is taken off" if ahead else "")
    )
    for request in answer.requests:
        console.print(f"  {plain(_summary(request))}", soft_wrap=True)
        if request.error:
            console.print(f"  {plain(request.error)}", style="red")


def _summary(request: RequestTrace) -> str:
    """A request on an engine, in one line."""
    words = [f"{request.request_id}: {request.outcome} after {seconds_text(request.seconds)}"]
    if request.peer_request_id:
        words.append(f"loaded from {request.peer}")
    elif request.peer:
        words.append(f"lent to {request.peer}")
    return ", ".join(words)


def _table(rows: Sequence[Row], begin: float) -> Table:
    table = Table("engine", "part", "rank")
    for name in ("from ms", "took ms", "bytes", "GB/s"):
        table.add_column(name, justify="right")
    table.add_column("how")
    for row in rows:
        part = row.part
        moved_s = part.moving or part.seconds  # a part may wait until the source computes more
        add_plain_row(
            table,
            row.engine,
            part.name,
            "" if part.rank is None else str(part.rank),
            f"{(row.started - begin) * 1000:.1f}",
            f"{part.seconds * 1000:.1f}",
            bytes_text(part.nbytes) if part.nbytes else "",
            f"{part.nbytes / moved_s / 1e9:.2f}" if part.nbytes and moved_s else "",
            _how(part),
        )
    return table


def _handover_table(stretches: Sequence[Stretch]) -> Table:
    whole = sum(stretch.seconds for stretch in stretches)
    table = Table(
        title="from the end of prefill to the first token", title_justify="left", show_footer=True
    )
    table.add_column("stretch", footer="all of it")
    table.add_column("whose")
    table.add_column("took ms", justify="right", footer=f"{whole * 1000:.1f}")
    table.add_column("share", justify="right")
    for stretch in stretches:
        share = f"{stretch.seconds / whole:.0%}" if whole else ""
        table.add_row(stretch.name, stretch.owner, f"{stretch.seconds * 1000:.1f}", share)
    return table


def _how(part: TracePart) -> str:
    if part.error:
        return part.error
    ranks = ", ".join(map(str, part.source_ranks))
    come = f"from rank{'s' if len(part.source_ranks) > 1 else ''} {ranks}" if ranks else ""
    words = [part.transport, come, part.note, "goes on" if part.is_open else ""]
    return ", ".join(word for word in words if word)


def picture(rows: Sequence[Row]) -> list[str]:
    """Bars on a common time axis, a line per part; the bar of the answer is cut off.

    >>> part = TracePart(name="read", started=5.0, seconds=0.01, rank=0)
    >>> lease = TracePart(name="lease", started=4.99, seconds=0.01)
    >>> for line in picture([Row("d", 4.99, lease), Row("d", 5.0, part)]):
    ...     print(line.rstrip())
    d lease  │████████████████████████████████
    d read 0 │                                ████████████████████████████████
             └─ 0 ──────────────────────────────────────────────────── 20.0 ms
    """
    begin = min(row.started for row in rows)
    drawn = [row for row in rows if row.part.name != NOT_DRAWN] or rows
    span = max(max(row.started + row.part.seconds for row in drawn) - begin, 1e-9)
    names = [_name(row) for row in rows]
    width = max(map(len, names))
    lines = []
    for name, row in zip(names, rows, strict=True):
        first = round((row.started - begin) / span * BAR_CHARS)
        last = round((row.started + row.part.seconds - begin) / span * BAR_CHARS)
        first = min(max(first, 0), BAR_CHARS - 1)
        bar = "█" * max(1, min(last, BAR_CHARS) - first)
        goes_on = last > BAR_CHARS or row.part.is_open
        lines.append(f"{name:<{width}} │{' ' * first}{bar}{'→' if goes_on else ''}")
    end = seconds_text(span)
    line = "─" * (BAR_CHARS - len(end) - 5)
    return [*lines, f"{'':<{width}} └─ 0 {line} {end}"]


def _name(row: Row) -> str:
    rank = "" if row.part.rank is None else f" {row.part.rank}"
    return printable(f"{row.engine} {row.part.name}{rank}")
