"""Senders and receivers of SGLang's kind, over real pools of two ranks: what arrives, and when."""

import math

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed; `make test-sglang` has it")

import json
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError

from benchmarks.vllm_servers.ports import free_port
from kvferry.errors import ConfigError
from kvferry.integrations.first_token import FirstToken
from tests.integrations.sglang.conftest import WINDOW, Rank, request, until

TOKENS = list(range(100, 150))
SLOTS = (3, 5)
"""Slots of the states of a prompt on both sides."""
NOTE = FirstToken(token_id=4711).note


class Prompt:
    """A prompt of a pair: computed in chunks on one side, loaded on the other."""

    def __init__(
        self, pair, number=7, tokens=TOKENS, theirs=None, first_page=3, at="", mine=(), **fields
    ):
        self.prefill, self.decode = pair
        self.length, self.number = len(tokens), number
        self.sender = self.prefill.room(number, request(f"p{number}", tokens, **dict(mine)))
        other = tokens if theirs is None else theirs
        self.receiver = self.decode.room(number, request(f"d{number}", other, **fields), at)
        self.pages = [
            list(range(first_page, first_page + -(-self.length // rank.page_size))) for rank in pair
        ]
        self.pages[1].reverse()  # the two block tables have nothing in common

    def allocate(self, prefix=0):
        """The decode server has pages; ``prefix`` tokens of them are there."""
        find_prefill(self.decode, self.receiver)
        self.receiver.init(0)
        assert self.receiver.poll() == KVPoll.WaitingForInput
        pages = self.pages[1][prefix // self.decode.page_size :]
        self.receiver.send_metadata(pages, 2, self.states(1), prefix)

    def begin(self):
        """The prefill server is asked, and begins."""
        until(lambda: self.sender.poll() == KVPoll.WaitingForInput, "the ask")
        self.sender.init(len(self.pages[0]), 5)
        for pool in self.prefill.pools:
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer.copy_(torch.rand(buffer.shape))

    def send(self, end):
        """Sends the tokens up to ``end``: whole pages, or all that are left."""
        size = self.prefill.page_size
        is_last = end == self.length
        done = self.sender.curr_idx
        pages = self.pages[0][done : None if is_last else end // size]
        if is_last:
            self.row()
        tokens = end - done * size if is_last else len(pages) * size
        with self.prefill.active():
            self.sender.send(pages, self.states(0) if is_last else None, tokens)

    def states(self, side):
        """The last pages of the pool with a window, as SGLang counts them, or the slot of the
        states of recurrent layers; none without either.
        """
        rank = (self.prefill, self.decode)[side]
        if len(rank.pools) == 1:
            return rank.slot(SLOTS[side])
        first = max(0, self.length - WINDOW) // rank.page_size
        return [list(range(40, 40 + -(-self.length // rank.page_size) - first))]

    def row(self):
        rows = self.prefill.rows
        rows.output_ids[5, 0] = 4711
        rows.bootstrap_room[5, 0] = self.number

    def settle(self):
        """Polls both rooms until they have ended; returns how."""
        ends = {}

        def ended():
            for name, room in (("sender", self.sender), ("receiver", self.receiver)):
                ends[name] = room.poll()
            return all(end in (KVPoll.Success, KVPoll.Failed) for end in ends.values())

        until(ended, "both rooms to end")
        return ends["sender"], ends["receiver"]

    def moved(self):
        """Whether every cell of the prompt is on the decode side, and its row."""
        source, target = self.prefill.cells(self.pages[0]), self.decode.cells(self.pages[1])
        same = all(
            torch.equal(a[: self.length], b[: self.length])
            for a, b in zip(source, target, strict=True)
        )
        rows = self.decode.rows
        return same and rows.output_ids[2, 0] == 4711 and rows.bootstrap_room[2, 0] == self.number

    def clear(self):
        self.sender.clear()
        self.receiver.clear()


class Unlike(Prompt):
    """A prompt whose prefill server is of another kind: it has no bootstrap server, and writes its
    first token into the note."""

    def __init__(self, pair, note=NOTE, **more):
        prefill, _ = pair
        address = prefill.manager.rooms.scheduler.address
        super().__init__(pair, at=f"kvferry://{address}", **more)
        prefill.manager.rows = SimpleNamespace(read=lambda _: note)


def find_prefill(rank, room):
    known = rank.manager.try_ensure_parallel_info
    until(lambda: known(room.bootstrap_addr), "the bootstrap server")


def why(room):
    with pytest.raises(KVTransferError) as caught:
        room.failure_exception()
    return str(caught.value)


@pytest.mark.parametrize("pages", [(8, 8), (8, 12), (1, 16), (16, 1), (24, 16)], ids=str)
def test_pages_of_any_two_sizes(pair, pages):
    prompt = Prompt(pair(*pages))
    prompt.allocate()
    prompt.begin()
    prompt.send(prompt.length)
    assert prompt.settle() == (KVPoll.Success, KVPoll.Success)
    assert prompt.moved()
    prompt.clear()


def test_a_prompt_is_read_chunk_by_chunk_and_counts_when_it_is_whole(pair):
    prompt = Prompt(pair(8, 12))
    prompt.allocate()
    prompt.begin()
    for end in (16, 40):
        prompt.send(end)
        until(lambda: prompt.receiver.poll() == KVPoll.Transferring, "the read to begin")
        assert prompt.sender.poll() == KVPoll.WaitingForInput
        assert prompt.decode.rows.bootstrap_room[2, 0] == 0
    prompt.send(prompt.length)
    assert prompt.settle() == (KVPoll.Success, KVPoll.Success)
    assert prompt.moved()
    prompt.clear()


def test_only_what_the_decode_server_lacks_moves(pair):
    prompt = Prompt(pair(8, 12))
    before = [each.clone() for each in prompt.decode.cells(prompt.pages[1])]
    prompt.allocate(prefix=24)
    prompt.begin()
    prompt.send(prompt.length)
    assert prompt.settle() == (KVPoll.Success, KVPoll.Success)
    after, source = prompt.decode.cells(prompt.pages[1]), prompt.prefill.cells(prompt.pages[0])
    for old, new, right in zip(before, after, source, strict=True):
        assert torch.equal(new[:24], old[:24])
        assert torch.equal(new[24 : prompt.length], right[24 : prompt.length])


def test_a_prompt_that_is_all_there_needs_its_row_alone(pair):
    prompt = Prompt(pair(8, 8), tokens=TOKENS[:48])
    prompt.allocate(prefix=48)
    prompt.begin()
    prompt.send(48)
    assert prompt.settle() == (KVPoll.Success, KVPoll.Success)
    assert prompt.decode.rows.output_ids[2, 0] == 4711


def test_a_prefill_server_waits_until_the_decode_server_has_pages(pair):
    prompt = Prompt(pair(8, 8))
    for _ in range(20):
        assert prompt.sender.poll() == KVPoll.Bootstrapping
    prompt.allocate()
    until(lambda: prompt.sender.poll() == KVPoll.WaitingForInput, "the ask")


def test_another_prompt_with_the_same_room_is_refused(pair):
    prompt = Prompt(pair(8, 8), theirs=[*TOKENS[:-1], 1])
    prompt.allocate()
    prompt.begin()
    prompt.send(prompt.length)
    until(lambda: prompt.receiver.poll() == KVPoll.Failed, "the refusal")
    assert "begins with other tokens" in why(prompt.receiver)


@pytest.mark.parametrize(
    ("field_name", "changed"),
    [("weights_digest", {}), ("rope", {"rope_theta": 5.0}), ("config_digest", {"hidden_act": "x"})],
)
@pytest.mark.parametrize("kind", [Prompt, Unlike])
def test_another_checkpoint_is_refused_by_name(
    pair, model_folder, tmp_path, kind, field_name, changed
):
    config = json.loads((model_folder / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensor = torch.arange(8.0) + (field_name == "weights_digest")
    save_file({"weight": tensor}, tmp_path / "model.safetensors")
    prompt = kind(pair(8, 8, tmp_path))
    prompt.allocate()
    until(lambda: prompt.receiver.poll() == KVPoll.Failed, "the refusal")
    assert f"{field_name}: " in why(prompt.receiver)


def test_a_room_that_is_in_use_is_refused(pair):
    prefill, decode = pair(8, 8)
    first, second = (prefill.room(7, request(rid, TOKENS)) for rid in "ab")
    assert first.poll() == KVPoll.Bootstrapping
    assert second.poll() == KVPoll.Failed
    assert "room 7 is in use by another request" in why(second)
    assert first.poll() == KVPoll.Bootstrapping
    first.clear()
    assert prefill.room(7, request("c", TOKENS)).poll() == KVPoll.Bootstrapping
    assert decode.room(7, request("a", TOKENS)).poll() == KVPoll.Bootstrapping


@pytest.mark.parametrize("pages", [(8, 12), (16, 1)], ids=str)
def test_a_server_of_another_kind_gives_its_channel_and_its_first_token(pair, pages):
    prompt = Unlike(pair(*pages))
    prompt.decode.rows.cached_tokens[2] = 9  # of the row's last owner
    prompt.allocate()
    prompt.begin()
    prompt.send(prompt.length)
    assert prompt.settle() == (KVPoll.Success, KVPoll.Success)
    assert prompt.moved()
    assert prompt.decode.rows.cached_tokens[2].sum() == 0
    prompt.clear()


def test_a_note_without_a_first_token_is_refused(pair):
    prompt = Unlike(pair(8, 8), note=b"")
    prompt.allocate()
    prompt.begin()
    prompt.send(prompt.length)
    assert prompt.settle() == (KVPoll.Success, KVPoll.Failed)
    assert "note of a first token" in why(prompt.receiver)
    assert prompt.decode.rows.bootstrap_room[2, 0] == 0


@pytest.mark.parametrize(
    "field_name", ["return_logprob", "return_hidden_states", "return_sampling_mask"]
)
def test_more_than_a_first_token_is_not_to_be_had_from_another_kind(pair, field_name):
    prompt = Unlike(pair(8, 8), **{field_name: True})
    find_prefill(prompt.decode, prompt.receiver)
    prompt.receiver.init(0)
    assert prompt.receiver.poll() == KVPoll.Failed
    assert f"{field_name}: the request wants" in why(prompt.receiver)


@pytest.mark.parametrize("address", ["kvferry://", "kvferry://host", "kvferry://h:0"])
def test_a_channel_that_is_none_is_refused(pair, address):
    _, decode = pair(8, 8)
    receiver = decode.room(7, request("d", TOKENS), address)
    find_prefill(decode, receiver)
    receiver.init(0)
    assert receiver.poll() == KVPoll.Failed
    assert "bootstrap_host" in why(receiver)


@pytest.mark.parametrize("sent", [0, 16, 40])
def test_an_abort_while_a_prompt_is_computed_revokes_before_it_returns(pair, sent):
    prompt = Prompt(pair(8, 12))
    prompt.allocate()
    prompt.begin()
    if sent:
        prompt.send(sent)
        until(lambda: prompt.receiver.poll() == KVPoll.Transferring, "the read to begin")
    prompt.sender.abort()
    leases = prompt.prefill.manager.rooms.scheduler.lender.leases
    assert not [lease for lease in leases.snapshot() if lease.lease_id]
    assert prompt.sender.poll() == KVPoll.Failed
    for buffer in (*prompt.prefill.pool.k_buffer, *prompt.prefill.pool.v_buffer):
        buffer.fill_(0)  # SGLang gives the pages to another request
    until(lambda: prompt.receiver.poll() == KVPoll.Failed, "the load to fail")
    assert "ended (abort)" in why(prompt.receiver)
    assert "Aborted" in why(prompt.sender)


def test_a_decode_server_that_aborts_keeps_its_pages_until_its_reads_have_ended(pair):
    prompt = Prompt(pair(8, 12))
    prompt.allocate()
    prompt.begin()
    prompt.send(16)
    until(lambda: prompt.receiver.poll() == KVPoll.Transferring, "the read to begin")
    manager = prompt.decode.manager
    assert not manager.is_abort_release_safe(prompt.number, 1)
    prompt.receiver.abort()
    until(lambda: prompt.receiver.poll() == KVPoll.Failed, "the reads to end")
    assert manager.is_abort_release_safe(prompt.number, 1)
    assert "Aborted" in why(prompt.receiver)
    prompt.send(prompt.length)
    # Nobody needs the prompt any more: the prefill side frees its pages, and answers nobody.
    over = (KVPoll.Success, KVPoll.Failed)
    until(lambda: prompt.sender.poll() in over, "the prefill side to hear of it")


def test_no_time_ends_the_wait_for_reads_of_a_decode_server(pair):
    """A source that is stopped may send late: SGLang would free the pages after 30 s."""
    _, decode = pair(8, 12)
    queue = decode.queue.transfer_queue
    assert queue.enable_deferred_kv_release
    assert queue.deferred_kv_release_timeout == math.inf


def test_a_request_that_nobody_sends_to_prefill_fails_in_time(pair):
    prefill, decode = pair(8, 8)
    receiver = decode.room(7, request("d", TOKENS))
    find_prefill(decode, receiver)
    receiver.init(0)
    decode.manager.waiting_timeout = 0
    receiver.send_metadata(list(range(3, 10)), 2, [], 0)
    until(lambda: receiver.poll() == KVPoll.Failed, "the time-out")
    assert "SGLANG_DISAGGREGATION_WAITING_TIMEOUT: 0" in why(receiver)
    assert prefill.manager.rooms.scheduler.lender.leases.num_open == 0


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_a_draft_model_is_refused_at_the_start(activated, model_folder, mode):
    with pytest.raises(ConfigError, match=r"speculative decoding: .*leave --speculative-algorithm"):
        Rank(mode, model_folder, free_port(), page_size=8, draft=True)


def test_inputs_that_servers_cannot_compare_are_refused(pair):
    prefill, _ = pair(8, 8)
    sender = prefill.room(7, request("p", TOKENS, input_embeds=[[0.0]]))
    assert sender.poll() == KVPoll.Failed
    assert "input_embeds: " in why(sender)


def test_weights_that_change_in_memory_end_all_lending(pair):
    prompt = Prompt(pair(8, 8))
    prompt.allocate()
    prompt.begin()
    prompt.send(16)
    prompt.prefill.manager.rooms.weights_changed()
    prompt.send(prompt.length)
    assert prompt.settle() == (KVPoll.Failed, KVPoll.Failed)


@pytest.mark.parametrize("pages", [(8, 12), (12, 8)], ids=str)
def test_of_a_pool_with_a_window_the_last_tokens_move(pair, pages):
    prompt = Prompt(pair(*pages, windowed=True), tokens=list(range(100, 190)))
    prompt.allocate()
    prompt.begin()
    prompt.send(48)
    until(lambda: prompt.receiver.poll() == KVPoll.Transferring, "the read to begin")
    prompt.send(prompt.length)
    assert prompt.settle() == (KVPoll.Success, KVPoll.Success)
    assert prompt.moved()
    kept = []
    for side, rank in enumerate((prompt.prefill, prompt.decode)):
        first = (prompt.length - WINDOW) // rank.page_size * rank.page_size
        cells = rank.cells(prompt.states(side)[0], pool=1)
        kept.append(
            [each[prompt.length - WINDOW - first : prompt.length - first] for each in cells]
        )
    for source, target in zip(*kept, strict=True):
        assert torch.equal(source, target)


@pytest.mark.parametrize(
    "told", ["[]", '{"0": 7}', '{"0": "no address"}', "nothing", '{"0": "127.0.0.1:99999"}']
)
def test_a_bootstrap_server_that_says_nonsense_is_not_known(pair, monkeypatch, told):
    from aiohttp import web

    from kvferry.integrations.sglang.bootstrap import BootstrapServer

    async def answer(self, request):
        return web.Response(text=told)

    monkeypatch.setattr(BootstrapServer, "_tell_channels", answer)
    _, decode = pair(8, 8)
    receiver = decode.room(7, request("d", TOKENS))
    known = decode.manager.try_ensure_parallel_info
    assert not any(known(receiver.bootstrap_addr) for _ in range(5))


def test_a_prefill_server_with_another_backend_is_refused(pair, monkeypatch):
    from aiohttp import web

    from kvferry.integrations.sglang.bootstrap import BootstrapServer

    async def answer(self, request):
        return web.Response(status=404)

    monkeypatch.setattr(BootstrapServer, "_tell_channels", answer)
    _, decode = pair(8, 8)
    receiver = decode.room(7, request("d", TOKENS))
    find_prefill(decode, receiver)
    receiver.init(0)
    assert receiver.poll() == KVPoll.Failed
    assert "start the prefill server with --disaggregation-transfer-backend" in why(receiver)


@pytest.mark.parametrize("number", [0, 2**62, 2**63 - 1])
def test_a_room_may_be_any_number(pair, number):
    prompt = Prompt(pair(8, 12), number=number)
    prompt.allocate()
    prompt.begin()
    prompt.send(prompt.length)
    assert prompt.settle() == (KVPoll.Success, KVPoll.Success)
