"""The KV cache manager once more: slow, obvious, and made of other ideas.

No hashes, no counters, no linked lists and no arithmetic on windows. What a kind of attention
needs is a question asked token by token; the prefix cache is keyed by the tokens themselves; a hit
is the longest length that passes a check of everything it would be used for.

The model also plays the memory. Every cell remembers whose it is and the whole prefix that it was
computed from, so that a hit on the wrong content is seen even where manager and model agree.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import lcm
from typing import Any, TypeAlias

NEW = -1
"""Stands in a planned table for a block that is still to be taken."""


@dataclass(frozen=True)
class Group:
    """What one group of layers keeps of every request."""

    kind: str
    """``"full"``, ``"window"``, ``"chunk"``, ``"state"`` or ``"cross"``."""
    block_size: int
    """Tokens per table entry, of all ranks together."""
    reach: int = 0
    """Tokens of the window, or of a chunk."""
    spare: int = 0
    """Blocks that a state takes for drafts."""
    reserved: int = 0
    """Blocks of the pool that belong to no request."""

    def reads(self, token: int, earlier: int) -> bool:
        """Whether computing ``token`` looks at what ``earlier`` left behind."""
        if self.kind == "window":
            return token - earlier < self.reach
        if self.kind == "chunk":
            return token // self.reach == earlier // self.reach
        if self.kind == "state":
            return earlier == token - 1
        return True

    def cell(self, token: int) -> tuple[int, int]:
        """Index of the block, and place in it, that ``token`` writes. A state is one place."""
        block, offset = divmod(token, self.block_size)
        return block, 0 if self.kind == "state" else offset

    def size(self, num_slots: int, num_encoder_tokens: int = 0) -> int:
        """Table entries for this many tokens."""
        num_tokens = num_encoder_tokens if self.kind == "cross" else num_slots
        return -(-num_tokens // self.block_size) + self.spare


@cache
def needed(group: Group, num_computed: int) -> frozenset[int]:
    """The computed tokens that the next one, or a later one, looks at."""
    return frozenset(t for t in range(num_computed) if group.reads(num_computed, t))


@cache
def is_dead(group: Group, index: int, num_computed: int) -> bool:
    """Whether all of a block is computed and will never be looked at again."""
    tokens = range(index * group.block_size, (index + 1) * group.block_size)
    return all(t < num_computed and t not in needed(group, num_computed) for t in tokens)


@cache
def live_blocks(group: Group, num_computed: int, num_slots: int) -> int:
    """Blocks that a table with so much room needs at once."""
    return sum(not is_dead(group, i, num_computed) for i in range(group.size(num_slots)))


Prefix: TypeAlias = tuple[str | None, str | None, frozenset[tuple[str, int]], tuple[int, ...]]
"""Salt, adapter, images with their positions, and tokens."""


def prefix(request: Any, num_tokens: int) -> Prefix:
    """All that the KV of the last of these tokens depends on."""
    images = {(i.identifier, i.offset) for i in request.mm_inputs if i.offset < num_tokens}
    tokens = tuple(request.all_token_ids[:num_tokens])
    return request.cache_salt, request.lora_name, frozenset(images), tokens


class SlowManager:
    """Blocks as plain lists of ids, for any groups."""

    def __init__(
        self,
        groups: Sequence[Group],
        num_blocks: int,
        max_model_len: int,
        enable_caching: bool,
        use_eagle: bool,
    ) -> None:
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.use_eagle = use_eagle
        self.unit = lcm(*(group.block_size for group in groups))
        # What a decoder keeps depends on what its encoder saw, which is in no request's tokens.
        has_encoder = any(group.kind == "cross" for group in groups)
        self.enable_caching = enable_caching and not has_encoder and self.unit < max_model_len
        self.num_reserved = sum(group.reserved for group in groups)
        self.free = list(range(1 + self.num_reserved, num_blocks))  # in the order of reuse
        self.content: dict[int, tuple[int, Prefix]] = {}  # hashed block → group and prefix
        self.holders = defaultdict[tuple[int, Prefix], list[int]](list)  # the same, oldest first
        self.tables: dict[str, list[list[int]]] = {}  # request → per group, block ids
        self.tainted: dict[str, set[tuple[int, int]]] = {}  # request → (group, index), never a hit
        self.unshared: dict[str, set[int]] = {}  # request → groups of which nothing more is hashed
        self.tells_steps = False
        self.unwritten: set[int] = set()  # states that the step under way writes
        self.memory: dict[int, tuple[int, dict[int, tuple[object, ...]]]] = {}

    # -- Looking up

    def look_up(self, request: Any) -> tuple[int, list[list[int]]]:
        """The longest usable prefix: its length, and per group the blocks that hold it."""
        if self.enable_caching and request.prompt_logprobs is None:
            # The last token is computed, for its logits.
            for length in reversed(self.lengths(request.num_tokens - 1)):
                rows = [self.hit(g, request, length) for g in range(len(self.groups))]
                if all(row is not None for row in rows):
                    return length, [row for row in rows if row is not None]
        return 0, [[] for _ in self.groups]

    def hit(self, g: int, request: Any, length: int) -> list[int] | None:
        """A group's blocks for a hit of this length, if it has all that the next token needs."""
        group = self.groups[g]
        row = []
        for index in range(length // group.block_size):
            if is_dead(group, index, length):
                row.append(0)
                continue
            block = self.oldest(g, request, (index + 1) * group.block_size)
            if block is None:
                return None
            row.append(block)
        if self.use_eagle and group.kind != "state":
            # The drafter wants the last block that matches computed again.
            end = length + group.block_size
            # With one group, a match leaves the last token out as a hit does: the field's rule.
            if end > request.num_tokens - (len(self.groups) == 1):
                return None
            if self.oldest(g, request, end) is None:
                return None
        return row

    def oldest(self, g: int, request: Any, num_tokens: int) -> int | None:
        """The block that was hashed first of those that end with this token."""
        holders = self.holders.get((g, prefix(request, num_tokens)))
        return holders[0] if holders and holders[0] not in self.unwritten else None

    def is_still_there(self, request: Any, rows: Sequence[Sequence[int]]) -> bool:
        """Whether no block of a hit was taken by somebody else since it was looked up."""
        return all(
            not block or self.content.get(block) == (g, prefix(request, (i + 1) * group.block_size))
            for g, (group, row) in enumerate(zip(self.groups, rows, strict=True))
            for i, block in enumerate(row)
        )

    # -- Allocating

    def drop_dead_blocks(self, request: Any, num_computed: int) -> None:
        """Gives back what the request will never look at again."""
        for group, table in zip(self.groups, self.tables.get(request.request_id, ()), strict=False):
            dropped = []
            for index, block in enumerate(table):
                if block and is_dead(group, index, num_computed):
                    dropped.append(block)
                    table[index] = 0
            self.give_back(dropped[::-1])

    def plan(
        self,
        request: Any,
        rows: Sequence[Sequence[int]],
        num_computed: int,
        num_slots: int,
        num_encoder_tokens: int = 0,
    ) -> list[list[int]]:
        """The tables that the request should have, with NEW where a block is to be taken."""
        planned = []
        for group, held in zip(self.groups, self.tables.get(request.request_id, rows), strict=True):
            size = group.size(num_slots, num_encoder_tokens)
            row = [*held, *[NEW] * (size - len(held))]
            planned.append([0 if is_dead(group, i, num_computed) else b for i, b in enumerate(row)])
        return planned

    def cost(self, planned: Sequence[Sequence[int]]) -> int:
        """Free blocks that such tables take; a hit that is free is one."""
        return sum(block == NEW or block in self.free for row in planned for block in row)

    def least_to_finish(
        self, planned: Sequence[Sequence[int]], num_computed: int, num_tokens: int, step: int
    ) -> int:
        """Free blocks without which the request cannot get to ``num_tokens`` in such steps.

        Args:
            planned: the tables with which it would start, with room for all those tokens.
        """
        least = sum(block > 0 and block in self.free for row in planned for block in row)
        for group, row in zip(self.groups, planned, strict=True):
            rooms = [(n, min(n + step, num_tokens)) for n in range(num_computed, num_tokens)]
            most = max((live_blocks(group, n, num_slots) for n, num_slots in rooms), default=0)
            least += max(0, most - sum(block > 0 for block in row))
        return least

    def adopt(
        self, request: Any, planned: list[list[int]], actual: Sequence[list[int]], result: Any
    ) -> None:
        """Takes the manager's choice of new blocks, if they are the right ones.

        Args:
            request: whose tables they are.
            planned: by :meth:`plan`.
            actual: the tables that the manager made.
            result: what it says is new.
        """
        new: list[list[int]] = []
        for row, ids in zip(planned, actual, strict=True):
            taken = [block for block, expected in zip(ids, row, strict=True) if expected == NEW]
            for block, expected in zip(ids, row, strict=True):
                assert expected in (NEW, block), f"table {ids}, expected {row}"
                if expected in self.free:
                    self.free.remove(expected)
            new.append(taken)
        assert [[block for block in ids if block] for ids in result.get_block_ids()] == new
        taken = [block for ids in new for block in ids]
        assert sorted(taken) == sorted(self.free[: len(taken)]), f"took {new} of {self.free}"
        del self.free[: len(taken)]
        for block in taken:
            if block in self.content:
                self.holders[self.content.pop(block)].remove(block)
        self.tables[request.request_id] = [list(ids) for ids in actual]
        self.tainted.setdefault(request.request_id, set())
        self.unshared.setdefault(request.request_id, set())

    # -- Sharing

    def taint(self, request: Any, first: int, num_tokens: int) -> None:
        """Notes the blocks that a load of the tokens ``first .. num_tokens - 1`` fills in part.

        A load brings what the token after it needs, no more.
        """
        for g, group in enumerate(self.groups):
            loaded = {group.cell(t) for t in needed(group, num_tokens) if t >= first}
            for token in range(first, num_tokens):
                if group.cell(token) not in loaded:
                    self.tainted[request.request_id].add((g, token // group.block_size))

    def clean(self, request: Any, g: int, first: int) -> None:
        """Notes that a load has filled all of a group's blocks that begin no earlier."""
        start = -(-first // self.groups[g].block_size)
        self.tainted[request.request_id] -= {
            (of, index)
            for of, index in self.tainted[request.request_id]
            if of == g and index >= start
        }

    def share(self, request: Any, num_tokens: int) -> None:
        """Makes full blocks of these tokens hits, if a hit can be as long and needs them."""
        if not self.enable_caching:
            return
        request_id = request.request_id
        for g, (group, table) in enumerate(zip(self.groups, self.tables[request_id], strict=True)):
            if g in self.unshared[request_id]:
                continue
            for index in range(num_tokens // group.block_size):
                block = table[index]
                if not block or block in self.content or (g, index) in self.tainted[request_id]:
                    continue
                if not any(self.uses(g, n, index) for n in self.lengths(num_tokens)):
                    continue
                content = (g, prefix(request, (index + 1) * group.block_size))
                self.content[block] = content
                self.holders[content].append(block)
                if group.kind == "state" and self.tells_steps:
                    self.unwritten.add(block)

    def lengths(self, most: int) -> range:
        """What a hit may be long: whole blocks of every group."""
        return range(self.unit, most + 1, self.unit)

    def uses(self, g: int, length: int, index: int) -> bool:
        """Whether a hit of this length needs a group's block, or proof of it."""
        group = self.groups[g]
        end = length // group.block_size
        if self.use_eagle and group.kind != "state" and index == end:
            return True
        # Where a hit may end with every block, all are hashed, the few that none needs included.
        ends_anywhere = group.block_size == self.unit
        return index < end and (ends_anywhere or not is_dead(group, index, length))

    def new_step_starts(self) -> None:
        """States are written by the end of the step that writes them, and no hit before."""
        self.tells_steps = True
        self.unwritten.clear()

    # -- Giving back

    def give_back(self, blocks: Sequence[int]) -> None:
        """Hashed blocks are reused last, in this order; the others first, in the opposite one."""
        held = {b for tables in self.tables.values() for table in tables for b in table}
        for block in blocks:
            if block in held:
                continue
            if block in self.content:
                self.free.append(block)
            else:
                self.free.insert(0, block)

    def release(self, request: Any) -> None:
        """Gives back all that the request holds, tails before heads."""
        del self.tainted[request.request_id], self.unshared[request.request_id]
        for table in self.tables.pop(request.request_id):
            self.give_back([block for block in reversed(table) if block])

    def reset(self) -> bool:
        """Forgets all content, unless a request is under way."""
        if self.tables:
            return False
        self.content.clear()
        self.holders.clear()
        return True

    # -- The memory

    def write(self, request: Any, g: int, token: int, content: tuple[object, ...]) -> None:
        """A group's layers write what ``token`` leaves behind."""
        index, offset = self.groups[g].cell(token)
        block = self.tables[request.request_id][g][index]
        assert block, f"token {token} of group {g} would be written to the null block"
        owner, cells = self.memory.get(block, (g, {}))
        if owner != g:  # groups lie over each other in memory
            cells = {}
        cells[offset] = content
        self.memory[block] = (g, cells)

    def holds(self, request: Any, g: int, token: int, row: Sequence[int]) -> bool:
        """Whether a table entry holds what ``token`` of this request left behind."""
        index, offset = self.groups[g].cell(token)
        owner, cells = self.memory.get(row[index], (g, {}))
        return owner == g and cells.get(offset) == prefix(request, token + 1)
