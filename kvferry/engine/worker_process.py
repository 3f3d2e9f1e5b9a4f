"""The process of a rank: ``python -m kvferry.engine.worker_process FD ENGINE RANK``.

``ENGINE`` and ``RANK`` are only for readers of ``ps``; the process gets its settings over the
socket. ``FD`` is the process's end of a socket pair. The process ends when the other end closes.
The kernel closes that end even if the parent dies abruptly. (A death signal from ``prctl`` would
also come at the end of the *thread* that started the process, while the parent still lives.)

A rank on another host than its engine is a child of a launcher, which calls
:func:`serve_elsewhere`.
"""

import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from kvferry.engine import remote
from kvferry.engine.communicator import GlooCommunicator, LocalGroup
from kvferry.engine.messages import (
    Answer,
    Command,
    Failed,
    LoadWeights,
    SchedulerOutput,
    Start,
)
from kvferry.engine.worker import Worker
from kvferry.errors import HostError, KVFerryError, WorkerDiedError

logger = logging.getLogger("kvferry.engine.worker")


def main(fd: int) -> int:
    """Serves an executor until it asks for the end; returns the exit code."""
    # Ctrl-C reaches the whole process group, but only the parent decides when ranks end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _exit_with_peer(fd)
    return serve(Connection(fd), _open_worker)


def serve_elsewhere(listener: socket.socket, key: str, host: str, model_folder: str) -> int:
    """Serves the connecting executor as a rank on another host; returns the exit code.

    Args:
        listener: a listening socket on ``host``.
        key: secret that the executor must know.
        host: address of this host.
        model_folder: folder with the converted model on this host.
    """
    with remote.accept(listener, key) as connection:
        _exit_with_peer(connection.fileno())
        return serve(connection, lambda start: _open_worker(start.on(host, model_folder)))


def serve(connection: Connection, open_worker: Callable[[Start], Worker]) -> int:
    """Opens the worker of a rank, in a process or a thread, and executes steps until the end.

    Returns:
        0 if the executor asked for the end, otherwise 1.
    """
    commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
    start = commands.decode(connection.recv_bytes())
    assert isinstance(start, Start)
    torch.set_num_threads(start.spec.threads)  # by default, each rank would use all cores
    try:
        worker = open_worker(start)
    except Exception as error:  # any error goes to the executor
        return _fail(connection, error)
    try:
        _answer(connection, worker.handshake())
        while (command := commands.decode(connection.recv_bytes())) is not None:
            match command:
                case SchedulerOutput():
                    _answer(connection, worker.execute(command))
                case LoadWeights():
                    heads = worker.load_weights(Path(command.model_folder))
                    _answer(connection, msgspec.msgpack.encode(heads))
                case Start():
                    raise AssertionError("a rank starts once")
    except EOFError:
        return 1
    except Exception as error:
        return _fail(connection, error)
    finally:
        try:
            worker.close()  # ranks that wait for this rank notice the end
        except KVFerryError:
            logger.exception("closing this rank")
    return 0


def _exit_with_peer(fd: int) -> None:
    def watch() -> None:
        poll = select.poll()
        poll.register(fd, select.POLLRDHUP)  # for TCP: the other side closed its end
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def _open_worker(start: Start) -> Worker:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("kvferry").setLevel(start.log_level)
    # Otherwise Gloo would look up the name of the host, which not every machine can resolve.
    if start.host:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(start.host))
    elif sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    spec = start.spec
    if spec.parallel.world_size == 1:
        return Worker(spec, LocalGroup(spec.parallel).communicator(0))
    return Worker(
        spec,
        GlooCommunicator(
            spec.parallel, start.rank, start.meeting, start.listener, spec.step_timeout_s
        ),
    )


def interface_of(host: str) -> str:
    """Name of the network interface with a given address.

    Raises:
        HostError: no interface of this machine has the address.
    """
    import psutil  # installed by the extra `ray`

    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if host in {address.address.partition("%")[0] for address in addresses}:
            return str(name)
    raise HostError(f"{host} is no address of this machine; its interfaces are {list(interfaces)}")


def _answer(connection: Connection, answer: Answer) -> None:
    connection.send_bytes(msgspec.msgpack.encode(answer))


def _fail(connection: Connection, error: Exception) -> int:
    if isinstance(error, WorkerDiedError):
        logger.warning("this rank ends: %s", error)  # the other rank's log has the traceback
    else:
        logger.error("this rank ends", exc_info=error)
    _answer(connection, Failed(kind=type(error).__name__, text=str(error)))
    return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
