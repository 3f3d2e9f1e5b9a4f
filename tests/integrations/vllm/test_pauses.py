"""Requests that vLLM refuses while generation is paused, reports of steps that failed, and hashes
of blocks of engines that draft: all are of vLLM 0.33 and later.
"""

from types import SimpleNamespace

import msgspec
import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

from vllm.v1.engine.core import EngineCoreProc

if not hasattr(EngineCoreProc, "pause_generation"):
    pytest.skip("vLLM before 0.33 has none of this", allow_module_level=True)

from vllm.config import VllmConfig
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvferry.cache import events
from kvferry.integrations.vllm.messages import StepReport


def pause(engine, monkeypatch):
    """Generation is paused as on a server: new requests are refused, and their clients may retry.

    Returns:
        The ids of the requests that are refused from now on.
    """
    core = engine.llm.llm_engine.engine_core.engine_core
    core.pause_scheduler()
    add, refused = core.add_request, []
    server = SimpleNamespace(
        reject_new_requests=True,
        scheduler=core.scheduler,
        add_request=add,
        _send_finish_outputs_to_client=lambda ids, *_: refused.extend(ids),
    )

    def add_request(request, request_wave=0):
        assert EngineCoreProc._reject_add_while_paused(server, request)

    monkeypatch.setattr(core, "add_request", add_request)
    return refused


def test_a_prompt_whose_decode_engine_is_paused_is_given_back(
    start_pair, reference, random_prompt, monkeypatch
):
    prefill, decode = start_pair(extra={"lease_duration_s": 600.0})
    (params,) = prefill.prefill([random_prompt(300)])
    assert prefill.used_blocks
    with monkeypatch.context() as patch:
        refused = pause(decode, patch)
        decode.add(random_prompt(300), params)
        assert len(refused) == 1
    decode.drain()
    prefill.drain()
    assert prefill.used_blocks == decode.used_blocks == 0
    with decode.at_work():
        decode.llm.llm_engine.engine_core.engine_core.resume_scheduler()
    prompt = random_prompt(300)
    found = decode.generate([prompt], prefill.prefill([prompt]))
    assert [list(each.outputs[0].token_ids) for each in found] == reference([prompt])
    prefill.drain()


def test_a_refused_prefill_leaves_nothing_behind(start, random_prompt, monkeypatch):
    engine = start("kv_both")
    with monkeypatch.context() as patch:
        refused = pause(engine, patch)
        engine.add(random_prompt(300), {"do_remote_decode": True, "do_remote_prefill": False})
        assert len(refused) == 1
    engine.drain()
    assert engine.used_blocks == 0


def of_rank(request_ids, report):
    """What a rank gives to vLLM's executor after a step."""
    output = KVConnectorOutput(finished_recving=request_ids, kv_connector_worker_meta=report)
    return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=output)


def test_reports_of_a_step_that_failed_join_those_of_the_next_step():
    aggregator = KVOutputAggregator(expected_finished_count=2)
    first = of_rank({"r"}, StepReport(written={"a": {0: 32}}, failed={"r"}))
    aggregator.ft_defer_kv_connector_outputs([first.kv_connector_output])
    second = [
        of_rank(None, StepReport(written={"a": {0: 64}})),
        of_rank({"r"}, StepReport(written={"a": {1: 64}})),
    ]
    joined = aggregator.aggregate(second).kv_connector_output
    assert joined.finished_recving == {"r"}
    report = joined.kv_connector_worker_meta
    assert report.failed == {"r"}
    assert report.written == {"a": {0: 64, 1: 64}}  # a later report of a rank stands


@pytest.mark.parametrize("has_connector", [True, False])
def test_blocks_of_an_engine_with_a_connector_are_hashed_by_their_own_tokens(has_connector):
    """The digest of a prompt and the router's index know the tokens of a block, and none behind."""
    drafts = SimpleNamespace(
        use_eagle_block_drop=lambda: True,
        use_eagle=lambda: True,
        use_multi_module_mtp=lambda: False,
        disable_lookahead_block_hashes=False,
    )
    config = SimpleNamespace(
        speculative_config=drafts,
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        kv_transfer_config=object() if has_connector else None,
        num_prefill_lookahead_tokens=1,
    )
    tokens_behind = VllmConfig.num_hash_lookahead_tokens.fget(config)
    assert tokens_behind == (0 if has_connector else 1)


def test_an_event_with_tokens_behind_its_blocks_is_read():
    told = BlockStored(
        block_hashes=[7],
        parent_block_hash=None,
        token_ids=[1, 2],
        block_size=2,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        lookahead_token_ids=[[3]],
    )
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=events.BlockStored)
    assert (read.block_hashes, read.token_ids) == ([7], [1, 2])
