"""``kvferry check``."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from kvferry.cli.console import make_console, print_json
from kvferry.cli.options import (
    AsJson,
    Device,
    Keys,
    Timeout,
    Tokens,
    load_keys,
    parse_address,
)
from kvferry.cli.rank_map import load_transports, show_explained
from kvferry.control.client import fetch_descriptions
from kvferry.control.handshake import common_transports, compare, unproved_heads
from kvferry.control.messages import DescriptionReply
from kvferry.errors import (
    ConfigError,
    KVFerryError,
    NotReadyError,
    PeerLostError,
    PluginError,
)
from kvferry.explain.pairs import EnginePair, PlannedEngine, explain_pair, pair_as_json
from kvferry.topology.description import EngineDescription
from kvferry.transports.base import DeviceTransport, Transport
from kvferry.transports.registry import transport_class
from kvferry.zeromq import join_address

FAILED_EXIT_CODE = 1
"""Exit code if a pair can never exchange KV."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Whether a prefill engine and a decode engine fit."""

    prefill: EngineDescription
    decode: EngineDescription
    mismatches: tuple[str, ...]
    pair: EnginePair | None
    """Plan of the pair; ``None`` if the engines do not fit."""

    @property
    def transports(self) -> tuple[str, ...]:
        """Names of the transports that the decode engine tries, in order; it uses the first."""
        return tuple(reaching(self.prefill, self.decode))

    @property
    def unproved_heads(self) -> list[str]:
        """Reasons why the weights of some moved KV heads are not proved equal; empty if all are."""
        return [] if self.mismatches else unproved_heads(self.prefill, self.decode)


def check(
    addresses: Annotated[
        list[str],
        typer.Argument(
            metavar="HOST:PORT...",
            help="Control channels (kv_port) of two or more engines.",
            show_default=False,
        ),
    ],
    seen_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="HOST:PORT",
            help="Control channel of one more engine: show only how it loads from the others.",
            show_default=False,
        ),
    ] = None,
    keys: Keys = None,
    timeout_s: Timeout = 5.0,
    tokens: Tokens = 2048,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Prints whether and how each pair of a producer and a consumer will work.

    Raises:
        ConfigError: an address or the keys cannot be used, or no two engines make a pair.
        PeerLostError: names all engines that did not answer.
        SystemExit: 1 if a pair does not fit.
    """
    if seen_from is not None:
        addresses = [seen_from, *addresses]
    answers = _ask(addresses, keys, timeout_s)
    verdicts = [
        _judge(prefill.description, decode.description, tokens, device)
        for prefill, decode in _pairs(answers)
        if seen_from is None or decode is answers[0]
    ]
    if not verdicts:
        asking, *others = answers
        if asking.role == "kv_producer":
            raise ConfigError(f"--from: {seen_from} is {asking.role}, which loads from nobody")
        raise ConfigError(
            f"--from: {seen_from} is {asking.role}, and no other engine lends to it: "
            f"{_roles_text(others)}; name at least one producer"
        )
    if as_json:
        print_json([_as_json(verdict) for verdict in verdicts])
    else:
        _show(verdicts, make_console())
    if any(verdict.mismatches for verdict in verdicts):
        sys.exit(FAILED_EXIT_CODE)


def _ask(addresses: Sequence[str], keys: Path | None, timeout_s: float) -> list[DescriptionReply]:
    hosts = [parse_address(address) for address in addresses]
    plain = [join_address(*each) for each in hosts]
    if len(set(plain)) < len(plain):
        twice = next(address for address in plain if plain.count(address) > 1)
        raise ConfigError(f"{twice} stands twice; name each engine once")
    answers = fetch_descriptions(plain, timeout_s, load_keys(keys))
    if failed := [answer for answer in answers if isinstance(answer, KVFerryError)]:
        kinds = {type(error) for error in failed}
        kind = kinds.pop() if len(kinds) == 1 else PeerLostError
        raise kind(
            "\n  ".join(
                _failure_text(address, answer)
                for address, answer in zip(plain, answers, strict=True)
                if isinstance(answer, KVFerryError)
            )
        )
    return [answer for answer in answers if isinstance(answer, DescriptionReply)]


def _failure_text(address: str, error: KVFerryError) -> str:
    text = str(error) if str(error).startswith(address) else f"{address}: {error}"
    if isinstance(error, NotReadyError):
        return text
    return f"{text}; is it the kv_port of an engine of this release?"


def _pairs(answers: Sequence[DescriptionReply]) -> list[tuple[DescriptionReply, DescriptionReply]]:
    pairs = [
        (prefill, decode)
        for prefill in answers
        for decode in answers
        if prefill is not decode
        and prefill.role in ("kv_producer", "kv_both")
        and decode.role in ("kv_consumer", "kv_both")
    ]
    if not pairs:
        raise ConfigError(
            f"no pair to check: {_roles_text(answers)}; name at least one producer and one consumer"
        )
    return pairs


def _roles_text(answers: Sequence[DescriptionReply]) -> str:
    return ", ".join(f"{answer.description.engine_id!r} is {answer.role}" for answer in answers)


def _judge(
    prefill: EngineDescription, decode: EngineDescription, tokens: int, device: str
) -> _Verdict:
    mismatches = compare(prefill, decode)
    transports = reaching(prefill, decode)
    if not mismatches and not transports:
        mismatches.append(
            f"transports: {', '.join(sorted(common_transports(prefill, decode)))}: both have them, "
            "and they reach ranks on one host only, and these are on several; add tcp on both"
        )
    pair = None
    if any(issubclass(kind, DeviceTransport) for kind in map(_class, decode.ranks[0].endpoints)):
        device = "cuda"  # a rank opens such a transport for a cache on a GPU only
    if not mismatches:
        kinds = load_transports(transports)
        try:
            pair = explain_pair(_engine(prefill), _engine(decode), tokens, kinds, device)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return _Verdict(prefill, decode, tuple(mismatches), pair)


def reaching(prefill: EngineDescription, decode: EngineDescription) -> list[str]:
    """Names of the common transports by which the decode engine reaches the prefill engine, best
    first.
    """
    common = common_transports(prefill, decode)
    hosts = {rank.host for rank in (*prefill.ranks, *decode.ranks)} - {""}
    return [
        name
        for name in decode.ranks[0].endpoints
        if name in common and (len(hosts) < 2 or not _class(name).same_host)
    ]


def _class(name: str) -> type[Transport]:
    try:
        return transport_class(name)
    except PluginError:
        return Transport  # the transport is not installed here, and may be of any kind


def _engine(description: EngineDescription) -> PlannedEngine:
    return PlannedEngine(
        name=description.engine_id,
        groups=description.geometries,
        engine_id=description.engine_id,
        memory=tuple(rank.memory for rank in description.ranks),
        convert_dtype=description.convert_dtype,
    )


def _as_json(verdict: _Verdict) -> dict[str, Any]:
    return {
        "prefill": verdict.prefill.engine_id,
        "decode": verdict.decode.engine_id,
        "fits": not verdict.mismatches,
        "mismatches": verdict.mismatches,
        "transport": next(iter(verdict.transports), None),
        "transports": verdict.transports,
        "unproved_heads": verdict.unproved_heads,
        "plan": None if verdict.pair is None else pair_as_json(verdict.pair),
    }


def _show(verdicts: Sequence[_Verdict], console: Console) -> None:
    for number, verdict in enumerate(verdicts):
        if number:
            console.print()
        names = f"{verdict.prefill.engine_id} → {verdict.decode.engine_id}"
        # As plain text: names and mismatches come from other machines, and may look like markup.
        if verdict.pair is None:
            console.print(Text(f"{names}: will not work", style="bold red"), soft_wrap=True)
            for mismatch in verdict.mismatches:
                console.print(Text(f"  {mismatch}"), soft_wrap=True)
            continue
        first, *others = verdict.transports
        over = f"over {first}" + "".join(f", else {name}" for name in others)
        console.print(Text(f"{names}: will work, {over}", style="bold green"), soft_wrap=True)
        for unproved in verdict.unproved_heads:
            console.print(Text(f"  {unproved}", style="yellow"), soft_wrap=True)
        show_explained(verdict.pair, console)
    failed = sum(bool(verdict.mismatches) for verdict in verdicts)
    console.print()
    console.print(f"{len(verdicts) - failed} of {len(verdicts)} pairs will work")
