"""Who has the beginning of a prompt: what engines tell of their prefix caches, kept for look-ups.

Engines publish what enters and leaves their caches (:mod:`kvferry.control.cache_events`). Each has
hashes of its own and blocks of its own size, so neither can be compared. A block gets a key here,
made of its tokens and of the key of the block before it. The keys of a prompt are made once for
each block size, and looked up at all engines whose blocks have that size. Where blocks were stored
one behind the other and none of them has left since, a look at the last one tells of all::

    events of an engine ──▶ thread ──▶ its blocks: hash → key, by group
                                             ▲
    prompt ──▶ keys, by block size ──────────┘ how many tokens from the start?

What is found is a guess: the engine may evict the blocks before it is asked. But nothing is guessed
beyond the events, unless that is asked for where there are none (:class:`SentPrompts`). Where some
are lost, or an engine was started again, all that was known of it is forgotten. A wrong guess costs
a computed prompt, and never changes a token.

An engine's blocks belong to the thread that listens to it. Look-ups come from the router's thread
and take no lock: each is of one key or of a copy of a chain, and at worst they see half of what the
thread does.
"""

import logging
import secrets
import threading
import time
from array import array
from bisect import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter

from kvferry.cache.events import MEDIUM, BlockHash, BlockRemoved, BlockStored
from kvferry.cluster.messages import KVEventsPlace
from kvferry.control.cache_events import CacheEventSubscriber, ReceivedEvents
from kvferry.errors import KVFerryError
from kvferry.lifetimes import Closing

logger = logging.getLogger(__name__)

MOST_BLOCKS = 1_000_000
"""Blocks that an index keeps of all engines; of more it knows nothing. They take some 160 MB."""
SENT_BLOCK = 32
"""Tokens of a block of what engines were sent; what they keep of a prompt is no finer."""
MOST_SENT_BLOCKS = 16_384
"""Blocks of what one engine was sent that are kept: half a million tokens, in some 2 MB."""
LISTEN_S = 0.5
"""Seconds after which a listener looks whether it is still wanted."""
PAUSE_S = 1e-4
"""Seconds between two batches, in which the router's thread may run: there are many in a replay."""
REPLAY_S = 30.0
"""Seconds that an engine has to send each batch again that was missed: it may only be slow."""
END_S = 2.0
"""Seconds for which the end of a listener is waited for."""
RETRY_S = 5.0
"""Seconds after which a listener that could not listen tries again."""

_RUN = 64
"""Blocks of a prompt whose keys are made at a time, and more where somebody looks further."""
_SHORTEST = 8
"""Blocks with which a chain begins. One takes the memory of a block."""
_MOST_GROUPS = 64
"""KV cache groups of an engine."""
_TOKEN_BYTES = array("I").itemsize
_BITS = (1 << 60) - 1  # Python keeps a number of 60 bits in 32 bytes, a longer one in 48
_START = secrets.randbits(60)
"""Key before the first block: random, so that nobody can make prompts whose keys are the same."""


def _packed(tokens: Sequence[int]) -> bytes:
    """Four bytes for each: what lies together is read much faster than Python's numbers are.

    Raises:
        OverflowError: a number is no token.
    """
    return array("I", tokens).tobytes()


def _keys(key: int, packed: bytes, size: int) -> list[int]:
    """The keys of the whole blocks of tokens, which come behind the block of ``key``."""
    step = size * _TOKEN_BYTES
    return [
        key := hash((key, packed[start : start + step])) & _BITS
        for start in range(0, len(packed) - step + 1, step)
    ]


class Prompt:
    """A prompt that is looked up."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.num_tokens = len(tokens)
        self._packed = _packed(tokens)
        self._keys: dict[int, list[int]] = {}

    def key(self, size: int, index: int) -> int:
        """Of one of its whole blocks of ``size`` tokens."""
        return self._made(size, index)[index]

    def some_keys(self, size: int, index: int) -> list[int]:
        """Of a block and of some that follow it."""
        return self._made(size, index)[index : index + _RUN]

    def _made(self, size: int, index: int) -> list[int]:
        """The keys that are made already, after this up to a block's at least."""
        keys = self._keys.setdefault(size, [])
        if index >= len(keys):
            last = max(index + 1, len(keys) + _RUN)
            step = size * _TOKEN_BYTES
            packed = self._packed[len(keys) * step : last * step]
            keys += _keys(keys[-1] if keys else _START, packed, size)
        return keys


@dataclass(slots=True)
class _Chain:
    """Blocks that follow each other and are all here."""

    first: int
    """Key of the first one."""
    keys: "array[int]"
    """Of all of them."""

    def count(self, prompt: Prompt, size: int, start: int) -> int:
        """How many blocks of a prompt these are, from its block ``start`` on.

        A key stands for all that comes before it: where the keys at one place are the same, they
        are so at every place before that.
        """
        keys = self.keys[: prompt.num_tokens // size - start]  # another thread may shorten it
        if not keys or keys[-1] == prompt.key(size, start + len(keys) - 1):
            return len(keys)
        return bisect(range(len(keys)), 0, key=lambda at: keys[at] != prompt.key(size, start + at))


_NOT_HERE = _Chain(-1, array("Q"))


@dataclass(slots=True)
class _Group:
    """The blocks of one KV cache group."""

    size: int
    """Tokens per block."""
    by_hash: dict[int, int] = field(default_factory=dict)
    """The engine's hash → key."""
    chains: dict[int, _Chain | None] = field(default_factory=dict)
    """Key of each block → the chain that it is part of, if it is part of one."""

    def count(self, prompt: Prompt) -> int:
        """Blocks of a prompt that are here, all from the start on."""
        count, most = 0, prompt.num_tokens // self.size
        while self.chains and count < most:
            for key in prompt.some_keys(self.size, count):
                chain = self.chains.get(key, _NOT_HERE)
                if chain is _NOT_HERE:
                    return count
                if chain is not None and chain.first == key:
                    count += max(1, chain.count(prompt, self.size, count))
                    break
                count += 1
        return count

    def ends_at(self, prompt: Prompt, tokens: int) -> bool:
        """Whether the block of a prompt is here that ends behind so many tokens."""
        if not self.chains or tokens % self.size:
            return False
        return prompt.key(self.size, tokens // self.size - 1) in self.chains

    def add(self, parent: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Blocks are here that follow ``parent`` and each other: hash and key of each."""
        before, chain = parent, self._ending_in(parent)
        for number, key in blocks:
            known = self.by_hash.get(number)
            if known is not None and known != key:
                self._drop(known)
                chain = self._ending_in(before)
            self.by_hash[number] = key
            if key in self.chains:
                chain = self._ending_in(key)
            else:
                if chain is None and len(blocks) >= _SHORTEST:
                    chain = _Chain(key, array("Q"))
                if chain is not None:
                    chain.keys.append(key)
                self.chains[key] = chain
            before = key

    def remove(self, number: int) -> None:
        """A block is not here any more."""
        if (key := self.by_hash.pop(number, None)) is not None:
            self._drop(key)

    def _ending_in(self, key: int) -> _Chain | None:
        chain = self.chains.get(key)
        return chain if chain is not None and chain.keys and chain.keys[-1] == key else None

    def _drop(self, key: int) -> None:
        chain = self.chains.pop(key, None)
        while chain is not None and (last := chain.keys.pop()) != key:
            self.chains[last] = None  # it is here, and what comes before it is not


class CachedBlocks:
    """What one engine's events say that its prefix cache holds.

    A beginning counts as held where one group has all its blocks and every other group the last
    one: a group with a window, or with states, keeps no more of it. Blocks whose hash comes from
    more than tokens (a LoRA adapter, a salt, an image) are left out, and with them what follows
    them; so are blocks outside of the memory that the engine computes in.
    """

    def __init__(self) -> None:
        self.forgotten = 0
        """How often all was forgotten because of what was lost."""
        self._groups: dict[int | None, _Group] = {}

    def __len__(self) -> int:
        """Blocks that are known."""
        return sum(len(group.by_hash) for group in tuple(self._groups.values()))

    def forget(self) -> None:
        """Knows nothing any more."""
        if len(self):
            self.forgotten += 1
        self._clear()

    def apply(self, received: ReceivedEvents, most: int = MOST_BLOCKS) -> None:
        """Takes in a batch; of stored blocks only until ``most`` are known."""
        if not received.is_gapless:
            self.forget()
        for event in received.batch.events:
            if isinstance(event, BlockStored):
                self._store(event, most - len(self))
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self._clear()

    def held(self, prompt: Prompt) -> int:
        """Tokens from the start of a prompt that the engine has."""
        groups = tuple(self._groups.values())
        if not groups:
            return 0
        longest_tokens, longest = max(
            ((group.size * group.count(prompt), group) for group in groups), key=itemgetter(0)
        )
        others = [group for group in groups if group is not longest]
        for tokens in range(longest_tokens, 0, -longest.size):
            if all(group.ends_at(prompt, tokens) for group in others):
                return tokens
        return 0

    def _clear(self) -> None:
        # That there are these groups still holds: nothing is held that one of them lacks.
        self._groups = {number: _Group(group.size) for number, group in self._groups.items()}

    def _store(self, event: BlockStored, room: int) -> None:
        size = event.block_size
        is_plain = (
            event.lora_id is None and event.lora_name is None and not any(event.extra_keys or ())
        )
        is_whole = size > 0 and len(event.token_ids) == size * len(event.block_hashes)
        parent = event.parent_block_hash
        key = _START if parent is None else self._key(parent, size)
        is_here = event.medium in (None, MEDIUM)
        if room <= 0 or key is None or not (is_here and is_plain and is_whole):
            return
        try:
            packed = _packed(event.token_ids)
        except OverflowError:
            return
        group = self._groups.get(event.group_idx)
        if group is None or group.size != size:
            if group is None and len(self._groups) >= _MOST_GROUPS:
                return
            group = self._groups[event.group_idx] = _Group(size)
        new = zip(map(_number, event.block_hashes), _keys(key, packed, size), strict=True)
        group.add(key, list(islice(new, room)))

    def _key(self, block_hash: BlockHash, size: int) -> int | None:
        """Of a block that any group has: the same tokens have the same hash in all groups, and one
        with a window may no longer have the block before a new one.
        """
        number = _number(block_hash)
        found = (group.by_hash.get(number) for group in self._groups.values() if group.size == size)
        return next((key for key in found if key is not None), None)

    def _remove(self, event: BlockRemoved) -> None:
        if event.medium not in (None, MEDIUM):
            return
        group = self._groups.get(event.group_idx)
        if group is None:
            if len(self._groups) < _MOST_GROUPS:
                self._groups[event.group_idx] = _Group(1)  # it is there, and lacks something
            return
        for block_hash in event.block_hashes:
            group.remove(_number(block_hash))


def _number(block_hash: BlockHash) -> int:
    if isinstance(block_hash, bytes):
        block_hash = int.from_bytes(block_hash[-8:], "big")
    return block_hash & _BITS


class SentPrompts:
    """What an engine should have that tells nothing itself: the prompts that it was sent last.

    Nobody knows how much it keeps. Each time it had less than was thought, only half as much is
    thought from then on, and with each prompt a little more again.
    """

    def __init__(self, most_blocks: int = MOST_SENT_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._room = most_blocks
        self._keys: dict[int, None] = {}
        """Of blocks of :data:`SENT_BLOCK` tokens, the last one that was sent at the end."""

    def __len__(self) -> int:
        """Blocks that it should have."""
        return len(self._keys)

    def note(self, prompt: Prompt) -> None:
        """It was sent a prompt, and has computed or loaded all of it."""
        # An engine evicts the end of a prompt before its beginning.
        for index in reversed(range(prompt.num_tokens // SENT_BLOCK)):
            key = prompt.key(SENT_BLOCK, index)
            self._keys.pop(key, None)
            self._keys[key] = None
        self._room = min(self._room + 1, self._most_blocks)
        self._trim()

    def held(self, prompt: Prompt) -> int:
        """Tokens from the start of a prompt that it should have."""
        for index in range(prompt.num_tokens // SENT_BLOCK):
            if prompt.key(SENT_BLOCK, index) not in self._keys:
                return index * SENT_BLOCK
        return prompt.num_tokens // SENT_BLOCK * SENT_BLOCK

    def missed(self) -> None:
        """It had less than was thought."""
        self._room = max(1, len(self) // 2)
        self._trim()

    def forget(self) -> None:
        """It has gone, and what comes in its place has nothing."""
        self._keys.clear()
        self._room = self._most_blocks

    def _trim(self) -> None:
        for key in list(islice(self._keys, max(0, len(self) - self._room))):
            del self._keys[key]


class _Listener(threading.Thread):
    """Takes in what one engine publishes, until it is told to stop."""

    def __init__(self, place: KVEventsPlace, index: "PrefixIndex") -> None:
        super().__init__(name=f"events {place.endpoint}", daemon=True)
        self.blocks = CachedBlocks()
        self._place = place
        self._index = index
        self._ended = threading.Event()
        self.start()

    def stop(self) -> None:
        """Has it end, within :data:`LISTEN_S`."""
        self._ended.set()

    def run(self) -> None:
        """The thread."""
        while not self._ended.is_set():
            try:
                self._listen()
            except KVFerryError as error:
                logger.warning("KV cache events of %s: %s", self._place.endpoint, error)
                self._ended.wait(RETRY_S)

    def _listen(self) -> None:
        place = self._place
        try:
            with CacheEventSubscriber(
                place.endpoint,
                replay_endpoint=place.replay_endpoint,
                topic=place.topic,
                replay_timeout_s=REPLAY_S,
            ) as subscriber:
                while not self._ended.is_set():
                    received = subscriber.receive(LISTEN_S)
                    if received is not None:
                        self.blocks.apply(received, self._index.room_for(self.blocks))
                        self._ended.wait(PAUSE_S)
        finally:
            self.blocks.forget()  # what comes next is not heard


class PrefixIndex(Closing):
    """What all engines of a router have."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._listeners: dict[KVEventsPlace, _Listener] = {}
        self._forgotten = 0

    @property
    def is_empty(self) -> bool:
        """Whether no engine tells anything."""
        return not self._listeners

    @property
    def forgotten(self) -> int:
        """How often all that was known of an engine was forgotten."""
        return self._forgotten + sum(each.blocks.forgotten for each in self._listeners.values())

    def follow(self, places: Collection[KVEventsPlace]) -> None:
        """Listens to these from now on, and forgets all others."""
        for gone in self._listeners.keys() - set(places):
            listener = self._listeners.pop(gone)
            listener.stop()
            self._forgotten += listener.blocks.forgotten + bool(len(listener.blocks))
        for place in places:
            if place not in self._listeners:
                self._listeners[place] = _Listener(place, self)

    def blocks(self, place: KVEventsPlace | None) -> CachedBlocks | None:
        """What is known of an engine; ``None`` where nobody listens to it."""
        listener = None if place is None else self._listeners.get(place)
        return None if listener is None else listener.blocks

    def room_for(self, blocks: CachedBlocks) -> int:
        """Blocks that may be known of one engine beside what is known of the others."""
        known = sum(len(each.blocks) for each in tuple(self._listeners.values()))
        return self._most_blocks - known + len(blocks)

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        listeners = tuple(self._listeners.values())
        self.follow(())
        deadline = time.monotonic() + END_S
        for listener in listeners:
            listener.join(max(0.0, deadline - time.monotonic()))
