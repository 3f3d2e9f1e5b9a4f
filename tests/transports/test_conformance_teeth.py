"""Transports that are broken on purpose fail the conformance class, each at the test it breaks.

Each defect is put into a transport of host memory and into those of a device: into one that reads
the device, a GPU's where there is one, and else that of a thread that takes its place; and into a
wire that serves what the device packs.
"""

import contextlib
import ctypes
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

from kvferry.errors import BoundsError, DecodeError
from kvferry.testing.host_device import HostIpcTransport, HostPackedTcpTransport
from kvferry.testing.transport_conformance import TransportConformance as Suite
from kvferry.testing.transport_peer import PeerProcess
from kvferry.testing.waiting import until
from kvferry.transports.base import Transfer, TransferState
from kvferry.transports.cuda_ipc import CudaIpcTransport
from kvferry.transports.shm import ShmTransport
from kvferry.transports.wire_reader import WirePeer

# Referred to through a module-level alias and never subclassed at module level: pytest collects
# what is a class named Test…


if TYPE_CHECKING:
    Sound = ShmTransport  # or any other: `broken_suite` puts a defect in front of each
else:
    Sound = object


class _Remembering(Sound):
    """Remembers what was read, so that it can do it wrongly."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.asked = {}

    def read(self, peer, tiles, runs, *, after=None):
        transfer = super().read(peer, tiles, runs, after=after)
        self.asked[transfer] = (peer, tiles, runs)
        return transfer


class LandsLate(_Remembering):
    """After a cancel that was reported, all the bytes land while the suite looks for them."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.late = []

    def cancel(self, transfer):
        super().cancel(transfer)
        self.late.append(self.asked[transfer])

    def land(self):
        for asked in self.late:
            transfer = super().read(*asked)
            until(lambda: transfer.is_terminal, what="the end of what lands late")  # noqa: B023


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


class ReportsTwice(Sound):
    """Each transfer is reported by two polls."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.again = []

    def poll(self):
        ended = super().poll()
        again, self.again = self.again, ended
        return ended + again


class BlocksInRead(Sound):
    """``read`` waits for the bytes."""

    def read(self, peer, tiles, runs, *, after=None):
        transfer = super().read(peer, tiles, runs, after=after)
        while after is None and not transfer.is_terminal:
            time.sleep(0.001)
        return transfer


class ChecksTooLate(Sound):
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


class ChecksNothing(Sound):
    """Reports what it should refuse as a failed read."""

    def read(self, peer, tiles, runs, *, after=None):
        try:
            return super().read(peer, tiles, runs, after=after)
        except BoundsError as error:
            refused = Transfer(0)
            refused.fail(error)
            return refused


class IgnoresTheEvent(Sound):
    """Starts before the engine's step has retired."""

    def read(self, peer, tiles, runs, *, after=None):
        return super().read(peer, tiles, runs)


class LosesRuns(Sound):
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


class IgnoresDeath(Sound):
    """Goes on reading what a dead process left behind."""

    def connect(self, endpoint):
        peer = super().connect(endpoint)
        peer.error = lambda: None  # type: ignore[method-assign] # of one that maps the memory
        if isinstance(peer, WirePeer):
            lose = self.reader.lose
            self.reader.lose = lambda lost, error: self._transfers.closed and lose(lost, error)
        return peer


class ForgetsTheCancelled(Sound):
    """A cancelled read is never reported."""

    def poll(self):
        return [each for each in super().poll() if each.state is not TransferState.CANCELLED]


class TellsNobody(Sound):
    """Those who wait for a read would wait for ever."""

    def read(self, peer, tiles, runs, *, after=None):
        transfer = super().read(peer, tiles, runs, after=after)
        transfer.on_end = lambda callback: None  # type: ignore[method-assign]
        return transfer


class LeavesReadsRunning(Sound):
    """``close`` does not wait for the movers."""

    closing = False

    def close(self):
        if not self.closing:
            threading.Timer(0.3, super().close).start()
            self.closing = True


@pytest.fixture(
    scope="module",
    params=[
        ShmTransport,
        HostIpcTransport,
        HostPackedTcpTransport,
        pytest.param(CudaIpcTransport, marks=pytest.mark.gpu),
    ],
    ids=lambda sound: sound.__name__,
)
def sound(request):
    """The transport that is to be broken."""
    if request.param is CudaIpcTransport and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; none is here")
    return request.param


@pytest.fixture(scope="module")
def peer(sound):
    with PeerProcess(sound, Suite.options()) as process:
        yield process


def broken_suite(sound, *defects, patience_s=Suite.patience_s):
    """The suite for a transport with these defects."""
    transport = type("Broken", (*defects, sound), {}) if defects else sound
    members = {"transport": transport, "patience_s": patience_s}
    if LandsLate in defects:
        members["settle"] = lambda suite, local: local.land()
    return type("BrokenSuite", (Suite,), members)()


def opened(suite):
    return contextlib.closing(suite.transport.open(suite.options()))


@pytest.mark.parametrize(
    ("defect", "test", "says"),
    [
        (
            LandsLate,
            Suite.test_a_read_cancelled_while_it_runs_lands_nothing_afterwards,
            "was changed",
        ),
        (
            LandsLate,
            Suite.test_a_read_cancelled_before_it_starts_lands_nothing,
            "was changed",
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
def test_a_broken_transport_fails(sound, defect, test, says, peer):
    suite = broken_suite(sound, defect)
    failure = pytest.raises((AssertionError, pytest.fail.Exception), match=says)
    with opened(suite) as local, failure:
        test(suite, local, peer)


def test_a_transport_that_ignores_death_fails(sound):
    if sound is CudaIpcTransport:
        pytest.skip("the memory of a dead process would end the CUDA context of what follows")
    suite = broken_suite(sound, IgnoresDeath, patience_s=2.0)
    with (
        PeerProcess(sound, suite.options()) as mortal,
        opened(suite) as local,
        pytest.raises(AssertionError, match=r"a read from a dead peer has not failed|StalledError"),
    ):
        suite.test_reading_from_a_dead_peer_fails_as_lost(local, mortal)


def test_a_transport_that_closes_with_reads_running_fails(sound, peer):
    suite = broken_suite(sound, LeavesReadsRunning)
    with pytest.raises(AssertionError, match="closed with reads running"):
        suite.test_closing_the_transport_ends_its_reads_first(peer)
    time.sleep(0.5)


@pytest.mark.parametrize("end", ["done", "cancelled", "closed"])
def test_a_transport_that_tells_no_end_fails(sound, peer, end):
    suite = broken_suite(sound, TellsNobody, patience_s=2.0)
    with opened(suite) as local, pytest.raises(AssertionError, match="the end was not told"):
        suite.test_the_end_of_a_read_is_told(local, peer, end)


def test_the_sound_transport_passes_the_same_calls(sound, peer):
    suite = broken_suite(sound)
    with opened(suite) as local:
        suite.test_a_read_cancelled_before_it_starts_lands_nothing(local, peer)
        suite.test_a_large_read_equals_the_oracle(local, peer)
        assert local.poll() == []


class ShortEndpoint(Sound):
    """Has an endpoint of 12 bytes: fewer than a prefix that the suite may cut from a longer one."""

    def endpoint(self):
        return b"pigeon loft!"

    def connect(self, endpoint):
        if endpoint != self.endpoint():
            raise DecodeError("not an endpoint of these pigeons")
        return super().connect(super().endpoint())


@pytest.mark.parametrize("seed", range(8))
def test_a_sound_transport_with_a_short_endpoint_passes(sound, seed):
    suite = broken_suite(sound, ShortEndpoint)
    with opened(suite) as local:
        suite.test_a_garbage_endpoint_is_refused(local, seed)
