"""Engines of several ranks: each rank is late in turn, and what each may do before it is."""

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed; `make test-sglang` has it")

import torch
from sglang.srt.disaggregation.base.conn import KVPoll

from kvferry.integrations import ranks as messages
from kvferry.integrations.rooms import RoomState
from tests.integrations.sglang.conftest import until
from tests.integrations.sglang.engines import (
    OVER,
    TOKENS,
    Prompt,
    assert_nothing_changes_after_an_abort,
    engines,
    open_leases,
    turns,
    why,
)

__all__ = ["engines"]

SHAPES = {
    "1 to 2": ((1, 8), (2, 12)),
    "2 to 1": ((2, 8), (1, 12)),
    "2 to 2": ((2, 12), (2, 8)),
}


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_any_two_numbers_of_ranks(engines, shapes, heads):
    prompt = Prompt(*engines(*shapes, heads=heads))
    prompt.begin()
    prompt.send(16)
    prompt.send(prompt.length)
    assert prompt.settle() == (KVPoll.Success, KVPoll.Success)
    assert prompt.has_moved()
    prompt.clear()
    assert open_leases(prompt.prefill) == 0


@pytest.mark.parametrize("ranks", [(2, 3), (3, 2)], ids=str)
def test_numbers_of_ranks_of_which_none_divides_the_other(engines, ranks):
    prompt = Prompt(*engines((ranks[0], 8), (ranks[1], 8), heads=6))
    prompt.begin()
    prompt.send(prompt.length)
    assert prompt.settle() == (KVPoll.Success, KVPoll.Success)
    assert prompt.has_moved()


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_of_the_prefill_server_delays_and_spoils_nothing(engines, late):
    prompt = Prompt(*engines((2, 8), (2, 12)))
    prompt.begin()
    order = prompt.prefill.order(late)
    for end in (16, 40, prompt.length):
        prompt.send(end, order[:1])
        for _ in turns():
            assert prompt.receivers_poll() not in OVER
            assert prompt.senders[order[0]].poll() != KVPoll.Failed
        prompt.send(end, order[1:])
    assert prompt.settle((order, None)) == (KVPoll.Success, KVPoll.Success)
    assert prompt.has_moved()


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_of_the_decode_server_is_not_written_to_before_it_has_pages(engines, late):
    prompt = Prompt(*engines((2, 8), (2, 12)))
    order = prompt.decode.order(late)
    prompt.find()
    before = [each.clone() for each in prompt.decode.ranks[late].cells(prompt.their_pages[late])]
    prompt.allocate(order[:1])
    if late == 1:
        prompt.settle_asked()
        prompt.send(prompt.length)
        for _ in turns():
            prompt.senders_poll()
            for receiver in prompt.receivers:
                assert receiver.poll() not in OVER
    after = prompt.decode.ranks[late].cells(prompt.their_pages[late])
    assert all(map(torch.equal, before, after))
    prompt.allocate(order[1:])
    if late == 0:
        prompt.settle_asked()
        prompt.send(prompt.length)
    assert prompt.settle((None, order)) == (KVPoll.Success, KVPoll.Success)
    assert prompt.has_moved()


def test_a_chunk_can_be_read_as_soon_as_the_first_rank_has_written_it(engines):
    prompt = Prompt(*engines((2, 8), (2, 12)))
    prompt.begin()
    prompt.send(16, [0])
    leases = prompt.prefill.first.rooms.scheduler.lender.leases
    assert list(leases.readable([leases.snapshot()[0].lease_id]).values()) == [16]


def test_a_rank_keeps_the_load_of_one_prompt_until_it_has_pages_while_it_reads_another(engines):
    prefill, decode = engines((1, 8), (2, 12))
    prompts = [Prompt(prefill, decode, number=n, first_page=16 * n) for n in (1, 2)]
    for prompt in prompts:
        prompt.find()
    prompts[0].allocate()
    prompts[1].allocate([0])
    for prompt in prompts:
        prompt.settle_asked()
        prompt.send(prompt.length)
    for _ in turns():
        prompts[0].receivers_poll()
        prompts[1].receivers[0].poll()
        prompts[1].senders_poll()
    prompts[1].allocate([1])
    assert prompts[1].settle() == (KVPoll.Success, KVPoll.Success)
    assert prompts[1].has_moved()


@pytest.mark.parametrize("late", [0, 1])
def test_no_rank_takes_a_prompt_before_the_report_of_a_late_rank(engines, late):
    prompt = Prompt(*engines((1, 8), (2, 12)))
    prompt.begin()
    prompt.send(prompt.length)
    early = 1 - late
    for _ in turns():
        assert prompt.receivers[early].poll() not in OVER
        assert prompt.senders_poll() not in OVER
        assert prompt.decode.ranks[early].rows.bootstrap_room[2, 0] == 0
    assert prompt.settle() == (KVPoll.Success, KVPoll.Success)
    assert prompt.has_moved()


STEPS = {"bootstrapping": None, "asked": 0, "one chunk": 16, "two chunks": 40}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("sent", STEPS.values(), ids=STEPS)
def test_a_rank_that_aborts_first_frees_pages_under_no_open_lease(engines, sent, first):
    prompt = Prompt(*engines((2, 8), (2, 12)))
    other = Prompt(prompt.prefill, prompt.decode, number=8, first_page=20)
    other.begin()
    prompt.find()
    if sent is not None:
        prompt.allocate()
        until(lambda: prompt.senders_poll() == KVPoll.WaitingForInput, "the ask")
        for sender in prompt.senders:
            sender.init(len(prompt.pages), 5)
        if sent:
            prompt.send(sent)
            assert open_leases(prompt.prefill) == 1
            prompt.until_read()
    prompt.senders[first].abort()
    assert open_leases(prompt.prefill) == 0  # so no read of it counts that ends later
    for _ in turns():
        assert prompt.receivers_poll() != KVPoll.Success
    prompt.senders[1 - first].abort()
    assert prompt.senders_poll() == KVPoll.Failed
    for sender in prompt.senders:
        why(sender)
    if sent is not None:
        until(lambda: prompt.receivers_poll() == KVPoll.Failed, "the load to fail")
    other.send(other.length)  # the other request goes on
    assert other.settle() == (KVPoll.Success, KVPoll.Success)
    assert other.has_moved()
    until(lambda: open_leases(prompt.prefill) == 0, "the leases to end")


@pytest.mark.parametrize("late", [0, 1])
def test_a_chunk_of_a_late_rank_revives_no_prompt_that_another_rank_has_freed(engines, late):
    prompt = Prompt(*engines((2, 8), (1, 12)))
    prompt.begin()
    prompt.send(16, [1 - late])
    prompt.senders[1 - late].abort()
    prompt.send(16, [late])  # the late rank has not seen the abort yet
    if late == 0:
        assert open_leases(prompt.prefill) == 0
    prompt.senders[late].abort()
    assert open_leases(prompt.prefill) == 0
    assert prompt.senders_poll() == KVPoll.Failed
    until(lambda: prompt.receivers_poll() == KVPoll.Failed, "the load to fail")


@pytest.mark.parametrize("first", [0, 1])
def test_an_abort_of_a_whole_prompt_waits_for_its_readers(engines, first):
    prompt = Prompt(*engines((2, 8), (2, 12)))
    prompt.begin()
    prompt.send(16)
    prompt.until_read()
    prompt.send(prompt.length)
    loan = prompt.senders[0].loan
    until(lambda: prompt.senders_poll() and loan.state is RoomState.LENT, "the prompt to be lent")
    for rank in (first, 1 - first):
        prompt.senders[rank].abort()
    assert prompt.settle() == (KVPoll.Failed, KVPoll.Success)  # the sender fails with its client
    assert prompt.has_moved()
    prompt.clear()
    assert open_leases(prompt.prefill) == 0


@pytest.mark.parametrize("first", [0, 1])
def test_a_failure_on_one_rank_ends_the_lease_before_any_rank_frees_pages(engines, first):
    """SGLang frees a prompt on all ranks when one of them says that it has failed."""
    prompt = Prompt(*engines((2, 8), (2, 12)))
    prompt.begin()
    prompt.send(prompt.length)
    loan = prompt.senders[0].loan
    until(lambda: prompt.senders_poll() and loan.state is RoomState.LENT, "the prompt to be lent")
    leases = prompt.prefill.first.rooms.scheduler.lender.leases
    until(lambda: prompt.receivers_poll([0]) and leases.snapshot()[0].target, "the lease's holder")
    why(prompt.senders[first])
    assert open_leases(prompt.prefill) == 0
    prompt.overwrite(first)
    why(prompt.senders[1 - first])
    until(lambda: prompt.receivers_poll() == KVPoll.Failed, "the load to fail")


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("sent", [(), (16,), (16, len(TOKENS))], ids=str)
def test_a_decode_server_that_aborts_keeps_the_pages_of_every_rank(engines, sent, first):
    prompt = Prompt(*engines((2, 8), (2, 12)))
    prompt.begin()
    for end in sent:
        prompt.send(end)
        prompt.until_read()
    for rank in (first, 1 - first):
        prompt.receivers[rank].abort()
    until(lambda: prompt.receivers_poll() in OVER, "the reads to end")
    assert_nothing_changes_after_an_abort(prompt, is_whole=sent == (16, prompt.length))


@pytest.mark.parametrize("first", [0, 1])
def test_a_decode_server_that_aborts_before_it_has_pages_asks_for_nothing(engines, first):
    prompt = Prompt(*engines((2, 8), (2, 12)))
    prompt.find()
    prompt.receivers[first].abort()
    assert prompt.receivers_poll() == KVPoll.Failed
    prompt.receivers[1 - first].abort()
    assert {"Aborted" in why(receiver) for receiver in prompt.receivers} == {True}
    assert prompt.senders_poll() == KVPoll.Bootstrapping


def test_pages_that_differ_between_the_ranks_of_a_prefill_server_are_lent_to_nobody(engines):
    prompt = Prompt(*engines((2, 8), (1, 12)))
    prompt.begin()
    prompt.send(prompt.length, [0])
    prompt.pages = [page + 1 for page in prompt.pages]
    prompt.send(prompt.length, [1])
    assert prompt.settle() == (KVPoll.Failed, KVPoll.Failed)
    assert "ranks [1] keep the prompt in other blocks than rank 0" in why(prompt.senders[0])


def test_a_rank_ends_if_the_first_rank_does_not_answer(engines, monkeypatch, caplog):
    monkeypatch.setattr(messages, "LET_GO_TIMEOUT_S", 0.2)
    prompt = Prompt(*engines((2, 8), (1, 12)))
    prompt.begin()
    prompt.send(16)
    prompt.prefill.first.rooms.others.close()
    with pytest.raises(SystemExit):
        prompt.senders[1].abort()
    assert "the first rank has not ended the lease of request p7-7" in caplog.text


def test_many_prompts_at_once(engines):
    prefill, decode = engines((2, 8), (2, 12))
    prompts = [Prompt(prefill, decode, number=n, tokens=[n, *TOKENS[:11]]) for n in range(1, 9)]
    for number, prompt in enumerate(prompts):
        prompt.pages = [3 + 2 * number, 4 + 2 * number]
        prompt.their_pages = [[5 + number], [20 + number]]
        prompt.find()
    for prompt in prompts:
        prompt.allocate()
    for prompt in prompts:
        until(lambda prompt=prompt: prompt.senders_poll() == KVPoll.WaitingForInput, "the ask")
    prompts[0].compute()
    for prompt in prompts:
        for sender in prompt.senders:
            sender.init(len(prompt.pages), 5)
        prompt.send(prompt.length)
    for prompt in prompts:
        assert prompt.settle() == (KVPoll.Success, KVPoll.Success)
    for prompt in prompts:
        for rank, pages in zip(decode.ranks, prompt.their_pages, strict=True):
            for number, cells in enumerate(rank.cells(pages)):
                source = prefill.ranks[rank.first_head // 2].cells(prompt.pages)[number]
                assert torch.equal(cells[: prompt.length], source[: prompt.length])
        prompt.clear()
    assert open_leases(prefill) == 0
