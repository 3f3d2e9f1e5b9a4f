"""The KV cache groups of a source engine as a target sees them, and the tokens of each that a load
moves.

A load covers the tokens ``[first_token, num_tokens)``: the target has the tokens before, and
computes the token after. For layers with a window, only the tokens must move that token
``num_tokens`` and later tokens still see. The rest of the first target block moves too if the
source still has the tokens, because a whole block may become a prefix hit::

    source   | null | null |   b  |   b  |   b  |
    needed                      xxxxxxxxxxxxxxx
    moved                   xxxxxxxxxxxxxxxxxxx
    target   |  null   |  null   |    b    |    b    |
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.control.tickets import Ticket
from kvferry.errors import BlockTableError, IncompatibleError, NullBlockError, TicketError
from kvferry.topology import GroupGeometry, GroupPair, pair_groups, ranges_text
from kvferry.topology.description import EngineDescription


def first_needed_token(pair: GroupPair, first_token: int, num_tokens: int) -> int:
    """The first of the tokens ``[first_token, num_tokens)`` of a load that must move for a pair."""
    return max(first_token, pair.first_kept_token(num_tokens))


@dataclass(frozen=True, slots=True)
class Filled:
    """The tokens of our groups that a load fills."""

    first_token: int
    """First token of the load; the tokens before were in our cache already."""
    starts: tuple[int, ...]
    """First token that the load fills, for each group."""
    partial: frozenset[int]
    """Groups in which the load leaves out tokens that the groups keep themselves."""

    @property
    def first_tokens(self) -> tuple[int, ...]:
        """For each group, the first token that the cache holds: ``starts`` if tokens are missing
        before, else 0.

        >>> Filled(first_token=8, starts=(8, 11), partial=frozenset()).first_tokens
        (0, 11)
        """
        return tuple(start if start > self.first_token else 0 for start in self.starts)


@dataclass(frozen=True, slots=True)
class SourceGroups:
    """A source engine's groups, paired with ours."""

    engine_id: str
    geometries: tuple[GroupGeometry, ...]
    """Geometry of each group of the source."""
    targets: tuple[GroupGeometry, ...]
    """Geometry of each group of ours."""
    pairs: tuple[GroupPair, ...]

    @classmethod
    def of(cls, description: EngineDescription, targets: Sequence[GroupGeometry]) -> "SourceGroups":
        """The groups of an engine whose handshake succeeded.

        Raises:
            ValueError: the groups can never match; the handshake refuses such an engine.
        """
        geometries = description.geometries
        pairs = pair_groups(geometries, targets, convert=True)  # the handshake judged dtypes
        return cls(description.engine_id, geometries, tuple(targets), pairs)

    @property
    def part_tokens(self) -> int:
        """Number of tokens at whose multiples a part of a load may end: a block ends there on both
        sides.
        """
        sides = (*self.geometries, *self.targets)
        return math.lcm(*(group.virtual_block_size for group in sides))

    def moves_early(self, pair: GroupPair) -> bool:
        """Whether a pair can move while its source still computes. A pair with a window or a state
        cannot: only the end of the prompt decides which of its tokens move.
        """
        sides = self.geometries[pair.source_group], self.targets[pair.target_group]
        is_whole = pair.sliding_window is None and pair.attention_chunk_size is None
        return is_whole and not any(side.is_recurrent for side in sides)

    def early_starts(self, first_token: int, num_tokens: int) -> tuple[int, ...]:
        """The starts of an early load: for the pairs that can move early, the value that
        :meth:`starts` will have once the source has computed the prompt; ``num_tokens`` for the
        other pairs.
        """
        return tuple(first_token if self.moves_early(pair) else num_tokens for pair in self.pairs)

    def check_kept(self, ticket: Ticket, first_token: int, num_tokens: int) -> None:
        """Checks that the source still keeps the tokens that a load of ``[first_token,
        num_tokens)`` moves.

        Raises:
            TicketError: the ticket is for another number of groups, or a recurrent state is wanted
                after fewer tokens than the source computed.
            BlockTableError: a table is too short.
            NullBlockError: a needed block was freed, because the source computed on past its
                window.
        """
        for what, number in (
            ("block tables", len(ticket.block_ids)),
            ("first tokens", len(ticket.first_tokens) or len(self.geometries)),
        ):
            if number != len(self.geometries):
                raise TicketError(
                    f"ticket: it has {what} for {number} KV cache groups, engine "
                    f"{self.engine_id!r} has {len(self.geometries)}; prefill it again"
                )
        for pair in self.pairs:
            first = first_needed_token(pair, first_token, num_tokens)
            table = ticket.block_ids[pair.source_group]
            block_size = self.geometries[pair.source_group].virtual_block_size
            where = f"engine {self.engine_id!r}, KV cache group {pair.source_group}"
            if len(table) * block_size < num_tokens:
                raise BlockTableError(
                    f"{where}: {len(table)} blocks of {block_size} tokens hold "
                    f"{len(table) * block_size}, not {num_tokens}"
                )
            if self.geometries[pair.source_group].is_recurrent and num_tokens != ticket.num_tokens:
                raise TicketError(
                    f"{where}: it keeps the state of layers {ranges_text(pair.layers)} after "
                    f"{ticket.num_tokens} tokens, not after {num_tokens}; let prefill choose the "
                    "first token, so that decode can load all the tokens that it computed"
                )
            needed = table[first // block_size : -(-num_tokens // block_size)]
            is_unfilled = first < _first_there(ticket, pair)
            if first < num_tokens and (is_unfilled or 0 in needed):
                missing = 0 if is_unfilled else needed.index(0)
                token = max(first, (first // block_size + missing) * block_size)
                raise NullBlockError(
                    f"{where}: it no longer keeps token {token} of layers "
                    f"{ranges_text(pair.layers)}, but the tokens {first} to {num_tokens - 1} are "
                    "needed: its window has moved on; prefill with max_tokens=1"
                )

    def starts(self, ticket: Ticket, first_token: int, num_tokens: int) -> tuple[int, ...]:
        """The first token that moves for each pair, once :meth:`check_kept` has passed."""
        return tuple(self._start(pair, ticket, first_token, num_tokens) for pair in self.pairs)

    def _start(self, pair: GroupPair, ticket: Ticket, first_token: int, num_tokens: int) -> int:
        needed = first_needed_token(pair, first_token, num_tokens)
        if pair.is_partial or needed == num_tokens:
            return needed  # its blocks are never hits, or none move
        source_size = self.geometries[pair.source_group].virtual_block_size
        target_size = self.targets[pair.target_group].virtual_block_size
        if self.targets[pair.target_group].is_recurrent:
            # A state fills its block; the source has nothing more, in whichever block the state
            # lies.
            return max(first_token, needed // target_size * target_size)
        wanted = max(first_token, _first_there(ticket, pair), needed // target_size * target_size)
        table = ticket.block_ids[pair.source_group]
        for block in reversed(range(wanted // source_size, needed // source_size)):
            if table[block] == 0:
                return (block + 1) * source_size
        return wanted

    def check_filled(self, ticket: Ticket, first_token: int, num_tokens: int) -> None:
        """Checks that a load fills every block of ours that it touches, or the end of such a block.

        Raises:
            IncompatibleError: a block would lack tokens before the tokens that move.
        """
        starts = self.starts(ticket, first_token, num_tokens)
        partial = self.filled(starts, first_token, num_tokens).partial
        lacking = [
            f"KV cache group {pair.target_group}, layers {ranges_text(pair.layers)}: the source "
            f"has them from token {start} on, which would fill a part of what this engine keeps, "
            "and it cannot keep that from its prefix cache; give both engines the same block size "
            "and switch the hybrid KV cache manager on or off on both"
            for pair, start in zip(self.pairs, starts, strict=True)
            if pair.target_group in partial
            or (
                first_token < start < num_tokens
                and start % self.targets[pair.target_group].virtual_block_size
            )
        ]
        if lacking:
            raise IncompatibleError(self.engine_id, lacking)

    def filled(self, starts: Sequence[int], first_token: int, num_tokens: int) -> Filled:
        """The tokens that a load of ``[first_token, num_tokens)`` with these starts fills."""
        firsts = [0] * len(self.targets)
        for pair, start in zip(self.pairs, starts, strict=True):
            firsts[pair.target_group] = max(firsts[pair.target_group], start)
        partial = frozenset(
            pair.target_group
            for pair in self.pairs
            if pair.is_partial and first_needed_token(pair, first_token, num_tokens) > first_token
        )
        return Filled(first_token, tuple(firsts), partial)


def _first_there(ticket: Ticket, pair: GroupPair) -> int:
    """The first token that the source's blocks of a pair can hold."""
    return ticket.first_tokens[pair.source_group] if ticket.first_tokens else 0
