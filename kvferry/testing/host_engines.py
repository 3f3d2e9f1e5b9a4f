"""Engines of the reference cluster on hosts, with a test in the place of the router.

    client ──HTTP──> prefill host: an engine ──┐
       └─────HTTP──> decode host:  an engine <─┘ the connector under test

Faults affect only the link between the two engines; the client's links stay good. Needs the extras
``engine`` and ``serve``.
"""

import contextlib
import http.client
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import msgspec

from kvferry.config import EngineConfig
from kvferry.connectors.records import digest_mismatch
from kvferry.serving.messages import EngineSettings
from kvferry.serving.metrics import Records, RequestSummary
from kvferry.testing.hosts import Host, HostProcess, Network
from kvferry.testing.waiting import WAIT_S, until

DTYPE = "float64"
"""Dtype whose rounding is too small to change a sampled token when the order of sums changes."""
HTTP_PORT = 8000
"""HTTP port of every engine, on the address of the engine's host."""
LOG_LINES = 20
"""Number of log lines in a message about an engine's death."""


@dataclass(frozen=True)
class HostAnswer:
    """Answer of an engine, or of a pair of engines, to a prompt."""

    token_ids: list[int]
    request_id: str = ""
    kv_transfer_params: dict[str, Any] | None = None
    error: str = ""
    """Reason why there are no tokens; empty for an answer with status 200."""


class HostEngine:
    """An engine that runs on a host and can be started again there."""

    def __init__(
        self,
        host: Host,
        client: Host,
        config: EngineConfig,
        *,
        address: str = "",
        model: Path,
        log: Path,
        dtype: str = DTYPE,
        timeout_s: float = WAIT_S,
    ) -> None:
        """Creates an engine that does not run yet.

        Args:
            host: the host of the engine.
            client: the host that sends the requests.
            config: config of the engine; ``port`` is replaced by :data:`HTTP_PORT`, ``host`` by the
                address.
            address: address of the host for HTTP; the IPv4 address by default.
            model: folder of the engine's model.
            log: file for the engine's output; a restarted engine appends to the file.
            dtype: dtype of weights, activations and KV cache.
            timeout_s: seconds within which each part of an answer must come.
        """
        self.host = host
        """Host of the engine."""
        self.log = log
        """File with the engine's output."""
        self._client = client
        self._settings = EngineSettings(
            engine=msgspec.structs.replace(config, host=address or host.ipv4, port=HTTP_PORT),
            role="prefill" if config.transfer_config().is_producer else "decode",
            model_folder=str(model),
            model_name=model.name,
            dtype=dtype,
        )
        self._timeout_s = timeout_s
        self._process: HostProcess | None = None

    def start(self) -> None:
        """Starts the engine, and the host if it is down. :meth:`wait_until_ready` waits for the
        engine.
        """
        self.host.start()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            self._process = self.host.run(
                # The messages to the launcher go to descriptor 1, and so into the log.
                [sys.executable, "-m", "kvferry.cluster.main", "engine", "1", self.host.name],
                stdin=PIPE,  # the engine ends when this pipe closes
                stdout=log,
                stderr=STDOUT,
                env=environment,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._settings) + b"\n")
        self._process.stdin.flush()

    def wait_until_ready(self) -> None:
        """Waits until the engine serves.

        Raises:
            AssertionError: the engine ended, or does not serve in time; quotes the engine's log.
        """
        assert self._process is not None
        process = self._process

        def lines() -> str:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])

        def serves() -> bool:
            with contextlib.suppress(OSError):
                if self._ask("GET", "/health")[0] == 200:
                    return True
            assert process.poll() is None, f"{self.host.name} ended:\n{lines()}"
            return False

        until(serves, what=lambda: f"{lines()}\n{self.host.name}")

    def complete(
        self, prompt: Sequence[int], max_tokens: int, params: Mapping[str, Any], offset: int = 0
    ) -> HostAnswer:
        """A greedy answer; an error of any kind is returned as an answer.

        Args:
            prompt: token ids.
            max_tokens: number of tokens in the answer.
            params: the ``kv_transfer_params``.
            offset: number of tokens at the end of the prompt that already belong to the answer.
        """
        body = {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "seed_offset": offset,
            "kv_transfer_params": params,
        }
        try:
            status, content = self._ask("POST", "/v1/completions", body)
        except (OSError, http.client.HTTPException) as error:
            return HostAnswer([], error=f"{self.host.name}: {error!r}")
        if status != 200:
            return HostAnswer([], error=f"{self.host.name}: {status} {content.decode()}")
        reply = msgspec.json.decode(content)
        return HostAnswer(
            reply["choices"][0]["token_ids"], reply["id"], reply["kv_transfer_params"]
        )

    def records(self) -> Records:
        """The ended transfers and requests since the engine's last start."""
        return msgspec.json.decode(self._ask("GET", "/kvferry/records")[1], type=Records)

    def used_blocks(self) -> int:
        """Number of used KV blocks."""
        text = self._ask("GET", "/metrics")[1].decode()
        (used,) = re.findall(r'^kvferry_engine_kv_blocks\{state="used"\} (\S+)$', text, re.M)
        return int(float(used))

    def _ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        address, port = self._settings.engine.host, self._settings.engine.port
        connection = http.client.HTTPConnection(address, port)
        connection.sock = self._client.connect(address, port, self._timeout_s)
        # A dead host sends nothing, so the clients must detect the death by keepalives.
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        try:
            content = None if body is None else msgspec.json.encode(body)
            connection.request(method, path, content, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


@dataclass
class HostPair:
    """A prefill engine and a decode engine, each on a host."""

    network: Network
    prefill: HostEngine
    decode: HostEngine
    max_tokens: int
    """Number of tokens in every answer, including the first token."""
    timeout_s: float = WAIT_S
    """Seconds within which every block must become free."""
    is_settled: bool = False
    """Whether both engines run and hold no block; stays ``False`` after a failed test."""

    def start(self) -> None:
        """Starts both engines (again, if need be), and waits until they serve."""
        for engine in (self.prefill, self.decode):
            engine.host.kill()
            engine.start()
        for engine in (self.prefill, self.decode):
            engine.wait_until_ready()

    def mend(self) -> None:
        """Repairs the link between the two engines, and resumes paused hosts."""
        self.network.restore(self.prefill.host, self.decode.host)
        for engine in (self.prefill, self.decode):
            if engine.host.is_up:
                engine.host.resume()

    def lend(self, prompt: Sequence[int]) -> HostAnswer:
        """Lets the prefill engine compute a prompt and lend the KV: the first token, and the
        ticket.
        """
        return self.prefill.complete(prompt, 1, {"do_remote_decode": True})

    def load(self, prompt: Sequence[int], first: HostAnswer) -> HostAnswer:
        """Lets the decode engine compute the rest of an answer from the lent KV."""
        if first.error:
            return first
        tokens, params = first.token_ids, first.kv_transfer_params
        left = self.max_tokens - len(tokens)
        rest = self.decode.complete([*prompt, *tokens], left, params or {}, offset=1)
        return HostAnswer([*tokens, *rest.token_ids], rest.request_id, error=rest.error)

    def serve(self, prompt: Sequence[int]) -> HostAnswer:
        """A whole answer, made as a router would make it."""
        return self.load(prompt, self.lend(prompt))

    def summary(self, answer: HostAnswer) -> RequestSummary:
        """The decode engine's summary of an answered request."""
        requests = {one.request_id: one for one in self.decode.records().requests}
        return requests[answer.request_id]

    def check_digests(self) -> int:
        """Checks that the loaded KV equals the lent KV, bit for bit.

        Returns:
            Number of loads with digests in the connector's records.
        """
        records = [*self.prefill.records().transfers, *self.decode.records().transfers]
        records = [one for one in records if one.ok and one.token_digests is not None]
        loads = {one.lease_id for one in records if one.direction == "recv"}
        for lease in loads:
            of_lease = [one for one in records if one.lease_id == lease]
            sent = [one for one in of_lease if one.direction == "send"]
            received = [one for one in of_lease if one.direction == "recv"]
            if sent:
                assert digest_mismatch(sent, received) is None, f"lease {lease} arrived wrong"
        return len(loads)

    def settle(self) -> None:
        """Waits until every block of both engines is free again."""
        engines = (self.prefill, self.decode)

        def used() -> dict[str, int]:
            blocks = {engine.host.name: engine.used_blocks() for engine in engines}
            return {name: number for name, number in blocks.items() if number}

        until(
            lambda: not used(),
            self.timeout_s,
            every_s=0.1,
            what=lambda: f"every block ({used()} are in use)",
        )
        self.is_settled = True
