"""The fence around transfer, and the threads that copy."""

import threading
import time
from typing import Any

import pytest

from kvferry.errors import CancelledError, PeerLostError, TransferError
from kvferry.testing.waiting import until
from kvferry.transports.base import Transfer, Transfers, TransferState
from kvferry.transports.movers import MoverPool, start_after


@pytest.fixture
def transfers():
    return Transfers()


@pytest.fixture
def transfer(transfers):
    return begin(transfers, 10)


def begin(transfers, nbytes):
    transfer = Transfer(nbytes, transfers)
    assert transfers.add(transfer)
    return transfer


def test_a_transfer_is_terminal_only_when_the_last_writer_has_left(transfers, transfer):
    assert transfer.enter()
    assert transfer.enter()
    transfer.stop(TransferState.CANCELLED, CancelledError("x"))
    assert not transfer.is_terminal
    transfer.leave(4, 1)
    assert not transfer.is_terminal
    assert transfers.poll() == []
    transfer.leave(4, 1)
    assert transfer.state is TransferState.CANCELLED
    assert transfers.poll() == [transfer]
    assert transfers.poll() == []


def test_nobody_enters_after_the_stop(transfer):
    transfer.fail(PeerLostError("x"))
    assert not transfer.enter()
    assert transfer.state is TransferState.FAILED


def test_the_last_byte_makes_it_done_once_all_writers_have_left(transfers, transfer):
    assert transfer.enter()
    assert transfer.enter()
    transfer.leave(10, 3)
    assert not transfer.is_terminal
    assert not transfer.enter()
    transfer.leave(0, 0)
    assert transfer.state is TransferState.DONE
    assert (transfer.bytes_done, transfer.segments) == (10, 3)
    assert transfers.poll() == [transfer]


def test_the_first_verdict_stands(transfers, transfer):
    first = PeerLostError("first")
    transfer.fail(first)
    transfer.fail(PeerLostError("second"))
    transfer.stop(TransferState.CANCELLED)
    assert transfer.error is first
    assert transfers.poll() == [transfer]


class Unsound(Transfer):
    """Its peer is dead when all bytes are there."""

    dead = PeerLostError("dead")

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.ends = []

    def verify(self):
        assert not self.is_terminal
        return self.dead

    def ended(self, state):
        assert not self.is_terminal
        self.ends.append(state)


def test_what_cannot_be_verified_fails_with_all_bytes_in_place(transfers):
    transfer = Unsound(1, transfers)
    transfers.add(transfer)
    transfer.enter()
    transfer.leave(1, 1)
    assert transfer.state is TransferState.FAILED
    assert transfer.error is Unsound.dead
    assert transfer.ends == [TransferState.FAILED]


@pytest.mark.parametrize("end", ["done", "failed", "cancelled", "closed"])
def test_each_end_is_told_once_and_then_there_is_something_to_poll(transfers, transfer, end):
    polled = []
    transfer.on_end(lambda ended: polled.append((ended, transfers.poll())))
    transfer.enter()
    if end == "done":
        transfer.leave(10, 1)
    elif end == "failed":
        transfer.fail(PeerLostError("x"))
    elif end == "cancelled":
        transfers.cancel(transfer)
    else:
        assert transfers.close()
    if end != "done":
        assert polled == []
        transfer.leave(0, 0)
    assert polled == [(transfer, [transfer])]
    transfers.cancel(transfer)
    assert len(polled) == 1
    transfer.on_end(polled.append)
    assert polled[1:] == [transfer]


def test_who_waits_and_fails_holds_up_nobody(transfer, caplog):
    told: list[Any] = []
    transfer.on_end(lambda _: 1 / 0)
    transfer.on_end(told.append)
    transfer.fail(PeerLostError("x"))
    assert told == [transfer]
    assert "who waited for a transfer failed" in caplog.text


def test_nothing_begins_once_it_is_closed(transfers):
    assert transfers.close()
    assert not transfers.close()
    late = Transfer(1, transfers)
    assert not transfers.add(late)
    assert isinstance(late.error, TransferError)
    assert transfers.poll() == [late]


def test_many_threads_and_one_stop_make_one_report(transfers):
    for _ in range(20):
        transfer = begin(transfers, 1 << 40)
        inside: list[Any] = []

        def write(transfer=transfer, inside=inside):
            while transfer.enter():
                inside.append(transfer.is_terminal)
                transfer.leave(1, 1)

        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.002)
        transfer.stop(TransferState.CANCELLED)
        for thread in threads:
            thread.join()
        assert not any(inside)
        assert transfers.poll() == [transfer]


def test_a_failing_event_fails_the_transfer(transfer):
    class Broken:
        def wait(self):
            raise RuntimeError("the device is gone")

    started = []
    start_after(Broken(), transfer, lambda: started.append(1))
    until(lambda: transfer.is_terminal, what=transfer)
    assert isinstance(transfer.error, TransferError)
    assert "the device is gone" in str(transfer.error)
    assert not started


def test_a_task_that_raises_does_not_end_its_mover(caplog):
    pool = MoverPool("test", 1)
    done = threading.Event()
    pool.submit(lambda: 1 / 0)
    pool.submit(done.set)
    assert done.wait(60)
    pool.close()
    pool.close()
    assert "a mover task failed" in caplog.text
    with pytest.raises(ValueError, match="threads"):
        MoverPool("test", 0)
