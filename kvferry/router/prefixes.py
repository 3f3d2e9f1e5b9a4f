"""Index of the engines' prefix caches, for look-ups of prompts.

Engines publish each block that enters or leaves their caches (:mod:`kvferry.control.cache_events`).
Each engine has its own hash function and block size, so hashes and blocks of two engines cannot be
compared. The index gives each block a key, made of the block's tokens and of the key of the block
before it. The keys of a prompt are made once for each block size, and looked up at all engines with
this block size. If the blocks of a chain were stored one after the other and none has left since,
one comparison of the last block covers the whole chain::

    events of an engine ──▶ thread ──▶ its blocks: hash → key, by group
                                             ▲
    prompt ──▶ keys, by block size ──────────┘ how many tokens from the start?

The result is an estimate: the engine may evict the blocks before it gets the request. The index
assumes nothing beyond the events, except for engines without events if this is configured
(:class:`SentPrompts`). If events are lost, or an engine restarts, the index forgets the whole cache
of this engine. A wrong estimate costs a prompt computation, and never changes a token.

Only the thread that listens to an engine changes the engine's blocks. Look-ups come from the
router's thread and take no lock: each look-up reads one key or a copy of a chain. In the worst case
a look-up sees half of the thread's change.
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
from kvferry.control.cache_events import CacheEventSubscriber, ReceivedEvents
from kvferry.errors import KVFerryError
from kvferry.lifetimes import Closing
from kvferry.serving.messages import KVEventsPlace

logger = logging.getLogger(__name__)

MOST_BLOCKS = 1_000_000
"""Maximum number of blocks in an index of all engines; further blocks are ignored. This many blocks
take about 160 MB."""
SENT_BLOCK = 32
"""Number of tokens per block of sent prompts; engines keep prompts in blocks no smaller than
this."""
MOST_SENT_BLOCKS = 16_384
"""Maximum number of sent blocks kept per engine: half a million tokens, in about 2 MB."""
LISTEN_S = 0.5
"""Seconds between two checks of a listener whether it should stop."""
PAUSE_S = 1e-4
"""Seconds between two batches, so that the router's thread may run: a replay has many batches."""
REPLAY_S = 30.0
"""Maximum number of seconds until an engine resends a missed batch: the engine may only be slow."""
END_S = 2.0
"""Maximum number of seconds to wait for the end of the listeners."""
RETRY_S = 5.0
"""Seconds before a listener tries again after an error."""

_RUN = 64
"""Smallest number of blocks whose keys are made at a time; a look-up further into the prompt makes
more."""
_SHORTEST = 8
"""Smallest number of new blocks for which a chain begins. A chain takes the memory of a block."""
_MOST_GROUPS = 64
"""Maximum number of KV cache groups of an engine."""
_TOKEN_BYTES = array("I").itemsize
_BITS = (1 << 60) - 1  # Python keeps a number of 60 bits in 32 bytes, a longer number in 48
START = secrets.randbits(60)
"""Key before the first block: random, so that clients cannot make two prompts with the same
keys."""


def _packed(tokens: Sequence[int]) -> bytes:
    """Four bytes per token: reading contiguous memory is much faster than reading Python's numbers.

    Raises:
        OverflowError: a number is not a token.
    """
    return array("I", tokens).tobytes()


def _keys(key: int, packed: bytes, size: int) -> list[int]:
    """Keys of the whole blocks of ``size`` tokens that follow the block of ``key``."""
    step = size * _TOKEN_BYTES
    return [
        key := hash((key, packed[start : start + step])) & _BITS
        for start in range(0, len(packed) - step + 1, step)
    ]


class Prompt:
    """A prompt for look-ups."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.num_tokens = len(tokens)
        self._packed = _packed(tokens)
        self._keys: dict[int, list[int]] = {}

    def key(self, size: int, index: int) -> int:
        """Key of the block with index ``index``, among the prompt's whole blocks of ``size``
        tokens.
        """
        return self._made(size, index)[index]

    def some_keys(self, size: int, index: int) -> list[int]:
        """Keys of the block with index ``index`` and of some blocks after it."""
        return self._made(size, index)[index : index + _RUN]

    def _made(self, size: int, index: int) -> list[int]:
        """The keys made so far, at least up to the block with index ``index``."""
        keys = self._keys.setdefault(size, [])
        if index >= len(keys):
            last = max(index + 1, len(keys) + _RUN)
            step = size * _TOKEN_BYTES
            packed = self._packed[len(keys) * step : last * step]
            keys += _keys(keys[-1] if keys else START, packed, size)
        return keys


@dataclass(slots=True)
class _Chain:
    """Consecutive blocks, all of them in the cache."""

    first: int
    """Key of the first block."""
    keys: "array[int]"
    """Keys of all blocks."""

    def count(self, prompt: Prompt, size: int, start: int) -> int:
        """Number of the chain's blocks in a prompt, from block ``start`` of the prompt on.

        A key stands for all blocks before it: if the keys at a position are equal, the keys at all
        earlier positions are equal too.
        """
        keys = self.keys[: prompt.num_tokens // size - start]  # a copy: the thread may shorten it
        if not keys or keys[-1] == prompt.key(size, start + len(keys) - 1):
            return len(keys)
        return bisect(range(len(keys)), 0, key=lambda at: keys[at] != prompt.key(size, start + at))


_NOT_HERE = _Chain(-1, array("Q"))


@dataclass(slots=True)
class _Group:
    """The blocks of one KV cache group."""

    size: int
    """Number of tokens per block."""
    by_hash: dict[int, int] = field(default_factory=dict)
    """The engine's hash → key."""
    chains: dict[int, _Chain | None] = field(default_factory=dict)
    """Key of each block → the block's chain; ``None`` for a block without a chain."""

    def count(self, prompt: Prompt) -> int:
        """Number of consecutive blocks in the cache, from the start of a prompt."""
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
        """Whether the cache has the block of a prompt that ends after ``tokens`` tokens."""
        if not self.chains or tokens % self.size:
            return False
        return prompt.key(self.size, tokens // self.size - 1) in self.chains

    def add(self, parent: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Adds consecutive blocks after ``parent``: hash and key of each block."""
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
        """Removes a block."""
        if (key := self.by_hash.pop(number, None)) is not None:
            self._drop(key)

    def _ending_in(self, key: int) -> _Chain | None:
        chain = self.chains.get(key)
        return chain if chain is not None and chain.keys and chain.keys[-1] == key else None

    def _drop(self, key: int) -> None:
        chain = self.chains.pop(key, None)
        while chain is not None and (last := chain.keys.pop()) != key:
            self.chains[last] = None  # in the cache, but its predecessor is not


class CachedBlocks:
    """Contents of one engine's prefix cache according to the engine's events.

    The engine holds a beginning of a prompt if one group has all blocks of this beginning and every
    other group has the last block: a group with a window, or with states, keeps no more. Three
    kinds of blocks are ignored: blocks whose hash depends on more than tokens (a LoRA adapter, a
    salt, an image), all blocks after such a block, and blocks outside of the memory used for
    computation.
    """

    def __init__(self) -> None:
        self.forgotten = 0
        """Number of times that the whole cache was forgotten because of lost events."""
        self._groups: dict[int | None, _Group] = {}

    def __len__(self) -> int:
        """Number of known blocks."""
        return sum(len(group.by_hash) for group in tuple(self._groups.values()))

    def forget(self) -> None:
        """Forgets the whole cache."""
        if len(self):
            self.forgotten += 1
        self._clear()

    def apply(self, received: ReceivedEvents, most: int = MOST_BLOCKS) -> None:
        """Takes a batch of events; stored blocks are added only until ``most`` blocks are known."""
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
        """Number of tokens from the start of a prompt in the engine's cache."""
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
        # The groups remain known: the engine holds no beginning that a group lacks.
        self._groups = {number: _Group(group.size) for number, group in self._groups.items()}

    def _store(self, event: BlockStored, room: int) -> None:
        size = event.block_size
        is_plain = (
            event.lora_id is None and event.lora_name is None and not any(event.extra_keys or ())
        )
        is_whole = size > 0 and len(event.token_ids) == size * len(event.block_hashes)
        parent = event.parent_block_hash
        key = START if parent is None else self._key(parent, size)
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
        new = zip(map(number_of, event.block_hashes), _keys(key, packed, size), strict=True)
        group.add(key, list(islice(new, room)))

    def _key(self, block_hash: BlockHash, size: int) -> int | None:
        """Key of a block in any group; ``None`` if no group has the block.

        The same tokens have the same hash in all groups, and a group with a window may already have
        dropped the block before a new block.
        """
        number = number_of(block_hash)
        found = (group.by_hash.get(number) for group in self._groups.values() if group.size == size)
        return next((key for key in found if key is not None), None)

    def _remove(self, event: BlockRemoved) -> None:
        if event.medium not in (None, MEDIUM):
            return
        group = self._groups.get(event.group_idx)
        if group is None:
            if len(self._groups) < _MOST_GROUPS:
                self._groups[event.group_idx] = _Group(1)  # the group exists, and lacks blocks
            return
        for block_hash in event.block_hashes:
            group.remove(number_of(block_hash))


def number_of(block_hash: BlockHash) -> int:
    """The last 60 bits of a block hash, by which the index knows the block."""
    if isinstance(block_hash, bytes):
        block_hash = int.from_bytes(block_hash[-8:], "big")
    return block_hash & _BITS


class SentPrompts:
    """Estimated cache of an engine without events: the prompts sent to the engine last.

    The size of the engine's cache is unknown. Each time the engine had less than expected, the
    estimate is halved; each prompt lets the estimate grow a little again.
    """

    def __init__(self, most_blocks: int = MOST_SENT_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._room = most_blocks
        self._keys: dict[int, None] = {}
        """Keys of blocks of :data:`SENT_BLOCK` tokens; the block sent last is at the end."""

    def __len__(self) -> int:
        """Number of blocks expected in the cache."""
        return len(self._keys)

    def note(self, prompt: Prompt) -> None:
        """Notes a prompt that the engine has computed or loaded completely."""
        # An engine evicts the end of a prompt before its beginning.
        for index in reversed(range(prompt.num_tokens // SENT_BLOCK)):
            key = prompt.key(SENT_BLOCK, index)
            self._keys.pop(key, None)
            self._keys[key] = None
        self._room = min(self._room + 1, self._most_blocks)
        self._trim()

    def held(self, prompt: Prompt) -> int:
        """Expected number of tokens from the start of a prompt in the engine's cache."""
        for index in range(prompt.num_tokens // SENT_BLOCK):
            if prompt.key(SENT_BLOCK, index) not in self._keys:
                return index * SENT_BLOCK
        return prompt.num_tokens // SENT_BLOCK * SENT_BLOCK

    def missed(self) -> None:
        """Notes that the engine had less than expected."""
        self._room = max(1, len(self) // 2)
        self._trim()

    def forget(self) -> None:
        """Notes that the engine went away; its successor begins with an empty cache."""
        self._keys.clear()
        self._room = self._most_blocks

    def _trim(self) -> None:
        for key in list(islice(self._keys, max(0, len(self) - self._room))):
            del self._keys[key]


class _Listener(threading.Thread):
    """A thread that takes the events of one engine until it is stopped."""

    def __init__(self, place: KVEventsPlace, index: "PrefixIndex") -> None:
        super().__init__(name=f"events {place.endpoint}", daemon=True)
        self.blocks = CachedBlocks()
        self._place = place
        self._index = index
        self._ended = threading.Event()
        self.start()

    def stop(self) -> None:
        """Makes the thread end, within :data:`LISTEN_S`."""
        self._ended.set()

    def run(self) -> None:
        """The thread's work."""
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
            self.blocks.forget()  # later events are missed


class PrefixIndex(Closing):
    """Known prefix caches of all engines of a router."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._listeners: dict[KVEventsPlace, _Listener] = {}
        self._forgotten = 0

    @property
    def is_empty(self) -> bool:
        """Whether no engine publishes events."""
        return not self._listeners

    @property
    def forgotten(self) -> int:
        """Number of times that the whole cache of an engine was forgotten."""
        return self._forgotten + sum(each.blocks.forgotten for each in self._listeners.values())

    def follow(self, places: Collection[KVEventsPlace]) -> None:
        """Listens to these addresses from now on, and forgets all others."""
        for gone in self._listeners.keys() - set(places):
            listener = self._listeners.pop(gone)
            listener.stop()
            self._forgotten += listener.blocks.forgotten + bool(len(listener.blocks))
        for place in places:
            if place not in self._listeners:
                self._listeners[place] = _Listener(place, self)

    def blocks(self, place: KVEventsPlace | None) -> CachedBlocks | None:
        """Known blocks of an engine; ``None`` if no thread listens to the engine."""
        listener = None if place is None else self._listeners.get(place)
        return None if listener is None else listener.blocks

    def room_for(self, blocks: CachedBlocks) -> int:
        """Number of blocks that may be known of one engine, given the blocks of the other
        engines.
        """
        known = sum(len(each.blocks) for each in tuple(self._listeners.values()))
        return self._most_blocks - known + len(blocks)

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        listeners = tuple(self._listeners.values())
        self.follow(())
        deadline = time.monotonic() + END_S
        for listener in listeners:
            listener.join(max(0.0, deadline - time.monotonic()))
