"""The PullConnector and several KV cache groups: what moves, what never does, who is told."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvferry.connectors.pull.groups import SourceGroups
from kvferry.connectors.pull.scheduler import PullScheduler
from kvferry.connectors.records import digest_mismatch
from kvferry.control.client import fetch_status
from kvferry.control.tickets import verify
from kvferry.errors import IncompatibleError, NullBlockError, TicketError
from kvferry.testing.connector_conformance import (
    HYBRID_GEOMETRIES,
    NUM_LAYERS,
    WINDOW,
    WINDOWED,
    Pair,
    hybrid_group,
    prompt,
)
from kvferry.testing.fake_engine import FakeEngine, Groups
from kvferry.testing.fake_rank import ContractBrokenError, FakeRequest, Stage
from kvferry.testing.waiting import WAIT_S
from kvferry.topology import pair_groups
from kvferry.topology.windows import first_kept_token
from tests.connectors.engines import KEY, end_leases, retold

WINDOWS = dict.fromkeys(WINDOWED, WINDOW)
BYTES_PER_HEAD = 2 * 2 * 4
"""Bytes of one token of one head of one layer: K and V, 2 elements each, 4 bytes per element."""

ALL_GEOMETRIES = pytest.mark.parametrize(
    "geometries", list(HYBRID_GEOMETRIES.values()), ids=list(HYBRID_GEOMETRIES)
)
EQUAL = HYBRID_GEOMETRIES["equal"]

OpenPair = Callable[..., Pair]


@pytest.fixture
def open_pair(open_engine: Callable[..., FakeEngine]) -> OpenPair:
    """Opens pairs that are closed at the end of the test."""

    def open_two(
        geometries: tuple[Groups, Groups],
        roles: tuple[str, str] = ("kv_producer", "kv_consumer"),
        **extra: Any,
    ) -> Pair:
        keys = {"num_blocks": 128, "layer_windows": WINDOWS, "lease_duration_s": 600.0} | extra
        producer, consumer = (
            open_engine(name, groups, role=role, **keys)
            for name, role, groups in zip("pd", roles, geometries, strict=True)
        )
        return Pair(producer, consumer, timeout_s=WAIT_S)

    return open_two


def loaded(pair: Pair, source: FakeRequest, *, local_blocks: int = 0) -> FakeRequest:
    """Decodes a prompt up to the end of its load, before anything is computed."""
    request = pair.decode(source, local_blocks=local_blocks)
    pair.run(lambda: request.stage in (Stage.COMPUTING, Stage.FINISHED), "the load to end")
    assert not request.failed
    return request


def records_of(engine: FakeEngine, direction: str) -> list[Any]:
    """The transfer records of all ranks and steps."""
    records = [record for output in engine.outputs for record in output.transfer_records]
    return [record for record in records if record.direction == direction]


def first_moved(pair: Pair, source: FakeRequest, layer: int, num_tokens: int, local: int) -> int:
    """Token by token: back from the window's first to the beginning of the target's block, as long
    as the source has them."""
    (target,) = (group for group in pair.consumer.groups if layer in group.model_layers)
    (lender,) = (i for i, group in enumerate(pair.producer.groups) if layer in group.model_layers)
    window = WINDOW if layer in WINDOWED else target.sliding_window
    first = max(local, first_kept_token(num_tokens, sliding_window=window))
    if first == num_tokens or target.sliding_window is None:
        return first
    assert source.response_params is not None
    table = source.response_params["remote_block_ids"][lender]
    size = pair.producer.groups[lender].block_size
    while first > local and first % target.block_size and table[(first - 1) // size]:
        first -= 1
    return first


def bytes_that_must_move(pair: Pair, source: FakeRequest, num_tokens: int, local: int) -> int:
    """Counted cell by cell over the ranks of the target."""
    total = 0
    for group in pair.consumer.groups:
        for rank in range(group.world_size):
            for layer in group.layers(rank):
                tokens = num_tokens - first_moved(pair, source, layer, num_tokens, local)
                total += tokens * len(group.heads(rank)) * BYTES_PER_HEAD
    return total


# ---- what moves -------------------------------------------------------------------------------


@ALL_GEOMETRIES
@pytest.mark.parametrize(
    ("num_tokens", "local_blocks"), [(5, 0), (WINDOW, 0), (40, 0), (40, 2), (33, 4)]
)
def test_no_block_outside_the_windows_moves(
    open_pair: OpenPair, geometries: tuple[Groups, Groups], num_tokens: int, local_blocks: int
) -> None:
    pair = open_pair(geometries)
    source = pair.prefill("r", num_tokens)
    request = loaded(pair, source, local_blocks=local_blocks)
    moved = sum(record.nbytes for record in records_of(pair.consumer, "recv"))
    assert moved == bytes_that_must_move(pair, source, num_tokens, request.local_tokens)
    pair.finish(request)
    pair.settle()


@ALL_GEOMETRIES
def test_a_block_in_which_a_window_begins_is_whole_where_the_source_has_the_rest(
    open_pair: OpenPair, geometries: tuple[Groups, Groups]
) -> None:
    pair = open_pair(geometries)
    source = pair.prefill("r", 40)
    request = loaded(pair, source)
    filled = pair.consumer.scheduler.first_filled_tokens(request)
    assert filled is not None
    for group, geometry in enumerate(pair.consumer.groups):
        firsts = {first_moved(pair, source, layer, 40, 0) for layer in geometry.model_layers}
        assert filled[group] == max(firsts)
        for rank in pair.consumer.ranks:
            cache, table = rank.caches[group], request.tables[group]
            assert not cache.wrong_cells(table, request.prompt_token_ids, max(firsts), 40)
            assert cache.is_spoilt(table, 0, min(firsts))
    pair.finish(request)
    assert pair.consumer.scheduler.first_filled_tokens(request) is None
    pair.settle()


@ALL_GEOMETRIES
def test_a_target_that_draws_the_first_token_itself_loads_one_token_less(
    open_pair: OpenPair, geometries: tuple[Groups, Groups]
) -> None:
    pair = open_pair(geometries)
    source = pair.prefill("r", 33)
    request = pair.consumer.add("r", prompt(33, "r"), source.response_params)
    pair.finish(request)
    assert request.external_tokens == 32
    assert not request.failed
    pair.settle()


@ALL_GEOMETRIES
@pytest.mark.parametrize("with_first_token", [True, False])
def test_the_digests_of_both_sides_agree_whatever_either_keeps(
    open_pair: OpenPair, geometries: tuple[Groups, Groups], with_first_token: bool
) -> None:
    pair = open_pair(geometries, record_digests=True)
    source = pair.prefill("r", 33)
    if with_first_token:
        request = pair.decode(source, local_blocks=1)
    else:
        request = pair.consumer.add("r", prompt(33, "r"), source.response_params)
    pair.finish(request)
    pair.settle()
    sent, received = records_of(pair.producer, "send"), records_of(pair.consumer, "recv")
    if with_first_token:  # the hit's cells are not the source's
        assert received[0].first_token == pair.consumer.block_size
    assert len(sent) == len(pair.producer.ranks)
    assert len(received) == len(pair.consumer.ranks)
    assert digest_mismatch(sent, received) is None
    counted = [any(token) for token in zip(*(r.token_digests for r in received), strict=True)]
    windows_only = geometries == HYBRID_GEOMETRIES["windows-only"]
    assert all(counted) or (windows_only and sum(counted) == WINDOW - 1 - (not with_first_token))


# ---- what the source holds --------------------------------------------------------------------


def test_a_lease_counts_the_blocks_that_are_there(open_pair: OpenPair) -> None:
    pair = open_pair(EQUAL)
    pair.prefill("r", 40)
    (lease,) = fetch_status("127.0.0.1", pair.producer.scheduler.port).leases  # type: ignore[attr-defined]
    # 10 of the layer that sees all; of the others those of the tokens 33 and later.
    assert lease.num_blocks == 10 + 2
    end_leases(pair.producer)
    pair.settle()


@pytest.fixture
def pair_past_the_window(open_pair: OpenPair, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """A pair whose producer goes on for 5 tokens before it lends its prompts."""
    pair = open_pair(EQUAL, record_digests=True)
    let_go = pair.producer._let_go
    monkeypatch.setattr(pair.producer, "_let_go", lambda request, num: let_go(request, num + 5))
    return pair


def test_what_the_source_let_go_is_refused_before_a_block_is_allocated(
    pair_past_the_window: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_past_the_window
    request = pair.decode(pair.prefill("r", 33))
    allocated = []
    allocate = pair.consumer._allocate
    monkeypatch.setattr(
        pair.consumer,
        "_allocate",
        lambda request, num_computed: (
            allocated.append(request.error) or allocate(request, num_computed)
        ),
    )
    pair.finish(request)
    assert isinstance(request.error, NullBlockError)
    assert "no longer keeps token 27 of layers 0-2, 4" in str(request.error)
    assert "max_tokens=1" in str(request.error)
    assert allocated == [request.error]
    assert request.external_tokens == 0
    (event,) = fetch_status("127.0.0.1", pair.consumer.scheduler.port).errors  # type: ignore[attr-defined]
    assert "request r: NullBlockError" in event.message
    pair.settle()


def test_what_the_source_let_go_is_not_missed_where_the_target_has_it(
    pair_past_the_window: Pair,
) -> None:
    pair = pair_past_the_window
    request = pair.decode(pair.prefill("r", 33), local_blocks=8)
    pair.finish(request)
    assert request.error is None
    assert request.external_tokens == 1
    pair.settle()
    sent = records_of(pair.producer, "send")
    assert digest_mismatch(sent, records_of(pair.consumer, "recv")) is None


# ---- blocks that must not become hits ---------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "partial"), [(40, {0}), (WINDOW - 1, set())])
def test_a_group_that_could_not_be_filled_is_named_until_the_request_ends(
    open_pair: OpenPair, num_tokens: int, partial: set[int]
) -> None:
    pair = open_pair(HYBRID_GEOMETRIES["windows-whole"])
    request = loaded(pair, pair.prefill("r", num_tokens))
    assert pair.consumer.scheduler.partial_groups(request) == partial
    pair.finish(request)
    assert pair.consumer.scheduler.partial_groups(request) == set()
    pair.settle()


@pytest.mark.parametrize("name", sorted(set(HYBRID_GEOMETRIES) - {"windows-whole"}))
def test_where_the_target_keeps_no_more_than_the_source_no_group_is_named(
    open_pair: OpenPair, name: str
) -> None:
    pair = open_pair(HYBRID_GEOMETRIES[name])
    request = loaded(pair, pair.prefill("r", 40))
    assert pair.consumer.scheduler.partial_groups(request) == set()
    pair.finish(request)
    pair.settle()


def test_blocks_that_could_not_be_filled_are_not_lent_on(open_pair: OpenPair) -> None:
    for name, lends in (("windows-whole", False), ("equal", True)):
        pair = open_pair(HYBRID_GEOMETRIES[name], roles=("kv_both", "kv_both"))
        source = pair.prefill("r", 40)
        assert source.response_params is not None
        source.response_params |= {"do_remote_decode": True}
        request = pair.decode(source)
        pair.finish(request)
        assert not request.failed
        assert (request.response_params is not None) == lends
        end_leases(pair.consumer)
        pair.settle()


@pytest.mark.parametrize("block_sizes", [(1, 4, 4), (3, 4, 4), (2, 6, 5)])
@pytest.mark.parametrize("num_tokens", range(21, 26))
def test_what_a_load_left_unfilled_below_a_window_does_not_move_on_as_if_it_were_there(
    open_pair: OpenPair, block_sizes: tuple[int, int, int], num_tokens: int
) -> None:
    first, second, third = (
        (hybrid_group([3], "NHD", size), hybrid_group(WINDOWED, "NHD", size, window=WINDOW))
        for size in block_sizes
    )
    pair = open_pair((first, second), roles=("kv_producer", "kv_both"))
    source = pair.prefill("r", num_tokens)
    assert source.response_params is not None
    source.response_params |= {"do_remote_decode": True}
    request = pair.decode(source)
    pair.finish(request)
    end = open_pair((third, third), roles=("kv_both", "kv_consumer")).producer
    onward = Pair(pair.consumer, end, pair.timeout_s)
    last = loaded(onward, request)  # every cell that it calls filled is looked at
    assert last.external_tokens > 0
    onward.finish(last)
    onward.settle()


def test_a_ticket_that_says_what_is_there_for_other_groups_is_refused(open_pair: OpenPair) -> None:
    pair = open_pair(EQUAL)
    source = pair.prefill("r", 33)
    assert source.response_params is not None
    ticket = verify(source.response_params["ticket"], KEY.encode())
    groups = SourceGroups("p", EQUAL[0], EQUAL[1], pair_groups(*EQUAL))
    for first_tokens, error, message in (
        ((0, 0, 0), TicketError, "first tokens for 3 KV cache groups"),
        ((0, 29), NullBlockError, "no longer keeps token 27"),
    ):
        changed = msgspec.structs.replace(ticket, first_tokens=first_tokens)
        with pytest.raises(error, match=message):
            groups.check_kept(changed, 0, 33)
    pair.finish(pair.decode(source))
    pair.settle()


def test_the_fake_engine_finds_a_group_that_should_have_been_named(
    open_pair: OpenPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PullScheduler, "partial_groups", lambda self, request: frozenset())
    pair = open_pair(HYBRID_GEOMETRIES["windows-whole"])
    with pytest.raises(ContractBrokenError, match="partial_groups"):
        loaded(pair, pair.prefill("r", 40))


def test_the_fake_engine_finds_a_block_that_was_not_filled_from_its_beginning(
    open_pair: OpenPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PullScheduler, "first_filled_tokens", lambda self, request: (0, 28))
    pair = open_pair(EQUAL)
    with pytest.raises(ContractBrokenError, match=r"first_filled_tokens says \(0, 28\)"):
        loaded(pair, pair.prefill("r", 40))


# ---- failures ---------------------------------------------------------------------------------


def test_a_load_that_fails_in_one_group_names_no_blocks(open_pair: OpenPair) -> None:
    pair = open_pair(EQUAL)
    source = pair.prefill("r", 33)
    assert source.response_params is not None
    ticket = verify(source.response_params["ticket"], KEY.encode())
    full, windowed = ticket.block_ids
    tables = (full, (*windowed[:-1], 6_000))
    source.response_params = retold(source.response_params, block_ids=tables)
    request = pair.decode(source)
    pair.finish(request)
    assert request.failed
    assert all(not output.invalid_block_ids for output in pair.consumer.outputs)
    pair.settle()


def test_other_windows_are_another_model(open_pair: OpenPair) -> None:
    full, windowed = EQUAL[1]
    pair = open_pair((EQUAL[0], (full, replace(windowed, sliding_window=WINDOW + 1))))
    request = pair.decode(pair.prefill("r", 33))
    pair.finish(request)
    assert isinstance(request.error, IncompatibleError)
    (mismatch,) = request.error.mismatches
    assert "0-2, 4" in mismatch
    assert f"sliding_window {WINDOW + 1}" in mismatch
    end_leases(pair.producer)
    pair.settle()


def test_chunks_move_from_the_start_of_the_chunk_of_the_next_token(open_pair: OpenPair) -> None:
    chunked = replace(
        hybrid_group(range(NUM_LAYERS), "NHD", 4), sliding_window=None, attention_chunk_size=10
    )
    pair = open_pair(((chunked,), (replace(chunked, block_size=6),)))
    for num_tokens, tokens in ((33, 3), (40, 0), (9, 9)):
        pair.consumer.outputs.clear()
        request = loaded(pair, pair.prefill(f"r{num_tokens}", num_tokens))
        (record,) = records_of(pair.consumer, "recv")
        assert record.nbytes == tokens * NUM_LAYERS * 3 * BYTES_PER_HEAD
        pair.finish(request)
    pair.settle()
