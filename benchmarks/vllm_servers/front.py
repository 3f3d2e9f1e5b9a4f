"""What stands in front of vLLM's servers: `kvferry router`, or a proxy of others."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.programs import Program
from benchmarks.vllm_servers.ports import free_port
from benchmarks.vllm_servers.server import Server


def router(log: Path, *arguments: str) -> contextlib.AbstractContextManager[str]:
    """The URL of `kvferry router`, which runs until the context ends."""
    port = free_port()
    command = [sys.executable, "-m", "kvferry.cli", "router", "--port", str(port), *arguments]
    return in_front(command, f"http://127.0.0.1:{port}", "/metrics", log)


@contextlib.contextmanager
def in_front(command: Sequence[str], url: str, path: str, log: Path) -> Iterator[str]:
    """The URL of a proxy, which runs until the context ends; ``path`` answers once it serves.

    Raises:
        ServerError: it ended.
    """
    with Program(command, url + path, log) as program:
        program.wait()
        yield url


def engines_file(prefill: Sequence[Server], decode: Sequence[Server]) -> str:
    """The file that `kvferry router --engines` reads, with what the servers were started with."""
    lines = []
    for role, servers in (("prefill", prefill), ("decode", decode)):
        for server in servers:
            options = server.options
            lines += [f"[[{role}]]", f'name = "{options.name}"', f'url = "{server.url}"']
            if options.transfer is not None:
                lines += [f'kv_role = "{options.transfer["kv_role"]}"']
            if options.kv_events is not None:
                lines += [f"[{role}.kv_events]"]
                for key, port in zip(
                    ("endpoint", "replay_endpoint"), options.kv_events, strict=True
                ):
                    lines += [f'{key} = "tcp://{options.address}:{port}"']
    return "\n".join(lines) + "\n"
