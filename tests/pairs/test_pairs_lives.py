"""The lives of requests between two engines: prefix hits, aborts, failures, many at once."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvferry.control.leases import LeaseTable
from kvferry.engine.messages import SamplingParams
from kvferry.errors import TicketError
from kvferry.topology import geometry
from kvferry.topology.sharding import split_heads

PREFILL = {"tp": 2, "block_size": 8, "layout": "HND"}
DECODE = {"pp": 2, "block_size": 12, "layout": "NHD"}
MAX_TOKENS = 6


def prompt(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, 300) for _ in range(length)]


def test_a_prompt_shorter_than_a_block_moves(open_pair: Any, undivided: Any) -> None:
    pair = open_pair(PREFILL, DECODE)
    answer = pair.generate([prompt(3)], MAX_TOKENS)[0]
    assert answer.token_ids == undivided([prompt(3)], MAX_TOKENS)[0]
    assert answer.num_external_tokens == 3
    pair.settle()


def test_a_prefix_hit_on_the_prefill_side_changes_nothing(open_pair: Any, undivided: Any) -> None:
    pair = open_pair(PREFILL, DECODE)
    head = prompt(40)
    questions = [[*head, *prompt(20, seed=1)], [*head, *prompt(25, seed=2)]]
    expected = undivided(questions, MAX_TOKENS)
    assert pair.generate(questions[:1], MAX_TOKENS)[0].token_ids == expected[0]
    first = pair.prefilled(questions[1:])[0]
    assert first.num_cached_tokens == 40  # five blocks of eight
    answer = pair.finish([pair.submit(first, questions[1], MAX_TOKENS)])[0]
    assert first.token_ids + answer.token_ids == expected[1]
    pair.check_digests()
    pair.settle()


def test_a_prefix_hit_on_the_decode_side_fetches_only_the_rest(
    open_pair: Any, undivided: Any
) -> None:
    pair = open_pair(PREFILL, DECODE)
    head = prompt(40)
    questions = [[*head, *prompt(20, seed=1)], [*head, *prompt(25, seed=2)]]
    expected = undivided(questions, MAX_TOKENS)
    answers = [pair.generate([question], MAX_TOKENS)[0] for question in questions]
    assert [answer.token_ids for answer in answers] == expected
    assert answers[1].num_cached_tokens == 36  # three blocks of twelve
    assert answers[1].num_external_tokens == 65 - 36
    assert pair.check_digests() == 2
    pair.settle()


def test_a_prompt_that_the_decode_side_knows_whole_moves_nothing(
    open_pair: Any, undivided: Any
) -> None:
    pair = open_pair(PREFILL, DECODE)
    question = prompt(36)  # three whole blocks of the decode side
    expected = undivided([question], MAX_TOKENS)[0]
    assert pair.generate([question], MAX_TOKENS)[0].token_ids == expected
    again = pair.generate([question], MAX_TOKENS)[0]
    assert again.token_ids == expected
    assert again.num_external_tokens == 0
    pair.settle()


def test_many_requests_at_once(open_pair: Any, undivided: Any) -> None:
    pair = open_pair(PREFILL, DECODE)
    questions = [prompt(length, seed=length) for length in range(5, 65, 5)]
    answers = pair.generate(questions, MAX_TOKENS)
    assert [answer.token_ids for answer in answers] == undivided(questions, MAX_TOKENS)
    pair.settle()


def test_a_seeded_draw_continues_where_the_prefill_side_stopped(
    open_pair: Any, model_folder: Any
) -> None:
    pair = open_pair(PREFILL, DECODE)
    sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=7, ignore_eos=True)
    pair.prefill.add_request("whole", prompt(20), sampling)
    whole = pair.finish(["whole"])[0].token_ids
    pair.prefill.add_request(
        "first",
        prompt(20),
        SamplingParams(max_tokens=1, temperature=1.0, seed=7, ignore_eos=True),
        kv_transfer_params={"do_remote_decode": True},
    )
    first = pair.finish(["first"])[0]
    pair.decode.add_request(
        "rest",
        [*prompt(20), *first.token_ids],
        SamplingParams(max_tokens=7, temperature=1.0, seed=7, ignore_eos=True, seed_offset=1),
        kv_transfer_params=first.kv_transfer_params,
    )
    assert first.token_ids + pair.finish(["rest"])[0].token_ids == whole
    pair.settle()


# ---- aborts -----------------------------------------------------------------------------------


def abort_when(pair: Any, name: str, ready: Callable[[], bool]) -> None:
    pair.run(ready)
    assert pair.decode.abort(name)
    assert pair.finish([name])[0].finish_reason == "abort"


@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_an_abort_gives_every_block_back(open_pair: Any, undivided: Any, moment: str) -> None:
    pair = open_pair(PREFILL, DECODE, lease_duration_s=600.0)
    first = pair.prefilled([prompt(60)])[0]
    name = pair.submit(first, prompt(60), MAX_TOKENS)
    if moment == "before":
        abort_when(pair, name, lambda: True)
    elif moment == "during":
        abort_when(pair, name, lambda: pair.decode.stats().scheduler.loading == 1)
    else:
        abort_when(pair, name, lambda: pair.decode.stats().scheduler.running == 1)
    pair.settle()
    questions = [prompt(60)]  # the same one: nothing half-loaded may be found in the prefix cache
    answers = pair.generate(questions, MAX_TOKENS)
    assert [answer.token_ids for answer in answers] == undivided(questions, MAX_TOKENS)
    pair.settle()


def test_a_request_aborted_on_the_prefill_side_is_not_lent_out(open_pair: Any) -> None:
    pair = open_pair(PREFILL, DECODE)
    pair.prefill.add_request(
        "r",
        prompt(60),
        SamplingParams(max_tokens=50, ignore_eos=True),
        kv_transfer_params={"do_remote_decode": True},
    )
    pair.run(lambda: "r" in pair.done and len(pair.done["r"].token_ids) > 2)
    pair.prefill.abort("r")
    assert pair.finish(["r"])[0].kv_transfer_params is None
    pair.settle()


# ---- loads that fail --------------------------------------------------------------------------


@pytest.fixture
def end_leases(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Ends every lease at will."""
    tables: list[LeaseTable] = []
    open_table = LeaseTable.from_options

    def opened(*args: Any) -> LeaseTable:
        tables.append(open_table(*args))
        return tables[-1]

    def end() -> None:
        for table in tables:
            table.revoke([lease.lease_id for lease in table.snapshot()])

    monkeypatch.setattr(LeaseTable, "from_options", opened)
    return end


@pytest.mark.parametrize("moment", ["before the load", "during the load"])
def test_recompute_gives_the_right_tokens_without_the_lease(
    open_pair: Any, undivided: Any, end_leases: Callable[[], None], moment: str
) -> None:
    pair = open_pair(PREFILL, DECODE, kv_load_failure_policy="recompute")
    questions = [prompt(60)]
    first = pair.prefilled(questions)[0]
    if moment == "before the load":
        end_leases()
    name = pair.submit(first, questions[0], MAX_TOKENS)
    if moment == "during the load":
        pair.run(lambda: pair.decode.stats().scheduler.loading == 1)
        end_leases()
    answer = pair.finish([name])[0]
    assert answer.finish_reason == "length"
    assert first.token_ids + answer.token_ids == undivided(questions, MAX_TOKENS)[0]
    pair.settle()


def test_fail_ends_the_request_with_an_error_that_names_the_cause(
    open_pair: Any, end_leases: Callable[[], None]
) -> None:
    pair = open_pair(PREFILL, DECODE)
    first = pair.prefilled([prompt(60)])[0]
    end_leases()
    answer = pair.finish([pair.submit(first, prompt(60), MAX_TOKENS)])[0]
    assert answer.finish_reason == "error"
    assert answer.token_ids == []
    assert "lease" in answer.error
    pair.settle()


def test_a_forged_ticket_is_refused_at_once(open_pair: Any) -> None:
    pair = open_pair(PREFILL, DECODE, lease_duration_s=1.0)
    first = pair.prefilled([prompt(20)])[0]
    head, dot, signature = first.kv_transfer_params["ticket"].partition(".")
    first.kv_transfer_params["ticket"] = head + dot + signature[::-1]
    with pytest.raises(TicketError):
        pair.submit(first, prompt(20), MAX_TOKENS)
    pair.settle()


def test_a_decode_engine_with_too_few_blocks_waits_and_serves_all(
    open_pair: Any, undivided: Any
) -> None:
    pair = open_pair(PREFILL, {**DECODE, "num_blocks": 14})
    questions = [prompt(60, seed=seed) for seed in range(5)]
    answers = pair.generate(questions, MAX_TOKENS)
    assert [answer.token_ids for answer in answers] == undivided(questions, MAX_TOKENS)


def test_a_planner_that_reads_a_head_from_the_wrong_rank_is_refused_by_the_weights(
    open_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = split_heads

    def turned(heads: range, tp: int, num_kv_heads: int) -> Iterator[tuple[range, range]]:
        for some, ranks in right(heads, tp, num_kv_heads):
            yield some, range(tp - ranks.stop, tp - ranks.start)

    pair = open_pair({**PREFILL, "tp": 3}, DECODE, lease_duration_s=1.0)
    monkeypatch.setattr(geometry, "split_heads", turned)
    answer = pair.generate([prompt(60)], MAX_TOKENS)[0]
    assert answer.finish_reason == "error"
    assert "KV heads: rank 2 of engine 'p' and rank 0 of engine 'd' both have a head 0" in (
        answer.error
    )
    pair.settle()
