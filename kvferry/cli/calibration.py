"""Measures what strategies are chosen by: copies in this process, reads from another one."""

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

import kvferry
from kvferry.errors import KVFerryError, TransferError
from kvferry.layouts.convert import convert
from kvferry.layouts.copier import copy_tiles, warm
from kvferry.layouts.tiles import TILE_DTYPE, Runs, Tiles, blank_runs
from kvferry.plugins import TRANSPORTS, installed_plugins
from kvferry.testing.transport_peer import PeerProcess
from kvferry.topology.machine_costs import Calibration, MachineCosts, WireCosts
from kvferry.topology.strategies import Addressing
from kvferry.transports.base import Peer, Transport, TransportOptions
from kvferry.transports.registry import transport_class

NBYTES = 32 << 20
"""Bytes of a large copy: more than the caches hold."""
PIECE_BYTES = (64, 256, 1024, 4096)
"""Lengths of the pieces of strided copies."""
SHORT_BYTES = 256
"""Length of the pieces that a transport moves one by one."""
ROUNDS = 8
"""The fastest of so many counts: others were held up by what else runs."""
READ_TIMEOUT_S = 20.0
"""Seconds after which a read is given up."""

_PACKAGES = ("numpy", "numba", "pyzmq", "torch", "nixl")


def calibrate(say: Callable[[str], object]) -> Calibration:
    """Measures the machine; takes well under a minute.

    Args:
        say: is told each figure, for people.
    """
    costs = _local_costs()
    say(f"copy: {1e-9 / costs.copy_byte_s:.1f} GB/s, {costs.piece_s * 1e9:.1f} ns per piece")
    say(f"conversion: {1e-9 / costs.convert_byte_s:.1f} GB/s of what is written")
    wires = {}
    for name in installed_plugins(TRANSPORTS):
        try:
            wires[name] = wire = _wire_costs(transport_class(name))
        except KVFerryError as error:  # a package or a device is missing
            say(f"{name}: not measured: {error}")
            continue
        say(
            f"{name}: {wire.transfer_s * 1e6:.0f} µs per read, {1e-9 / wire.byte_s:.1f} GB/s, "
            f"{wire.operation_s * 1e9:.1f} ns per operation"
        )
    return Calibration(machine=_machine(), costs=replace(costs, wires=wires))


def _local_costs() -> MachineCosts:
    warm()
    source, target = np.ones(2 * NBYTES, dtype=np.uint8), np.zeros(NBYTES, dtype=np.uint8)
    addresses = [source.ctypes.data], [target.ctypes.data]

    def copied(length: int) -> float:
        tiles, runs = pieces(NBYTES, length)
        return _seconds(lambda: copy_tiles(*addresses, tiles, runs))

    whole = copied(NBYTES)
    counts = np.array([NBYTES // length for length in PIECE_BYTES])
    more = np.array([copied(length) - whole for length in PIECE_BYTES])
    converted = np.zeros(NBYTES, dtype=np.uint8)
    half = target[: NBYTES // 2]
    conversion = _seconds(lambda: convert(half, "bfloat16", converted, "float32"))
    return MachineCosts(
        copy_byte_s=whole / NBYTES,
        piece_s=max(float(counts @ more / (counts @ counts)), 0.0),  # least squares
        convert_byte_s=conversion / NBYTES,
    )


def pieces(nbytes: int, length: int) -> tuple[Tiles, Runs]:
    """A copy of so many bytes in pieces of ``length`` each, twice as far apart in the source.

    Whatever is to be one piece takes the source's bytes as they lie.
    """
    tiles = np.zeros(1, dtype=TILE_DTYPE)
    count = nbytes // length
    step = length if count == 1 else 2 * length
    tiles["source_token_stride"], tiles["target_token_stride"] = step, length
    tiles["source_head_stride"] = tiles["target_head_stride"] = length
    tiles["source_element_stride"] = tiles["target_element_stride"] = 1
    tiles["heads"], tiles["elements"], tiles["itemsize"] = 1, length, 1
    runs = blank_runs(1)
    runs["tokens"] = count
    return tiles, runs


def _wire_costs(kind: type[Transport]) -> WireCosts:
    options = TransportOptions(stall_timeout_s=READ_TIMEOUT_S)
    with PeerProcess(kind, options) as server, kind.open(options) as reader:
        server.allocate(2 * NBYTES, 0)
        memory = np.zeros(NBYTES, dtype=np.uint8)
        region = reader.register(memory, serve=False)
        with reader.connect(server.endpoint()) as peer:

            def read(nbytes: int, length: int) -> float:
                tiles, runs = pieces(nbytes, length)
                tiles["target_region"] = region
                return _seconds(lambda: _read(reader, peer, tiles, runs))

            small = read(4096, 4096)
            byte_s = max(read(NBYTES, NBYTES) - small, 1e-9) / NBYTES
            if kind.addressing is Addressing.PACKED:
                return WireCosts(small, byte_s, 0.0)  # its chunks were large ones already
            count = NBYTES // 4 // SHORT_BYTES
            taken = read(NBYTES // 4, SHORT_BYTES) - small - NBYTES // 4 * byte_s
            return WireCosts(small, byte_s, max(taken, 0.0) / count)


def _read(reader: Transport, peer: Peer, tiles: Tiles, runs: Runs) -> None:
    transfer = reader.read(peer, tiles, runs)
    deadline = time.monotonic() + READ_TIMEOUT_S
    while not transfer.is_terminal:
        reader.poll()
        if time.monotonic() > deadline:
            raise TransferError(f"a read took more than {READ_TIMEOUT_S} s")
        time.sleep(0)
    reader.poll()
    if transfer.error is not None:
        raise transfer.error


def _seconds(work: Callable[[], object]) -> float:
    """The fewest seconds of a few rounds, after one that does not count."""
    work()
    return min(_rounds(work))


def _rounds(work: Callable[[], object]) -> Iterator[float]:
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        work()
        yield time.perf_counter() - begin


def _machine() -> dict[str, str]:
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": f"{os.getloadavg()[0]:.2f} processes over the last minute",
        "kvferry": kvferry.__version__,
    }
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
