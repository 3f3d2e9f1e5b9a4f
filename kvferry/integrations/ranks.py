"""Messages between the ranks of one engine, for serving engines with a scheduler in every rank.

Each rank is a process. All get the same requests in the same order. The first rank decides for all
of them: it has the scheduler half, and every rank has a worker half. What the other ranks must hear
or tell goes over one socket each, in a folder that only their user can enter::

    other rank                                         first rank
       RankHello ── where its memory lies ────────────>  when all have said it, peers may connect
       RankReport ─ what its loads have come to ──────>  joined with the reports of the others;
                    the first rank of a later pipeline stage reports written chunks too
       Whole ────── the blocks of a computed prompt ──>  must be those of the first rank
       LetGo ────── it frees the blocks of a prompt ──>  a thread: the lease is revoked at once
          <──────── LetGo: no read counts any more ───
          <──────── RankStep: loads to begin, notes, failed loads ──

Only :meth:`FollowingWorker.let_go` waits for an answer. The answer comes from a thread that does
nothing else, so it comes also while the first rank computes.
"""

import hashlib
import logging
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec
import zmq
from msgspec.structs import replace

from kvferry.connectors.aggregator import KVOutputAggregator
from kvferry.connectors.base import KVConnectorOutput
from kvferry.connectors.pull.metadata import NO_NEWS, LentSpec, PullMetadata, packed
from kvferry.connectors.pull.worker import PullWorker
from kvferry.errors import EngineError
from kvferry.lifetimes import Closing
from kvferry.mailbox import Mailbox
from kvferry.topology import ParallelShape
from kvferry.zeromq import Context, Socket, zmq_errors

logger = logging.getLogger(__name__)

MEET_TIMEOUT_S = 300.0
"""Seconds after the first request's arrival within which every rank must have said hello."""
LET_GO_TIMEOUT_S = 240.0
"""Seconds after which a rank that got no answer to a :class:`LetGo` ends. Serving engines end a
rank that is stuck after 300 s by default, without telling the cause."""


class RankHello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a rank: its ``handshake_metadata``."""

    handshake: bytes


class RankReport(msgspec.Struct, frozen=True, tag="report"):
    """What the loads of a rank have come to since its last report."""

    output: KVConnectorOutput
    """The report. Its ``written`` map has request ids: only the first rank knows the leases."""


class Whole(msgspec.Struct, frozen=True, tag="whole"):
    """A rank has computed a prompt."""

    request_id: str
    blocks: bytes
    """Digest of its block tables, see :func:`blocks_digest`."""


class LetGo(msgspec.Struct, frozen=True, tag="let_go"):
    """A rank is about to free the blocks of a prompt; the answer says that no read counts any
    more.
    """

    request_id: str


class RankStep(msgspec.Struct, kw_only=True, tag="step"):
    """The news of the first rank for all others."""

    num_loads: int
    """Number of loads that the first rank had begun to ask for. A rank that has begun fewer may
    have no blocks yet for a load of this step, and keeps the step for later."""
    metadata: PullMetadata = msgspec.field(default_factory=PullMetadata)
    notes: dict[str, bytes] = msgspec.field(default_factory=dict)
    """Request id → note that came with a prompt, for the loads that every rank has confirmed."""
    failed: list[str] = msgspec.field(default_factory=list)
    """Requests whose load has failed, and of which no read is under way on any rank."""


BlockTables: TypeAlias = Sequence[Sequence[int]]
"""Block tables of a request, one per KV cache group."""
ToFirst: TypeAlias = RankHello | RankReport | Whole | LetGo
"""Messages of a rank to the first rank."""

_encode = msgspec.msgpack.encode
_to_first = msgspec.msgpack.Decoder(ToFirst)
_to_others = msgspec.msgpack.Decoder(RankStep | LetGo)


class OtherRanks(Closing):
    """The first rank's end. Only the scheduler's thread uses the object, and its own thread."""

    def __init__(
        self,
        number: int,
        *,
        on_met: Callable[[Sequence[bytes]], object],
        on_let_go: Callable[[str], object],
    ) -> None:
        """Listens and returns.

        Args:
            number: number of the other ranks; nothing listens for 0.
            on_met: takes the ``handshake_metadata`` of the other ranks, by rank, once all have said
                hello. Called on a thread.
            on_let_go: makes sure that no read counts of a prompt whose blocks a rank frees. Called
                on a thread.

        Raises:
            HostError: there is no room for a socket in the folder for temporary files.
        """
        self._number = number
        self._on_met = on_met
        self._on_let_go = on_let_go
        self._num_loads = 0
        self._hellos: dict[int, bytes] = {}
        self._has_met = threading.Event()
        self._received: deque[tuple[int, RankReport | Whole | LetGo]] = deque()
        self._folder = tempfile.mkdtemp(prefix="kvferry-ranks-")
        self.address = f"ipc://{self._folder}/first"
        """Address at which the other ranks connect."""
        self._context: Context = zmq.Context()
        self._router = _socket(self._context, zmq.ROUTER)
        with zmq_errors(f"listening for other ranks at {self.address}"):
            self._router.bind(self.address)
        self._mailbox = Mailbox("ranks", poller=zmq.Poller())
        self._mailbox.watch(self._router, self._receive)
        self._mailbox.start()

    def meet(self) -> None:
        """Waits until every rank has said hello; all have by the time requests come.

        Raises:
            EngineError: a rank is silent for :data:`MEET_TIMEOUT_S`.
        """
        if not self._has_met.wait(MEET_TIMEOUT_S):
            raise EngineError(
                f"of {self._number} other ranks, only {sorted(self._hellos)} have said hello "
                f"within {MEET_TIMEOUT_S:g} s; see the logs of the others"
            )

    def begin_load(self) -> None:
        """Notes that the first rank is about to ask for a load.

        Raises:
            EngineError: see :meth:`meet`.
        """
        self.meet()
        self._num_loads += 1

    def tell(self, metadata: PullMetadata) -> None:
        """Tells all other ranks their part of a step; a step without any is left out."""
        told = replace(metadata, writes=[], released=[])
        if told != NO_NEWS:
            self._post(RankStep(num_loads=self._num_loads, metadata=told))

    def confirm(self, request_id: str, note: bytes) -> None:
        """Tells all other ranks the note of a prompt whose load every rank has confirmed."""
        self._post(RankStep(num_loads=self._num_loads, notes={request_id: note}))

    def fail(self, request_id: str) -> None:
        """Tells all other ranks that a load has failed: a later pipeline stage must not wait on."""
        self._post(RankStep(num_loads=self._num_loads, failed=[request_id]))

    def received(self) -> Iterator[tuple[int, RankReport | Whole | LetGo]]:
        """Takes what ranks have told since the last call; the rank, and its message."""
        while self._received:
            yield self._received.popleft()

    def close(self) -> None:
        """Ends the thread and the socket. Idempotent."""
        self._mailbox.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _post(self, step: RankStep) -> None:
        payload = _encode(step)
        self._mailbox.post(lambda: self._send(payload))

    def _send(self, payload: bytes) -> None:
        for rank in range(1, self._number + 1):
            self._router.send_multipart((_name(rank), payload), zmq.NOBLOCK)

    def _receive(self) -> None:
        try:
            name, payload = self._router.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        rank, message = int(name), _to_first.decode(payload)
        if isinstance(message, RankHello):
            self._note_hello(rank, message)
            return
        if isinstance(message, LetGo):
            self._on_let_go(message.request_id)
            self._router.send_multipart((name, payload), zmq.NOBLOCK)
        self._received.append((rank, message))

    def _note_hello(self, rank: int, hello: RankHello) -> None:
        self._hellos[rank] = hello.handshake
        if len(self._hellos) == self._number:
            self._on_met([handshake for _, handshake in sorted(self._hellos.items())])
            self._has_met.set()
            shutil.rmtree(self._folder, ignore_errors=True)  # a killed process leaves nothing


class RankReports:
    """The reports of all ranks of an engine, which come one by one."""

    def __init__(self, shape: ParallelShape) -> None:
        """Starts without a report."""
        self._stage_size = shape.tp
        self._progress: list[dict[str, tuple[int, int]]] = [{} for _ in range(shape.world_size)]
        """Progress of the loads in the last report of each rank."""
        self._joiner = KVOutputAggregator(shape.world_size)

    def begin(self, request_id: str) -> None:
        """Notes that a load begins; its id may have been used before."""
        self._joiner.forget(request_id)

    def join(self, rank: int, output: KVConnectorOutput) -> KVConnectorOutput:
        """The report of a rank, joined with what the others have reported before. A prompt is
        written on all ranks of a pipeline stage as far as the stage's first rank has written it;
        no other rank tells of that.
        """
        self._progress[rank] = output.transfer_progress
        reports = [KVConnectorOutput(transfer_progress=each) for each in self._progress]
        reports[rank] = output
        joined = self._joiner.join(reports)
        for written in joined.written.values():
            written.update(dict.fromkeys(range(rank, rank + self._stage_size), written[rank]))
        return joined


class FollowingWorker(Closing):
    """The worker half of a rank that is not the first. Only the scheduler's thread uses it."""

    def __init__(self, worker: PullWorker, rank: int, address: str) -> None:
        """Takes ownership of the worker, says hello and returns.

        Args:
            worker: the worker half; its caches are registered.
            rank: this rank.
            address: :attr:`OtherRanks.address` of the first rank.
        """
        self._worker = worker
        self._rank = rank
        self._steps: deque[RankStep] = deque()
        """Steps of the first rank that have not been followed."""
        self._context: Context = zmq.Context()
        self._dealer = _socket(self._context, zmq.DEALER)
        self._dealer.setsockopt(zmq.IDENTITY, _name(rank))
        with zmq_errors(f"connecting to the first rank at {address}"):
            self._dealer.connect(address)
        self.tell(RankHello(worker.handshake_metadata()))

    def tell(self, message: ToFirst) -> None:
        """Sends a message to the first rank."""
        self._dealer.send(_encode(message))

    def wrote(self, request_id: str, num_tokens: int) -> None:
        """Tells the first rank that the first ``num_tokens`` tokens of a prompt are written here.
        On a device, a later call of this method or of :meth:`step` tells so, after all work that
        the calling thread has queued.
        """
        part = LentSpec(
            request_id=request_id, lease_id=request_id, block_ids=(), num_tokens=num_tokens
        )
        self._worker.start_load_kv(PullMetadata(writes=[part]))
        self._report()

    def step(self, num_loads: int, tables: Mapping[str, BlockTables]) -> list[RankStep]:
        """Does what the first rank has told, and reports what has come of it.

        Args:
            num_loads: number of loads begun on this rank so far.
            tables: request id → this rank's block tables, for the loads that are under way.

        Returns:
            The steps of the first rank that were followed.
        """
        while self._dealer.poll(0):
            self._steps.append(self._received())
        followed: list[RankStep] = []
        while self._steps and self._steps[0].num_loads <= num_loads:
            step = self._steps.popleft()
            self._worker.start_load_kv(_here(step.metadata, tables))
            followed.append(step)
        if followed or tables or self._worker.awaits_device:
            self._report()
        return followed

    def let_go(self, request_id: str) -> None:
        """Has the first rank end the lease of a prompt, and waits until no read counts any more.

        Raises:
            SystemExit: no answer came within :data:`LET_GO_TIMEOUT_S`. The caller would survive any
                other error, and free the blocks although another engine may read them.
        """
        self.tell(LetGo(request_id))
        deadline = time.monotonic() + LET_GO_TIMEOUT_S
        while self._dealer.poll(max(0, round(1000 * (deadline - time.monotonic())))):
            answer = _to_others.decode(self._dealer.recv())
            if isinstance(answer, LetGo):
                return
            self._steps.append(answer)
        logger.critical(
            "rank %d ends: the first rank has not ended the lease of request %s within %g s, so "
            "its blocks cannot be freed; see the log of the first rank",
            self._rank,
            request_id,
            LET_GO_TIMEOUT_S,
        )
        raise SystemExit(1)

    def close(self) -> None:
        """Ends the socket and the worker. Idempotent."""
        self._context.destroy(linger=0)
        self._worker.close()

    def _report(self) -> None:
        output = self._worker.get_transfer_results(set())
        if not output.is_empty():
            self.tell(RankReport(output))

    def _received(self) -> RankStep:
        step = _to_others.decode(self._dealer.recv())
        assert isinstance(step, RankStep)  # every LetGo was awaited
        return step


def _here(metadata: PullMetadata, tables: Mapping[str, BlockTables]) -> PullMetadata:
    """What the first rank tells its worker, with the loads into the blocks of this rank."""
    loads, parts = (
        [replace(spec, target_tables=packed(tables[spec.request_id])) for spec in specs]
        for specs in (metadata.loads, metadata.parts)
    )
    return replace(metadata, loads=loads, parts=parts)


def blocks_digest(tables: BlockTables) -> bytes:
    """Digest of the block tables of a prompt, by which two ranks compare their blocks."""
    return hashlib.blake2b(b"|".join(packed(tables)), digest_size=16).digest()


def _name(rank: int) -> bytes:
    return str(rank).encode()


def _socket(context: Context, kind: int) -> Socket:
    """A socket that keeps every message until it is taken: each rank takes them in every turn."""
    socket: Socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket
