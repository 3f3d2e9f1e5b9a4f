"""Loads and loans of KV, for the scheduler.

Wraps the scheduler half of the connector. This module keeps two kinds of requests with blocks:
requests that wait for their load, and ended requests whose blocks another engine still reads or
ranks still write. Both kinds leave only when the connector reports their end: there are no timeouts
here.
"""

import logging
from collections import Counter
from itertools import chain
from typing import Any

import msgspec

from kvferry.cache import KVCacheManager
from kvferry.connectors.base import KVConnectorOutput, SchedulerConnector
from kvferry.engine.messages import SchedulerOutput
from kvferry.engine.request import EngineRequest, ExternalLoad
from kvferry.errors import PluginError
from kvferry.observe.records import TransferRecord

logger = logging.getLogger(__name__)

_MAX_REMEMBERED = 4096
"""Maximum number of unexpected reports that are logged, so that no connector can fill the log."""


class KVTransfers:
    """Calls the connector in the promised order, and keeps the requests whose blocks it needs."""

    def __init__(self, connector: SchedulerConnector | None, manager: KVCacheManager) -> None:
        self._connector = connector
        self._manager = manager
        self._loads: dict[str, EngineRequest] = {}
        self.held: dict[str, EngineRequest] = {}
        """Request id → request, for ended ones whose blocks stay allocated."""
        self._lent_as: dict[str, dict[str, Any]] = {}
        """Request id → ``kv_transfer_params`` of the answer, for these requests."""
        self._withdrawn: set[str] = set()
        self._started: list[str] = []
        self._logged: set[tuple[str, str]] = set()

    @property
    def has_connector(self) -> bool:
        """Whether the engine has a connector."""
        return self._connector is not None

    @property
    def loading(self) -> list[EngineRequest]:
        """Requests that wait without a seat for the end of their load."""
        return [request for request in self._loads.values() if request.load.is_async]

    @property
    def num_held_blocks(self) -> int:
        """Number of blocks of these ended requests; a block of two requests counts twice."""
        return sum(map(self._manager.num_held_blocks, self.held))

    def holds(self, request_id: str) -> bool:
        """Whether an ended request with this id still has blocks."""
        return request_id in self.held

    def has_pending_work(self) -> bool:
        """Whether the ranks must go on stepping because the connector has work."""
        if self._connector is None:
            return False
        return bool(self._loads or self.held) or self._connector.has_pending_work()

    def arrived(self, request: EngineRequest) -> None:
        """Shows the connector a new request.

        Raises:
            KVFerryError: the ``kv_transfer_params`` of the request cannot be used.
        """
        if self._connector is not None:
            self._connector.on_new_request(request)
            request.only_cached = self._connector.lends_only_cached(request)

    def match(self, request: EngineRequest, num_local: int) -> bool:
        """Sets ``request.load`` to the connector's offer of tokens beyond ``num_local`` tokens.

        At least the last token is always computed, whatever the connector offers.

        Returns:
            ``False`` if the connector wants to be asked again later.

        Raises:
            KVFerryError: the load is impossible; ``request.load`` then has no external tokens.
        """
        request.load = ExternalLoad(num_local)
        if self._connector is None or not request.may_load:
            return True
        tokens, load_async = self._connector.get_num_new_matched_tokens(request, num_local)
        if tokens is None:
            return False
        if tokens < 0:
            raise PluginError(
                f"{type(self._connector).__name__} offers {tokens} tokens for "
                f"{request.request_id!r}; it must offer 0 or more, or None"
            )
        tokens = min(tokens, request.num_tokens - 1 - num_local)
        request.load = ExternalLoad(num_local, tokens, is_async=load_async and tokens > 0)
        return True

    def allocated(self, request: EngineRequest) -> None:
        """Reports a request's allocated blocks to the connector; the load, if any, begins.

        ``num_computed_tokens`` must count the local prefix hit already.
        """
        if self._connector is None:
            return
        load = request.load
        blocks = self._manager.get_blocks(request.request_id)
        self._connector.update_state_after_alloc(request, blocks, load.external_tokens)
        if load.external_tokens:
            load.under_way = True
            self._loads[request.request_id] = request
            self._started.append(request.request_id)

    def take_started(self) -> list[str]:
        """Ids of loads and loans begun since the last call; earlier reports on them are void."""
        started, self._started = self._started, []
        return started

    def metadata(self, output: SchedulerOutput) -> bytes | None:
        """The connector's message to the halves in the ranks for this step, as MessagePack."""
        if self._connector is None:
            return None
        return msgspec.msgpack.encode(self._connector.build_connector_meta(output))

    @property
    def ending(self) -> list[str]:
        """Requests whose load ends with the step that computes them."""
        return [name for name, request in self._loads.items() if not request.load.is_async]

    def receive(self, output: KVConnectorOutput) -> list[EngineRequest]:
        """Applies the joined report of a step: frees returned blocks, and caches loaded blocks.

        Returns:
            Requests whose load has ended; ``load`` has the result.
        """
        if self._connector is None:
            return []
        self._connector.update_connector_output(output)
        self._note_failures(output.transfer_records, output.invalid_block_ids)
        in_step = self.ending
        ended = []
        for name in [*in_step, *sorted(output.finished_recving.difference(in_step))]:
            if name in self._loads:
                request = self._loads.pop(name)
                self._end_load(request, name in output.failed_recving)
                ended.append(request)
            elif name in self.held and self.held[name].load.under_way:
                self._release(name)
            else:
                self._ignore("finished_recving", name)
        for name in sorted(output.finished_sending):
            if name in self.held:
                self._release(name)
            else:
                self._ignore("finished_sending", name)
        return ended

    def ended(self, request: EngineRequest) -> dict[str, Any] | None:
        """Handles the end of a request: frees its blocks, now or when the connector returns them.

        Returns:
            The ``kv_transfer_params`` of the response.
        """
        name, load = request.request_id, request.load
        self._loads.pop(name, None)
        load.under_way = load.under_way and load.is_async
        keep, params = False, None
        block_ids = self._manager.get_block_ids(name)
        if self._connector is not None:
            keep, params = self._connector.request_finished(request, block_ids)
        # Null blocks count too: after the load of a window of one token, a table may have no
        # others.
        is_admitted = any(block_ids)
        if keep and is_admitted:
            self.held[name] = request
            self._lent_as[name] = params or {}
            if not load.under_way:
                self._started.append(name)
        elif is_admitted:
            self._manager.free(request)
        return params

    def take_back(self, request_id: str) -> None:
        """Takes back what an ended request lends; other ids are ignored."""
        if self._connector is not None and (params := self._lent_as.get(request_id)):
            self._connector.take_back(params)

    def reclaim(self, num_blocks: int) -> bool:
        """Ends loans of cached prefixes that no engine has fetched yet, oldest first, until
        ``num_blocks`` blocks will come back.

        Returns:
            Whether any blocks will come back. They come back when the ranks report the ends.
        """
        num_back = 0
        ends: Counter[int] = Counter()
        for name, request in self.held.items():
            if num_back >= num_blocks:
                break
            if request.only_cached and self._withdraw(name):
                for block in chain.from_iterable(self._manager.get_blocks(name).blocks):
                    ends[block.block_id] += 1
                    # Running requests or other loans may share the block.
                    num_back += not block.is_null and ends[block.block_id] == block.ref_cnt
        return num_back > 0

    def _withdraw(self, request_id: str) -> bool:
        """Ends a loan if no engine has fetched it; returns whether the loan has been ended."""
        assert self._connector is not None  # only a connector keeps blocks of ended requests
        if request_id not in self._withdrawn and self._connector.withdraw(request_id):
            self._withdrawn.add(request_id)
        return request_id in self._withdrawn

    def _release(self, request_id: str) -> None:
        self._withdrawn.discard(request_id)
        del self._lent_as[request_id]
        self._manager.free(self.held.pop(request_id))

    def _note_failures(self, records: list[TransferRecord], invalid_block_ids: set[int]) -> None:
        """Keeps the reasons of failures until the failed loads have ended on all ranks."""
        for record in records:
            if not record.ok and record.request_id in self._loads:
                self._loads[
                    record.request_id
                ].load.error = (
                    f"rank {record.rank} could not load from engine {record.peer!r}: {record.error}"
                )
        if not invalid_block_ids:
            return
        for request in self._loads.values():
            for table in self._manager.get_block_ids(request.request_id):
                request.load.invalid_block_ids |= invalid_block_ids.intersection(table)

    def _end_load(self, request: EngineRequest, failed: bool) -> None:
        """Notes the result of a load, and makes the filled blocks available as prefix hits."""
        load = request.load
        load.under_way = False
        load.error = load.error or "the connector gave no reason"
        load.valid_tokens = load.local_tokens + load.external_tokens
        partial: frozenset[int] = frozenset()
        first_filled = None
        if not failed:
            # Even blocks before a failed block may have left-out tokens.
            try:
                partial, first_filled = self._filled(request)
            except PluginError as error:
                failed, load.error = True, str(error)
        if failed:
            load.valid_tokens = load.local_tokens
        elif load.invalid_block_ids:
            load.valid_tokens = self._valid_tokens(request)
        else:
            load.error = ""
        self._manager.cache_blocks(request, load.valid_tokens, partial, first_filled)

    def _filled(self, request: EngineRequest) -> tuple[frozenset[int], tuple[int, ...] | None]:
        """Asks the connector for the groups with left-out tokens, and the first filled tokens.

        Raises:
            PluginError: the connector names unknown KV cache groups, or negative tokens.
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

    def _valid_tokens(self, request: EngineRequest) -> int:
        """Number of tokens before the first unfilled block; the local hit is always valid."""
        load = request.load
        tables = self._manager.get_block_ids(request.request_id)
        if len(tables) != 1:  # a block of a group implies nothing for the tokens of other groups
            return load.local_tokens
        block_size = self._manager.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        first = next(i for i, block in enumerate(tables[0]) if block in load.invalid_block_ids)
        end = load.local_tokens + load.external_tokens
        return min(end, max(load.local_tokens, first * block_size))

    def _ignore(self, kind: str, request_id: str) -> None:
        """Logs a report without a matching request; late and repeated reports are normal."""
        if (kind, request_id) not in self._logged and len(self._logged) < _MAX_REMEMBERED:
            self._logged.add((kind, request_id))
            logger.info("%s names %r, which awaits no such report; ignored", kind, request_id)
