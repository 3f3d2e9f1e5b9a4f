"""A known cache tells right cells from wrong ones in every layout."""

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.layouts.arrays import view_of
from kvferry.testing.host_device import AWAY, HostDevice
from kvferry.testing.known_cache import KnownCache
from kvferry.testing.torch_device import TorchDevice
from kvferry.topology import EngineGeometry, ParallelShape, locate_memory

TOKENS = list(range(100, 120))
TABLE = [5, 2, 7, 1, 4]


def cache_of(layout: str, rank: int = 0, **changes) -> KnownCache:
    values: dict[str, Any] = {
        "num_kv_heads": 3,
        "parallel": ParallelShape(tp=2, pp=2),
        "dtype": "float32",
    }
    geometry = EngineGeometry(
        num_layers=3, head_size=2, block_size=4, layout=layout, **(values | changes)
    )
    memory = np.zeros(geometry.nbytes(rank, 8), dtype=np.uint8)
    return KnownCache(geometry, rank, 8, memory)


LAYOUTS = ["NHD", "HND", "BHNKD", "BLKNHD", "BLHNC", "BHK(k=DN,v=ND)"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_written_is_right_and_one_flipped_bit_is_not(layout):
    cache = cache_of(layout, rank=1)
    cache.write(TABLE, TOKENS, 0, 18)
    assert cache.wrong_cells(TABLE, TOKENS, 0, 18) == []
    name = next(iter(cache.tensors))
    flat = cache.tensors[name].reshape(-1).view(np.uint8)
    changed = np.flatnonzero(flat != 0xA5)
    flat[changed[0]] ^= 1
    assert len(cache.wrong_cells(TABLE, TOKENS, 0, 18)) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_that_was_written_to_is_found(layout):
    cache = cache_of(layout)
    assert cache.touched(range(8)) == []
    cache.write(TABLE, TOKENS, 4, 6)
    assert cache.touched(range(8)) == [2]
    cache.spoil([2])
    assert cache.touched(range(8)) == []


def test_cells_depend_on_the_whole_prefix_and_on_the_salt():
    cache = cache_of("NHD")
    cache.write(TABLE, TOKENS, 0, 8)
    other = [999, *TOKENS[1:]]
    assert cache.wrong_cells(TABLE, other, 4, 8) != []
    assert cache.wrong_cells(TABLE, TOKENS, 4, 8, salt=1) != []


WINDOW_TABLE = [0, 0, 7, 1, 4]


def test_nothing_is_written_to_the_null_block_and_it_is_never_right():
    cache = cache_of("NHD")
    cache.write(WINDOW_TABLE, TOKENS, 0, 20)
    assert cache.touched(range(8)) == [1, 4, 7]
    assert cache.wrong_cells(WINDOW_TABLE, TOKENS, 8, 20) == []
    assert cache.wrong_cells(WINDOW_TABLE, TOKENS, 7, 20) != []


def test_cells_that_nobody_wrote_are_known_within_a_block():
    cache = cache_of("HND")
    cache.write(WINDOW_TABLE, TOKENS, 10, 20)
    assert cache.is_spoilt(WINDOW_TABLE, 0, 10)
    assert not cache.is_spoilt(WINDOW_TABLE, 0, 11)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_some_layers_can_be_asked_for(layout):
    parallel = ParallelShape(tp=2)
    cache = cache_of(layout, parallel=parallel, layer_indices=(1, 4, 6))
    cache.write(TABLE, TOKENS, 0, 18)
    views = cache.registered(by_layer=True)
    views["layer.4"][:] = 0
    assert cache.wrong_cells(TABLE, TOKENS, 0, 18, layers={1, 6}) == []
    assert all("layer 4" in line for line in cache.wrong_cells(TABLE, TOKENS, 0, 18))
    assert cache.wrong_cells(TABLE, TOKENS, 0, 18, layers={4}) != []


def test_a_rank_without_layers_of_the_group_has_no_cells():
    parallel = ParallelShape(tp=2, pp=2)
    cache = cache_of("NHD", layer_indices=(1, 4, 6), layer_split=(0, 3), parallel=parallel)
    cache.write(TABLE, TOKENS, 0, 18)
    assert cache.registered(by_layer=True) == {}
    assert cache.touched(range(8)) == []


def test_two_ranks_agree_on_the_head_that_both_hold():
    changes = {"num_kv_heads": 1, "parallel": ParallelShape(tp=2), "dtype": "uint8"}
    first, second = (cache_of("NHD", rank, **changes) for rank in (0, 1))
    first.write(TABLE, TOKENS, 0, 8)
    second.write(TABLE, TOKENS, 0, 8)
    for name in first.tensors:
        np.testing.assert_array_equal(first.tensors[name], second.tensors[name])


@pytest.fixture(params=["thread", "torch", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request):
    """Devices on which caches may lie; torch's own takes the place of a GPU."""
    with ExitStack() as stack:
        if request.param == "thread":
            yield stack.enter_context(HostDevice())
        elif request.param == "torch":
            yield TorchDevice("cpu")
        else:
            if not torch.cuda.is_available():
                pytest.skip("needs a CUDA device; none is here")
            yield TorchDevice()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "int64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_on_a_device_is_known_as_one_in_host_memory_is(device, layout, dtype):
    host = cache_of(layout, dtype=dtype)
    memory = device.allocate(host.geometry.nbytes(0, 8))
    cache = KnownCache(host.geometry, 0, 8, memory, device)
    assert cache.touched(range(8)) == []
    for each in (host, cache):
        each.write(WINDOW_TABLE, TOKENS, 8, 18)
    assert cache.wrong_cells(WINDOW_TABLE, TOKENS, 8, 18) == []
    assert cache.wrong_cells(WINDOW_TABLE, TOKENS, 8, 19) != []
    assert cache.touched(range(8)) == host.touched(range(8)) == [1, 4, 7]
    assert cache.is_spoilt(WINDOW_TABLE, 18, 20)
    assert not cache.is_spoilt(WINDOW_TABLE, 17, 20)
    cache.spoil([7])
    assert cache.touched([0, 7, 4]) == [4]
    assert cache.touched([]) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_on_a_device_is_registered_where_it_lies(device, layout):
    host = cache_of(layout)
    memory = device.allocate(host.geometry.nbytes(0, 8) + 64)
    cache = KnownCache(host.geometry, 0, 8, memory, device)
    here, (region,) = locate_memory(host.geometry, 0, cache.registered())
    there, _ = locate_memory(host.geometry, 0, host.registered())
    assert (region.address, region.device) == (memory.address, memory.device)
    assert here.tensors == there.tensors
    by_layer = {name: view_of(each) for name, each in cache.registered(by_layer=True).items()}
    assert {name: each.strides for name, each in by_layer.items()} == {
        name: each.strides for name, each in host.registered(by_layer=True).items()
    }


def test_the_memory_of_a_pretended_device_is_not_the_hosts():
    with HostDevice() as device:
        assert device.allocate(64).address >= AWAY
