"""The rooms of a rank that is not the first: they follow the first rank's rooms.

Of the answers of the TP ranks of a stage to a poll the serving engine takes the least, and of the
pipeline stages it waits until all have a last answer. So a rank that follows gives the greatest
answer that is true here, and the first rank's answer counts:

===================  ============================================================================
a prompt that is     ``Success``: only the first rank knows of readers. Nothing is told; a rank
lent                 that frees blocks for another cause than a poll lets the prompt go first.
a prompt that is     ``Transferring`` until the first rank has told that the load counts on every
loaded               rank, and this rank's row is written; then ``Success``. ``Failed`` once the
                     first rank has told that the load has failed, and that no rank reads on.
===================  ============================================================================

A load is begun, read on and cancelled as the first rank tells in its steps, but into this rank's
own blocks, and never before the engine has given the blocks here too. No stage ends a load in
another way than the first rank: a stage that took the prompt alone would compute alone.
"""

from kvferry.integrations.ranks import FollowingWorker, Whole, blocks_digest
from kvferry.integrations.rooms import (
    PolledRoom,
    PolledRooms,
    RoomLoad,
    RoomLoan,
    RoomRequest,
    RoomState,
)


class FollowingRooms(PolledRooms):
    """All rooms of one engine, on a rank that is not its first."""

    def __init__(self, worker: FollowingWorker, *, leads_stage: bool) -> None:
        """Takes ownership of the worker.

        Args:
            worker: the worker half of this rank.
            leads_stage: whether this rank is the first rank of a later pipeline stage, and tells
                of the written chunks of the stage.
        """
        super().__init__()
        self._worker = worker
        self._leads_stage = leads_stage
        self._loads: dict[str, RoomLoad] = {}
        self._num_loads = 0
        """Number of loads that the engine has begun."""

    def step(self) -> None:
        """Does what the first rank has told, and reports what has come of it."""
        self._polled.clear()
        tables = {name: load.tables for name, load in self._loads.items()}
        for step in self._worker.step(self._num_loads, tables):
            for name, load in self._loads.items():
                if load.is_over:
                    continue
                if name in step.notes:
                    load.note, load.state = step.notes[name], RoomState.DONE
                elif name in step.failed:
                    load.fail("")  # the first rank tells the reason

    # ---- prompts that are lent ----------------------------------------------------------------

    def lend(self, request: RoomRequest) -> RoomLoan:
        """See :meth:`Rooms.lend`."""
        return RoomLoan(request=request)

    def wrote(self, loan: RoomLoan, num_tokens: int) -> None:
        """See :meth:`Rooms.wrote`; the word of a stage's first rank counts for all its ranks."""
        loan.state, loan.num_tokens = RoomState.WRITING, num_tokens
        if self._leads_stage:
            self._worker.wrote(loan.request.request_id, num_tokens)

    def lend_whole(self, loan: RoomLoan, note: bytes) -> None:
        """See :meth:`Rooms.lend_whole`; the first rank has the note too."""
        loan.state = RoomState.LENT
        request = loan.request
        self._worker.tell(Whole(request.request_id, blocks_digest(request.tables)))

    def give_up_loan(self, loan: RoomLoan, reason: str) -> None:
        """See :meth:`Rooms.give_up_loan`. A whole prompt ends with the first rank's poll."""
        if loan.state is not RoomState.LENT:
            self.fail_loan(loan, reason)

    def fail_loan(self, loan: RoomLoan, reason: str) -> None:
        """Ends a loan whose blocks the engine is about to free, and waits until no read counts.

        Raises:
            SystemExit: see :meth:`FollowingWorker.let_go`.
        """
        if not loan.is_over:
            self._worker.let_go(loan.request.request_id)
            loan.fail(reason)

    # ---- prompts that are loaded --------------------------------------------------------------

    def load(self, request: RoomRequest, first_token: int) -> RoomLoad:
        """See :meth:`Rooms.load`; from now on the first rank may begin the load here."""
        load = RoomLoad(
            request=request,
            tables=request.tables,
            first_token=first_token,
            state=RoomState.READING,
        )
        self._num_loads += 1
        self._loads[request.request_id] = load
        self.step()
        return load

    def give_up_load(self, load: RoomLoad, reason: str) -> None:
        """See :meth:`Rooms.give_up_load`; the first rank gives the load up on all ranks."""
        load.request.finish_reason = load.request.finish_reason or "abort"

    # ---- the end ------------------------------------------------------------------------------

    def forget(self, room: PolledRoom) -> None:
        """Forgets a room that the engine polls no more. The engine keeps the blocks of a failed
        load until every rank has reported the end of its reads, and then calls this method again.
        """
        name = room.request.request_id
        self._polled.discard(name)
        if isinstance(room, RoomLoad) and not room.is_over:
            room.fail("the request has ended")
        else:
            self._loads.pop(name, None)

    def weights_changed(self) -> None:
        """See :meth:`Rooms.weights_changed`; the first rank stops all lending and loading."""

    def close(self) -> None:
        """Ends threads, connections and sockets. Idempotent."""
        self._worker.close()
