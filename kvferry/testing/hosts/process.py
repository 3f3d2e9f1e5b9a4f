"""A process in a host, as seen by the test that started the process."""

import os
import select
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, TypeAlias

File: TypeAlias = int | IO[Any] | None
"""A file argument of :class:`subprocess.Popen`: a descriptor, a file, ``PIPE``, ``DEVNULL``,
``STDOUT`` (for stderr), or ``None`` for the file of this process."""


class HostProcess:
    """A process in a host; the part of :class:`subprocess.Popen` that tests use."""

    def __init__(
        self, argv: Sequence[str], pidfd: int, ask_exit_code: Callable[[], int | None]
    ) -> None:
        """Use :meth:`Host.run`."""
        self.args = list(argv)
        self.returncode: int | None = None
        """Exit code, negative for a signal; ``None`` until a call has found the process ended."""
        self.stdin: IO[bytes] | None = None
        """Pipe to the process's stdin; ``None`` without ``PIPE``."""
        self.stdout: IO[bytes] | None = None
        """Pipe from the process's stdout; ``None`` without ``PIPE``."""
        self.stderr: IO[bytes] | None = None
        """Pipe from the process's stderr; ``None`` without ``PIPE``."""
        self._pidfd = pidfd
        self._ask_exit_code = ask_exit_code

    @property
    def pid(self) -> int:
        """The process id on this machine; the id inside the host differs.

        Raises:
            ProcessLookupError: the process has ended.
        """
        for line in Path(f"/proc/self/fdinfo/{self._pidfd}").read_text().splitlines():
            if line.startswith("Pid:") and (pid := int(line.split()[1])) > 0:
                return pid
        raise ProcessLookupError(f"{self.args[0]} has ended")

    def poll(self) -> int | None:
        """The exit code of the process; ``None`` while the process runs."""
        if self.returncode is None:
            self.returncode = self._ask_exit_code()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the process and returns the exit code.

        Raises:
            subprocess.TimeoutExpired: the process still runs after ``timeout`` seconds.
        """
        if self.returncode is None:
            waiting = select.poll()
            waiting.register(self._pidfd, select.POLLIN)
            if not waiting.poll(None if timeout is None else timeout * 1000):
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
        code = self.poll()
        assert code is not None  # the process has ended
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal; does nothing if the process has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        """Asks the process to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the process. Its children live on, unless they notice."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Closes the local ends of the pipes, and forgets the process."""
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        os.close(self._pidfd)


def open_end(number: int, file: File, theirs: ExitStack) -> tuple[int, IO[bytes] | None]:
    """Opens stdin, stdout or stderr: (descriptor for the process, local end of a pipe)."""
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
