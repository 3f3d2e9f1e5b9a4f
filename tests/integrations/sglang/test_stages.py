"""Engines of several pipeline stages: SGLang asks each stage, and takes a room for over when all
stages say so.
"""

import contextlib
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed; `make test-sglang` has it")

import torch
from sglang.srt.disaggregation.base.conn import KVPoll

from kvferry.errors import KVFerryError
from kvferry.integrations.rooms import RoomState
from kvferry.integrations.sglang.rows import Rows
from tests.integrations.sglang.conftest import until
from tests.integrations.sglang.engines import (
    OVER,
    Prompt,
    assert_nothing_changes_after_an_abort,
    engines,
    open_leases,
    turns,
    why,
)

__all__ = ["engines"]

ONE_TO_TWO = ((1, 8), (1, 12, (1, 2)))
TWO_TO_ONE = ((1, 8, (2, 1)), (1, 12))
TWO_TO_TWO = ((1, 12, (1, 2)), (1, 8, (2, 1)))
SHAPES = {
    "PP 1 to 2": ONE_TO_TWO,
    "PP 2 to 1": TWO_TO_ONE,
    "PP 2 to 2, other layers": TWO_TO_TWO,
    "PP 3 to 2": ((1, 8, (1, 1, 1)), (1, 16, (1, 2))),
    "TP 2 and PP 2 to 1": ((2, 8, (1, 2)), (1, 12)),
    "1 to TP 2 and PP 2": ((1, 8), (2, 12, (2, 1))),
    "TP 2 and PP 2 to PP 3": ((2, 8, (2, 1)), (1, 12, (1, 1, 1))),
}


def answers(rooms, engine):
    """The answer of each stage: the least of the answers of its ranks."""
    found = [room.poll() for room in rooms]
    return [min(found[first : first + engine.tp]) for first in range(0, len(found), engine.tp)]


def settled(prompt):
    """Polls until all stages of both servers have a last answer; the answers."""
    found = {}

    def over():
        found["p"] = answers(prompt.senders, prompt.prefill)
        found["d"] = answers(prompt.receivers, prompt.decode)
        return all(answer in OVER for answer in (*found["p"], *found["d"]))

    until(over, "all stages to end")
    return found["p"], found["d"]


def all_moved(prompt):
    counted, loaded = settled(prompt)
    return {*counted, *loaded} == {KVPoll.Success} and prompt.has_moved()


def readable(prompt):
    """Number of tokens that a target may read."""
    leases = prompt.prefill.first.rooms.scheduler.lender.leases
    prompt.prefill.first.rooms.step()
    found = [each.lease_id for each in leases.snapshot() if each.request_id.startswith("p7-")]
    return list(leases.readable(found).values())


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_any_two_numbers_of_stages(engines, shapes):
    prompt = Prompt(*engines(*shapes))
    prompt.begin()
    for end in (16, 40, prompt.length):
        if end % prompt.prefill.page_size == 0 or end == prompt.length:
            prompt.send(end)
    assert all_moved(prompt)
    prompt.clear()
    assert open_leases(prompt.prefill) == 0


def test_only_the_first_stage_is_asked_before_a_prompt_is_computed(engines):
    """SGLang asks the first stage alone, and tells the others its answer."""
    prompt = Prompt(*engines(*TWO_TO_TWO))
    prompt.find()
    assert prompt.senders[0].poll_pp_consensus() == KVPoll.Bootstrapping
    prompt.allocate()
    until(
        lambda: prompt.senders[0].poll_pp_consensus() == KVPoll.WaitingForInput,
        "the ask",
    )


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_chunk_can_be_read_once_every_stage_has_written_it(engines, late):
    prompt = Prompt(*engines((1, 8, (1, 1, 1)), (1, 12)))
    prompt.begin()
    order = prompt.prefill.order(late)
    prompt.send(16, order[:-1])
    assert readable(prompt) == ([] if late == 0 else [0])
    prompt.send(16, order[-1:])
    if late:  # the lease begins with the first rank, and the word of a stage before that is lost
        until(lambda: readable(prompt) == [16], "the word of every stage")
    prompt.send(40, [0])
    for _ in turns():
        assert readable(prompt)[0] <= 16
    prompt.send(40, [2, 1])
    until(lambda: readable(prompt) == [40], "the word of every stage")
    prompt.send(prompt.length)
    assert all_moved(prompt)


def test_a_chunk_that_tp_ranks_of_a_stage_have_not_told_of_can_be_read(engines):
    """Of a stage the first rank's word counts; see the module of the rooms."""
    prompt = Prompt(*engines((2, 8, (1, 2)), (1, 12)))
    prompt.begin()
    prompt.send(16, [0, 2])
    until(lambda: readable(prompt) == [16], "the word of every stage")


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_stage_of_the_prefill_server_delays_and_spoils_nothing(engines, late):
    prompt = Prompt(*engines(*TWO_TO_TWO))
    prompt.begin()
    for end in (24, 48, prompt.length):
        prompt.send(end, [1 - late])
        for _ in turns():
            assert not any(answer in OVER for answer in answers(prompt.receivers, prompt.decode))
            assert answers(prompt.senders, prompt.prefill)[0] not in OVER
        prompt.send(end, [late])
    assert all_moved(prompt)


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_stage_of_the_decode_server_is_not_written_to_before_it_has_pages(engines, late):
    prompt = Prompt(*engines(*ONE_TO_TWO))
    prompt.find()
    before = [each.clone() for each in prompt.decode.ranks[late].cells(prompt.their_pages[late])]
    prompt.allocate([1 - late])
    if late == 1:
        prompt.settle_asked()
        prompt.send(prompt.length)
    for _ in turns():
        answers(prompt.senders, prompt.prefill)
        assert prompt.receivers[1 - late].poll() not in OVER
    after = prompt.decode.ranks[late].cells(prompt.their_pages[late])
    assert all(map(torch.equal, before, after))
    prompt.allocate([late])
    if late == 0:
        prompt.settle_asked()
        prompt.send(prompt.length)
    assert all_moved(prompt)


STEPS = {"bootstrapping": None, "asked": 0, "one chunk": 24, "two chunks": 48}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("sent", STEPS.values(), ids=STEPS)
def test_a_stage_that_aborts_first_frees_pages_under_no_open_lease(engines, sent, first):
    prompt = Prompt(*engines(*TWO_TO_TWO))
    other = Prompt(prompt.prefill, prompt.decode, number=8, first_page=20)
    other.begin()
    prompt.find()
    if sent is not None:
        prompt.allocate()
        until(lambda: prompt.senders_poll() == KVPoll.WaitingForInput, "the ask")
        for sender in prompt.senders:
            sender.init(len(prompt.pages), 5)
        for end in range(24, sent + 1, 24):
            prompt.send(end)
    prompt.senders[first].abort()
    assert open_leases(prompt.prefill) == 0  # so no read of it counts that ends later
    prompt.senders[1 - first].abort()
    until(lambda: prompt.senders[0].poll_pp_consensus() == KVPoll.Failed, "the first stage")
    for sender in prompt.senders:
        why(sender)
    if sent is not None:
        until(
            lambda: answers(prompt.receivers, prompt.decode) == [KVPoll.Failed] * 2,
            "every stage to hear that the load has failed",
        )
    other.send(other.length)  # the other request goes on
    assert all_moved(other)


def test_a_stage_that_gives_a_prompt_up_alone_fails_it_on_all(engines):
    prompt = Prompt(*engines(*TWO_TO_ONE))
    prompt.begin()
    prompt.send(16)
    prompt.senders[1].abort()
    until(lambda: prompt.senders[0].poll() == KVPoll.Failed, "the first stage to hear of it")
    assert "rank 1 has given the prompt up" in why(prompt.senders[0])
    until(lambda: prompt.receivers_poll() == KVPoll.Failed, "the load to fail")


@pytest.mark.parametrize("first", [0, 1])
def test_an_abort_of_a_whole_prompt_waits_for_its_readers(engines, first):
    prompt = Prompt(*engines(*TWO_TO_TWO))
    prompt.begin()
    prompt.send(24)
    prompt.until_read()
    prompt.send(prompt.length)
    loan = prompt.senders[0].loan
    until(lambda: prompt.senders_poll() and loan.state is RoomState.LENT, "the prompt to be lent")
    for rank in (first, 1 - first):
        prompt.senders[rank].abort()
    counted, loaded = settled(prompt)
    assert counted[0] == KVPoll.Failed  # with its client, once the readers are done
    assert loaded == [KVPoll.Success] * 2
    assert prompt.has_moved()
    prompt.clear()
    assert open_leases(prompt.prefill) == 0


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("sent", [(), (24,), (24, 50)], ids=str)
def test_a_decode_server_that_aborts_ends_alike_on_all_stages(engines, sent, first):
    prompt = Prompt(*engines(*TWO_TO_TWO))
    prompt.begin()
    for end in sent:
        prompt.send(end)
        prompt.until_read()
    for rank in (first, 1 - first):
        prompt.receivers[rank].abort()
    until(
        lambda: answers(prompt.receivers, prompt.decode) == [KVPoll.Failed] * 2,
        "every stage to have failed",
    )
    assert_nothing_changes_after_an_abort(prompt, is_whole=sent == (24, 50))


@pytest.mark.parametrize("first", [0, 1])
def test_an_abort_after_the_last_answer_of_a_stage_changes_no_answer(engines, first):
    """Between its answer and SGLang's end of the load lie a turn of every stage, and aborts."""
    prompt = Prompt(*engines(*ONE_TO_TWO))
    prompt.begin()
    prompt.send(prompt.length)
    until(lambda: prompt.receivers_poll() == KVPoll.Success, "the load")
    for rank in (first, 1 - first):
        prompt.receivers[rank].abort()
    assert answers(prompt.receivers, prompt.decode) == [KVPoll.Success] * 2


def test_a_load_that_the_first_rank_cannot_begin_fails_on_every_stage(engines, monkeypatch):
    prompt = Prompt(*engines(*ONE_TO_TWO))
    prompt.find()

    def refused(_):
        raise KVFerryError("no such transfer")

    monkeypatch.setattr(prompt.decode.first.rooms.scheduler, "on_new_request", refused)
    prompt.allocate()
    until(
        lambda: answers(prompt.receivers, prompt.decode) == [KVPoll.Failed] * 2,
        "every stage to have failed",
    )
    assert "no such transfer" in why(prompt.receivers[0])
    assert "from another rank" in why(prompt.receivers[1])


def test_a_row_of_another_size_fails_on_every_stage(engines):
    prompt = Prompt(*engines(*ONE_TO_TWO))
    for rank in prompt.decode.ranks:
        rank.manager.rows = Rows([0], [8])
    prompt.begin()
    prompt.send(prompt.length)
    assert settled(prompt)[1] == [KVPoll.Failed] * 2
    assert "metadata buffers: rows of prefill have" in why(prompt.receivers[0])


def test_the_row_of_the_first_stage_is_handed_over(engines):
    """SGLang brings the sampled token to all stages, so all have the row; one is enough."""
    prompt = Prompt(*engines(*TWO_TO_TWO))
    prompt.begin()
    prompt.send(prompt.length)
    prompt.prefill.ranks[1].rows.output_ids[5, 0] = 0
    assert all_moved(prompt)


def test_pages_that_differ_between_the_stages_of_a_prefill_server_are_lent_to_nobody(engines):
    prompt = Prompt(*engines(*TWO_TO_TWO))
    prompt.begin()
    prompt.send(prompt.length, [0])
    prompt.pages = [page + 1 for page in prompt.pages]
    prompt.send(prompt.length, [1])
    counted, loaded = settled(prompt)
    assert counted[0] == KVPoll.Failed
    assert loaded == [KVPoll.Failed] * 2
    assert "ranks [1] keep the prompt in other blocks than rank 0" in why(prompt.senders[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_the_word_of_a_stage_comes_after_its_stream_has_computed(engines, rank, monkeypatch):
    """SGLang tells of a chunk while a stream of its own may still compute this chunk."""
    prompt = Prompt(*engines(*TWO_TO_ONE))
    prompt.begin()
    rooms, scheduler = (
        prompt.prefill.ranks[rank].manager.rooms,
        prompt.prefill.ranks[rank].scheduler,
    )
    told = []

    @contextlib.contextmanager
    def stream():
        told.append("enter")
        yield
        told.append("leave")

    wrote = rooms.wrote
    monkeypatch.setattr(rooms, "wrote", lambda *args: told.append("wrote") or wrote(*args))
    scheduler.forward_stream_ctx = stream()
    prompt.send(16, [rank])
    assert told == ["enter", "wrote", "leave"]


@pytest.mark.parametrize(("backend", "told"), [("kvferry", ["done", "failed"]), ("fake", ["done"])])
def test_the_next_stage_is_told_of_failed_loads_too(activated, backend, told):
    """SGLang tells only of those that are done."""
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin

    queue = [SimpleNamespace(req=SimpleNamespace(rid=rid)) for rid in ("done", "failed", "other")]

    def pop_transferred(rids):
        found = [each for each in transfers.queue if each.req.rid in rids]
        transfers.queue = [each for each in transfers.queue if each not in found]
        return [each.req for each in found if each.req.rid == "done"]

    transfers = SimpleNamespace(
        queue=queue, pop_transferred=pop_transferred, resolve_deferred_releases=lambda: None
    )
    scheduler = SimpleNamespace(
        disagg_decode_prealloc_queue=SimpleNamespace(transfer_backend=TransferBackend(backend)),
        disagg_decode_transfer_queue=transfers,
        enable_hisparse=False,
        waiting_queue=[],
    )
    process = SchedulerPPMixin.process_decode_transfer_queue
    assert process(scheduler, ["done", "failed"]) == told
    assert [req.rid for req in scheduler.waiting_queue] == ["done"]
    assert not process(scheduler, [])
    assert process(scheduler, None) is None
