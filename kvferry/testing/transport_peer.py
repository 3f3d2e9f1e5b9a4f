"""A serving rank in another process, for the transport conformance tests.

:class:`PeerProcess` is the handle; it starts ``python -m kvferry.testing.transport_peer``. Parent
and child exchange JSON lines over the child's stdin and stdout. The child ends when its stdin
closes, so no child outlives the tests.
"""

import contextlib
import importlib
import importlib.util
import inspect
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.errors import KVFerryError, TransferError
from kvferry.layouts.arrays import ByteArray, MemorySpan
from kvferry.lifetimes import Closing
from kvferry.transports.base import DeviceTransport, Transport, TransportOptions


def pattern(nbytes: int, seed: int) -> ByteArray:
    """Bytes for both processes: ``uint8`` of ``nbytes``, random by ``seed``."""
    rng = np.random.Generator(np.random.SFC64(seed))
    words: npt.NDArray[np.uint64] = rng.integers(0, 2**64, -(-nbytes // 8), dtype=np.uint64)
    return words.view(np.uint8)[:nbytes]


Memory: TypeAlias = ByteArray | MemorySpan
"""Memory allocated by a transport, on the host or on a device."""


def allocate(transport: Transport, nbytes: int) -> tuple[int, Memory]:
    """Memory that peers may read; device memory if the transport serves device memory."""
    if isinstance(transport, DeviceTransport):
        return transport.allocate_device(nbytes)
    return transport.allocate(nbytes)


def fill(memory: Memory, values: ByteArray) -> None:
    """Overwrites the whole memory."""
    if isinstance(memory, np.ndarray):
        memory[:] = values
    elif memory.is_host:
        memory.as_array()[:] = values
    else:
        import torch

        torch.as_tensor(memory).copy_(torch.from_numpy(values))


def contents(memory: Memory) -> ByteArray:
    """A copy of the current content."""
    if isinstance(memory, np.ndarray):
        return memory.copy()
    if memory.is_host:
        return memory.as_array().copy()
    import torch

    held: ByteArray = torch.as_tensor(memory).cpu().numpy()
    return held


class _Start(msgspec.Struct):
    """The first line from the parent to the child."""

    file: str
    module: str
    qualname: str
    """Qualified name of the transport's class in the module."""
    options: TransportOptions


class _Call(msgspec.Struct):
    """A call of a method of :class:`_Child`."""

    method: str
    arguments: tuple[int, ...]


_TOLD = (KVFerryError, ValueError, OSError, ImportError)
"""Errors reported by the child to the parent; the child goes on."""


class _Answer(msgspec.Struct):
    """Result or error of a call."""

    number: int = 0
    data: bytes = b""
    error: str = ""


class PeerProcess(Closing):
    """A child process that serves memory through a transport. A context manager."""

    def __init__(self, transport: type[Transport], options: TransportOptions) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvferry.testing.transport_peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        file, path = inspect.getfile(transport), transport.__qualname__
        start = _Start(file, transport.__module__, path, options)
        try:
            self._tell(start)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def allocate(self, nbytes: int, seed: int) -> int:
        """Allocates a region in the child with ``pattern(nbytes, seed)`` as content; returns the
        id.
        """
        return self._ask("allocate", nbytes, seed).number

    def refill(self, region: int, seed: int) -> None:
        """Overwrites a region of the child with another pattern."""
        self._ask("refill", region, seed)

    def endpoint(self) -> bytes:
        """The endpoint that covers all regions allocated so far."""
        return self._ask("endpoint").data

    def suspend(self) -> None:
        """Stops the child (SIGSTOP) as if its host had frozen, and waits until the child has
        stopped.
        """
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def resume(self) -> None:
        """Lets a suspended child go on."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Ends the child at once (SIGKILL), and waits until the child has ended. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # a command that the child never read
                    pipe.close()

    def close(self) -> None:
        """Ends the child, after the child has closed its transport. Idempotent."""
        if self._process.poll() is None and self._process.stdin is not None:
            self._process.stdin.close()
            # The child may hang in its close, or be suspended.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
        self.kill()

    def _ask(self, method: str, *arguments: int) -> _Answer:
        return self._tell(_Call(method, arguments))

    def _tell(self, message: _Start | _Call) -> _Answer:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # there will be no answer either
            # Extra keys may be any mapping.
            self._process.stdin.write(msgspec.json.encode(message, enc_hook=dict) + b"\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise TransferError(f"the peer process ended with status {self._process.wait()}")
        answer = msgspec.json.decode(line, type=_Answer)
        if answer.error:
            raise TransferError(f"the peer process: {answer.error}")
        return answer


def _transport_class(start: _Start) -> type[Transport]:
    try:
        module = importlib.import_module(start.module)
    except ImportError:  # a test file that is on no path
        spec = importlib.util.spec_from_file_location(start.module, Path(start.file))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[start.module] = module
        spec.loader.exec_module(module)
    found: Any = module
    for name in start.qualname.split("."):
        found = getattr(found, name)
    transport: type[Transport] = found
    return transport


class _Child:
    """The code in the child: each public method answers a call."""

    def __init__(self, start: _Start) -> None:
        self.transport = _transport_class(start).open(start.options)
        self._regions: dict[int, Memory] = {}

    def allocate(self, nbytes: int, seed: int) -> _Answer:
        region, memory = allocate(self.transport, nbytes)
        fill(memory, pattern(nbytes, seed))
        self._regions[region] = memory
        return _Answer(number=region)

    def refill(self, region: int, seed: int) -> _Answer:
        memory = self._regions[region]
        fill(memory, pattern(memory.nbytes, seed))
        return _Answer()

    def endpoint(self) -> _Answer:
        return _Answer(data=self.transport.endpoint())


def _refusal(error: Exception) -> _Answer:
    return _Answer(error=f"{type(error).__name__}: {error}")


def main() -> None:
    """Opens the transport that the first line names, then answers calls until stdin closes."""
    # Libraries under a transport may print; their output must not end up among the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(answer: _Answer) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()

    try:
        child = _Child(msgspec.json.decode(sys.stdin.buffer.readline(), type=_Start))
    except _TOLD as error:
        say(_refusal(error))
        return
    say(_Answer())
    for line in sys.stdin.buffer:
        call = msgspec.json.decode(line, type=_Call)
        try:
            answer = getattr(child, call.method)(*call.arguments)
        except _TOLD as error:
            answer = _refusal(error)
        say(answer)
    child.transport.close()


if __name__ == "__main__":
    main()
