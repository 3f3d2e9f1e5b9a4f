"""The example's reads equal the oracle's, and the example passes the conformance suite (slow)."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from kvferry.errors import DecodeError
from kvferry.plugins import TRANSPORTS, temporary_plugin
from kvferry.testing import TransportConformance
from kvferry.testing.transport_cases import copy_slowly
from kvferry.testing.waiting import until
from kvferry.topology import EngineGeometry, ParallelShape, plan_transfer
from kvferry.transports import TransferState, TransportOptions, open_transport

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
try:
    cross_memory = importlib.import_module("cross_memory")
finally:
    sys.path.remove(str(HERE))
CrossMemoryTransport = cross_memory.CrossMemoryTransport


@pytest.fixture(autouse=True)
def _is_permitted():
    """Some containers do not let a process call process_vm_readv, even on itself."""
    with CrossMemoryTransport.open(TransportOptions()) as transport:
        if transport.connect(transport.endpoint()).error() is not None:
            pytest.skip("process_vm_readv is not permitted here")


@pytest.fixture
def _on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(HERE)  # for the peer, which is another process
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def geometry(block_size, layout):
    return EngineGeometry(
        num_layers=2,
        num_kv_heads=4,
        head_size=8,
        dtype="float32",
        block_size=block_size,
        layout=layout,
        parallel=ParallelShape(),
    )


def test_a_plan_is_read_through_it_by_name():
    source = geometry(block_size=4, layout="HND")
    target = geometry(block_size=6, layout="NHD")
    plan = plan_transfer(source=source, target=target)
    tiles = plan.lower({0: source.memory(0, 8)}, target.memory(0, 8))[0]
    runs = plan.bind([5, 1, 2], [3, 4], num_tokens=11).runs_of(0)
    with (
        temporary_plugin(TRANSPORTS, "cross_memory", CrossMemoryTransport),
        open_transport("cross_memory", TransportOptions()) as serving,
        open_transport("cross_memory", TransportOptions()) as reading,
    ):
        _, filled = serving.allocate(source.nbytes(0, 8))
        _, empty = reading.allocate(target.nbytes(0, 8))
        filled[:] = np.random.default_rng(0).integers(1, 256, filled.size)
        wanted = empty.copy()
        copy_slowly(tiles, runs, [filled], [wanted])
        transfer = reading.read(reading.connect(serving.endpoint()), tiles, runs)
        until(lambda: transfer.is_terminal, what=transfer)
        assert transfer.state is TransferState.DONE
        assert wanted.any()
        assert np.array_equal(empty, wanted)


def test_an_endpoint_that_makes_no_sense_is_refused():
    with CrossMemoryTransport.open(TransportOptions()) as transport, pytest.raises(DecodeError):
        transport.connect(b"nonsense")


@pytest.mark.slow
@pytest.mark.usefixtures("_on_the_path")
class TestConformance(TransportConformance):
    transport = CrossMemoryTransport
