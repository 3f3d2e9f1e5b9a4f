"""Other connectors of the same engine, under vLLM's MultiConnector.

MultiConnector passes every call on to all of its connectors. It asks every connector how much of a
request the connector has; the first connector with any tokens loads the request. MultiConnector
tells no connector about the others. kvferry's connector must know its neighbours all the same:

==========================  =====================================================================
when                        action
==========================  =====================================================================
a load begins               a neighbour that still copies from these blocks for the request before
                            must finish first
the weights change          neighbours forget their contents, until no request is left with KV of
                            the older weights
a load would fill a block   refused: vLLM's prefix cache can be told to leave such a block out, a
only in part                neighbour cannot
a load fails                the ``kv_load_failure_policy`` of MultiConnector counts, not kvferry's
==========================  =====================================================================
"""

import logging
from collections.abc import Iterable
from typing import Any

from kvferry.errors import ConfigError
from kvferry.integrations.vllm import compat

logger = logging.getLogger(__name__)


class Beside:
    """The neighbours of kvferry's connector; the group may be empty."""

    def __init__(self, connectors: Iterable[Any] = ()) -> None:
        """Args:
        connectors: the neighbours in the scheduler's process.

        Raises:
            ConfigError: a neighbour connects engines as kvferry does.
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
        """Requests whose blocks hold KV of weights that the engine no longer has."""
        self._steps_to_forget = 0

    def __bool__(self) -> bool:
        return bool(self._connectors)

    def will_write(self, block_ids: Iterable[int]) -> None:
        """Makes neighbours finish their copies from these blocks before a load overwrites them."""
        written = list(block_ids)
        for each in self._connectors:
            compat.finish_copies_from(each, written)

    def forget(self, outdated: Iterable[str]) -> None:
        """Notes a change of the weights; the given requests have KV of the older weights."""
        self._outdated |= set(outdated)
        self._steps_to_forget = _STEPS_TO_STORE

    def look(self, kv_cache_manager: Any) -> None:
        """Resets the neighbours' caches at the start of a step, if they may hold outdated KV; takes
        the scheduler's cache manager.
        """
        if not self._steps_to_forget:
            return
        self._outdated &= compat.requests_with_blocks(kv_cache_manager)
        self._steps_to_forget = _STEPS_TO_STORE if self._outdated else self._steps_to_forget - 1
        for each in self._connectors:
            try:
                each.reset_cache()
            except AssertionError:
                # OffloadingConnector wants a step between two resets: another caller has just reset
                # it, and nothing was stored since.
                logger.debug("%s was reset already", type(each).__name__)


_STEPS_TO_STORE = 3
"""Number of steps after a request has lost its blocks in which they may still reach a store."""
