"""Digests on a device are those of the host."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvferry.layouts.digest import digest_rows
from kvferry.testing.host_device import HostCopyStream
from kvferry.topology import memory_of, token_digests
from tests.kernel_reports import reports_of
from tests.topology.conftest import Worlds

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROPERTY = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def on_both(copies, positions, keys):
    """The sums of the source's cells, by the host and by the device."""
    from kvferry.layouts.digest_triton import digest_rows_device

    tables = copies.tiles, copies.runs, positions, keys
    memory = [torch.from_numpy(source).to(DEVICE) for source in copies.sources]
    addresses = [source.ctypes.data for source in copies.sources]
    there = [tensor.data_ptr() for tensor in memory]
    return (
        digest_rows(np.array(addresses), *tables),
        digest_rows_device(there, *tables, device=DEVICE),
    )


def test_the_sums_are_those_of_the_host(copy_cases):
    @PROPERTY
    @given(st.data())
    def law(data):
        copies = copy_cases.draw(data)
        if not np.isin(copies.tiles["itemsize"], (1, 2, 4, 8)).all():
            copies.tiles["itemsize"] = 1
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        tokens = int(copies.runs["tokens"].sum())
        keys = rng.integers(0, 2**40, (len(copies.tiles), 3))
        host, device = on_both(copies, rng.permutation(tokens), keys)
        np.testing.assert_array_equal(host, device)

    law()


def test_the_digests_of_ranks_of_any_geometry_are_those_of_the_host():
    from kvferry.layouts.digest_triton import digest_rows_device

    class OnDevice(HostCopyStream):
        def digest(self, *tables):
            return digest_rows_device(*tables, device=DEVICE)

    with OnDevice() as stream:

        @PROPERTY
        @given(st.data())
        def law(data):
            case = Worlds().case(data)
            engine, tokens = case.source, (case.num_tokens, case.first_token)
            assume(0 not in case.source_blocks)  # the null block has no cells
            for rank, tensors in engine.tensors.items():
                memory, regions = memory_of(engine.geometry, rank, tensors)
                place = engine.geometry, rank, memory
                there = [torch.from_numpy(region).to(DEVICE) for region in regions]
                blocks = case.source_blocks
                host = token_digests(*place, [r.ctypes.data for r in regions], blocks, *tokens)
                addresses = [tensor.data_ptr() for tensor in there]
                device = token_digests(*place, addresses, blocks, *tokens, stream=stream)
                np.testing.assert_array_equal(host, device)

        law()


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_more_rows_than_a_program_takes_at_a_time_are_all_counted(copy_cases, itemsize):
    copies = large(itemsize)
    host, device = on_both(copies, np.arange(100), np.array([[1 << 40, 2, 3]]))
    np.testing.assert_array_equal(host, device)
    copies.sources[0][-itemsize] ^= 1  # the last element of all
    _, changed = on_both(copies, np.arange(100), np.array([[1 << 40, 2, 3]]))
    assert (changed != host).tolist() == [False] * 99 + [True]


def large(itemsize):
    """One tile and one run of 100 tokens with 5 heads of 6 elements."""
    from kvferry.layouts import TILE_DTYPE, blank_runs
    from tests.layouts.conftest import Copies

    tiles, runs = np.zeros(1, dtype=TILE_DTYPE), blank_runs(1)
    tiles["heads"], tiles["elements"], tiles["itemsize"] = 5, 6, itemsize
    for dim, stride in (("element", 1), ("head", 6), ("token", 30)):
        tiles[f"source_{dim}_stride"] = stride * itemsize
    runs["tokens"] = 100
    source = np.random.default_rng(itemsize).integers(0, 256, 3000 * itemsize, dtype=np.uint8)
    return Copies(tiles, runs, [source], [])


def test_elements_of_another_size_are_refused():
    copies = large(2)
    copies.tiles["itemsize"] = 16
    with pytest.raises(ValueError, match=r"itemsize: \{16\}"):
        on_both(copies, np.arange(100), np.zeros((1, 3), dtype=np.int64))


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_compiled_for_a_gpu_it_spills_nothing(capability, tmp_path):
    from kvferry.layouts.digest_triton import ROWS, RUN_WORDS, TILE_WORDS

    signature = {"tables": "*i64", "sums": "*i64", "num_tiles": "i32", "num_runs": "i32"}
    constants = {"TILE_WORDS": TILE_WORDS, "RUN_WORDS": RUN_WORDS, "ROWS": ROWS}
    module, cases = "kvferry.layouts.digest_triton", [(signature, constants, ROWS // 32)]
    (report,) = reports_of(module, "digest_kernel", cases, int(capability), tmp_path)
    assert report["spilled"] == 0
    assert report["registers"] <= 64
