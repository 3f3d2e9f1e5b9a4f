"""Entry point of the launcher's child processes: ``python -m kvferry.cluster.main WHAT FD NAME``.

``WHAT`` is ``engine``, ``rank``, ``router``, ``worker`` or ``convert``; ``FD`` is the pipe for
events. ``NAME`` is only for people who read ``ps`` or the kernel's log.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile

from kvferry.config import ModelConfig
from kvferry.errors import HostError, KVFerryError, WorkerDiedError
from kvferry.serving.messages import (
    Bound,
    ChildFailed,
    EngineSettings,
    RankSettings,
    Ready,
    RouterSettings,
)
from kvferry.serving.process import (
    SPARE_PREFIX,
    LogFormatter,
    Reporter,
    Terminated,
    begin,
    listen,
    temporary_folder,
)

logger = logging.getLogger("kvferry.cluster")


def main() -> int:
    """Runs a child process; returns the exit code."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    what, report = sys.argv[1], Reporter(int(sys.argv[2]))
    run = {
        "engine": _engine,
        "rank": _rank,
        "router": _router,
        "worker": _worker,
        "convert": _convert,
    }[what]
    try:
        run(report)
    except KVFerryError as error:
        logger.error("%s: %s", type(error).__name__, error)
        report.send(ChildFailed(name=type(error).__name__, message=str(error)))
        return 1
    except Terminated:
        logger.info("terminated")
    except Exception as error:
        logger.exception("unexpected error")
        report.send(
            ChildFailed(name=type(error).__name__, message=f"{type(error).__name__}: {error}")
        )
        return 1
    return 0


def _convert(report: Reporter) -> None:
    from kvferry.cluster.preflight import convert

    model = begin(ModelConfig)
    try:
        folder = convert(model, report.loading)
    except HostError as error:
        logger.warning("%s; for this start it is converted into a temporary folder", error)
        spare = tempfile.mkdtemp(prefix=SPARE_PREFIX, dir=temporary_folder())
        os.environ["KVFERRY_CACHE"] = spare
        try:
            folder = convert(model, report.loading)
        except BaseException:
            shutil.rmtree(spare)
            raise
    report.send(Ready(folder=str(folder)))


def _router(report: Reporter) -> None:
    settings = begin(RouterSettings)
    with contextlib.closing(listen(settings.host, settings.port, "router")) as listener:
        report.send(Bound(port=listener.getsockname()[1]))
        from kvferry.router.answer import TextCodec
        from kvferry.router.draining import Drain
        from kvferry.router.router import serve_router

        assert settings.model_folder is not None  # the launcher always sends the model's folder
        codec = TextCodec.open(settings.model_folder)
        report.send(Ready())

        async def serve() -> None:
            await serve_router(settings, codec, (), listener, Drain())

        asyncio.run(serve())


def _worker(_: Reporter) -> None:
    from kvferry.router.workers import WorkerSettings

    settings = begin(WorkerSettings)
    from kvferry.router.router import serve_as_worker

    serve_as_worker(settings)


def _engine(report: Reporter) -> None:
    settings = begin(EngineSettings)
    who = f"engine {settings.engine.name!r}"
    with contextlib.closing(listen(settings.engine.host, settings.engine.port, who)) as listener:
        report.send(Bound(port=listener.getsockname()[1]))
        from kvferry.cluster.engine_server import run_engine

        run_engine(settings, listener, report)


def _rank(report: Reporter) -> None:
    settings = begin(RankSettings)
    with contextlib.closing(listen(settings.host, 0, "rank")) as listener:
        report.send(Bound(port=listener.getsockname()[1]))
        from kvferry.engine.worker_process import serve_elsewhere

        if serve_elsewhere(listener, settings.key, settings.host, settings.model_folder):
            raise WorkerDiedError("the rank has failed; its log says why")


if __name__ == "__main__":
    sys.exit(main())
