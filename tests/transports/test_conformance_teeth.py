"""Transports that are broken on purpose fail the conformance class, each at the test it breaks."""

import contextlib
import ctypes
import threading
import time

import pytest

from kvferry.errors import BoundsError
from kvferry.testing.transport_conformance import TransportConformance as Suite
from kvferry.testing.transport_peer import PeerProcess
from kvferry.transports.base import Transfer, TransferState
from kvferry.transports.shm import ShmTransport

# Referred to through a module-level alias and never subclassed at module level: pytest collects
# what is a class named Test…


class _Remembering(ShmTransport):
    """Remembers what was read, so that it can do it wrongly."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.asked = {}

    def read(self, peer, tiles, runs, *, after=None):
        transfer = super().read(peer, tiles, runs, after=after)
        self.asked[transfer] = (peer, tiles, runs)
        return transfer


class LandsLate(_Remembering):
    """After a cancel that was reported, all the bytes land."""

    def cancel(self, transfer):
        super().cancel(transfer)
        threading.Timer(0.1, super().read, self.asked[transfer]).start()


class WritesPastTheEnd(_Remembering):
    """One byte too many."""

    def poll(self):
        ended = super().poll()
        for transfer in ended:
            if transfer.nbytes:
                _, tiles, _ = self.asked[transfer]
                region = self._regions.arrays[tiles[-1]["target_region"]]
                ctypes.c_ubyte.from_address(region.ctypes.data + region.nbytes).value ^= 0xFF
        return ended


class ReportsTwice(ShmTransport):
    """Each transfer is reported by two polls."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.again = []

    def poll(self):
        ended = super().poll()
        again, self.again = self.again, ended
        return ended + again


class BlocksInRead(ShmTransport):
    """``read`` waits for the bytes."""

    def read(self, peer, tiles, runs, *, after=None):
        transfer = super().read(peer, tiles, runs, after=after)
        while after is None and not transfer.is_terminal:
            time.sleep(0.001)
        return transfer


class ChecksTooLate(ShmTransport):
    """Moves the first tiles before it looks at the last, and says nothing of it."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.early = []

    def read(self, peer, tiles, runs, *, after=None):
        with contextlib.suppress(BoundsError):
            self.early.append(super().read(peer, tiles[:-1], runs))
        return super().read(peer, tiles, runs, after=after)

    def poll(self):
        return [each for each in super().poll() if each not in self.early]


class ChecksNothing(ShmTransport):
    """Reports what it should refuse as a failed read."""

    def read(self, peer, tiles, runs, *, after=None):
        try:
            return super().read(peer, tiles, runs, after=after)
        except BoundsError as error:
            refused = Transfer(0)
            refused.fail(error)
            return refused


class IgnoresTheEvent(ShmTransport):
    """Starts before the engine's step has retired."""

    def read(self, peer, tiles, runs, *, after=None):
        return super().read(peer, tiles, runs)


class LosesRuns(ShmTransport):
    """Reads the first run once more in place of the last: as many bytes as were asked for."""

    def read(self, peer, tiles, runs, *, after=None):
        runs = runs.copy()
        runs[-1:] = runs[:1]
        return super().read(peer, tiles, runs, after=after)


class ReadsOldBytes(_Remembering):
    """Keeps what it read once."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.kept = None

    def poll(self):
        ended = super().poll()
        if ended:
            memory = self._regions.arrays[-1]
            self.kept = memory.copy() if self.kept is None else self.kept
            memory[:] = self.kept
        return ended


class IgnoresDeath(ShmTransport):
    """Goes on reading what a dead process left behind."""

    def connect(self, endpoint):
        peer = super().connect(endpoint)
        peer.error = lambda: None
        return peer


class ForgetsTheCancelled(ShmTransport):
    """A cancelled read is never reported."""

    def poll(self):
        return [each for each in super().poll() if each.state is not TransferState.CANCELLED]


class TellsNobody(ShmTransport):
    """Those who wait for a read would wait for ever."""

    def read(self, peer, tiles, runs, *, after=None):
        transfer = super().read(peer, tiles, runs, after=after)
        transfer.on_end = lambda callback: None
        return transfer


class LeavesReadsRunning(ShmTransport):
    """``close`` does not wait for the movers."""

    closing = False

    def close(self):
        if not self.closing:
            threading.Timer(0.3, super().close).start()
            self.closing = True


@pytest.fixture(scope="module")
def peer():
    with PeerProcess(ShmTransport, Suite.options()) as process:
        yield process


def broken_suite(transport):
    suite = type("Broken", (Suite,), {"transport": transport, "patience_s": 2.0})
    return suite()


LATE = pytest.mark.timed(
    "Bytes that a timer brings must land within 0.4 s, after the memory is filled."
)


@pytest.mark.parametrize(
    ("transport", "test", "says"),
    [
        pytest.param(
            LandsLate,
            Suite.test_a_read_cancelled_while_it_runs_lands_nothing_afterwards,
            "was changed",
            marks=LATE,
        ),
        pytest.param(
            LandsLate,
            Suite.test_a_read_cancelled_before_it_starts_lands_nothing,
            "was changed",
            marks=LATE,
        ),
        (WritesPastTheEnd, Suite.test_a_large_read_equals_the_oracle, "differs from the oracle"),
        (
            ReportsTwice,
            Suite.test_many_reads_at_once_are_each_reported_once,
            "an end is reported twice",
        ),
        (BlocksInRead, Suite.test_a_read_returns_before_it_is_done, r"calls \[.* s of"),
        (
            ChecksTooLate,
            Suite.test_copies_that_leave_a_region_are_refused_before_a_byte_moves,
            "was changed",
        ),
        (
            ChecksNothing,
            Suite.test_copies_that_leave_a_region_are_refused_before_a_byte_moves,
            "was not refused",
        ),
        (IgnoresTheEvent, Suite.test_a_read_waits_for_its_event, "over before its event"),
        (LosesRuns, Suite.test_a_large_read_equals_the_oracle, "differs from the oracle"),
        (
            ReadsOldBytes,
            Suite.test_a_read_sees_what_the_source_holds_now,
            "differs from the oracle",
        ),
        (
            ForgetsTheCancelled,
            Suite.test_a_read_cancelled_before_it_starts_lands_nothing,
            r"poll\(\) says nothing of",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_transport_fails(transport, test, says, peer):
    suite = broken_suite(transport)
    local = transport.open(suite.options())
    try:
        with pytest.raises((AssertionError, pytest.fail.Exception), match=says):
            test(suite, local, peer)
        time.sleep(0.2)  # what lands late must land while its memory is there
    finally:
        local.close()


def test_a_transport_that_ignores_death_fails():
    suite = broken_suite(IgnoresDeath)
    with (
        PeerProcess(ShmTransport, suite.options()) as mortal,
        contextlib.closing(IgnoresDeath.open(suite.options())) as local,
        pytest.raises(AssertionError, match="a read from a dead peer has not failed"),
    ):
        suite.test_reading_from_a_dead_peer_fails_as_lost(local, mortal)


def test_a_transport_that_closes_with_reads_running_fails(peer):
    suite = broken_suite(LeavesReadsRunning)
    with pytest.raises(AssertionError, match="closed with reads running"):
        suite.test_closing_the_transport_ends_its_reads_first(peer)
    time.sleep(0.5)


@pytest.mark.parametrize("end", ["done", "cancelled", "closed"])
def test_a_transport_that_tells_no_end_fails(peer, end):
    suite = broken_suite(TellsNobody)
    with (
        contextlib.closing(TellsNobody.open(suite.options())) as local,
        pytest.raises(AssertionError, match="the end was not told"),
    ):
        suite.test_the_end_of_a_read_is_told(local, peer, end)


def test_the_sound_transport_passes_the_same_calls(peer):
    suite = broken_suite(ShmTransport)
    with contextlib.closing(ShmTransport.open(suite.options())) as local:
        suite.test_a_read_cancelled_before_it_starts_lands_nothing(local, peer)
        suite.test_a_large_read_equals_the_oracle(local, peer)
    assert local.poll() == []
