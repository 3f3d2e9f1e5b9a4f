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
from kvferry.control.messages import decode_with
from kvferry.control.sockets import Listener, bind_error, bound_port, endpoint
from kvferry.errors import DecodeError
from kvferry.lifetimes import Closing

logger = logging.getLogger(__name__)

_END = -1
_batch: msgspec.msgpack.Decoder[KVEventBatch] = msgspec.msgpack.Decoder(KVEventBatch)


def _packed(number: int) -> bytes:
    return number.to_bytes(8, "big", signed=True)


class _Kept:
    """The youngest batches, for those who missed some. Threads share it."""

    def __init__(self, steps: int) -> None:
        self._lock = threading.Lock()
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=steps)

    def add(self, number: int, batch: bytes) -> None:
        with self._lock:
            self._batches.append((number, batch))

    def since(self, number: int) -> list[tuple[int, bytes]]:
        with self._lock:
            return [kept for kept in self._batches if kept[0] >= number]


class _ReplayServer(Closing):
    """Answers whoever missed batches, on a thread of its own that also owns the socket."""

    def __init__(self, router: "zmq.Socket[bytes]", kept: _Kept, topic: bytes) -> None:
        self._router = router
        self._kept = kept
        self._topic = topic
        self._listener = Listener("kvferry-events", router, self._serve)

    def close(self) -> None:
        """Ends the thread and closes the socket. Idempotent."""
        self._listener.close()

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
        for number, batch in self._kept.since(first):
            self._send(frames[0], self._topic, number, batch)
        self._send(frames[0], b"", _END, b"")

    def _send(self, client: bytes, topic: bytes, number: int, batch: bytes) -> None:
        # Without ROUTER_MANDATORY, what does not fit is dropped: the listener sees a gap.
        self._router.send_multipart((client, b"", topic, _packed(number), batch), zmq.NOBLOCK)


class CacheEventPublisher(Closing):
    """The sending end. Belongs to the engine's thread, which it never keeps waiting."""

    def __init__(
        self,
        config: KVEventsConfig,
        context: "zmq.Context[zmq.Socket[bytes]]",
        publisher: "zmq.Socket[bytes]",
        router: "zmq.Socket[bytes] | None",
    ) -> None:
        """Use :meth:`open`."""
        self._config = config
        self._context = context
        self._publisher = publisher
        self._topic = config.topic.encode()
        self._next = 0
        self._kept = _Kept(config.buffer_steps)
        self.endpoint = _reachable(config.endpoint, publisher)
        """Where listeners on this machine subscribe."""
        self.replay_endpoint: str | None = None
        """Where they ask for what they missed."""
        self._replay: _ReplayServer | None = None
        if router is not None and config.replay_endpoint is not None:
            self.replay_endpoint = _reachable(config.replay_endpoint, router)
            self._replay = _ReplayServer(router, self._kept, self._topic)

    @classmethod
    def open(cls, config: KVEventsConfig) -> "CacheEventPublisher":
        """Listens and returns.

        Raises:
            PortInUseError: a port is taken.
            HostError: an address is not of this machine, or a port needs privileges.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            publisher = context.socket(zmq.PUB)
            publisher.setsockopt(zmq.SNDHWM, config.hwm)
            _bind(publisher, config.endpoint, "kv_events.endpoint")
            router = None
            if config.replay_endpoint is not None:
                router = context.socket(zmq.ROUTER)
                router.setsockopt(zmq.MAXMSGSIZE, 1024)  # a request is 8 bytes
                # One whole replay fits. Who asks again without reading gets no more memory.
                router.setsockopt(zmq.SNDHWM, config.buffer_steps + 1)
                _bind(router, config.replay_endpoint, "kv_events.replay_endpoint")
        except BaseException:
            context.destroy(linger=0)
            raise
        return cls(config, context, publisher, router)

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
        self._kept.add(number, data)  # first: who sees the message may ask for it
        try:
            self._publisher.send_multipart((self._topic, _packed(number), data), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # listeners see a gap; the engine computes on
            logger.warning("KV cache events of batch %d were not sent: %s", number, error)

    def close(self) -> None:
        """Stops listening; what listeners have not got yet is lost. Idempotent."""
        if self._replay is not None:
            self._replay.close()
        self._context.destroy(linger=0)


def _bind(target: "zmq.Socket[bytes]", address: str, key: str) -> None:
    host, port = split_endpoint(address)
    if ":" in host:
        target.setsockopt(zmq.IPV6, 1)
    try:
        target.bind(endpoint(host, port or "*"))
    except zmq.ZMQError as error:
        raise bind_error(error, host, port, key) from error


def _reachable(address: str, target: "zmq.Socket[bytes]") -> str:
    host, _ = split_endpoint(address)
    return endpoint("127.0.0.1" if host == "*" else host, bound_port(target))


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
        context: "zmq.Context[zmq.Socket[bytes]]",
        subscriber: "zmq.Socket[bytes]",
        replay_endpoint: str | None,
        replay_timeout_s: float,
    ) -> None:
        """Use :meth:`open`."""
        self._context = context
        self._subscriber = subscriber
        self._replay_endpoint = replay_endpoint
        self._replay_timeout_s = replay_timeout_s
        self._ready: deque[ReceivedEvents] = deque()
        self._expected = 0

    @classmethod
    def open(
        cls,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        replay_timeout_s: float = 5.0,
    ) -> "CacheEventSubscriber":
        """Connects, now or as soon as there is a publisher, and returns.

        Args:
            endpoint: what the engine publishes on, ``tcp://host:port``.
            replay_endpoint: where it answers for what was missed; without it gaps stay gaps.
            topic: what the publisher's topic begins with.
            replay_timeout_s: seconds to wait for each batch of a replay.

        Raises:
            ValueError: an endpoint is not of that form.
        """
        for address in (endpoint, replay_endpoint):
            if address is not None:
                split_endpoint(address)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        subscriber = context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.SUBSCRIBE, topic.encode())
        _connect(subscriber, endpoint)
        return cls(context, subscriber, replay_endpoint, replay_timeout_s)

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
            _connect(dealer, self._replay_endpoint)
            dealer.send_multipart((b"", _packed(first)))
            batches = []
            while (frames := _receive(dealer, self._replay_timeout_s)) is not None:
                if len(frames) == 4 and frames[2] == _packed(_END):
                    break
                number, batch = _decoded(frames[1:])
                if first <= number < last:
                    batches.append((number, batch))
            return batches


def _connect(target: "zmq.Socket[bytes]", address: str) -> None:
    target.setsockopt(zmq.LINGER, 0)
    if ":" in split_endpoint(address)[0]:
        target.setsockopt(zmq.IPV6, 1)
    target.connect(address)


def _receive(target: "zmq.Socket[bytes]", timeout_s: float) -> list[bytes] | None:
    return target.recv_multipart() if target.poll(round(timeout_s * 1000)) else None


def _decoded(frames: list[bytes]) -> tuple[int, KVEventBatch]:
    if len(frames) != 3 or len(frames[1]) != 8:
        raise DecodeError(
            f"KV cache events: {len(frames)} frames; a message is a topic, a sequence number of "
            "8 bytes and a batch"
        )
    batch = decode_with(_batch, frames[2], "KV cache events: a batch")
    return int.from_bytes(frames[1], "big", signed=True), batch
