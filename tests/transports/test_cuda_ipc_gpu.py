"""The transport of GPUs on a GPU; run with ``python -m benchmarks.gpu`` or ``pytest -m gpu``."""

from types import MappingProxyType

import numpy as np
import pytest
import torch

from kvferry.errors import TransferError
from kvferry.layouts.arrays import MemorySpan
from kvferry.layouts.copier import copy_tiles
from kvferry.testing.transport_cases import large_case, random_case
from kvferry.testing.transport_conformance import TransportConformance
from kvferry.testing.transport_peer import PeerProcess, contents, fill, pattern
from kvferry.testing.waiting import until
from kvferry.transports import TransferState, TransportOptions
from kvferry.transports.cuda_ipc import CudaIpcTransport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is here"),
]


class TestCudaIpcTransport(TransportConformance):
    """Targets are pinned host memory here, which a GPU writes as it writes its own."""

    transport = CudaIpcTransport
    extra = MappingProxyType({"chunk_bytes": 1 << 20})


@pytest.fixture
def local():
    with CudaIpcTransport.open(TransportOptions(extra={"chunk_bytes": 1 << 20})) as transport:
        yield transport


@pytest.fixture(scope="module")
def peer():
    with PeerProcess(CudaIpcTransport, TransportOptions()) as process:
        yield process


def wait(transport, transfer):
    until(lambda: transfer.is_terminal, every_s=0.001, what=transfer)
    transport.poll()
    assert transfer.state is TransferState.DONE, transfer.error


@pytest.mark.parametrize("case", [random_case(5), random_case(9), large_case(64 << 20)])
def test_memory_of_another_process_is_read_into_memory_of_the_device(local, peer, case):
    sizes = enumerate(case.source_region_bytes)
    first, *_ = [peer.allocate(nbytes, seed) for seed, nbytes in sizes]
    spans = [local.allocate_device(nbytes)[1] for nbytes in case.target_region_bytes]
    tiles = case.tiles.copy()
    tiles["source_region"] += first
    for _ in range(3):
        wait(local, local.read(local.connect(peer.endpoint()), tiles, case.runs))
    sources = [pattern(nbytes, seed) for seed, nbytes in enumerate(case.source_region_bytes)]
    wanted = [np.zeros(nbytes, dtype=np.uint8) for nbytes in case.target_region_bytes]
    copy_tiles(
        [source.ctypes.data for source in sources],
        [target.ctypes.data for target in wanted],
        case.tiles,
        case.runs,
    )
    for span, want in zip(spans, wanted, strict=True):
        assert np.array_equal(contents(span), want)


def test_tensors_that_torch_has_cut_from_one_allocation_are_served(local):
    case = large_case(1 << 20)
    room = torch.zeros(3 * case.source_region_bytes[0], dtype=torch.uint8, device="cuda")
    part = room[case.source_region_bytes[0] :][: case.source_region_bytes[0]]
    with CudaIpcTransport.open(TransportOptions()) as source:
        span = MemorySpan(part.data_ptr(), part.nbytes, str(part.device))
        source.register_device(span)
        fill(span, pattern(part.nbytes, 6))
        torch.cuda.synchronize()
        _, memory = local.allocate_device(case.target_region_bytes[0])
        wait(local, local.read(local.connect(source.endpoint()), case.tiles, case.runs))
        wanted = np.zeros(memory.nbytes, dtype=np.uint8)
        held = pattern(part.nbytes, 6)
        copy_tiles([held.ctypes.data], [wanted.ctypes.data], case.tiles, case.runs)
        assert np.array_equal(contents(memory), wanted)


def test_a_read_starts_after_the_step_that_still_uses_its_blocks(local, peer):
    from kvferry.layouts.cuda_stream import CudaEvent

    case = large_case(1 << 20)
    region = peer.allocate(case.source_region_bytes[0], 8)
    _, memory = local.allocate_device(case.target_region_bytes[0])
    tiles = case.tiles.copy()
    tiles["source_region"] = region
    torch.cuda._sleep(400_000_000)
    torch.as_tensor(memory).fill_(7)  # the last step of the request that had the blocks before
    transfer = local.read(
        local.connect(peer.endpoint()), tiles, case.runs, after=CudaEvent.of_engine("cuda:0")
    )
    assert not transfer.is_terminal
    wait(local, transfer)
    assert (contents(memory) != 7).mean() > 0.9


def test_memory_without_a_handle_is_refused_with_a_reason(local):
    with pytest.raises(TransferError, match="sharing 100 bytes of cuda:0"):
        local.register_device(MemorySpan(4096, 100, "cuda:0"))
