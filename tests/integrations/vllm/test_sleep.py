"""Engines that fall asleep and wake up, with vLLM's own classes around their connectors.

vLLM ignores sleep on a CPU. So the worker gets the methods of vLLM's workers of GPUs, and a backend
for sleep mode that overwrites the KV cache, as other owners of the memory would.
"""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
    pytest.skip("vLLM before 0.33 tells no connector of sleep", allow_module_level=True)

from vllm.config import KVTransferConfig
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from benchmarks.vllm_servers.ports import free_port
from kvferry.integrations.vllm import KVFerryConnector
from tests.integrations.vllm.conftest import tokens

LENGTHS = (5, 128, 300)


class Scribbler(SleepModeBackend):
    """Lets the memory of a KV cache go: somebody else writes there."""

    def __init__(self, caches: list[torch.Tensor]) -> None:
        super().__init__()
        self._caches = caches

    def suspend(self, level: int = 1) -> None:
        """See vLLM."""
        for cache in self._caches:
            cache.fill_(1e9)

    def resume(self, tags: list[str] | None = None) -> None:
        """See vLLM."""

    def discard(self, tags: tuple[str, ...]) -> None:
        """See vLLM."""
        self.suspend()


def core(engine: Any) -> Any:
    """vLLM's core of an engine."""
    return engine.llm.llm_engine.engine_core.engine_core


@pytest.fixture
def start_sleepers(start_pair, monkeypatch):
    """Starts pairs whose engines can sleep."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (0, 1))
    for name in ("sleep", "wake_up", "discard"):
        monkeypatch.setattr(CPUWorker, name, getattr(Worker, name))

    def start(**settings):
        pair = start_pair(**settings)
        for engine in pair:
            worker = core(engine).model_executor.driver_worker.worker
            worker._sleep_mode_backend = Scribbler(list(worker.model_runner.kv_caches))
        return pair

    return start


def carry(prefill, decode, prompts):
    """The tokens of prompts that prefill computes and decode loads."""
    params = prefill.prefill(prompts)
    found = tokens(decode.generate(prompts, params))
    for engine in (prefill, decode):
        engine.drain()
    return found


def incarnation(engine):
    return engine.connector.connector_scheduler.pull.description.told.incarnation


@pytest.mark.parametrize("transport", ["tcp", "vm"])
@pytest.mark.parametrize("sleeper", ["prefill", "decode"])
def test_an_engine_serves_after_it_slept(
    start_sleepers, reference, random_prompt, sleeper, transport
):
    extra = {"transport": transport}
    if transport == "tcp":
        extra["transport_config"] = {"tcp": {"port": free_port()}}
    prefill, decode = start_sleepers(p_extra=extra, d_extra={"transport": transport})
    engine = prefill if sleeper == "prefill" else decode
    before, pull = incarnation(engine), engine.connector.connector_scheduler.pull
    for _ in range(3):
        prompts = [random_prompt(length) for length in LENGTHS]
        assert carry(prefill, decode, prompts) == reference(prompts)
        with engine.at_work():
            core(engine).sleep(level=1)
            assert core(engine).wake_up()
        assert incarnation(engine) != before
        assert engine.connector.connector_scheduler.pull is pull
    prompts = [random_prompt(length) for length in LENGTHS]
    assert carry(prefill, decode, prompts) == reference(prompts)
    assert decode.prompt_tokens_from("external_kv_transfer") == 4 * sum(n - 1 for n in LENGTHS)
    assert prefill.used_blocks == decode.used_blocks == 0


def test_an_engine_serves_after_its_kv_cache_alone_was_let_go(
    start_sleepers, reference, random_prompt
):
    prefill, decode = start_sleepers()
    for _ in range(2):
        prompts = [random_prompt(length) for length in LENGTHS]
        assert carry(prefill, decode, prompts) == reference(prompts)
        for engine in (prefill, decode):
            with engine.at_work():
                core(engine).pause_scheduler()
                core(engine).release_kv_cache_memory()
                assert core(engine).wake_up(["kv_cache"])


def test_a_wake_up_without_sleep_changes_nothing(start_pair, reference, random_prompt):
    """vLLM hands the ranks' handshakes over again."""
    prefill, decode = start_pair()
    prompts = [random_prompt(300)]
    params = prefill.prefill(prompts)
    before, port = incarnation(prefill), prefill.connector.connector_scheduler.pull.port
    for engine in (prefill, decode):
        with engine.at_work():
            core(engine).wake_up()
    pull = prefill.connector.connector_scheduler.pull
    assert (incarnation(prefill), pull.port) == (before, port)
    assert tokens(decode.generate(prompts, params)) == reference(prompts)
    assert decode.prompt_tokens_from("external_kv_transfer") == 299
    prefill.drain()


@pytest.mark.parametrize("transport", ["tcp", "vm"])
@pytest.mark.parametrize("sleeper", ["prefill", "decode"])
def test_no_token_is_wrong_if_workers_sleep_while_prompts_are_lent_and_loaded(
    start_sleepers, reference, random_prompt, sleeper, transport
):
    """A trainer may call the workers although requests are under way."""
    prefill, decode = start_sleepers(policy="recompute", extra={"transport": transport})
    engine = prefill if sleeper == "prefill" else decode
    for turn in range(6):
        prompts = [random_prompt(length) for length in LENGTHS]
        params = prefill.prefill(prompts)
        ids = [decode.add(*each) for each in zip(prompts, params, strict=True)]
        for _ in range(turn):
            decode.step()
        with engine.at_work():
            core(engine).model_executor.sleep(1)
        prefill.step()
        with engine.at_work():
            core(engine).wake_up()
        if sleeper == "prefill":
            ended = decode.finish(*ids)
            assert tokens([ended[each] for each in ids]) == reference(prompts)
        else:
            decode.finish(*ids)  # what decode had computed is gone, as vLLM was not told
        decode.drain()
        prefill.drain()
        assert prefill.used_blocks == decode.used_blocks == 0
        with engine.at_work():
            assert engine.scheduler.reset_prefix_cache()
        prompts = [random_prompt(length) for length in LENGTHS]
        assert carry(prefill, decode, prompts) == reference(prompts)


def test_a_request_that_waits_while_decode_sleeps_is_loaded_after(
    start_sleepers, reference, random_prompt
):
    prefill, decode = start_sleepers()
    prompts = [random_prompt(length) for length in LENGTHS]
    params = prefill.prefill(prompts)
    with decode.at_work():
        core(decode).sleep(level=1)
    ids = [decode.add(*each) for each in zip(prompts, params, strict=True)]
    with decode.at_work():
        core(decode).wake_up()
    ended = decode.finish(*ids)
    assert tokens([ended[each] for each in ids]) == reference(prompts)
    assert decode.prompt_tokens_from("external_kv_transfer") == sum(n - 1 for n in LENGTHS)
    prefill.drain()


@pytest.mark.parametrize(
    ("transport", "may"), [("tcp", True), (["cuda_ipc", "tcp"], False), ("nixl", False)]
)
def test_transports_that_cannot_sleep_are_named(caplog, transport, may):
    config = KVTransferConfig(
        kv_connector="KVFerryConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"transport": transport},
    )
    assert KVFerryConnector.supports_sleep_mode(config) is may
    assert ("name tcp or ucx in its place" in caplog.text) is not may
