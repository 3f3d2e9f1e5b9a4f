"""Calls leave from any thread and are answered on any: nothing is lost, nothing waits in vain."""

import contextlib
import math
import random
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any, cast

import pytest
import zmq

from kvferry.control import messages
from kvferry.control.client import ControlClient
from kvferry.control.connection import SECOND_LOOK_S, Call, Connection
from kvferry.control.links import ZmqNetwork
from kvferry.control.messages import FinishAnswer, LeaseAnswer
from kvferry.control.options import ControlOptions
from kvferry.errors import CancelledError, PeerLostError
from kvferry.testing.waiting import WAIT_S, until
from tests.clock import Clock
from tests.load import stop

PATIENT = ControlOptions(request_timeout_s=2 * WAIT_S)
"""With these, what is forgotten is not found by its timeout."""


@pytest.fixture
def met(serve, describe):
    """A served engine, and a patient client that has shaken hands with it."""
    served = serve()
    description = describe("decode-0", "d1")
    client = served.client(description, PATIENT)
    client.handshake(served.address, description).result(WAIT_S)
    return served, client


def ask(client, served, number):
    """One call of a kind that depends on ``number``, and the answer that it must get."""
    if number % 3 == 0:
        lease_id = served.grant(0)
        renewed = served.renew(client, lease_id)
        return renewed, {lease_id: LeaseAnswer.HELD}
    known = number % 3 == 1
    lease_id = served.grant(0) if known else f"unknown-{number}"
    finished = served.finish(client, lease_id)
    return finished, FinishAnswer.HELD if known else FinishAnswer.REVOKED


def test_calls_that_become_overdue_one_after_the_other_are_all_given_up():
    """Some become overdue while those before them get their second look."""
    context = zmq.Context()
    silent = context.socket(zmq.ROUTER)
    address = f"127.0.0.1:{silent.bind_to_random_port('tcp://127.0.0.1')}"
    options = ControlOptions(request_timeout_s=0.2)
    with ControlClient(engine_id="d", incarnation="d1", options=options) as client:
        futures = []
        for _ in range(4):
            futures.append(client.status(address))
            time.sleep(SECOND_LOOK_S * 0.6)
        for future in futures:
            with pytest.raises(PeerLostError, match="request_timeout_s"):
                future.result(WAIT_S)
    context.destroy(linger=0)


def keep_asking(client, served, seed, calls, barrier):
    """Bursts of calls, whose ends every thread waits for; between them nothing wakes anybody."""
    rng = random.Random(seed)
    while calls > 0:
        barrier.wait(WAIT_S)
        burst = [ask(client, served, rng.randrange(1000)) for _ in range(rng.randrange(4))]
        while rng.random() < 0.5:
            client.pump()
            time.sleep(rng.random() * 2e-4)
        for future, expected in burst:
            assert future.result(WAIT_S) == expected
        calls -= 1


@pytest.mark.parametrize("pumps", [False, True], ids=["alone", "beside pumping threads"])
def test_no_answer_is_lost_when_many_threads_send_and_pump(met, pumps):
    served, client = met
    over = threading.Event()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads change places in the middle of everything
    failures = []

    def run(task, *arguments):
        try:
            task(*arguments)
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    def keep_pumping():
        while not over.is_set():
            client.pump()

    barrier = threading.Barrier(4)
    askers = [
        threading.Thread(target=run, args=(keep_asking, client, served, seed, 400, barrier))
        for seed in range(4)
    ]
    pumping = [threading.Thread(target=run, args=(keep_pumping,)) for _ in range(2 * pumps)]
    try:
        for thread in askers + pumping:
            thread.start()
        for thread in askers:
            thread.join()
    finally:
        over.set()
        sys.setswitchinterval(interval)
    for thread in pumping:
        thread.join()
    assert failures == []


def test_thousands_of_calls_at_once_are_all_answered(met):
    served, client = met
    asked = []

    def send(first):
        for number in range(first, first + 1000):
            asked.append(ask(client, served, number))
            if number % 7 == 0:
                client.pump()

    threads = [threading.Thread(target=send, args=(1000 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 4000
    for future, expected in asked:
        assert future.result(WAIT_S) == expected


def test_every_call_that_is_made_while_the_client_is_closed_ends(met):
    served, client = met
    asked: list[Future[Any]] = []
    failures = []

    def keep_calling():
        try:
            while not asked or not isinstance(asked[-1].exception(WAIT_S), CancelledError):
                asked.append(client.status(served.address))
                asked.append(served.finish(client, "lease"))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=keep_calling) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    client.close()
    for thread in threads:
        thread.join()
    assert failures == []
    assert {type(future.exception(WAIT_S)) for future in asked} <= {type(None), CancelledError}


@pytest.fixture
def busy(met):
    """The same, with the client's thread held up in a callback until the test is over."""
    served, client = met
    over, entered = threading.Event(), threading.Event()

    def hold(future):
        entered.set()
        over.wait(2 * WAIT_S)

    with source() as (router, address):
        held = client.finish(address, "i", "lease", b"s", rank=0, ok=True, nonce=b"n")
        held.add_done_callback(hold)
        answer_one(router)
        assert entered.wait(WAIT_S)
        yield served, client
        over.set()


@contextlib.contextmanager
def source():
    """A ROUTER that answers nothing by itself, and its address."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.rcvtimeo = int(WAIT_S * 1000)
        yield router, f"127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"


def answer_one(router):
    """Confirms the one finish of the next request."""
    who, payload = router.recv_multipart()
    asked = messages.decode_request(payload)
    answer = messages.FinishReply(id=asked.id, answers=(FinishAnswer.HELD,))
    router.send_multipart([who, messages.encode(answer)])


def pump_until_done(client, future):
    """Waits for a future as a step thread does."""

    def is_done():
        if not future.done():
            client.pump()
        return future.done()

    until(is_done, every_s=0, what="the answer")


def test_who_pumps_gets_an_answer_that_the_clients_thread_has_no_time_for(busy):
    served, client = busy
    threads = []
    finished = served.finish(client, served.grant(0))
    finished.add_done_callback(lambda future: threads.append(threading.current_thread()))
    pump_until_done(client, finished)
    assert threads == [threading.current_thread()]
    assert client.pump() is False


def test_a_broken_connection_is_replaced_by_whoever_sends_next(busy, serve):
    served, client = busy
    open_call = served.finish(client, "lost")
    pump_until_done(client, open_call)
    served.server.close()
    again = serve(engine_id=served.description.engine_id, port=served.server.port)
    answers: list[Any] = []

    def is_told():
        """Calls go to the connection of before until this process knows that it has ended."""
        if not answers or answers[-1].done():
            answers.append(client.status(again.address))
        client.pump()
        return answers[-1].done() and answers[-1].exception() is None

    until(is_told, every_s=0, what="an answer of the server's next start")
    assert answers[-1].result(0).incarnation == again.incarnation


@pytest.mark.timed("A handshake must be answered within 1 s.")
def test_answers_that_came_in_time_are_found_by_a_thread_that_wakes_late(serve, describe):
    served = serve()
    description = describe("decode-0", "d1")
    client = served.client(description, ControlOptions(request_timeout_s=1.0))
    client.handshake(served.address, description).result(WAIT_S)
    status = client.status(served.address)
    status.add_done_callback(lambda future: time.sleep(2.0))  # on the client's thread, or on ours
    finished = served.finish(client, served.grant(0))
    assert finished.result(WAIT_S) == FinishAnswer.HELD


STOPPED = """
import sys
from kvferry.control.client import ControlClient
from kvferry.control.options import ControlOptions

options = ControlOptions(request_timeout_s=3.0, heartbeat_s=60.0)
with ControlClient(engine_id="d", incarnation="d1", options=options) as client:
    held = client.finish(sys.argv[1], "p1", "lease", b"s", rank=0, ok=True, nonce=b"n")
    print(held.result(), flush=True)
"""


def test_a_process_that_was_stopped_finds_the_answers_that_came_meanwhile():
    with source() as (router, address):
        command = [sys.executable, "-c", STOPPED, address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                assert router.poll(int(WAIT_S * 1000))
                stop(process.pid)
                answer_one(router)
                time.sleep(3.5)  # longer than the client's patience
                process.send_signal(signal.SIGCONT)
                assert process.stdout.readline() == "held\n"
            finally:
                process.kill()


def test_a_call_is_given_up_only_if_two_looks_find_no_answer():
    """The first finds answers that came in time, the second those that ZeroMQ had not read yet."""
    options = ControlOptions(request_timeout_s=1.0)
    with ZmqNetwork(options) as network, source() as (router, address):
        connection = Connection(network.connect(address, "127.0.0.1"), address, options)
        request = messages.Finishes(
            id=0,
            engine_id="d",
            incarnation="d1",
            source_incarnation="p1",
            items=(messages.Finish(lease_id="lease", rank=0, ok=True, nonce=b"n", proof=b"p"),),
        )
        calls = [Call(request, lambda reply: reply) for _ in range(3)]
        descriptors = cast("tuple[int, int]", connection.link.descriptors)  # those of sockets

        def answered():
            answer_one(router)
            assert select.select(descriptors, [], [], WAIT_S)[0]

        with connection.lock:
            assert [connection.send(call) for call in calls] == [[], [], []]
            assert connection.receive() == []  # whoever has sent looks
            late = calls[-1].deadline + 1.0
            answered()
            assert [call for call, _ in connection.expire(late)] == calls[:1]
            answered()
            assert [call for call, _ in connection.expire(late + SECOND_LOOK_S / 2)] == calls[1:2]
            ((call, error),) = connection.expire(late + SECOND_LOOK_S)
            assert call is calls[2]
            assert isinstance(error, PeerLostError)
            assert connection.next_look == math.inf
            assert connection.end() == []


class BreakingLink:
    """A link that breaks between the look at it and the send."""

    descriptors = (0, 1)
    lost: PeerLostError | None = None

    def send(self, payload):
        self.lost = PeerLostError("127.0.0.1:1: the two have different curve_keys")
        raise PeerLostError("127.0.0.1:1: it takes no more messages")

    def receive(self):
        return None

    def why_lost(self):
        return self.lost

    def close(self):
        pass


def test_a_call_on_a_link_that_has_just_broken_ends_with_the_reason_of_the_loss():
    connection = Connection(BreakingLink(), "127.0.0.1:1", ControlOptions())
    call = Call(messages.StatusRequest(id=0), lambda reply: reply)
    with connection.lock:
        ended = connection.send(call)
        assert ended is not None
        ((sent, error),) = ended
        assert sent is call
        assert "curve_keys" in str(error)
        assert connection.send(call) is None  # the next call takes a new connection


@pytest.mark.slow
def test_a_call_without_an_answer_ends_in_time_though_others_are_answered(
    monkeypatch, serve, describe
):
    """The thread that sleeps until the first deadline is not told of every later one."""
    served = serve()
    description = describe("decode-0", "d1")
    clock, patience_s = Clock.install(monkeypatch), 120.0
    options = ControlOptions(request_timeout_s=patience_s)
    client = served.client(description, options, clock=clock)
    with source() as (_, address):
        for pause in (0.0, 0.2, 0.8, 1.2):
            clock.advance(pause * patience_s)
            client.status(served.address).result(WAIT_S)
            began, unanswered = clock(), client.status(address)
            until(clock.passing(unanswered.done), what="the end of the call")
            with pytest.raises(PeerLostError, match="no answer within"):
                unanswered.result()
            assert 0.9 * patience_s < clock() - began
