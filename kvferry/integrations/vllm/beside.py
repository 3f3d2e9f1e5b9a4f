"""Other connectors of the same engine, under vLLM's MultiConnector.

MultiConnector hands every call on to all of its connectors, and asks all of them what they have of
a request; the first that has anything loads it. It tells none of them of the others. Ours has to
know of them all the same:

==========================  =====================================================================
when                        what is done
==========================  =====================================================================
a load begins               a neighbour that still copies from those blocks, freed by the request
                            before, has to finish first
the weights change          neighbours forget what they keep, until no request is left with KV of
                            the older weights
a load would fill a block   refused: vLLM's prefix cache can be told to leave such a block out, a
only in part                neighbour cannot
a load fails                the ``kv_load_failure_policy`` of MultiConnector counts, not ours
==========================  =====================================================================
"""

import logging
from collections.abc import Iterable
from typing import Any

from kvferry.errors import ConfigError
from kvferry.integrations.vllm import compat

logger = logging.getLogger(__name__)


class Beside:
    """The neighbours of our connector; there may be none."""

    def __init__(self, connectors: Iterable[Any] = ()) -> None:
        """Args:
        connectors: the neighbours, as they are in the scheduler's process.

        Raises:
            ConfigError: one of them connects engines as ours does.
        """
        self._connectors = tuple(connectors)
        for each in self._connectors:
            if compat.has_handshake(each):
                raise ConfigError(
                    f"MultiConnector: {type(each).__name__} stands beside KVFerryConnector, and "
                    "both describe themselves to other engines; vLLM hands on the description of "
                    "one connector alone. Keep one of the two"
                )
        self._outdated: set[str] = set()
        """Requests with KV of weights that the engine no longer has."""
        self._steps_to_forget = 0

    def __bool__(self) -> bool:
        return bool(self._connectors)

    def will_write(self, block_ids: Iterable[int]) -> None:
        """A load into these blocks begins with this step."""
        for each in self._connectors:
            compat.finish_copies_from(each, block_ids)

    def forget(self, outdated: Iterable[str]) -> None:
        """The weights have changed; these requests have KV of the older ones."""
        self._outdated |= set(outdated)
        self._steps_to_forget = _STEPS_TO_STORE

    def request_finished(self, request_id: str) -> None:
        """A request has ended."""
        self._outdated.discard(request_id)

    def look(self) -> None:
        """A step begins, in which whatever was stored before may be looked up."""
        if not self._steps_to_forget:
            return
        self._steps_to_forget = _STEPS_TO_STORE if self._outdated else self._steps_to_forget - 1
        for each in self._connectors:
            try:
                each.reset_cache()
            except AssertionError:
                # OffloadingConnector wants a step between two resets: somebody else has just made
                # one, and nothing was stored since.
                logger.debug("%s was reset already", type(each).__name__)


_STEPS_TO_STORE = 3
"""Steps from its last one on in which a request's blocks may still be given to a store."""
