"""Index of the engines' prefix caches, for look-ups of prompts.

Engines publish each block that enters or leaves their caches (:mod:`kvferry.control.cache_events`).
Each engine has its own hash function and block size, so hashes and blocks of two engines cannot be
compared. The index gives each block a key, which stands for all tokens up to the end of the block.
The keys of a prompt are made once and looked up at all engines. If the blocks of a chain were
stored one after the other and none has left since, one comparison of the last block covers the
whole chain::

    events of an engine ──▶ thread ──▶ its blocks: hash → key, by group
                                             ▲
    prompt ──▶ keys ─────────────────────────┘ how many tokens from the start?

A vLLM server with windows or states (Mamba, linear attention) keeps some blocks of a prompt in
these groups, and none of the others. Its events tell all tokens, but only the hashes of the blocks
that are kept, and do not say where these blocks are. A hash is the same in all groups, so the index
takes the position from a group that has told all blocks. If there is no such group, only the last
hash has a position: the end of the tokens.

The result is an estimate: the engine may evict the blocks before it gets the request. The index
assumes nothing beyond the events, except for engines without events if this is configured
(:class:`SentPrompts`). If events are lost, or an engine restarts, the index forgets the whole cache
of this engine. A wrong estimate costs a prompt computation, and never changes a token.

Only the thread that listens to an engine changes the engine's blocks. Look-ups come from the
router's thread and take no lock: each look-up reads one key or a copy of a chain. In the worst case
a look-up sees half of the thread's change.
"""

import logging
import math
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
_GRAIN = 16
"""Number of tokens between two keys, or less if a block size is no multiple. Blocks of different
sizes have the same key if they end at the same token of the same prompt."""
_NOWHERE = -1
"""Key of a block of which only the hash is known."""
_STATES = "mamba"
_SPARSE = frozenset({_STATES, "sliding_window", "sliding_window_mla", "chunked_local_attention"})
"""vLLM's names for groups that keep only some blocks of a prompt."""
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


def _grain(size: int) -> int:
    """Number of tokens between two keys, for blocks of ``size`` tokens."""
    return math.gcd(size, _GRAIN)


def _keys(key: int, packed: bytes, size: int) -> list[int]:
    """Keys of the whole blocks of ``size`` tokens that follow the block of ``key``."""
    grain = _grain(size)
    step = grain * _TOKEN_BYTES
    keys = [
        key := hash((key, packed[start : start + step])) & _BITS
        for start in range(0, len(packed) - step + 1, step)
    ]
    return keys if size == grain else keys[size // grain - 1 :: size // grain]


class Prompt:
    """A prompt for look-ups."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.num_tokens = len(tokens)
        self._packed = _packed(tokens)
        self._keys: dict[int, list[int]] = {}

    def key(self, size: int, tokens: int) -> int:
        """Key of the first ``tokens`` tokens, for blocks of ``size`` tokens.

        ``tokens`` is a multiple of ``size``, above 0.
        """
        grain = _grain(size)
        return self._made(grain, tokens // grain)[tokens // grain - 1]

    def some_keys(self, size: int, index: int) -> list[int]:
        """Keys of the block with index ``index`` and of some blocks after it, among the prompt's
        whole blocks of ``size`` tokens.
        """
        grain = _grain(size)
        per_block = size // grain
        end = (index + 1) * per_block
        return self._made(grain, end)[end - 1 : end + _RUN * per_block - 1 : per_block]

    def _made(self, grain: int, count: int) -> list[int]:
        """The keys made so far for every ``grain`` tokens, at least ``count`` keys."""
        keys = self._keys.setdefault(grain, [])
        if count > len(keys):
            last = max(count, len(keys) + _RUN)
            step = grain * _TOKEN_BYTES
            packed = self._packed[len(keys) * step : last * step]
            keys += _keys(keys[-1] if keys else START, packed, grain)
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
        if not keys or keys[-1] == prompt.key(size, (start + len(keys)) * size):
            return len(keys)
        return bisect(
            range(len(keys)),
            0,
            key=lambda at: keys[at] != prompt.key(size, (start + at + 1) * size),
        )


_NOT_HERE = _Chain(-1, array("Q"))


@dataclass(slots=True)
class _Group:
    """The blocks of one KV cache group."""

    size: int = 0
    """Number of tokens per block; 0 before the first block."""
    step: int = 0
    """Greatest common divisor of the sizes of all blocks. An engine may tell the end of a prompt as
    a smaller block."""
    kind: str | None = None
    """vLLM's name for the kind of the group; ``None`` if the engine does not say it."""
    has_gaps: bool = False
    """Whether the group was seen to keep only some blocks of a prompt."""
    by_hash: dict[int, int] = field(default_factory=dict)
    """The engine's hash → key."""
    chains: dict[int, _Chain | None] = field(default_factory=dict)
    """Key of each block → the block's chain; ``None`` for a block without a chain."""

    @property
    def is_sparse(self) -> bool:
        """Whether the group keeps only some blocks of a prompt."""
        return self.has_gaps or self.kind in _SPARSE

    def fits(self, size: int) -> bool:
        """Whether blocks of ``size`` tokens can be in this group."""
        small, large = sorted((size, self.size))
        return not small or (large % small == 0 and _grain(small) == _grain(large))

    def note_size(self, size: int) -> None:
        """Notes that blocks of ``size`` tokens are in the group."""
        if size > self.size:
            self.chains = dict.fromkeys(self.chains)  # a chain has blocks of the group's size
        self.size, self.step = max(self.size, size), math.gcd(self.step, size)

    def count(self, prompt: Prompt) -> int:
        """Number of tokens in consecutive blocks in the cache, from the start of a prompt."""
        if not self.chains:
            return 0
        whole = self._count_whole(prompt) * self.size
        longest = min(prompt.num_tokens, whole + self.size - 1) // self.step * self.step
        ends = range(longest, whole, -self.step)
        return next((tokens for tokens in ends if self.ends_at(prompt, tokens)), whole)

    def _count_whole(self, prompt: Prompt) -> int:
        count, most = 0, prompt.num_tokens // self.size
        while count < most:
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
        return tokens % self.step == 0 and prompt.key(self.step, tokens) in self.chains

    def is_told_again(self, numbers: Sequence[int]) -> bool:
        """Whether a store with all hashes, from the beginning of a prompt on, only reports a prefix
        hit. Such a report also contains blocks that the group does not have.

        vLLM reports a hit if the request asks for it (``kv_cache_report_mode`` is ``full``). The
        last block of a hit is known. A group that keeps few states never stores two in a row.
        """
        return (
            self.is_sparse
            and len(numbers) > 1
            and (numbers[-1] in self.by_hash or (self.has_gaps and self.kind == _STATES))
        )

    def add(self, parent: int, blocks: Sequence[tuple[int, int]], size: int) -> None:
        """Adds consecutive blocks of ``size`` tokens after ``parent``: hash and key of each
        block.
        """
        if size < self.size:
            for number, key in blocks:
                self.place(number, key)
            return
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

    def place(self, number: int, key: int) -> None:
        """Adds a single block, or corrects its key."""
        known = self.by_hash.get(number)
        if known is not None and known != key:
            self._drop(known)
        self.by_hash[number] = key
        if key != _NOWHERE:
            self.chains.setdefault(key)

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
    other group has the last block: a group with a window, or with states, keeps no more. If there
    are only such groups, the last block in each group is enough. Three kinds of blocks are ignored:
    blocks whose hash depends on more than tokens (a LoRA adapter, a salt, an image), all blocks
    after such a block, and blocks outside of the memory used for computation.
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
                if (room := most - len(self)) > 0 and _is_usable(event):
                    self._store(event, room)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            else:
                self._clear()

    def held(self, prompt: Prompt) -> int:
        """Number of tokens from the start of a prompt in the engine's cache."""
        groups = tuple(self._groups.values())
        if not groups or not all(group.chains for group in groups):
            return 0
        longest, first, others = prompt.num_tokens, groups[0], groups
        if not all(group.is_sparse for group in groups):
            counts = ((group.count(prompt), group) for group in groups)
            longest, first = max(counts, key=itemgetter(0))
            others = tuple(group for group in groups if group is not first)
        for tokens in range(longest // first.step * first.step, 0, -first.step):
            if all(group.ends_at(prompt, tokens) for group in others):
                return tokens
        return 0

    def _clear(self) -> None:
        # The groups remain known: the engine holds no beginning that a group lacks.
        self._groups = {number: _Group() for number in self._groups}

    def _store(self, event: BlockStored, room: int) -> None:
        size, tokens = event.block_size, event.token_ids
        numbers = [number_of(block_hash) for block_hash in event.block_hashes]
        group = self._groups.get(event.group_idx)
        if group is None or not group.fits(size):
            if len(self._groups) >= _MOST_GROUPS if group is None else size < group.size:
                return
            group = _Group()
        is_whole = len(numbers) * size == len(tokens)
        group.kind, group.has_gaps = event.kv_cache_spec_kind, group.has_gaps or not is_whole
        parent = START
        if event.parent_block_hash is not None:
            parent = self._key(number_of(event.parent_block_hash), size)
        if parent == _NOWHERE and not group.is_sparse:
            return
        if is_whole and event.parent_block_hash is None and group.is_told_again(numbers):
            return
        try:
            keys = [] if parent == _NOWHERE else _keys(parent, _packed(tokens), size)
        except OverflowError:
            return
        self._groups[event.group_idx] = group
        group.note_size(size)
        if is_whole and keys:
            new = list(islice(zip(numbers, keys, strict=True), room))
            group.add(parent, new, size)
            self._correct(group, new)
        else:
            self._place(group, numbers[-room:], keys)

    def _place(self, group: _Group, numbers: Sequence[int], keys: Sequence[int]) -> None:
        """Adds blocks whose positions the store does not say, of tokens with these keys."""
        for number in numbers:
            group.place(number, self._key(number, group.size))
        if numbers and keys and group.by_hash[numbers[-1]] == _NOWHERE:
            group.place(numbers[-1], keys[-1])

    def _correct(self, group: _Group, new: Sequence[tuple[int, int]]) -> None:
        """Moves blocks of other groups to the positions that a store of ``group`` has told."""
        for other in self._groups.values():
            if other.is_sparse and other is not group and _grain(other.size) == _grain(group.size):
                for number, key in new:
                    if number in other.by_hash:
                        other.place(number, key)

    def _key(self, number: int, size: int) -> int:
        """Key of a block in any group; :data:`_NOWHERE` if no group knows its position.

        The same tokens have the same hash in all groups, and a group with a window may already have
        dropped the block before a new block.
        """
        groups = (group for group in self._groups.values() if _grain(group.size) == _grain(size))
        found = (group.by_hash.get(number, _NOWHERE) for group in groups)
        return next((key for key in found if key != _NOWHERE), _NOWHERE)

    def _remove(self, event: BlockRemoved) -> None:
        if event.medium not in (None, MEDIUM):
            return
        group = self._groups.get(event.group_idx)
        if group is None:
            if len(self._groups) < _MOST_GROUPS:
                self._groups[event.group_idx] = _Group()  # the group exists, and lacks blocks
            return
        for block_hash in event.block_hashes:
            group.remove(number_of(block_hash))


def _is_usable(event: BlockStored) -> bool:
    """Whether a store is well-formed, for the memory used for computation, and only of tokens."""
    size, count = event.block_size, len(event.token_ids)
    if size <= 0 or count % size or len(event.block_hashes) * size > count:
        return False
    is_plain = event.lora_id is None and event.lora_name is None and not any(event.extra_keys or ())
    return is_plain and event.medium in (None, MEDIUM)


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
            key = prompt.key(SENT_BLOCK, (index + 1) * SENT_BLOCK)
            self._keys.pop(key, None)
            self._keys[key] = None
        self._room = min(self._room + 1, self._most_blocks)
        self._trim()

    def held(self, prompt: Prompt) -> int:
        """Expected number of tokens from the start of a prompt in the engine's cache."""
        for index in range(prompt.num_tokens // SENT_BLOCK):
            if prompt.key(SENT_BLOCK, (index + 1) * SENT_BLOCK) not in self._keys:
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
