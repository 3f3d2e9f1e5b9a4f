"""The PullConnector and hybrid models: attention in some layers, recurrent state in the others."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from kvferry.config import KVTransferConfig
from kvferry.connectors.pull.groups import SourceGroups
from kvferry.connectors.records import digest_mismatch
from kvferry.control.tickets import Ticket
from kvferry.errors import IncompatibleError, TicketError
from kvferry.layouts import Layout
from kvferry.observe.records import TransferRecord
from kvferry.testing.connector_conformance import (
    REMOTE_DECODE,
    ConnectorConformance,
    Pair,
    open_pair,
    prompt,
)
from kvferry.testing.fake_engine import FakeEngine, Groups
from kvferry.testing.fake_rank import FakeRequest, Stage
from kvferry.topology import (
    EngineGeometry,
    ParallelShape,
    StateGeometry,
    mamba2_states,
    pair_groups,
    split_of_group,
)
from kvferry.topology.group import GroupGeometry
from tests.connectors.engines import SHORT_LEASE

NUM_LAYERS = 5
ATTENTION = (1, 4)
RECURRENT = (0, 2, 3)
WHOLE = 64
"""Block size with which one block holds the state of any request here: vLLM's mode ``none``."""
STATES = mamba2_states(
    num_heads=6, head_size=2, state_size=3, num_groups=1, conv_kernel=4,
    dtype="bfloat16", ssm_dtype="float32",
)  # fmt: skip
STATE_BYTES = 3 * (6 * 2 + 2 * 3) * 2 + 6 * 2 * 3 * 4
"""Of one layer, undivided."""


def attention(
    layout: str, block_size: int, stages: Sequence[int] = (NUM_LAYERS,), tp: int = 1
) -> EngineGeometry:
    """The group of the layers that attend to all tokens."""
    return EngineGeometry(
        num_layers=len(ATTENTION),
        layer_indices=ATTENTION,
        layer_split=split_of_group(ATTENTION, stages),
        num_kv_heads=3,
        head_size=2,
        dtype="float32",
        block_size=block_size,
        layout=layout,
        parallel=ParallelShape(tp=tp, pp=len(stages)),
    )


def recurrent(
    layout: str,
    block_size: int,
    stages: Sequence[int] = (NUM_LAYERS,),
    tp: int = 1,
    layers: Sequence[int] = RECURRENT,
    page_size_padded: int | None = None,
) -> StateGeometry:
    """A group of layers with state."""
    return StateGeometry(
        num_layers=len(layers),
        layer_indices=tuple(layers),
        layer_split=split_of_group(layers, stages),
        states=STATES,
        block_size=block_size,
        layout=Layout.parse(layout),
        parallel=ParallelShape(tp=tp, pp=len(stages)),
        page_size_padded=page_size_padded,
    )


#: (groups of the producer, groups of the consumer) by name.
GEOMETRIES: dict[str, tuple[Sequence[GroupGeometry], Sequence[GroupGeometry]]] = {
    "equal": 2 * ((attention("NHD", 4), recurrent("BHD", WHOLE)),),
    # TP 3 to TP 2, and two stages; channels last on one side.
    "tp3-tp2": (
        (recurrent("B(conv=DH,ssm=HD)", WHOLE, tp=3), attention("HND", 8, tp=3)),
        (
            attention("NHD", 4, stages=(2, 3), tp=2),
            recurrent("BHD", WHOLE, stages=(2, 3), tp=2, page_size_padded=512),
        ),
    ),
    # A state per block on both sides (mode all), blocks of two sizes, layers in other groups, and
    # more ranks than groups of B and C.
    "all-tp4": (
        (attention("NHD", 4, tp=4), recurrent("BDH", 8, tp=4)),
        (
            recurrent("BHD", 4, layers=(0, 3)),
            attention("HND", 4),
            recurrent("BHD", 4, layers=(2,)),
        ),
    ),
}


@pytest.mark.smoke
class TestHybridsOverShm(ConnectorConformance):
    """With a state per block, as a prefix can be a hit only there."""

    short_lease = SHORT_LEASE

    @pytest.fixture
    def geometries(self) -> tuple[Groups, Groups]:
        return GEOMETRIES["all-tp4"]

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


def loaded(pair: Pair, source: FakeRequest) -> FakeRequest:
    """Decodes a prompt up to the end of its load."""
    request = pair.decode(source)
    pair.run(lambda: request.stage in (Stage.COMPUTING, Stage.FINISHED), "the load to end")
    assert not request.failed
    return request


def records_of(engine: FakeEngine, direction: str) -> list[TransferRecord]:
    return [
        record
        for output in engine.outputs
        for record in output.transfer_records
        if record.direction == direction
    ]


@pytest.mark.parametrize("num_tokens", [7, 33])
def test_every_layer_gives_its_state_once_whatever_the_tokens(pair: Pair, num_tokens: int) -> None:
    source = pair.prefill("r", num_tokens)
    pair.finish(loaded(pair, source))
    pair.settle()
    moved = sum(record.nbytes for record in records_of(pair.consumer, "recv"))
    tp = pair.consumer.groups[0].parallel.tp
    # Each rank of the consumer has its own copy of B and C.
    states = STATE_BYTES + (tp - 1) * 3 * 2 * 3 * 2
    assert moved == len(RECURRENT) * states + len(ATTENTION) * num_tokens * 2 * 3 * 2 * 4


def test_the_digests_of_both_sides_agree(pair: Pair) -> None:
    pair.finish(loaded(pair, pair.prefill("r", 33)))
    pair.settle()
    sent, received = records_of(pair.producer, "send"), records_of(pair.consumer, "recv")
    assert len(sent) == len(pair.producer.ranks)
    assert len(received) == len(pair.consumer.ranks)
    assert digest_mismatch(sent, received) is None


def test_a_load_of_fewer_tokens_than_prefill_computed_is_refused(pair: Pair) -> None:
    source = pair.prefill("r", 33)
    request = pair.consumer.add("r", prompt(33, "r"), source.response_params)
    pair.finish(request)
    assert isinstance(request.error, TicketError)
    assert "after 33 tokens, not after 32; let prefill choose the first token" in str(request.error)
    pair.settle()


@pytest.mark.parametrize("name", ["all-tp4"])
def test_a_state_is_loaded_behind_a_local_hit(
    producer_and_consumer: tuple[KVTransferConfig, KVTransferConfig], name: str
) -> None:
    with open_pair(producer_and_consumer, GEOMETRIES[name]) as pair:
        request = pair.decode(pair.prefill("r", 33), local_blocks=4)
        pair.finish(request)
        assert not request.failed
        assert request.external_tokens == 33 - 4 * pair.consumer.block_size
        pair.settle()


def test_other_states_are_refused_at_the_handshake(
    producer_and_consumer: tuple[KVTransferConfig, KVTransferConfig],
) -> None:
    other = mamba2_states(
        num_heads=6, head_size=2, state_size=3, num_groups=2, conv_kernel=4,
        dtype="bfloat16", ssm_dtype="float32",
    )  # fmt: skip
    ours, theirs = GEOMETRIES["equal"]
    assert isinstance(theirs[1], StateGeometry)
    changed = replace(theirs[1], states=other)
    with open_pair(producer_and_consumer, (ours, (theirs[0], changed))) as pair:
        request = pair.decode(pair.prefill("r", 9))
        pair.finish(request)
        assert isinstance(request.error, IncompatibleError)
        (mismatch,) = request.error.mismatches
        assert mismatch.startswith("recurrent_state of layers 0, 2-3: engine")


def test_a_prompt_whose_states_have_moved_on_is_not_lent(
    producer_and_consumer: tuple[KVTransferConfig, KVTransferConfig],
) -> None:
    with open_pair(producer_and_consumer, GEOMETRIES["equal"]) as pair:
        request = FakeRequest("r", prompt(9, "r"), dict(REMOTE_DECODE))
        request.num_computed_tokens, request.finish_reason = 10, "length"
        assert pair.producer.scheduler.request_finished(request, ([1, 2, 3], [4])) == (False, None)


def test_a_state_fills_its_block_also_where_the_source_keeps_states_of_smaller_blocks() -> None:
    source, target = recurrent("BHD", 4), recurrent("BHD", 8)
    groups = SourceGroups("p", (source,), (target,), pair_groups([source], [target]))
    # The source let go of its state after the tokens 24 to 27, when it had computed on.
    ticket = Ticket(
        lease_id="l", engine_id="p", incarnation="i", secret=b"", host="h", port=1,
        request_id="r", num_tokens=31, block_ids=((0, 0, 0, 0, 0, 0, 0, 5),), prompt_digest="",
        lease_duration_s=30.0, tp=1, pp=1,
    )  # fmt: skip
    groups.check_kept(ticket, 0, 31)
    groups.check_filled(ticket, 0, 31)
    assert groups.filled(groups.starts(ticket, 0, 31), 0, 31).starts == (24,)
