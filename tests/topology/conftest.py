"""Random worlds for the laws, and a slow oracle that slices and concatenates logical arrays."""

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from kvferry.layouts import Layout
from kvferry.topology import EngineGeometry, ParallelShape

DTYPES = {"uint8": np.uint8, "bfloat16": np.uint16, "float32": np.uint32, "float64": np.uint64}
#: How NumPy stores the dtypes that a test may ask for, beside those that are drawn.
STORED: dict[str, Any] = DTYPES | {"float16": np.uint16, "float8_e4m3fn": np.uint8}
GUARD = 64  # bytes around every storage that nobody may touch


@dataclass
class Engine:
    """An engine with real memory on every rank."""

    geometry: EngineGeometry
    num_blocks: int
    tensors: dict = field(default_factory=dict)  # rank → name → array
    storages: dict = field(default_factory=dict)  # rank → list of byte arrays, guards included


@dataclass
class Case:
    source: Engine
    target: Engine
    target_rank: int
    source_blocks: list
    target_blocks: list
    first_token: int
    num_tokens: int
    logical: dict  # part → array [layer, token, head, element]
    engine_id: str


class Worlds:
    """Draws cases, fills memory, and knows the slow truth."""

    Case = Case

    often_context_parallel = False
    """Whether most engines spread tokens over ranks, and not every other one; requests are long,
    and layers few."""
    often_cross_layer = False
    """Whether most layouts have all layers of a group in one tensor."""
    several_heads_per_rank = False
    """Whether there are few ranks for many KV heads."""

    # ---- drawing -------------------------------------------------------------------------------

    def case(self, data, **fixed):
        draw = data.draw
        model = self.model(draw)
        source_geometry = self.geometry(draw, model)
        target_geometry = self.geometry(draw, model)
        is_long = self.often_context_parallel
        fewest, most = (24, 40) if is_long else (0, 20)
        num_tokens = draw(st.integers(fewest, most), label="num_tokens")
        first_token = draw(st.integers(0, 4 if is_long else num_tokens), label="first_token")
        source_blocks = self.table(draw, source_geometry, num_tokens)
        target_blocks = self.table(draw, target_geometry, num_tokens)
        target_rank = draw(st.integers(0, target_geometry.world_size - 1), label="target_rank")
        seed = draw(st.integers(0, 2**32 - 1), label="seed")
        rng = np.random.default_rng(seed)
        source = self.engine(draw, rng, source_geometry, max(source_blocks, default=0) + 1)
        target = self.engine(draw, rng, target_geometry, max(target_blocks, default=0) + 1)
        logical = self.logical(rng, source_geometry, len(source_blocks))
        self.fill(source, source_blocks, logical)
        if draw(st.booleans(), label="null target blocks"):
            holes = draw(st.sets(st.integers(0, max(len(target_blocks) - 1, 0)), max_size=2))
            target_blocks = [0 if i in holes else b for i, b in enumerate(target_blocks)]
            source_blocks = self._nulled(
                draw, source_geometry, target_geometry, source_blocks, target_blocks
            )
        return Case(
            source,
            target,
            target_rank,
            source_blocks,
            target_blocks,
            first_token,
            num_tokens,
            logical,
            draw(st.sampled_from(["", "d0", "decode-1"])),
        )

    def _nulled(self, draw, source, target, source_blocks, target_blocks):
        """Source blocks that only null target blocks want may be null as well."""
        wanted = {
            token // source.virtual_block_size
            for token in range(len(target_blocks) * target.virtual_block_size)
            if target_blocks[token // target.virtual_block_size] != 0
        }
        drop = draw(st.booleans(), label="null source blocks")
        return [0 if drop and i not in wanted else b for i, b in enumerate(source_blocks)]

    def model(self, draw):
        mla = draw(st.integers(0, 4), label="mla") == 0
        head_size = draw(st.integers(1, 5), label="head_size")
        sizes_differ = not mla and draw(st.booleans(), label="sizes differ")
        most_layers = 2 if self.often_context_parallel else 5
        return {
            "num_layers": draw(st.integers(1, most_layers), label="num_layers"),
            "num_kv_heads": 1 if mla else self._num_kv_heads(draw),
            "head_size": head_size,
            "head_size_v": draw(st.integers(1, 5)) if sizes_differ else None,
            "use_mla": mla,
            "dtype": draw(st.sampled_from(sorted(DTYPES)), label="dtype"),
            "scale_dtype": draw(st.sampled_from([None, None, "bfloat16", "float32"])),
        }

    def _num_kv_heads(self, draw):
        fewest = 4 if self.several_heads_per_rank else 1
        return draw(st.integers(fewest, 6), label="num_kv_heads")

    def geometry(self, draw, model) -> EngineGeometry:
        pp = draw(st.integers(1, min(model["num_layers"], 3)), label="pp")
        split = None
        if draw(st.booleans(), label="own split"):
            layers = range(1, model["num_layers"])
            cuts = draw(
                st.sets(st.sampled_from(layers), min_size=pp - 1, max_size=pp - 1)
                if pp > 1
                else st.just(set())
            )
            edges = [0, *sorted(cuts), model["num_layers"]]
            split = [b - a for a, b in itertools.pairwise(edges)]
        most_tp = 2 if self.several_heads_per_rank else 7
        parallel = self.parallel(draw, [model["num_kv_heads"]], most_tp, pp)
        geometry = EngineGeometry(
            **model,
            block_size=self.block_size(draw, parallel),
            layout=self.layout(draw, "latent" if model["use_mla"] else None),
            parallel=parallel,
            layer_split=split,
        )
        return self.separated(draw, self.padded(draw, geometry))

    def separated(self, draw, geometry) -> EngineGeometry:
        """The same, in one case of four with tensors of their own for k and v."""
        if draw(st.integers(0, 3), label="separate parts"):
            return geometry
        joins = geometry.use_mla or geometry.layout.inner_orders or geometry.page_size_padded
        return dataclasses.replace(geometry, separate_parts=not joins)

    def padded(self, draw, geometry) -> EngineGeometry:
        """The same, in one case of four with padded pages."""
        if draw(st.integers(0, 3), label="padded pages"):
            return geometry
        elements = geometry.block_size * max(
            len(geometry.heads(rank)) for rank in range(geometry.world_size)
        )
        elements *= sum(size for _, size in geometry.part_sizes)
        padding = draw(st.integers(0, 3), label="padding")
        return dataclasses.replace(
            geometry, page_size_padded=(elements + padding) * geometry.itemsize
        )

    def parallel(self, draw, kv_heads, most_tp, pp) -> ParallelShape:
        """A shape, half the time with context parallelism; for layers with these KV heads."""
        tp = draw(st.integers(1, most_tp), label="tp")
        multiple = math.lcm(*kv_heads) * draw(st.integers(2, 4), label="replicas")
        kinds = ["none"] * (1 if self.often_context_parallel else 4) + ["dcp", "dcp", "pcp", "both"]
        kind = draw(st.sampled_from(kinds), label="context parallelism")
        if multiple <= 8 and (kind == "dcp" or draw(st.booleans(), label="equal replicas")):
            tp = multiple
        if kind == "none":
            return ParallelShape(tp=tp, pp=pp)
        replicas = [
            sum(heads * rank // tp == head for rank in range(tp))
            for heads in kv_heads
            for head in range(heads)
            if heads < tp
        ]
        if any(heads >= tp for heads in kv_heads):
            replicas.append(1)
        fits = [n for n in range(1, tp + 1) if all(count % n == 0 for count in replicas)]
        return ParallelShape(
            tp=tp,
            pp=pp,
            dcp=1 if kind == "pcp" else draw(st.sampled_from(fits[1:] or [1]), label="dcp"),
            pcp=1 if kind == "dcp" else draw(st.integers(2, 3), label="pcp"),
            interleave_size=draw(st.sampled_from([1, 1, 2, 3]), label="interleave_size"),
        )

    def block_size(self, draw, parallel) -> int:
        size = draw(st.integers(1, 6), label="block_size")
        if parallel.dcp * parallel.pcp == 1:
            return size
        size += draw(st.integers(0, 6), label="more")
        turn = parallel.interleave_size
        return -(-size // turn) * turn

    def layout(self, draw, latent=None) -> Layout:
        kinds = ["order", "inner"] if self.often_cross_layer else ["named", "order", "inner"]
        kind = draw(st.sampled_from(kinds), label="kind of layout")
        if kind == "named":
            return Layout.named(draw(st.sampled_from(["NHD", "HND", "BHNKD", "BLHNC", "BHLNC"])))
        optional = ["L", "KL"] if self.often_cross_layer else ["", "K", "L", "KL"]
        dims = "BNHD" + draw(st.sampled_from(optional), label="optional dims")
        order = "".join(draw(st.permutations(dims), label="order"))
        if kind == "order":
            return Layout(order)
        inner = draw(st.sampled_from(["D", "ND", "HD", "NHD"]), label="inner dims")
        outer = "".join(dim for dim in order if dim not in inner)
        parts = ["latent"] if latent else ["k", "v"]
        return Layout(outer, {part: "".join(draw(st.permutations(inner))) for part in parts})

    def table(self, draw, geometry, num_tokens):
        blocks = -(-num_tokens // geometry.virtual_block_size) + draw(st.integers(0, 2))
        ids = draw(st.permutations(range(1, blocks + 3)), label="block ids")
        return list(ids[:blocks])

    # ---- memory --------------------------------------------------------------------------------

    def engine(self, draw, rng, geometry, num_blocks) -> Engine:
        engine = Engine(geometry, num_blocks)
        kind = draw(st.sampled_from(["dense", "one storage", "strided"]), label="memory")
        for rank in range(geometry.world_size):
            shapes = {
                name: each.layout.shape(geometry.box(rank, num_blocks, each))
                for name, each in geometry.tensors(rank).items()
            }
            names = geometry.tensor_names(rank)
            dtype = STORED[geometry.dtype]
            tensors, storages = {}, []
            own = [name for name in names if not name.endswith("_scale")]
            together = kind == "one storage" and geometry.page_size_padded is None
            if together and len({shapes[name] for name in own}) == 1:
                stacked, storage = self._dense(rng, (len(own), *shapes[own[0]]), dtype)
                tensors = dict(zip(own, stacked, strict=True))
                storages.append(storage)
            for name in own if not tensors else ():
                make = self._dense if kind == "dense" else self._strided
                if geometry.page_size_padded is not None:
                    make = functools.partial(self._padded, geometry)
                tensors[name], storage = make(rng, shapes[name], dtype)
                storages.append(storage)
            for name in names[len(own) :]:
                shape = geometry.cache_shape(rank, num_blocks, name.rpartition(".")[2])
                make = self._dense if kind == "dense" else self._strided
                tensors[name], storage = make(rng, shape, STORED[geometry.scale_dtype])
                storages.append(storage)
            engine.tensors[rank], engine.storages[rank] = tensors, storages
        return engine

    def _dense(self, rng, shape, dtype):
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        storage = rng.integers(0, 256, GUARD + nbytes + GUARD, dtype=np.uint8)
        return storage[GUARD : GUARD + nbytes].view(dtype).reshape(shape), storage

    def _padded(self, geometry, rng, shape, dtype):
        nbytes = math.prod(self._num_pages(geometry, shape)) * geometry.page_size_padded
        storage = rng.integers(0, 256, GUARD + nbytes + GUARD, dtype=np.uint8)
        return self.padded_view(geometry, storage[GUARD : GUARD + nbytes], shape, dtype), storage

    def _num_pages(self, geometry, shape):
        dims = geometry.layout.dims(geometry.part_sizes)
        return [extent for extent, letter in zip(shape, dims, strict=True) if letter in "LB"]

    def padded_view(self, geometry, memory, shape, dtype):
        """Page after page, each with its cells in order and then bytes that nobody may touch."""
        dims = geometry.layout.dims(geometry.part_sizes)
        order = sorted(range(len(dims)), key=lambda dim: dims[dim] not in "LB")
        pages = memory.view(dtype).reshape(math.prod(self._num_pages(geometry, shape)), -1)
        cells = pages[:, : math.prod(shape) // len(pages)]
        view = cells.reshape([shape[dim] for dim in order]).transpose(np.argsort(order))
        assert np.shares_memory(view, memory)
        return view

    def _strided(self, rng, shape, dtype):
        """A view with gaps in every dim, some of them walked backwards, in any dim order."""
        order = rng.permutation(len(shape))
        padded = [shape[dim] + int(rng.integers(0, 2)) for dim in order]
        whole, storage = self._dense(rng, padded, dtype)
        view = whole[tuple(slice(n - shape[d], None) for n, d in zip(padded, order, strict=True))]
        view = view.transpose(np.argsort(order))
        flips = tuple(slice(None, None, int(rng.choice([1, -1]))) for _ in shape)
        return view[flips], storage

    # ---- the slow truth ------------------------------------------------------------------------

    def logical(self, rng, geometry, num_blocks):
        tokens = num_blocks * geometry.virtual_block_size
        return {
            part.name: rng.integers(
                0,
                np.iinfo(STORED[part.dtype]).max,
                dtype=STORED[part.dtype],
                endpoint=True,
                size=(geometry.num_layers, tokens, geometry.num_kv_heads, part.head_size),
            )
            for part in geometry.parts
        }

    def fill(self, engine, blocks, logical) -> None:
        """Writes logical cells into every rank that holds them, replicas included."""
        geometry = engine.geometry
        for rank in range(geometry.world_size):
            for layer in geometry.layers(rank):
                for part, cells in logical.items():
                    heads = geometry.heads(rank)
                    self.write(
                        engine,
                        rank,
                        layer,
                        part,
                        blocks,
                        range(cells.shape[1]),
                        cells[layer, :, heads.start : heads.stop],
                    )

    def write(self, engine, rank, layer, part, blocks, tokens, cells) -> None:
        """cells: [token, head, element], for those token positions; the rank has some of them."""
        boxes = self.read_box(engine, rank, layer, part)  # [block, token, head, element]
        for token, cell in zip(tokens, cells, strict=True):
            if (place := self.place(engine.geometry, rank, token)) is not None:
                boxes[blocks[place[0]], place[1]] = cell
        self.write_box(engine, rank, layer, part, boxes)

    def place(self, geometry, rank, token):
        """Entry of the block table and slot in the block of a token, or None; by definition."""
        shape = geometry.parallel
        ranks = shape.dcp * shape.pcp
        if ranks == 1:
            return token // geometry.block_size, token % geometry.block_size
        rest, tp_rank = divmod(rank, shape.tp)
        head = geometry.heads(rank).start
        replicas = [
            other for other in range(shape.tp) if head in geometry.heads(rest * shape.tp + other)
        ]
        ours = rest % shape.pcp * shape.dcp + replicas.index(tp_rank) % shape.dcp
        entry = token // (geometry.block_size * ranks)
        first = entry * geometry.block_size * ranks
        held = [
            position
            for position in range(first, first + geometry.block_size * ranks)
            if position // shape.interleave_size % ranks == ours
        ]
        assert len(held) == geometry.block_size
        return (entry, held.index(token)) if token in held else None

    def _tensor(self, engine, rank, layer, part):
        """One layer's tensor that holds a part, with its dims' letters; L is gone."""
        geometry = engine.geometry
        dims = geometry.layout.order.replace("C", "D")
        inner = geometry.layout.inner_orders
        suffix = ""
        if part.endswith("_scale") or geometry.separate_parts:
            suffix = f".{part}"
            dims = dims.replace("K", "") + inner.get(part.removesuffix("_scale"), "")
        else:
            if len({size for _, size in geometry.part_sizes}) > 1:
                dims = dims.replace("K", "")
            dims += "*" if inner else ""
        if "L" not in dims:
            return engine.tensors[rank][f"layer.{layer}{suffix}"], dims
        index = list(geometry.layers(rank)).index(layer)
        tensor = engine.tensors[rank][f"layers{suffix}"]
        view = tensor[(slice(None),) * dims.index("L") + (index,)]
        return view, dims.replace("L", "")

    def _part_view(self, engine, rank, layer, part):
        """A view of one part's cells, and the letters of its dims; the last may be ``*``."""
        geometry = engine.geometry
        tensor, dims = self._tensor(engine, rank, layer, part)
        if part.endswith("_scale") or geometry.separate_parts:
            return tensor, dims
        parts = [p for p in geometry.parts if not p.name.endswith("_scale")]
        names = [p.name for p in parts]
        if "K" in dims:
            view = tensor[(slice(None),) * dims.index("K") + (names.index(part),)]
            return view, dims.replace("K", "")
        inner = geometry.layout.inner_orders
        sizes = [
            p.head_size
            * math.prod(
                self._extents(engine, rank, part)[d] for d in inner.get(p.name, "").replace("D", "")
            )
            for p in parts
        ]
        first = sum(sizes[: names.index(part)])
        axis = dims.index("*" if inner else "D")
        cut = slice(first, first + sizes[names.index(part)])
        return tensor[(slice(None),) * axis + (cut,)], dims

    def _extents(self, engine, rank, part):
        geometry = engine.geometry
        size = next(p.head_size for p in geometry.parts if p.name == part)
        return {
            "B": engine.num_blocks,
            "N": geometry.block_size,
            "H": len(geometry.heads(rank)),
            "D": size,
        }

    def read_box(self, engine, rank, layer, part):
        view, dims = self._part_view(engine, rank, layer, part)
        extents = self._extents(engine, rank, part)
        if "*" in dims:
            dims = dims.replace("*", engine.geometry.layout.inner_orders[part])
            view = view.copy().reshape([extents[dim] for dim in dims])
        return view.transpose([dims.index(dim) for dim in "BNHD"]).copy()

    def write_box(self, engine, rank, layer, part, boxes) -> None:
        view, dims = self._part_view(engine, rank, layer, part)
        flat = dims.replace("*", engine.geometry.layout.inner_orders.get(part, ""))
        view[...] = boxes.transpose(["BNHD".index(dim) for dim in flat]).reshape(view.shape)

    def expect(self, case):
        """What the transfer must do, done slowly on the target's own memory."""
        geometry = case.target.geometry
        heads = geometry.heads(case.target_rank)
        tokens = self.moved(case)
        for layer in geometry.layers(case.target_rank):
            for part, cells in case.logical.items():
                wanted = cells[layer][tokens][:, heads.start : heads.stop]
                self.write(
                    case.target, case.target_rank, layer, part, case.target_blocks, tokens, wanted
                )

    def moved(self, case):
        geometry, rank = case.target.geometry, case.target_rank
        places = {
            token: self.place(geometry, rank, token)
            for token in range(case.first_token, case.num_tokens)
        }
        return [t for t, place in places.items() if place and case.target_blocks[place[0]] != 0]


@pytest.fixture(scope="session")
def worlds() -> Worlds:
    return Worlds()
