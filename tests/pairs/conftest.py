"""A prefill and a decode engine around one tiny model, and the undivided engine to compare with."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvferry.config import EngineConfig
from kvferry.connectors.records import digest_mismatch
from kvferry.engine.builder import ExecutorKind, build_engine
from kvferry.engine.engine import Engine
from kvferry.engine.messages import EngineOutput, SamplingParams
from kvferry.engine.weights import prepare_model
from kvferry.engine.weights_folder import TinyConfig, TinyLatent
from kvferry.observe.records import TransferRecord
from kvferry.testing.waiting import until

NUM_BLOCKS = 96
WINDOW = 24
"""Tokens that a layer of the hybrid model attends to."""


def engine_config(role: str, name: str, shape: dict[str, Any], **extra: Any) -> EngineConfig:
    """A small engine; ``shape`` gives tp, pp, block_size and layout, ``extra`` the extra keys."""
    keys = {"record_digests": True, "cluster_key": "k" * 32, **extra}
    policy = keys.pop("kv_load_failure_policy", "fail")
    return EngineConfig(
        name=name,
        num_blocks=shape.get("num_blocks", NUM_BLOCKS),
        max_num_batched_tokens=64,
        kv_transfer_config={
            "kv_connector": "PullConnector",
            "kv_role": role,
            "kv_port": keys.pop("kv_port", 0),
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": keys,
        },
        **{key: value for key, value in shape.items() if key != "num_blocks"},
    )


@dataclass
class EnginePair:
    """What a router does, without HTTP: prompts go to ``prefill``, then to ``decode``."""

    prefill: Engine
    decode: Engine
    records: list[TransferRecord]

    def step(self) -> dict[str, EngineOutput]:
        """One step of each engine; collects what they say."""
        for engine in (self.prefill, self.decode):
            for output in engine.step():
                name = output.request_id
                self.done[name] = self.done[name] + output if name in self.done else output
            self.records += engine.records()
        return self.done

    def __post_init__(self) -> None:
        self.done: dict[str, EngineOutput] = {}

    def run(self, condition: Callable[[], bool]) -> None:
        """Steps both engines until a condition holds."""

        def holds() -> bool:
            if condition():
                return True
            self.step()
            if not (self.prefill.is_computing or self.decode.is_computing):
                time.sleep(0.001)
            return False

        until(holds, every_s=0, what=lambda: (self.prefill.stats(), self.decode.stats()))

    def finish(self, names: Sequence[str]) -> list[EngineOutput]:
        """Steps until these requests have ended."""
        self.run(
            lambda: all(n in self.done and self.done[n].finish_reason is not None for n in names)
        )
        return [self.done[name] for name in names]

    def prefilled(self, prompts: Sequence[Sequence[int]]) -> list[EngineOutput]:
        """Computes prompts on the prefill engine: one token each, and the params for the other."""
        names = [uuid.uuid4().hex for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self.prefill.add_request(
                name,
                prompt,
                SamplingParams(max_tokens=1, ignore_eos=True),
                kv_transfer_params={"do_remote_decode": True},
            )
        return self.finish(names)

    def submit(self, first: EngineOutput, prompt: Sequence[int], max_tokens: int) -> str:
        """Gives the decode engine a computed prompt and its first token."""
        name = uuid.uuid4().hex
        self.decode.add_request(
            name,
            [*prompt, *first.token_ids],
            SamplingParams(max_tokens=max_tokens - 1, ignore_eos=True, seed_offset=1),
            kv_transfer_params=first.kv_transfer_params,
        )
        return name

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[EngineOutput]:
        """Answers, the first token of each from the prefill engine."""
        firsts = self.prefilled(prompts)
        names = [self.submit(f, p, max_tokens) for f, p in zip(firsts, prompts, strict=True)]
        ended = self.finish(names)
        for first, completion in zip(firsts, ended, strict=True):
            completion.token_ids[:0] = first.token_ids
        return ended

    def settle(self) -> None:
        """Steps until every block of both engines is free again."""
        self.run(lambda: not (self.prefill.has_work() or self.decode.has_work()))
        for engine in (self.prefill, self.decode):
            stats = engine.stats().scheduler
            assert stats.free_blocks == stats.usable_blocks, stats

    def check_digests(self) -> int:
        """Asserts that every load arrived bit for bit; returns how many there were."""
        leases = {r.lease_id for r in self.records if r.direction == "recv" and r.ok}
        for lease in leases:
            of_lease = [record for record in self.records if record.lease_id == lease]
            sent = [record for record in of_lease if record.direction == "send"]
            received = [record for record in of_lease if record.direction == "recv"]
            assert digest_mismatch(sent, received) is None
        return len(leases)


MODELS = {
    # Six query heads over three KV heads, five layers: few shapes divide them.
    "llama": TinyConfig(num_layers=5),
    # Two groups of two layers with windows, and one of the two layers that see all.
    "hybrid": TinyConfig(num_layers=6, sliding_window=WINDOW, full_attention_every=3),
    "mla": TinyConfig(num_layers=5, latent=TinyLatent()),
}


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the models, each once."""
    cache = tmp_path_factory.mktemp("models")
    return lambda name: prepare_model("tiny", tiny=MODELS[name], cache=cache)


@pytest.fixture
def model_folder(request: pytest.FixtureRequest, model_folders: Callable[[str], Path]) -> Path:
    """The model of a test: Llama, or the one it is parametrized with."""
    return model_folders(getattr(request, "param", "llama"))


Known = dict[tuple[Path, tuple[int, ...], int], list[int]]
Undivided = Callable[[Sequence[Sequence[int]], int], list[list[int]]]


@pytest.fixture(scope="session")
def known_answers() -> Known:
    """Answers of undivided engines, each computed once."""
    return {}


@pytest.fixture
def undivided(model_folder: Path, known_answers: Known) -> Undivided:
    """Greedy answers of one engine with one rank that keeps all blocks of all layers."""
    config = EngineConfig(
        name="whole", num_blocks=256, kv_transfer_config={}, hybrid_kv_cache=False
    )

    def answers(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        keys = [(model_folder, tuple(prompt), max_tokens) for prompt in prompts]
        missing = [key for key in keys if key not in known_answers]
        if missing:
            engine = build_engine(
                config, model_folder, dtype="float64", executor="inprocess", connect=False
            )
            sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            with engine:
                done = engine.generate([prompt for _, prompt, _ in missing], sampling)
                for key, answer in zip(missing, done, strict=True):
                    known_answers[key] = answer.token_ids
        return [known_answers[key] for key in keys]

    return answers


OpenPair = Callable[..., EnginePair]


@pytest.fixture
def open_pair(model_folder: Path) -> Iterator[OpenPair]:
    """Opens pairs in float64; they are closed at the end of the test."""
    with ExitStack() as stack:

        def open_one(
            prefill: dict[str, Any],
            decode: dict[str, Any],
            *,
            executor: ExecutorKind = "inprocess",
            **extra: Any,
        ) -> EnginePair:
            engines = []
            for role, name, shape in (
                ("kv_producer", "p", prefill),
                ("kv_consumer", "d", decode),
            ):
                config = engine_config(role, name, shape, **extra)
                engine = build_engine(config, model_folder, dtype="float64", executor=executor)
                stack.callback(engine.close)
                engines.append(engine)
            prefill_engine, decode_engine = engines
            return EnginePair(prefill_engine, decode_engine, records=[])

        yield open_one
