"""KV cache events on ZeroMQ: an engine publishes, and any number of routers and indexes listen.

Sockets and frames are the same as in vLLM's publisher, so that its consumers work:

======  ===============================================================================
PUB     topic, sequence number, batch: one message per engine step with news
ROUTER  a listener sends an empty frame and the first sequence number that it wants; the
        publisher answers with the batches from this number on that it still keeps, each
        like the PUB's behind an empty frame, and then with sequence number -1 and an
        empty batch
======  ===============================================================================

A sequence number is 8 bytes, big-endian, signed. A batch is the MessagePack of a
:class:`~kvferry.cache.events.KVEventBatch`. Nothing is confirmed: PUB drops messages that a slow
listener cannot take, and messages from before the listener was connected. A listener sees the gap
in the sequence numbers and asks for the missing batches. It also asks at its start, and after each
long silence. Events contain the tokens of prompts; every program that can connect may read them.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import zmq

from kvferry.cache.events import KVCacheEvent, KVEventBatch, with_short_hashes
from kvferry.config import KVEventsConfig, split_endpoint
from kvferry.decoding import decode
from kvferry.errors import DecodeError
from kvferry.lifetimes import Closing
from kvferry.mailbox import Mailbox
from kvferry.zeromq import Context, Socket, connect, listen, tcp_address

logger = logging.getLogger(__name__)

QUIET_S = 5.0
"""Seconds of silence after which a listener asks whether it has missed a batch."""

_END = -1
_batch: msgspec.msgpack.Decoder[KVEventBatch] = msgspec.msgpack.Decoder(KVEventBatch)


def _packed(number: int) -> bytes:
    return number.to_bytes(8, "big", signed=True)


class _Replay(Closing):
    """Keeps the latest batches, and a thread that sends them to listeners that missed some."""

    def __init__(self, router: Socket, steps: int, topic: bytes) -> None:
        self._router = router
        self._topic = topic
        self.lock = threading.Lock()
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=steps)
        self._mailbox = Mailbox("events", poller=zmq.Poller())
        self._mailbox.watch(router, self._serve)
        self._mailbox.start()

    def keep(self, number: int, batch: bytes) -> None:
        """Remembers a batch; called on the publisher's thread."""
        with self.lock:
            self.kept.append((number, batch))

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._mailbox.close()

    def _serve(self) -> None:
        try:
            self._answer(self._router.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return
        except zmq.ZMQError as error:  # this listener is gone; the other listeners go on
            logger.warning("a replay of KV cache events was broken off: %s", error)

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            logger.warning("a request for KV cache events was not understood, and is ignored")
            return
        first = int.from_bytes(frames[2], "big", signed=True)
        with self.lock:
            missed = [kept for kept in self.kept if kept[0] >= first]
        for number, batch in missed:
            self._send(frames[0], self._topic, number, batch)
        self._send(frames[0], b"", _END, b"")

    def _send(self, client: bytes, topic: bytes, number: int, batch: bytes) -> None:
        # Without ROUTER_MANDATORY, ZeroMQ drops messages that do not fit: the listener sees a gap.
        self._router.send_multipart((client, b"", topic, _packed(number), batch), zmq.NOBLOCK)


class CacheEventPublisher(Closing):
    """The sending end. Belongs to the engine's thread, which never waits for it."""

    def __init__(self, config: KVEventsConfig) -> None:
        """Listens and returns.

        Raises:
            PortInUseError: a port is taken.
            HostError: an address is not of this machine, or a port needs privileges.
        """
        self._config = config
        self._topic = config.topic.encode()
        self.next_number = 0
        self.replay: _Replay | None = None
        self.replay_endpoint: str | None = None
        """Address at which listeners on this machine ask for missed batches; ``None`` if they
        cannot."""
        self._context: Context = zmq.Context()
        try:
            self.socket = self._context.socket(zmq.PUB)
            self.socket.setsockopt(zmq.SNDHWM, config.hwm)
            self.endpoint = _listen(self.socket, config.endpoint, "kv_events.endpoint")
            """Address at which listeners on this machine subscribe."""
            if config.replay_endpoint is not None:
                router = self._context.socket(zmq.ROUTER)
                router.setsockopt(zmq.MAXMSGSIZE, 1024)  # a request is 8 bytes
                # A whole replay fits. A listener that asks again without reading gets no more
                # memory.
                router.setsockopt(zmq.SNDHWM, config.buffer_steps + 1)
                self.replay_endpoint = _listen(
                    router, config.replay_endpoint, "kv_events.replay_endpoint"
                )
                self.replay = _Replay(router, config.buffer_steps, self._topic)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Sends the events of a step as a batch; sends nothing without events."""
        if not events:
            return
        if self._config.block_hashes == "uint64":
            events = [with_short_hashes(event) for event in events]
        # The rank of this scheduler among the engine's schedulers; there is only one.
        batch = KVEventBatch(ts=time.time(), events=list(events), data_parallel_rank=0)
        data = msgspec.msgpack.encode(batch)
        number, self.next_number = self.next_number, self.next_number + 1
        if self.replay is not None:
            self.replay.keep(number, data)  # first: a listener of the message may ask for it
        try:
            self.socket.send_multipart((self._topic, _packed(number), data), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # listeners see a gap; the engine continues
            logger.warning("KV cache events of batch %d were not sent: %s", number, error)

    def close(self) -> None:
        """Stops listening; messages that listeners have not received yet are lost. Idempotent."""
        if self.replay is not None:
            self.replay.close()
        self._context.destroy(linger=0)


def _listen(socket: Socket, address: str, key: str) -> str:
    """Binds a socket and returns its address for listeners on this machine."""
    host, port = split_endpoint(address)
    return tcp_address("127.0.0.1" if host == "*" else host, listen(socket, host, port, key))


@dataclass(frozen=True, slots=True)
class ReceivedEvents:
    """A batch received by a listener."""

    number: int
    """Number of the batch at its publisher; the first batch since the publisher's start has 0."""
    batch: KVEventBatch
    is_gapless: bool
    """Whether the batch follows the batch before it. If not, the listener must forget its knowledge
    of the engine: events in between are lost, or the engine was restarted."""


class CacheEventSubscriber(Closing):
    """The listening end, for an engine: its batches in order, including batches that were missed.

    Belongs to a single thread.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        replay_timeout_s: float = 5.0,
    ) -> None:
        """Connects, now or as soon as there is a publisher, and returns.

        Args:
            endpoint: address at which the engine publishes, ``tcp://host:port``.
            replay_endpoint: address at which the engine sends missed batches; without it, gaps
                stay.
            topic: prefix of the publisher's topic.
            replay_timeout_s: seconds to wait for each batch of a replay.

        Raises:
            ValueError: an endpoint does not have this form.
        """
        publisher = split_endpoint(endpoint)
        self._replay_endpoint = None if replay_endpoint is None else split_endpoint(replay_endpoint)
        self._replay_timeout_s = replay_timeout_s
        self._topic = topic.encode()
        self._ready: deque[ReceivedEvents] = deque()
        self._expected = 0
        self._last_ts = 0.0
        """Timestamp of the batch before the expected batch."""
        self._is_gapless = True
        """Whether no batch is lost before the next batch."""
        self._held: tuple[int, KVEventBatch] | None = None
        """Number and batch published behind a gap, which a replay may fill."""
        self._replay: Socket | None = None
        """Socket of the replay under way."""
        self._anchor: tuple[int, float] | None = None
        """Number and time of the batch with which the replay under way must begin. A replay that
        begins with another batch shows that the engine was restarted. ``None`` after this check."""
        self._turn_at = math.inf if replay_endpoint is None else 0.0
        """Clock reading at which a replay begins, or at which the replay under way is given up."""
        self._context: Context = zmq.Context()
        self._subscriber = self._context.socket(zmq.SUB)
        self._subscriber.setsockopt(zmq.SUBSCRIBE, self._topic)
        connect(self._subscriber, *publisher)

    def receive(self, timeout_s: float) -> ReceivedEvents | None:
        """The next batch, or ``None`` if none comes within ``timeout_s`` seconds.

        The subscriber notices missed batches when a later batch arrives; with a
        ``replay_endpoint``, it also notices within a few :data:`QUIET_S`.

        Raises:
            DecodeError: the publisher sent bytes that are no batch. They count as a missed batch.
        """
        deadline = time.monotonic() + timeout_s
        while not self._ready:
            now = time.monotonic()
            if now >= self._turn_at:
                if self._replay is None:
                    self._ask()
                else:
                    self._end_replay()
            elif not self._hear(min(deadline, self._turn_at) - now) and now >= deadline:
                return None
        return self._ready.popleft()

    def close(self) -> None:
        """Disconnects. Idempotent."""
        self._context.destroy(linger=0)

    def _hear(self, timeout_s: float) -> bool:
        """Takes a message; returns whether a message came in time."""
        poller = zmq.Poller()
        # Messages that are published behind a gap wait in their socket.
        for target in (self._replay, self._subscriber if self._held is None else None):
            if target is not None:
                poller.register(target, zmq.POLLIN)
        heard = [target for target, _ in poller.poll(math.ceil(max(0.0, timeout_s) * 1000))]
        if not heard:
            return False
        frames = heard[0].recv_multipart()
        if heard[0] is self._replay:
            self._take_replayed(frames[1:])
        else:
            if self._replay is None:
                self._turn_in(QUIET_S)
            self._take(*_decoded(frames))
        return True

    def _take(self, number: int, batch: KVEventBatch) -> None:
        """Takes a published batch."""
        if number < self._expected:
            if batch.ts <= self._last_ts:
                return  # a replay was faster
            self._start_anew()
        if number == self._expected or self._replay_endpoint is None:
            self._put(number, batch)
        else:
            self._held = number, batch
            self._ask()  # again even during a replay: that replay may have been requested too early

    def _put(self, number: int, batch: KVEventBatch) -> None:
        is_gapless = self._is_gapless and number == self._expected
        self._ready.append(ReceivedEvents(number, batch, is_gapless))
        self._expected, self._last_ts, self._is_gapless = number + 1, batch.ts, True

    def _start_anew(self) -> None:
        """Records that the engine was restarted, and counts from 0 again."""
        self._expected, self._is_gapless = 0, False

    def _ask(self) -> None:
        """Requests all batches from the last batch on, which shows a restart of the publisher."""
        self._close_replay()
        assert self._replay_endpoint is not None
        # Each replay has its own socket: the rest of an abandoned replay cannot enter the next.
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.setsockopt(zmq.LINGER, 0)
        connect(dealer, *self._replay_endpoint)
        dealer.send_multipart((b"", _packed(max(0, self._expected - 1))))
        self._replay = dealer
        self._turn_in(self._replay_timeout_s)
        self._anchor = (self._expected - 1, self._last_ts) if self._expected else None

    def _take_replayed(self, frames: list[bytes]) -> None:
        self._turn_in(self._replay_timeout_s)
        if len(frames) == 3 and frames[1] == _packed(_END):
            if self._anchor is None:
                self._end_replay()
            else:  # the engine has published fewer batches than we received
                self._start_anew()
                self._ask()
            return
        try:
            number, batch = _decoded(frames)
        except DecodeError:
            self._end_replay()
            raise
        if not frames[0].startswith(self._topic):
            return
        anchor, self._anchor = self._anchor, None
        if anchor is not None and number == anchor[0] and batch.ts != anchor[1]:
            self._start_anew()
            self._ask()
            return
        if anchor is not None and number > anchor[0]:
            self._is_gapless = False  # the batch that would show a restart is no longer kept
        if number >= self._expected and (self._held is None or number < self._held[0]):
            self._put(number, batch)

    def _end_replay(self) -> None:
        self._close_replay()
        self._turn_in(QUIET_S)
        if self._held is not None:
            held, self._held = self._held, None
            self._put(*held)

    def _turn_in(self, seconds: float) -> None:
        if self._replay_endpoint is not None:
            self._turn_at = time.monotonic() + seconds

    def _close_replay(self) -> None:
        if self._replay is not None:
            self._replay.close()
            self._replay = None


def _decoded(frames: list[bytes]) -> tuple[int, KVEventBatch]:
    if len(frames) != 3 or len(frames[1]) != 8:
        raise DecodeError(
            f"KV cache events: {len(frames)} frames; a message is a topic, a sequence number of "
            "8 bytes and a batch"
        )
    batch = decode(_batch, frames[2], "KV cache events: a batch")
    return int.from_bytes(frames[1], "big", signed=True), batch
