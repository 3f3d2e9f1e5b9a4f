"""The KV cache groups of a source engine as a target sees them: what of each a load moves.

A load is of the tokens ``[first_token, num_tokens)``: the ones before are here already, the one
after is computed here. Of layers with a window only those of them must move that token
``num_tokens`` and later ones still see. The rest of the target's block in which they begin moves
with them if the source still has it, for a block that is whole may become a prefix hit::

    source   | null | null |   b  |   b  |   b  |
    needed                      xxxxxxxxxxxxxxx
    moved                   xxxxxxxxxxxxxxxxxxx
    target   |  null   |  null   |    b    |    b    |
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.control.tickets import Ticket
from kvferry.errors import BlockTableError, NullBlockError, TicketError
from kvferry.topology import EngineGeometry, GroupPair, pair_groups, ranges_text
from kvferry.topology.description import EngineDescription


def first_needed_token(pair: GroupPair, first_token: int, num_tokens: int) -> int:
    """The first of the tokens ``[first_token, num_tokens)`` of a load that must move for a pair."""
    return max(first_token, pair.first_kept_token(num_tokens))


@dataclass(frozen=True, slots=True)
class SourceGroups:
    """A source engine's groups, paired with ours."""

    engine_id: str
    geometries: tuple[EngineGeometry, ...]
    """One per group of the source."""
    targets: tuple[EngineGeometry, ...]
    """One per group of ours."""
    pairs: tuple[GroupPair, ...]

    @classmethod
    def of(
        cls, description: EngineDescription, targets: Sequence[EngineGeometry]
    ) -> "SourceGroups":
        """The groups of an engine whose handshake succeeded.

        Raises:
            ValueError: the groups can never match; the handshake refuses such an engine.
        """
        geometries = tuple(map(EngineGeometry.from_description, description.groups))
        pairs = pair_groups(geometries, targets)
        return cls(description.engine_id, geometries, tuple(targets), pairs)

    def check_kept(self, ticket: Ticket, first_token: int, num_tokens: int) -> None:
        """Checks that the source still keeps what a load of ``[first_token, num_tokens)`` moves.

        Raises:
            TicketError: the ticket has block tables for another number of groups.
            BlockTableError: a table is too short.
            NullBlockError: a block was let go, because the source computed on past its window.
        """
        if len(ticket.block_ids) != len(self.geometries):
            raise TicketError(
                f"ticket: it has block tables for {len(ticket.block_ids)} KV cache groups, engine "
                f"{self.engine_id!r} has {len(self.geometries)}; prefill it again"
            )
        for pair in self.pairs:
            first = first_needed_token(pair, first_token, num_tokens)
            table = ticket.block_ids[pair.source_group]
            block_size = self.geometries[pair.source_group].block_size
            where = f"engine {self.engine_id!r}, KV cache group {pair.source_group}"
            if len(table) * block_size < num_tokens:
                raise BlockTableError(
                    f"{where}: {len(table)} blocks of {block_size} tokens hold "
                    f"{len(table) * block_size}, not {num_tokens}"
                )
            needed = table[first // block_size : -(-num_tokens // block_size)]
            if first < num_tokens and 0 in needed:
                token = max(first, (first // block_size + needed.index(0)) * block_size)
                raise NullBlockError(
                    f"{where}: it no longer keeps token {token} of layers "
                    f"{ranges_text(pair.layers)}, but the tokens {first} to {num_tokens - 1} are "
                    "needed: its window has moved on; prefill with max_tokens=1"
                )

    def starts(self, ticket: Ticket, first_token: int, num_tokens: int) -> tuple[int, ...]:
        """The first token that moves for each pair, once :meth:`check_kept` has passed."""
        return tuple(
            self._start(pair, ticket.block_ids[pair.source_group], first_token, num_tokens)
            for pair in self.pairs
        )

    def _start(
        self, pair: GroupPair, table: Sequence[int], first_token: int, num_tokens: int
    ) -> int:
        needed = first_needed_token(pair, first_token, num_tokens)
        if pair.is_partial or needed == num_tokens:
            return needed  # no block is ever a hit for it, or none moves at all
        source_size = self.geometries[pair.source_group].block_size
        target_size = self.targets[pair.target_group].block_size
        wanted = max(first_token, needed // target_size * target_size)
        for block in reversed(range(wanted // source_size, needed // source_size)):
            if table[block] == 0:
                return (block + 1) * source_size
        return wanted

    def first_filled(self, starts: Sequence[int]) -> tuple[int, ...]:
        """For each group of ours, the token from which on a load with these starts fills it."""
        firsts = [0] * len(self.targets)
        for pair, start in zip(self.pairs, starts, strict=True):
            firsts[pair.target_group] = max(firsts[pair.target_group], start)
        return tuple(firsts)

    def partial_targets(self, first_token: int, num_tokens: int) -> frozenset[int]:
        """Our groups of which such a load leaves out tokens that they keep themselves."""
        return frozenset(
            pair.target_group
            for pair in self.pairs
            if pair.is_partial and first_needed_token(pair, first_token, num_tokens) > first_token
        )
