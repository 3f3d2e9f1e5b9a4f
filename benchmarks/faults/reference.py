"""kvferry's own engines on hosts: two that prefill and two that decode, all of unequal shapes."""

import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.faults.load import Prompts
from benchmarks.faults.system import CONTROL_PORT, HTTP_PORT, KEY, Member, Role, Step, System
from benchmarks.undivided import undivided
from kvferry.cluster.preflight import convert
from kvferry.config import ModelConfig
from kvferry.engine.messages import SamplingParams
from kvferry.testing.hosts import Host

_MODEL = ModelConfig(source="tiny", dtype="float64")
_PROMPTS = 240
_TOKENS = 20
_LEASE_S = 10.0
_SHAPES: Mapping[str, str] = {
    "p0": 'tp = 1\nblock_size = 16\nlayout = "NHD"',
    "p1": 'tp = 1\nblock_size = 8\nlayout = "HND"',
    "d0": 'tp = 2\nblock_size = 24\nlayout = "NHD"',
    "d1": 'tp = 2\nblock_size = 16\nlayout = "HND"',
}
_ENGINE = """
[[{role}]]
name = "{name}"
host = "{address}"
port = {port}
num_blocks = 256
max_model_len = 512
max_num_seqs = 4             # so that requests wait
max_num_batched_tokens = 64  # so that a prompt takes several steps
{shape}
[{role}.kv_transfer_config]
kv_connector = "PullConnector"
kv_role = "{kv_role}"
kv_port = {kv_port}
kv_load_failure_policy = "recompute"
[{role}.kv_transfer_config.kv_connector_extra_config]
host = "{address}"
transport = "{transport}"
cluster_key = "{key}"
lease_duration_s = {lease_s}
"""


class ReferenceMember(Member):
    """An engine as ``kvferry engine`` runs it: started again when it fails."""

    def __init__(
        self, role: Role, host: Host, client: Host, system: "ReferenceSystem", file: Path
    ) -> None:
        super().__init__(role, host, client, system.folder)
        self._file = file
        self._environment = system.environment()
        self._router = system.router

    def command(self) -> tuple[list[str], Mapping[str, str]]:
        """See :class:`Member`."""
        arguments = [str(self._file), self.name, "--router", self._router.url]
        arguments += ["--logs", str(self.folder)]
        return [sys.executable, "-m", "kvferry.cli", "engine", *arguments], self._environment

    def step_counts(self) -> Mapping[Step, float]:
        """See :class:`Member`."""
        of = {
            state: self.metrics().get(f'kvferry_engine_live_requests{{state="{state}"}}', 0.0)
            for state in ("waiting", "running", "lent", "loading")
        }
        return {
            "waiting": of["waiting"],
            "prefilling": of["running"],
            "lent": of["lent"],
            "loading": of["loading"],
            "decoding": of["running"],
        }

    def used_blocks(self) -> float:
        """See :class:`Member`."""
        return self.metrics().get('kvferry_engine_kv_blocks{state="used"}', 0.0)

    def restart(self) -> None:
        """Kills the engine and its ranks; who supervises it starts it again."""
        for process in self.processes()[1:]:
            process.kill()


class ReferenceSystem(System):
    """Two and two of them."""

    clients = 16
    requests = 170
    lease_s = 3 * _LEASE_S + 30.0

    def __init__(self, folder: Path, transport: str) -> None:
        super().__init__(folder)
        self.name = f"reference, {transport}"
        os.environ["KVFERRY_CACHE"] = str(folder / "cache")
        self._transport = transport
        self._model = convert(_MODEL, lambda _doing, _done: None)

    def make_members(self) -> list[Member]:
        """See :class:`System`."""
        file = self.folder / "cluster.toml"
        text = f'[model]\nsource = "{_MODEL.source}"\ndtype = "{_MODEL.dtype}"\n'
        members: list[Member] = []
        for name, shape in _SHAPES.items():
            role: Role = "prefill" if name.startswith("p") else "decode"
            host = self.network.add_host(name)
            text += _ENGINE.format(
                role=role,
                name=name,
                address=host.ipv4,
                port=HTTP_PORT + host.index,
                kv_port=CONTROL_PORT + host.index,
                shape=shape,
                kv_role="kv_producer" if role == "prefill" else "kv_consumer",
                transport=self._transport,
                key=KEY,
                lease_s=_LEASE_S,
            )
            members.append(ReferenceMember(role, host, self.client, self, file))
        file.write_text(text)
        return members

    def router_arguments(self) -> list[str]:
        """See :class:`System`."""
        return ["--tokenizer", str(self._model)]

    def environment(self) -> dict[str, str]:
        """See :class:`System`. Over UCX: hosts have no other way to each other than TCP."""
        return {**super().environment(), "UCX_TLS": "tcp", "UCX_LOG_LEVEL": "error"}

    def make_prompts(self) -> Prompts:
        """Answers of an engine with one rank, in this process."""
        chance = random.Random(11)
        prompts = [
            [chance.randrange(3, 250) for _ in range(chance.randrange(20, 260))]
            for _ in range(_PROMPTS)
        ]
        with undivided(self._model, _MODEL.dtype, num_blocks=2048) as engine:
            sampling = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
            answers = engine.generate(prompts, sampling)
        return Prompts(prompts, [list(answer.token_ids) for answer in answers])
