"""The PullConnector and latent attention (MLA): one head, which every TP rank holds."""

from collections import Counter
from collections.abc import Iterator

import pytest

from kvferry.config import KVTransferConfig
from kvferry.connectors.records import digest_mismatch
from kvferry.testing.connector_conformance import ConnectorConformance, Pair, open_pair
from kvferry.testing.fake_engine import Groups
from kvferry.topology import EngineGeometry, ParallelShape
from tests.connectors.engines import SHORT_LEASE

NUM_LAYERS = 8
HEAD_SIZE = 9
"""Elements of a latent: ``kv_lora_rank + qk_rope_head_dim``."""


def latent(layout: str, block_size: int, **parallel: int) -> EngineGeometry:
    """A geometry of 8 layers that keep one latent per token."""
    return EngineGeometry(
        num_layers=NUM_LAYERS,
        num_kv_heads=1,
        head_size=HEAD_SIZE,
        dtype="bfloat16",
        block_size=block_size,
        layout=layout,
        parallel=ParallelShape(**parallel),
        use_mla=True,
    )


GEOMETRIES = {
    "tp4-tp2": (latent("BND", 4, tp=4), latent("BND", 4, tp=2)),
    "tp1-tp4": (latent("NHD", 8), latent("BND", 6, tp=4)),
    "tp2-pp2": (latent("BND", 4, tp=2), latent("BLND", 6, pp=2)),
}


class TestLatentsOverShm(ConnectorConformance):
    short_lease = SHORT_LEASE

    @pytest.fixture(
        params=[
            pytest.param(pair, id=name, marks=[pytest.mark.smoke] * (name == "tp4-tp2"))
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


@pytest.fixture(params=list(GEOMETRIES.values()), ids=list(GEOMETRIES))
def pair(
    request: pytest.FixtureRequest, producer_and_consumer: tuple[KVTransferConfig, KVTransferConfig]
) -> Iterator[Pair]:
    """Two open engines."""
    with open_pair(producer_and_consumer, request.param) as pair:
        yield pair


def test_every_target_rank_reads_each_latent_once(pair: Pair) -> None:
    request = pair.decode(pair.prefill("r", 21))
    pair.finish(request)
    (consumer,) = pair.consumer.groups
    moved: Counter[int] = Counter()
    for output in pair.consumer.outputs:
        moved.update({record.rank: record.nbytes for record in output.transfer_records})
    assert moved == {
        rank: 21 * len(consumer.layers(rank)) * HEAD_SIZE * 2 for rank in range(consumer.world_size)
    }


def test_the_replicas_of_the_source_share_the_work(pair: Pair) -> None:
    request = pair.decode(pair.prefill("r", 21))
    pair.finish(request)
    pieces: Counter[int] = Counter()
    for worker in pair.consumer.workers:
        (peer,) = worker.cache.loads.peers.connected.values()  # type: ignore[attr-defined]
        (group,) = peer.plans
        pieces.update(piece.source_rank for piece in group.plan.pieces)
    (producer,) = pair.producer.groups
    assert set(pieces) == set(range(producer.world_size))
    assert max(pieces.values()) == min(pieces.values())


def test_replicas_count_once_in_the_digests_of_both_sides(pair: Pair) -> None:
    request = pair.decode(pair.prefill("r", 21))
    pair.finish(request)
    pair.settle()
    sides = []
    for engine, direction in ((pair.producer, "send"), (pair.consumer, "recv")):
        records = [record for output in engine.outputs for record in output.transfer_records]
        sides.append([record for record in records if record.direction == direction])
        assert any(any(record.token_digests or ()) for record in sides[-1])
    assert digest_mismatch(*sides) is None


def test_the_blocks_stay_until_every_rank_of_the_target_is_done_although_one_read_them_all(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every target rank tells the source, whose own ranks are not asked: replicas that nobody read
    # from, and ranks that many read from, make no difference.
    table = pair.producer.scheduler.lender.leases  # type: ignore[attr-defined]
    finish, told = table.finish, []

    def noted(*args: object, **kwargs: object) -> object:
        answer = finish(*args, **kwargs)
        told.append((table.num_open, kwargs.get("rank")))
        return answer

    monkeypatch.setattr(table, "finish", noted)
    request = pair.decode(pair.prefill("r", 21))
    pair.finish(request)
    ranks = len(pair.consumer.workers)
    assert len(told) == ranks
    assert [open for open, _ in told[:-1]] == [1] * (ranks - 1)
    pair.settle()
