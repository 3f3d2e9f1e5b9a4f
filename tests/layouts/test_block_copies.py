"""copy_kv_blocks between caches in host memory; with a GPU see test_gpu.py."""

import contextlib
import threading
from functools import partial

import numpy as np
import pytest
import torch

from kvferry.errors import BlockIdError, HostError
from kvferry.layouts import block_copies, copy_kv_blocks, device, staging
from kvferry.layouts.arrays import view_of
from kvferry.layouts.device import HostLane
from kvferry.testing.host_device import HostCopyStream

SHAPES = {
    "blocks first, packed": ((7, 3, 4, 10), (5, 3, 4, 10), 0),
    "k and v first": ((2, 7, 4, 3, 5), (2, 5, 4, 3, 5), 1),
    "latent": ((7, 4, 6), (5, 4, 6), 0),
    "blocks alone": ((7,), (5,), 0),
    "k and v inside": ((7, 3, 4, 2, 5), (5, 3, 4, 2, 5), 0),
}


def caches(shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layer.{layer}": torch.randn(shape, generator=generator).to(dtype) for layer in range(3)
    }


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_blocks_are_copied_and_no_others(kind, direction, dtype):
    source_shape, target_shape, dim = SHAPES[kind]
    source, target = caches(source_shape, 0, dtype), caches(target_shape, 1, dtype)
    source_ids, target_ids = [6, 0, 3], [1, 4, 0]
    wanted = {name: cache.clone() for name, cache in target.items()}
    at = (slice(None),) * dim
    for name, cache in wanted.items():
        for one, two in zip(source_ids, target_ids, strict=True):
            cache[(*at, two)] = source[name][(*at, one)]
    copy_kv_blocks(source, target, source_ids, target_ids, direction)
    for name, cache in wanted.items():
        assert torch.equal(target[name].view(torch.uint8), cache.view(torch.uint8))


def test_layers_may_have_different_shapes_and_any_strides():
    source = {"a": np.arange(60).reshape(3, 4, 5).transpose(1, 2, 0), "b": np.arange(12)}
    target = {"a": np.zeros((2, 5, 3), int), "b": np.zeros(4, int), "c": np.zeros(1)}
    copy_kv_blocks(source, target, [3, 1], [0, 1], "h2d")
    np.testing.assert_array_equal(target["a"], source["a"][[3, 1]])
    assert target["b"].tolist() == [3, 1, 0, 0]


def test_the_dim_of_blocks_may_be_given():
    source, target = {"a": np.arange(20).reshape(2, 2, 5)}, {"a": np.zeros((2, 2, 3), int)}
    copy_kv_blocks(source, target, [4], [2], "h2d", block_dim=2)
    np.testing.assert_array_equal(target["a"][:, :, 2], source["a"][:, :, 4])


READ_ONLY = np.frombuffer(bytes(4 * 2 * 4), dtype=np.float32).reshape(4, 2)


def test_no_blocks_and_no_layers_are_legal():
    copy_kv_blocks({}, {}, [1], [1], "h2d")
    copy_kv_blocks(caches((3, 2), 0), caches((3, 2), 1), [], [], "d2h")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"direction": "up"}, "direction: 'up' is unknown"),
        ({"src_block_ids": [1]}, "1 of the source, 2 of the target"),
        ({"dst_block_ids": [1, 1]}, "stands twice"),
        ({"dst_block_ids": torch.tensor([1, 1])}, "stands twice"),
        ({"block_dim": -2}, "block_dim: -2 is not one of the 2 dims of 'layer.0'"),
        ({"block_dim": 2}, "block_dim: 2 is not one of the 2 dims of 'layer.0'"),
        ({"dst_kv_caches": {f"layer.{i}": READ_ONLY for i in range(3)}},
         "dst_kv_caches: 'layer.0' is read-only"),
        ({"dst_kv_caches": {"layer.1": torch.zeros(4, 2)}}, "layers missing: layer.0, layer.2"),
        ({"dst_kv_caches": caches((4, 3), 0)}, r"'layer.0': \(4, 2\)"),
        ({"dst_kv_caches": caches((4, 2), 0, torch.float16)}, "float16"),
        ({"dst_kv_caches": {f"layer.{i}": torch.zeros(4, 2, device="meta") for i in range(3)},
          "direction": "d2h"}, "is on a device"),
        ({"dst_kv_caches": {f"layer.{i}": torch.zeros(4, 2, device="meta") for i in range(3)}},
         "give one on a CUDA device"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_moves(change, message):
    target = caches((4, 2), 1)
    call = {
        "src_kv_caches": caches((4, 2), 0),
        "dst_kv_caches": target,
        "src_block_ids": [1, 2],
        "dst_block_ids": [3, 0],
        "direction": "h2d",
    }
    before = {name: cache.clone() for name, cache in target.items()}
    with pytest.raises(ValueError, match=message):
        copy_kv_blocks(**call | change)
    assert all(torch.equal(target[name], cache) for name, cache in before.items())


@pytest.mark.parametrize("ids", [[1.7], ["1"], [True], np.ones(1), torch.ones(1)])
def test_ids_that_are_no_whole_numbers_are_refused(ids):
    with pytest.raises(BlockIdError, match=r"src_block_ids: ids are .*, not 64-bit whole"):
        copy_kv_blocks(caches((4, 2), 0), caches((4, 2), 1), ids, [2], "h2d")


@pytest.mark.parametrize(("source", "target"), [([4], [1]), ([1], [-1])])
def test_a_block_outside_is_refused(source, target):
    with pytest.raises(BlockIdError):
        copy_kv_blocks(caches((4, 2), 0), caches((4, 2), 1), source, target, "h2d")


@pytest.mark.parametrize("to_device", [False, True])
@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
@pytest.mark.parametrize("kind", SHAPES)
def test_the_lane_of_a_device_is_right_with_the_host_in_its_place(
    monkeypatch, kind, chunk_bytes, to_device
):
    source_shape, target_shape, dim = SHAPES[kind]
    source, target = caches(source_shape, 0), caches(target_shape, 1)
    wanted = {name: cache.clone() for name, cache in target.items()}
    copy_kv_blocks(source, wanted, [6, 0, 3], [1, 4, 0], "d2h")
    views = [(view_of(source[name]), view_of(target[name]), dim) for name in source]
    sources, targets = [one.address for one, *_ in views], [one.address for _, one, _ in views]
    monkeypatch.setattr(
        device, "stage", lambda tiles, runs: staging.stage(tiles, runs, chunk_bytes)
    )
    with HostCopyStream() as stream:
        lane = HostLane(stream)
        for tiles, runs in block_copies._tables(views, [6, 0, 3], [1, 4, 0]):
            lane.copy(sources, targets, tiles, runs, to_device=to_device)
    for name, cache in wanted.items():
        assert torch.equal(target[name], cache)


def rows(size=2):
    """Three blocks of so many numbers, a target, and the tables that copy two blocks to it."""
    source, target = np.arange(3.0 * size).reshape(3, size), np.zeros((3, size))
    views = [(view_of(source), view_of(target), 0)]
    (tables,) = block_copies._tables(views, [1, 2], [2, 0])
    return source, target, ([source.ctypes.data], [target.ctypes.data], *tables)


def test_a_lane_waits_for_what_the_engine_has_asked_of_the_device():
    source, target, arguments = rows()
    with HostCopyStream() as stream:
        stream.engine.reached.clear()
        lane = HostLane(stream)
        call = threading.Thread(
            target=lane.copy,
            args=arguments,
            kwargs={"to_device": True},
        )
        call.start()
        call.join(0.05)
        assert call.is_alive()
        assert not target.any()
        stream.engine.reached.set()
        call.join()
    np.testing.assert_array_equal(target, source[[2, 0, 1]] * [[1], [0], [1]])


class Refusing(HostCopyStream):
    """Refuses the pinning of a buffer, or a copy, once."""

    def __init__(self, *, pins=99, copies=99):
        super().__init__()
        self.pins, self.copies = pins, copies
        """Number of calls before the one that is refused."""

    def pin(self, memory):
        self.pins -= 1
        if self.pins == -1:
            raise HostError("no memory can be pinned")
        super().pin(memory)

    def prepare(self, *arguments):
        self.copies -= 1
        if self.copies == -1:
            raise HostError("no room for the tiles")
        return super().prepare(*arguments)


@pytest.mark.parametrize("pins", [0, 1, 2])
def test_a_lane_has_pinned_all_memory_that_the_device_reads_whatever_was_refused(monkeypatch, pins):
    monkeypatch.setattr(device, "WIRE_CHUNK_BYTES", 1)  # the buffers grow with the blocks
    read: list[bool] = []
    with Refusing(pins=pins) as stream:
        lane = HostLane(stream)
        monkeypatch.setattr(stream, "copy", partial(_noted, stream, read))
        for size in (2, 4, 3, 4):
            source, target, arguments = rows(size)
            monkeypatch.setattr(device, "stage", partial(staging.stage, chunk_bytes=8 * size))
            with contextlib.suppress(HostError):
                lane.copy(*arguments, to_device=True)
                np.testing.assert_array_equal(target[[2, 0]], source[[1, 2]])
        assert stream.pins < 0
    assert read
    assert all(read)


def _noted(stream, read, sources, *rest):
    """A copy, noted as one out of pinned memory or another."""
    read.append(sources[0] in stream.pinned)
    return HostCopyStream.copy(stream, sources, *rest)


def test_a_lane_that_could_not_go_on_leaves_no_copy_under_way(monkeypatch):
    _, target, arguments = rows()
    monkeypatch.setattr(device, "stage", partial(staging.stage, chunk_bytes=16))
    refused: list[np.ndarray] = []
    with Refusing(copies=1) as stream:
        lane = HostLane(stream)

        def copy():
            with pytest.raises(HostError, match="no room for the tiles"):
                lane.copy(*arguments, to_device=True)
            refused.append(target.copy())

        stream.pause()
        call = threading.Thread(target=copy)
        call.start()
        call.join(0.05)
        assert not refused  # the first chunk is under way
        stream.resume()
        call.join()
        stream.record().wait()
        np.testing.assert_array_equal(target, refused[0])
        assert target.any()
