"""Weights that change in the memory of vLLM: nothing computed with older ones is served as new."""

import functools
import itertools
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")


from kvferry.integrations.checkpoint import tensor_digests, weight_files
from kvferry.integrations.vllm.compat import release
from kvferry.integrations.vllm.fingerprint import named_weights
from kvferry.integrations.vllm.weights import RankWeights, weights_digest

EXTERNAL = "external_kv_transfer"
goes_on = pytest.mark.skipif(
    not release.gives_cache_manager,
    reason="before 0.30 vLLM lets no connector empty its prefix cache, so transfers end with an "
    "update",
)


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def reload(engine, model):
    """What a trainer does that has written a checkpoint."""
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})


def write_to_norms(worker):
    """Changes parameters in place, without vLLM's loaders; runs on the worker."""
    for name, parameter in worker.get_model().named_parameters():
        if "norm" in name:
            parameter.data.mul_(1.5)


def feed(worker, path):
    """Loads a checkpoint's tensors one at a time, as trainers send them; runs on the worker."""
    from safetensors.torch import load_file
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    model = worker.get_model()
    initialize_layerwise_reload(model)
    for name, tensor in load_file(Path(path) / "model.safetensors").items():
        model.load_weights(weights=[(name, tensor)])
    finalize_layerwise_reload(model, worker.vllm_config.model_config)


def weights_of(engine):
    """What the engine says its weights are, having looked."""
    half = engine.connector.connector_scheduler
    half._look_at_weights()
    return half._content.weights


def are_in_question(engine):
    """Whether the engine will look at its weights before the next step."""
    return engine.connector.connector_scheduler._weights.in_question


def be_as_before_0_30(engine):
    """vLLM gives the connector no cache manager."""
    engine.connector.connector_scheduler._kv_cache_manager = None


@pytest.fixture(scope="session")
def other_model(make_model):
    """Of the same shape as the one that engines start with."""
    return make_model(seed=99)


@pytest.fixture
def pair(start_pair):
    return start_pair(policy="recompute")


@pytest.fixture
def answers_of(start):
    """Greedy answers of an engine without connector and prefix cache, with a model's weights."""
    engine = start(None, enable_prefix_caching=False)

    @functools.cache
    def answers(model, prompts):
        reload(engine, model)
        return tokens(engine.generate(prompts))

    return lambda model, prompts: answers(model, tuple(tuple(prompt) for prompt in prompts))


@goes_on
@pytest.mark.parametrize("change", ["reload_weights", "load_weights"])
def test_weights_that_were_loaded_anew_are_known_by_what_they_are(
    start_pair, tiny_llama, other_model, change
):
    prefill, decode = start_pair()
    at_start = weights_of(prefill)
    assert at_start == weights_of(decode)
    if change == "reload_weights":
        reload(prefill, other_model)
    else:
        prefill.llm.collective_rpc(feed, args=(str(other_model),))
    assert weights_of(prefill) != at_start
    files = tensor_digests(weight_files(other_model), full=False)
    assert weights_of(prefill) == weights_digest({}, [RankWeights("", files, "")])
    reload(decode, other_model)
    assert weights_of(prefill) == weights_of(decode)
    reload(prefill, tiny_llama)
    assert weights_of(prefill) == at_start


@goes_on
def test_parameters_that_were_written_to_are_seen(start_pair, other_model):
    prefill, decode = start_pair()
    at_start = weights_of(prefill)
    prefill.llm.collective_rpc(write_to_norms)
    changed = weights_of(prefill)
    assert changed != at_start
    decode.llm.collective_rpc(write_to_norms)
    assert weights_of(decode) == changed
    reload(prefill, other_model)
    reload(decode, other_model)
    assert weights_of(decode) == weights_of(prefill) != changed


def test_a_call_that_changes_no_weights_ends_no_lease_and_no_prefix(pair, random_prompt, reference):
    prefill, decode = pair
    prompt = random_prompt(200)
    [params] = prefill.prefill([prompt])
    prefill.llm.collective_rpc(lambda worker: 1)
    assert are_in_question(prefill)
    [again] = prefill.prefill([prompt])
    assert not are_in_question(prefill)
    found = decode.generate([prompt] * 2, [params, again])
    assert tokens(found) == reference([prompt]) * 2
    assert decode.prompt_tokens_from(EXTERNAL) >= 199
    assert prefill.prompt_tokens_from("local_cache_hit") >= 128


@goes_on
def test_kv_of_older_weights_is_not_loaded(
    pair, tiny_llama, other_model, random_prompt, answers_of, caplog
):
    prefill, decode = pair
    prompts = [random_prompt(length) for length in (70, 200)]
    older = prefill.prefill(prompts)
    before = weights_of(prefill)
    reload(prefill, other_model)
    prefill.step()
    # A lease of before: it is revoked.
    found = decode.generate(prompts[:1], older[:1])
    assert tokens(found) == answers_of(tiny_llama, prompts[:1])
    # One of after: decode has not changed yet, and says so with both values.
    newer = prefill.prefill(prompts)
    found = decode.generate(prompts, newer)
    assert tokens(found) == answers_of(tiny_llama, prompts)
    assert f"weights: prefill had {weights_of(prefill)}, here it is {before}" in caplog.text
    assert decode.prompt_tokens_from(EXTERNAL) == 0
    # Decode follows: they pair again.
    reload(decode, other_model)
    newer = prefill.prefill(prompts)
    found = decode.generate(prompts, newer)
    assert tokens(found) == answers_of(other_model, prompts)
    assert decode.prompt_tokens_from(EXTERNAL) == sum(len(prompt) - 1 for prompt in prompts)


@goes_on
@pytest.mark.parametrize("steps", range(4))
def test_a_load_is_overtaken_by_an_update(
    pair, tiny_llama, other_model, random_prompt, answers_of, steps
):
    prefill, decode = pair
    prompts = [random_prompt(length) for length in (70, 200, 900)]
    first = prefill.prefill(prompts[:1])
    decode.generate(prompts[:1], first)  # from now on they know each other
    params = prefill.prefill(prompts)
    ids = [decode.add(*each) for each in zip(prompts, params, strict=True)]
    for _ in range(steps):
        if not decode.scheduler.running:  # what runs goes on with the KV that it has, as in vLLM
            decode.step()
    # vLLM adds a random part to our ids.
    begun = {request.request_id.partition("-")[0] for request in decode.scheduler.running}
    reload(decode, other_model)
    ended = decode.finish(*ids)
    right = answers_of(other_model, prompts)
    for request_id, expected in zip(ids, right, strict=True):
        if request_id not in begun:
            assert tokens([ended[request_id]]) == [expected]


@goes_on
def test_prefixes_of_older_weights_are_no_hits(
    pair, tiny_llama, other_model, random_prompt, answers_of
):
    prefill, decode = pair
    prompts = [random_prompt(length) for length in (130, 300)]
    found = decode.generate(prompts, prefill.prefill(prompts))
    assert tokens(found) == answers_of(tiny_llama, prompts)
    for engine in pair:
        reload(engine, other_model)
    # Of decode alone, then by way of prefill, whose blocks are still lent in part.
    assert tokens(decode.generate(prompts[:1])) == answers_of(other_model, prompts[:1])
    found = decode.generate(prompts, prefill.prefill(prompts))
    assert tokens(found) == answers_of(other_model, prompts)


@goes_on
def test_what_was_half_computed_with_older_weights_is_not_lent(
    start_pair, other_model, random_prompt, answers_of
):
    prefill, decode = start_pair(policy="recompute", max_num_batched_tokens=128)
    prompt = random_prompt(500)
    request_id = prefill.add(
        prompt, {"do_remote_decode": True, "do_remote_prefill": False}, max_tokens=1
    )
    prefill.step()
    for engine in (prefill, decode):
        reload(engine, other_model)
    output = prefill.finish(request_id)[request_id]
    assert output.kv_transfer_params is None
    # Nor is what was computed of it after the update a prefix of another request.
    found = decode.generate([prompt], prefill.prefill([prompt]))
    assert tokens(found) == answers_of(other_model, [prompt])


def test_without_vllms_cache_manager_nothing_is_lent_or_loaded_after_an_update(
    pair, tiny_llama, other_model, random_prompt, answers_of, caplog
):
    prefill, decode = pair
    for engine in pair:
        be_as_before_0_30(engine)
    prompts = [random_prompt(length) for length in (70, 130, 200)]
    params = prefill.prefill(prompts)
    assert tokens(decode.generate(prompts[:1], params[:1])) == answers_of(tiny_llama, prompts[:1])
    loaded = decode.prompt_tokens_from(EXTERNAL)
    assert loaded == 69
    remedy = "restart this engine with the new weights"
    # Decode alone has changed, and says once what to do; it does not help to change back.
    reload(decode, other_model)
    found = decode.generate(prompts[1:2], params[1:2])
    assert tokens(found) == answers_of(other_model, prompts[1:2])
    told = caplog.text.count(remedy)
    assert told
    reload(decode, tiny_llama)
    found = decode.generate(prompts[2:], params[2:])
    assert tokens(found) == answers_of(tiny_llama, prompts[2:])
    assert decode.prompt_tokens_from(EXTERNAL) == loaded
    assert caplog.text.count(remedy) == told
    # Prefill lends nothing then.
    reload(prefill, other_model)
    assert prefill.prefill([random_prompt(90)]) == [None]
    assert caplog.text.count(remedy) > told


def test_without_it_the_next_step_sees_an_update(start_pair, other_model, random_prompt, caplog):
    prefill, _ = start_pair(max_num_batched_tokens=128)
    be_as_before_0_30(prefill)
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    request_id = prefill.add(random_prompt(500), asked, max_tokens=1)
    prefill.step()
    reload(prefill, other_model)
    prefill.step()
    assert "restart this engine with the new weights" in caplog.text
    assert prefill.finish(request_id)[request_id].kv_transfer_params is None


def test_config_looks_at_no_memory(start_pair, other_model):
    prefill, _ = start_pair(extra={"weights_check": "config"})
    reload(prefill, other_model)
    assert not are_in_question(prefill)
    assert weights_of(prefill) == ""


CHANGING = (("prefill",), ("prefill",), ("decode",), ("prefill", "decode"))
"""Whose weights change in the middle of a round, while half of its requests load."""
FOLLOWING = (None, None, "decode", "prefill")
"""Who has taken the other's weights over before."""


def check_rounds(engines, models, prompts, answers_of, rounds):
    """Every round sends all prompts to engines whose weights change, on one side or on both."""
    prefill, decode = engines.values()
    now = dict.fromkeys(engines, models[0])
    newer = itertools.cycle(models[1:] + models[:1])
    half = len(prompts) // 2
    for index in range(rounds):
        if follower := FOLLOWING[index % 4]:
            [other] = engines.keys() - {follower}
            reload(engines[follower], now[other])
            now[follower] = now[other]
        params = prefill.prefill(prompts)
        ids = [decode.add(*each) for each in zip(prompts[:half], params, strict=False)]
        decode.step()
        model = next(newer)
        for side in CHANGING[index % 4]:
            # What is being decoded would go on with the KV that it has.
            assert side == "prefill" or not decode.scheduler.running
            reload(engines[side], model)
            now[side] = model
        ids += [decode.add(*each) for each in zip(prompts[half:], params[half:], strict=True)]
        ended = decode.finish(*ids)
        found = tokens([ended[request_id] for request_id in ids])
        right = answers_of(now["decode"], prompts)
        stale = [number for number in range(len(prompts)) if found[number] != right[number]]
        assert not stale, f"round {index}"
    # Where the weights of both are equal all is loaded as ever.
    reload(prefill, now["decode"])
    before = decode.prompt_tokens_from(EXTERNAL)
    fresh = [[*prompt[1:], prompt[0]] for prompt in prompts[:8]]
    found = tokens(decode.generate(fresh, prefill.prefill(fresh)))
    assert found == answers_of(now["decode"], fresh)
    loaded = decode.prompt_tokens_from(EXTERNAL) - before
    assert loaded == sum(len(prompt) - 1 for prompt in fresh)


@goes_on
@pytest.mark.parametrize(
    "rounds", [4, pytest.param(10, marks=pytest.mark.slow(reason="200 requests take minutes"))]
)
def test_no_answer_comes_from_older_weights(
    pair, tiny_llama, make_model, random_prompt, answers_of, rounds
):
    """20 requests in each round, and every round changes weights while half of them load."""
    models = [tiny_llama, make_model(seed=99), make_model(seed=100)]
    prompts = [random_prompt(40 + 37 * index) for index in range(20)]
    engines = dict(zip(("prefill", "decode"), pair, strict=True))
    check_rounds(engines, models, prompts, answers_of, rounds)


# ---- digests, without engines ------------------------------------------------------------------


def rank(beneath, **given):
    return RankWeights(beneath, given, f"memory {beneath}")


def test_ranks_that_were_given_the_same_are_as_one():
    one = weights_digest({"a": "1", "b": "2"}, [rank("at start", a="3")])
    two = weights_digest({"a": "1", "b": "2"}, [rank("at start", a="3"), rank("at start", a="3")])
    files = weights_digest({"a": "3", "b": "2"}, [rank("at start")])
    assert one == two == files


@pytest.mark.parametrize(
    "ranks",
    [
        [rank("at start"), rank("at start")],
        [rank("at start", a="3"), rank("at start", a="4")],
        [rank("", a="1"), rank("", a="1")],
        [rank("other"), rank("at start")],
        [rank("at start"), rank("other")],
    ],
)
def test_every_difference_is_another_digest(ranks):
    others = [
        [rank("at start", a="3"), rank("at start", a="3")],
        [rank("", a="3"), rank("", b="2")],
        [rank("other"), rank("other")],
    ]
    digests = [weights_digest({"a": "1", "b": "2"}, each) for each in (ranks, *others)]
    assert digests.count(digests[0]) == 1


def test_dummy_weights_are_told_by_their_seed(tmp_path):
    from types import SimpleNamespace

    one, two = (named_weights(SimpleNamespace(seed=seed), "dummy", "sample") for seed in (0, 1))
    assert one != two
