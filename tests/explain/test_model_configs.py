"""Public configs: what ``kvferry plan`` reads of each is what its engine keeps, or it is refused.

``model_configs.json`` has one row per model: the keys of its ``config.json`` about layers and
heads, where the file is from, and the caches that the model has, with the source of that figure.
None of the figures is from the reader that is tested.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache.cache_shape import CacheShape, LayerHeads
from kvferry.errors import ModelError
from kvferry.explain.families import FAMILIES
from kvferry.explain.models import parse_model
from kvferry.topology import ranges_text


def unpacked(value):
    """A value of the table with its lists of equal neighbours, ``{"runs": ...}``, written out."""
    if isinstance(value, dict) and set(value) == {"runs"}:
        return [unpacked(one) for count, one in value["runs"] for _ in range(count)]
    if isinstance(value, dict):
        return {key: unpacked(one) for key, one in value.items()}
    return value


TABLE = Path(__file__).parent / "model_configs.json"
ROWS = json.loads(TABLE.read_text(encoding="utf-8"))


def cache_text(cache):
    """What a layer keeps, as the table has it."""
    if isinstance(cache, tuple):
        sizes = (f"{part.num_channels * part.channel_size} {part.dtype}" for part in cache)
        return f"state of {' and '.join(sizes)}"
    if cache.use_mla:
        return f"latent of {cache.head_size}"
    text = f"{cache.num_kv_heads}x{cache.head_size}"
    if cache.head_size_v is not None:
        text += f"/{cache.head_size_v}"
    if cache.sliding_window is not None:
        text += f" window {cache.sliding_window}"
    if cache.attention_chunk_size is not None:
        text += f" chunk {cache.attention_chunk_size}"
    return text


def caches_of(shape):
    """What is kept → the layers that keep it."""
    found: dict[Any, Any] = {}
    for layer, cache in enumerate(shape.layers):
        if cache is not None:
            found.setdefault(cache_text(cache), []).append(layer)
    return {text: ranges_text(layers, most=99) for text, layers in found.items()}


def names(refused):
    return [pytest.param(row, id=row["name"]) for row in ROWS if ("refused" in row) == refused]


@pytest.mark.parametrize("row", names(refused=False))
def test_each_layer_of_a_public_model_keeps_what_its_engine_keeps(row):
    model = parse_model(unpacked(row["config"]), "config.json")

    assert caches_of(model.shape) == row["caches"]
    assert len(model.shape.layers) == row["layers"]
    assert model.dtype == row["dtype"]


@pytest.mark.parametrize("row", names(refused=True))
def test_what_cannot_be_planned_is_refused_by_the_key_that_is_not_understood(row):
    with pytest.raises(ModelError, match=r"^config\.json: ") as raised:
        parse_model(unpacked(row["config"]), "config.json")
    assert row["refused"] in str(raised.value)


def test_the_table_has_sixty_models_of_many_families_and_says_where_each_is_from():
    assert len(ROWS) >= 60
    assert len({row["name"] for row in ROWS}) == len(ROWS)
    assert len({str(row["config"].get("model_type")) for row in ROWS}) >= 40
    for row in ROWS:
        assert row["source"], row["name"]
        assert row["figures"], row["name"]


def test_a_model_that_is_known_by_name_reads_the_same_from_its_file():
    shape = parse_model({"model_type": "RefinedWebModel", "multi_query": True, "n_head": 71,
                         "n_layer": 32, "hidden_size": 4544}, "here").shape  # fmt: skip
    assert shape == CacheShape.uniform(32, LayerHeads(1, 64))


# ---- what files leave out -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(kind for kind in FAMILIES if kind))
def test_what_a_file_leaves_out_is_what_the_class_of_transformers_fills_in(kind):
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    if kind not in auto.CONFIG_MAPPING:
        pytest.skip("transformers has no class for it")
    whole = auto.CONFIG_MAPPING[kind]().to_dict()
    try:
        shape = parse_model(whole, "here").shape
    except ModelError:
        pytest.skip("the class fills in a model that cannot be planned")

    optional = ("num_key_value_heads", "head_dim", "sliding_window", "layer_types")
    for key in optional:
        filled = FAMILIES[kind].defaults.get(key)
        if whole.get(key) is None or (key in ("sliding_window", "layer_types") and filled is None):
            continue
        less = {name: value for name, value in whole.items() if name != key}
        assert parse_model(less, "here").shape == shape, key


# ---- whatever a file says -----------------------------------------------------------------------

KEYS = sorted(
    {key for row in ROWS for part in (row["config"], *row["config"].values())
     if isinstance(part, dict) for key in part} | {"quantization_config", "text_config"}
)  # fmt: skip
KINDS = ["full_attention", "sliding_attention", "linear_attention", "conv", "M*E-", "LLLG", "auto"]
VALUES: st.SearchStrategy = st.deferred(
    lambda: (
        st.none()
        | st.booleans()
        | st.integers(-2, 80)
        | st.floats(allow_nan=False)
        | st.sampled_from(KINDS)
        | st.lists(VALUES, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3)
    )
)


def outcome_of(values):
    """The model that a file describes, or why it is refused."""
    try:
        return parse_model(values, "here")
    except ModelError as error:
        return str(error)


@given(
    st.sampled_from(list(FAMILIES)),
    st.integers(1, 4),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=8),
)
def test_whatever_a_file_says_it_is_read_or_refused_with_one_error(kind, layers, values):
    plain = {"num_hidden_layers": layers, "num_attention_heads": 4, "hidden_size": 64}

    outcome = outcome_of({**plain, **values, "model_type": kind})

    if isinstance(outcome, str):
        assert outcome.startswith("here: ")
    else:
        assert 1 <= len(outcome.shape.layers) <= 4096
        assert outcome.shape.heads.num_kv_heads >= 1
