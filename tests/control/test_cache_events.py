"""KV cache events on ZeroMQ: in order, replayed when missed, and nobody is kept waiting."""

import time

import msgspec
import pytest
import zmq

from kvferry.cache.events import AllBlocksCleared, BlockRemoved, KVEventBatch
from kvferry.config import KVEventsConfig
from kvferry.control import cache_events
from kvferry.control.cache_events import CacheEventPublisher, CacheEventSubscriber
from kvferry.errors import DecodeError, HostError, PortInUseError
from kvferry.testing.waiting import WAIT_S, until
from tests.publishers import FREE, publishers


def removed(number):
    return BlockRemoved(block_hashes=[number], medium="GPU", group_idx=0)


def packed(number):
    return msgspec.msgpack.encode(KVEventBatch(ts=time.time(), events=[removed(number)]))


def fall_silent(publisher):
    """What it publishes from now on is kept for replays, and reaches nobody at once."""
    publisher.socket.close()


def hashes(received):
    return [block_hash for event in received.batch.events for block_hash in event.block_hashes]


@pytest.fixture
def open_publisher():
    with publishers() as open_one:
        yield open_one


@pytest.fixture
def subscribe():
    opened = []

    def open_one(publisher, *, replay=True, **options):
        replay_endpoint = publisher.replay_endpoint if replay else None
        opened.append(
            CacheEventSubscriber(publisher.endpoint, replay_endpoint=replay_endpoint, **options)
        )
        return opened[-1]

    yield open_one
    for subscriber in opened:
        subscriber.close()


def first_heard(publisher, subscriber):
    """Publishes until the subscription has reached the publisher; returns how many it took."""
    count = 0

    def heard():
        nonlocal count
        publisher.publish([removed(count)])
        count += 1
        return subscriber.receive(0.02)

    received = until(heard, every_s=0, what="a batch")
    return count, received


def receive_all(subscriber):
    """Receives batches until no more comes."""
    while subscriber.receive(WAIT_S) is not None:
        pass


def test_late_listener_gets_every_batch_from_the_first_on(open_publisher, subscribe):
    publisher = open_publisher()
    for number in range(5):
        publisher.publish([removed(number)])
    subscriber = subscribe(publisher)
    count = 5
    received = None
    while received is None:
        publisher.publish([removed(count)])
        count += 1
        received = subscriber.receive(0.02)
    news = [received] + [subscriber.receive(WAIT_S) for _ in range(count - 1)]
    assert [each.number for each in news] == list(range(count))
    assert [hashes(each) for each in news] == [[number] for number in range(count)]
    assert all(each.is_gapless for each in news)
    assert subscriber.receive(0.0) is None


def test_listener_is_told_what_was_published_before_it_though_nothing_follows(
    open_publisher, subscribe
):
    publisher = open_publisher()
    for number in range(5):
        publisher.publish([removed(number)])
    subscriber = subscribe(publisher)
    news = [subscriber.receive(WAIT_S) for _ in range(5)]
    assert [each.number for each in news] == list(range(5))
    assert all(each.is_gapless for each in news)
    assert subscriber.receive(0.0) is None


@pytest.fixture
def often(monkeypatch):
    """Listeners ask as soon as nothing is there."""
    monkeypatch.setattr(cache_events, "QUIET_S", 0.0)


@pytest.mark.usefixtures("often")
def test_each_batch_arrives_once_whether_replays_or_news_bring_it(open_publisher, subscribe):
    publisher = open_publisher()
    subscriber = subscribe(publisher)
    heard = []
    for number in range(200):
        publisher.publish([removed(number)])
        if number % 3 and (received := subscriber.receive(0.001 * (number % 5))) is not None:
            heard.append(received)
    while len(heard) < 200:
        heard.append(subscriber.receive(WAIT_S))
    assert subscriber.receive(0.2) is None
    assert [each.number for each in heard] == list(range(200))
    assert all(each.is_gapless for each in heard)


@pytest.mark.usefixtures("often")
def test_what_was_lost_before_a_silence_arrives(open_publisher, subscribe):
    publisher = open_publisher()
    subscriber = subscribe(publisher)
    publisher.publish([removed(0)])
    assert subscriber.receive(WAIT_S).number == 0
    fall_silent(publisher)
    publisher.publish([removed(1)])
    received = subscriber.receive(WAIT_S)
    assert (received.number, received.is_gapless) == (1, True)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("count", [2, 3, 4])
def test_engine_started_anew_shows_in_silence(open_publisher, subscribe, count):
    """Of three batches that were heard: the new engine has published fewer, as many, or more."""
    publisher = open_publisher()
    for number in range(3):
        publisher.publish([removed(number)])
    subscriber = subscribe(publisher)
    assert [subscriber.receive(WAIT_S).number for _ in range(3)] == [0, 1, 2]
    publisher.close()
    again = open_publisher(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
    fall_silent(again)
    for number in range(count):
        again.publish([removed(1000 + number)])
    news = [subscriber.receive(WAIT_S) for _ in range(count)]
    assert [hashes(each) for each in news] == [[1000 + number] for number in range(count)]
    assert [each.is_gapless for each in news] == [False] + [True] * (count - 1)


@pytest.mark.usefixtures("often")
def test_replay_that_no_longer_has_the_last_batch_is_a_gap(open_publisher, subscribe):
    publisher = open_publisher(buffer_steps=2)
    publisher.publish([removed(0)])
    subscriber = subscribe(publisher)
    assert subscriber.receive(WAIT_S).number == 0
    fall_silent(publisher)
    with publisher.replay.lock:  # both at once
        for number in range(1, 3):
            publisher.replay.kept.append((number, packed(number)))
    news = [subscriber.receive(WAIT_S) for _ in range(2)]
    assert [(each.number, each.is_gapless) for each in news] == [(1, False), (2, True)]


def test_gap_shows_where_nobody_can_fill_it(open_publisher, subscribe):
    publisher = open_publisher()
    publisher.publish([removed(0)])
    _, received = first_heard(publisher, subscribe(publisher, replay=False))
    assert received.number > 0
    assert not received.is_gapless


def test_only_the_youngest_batches_are_kept(open_publisher, subscribe):
    publisher = open_publisher(buffer_steps=3)
    for number in range(10):
        publisher.publish([removed(number)])
    subscriber = subscribe(publisher)
    _, first = first_heard(publisher, subscriber)
    assert not first.is_gapless
    second = subscriber.receive(WAIT_S)
    assert second.is_gapless
    assert second.number == first.number + 1
    assert first.number >= 10 - 3


def test_engine_started_anew_is_a_gap(open_publisher, subscribe):
    publisher = open_publisher()
    subscriber = subscribe(publisher)
    count, _ = first_heard(publisher, subscriber)
    while count < 50:
        publisher.publish([removed(count)])
        count += 1
    while subscriber.receive(WAIT_S).number < count - 1:
        pass
    publisher.close()
    again = open_publisher(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
    again.publish([removed(1000)])
    _, received = first_heard(again, subscriber)
    assert received.number == 0
    assert hashes(received) == [1000]
    assert not received.is_gapless
    assert subscriber.receive(WAIT_S).is_gapless


def test_listener_hears_the_topics_it_asked_for(open_publisher, subscribe):
    publisher = open_publisher(topic="kv@prefill-1")
    deaf = subscribe(publisher, topic="kv@decode")
    first_heard(publisher, subscribe(publisher, topic="kv@prefill"))
    assert deaf.receive(0.1) is None
    deaf_again = subscribe(publisher, topic="kv@prefill-10")
    assert deaf_again.receive(0.5) is None


def test_step_without_events_sends_nothing(open_publisher, subscribe):
    publisher = open_publisher()
    subscriber = subscribe(publisher)
    count, _ = first_heard(publisher, subscriber)
    publisher.publish([])
    publisher.publish([AllBlocksCleared()])
    last = None
    while last is None or not isinstance(last.batch.events[0], AllBlocksCleared):
        last = subscriber.receive(WAIT_S)
    assert last.number == count


def test_frames_are_those_of_vllms_publisher(open_publisher):
    publisher = open_publisher(topic="t")
    before = time.time()
    publisher.publish([BlockRemoved(block_hashes=[bytes(31) + b"\x05"], medium="GPU")])
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart((b"", bytes(8)))
        assert dealer.poll(int(WAIT_S * 1000))
        empty, topic, number, batch = dealer.recv_multipart()
        assert (empty, topic, number) == (b"", b"t", bytes(8))
        ts, events, rank = msgspec.msgpack.decode(batch)
        assert before <= ts <= time.time()
        assert (events, rank) == (
            [{"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU"}],
            0,
        )
        assert dealer.poll(int(WAIT_S * 1000))
        assert dealer.recv_multipart() == [b"", b"", b"\xff" * 8, b""]


def test_whole_hashes_are_sent_when_asked_for(open_publisher, subscribe):
    publisher = open_publisher(block_hashes="bytes")
    whole = bytes(range(32))
    publisher.publish([BlockRemoved(block_hashes=[whole], medium="GPU")])
    _, received = first_heard(publisher, subscribe(publisher))
    assert hashes(received) == [whole]


@pytest.mark.parametrize(
    "frames", [(b"",), (b"", b"short"), (b"", bytes(8), b"more"), (b"x", bytes(8))]
)
def test_bad_replay_request_is_ignored_and_others_are_served(open_publisher, subscribe, frames):
    publisher = open_publisher()
    publisher.publish([removed(0)])
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart(frames)
        _, received = first_heard(publisher, subscribe(publisher))
        assert received.number == 0
        assert not dealer.poll(0)


@pytest.mark.parametrize(
    "frames",
    [
        (b"", bytes(8)),
        (b"", b"1", msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=[]))),
        (b"", bytes(8), b"\xc1"),
        (b"", bytes(8), msgspec.msgpack.encode([0.0, [{"type": "Unheard"}]])),
        (b"", bytes(8), b"\x92\x00\x91\x81\xa4type\xa1\xff"),  # not UTF-8
        (
            b"",
            bytes(8),  # very deep
            b"\x92\x00\x91\x82\xa4type\xabBlockStored\xaaextra_keys\x91" + b"\x91" * 100_000,
        ),
    ],
)
def test_what_is_no_batch_is_a_named_error_and_the_next_one_arrives(frames):
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        with CacheEventSubscriber(f"tcp://127.0.0.1:{port}") as subscriber:
            good = (b"", bytes(8), msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=[])))

            def is_heard():
                publisher.send_multipart(good)
                return subscriber.receive(0.02) is not None

            until(is_heard, every_s=0, what="a batch")
            publisher.send_multipart(frames)
            publisher.send_multipart(
                (b"", bytes(8), msgspec.msgpack.encode(KVEventBatch(ts=2.0, events=[])))
            )
            with pytest.raises(DecodeError, match="KV cache events: "):
                receive_all(subscriber)  # of the good ones more may be on the way
            received = subscriber.receive(WAIT_S)
            assert received is not None
            assert received.batch.ts == 2.0


def test_silent_replay_socket_does_not_hold_batches_back(open_publisher, subscribe):
    publisher = open_publisher()
    publisher.publish([removed(0)])
    with zmq.Context() as context, context.socket(zmq.ROUTER) as mute:
        port = mute.bind_to_random_port("tcp://127.0.0.1")
        with CacheEventSubscriber(
            publisher.endpoint, replay_endpoint=f"tcp://127.0.0.1:{port}", replay_timeout_s=0.05
        ) as subscriber:
            _, received = first_heard(publisher, subscriber)
            assert not received.is_gapless


@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_taken_port_is_a_named_error(open_publisher, key):
    first = open_publisher()
    addresses = {"endpoint": FREE, "replay_endpoint": FREE, key: first.endpoint}
    with pytest.raises(PortInUseError, match=rf"kv_events\.{key}: .* is taken"):
        CacheEventPublisher(KVEventsConfig(**addresses))


def test_address_of_another_machine_is_a_named_error():
    with pytest.raises(HostError, match=r"cannot listen on '192\.0\.2\.1'"):
        CacheEventPublisher(KVEventsConfig(endpoint="tcp://192.0.2.1:0"))


def test_closing_twice_is_harmless_and_frees_the_ports(open_publisher):
    first = open_publisher()
    first.close()
    first.close()
    again = open_publisher(endpoint=first.endpoint, replay_endpoint=first.replay_endpoint)
    assert (again.endpoint, again.replay_endpoint) == (first.endpoint, first.replay_endpoint)
