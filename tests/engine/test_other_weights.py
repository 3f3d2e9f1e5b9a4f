"""An engine whose weights change while it runs: what it refuses, and what other engines hear."""

import msgspec
import pytest
import torch

from kvferry.config import EngineConfig
from kvferry.engine.builder import build_engine
from kvferry.engine.messages import SamplingParams
from kvferry.engine.request import SchedulerOptions
from kvferry.engine.weights import fingerprint, prepare_model
from kvferry.engine.weights_folder import TINY_MODELS
from kvferry.errors import EngineError, ModelError, TicketError
from tests.engine.scripted import ScriptedScheduler
from tests.engine.simulated import open_simulated

PROMPT = list(range(1, 60))
FIVE = SamplingParams(max_tokens=5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    cache, tiny = tmp_path_factory.mktemp("models"), TINY_MODELS["tiny"]
    others = [
        msgspec.structs.replace(tiny, seed=1),
        msgspec.structs.replace(tiny, num_layers=3),
    ]
    return [prepare_model("tiny", tiny=each, cache=cache) for each in (tiny, *others)]


@pytest.fixture
def start(folders):
    torch.set_num_threads(1)
    opened = []

    def start(name, role=None, folder=folders[0], **values):
        transfer = {}
        if role is not None:
            extra = {"transport": "shm"}
            transfer = {"kv_connector": "PullConnector", "kv_role": role, "kv_port": 0}
            transfer["kv_connector_extra_config"] = extra
        config = EngineConfig(name=name, kv_transfer_config=transfer, num_blocks=64, **values)
        engine = build_engine(
            config, folder, dtype="float64", executor="inprocess", connect=role is not None
        )
        opened.append(engine)
        return engine

    yield start
    for engine in opened:
        engine.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_the_next_step_computes_with_the_other_weights(start, folders, tp):
    engine, other = start("one", tp=tp), start("other", folder=folders[1])
    (before,) = engine.generate([PROMPT], FIVE)
    digest = engine.load_weights(folders[1])
    assert digest == fingerprint(folders[1], "float64").weights_digest
    (after,), (right,) = engine.generate([PROMPT], FIVE), other.generate([PROMPT], FIVE)
    assert after.token_ids == right.token_ids != before.token_ids
    assert after.num_cached_tokens == 0


def test_an_engine_with_work_keeps_its_weights(start, folders):
    engine = start("one")
    engine.add_request("r", PROMPT, FIVE)
    with pytest.raises(EngineError, match="1 requests, 0 loads and 0 leases; pause it"):
        engine.load_weights(folders[1])
    while engine.has_work():
        engine.step()
    engine.load_weights(folders[1])


def test_another_shape_is_refused_with_both_values_and_nothing_changes(start, folders):
    engine = start("one")
    (before,) = engine.generate([PROMPT], FIVE)
    with pytest.raises(ModelError, match=r"num_layers: the engine's model 'tiny-0' has 4, .* 3"):
        engine.load_weights(folders[2])
    (after,) = engine.generate([PROMPT], FIVE)
    assert after.token_ids == before.token_ids


def test_a_connector_that_cannot_follow_keeps_the_weights(folders):
    engine, *_ = open_simulated(SchedulerOptions(), scripted=True)
    with engine, pytest.raises(EngineError, match=f"{ScriptedScheduler.__name__} cannot follow"):
        engine.load_weights(folders[1])


def test_kv_of_other_weights_is_refused_until_both_engines_have_them(start, folders):
    source, target = start("p", "kv_producer"), start("d", "kv_consumer")
    alone = start("alone", folder=folders[1])
    (right,) = alone.generate([PROMPT], FIVE)

    def hand_over():
        (lent,) = source.generate(
            [PROMPT], SamplingParams(max_tokens=1), [{"do_remote_decode": True}]
        )
        params = lent.kv_transfer_params
        try:
            target.add_request("r", PROMPT, FIVE, kv_transfer_params=params)
        finally:
            source.take_back(params)
            while source.has_work():
                source.step()

    source.load_weights(folders[1])
    before, after = (fingerprint(each, "float64").weights_digest for each in folders[:2])
    with pytest.raises(TicketError, match=f"weights: prefill had {after}, here it is {before}"):
        hand_over()
    target.load_weights(folders[1])
    (lent,) = source.generate([PROMPT], SamplingParams(max_tokens=1), [{"do_remote_decode": True}])
    target.add_request("r", PROMPT, FIVE, kv_transfer_params=lent.kv_transfer_params)
    tokens = []
    while target.has_work():
        source.step()
        tokens += [token for output in target.step() for token in output.token_ids]
    assert tokens == right.token_ids
    assert target.stats().scheduler.failed_loads == 0
