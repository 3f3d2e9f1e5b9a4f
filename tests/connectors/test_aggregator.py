"""Law 4: one report per rank. The aggregator against a model that replays the whole history."""

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from kvferry.connectors import aggregator as module
from kvferry.connectors.aggregator import KVOutputAggregator
from kvferry.connectors.base import KVConnectorOutput
from kvferry.observe.records import TransferRecord

pytestmark = pytest.mark.smoke


@dataclass
class Output:
    kv_connector_output: KVConnectorOutput | None = None
    sampled: list[int] = field(default_factory=list)


def output(**fields) -> Output:
    return Output(KVConnectorOutput(**fields))


def sent(*ids: str) -> Output:
    return output(finished_sending=set(ids))


def received(*ids: str, failed: tuple[str, ...] = ()) -> Output:
    return output(finished_recving=set(ids), failed_recving=set(failed))


def joined(aggregator: KVOutputAggregator, *outputs: Output | None) -> KVConnectorOutput:
    result = aggregator.aggregate(list(outputs))
    assert result is not None
    assert result.kv_connector_output is not None
    return result.kv_connector_output


class TestFinished:
    def test_a_request_is_finished_when_every_rank_reported_it(self):
        aggregator = KVOutputAggregator(2)
        assert joined(aggregator, sent("a"), sent()).finished_sending == set()
        assert joined(aggregator, sent(), sent("a")).finished_sending == {"a"}

    def test_a_rank_that_reports_twice_counts_once(self):
        aggregator = KVOutputAggregator(2)
        for _ in range(3):
            assert joined(aggregator, received("a"), None).finished_recving == set()
        assert joined(aggregator, sent(), received("a")).finished_recving == {"a"}

    def test_a_finished_request_is_reported_once(self):
        aggregator = KVOutputAggregator(2)
        assert joined(aggregator, sent("a"), sent("a")).finished_sending == {"a"}
        for _ in range(3):
            assert joined(aggregator, sent("a"), sent("a")).finished_sending == set()

    def test_sending_and_receiving_are_counted_apart(self):
        aggregator = KVOutputAggregator(2)
        report = joined(aggregator, sent("a"), received("a"))
        assert (report.finished_sending, report.finished_recving) == (set(), set())

    def test_ids_that_are_prefixes_of_each_other_are_different(self):
        aggregator = KVOutputAggregator(2)
        assert joined(aggregator, sent("req-1"), sent("req-10")).finished_sending == set()

    def test_a_dead_rank_keeps_its_place(self):
        aggregator = KVOutputAggregator(3)
        joined(aggregator, sent("a"), None, sent())
        joined(aggregator, sent("a"), None, sent("a"))
        assert aggregator.waiting_for("a") == {1}
        assert joined(aggregator, sent(), sent("a"), sent()).finished_sending == {"a"}
        assert aggregator.waiting_for("a") == frozenset()

    def test_an_output_without_a_report_says_nothing(self):
        aggregator = KVOutputAggregator(2)
        assert joined(aggregator, Output(None), sent("a")).finished_sending == set()
        assert joined(aggregator, sent("a"), Output(None)).finished_sending == {"a"}


class TestForget:
    def test_a_forgotten_id_may_be_used_again(self):
        aggregator = KVOutputAggregator(2)
        joined(aggregator, received("a", failed=("a",)), received("a"))
        aggregator.forget("a")
        assert joined(aggregator, received("a"), sent()).finished_recving == set()
        again = joined(aggregator, sent(), received("a"))
        assert again.finished_recving == {"a"}
        assert again.failed_recving == set()

    def test_a_half_reported_id_starts_again(self):
        aggregator = KVOutputAggregator(2)
        joined(aggregator, received("a"), received())
        aggregator.forget("a")
        assert joined(aggregator, received(), received("a")).finished_recving == set()

    def test_an_unknown_id_is_let_be(self):
        KVOutputAggregator(2).forget("nobody")

    def test_memory_is_bounded_and_drops_the_oldest(self, monkeypatch):
        monkeypatch.setattr(module, "REMEMBERED", 2)
        aggregator = KVOutputAggregator(1)
        for request_id in ("a", "b", "c"):
            assert joined(aggregator, sent(request_id)).finished_sending == {request_id}
        assert joined(aggregator, sent("b", "c")).finished_sending == set()
        assert joined(aggregator, sent("a")).finished_sending == {"a"}


class TestFailed:
    def test_a_failure_is_held_until_every_rank_is_done(self):
        aggregator = KVOutputAggregator(2)
        first = joined(aggregator, received("a", failed=("a",)), received())
        assert (first.finished_recving, first.failed_recving) == (set(), set())
        second = joined(aggregator, received(), received("a"))
        assert (second.finished_recving, second.failed_recving) == ({"a"}, {"a"})

    def test_a_failure_alone_does_not_finish_its_rank(self):
        aggregator = KVOutputAggregator(2)
        joined(aggregator, output(failed_recving={"a"}), received("a"))
        assert aggregator.waiting_for("a") == {0}
        assert joined(aggregator, received("a"), received()).failed_recving == {"a"}

    def test_a_failure_of_a_load_that_ends_with_the_step_counts_on_any_rank_at_once(self):
        aggregator = KVOutputAggregator(2)
        reports = [KVConnectorOutput(failed_recving={"a", "b"}), KVConnectorOutput()]
        assert aggregator.join(reports, ["a"]).failed_recving == {"a"}
        assert joined(aggregator, received("a", "b"), received("a", "b")).failed_recving == {"b"}

    def test_a_failure_reported_after_the_end_changes_nothing(self):
        aggregator = KVOutputAggregator(2, expected=1)
        joined(aggregator, received("a"), received())
        late = joined(aggregator, received(), received("a", failed=("a",)))
        assert late.is_empty()
        aggregator.forget("a")
        assert joined(aggregator, received("a"), received()).failed_recving == set()

    def test_invalid_blocks_are_united_at_once(self):
        aggregator = KVOutputAggregator(2)
        first = joined(
            aggregator,
            output(finished_recving={"a"}, failed_recving={"a"}, invalid_block_ids={3, 4}),
            output(invalid_block_ids={4, 5}),
        )
        assert first.invalid_block_ids == {3, 4, 5}
        assert joined(aggregator, received(), received("a")).invalid_block_ids == set()


class TestExpectedCount:
    def test_it_comes_from_the_connector_its_class_or_the_world(self):
        class OneOfAll:
            @classmethod
            def get_finished_count(cls) -> int:
                return 1

        for connector, ends in [
            (OneOfAll, True),
            (OneOfAll(), True),
            (SimpleNamespace(get_finished_count=lambda: 1), True),
            (SimpleNamespace(get_finished_count=lambda: None), False),
            (SimpleNamespace(), False),
            (None, False),
        ]:
            aggregator = KVOutputAggregator.from_connector(connector, world_size=2)
            assert joined(aggregator, sent("a"), sent()).finished_sending == (
                {"a"} if ends else set()
            )

    @pytest.mark.parametrize(("world_size", "expected"), [(0, None), (2, 0), (2, 3), (2, -1)])
    def test_a_count_that_could_never_be_reached_is_refused(self, world_size, expected):
        with pytest.raises(ValueError, match=f"{world_size if expected is None else expected}"):
            KVOutputAggregator(world_size, expected)

    def test_a_change_holds_for_requests_first_reported_afterwards(self):
        aggregator = KVOutputAggregator(3)
        joined(aggregator, sent("old"))
        change = joined(aggregator, output(expected_finished_count=2), sent("old"))
        assert change.expected_finished_count == 2
        assert change.finished_sending == set()
        after = joined(aggregator, sent("new"), sent("new"), sent())
        assert after.finished_sending == {"new"}
        assert after.expected_finished_count == 0
        assert joined(aggregator, sent(), sent(), sent("old")).finished_sending == {"old"}

    def test_a_change_beyond_the_world_expects_all(self, caplog):
        aggregator = KVOutputAggregator(2, expected=1)
        joined(aggregator, output(expected_finished_count=7), sent())
        assert "expects 7 ranks" in caplog.text
        assert joined(aggregator, sent("a"), sent()).finished_sending == set()
        assert joined(aggregator, sent(), sent("a")).finished_sending == {"a"}

    def test_more_outputs_than_ranks_are_refused(self):
        with pytest.raises(ValueError, match="reports of 3 ranks, but there are 2"):
            KVOutputAggregator(2).aggregate([sent(), sent(), sent()])


def record(rank: int) -> TransferRecord:
    return TransferRecord(
        request_id="a", lease_id="l", rank=rank, peer="p", direction="recv", first_token=0,
        tokens=1, nbytes=1, copies=1, started=0.0, finished=1.0, ok=True,
    )  # fmt: skip


class TestTheRest:
    def test_stats_and_progress_are_added_events_and_records_concatenated(self):
        report = joined(
            KVOutputAggregator(2),
            output(
                kv_connector_stats={"bytes": 3, "loads": 1},
                kv_cache_events=["e0"],
                transfer_records=[record(0)],
                transfer_progress={"a": (1, 10), "b": (5, 5)},
            ),
            output(
                kv_connector_stats={"bytes": 4},
                kv_cache_events=["e1", "e2"],
                transfer_records=[record(1)],
                transfer_progress={"a": (2, 20)},
            ),
        )
        assert report.kv_connector_stats == {"bytes": 7, "loads": 1}
        assert report.kv_cache_events == ["e0", "e1", "e2"]
        assert [r.rank for r in report.transfer_records] == [0, 1]
        assert report.transfer_progress == {"a": (3, 30), "b": (5, 5)}

    def test_the_output_rank_lends_everything_else(self):
        outputs = [Output(None, sampled=[1]), Output(None, sampled=[2])]
        result = KVOutputAggregator(2).aggregate(outputs, output_rank=1)
        assert result is not None
        assert result.sampled == [2]

    def test_a_dead_output_rank_loses_no_reports(self):
        aggregator = KVOutputAggregator(2)
        joined(aggregator, received("a", "b", failed=("a",)), received())
        lost = [
            None,
            output(
                finished_recving={"a"},
                invalid_block_ids={7},
                kv_connector_stats={"bytes": 1},
                transfer_progress={"b": (1, 2)},
                expected_finished_count=1,
            ),
        ]
        assert aggregator.aggregate(lost) is None
        report = joined(
            aggregator,
            received(),
            output(
                finished_recving={"b"},
                kv_connector_stats={"bytes": 2},
                transfer_progress={"b": (2, 2)},
            ),
        )
        assert report.finished_recving == {"a", "b"}
        assert report.failed_recving == {"a"}
        assert report.invalid_block_ids == {7}
        assert report.kv_connector_stats == {"bytes": 3}
        assert report.transfer_progress == {"b": (2, 2)}
        assert report.expected_finished_count == 1
        assert joined(aggregator, received(), received()).is_empty()

    def test_structs_are_copied_as_well_as_dataclasses(self):
        class RankOutput(msgspec.Struct):
            kv_connector_output: KVConnectorOutput | None = None

        given_ = [RankOutput(sent("a").kv_connector_output), RankOutput(None)]
        result = KVOutputAggregator(2).aggregate(given_)
        assert result is not given_[0]
        assert given_ == [RankOutput(sent("a").kv_connector_output), RankOutput(None)]


# --- law 4 ------------------------------------------------------------------------------------

IDS = ("r", "r1", "r2", "s")
WORLD = 3


@st.composite
def reports(draw):
    """One rank's output of one step, ``None`` for a dead rank."""
    if draw(st.integers(0, 5)) == 0:
        return None
    some = st.sets(st.sampled_from(IDS), max_size=2)
    finished = draw(some)
    return output(
        finished_sending=draw(some),
        finished_recving=finished,
        failed_recving={i for i in finished if draw(st.booleans())},
        invalid_block_ids=draw(st.sets(st.integers(1, 5), max_size=2)),
        kv_connector_stats={"n": draw(st.integers(0, 3))},
        kv_cache_events=draw(st.lists(st.integers(), max_size=1)),
        expected_finished_count=draw(st.sampled_from([0, 0, 0, 1, 2, 3])),
    )


histories = st.lists(st.lists(reports(), min_size=WORLD, max_size=WORLD), max_size=8)


def completion(history, direction: str, request_id: str) -> int | None:
    """The step in which a request is complete, by the whole history from its start."""
    expected, needed = WORLD, None
    ranks: set[int] = set()
    for step, outputs in enumerate(history):
        for rank, out in enumerate(outputs):
            if out is None:
                continue
            expected = out.kv_connector_output.expected_finished_count or expected
            if request_id in getattr(out.kv_connector_output, direction):
                needed = expected if needed is None else needed
                ranks = ranks | {rank}
                if len(ranks) == needed:
                    return step
    return None


def failed_by(history, step: int, request_id: str) -> bool:
    return any(
        out is not None and request_id in out.kv_connector_output.failed_recving
        for outputs in history[: step + 1]
        for out in outputs
    )


def model(history) -> list[tuple]:
    """What has been reported up to each step whose output rank lives."""
    seen = []
    for step in range(len(history)):
        if history[step][0] is None:
            continue
        told = [out.kv_connector_output for outs in history[: step + 1] for out in outs if out]
        done = {
            direction: {
                i
                for i in IDS
                if (at := completion(history, direction, i)) is not None and at <= step
            }
            for direction in ("finished_sending", "finished_recving")
        }
        failed = {
            i
            for i in done["finished_recving"]
            if (at := completion(history, "finished_recving", i)) is not None
            and failed_by(history, at, i)
        }
        invalid = set().union(*(report.invalid_block_ids for report in told))
        total = sum(report.kv_connector_stats["n"] for report in told)
        events = [event for report in told for event in report.kv_cache_events]
        seen.append((*done.values(), failed, invalid, total, events))
    return seen


class LawBrokenError(AssertionError):
    """A report that the law forbids, whatever the others are."""


def observed(history, aggregator_class=KVOutputAggregator) -> list[tuple]:
    """What the aggregator reports, step by step, in all.

    Raises:
        LawBrokenError: an id is reported twice, or fails without an end.
    """
    aggregator = aggregator_class(WORLD)
    sending: set[str] = set()
    recving: set[str] = set()
    failed, invalid, total, events = set(), set(), 0, []
    seen = []
    for outputs in history:
        result = aggregator.aggregate(outputs)
        if result is None:
            continue
        report = result.kv_connector_output
        twice = sending & report.finished_sending | recving & report.finished_recving
        unfinished = report.failed_recving - report.finished_recving
        if twice or unfinished:
            raise LawBrokenError(f"twice: {twice}; failed, but not finished: {unfinished}")
        sending |= report.finished_sending
        recving |= report.finished_recving
        failed |= report.failed_recving
        invalid |= report.invalid_block_ids
        total += report.kv_connector_stats.get("n", 0)
        events += report.kv_cache_events
        seen.append(tuple(map(copy.copy, (sending, recving, failed, invalid, total, events))))
    return seen


def law_holds(history, aggregator_class=KVOutputAggregator) -> bool:
    try:
        return observed(copy.deepcopy(history), aggregator_class) == model(history)
    except LawBrokenError:  # an error that a mistake happens to run into is no finding
        return False


@given(histories)
def test_one_report_per_rank(history):
    untouched = copy.deepcopy(history)
    assert observed(history) == model(untouched)
    assert history == untouched


class CountsReports(module._Ledger):
    """Counts reports, not ranks."""

    def report(self, rank, request_ids, expected):
        anonymous = sum(len(ranks) for _, ranks in self.pending.values())
        return super().report(1000 + anonymous, request_ids, expected)


class Forgets(module._Ledger):
    """Does not remember what is finished."""

    def _remember(self, request_id):
        pass


class TakesTheNewCount(module._Ledger):
    """Applies a changed count to requests that were already reported."""

    def report(self, rank, request_ids, expected):
        self.pending = {i: (expected, ranks) for i, (_, ranks) in self.pending.items()}
        return super().report(rank, request_ids, expected)


class DropsTheStep(KVOutputAggregator):
    """Loses what the others said when the output rank is dead."""

    def aggregate(self, outputs, output_rank=0):
        return None if outputs[output_rank] is None else super().aggregate(outputs, output_rank)


@pytest.mark.parametrize("mutant", [CountsReports, Forgets, TakesTheNewCount])
def test_the_law_catches_a_wrong_ledger(mutant, monkeypatch):
    monkeypatch.setattr(module, "_Ledger", mutant)
    assert counterexample(KVOutputAggregator) is not None


def test_the_law_catches_a_lost_step():
    assert counterexample(DropsTheStep) is not None


def counterexample(aggregator_class):
    """Any one will do: shrinking may take minutes."""
    try:
        return find(
            histories,
            lambda history: not law_holds(history, aggregator_class),
            settings=settings(max_examples=2000, database=None, phases=[Phase.generate]),
        )
    except NoSuchExample:
        return None
