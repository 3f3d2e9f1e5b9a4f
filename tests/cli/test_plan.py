"""``kvferry plan``: five pairs that other systems refuse, hybrids, errors, pictures."""

import json
import re
import subprocess
import sys
from collections import defaultdict
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from kvferry.explain.models import KNOWN_MODELS
from kvferry.layouts.layout import LAYOUT_NAMES
from tests.explain.test_model_configs import ROWS, unpacked
from tests.refused_pairs import REFUSED_PAIRS

SVG = "{http://www.w3.org/2000/svg}"


def options(prefill, decode, model, tokens=512):
    return "plan", "--prefill", prefill, "--decode", decode, "--model", model, "--tokens", tokens


@pytest.fixture
def planned(kvferry):
    """Plans two specs; returns the text for people and the one pair of the JSON."""

    def run(*args, **more):
        text = kvferry(*options(*args, **more))
        assert text.code == 0, text.err
        document = json.loads(kvferry(*options(*args, **more), "--json").out)
        (pair,) = document["pairs"]
        return text.out, pair

    return run


def sentence(text, start):
    """The line of the explanation that begins so."""
    (line,) = [line for line in text.splitlines() if line[14:].startswith(start)]
    return line[14:]


def total(pair, key):
    return sum(transfer[key] for transfer in pair["transfers"])


def test_a_cache_that_is_quantised_beside_the_config_has_half_the_bytes(planned, tmp_path):
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, pair = planned("tp=2", "tp=1", str(tmp_path))
    assert total(pair, "nbytes") == 4 * 8 * 8 * 2 * 2 * 512
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    values = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(values))
    _, pair = planned("tp=2", "tp=1", str(tmp_path))
    assert total(pair, "nbytes") == 4 * 8 * 8 * 2 * 1 * 512


# ---- pairs that today's systems refuse ----------------------------------------------------------


def test_prefill_blocks_larger_than_decode_blocks(planned):
    text, pair = planned(*REFUSED_PAIRS["larger prefill blocks"], "llama-3-8b")

    assert sentence(text, "block:") == (
        "block: 64 tokens become 16; a prefill block fills 4 decode blocks"
    )
    assert total(pair, "nbytes") == 32 * 8 * 2 * 128 * 2 * 512
    # One piece per layer, part and 16 tokens, however the blocks lie.
    assert total(pair, "segments_shuffled") == 32 * 2 * (512 // 16)
    assert total(pair, "segments_ordered") == 32 * 2
    assert "block=64 on decode: 4 times fewer segments" in text


def test_nhd_to_hnd(planned):
    text, pair = planned(*REFUSED_PAIRS["NHD to HND"], "llama-3-8b")

    assert sentence(text, "layout:") == "layout: NHD becomes HND on the way"
    assert total(pair, "rows") == total(pair, "segments_shuffled") == 32 * 2 * 8 * 512
    # A block of 16 tokens and 8 heads is one run as soon as both sides agree.
    assert "layout=NHD on decode: 128 times fewer segments" in text
    assert pair["savings"][0] == {"prefill": {}, "decode": {"layout": "NHD"}, "factor": 128.0}


def test_more_prefill_ranks_than_decode_ranks_with_replicated_heads(planned):
    text, pair = planned(*REFUSED_PAIRS["more prefill ranks, heads replicated"], "qwen2.5-7b")

    assert "each KV head lies on 2 prefill ranks" in sentence(text, "tp=8")
    assert sentence(text, "tp: 8").startswith("tp: 8 becomes 2; a decode rank reads from 4 prefill")
    # 4 heads on 8 ranks: each decode rank has two heads, each from two replicas in turn.
    readers = defaultdict(set)
    for transfer in pair["transfers"]:
        readers[transfer["decode_rank"]].add(transfer["prefill_rank"])
    assert readers == {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7}}
    assert total(pair, "nbytes") == 28 * 4 * 2 * 128 * 2 * 512  # every head once
    assert pair["balance"]["prefill_ranks"]["peak"] == 1.0
    assert pair["balance"]["prefill_ranks"]["idle"] == []
    assert "prefill ranks: 3.5 MiB each" in text


def test_tp_3_to_tp_2(planned):
    text, pair = planned(*REFUSED_PAIRS["TP 3 to TP 2"], "smollm2-135m")

    assert sentence(text, "tp:") == "tp: 3 becomes 2; a decode rank reads from 1 to 2 prefill ranks"
    assert [
        (transfer["decode_rank"], transfer["prefill_rank"], transfer["heads"])
        for transfer in pair["transfers"]
    ] == [(0, 0, [0]), (1, 1, [1]), (1, 2, [2])]
    assert pair["balance"]["decode_ranks"]["peak"] == pytest.approx(4 / 3)
    assert "the busiest 1.33 times the mean" in sentence(text, "decode ranks")


def test_pipeline_stages_on_the_decode_side(planned):
    text, pair = planned(*REFUSED_PAIRS["PP on the decode side"], "smollm2-135m")

    assert sentence(text, "pp:") == (
        "pp: layers 0-29 become 0-6 | 7-14 | 15-22 | 23-29; two ranks move the layers that both "
        "have"
    )
    assert [transfer["layers"] for transfer in pair["transfers"]] == [
        list(range(7)),
        list(range(7, 15)),
        list(range(15, 23)),
        list(range(23, 30)),
    ]
    assert {transfer["prefill_rank"] for transfer in pair["transfers"]} == {0}


# ---- what is said -------------------------------------------------------------------------------


def test_engines_that_are_alike_differ_in_nothing(planned):
    text, pair = planned("tp=2", "tp=2", "llama-3-8b")

    assert "What differs" not in text
    ways = {name: group["way"] for name, (group,) in pair["ways"].items()}
    assert ways.items() >= dict.fromkeys(("shm", "vm", "tcp"), "placed").items()
    assert pair["balance"]["links"]["peak"] == 1.0


def test_layouts_that_one_head_per_rank_makes_alike_are_told_from_others(planned):
    alike, _ = planned("tp=8,layout=HND", "tp=8", "llama-3-8b")
    unlike, _ = planned("tp=8,layout=HND", "tp=4", "llama-3-8b")

    assert "layout: HND and NHD lie alike here" in alike
    assert "layout: HND becomes NHD on the way" in unlike


def test_a_saving_is_what_a_plan_of_the_changed_specs_shows(planned):
    prefill = {"tp": 8, "pp": 2, "block": 16, "layout": "HND"}
    decode = {"tp": 3, "block": 64, "layout": "NHD"}

    def run(changes):
        specs = (
            ",".join(f"{key}={value}" for key, value in {**side, **change}.items())
            for side, change in ((prefill, changes["prefill"]), (decode, changes["decode"]))
        )
        return planned(*specs, "llama-3-70b")

    text, now = run({"prefill": {}, "decode": {}})
    assert "block=64 on prefill and layout=HND on decode: 64 times fewer segments" in text
    assert len(now["savings"]) >= 2
    for saving in now["savings"]:
        _, then = run(saving)
        assert saving["factor"] == total(now, "segments_shuffled") / total(
            then, "segments_shuffled"
        )


def test_hybrid_models_show_their_groups_and_windows(planned):
    text, pair = planned("tp=2", "tp=2,hybrid=false,block=32", "gemma-3-27b", tokens=4096)

    groups = pair["engines"]["prefill"]["groups"]
    assert sorted(layer for group in groups for layer in group["layers"]) == list(range(62))
    assert [group["sliding_window"] for group in groups] == [1024] * 6 + [None]
    assert len(pair["engines"]["decode"]["groups"]) == 1
    assert "Groups of prefill" in text
    assert "Groups of decode" not in text
    assert "window of 1024" in text
    assert sentence(text, "groups:").startswith("groups: 7 on prefill and 1 on decode")
    assert sentence(text, "window:").endswith("only the last 1023 tokens move")
    per_token = 16 * 2 * 128 * 2
    assert total(pair, "nbytes") == per_token * (10 * 4096 + 52 * 1023)


def test_a_request_that_fits_its_windows_moves_whole(planned):
    text, pair = planned("tp=1", "tp=1", "gpt-oss-20b", tokens=100)

    assert "window:" not in text
    assert total(pair, "nbytes") == 24 * 8 * 64 * 2 * 2 * 100


def test_a_latent_is_read_whole_by_every_decode_rank(planned):
    text, pair = planned("tp=4", "tp=2", "deepseek-v3")

    assert "the latent lies on 4 prefill ranks" in text
    assert "the latent is read by 2 decode ranks" in text
    assert "1, 5 ... 57" in text  # layers that a replica gives in turn with the others
    assert total(pair, "nbytes") == 2 * 61 * 576 * 2 * 512
    assert pair["balance"]["prefill_ranks"]["peak"] < 1.05


def test_recurrent_layers_move_one_state_whatever_the_tokens(planned):
    per_token = 4 * 2 * 4 * 128 * 2
    # x of 48 heads of 64, B and C of 128 each, three inputs of all; 64 * 128 numbers per head.
    state = (3 * (48 * 64 + 2 * 128) + 48 * 64 * 128) * 2

    text, pair = planned("tp=4,layout=HND", "tp=3,pp=2", "granite-4.0-h-tiny", tokens=1000)
    assert "40 layers, 36 of them recurrent, 4 KV heads of 128" in text
    assert sentence(text, "state:") == (
        "state: of layers 0-4, 6-14, 16-24, 26-34 and 1 more ranges the state after the last token "
        "moves, as many bytes for any number of tokens"
    )
    assert "window:" not in text
    replicas = 2 * 3 * 2 * 128 * 2  # B and C on the other two ranks of a stage
    assert total(pair, "nbytes") == per_token * 1000 + 36 * (state + replicas)
    groups = pair["engines"]["prefill"]["groups"]
    assert groups[0]["recurrent_state"] is None
    assert groups[1]["recurrent_state"].startswith("conv bfloat16 (x 48*64, B 1*128, C 1*128) of 3")
    # B and C come from every rank that holds them, in turn.
    assert {transfer["prefill_rank"] for transfer in pair["transfers"]} == {0, 1, 2, 3}
    assert pair["savings"][0]["decode"] == {"layout": "HND"}


@pytest.fixture
def config_file(tmp_path):
    """Writes the ``config.json`` of a public model."""

    def write(name):
        (row,) = [row for row in ROWS if row["name"].startswith(name)]
        path = tmp_path / "config.json"
        path.write_text(json.dumps(unpacked(row["config"])), encoding="utf-8")
        return path

    return write


def test_layers_with_heads_of_their_own_are_told_and_counted_by_their_own(planned, config_file):
    text, pair = planned(
        "tp=8", "tp=4", config_file("nvidia/Gemma-4-31B"), tokens=4096
    )  # the checkpoint brings scales for a cache of 1 byte per element

    assert (
        "60 layers, 50 of them with a window, 16 KV heads of 256 in 50 of them and 4 KV heads of "
        "512 in 10 of them"
    ) in text
    full, windows = list(range(5, 60, 6)), 50
    # The 1,023 tokens that a window keeps begin within a block, which is filled.
    assert total(pair, "nbytes") == 2 * (len(full) * 4 * 512 * 4096 + windows * 16 * 256 * 1024)
    groups = {tuple(group["layers"]): group for group in pair["engines"]["prefill"]["groups"]}
    assert groups[tuple(full)]["num_kv_heads"] == 4
    assert sum(len(layers) for layers in groups) == 60
    # On a rank of eight the pages are equal, so blocks are too.
    assert {group["block_size"] for group in groups.values()} == {16}
    readers = {
        (transfer["decode_rank"], transfer["prefill_rank"]): transfer["heads"]
        for transfer in pair["transfers"]
    }
    assert {source for target, source in readers if target == 1} == {2, 3}
    assert "tp=8: each KV head of layers 5, 11, 17, 23 and 6 more ranges lies on 2 prefill" in text


def test_programs_are_told_the_heads_of_each_layer(kvferry, config_file):
    path = config_file("XiaomiMiMo/MiMo-V2-Flash")
    model = json.loads(kvferry(*options("tp=1", "tp=1", path), "--json").out)["model"]

    full = [0, 5, 11, 17, 23, 29, 35, 41, 47]
    assert model["heads"][0]["layers"] == full
    assert {
        (heads["num_kv_heads"], heads["head_size"], heads["head_size_v"], heads["use_mla"])
        for heads in model["heads"]
    } == {(4, 192, 128, False), (8, 192, 128, False)}
    assert model["layer_windows"] == {str(n): 128 for n in range(48) if n not in full}
    assert model["num_layers"] == 48
    assert model["recurrent_layers"] == model["layers_without_cache"] == []


def test_a_cache_that_layers_share_is_moved_once(planned, config_file):
    text, pair = planned("tp=2", "tp=2", config_file("gemma3n_text"), tokens=100)

    assert "35 layers, 16 of them with a window, 15 of them without a cache of their own" in text
    assert total(pair, "nbytes") == 20 * 2 * 256 * 2 * 2 * 100


def test_keys_and_values_of_unlike_sizes_are_counted_apart(planned, config_file):
    text, pair = planned("tp=8", "tp=16", config_file("XiaomiMiMo/MiMo-V2-Flash"), tokens=64)

    assert "4 KV heads of 192 (k) and 128 (v) in 9 of them" in text
    assert pair["engines"]["prefill"]["groups"][0]["head_size_v"] == 128
    by_heads = {4: 9, 8: 39}
    copies = {heads: 16 / heads for heads in by_heads}  # on sixteen ranks of decode
    assert total(pair, "nbytes") == sum(
        layers * heads * copies[heads] * (192 + 128) * 2 * 64 for heads, layers in by_heads.items()
    )
    first = {
        transfer["prefill_rank"] for transfer in pair["transfers"] if transfer["decode_rank"] == 1
    }
    assert first == {0, 1}  # head 0 of the full layers lies on both, of the windowed ones on 0


def test_stages_may_have_unequal_numbers_of_layers(planned, kvferry):
    text, pair = planned("tp=1", "layers=20+7+3", "smollm2-135m")

    assert sentence(text, "pp:").startswith("pp: layers 0-29 become 0-19 | 20-26 | 27-29;")
    assert [len(transfer["layers"]) for transfer in pair["transfers"]] == [20, 7, 3]
    for spec, message in (
        ("layers=20+7", "layers: 20+7 are 27 layers on 2 stages; the model has 30"),
        ("pp=3,layers=20+10", "layers: 20+10 are 2 stages, pp is 3"),
        ("layers=20+x", "layers: 'x' is not a whole number"),
        ("layers=30+0", "layers: '0' is not a whole number of 1 or more"),
    ):
        outcome = kvferry(*options("tp=1", spec, "smollm2-135m"))
        assert outcome.code == 2
        assert f"--decode: {message}" in outcome.err


def test_interleaved_tokens_are_explained(planned):
    text, pair = planned("tp=16,dcp=2", "tp=2,pcp=2,interleave=4", "llama-3-8b")

    assert sentence(text, "context:") == (
        "context: tokens go round over 2 prefill ranks, 1 at a time, and go round over 2 decode "
        "ranks, 4 at a time"
    )
    assert "block:" not in text  # 2 * 16 tokens on both sides
    assert "lies on" not in text  # no two ranks of prefill hold the same tokens
    assert total(pair, "nbytes") == 32 * 8 * 2 * 128 * 2 * 512
    assert {transfer["nbytes"] for transfer in pair["transfers"]} == {32 * 2 * 128 * 2 * 128}
    text, _ = planned("block=32", "tp=8,dcp=1,pcp=2", "llama-3-8b")
    assert "tokens lie together on a prefill rank, and go round over 2 decode ranks" in text


def test_a_dtype_that_would_have_to_be_rounded_is_a_mismatch_with_its_remedy(kvferry):
    outcome = kvferry(*options("tp=2", "dtype=float8_e4m3fn", "llama-3-8b"))

    assert outcome.code == 2
    assert "dtype of layers 0-31: source has bfloat16, target has float8_e4m3fn" in outcome.err


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp8", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("FP8_E4M3", "float8_e4m3fn"),
        ("fp8_inc", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("auto", "bfloat16"),
        ("half", "float16"),
        ("float", "float32"),
    ],
)
def test_names_of_vllm_for_a_dtype_are_those_of_torch(planned, name, dtype):
    text, pair = planned(f"tp=2,dtype={name}", f"tp=1,dtype={name}", "llama-3.2-1b")
    assert (text, pair) == planned(f"tp=2,dtype={dtype}", f"tp=1,dtype={dtype}", "llama-3.2-1b")


@pytest.mark.parametrize("name", ["nhd", "hnd", "Hnd"])
def test_a_layout_is_named_in_either_case(planned, name):
    text, pair = planned(f"layout={name}", "tp=2", "llama-3.2-1b")
    assert (text, pair) == planned(f"layout={name.upper()}", "tp=2", "llama-3.2-1b")


def test_no_other_key_is_proposed_for_data_parallel_ranks(kvferry):
    outcome = kvferry(*options("tp=2,dp=2", "tp=2", "llama-3-8b"))
    assert "did you mean" not in outcome.err
    assert "leave out dp, and plan one of these engines" in outcome.err


def test_a_table_of_very_many_ranks_is_cut_and_says_so(kvferry):
    outcome = kvferry(*options("tp=8,pp=8", "tp=16", "llama-3-8b", tokens=16))

    assert "64 more" in outcome.out
    assert "see --json" in outcome.out


@pytest.mark.slow
def test_every_known_model_is_planned(kvferry):
    for name in KNOWN_MODELS:
        outcome = kvferry(*options("tp=4,pp=2", "tp=2", name, tokens=16), "--json")
        assert json.loads(outcome.out)["model"]["name"] == name


def test_a_plan_of_specs_needs_nothing_beyond_the_base_dependencies():
    code = (
        "import sys\n"
        "sys.argv = 'kvferry plan --prefill tp=2 --decode tp=1 --model llama-3.2-1b'.split()\n"
        "from kvferry.cli.app import run\n"
        "try:\n    run()\nexcept SystemExit:\n    pass\n"
        "print({'torch', 'transformers', 'nixl', 'ucxx', 'triton', 'matplotlib'} & {*sys.modules})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "set()", result.stderr


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("tp=8", "tp=2", "lama-3-70b"), "did you mean 'llama-3-70b'? known models: llama-3-8b,"),
        (("tp=8", "tp=2", "/nowhere/config.json"), "/nowhere/config.json: cannot be read"),
        (("tp=8,blck=16", "tp=2", "llama-3-8b"), "--prefill: unknown key 'blck'; did you mean 'b"),
        (("tp=8", "xyz=1", "llama-3-8b"), "--decode: unknown key 'xyz'; known keys: tp (tensor-"),
        (("tp", "tp=2", "llama-3-8b"), "--prefill: 'tp' is no key=value; write --prefill tp=8"),
        (("tp=", "tp=2", "llama-3-8b"), "--prefill: 'tp=' is no key=value"),
        (("", "tp=2", "llama-3-8b"), "--prefill: '' is no key=value"),
        (("tp=8,tp=4", "tp=2", "llama-3-8b"), "--prefill: tp stands twice; write it once"),
        (("tp=zero", "tp=2", "llama-3-8b"), "tp: 'zero' is not a whole number of 1 or more"),
        (("tp=0", "tp=2", "llama-3-8b"), "tp: '0' is not a whole number of 1 or more"),
        (("tp=2000", "tp=2", "llama-3-8b"), "--prefill: 2000 ranks, an engine has 1024 at most"),
        (("tp=8", "hybrid=yes", "llama-3-8b"), "hybrid: 'yes' is neither true nor false"),
        (("tp=8", "layout=HDN", "llama-3-8b"), "--decode: layout 'HDN'"),
        (("dtype=bf16", "tp=2", "llama-3-8b"), "--prefill: dtype: 'bf16' is unknown"),
        (("dtype=nvfp4", "tp=2", "llama-3-8b"), "--prefill: dtype: 'nvfp4' has scales beside"),
        (("tp=2", "dtype=fp8_ds_mla", "llama-3-8b"), "'fp8_ds_mla' has scales beside its elem"),
        (("dp=2,tp=4", "tp=2", "llama-3-8b"), "--prefill: dp: each data-parallel engine has a c"),
        (("tp=4", "tp=2,ep=8", "llama-3-8b"), "--decode: ep: experts keep no KV; leave out ep"),
        (("tp=8", "pp=99", "llama-3-8b"), "--decode: parallel: pp=99 stages for 32 layers"),
        (("tp=8", f"tp={'9' * 5000}", "llama-3-8b"), "--decode: tp: a number of 5000 digits; no e"),
        (("tp=8", "tp=2", "x" * 300), "cannot be read: File name too long"),
    ],
)
def test_bad_input_is_one_clear_error(kvferry, args, message):
    outcome = kvferry(*options(*args))

    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.count("kvferry:") == 1
    assert outcome.out == ""


@pytest.mark.parametrize("tokens", ["2000000000", "9" * 30])
def test_a_request_of_more_blocks_than_a_ticket_names_is_refused_at_once(kvferry, tokens):
    outcome = kvferry(*options("tp=8", "tp=2,block=1024", "llama-3-8b"), "--tokens", tokens)

    assert outcome.code == 2
    assert f"num_tokens: {tokens} tokens need" in outcome.err
    assert "blocks of 16, and a request has 2097152 at most" in outcome.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "nothing to plan: give a CLUSTER.toml, or --prefill, --decode and --model"),
        (("--prefill", "tp=2"), "--decode, --model missing; without a file all three are needed"),
        (("x.toml", "--model", "llama-3-8b"), "leave out --prefill, --decode and --model, or"),
    ],
)
def test_options_that_do_not_go_together_are_named(kvferry, args, message):
    outcome = kvferry("plan", *args)

    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err


def test_a_layout_with_inner_orders_may_stand_in_a_spec(planned):
    _, pair = planned("layout=BHK(k=DN,v=ND),tp=2", "tp=2", "llama-3-8b")

    assert pair["engines"]["prefill"]["groups"][0]["layout"] == "BHK(k=DN,v=ND)"
    assert pair["engines"]["prefill"]["tp"] == 2


# ---- the picture --------------------------------------------------------------------------------


@pytest.fixture
def drawn(kvferry, tmp_path):
    """Draws a plan; returns the parsed picture and the pair."""

    def run(*args, **more):
        path = tmp_path / "plan.svg"
        outcome = kvferry(*options(*args, **more), "--json", "--picture", path)
        assert outcome.code == 0, outcome.err
        return ET.parse(path).getroot(), json.loads(outcome.out)["pairs"][0]

    return run


def test_the_picture_has_a_band_per_pair_of_ranks_as_thick_as_its_bytes(drawn):
    root, pair = drawn("tp=3,pp=2,layout=HND", "tp=4,block=64", "llama-3-70b")

    bands = root.findall(f"{SVG}path")
    assert len(bands) == len(pair["transfers"])
    for band, transfer in zip(bands, pair["transfers"], strict=True):
        assert band.find(f"{SVG}title").text.startswith(
            f"decode rank {transfer['decode_rank']} reads layers "
        )
        assert f"from prefill rank {transfer['prefill_rank']}:" in band.find(f"{SVG}title").text
        points = re.findall(r"([\d.]+),([\d.]+)", band.get("d"))
        thickness = float(points[-1][1]) - float(points[0][1])  # lower and upper edge at one end
        most = max(*prefill_bytes(pair), *pair["balance"]["decode_ranks"]["nbytes"])
        assert thickness == pytest.approx(96 * transfer["nbytes"] / most, abs=0.02)


def prefill_bytes(pair):
    return pair["balance"]["prefill_ranks"]["nbytes"]


def areas(root, side):
    """(rank that is shown, prefill rank whose colour it is) → area of the cells in the maps."""
    found: defaultdict[Any, float] = defaultdict(float)
    for rect in root.findall(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is None or rect.get("fill").startswith("url"):
            continue
        words = title.text.split()
        if words[0] == side:
            key = (int(words[2]), int(words[-1])) if side == "decode" else int(words[2])
            found[key] += float(rect.get("width")) * float(rect.get("height"))
    return found


@pytest.mark.parametrize(
    ("prefill", "decode", "model"),
    [
        ("tp=8,pp=2,layout=HND", "tp=3,block=64", "llama-3-70b"),
        ("tp=8", "tp=3,pp=2", "qwen2.5-7b"),
        ("tp=4", "tp=2", "deepseek-v3"),
        ("tp=2,pp=2", "tp=4,hybrid=false", "gemma-3-27b"),
    ],
)
def test_the_maps_show_every_cell_of_every_decode_rank_once_by_its_source(
    drawn, prefill, decode, model
):
    # So few tokens that no window cuts: areas are as bytes.
    root, pair = drawn(prefill, decode, model, tokens=64)

    shown = areas(root, "decode")
    bytes_of = {
        (transfer["decode_rank"], transfer["prefill_rank"]): transfer["nbytes"]
        for transfer in pair["transfers"]
    }
    assert shown.keys() == bytes_of.keys()
    scale = sum(shown.values()) / sum(bytes_of.values())
    for ranks, nbytes in bytes_of.items():
        assert shown[ranks] == pytest.approx(nbytes * scale, rel=0.02), ranks


def test_a_map_of_heads_leaves_recurrent_layers_out_and_says_so(drawn):
    root, _ = drawn("tp=2", "tp=1", "granite-4.0-h-tiny")

    layers = {
        layer
        for rect in root.findall(f"{SVG}rect")
        if (title := rect.find(f"{SVG}title")) is not None
        for layers in re.findall(r"layers ([\d, -]+),", title.text)
        for layer in layers.split(", ")
    }
    assert layers == {"5", "15", "25", "35"}
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert any(text.startswith("Bands count the states of recurrent layers") for text in texts)


def test_cells_lie_in_their_rank_at_their_layers_and_heads(drawn):
    root, _ = drawn("tp=4,pp=2", "tp=3", "llama-3-8b", tokens=16)

    rects = root.findall(f"{SVG}rect")
    frames = [
        tuple(float(rect.get(key)) for key in ("x", "y", "width", "height"))
        for rect in rects
        if rect.get("fill") == "#eeeeee"
    ]
    first_of = {"prefill": 0, "decode": 8}
    assert len(frames) == 8 + 3
    places = re.compile(r"(\w+) rank (\d+) \w+ layers (\d+)-(\d+), KV heads (\d+)(?:-(\d+))?")
    seen = 0
    for rect in rects:
        title = rect.find(f"{SVG}title")
        if title is None:
            continue
        ((side, *numbers),) = places.findall(title.text)
        numbers[-1] = numbers[-1] or numbers[-2]  # of one head
        rank, layer, last_layer, head, last_head = map(int, numbers)
        x, y, width, height = frames[first_of[side] + rank]
        expected = (
            x + width * head / 8,
            y + height * layer / 32,
            width * (last_head + 1 - head) / 8,
            height * (last_layer + 1 - layer) / 32,
        )
        shown = [float(rect.get(key)) for key in ("x", "y", "width", "height")]
        assert shown == pytest.approx(expected, abs=0.02), title.text
        seen += 1
    assert seen >= 16


def test_the_picture_names_ranks_groups_windows_and_blocks(drawn):
    root, _ = drawn("tp=2", "tp=1,block=24,hybrid=false", "gemma-3-27b", tokens=4096)

    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert texts.count("rank 1") == 1
    assert texts.count("rank 0") == 2
    assert "KV heads 0 to 15 →, layers 0 to 61 ↓" in texts
    assert texts.count("24 tokens") == 2  # two blocks of decode beside three of prefill
    assert texts.count("16 tokens") == 3
    assert any(text.startswith("prefill, group 6: layers 5, 11") for text in texts)
    assert any(text.startswith("Hatched") for text in texts)
    hatched = [rect for rect in root.findall(f"{SVG}rect") if rect.get("fill") == "url(#hatch)"]
    assert hatched


@pytest.mark.slow
def test_everything_lies_inside_the_picture(drawn):
    root, _ = drawn("tp=64", "pp=30", "smollm2-135m", tokens=16)

    width, height = float(root.get("width")), float(root.get("height"))
    for shape in root.iter():
        if shape.tag in (f"{SVG}rect", f"{SVG}text") and shape.get("y") is not None:
            assert 0 <= float(shape.get("x")) <= width
            assert 0 <= float(shape.get("y")) + float(shape.get("height", 0)) <= height


def test_a_cluster_file_is_drawn_with_all_its_pairs(kvferry, cluster_file, tmp_path):
    file, picture = cluster_file(), tmp_path / "all.svg"
    text = file.read_text()
    file.write_text(text + text[text.index("[[decode]]") :].replace("d0", "<d&1>"))

    outcome = kvferry("plan", file, "--tokens", "64", "--picture", picture)

    assert f"picture: {picture}" in outcome.out
    texts = [text.text or "" for text in ET.parse(picture).getroot().findall(f"{SVG}text")]
    assert any(text.startswith("d0 reads 64 tokens of tiny from p0") for text in texts)
    assert any(text.startswith("<d&1> reads 64 tokens of tiny from p0") for text in texts)


def test_what_cannot_be_drawn_is_refused_before_anything_is_computed(kvferry, tmp_path):
    picture = tmp_path / "x.svg"
    outcome = kvferry(*options("tp=128", "tp=2", "llama-3-8b"), "--picture", picture)

    assert outcome.code == 2
    assert "prefill has 128 ranks, at most 64 are drawn" in outcome.err
    assert not picture.exists()


def test_a_picture_that_cannot_be_written_is_one_error(kvferry, tmp_path):
    outcome = kvferry(*options("tp=1", "tp=1", "llama-3-8b"), "--picture", tmp_path)

    assert outcome.code == 2
    assert f"{tmp_path}: cannot be written" in outcome.err


def test_a_random_model_is_planned_without_a_folder_to_write(kvferry, cluster_file, monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE", "/dev/null")
    outcome = kvferry("plan", cluster_file())
    assert outcome.code == 0, outcome.err
    assert "tiny: 4 layers" in outcome.out


@pytest.mark.slow
def test_every_layout_name_is_said_back(kvferry):
    for name in LAYOUT_NAMES:
        outcome = kvferry(*options(f"layout={name}", "tp=1", "smollm2-135m", tokens=16), "--json")
        (pair,) = json.loads(outcome.out)["pairs"]
        assert pair["engines"]["prefill"]["groups"][0]["layout"] == name
