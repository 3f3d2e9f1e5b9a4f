"""A prefill and a decode engine of the real vLLM in this process, stepped by hand.

``python -m benchmarks.vllm_adapter.engines ORDER RESULT`` runs in ``.venv-vllm``: it reads an
:class:`Order` and writes :class:`Measured`, both JSON files.
"""

import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.vllm_adapter.meter import Clock, Meter, StepCost
from benchmarks.vllm_servers.ports import free_port
from kvferry.control.tracing import new_traceparent

BLOCK_SIZE = 32
_HELD = {"stall_timeout_s": 3600.0, "request_timeout_s": 3600.0, "handshake_timeout_s": 3600.0}
"""Extra keys with which what is under way stays under way."""
_REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
_WITHIN_S = 120.0
_AGENT = "_KV_CONNECTOR_AGENT"
"""There is no public way to put a connector there."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be measured."""

    model: str
    """Folder of the model."""
    vocab_size: int
    layers: int
    requests: int
    """In flight at once."""
    prompt_tokens: int
    steps: int
    """That are measured of each case."""
    packages: str = ""
    """Folder of packages that this environment lacks: OpenTelemetry's SDK, where spans are made."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What the steps of one case took."""

    name: str
    in_flight: int
    """Requests with a transfer."""
    steps: dict[Clock, tuple[StepCost, ...]]
    """The clocks take turns."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """All that the engines' process measured."""

    layer_calls: float
    """Microseconds of what is called for every layer, of all layers together; in each step."""
    cases: tuple[Case, ...]
    per_request: dict[str, tuple[float, ...]]
    """Method that is called for one request → CPU microseconds of each call."""


class Engine:
    """One vLLM engine. vLLM keeps a worker's connector in a global, which is swapped here."""

    def __init__(self, order: Order, role: str, extra: Mapping[str, Any]) -> None:
        from vllm import LLM

        _swap_agent(None)
        self._random = random.Random(role)
        self._order = order
        self._count = 0
        self.port = free_port()
        self._llm = LLM(
            model=order.model,
            dtype="float32",
            block_size=BLOCK_SIZE,
            max_model_len=8192,
            max_num_seqs=order.requests + 8,
            kv_cache_memory_bytes=512 << 20,
            enforce_eager=True,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            kv_transfer_config={
                "kv_connector": "KVFerryConnector",
                "kv_connector_module_path": "kvferry.integrations.vllm",
                "kv_role": role,
                "kv_port": self.port,
                "engine_id": role,
                "kv_connector_extra_config": {"transport": "tcp", **extra},
            },
        )
        self.worker = _swap_agent(None)
        self.meter = Meter()
        self.meter.watch(self.scheduler.connector, "scheduler")
        self.meter.watch(self.worker, "worker")
        self.meter.time_layer_calls(self.worker, order.layers)

    @property
    def scheduler(self) -> Any:
        """The engine's own."""
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    def prompt(self, tokens: int) -> list[int]:
        """A random one."""
        return [self._random.randrange(self._order.vocab_size) for _ in range(tokens)]

    def add(
        self, prompt: list[int], params: Mapping[str, Any] | None = None, max_tokens: int = 8000
    ) -> str:
        """Adds a request; its id."""
        from vllm import SamplingParams

        self._count += 1
        request_id = f"r{self._count}"
        self._llm.llm_engine.add_request(
            request_id,
            {"prompt_token_ids": prompt},
            SamplingParams(
                max_tokens=min(max_tokens, 8000 - len(prompt)),
                temperature=0,
                ignore_eos=True,
                detokenize=False,
                extra_args=None if params is None else {"kv_transfer_params": dict(params)},
            ),
            trace_headers={"traceparent": new_traceparent()} if self._order.packages else None,
        )
        return request_id

    def step(self) -> list[Any]:
        """One step; its finished requests."""
        _swap_agent(self.worker)
        try:
            return [output for output in self._llm.llm_engine.step() if output.finished]
        finally:
            _swap_agent(None)

    def abort(self, request_ids: list[str]) -> None:
        """Aborts requests."""
        self._llm.llm_engine.abort_request(request_ids)

    def step_until(self, condition: Callable[[], bool]) -> None:
        """Steps until something is so."""
        deadline = time.monotonic() + _WITHIN_S
        while not condition():
            assert time.monotonic() < deadline, "the engine does not get there"
            self.step()

    def lend(self, count: int) -> list[tuple[list[int], dict[str, Any]]]:
        """Computes prompts; each with what a proxy would forward."""
        prompts = {}
        for _ in range(count):
            prompt = self.prompt(self._order.prompt_tokens)
            prompts[self.add(prompt, _REMOTE_DECODE, max_tokens=1)] = prompt
        lent: dict[str, dict[str, Any]] = {}
        deadline = time.monotonic() + _WITHIN_S
        while len(lent) < count:
            assert time.monotonic() < deadline, "the prompts are not computed"
            for output in self.step():
                # As it comes through HTTP.
                lent[output.request_id] = json.loads(json.dumps(output.kv_transfer_params))
        return [(prompts[request_id], params) for request_id, params in lent.items()]

    def measure(self, name: str, in_flight: int) -> Case:
        """Steps with one more request that generates tokens, which has nothing to transfer."""
        own = self.add(self.prompt(8))
        for _ in range(5):
            self.step()
        costs: dict[Clock, list[StepCost]] = {"wall": [], "cpu": []}
        for _ in range(self._order.steps):
            for clock, steps in costs.items():
                steps.append(self.meter.step(self.step, clock))
        self.abort([own])
        self.step()
        found = {clock: tuple(steps) for clock, steps in costs.items()}
        return Case(name=name, in_flight=in_flight, steps=found)

    def end_leases(self) -> None:
        """Takes all leases back, as after a change of weights; the next step frees their blocks."""
        self.scheduler.connector._scheduler.pull.revoke_leases()  # noqa: SLF001 (there is no other)

    def close(self) -> None:
        """Ends the connector's threads."""
        self.worker.shutdown()
        self.scheduler.connector.shutdown()


def measure(order: Order) -> Measured:
    """Starts the engines and measures all cases."""
    import vllm  # noqa: F401 (it shall find nothing in the folder of packages)

    if order.packages:
        sys.path.append(order.packages)
    prefill = Engine(order, "kv_producer", {"lease_duration_s": 600.0})
    decode = _decode_engine(order)
    idle = "no transfer under way"
    cases = [
        prefill.measure(f"prefill, {idle}", 0),
        decode.measure(f"decode, {idle}", 0),
    ]
    per_request: dict[str, list[float]] = {}
    lent: list[tuple[list[int], dict[str, Any]]] = []
    found = prefill.meter.by_method(lambda: lent.extend(prefill.lend(order.requests)))
    per_request["request_finished (prefill)"] = _busiest(found, "request_finished", order)
    cases.append(prefill.measure("prefill, leases that nobody has asked for", order.requests))
    ids: list[str] = []

    def load() -> None:
        ids.extend(decode.add(prompt, params) for prompt, params in lent)
        decode.step_until(lambda: _num_loading(decode) == order.requests)

    found = decode.meter.by_method(load)
    for method in ("on_new_request", "update_state_after_alloc"):
        per_request[f"{method} (decode)"] = _busiest(found, method, order)
    cases.append(decode.measure("decode, loads under way", order.requests))
    cases.append(prefill.measure("prefill, leases being read", order.requests))
    assert _num_loading(decode) == order.requests, "a load has ended"
    found = decode.meter.by_method(lambda: decode.abort(ids))
    per_request["request_finished (decode, aborted)"] = _busiest(found, "request_finished", order)
    decode.step_until(lambda: _num_loading(decode) == 0)
    lent = prefill.lend(order.requests)
    prefill.end_leases()
    found = prefill.meter.by_method(prefill.step)
    whole_step = sum(found["build_connector_meta"])
    per_request["build_connector_meta (prefill), per lease that ended"] = [
        whole_step / order.requests
    ]
    prefill.close()
    with socket.create_server(("127.0.0.1", prefill.port)):  # it listens and never answers
        for prompt, params in lent:
            decode.add(prompt, params)
        cases.append(decode.measure("decode, leases awaited", order.requests))
    assert decode.scheduler.get_request_counts() == (0, order.requests), "a request did not wait"
    return Measured(
        layer_calls=decode.meter.layer_calls,
        cases=tuple(cases),
        per_request={name: tuple(spans) for name, spans in per_request.items()},
    )


def _decode_engine(order: Order) -> Engine:
    """One whose reads land by half and then stand still, as from a source that was stopped."""
    from vllm.platforms import current_platform

    # Starting another worker, vLLM looks through all modules for kernels to replace, and stumbles
    # over llvmlite, which the first engine has loaded. They are replaced already.
    override = "register_triton_kernel_overrides"
    setattr(type(current_platform), override, classmethod(lambda _cls: None))
    from kvferry.plugins import TRANSPORTS, temporary_plugin
    from kvferry.testing.faults import stalling_transport
    from kvferry.transports.tcp import TcpTransport

    with temporary_plugin(TRANSPORTS, "tcp", stalling_transport(TcpTransport, stall=1.0)):
        return Engine(order, "kv_consumer", _HELD)


def _swap_agent(agent: Any) -> Any:
    """Sets vLLM's global of the worker's connector; what it was."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    older = getattr(kv_transfer_state, _AGENT)
    setattr(kv_transfer_state, _AGENT, agent)
    return older


def _num_loading(engine: Engine) -> int:
    from vllm.v1.request import RequestStatus

    waits = RequestStatus.WAITING_FOR_REMOTE_KVS
    return sum(request.status == waits for request in engine.scheduler.requests.values())


def _busiest(found: Mapping[str, list[float]], method: str, order: Order) -> list[float]:
    """The calls that did something: vLLM makes some of them for every request, more than once."""
    calls = found.get(method) or found[f"{method}_all_groups"]
    return sorted(calls, reverse=True)[: order.requests]


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    found_all = measure(msgspec.json.decode(source.read_bytes(), type=Order))
    target.write_bytes(msgspec.json.encode(found_all))
    sys.stdout.flush()
    os._exit(0)  # reads that stand still would be waited for
