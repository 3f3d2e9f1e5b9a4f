"""The pool of staging memory: in turn, leaving room for others, and never two in one place."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.errors import ConfigError, StagingFullError
from kvferry.transports.base import Peer, Transfer, TransferState
from kvferry.transports.staging import ALIGNMENT, Claim, Slot, StagingPool

UNIT = ALIGNMENT
STALL_S = 10.0


class Clock:
    """Seconds that the test lets pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def open_pool(units: int) -> tuple[StagingPool, Clock]:
    clock = Clock()
    return StagingPool(units * UNIT, STALL_S, clock), clock


def leased(pool: StagingPool, units: int, source: str = "a") -> Slot:
    """A slot into which a read is under way."""
    slot = pool.claim(units * UNIT, source).slot
    assert slot is not None
    slot.transfer = Transfer(nbytes=units * UNIT)
    return slot


def end(slot: Slot, state: TransferState = TransferState.DONE) -> None:
    assert slot.transfer is not None
    slot.transfer.stop(state)


class Machine(RuleBasedStateMachine):
    """Loads that lease, finish and give up; the memory is a list of owners, byte by byte."""

    UNITS = 16

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.clock = open_pool(self.UNITS)
        self.queue: list[Claim] = []
        self.held: list[Slot] = []
        self.lost: list[Slot] = []

    def admit(self) -> None:
        """Takes in what was granted or refused."""
        waiting: list[Claim] = []
        for claim in self.queue:
            if not (claim.slot or claim.error):
                waiting.append(claim)
                continue
            assert claim.source not in {c.source for c in waiting}, "served out of turn"
            if claim.slot is not None:
                claim.slot.transfer = Transfer(nbytes=claim.nbytes)
                self.held.append(claim.slot)
        self.queue = waiting

    def leaves_room(self, claim: Claim) -> bool:
        """Whether a source may have another slot."""
        mine = [slot.nbytes for slot in self.held if slot.source == claim.source]
        lost = [slot.nbytes for slot in self.lost if slot.source == claim.source]
        free = self.UNITS * UNIT - sum(slot.nbytes for slot in (*self.held, *self.lost))
        return not mine or sum(mine + lost) + claim.nbytes <= free - claim.nbytes

    @rule(units=st.integers(1, UNITS), source=st.sampled_from("abc"))
    def claim(self, units: int, source: str) -> None:
        self.queue.append(self.pool.claim(units * UNIT, source))
        self.admit()

    @rule(source=st.sampled_from("abc"))
    def claim_little(self, source: str) -> None:
        self.claim(1, source)

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        claim = self.queue.pop(data.draw(st.integers(0, len(self.queue) - 1)))
        self.pool.withdraw(claim)
        self.admit()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        slot = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        end(slot)
        self.pool.release(slot)
        self.admit()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        slot = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.lost.append(slot)
        self.pool.quarantine(slot)
        self.admit()

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def end_late(self, data: st.DataObject) -> None:
        slot = self.lost.pop(data.draw(st.integers(0, len(self.lost) - 1)))
        end(slot, TransferState.FAILED)
        self.pool.sweep()
        self.admit()

    @rule(seconds=st.floats(0, STALL_S))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.pool.sweep()
        self.admit()

    @invariant()
    def every_byte_has_one_owner(self) -> None:
        owners: list[Slot | None] = [None] * self.UNITS
        for slot in (*self.held, *self.lost):
            for unit in range(slot.offset // UNIT, (slot.offset + slot.nbytes) // UNIT):
                assert owners[unit] is None, "leased twice while something may land in it"
                owners[unit] = slot
        free = max(map(len, "".join(" " if o else "x" for o in owners).split()), default=0)
        # Each in its turn: the first one whose source leaves room for others.
        heads = {claim.source: claim for claim in reversed(self.queue)}
        first = [claim for claim in self.queue if claim is heads[claim.source]]
        fair = [claim for claim in first if self.leaves_room(claim)]
        if fair:
            assert fair[0].nbytes > free * UNIT, "kept waiting beside free memory"

    @invariant()
    def numbers_say_what_is(self) -> None:
        numbers = self.pool.numbers
        assert numbers.used_bytes == sum(slot.nbytes for slot in self.held)
        assert numbers.quarantined_bytes == sum(slot.nbytes for slot in self.lost)
        assert numbers.waiting == len(self.queue)


Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestPool = Machine.TestCase


def test_loads_share_the_memory_in_turn() -> None:
    pool, _ = open_pool(2)
    first = [pool.claim(UNIT, "a"), pool.claim(UNIT, "b")]
    one, other = pool.claim(UNIT, "c"), pool.claim(UNIT, "d")
    assert first[0].slot is not None
    pool.release(first[0].slot)
    assert one.slot is not None
    assert other.slot is None


def fill(pool: StagingPool, source: str) -> list[Slot]:
    """All that a source gets, slot by slot; it stays in the queue for more."""
    slots = []
    while (slot := pool.claim(UNIT, source).slot) is not None:
        slots.append(slot)
    return slots


def test_sources_that_stand_still_leave_half_of_what_is_free_to_others() -> None:
    pool, _ = open_pool(64)
    assert [len(fill(pool, source)) for source in "abcdefg"] == [32, 16, 8, 4, 2, 1, 1]


@given(st.lists(st.integers(0, 5), max_size=200))
@settings(deadline=None)
def test_a_source_that_comes_after_some_that_stand_still_is_served_at_once(
    turns: list[int],
) -> None:
    """In whatever order they took what they have."""
    pool, _ = open_pool(64)
    for source in turns:
        pool.claim(UNIT, str(source))
    assert pool.claim(UNIT, "another").slot is not None


def test_sources_that_move_come_to_hold_equal_parts() -> None:
    pool, _ = open_pool(30)
    held = [*fill(pool, "a"), *fill(pool, "b")]  # and one more of each waits
    assert Counter(slot.source for slot in held) == {"a": 15, "b": 7}
    claims = [pool.claim(UNIT, source) for source in "ab" * 100]
    for _ in range(30):
        pool.release(held.pop(0))
        held += [claim.slot for claim in claims if claim.slot and claim.slot not in held]
        claims = [claim for claim in claims if not claim.slot]
    assert Counter(slot.source for slot in pool.used) == {"a": 10, "b": 10}


def test_a_chunk_that_was_passed_over_is_next_when_the_slots_of_its_source_are_back() -> None:
    """Others that come all the time do not keep it waiting."""
    pool, _ = open_pool(4)
    slot = pool.claim(UNIT, "a").slot
    assert slot is not None
    large = pool.claim(3 * UNIT, "a")  # at its bound
    others = [pool.claim(UNIT, source) for source in "bcdefg"]
    for claim in others[:3]:
        assert claim.slot is not None
        pool.release(claim.slot)
    pool.release(slot)
    assert large.slot is None
    late = pool.claim(UNIT, "h")
    for claim in others[3:5]:
        assert claim.slot is not None
        pool.release(claim.slot)
    assert late.slot is None, "it came later"
    assert others[5].slot is not None
    pool.release(others[5].slot)
    assert large.slot is not None
    assert late.slot is not None


def test_what_a_source_has_in_quarantine_counts() -> None:
    pool, _ = open_pool(8)
    for slot in fill(pool, "a"):
        pool.quarantine(slot)
    assert pool.numbers.quarantined_bytes == 4 * UNIT
    assert pool.numbers.used_bytes == UNIT, "one slot in its turn, and no more"
    assert len(fill(pool, "b")) == 1


def test_a_slot_in_quarantine_comes_back_when_its_transfer_ends_late() -> None:
    pool, clock = open_pool(1)
    slot = leased(pool, 1)
    pool.quarantine(slot)
    clock.now += 1e6
    pool.sweep()
    assert pool.numbers.quarantined_bytes == UNIT
    end(slot, TransferState.CANCELLED)
    pool.sweep()
    assert pool.numbers.quarantined_bytes == 0
    assert leased(pool, 1).offset == slot.offset


def test_a_pool_that_quarantine_holds_refuses_loads_after_the_stall_timeout_and_then_at_once() -> (
    None
):
    pool, clock = open_pool(2)
    slots = [leased(pool, 1), leased(pool, 1, "b")]
    waiting = pool.claim(UNIT, "c")
    pool.quarantine(slots[0])
    clock.now += 2 * STALL_S
    pool.sweep()
    assert waiting.error is None, "a load still uses some of it, which will come back"
    pool.quarantine(slots[1])
    clock.now += STALL_S - 0.1
    pool.sweep()
    assert waiting.error is None
    clock.now += 0.2
    pool.sweep()
    assert isinstance(waiting.error, StagingFullError)
    assert "stall_timeout_s" in str(waiting.error)
    assert pool.claim(UNIT, "a").error is not None
    assert pool.numbers.refused == 2
    end(slots[0])
    pool.sweep()
    assert pool.claim(UNIT, "a").slot is not None


def test_a_chunk_that_fits_beside_quarantine_is_served_when_the_one_before_it_is_refused() -> None:
    pool, clock = open_pool(3)
    kept, used = leased(pool, 2), leased(pool, 1, "b")
    pool.quarantine(kept)
    large, small = pool.claim(2 * UNIT, "c"), pool.claim(UNIT, "c")
    end(used)
    pool.release(used)
    clock.now += STALL_S
    pool.sweep()
    assert isinstance(large.error, StagingFullError)
    assert small.slot is not None
    assert pool.numbers.refused == 1


class Connection(Peer):
    """Whose end proves that nothing of a transfer lands any more."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer

    def close(self) -> None:
        self.transfer.stop(TransferState.FAILED)


def test_a_read_that_goes_on_for_too_long_in_quarantine_loses_its_connection() -> None:
    pool, clock = open_pool(1)
    slot = leased(pool, 1)
    assert slot.transfer is not None
    slot.connection = Connection(slot.transfer)
    pool.quarantine(slot)
    clock.now += STALL_S - 0.1
    pool.sweep()
    assert not slot.transfer.is_terminal
    clock.now += 0.2
    pool.sweep()
    pool.sweep()
    assert pool.claim(UNIT, "a").slot is not None


def test_a_chunk_that_can_never_fit_is_refused_with_the_key_to_change() -> None:
    pool, _ = open_pool(2)
    with pytest.raises(ConfigError, match=r"staging_bytes.*write at least"):
        pool.claim(3 * UNIT, "a")


def test_who_waits_for_a_slot_is_told_when_its_turn_has_come_or_never_will() -> None:
    pool, _ = open_pool(2)
    first = leased(pool, 2)
    told: list[str] = []
    pool.claim(2 * UNIT, "b", lambda: told.append("b"))
    pool.claim(2 * UNIT, "c", lambda: told.append("c"))
    end(first)
    pool.release(first)
    assert told == ["b"]


def test_memory_may_be_written_while_a_transfer_into_it_goes_on() -> None:
    pool, _ = open_pool(1)
    slot = leased(pool, 1)
    assert slot.offset % ALIGNMENT == 0
    pool.quarantine(slot)
    assert pool.may_be_written
    end(slot)
    assert not pool.may_be_written
