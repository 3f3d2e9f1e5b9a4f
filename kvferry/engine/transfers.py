"""KV that comes from outside or is lent to the outside, as the scheduler sees it.

Wraps the connector's scheduler half. Two kinds of blocks are its business: those of requests that
wait for their load, and those of requests that have ended but whose blocks somebody else still
reads or writes. Both leave only when the connector says so: nothing here times out.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.cache import KVCacheManager
from kvferry.connectors.base import KVConnectorOutput, SchedulerConnector, TransferRecord
from kvferry.engine.messages import SchedulerOutput
from kvferry.engine.request import EngineRequest, RemoteLoad
from kvferry.errors import PluginError

logger = logging.getLogger(__name__)

_MAX_REMEMBERED = 4096
"""Ids whose unexpected report was logged; the log is not a place for a connector to fill."""


@dataclass(frozen=True, slots=True)
class Match:
    """What can come from outside for a request."""

    tokens: int
    load_async: bool
    """Whether the request is parked until its tokens are there."""


NO_MATCH = Match(tokens=0, load_async=False)


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """How a load ended."""

    request: EngineRequest
    synchronous: bool
    external_tokens: int
    """Tokens that were to come from outside."""
    valid_tokens: int
    """Leading tokens of the request whose KV is in its blocks."""
    partial_groups: frozenset[int]
    """KV cache groups of whose blocks only a part was filled."""
    first_filled: tuple[int, ...] | None
    """For each group, the token from which on it was filled; ``None`` for what was needed."""
    cause: str
    """Why it failed; empty if it did not."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A request that has ended and whose blocks stay allocated."""

    request: EngineRequest
    num_blocks: int
    loading: bool
    """Whether its load was still under way."""


class KVTransfers:
    """Calls the connector in the order it was promised, and keeps what it must keep."""

    def __init__(self, connector: SchedulerConnector | None, manager: KVCacheManager) -> None:
        self._connector = connector
        self._manager = manager
        self._loading: dict[str, EngineRequest] = {}
        self._synchronous: dict[str, EngineRequest] = {}
        self._held: dict[str, _Held] = {}
        self._started: list[str] = []
        self._causes: dict[str, str] = {}
        self._logged: set[tuple[str, str]] = set()

    @property
    def has_connector(self) -> bool:
        """Whether there is a connector at all."""
        return self._connector is not None

    @property
    def loading(self) -> Iterable[EngineRequest]:
        """Requests parked until their load ends."""
        return self._loading.values()

    @property
    def num_loading(self) -> int:
        """How many requests are parked."""
        return len(self._loading)

    @property
    def num_held(self) -> int:
        """Ended requests whose blocks stay allocated."""
        return len(self._held)

    @property
    def num_held_blocks(self) -> int:
        """Blocks of those requests; one that two of them share counts twice."""
        return sum(held.num_blocks for held in self._held.values())

    def holds(self, request_id: str) -> bool:
        """Whether an ended request of this id still has blocks."""
        return request_id in self._held

    def has_pending_work(self) -> bool:
        """Whether the ranks must go on stepping for the connector's sake."""
        if self._connector is None:
            return False
        return bool(self._loading or self._held) or self._connector.has_pending_work()

    def arrived(self, request: EngineRequest) -> None:
        """Shows the connector a new request.

        Raises:
            KVFerryError: its ``kv_transfer_params`` cannot be used.
        """
        if self._connector is not None:
            self._connector.on_new_request(request)

    def match(self, request: EngineRequest, num_local: int) -> Match | None:
        """What can come from outside beyond ``num_local`` tokens; ``None`` means ask later.

        At least one token is left to compute, whatever the connector offers.

        Raises:
            KVFerryError: the load is impossible.
        """
        if self._connector is None or not request.may_load:
            return NO_MATCH
        tokens, load_async = self._connector.get_num_new_matched_tokens(request, num_local)
        if tokens is None:
            return None
        if tokens < 0:
            raise PluginError(
                f"{type(self._connector).__name__} offers {tokens} tokens for "
                f"{request.request_id!r}; it must offer 0 or more, or None"
            )
        tokens = min(tokens, request.num_tokens - 1 - num_local)
        return Match(tokens, load_async) if tokens else NO_MATCH

    def allocated(self, request: EngineRequest, match: Match) -> None:
        """The request's blocks are allocated, its local hit is in ``num_computed_tokens``."""
        if self._connector is None:
            return
        blocks = self._manager.get_blocks(request.request_id)
        self._connector.update_state_after_alloc(request, blocks, match.tokens)
        if match.tokens:
            request.load = RemoteLoad(request.num_computed_tokens, match.tokens)
            loads = self._loading if match.load_async else self._synchronous
            loads[request.request_id] = request
            self._started.append(request.request_id)

    def take_started(self) -> list[str]:
        """Ids of loads and loans that began since the last call: earlier reports are not theirs."""
        started, self._started = self._started, []
        return started

    def metadata(self, output: SchedulerOutput) -> bytes | None:
        """What the ranks' halves are told in this step, as MessagePack."""
        if self._connector is None:
            return None
        return msgspec.msgpack.encode(self._connector.build_connector_meta(output))

    def receive(self, output: KVConnectorOutput) -> list[EndedLoad]:
        """Takes the joined report of a step: frees what nobody reads, returns loads that ended."""
        if self._connector is None:
            return []
        self._connector.update_connector_output(output)
        self._note_failures(output.transfer_records, output.invalid_block_ids)
        ended = [
            self._outcome(request, name in output.failed_recving, synchronous=True)
            for name, request in self._synchronous.items()
        ]
        # A connector that reports a failure in one of the two sets only must not park it for ever.
        reported = output.finished_recving | output.failed_recving
        for name in sorted(reported - set(self._synchronous)):
            if name in self._loading:
                request = self._loading.pop(name)
                ended.append(self._outcome(request, name in output.failed_recving))
            elif name in self._held and self._held[name].loading:
                self._release(name)
            else:
                self._ignore("finished_recving", name)
        self._synchronous.clear()
        for name in sorted(output.finished_sending):
            if name in self._held:
                self._release(name)
            else:
                self._ignore("finished_sending", name)
        return ended

    def ended(self, request: EngineRequest) -> dict[str, Any] | None:
        """A request ended: its blocks are freed now or when the connector lets go of them.

        Returns:
            The ``kv_transfer_params`` of the response.
        """
        name = request.request_id
        loading = self._loading.pop(name, None) is not None
        self._synchronous.pop(name, None)
        self._causes.pop(name, None)
        keep, params = False, None
        block_ids = self._manager.get_block_ids(name)
        if self._connector is not None:
            keep, params = self._connector.request_finished(request, block_ids)
        # Null blocks count: a table may hold nothing else, where a window of one token is loaded.
        is_admitted = any(block_ids)
        if keep and is_admitted:
            self._held[name] = _Held(request, self._manager.num_held_blocks(name), loading)
            if not loading:
                self._started.append(name)
        elif is_admitted:
            self._manager.free(request)
        return params

    def _release(self, request_id: str) -> None:
        self._manager.free(self._held.pop(request_id).request)

    def _note_failures(self, records: list[TransferRecord], invalid_block_ids: set[int]) -> None:
        """Remembers why loads fail until they have ended on all ranks."""
        loads = self._loading | self._synchronous
        for record in records:
            if not record.ok and record.request_id in loads:
                self._causes[record.request_id] = (
                    f"rank {record.rank} could not load from engine {record.peer!r}: {record.error}"
                )
        if not invalid_block_ids:
            return
        for request in loads.values():
            assert request.load is not None
            for table in self._manager.get_block_ids(request.request_id):
                request.load.invalid_block_ids |= invalid_block_ids.intersection(table)

    def _outcome(
        self, request: EngineRequest, failed: bool, *, synchronous: bool = False
    ) -> EndedLoad:
        load = request.load
        assert load is not None
        request.load = None
        cause = self._causes.pop(request.request_id, "the connector gave no reason")
        valid = load.local_tokens + load.external_tokens
        partial: frozenset[int] = frozenset()
        first_filled = None
        if not failed:
            # Of what came before a block that failed, too, some may have been left out.
            try:
                partial, first_filled = self._filled(request)
            except PluginError as error:
                failed, cause = True, str(error)
        if failed:
            valid = load.local_tokens
        elif load.invalid_block_ids:
            valid = self._valid_tokens(request, load)
        else:
            cause = ""
        return EndedLoad(
            request, synchronous, load.external_tokens, valid, partial, first_filled, cause
        )

    def _filled(self, request: EngineRequest) -> tuple[frozenset[int], tuple[int, ...] | None]:
        """What the connector says that a load has left out, and from where on it has filled.

        Raises:
            PluginError: it speaks of other KV cache groups than there are, or of tokens below 0.
        """
        connector = self._connector
        assert connector is not None
        partial = connector.partial_groups(request)
        filled = connector.first_filled_tokens(request)
        num_groups = len(self._manager.kv_cache_config.kv_cache_groups)
        firsts = (0,) * num_groups if filled is None else filled
        if not partial <= set(range(num_groups)) or len(firsts) != num_groups or min(firsts) < 0:
            raise PluginError(
                f"{type(connector).__name__}: partial_groups is {sorted(partial)} and "
                f"first_filled_tokens {filled} for {request.request_id!r}; there are {num_groups} "
                "KV cache groups, and tokens count from 0"
            )
        return partial, filled

    def _valid_tokens(self, request: EngineRequest, load: RemoteLoad) -> int:
        """Tokens before the first block that was not filled; the local hit is always valid."""
        tables = self._manager.get_block_ids(request.request_id)
        if len(tables) != 1:  # a block of one group says nothing about the tokens of another
            return load.local_tokens
        block_size = self._manager.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        first = next(i for i, block in enumerate(tables[0]) if block in load.invalid_block_ids)
        end = load.local_tokens + load.external_tokens
        return min(end, max(load.local_tokens, first * block_size))

    def _ignore(self, kind: str, request_id: str) -> None:
        """Logs a report that means nothing to us; late and double reports are ordinary."""
        if (kind, request_id) not in self._logged and len(self._logged) < _MAX_REMEMBERED:
            self._logged.add((kind, request_id))
            logger.info("%s names %r, which awaits no such report; ignored", kind, request_id)
