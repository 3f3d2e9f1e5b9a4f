"""A process in a host, as the test that started it sees it."""

import os
import select
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, TypeAlias

File: TypeAlias = int | IO[Any] | None
"""As :class:`subprocess.Popen` takes it: a descriptor, a file, ``PIPE``, ``DEVNULL``, ``STDOUT``
(for stderr), or ``None`` for that of this process."""


class HostProcess:
    """A process in a host; the part of :class:`subprocess.Popen` that tests use."""

    def __init__(
        self, argv: Sequence[str], pidfd: int, ask_exit_code: Callable[[], int | None]
    ) -> None:
        """Use :meth:`Host.run`."""
        self.args = list(argv)
        self.returncode: int | None = None
        """How it ended, negative for a signal; ``None`` until somebody has asked."""
        self.stdin: IO[bytes] | None = None
        """Its stdin, where ``PIPE`` was asked for."""
        self.stdout: IO[bytes] | None = None
        """Its stdout, likewise."""
        self.stderr: IO[bytes] | None = None
        """Its stderr, likewise."""
        self._pidfd = pidfd
        self._ask_exit_code = ask_exit_code

    @property
    def pid(self) -> int:
        """Its process id on this machine; in its host it has another.

        Raises:
            ProcessLookupError: it has ended.
        """
        for line in Path(f"/proc/self/fdinfo/{self._pidfd}").read_text().splitlines():
            if line.startswith("Pid:") and (pid := int(line.split()[1])) > 0:
                return pid
        raise ProcessLookupError(f"{self.args[0]} has ended")

    def poll(self) -> int | None:
        """Its exit code; ``None`` while it runs."""
        if self.returncode is None:
            self.returncode = self._ask_exit_code()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end and returns its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        if self.returncode is None:
            waiting = select.poll()
            waiting.register(self._pidfd, select.POLLIN)
            if not waiting.poll(None if timeout is None else timeout * 1000):
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
        code = self.poll()
        assert code is not None  # its end has been seen
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal; does nothing if it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        """Asks it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills it. What it has started lives on, unless it notices."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Closes our ends of its pipes, and forgets it."""
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        os.close(self._pidfd)


def open_end(number: int, file: File, theirs: ExitStack) -> tuple[int, IO[bytes] | None]:
    """(descriptor for the process, our end of a pipe) for its stdin, stdout or stderr."""
    if file == subprocess.PIPE:
        read, write = os.pipe()
        their, our = (read, write) if number == 0 else (write, read)
        theirs.callback(os.close, their)
        return their, os.fdopen(our, "wb" if number == 0 else "rb")
    if file == subprocess.DEVNULL:
        null = os.open(os.devnull, os.O_RDWR)
        theirs.callback(os.close, null)
        return null, None
    if file is None or file == subprocess.STDOUT:
        return number, None
    return file if isinstance(file, int) else file.fileno(), None
