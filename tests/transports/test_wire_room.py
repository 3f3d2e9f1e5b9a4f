"""Reads of tcp and ucx for whose tables a source has no room: nobody's load fails by that."""

import contextlib
import importlib.util
import itertools

import numpy as np
import pytest

from kvferry.errors import NotReadyError, StalledError, TransferError
from kvferry.layouts.tiles import TILE_DTYPE, blank_runs
from kvferry.testing.host_device import HostPackedTcpTransport
from kvferry.testing.transport_peer import pattern
from kvferry.testing.waiting import until
from kvferry.transports import (
    TransferState,
    TransportOptions,
    base,
    tcp_reader,
    ucx_reader,
    wire,
    wire_reader,
)
from kvferry.transports.tcp import TcpTransport
from kvferry.transports.ucx import UcxTransport
from kvferry.transports.wire_chunks import check_chunks
from tests.clock import Clock

BLOCKS, BLOCK_BYTES = 4000, 16
NBYTES = BLOCKS * BLOCK_BYTES
STALL_S = 1000.0
"""Seconds without a byte after which a read is stalled, by the clock of the tests."""
WIRES = [
    pytest.param(TcpTransport, 1, id="tcp"),
    pytest.param(TcpTransport, 2, id="tcp by two connections"),
    pytest.param(HostPackedTcpTransport, 1, id="tcp that packs"),
    pytest.param(
        UcxTransport,
        1,
        id="ucx",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(
                importlib.util.find_spec("ucxx") is None,
                reason="the package ucxx is not installed (`make test-rest` installs it)",
            ),
        ],
    ),
]


@pytest.fixture
def clock(monkeypatch):
    """The clock of what reads; name the fixture before ``pair``."""
    clock = Clock.install(monkeypatch)
    clock.move(monkeypatch, base, tcp_reader, ucx_reader, wire_reader)
    return clock


@pytest.fixture
def pair(kind, threads):
    """Two transports, and the memory into which the second reads from the first."""
    options = TransportOptions(
        threads=threads, stall_timeout_s=STALL_S, extra={"chunk_bytes": NBYTES // 8}
    )
    with (
        contextlib.closing(kind.open(options)) as source,
        contextlib.closing(kind.open(options)) as target,
    ):
        source.allocate(NBYTES)[1][:] = pattern(NBYTES, 1)
        yield source, target, target.allocate(NBYTES)[1]


def read(target, peer):
    """Begins to read the blocks, each to its own place, and in an order that merges nothing."""
    tiles = np.zeros(1, dtype=TILE_DTYPE)
    for side in ("source", "target"):
        tiles[f"{side}_block_stride"] = tiles[f"{side}_token_stride"] = BLOCK_BYTES
        tiles[f"{side}_element_stride"] = 1
    tiles["heads"], tiles["elements"], tiles["itemsize"] = 1, BLOCK_BYTES, 1
    runs = blank_runs(BLOCKS)
    runs["source_block"] = runs["target_block"] = np.random.default_rng(1).permutation(BLOCKS)
    runs["tokens"] = 1
    return target.read(peer, tiles, runs)


def refuse(monkeypatch, numbers):
    """Sources have no room for the requests with these numbers."""
    count = itertools.count()

    def checked(*tables):
        if next(count) in numbers:
            raise NotReadyError("the tables of all reads are many")
        return check_chunks(*tables)

    monkeypatch.setattr(wire, "check_chunks", checked)


@pytest.mark.parametrize(("kind", "threads"), WIRES)
def test_reads_begun_at_once_wait_for_each_other_instead_of_being_refused(pair, monkeypatch):
    source, target, memory = pair
    for module in ("wire", "wire_chunks"):
        monkeypatch.setattr(f"kvferry.transports.{module}.MAX_TABLE_BYTES", 1 << 20)
    peer = target.connect(source.endpoint())
    transfers = [read(target, peer) for _ in range(30)]
    until(lambda: all(transfer.is_terminal for transfer in transfers))
    assert {transfer.state for transfer in transfers} == {TransferState.DONE}
    assert source.server.refused == 0
    assert np.array_equal(memory, pattern(NBYTES, 1))


@pytest.mark.parametrize(("kind", "threads"), WIRES)
def test_a_read_for_which_a_source_has_no_room_is_requested_again(clock, pair, monkeypatch):
    source, target, memory = pair
    refuse(monkeypatch, {0, 2, 3, 4})
    transfer = read(target, target.connect(source.endpoint()))
    until(clock.passing(lambda: transfer.is_terminal))
    assert transfer.state is TransferState.DONE, transfer.error
    assert source.server.refused >= 1
    assert np.array_equal(memory, pattern(NBYTES, 1))


@pytest.mark.parametrize(("kind", "threads"), WIRES)
def test_reads_that_are_put_off_follow_each_other(clock, pair, threads, monkeypatch):
    source, target, _ = pair
    peer = target.connect(source.endpoint())
    refuse(monkeypatch, range(40))
    transfers = [read(target, peer) for _ in range(40 // threads)]
    until(lambda: source.server.refused == 40)
    until(clock.passing(lambda: transfers[0].is_terminal))
    until(lambda: all(transfer.is_terminal for transfer in transfers))
    assert {transfer.state for transfer in transfers} == {TransferState.DONE}


@pytest.mark.parametrize(("kind", "threads"), WIRES)
def test_a_read_for_which_there_is_never_room_stalls_and_asks_once_per_tick(
    clock, pair, threads, monkeypatch
):
    source, target, _ = pair
    refuse(monkeypatch, range(10**9))
    before = clock()
    transfer = read(target, target.connect(source.endpoint()))
    until(clock.passing(lambda: transfer.is_terminal, 20.0))
    assert isinstance(transfer.error, StalledError)
    assert "no room before: the tables of all reads are many" in str(transfer.error)
    assert source.server.refused <= threads * (clock() - before + 2)


@pytest.mark.parametrize(("kind", "threads"), WIRES)
def test_a_read_whose_request_no_source_takes_fails_at_once_and_alone(pair, monkeypatch):
    source, target, _ = pair
    peer = target.connect(source.endpoint())
    with monkeypatch.context() as patch:
        patch.setattr(wire_reader, "MAX_REQUEST_BYTES", 24 * BLOCKS)
        transfer = read(target, peer)
        until(lambda: transfer.is_terminal)
    assert type(transfer.error) is TransferError
    assert "read in several parts" in str(transfer.error)
    after = read(target, peer)
    until(lambda: after.is_terminal)
    assert after.state is TransferState.DONE
    assert source.server.refused == 0
