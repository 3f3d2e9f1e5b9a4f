"""Prefill and decode engines of the real vLLM on a CPU, all in this process and stepped by hand.

They run where vLLM is installed; elsewhere the tests are skipped. Engines are cheap once vLLM is
imported: a sixth of a second each.
"""

import gc
import importlib.util
import itertools
import json
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm_servers.ports import free_port
from kvferry.testing.waiting import until
from tests.integrations.checkpoints import write_tiny_hybrid

HERE = Path(__file__).parent
VOCABULARY = 1024
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}

# vLLM reads these when it is imported.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
if importlib.util.find_spec("vllm") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import kvferry.integrations.vllm  # vLLM's warnings are not ours


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of vLLM and of what it imports are not ours to fail for.

    Tests with engines come first: others load Numba, and vLLM's first engine does not start then.
    Those without engines take seconds, so a change must pass them all.
    """

    def starts_engines(item: pytest.Item) -> bool:
        return "_first_engine" in getattr(item, "fixturenames", ())

    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))
            if not starts_engines(item) and item.get_closest_marker("slow") is None:
                item.add_marker("smoke")
    items.sort(key=lambda item: not starts_engines(item))


def pytest_sessionfinish() -> None:
    """Nothing is collected from now on: vLLM does so twice per engine when Python ends, and
    dozens of engines on a heap of this size would keep the run from ending for minutes."""
    gc.collect = lambda generation=2: 0


def write_tiny_llama(folder: Path, *, seed: int = 1234, **config: Any) -> Path:
    """A random Llama on disk; other seeds are other checkpoints of the same shape."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        # Large weights: with the usual 0.02 the attention of a random model is nearly flat, and
        # wrong KV would give the right tokens.
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**(settings | config)))
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads(model.config.to_json_string())
    values["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@contextmanager
def _agent_is(agent: Any) -> Iterator[None]:
    """Within the block, vLLM's global is the connector of one worker; afterwards it is empty."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    kv_transfer_state._KV_CONNECTOR_AGENT = agent
    try:
        yield
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = None


class Engine:
    """One vLLM engine. vLLM keeps a worker's connector in a global, which is swapped here."""

    def __init__(self, model: Path, role: str | None, **settings: Any) -> None:
        from vllm import LLM
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        extra = settings.pop("extra", {})
        policy = settings.pop("policy", "fail")
        before, after = settings.pop("before", ()), settings.pop("after", ())
        self.engine_id = f"{role}-{next(_numbers)}"
        transfer = {
            "kv_connector": "KVFerryConnector",
            "kv_connector_module_path": "kvferry.integrations.vllm",
            "kv_role": role,
            "kv_port": free_port(),
            "kv_connector_extra_config": {"transport": "tcp", **extra},
        }
        if before or after:
            transfer = {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": [*before, transfer, *after]},
            }
        transfer |= {"engine_id": self.engine_id, "kv_load_failure_policy": policy}
        defaults = {
            "dtype": "float32",
            "block_size": 64,
            "max_model_len": 2048,
            "max_num_seqs": 32,
            "kv_cache_memory_bytes": 16 << 20,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
        }
        with _agent_is(None):
            self.llm = LLM(
                model=str(model),
                **(defaults | settings),
                **({} if role is None else {"kv_transfer_config": transfer}),
            )
            _started.append(self.llm)
            self._agent = get_kv_transfer_group() if has_kv_transfer_group() else None

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def connector(self) -> Any:
        """The scheduler's connector: ours, where there are several."""
        return _ours(self.scheduler.connector)

    @property
    def worker(self) -> Any:
        """The worker's connector, likewise."""
        return _ours(self._agent)

    @property
    def used_blocks(self) -> int:
        """Blocks that somebody holds."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def prompt_tokens_from(self, source: str) -> int:
        """vLLM's own count of prompt tokens by where their KV came from."""
        for logger in self.llm.llm_engine.logger_manager.stat_loggers:
            if hasattr(logger, "counter_prompt_tokens_by_source"):
                (counter,) = logger.counter_prompt_tokens_by_source[source][0].collect()
                return int(counter.samples[0].value)
        raise AssertionError("vLLM keeps no Prometheus figures")

    def add(
        self,
        prompt: Any,
        params: dict[str, Any] | None = None,
        *,
        max_tokens: int = 12,
        lora: Any = None,
        **sampling: Any,
    ) -> str:
        """Adds a request: of token ids, or whatever prompt vLLM takes as a mapping; returns its id.

        Args:
            prompt: the prompt.
            params: ``kv_transfer_params``.
            max_tokens: tokens of the answer.
            lora: vLLM's request of an adapter.
            **sampling: vLLM's sampling parameters.
        """
        from vllm import SamplingParams

        request_id = f"r{next(_numbers)}"
        self.llm.llm_engine.add_request(
            request_id,
            prompt if isinstance(prompt, dict) else {"prompt_token_ids": list(prompt)},
            SamplingParams(
                max_tokens=max_tokens,
                temperature=0,
                ignore_eos=True,
                detokenize=False,
                extra_args=None if params is None else {"kv_transfer_params": params},
                **sampling,
            ),
            lora_request=lora,
        )
        return request_id

    def step(self) -> list[Any]:
        """One step; its finished requests."""
        with self.at_work():
            return [output for output in self.llm.llm_engine.step() if output.finished]

    def at_work(self) -> AbstractContextManager[None]:
        """Within the block, the worker's connector is the one that vLLM calls."""
        return _agent_is(self._agent)

    def abort(self, *request_ids: str) -> None:
        """Aborts requests."""
        self.llm.llm_engine.abort_request(list(request_ids))

    def finish(self, *request_ids: str) -> dict[str, Any]:
        """Steps until these requests have ended; request id → output."""
        ended: dict[str, Any] = {}

        def have_ended() -> bool:
            ended.update({output.request_id: output for output in self.step()})
            return ended.keys() >= set(request_ids)

        until(have_ended, every_s=0, what=lambda: f"the end of {set(request_ids) - ended.keys()}")
        return ended

    def generate(
        self,
        prompts: Sequence[Any],
        params: Sequence[dict[str, Any] | None] | None = None,
        **sampling: Any,
    ) -> list[Any]:
        """Runs requests together; their outputs."""
        each = [None] * len(prompts) if params is None else params
        ids = [self.add(prompt, p, **sampling) for prompt, p in zip(prompts, each, strict=True)]
        ended = self.finish(*ids)
        return [ended[request_id] for request_id in ids]

    def prefill(self, prompts: Sequence[Any], lora: Any = None) -> list[dict[str, Any]]:
        """What a proxy would forward of each."""
        asked = [dict(REMOTE_DECODE) for _ in prompts]
        outputs = self.generate(prompts, asked, max_tokens=1, lora=lora)
        # As it comes through HTTP.
        return [json.loads(json.dumps(output.kv_transfer_params)) for output in outputs]

    def drain(self) -> None:
        """Steps until vLLM has nothing left to step for."""

        def is_drained() -> bool:
            if self.scheduler.has_requests():
                self.step()
            return not self.scheduler.has_requests()

        until(is_drained, every_s=0, what=lambda: f"the end of {list(self.scheduler.requests)}")

    def close(self) -> None:
        """Ends the connector's threads."""
        if self._agent is not None:
            self._agent.shutdown()
            self.scheduler.connector.shutdown()


def _ours(connector: Any) -> Any:
    each = getattr(connector, "sub_connectors", [connector])
    return next(one for one in each if isinstance(one, kvferry.integrations.vllm.KVFerryConnector))


_numbers = itertools.count()
_started: list[Any] = []
"""An engine that is collected takes the process's parallel groups with it, and so all others."""


def assert_all_arrived(sent: Sequence[Any], received: Sequence[Any], leases: int) -> None:
    """Every cell of every lease, of attention and of states, arrived bit for bit."""
    from kvferry.connectors.records import digest_mismatch

    assert {record.lease_id for record in received} == {record.lease_id for record in sent}
    assert len(received) == len(sent) == leases
    for record in received:
        lent = [each for each in sent if each.lease_id == record.lease_id]
        assert record.ok
        assert digest_mismatch(lent, [record]) is None


def tokens(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="session")
def random_prompt() -> Callable[[int], list[int]]:
    """Prompts of some length, all different."""
    generator = random.Random(7)
    return lambda length: [generator.randrange(VOCABULARY) for _ in range(length)]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that every engine here serves unless told otherwise."""
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Other models: the keyword arguments of :func:`write_tiny_llama`."""
    folder = tmp_path_factory.mktemp("models")
    return lambda **config: write_tiny_llama(folder / f"llama-{next(_numbers)}", **config)


@pytest.fixture(scope="session")
def tiny_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of layers with and without a window."""
    return write_tiny_hybrid(tmp_path_factory.mktemp("hybrid") / "gemma")


@pytest.fixture(scope="session")
def tiny_windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which every layer has a window: one KV cache group."""
    folder = tmp_path_factory.mktemp("windows") / "gemma"
    return write_tiny_hybrid(folder, full="sliding_attention")


@pytest.fixture(scope="session")
def decodes_windows() -> dict[str, Any]:
    """Settings with which decode takes models with windows in the installed release."""
    from kvferry.integrations.vllm.compat import release

    if release.takes_failed_requests:
        return {}
    return {"d_disable_hybrid_kv_cache_manager": True, "d_enable_prefix_caching": False}


@pytest.fixture(scope="session")
def _first_engine(tiny_llama: Path) -> Engine:
    from vllm.platforms import current_platform

    engine = Engine(tiny_llama, None)
    # Starting another worker, vLLM looks through all modules for kernels to replace, and stumbles
    # over llvmlite, which our first pair has loaded. They are replaced already.
    patch = pytest.MonkeyPatch()
    patch.setattr(
        type(current_platform),
        "register_triton_kernel_overrides",
        classmethod(lambda cls: None),
        raising=False,  # vLLM before 0.31 does not look
    )
    return engine


@pytest.fixture(scope="session")
def reference(_first_engine: Engine) -> Callable[..., list[list[int]]]:
    """Greedy tokens of a single engine without a connector."""
    known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def generate(prompts: Sequence[Sequence[int]], max_tokens: int = 12) -> list[list[int]]:
        missing = [prompt for prompt in prompts if (tuple(prompt), max_tokens) not in known]
        for prompt, found in zip(
            missing, tokens(_first_engine.generate(missing, max_tokens=max_tokens)), strict=True
        ):
            known[tuple(prompt), max_tokens] = found
        return [known[tuple(prompt), max_tokens] for prompt in prompts]

    return generate


@pytest.fixture
def start(_first_engine: Engine, tiny_llama: Path) -> Iterator[Callable[..., Engine]]:
    """Starts an engine with a role and settings of vLLM's; its connector ends with the test."""
    engines: list[Engine] = []

    def start_engine(role: str | None, model: Path | None = None, **settings: Any) -> Engine:
        engines.append(Engine(model or tiny_llama, role, **settings))
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.close()


@pytest.fixture
def start_pair(start: Callable[..., Engine]) -> Callable[..., tuple[Engine, Engine]]:
    """A prefill and a decode engine; settings of one side begin with ``p_`` or ``d_``."""

    def pair(**settings: Any) -> tuple[Engine, Engine]:
        both = {key: value for key, value in settings.items() if key[:2] not in ("p_", "d_")}
        own = {
            side: {key[2:]: value for key, value in settings.items() if key.startswith(side)}
            for side in ("p_", "d_")
        }
        return (
            start("kv_producer", **both, **own["p_"]),
            start("kv_consumer", **both, **own["d_"]),
        )

    return pair


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], list[Any]]:
    """``records(engine)`` is a list to which the records of its transfers are added."""

    def of(engine: Engine) -> list[Any]:
        found: list[Any] = []
        pull = engine.worker.connector_worker.pull
        get = pull.get_transfer_results

        def get_transfer_results(finished: set[str]) -> Any:
            output = get(finished)
            found.extend(output.transfer_records)
            return output

        monkeypatch.setattr(pull, "get_transfer_results", get_transfer_results)
        return found

    return of
