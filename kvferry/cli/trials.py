"""Tries each installed transport on this machine, as two engines of this machine would use it.

For a cache in host memory, this process serves some memory over the transport, and a child process
reads it: ``python -m kvferry.cli.trials NAME``. So what a container forbids between two processes
shows here. For a cache on a GPU, the transport is opened only.
"""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from kvferry.config import KVTransferConfig
from kvferry.connectors.pull.memory import check_device
from kvferry.errors import ConfigError, KVFerryError, TransferError
from kvferry.layouts.arrays import ByteArray
from kvferry.layouts.tiles import TILE_DTYPE, blank_runs
from kvferry.plugins import TRANSPORTS, installed_plugins
from kvferry.transports.base import DeviceTransport, TransportOptions
from kvferry.transports.registry import (
    ALLOCATED,
    IN_HOST_MEMORY,
    ON_A_DEVICE,
    device_keys,
    open_transport,
    transport_class,
)

LIMIT_S = 120.0
"""Seconds within which a child must have read: it may have to compile the kernels first."""
_TOKENS, _TOKEN_BYTES = 256, 4096


@dataclass(frozen=True, slots=True)
class Trials:
    """Results of all transports that can serve a cache, by name, best first: the reason why a
    transport cannot be used here, or an empty text.
    """

    allocated: dict[str, str] = field(default_factory=dict)
    """Results for a cache in host memory that the transport allocates."""
    existing: dict[str, str] = field(default_factory=dict)
    """Results for a cache in host memory that an engine has allocated."""
    device: dict[str, str] = field(default_factory=dict)
    """Results for a cache on a GPU."""


def try_all(device: str | None) -> Trials:
    """Tries all transports, for caches on ``device`` (``cuda:0`` say) as well if there is one."""
    found: dict[str, str | _Child] = {}
    own_memory_only = set()
    with ExitStack() as stack:
        for name in _installed(*ALLOCATED, *IN_HOST_MEMORY):
            try:
                if issubclass(transport_class(name), DeviceTransport):
                    continue
                transport = stack.enter_context(open_transport(name))
                transport.allocate(_TOKENS * _TOKEN_BYTES)[1][:] = _pattern()
                found[name] = _Child(name, transport.endpoint())
            except (KVFerryError, ImportError) as error:
                found[name] = str(error)
                continue
            try:
                transport.register(np.zeros(_TOKEN_BYTES, dtype=np.uint8))
            except TransferError:
                own_memory_only.add(name)
        allocated = {
            name: each if isinstance(each, str) else each.result() for name, each in found.items()
        }
    return Trials(
        allocated,
        {name: each for name, each in allocated.items() if name not in own_memory_only},
        {} if device is None else _try_on_device(device),
    )


def _try_on_device(device: str) -> dict[str, str]:
    config = KVTransferConfig(kv_connector="PullConnector", kv_role="kv_both", kv_port=0)
    keys, found = device_keys(device), {}
    for name in _installed(*ON_A_DEVICE):
        options = TransportOptions(extra=keys.get(name, {}))
        try:
            with open_transport(name, options) as transport:
                try:
                    check_device(device, config, {name: transport})
                except ConfigError:  # made for host memory
                    continue
        except (KVFerryError, ImportError) as error:
            found[name] = str(error)
        else:
            found[name] = ""
    return found


def _installed(*first: str) -> Iterator[str]:
    """The given transports, and then all other installed transports."""
    yield from first
    yield from (name for name in installed_plugins(TRANSPORTS) if name not in first)


def _pattern() -> ByteArray:
    return np.arange(_TOKENS * _TOKEN_BYTES, dtype=np.int64).astype(np.uint8)


class _Child:
    """A child process that reads over a transport."""

    def __init__(self, name: str, endpoint: bytes) -> None:
        self._endpoint = endpoint
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", __name__, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def result(self) -> str:
        """Waits for the child: an empty text if all bytes came, else the reason."""
        try:
            told, log = self._process.communicate(self._endpoint, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return f"a read by another process did not end within {LIMIT_S:.0f} s"
        if self._process.returncode and not told:
            last = log.decode(errors="replace").strip().rpartition("\n")[2]
            return f"the reading process ended with exit code {self._process.returncode}: {last}"
        return told.decode(errors="replace").strip()


def read_from(name: str, endpoint: bytes) -> None:
    """Reads the memory that another process serves over a transport.

    Raises:
        KVFerryError: the bytes cannot be read, or are not the served bytes.
    """
    tiles, runs = np.zeros(1, dtype=TILE_DTYPE), blank_runs(1)
    for side in ("source", "target"):
        tiles[f"{side}_token_stride"], tiles[f"{side}_element_stride"] = _TOKEN_BYTES, 1
    tiles["heads"], tiles["elements"], tiles["itemsize"] = 1, _TOKEN_BYTES, 1
    runs["tokens"] = _TOKENS
    with open_transport(name) as transport, transport.connect(endpoint) as peer:
        memory = transport.allocate(_TOKENS * _TOKEN_BYTES)[1]
        ended = threading.Event()
        transfer = transport.read(peer, tiles, runs)
        transfer.on_end(lambda _: ended.set())
        ended.wait()  # the parent has the limit
        if transfer.error is not None:
            raise transfer.error
        if not np.array_equal(memory, _pattern()):
            raise TransferError(f"{name}: the bytes that came are not those that were served")


if __name__ == "__main__":
    try:
        read_from(sys.argv[1], sys.stdin.buffer.read())
    except KVFerryError as error:
        sys.exit(print(error))
