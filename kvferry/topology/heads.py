"""Digests of the weights behind each KV head: the proof that two ranks mean the same head.

Geometries say which heads a rank holds, and plans depend on this. A geometry may be wrong: if a
rank counts a head as a replica of a neighbouring head, the target reads from the wrong rank. Every
later token is then wrong although every shape fits. Therefore each rank digests the rows of its own
weights that make K and V of each head. The handshake compares these digests for every pair of ranks
between which cells move. The digests cover weights, because weights are known before the first
request and do not depend on a prompt.

A rank may hold its weights in the private form of a kernel, and two ranks may hold them in
different forms. Therefore a digest covers a few columns of a head's rows (:func:`probed_columns`).
Any kernel returns these columns exactly when its inputs are unit vectors. The values are converted
to a common form before they are digested (:func:`form_of`).
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, cast

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvferry.topology.geometry import EngineGeometry
from kvferry.topology.group import GroupGeometry
from kvferry.topology.lowering import Piece
from kvferry.topology.pairing import pair_groups
from kvferry.topology.plan import plan_transfer
from kvferry.topology.sharding import ranges_text

DIGEST_BYTES = 8
"""Number of bytes in the digest of a head of a layer."""
NUM_COLUMNS = 8
"""Number of digested columns of a head's rows."""
MAX_LAYERS = 4096
"""Largest number of layers in the record of a rank."""
MAX_REASONS = 16
"""Largest number of different reasons why layers of a rank have no digests."""
MAX_REASON_CHARS = 256
"""Largest number of characters of such a reason."""
FORMS = ("bfloat16", "float16")
"""Dtypes to which weights are rounded before they are digested."""

LATENT = "a latent has no heads to tell apart"
"""Reason why a layer of MLA has no digest; such a layer needs none."""

_NOTHING = ("an engine, or a release, that digests no weights", b"")
"""Record of a layer for which a rank sends nothing: a reason, and no digests."""

Layers: TypeAlias = Annotated[tuple[int, ...], Meta(max_length=MAX_LAYERS)]
Form: TypeAlias = Literal["bfloat16", "float16"]
"""A name in :data:`FORMS`."""
Reason: TypeAlias = Annotated[str, Meta(max_length=MAX_REASON_CHARS)]


class HeadDigests(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of the weights that make K and V of each KV head that a rank holds.

    Every attention layer of the rank is in one of the two fields: the layer has digests or a
    reason.
    """

    digests: dict[Form, Annotated[dict[int, bytes], Meta(max_length=MAX_LAYERS)]]
    """Form of the weights → index of a layer in the model → digests of the rank's heads in this
    layer, :data:`DIGEST_BYTES` bytes each, in the order of the heads."""
    untold: Annotated[dict[Reason, Layers], Meta(max_length=MAX_REASONS)] = {}
    """Reason → layers without digests for this reason."""

    @classmethod
    def of(cls, told: Mapping[int, tuple[str, bytes]]) -> "HeadDigests":
        """Makes the digests of a rank from a record per layer; the inverse of :meth:`told`."""
        digests: dict[Form, dict[int, bytes]] = {}
        untold: dict[str, tuple[int, ...]] = {}
        for layer, (text, found) in sorted(told.items()):
            if found:
                digests.setdefault(cast(Form, text), {})[layer] = found
            else:
                untold[text] = (*untold.get(text, ()), layer)
        return cls(digests=digests, untold=untold)

    def told(self) -> dict[int, tuple[str, bytes]]:
        """Layer → form of the weights and digests; or the reason, and no digests."""
        found: dict[int, tuple[str, bytes]] = {
            layer: (form, digests)
            for form, layers in self.digests.items()
            for layer, digests in layers.items()
        }
        return found | {
            layer: (reason, b"") for reason, layers in self.untold.items() for layer in layers
        }

    def check(self, groups: Sequence[GroupGeometry], rank: int) -> None:
        """Checks that every attention layer of a rank occurs once, with a digest per head.

        Args:
            groups: the geometries of the engine's groups.
            rank: the rank of the digests.

        Raises:
            ValueError: the message contains the layer, the actual value and the expected value.
        """
        held = {
            layer: len(group.heads(rank))
            for group in attention_of(groups)
            for layer in group.layers(rank)
        }
        for reason in self.untold:
            if not reason or not reason.isprintable():
                raise ValueError(f"heads: untold: {reason[:80]!r} is no text that can be printed")
        layers = [
            layer for found in (*self.digests.values(), *self.untold.values()) for layer in found
        ]
        told = self.told()
        if len(layers) != len(told):
            twice = next(layer for layer, times in Counter(layers).items() if times > 1)
            raise ValueError(f"heads: layer {twice} is told of twice; tell of it once")
        if told.keys() != held.keys():
            raise ValueError(
                f"heads: layers {ranges_text(sorted(told)) or 'none'} are told of, the rank holds "
                f"{ranges_text(sorted(held)) or 'none'}; give each layer digests or a reason"
            )
        for layer, digests in (item for found in self.digests.values() for item in found.items()):
            if len(digests) != held[layer] * DIGEST_BYTES:
                raise ValueError(
                    f"heads: layer {layer}: {len(digests)} bytes of digests, expected "
                    f"{DIGEST_BYTES} for each of its {held[layer]} heads"
                )


def attention_of(groups: Sequence[GroupGeometry]) -> Iterator[EngineGeometry]:
    """The groups with KV heads; groups of recurrent layers have none."""
    return (group for group in groups if isinstance(group, EngineGeometry))


def split_digests(digests: bytes) -> list[bytes]:
    """Splits the digests of a layer into a digest per head.

    >>> split_digests(b"-head 0--head 1-")
    [b'-head 0-', b'-head 1-']
    """
    return [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]


def alike_heads(
    groups: Sequence[GroupGeometry], ranks: Sequence[HeadDigests | None]
) -> tuple[int, ...]:
    """The layers of an engine in which two heads have equal weights, ascending.

    Digests cannot tell such heads apart. Checkpoints with copied or pruned heads exist.

    Args:
        groups: the geometries of the engine's groups.
        ranks: the digests of each rank; ``None`` for a rank without digests.
    """
    seen: dict[tuple[int, bytes], int] = {}
    alike: set[int] = set()
    told = [{} if rank is None else rank.told() for rank in ranks]
    for group in attention_of(groups):
        for rank, layers in enumerate(told):
            for layer in group.layers(rank):
                digests = split_digests(layers.get(layer, _NOTHING)[1])
                for head, digest in zip(group.heads(rank), digests, strict=False):
                    if seen.setdefault((layer, digest), head) != head:
                        alike.add(layer)
    return tuple(sorted(alike))


# ---- digests of weights ------------------------------------------------------------------------


def probed_columns(width: int) -> npt.NDArray[np.int64]:
    """The columns of a projection's weights that are digested: few, and spread over all columns.

    >>> probed_columns(576).tolist()
    [0, 72, 144, 216, 288, 360, 432, 504]

    Args:
        width: number of columns of the weights, which is the size of the hidden state.
    """
    return np.unique(np.arange(NUM_COLUMNS) * width // NUM_COLUMNS)


def form_of(dtype: str) -> Form:
    """The dtype to which weights are rounded before they are digested.

    An engine that computes in float32 and an engine that computes in bfloat16 hold the same
    checkpoint in two forms. The two forms are equal after both are rounded to bfloat16.

    >>> form_of("float32"), form_of("bfloat16"), form_of("float16")
    ('bfloat16', 'bfloat16', 'float16')

    Args:
        dtype: dtype of the loaded weights, without ``torch.``.

    Raises:
        ValueError: weights of this dtype are not digested.
    """
    if dtype in ("float64", "float32", "bfloat16"):
        return "bfloat16"
    if dtype == "float16":
        return "float16"
    raise ValueError(f"dtype: {dtype!r} is none of float64, float32, bfloat16 and float16")


def digest_heads(
    k_HDC: npt.NDArray[np.float32], v_HDC: npt.NDArray[np.float32], dtype: object
) -> tuple[Form, bytes]:
    """Form of the weights of a layer, and digests of its heads on a rank, in the order of the
    heads.

    >>> rows = np.arange(2 * 4 * 8, dtype=np.float32).reshape(2, 4, 8)
    >>> form, digests = digest_heads(rows, rows, "float32")
    >>> one, two = split_digests(digests)
    >>> form, one == digest_heads(rows[:1], rows[:1], "bfloat16")[1], one == two
    ('bfloat16', True, False)

    Args:
        k_HDC: float32 ``[heads, head size, columns]``: the probed columns of the rows that make K,
            exactly as loaded.
        v_HDC: the probed columns of the rows that make V, ``[heads, head size of V, columns]``.
        dtype: dtype of the loaded weights: a torch dtype, or its name.

    Raises:
        ValueError: weights of this dtype are not digested.
    """
    form = form_of(str(dtype).removeprefix("torch."))
    return form, b"".join(
        hashlib.blake2b(
            _bits(k_DC, form).tobytes() + _bits(v_DC, form).tobytes(), digest_size=DIGEST_BYTES
        ).digest()
        for k_DC, v_DC in zip(k_HDC, v_HDC, strict=True)
    )


def _bits(values: npt.NDArray[np.float32], form: str) -> npt.NDArray[np.uint16]:
    """Converts the values to a form of two bytes, as little-endian integers."""
    values = np.ascontiguousarray(values, np.float32) + np.float32(0)  # -0.0 becomes 0.0
    if form == "float16":
        return values.astype("<f2").view("<u2")
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))  # ties to even
    return (rounded >> np.uint32(16)).astype("<u2")


# ---- two engines -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ComparedHeads:
    """Result of comparing the digests of two engines, for the pairs of ranks that move cells."""

    wrong: Mapping[tuple[int, int], Mapping[int, tuple[int, ...]]]
    """(source rank, target rank) → head of the model → layers in which the two ranks hold different
    heads under this number."""
    unproved: Mapping[str, tuple[tuple[int, int], ...]]
    """Reason → pairs of ranks that share no layer with digests on both sides, among the layers with
    the same number of heads. Latents do not count: they have no heads to tell apart."""


def compare_heads(
    sources: Sequence[GroupGeometry],
    source_heads: Sequence[HeadDigests | None],
    targets: Sequence[GroupGeometry],
    target_heads: Sequence[HeadDigests | None],
    target_engine_id: str = "",
) -> ComparedHeads:
    """Compares the digests of every head that moves, on its source rank and on its target rank.

    Args:
        sources: the groups of the source engine.
        source_heads: the digests of each source rank; ``None`` for a rank without digests.
        targets: the groups of the target engine.
        target_heads: the digests of each target rank.
        target_engine_id: engine id for the choice among replicas, as in
            :func:`~kvferry.topology.plan.plan_transfer`.

    Raises:
        ValueError: the groups can never match.
    """
    wrong: dict[tuple[int, int], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    # A proved layer proves nothing about layers that have another number of heads.
    proved: set[tuple[tuple[int, int], int]] = set()
    reasons: dict[tuple[tuple[int, int], int], str] = {}
    ours, theirs = (
        [{} if rank is None else rank.told() for rank in heads]
        for heads in (source_heads, target_heads)
    )
    for source, target, target_rank, piece in _moves(sources, targets, target_engine_id):
        ranks = piece.source_rank, target_rank
        one = ours[ranks[0]].get(piece.layer, _NOTHING)
        two = theirs[ranks[1]].get(piece.layer, _NOTHING)
        if one[0] == two[0] == LATENT:
            continue
        kind = ranks, source.num_kv_heads
        if one[0] != two[0] or not (one[1] and two[1]):
            reasons.setdefault(kind, _why_unproved(one, two))
            continue
        proved.add(kind)
        first = source.heads(ranks[0]).start, target.heads(ranks[1]).start
        for head in piece.heads:
            digest = _digest_at(one[1], head - first[0])
            if not digest or digest != _digest_at(two[1], head - first[1]):
                wrong[ranks][head].add(piece.layer)
    unproved: dict[str, dict[tuple[int, int], None]] = defaultdict(dict)
    for kind, reason in reasons.items():
        if kind not in proved:
            unproved[reason][kind[0]] = None
    return ComparedHeads(
        {
            ranks: {head: tuple(sorted(layers)) for head, layers in heads.items()}
            for ranks, heads in wrong.items()
        },
        {reason: tuple(pairs) for reason, pairs in unproved.items()},
    )


def _moves(
    sources: Sequence[GroupGeometry], targets: Sequence[GroupGeometry], target_engine_id: str
) -> Iterator[tuple[EngineGeometry, EngineGeometry, int, Piece]]:
    """Every piece of every plan that moves KV heads, with both groups and the target rank."""
    for pair in pair_groups(sources, targets, convert=True):
        source, target = sources[pair.source_group], targets[pair.target_group]
        if not (isinstance(source, EngineGeometry) and isinstance(target, EngineGeometry)):
            continue
        for target_rank in range(0 if target.use_mla else target.world_size):
            plan = plan_transfer(
                source=source,
                target=target,
                target_rank=target_rank,
                target_engine_id=target_engine_id,
                layers=pair.layers,
                convert=True,
            )
            for piece in plan.pieces:
                yield source, target, target_rank, piece


def _why_unproved(one: tuple[str, bytes], two: tuple[str, bytes]) -> str:
    """The reason why the records of two ranks for a layer cannot be compared."""
    if one[1] and two[1]:
        return f"digests of weights in {one[0]} and in {two[0]} cannot be compared"
    return two[0] if one[1] else one[0]


def _digest_at(digests: bytes, place: int) -> bytes:
    """The digest at an index of a rank's heads; empty if the rank has no such head."""
    return digests[place * DIGEST_BYTES :][:DIGEST_BYTES] if place >= 0 else b""
