"""Engines of several ranks, and prompts between two of them, as SGLang's schedulers drive both."""

import time

import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import KVTransferError

from benchmarks.vllm_servers.ports import free_port
from kvferry.integrations.sglang.bootstrap import BootstrapServer
from tests.integrations.sglang.conftest import (
    HOST,
    LAYERS,
    Group,
    Rank,
    listens,
    request,
    until,
)

TOKENS = list(range(100, 150))
SLOTS = (3, 5)
"""Slots of the states of a prompt on both sides."""
OVER = (KVPoll.Success, KVPoll.Failed)
PARTS = ("k_buffer", "v_buffer")


class Engine:
    """All ranks of a server, which one test drives as SGLang's schedulers would."""

    def __init__(self, mode, folder, port, *, tp, page_size, split=(LAYERS,), heads=4, **more):
        ends = [sum(split[: stage + 1]) for stage in range(len(split))]
        layers = [list(range(e - n, e)) for e, n in zip(ends, split, strict=True)]
        world, stages = Group(), [Group(layers) for _ in range(tp)]
        shape = {"tp": tp, "split": split, "page_size": page_size, "heads": heads} | more
        self.page_size, self.heads, self.tp = page_size, heads, tp
        self.ranks = [
            Rank(mode, folder, port, rank=rank, groups=(world, stages[rank % tp]), **shape)
            for rank in range(tp * len(split))
        ]
        self.first = self.ranks[0].manager

    def order(self, last):
        """The ranks, with one of them behind all others."""
        return [*(r for r in range(len(self.ranks)) if r != last), last]

    def close(self):
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def engines(activated, model_folder):
    """``engines((tp, page size), (tp, page size))`` opens a prefill and a decode engine; a third
    value is the number of layers of each pipeline stage.
    """
    opened = []

    def opening(*shapes, **more):
        port = free_port()
        server = BootstrapServer(HOST, port)
        until(lambda: listens(port), "the bootstrap server")
        for mode, (tp, page_size, *split) in zip(("prefill", "decode"), shapes, strict=True):
            shape = {"tp": tp, "page_size": page_size} | more
            if split:
                shape["split"] = split[0]
            opened.append(Engine(mode, model_folder, port, **shape))
        opened.append(server)
        return opened[0], opened[1]

    yield opening
    for each in opened:
        each.close()


def poll(rooms, order=None):
    """The least of the answers of all ranks, as SGLang takes it of the ranks of a stage."""
    return min(rooms[rank].poll() for rank in order or range(len(rooms)))


class Prompt:
    """A prompt of two engines."""

    def __init__(self, prefill, decode, number=7, tokens=TOKENS, first_page=3):
        self.prefill, self.decode, self.number = prefill, decode, number
        self.length = len(tokens)
        self.senders = [r.room(number, request(f"p{number}", tokens)) for r in prefill.ranks]
        self.receivers = [r.room(number, request(f"d{number}", tokens)) for r in decode.ranks]
        self.pages = list(range(first_page, first_page + -(-self.length // prefill.page_size)))
        # No rank of the decode server has the same pages as another.
        self.their_pages = [
            list(range(first_page + rank, first_page + rank + -(-self.length // decode.page_size)))
            for rank in range(len(decode.ranks))
        ]

    def find(self):
        """Every rank of the decode server knows the prefill server."""
        for rank, receiver in zip(self.decode.ranks, self.receivers, strict=True):
            known = rank.manager.try_ensure_parallel_info
            until(lambda known=known, at=receiver.bootstrap_addr: known(at), "the bootstrap server")
            receiver.init(0)

    def allocate(self, order=None, prefix=0):
        """Ranks of the decode server get pages."""
        for rank in order if order is not None else range(len(self.receivers)):
            pages = self.their_pages[rank][prefix // self.decode.page_size :]
            slot = self.decode.ranks[rank].slot(SLOTS[1])
            self.receivers[rank].send_metadata(
                pages, 2, slot, prefix, KVTransferDestination.DEVICE, None
            )

    def begin(self):
        """The prefill server is asked, and begins."""
        self.find()
        self.allocate()
        self.settle_asked()

    def settle_asked(self):
        until(lambda: self.senders_poll() == KVPoll.WaitingForInput, "the ask")
        self.compute()
        for sender in self.senders:
            sender.init(len(self.pages), 5)

    def compute(self):
        """Every head of a prompt has the same values on all ranks that keep the head."""
        layers = {layer for rank in self.prefill.ranks for layer in rank.layers}
        self.right = {(part, layer): self._fill(part, layer) for part in PARTS for layer in layers}

    def _fill(self, part, layer):
        ranks = [rank for rank in self.prefill.ranks if layer in rank.layers]
        buffers = [getattr(rank.pools[0], part)[layer - rank.layers.start] for rank in ranks]
        whole = torch.rand(len(buffers[0]), self.prefill.heads, 8)
        for rank, buffer in zip(ranks, buffers, strict=True):
            buffer.copy_(whole[:, rank.first_head : rank.first_head + buffer.shape[1]])
        first = self.pages[0] * self.prefill.page_size
        return whole[first : first + self.length].clone()

    def send(self, end, order=None):
        """Ranks of the prefill server send the tokens up to ``end``."""
        size, is_last = self.prefill.page_size, end == self.length
        for rank in order if order is not None else range(len(self.senders)):
            sender, each = self.senders[rank], self.prefill.ranks[rank]
            done = sender.curr_idx
            pages = self.pages[done : None if is_last else end // size]
            each.rows.output_ids[5, 0] = 4711
            each.rows.bootstrap_room[5, 0] = self.number
            with each.active():
                slot = each.slot(SLOTS[0]) if is_last else None
                sender.send(pages, slot, len(pages) * size)

    def senders_poll(self, order=None):
        return poll(self.senders, order)

    def receivers_poll(self, order=None):
        return poll(self.receivers, order)

    def until_read(self):
        """The decode server has begun to read; a short prompt may be there at once."""
        begun = (KVPoll.Transferring, KVPoll.Success)
        until(
            lambda: self.receivers_poll() in begun or not self.senders_poll(), "the read to begin"
        )

    def settle(self, orders=None):
        """Polls all rooms until they have ended; returns how."""
        ends = {}

        def ended():
            ends["p"] = self.senders_poll(orders and orders[0])
            ends["d"] = self.receivers_poll(orders and orders[1])
            return all(end in OVER for end in ends.values())

        until(ended, "all rooms to end")
        return ends["p"], ends["d"]

    def has_moved(self):
        """Whether every rank of the decode server has its heads and its row."""
        for rank, pages in zip(self.decode.ranks, self.their_pages, strict=True):
            names = [(part, layer) for part in PARTS for layer in rank.layers]
            for name, cells in zip(names, rank.cells(pages), strict=True):
                heads = slice(rank.first_head, rank.first_head + cells.shape[1])
                if not torch.equal(cells[: self.length], self.right[name][:, heads]):
                    return False
            if rank.rows.output_ids[2, 0] != 4711 or rank.rows.bootstrap_room[2, 0] != self.number:
                return False
        return True

    def overwrite(self, rank):
        """SGLang gives the pages of a rank of the prefill server to another prompt."""
        pool = self.prefill.ranks[rank].pools[0]
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.fill_(-1)

    def clear(self):
        for room in (*self.senders, *self.receivers):
            room.clear()


def open_leases(engine):
    return engine.first.rooms.scheduler.lender.leases.num_open


def all_cells(engine):
    """All cells of all ranks."""
    return [each for rank in engine.ranks for each in rank.cells(range(1, 20))]


def turns():
    """Turns of SGLang's loops, for as long as all that other threads do takes."""
    for _ in range(80):
        time.sleep(0.005)
        yield


def why(room):
    with pytest.raises(KVTransferError) as caught:
        room.failure_exception()
    return str(caught.value)


def assert_nothing_changes_after_an_abort(prompt, *, is_whole):
    """All ranks of a decode server have given a load up, and may free its pages: nothing changes
    them any more, whatever the prefill server does.
    """
    for receiver in prompt.receivers:
        why(receiver)
        receiver.ensure_abort_notified(force_arm=True)
    managers = [rank.manager for rank in prompt.decode.ranks]
    assert all(manager.is_abort_release_safe(prompt.number, 1) for manager in managers)
    before = all_cells(prompt.decode)
    if not is_whole:
        prompt.send(prompt.length)
    until(lambda: prompt.senders_poll() in OVER, "the prefill side to hear of it")
    for manager in managers * 20:
        manager.rooms.step()
    assert all(map(torch.equal, before, all_cells(prompt.decode)))
    until(lambda: open_leases(prompt.prefill) == 0, "the leases to end")
