"""``kvferry bench``: what the transports move between two hosts, beside what the paths could."""

import ctypes
import os
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.cli.bench_server import (
    BARE,
    ENGINE_ID,
    LAYOUT,
    MAX_BYTES,
    BareEndpoint,
    open_transports,
    pattern,
)
from kvferry.cli.check import reaching
from kvferry.cli.console import make_console, print_json, seconds_text
from kvferry.cli.status import load_keys, parse_address
from kvferry.connectors.pull.config import PullConfig
from kvferry.control.client import ControlClient, fetch_descriptions
from kvferry.control.options import ControlOptions
from kvferry.decoding import decode, decoder_for
from kvferry.errors import ConfigError, KVFerryError, NotReadyError, ProtocolError, TransferError
from kvferry.explain.limits import TOKEN_BYTES, dial, read_process, receive_part
from kvferry.explain.sentences import bytes_text
from kvferry.layouts import Layout
from kvferry.layouts.arrays import HOST, MemorySpan
from kvferry.layouts.tiles import TILE_DTYPE, Runs, Tiles, blank_runs
from kvferry.lifetimes import Closing
from kvferry.topology import EngineGeometry, TransferPlan, plan_transfer
from kvferry.topology.cell_digest import token_digests
from kvferry.topology.description import EngineDescription, RankDescription
from kvferry.topology.typical import mean_segment_bytes, mean_source_bytes
from kvferry.transports.base import Peer, Transport, TransportOptions
from kvferry.transports.local import LocalPeer, host_digest
from kvferry.transports.regions import private_memory
from kvferry.transports.registry import open_transport
from kvferry.transports.staged import StagedTransport, Staging
from kvferry.transports.vm import VmPeer
from kvferry.transports.ways import choose_way
from kvferry.zeromq import join_address

MAX_THREADS = 32
"""Of either side."""
_LAYOUTS = (LAYOUT, "HND")
"""Of the target."""
_PIECE_BYTES = 32 << 20
"""Of a memcpy or a ``process_vm_readv``."""
_SMALL_LOADS = 20
"""Loads of one block in a round, of which the median counts."""
_BUSY_S = 0.2
"""Seconds between two looks whether the other client has ended."""

_SOCKETS = "bare sockets"
_LIMITS = {
    "shm": "memcpy",
    "vm": "process_vm_readv",
    "tcp": _SOCKETS,
    "ucx": _SOCKETS,
    "nixl": "one bulk READ",
}
"""Transport → the bare loop over the same path."""
_LIMIT, _SMALL = "limit", "small load"
"""What is timed of a transport beside its cases."""

Ids: TypeAlias = npt.NDArray[np.int64]
Run: TypeAlias = Callable[[], object]
Key: TypeAlias = tuple[str, str]
"""A transport, and what is timed of it."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """All blocks of the cache by one transport."""

    layouts: str
    """Source and target."""
    shuffled: bool
    """Whether the block tables are; otherwise in order."""
    way: str
    """``placed`` or ``staged``."""
    gb_per_s: float
    """Median over the rounds."""
    share: float | None
    """Of the limit: the median over the rounds of each round's; ``None`` if no limit is known."""
    seconds: tuple[float, ...]
    """One per round."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What one transport does."""

    transport: str
    limit: str | None
    """What bounds it, if that is known."""
    limit_gb_per_s: float | None
    cases: tuple[Case, ...]
    small_load_s: float
    """Seconds of a load of one block of tokens, from the call until it is in place; median."""


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    address: str
    model: str
    dtype: str
    block_size: int
    """Tokens per block."""
    tokens: int
    nbytes: int
    """That one case moves."""
    small_load_bytes: int
    threads: int
    """On this side."""
    rounds: int
    load_average: float
    """Of this machine, over the last minute, at the end."""
    transports: tuple[Figures, ...]
    """In the order in which an engine would try them."""
    left_out: dict[str, str]
    """Transport → why it did not take part."""


def bench(
    address: str, keys: Path | None, timeout_s: float, rounds: int, threads: int, as_json: bool
) -> None:
    """Measures against a ``kvferry bench --serve``, and prints the figures.

    Raises:
        ConfigError: the address or the keys cannot be used, or no transport reaches.
        PeerLostError: nobody answers there.
        NotReadyError: it serves another client.
        ProtocolError: it is something else.
        TransferError: a transport failed, or moved wrong bytes.
    """
    host, port = parse_address(address)
    address = join_address(host, port)
    options = ControlOptions(request_timeout_s=timeout_s, curve=load_keys(keys))
    theirs = _describe(address, options)
    with ExitStack() as stack:
        names = [name for name in theirs.ranks[0].endpoints if name != BARE]
        opened, failed = open_transports(names, TransportOptions(threads=threads))
        for transport in opened.values():
            stack.enter_context(transport)
        left_out = {name: str(error) for name, error in failed.items()}
        if not opened:
            raise _unreachable(address, left_out)
        ours = _ours(theirs, opened)
        client = stack.enter_context(
            ControlClient(engine_id=ours.engine_id, incarnation=ours.incarnation, options=options)
        )
        theirs = client.handshake(address, ours).result()
        reach = reaching(theirs, ours)
        left_out |= {
            name: "it reaches ranks on one host only" for name in opened if name not in reach
        }
        sockets = [stack.enter_context(tcp) for tcp in _dial(theirs, host, threads, timeout_s)]
        reader = stack.enter_context(_Reader(theirs, sockets))
        for name in reach:
            try:
                reader.add(name, opened[name], theirs.ranks[0].endpoints[name])
            except KVFerryError as error:
                left_out[name] = str(error)
        if not reader.transports:
            raise _unreachable(address, left_out)
        results = reader.measure(address, rounds, left_out)
    if as_json:
        print_json(results)
    else:
        _show(results, make_console())


def _describe(address: str, options: ControlOptions) -> EngineDescription:
    """What serves there; checked as far as the rest relies on it."""
    (answer,) = fetch_descriptions([address], options.request_timeout_s, options.curve)
    if isinstance(answer, KVFerryError):
        raise type(answer)(f"{answer}; start `kvferry bench --serve` there") from answer
    theirs = answer.description
    if theirs.engine_id != ENGINE_ID or BARE not in theirs.ranks[0].endpoints:
        raise ProtocolError(
            f"{address}: engine {theirs.engine_id!r} is no `kvferry bench --serve`; start one there"
        )
    if len(theirs.geometries) != 1 or not isinstance(theirs.geometries[0], EngineGeometry):
        raise ProtocolError(
            f"{address}: it has {len(theirs.geometries)} KV cache groups or other layers than "
            "attention, expected one group of attention; start a `kvferry bench --serve` there"
        )
    regions = theirs.ranks[0].memory[0].region_bytes
    if len(regions) != 1 or regions[0] > MAX_BYTES:
        raise ProtocolError(
            f"{address}: it has {len(regions)} regions of {bytes_text(sum(regions))}, expected one "
            f"of {bytes_text(MAX_BYTES)} at most; give it fewer --tokens"
        )
    return theirs


def _unreachable(address: str, left_out: dict[str, str]) -> ConfigError:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
    return ConfigError(
        f"{address}: no transport reaches it ({reasons}); serve with --transport tcp"
    )


def _ours(theirs: EngineDescription, opened: dict[str, Transport]) -> EngineDescription:
    """This side as an engine of the same shape, by which the other one is shaken hands with."""
    name = secrets.token_hex(8)
    rank = RankDescription(
        rank=0,
        endpoints=dict.fromkeys(opened, b""),
        memory=theirs.ranks[0].memory,
        host=host_digest(),
    )
    return msgspec.structs.replace(theirs, engine_id=name, incarnation=name, ranks=(rank,))


def _dial(
    theirs: EngineDescription, host: str, count: int, timeout_s: float
) -> Iterator[socket.socket]:
    """Connections to the bare loop; while they are open no other client is served."""
    bare = decode(decoder_for(BareEndpoint), theirs.ranks[0].endpoints[BARE], "bare endpoint")
    name, deadline = secrets.token_bytes(TOKEN_BYTES), time.monotonic() + timeout_s
    while True:
        try:
            first = dial(host, bare.port, bare.token, name)
            break
        except NotReadyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_BUSY_S)
    yield first
    for _ in range(count - 1):
        yield dial(host, bare.port, bare.token, name)


class _Reader(Closing):
    """Reads all blocks into one memory of this process, by each transport."""

    def __init__(self, theirs: EngineDescription, sockets: list[socket.socket]) -> None:
        (source,) = theirs.geometries
        assert isinstance(source, EngineGeometry)  # _describe has looked
        self._model, self._memory = theirs.model.name, theirs.ranks[0].memory[0]
        self._source = source
        blocks = self._memory.num_blocks
        self._tokens = (blocks - 1) * source.block_size
        self._targets = {name: replace(source, layout=Layout.named(name)) for name in _LAYOUTS}
        self._plans: dict[str, tuple[TransferPlan, Tiles]] = {}
        for name, target in self._targets.items():
            plan = plan_transfer(source=source, target=target)
            tiles = plan.lower({0: self._memory}, target.memory(0, blocks))[0]
            self._plans[name] = plan, tiles
        ids, rng = np.arange(1, blocks), np.random.default_rng(0)
        self._tables = {False: (ids, ids), True: (rng.permutation(ids), rng.permutation(ids))}
        self._target = private_memory(self._memory.region_bytes[0])
        self._sockets, self._pool = sockets, ThreadPoolExecutor(len(sockets))
        config = PullConfig()
        self._staging = Staging(
            [MemorySpan(self._target.ctypes.data, self._target.nbytes, HOST)],
            nbytes=config.staging_bytes,
            stall_timeout_s=config.stall_timeout_s,
            threads=len(sockets),
        )
        self._stack = ExitStack()
        self._runs: dict[Key, Run] = {}
        self._ways: dict[Key, str] = {}
        """By transport and target layout."""
        self.transports: list[str] = []
        """Those that reach the other side."""

    def close(self) -> None:
        """Ends connections, threads and transports. Idempotent."""
        for tcp in self._sockets:
            with suppress(OSError):
                tcp.shutdown(socket.SHUT_RDWR)  # wakes who waits for it
        self._pool.shutdown()
        self._stack.close()
        self._staging.close()

    def add(self, name: str, transport: Transport, endpoint: bytes) -> None:
        """Connects by a transport, which is ours from now on.

        Raises:
            PeerLostError, DecodeError: see :meth:`Transport.connect`.
        """
        self._stack.callback(transport.close)
        transport.register(self._target, serve=False)
        peer = transport.connect(endpoint)
        if (limit := self._limit(name, peer, endpoint)) is not None:
            self._runs[name, _LIMIT] = limit
        for layout, (plan, tiles) in self._plans.items():
            copies = plan.bind(*self._tables[True], self._tokens)
            way = choose_way(
                transport,
                device=HOST,
                conversion=None,
                segment_bytes=mean_segment_bytes({0: tiles}, copies),
                source_bytes=mean_source_bytes({0: tiles}, copies),
            )
            self._ways[name, layout] = str(way)
            by = transport
            if not way.placed:
                by = StagedTransport(transport, self._staging)
                self._stack.callback(by.close)  # before the transport
            load = partial(_load, by, peer, plan, tiles)
            for shuffled, tables in self._tables.items():
                what = _case_name(layout, shuffled)
                self._runs[name, what] = partial(load, tables, self._tokens)
            if layout == LAYOUT:
                block = self._tables[False][0][:1]
                self._runs[name, _SMALL] = partial(load, (block, block), self._source.block_size)
        self.transports.append(name)

    def measure(self, address: str, rounds: int, left_out: dict[str, str]) -> Results:
        """Checks every case once, then times ``rounds`` rounds, everything in each.

        Raises:
            TransferError: a transport failed, or moved wrong bytes.
        """
        self._check()
        runs = list(self._runs.items())
        for _, run in runs:
            run()
        seconds: dict[Key, list[float]] = {key: [] for key in self._runs}
        for number in range(rounds):
            # Another one begins each time: none is always behind the same neighbour.
            first = number % len(runs)
            for key, run in runs[first:] + runs[:first]:
                repeats = _SMALL_LOADS if key[1] == _SMALL else 1
                seconds[key].append(statistics.median(_timed(run) for _ in range(repeats)))
        per_token = self._plans[LAYOUT][0].bytes_per_token
        return Results(
            address=address,
            model=self._model,
            dtype=self._source.dtype,
            block_size=self._source.block_size,
            tokens=self._tokens,
            nbytes=per_token * self._tokens,
            small_load_bytes=per_token * self._source.block_size,
            threads=len(self._sockets),
            rounds=rounds,
            load_average=round(os.getloadavg()[0], 2),
            transports=tuple(
                self._figures(name, seconds, per_token * self._tokens) for name in self.transports
            ),
            left_out=left_out,
        )

    def _figures(self, name: str, seconds: dict[Key, list[float]], nbytes: int) -> Figures:
        bounds = [self._target.nbytes / each / 1e9 for each in seconds.get((name, _LIMIT), ())]
        cases = []
        for layout in self._targets:
            for shuffled in self._tables:
                took = seconds[name, _case_name(layout, shuffled)]
                rates = [nbytes / each / 1e9 for each in took]
                shares = [rate / bound for rate, bound in zip(rates, bounds, strict=False)]
                cases.append(
                    Case(
                        layouts=f"{LAYOUT}→{layout}",
                        shuffled=shuffled,
                        way=self._ways[name, layout],
                        gb_per_s=statistics.median(rates),
                        share=statistics.median(shares) if shares else None,
                        seconds=tuple(took),
                    )
                )
        return Figures(
            transport=name,
            limit=_LIMITS.get(name),
            limit_gb_per_s=statistics.median(bounds) if bounds else None,
            cases=tuple(cases),
            small_load_s=statistics.median(seconds[name, _SMALL]),
        )

    def _check(self) -> None:
        """Runs every case, and compares the digests of all cells.

        Raises:
            TransferError: some are wrong.
        """
        held = pattern(self._target.nbytes).ctypes
        for shuffled, (sources, targets) in self._tables.items():
            digests = partial(token_digests, num_tokens=self._tokens)
            expected = digests(self._source, 0, self._memory, [held.data], sources)
            for name in self.transports:
                for layout, geometry in self._targets.items():
                    self._target[:] = 0
                    what = _case_name(layout, shuffled)
                    self._runs[name, what]()
                    memory = geometry.memory(0, self._memory.num_blocks)
                    found = digests(geometry, 0, memory, [self._target.ctypes.data], targets)
                    if wrong := int(np.count_nonzero(found != expected)):
                        raise TransferError(
                            f"{name}, {what}: {wrong} of {self._tokens} tokens differ from what "
                            "the other side has; run the same release of kvferry on both"
                        )

    # ---- the limits ----------------------------------------------------------------------------

    def _limit(self, name: str, peer: Peer, endpoint: bytes) -> Run | None:
        """The bare loop over the same path, if there is one; it moves the whole memory."""
        if isinstance(peer, VmPeer):
            pid = peer.process.pid

            def read(target: int, source: int, nbytes: int) -> None:
                read_process(pid, np.array([[target, nbytes]]), np.array([[source, nbytes]]))

            return partial(self._copy, read, int(peer.addresses[0]))
        if name == "shm":
            assert isinstance(peer, LocalPeer)  # one of shm
            return partial(self._copy, ctypes.memmove, int(peer.addresses[0]))
        if name == "nixl":
            return self._bulk_read(endpoint)
        if _LIMITS.get(name) == _SOCKETS:
            return self._receive
        return None

    def _receive(self) -> None:
        """One connection per thread."""
        parts = len(self._sockets)

        def receive(number: int) -> None:
            receive_part(self._sockets[number], self._target, number, parts)

        list(self._pool.map(receive, range(parts)))

    def _copy(self, copy: Callable[[int, int, int], object], source: int) -> None:
        """Copies from an address, a piece at a time by the thread that comes first."""
        nbytes, target = self._target.nbytes, self._target.ctypes.data
        left = iter(range(0, nbytes, _PIECE_BYTES))

        def work(_: int) -> None:
            for first in left:
                copy(target + first, source + first, min(_PIECE_BYTES, nbytes - first))

        list(self._pool.map(work, range(len(self._sockets))))

    def _bulk_read(self, endpoint: bytes) -> Run:
        """One READ of one descriptor."""
        nbytes = self._target.nbytes
        transport = open_transport("nixl", TransportOptions(extra={"chunk_bytes": nbytes}))
        self._stack.callback(transport.close)
        transport.register(self._target, serve=False)
        tiles, runs = np.zeros(1, dtype=TILE_DTYPE), blank_runs(1)
        tiles["elements"] = nbytes
        for field in ("heads", "itemsize", "source_element_stride", "target_element_stride"):
            tiles[field] = 1
        runs["tokens"] = 1
        return partial(_read, transport, transport.connect(endpoint), tiles, runs)


def _load(
    transport: Transport,
    peer: Peer,
    plan: TransferPlan,
    tiles: Tiles,
    tables: tuple[Ids, Ids],
    tokens: int,
) -> None:
    """Binds the block tables, reads, and waits until all is in place."""
    _read(transport, peer, tiles, plan.bind(*tables, tokens).runs_of(0))


def _read(transport: Transport, peer: Peer, tiles: Tiles, runs: Runs) -> None:
    over = threading.Event()
    read = transport.read(peer, tiles, runs)
    read.on_end(lambda _: over.set())
    over.wait()
    transport.poll()
    if read.error is not None:
        raise read.error


def _timed(run: Run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _case_name(layout: str, shuffled: bool) -> str:
    return f"{LAYOUT}→{layout}, {'shuffled' if shuffled else 'in order'}"


def _show(results: Results, console: Console) -> None:
    table = Table(title=f"GB/s, and share of the limit: {results.address}")
    table.add_column("transport")
    table.add_column("limit", justify="right")
    for layout in _LAYOUTS:
        for shuffled in (False, True):
            header = _case_name(layout, shuffled).replace(", ", "\n")
            table.add_column(header, justify="right")
    table.add_column("one block", justify="right")
    for figures in results.transports:
        limit = "unknown"
        if figures.limit_gb_per_s is not None:
            limit = f"{figures.limit}\n{figures.limit_gb_per_s:.2f}"
        cells = [_cell(case) for case in figures.cases]
        table.add_row(figures.transport, limit, *cells, seconds_text(figures.small_load_s))
    console.print(table)
    count = "1 thread" if results.threads == 1 else f"{results.threads} threads"
    console.print(
        f"{escape(results.model)}, {results.dtype}: {results.tokens} tokens in blocks of "
        f"{results.block_size}, {results.nbytes / 1e6:.0f} MB; one block has "
        f"{bytes_text(results.small_load_bytes)}. {count} here. Medians of "
        f"interleaved rounds: {results.rounds}; load average {results.load_average}.",
        soft_wrap=True,
    )
    for name, reason in results.left_out.items():
        console.print(f"[yellow]![/] {escape(name)} is left out: {escape(reason)}", soft_wrap=True)


def _cell(case: Case) -> str:
    share = "" if case.share is None else f" ({case.share:.2f})"
    staged = "" if case.way == "placed" else f"\n{case.way}"
    return f"{case.gb_per_s:.2f}{share}{staged}"
