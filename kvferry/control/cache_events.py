"""KV cache events on ZeroMQ: one engine publishes, any number of routers and indexes listen.

Sockets and frames are those of vLLM's publisher, so that its consumers work:

======  ===============================================================================
PUB     topic, sequence number, batch: one message per engine step with news
ROUTER  asked with the first sequence number that is wanted, behind an empty frame; answers
        with the batches from there on that are still kept, each like the PUB's behind an
        empty frame, and at last with sequence number -1 and an empty batch
======  ===============================================================================

A sequence number is 8 bytes, big-endian, signed. A batch is the MessagePack of a
:class:`~kvferry.cache.events.KVEventBatch`. Nothing is confirmed: PUB drops what a slow listener
cannot take, the listener sees the gap in the numbers and asks for the rest. Events hold the
tokens of prompts, and anyone who can connect may read them.
"""

import logging
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

_END = -1
_batch: msgspec.msgpack.Decoder[KVEventBatch] = msgspec.msgpack.Decoder(KVEventBatch)


def _packed(number: int) -> bytes:
    return number.to_bytes(8, "big", signed=True)


class _Replay(Closing):
    """Keeps the youngest batches, and a thread that sends them to those who missed some."""

    def __init__(self, router: Socket, steps: int, topic: bytes) -> None:
        self._router = router
        self._topic = topic
        self._lock = threading.Lock()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=steps)
        self._mailbox = Mailbox("events", poller=zmq.Poller())
        self._mailbox.watch(router, self._serve)
        self._mailbox.start()

    def keep(self, number: int, batch: bytes) -> None:
        """Remembers a batch; from the publisher's thread."""
        with self._lock:
            self._kept.append((number, batch))

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._mailbox.close()

    def _serve(self) -> None:
        try:
            self._answer(self._router.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return
        except zmq.ZMQError as error:  # that listener is gone; the others go on
            logger.warning("a replay of KV cache events was broken off: %s", error)

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            logger.warning("a request for KV cache events was not understood, and is ignored")
            return
        first = int.from_bytes(frames[2], "big", signed=True)
        with self._lock:
            missed = [kept for kept in self._kept if kept[0] >= first]
        for number, batch in missed:
            self._send(frames[0], self._topic, number, batch)
        self._send(frames[0], b"", _END, b"")

    def _send(self, client: bytes, topic: bytes, number: int, batch: bytes) -> None:
        # Without ROUTER_MANDATORY, what does not fit is dropped: the listener sees a gap.
        self._router.send_multipart((client, b"", topic, _packed(number), batch), zmq.NOBLOCK)


class CacheEventPublisher(Closing):
    """The sending end. Belongs to the engine's thread, which it never keeps waiting."""

    def __init__(self, config: KVEventsConfig) -> None:
        """Listens and returns.

        Raises:
            PortInUseError: a port is taken.
            HostError: an address is not of this machine, or a port needs privileges.
        """
        self._config = config
        self._topic = config.topic.encode()
        self._next = 0
        self._replay: _Replay | None = None
        self.replay_endpoint: str | None = None
        """Where listeners on this machine ask for what they missed, if they can."""
        self._context: Context = zmq.Context()
        try:
            self._publisher = self._context.socket(zmq.PUB)
            self._publisher.setsockopt(zmq.SNDHWM, config.hwm)
            self.endpoint = _listen(self._publisher, config.endpoint, "kv_events.endpoint")
            """Where they subscribe."""
            if config.replay_endpoint is not None:
                router = self._context.socket(zmq.ROUTER)
                router.setsockopt(zmq.MAXMSGSIZE, 1024)  # a request is 8 bytes
                # One whole replay fits. Who asks again without reading gets no more memory.
                router.setsockopt(zmq.SNDHWM, config.buffer_steps + 1)
                self.replay_endpoint = _listen(
                    router, config.replay_endpoint, "kv_events.replay_endpoint"
                )
                self._replay = _Replay(router, config.buffer_steps, self._topic)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Sends the events of one step as one batch; nothing without events."""
        if not events:
            return
        if self._config.block_hashes == "uint64":
            events = [with_short_hashes(event) for event in events]
        # The rank is that of this scheduler among its engine's: there is one.
        batch = KVEventBatch(ts=time.time(), events=list(events), data_parallel_rank=0)
        data = msgspec.msgpack.encode(batch)
        number, self._next = self._next, self._next + 1
        if self._replay is not None:
            self._replay.keep(number, data)  # first: who sees the message may ask for it
        try:
            self._publisher.send_multipart((self._topic, _packed(number), data), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # listeners see a gap; the engine computes on
            logger.warning("KV cache events of batch %d were not sent: %s", number, error)

    def close(self) -> None:
        """Stops listening; what listeners have not got yet is lost. Idempotent."""
        if self._replay is not None:
            self._replay.close()
        self._context.destroy(linger=0)


def _listen(socket: Socket, address: str, key: str) -> str:
    """Binds a socket, and says where listeners on this machine find it."""
    host, port = split_endpoint(address)
    return tcp_address("127.0.0.1" if host == "*" else host, listen(socket, host, port, key))


@dataclass(frozen=True, slots=True)
class ReceivedEvents:
    """One batch, as a listener gets it."""

    number: int
    """Of the publisher's batches, 0 the first since its start."""
    batch: KVEventBatch
    is_gapless: bool
    """Whether it follows the batch before it. If not, forget what you know of the engine: events
    in between are lost, or the engine was started anew."""


class CacheEventSubscriber(Closing):
    """The listening end, for one engine: its batches in order, with those that were missed.

    Belongs to one thread.
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
            endpoint: what the engine publishes on, ``tcp://host:port``.
            replay_endpoint: where it answers for what was missed; without it gaps stay gaps.
            topic: what the publisher's topic begins with.
            replay_timeout_s: seconds to wait for each batch of a replay.

        Raises:
            ValueError: an endpoint is not of that form.
        """
        publisher = split_endpoint(endpoint)
        self._replay_endpoint = None if replay_endpoint is None else split_endpoint(replay_endpoint)
        self._replay_timeout_s = replay_timeout_s
        self._ready: deque[ReceivedEvents] = deque()
        self._expected = 0
        self._context: Context = zmq.Context()
        self._subscriber = self._context.socket(zmq.SUB)
        self._subscriber.setsockopt(zmq.SUBSCRIBE, topic.encode())
        connect(self._subscriber, *publisher)

    def receive(self, timeout_s: float) -> ReceivedEvents | None:
        """The next batch, or ``None`` if none comes within ``timeout_s`` seconds.

        That batches were missed shows when a later one arrives.

        Raises:
            DecodeError: the publisher sent what is no batch. It counts as missed.
        """
        if not self._ready:
            frames = _receive(self._subscriber, timeout_s)
            if frames is not None:
                self._take(*_decoded(frames))
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        """Disconnects. Idempotent."""
        self._context.destroy(linger=0)

    def _take(self, number: int, batch: KVEventBatch) -> None:
        is_gapless = True
        if number < self._expected:  # the engine was started anew, and counts from 0 again
            self._expected, is_gapless = 0, False
        missed = self._replayed(self._expected, number)
        for each_number, each in [*missed, (number, batch)]:
            is_gapless = is_gapless and each_number == self._expected
            self._ready.append(ReceivedEvents(each_number, each, is_gapless))
            self._expected, is_gapless = each_number + 1, True

    def _replayed(self, first: int, last: int) -> list[tuple[int, KVEventBatch]]:
        """The batches ``[first, last)``, as far as the publisher still has them."""
        if first == last or self._replay_endpoint is None:
            return []
        # A socket for each replay: the rest of one that was given up cannot enter the next.
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.RCVHWM, 0)
            dealer.setsockopt(zmq.LINGER, 0)
            connect(dealer, *self._replay_endpoint)
            dealer.send_multipart((b"", _packed(first)))
            batches = []
            while (frames := _receive(dealer, self._replay_timeout_s)) is not None:
                if len(frames) == 4 and frames[2] == _packed(_END):
                    break
                number, batch = _decoded(frames[1:])
                if first <= number < last:
                    batches.append((number, batch))
            return batches


def _receive(target: Socket, timeout_s: float) -> list[bytes] | None:
    return target.recv_multipart() if target.poll(round(timeout_s * 1000)) else None


def _decoded(frames: list[bytes]) -> tuple[int, KVEventBatch]:
    if len(frames) != 3 or len(frames[1]) != 8:
        raise DecodeError(
            f"KV cache events: {len(frames)} frames; a message is a topic, a sequence number of "
            "8 bytes and a batch"
        )
    batch = decode(_batch, frames[2], "KV cache events: a batch")
    return int.from_bytes(frames[1], "big", signed=True), batch
