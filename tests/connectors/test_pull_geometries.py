"""The PullConnector between engines that spread tokens over ranks, quantise, or pad pages."""

from dataclasses import replace

import pytest

from kvferry.config import KVTransferConfig
from kvferry.testing.connector_conformance import ConnectorConformance
from kvferry.testing.fake_engine import Groups
from kvferry.topology import EngineGeometry, ParallelShape
from tests.connectors.engines import SHORT_LEASE


def geometry(block_size: int, layout: str = "NHD", **parallel: int) -> EngineGeometry:
    """4 layers, one KV head: every TP rank holds a replica of it."""
    return EngineGeometry(
        num_layers=4,
        num_kv_heads=1,
        head_size=5,
        dtype="bfloat16",
        block_size=block_size,
        layout=layout,
        parallel=ParallelShape(**parallel),
    )


def hybrid(block_size: int, **parallel: int) -> Groups:
    """The same layers in two groups, one of which keeps a window."""
    one = replace(geometry(block_size, "NHD", **parallel), num_layers=2)
    return (
        replace(one, layer_indices=(0, 2), sliding_window=7),
        replace(one, layer_indices=(1, 3)),
    )


def quantised(one: EngineGeometry) -> EngineGeometry:
    """The same in bytes, with scales."""
    return replace(one, dtype="float8_e4m3fn", scale_dtype="float32")


GEOMETRIES = {
    "dcp4-tp2": (geometry(3, tp=4, dcp=4), geometry(6, tp=2)),
    "tp1-dcp2": (geometry(8), geometry(6, tp=4, dcp=2, interleave_size=3)),
    "pcp2-dcp2": (geometry(4, tp=2, pcp=2), geometry(4, tp=2, pp=2, dcp=2, interleave_size=2)),
    "windows": (hybrid(3, tp=4, dcp=2), hybrid(4, pcp=2, interleave_size=2)),
    "fp8": (quantised(geometry(3, tp=4, dcp=4)), quantised(geometry(6, "HND", tp=2))),
    "fp8-cross-layer": (quantised(geometry(8, "BLKNHD")), quantised(geometry(6, "HND", pp=2))),
    "padded": (replace(geometry(8), page_size_padded=200), geometry(6, "HND", tp=2)),
}


class TestGeometriesOverShm(ConnectorConformance):
    short_lease = SHORT_LEASE

    @pytest.fixture(
        params=[
            pytest.param(pair, id=name, marks=[pytest.mark.smoke] * (name == "dcp4-tp2"))
            for name, pair in GEOMETRIES.items()
        ]
    )
    def geometries(self, request: pytest.FixtureRequest) -> tuple[Groups, Groups]:
        pair: tuple[Groups, Groups] = request.param
        return pair

    @pytest.fixture
    def configs(
        self, producer_and_consumer: tuple[KVTransferConfig, KVTransferConfig]
    ) -> tuple[KVTransferConfig, KVTransferConfig]:
        return producer_and_consumer
