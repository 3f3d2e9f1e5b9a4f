"""Calls leave from any thread and are answered on any: nothing is lost, nothing waits in vain."""

import math
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import zmq

from kvferry.control import messages
from kvferry.control.connection import SECOND_LOOK_S, Call, Connection
from kvferry.control.messages import FinishAnswer, LeaseAnswer
from kvferry.control.options import ControlOptions
from kvferry.errors import PeerLostError

WAIT = 20  # seconds; far more than anything here takes
PATIENT = ControlOptions(request_timeout_s=120.0)  # what is forgotten is not found by its timeout


@pytest.fixture
def met(serve, describe):
    """A served engine, and a patient client that has shaken hands with it."""
    served = serve()
    description = describe("decode-0", "d1")
    client = served.client(description, PATIENT)
    client.handshake(served.address, description).result(WAIT)
    return served, client


def ask(client, served, number):
    """One call of a kind that depends on ``number``, and the answer that it must get."""
    if number % 3 == 0:
        lease_id = served.grant(0)
        renewed = client.renew(served.address, served.incarnation, [lease_id])
        return renewed, {lease_id: LeaseAnswer.HELD}
    known = number % 3 == 1
    lease_id = served.grant(0) if known else f"unknown-{number}"
    finished = client.finish(served.address, served.incarnation, lease_id, rank=0, ok=True)
    return finished, FinishAnswer.HELD if known else FinishAnswer.REVOKED


def keep_asking(client, served, seed, calls, barrier):
    """Bursts of calls, whose ends every thread waits for; between them nothing wakes anybody."""
    rng = random.Random(seed)
    while calls > 0:
        barrier.wait(WAIT)
        burst = [ask(client, served, rng.randrange(1000)) for _ in range(rng.randrange(4))]
        while rng.random() < 0.5:
            client.pump()
            time.sleep(rng.random() * 2e-4)
        for future, expected in burst:
            assert future.result(WAIT) == expected
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
        assert future.result(WAIT) == expected


@pytest.fixture
def busy(met):
    """The same, with the client's thread held up in a callback until the test is over."""
    served, client = met
    over, entered = threading.Event(), threading.Event()

    def hold(future):
        entered.set()
        over.wait(WAIT)

    client.status(served.address).add_done_callback(hold)
    if not entered.wait(0.5):  # it was answered before the callback was added
        client.renew(served.address, served.incarnation, [])
    assert entered.wait(WAIT)
    yield served, client
    over.set()


def pumped(client, future):
    """Waits for a future as a step thread does."""
    deadline = time.monotonic() + WAIT
    while not future.done():
        client.pump()
        assert time.monotonic() < deadline
    return future.result()


def test_who_pumps_gets_an_answer_that_the_clients_thread_has_no_time_for(busy):
    served, client = busy
    threads = []
    finished = client.finish(served.address, served.incarnation, served.grant(0), rank=0, ok=True)
    finished.add_done_callback(lambda future: threads.append(threading.current_thread()))
    assert pumped(client, finished) == FinishAnswer.HELD
    assert threads == [threading.current_thread()]
    assert client.pump() is False


def test_a_broken_connection_is_replaced_by_whoever_sends_next(busy, serve):
    served, client = busy
    open_call = client.finish(served.address, served.incarnation, "lost", rank=0, ok=True)
    pumped(client, open_call)
    served.server.close()
    again = serve(engine_id=served.description.engine_id, port=served.server.port)
    deadline = time.monotonic() + WAIT
    while True:  # until the end of the old connection has been told to this process
        answer = client.status(again.address)
        try:
            assert pumped(client, answer).incarnation == again.incarnation
            return
        except AssertionError:
            assert time.monotonic() < deadline


def test_answers_that_came_in_time_are_found_by_a_thread_that_wakes_late(serve, describe):
    served = serve()
    description = describe("decode-0", "d1")
    client = served.client(description, ControlOptions(request_timeout_s=0.3))
    client.handshake(served.address, description).result(WAIT)
    status = client.status(served.address)
    status.add_done_callback(lambda future: time.sleep(1.0))  # on the client's thread, or on ours
    finished = client.finish(served.address, served.incarnation, served.grant(0), rank=0, ok=True)
    assert finished.result(WAIT) == FinishAnswer.HELD


STOPPED = """
import sys
from kvferry.control.client import ControlClient
from kvferry.control.options import ControlOptions

options = ControlOptions(request_timeout_s=1.0, heartbeat_s=60.0)
with ControlClient(engine_id="d", incarnation="d1", options=options) as client:
    print(client.finish(sys.argv[1], "p1", "lease", rank=0, ok=True).result(), flush=True)
"""


def test_a_process_that_was_stopped_finds_the_answers_that_came_meanwhile():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.rcvtimeo = WAIT * 1000
        address = f"127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        command = [sys.executable, "-c", STOPPED, address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                who, payload = router.recv_multipart()
                process.send_signal(signal.SIGSTOP)
                asked = messages.decode_request(payload)
                answer = messages.FinishReply(id=asked.id, answers=(FinishAnswer.HELD,))
                router.send_multipart([who, messages.encode(answer)])
                time.sleep(1.5)  # longer than the client's patience
                process.send_signal(signal.SIGCONT)
                assert process.stdout.readline() == "held\n"
            finally:
                process.kill()


def test_a_call_is_given_up_only_if_two_looks_find_no_answer():
    """The first finds answers that came in time, the second those that ZeroMQ had not read yet."""
    options = ControlOptions(request_timeout_s=1.0)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.rcvtimeo = WAIT * 1000
        address = f"127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        connection = Connection(context, address, options)
        calls = [Call(messages.StatusRequest(id=0), lambda reply: reply) for _ in range(3)]
        with connection.lock:
            assert [connection.send(call) for call in calls] == [[], [], []]
            late = calls[-1].deadline + 1.0
            answer_one(router, connection)
            assert [call for call, _ in connection.expire(late)] == calls[:1]
            answer_one(router, connection)
            assert [call for call, _ in connection.expire(late + SECOND_LOOK_S / 2)] == calls[1:2]
            ((call, error),) = connection.expire(late + SECOND_LOOK_S)
            assert call is calls[2]
            assert isinstance(error, PeerLostError)
            assert connection.next_look == math.inf
            assert connection.end() == []


def answer_one(router, connection):
    """Answers one request; returns once the answer lies in the socket of the connection."""
    who, payload = router.recv_multipart()
    asked = messages.decode_request(payload)
    router.send_multipart([who, messages.encode(messages.Released(id=asked.id))])
    deadline = time.monotonic() + WAIT
    while not connection.has_news:
        assert time.monotonic() < deadline


def test_a_call_without_an_answer_ends_in_time_though_others_are_answered(serve, describe):
    """The thread that sleeps until the first deadline is not told of every later one."""
    served = serve()
    description = describe("decode-0", "d1")
    client = served.client(description, ControlOptions(request_timeout_s=0.5))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as mute:
        mute.linger = 0
        address = f"127.0.0.1:{mute.bind_to_random_port('tcp://127.0.0.1')}"
        for pause in (0.0, 0.1, 0.4, 0.6, 0.3):
            time.sleep(pause)
            client.status(served.address).result(WAIT)
            began = time.monotonic()
            with pytest.raises(PeerLostError, match="no answer within"):
                client.status(address).result(WAIT)
            assert 0.4 < time.monotonic() - began < 3
