"""``kvferry demo``."""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvferry.cli.console import PartProgress, make_console
from kvferry.cli.plan import cluster_engines
from kvferry.cli.rank_map import show_pair
from kvferry.cluster import demo as steps
from kvferry.cluster.demo import Answer, Prompt, Reference, Result
from kvferry.cluster.launcher import Cluster
from kvferry.cluster.model_shape import convert
from kvferry.cluster.text import TextCodec
from kvferry.cluster.timeline import draw
from kvferry.config import ClusterConfig
from kvferry.engine.weights import load_model_config
from kvferry.errors import ConfigError
from kvferry.explain.pairs import map_pairs


def demo(out: Path, transport: str, prompts: Path | None, max_tokens: int, model: str) -> None:
    """Runs the demo; exits with 1 when an answer or the KV differs.

    Raises:
        KVFerryError: it cannot be run.
    """
    console = make_console()
    questions = steps.load_prompts(prompts)
    config = steps.demo_config(model, transport)
    out.mkdir(parents=True, exist_ok=True)

    _heading(console, "1. The model")
    with PartProgress(console) as progress:
        folder = str(convert(config.model, partial(progress, "model")))
    references = _reference(console, folder, config, questions, max_tokens)
    sequences = [reference.prompt_tokens + max_tokens for reference in references]
    config = steps.demo_config(model, transport, sequences)
    answers, results = _cluster(console, config, questions, references, max_tokens, out)

    _heading(console, "5. What moved")
    console.print(_table(results))
    shape = load_model_config(folder)
    longest = max(results, key=lambda result: result.tokens_moved)
    for pair in map_pairs(*cluster_engines(config, shape), max(1, longest.tokens_moved)):
        show_pair(pair, console)
    draw(results, out / "timeline.png")
    _write_json(out / "results.json", config, references, answers, results)
    console.print(f"timeline: {out / 'timeline.png'}, all figures: {out / 'results.json'}")
    sys.exit(_verdict(console, results))


def _heading(console: Console, text: str) -> None:
    console.print()
    console.rule(f"[bold]{text}[/]", align="left")


def _reference(
    console: Console,
    folder: str,
    config: ClusterConfig,
    questions: Sequence[Prompt],
    max_tokens: int,
) -> list[Reference]:
    """What one undivided engine answers."""
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

        references = steps.run_reference(folder, config.model.dtype, ids, max_tokens, advance)
    tokens = sum(len(reference.token_ids) for reference in references)
    console.print(
        f"{len(ids)} prompts of {min(map(len, ids))} to {max(map(len, ids))} tokens, "
        f"{tokens} tokens answered in {time.monotonic() - began:.1f} s; closed"
    )
    return references


def _cluster(
    console: Console,
    config: ClusterConfig,
    questions: Sequence[Prompt],
    references: Sequence[Reference],
    max_tokens: int,
    out: Path,
) -> tuple[list[Answer], list[Result]]:
    """Starts the cluster, sends everything at once, compares; the cluster has ended then."""
    _heading(console, "3. A prefill engine and a decode engine of different shapes")
    for engine, role in ((config.prefill[0], "prefill"), (config.decode[0], "decode")):
        console.print(
            f"{role:<8} TP {engine.tp}, PP {engine.pp}, blocks of {engine.block_size} tokens, "
            f"{engine.layout}"
        )
    with PartProgress(console) as progress:
        cluster = Cluster.open(config, logs=out / "logs", progress=progress)
    with cluster:
        _heading(console, "4. All prompts at once, through the router, streaming")
        answers = _send(console, cluster, questions, max_tokens)
        failed = [answer for answer in answers if answer.error]
        if failed:
            for answer in failed:
                console.print(f"[bold red]{answer.name}:[/] {escape(answer.error)}")
            for death in cluster.deaths:
                console.print(f"[bold red]died:[/] {escape(str(death))}")
            console.print(f"demo: {len(failed)} of {len(answers)} requests failed", soft_wrap=True)
            cluster.close()
            sys.exit(1)
        records = steps.fetch_records(cluster, answers)
    return answers, steps.compare(references, answers, records)


def _send(
    console: Console, cluster: Cluster, questions: Sequence[Prompt], max_tokens: int
) -> list[Answer]:
    live: dict[str, Answer] = {}
    if not console.is_terminal:

        def changed(answer: Answer) -> None:
            if answer.finished is not None:
                console.print(_line(answer), soft_wrap=True)

        return asyncio.run(steps.send_all(cluster.url, questions, max_tokens, changed))
    with Live(console=console, refresh_per_second=8, get_renderable=lambda: _board(live)):

        def note(answer: Answer) -> None:
            live[answer.name] = answer

        return asyncio.run(steps.send_all(cluster.url, questions, max_tokens, note))


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


def _verdict(console: Console, results: Sequence[Result]) -> int:
    """Prints what differs and the last line; returns the exit code."""
    for result in results:
        if result.difference is not None:
            gap = result.difference
            console.print(
                f"[bold red]{result.name}:[/] token {gap.position} is {gap.got}, the undivided "
                f"engine drew {gap.expected}; gap between the two best logits there: "
                f"{_number(gap.reference_gap)} (undivided), {_number(gap.cluster_gap)} (cluster)"
            )
        if result.damage:
            console.print(f"[bold red]{result.name}:[/] {escape(result.damage)}")
    identical = sum(result.difference is None for result in results)
    damaged = [result for result in results if result.damage]
    kv = f"KV of {len(damaged)} requests differs" if damaged else "KV verified bit for bit"
    console.print(
        f"demo: {identical}/{len(results)} requests identical to the undivided engine, {kv}",
        soft_wrap=True,
    )
    return 0 if all(result.ok for result in results) else 1


def _number(value: float | None) -> str:
    return "the answer has ended" if value is None else f"{value:.3g}"


def _write_json(
    path: Path,
    config: ClusterConfig,
    references: Sequence[Reference],
    answers: Sequence[Answer],
    results: Sequence[Result],
) -> None:
    requests: list[dict[str, Any]] = []
    for reference, answer, result in zip(references, answers, results, strict=True):
        requests.append(
            {
                "name": result.name,
                "identical": result.difference is None,
                "kv_verified": not result.damage,
                "difference": asdict(result.difference) if result.difference else None,
                "prompt_tokens": result.prefill.prompt_tokens,
                "tokens_moved": result.tokens_moved,
                "bytes_moved": result.nbytes,
                "copies": result.copies,
                "transfer_s": result.transfer_s,
                "smallest_gap": min(reference.gaps, default=None),
                "answer": asdict(answer),
                "prefill_timings": result.prefill.timings,
                "decode_timings": result.decode.timings if result.decode else None,
            }
        )
    document = {"cluster": config, "requests": requests}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2))
