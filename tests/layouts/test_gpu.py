"""What only a GPU can show; run with ``python -m benchmarks.gpu`` or ``pytest -m gpu``."""

import threading

import numpy as np
import pytest
import torch

from kvferry.layouts import (
    copy_kv_blocks,
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
    kv_postprocess_layout_on_receive,
    zero_tail,
)
from kvferry.layouts.arrays import bytes_at, whole_pages
from kvferry.layouts.copier import copy_tiles
from kvferry.layouts.device import Placer
from kvferry.layouts.postprocess import default_method
from kvferry.layouts.staging import stage
from kvferry.testing.transport_peer import contents, fill
from kvferry.topology import EngineGeometry, ParallelShape, locate_memory, plan_transfer
from kvferry.transports.packing import PackedPiece, Packer
from kvferry.transports.wire_chunks import plan_chunks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is here"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]
BLOCKS = 64


def caches_of(count, tokens, heads, elements, dtype, order="NHD"):
    inner = (tokens, heads) if order == "NHD" else (heads, tokens)
    shape = (BLOCKS, *inner, elements * dtype.itemsize)
    made = [torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype) for _ in range(count)]
    return [cache if order == "NHD" else cache.transpose(1, 2) for cache in made]


def keep_busy():
    """Work of some ten milliseconds on the current stream."""
    torch.cuda._sleep(20_000_000)


def on_gpu(caches):
    return [cache.clone(memory_format=torch.preserve_format).cuda() for cache in caches]


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        one, other = one.cpu().contiguous(), other.contiguous()
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("method", ["triton", "torch"])
@pytest.mark.parametrize(
    ("heads", "elements", "dtype"),
    [
        (1, 576, torch.bfloat16),
        (1, 80, torch.float8_e4m3fn),
        (3, 64, torch.float32),
        (3, 80, torch.bfloat16),
        (9, 80, torch.float16),
        (9, 64, torch.float8_e4m3fn),
        (9, 128, torch.bfloat16),
        (9, 576, torch.float32),
    ],
    ids=str,
)
def test_a_gpu_leaves_the_bits_that_the_host_leaves(method, dtype, elements, heads):
    rng = np.random.default_rng(0)
    for tokens in (1, 2, 16, 48, 128, 256):
        ids = rng.permutation(BLOCKS)[:32].tolist()
        for post, order in (
            (kv_postprocess_layout_on_receive, "NHD"),
            (lambda c, i, **o: kv_postprocess_blksize_on_receive(c, i, 0.5, **o), "HND"),
            (lambda c, i, **o: kv_postprocess_blksize_and_layout_on_receive(c, i, 2, **o), "NHD"),
        ):
            if tokens == 1 and post is not kv_postprocess_layout_on_receive and order == "NHD":
                continue  # no two remote blocks in one token
            host = caches_of(2, tokens, heads, elements, dtype, order)
            device = on_gpu(host)
            post(host, ids)
            post(device, ids, method=method)
            assert_same(device, host)


def test_many_layers_and_blocks_at_once_are_right():
    assert default_method("cuda") == "triton"
    host = caches_of(160, 16, 8, 128, torch.bfloat16)
    device = on_gpu(host)
    ids = np.random.default_rng(1).permutation(BLOCKS).tolist()
    for _ in range(20):  # a race between loads and stores would show sooner or later
        kv_postprocess_layout_on_receive(host, ids, threads=2)
        kv_postprocess_layout_on_receive(device, ids)
    assert_same(device, host)


def test_a_side_stream_waits_for_the_engine_and_the_engine_for_its_event():
    host = caches_of(2, 16, 8, 128, torch.bfloat16)
    device = [torch.zeros_like(cache, device="cuda") for cache in host]
    filled = on_gpu(host)
    side = torch.cuda.Stream(device[0].device)
    keep_busy()  # the step that is still running when the blocks are asked for
    for cache, values in zip(device, filled, strict=True):
        cache.copy_(values)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kv_postprocess_layout_on_receive(device, [3, 5])
    torch.cuda.current_stream().wait_event(side.record_event())
    found = [cache.clone() for cache in device]
    kv_postprocess_layout_on_receive(host, [3, 5])
    assert_same(found, host)


def test_calls_that_wait_for_a_busy_gpu_keep_their_block_ids():
    host = caches_of(4, 16, 8, 128, torch.bfloat16)
    device = on_gpu(host)
    streams = [torch.cuda.Stream(device[0].device) for _ in range(2)]
    kv_postprocess_layout_on_receive(device, [0])
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            keep_busy()
    for block in range(1, 40):  # more calls than there are slots for ids
        with torch.cuda.stream(streams[block % 2]):
            kv_postprocess_layout_on_receive(device, [block])
    torch.cuda.synchronize()
    kv_postprocess_layout_on_receive(host, list(range(40)))
    assert_same(device, host)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_go_to_the_host_and_back(dtype):
    names = [f"layer.{index}" for index in range(8)]
    device = dict(zip(names, on_gpu(caches_of(8, 16, 3, 80, dtype)), strict=True))
    host = dict(zip(names, caches_of(8, 16, 3, 80, dtype), strict=True))
    wanted = {name: cache.clone() for name, cache in host.items()}
    copy_kv_blocks(device, host, [1, 5, 9], [2, 0, 7], "d2h")
    for name, cache in wanted.items():
        cache[[2, 0, 7]] = device[name].cpu()[[1, 5, 9]]
    assert_same(host.values(), wanted.values())
    copy_kv_blocks(host, device, [2, 0], [30, 31], "h2d")
    assert_same([cache[[30, 31]] for cache in device.values()], [c[[2, 0]] for c in host.values()])


def test_a_tail_is_zeroed_on_the_device():
    host = caches_of(2, 16, 3, 80, torch.float8_e4m3fn)
    device = on_gpu(host)
    for caches in (host, device):
        zero_tail(caches, [4, 9, 11], 20)
    assert_same(device, host)


@pytest.fixture
def stream():
    from kvferry.layouts.cuda_stream import CudaCopyStream

    with CudaCopyStream.open() as opened:
        yield opened


def hnd_to_nhd(layers=8, blocks=64, tokens=16, heads=8, head_size=128):
    """A geometry per side, the tiles of a plan between them, and shuffled runs."""
    source, target = (
        EngineGeometry(
            num_layers=layers,
            num_kv_heads=heads,
            head_size=head_size,
            dtype="bfloat16",
            block_size=tokens,
            layout=layout,
            parallel=ParallelShape(),
        )
        for layout in ("HND", "NHD")
    )
    memories = [side.memory(0, blocks + 1) for side in (source, target)]
    plan = plan_transfer(source=source, target=target)
    rng = np.random.default_rng(3)
    there, here = ((1 + rng.permutation(blocks)).tolist() for _ in range(2))
    runs = plan.bind(there, here, blocks * tokens - 5).runs_of(0)
    return plan.lower({0: memories[0]}, memories[1])[0], runs, memories[0].region_bytes[0]


def random_bytes(nbytes):
    return np.random.default_rng(4).integers(0, 256, nbytes, dtype=np.uint8)


def test_a_side_stream_copies_what_the_host_copies(stream):
    tiles, runs, nbytes = hnd_to_nhd()
    source, target = stream.allocate(nbytes), stream.allocate(nbytes)
    held, wanted = random_bytes(nbytes), np.zeros(nbytes, dtype=np.uint8)
    fill(source, held)
    torch.cuda.synchronize()
    for _ in range(20):
        stream.copy([source.address], [target.address], tiles, runs)
    event = stream.record()
    event.wait()
    assert event.done()
    copy_tiles([held.ctypes.data], [wanted.ctypes.data], tiles, runs)
    assert np.array_equal(contents(target), wanted)


def test_chunks_in_pinned_memory_are_placed_in_a_cache_of_the_device(stream):
    tiles, runs, nbytes = hnd_to_nhd()
    held, wanted = random_bytes(nbytes), np.zeros(nbytes, dtype=np.uint8)
    cache = stream.allocate(nbytes)
    staging = whole_pages(8 << 20)
    with Placer([cache.address], [stream, stream]) as placer:
        placer.adopt(staging)
        for chunk in stage(tiles, runs):
            landed = staging[: chunk.nbytes]
            ends = [held.ctypes.data], [landed.ctypes.data]
            copy_tiles(*ends, chunk.pack_tiles, chunk.pack_runs)
            event = placer.place(landed, chunk.unpack_tiles, chunk.unpack_runs)
            assert event is not None
            event.wait()
    copy_tiles([held.ctypes.data], [wanted.ctypes.data], tiles, runs)
    assert np.array_equal(contents(cache), wanted)


def test_pieces_of_a_cache_on_the_device_are_packed_in_host_memory(stream):
    tiles, runs, nbytes = hnd_to_nhd()
    cache, held = stream.allocate(nbytes), random_bytes(nbytes)
    fill(cache, held)
    torch.cuda.synchronize()
    plan = plan_chunks(tiles, runs, 1 << 20)
    with Packer([stream], 2 << 20) as packer:
        for index, size in enumerate(plan.nbytes.tolist()):
            wanted = np.zeros(size, dtype=np.uint8)
            copy_tiles([held.ctypes.data], [wanted.ctypes.data], *plan.pack(index))
            for tables in packer.pieces(*plan.pack(index)):
                ready = threading.Event()
                piece = PackedPiece(*tables, ready.set)
                packer.pack(piece, np.array([cache.address]), "reader")
                assert ready.wait(60)
                end = piece.first_byte + piece.nbytes
                packed = bytes_at(piece.address, piece.nbytes)
                assert np.array_equal(packed, wanted[piece.first_byte : end])
                packer.release(piece)


def test_tensors_of_the_device_are_located_and_their_bytes_are_theirs():
    one = EngineGeometry(
        num_layers=2,
        num_kv_heads=2,
        head_size=8,
        dtype="float32",
        block_size=4,
        layout="NHD",
        parallel=ParallelShape(),
    )
    whole = torch.zeros((2, *one.cache_shape(0, 3)), device="cuda")
    _, (span,) = locate_memory(one, 0, dict(zip(one.tensor_names(0), whole, strict=True)))
    assert (span.address, span.device) == (whole.data_ptr(), "cuda:0")
    torch.as_tensor(span)[:4] = 255
    assert torch.isnan(whole.flatten()[0])


def test_an_event_of_the_engine_is_waited_for_by_the_calling_thread():
    from kvferry.layouts.cuda_stream import CudaEvent

    torch.cuda._sleep(200_000_000)
    event = CudaEvent.of_engine("cuda:0")
    assert not event.done()
    event.wait()
    assert event.done()
