"""The HTTP server of every process of a cluster that has one."""

import asyncio
import contextlib
import signal
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import uvicorn

SHUTDOWN_GRACE_S = 3
"""Seconds that open requests have at the end."""


async def serve(app: Any, listener: socket.socket, until: "asyncio.Event | None" = None) -> None:
    """Serves the ASGI application ``app`` until SIGTERM, or until the event is set."""
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
