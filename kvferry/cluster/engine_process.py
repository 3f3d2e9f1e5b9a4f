"""What runs in the scheduler process of an engine, once it has its settings."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, runtime_checkable

from kvferry.cluster.child import Ready, Reporter
from kvferry.cluster.engine_server import EngineServer
from kvferry.cluster.settings import EngineSettings
from kvferry.config import EngineConfig
from kvferry.engine.builder import build_engine
from kvferry.engine.engine import Engine
from kvferry.engine.loop import EngineLoop
from kvferry.engine.weights import load_model_config
from kvferry.errors import KVFerryError

logger = logging.getLogger(__name__)

Serve = Callable[[Any, socket.socket, asyncio.Event], Awaitable[None]]
"""Serves an ASGI application on a listening socket until the event is set."""


def run_engine(
    settings: EngineSettings, listener: socket.socket, report: Reporter, serve: Serve
) -> None:
    """Runs an engine and its HTTP server until SIGTERM, or until the engine cannot go on.

    Raises:
        KVFerryError: it could not start, or could not go on.
    """
    config = settings.engine
    report.loading(f"starting {config.tp * config.pp} ranks", 0.2)
    engine = build_engine(config, settings.model_folder, dtype=settings.dtype)
    failure = asyncio.run(_run(engine, settings, listener, report, serve))
    if failure is not None:
        raise failure


@runtime_checkable
class _ListensForPeers(Protocol):
    """A connector half with a control channel."""

    @property
    def port(self) -> int:
        """TCP port of the control channel."""


def _control_address(engine: Engine, config: EngineConfig) -> str | None:
    """Where ``kvferry status`` finds the engine; ``None`` for connectors that do not listen."""
    connector = engine.connector
    if not isinstance(connector, _ListensForPeers):
        return None
    extra = config.transfer_config().kv_connector_extra_config
    return f"{extra.get('host', '127.0.0.1')}:{connector.port}"


async def _run(
    engine: Engine,
    settings: EngineSettings,
    listener: socket.socket,
    report: Reporter,
    serve: Serve,
) -> KVFerryError | None:
    """Serves; returns why the engine ended by itself, if it did."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_failure(error: KVFerryError) -> None:
        logger.error("the engine cannot go on: %s", error)
        loop.call_soon_threadsafe(ended.set)

    model = load_model_config(settings.model_folder)
    control = _control_address(engine, settings.engine)
    engine_loop = EngineLoop.open(engine, on_failure)
    try:
        server = EngineServer(
            engine_loop,
            name=settings.engine.name,
            model_name=settings.model_name,
            max_model_len=min(settings.engine.max_model_len, model.max_position_embeddings),
        )
        report.send(Ready(control=control))
        await serve(server.app(), listener, ended)
    finally:
        await asyncio.to_thread(engine_loop.close)
    return engine_loop.failure
