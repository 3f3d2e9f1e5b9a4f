"""Chunks through a socket, piece by piece, against the slow oracle."""

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvferry.layouts.copier import copy_tiles
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, blank_runs
from kvferry.testing.transport_cases import copy_slowly, random_case
from kvferry.testing.transport_peer import pattern
from kvferry.transports import tcp_kernels as kernels
from kvferry.transports.wire_chunks import plan_chunks


def addresses_of(memories):
    return np.array([memory.ctypes.data for memory in memories], dtype=np.int64)


def largest_box(plan):
    tiles = plan.tiles
    widths = tiles["heads"] * tiles["elements"] * tiles["itemsize"]
    return int(widths.max()) * int(plan.runs["tokens"].max())


@pytest.mark.parametrize("direct_bytes", [1, 8, 48, 1 << 40], ids=lambda least: f"direct-{least}")
@pytest.mark.parametrize("seed", range(25))
def test_what_comes_out_of_a_socket_equals_the_oracle(seed, direct_bytes):
    """Whatever the pieces, the buffer, the table and the calls have room for."""
    rng = np.random.default_rng(seed)
    case = random_case(seed)
    plan = plan_chunks(case.tiles, case.runs, int(rng.integers(1, 2000)))
    sources = [pattern(nbytes, seed) for nbytes in case.source_region_bytes]
    targets = [pattern(nbytes, seed + 1) for nbytes in case.target_region_bytes]
    expected = [memory.copy() for memory in targets]
    copy_slowly(case.tiles, case.runs, sources, expected)
    box = largest_box(plan)
    ends = [kernels.new_part(box + int(rng.integers(0, 3 * box))) for _ in range(2)]
    with_header = bool(seed % 2)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for index in range(len(plan.chunks)):
            nbytes = int(plan.nbytes[index])
            pack, unpack = plan.pack(index), plan.unpack(index)
            dense = np.zeros(nbytes, dtype=np.uint8)
            copy_tiles(addresses_of(sources), [dense.ctypes.data], *pack)
            ends[0].header[:] = (7, index, nbytes)
            kernels.begin(ends[0], direct_bytes, False, with_header)
            kernels.begin(ends[1], int(rng.choice([1, 8, 48, 1 << 40])), bool(seed % 3), False)
            left, missing, placed = nbytes + 24 * with_header, nbytes, 0
            while left or missing:
                if left:
                    most = int(rng.integers(1, 500))
                    sent, failed = kernels.send(
                        ours.fileno(), ends[0], addresses_of(sources), *pack, most, 0
                    )
                    assert not failed
                    left -= sent
                    if with_header and left <= nbytes < left + sent:
                        got = theirs.recv(24)
                        assert np.frombuffer(got, "<i8").tolist() == [7, index, nbytes]
                    if missing == nbytes:  # what is on the wire is what staging says
                        peeked = theirs.recv(1 << 20, socket.MSG_PEEK)
                        assert peeked == dense[: len(peeked)].tobytes()
                came, there, failed = kernels.receive(
                    theirs.fileno(),
                    ends[1],
                    addresses_of(targets),
                    *unpack,
                    int(rng.integers(1, 500)),
                    int(rng.integers(0, 3)),
                )
                assert not failed
                missing -= came
                placed += there
            assert placed == nbytes
            after = theirs.fileno(), ends[1], addresses_of(targets), *unpack, 1, 0
            assert kernels.receive(*after) == (0, 0, 0)
    assert all(map(np.array_equal, targets, expected))


def flat(blocks, block_bytes, stride):
    """One tile of dense blocks, each of one token, that lie ``stride`` apart on both sides."""
    tiles = np.zeros(1, dtype=TILE_DTYPE)
    for side in ("source", "target"):
        tiles[f"{side}_block_stride"], tiles[f"{side}_element_stride"] = stride, 1
        tiles[f"{side}_token_stride"] = tiles[f"{side}_head_stride"] = block_bytes
    tiles["heads"], tiles["elements"], tiles["itemsize"] = 1, block_bytes, 1
    runs = blank_runs(blocks)
    runs["source_block"] = runs["target_block"] = np.arange(blocks)
    runs["tokens"] = 1
    return plan_chunks(tiles, runs, 1 << 40)


@pytest.mark.parametrize(
    ("block_bytes", "stride", "packed"),
    [(4096, 8192, False), (4095, 8192, True), (512, 512, False), (512, 1024, True)],
    ids=["4 KiB apart", "less apart", "short side by side", "short apart"],
)
@pytest.mark.parametrize("sending", [True, False], ids=["sent", "received"])
def test_pieces_of_4_kib_and_more_are_never_copied_in_user_space(
    block_bytes, stride, packed, sending
):
    plan = flat(16, block_bytes, stride)
    memory = np.zeros(16 * stride, dtype=np.uint8)
    part = kernels.new_part()
    tiles, runs = plan.pack(0) if sending else plan.unpack(0)
    kernels.begin(part, kernels.DIRECT_BYTES, False, False)
    assert kernels.fill(part, addresses_of([memory]), tiles, runs, sending)
    state = part.state[0]
    assert state["packed"] == (16 * block_bytes if packed else 0)
    rows = part.rows[: state["rows"]]
    low = memory.ctypes.data
    inside = (rows["address"] >= low) & (rows["address"] + rows["nbytes"] <= low + memory.nbytes)
    assert inside.all() == (not packed)
    assert rows["nbytes"].sum() == 16 * block_bytes


def test_more_pieces_than_one_call_takes_are_sent_by_several():
    plan = flat(3000, 8, 16)
    memory = pattern(3000 * 16, 3).copy()
    part = kernels.new_part()
    tiles, runs = plan.pack(0)
    kernels.begin(part, 1, False, False)
    rows = []
    while kernels.fill(part, addresses_of([memory]), tiles, runs, True):
        state = part.state[0]
        rows.append(int(state["rows"]))
        kernels.took(part, int(state["nbytes"]))
    assert rows == [1024, 1024, 952]


def test_the_end_of_a_connection_is_told_from_nothing_to_receive():
    tiles, runs = flat(1, 8, 8).unpack(0)
    assert runs.dtype == RUN_DTYPE
    memory = np.zeros(8, dtype=np.uint8)
    part = kernels.new_part()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        kernels.begin(part, 1, False, False)
        args = (theirs.fileno(), part, addresses_of([memory]), tiles, runs, 8, 0)
        assert kernels.receive(*args) == (0, 0, 0)
        ours.send(b"1234")
        ours.close()
        assert kernels.receive(*args) == (4, 0, 0)
        assert kernels.receive(*args) == (0, 0, -1)


@pytest.mark.parametrize("side", ["sent", "received"])
def test_a_call_waits_as_often_as_it_may_and_goes_on_with_what_comes(side):
    """One thread does what it can at once; the other end is slow."""
    nbytes, waits = 16 << 20, 1 << 20
    memory, other = pattern(nbytes, 1).copy(), bytearray()
    target = np.zeros(nbytes, dtype=np.uint8)
    plan = flat(1, nbytes, nbytes)
    part = kernels.new_part()
    kernels.begin(part, 1, False, False)
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)  # it holds twice as much

    def slowly():
        for first in range(0, nbytes, 64 << 10):
            if side == "sent":
                other.extend(theirs.recv(64 << 10, socket.MSG_WAITALL))
            else:
                theirs.sendall(memory[first : first + (64 << 10)].data)

    with ThreadPoolExecutor(1) as pool, ours, theirs:
        ours.setblocking(False)
        if side == "sent":
            args = ours.fileno(), part, addresses_of([memory]), *plan.pack(0), nbytes, waits
            call: Any = kernels.send
        else:
            args = ours.fileno(), part, addresses_of([target]), *plan.unpack(0), nbytes, waits
            call = kernels.receive
        slow = pool.submit(slowly)
        went: list[int] = []
        while sum(went) < nbytes:  # on a busy machine the other thread may not run for a while
            done, *_, failed = call(*args)
            assert failed == 0
            went.append(done)
        slow.result()
    assert bytes(other if side == "sent" else target) == bytes(memory)
    assert max(went) > 256 << 10, "one call went on after it had waited"


def test_a_call_that_may_not_wait_any_more_says_what_has_come():
    tiles, runs = flat(1, 8, 8).unpack(0)
    memory = np.zeros(8, dtype=np.uint8)
    part = kernels.new_part()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        kernels.begin(part, 1, False, False)
        ours.send(b"1234")
        args = theirs.fileno(), part, addresses_of([memory]), tiles, runs, 8, 3
        assert kernels.receive(*args) == (4, 0, 0)
