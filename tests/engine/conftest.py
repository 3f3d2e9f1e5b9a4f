from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvferry.config import EngineConfig, KVTransferConfig
from kvferry.engine.builder import engine_cache
from kvferry.engine.messages import SamplingParams, ScheduledRequest, SchedulerOutput, WorkerSpec
from kvferry.engine.weights import load_model_config, prepare_model
from kvferry.engine.weights_folder import TinyConfig


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory) -> Path:
    """Where this test run keeps converted models."""
    return tmp_path_factory.mktemp("model-cache")


@pytest.fixture(scope="session")
def tiny_folder(model_cache):
    """Makes tiny models; equal ones are made once."""

    def make(**values) -> Path:
        return prepare_model("tiny", tiny=TinyConfig(**values), cache=model_cache)

    return make


@pytest.fixture(scope="session")
def worker_spec():
    """Builds the spec of an engine's workers."""

    def make(
        folder: Path,
        *,
        tp=1,
        pp=1,
        layout="NHD",
        block_size=4,
        num_blocks=48,
        dtype="float64",
        hybrid_kv_cache=True,
        connector: KVTransferConfig | None = None,
        **values,
    ) -> WorkerSpec:
        model = load_model_config(folder)
        engine = EngineConfig(
            name="tested",
            kv_transfer_config={},
            tp=tp,
            pp=pp,
            layout=layout,
            block_size=block_size,
            hybrid_kv_cache=hybrid_kv_cache,
        )
        return WorkerSpec(
            engine="tested",
            model_folder=str(folder),
            geometries=engine_cache(engine, model, dtype)[1],
            layer_windows=dict(model.cache_shape.layer_windows),
            num_blocks=num_blocks,
            incarnation="first",
            kv_transfer_config=connector,
            **values,
        )

    return make


@pytest.fixture
def recording_connector(monkeypatch):
    """The config of a connector that notes its calls; see ``plugins/``."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "plugins")

    def make(**extra) -> KVTransferConfig:
        return KVTransferConfig(
            kv_connector="RecordingConnector",
            kv_role="kv_both",
            kv_connector_module_path="recording_connector",
            kv_connector_extra_config=extra,
        )

    return make


@dataclass
class Sequence:
    """What a scheduler would know of one request."""

    request_id: str
    prompt: list[int]
    blocks: list[int]
    sampling: SamplingParams
    output: list[int]
    gaps: list[float]
    computed: int = 0

    def next_part(self, chunk: int) -> ScheduledRequest:
        known = self.prompt + self.output
        tokens = known[self.computed : self.computed + chunk]
        done = self.computed + len(tokens) == len(known)
        part = ScheduledRequest(
            request_id=self.request_id,
            token_ids=tokens,
            first_position=self.computed,
            block_ids=(self.blocks,),
            sample=self.sampling if done else None,
            output_index=len(self.output),
        )
        self.computed += len(tokens)
        return part


@pytest.fixture(scope="session")
def generate():
    """The least of a scheduler: runs prompts together, block tables scattered over the cache."""

    def run(executor, prompts, *, tokens=6, chunk=512, sampling=None, seed=0, together=True):
        spec = executor.spec
        size = spec.geometries[0].block_size
        scattered = torch.randperm(
            spec.num_blocks - 1, generator=torch.Generator().manual_seed(seed)
        )
        free = [1 + int(block) for block in scattered]
        sequences = []
        for number, prompt in enumerate(prompts):
            needed = -(-(len(prompt) + tokens) // size)
            blocks, free = free[:needed], free[needed:]
            assert len(blocks) == needed, "the test's cache is too small"
            choice = SamplingParams(max_tokens=tokens) if sampling is None else sampling
            sequences.append(Sequence(f"r{number}", list(prompt), blocks, choice, [], []))
        batches = [sequences] if together else [[sequence] for sequence in sequences]
        for batch in batches:
            while live := [sequence for sequence in batch if len(sequence.output) < tokens]:
                step = SchedulerOutput(requests=[sequence.next_part(chunk) for sequence in live])
                outputs = [output for output in executor.execute(step) if output.sampled]
                assert len(outputs) <= 1
                for sequence in live:
                    if outputs and sequence.request_id in outputs[0].sampled:
                        sequence.output.append(outputs[0].sampled[sequence.request_id])
                        sequence.gaps.append(outputs[0].gaps[sequence.request_id])
        return sequences

    return run


@pytest.fixture(scope="session")
def prompts():
    """Token ids of several lengths, none a multiple of another."""

    def make(*lengths, vocab=320, seed=5):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]

    return make
