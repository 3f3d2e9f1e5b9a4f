"""Describe, compare, apply: the properties that two engines must agree on before a block moves.

:func:`validate` checks a single description, because it came from a peer. :func:`compare` checks a
pair. Both functions are pure; :class:`kvferry.control.peers.PeerTable` applies a description.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import msgspec

from kvferry.errors import ProtocolError
from kvferry.layouts.convert import is_convertible, is_lossless
from kvferry.layouts.layout import Box, CellStrides
from kvferry.topology.description import (
    MAX_GROUPS,
    MAX_RANKS,
    EngineDescription,
    RankDescription,
)
from kvferry.topology.group import GroupGeometry
from kvferry.topology.heads import ComparedHeads, compare_heads
from kvferry.topology.pairing import group_mismatches, repeated_layers
from kvferry.topology.sharding import ranges_text
from kvferry.topology.states import StateGeometry
from kvferry.topology.tensors import RankMemory, TensorKind, TensorMemory

# Limits over a whole description, so that any description is checked within a second.
MAX_MEMORIES = 8192
"""Largest product of ranks and groups."""
MAX_TENSORS = 32_768
"""Largest number of tensors of all ranks and groups: 256 ranks with 128 layers each."""
MAX_PARTS = 65_536
"""Largest number of parts of all tensors (k and v are two), and of sections of recurrent layers
times ranks."""
MAX_REGIONS = 131_072
"""Largest number of regions of all ranks and groups."""
MAX_LAYERS = 4096
"""Largest number of layers of a model, over all groups."""
MAX_NAME_CHARS = 256
"""Largest number of characters of an engine id or incarnation."""
MAX_ERROR_CHARS = 1000
"""Largest number of characters of an error that a description can cause."""
MAX_WRONG_PAIRS = 8
"""Largest number of pairs of ranks in the error about differing heads."""
MAX_BYTES = 1 << 60
"""Number of bytes of the largest region, offset or stride; sums stay inside 64 bits."""

_STRIDE_FIELDS = ("layer", "block", "token", "head", "element")

#: Field of the model's fingerprint → what to do if this field differs.
_MODEL_REMEDIES = {
    "architecture": "serve the same model on both",
    "num_layers": "serve the same model on both",
    "num_kv_heads": "serve the same model on both",
    "head_size": "serve the same model on both",
    "dtype": "give both the same KV cache dtype",
    "rope": "give both the same rope and context-scaling settings",
    "config_digest": "give both the same model config",
    "weights_digest": "load the same checkpoint on both; equal shapes are not enough",
}
_OR_CONVERT = ", or set convert_dtype on the engine that reads"


def validate(description: EngineDescription) -> None:
    """Checks that a description is consistent and that its memory stays inside its regions.

    Raises:
        ProtocolError: a check failed; the message contains the place, the value and the limit.
    """
    where = f"engine {description.engine_id[:MAX_NAME_CHARS]!r}"
    try:
        _check_names(description)
        _check_size(description)
        geometries = _geometries(description)
        for number, rank in enumerate(description.ranks):
            _check_rank(rank, number, geometries)
    except ValueError as error:
        # The peer wrote parts of the text, which may have any length.
        raise ProtocolError(f"{where}: {error}"[:MAX_ERROR_CHARS]) from error


def compare(source: EngineDescription, target: EngineDescription) -> list[str]:
    """Every reason why an engine can never read the KV of another engine; empty if there is none.

    Layout, block size, TP, PP, DCP and the grouping of layers may differ; blocks are converted on
    the way. The dtype may differ if the target's dtype holds every value of the source's dtype, or
    if the target allows a loss of precision.

    Args:
        source: the valid description of the source engine.
        target: the valid description of the target engine.
    """
    groups = _compare_groups(source, target)
    return [
        *_compare_engines(source, target),
        *_compare_models(source, target),
        *groups,
        *([] if groups else _compare_heads(source, target)),  # heads of groups that match
        *_compare_transports(source, target),
    ]


def unproved_heads(source: EngineDescription, target: EngineDescription) -> list[str]:
    """The pairs of ranks of two fitting engines that move KV heads without proof, with the reasons.

    There is a sentence per reason. The result is empty if every pair of ranks shares a layer with
    digests on both sides.
    """
    return [
        f"KV heads of {len(pairs)} pairs of ranks between engines {source.engine_id!r} and "
        f"{target.engine_id!r} are not proved by their weights (ranks {pairs[0][0]} and "
        f"{pairs[0][1]}, for one): {reason}"
        for reason, pairs in _heads(source, target).unproved.items()
    ]


# ---- a single description ----------------------------------------------------------------------


def _check_names(description: EngineDescription) -> None:
    for field in ("engine_id", "incarnation"):
        length = len(getattr(description, field))
        if not 1 <= length <= MAX_NAME_CHARS:
            raise ValueError(f"{field}: {length} characters, allowed are 1 to {MAX_NAME_CHARS}")
    said = msgspec.structs.asdict(description.model) | {
        "engine_id": description.engine_id,
        "incarnation": description.incarnation,
    }
    for field, value in said.items():
        # They reach terminals and logs, where escape sequences and new lines could forge rows.
        if isinstance(value, str) and not value.isprintable():
            raise ValueError(
                f"{field}: {value[:MAX_NAME_CHARS]!r} has characters that do not print"
            )
    if not 0 <= description.protocol_min <= description.protocol_max:
        raise ValueError(
            f"protocol_min: {description.protocol_min} to protocol_max "
            f"{description.protocol_max} is no range of versions"
        )


def _check_size(description: EngineDescription) -> None:
    """Checks the counts that bound the time of the checks that follow."""
    ranks, groups = len(description.ranks), len(description.groups)
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"ranks: {ranks} described, allowed are 1 to {MAX_RANKS}")
    if not 1 <= groups <= MAX_GROUPS:
        raise ValueError(f"groups: {groups} described, allowed are 1 to {MAX_GROUPS}")
    memories = [memory for rank in description.ranks for memory in rank.memory]
    tensors = sum(len(memory.tensors) for memory in memories)
    _check_at_most("ranks times groups", ranks * groups, MAX_MEMORIES)
    _check_at_most("tensors", tensors, MAX_TENSORS)
    parts = sum(len(tensor.parts) for memory in memories for tensor in memory.tensors)
    _check_at_most("parts", parts, MAX_PARTS)
    sections = sum(
        len(state.sections)
        for geometry in description.geometries
        if isinstance(geometry, StateGeometry)
        for state in geometry.states
    )
    _check_at_most("sections times ranks", sections * ranks, MAX_PARTS)
    regions = sum(len(memory.region_bytes) for memory in memories)
    _check_at_most("regions", regions, MAX_REGIONS)


def _check_at_most(what: str, count: int, most: int) -> None:
    if count > most:
        raise ValueError(f"{what}: {count} described in all, at most {most} are accepted")


def _geometries(description: EngineDescription) -> tuple[GroupGeometry, ...]:
    ranks, geometries = len(description.ranks), description.geometries
    for number, geometry in enumerate(geometries):
        # Check this before any other question, whose time grows with ranks and layers.
        shape = geometry.parallel
        if shape.world_size != ranks:
            raise ValueError(
                f"group {number}: tp * pp * pcp = {shape.tp} * {shape.pp} * {shape.pcp} makes "
                f"{shape.world_size} ranks, {ranks} are described"
            )
        _check_layers(geometry, number)
    _check_together(geometries)
    return geometries


def _check_layers(geometry: GroupGeometry, number: int) -> None:
    if geometry.num_layers > MAX_LAYERS:
        raise ValueError(
            f"group {number}: num_layers: {geometry.num_layers}, allowed are {MAX_LAYERS}"
        )
    if geometry.model_layers[-1] >= MAX_LAYERS:
        raise ValueError(
            f"group {number}: layer_indices: {geometry.model_layers[-1]}, the last one allowed is "
            f"{MAX_LAYERS - 1}"
        )


def _check_together(geometries: Sequence[GroupGeometry]) -> None:
    """Checks that the groups fit together; their memories may overlap."""
    for number, geometry in enumerate(geometries):
        if geometry.parallel != geometries[0].parallel:
            raise ValueError(
                f"group {number}: {geometry.parallel}, but group 0 has {geometries[0].parallel}; "
                "all groups lie on the same ranks"
            )
    if repeated := repeated_layers(geometries):
        raise ValueError(
            f"groups: layers {ranges_text(repeated)} are in several; a layer is in one"
        )


def _check_rank(rank: RankDescription, number: int, geometries: Sequence[GroupGeometry]) -> None:
    where = f"rank {number}"
    if rank.rank != number:
        raise ValueError(f"{where}: describes itself as rank {rank.rank}; ranks come in order")
    if not rank.endpoints:
        raise ValueError(f"{where}: endpoints: none; every rank serves at least one transport")
    if len(rank.memory) != len(geometries):
        raise ValueError(
            f"{where}: memory: {len(rank.memory)} entries for {len(geometries)} groups"
        )
    for group, (memory, geometry) in enumerate(zip(rank.memory, geometries, strict=True)):
        _check_memory(memory, geometry, number, f"{where}: group {group}")
    if rank.heads is not None:
        try:
            rank.heads.check(geometries, number)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error


def _check_memory(memory: RankMemory, geometry: GroupGeometry, rank: int, where: str) -> None:
    if not 1 <= memory.num_blocks <= MAX_BYTES:
        raise ValueError(f"{where}: num_blocks: {memory.num_blocks} is not 1 or more")
    for region, size in enumerate(memory.region_bytes):
        if not 0 <= size <= MAX_BYTES:
            raise ValueError(f"{where}: region {region}: {size} bytes, at most {MAX_BYTES}")
    names = {tensor.name for tensor in memory.tensors}
    expected = geometry.tensors(rank)
    if geometry.layout.is_cross_layer and not names & set(expected):
        # A tensor that holds every layer may be described as one view per layer.
        geometry = replace(geometry, layout=geometry.layout.without_layers())
        expected = geometry.tensors(rank)
    if names != set(expected) or len(memory.tensors) != len(expected):
        missing = sorted(set(expected) - names)
        raise ValueError(
            f"{where}: tensors: {len(memory.tensors)} described, {len(expected)} expected; "
            f"missing: {', '.join(missing[:8]) or 'none'}"
        )
    for tensor in memory.tensors:
        kind = expected[tensor.name]
        box = geometry.box(rank, memory.num_blocks, kind)
        _check_tensor(tensor, memory.region_bytes, box, kind, f"{where}: {tensor.name[:80]}")


def _check_tensor(
    tensor: TensorMemory,
    region_bytes: tuple[int, ...],
    box: Box,
    kind: TensorKind,
    where: str,
) -> None:
    if not 0 <= tensor.region < len(region_bytes):
        raise ValueError(f"{where}: region: {tensor.region}, there are {len(region_bytes)}")
    sizes = {part.name: part for part in kind.parts}
    if tensor.parts.keys() != sizes.keys():
        raise ValueError(f"{where}: parts: {sorted(tensor.parts)}, expected {sorted(sizes)}")
    size = region_bytes[tensor.region]
    for name, strides in tensor.parts.items():
        held = kind.part_box(box, name)
        try:
            first, end = _extent(strides, held, sizes[name].head_size, sizes[name].itemsize)
        except ValueError as error:
            raise ValueError(f"{where}: part {name}: {error}") from error
        first, end = tensor.offset + first, tensor.offset + end
        if first < 0 or end > size:
            raise ValueError(
                f"{where}: part {name}: spans bytes {first} to {end} of region {tensor.region}, "
                f"which has {size} bytes"
            )
        _check_strides(strides, tensor.offset, f"{where}: part {name}")


def _extent(strides: CellStrides, box: Box, elements: int, itemsize: int) -> tuple[int, int]:
    """First byte, and byte after the last byte, of a part's cells, from the tensor's start."""
    extents = (box.layers, box.blocks, box.tokens, box.heads, elements)
    first = last = strides.offset
    for field, extent in zip(_STRIDE_FIELDS, extents, strict=True):
        if extent > 1 and getattr(strides, field) == 0:
            raise ValueError(f"stride of {field}: 0 bytes for {extent} of them; cells overlap")
        reach = getattr(strides, field) * (extent - 1)
        first, last = first + min(reach, 0), last + max(reach, 0)
    return first, last + itemsize


def _check_strides(strides: CellStrides, offset: int, where: str) -> None:
    """Also bounds the strides of dims with extent 1, which no cell uses but 64-bit sums do."""
    for field, value in [
        ("tensor offset", offset),
        ("offset", strides.offset),
        *((field, getattr(strides, field)) for field in _STRIDE_FIELDS),
    ]:
        if abs(value) > MAX_BYTES:
            raise ValueError(f"{where}: {field}: {value} bytes, at most {MAX_BYTES}")


# ---- a pair ------------------------------------------------------------------------------------


def _differs(
    field: str,
    ours: EngineDescription,
    theirs: EngineDescription,
    values: tuple[object, object],
    remedy: str,
) -> str:
    one, two = (str(value)[:MAX_NAME_CHARS] for value in values)
    return (
        f"{field}: engine {ours.engine_id!r} has {one}, engine {theirs.engine_id!r} has {two}; "
        f"{remedy}"
    )


def _compare_engines(ours: EngineDescription, theirs: EngineDescription) -> Iterator[str]:
    if (ours.engine_id, ours.incarnation) == (theirs.engine_id, theirs.incarnation):
        yield (
            f"engine_id: engine {ours.engine_id!r} is talking to itself: the address that it was "
            "given leads back to it; set host of the other engine to an address at which this "
            "machine reaches it (127.0.0.1 is every machine's own)"
        )
    elif ours.engine_id == theirs.engine_id:
        yield (
            f"engine_id: both engines are named {ours.engine_id!r}; give each engine its own "
            "engine_id"
        )
    if max(ours.protocol_min, theirs.protocol_min) > min(ours.protocol_max, theirs.protocol_max):
        ranges = tuple(f"versions {d.protocol_min} to {d.protocol_max}" for d in (ours, theirs))
        yield _differs(
            "protocol", ours, theirs, (ranges[0], ranges[1]), "upgrade the older release"
        )


def _compare_models(source: EngineDescription, target: EngineDescription) -> Iterator[str]:
    for field, remedy in _MODEL_REMEDIES.items():
        values = (getattr(source.model, field), getattr(target.model, field))
        if field == "dtype":
            converts = is_convertible if target.convert_dtype else is_lossless
            if converts(*values):
                continue  # the groups check scales, which forbid a conversion
            if is_convertible(*values):
                remedy += _OR_CONVERT
        if values[0] != values[1]:
            if field == "weights_digest":  # a digest does not name its checkpoint
                names = source.model.name, target.model.name
                values = (f"{values[0]} ({names[0]})", f"{values[1]} ({names[1]})")
            yield _differs(f"model.{field}", source, target, values, remedy)


def _compare_groups(source: EngineDescription, target: EngineDescription) -> list[str]:
    return group_mismatches(
        source.geometries,
        target.geometries,
        names=(f"engine {source.engine_id!r}", f"engine {target.engine_id!r}"),
        convert=target.convert_dtype,
    )


def _heads(source: EngineDescription, target: EngineDescription) -> ComparedHeads:
    """The result of comparing the digests of both engines for the KV heads that move."""
    return compare_heads(
        source.geometries,
        [rank.heads for rank in source.ranks],
        target.geometries,
        [rank.heads for rank in target.ranks],
        target.engine_id,
    )


def _compare_heads(source: EngineDescription, target: EngineDescription) -> Iterator[str]:
    """The ranks that hold different heads under the same number, according to their weights."""
    if not all(any(rank.heads for rank in each.ranks) for each in (source, target)):
        return  # nothing to compare
    found = _heads(source, target).wrong
    for (ours, theirs), heads in list(found.items())[:MAX_WRONG_PAIRS]:
        head, layers = next(iter(heads.items()))
        yield (
            f"KV heads: rank {ours} of engine {source.engine_id!r} and rank {theirs} of engine "
            f"{target.engine_id!r} both have a head {head} in layers {ranges_text(layers)}, but "
            "its weights differ: load the same weights on both; if they are the same, an engine "
            "counts its heads wrongly: report it, with the model and both tensor parallel sizes"
        )
    if len(found) > MAX_WRONG_PAIRS:
        yield f"KV heads: {len(found) - MAX_WRONG_PAIRS} more pairs of ranks differ in this way"


def common_transports(ours: EngineDescription, theirs: EngineDescription) -> set[str]:
    """Names of the transports of every rank of both engines."""
    return _transports(ours.ranks) & _transports(theirs.ranks)


def _compare_transports(ours: EngineDescription, theirs: EngineDescription) -> Iterator[str]:
    if not common_transports(ours, theirs):
        values = (_transports(ours.ranks), _transports(theirs.ranks))
        names = tuple(", ".join(sorted(value)) or "none on every rank" for value in values)
        yield _differs(
            "transports", ours, theirs, (names[0], names[1]), "enable one transport on both"
        )


def _transports(ranks: Iterable[RankDescription]) -> set[str]:
    """Transports of every rank."""
    found = [set(rank.endpoints) for rank in ranks]
    return set.intersection(*found) if found else set()
