"""Digests of the cells that a rank lent or loaded, over the cells that must be equal on both sides.

For a layer with a sliding window, an engine may keep all tokens or only the window, and tokens
behind the window never move. So for such a layer both sides count only the tokens from
``first_kept_token`` on, computed with the number of tokens that the *source* has. This number is
never below that of the target, which may compute the last token itself.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvferry.connectors.base import ConnectorContext
from kvferry.connectors.pull.metadata import LentSpec, LoadSpec, ids_of
from kvferry.errors import KVFerryError
from kvferry.layouts.device import CopyStream
from kvferry.observe.records import TransferRecord
from kvferry.topology import GroupGeometry, GroupPair, token_digests
from kvferry.topology.binding import BlockIds
from kvferry.topology.tensors import RankMemory
from kvferry.topology.windows import first_kept_token, num_leading_nulls


class RankDigests:
    """Computes the digests of one rank."""

    def __init__(
        self,
        context: ConnectorContext,
        rank: int,
        memory: Sequence[RankMemory],
        addresses: Sequence[int],
        stream: CopyStream | None,
    ) -> None:
        """Args:
        context: context from which the connector was built.
        rank: the rank whose cells are digested.
        memory: the rank's memory, one per KV cache group.
        addresses: address of each of the rank's regions in this process.
        stream: stream of the device that has the regions; ``None`` for host memory.
        """
        self._groups = context.groups
        self._windows = context.layer_windows
        self._rank = rank
        self._memory = memory
        self._addresses = addresses
        self._stream = stream

    def record_lent(self, spec: LentSpec) -> TransferRecord:
        """A record of blocks that were just lent, with a digest of each of the tokens ``[0,
        num_tokens)``; the record has an error if the device failed.

        Called on the step thread, so that the blocks do not change meanwhile. A device first
        carries out the steps that wrote the blocks.
        """
        started = time.time()
        try:
            if self._stream is not None:
                self._stream.follow(self._stream.engine_event())
            return spec.record(self._rank, started, token_digests=self._lent(spec))
        except KVFerryError as error:
            return spec.record(self._rank, started, error=error)

    def _lent(self, spec: LentSpec) -> tuple[int, ...]:
        firsts: dict[int, int] = {}
        for group, ids in zip(self._groups, spec.block_ids, strict=True):
            # A source that computed on has freed more blocks than its targets may ask for. Such
            # targets are refused, but the digest must not fail here.
            let_go = num_leading_nulls(ids) * group.virtual_block_size
            first = max(group.first_kept_token(spec.num_tokens), let_go)
            firsts |= dict.fromkeys(group.model_layers, first)
        return self._sums(spec.block_ids, 0, spec.num_tokens, firsts, spec.num_tokens)

    def loaded(self, spec: LoadSpec, pairs: Iterable[GroupPair]) -> tuple[int, ...]:
        """The digests of a load, one for each of the tokens ``[first_token, num_tokens)``."""
        source_tokens = spec.ticket.num_tokens  # digests of both sides begin at its windows
        firsts = {
            layer: pair.first_kept_token(source_tokens) for pair in pairs for layer in pair.layers
        }
        span = spec.first_token, spec.num_tokens
        tables = [ids_of(table) for table in spec.target_tables]
        return self._sums(tables, *span, firsts, source_tokens)

    def _sums(
        self,
        tables: Sequence[BlockIds],
        first_token: int,
        num_tokens: int,
        firsts: Mapping[int, int],
        source_tokens: int,
    ) -> tuple[int, ...]:
        """Sums over the groups.

        Args:
            tables: whole block tables, one per group.
            first_token: start of the span.
            num_tokens: end of the span.
            firsts: layer → the first token of the layer that both sides keep.
            source_tokens: number of tokens that the source has.
        """
        total = np.zeros(num_tokens - first_token, dtype=np.uint64)
        for group, memory, ids in zip(self._groups, self._memory, tables, strict=True):
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
                    stream=self._stream,
                )
        return tuple(total.tolist())

    def _by_start(
        self, group: GroupGeometry, firsts: Mapping[int, int], source_tokens: int
    ) -> dict[int, list[int]]:
        """First token that counts → the layers of a group, on this rank, that begin with this
        token.
        """
        layers = defaultdict(list)
        for layer in group.layers(self._rank):
            seen = first_kept_token(source_tokens, sliding_window=self._windows.get(layer))
            layers[max(seen, firsts[layer])].append(layer)
        return layers
