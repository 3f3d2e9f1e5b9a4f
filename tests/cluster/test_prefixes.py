"""What the router knows of the engines' caches: as much as their events say, and nothing more."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from kvferry.control.cache_events import ReceivedEvents
from kvferry.router import prefixes
from kvferry.router.prefixes import CachedBlocks, PrefixIndex, Prompt
from kvferry.serving.messages import KVEventsPlace
from kvferry.testing.waiting import until
from tests.publishers import publishers


def stored(hashes, tokens, *, parent=None, size=2, group=0, **changes):
    values = {"lora_id": None, "lora_name": None, "medium": "GPU"} | changes
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=size,
        group_idx=group,
        **values,
    )


def removed(hashes, group=0, medium="GPU"):
    return BlockRemoved(block_hashes=hashes, medium=medium, group_idx=group)


def received(*events, number=0, is_gapless=True):
    return ReceivedEvents(number, KVEventBatch(ts=0.0, events=list(events)), is_gapless)


def known(*events):
    blocks = CachedBlocks()
    blocks.apply(received(*events))
    return blocks


def held(blocks, tokens):
    return blocks.held(Prompt(tokens))


# ---- the law ------------------------------------------------------------------------------------


class Cache:
    """A prefix cache that is the truth: group → beginnings of which the last block is there."""

    def __init__(self, rng, sizes):
        self.rng = rng
        self.sizes = sizes
        self.names = itertools.count(1)
        self.clear()

    def clear(self):
        self.beginnings: list[set[tuple[int, ...]]] = [set() for _ in self.sizes]
        self.hashes = {}

    def hash_of(self, beginning):
        """One for the same tokens in all groups, as engines have it."""
        return self.hashes.setdefault(beginning, next(self.names))

    def step(self):
        """Something happens; the events that tell of it."""
        match self.rng.randrange(10):
            case 0:
                self.clear()
                return [AllBlocksCleared()]
            case 1 | 2 | 3:
                return [event for each in range(len(self.sizes)) for event in self.evict(each)]
            case _:
                tokens = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 14))]
                return [
                    event for each in range(len(self.sizes)) for event in self.fill(each, tokens)
                ]

    def fill(self, group, tokens):
        size, there = self.sizes[group], self.beginnings[group]
        whole = [tuple(tokens[: end * size]) for end in range(1, len(tokens) // size + 1)]
        if group and self.rng.randrange(2):
            whole = whole[-1:]  # a window keeps no more
        new = [beginning for beginning in whole if beginning not in there]
        there.update(new)
        for beginning in new:
            parent = beginning[:-size]
            yield stored(
                [self.hash_of(beginning)],
                list(beginning[-size:]),
                parent=self.hash_of(parent) if parent else None,
                size=size,
                group=group,
            )

    def evict(self, group):
        there = self.beginnings[group]
        gone = self.rng.sample(sorted(there), min(len(there), self.rng.randrange(3)))
        there.difference_update(gone)
        if gone:
            yield removed([self.hash_of(each) for each in gone], group)

    def known(self):
        """Groups that there are."""
        return range(len(self.sizes))

    def held(self, tokens):
        """Tokens that a request hits: whole in one group, the last block in the others."""
        best = 0
        for size, there in zip(self.sizes, self.beginnings, strict=True):
            for end in range(size, len(tokens) + 1, size):
                if tuple(tokens[:end]) not in there:
                    break
                if all(tuple(tokens[:end]) in self.beginnings[group] for group in self.known()):
                    best = max(best, end)
        return best


class Told(Cache):
    """What somebody knows who believes the events, and forgets when some are lost."""

    def __init__(self, sizes):
        super().__init__(random.Random(0), sizes)
        self.heard_of = set()

    def known(self):
        return self.heard_of

    def apply(self, batch):
        if not batch.is_gapless:
            self.clear()
        for event in batch.batch.events:
            if isinstance(event, AllBlocksCleared):
                self.clear()
                continue
            assert event.group_idx is not None
            if isinstance(event, BlockRemoved):
                self.heard_of.add(event.group_idx)
                for each in event.block_hashes:
                    self.beginnings[event.group_idx].discard(self.hashes.get(each))
            else:
                (name,), parent = event.block_hashes, event.parent_block_hash
                is_known = any(self.hashes.get(parent) in there for there in self.beginnings)
                if parent is None or is_known:
                    self.heard_of.add(event.group_idx)
                    before = () if parent is None else self.hashes[parent]
                    self.hashes[name] = before + tuple(event.token_ids)
                    self.beginnings[event.group_idx].add(self.hashes[name])


def check(make, seed):
    """An engine's events reach the index, but for those that are lost."""
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "_SHORTEST", rng.choice([1, 1, 2]))
        check_events(make, rng)


def check_events(make, rng):
    sizes = rng.choice([(1,), (2,), (3,), (2, 2), (2, 2, 2)])
    engine, blocks, told = Cache(rng, sizes), make(), Told(sizes)
    is_gapless = True
    for number in range(40):
        if rng.randrange(12) == 0:  # it is started again, and counts from 0 again
            engine.clear()
            is_gapless = False
        batch = received(*engine.step(), number=number, is_gapless=is_gapless)
        if rng.randrange(8) == 0:
            is_gapless = False
            continue  # until the next batch nobody can know that this one is lost
        blocks.apply(batch)
        told.apply(batch)
        is_gapless = True
        for _ in range(4):
            tokens = [rng.randrange(2) for _ in range(rng.randrange(14))]
            found = held(blocks, tokens)
            assert found <= engine.held(tokens), "it says what the engine has not"
            assert found == told.held(tokens), "it does not say what the events say"
        assert len(blocks) == sum(map(len, told.beginnings))


def is_caught(make, seed):
    try:
        check(make, seed)
    except AssertionError:
        return True
    return False


@given(st.integers(0, 2**32))
def test_index_knows_what_the_events_say_and_never_more_than_the_engine_has(seed):
    check(CachedBlocks, seed)


class BelievesEvictedBlocks(CachedBlocks):
    def _remove(self, event):
        pass


class BelievesAfterALoss(CachedBlocks):
    def apply(self, batch, most=10**6):
        super().apply(received(*batch.batch.events), most)


class BelievesWhatWasCleared(CachedBlocks):
    def apply(self, batch, most=10**6):
        events = [e for e in batch.batch.events if not isinstance(e, AllBlocksCleared)]
        super().apply(received(*events, is_gapless=batch.is_gapless), most)


class TakesAnyParentForTheStart(CachedBlocks):
    def _key(self, number, size):
        found = super()._key(number, size)
        return prefixes.START if found < 0 else found


class BelievesTheRestOfAChain(CachedBlocks):
    def _remove(self, event):
        group = self._groups.get(event.group_idx)
        if group is None:
            super()._remove(event)
            return
        for each in event.block_hashes:
            if (known := group.by_hash.pop(prefixes.number_of(each), None)) is not None:
                group.chains.pop(known, None)


class LooksAtOneGroup(CachedBlocks):
    def held(self, prompt):
        groups = tuple(self._groups.values())
        return max((group.count(prompt) for group in groups), default=0)


@pytest.mark.parametrize(
    "broken",
    [
        BelievesEvictedBlocks,
        BelievesAfterALoss,
        BelievesWhatWasCleared,
        TakesAnyParentForTheStart,
        BelievesTheRestOfAChain,
        LooksAtOneGroup,
    ],
)
def test_law_catches_an_index_that_lies(broken):
    assert any(is_caught(broken, seed) for seed in range(500))


# ---- what is kept -------------------------------------------------------------------------------


def test_engines_with_blocks_of_other_sizes_are_compared():
    prompt = Prompt(range(100, 112))
    small = known(stored([1, 2, 3], list(range(100, 106)), size=2))
    large = known(stored([b"\7" * 32, b"\10" * 32], list(range(100, 108)), size=4))
    assert (small.held(prompt), large.held(prompt)) == (6, 8)


def test_one_block_in_the_middle_ends_what_is_held():
    blocks = known(stored([1, 2, 3], [1, 2, 3, 4, 5, 6]))
    blocks.apply(received(removed([2])))
    assert held(blocks, [1, 2, 3, 4, 5, 6]) == 2
    blocks.apply(received(stored([2], [3, 4], parent=1)))
    assert held(blocks, [1, 2, 3, 4, 5, 6, 7]) == 6


def test_long_chains_are_shortened_prolonged_and_left_where_prompts_part():
    tokens = list(range(2 * 20))
    blocks = known(stored(list(range(1, 21)), tokens))
    blocks.apply(received(stored([21], [40, 41], parent=20), stored([31], [7, 7], parent=12)))
    assert held(blocks, [*tokens, 40, 41]) == 42
    assert held(blocks, [*tokens[:17], 99, 99, 99]) == 16
    assert held(blocks, [*tokens[:24], 7, 7, 7]) == 26
    blocks.apply(received(removed([15])))
    assert held(blocks, tokens) == 28
    blocks.apply(received(stored([15], tokens[28:30], parent=14)))
    assert held(blocks, [*tokens, 40, 41]) == 42
    blocks.apply(received(removed([1])))
    assert held(blocks, tokens) == 0


def test_hash_that_is_given_twice_in_one_event_breaks_the_chain_where_it_was():
    blocks = known(stored([*range(1, 10), 3, 11], list(range(22))))
    assert held(blocks, list(range(22))) == 4
    assert len(blocks) == 10


def test_window_group_finds_the_parent_that_it_no_longer_has():
    blocks = known(stored([1, 2], [1, 2, 3, 4], group=0), stored([2], [3, 4], parent=1, group=1))
    assert held(blocks, [1, 2, 3, 4, 5]) == 4
    assert held(blocks, [1, 2]) == 0  # the window's block is not there
    blocks.apply(received(removed([2], group=1)))
    assert held(blocks, [1, 2, 3, 4, 5]) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_name": "poet"},
        {"lora_id": 1},
        {"extra_keys": [("salt",)]},
        {"medium": "CPU"},
        {"size": 3},
        {"size": 0},
        {"size": -2},
    ],
)
def test_blocks_that_are_more_than_tokens_or_elsewhere_are_left_out(changes):
    blocks = known(stored([1], [1, 2], **changes), stored([2], [3, 4], parent=1))
    assert len(blocks) == 0
    assert held(blocks, [1, 2, 3, 4]) == 0


@pytest.mark.parametrize("token", [-1, 2**32])
def test_numbers_that_are_no_tokens_are_left_out(token):
    assert len(known(stored([1], [1, token]))) == 0


def test_extra_keys_that_are_none_change_nothing():
    assert held(known(stored([1], [1, 2], extra_keys=[None])), [1, 2]) == 2


def test_block_that_left_another_memory_is_still_here():
    blocks = known(stored([1], [1, 2]), removed([1], medium="CPU"))
    assert held(blocks, [1, 2]) == 2


def test_hash_that_stands_for_other_tokens_forgets_the_first_ones():
    blocks = known(stored([1], [1, 2]), stored([1], [5, 6]))
    assert (held(blocks, [1, 2]), held(blocks, [5, 6])) == (0, 2)
    blocks.apply(received(removed([1])))
    assert (held(blocks, [1, 2]), held(blocks, [5, 6])) == (0, 0)


def test_no_more_blocks_are_kept_than_there_is_room_for():
    blocks = CachedBlocks()
    blocks.apply(received(stored([1, 2, 3], [1, 2, 3, 4, 5, 6])), 2)
    assert (len(blocks), held(blocks, [1, 2, 3, 4, 5, 6])) == (2, 4)
    blocks.apply(received(stored([9], [9, 9])), 2)
    assert held(blocks, [9, 9]) == 0
    blocks.apply(received(removed([2]), stored([9], [9, 9])), 2)
    assert held(blocks, [9, 9]) == 2


# ---- listening ----------------------------------------------------------------------------------


@pytest.fixture
def open_publisher():
    with publishers() as open_one:
        yield open_one


@pytest.fixture
def make_index():
    made = []

    def make(**options):
        made.append(PrefixIndex(**options))
        return made[-1]

    yield make
    for index in made:
        index.close()


def place_of(publisher, **changes):
    values = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    return KVEventsPlace(**(values | changes))


def hears(index, place, publisher, tokens=(70, 70)):
    """Publishes until the index has heard it."""
    names = itertools.count(1000)

    def is_heard():
        publisher.publish([stored([next(names)], list(tokens))])
        return index.blocks(place).held(Prompt(tokens)) == len(tokens)

    until(is_heard)


def test_index_follows_engines_and_forgets_them(open_publisher, make_index):
    first, second, index = open_publisher(), open_publisher(), make_index()
    assert index.is_empty
    first.publish([stored([1, 2], [1, 2, 3, 4])])
    index.follow([place_of(first), place_of(second)])
    hears(index, place_of(first), first)
    hears(index, place_of(second), second)
    assert not index.is_empty
    assert held(index.blocks(place_of(first)), [1, 2, 3, 4]) == 4  # it was missed, and replayed
    assert held(index.blocks(place_of(second)), [1, 2, 3, 4]) == 0
    index.follow([place_of(second)])
    assert index.blocks(place_of(first)) is None
    assert index.blocks(None) is None
    assert index.forgotten == 1
    index.follow([place_of(first), place_of(second)])
    hears(index, place_of(first), first, (71, 71))
    assert held(index.blocks(place_of(first)), [1, 2, 3, 4]) == 4


def test_engine_that_says_that_it_was_started_again_is_a_new_one(open_publisher, make_index):
    publisher, index = open_publisher(replay_endpoint=None), make_index()
    index.follow([place_of(publisher, start="a")])
    hears(index, place_of(publisher, start="a"), publisher)
    index.follow([place_of(publisher, start="b")])
    assert len(index.blocks(place_of(publisher, start="b"))) == 0


def test_lost_events_that_nobody_has_make_it_forget(open_publisher, make_index):
    publisher, index = open_publisher(buffer_steps=1), make_index()
    place = place_of(publisher)
    index.follow([place])
    hears(index, place, publisher)
    publisher.next_number += 5  # as if they had been dropped
    hears(index, place, publisher, (71, 71))
    assert held(index.blocks(place), [70, 70]) == 0
    assert index.forgotten == 1


def test_what_is_no_event_is_forgotten_and_listened_past(open_publisher, make_index, monkeypatch):
    monkeypatch.setattr(prefixes, "RETRY_S", 0.01)
    publisher, index = open_publisher(replay_endpoint=None), make_index()
    place = place_of(publisher)
    index.follow([place])
    hears(index, place, publisher)
    publisher.socket.send_multipart((b"", b"12345678", b"\xc1"))
    until(lambda: held(index.blocks(place), [70, 70]) == 0)
    hears(index, place, publisher, (72, 72))


def test_all_engines_together_have_no_more_than_there_is_room_for(open_publisher, make_index):
    first, second, index = open_publisher(), open_publisher(), make_index(most_blocks=3)
    places = [place_of(first), place_of(second)]
    index.follow(places)
    first.publish([stored([1, 2, 3, 4, 5, 6], list(range(12)))])
    until(lambda: first.publish([removed([77])]) or len(index.blocks(places[0])) == 3)
    second.publish([stored([1], [1, 2])])
    counts: Counter[str] = Counter()

    def has_heard():
        counts["asked"] += 1
        second.publish([AllBlocksCleared(), stored([2], [3, 4])])
        first.publish([AllBlocksCleared()])
        return len(index.blocks(places[1])) == 1

    until(has_heard)
    assert len(index.blocks(places[0])) == 0
