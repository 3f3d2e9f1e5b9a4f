"""Nearly right messages at the data ports of tcp and ucx: what is served lies in the regions."""

import contextlib

import numpy as np
import pytest

from kvferry.decoding import decode
from kvferry.errors import DecodeError, ProtocolError, TransferError
from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.tiles import TILE_DTYPE, blank_runs
from kvferry.transports.wire_chunks import check_chunks
from kvferry.transports.wire_messages import (
    CHUNK_DTYPE,
    MAX_CHUNK_BYTES,
    REPLIES,
    SOURCE_RUN_DTYPE,
    SOURCE_TILE_DTYPE,
    TCP_REQUESTS,
    UCX_REQUESTS,
    Cancel,
    Endpoint,
    Hello,
    Read,
    Refused,
    Want,
    decode_endpoint,
    decode_read,
    encode_table,
)
from tests.fuzzing import nearly

REGIONS = (1 << 20, 4096)
COUNTS = [
    pytest.param(10_000, 0, id="short"),
    pytest.param(100_000, 1, id="long", marks=pytest.mark.slow),
    # A million, in parts that a slow machine ends in time.
    *(
        pytest.param(100_000, seed, id=f"soak-{seed}", marks=pytest.mark.soak)
        for seed in range(2, 11)
    ),
]


def read(steps: bytes = b"") -> Read:
    """Two tiles, three runs of two lengths, four chunks."""
    tiles = np.zeros(2, TILE_DTYPE)
    for name, value in {
        "source_block_stride": 4096,
        "source_token_stride": 256,
        "source_head_stride": 64,
        "source_element_stride": 2,
        "heads": 4,
        "elements": 32,
        "itemsize": 2,
    }.items():
        tiles[name] = value
    tiles["source_offset"] = (0, 1 << 19)
    runs = blank_runs(3)
    runs["source_block"], runs["tokens"] = (1, 5, 9), (16, 16, 3)
    chunks = np.array([(0, 2, 0, 2), (0, 1, 2, 1), (1, 1, 2, 1), (0, 2, 1, 1)], CHUNK_DTYPE)
    return Read(
        1,
        encode_table(tiles, SOURCE_TILE_DTYPE),
        encode_table(runs, SOURCE_RUN_DTYPE),
        chunks.tobytes(),
        steps,
    )


REQUESTS = (
    Hello(bytes(16), 3, 3),
    read(),
    read(),
    read(),
    read(np.array([1, 2, 1], "<i8").tobytes()),
    Cancel(1),
    Want(1, 0, 7),
)


@pytest.mark.parametrize(("count", "seed"), COUNTS)
@pytest.mark.parametrize("requests", [TCP_REQUESTS, UCX_REQUESTS], ids=["tcp", "ucx"])
def test_what_is_served_of_nearly_right_reads_lies_in_the_regions(requests, count, seed):
    served = 0
    for number, data in enumerate(nearly(REQUESTS, count, seed=seed, changes=1)):
        with contextlib.suppress(DecodeError, ProtocolError, TransferError):
            message = decode(requests, data, "request")
            if not isinstance(message, Read):
                continue
            plan = check_chunks(*decode_read(message), REGIONS)
            index = number % len(plan.chunks)
            assert 0 <= plan.nbytes[index] <= MAX_CHUNK_BYTES
            tiles, runs = plan.pack(index)
            check_bounds(tiles, runs, REGIONS, [plan.nbytes[index]])  # and fills the buffer
            served += 1
    assert served > count // 100


@pytest.mark.parametrize(("count", "seed"), COUNTS)
def test_nearly_right_replies_and_endpoints_are_decoded_or_refused(count, seed):
    replies = (Refused(1, "TransferError", "busy"), Refused(None, "ProtocolError", "no"))
    for data in nearly(replies, count, seed=seed):
        with contextlib.suppress(DecodeError):  # nothing else may be raised
            decode(REPLIES, data, "reply")
    endpoint = Endpoint(host="127.0.0.1", port=1, token=bytes(16), regions=(1, 2))
    for data in nearly([endpoint], count, seed=seed):
        with contextlib.suppress(DecodeError):
            decode_endpoint(data)
