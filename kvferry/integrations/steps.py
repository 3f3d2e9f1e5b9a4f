"""Steps of a serving engine as kvferry's scheduler reads them, and failures at its start."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from kvferry.errors import KVFerryError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScheduledPrompt:
    """A part of a prompt as a :class:`kvferry.connectors.base.ScheduledRequestView`."""

    request_id: str
    first_position: int
    block_ids: tuple[list[int], ...]
    num_new_blocks: tuple[int, ...]
    resumed: bool


@dataclass(frozen=True, slots=True)
class StepView:
    """The part of a step that computes some prompts, as a
    :class:`kvferry.connectors.base.SchedulerOutputView`.

    The other requests of the step are left out.
    """

    requests: list[ScheduledPrompt]
    finished_req_ids: set[str]
    preempted_req_ids: set[str]
    num_scheduled_tokens: Mapping[str, int]


@contextmanager
def one_line_at_start(engine_id: str) -> Iterator[None]:
    """Logs in one line why an engine does not start; serving engines show tracebacks only."""
    try:
        yield
    except KVFerryError as error:
        logger.error("engine %s does not start: %s: %s", engine_id, type(error).__name__, error)
        raise
