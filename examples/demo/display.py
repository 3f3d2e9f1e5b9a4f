"""The demo's display: steps, tables and verdict."""

import asyncio
import secrets
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvferry.cli.console import PartProgress, make_console
from kvferry.cli.options import RayAddress
from kvferry.cli.plan import cluster_engines
from kvferry.cli.rank_map import show_pair
from kvferry.cluster.launcher import Cluster
from kvferry.cluster.preflight import convert
from kvferry.config import ClusterConfig
from kvferry.engine.weights import load_model_config
from kvferry.errors import ConfigError
from kvferry.explain.pairs import map_pairs
from kvferry.router.answer import TextCodec
from kvferry.serving.process import output_folder

from . import acts
from .acts import Answer, Prompt, Reference, Result, Turn, TurnResult
from .timeline import draw_timeline


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture and the results.")] = Path(
        "demo-out"
    ),
    transport: Annotated[
        str, typer.Option(help="What moves the KV: shm or tcp, or another one installed.")
    ] = "shm",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of prompts to send: a file *.txt for each.",
            show_default="the ones that ship",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 40,
    model: Annotated[str, typer.Option(help="Model to serve.")] = "smollm2",
    ray: RayAddress = None,
) -> None:
    """Runs the demo; exits with 1 if an answer or the KV differs.

    Raises:
        KVFerryError: the demo cannot be run.
    """
    console = make_console()
    questions = acts.load_prompts(prompts)
    # Engines on other machines would publish prompts to any listener there.
    said = acts.load_prompts(acts.CONVERSATION_FOLDER) if ray is None else []
    transports = [transport]
    if ray is not None and transport == "shm":
        transports.append("tcp")  # ranks of one node still use shared memory
    config = acts.demo_config(model, transports)
    output_folder(out, "--out")

    _heading(console, "1. The model")
    with PartProgress(console) as progress:
        folder = str(convert(config.model, partial(progress, "model")))
    references, turns = _reference(console, folder, config, questions, max_tokens, said)
    sequences = [reference.prompt_tokens + max_tokens for reference in references]
    sequences += [turn.reference.prompt_tokens + acts.TURN_TOKENS for turn in turns]
    config = acts.demo_config(model, transports, sequences, converses=bool(turns))
    answers, results, held = _cluster(
        console, config, questions, references, turns, max_tokens, out, ray
    )

    _heading(console, f"{6 if turns else 5}. What moved")
    console.print(_table(results))
    shape = load_model_config(folder)
    longest = max(results, key=lambda result: result.tokens_moved)
    for pair in map_pairs(*cluster_engines(config, shape), max(1, longest.tokens_moved)):
        show_pair(pair, console)
    draw_timeline(results, held, out / "timeline.png")
    _write_json(out / "results.json", config, references, answers, results, held)
    console.print(f"timeline: {out / 'timeline.png'}, all figures: {out / 'results.json'}")
    sys.exit(verdict(console, results, held))


def _heading(console: Console, text: str) -> None:
    console.print()
    console.rule(f"[bold]{text}[/]", align="left")


def _reference(
    console: Console,
    folder: str,
    config: ClusterConfig,
    questions: Sequence[Prompt],
    max_tokens: int,
    said: Sequence[Prompt],
) -> tuple[list[Reference], list[Turn]]:
    """The undivided engine's answers to the prompts and in the conversation."""
    _heading(console, "2. The undivided engine answers every prompt")
    codec = TextCodec.open(folder)
    ids = [codec.encode_chat([{"role": "user", "content": q.text}]) for q in questions]
    limit = config.prefill[0].max_model_len
    for question, prompt in zip(questions, ids, strict=True):
        if len(prompt) + max_tokens > limit:
            raise ConfigError(
                f"prompt {question.name!r} has {len(prompt)} tokens; with an answer of "
                f"{max_tokens} that is more than the {limit} that the demo's engines take"
            )
    began = time.monotonic()
    with Progress(
        TextColumn("one engine, TP 1, PP 1"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} tokens"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("reference", total=sum(map(len, ids)))

        def advance(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        references, turns = acts.run_reference(
            folder, config.model.dtype, ids, max_tokens, advance, said
        )
    tokens = sum(len(reference.token_ids) for reference in references)
    console.print(
        f"{len(ids)} prompts of {min(map(len, ids))} to {max(map(len, ids))} tokens, "
        f"{tokens} tokens answered, and a conversation of {len(turns)} turns held, in "
        f"{time.monotonic() - began:.1f} s; closed"
    )
    return references, turns


def _cluster(
    console: Console,
    config: ClusterConfig,
    questions: Sequence[Prompt],
    references: Sequence[Reference],
    turns: Sequence[Turn],
    max_tokens: int,
    out: Path,
    ray: str | None,
) -> tuple[list[Answer], list[Result], list[TurnResult]]:
    """Starts the cluster, sends all prompts at once, holds the conversation, and compares; closes
    the cluster at the end.
    """
    _heading(console, "3. A prefill engine and a decode engine of different shapes")
    for engine, role in ((config.prefill[0], "prefill"), (config.decode[0], "decode")):
        console.print(
            f"{role:<8} TP {engine.tp}, PP {engine.pp}, blocks of {engine.block_size} tokens, "
            f"{engine.layout}"
        )
    # Engines on other machines would otherwise serve any client.
    api_key = None if ray is None else secrets.token_hex(16)
    with PartProgress(console) as progress:
        cluster = Cluster.open(
            config, ray=ray, api_key=api_key, logs=out / "logs", progress=progress
        )
    with cluster:
        for running in cluster.engines:
            console.print(f"{running.role:<8} runs as {running.process.where}")
        _heading(console, "4. All prompts at once, through the router, streaming")
        answers = _send(console, cluster, questions, max_tokens)
        _end_if_failed(console, cluster, answers)
        records = acts.fetch_records(cluster, answers)
        held = _conversation(console, cluster, turns, max_tokens) if turns else []
    return answers, acts.compare(references, answers, records), held


def _end_if_failed(console: Console, cluster: Cluster, answers: Sequence[Answer]) -> None:
    failed = [answer for answer in answers if answer.error]
    if not failed:
        return
    for answer in failed:
        console.print(f"[bold red]{answer.name}:[/] {escape(answer.error)}")
    for death in cluster.deaths:
        console.print(f"[bold red]died:[/] {escape(str(death))}")
    console.print(f"demo: {len(failed)} of {len(answers)} requests failed", soft_wrap=True)
    cluster.close()
    sys.exit(1)


def _conversation(
    console: Console, cluster: Cluster, turns: Sequence[Turn], max_tokens: int
) -> list[TurnResult]:
    """The second act."""
    _heading(console, "5. A conversation, over a router that knows what the engines have cached")
    cluster.change_router(acts.SECOND_ROUTER)
    answers = _watch(console, lambda changed: acts.hold(cluster, turns, max_tokens, changed))
    _end_if_failed(console, cluster, answers)
    held = acts.fetch_turns(cluster, turns, answers)
    console.print(turn_table(held))
    return held


def turn_table(held: Sequence[TurnResult]) -> Table:
    table = Table(
        "turn", "prompt", "computed", "by", "cached there", "borrowed", "cached at decode",
        "moved to decode", "TTFT s", "tokens",
    )  # fmt: skip
    for column in (*table.columns[1:3], *table.columns[4:9]):
        column.justify = "right"
    for turn in held:
        answer = turn.answer
        assert answer.first_token is not None
        table.add_row(
            turn.name,
            str(turn.prompt_tokens),
            str(turn.computed),
            turn.engine,
            str(turn.cached),
            str(turn.borrowed),
            str(turn.decode_cached),
            str(turn.moved),
            f"{answer.first_token - answer.sent:.2f}",
            "[red]differ" if turn.difference else f"[green]{len(answer.token_ids)} same",
        )
    return table


def _send(
    console: Console, cluster: Cluster, questions: Sequence[Prompt], max_tokens: int
) -> list[Answer]:
    return _watch(console, lambda changed: acts.send_all(cluster, questions, max_tokens, changed))


def _watch(
    console: Console, ask: Callable[[Callable[[Answer], None]], Coroutine[Any, Any, list[Answer]]]
) -> list[Answer]:
    """Shows answers as they grow."""
    live: dict[str, Answer] = {}

    def changed(answer: Answer) -> None:
        live[answer.name] = answer
        if not console.is_terminal and answer.finished is not None:
            console.print(_line(answer), soft_wrap=True)

    board = Live(console=console, refresh_per_second=8, get_renderable=lambda: _board(live))
    with board if console.is_terminal else nullcontext():
        return asyncio.run(ask(changed))


def _line(answer: Answer) -> str:
    assert answer.finished is not None
    return (
        f"[bold]{escape(answer.name)}[/] ({len(answer.token_ids)} tokens, "
        f"{answer.finished - answer.sent:.1f} s): {escape(' '.join(answer.text.split()))}"
    )


def _board(live: dict[str, Answer]) -> Table:
    """The answers as they grow."""
    table = Table("prompt", "state", "tokens", "s", "answer", expand=True)
    table.columns[4].ratio = 1
    table.columns[4].no_wrap = True
    now = time.time()
    for answer in live.values():
        if answer.finished is not None:
            state = "[red]failed" if answer.error else "[green]done"
        else:
            state = "[yellow]decode" if answer.token_ids else "[blue]prefill"
        seconds = (answer.finished or now) - answer.sent
        # The end of the text is where it grows.
        text = escape(" ".join(answer.text.split())[-160:])
        table.add_row(answer.name, state, str(len(answer.token_ids)), f"{seconds:.1f}", text)
    return table


def _table(results: Sequence[Result]) -> Table:
    table = Table(
        "request", "prompt", "tokens moved", "MB", "copies", "transfer ms", "GB/s", "TTFT s",
        "total s", "tokens", "KV",
    )  # fmt: skip
    for column in table.columns[1:9]:
        column.justify = "right"
    for result in results:
        answer = result.answer
        assert answer.finished is not None
        assert answer.first_token is not None
        rate = f"{result.nbytes / result.transfer_s / 1e9:.3f}" if result.transfer_s else "-"
        table.add_row(
            result.name,
            str(result.prefill.prompt_tokens),
            str(result.tokens_moved),
            f"{result.nbytes / 1e6:.2f}",
            f"{result.copies:,}",
            f"{result.transfer_s * 1000:.2f}",
            rate,
            f"{answer.first_token - answer.sent:.2f}",
            f"{answer.finished - answer.sent:.2f}",
            "[red]differ" if result.difference else f"[green]{len(answer.token_ids)} same",
            "[red]differs" if result.damage else "[green]same",
        )
    return table


def verdict(console: Console, results: Sequence[Result], held: Sequence[TurnResult] = ()) -> int:
    """Prints the differences and the last line; returns the exit code."""
    compared: list[Result | TurnResult] = [*results, *held]
    for result in compared:
        if result.difference is not None:
            gap = result.difference
            console.print(
                f"[bold red]{result.name}:[/] token {gap.position} is {gap.got}, the undivided "
                f"engine drew {gap.expected}; gap between the two best logits there: "
                f"{_number(gap.reference_gap)} (undivided), {_number(gap.cluster_gap)} (cluster)"
            )
    damaged = [result for result in results if result.damage]
    for each in damaged:
        console.print(f"[bold red]{each.name}:[/] {escape(each.damage)}")
    if held:
        same = sum(turn.difference is None for turn in held)
        prompts = sum(turn.prompt_tokens for turn in held)
        console.print(
            f"conversation: {same}/{len(held)} turns identical to the undivided engine, "
            f"{sum(turn.computed for turn in held)} of {prompts} prompt tokens computed",
            soft_wrap=True,
        )
    identical = sum(result.difference is None for result in results)
    kv = f"KV of {len(damaged)} requests differs" if damaged else "KV verified bit for bit"
    console.print(
        f"demo: {identical}/{len(results)} requests identical to the undivided engine, {kv}",
        soft_wrap=True,
    )
    is_same = all(turn.difference is None for turn in held)
    return 0 if is_same and all(result.ok for result in results) else 1


def _number(value: float | None) -> str:
    return "the answer has ended" if value is None else f"{value:.3g}"


def _write_json(
    path: Path,
    config: ClusterConfig,
    references: Sequence[Reference],
    answers: Sequence[Answer],
    results: Sequence[Result],
    held: Sequence[TurnResult],
) -> None:
    requests: list[dict[str, Any]] = []
    for reference, answer, result in zip(references, answers, results, strict=True):
        requests.append(
            {
                "name": result.name,
                "identical": result.difference is None,
                "kv_verified": not result.damage,
                "difference": result.difference,
                "prompt_tokens": result.prefill.prompt_tokens,
                "tokens_moved": result.tokens_moved,
                "bytes_moved": result.nbytes,
                "copies": result.copies,
                "transfer_s": result.transfer_s,
                "smallest_gap": min(reference.gaps, default=None),
                "answer": answer,
                "prefill_timings": result.prefill.timings,
                "decode_timings": result.decode.timings if result.decode else None,
            }
        )
    document = {
        "cluster": config,
        "requests": requests,
        "second_router": acts.SECOND_ROUTER,
        "conversation": [
            {"identical": turn.difference is None, "computed": turn.computed, "turn": turn}
            for turn in held
        ],
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2))
