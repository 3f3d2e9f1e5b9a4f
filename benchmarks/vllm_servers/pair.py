"""A prefill server and a decode server, and what vLLM's example proxy does in front of them."""

import contextlib
import dataclasses
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.vllm_servers.client import Completion, complete
from benchmarks.vllm_servers.connectors import Connector
from benchmarks.vllm_servers.models import Model
from benchmarks.vllm_servers.server import Server, ServerOptions

REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a proxy tells the prefill server."""
EXTERNAL_TOKENS = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'
CACHE_USED = "vllm:kv_cache_usage_perc"
"""Fraction of a server's blocks that requests or leases hold."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Of one server."""

    block_size: int = 128
    tp: int = 1
    pp: int = 1
    dp: int = 1
    conv: str = "SD"
    """Layout of the states of convolutions, in models with recurrent layers."""
    arguments: tuple[str, ...] = ()
    """More of its command line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """Two servers that are up."""

    prefill: Server
    decode: Server

    def ask(self, prompt: Sequence[int], max_tokens: int = 16, **options: Any) -> Completion:
        """One request through both, the decode server choosing all tokens.

        Raises:
            RefusalError: one of the servers answered with an error.
            httpx.HTTPError: one of them did not answer.
        """
        request_id = uuid.uuid4().hex
        ticket = self.start(prompt, request_id=request_id, **options)
        return self.finish(prompt, ticket, max_tokens, request_id=request_id, **options)

    def start(self, prompt: Sequence[int], **options: Any) -> Mapping[str, Any]:
        """Has the prompt computed; what the prefill server says to the decode server."""
        first = complete(
            self.prefill.url,
            prompt,
            1,
            kv_transfer_params=REMOTE_DECODE,
            return_token_ids=False,
            **options,
        )
        assert first.kv_transfer_params is not None, "the prefill server returned no parameters"
        return first.kv_transfer_params

    def finish(
        self,
        prompt: Sequence[int],
        ticket: Mapping[str, Any],
        max_tokens: int = 16,
        **options: Any,
    ) -> Completion:
        """Has the tokens generated from the prefill server's blocks."""
        return complete(self.decode.url, prompt, max_tokens, kv_transfer_params=ticket, **options)

    def pause(self) -> None:
        """Stops both servers where they are."""
        for server in (self.prefill, self.decode):
            server.pause()

    def resume(self) -> None:
        """Lets them go on."""
        for server in (self.prefill, self.decode):
            server.resume()

    def external_tokens(self) -> float:
        """Prompt tokens whose KV the decode server got from outside, as vLLM counts them."""
        return self.decode.metrics().get(EXTERNAL_TOKENS, 0.0)

    def idle(self, within_s: float = 30.0) -> bool:
        """Whether both servers' blocks are all free, now or soon."""
        deadline = time.monotonic() + within_s
        while any(server.metrics()[CACHE_USED] for server in (self.prefill, self.decode)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True


def pair_options(
    model: Model, prefill: Shape, decode: Shape, connector: Connector, **options: Any
) -> tuple[ServerOptions, ServerOptions]:
    """How the servers of a pair are started."""

    def one(name: str, shape: Shape, transfer: Mapping[str, Any]) -> ServerOptions:
        return ServerOptions(
            name=name,
            model=model,
            block_size=shape.block_size,
            tp=shape.tp,
            pp=shape.pp,
            dp=shape.dp,
            transfer=transfer,
            environment={"VLLM_SSM_CONV_STATE_LAYOUT": shape.conv, **connector.environment()},
            arguments=shape.arguments,
            **options,
        )

    return (
        one("p0", prefill, connector.config("kv_producer", "p0")),
        one("d0", decode, connector.config("kv_consumer", "d0")),
    )


@contextlib.contextmanager
def running(options: Sequence[ServerOptions], logs: Path) -> Iterator[list[Server]]:
    """Servers that are up, started side by side."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server(each, logs)) for each in options]
        for server in servers:
            server.wait()
        yield servers
