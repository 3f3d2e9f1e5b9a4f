"""Digests of what a rank lent or loaded, over the cells that both sides must have alike.

A layer with a sliding window may be kept whole on one side and by its window on the other, and what
lies behind the window never moves. So of such a layer both sides count only the tokens from
``first_kept_token`` on, at the number of tokens that the *source* has: it is never below that of
the target, which may leave the last token to itself.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvferry.connectors.base import ConnectorContext
from kvferry.connectors.pull.metadata import LentSpec, LoadSpec
from kvferry.topology import GroupGeometry, GroupPair, token_digests
from kvferry.topology.tensors import RankMemory
from kvferry.topology.windows import first_kept_token, num_leading_nulls


class RankDigests:
    """Computes them for one rank."""

    def __init__(
        self,
        context: ConnectorContext,
        rank: int,
        memory: Sequence[RankMemory],
        addresses: Sequence[int],
    ) -> None:
        """Args:
        context: what the connector was built from.
        rank: whose cells.
        memory: the rank's memory, one per KV cache group.
        addresses: address of each of its regions in this process.
        """
        self._groups = context.groups
        self._windows = context.layer_windows
        self._rank = rank
        self._memory = memory
        self._addresses = addresses

    def lent(self, spec: LentSpec) -> tuple[int, ...]:
        """One digest for each of the tokens ``[0, num_tokens)`` of blocks that were just lent."""
        firsts: dict[int, int] = {}
        for group, ids in zip(self._groups, spec.block_ids, strict=True):
            # A source that computed on has let go of more than its targets may ask for; they are
            # refused, but that is no reason to trip over it here.
            let_go = num_leading_nulls(ids) * group.virtual_block_size
            first = max(group.first_kept_token(spec.num_tokens), let_go)
            firsts |= dict.fromkeys(group.model_layers, first)
        return self._sums(spec.block_ids, 0, spec.num_tokens, firsts, spec.num_tokens)

    def loaded(self, spec: LoadSpec, pairs: Iterable[GroupPair]) -> tuple[int, ...]:
        """One digest for each of the tokens ``[first_token, num_tokens)`` of a load."""
        source_tokens = spec.ticket.num_tokens  # both sides' digests begin where its windows do
        firsts = {
            layer: pair.first_kept_token(source_tokens) for pair in pairs for layer in pair.layers
        }
        span = spec.first_token, spec.num_tokens
        return self._sums(spec.target_block_ids, *span, firsts, source_tokens)

    def _sums(
        self,
        block_ids: Sequence[Sequence[int]],
        first_token: int,
        num_tokens: int,
        firsts: Mapping[int, int],
        source_tokens: int,
    ) -> tuple[int, ...]:
        """Sums over the groups.

        Args:
            block_ids: whole block tables, one per group.
            first_token: start of the span.
            num_tokens: its end.
            firsts: layer → the first token that both sides keep of it.
            source_tokens: tokens that the source has.
        """
        total = np.zeros(num_tokens - first_token, dtype=np.uint64)
        for group, memory, ids in zip(self._groups, self._memory, block_ids, strict=True):
            for start, layers in self._by_start(group, firsts, source_tokens).items():
                first = min(max(start, first_token), num_tokens)
                total[first - first_token :] += token_digests(
                    group,
                    self._rank,
                    memory,
                    self._addresses,
                    ids,
                    num_tokens,
                    first,
                    layers=layers,
                )
        return tuple(total.tolist())

    def _by_start(
        self, group: GroupGeometry, firsts: Mapping[int, int], source_tokens: int
    ) -> dict[int, list[int]]:
        """First token that counts → those of this rank's layers of a group for which it does."""
        layers = defaultdict(list)
        for layer in group.layers(self._rank):
            seen = first_kept_token(source_tokens, sliding_window=self._windows.get(layer))
            layers[max(seen, firsts[layer])].append(layer)
        return layers
