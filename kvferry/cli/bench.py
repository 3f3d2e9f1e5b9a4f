"""``kvferry bench``: the speed of transports between two hosts, beside the limits of the paths."""

import ctypes
import os
import secrets
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import typer
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
    serve_blocks,
)
from kvferry.cli.check import reaching
from kvferry.cli.console import make_console, print_json, seconds_text
from kvferry.cli.options import AsJson, Keys, Timeout, load_keys, parse_address
from kvferry.connectors.pull.config import PullConfig
from kvferry.control.client import ControlClient, fetch_descriptions
from kvferry.control.options import ControlOptions
from kvferry.decoding import decode, decoder_for
from kvferry.errors import ConfigError, KVFerryError, NotReadyError, ProtocolError, TransferError
from kvferry.explain.limits import (
    TOKEN_BYTES,
    copy_from,
    copy_pieces,
    dial,
    receive_all,
    wait_for_end,
)
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

_LAYOUTS = (LAYOUT, "HND")
"""Names of the target's layouts."""
_PIECE_BYTES = 32 << 20
"""Number of bytes in a single memcpy or ``process_vm_readv``."""
_SMALL_LOADS = 20
"""Number of one-block loads in a round; the median counts."""
_BUSY_S = 0.2
"""Seconds between two checks whether the other client has ended."""

_SOCKETS = "bare sockets"
_LIMITS = {
    "shm": "memcpy",
    "vm": "process_vm_readv",
    "tcp": _SOCKETS,
    "ucx": _SOCKETS,
    "nixl": "one bulk READ",
}
"""Transport → name of the bare loop over the same path."""
_LIMIT, _SMALL = "limit", "small load"
"""Names of a transport's measurements beside the cases."""

Ids: TypeAlias = npt.NDArray[np.int64]
Run: TypeAlias = Callable[[], object]
Key: TypeAlias = tuple[str, str]
"""Name of a transport, and name of a measurement."""


class BenchCase(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer of all blocks of the cache by one transport."""

    layouts: str
    """Layouts of source and target."""
    shuffled: bool
    """Whether the block tables are shuffled; otherwise in order."""
    way: str
    """``placed`` or ``staged``."""
    gb_per_s: float
    """Median over the rounds, in GB/s."""
    share: float | None
    """Share of the limit, as the median of the rounds' shares; ``None`` if no limit is known."""
    seconds: tuple[float, ...]
    """Seconds of the case in each round."""


class BenchFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one transport."""

    transport: str
    limit: str | None
    """Name of the transport's limit; ``None`` if no limit is known."""
    limit_gb_per_s: float | None
    cases: tuple[BenchCase, ...]
    small_load_s: float
    """Median time of a load of one block of tokens, from the call until the block is in place, in
    seconds."""


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a run."""

    address: str
    model: str
    dtype: str
    block_size: int
    """Number of tokens per block."""
    tokens: int
    nbytes: int
    """Number of bytes moved by one case."""
    small_load_bytes: int
    threads: int
    """Number of threads on this side."""
    rounds: int
    load_average: float
    """Load average of this machine over the last minute, at the end of the run."""
    transports: tuple[BenchFigures, ...]
    """Measurements in the order in which an engine would try the transports."""
    left_out: dict[str, str]
    """Transport → reason why the transport did not take part."""


def bench(
    context: typer.Context,
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="[HOST:PORT]", help="The side that runs with --serve.", show_default=False
        ),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve memory to the other side, until Ctrl-C.")
    ] = False,
    host: Annotated[str, typer.Option(help="With --serve: address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="With --serve: port; 0 takes a free port.")
    ] = 14600,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="With --serve: allow other machines without --keys."),
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="With --serve: model of the KV cache: a name, or a config.json."
        ),
    ] = "llama-3-8b",
    tokens: Annotated[int, typer.Option(min=1, help="With --serve: tokens to move.")] = 2048,
    block: Annotated[int, typer.Option(min=1, help="With --serve: tokens per block.")] = 16,
    transport: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="With --serve: transport to measure. May be repeated.",
            show_default="shm, vm, tcp and nixl, where installed",
        ),
    ] = None,
    keys: Keys = None,
    threads: Annotated[
        int, typer.Option(min=1, max=32, help="Threads of each transport on this side.")
    ] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that each measure everything.")] = 5,
    timeout_s: Timeout = 5.0,
    as_json: AsJson = False,
) -> None:
    """Measures the speed between two hosts, or serves as the other side.

    Raises:
        ConfigError: an option belongs to the other side; see also below.
        KVFerryError: see :func:`_measure` and :func:`~kvferry.cli.bench_server.serve_blocks`.
    """
    theirs = (
        ("rounds", "timeout_s", "as_json")
        if serve
        else ("host", "port", "insecure", "model", "tokens", "block", "transport")
    )
    for parameter in context.command.params:
        assert parameter.name is not None
        source = context.get_parameter_source(parameter.name)
        if parameter.name in theirs and source is not None and source.name != "DEFAULT":
            side = "kvferry bench HOST:PORT" if serve else "kvferry bench --serve"
            raise ConfigError(
                f"{parameter.opts[0]}: belongs to the other side; give it to `{side}`"
            )
    if serve == (address is not None):
        raise ConfigError(
            f"--serve and HOST:PORT: {'both' if serve else 'neither'} given; write "
            "`kvferry bench --serve` on one host and `kvferry bench HOST:PORT` on the other"
        )
    if address is not None:
        _measure(address, keys, timeout_s, rounds, threads, as_json)
        return
    serve_blocks((host, port), keys, insecure, model, tokens, block, transport, threads)


def _measure(
    address: str, keys: Path | None, timeout_s: float, rounds: int, threads: int, as_json: bool
) -> None:
    """Measures against a ``kvferry bench --serve``, and prints the results.

    Raises:
        ConfigError: the address or the keys cannot be used, or no transport reaches the other side.
        PeerLostError: no answer comes from the address.
        NotReadyError: the other side serves another client.
        ProtocolError: another kind of server answers.
        TransferError: a transport failed, or moved wrong bytes.
    """
    host, port = parse_address(address)
    address = join_address(host, port)
    options = ControlOptions(request_timeout_s=timeout_s, curve=load_keys(keys))
    theirs = describe_there(address, options)
    with ExitStack() as stack:
        names = [name for name in theirs.ranks[0].endpoints if name != BARE]
        opened, failed = open_transports(names, TransportOptions(threads=threads))
        for transport in opened.values():
            stack.enter_context(transport)
        left_out = {name: str(error) for name, error in failed.items()}
        if not opened:
            raise _unreachable(address, left_out)
        ours = describe_here(theirs, opened)
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


def describe_there(address: str, options: ControlOptions) -> EngineDescription:
    """Description of the serving side, checked as far as the rest of this module relies on it."""
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


def describe_here(theirs: EngineDescription, opened: dict[str, Transport]) -> EngineDescription:
    """This side as an engine of the same shape, for the handshake with the other side."""
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
    """Connections to the bare loop; while they are open, the other side serves no other client."""
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
    """Reads all blocks by each transport into the same memory of this process."""

    def __init__(self, theirs: EngineDescription, sockets: list[socket.socket]) -> None:
        (source,) = theirs.geometries
        assert isinstance(source, EngineGeometry)  # describe_there has checked this
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
        """Way of the cells, by transport and target layout."""
        self.transports: list[str] = []
        """Names of the transports that reach the other side."""

    def close(self) -> None:
        """Ends connections, threads and transports. Idempotent."""
        for tcp in self._sockets:
            with suppress(OSError):
                tcp.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for the socket
        self._pool.shutdown()
        self._stack.close()
        self._staging.close()

    def add(self, name: str, transport: Transport, endpoint: bytes) -> None:
        """Connects by a transport, and takes ownership of the transport.

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
            load = partial(load_blocks, by, peer, plan, tiles)
            for shuffled, tables in self._tables.items():
                what = _case_name(layout, shuffled)
                self._runs[name, what] = partial(load, tables, self._tokens)
            if layout == LAYOUT:
                block = self._tables[False][0][:1]
                self._runs[name, _SMALL] = partial(load, (block, block), self._source.block_size)
        self.transports.append(name)

    def measure(self, address: str, rounds: int, left_out: dict[str, str]) -> Results:
        """Checks every case once, then runs ``rounds`` rounds with every measurement in each.

        Raises:
            TransferError: a transport failed, or moved wrong bytes.
        """
        self._check()
        runs = list(self._runs.items())
        for _, run in runs:
            run()
        seconds: dict[Key, list[float]] = {key: [] for key in self._runs}
        for number in range(rounds):
            # Another measurement begins each round, so that no one always has the same predecessor.
            first = number % len(runs)
            for key, run in runs[first:] + runs[:first]:
                repeats = _SMALL_LOADS if key[1] == _SMALL else 1
                seconds[key].append(statistics.median(seconds_of(run) for _ in range(repeats)))
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

    def _figures(self, name: str, seconds: dict[Key, list[float]], nbytes: int) -> BenchFigures:
        bounds = [self._target.nbytes / each / 1e9 for each in seconds.get((name, _LIMIT), ())]
        cases = []
        for layout in self._targets:
            for shuffled in self._tables:
                took = seconds[name, _case_name(layout, shuffled)]
                rates = [nbytes / each / 1e9 for each in took]
                shares = [rate / bound for rate, bound in zip(rates, bounds, strict=False)]
                cases.append(
                    BenchCase(
                        layouts=f"{LAYOUT}→{layout}",
                        shuffled=shuffled,
                        way=self._ways[name, layout],
                        gb_per_s=statistics.median(rates),
                        share=statistics.median(shares) if shares else None,
                        seconds=tuple(took),
                    )
                )
        return BenchFigures(
            transport=name,
            limit=_LIMITS.get(name),
            limit_gb_per_s=statistics.median(bounds) if bounds else None,
            cases=tuple(cases),
            small_load_s=statistics.median(seconds[name, _SMALL]),
        )

    def _check(self) -> None:
        """Runs every case, and compares the digests of all cells.

        Raises:
            TransferError: a digest is wrong.
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
        """The bare loop over the same path, if there is any; the loop moves the whole memory."""
        if isinstance(peer, LocalPeer) and name in ("vm", "shm"):
            copy = copy_from(peer.process.pid) if isinstance(peer, VmPeer) else ctypes.memmove
            ends = self._target.ctypes.data, int(peer.addresses[0])
            return partial(copy_pieces, self._pool, copy, ends, self._target.nbytes, _PIECE_BYTES)
        if name == "nixl":
            return self._bulk_read(endpoint)
        if _LIMITS.get(name) == _SOCKETS:
            return partial(receive_all, self._pool, self._sockets, self._target)
        return None

    def _bulk_read(self, endpoint: bytes) -> Run:
        """A single READ of one descriptor."""
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


def load_blocks(
    transport: Transport,
    peer: Peer,
    plan: TransferPlan,
    tiles: Tiles,
    tables: tuple[Ids, Ids],
    tokens: int,
) -> None:
    """Binds the block tables, reads, and waits until all cells are in place."""
    _read(transport, peer, tiles, plan.bind(*tables, tokens).runs_of(0))


def _read(transport: Transport, peer: Peer, tiles: Tiles, runs: Runs) -> None:
    read = transport.read(peer, tiles, runs)
    wait_for_end([read])
    transport.poll()
    if read.error is not None:
        raise read.error


def seconds_of(run: Run) -> float:
    """Seconds of one call."""
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


def _cell(case: BenchCase) -> str:
    share = "" if case.share is None else f" ({case.share:.2f})"
    staged = "" if case.way == "placed" else f"\n{case.way}"
    return f"{case.gb_per_s:.2f}{share}{staged}"
