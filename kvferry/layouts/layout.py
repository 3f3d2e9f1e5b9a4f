"""Where a cell lies inside a KV cache tensor: the order of the tensor's dims.

Legend of the letters::

    L  layer (only if one tensor holds every layer of a rank)
    K  part: k, then v
    B  block
    N  token inside a block
    H  KV head of the rank
    D  element of a head; C also means D, in orders that pack k and v into one dim

A layout is an outer order. If the parts of a cache have different inner orders, a layout also has
one inner order per part. Addresses need strides only, so every permutation of the dims works
equally well.
"""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_DIMS = "LKBNHD"
_MEANING = {
    "L": "layers",
    "K": "parts",
    "B": "blocks",
    "N": "tokens in a block",
    "H": "heads",
    "D": "elements",
}

LAYOUT_NAMES: Mapping[str, str] = {
    "NHD": "KBNHD",
    "HND": "KBHND",
    **{
        order: order
        for order in (
            *("BKNHD", "BKHND", "BNHKD", "BHNKD", "BLKNHD", "BLKHND", "BLHNKD"),
            *("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"),
        )
    },
}
"""Every name that :meth:`Layout.named` knows → the order behind the name."""

_WITH_INNER = re.compile(r"([A-Z]*)\(([^()]*)\)")


class Box(NamedTuple):
    """How many cells one tensor of a rank holds along each dim."""

    layers: int
    blocks: int
    tokens: int
    """Number of tokens per block."""
    heads: int
    parts: tuple[tuple[str, int], ...]
    """Name and elements per head of each part, in the order of the parts in memory."""


class CellStrides(NamedTuple):
    """Address of a cell of one part relative to its tensor, in the unit of the tensor's strides.

    The address is ``offset + layer * l + block * b + token * n + head * h + element * d``, with
    indices local to the rank. The handshake carries these numbers in bytes.
    """

    offset: int
    layer: int
    block: int
    token: int
    head: int
    element: int


@dataclass(frozen=True, slots=True)
class Layout:
    """An order of the dims of a KV cache tensor, outermost first.

    >>> Layout("KBNHD") == Layout.named("NHD")
    True
    >>> str(Layout.parse("BHK(k=DN,v=ND)"))
    'BHK(k=DN,v=ND)'
    >>> Layout.named("HND").shape(Box(1, 100, 16, 8, (("k", 128), ("v", 128))))
    (2, 100, 8, 16, 128)
    >>> Layout.named("BLHNC").shape(Box(32, 100, 16, 8, (("k", 128), ("v", 128))))
    (100, 32, 8, 16, 256)

    An absent dim has extent 1. If K is absent, or the parts differ in size, the parts share D: the
    elements of k come first, then the elements of v. With ``inner`` orders, the dims of the inner
    orders form one flat last dim of the tensor, because the parts have no common shape.

    Raises:
        ValueError: the letters do not make an order; the message names an order that would work.
    """

    order: str = field(compare=False)
    """The order as written; only the outer dims if there are inner orders."""
    inner: Mapping[str, str] | tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """Part name → order of its inner dims; kept as a sorted tuple of pairs."""
    key: tuple[str, tuple[tuple[str, str], ...]] = field(default=("", ()), init=False, repr=False)
    """Key of equality and hash: the orders with C written as D."""

    def __post_init__(self) -> None:
        pairs = self.inner.items() if isinstance(self.inner, Mapping) else self.inner
        inner = tuple(sorted((str(part), str(order)) for part, order in pairs))
        object.__setattr__(self, "inner", inner)
        problem = _problem(self.order, inner)
        if problem:
            raise ValueError(f"layout {self._text(inner)!r}: {problem}")
        canonical = tuple((part, order.replace("C", "D")) for part, order in inner)
        object.__setattr__(self, "key", (self.order.replace("C", "D"), canonical))

    @classmethod
    def named(cls, name: str) -> "Layout":
        """The layout with a well-known name.

        Raises:
            ValueError: an unknown name; the message lists the known ones.
        """
        if name not in LAYOUT_NAMES:
            near = difflib.get_close_matches(name, LAYOUT_NAMES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"layout {name!r}: unknown name; {hint}known names: {', '.join(LAYOUT_NAMES)}; "
                "any other order is written Layout('KBNHD')"
            )
        return cls(LAYOUT_NAMES[name])

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Parses a name, an order, or an order with inner orders; the inverse of ``str(layout)``.

        ``nhd`` and ``hnd`` are names, too, because serving engines use both cases.

        Raises:
            ValueError: the text is none of these.
        """
        if text.upper() in ("NHD", "HND") or text in LAYOUT_NAMES:
            return cls.named(text.upper())
        match = _WITH_INNER.fullmatch(text)
        if match is None:
            return cls(text)
        pairs = [pair.partition("=") for pair in match[2].split(",")]
        if any(not equals for _, equals, _ in pairs):
            raise ValueError(
                f"layout {text!r}: write inner orders as part=ORDER, as in BHK(k=DN,v=ND)"
            )
        parts = [part.strip() for part, _, _ in pairs]
        if len(set(parts)) != len(parts):
            raise ValueError(f"layout {text!r}: a part has two inner orders; give each part one")
        return cls(match[1], tuple((part.strip(), order.strip()) for part, _, order in pairs))

    def __str__(self) -> str:
        return self._text(tuple(self.inner_orders.items()))

    def _text(self, inner: tuple[tuple[str, str], ...]) -> str:
        suffix = ",".join(f"{part}={order}" for part, order in inner)
        return f"{self.order}({suffix})" if suffix else self.order

    @property
    def inner_orders(self) -> dict[str, str]:
        """Part name → order of its inner dims; empty if all dims are outer."""
        return dict(self.inner)

    @property
    def is_cross_layer(self) -> bool:
        """Whether a single tensor holds every layer of a rank."""
        return "L" in self.order

    def without_layers(self) -> "Layout":
        """The layout of one layer's view of a cross-layer tensor."""
        return Layout(self.order.replace("L", ""), self.inner)

    def dims(self, parts: tuple[tuple[str, int], ...]) -> str:
        """Letters of the tensor's dims for these parts; ``*`` stands for a flat inner dim."""
        order, inner = self.key
        if len({elements for _, elements in parts}) > 1:
            order = order.replace("K", "")
        return order + "*" if inner else order

    def shape(self, box: Box) -> tuple[int, ...]:
        """The shape of a tensor that holds ``box``.

        Raises:
            ValueError: a dim of more than one cell is absent, or a part has no inner order.
        """
        self._check_fits(box)
        dims = self.dims(box.parts)
        return tuple(self._extent(dim, dims, box) for dim in dims)

    def strides(self, box: Box, tensor_strides: Sequence[int]) -> dict[str, CellStrides]:
        """Where the cells of each part lie, given the strides of the tensor's dims.

        Args:
            box: number of cells that the tensor holds along each dim.
            tensor_strides: one stride per dim of :meth:`shape`, in bytes or any other unit.

        Raises:
            ValueError: see :meth:`shape`, or a wrong number of strides.
        """
        self._check_fits(box)
        dims = self.dims(box.parts)
        if len(tensor_strides) != len(dims):
            raise ValueError(f"layout {self}: {len(dims)} dims, got {len(tensor_strides)} strides")
        outer = dict(zip(dims, tensor_strides, strict=True))
        result = {}
        first = 0  # number of cells of the earlier parts in the shared dim
        for index, (part, elements) in enumerate(box.parts):
            steps = outer | self._inner_steps(part, elements, box, outer.get("*", 0))
            if "K" in outer:
                offset = index * outer["K"]
            else:
                offset = first * (outer["*"] if "*" in outer else outer["D"])
            first += self._content(part, elements, box)
            result[part] = CellStrides(offset, *(steps.get(dim, 0) for dim in "LBNHD"))
        return result

    def _inner_steps(self, part: str, elements: int, box: Box, unit: int) -> dict[str, int]:
        steps = {}
        for dim in reversed(dict(self.key[1]).get(part, "")):
            steps[dim] = unit
            unit *= elements if dim == "D" else _extents(box)[dim]
        return steps

    def _content(self, part: str, elements: int, box: Box) -> int:
        """Number of cells of one part in the dim that packed parts share."""
        inner = dict(self.key[1]).get(part, "D")
        return math.prod(elements if dim == "D" else _extents(box)[dim] for dim in inner)

    def _extent(self, dim: str, dims: str, box: Box) -> int:
        if dim not in "D*":
            return _extents(box)[dim]
        contents = [self._content(part, elements, box) for part, elements in box.parts]
        return contents[0] if "K" in dims else sum(contents)

    def _check_fits(self, box: Box) -> None:
        inner = dict(self.key[1])
        if inner and set(inner) != {part for part, _ in box.parts}:
            raise ValueError(
                f"layout {self}: inner orders for {sorted(inner)}, but the cache's parts are "
                f"{sorted(part for part, _ in box.parts)}; give each part one"
            )
        present = self.key[0] + "".join(inner.values())
        for dim, extent in _extents(box).items():
            if dim != "K" and dim not in present and extent != 1:
                raise ValueError(
                    f"layout {self}: has no {dim}, so it can hold 1 of {_MEANING[dim]}, "
                    f"not {extent}; add {dim} to the order"
                )


def _extents(box: Box) -> dict[str, int]:
    return {
        "L": box.layers,
        "K": len(box.parts),
        "B": box.blocks,
        "N": box.tokens,
        "H": box.heads,
    }


def _problem(order: str, inner: tuple[tuple[str, str], ...]) -> str:
    """The error in an order, with a suggestion; empty if the order is valid."""
    for _, letters in inner or (("", ""),):
        problem = _letters_problem(order + letters)
        if problem:
            return problem
    if len({frozenset(letters) for _, letters in inner}) > 1:
        return "the inner orders name different dims; each must order the same ones"
    if inner and (set("LKB") & set(inner[0][1])):
        return "inner orders may hold N, H and D; L, K and B belong to the outer order"
    if inner and any("D" not in letters and "C" not in letters for _, letters in inner):
        return "every inner order must hold D, as in BHK(k=DN,v=ND)"
    return ""


def _letters_problem(order: str) -> str:
    if order in ("NHD", "HND"):
        return f"is a name, not an order; write Layout.named({order!r})"
    unknown = [letter for letter in order if letter not in _DIMS + "C"]
    if unknown:
        return f"unknown dim {unknown[0]!r}; an order holds letters of {_DIMS}, as in KBNHD"
    twice = [letter for letter in _DIMS + "C" if order.count(letter) > 1]
    if twice:
        return f"dim {twice[0]} stands twice; each stands once, as in KBNHD"
    if "C" in order and set("KD") & set(order):
        return "C is K and D packed; write either C, or K and D"
    if "B" not in order:
        return "dim B (block) is missing; an order holds at least B and D, as in KBNHD"
    if "D" not in order and "C" not in order:
        return "dim D (element) is missing; an order holds at least B and D, as in KBNHD"
    return ""
