"""The transfer backend ``kvferry``: the classes that SGLang makes of a backend.

What SGLang asks of a backend, and what kvferry makes of it:

=====================================  ========================================================
SGLang                                 kvferry
=====================================  ========================================================
prefill, before a prompt is computed   the room is a transfer; the target asks for it once it has
                                       pages, and only then the room leaves ``Bootstrapping``
``send`` of a chunk                    the lease grows; the target reads what is written
``send`` of the last chunk             the lease is whole, with SGLang's row of metadata as a note
``poll`` says ``Success``              every rank of the target has read, and was told ``held``
``abort`` while a prompt is computed   the lease is revoked before SGLang frees the pages
decode, ``send_metadata``              the ask, and a load into the pages
``poll`` says ``Success``              the load is confirmed, and the row is written
``poll`` says ``Failed``               no read can change the pages any more
=====================================  ========================================================

A chunk is all that a prefill server sends: also the pages that the decode server has (it is never
told ``decode_prefix_len``), as a load reads only what the decode server lacks. The addresses of
control channels are registered at SGLang's bootstrap server, on a path of kvferry's own.

The first rank of an engine does this. The other ranks follow it, see
:mod:`kvferry.integrations.following`.
"""

import logging
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, Literal

from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import (
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
    KVTransferError,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_parallel

from kvferry.control.tickets import TransferId
from kvferry.errors import KVFerryError
from kvferry.integrations.rooms import PolledRoom, RoomLoad, RoomLoan, RoomRequest, RoomState
from kvferry.integrations.sglang.bootstrap import BootstrapClient, is_channel, register
from kvferry.integrations.sglang.config import transfer_config
from kvferry.integrations.sglang.opening import check_options, open_rank, rank_of
from kvferry.integrations.sglang.requests import LoadedAdapters, check_first_token, check_served
from kvferry.integrations.sglang.rows import Rows, write_first_token
from kvferry.integrations.start import one_line_at_start

logger = logging.getLogger(__name__)

QUEUE: ContextVar[Any] = ContextVar("the queue of SGLang that makes a manager")

POLLS = {
    RoomState.EXPECTED: KVPoll.Bootstrapping,
    RoomState.ASKED: KVPoll.WaitingForInput,
    RoomState.WRITING: KVPoll.WaitingForInput,
    RoomState.COMPUTED: KVPoll.Transferring,
    RoomState.LENT: KVPoll.Transferring,
    RoomState.WAITING: KVPoll.WaitingForInput,
    RoomState.READING: KVPoll.Transferring,
    RoomState.ENDING: KVPoll.Transferring,
}
"""SGLang's status of a room that has not ended."""


class Manager(CommonKVManager):
    """One rank of an engine, with all its rooms; SGLang's scheduler process makes one."""

    supports_deferred_decode_kv_release = True

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False
    ) -> None:
        """Opens the engine; see SGLang for the arguments.

        Raises:
            ConfigError, HostError: the engine cannot be served; the message names the setting.
        """
        queue = QUEUE.get()
        is_prefill = disaggregation_mode == DisaggregationMode.PREFILL
        role: Literal["kv_producer", "kv_consumer"] = "kv_producer" if is_prefill else "kv_consumer"
        dp_rank = args.system_dp_rank or get_parallel().attn_dp_rank
        config, extra = transfer_config(role, dp_rank)
        self._dp_rank = dp_rank
        self._key = extra.key()
        self._owners: dict[int, Any] = {}
        """Bootstrap room → its sender or receiver."""
        self.is_first = rank_of(get_parallel()) == 0
        """Whether this rank decides, and the others follow."""
        self._scheduler = queue.scheduler
        with one_line_at_start(config.engine_id):
            check_options(args)
            self.buffers = queue.metadata_buffers
            self.rows = Rows(args.aux_data_ptrs, args.aux_item_lens)
            kinds = [getattr(each, "value", str(each)) for each in args.state_types]
            self.names, self.groups, self.rooms = open_rank(queue, kinds, dp_rank, config, extra)
        runner = queue.scheduler.tp_worker.model_runner
        self._adapters = LoadedAdapters(runner, extra.weights_check)
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        if not is_prefill:
            self.bootstrap = BootstrapClient(self.prefill_info_table)
            # Pages are kept until no read can change them, whatever the time: a source that is
            # stopped may send late.
            queue.transfer_queue.enable_deferred_kv_release = True
            queue.transfer_queue.deferred_kv_release_timeout = math.inf
        logger.info(
            "engine %s: control channel at %s; `kvferry status %s` shows its leases",
            self.names.engine_id,
            self.names.address,
            self.names.address,
        )

    def close(self) -> None:
        """Ends threads, connections and sockets of kvferry. Idempotent."""
        if self.disaggregation_mode == DisaggregationMode.DECODE:
            self.bootstrap.close()
        self.rooms.close()

    # ---- bootstrap servers --------------------------------------------------------------------

    def register_to_bootstrap(self) -> None:
        """Registers this prefill engine at SGLang's bootstrap server, and its control channel."""
        super().register_to_bootstrap()
        if self.is_first:
            register(self.bootstrap_host, self.bootstrap_port, self._dp_rank, self.names.address)

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether a prefill server is known; see :meth:`BootstrapClient.knows`."""
        return self.bootstrap.knows(bootstrap_addr)

    # ---- rooms --------------------------------------------------------------------------------

    def claim(self, number: int, owner: Any) -> bool:
        """Whether a bootstrap room is free; from now on ``owner`` has it."""
        return self._owners.setdefault(number, owner) is owner

    def release(self, number: int) -> None:
        """Frees a bootstrap room; another request may have it from now on."""
        self._owners.pop(number, None)

    def request(self, theirs: Any, number: int, address: str, *, loads: bool) -> RoomRequest:
        """A request of SGLang in the form of kvferry.

        Args:
            theirs: SGLang's request.
            number: its bootstrap room.
            address: address of the source's control channel.
            loads: whether the prompt is loaded here.

        Raises:
            ConfigError: the request has inputs that two servers cannot compare.
        """
        check_served(theirs)
        adapter = getattr(theirs, "lora_id", None)
        # A request that was retracted has output already, which prefill computes again.
        tokens = [*theirs.origin_input_ids, *theirs.output_ids]
        return RoomRequest(
            request_id=f"{theirs.rid}-{number}",
            prompt_token_ids=tokens,
            kv_transfer_params={
                "do_remote_prefill": loads,
                "do_remote_decode": not loads,
                "transfer": TransferId.of_room(address, number, self._key).text,
            },
            weights=self.names.weights,
            adapter="" if adapter is None else self._adapters.key(adapter),
            tables=tuple([] for _ in self.groups),
        )

    def publish(self, number: int, room: PolledRoom) -> None:
        """Tells SGLang's part of the manager how a room stands."""
        if not room.is_over:
            self.update_status(number, POLLS[room.state])
        elif room.state is RoomState.DONE:
            self.update_status(number, KVPoll.Success)
        else:
            self.fail(number, room.error)

    def fail(self, number: int, reason: object) -> None:
        """Fails a room; SGLang gives the reason, if any, to the client. A rank that follows has
        none of its own.
        """
        if reason:
            self.record_failure(number, str(reason))
        self.update_status(number, KVPoll.Failed)

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        num_kv_tokens: int | None = None,
        wait_event: object = None,
        **_: object,
    ) -> None:
        """Lends a computed chunk of a prompt; called by :meth:`CommonKVSender.send`."""
        loan = self._owners[bootstrap_room].loan
        if loan is None or loan.is_over:
            return
        request: RoomRequest = loan.request
        request.tables[0].extend(int(page) for page in kv_indices)
        if is_last_chunk:
            assert aux_index is not None  # SGLang gives the row with the last chunk
            length = len(request.prompt_token_ids)
            request.tables = (
                request.tables[0],
                *(
                    group.table((state_indices or ())[group.state], length)
                    for group in self.groups[1:]
                    if group.state is not None
                ),
            )
            self.rooms.lend_whole(loan, self.rows.read(aux_index))
        elif wait_event is None:  # otherwise the next chunk tells of this one too
            written = len(request.tables[0]) * self.groups[0].geometry.block_size
            with self._computing():
                self.rooms.wrote(loan, written)
        self.publish(bootstrap_room, loan)

    def _computing(self) -> AbstractContextManager[object]:
        """Makes the stream current on which SGLang has begun to compute a chunk. With pipeline
        stages this is a stream of its own, and SGLang tells of a chunk before it is computed.
        """
        if self.pp_size == 1:
            return nullcontext()
        context: AbstractContextManager[object] = self._scheduler.forward_stream_ctx
        return context

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether no read of this engine can change the pages of a room any more."""
        self.rooms.step()
        load = getattr(self._owners.get(bootstrap_room), "load", None)
        return load is None or load.is_over


class _Claim:
    """The claim of a sender or receiver to its bootstrap room."""

    bootstrap_room: int
    _owns: bool
    """Whether no other request had the room."""

    def failure_exception(self) -> None:
        """Raises the error of a failed room.

        Raises:
            KVTransferError: always.
        """
        if not self._owns:
            text = "is in use by another request; draw a new bootstrap_room per request"
            raise KVTransferError(self.bootstrap_room, f"room {self.bootstrap_room} {text}")
        super().failure_exception()  # type: ignore[misc]


class Sender(_Claim, CommonKVSender):
    """The room of a prompt on the prefill side."""

    def __init__(
        self,
        mgr: Manager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        """See SGLang for the arguments; :meth:`attach` gives the request."""
        self.loan: RoomLoan | None = None
        self._owns = mgr.claim(bootstrap_room, self)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        if not self._owns:
            self.conclude_state = KVPoll.Failed

    def attach(self, theirs: Any) -> None:
        """Takes the request of the room; from now on a decode server may ask for its prompt."""
        if not self._owns:
            return
        manager: Manager = self.kv_mgr
        try:
            address = manager.names.address
            request = manager.request(theirs, self.bootstrap_room, address, loads=False)
            self.loan = manager.rooms.lend(request)
        except KVFerryError as error:
            manager.fail(self.bootstrap_room, error)

    def poll(self) -> Any:
        """The status of the room; never waits."""
        loan, manager = self.loan, self.kv_mgr
        if self.conclude_state is None and loan is not None:
            manager.rooms.poll(loan)
            if not (manager.is_first or loan.is_over):
                return KVPoll.Success  # SGLang takes the least of all ranks' answers
            manager.rooms.look(loan)
            manager.publish(self.bootstrap_room, loan)
        status = super().poll()
        if status == KVPoll.Failed and loan is not None:
            manager.rooms.give_up_loan(loan, "the room has failed")
        return status

    def poll_pp_consensus(self) -> Any:
        """The status of a room for all pipeline stages; SGLang asks the first stage alone, as long
        as the prompt is not computed.
        """
        return self.poll()

    def abort(self) -> None:
        """Ends the room of an aborted request; see :meth:`Rooms.give_up_loan`."""
        if not self._owns or self.conclude_state is not None:
            return
        if self.loan is not None:
            self.kv_mgr.rooms.give_up_loan(self.loan, "Aborted by AbortReq.")
        if self.loan is None or self.loan.is_over:
            super().abort()

    def clear(self) -> None:
        """Forgets the room."""
        if not self._owns:
            return
        if self.loan is not None:
            self.kv_mgr.rooms.forget(self.loan)
        self.kv_mgr.release(self.bootstrap_room)
        super().clear()

    def failure_exception(self) -> None:
        """Raises the error of a failed room; SGLang frees its pages next.

        Raises:
            KVTransferError: always.
            SystemExit: see :meth:`FollowingRooms.fail_loan`.
        """
        if self.loan is not None:
            self.kv_mgr.rooms.fail_loan(self.loan, "the room has failed")
        super().failure_exception()


class Receiver(_Claim, CommonKVReceiver):
    """The room of a prompt on the decode side."""

    def __init__(
        self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int | None = None
    ) -> None:
        """See SGLang for the arguments; :meth:`attach` gives the request."""
        assert bootstrap_room is not None  # SGLang's decode server gives each request a room
        self.load: RoomLoad | None = None
        self._theirs: Any = None
        self._channel = ""
        self._row = -1
        self.bootstrap_infos: list[str] = []
        self._owns = mgr.claim(bootstrap_room, self)
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        if not self._owns:
            self.conclude_state = KVPoll.Failed

    def attach(self, theirs: Any) -> None:
        """Takes the request of the room."""
        self._theirs = theirs

    def init(self, prefill_dp_rank: int) -> None:
        """Finds the control channel of the prefill engine."""
        if self.conclude_state is not None:
            return
        try:
            self._channel = self.kv_mgr.bootstrap.channel_of(self.bootstrap_addr, prefill_dp_rank)
            if is_channel(self.bootstrap_addr):
                check_first_token(self._theirs)
        except KVFerryError as error:
            self._fail(error)
            return
        self.bootstrap_infos = [self._channel]
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.WaitingForInput)

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:
        """Begins to load the prompt into its pages. See SGLang for the arguments."""
        if destination != KVTransferDestination.DEVICE or device_kv_indices is not None:
            raise NotImplementedError("kvferry loads into the pages of the device only")
        assert aux_index is not None  # SGLang has taken a row for the request
        manager: Manager = self.kv_mgr
        # Of a receiver SGLang asks only whether the time is set.
        self.init_time, self._row = time.monotonic(), aux_index
        first, number = decode_prefix_len or 0, self.bootstrap_room
        try:
            request = manager.request(self._theirs, number, self._channel, loads=True)
            length = len(request.prompt_token_ids)
            pages = [
                kv_indices if group.state is None else (state_indices or ())[group.state]
                for group in manager.groups
            ]
            request.tables = tuple(
                group.table(each, length, first)
                for group, each in zip(manager.groups, pages, strict=True)
            )
            if any(group.geometry.is_recurrent for group in manager.groups):
                # The state of the whole prompt always moves, with its last token.
                first = min(first, length - 1)
            self.load = manager.rooms.load(request, first)
        except KVFerryError as error:
            self._fail(error)

    def _poll(self) -> Any:
        load = self.load
        if self.conclude_state is None and load is not None:
            self.kv_mgr.rooms.poll(load)
            if load.state is RoomState.DONE:
                self._write_row(load)
            self.kv_mgr.publish(self.bootstrap_room, load)
            if load.state is RoomState.FAILED and load.request.finish_reason != "abort":
                self.kv_mgr.bootstrap.forget(self.bootstrap_addr)
        return super()._poll()

    def _write_row(self, load: RoomLoad) -> None:
        """Writes the row of metadata that came with a confirmed load."""
        manager: Manager = self.kv_mgr
        try:
            if is_channel(self.bootstrap_addr):
                write_first_token(manager.buffers, self._row, load.note, self.bootstrap_room)
            else:
                manager.rows.write(self._row, manager.rows.check(load.note))
        except KVFerryError as error:
            load.state, load.error = RoomState.FAILED, f"{type(error).__name__}: {error}"

    def _check_waiting_timeout(self) -> None:
        """Gives up a load after SGLang's time for the wait before the first read."""
        if self.load is None or self.init_time is None:
            return
        waited, limit = time.monotonic() - self.init_time, self.kv_mgr.waiting_timeout
        if waited >= limit:
            self.kv_mgr.rooms.give_up_load(
                self.load,
                f"the prefill server has lent nothing for {waited:.0f} s "
                f"(SGLANG_DISAGGREGATION_WAITING_TIMEOUT: {limit})",
            )

    def _fail(self, error: KVFerryError) -> None:
        self.kv_mgr.fail(self.bootstrap_room, f"{type(error).__name__}: {error}")

    def abort(self) -> None:
        """Gives up the load of an aborted request; the room fails once its reads have ended."""
        if not self._owns or self.conclude_state is not None:
            return
        if self.load is None:
            self.kv_mgr.fail(self.bootstrap_room, "Aborted by AbortReq.")
            self.conclude_state = KVPoll.Failed
        else:
            self.kv_mgr.rooms.give_up_load(self.load, "Aborted by AbortReq.")

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Gives up the load of a request that has failed for a cause of SGLang's."""
        if self.load is not None:
            self.abort_notified = True
            self.kv_mgr.rooms.give_up_load(self.load, "the request has failed")

    def _clear(self) -> None:
        if not self._owns:
            return
        if self.load is not None:
            self.kv_mgr.rooms.forget(self.load)
        if self.load is None or self.load.is_over:
            self.kv_mgr.release(self.bootstrap_room)
        super()._clear()
