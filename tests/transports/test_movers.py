"""The fence around landing, and the threads that copy."""

import threading
import time

import pytest

from kvferry.errors import CancelledError, PeerLostError, TransferError
from kvferry.transports.base import Transfer, TransferState
from kvferry.transports.movers import Landing, Ledger, MoverPool, start_after


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def landing(ledger):
    return Landing(Transfer(nbytes=10), ledger)


def test_a_transfer_is_terminal_only_when_the_last_writer_has_left(ledger, landing):
    assert landing.enter()
    assert landing.enter()
    landing.stop(TransferState.CANCELLED, CancelledError("x"))
    assert not landing.transfer.is_terminal
    landing.leave(4, 1)
    assert not landing.transfer.is_terminal
    assert ledger.poll() == []
    landing.leave(4, 1)
    assert landing.transfer.state is TransferState.CANCELLED
    assert ledger.poll() == [landing.transfer]
    assert ledger.poll() == []


def test_nobody_enters_after_the_stop(landing):
    landing.fail(PeerLostError("x"))
    assert not landing.enter()
    assert landing.transfer.state is TransferState.FAILED


def test_the_last_byte_makes_it_done_once_all_writers_have_left(ledger, landing):
    assert landing.enter()
    assert landing.enter()
    landing.leave(10, 3)
    assert not landing.transfer.is_terminal
    assert not landing.enter()
    landing.leave(0, 0)
    assert landing.transfer.state is TransferState.DONE
    assert (landing.transfer.bytes_done, landing.transfer.segments) == (10, 3)
    assert ledger.poll() == [landing.transfer]


def test_the_first_verdict_stands(ledger, landing):
    first = PeerLostError("first")
    landing.fail(first)
    landing.fail(PeerLostError("second"))
    landing.stop(TransferState.CANCELLED)
    assert landing.transfer.error is first
    assert ledger.poll() == [landing.transfer]


def test_what_cannot_be_verified_fails_with_all_bytes_in_place(ledger):
    error = PeerLostError("dead")
    ends = []
    landing = Landing(Transfer(nbytes=1), ledger, verify=lambda: error, on_end=ends.append)
    landing.enter()
    landing.leave(1, 1)
    assert landing.transfer.state is TransferState.FAILED
    assert landing.transfer.error is error
    assert ends == [TransferState.FAILED]


def test_many_threads_and_one_stop_make_one_report(ledger):
    for _ in range(20):
        landing = Landing(Transfer(nbytes=1 << 40), ledger)
        inside = []

        def write(landing=landing, inside=inside):
            while landing.enter():
                inside.append(landing.transfer.is_terminal)
                landing.leave(1, 1)

        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.002)
        landing.stop(TransferState.CANCELLED)
        for thread in threads:
            thread.join()
        assert not any(inside)
        assert ledger.poll() == [landing.transfer]


def test_a_failing_event_fails_the_transfer(landing):
    class Broken:
        def wait(self):
            raise RuntimeError("the device is gone")

    started = []
    start_after(Broken(), landing, lambda: started.append(1))
    deadline = time.monotonic() + 5
    while not landing.transfer.is_terminal and time.monotonic() < deadline:
        time.sleep(0.001)
    assert isinstance(landing.transfer.error, TransferError)
    assert "the device is gone" in str(landing.transfer.error)
    assert not started


def test_a_task_that_raises_does_not_end_its_mover(caplog):
    pool = MoverPool("test", 1)
    done = threading.Event()
    pool.submit(lambda: 1 / 0)
    pool.submit(done.set)
    assert done.wait(5)
    pool.close()
    pool.close()
    assert "a mover task failed" in caplog.text
    with pytest.raises(ValueError, match="threads"):
        MoverPool("test", 0)
