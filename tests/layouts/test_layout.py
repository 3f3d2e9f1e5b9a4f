"""Layouts: names, text, shapes and strides."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.layouts import LAYOUT_NAMES, Box, Layout

KV = (("k", 4), ("v", 4))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("NHD", (2, 7, 3, 5, 4)),
        ("HND", (2, 7, 5, 3, 4)),
        ("BKNHD", (7, 2, 3, 5, 4)),
        ("BKHND", (7, 2, 5, 3, 4)),
        ("BNHKD", (7, 3, 5, 2, 4)),
        ("BHNKD", (7, 5, 3, 2, 4)),
        ("BLKNHD", (7, 6, 2, 3, 5, 4)),
        ("BLKHND", (7, 6, 2, 5, 3, 4)),
        ("BLHNKD", (7, 6, 5, 3, 2, 4)),
        ("LBHNC", (6, 7, 5, 3, 8)),
        ("LBNHC", (6, 7, 3, 5, 8)),
        ("LHBNC", (6, 5, 7, 3, 8)),
        ("BLHNC", (7, 6, 5, 3, 8)),
        ("BLNHC", (7, 6, 3, 5, 8)),
        ("BHLNC", (7, 5, 6, 3, 8)),
    ],
)
def test_every_name_has_the_shape_it_says(name, shape):
    layout = Layout.named(name)
    layers = 6 if layout.is_cross_layer else 1
    assert layout.shape(Box(layers, 7, 3, 5, KV)) == shape


def test_the_list_of_names_is_complete():
    assert len(LAYOUT_NAMES) == 15


orders = st.sampled_from(["BNHD", "KBNHD", "LBNHD", "LKBNHD", "BND", "BHD", "BD"]).flatmap(
    lambda dims: st.permutations(dims).map("".join)
)
inner_layouts = st.builds(
    lambda outer, k, v: Layout("".join(outer), {"k": "".join(k), "v": "".join(v)}),
    st.permutations("BHK"),
    st.permutations("DN"),
    st.permutations("DN"),
)


def test_the_two_names_of_serving_engines_are_parsed_in_either_case():
    for name in ("nhd", "hnd"):
        assert Layout.parse(name) == Layout.named(name.upper())
    with pytest.raises(ValueError, match="layout 'bhnd'"):
        Layout.parse("bhnd")


@given(st.one_of(orders.map(Layout), inner_layouts))
def test_text_parses_back_to_the_layout(layout):
    assert Layout.parse(str(layout)) == layout
    assert hash(Layout.parse(str(layout))) == hash(layout)


def test_c_is_another_word_for_packed_d():
    assert Layout("BHNC") == Layout("BHND")
    assert str(Layout("BHNC")) == "BHNC"
    assert Layout("BHNC") != Layout("BNHC")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("KBNHX", "unknown dim 'X'"),
        ("KBNHDD", "D stands twice"),
        ("KNHD", "B (block) is missing"),
        ("KBNH", "D (element) is missing"),
        ("KBNHC", "C is K and D packed"),
        ("BNHCD", "C is K and D packed"),
        ("", "B (block) is missing"),
        ("bnhd", "unknown dim 'b'"),
        ("BK(k=DN,v=DH)", "different dims"),
        ("BHDK(k=N,v=N)", "every inner order must hold D"),
        ("BHK(k=HN,v=HN)", "H stands twice"),
        ("BH(k=N,v=N)", "D (element) is missing"),
        ("BHK(DN,ND)", "part=ORDER"),
        ("BHK(k=DN,k=ND)", "two inner orders"),
        ("BHN(k=KD,v=KD)", "belong to the outer order"),
    ],
)
def test_a_bad_order_is_refused_with_what_is_wrong(text, says):
    with pytest.raises(ValueError, match="layout") as error:
        Layout.parse(text)
    assert says in str(error.value)


def test_a_name_used_as_an_order_says_how_to_write_it():
    with pytest.raises(ValueError, match=r"write Layout.named\('NHD'\)"):
        Layout("NHD")


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    with pytest.raises(ValueError, match=r"did you mean 'LBHNC'.*NHD, HND"):
        Layout.named("LBHNX")


@pytest.mark.parametrize(
    ("layout", "box", "says"),
    [
        ("KBHD", Box(1, 2, 3, 4, KV), "no N.*not 3; add N"),
        ("KBND", Box(1, 2, 3, 4, KV), "no H.*not 4; add H"),
        ("KBNHD", Box(5, 2, 3, 4, KV), "no L.*not 5; add L"),
        ("BH(k=ND,v=DN)", Box(1, 2, 3, 4, (("latent", 4),)), "parts are"),
    ],
)
def test_cells_that_do_not_fit_are_refused(layout, box, says):
    with pytest.raises(ValueError, match=says):
        Layout.parse(layout).shape(box)


@pytest.mark.parametrize("layout", ["BND", "KBND", "KBHD", "BD"])
def test_absent_dims_have_extent_one(layout):
    tokens = 3 if "N" in layout else 1
    heads = 4 if "H" in layout else 1
    shape = Layout(layout).shape(Box(1, 2, tokens, heads, (("latent", 5),)))
    assert np.prod(shape) == 2 * tokens * heads * 5


def test_parts_of_unequal_size_pack_in_d_and_k_leaves_the_order():
    box = Box(1, 7, 3, 5, (("k", 4), ("v", 2)))
    assert Layout("KBNHD").shape(box) == (7, 3, 5, 6)
    strides = Layout("KBNHD").strides(box, (90, 30, 6, 1))
    assert strides["k"].offset == 0
    assert strides["v"].offset == 4


def test_orders_inside_each_part_as_cpu_attention_keeps_them():
    # Per head of a block: k as [D, N], then v as [N, D].
    layout = Layout("BHK", {"k": "DN", "v": "ND"})
    box = Box(1, 7, 3, 5, KV)
    assert layout.shape(box) == (7, 5, 2, 12)
    strides = layout.strides(box, (120, 24, 12, 1))
    assert strides["k"] == (0, 0, 120, 1, 24, 3)
    assert strides["v"] == (12, 0, 120, 4, 24, 1)


def test_a_wrong_number_of_strides_is_refused():
    with pytest.raises(ValueError, match="5 dims, got 2 strides"):
        Layout("KBNHD").strides(Box(1, 7, 3, 5, KV), (1, 2))


@given(st.one_of(orders.map(Layout), inner_layouts))
def test_every_cell_has_its_own_place_inside_the_tensor(layout):
    present = layout.order + "".join(layout.inner_orders.values())
    box = Box(
        2 if "L" in present else 1, 2, 3 if "N" in present else 1, 2 if "H" in present else 1, KV
    )
    shape = layout.shape(box)
    steps = [int(np.prod(shape[dim + 1 :])) for dim in range(len(shape))]
    seen = np.zeros(int(np.prod(shape)), dtype=int)
    for part, elements in box.parts:
        cells = layout.strides(box, steps)[part]
        extents = (box.layers, box.blocks, box.tokens, box.heads, elements)
        at = cells.offset + sum(
            np.arange(extent).reshape([-1 if dim == i else 1 for i in range(5)]) * step
            for dim, (extent, step) in enumerate(zip(extents, cells[1:], strict=True))
        )
        np.add.at(seen, at.ravel(), 1)
    assert (seen == 1).all()
