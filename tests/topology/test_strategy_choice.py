"""The choice of a strategy: total, cheapest first, with a reason for each that cannot serve."""

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cli.strategies import KNOWN_MOVERS
from kvferry.errors import ConfigError
from kvferry.layouts.copier import expand
from kvferry.layouts.staging import stage
from kvferry.topology import (
    Addressing,
    EngineGeometry,
    MachineCosts,
    MoverTraits,
    ParallelShape,
    Strategy,
    StrategyWork,
    choose_strategy,
    plan_transfer,
    strategy_work,
)
from kvferry.topology.machine_costs import (
    DEFAULT_WIRES,
    Calibration,
    WireCosts,
    default_costs_path,
    load_costs,
)
from kvferry.topology.typical import typical_copies

LAW = settings(max_examples=100, deadline=None)

counts = st.integers(0, 10**7)
small = st.floats(0, 1e-3, allow_subnormal=False)
wires = st.builds(WireCosts, transfer_s=small, byte_s=small, operation_s=small)
movers = st.builds(
    MoverTraits,
    name=st.sampled_from([*DEFAULT_WIRES, "pigeon"]),
    addressing=st.sampled_from(Addressing),
    fences=st.booleans(),
)
machines = st.builds(
    MachineCosts,
    copy_byte_s=small,
    piece_s=small,
    convert_byte_s=small,
    wires=st.dictionaries(st.sampled_from([*DEFAULT_WIRES, "pigeon"]), wires),
)
works = st.builds(
    StrategyWork,
    **{
        field.name: counts
        for field in dataclasses.fields(StrategyWork)
        if field.name not in ("conversion", "in_place_obstacle")
    },
    conversion=st.sampled_from([None, None, ("bfloat16", "float32")]),
    in_place_obstacle=st.sampled_from([None, "blocks are torn"]),
)


def geometry(**changes):
    values = {
        "num_layers": 2,
        "num_kv_heads": 4,
        "head_size": 8,
        "dtype": "bfloat16",
        "block_size": 16,
        "layout": "NHD",
        "parallel": ParallelShape(),
    }
    return EngineGeometry(**values | changes)


@LAW
@given(works, movers, machines)
def test_every_strategy_is_told_of_and_the_cheapest_that_can_serve_is_chosen(work, mover, costs):
    choice = choose_strategy(work, mover, costs)
    assert sorted(cost.strategy for cost in choice.costs) == sorted(Strategy)
    serving = [cost for cost in choice.costs if cost.seconds is not None]
    assert choice.costs[: len(serving)] == tuple(serving)
    seconds = [cost.seconds for cost in serving]
    assert seconds == sorted(seconds)
    assert choice.cost_of(Strategy.STAGED).seconds is not None
    assert all(cost.reason for cost in choice.costs)


@LAW
@given(works, movers, machines)
def test_only_staging_converts_and_only_staging_serves_what_cannot_fence(work, mover, costs):
    choice = choose_strategy(work, mover, costs)
    if work.conversion is not None or not mover.fences:
        assert choice.strategy is Strategy.STAGED
        for cost in choice.alternatives:
            says = "float32" if work.conversion is not None else f"{mover.name} cannot fence"
            assert cost.seconds is None
            assert says in cost.reason
        return
    pieces = mover.addressing is Addressing.SEGMENTS
    assert (choice.cost_of(Strategy.STRIDED).seconds is None) == pieces
    assert (choice.cost_of(Strategy.DIRECT).seconds is None) != pieces
    in_place = choice.cost_of(Strategy.IN_PLACE)
    assert (in_place.seconds is None) == (work.in_place_obstacle is not None)
    if work.in_place_obstacle is not None:
        assert in_place.reason == "blocks are torn"


@LAW
@given(works, movers, machines, st.sampled_from(Strategy))
def test_a_wanted_strategy_is_chosen_wherever_it_can_serve(work, mover, costs, wanted):
    free, forced = (
        choose_strategy(work, mover, costs),
        choose_strategy(work, mover, costs, wanted=wanted),
    )
    can = free.cost_of(wanted).seconds is not None
    assert forced.strategy is (wanted if can else free.strategy)
    assert {cost.strategy: cost for cost in forced.costs} == {
        cost.strategy: cost for cost in free.costs
    }


@LAW
@given(works, movers, machines, st.data())
def test_no_strategy_is_cheaper_on_a_slower_machine_or_with_more_to_do(work, mover, costs, data):
    field = data.draw(st.sampled_from(["copy_byte_s", "piece_s", "convert_byte_s"]))
    slower = dataclasses.replace(costs, **{field: getattr(costs, field) * 2})
    wire = dataclasses.replace(costs.wire(mover), byte_s=costs.wire(mover).byte_s + 1e-9)
    longer = dataclasses.replace(costs, wires={**costs.wires, mover.name: wire})
    before = choose_strategy(work, mover, costs)
    for after in (
        choose_strategy(work, mover, slower),
        choose_strategy(work, mover, longer),
        choose_strategy(work + work, mover, costs),
    ):
        for cost in after.costs:
            assert (cost.seconds or 0) >= (before.cost_of(cost.strategy).seconds or 0)
        assert after.seconds >= before.seconds


def test_short_pieces_are_staged_and_long_ones_go_to_their_place_where_pieces_cost():
    mover = MoverTraits("pieces", Addressing.SEGMENTS, fences=True)
    shattered = strategy_work(plan_transfer(source=geometry(layout="HND"), target=geometry()))
    whole = strategy_work(plan_transfer(source=geometry(), target=geometry()))
    assert choose_strategy(shattered, mover, MachineCosts()).strategy is not Strategy.DIRECT
    assert choose_strategy(whole, mover, MachineCosts()).strategy is Strategy.DIRECT


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({}, {"layout": "HND", "block_size": 24}),
        ({"parallel": ParallelShape(tp=2), "layout": "HND"}, {}),
        ({"dtype": "float8_e4m3fn"}, {"dtype": "float32", "layout": "HND"}),
    ],
)
def test_the_work_is_what_really_moves(source, target):
    plan = plan_transfer(source=geometry(**source), target=geometry(**target))
    work = strategy_work(plan, num_tokens=100)
    cells = 2 * 2 * 4 * 8 * 100  # layers, parts, heads, elements, tokens
    assert (work.nbytes, work.placed_nbytes) == (
        cells * plan.source.itemsize,
        cells * plan.target.itemsize,
    )
    assert work.conversion == plan.conversion
    assert (work.in_place_obstacle is None) == (plan.conversion is None)
    frame = np.lcm(plan.source.block_size, plan.target.block_size)
    if plan.conversion is None:
        whole = -(-100 // plan.source.block_size) * plan.source.block_size
        assert work.block_nbytes == cells // 100 * whole * 2
        assert work.repack_nbytes == cells // 100 * -(-100 // frame) * frame * 2
        memories = {rank: plan.source.memory(rank, 8) for rank in plan.source_ranks}
        copies = plan.bind(np.arange(1, 8), np.arange(1, 8), 100)
        tiles = plan.lower(memories, plan.target.memory(0, 8))
        assert work.segments_ordered == sum(
            len(expand(rows, copies.runs_of(rank))) for rank, rows in tiles.items()
        )


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({"parallel": ParallelShape(tp=4), "layout": "HND"}, {"parallel": ParallelShape(tp=2)}),
        ({"parallel": ParallelShape(tp=8, pp=2)}, {"layout": "HND", "block_size": 24}),
        ({"layout": "LBHKND"}, {"dtype": "float32"}),
    ],
)
def test_counting_what_is_alike_once_counts_everything(source, target):
    shape = {"num_layers": 5, "head_size": 64, "num_kv_heads": 4}
    plan = plan_transfer(source=geometry(**shape | source), target=geometry(**shape | target))
    num_tokens = 3000
    work = strategy_work(plan, num_tokens=num_tokens)
    blocks = -(-num_tokens // 16)
    memories = {rank: plan.source.memory(rank, blocks + 1) for rank in plan.source_ranks}
    copies = typical_copies(plan, num_tokens, seed=0)
    segments = packed = unpacked = chunks = 0
    for rank, tiles in plan.lower(memories, plan.target.memory(0, blocks + 1)).items():
        runs = copies.runs_of(rank)
        segments += len(expand(tiles, runs))
        size = plan.target.itemsize if plan.conversion else None
        for chunk in stage(tiles, runs, target_itemsize=size):
            chunks += 1
            packed += len(expand(chunk.pack_tiles, chunk.pack_runs))
            unpacked += len(expand(chunk.unpack_tiles, chunk.unpack_runs))
    assert work.segments_shuffled == segments
    assert (work.chunks, work.pack_segments, work.unpack_segments) == (chunks, packed, unpacked)


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        *((name, ("HND", "HND")) for name in KNOWN_MOVERS),
        *((name, ("HND", "NHD")) for name in ("shm", "cuda_ipc", "tcp", "ucx", "nixl")),
    ],
)
def test_each_transport_does_by_default_what_it_does_best(name, layouts):
    """With the built-in figures, for a large model and TP 8 to TP 4."""
    large = {"num_layers": 40, "num_kv_heads": 8, "head_size": 128}
    plan = plan_transfer(
        source=geometry(**large, layout=layouts[0], parallel=ParallelShape(tp=8)),
        target=geometry(**large, layout=layouts[1], parallel=ParallelShape(tp=4)),
    )
    choice = choose_strategy(strategy_work(plan), KNOWN_MOVERS[name], MachineCosts())
    assert choice.strategy is (Strategy.STAGED if name == "nixl" else Strategy.STRIDED)


# ---- the file of costs -------------------------------------------------------------------------


def test_a_calibration_comes_back_as_it_was_written(tmp_path, monkeypatch):
    costs = MachineCosts(copy_byte_s=1e-10, wires={"pigeon": WireCosts(0.5, 1e-3, 0.0)})
    path = tmp_path / "kvferry" / "costs.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_costs_path() == path
    assert load_costs() == MachineCosts()  # there is none yet
    path.parent.mkdir()
    path.write_bytes(Calibration(machine={"cpu": "abacus"}, costs=costs).encode())
    assert load_costs() == load_costs(path) == costs


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[:-9], "is no calibration"),
        (lambda text: text.replace(b"copy_byte_s", b"copy_bite_s"), None),
        (lambda text: text.replace(b"8e-11", b"-1"), "copy_byte_s is -1"),
        (lambda text: text.replace(b"8e-11", b'"fast"'), r"Expected `float`"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused_with_what_to_do(tmp_path, change, says):
    path = tmp_path / "costs.json"
    text = msgspec.json.encode(Calibration(machine={}, costs=MachineCosts()))
    path.write_bytes(change(text))
    if says is None:  # a key that is not known is left alone: an older release reads a newer file
        assert load_costs(path) == MachineCosts()
        return
    with pytest.raises(ConfigError, match=says):
        load_costs(path)


def test_a_missing_file_that_was_named_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_costs(tmp_path / "costs.json")
