"""Bursts of requests whose pages lie anywhere, beside what each path carries in bulk.

A rank holds 4 layers of one KV head: that of a Llama-3-8B at TP 8 and PP 8. So a page of 16 tokens
is 8 pieces of 4 KiB, one of 64 tokens 8 pieces of 16 KiB. All requests of a burst are begun at
once, by one thread; none shares a page with another, and all pages are in random order on both
sides. The ceiling of a path moves as many bytes that lie together.
"""

import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console

from benchmarks import tables
from benchmarks.cases import LAYOUTS, CacheShape, WrongDataError, lowered
from benchmarks.kvferry_side import Offer
from benchmarks.machine import Machine, load_average
from benchmarks.nixl_side import LOCAL, NixlSource, descriptor_rows, make_agent
from benchmarks.nixl_ways_side import NixlWaysSource
from benchmarks.remote import Remote
from benchmarks.transports import NIXL_TLS
from kvferry.explain.limits import TOKEN_BYTES, BareSource, dial, read_process, receive_part
from kvferry.transports.base import Peer, Transfer, Transport
from kvferry.transports.registry import open_transport
from kvferry.transports.vm import VmEndpoint

Ids = npt.NDArray[np.int64]
Tables = list[tuple[Ids, Ids]]
"""Source and target pages of each request."""

_LAYERS, _HEAD_SIZE = 4, 128
_POOL_TOKENS = 524_288
"""Of either side: 1.07 GB, seven times over all processes."""
_CALL_BYTES = 8 << 20
"""Of a memcpy or a ``process_vm_readv``: glibc copies 268 MB in one call at a quarter of the rate
of 134 MB, measured."""
PAGES = (16, 64)
"""Tokens per page."""
K = 1024
BURSTS = (
    *((1, 8 * K), (8, 8 * K), (64, 8 * K), (1, 32 * K), (16, 32 * K), (1, 128 * K), (4, 128 * K)),
    *((64, 32 * K), (64, 128 * K)),
)
"""Requests, and tokens of each; those that the pool does not hold are counted, not moved."""

ONE_HOST, TCP = "one host", "TCP"
_BESIDE_NIXL = (
    ("shm", "NIXL pages, shm"),
    ("vm", "NIXL pages, shm"),
    ("tcp", "NIXL pages, tcp"),
)
CONTENDERS = {
    ONE_HOST: {
        "memcpy": None,
        "shm": "memcpy",
        "process_vm_readv": None,
        "vm": "process_vm_readv",
        "NIXL bulk, shm": None,
        "NIXL pages, shm": "NIXL bulk, shm",
        "nixl, shm": "NIXL bulk, shm",
    },
    TCP: {
        "sockets": None,
        "tcp": "sockets",
        "NIXL bulk, tcp": None,
        "NIXL pages, tcp": "NIXL bulk, tcp",
        "nixl, tcp": "NIXL bulk, tcp",
    },
}
"""Path → contender → its ceiling; ``None`` for a ceiling. ``nixl`` is our transport over NIXL."""


@dataclass(frozen=True, slots=True)
class Burst:
    """One row of the table."""

    page: int
    """Tokens per page."""
    requests: int
    tokens: int
    """Of each request."""
    pool: int
    """Tokens of the cache of either side."""

    def __str__(self) -> str:
        return (
            f"{self.requests} × {self.tokens // K}k"
            if self.tokens >= K
            else f"{self.requests} × {self.tokens}"
        )

    @property
    def shape(self) -> CacheShape:
        """The cache, cut into such pages."""
        return CacheShape(_LAYERS, 1, _HEAD_SIZE, self.page, self.pool)

    @property
    def pieces(self) -> int:
        """Contiguous copies, where no two pages are neighbours on both sides."""
        return self.requests * self.tokens // self.page * _LAYERS * 2

    @property
    def nbytes(self) -> int:
        """Bytes that all requests move."""
        return self.pieces * self.shape.block_bytes

    def tables(self) -> Tables:
        """The pages of each request."""
        rng = np.random.default_rng(self.page)
        each = self.tokens // self.page
        source, target = (rng.permutation(self.shape.blocks - 1) + 1 for _ in range(2))
        return [
            (source[first : first + each], target[first : first + each])
            for first in range(0, self.requests * each, each)
        ]


def all_bursts(pool: int = _POOL_TOKENS, scale: int = 1) -> list[Burst]:
    """Every burst; with ``scale`` each request has so many times fewer tokens."""
    return [
        Burst(page, requests, tokens // scale, pool)
        for page in PAGES
        for requests, tokens in BURSTS
    ]


def region_bytes(pool: int) -> int:
    """Of a cache with pages of any size."""
    return max(CacheShape(_LAYERS, 1, _HEAD_SIZE, page, pool).region_bytes for page in PAGES)


class PagedSource:
    """Random bytes in shared memory, in private memory, and behind sockets."""

    def __init__(self, pool: int) -> None:
        nbytes = region_bytes(pool)
        self._shm, self._vm, self._tcp = (open_transport(name) for name in ("shm", "vm", "tcp"))
        _, region = self._shm.allocate(nbytes)
        rng = np.random.Generator(np.random.SFC64(1))
        for first in range(0, nbytes, 1 << 24):
            part = region[first : first + (1 << 24)]
            part[:] = np.frombuffer(rng.bytes(part.nbytes), dtype=np.uint8)
        self._vm.register(region.copy())
        self._tcp.register(region)
        # What a burst moves is one of several equal parts of this.
        self._bare = BareSource(region[: Burst(PAGES[0], 1, pool, pool).nbytes])

    def offer(self) -> Offer:
        """How to reach it."""
        return Offer(
            shm=self._shm.endpoint(),
            vm=self._vm.endpoint(),
            tcp={1: self._tcp.endpoint()},
            encrypted={},
            socket=(self._bare.port, self._bare.token),
            tls=None,
        )

    def close(self) -> None:
        """Closes the transports and the bare loop."""
        self._bare.close()
        for transport in (self._tcp, self._vm, self._shm):
            transport.close()


class _Target:
    """The memory of a reader, and the check of what landed in it."""

    def __init__(self, pool: int, offer: Offer) -> None:
        (self.source,) = (segment.array for segment in offer.attach())
        self.array = np.zeros(region_bytes(pool), dtype=np.uint8)
        self.array[:] = 0
        self.address = self.array.ctypes.data

    def clear(self) -> None:
        """Zeroes it."""
        self.array[:] = 0

    def check(self, contender: str, burst: Burst) -> None:
        """Compares all pages of a burst, or what its ceiling has moved.

        Raises:
            WrongDataError: something else is there.
        """
        shape = burst.shape
        if any(contender in each and each[contender] is None for each in CONTENDERS.values()):
            same = np.array_equal(self.array[: burst.nbytes], self.source[: burst.nbytes])
        else:
            rows = (_LAYERS * 2, shape.blocks, shape.block_bytes)
            found, held = (
                memory[: shape.region_bytes].reshape(rows) for memory in (self.array, self.source)
            )
            source, target = (np.concatenate(ids) for ids in zip(*burst.tables(), strict=True))
            same = all(
                np.array_equal(ours[target], theirs[source])
                for ours, theirs in zip(found, held, strict=True)
            )
        if not same:
            raise WrongDataError(f"{contender}, {burst}, pages of {burst.page}: not the source's")


class PagedReader:
    """Reads by our transports, and by the bare loops."""

    def __init__(self, pool: int, offer: Offer, endpoints: dict[str, tuple[str, bytes]]) -> None:
        """Args:
        pool: tokens of the cache.
        offer: how to reach the source; its bare loop too, unless ``endpoints`` are of ``nixl``.
        endpoints: contender → transport and endpoint.
        """
        self._target = _Target(pool, offer)
        self._open: dict[str, tuple[Transport, Peer]] = {}
        for contender, (name, endpoint) in endpoints.items():
            transport = open_transport(name)
            transport.register(self._target.array, serve=False)
            self._open[contender] = transport, transport.connect(endpoint)
        self._pool = pool
        self._loops: dict[str, Callable[[Burst], object]] = {}
        if "tcp" in endpoints:
            self._vm = msgspec.msgpack.decode(offer.vm, type=VmEndpoint)
            self._tcp = dial("127.0.0.1", *offer.socket, bytes(TOKEN_BYTES))
            self._loops = {
                "memcpy": self._memcpy,
                "process_vm_readv": self._process_vm_readv,
                "sockets": self._receive,
            }
        self.clear, self.check = self._target.clear, self._target.check
        # Connections are made now: both processes may be suspended from here on.
        for contender in self._open:
            self.measure(contender, Burst(PAGES[0], 1, PAGES[0], pool))

    def measure(self, contender: str, burst: Burst) -> float:
        """One burst; seconds."""
        if contender in self._loops:
            began = time.perf_counter()
            self._loops[contender](burst)
            return time.perf_counter() - began
        transport, peer = self._open[contender]
        plan, tiles = lowered(burst.shape, LAYOUTS[0], LAYOUTS[0])
        requests = burst.tables()
        ended = threading.Semaphore(0)

        def on_end(_: Transfer) -> None:
            ended.release()

        began = time.perf_counter()
        reads = []
        for source, target in requests:
            runs = plan.bind(source, target, burst.tokens).runs_of(0)
            reads.append(transport.read(peer, tiles, runs))
            reads[-1].on_end(on_end)
        for _ in reads:
            ended.acquire()
        seconds = time.perf_counter() - began
        transport.poll()
        for read in reads:
            if read.error is not None:
                raise read.error
        return seconds

    def close(self) -> None:
        """Closes the transports."""
        for transport, _ in self._open.values():
            transport.close()

    def _memcpy(self, burst: Burst) -> None:
        target, source = self._target.address, self._target.source.ctypes.data
        for first in range(0, burst.nbytes, _CALL_BYTES):
            nbytes = min(_CALL_BYTES, burst.nbytes - first)
            ctypes.memmove(target + first, source + first, nbytes)

    def _process_vm_readv(self, burst: Burst) -> None:
        target, source = self._target.address, self._vm.addresses[0]
        for first in range(0, burst.nbytes, _CALL_BYTES):
            nbytes = min(_CALL_BYTES, burst.nbytes - first)
            local, remote = ([[start + first, nbytes]] for start in (target, source))
            read_process(self._vm.process.pid, np.array(local), np.array(remote))

    def _receive(self, burst: Burst) -> None:
        parts, left = divmod(self._pool, burst.requests * burst.tokens)
        assert not left  # the pool is a multiple of every burst that it holds
        target = self._target.array[: parts * burst.nbytes]
        receive_part(self._tcp, target, 0, parts)


class PagedNixlReader:
    """Reads with NIXL itself: one descriptor in all, or one per piece; made before the clock."""

    def __init__(self, pool: int, offer: Offer, metadata: tuple[bytes, list[int]]) -> None:
        self._target = _Target(pool, offer)
        self.clear, self.check = self._target.clear, self._target.check
        self._agent = make_agent("reader", 0, progress_thread=False)
        rows = descriptor_rows(np.array([self._target.address]), self._target.array.nbytes)
        self._registered = self._agent.register_memory(rows, "DRAM")
        described, (self._source,) = metadata
        self._peer = self._agent.add_remote_agent(described)

    def measure(self, contender: str, burst: Burst) -> float:
        """One burst: post all, and wait; seconds."""
        pieces = [(0, 0, burst.nbytes)] if "bulk" in contender else _pieces(burst)
        made = [self._request(*piece) for piece in pieces]
        requests = [request for request, _ in made]
        began = time.perf_counter()
        states = [self._agent.transfer(request) for request in requests]
        while "PROC" in states:
            states = [
                self._agent.check_xfer_state(request) if state == "PROC" else state
                for request, state in zip(requests, states, strict=True)
            ]
        seconds = time.perf_counter() - began
        for request, lists in made:
            self._agent.release_xfer_handle(request)
            for each in lists:
                self._agent.release_dlist_handle(each)
        if set(states) != {"DONE"}:
            raise RuntimeError(f"{contender}, {burst}: a READ ended as {set(states) - {'DONE'}}")
        return seconds

    def close(self) -> None:
        """Gives the memory back."""
        self._agent.deregister_memory(self._registered)

    def _request(self, source: Any, target: Any, nbytes: int) -> tuple[Any, tuple[Any, Any]]:
        """A request, and the lists of descriptors that it is made of."""
        sides = (
            (self._peer, np.atleast_1d(source) + self._source),
            (LOCAL, np.atleast_1d(target) + self._target.address),
        )
        remote, local = (
            self._agent.prep_xfer_dlist(agent, descriptor_rows(addresses, nbytes), "DRAM")
            for agent, addresses in sides
        )
        chosen = np.arange(len(sides[0][1]), dtype=np.int32)
        request = self._agent.make_prepped_xfer("READ", local, chosen, remote, chosen)
        return request, (local, remote)


def _pieces(burst: Burst) -> Iterator[tuple[Ids, Ids, int]]:
    """Source offsets, target offsets and the size of the pieces of each request."""
    shape = burst.shape
    size = shape.block_bytes
    starts = np.arange(_LAYERS * 2, dtype=np.int64)[:, None] * shape.blocks * size
    for source, target in burst.tables():
        yield (starts + source * size).ravel(), (starts + target * size).ravel(), size


# ---- all of them -------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One burst."""

    burst: Burst
    bind_seconds: float
    """To bind one of its requests; median."""
    table_bytes: int
    """Of the tables that one of its requests is to a transport."""
    seconds: dict[str, tuple[float, ...]]
    """Contender → seconds, one per round; empty if it was only counted."""

    def gbps(self, contender: str) -> float:
        """Median GB/s."""
        return self.burst.nbytes / statistics.median(self.seconds[contender]) / 1e9

    def share(self, contender: str, of: str) -> float:
        """How many times another's rate: the median over the rounds of each round's."""
        pairs = zip(self.seconds[contender], self.seconds[of], strict=True)
        return statistics.median(theirs / ours for ours, theirs in pairs)


class PagedResults(msgspec.Struct, frozen=True, kw_only=True):
    """All that one run measured."""

    command: str
    machine: Machine
    rounds: int
    quick: bool
    nixl_skipped: str | None
    """Why NIXL did not take part."""
    load_after: float
    rows: tuple[Row, ...]


def measure(
    command: str,
    machine: Machine,
    rounds: int,
    quick: bool,
    say: Callable[[str], object],
    nixl_skipped: str | None,
) -> PagedResults:
    """Checks every contender in the first burst of each page size, then measures the rounds.

    Raises:
        WrongDataError: a contender moved something else than it should.
    """
    bursts = all_bursts(_POOL_TOKENS // 64, 64) if quick else all_bursts()
    moved = [burst for burst in bursts if burst.requests * burst.tokens <= burst.pool]
    seconds: dict[tuple[Burst, str], list[float]] = {}
    with ExitStack() as stack:
        contenders = list(_start(stack, bursts[0].pool, say, not nixl_skipped))
        for burst in {burst.page: burst for burst in reversed(moved)}.values():
            say(f"checking the data: pages of {burst.page}")
            for source, reader, contender in contenders:
                _run(source, reader, "clear")
                _run(source, reader, "measure", contender, burst)
                _run(source, reader, "check", contender, burst)
        for number in range(rounds):
            for burst in moved:
                say(f"round {number + 1} of {rounds}: {burst}, pages of {burst.page}")
                first = number % len(contenders)
                for source, reader, contender in contenders[first:] + contenders[:first]:
                    took = _run(source, reader, "measure", contender, burst)
                    seconds.setdefault((burst, contender), []).append(took)
    return PagedResults(
        command=command,
        machine=machine,
        rounds=rounds,
        quick=quick,
        nixl_skipped=nixl_skipped,
        load_after=load_average(),
        rows=tuple(_row(burst, seconds) for burst in bursts),
    )


def _start(
    stack: ExitStack, pool: int, say: Callable[[str], object], nixl: bool
) -> Iterator[tuple[Remote, Remote, str]]:
    """Starts the processes; yields source, reader and contender. All are suspended."""

    def start(name: str, make: Callable[..., object], *arguments: object, **env: str) -> Remote:
        say(f"starting {name}")
        return stack.enter_context(Remote(name, make, *arguments, env=env))

    source = start("kvferry source", PagedSource, pool)
    offer: Offer = source.call("offer")
    endpoints = {"shm": offer.shm, "vm": offer.vm, "tcp": offer.tcp[1]}
    named = {name: (name, endpoint) for name, endpoint in endpoints.items()}
    pairs = [
        (
            source,
            start("kvferry reader", PagedReader, pool, offer, named),
            ["memcpy", "shm", "process_vm_readv", "vm", "sockets", "tcp"],
        )
    ]
    for path, tls in NIXL_TLS.items() if nixl else ():
        env = {"UCX_TLS": tls, "NIXL_LOG_LEVEL": "ERROR"}
        theirs = start(f"NIXL {path} source", NixlSource, offer, 0, path == "tcp", **env)
        metadata = theirs.call("metadata")
        reader = start(f"NIXL {path} reader", PagedNixlReader, pool, offer, metadata, **env)
        pairs.append((theirs, reader, [f"NIXL bulk, {path}", f"NIXL pages, {path}"]))
        ours = start(f"kvferry nixl {path} source", NixlWaysSource, offer, **env)
        named = {f"nixl, {path}": ("nixl", ours.call("endpoint"))}
        reader = start(f"kvferry nixl {path} reader", PagedReader, pool, offer, named, **env)
        pairs.append((ours, reader, list(named)))
    for one, other, names in pairs:
        one.suspend()
        other.suspend()
        yield from ((one, other, name) for name in names)


def _run(source: Remote, reader: Remote, method: str, *arguments: object) -> Any:
    source.resume()
    reader.resume()
    try:
        return reader.call(method, *arguments)
    finally:
        source.suspend()
        reader.suspend()


def _row(burst: Burst, seconds: dict[tuple[Burst, str], list[float]]) -> Row:
    """The figures of a burst, with what is counted of one of its requests."""
    one = Burst(burst.page, 1, burst.tokens, burst.pool)
    plan, tiles = lowered(one.shape, LAYOUTS[0], LAYOUTS[0])
    ((source, target),) = one.tables()
    took = []
    for _ in range(10):
        began = time.perf_counter()
        runs = plan.bind(source, target, one.tokens).runs_of(0)
        took.append(time.perf_counter() - began)
    return Row(
        burst=burst,
        bind_seconds=statistics.median(took),
        table_bytes=tiles.nbytes + runs.nbytes,
        seconds={name: tuple(each) for (of, name), each in seconds.items() if of == burst},
    )


# ---- shown -------------------------------------------------------------------------------------


def show(results: PagedResults, console: Console) -> None:
    """Prints the tables."""
    for line in _lines(results):
        console.print(line, highlight=False, markup=False)


def write(results: PagedResults, folder: Path) -> None:
    """Writes ``paged.json``, ``PAGED.md`` and ``paged.png`` into ``folder``."""
    machine = results.machine
    lines = [
        "# Bursts of pages",
        "",
        (
            f"Made by `{results.command}` on {machine.date}: {machine.cpu}, {machine.cores} cores, "
            f"{machine.memory_gib} GiB, Linux {machine.kernel}, Python {machine.python}. Load "
            f"average {machine.load_before} before, {results.load_after} after."
        ),
        "",
        *(["**A quick run: its figures say nothing.**", ""] if results.quick else []),
        *([f"**NIXL: {results.nixl_skipped}.**", ""] if results.nixl_skipped else []),
        (
            "Requests of a rank with 4 layers of one KV head of 128 (Llama-3-8B at TP 8 and PP 8, "
            "bfloat16): a page of 16 tokens is 8 pieces of 4 KiB, one of 64 tokens 8 of 16 KiB. "
            "Pages are in random order on both sides. All requests of a burst begin at once, by "
            "one thread, and each side has one thread per transport. `memcpy`, "
            "`process_vm_readv`, `sockets` and `NIXL bulk` move as many bytes that lie together, "
            "in calls of 8 MiB, with one `sendall`, and with one descriptor. `NIXL pages` has a "
            "descriptor per piece, its requests made before the clock starts; ours binds and reads "
            "while it runs. `nixl` is our transport over NIXL. GB/s, the medians of "
            f"{results.rounds} interleaved rounds; in brackets the share of the ceiling before "
            "it, the median of the rounds' own."
        ),
        "",
        *_lines(results),
        "",
        "![paged](paged.png)",
    ]
    tables.write(folder, "paged", results, "\n".join(lines) + "\n")
    _draw(results, folder / "paged.png")


def _lines(results: PagedResults) -> Iterator[str]:
    measured = [row for row in results.rows if row.seconds]
    for path, contenders in CONTENDERS.items():
        there = {name: of for name, of in contenders.items() if name in measured[0].seconds}
        cells = [("page", "requests × tokens", "MB", *there)]
        cells += [
            (
                str(row.burst.page),
                str(row.burst),
                f"{row.burst.nbytes / 1e6:,.0f}",
                *(_cell(row, name, of) for name, of in there.items()),
            )
            for row in measured
        ]
        yield from (f"## {path[0].upper()}{path[1:]}", "", *tables.markdown(cells, 2), "")
    for ours, theirs in _BESIDE_NIXL if not results.nixl_skipped else ():
        shares = [row.share(ours, theirs) for row in measured]
        yield f"- `{ours}` moves at {min(shares):.1f} to {max(shares):.1f} times `{theirs}`"
    yield from ("", "## Counted", "")
    yield (
        "What a burst is to a transport, also where this machine has no room for it. Ours is given "
        "tables of tiles and runs; NIXL takes a descriptor of 24 bytes on either side per piece."
    )
    counted = [
        (
            "page",
            "requests × tokens",
            "MB",
            "pieces",
            "our tables, KB",
            "descriptors, KB",
            "bind of one request, ms",
            "measured",
        )
    ]
    counted += [
        (
            str(row.burst.page),
            str(row.burst),
            f"{row.burst.nbytes / 1e6:,.0f}",
            f"{row.burst.pieces:,}",
            f"{row.table_bytes * row.burst.requests / 1e3:,.0f}",
            f"{row.burst.pieces * 48 / 1e3:,.0f}",
            f"{row.bind_seconds * 1e3:.2f}",
            "yes" if row.seconds else "no",
        )
        for row in results.rows
    ]
    yield from ("", *tables.markdown(counted, 2))


def _cell(row: Row, contender: str, of: str | None) -> str:
    share = "" if of is None else f" ({row.share(contender, of):.2f})"
    return f"{row.gbps(contender):.2f}{share}"


def _draw(results: PagedResults, path: Path) -> None:
    """GB/s per burst, a panel for each path and page size."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(len(CONTENDERS), len(PAGES), figsize=(13, 8), squeeze=False)
    for line, (name, contenders) in zip(grid, CONTENDERS.items(), strict=True):
        for axes, page in zip(line, PAGES, strict=True):
            rows = [row for row in results.rows if row.seconds and row.burst.page == page]
            there = [each for each in contenders if each in rows[0].seconds]
            for contender in there:
                is_ceiling = contenders[contender] is None
                axes.plot(
                    [str(row.burst) for row in rows],
                    [row.gbps(contender) for row in rows],
                    marker=None if is_ceiling else "o",
                    linestyle="--" if is_ceiling else "-",
                    label=contender,
                )
            axes.set_title(f"{name}, pages of {page} tokens")
            axes.set_ylabel("GB/s")
            axes.set_ylim(bottom=0)
            axes.legend(fontsize=7, frameon=False)
            axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
