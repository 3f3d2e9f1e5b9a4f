"""Engines of the reference cluster on hosts, and a test in the place of their router.

    client ──HTTP──> prefill host: an engine ──┐
       └─────HTTP──> decode host:  an engine <─┘ the connector under test

Faults are put on the link between the two engines; the client's own links stay well. Needs the
extras ``engine`` and ``serve``.
"""

import http.client
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import msgspec

from kvferry.cluster.messages import EngineSettings
from kvferry.cluster.metrics import Records, RequestSummary
from kvferry.config import EngineConfig
from kvferry.connectors.records import digest_mismatch
from kvferry.testing.hosts import Host, HostProcess, Network

DTYPE = "float64"
"""In which sums in another order choose no other token."""
HTTP_PORT = 8000
"""Of every engine, on the address of its host."""
START_TIMEOUT_S = 150.0
"""Seconds for an engine to serve."""
LOG_LINES = 20
"""Lines of a log that an engine's death quotes."""


@dataclass(frozen=True)
class HostAnswer:
    """What an engine, or a pair of them, said to a prompt."""

    token_ids: list[int]
    request_id: str = ""
    kv_transfer_params: dict[str, Any] | None = None
    error: str = ""
    """Why there are no tokens; empty for an answer with status 200."""


class HostEngine:
    """One engine that runs on a host, or can be started there again."""

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
        timeout_s: float = 60.0,
    ) -> None:
        """An engine that does not run yet.

        Args:
            host: where it is to run.
            client: the host that its requests come from.
            config: the engine; its ``port`` is :data:`HTTP_PORT`, its ``host`` what comes next.
            address: of the host, where it serves HTTP; the IPv4 address, unless given.
            model: folder of its model.
            log: file for what it writes; goes on when it is started again.
            dtype: of weights, activations and KV cache.
            timeout_s: seconds in which each part of an answer must come.
        """
        self.host = host
        """Where it runs."""
        self.log = log
        """What it writes."""
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
        """Starts it, and its host if that is down; :meth:`wait_until_ready` waits for it."""
        self.host.start()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            self._process = self.host.run(
                # What it tells its launcher goes to descriptor 1, into the log.
                [sys.executable, "-m", "kvferry.cluster.main", "engine", "1", self.host.name],
                stdin=PIPE,  # it ends when this ends
                stdout=log,
                stderr=STDOUT,
                env=environment,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._settings) + b"\n")
        self._process.stdin.flush()

    def wait_until_ready(self) -> None:
        """Waits until it serves.

        Raises:
            AssertionError: it ended, or does not serve in time; quotes its log.
        """
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                if self._ask("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            lines = "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            assert self._process.poll() is None, f"{self.host.name} ended:\n{lines}"
            assert time.monotonic() < deadline, f"{self.host.name} does not serve:\n{lines}"
            time.sleep(0.1)

    def complete(
        self, prompt: Sequence[int], max_tokens: int, params: Mapping[str, Any], offset: int = 0
    ) -> HostAnswer:
        """A greedy answer; an error of any kind is one too.

        Args:
            prompt: token ids.
            max_tokens: how many tokens it gives.
            params: the ``kv_transfer_params``.
            offset: tokens of the answer that end the prompt already.
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
        """The transfers and requests of this start, the ended ones."""
        return msgspec.json.decode(self._ask("GET", "/kvferry/records")[1], type=Records)

    def used_blocks(self) -> int:
        """KV blocks that are not free."""
        text = self._ask("GET", "/metrics")[1].decode()
        (used,) = re.findall(r'^kvferry_engine_kv_blocks\{state="used"\} (\S+)$', text, re.M)
        return int(float(used))

    def _ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        address, port = self._settings.engine.host, self._settings.engine.port
        connection = http.client.HTTPConnection(address, port)
        connection.sock = self._client.connect(address, port, self._timeout_s)
        # A host that has died says nothing: this is how its clients get to know.
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
    """A prefill and a decode engine on hosts of their own."""

    network: Network
    prefill: HostEngine
    decode: HostEngine
    max_tokens: int
    """Of every answer, the first token included."""
    timeout_s: float = 60.0
    """Seconds in which every block must become free."""
    is_settled: bool = False
    """Whether both run and are known to hold no block; a test that fails leaves it ``False``."""

    def start(self) -> None:
        """Starts both (again, if need be), and waits until they serve."""
        for engine in (self.prefill, self.decode):
            engine.host.kill()
            engine.start()
        for engine in (self.prefill, self.decode):
            engine.wait_until_ready()

    def mend(self) -> None:
        """The link between the two is well, and nobody pauses."""
        self.network.restore(self.prefill.host, self.decode.host)
        for engine in (self.prefill, self.decode):
            if engine.host.is_up:
                engine.host.resume()

    def lend(self, prompt: Sequence[int]) -> HostAnswer:
        """Has a prompt computed, and its KV lent: the first token, and where the KV is."""
        return self.prefill.complete(prompt, 1, {"do_remote_decode": True})

    def load(self, prompt: Sequence[int], first: HostAnswer) -> HostAnswer:
        """Has the rest of an answer decoded from KV that was lent."""
        if first.error:
            return first
        tokens, params = first.token_ids, first.kv_transfer_params
        left = self.max_tokens - len(tokens)
        rest = self.decode.complete([*prompt, *tokens], left, params or {}, offset=1)
        return HostAnswer([*tokens, *rest.token_ids], rest.request_id, error=rest.error)

    def serve(self, prompt: Sequence[int]) -> HostAnswer:
        """A whole answer, as a router has it made."""
        return self.load(prompt, self.lend(prompt))

    def summary(self, answer: HostAnswer) -> RequestSummary:
        """What the decode engine tells of a request that it has answered."""
        requests = {one.request_id: one for one in self.decode.records().requests}
        return requests[answer.request_id]

    def check_digests(self) -> int:
        """Asserts that what was loaded is what was lent, bit for bit.

        Returns:
            How many loads there were of which the connector has records with digests.
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
        deadline = time.monotonic() + self.timeout_s
        while used := {
            engine.host.name: blocks
            for engine in (self.prefill, self.decode)
            if (blocks := engine.used_blocks())
        }:
            assert time.monotonic() < deadline, f"KV blocks that never came back: {used}"
            time.sleep(0.1)
        self.is_settled = True
