"""kvferry's log inside vLLM's: the same handlers, format and level."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.errors import KVFerryError

logger = logging.getLogger(__name__)

VLLM = logging.getLogger("vllm")
"""vLLM has set it up once ``vllm`` is imported."""


class VllmHandler(logging.Handler):
    """Hands records to whatever handlers vLLM's logger has by then."""

    def emit(self, record: logging.LogRecord) -> None:
        """See :class:`logging.Handler`."""
        VLLM.handle(record)


def log_with_vllm() -> None:
    """Has ``kvferry``'s loggers write what vLLM's do, and where they do.

    Not where somebody has set them up already, in the file that ``VLLM_LOGGING_CONFIG_PATH`` names
    for example.
    """
    ours = logging.getLogger("kvferry")
    if ours.handlers or ours.level != logging.NOTSET:
        return
    ours.setLevel(VLLM.getEffectiveLevel())
    ours.addHandler(VllmHandler())


@contextmanager
def one_line_at_start(engine_id: str) -> Iterator[None]:
    """Says in one line why an engine does not start; vLLM shows that within tracebacks only."""
    try:
        yield
    except KVFerryError as error:
        logger.error("engine %s does not start: %s: %s", engine_id, type(error).__name__, error)
        raise
