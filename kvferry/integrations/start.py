"""The start of a serving engine with kvferry."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.errors import KVFerryError

logger = logging.getLogger(__name__)


@contextmanager
def one_line_at_start(engine_id: str) -> Iterator[None]:
    """Logs in one line why an engine does not start; serving engines show tracebacks only."""
    try:
        yield
    except KVFerryError as error:
        logger.error("engine %s does not start: %s: %s", engine_id, type(error).__name__, error)
        raise
