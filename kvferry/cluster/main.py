"""Entry point of what the launcher starts: ``python -m kvferry.cluster.main WHAT FD NAME``.

``WHAT`` is ``engine``, ``router`` or ``convert``; ``FD`` is the pipe for events. ``NAME`` is
read by people alone, in ``ps`` and in the kernel's log.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

from kvferry.cluster.child import Bound, Failed, Ready, Reporter, Terminated, begin, listen
from kvferry.cluster.settings import ConvertSettings, EngineSettings, RouterSettings
from kvferry.errors import KVFerryError

if TYPE_CHECKING:
    import uvicorn

SHUTDOWN_GRACE_S = 3
"""Seconds that open requests have at the end."""

logger = logging.getLogger("kvferry.cluster")


def main() -> int:
    """Runs one process; returns its exit code."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # It would log every health check.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    what, report = sys.argv[1], Reporter(int(sys.argv[2]))
    run = {"engine": _engine, "router": _router, "convert": _convert}[what]
    try:
        run(report)
    except KVFerryError as error:
        logger.error("%s: %s", type(error).__name__, error)
        report.send(Failed(name=type(error).__name__, message=str(error)))
        return 1
    except Terminated:
        logger.info("terminated")
    except Exception as error:
        logger.exception("unexpected error")
        report.send(Failed(name=type(error).__name__, message=f"{type(error).__name__}: {error}"))
        return 1
    return 0


def _convert(report: Reporter) -> None:
    from kvferry.cluster.model_shape import convert

    settings = begin(ConvertSettings)
    report.send(Ready(folder=str(convert(settings.model, report.loading))))


def _router(report: Reporter) -> None:
    settings = begin(RouterSettings)
    with contextlib.closing(listen(settings.host, settings.port, "router")) as listener:
        report.send(Bound(port=listener.getsockname()[1]))
        from kvferry.cluster.router import Router
        from kvferry.cluster.text import TextCodec

        router = Router(settings, TextCodec.open(settings.model_folder))
        report.send(Ready())
        asyncio.run(_serve(router.app(), listener))


def _engine(report: Reporter) -> None:
    settings = begin(EngineSettings)
    who = f"engine {settings.engine.name!r}"
    with contextlib.closing(listen(settings.host, settings.engine.port, who)) as listener:
        report.send(Bound(port=listener.getsockname()[1]))
        from kvferry.cluster.engine_process import run_engine

        run_engine(settings, listener, report, _serve)


async def _serve(app: Any, listener: socket.socket, until: "asyncio.Event | None" = None) -> None:
    """Serves ``app`` until SIGTERM, or until the event is set."""
    import uvicorn

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
    )
    server = uvicorn.Server(config)
    # uvicorn would take the signals for itself and raise them again when it has ended.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _stop, server)
    watcher = asyncio.create_task(_stop_when(server, until)) if until is not None else None
    await server.serve(sockets=[listener])
    if watcher is not None:
        watcher.cancel()


def _stop(server: "uvicorn.Server") -> None:
    server.should_exit = True


async def _stop_when(server: "uvicorn.Server", event: asyncio.Event) -> None:
    await event.wait()
    _stop(server)


if __name__ == "__main__":
    sys.exit(main())
