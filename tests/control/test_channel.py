"""A served engine and its clients, over real sockets."""

import contextlib
import gc
import queue
import socket
import threading
import time
import tracemalloc

import msgspec
import pytest
import zmq

from kvferry.control import links, messages
from kvferry.control.client import ControlClient, fetch_status
from kvferry.control.leases import LeaseOutcome, LeaseTable
from kvferry.control.messages import FinishAnswer, LeaseAnswer, TransferStatus
from kvferry.control.options import ControlOptions
from kvferry.control.server import ControlServer
from kvferry.errors import (
    CancelledError,
    HandshakeNeededError,
    HostError,
    IncompatibleError,
    NotReadyError,
    PeerLostError,
    PortInUseError,
    ProtocolError,
)
from kvferry.testing.waiting import WAIT_S, until
from tests.clock import Clock


def target(served, describe, engine_id="decode-0", incarnation="d1", **shape):
    """A client whose engine has shaken hands with the served one."""
    description = describe(engine_id, incarnation, **shape)
    client = served.client(description)
    client.handshake(served.address, description).result(WAIT_S)
    return client


def renew(client, served, *lease_ids):
    return served.renew(client, *lease_ids).result(WAIT_S)


def finish(client, served, lease_id, rank=0, ok=True):
    future = served.finish(client, lease_id, rank=rank, ok=ok)
    return future.result(WAIT_S)


def test_the_holder_of_a_lease_is_told_unasked_that_it_has_grown_or_is_revoked(serve, describe):
    served = serve()
    told: queue.Queue[tuple[str, messages.Renewed]] = queue.Queue()
    client = target(served, describe)

    def listen(address, news):
        if isinstance(news, messages.Renewed) and news.states:
            told.put((address, news))

    client.listen(listen)
    lease_id = served.leases.grant("r", 1, num_tokens=8, writers=(0, 1)).lease_id
    renewed = client.renew(served.address, served.incarnation, served.keys(lease_id)).result(WAIT_S)
    held = {lease_id: LeaseAnswer.HELD}
    assert (renewed.states, renewed.written) == (held, {lease_id: 0})
    served.server.written(lease_id, 0, 5)
    served.server.written(lease_id, 1, 8)
    address, news = told.get(timeout=WAIT_S)
    assert (address, news.states, news.written) == (served.address, held, {lease_id: 5})
    served.server.written(lease_id, 0, 8)
    _, news = told.get(timeout=WAIT_S)
    assert (news.states, news.written) == (held, {})
    served.server.revoke([lease_id])
    _, news = told.get(timeout=WAIT_S)
    assert (news.states, news.written) == ({lease_id: LeaseAnswer.REVOKED}, {})


def test_a_lease_that_ends_while_its_renewal_is_answered_is_not_said_to_be_whole(
    serve, describe, monkeypatch
):
    """No number of tokens means that all are written."""
    served = serve()
    client = target(served, describe)
    lease_id = served.leases.grant("r", 1, num_tokens=8, writers=(0, 1)).lease_id
    take = served.leases.renew

    def take_and_revoke(*said, **more):
        states = take(*said, **more)
        served.server.revoke([lease_id])
        return states

    monkeypatch.setattr(served.leases, "renew", take_and_revoke)
    renewed = client.renew(served.address, served.incarnation, served.keys(lease_id)).result(WAIT_S)
    assert (renewed.states, renewed.written) == ({lease_id: LeaseAnswer.REVOKED}, {})


def test_the_life_of_a_lease(serve, describe):
    served = serve()
    client = target(served, describe, tp=2)
    lease_id = served.grant(num_blocks=8)
    assert renew(client, served, lease_id) == {lease_id: LeaseAnswer.HELD}
    assert finish(client, served, lease_id, rank=0) == FinishAnswer.HELD
    assert served.leases.sweep() == []
    assert finish(client, served, lease_id, rank=1) == FinishAnswer.HELD
    (ended,) = served.leases.sweep()
    assert (ended.lease_id, ended.outcome) == (lease_id, LeaseOutcome.DONE)
    assert renew(client, served, lease_id) == {lease_id: LeaseAnswer.DONE}
    assert finish(client, served, lease_id, rank=1) == FinishAnswer.HELD


def test_the_ranks_of_the_target_are_counted_not_those_of_the_source(serve, describe):
    served = serve()  # has two ranks
    client = target(served, describe, tp=3)
    lease_id = served.grant()
    for rank in range(3):
        assert served.leases.sweep() == []
        finish(client, served, lease_id, rank=rank)
    assert len(served.leases.sweep()) == 1


def test_a_handshake_brings_the_description_of_the_other_side(serve, describe):
    served = serve()
    description = describe("decode-0")
    client = served.client(description)
    assert client.handshake(served.address, description).result(WAIT_S) == served.description


def test_before_it_has_a_description_the_server_says_ask_later(serve, describe):
    served = serve(ready=False)
    description = describe("decode-0")
    client = served.client(description)
    with pytest.raises(NotReadyError, match="still starting") as raised:
        client.handshake(served.address, description).result(WAIT_S)
    assert not isinstance(raised.value, HandshakeNeededError)
    assert not client.status(served.address).result(WAIT_S).ready
    served.server.set_description(served.description)
    client.handshake(served.address, description).result(WAIT_S)
    assert client.status(served.address).result(WAIT_S).ready
    assert client.status(served.address).result(WAIT_S).errors == ()


def test_a_description_of_somebody_else_is_not_served(serve, describe):
    served = serve(ready=False)
    with pytest.raises(ValueError, match="stranger"):
        served.server.set_description(describe("stranger"))


def test_an_engine_that_does_not_fit_is_refused_with_every_mismatch(serve, describe, fingerprint):
    served = serve()
    description = describe("decode-0", model=fingerprint(weights_digest="w1", rope="x"))
    client = served.client(description)
    with pytest.raises(IncompatibleError) as raised:
        client.handshake(served.address, description).result(WAIT_S)
    assert raised.value.peer == served.description.engine_id
    assert len(raised.value.mismatches) == 2
    lease_id = served.grant()
    with pytest.raises(HandshakeNeededError):
        renew(client, served, lease_id)
    assert finish(client, served, lease_id) == FinishAnswer.REVOKED
    (peer,) = client.status(served.address).result(WAIT_S).peers
    assert peer.state == "refused"
    assert "load the same checkpoint" in peer.last_error


def test_a_peer_whose_memory_leaves_its_regions_is_refused_by_either_side(serve, describe):
    served = serve()
    description = describe("decode-0")
    rank = description.ranks[0]
    memory = msgspec.structs.replace(rank.memory[0], region_bytes=(1,) * 6)
    rank = msgspec.structs.replace(rank, memory=(memory,))
    broken = msgspec.structs.replace(description, ranks=(rank,))
    client = served.client(description)
    with pytest.raises(ProtocolError, match="spans bytes"):
        client.handshake(served.address, broken).result(WAIT_S)
    served.server._description = msgspec.structs.replace(
        broken, engine_id=served.description.engine_id
    )
    with pytest.raises(ProtocolError, match="spans bytes"):
        client.handshake(served.address, description).result(WAIT_S)


def test_an_engine_that_does_not_fit_only_in_our_eyes_is_not_used(serve, describe, fingerprint):
    """The peer may be of a release that compares less than we do."""
    served = serve()
    served.server._shake_hands = lambda request: messages.HandshakeReply(
        id=request.id, description=served.description
    )
    description = describe("decode-0", model=fingerprint(rope="x"))
    with pytest.raises(IncompatibleError, match=r"model\.rope"):
        served.client(description).handshake(served.address, description).result(WAIT_S)


def test_a_successful_handshake_shows_in_the_status_of_both_sides(serve, describe):
    source, sink = serve(), serve()
    client = source.client(sink.description, peers=sink.server.peers)
    client.handshake(source.address, sink.description).result(WAIT_S)
    for served, other in ((source, sink), (sink, source)):
        (peer,) = served.server.status().peers
        assert (peer.engine_id, peer.state) == (other.description.engine_id, "ready")


def test_a_restarted_target_must_shake_hands_again_and_its_old_reads_do_not_count(serve, describe):
    served = serve()
    before = target(served, describe, incarnation="d1", tp=2)
    lease_id = served.grant()
    assert renew(before, served, lease_id) == {lease_id: LeaseAnswer.HELD}
    assert finish(before, served, lease_id, rank=0) == FinishAnswer.HELD
    description = describe("decode-0", "d2", tp=2)
    after = served.client(description)
    with pytest.raises(HandshakeNeededError, match="start d2 of 'decode-0' has not shaken hands"):
        renew(after, served, lease_id)
    assert finish(after, served, lease_id, rank=1) == FinishAnswer.REVOKED
    after.handshake(served.address, description).result(WAIT_S)
    assert renew(after, served, lease_id) == {lease_id: LeaseAnswer.HELD}
    assert finish(before, served, lease_id, rank=1) == FinishAnswer.REVOKED
    assert renew(before, served, lease_id) == {lease_id: LeaseAnswer.REVOKED}
    for rank in range(2):
        assert served.leases.sweep() == []
        assert finish(after, served, lease_id, rank=rank) == FinishAnswer.HELD


def test_a_handshake_under_the_name_of_a_living_engine_takes_nothing_from_it(serve, describe):
    served = serve()
    real = target(served, describe, incarnation="d1")
    lease_id = served.grant()
    assert renew(real, served, lease_id) == {lease_id: LeaseAnswer.HELD}
    stranger = target(served, describe, incarnation="fresh", tp=2)
    assert renew(real, served, lease_id) == {lease_id: LeaseAnswer.HELD}
    forged = stranger.renew(served.address, served.incarnation, {lease_id: b"guessed"})
    assert forged.result(WAIT_S).states == {lease_id: LeaseAnswer.REVOKED}
    (status,) = [peer for peer in served.server.status().peers if peer.incarnation == "d1"]
    assert "give each engine its own engine_id" in status.last_error
    assert finish(real, served, lease_id) == FinishAnswer.HELD


def test_what_the_status_shows_is_not_enough_to_speak_of_a_lease(serve, describe):
    served = serve()
    client = target(served, describe, incarnation="d1", tp=2)
    lease_id = served.grant()
    renew(client, served, lease_id)
    shown = fetch_status("127.0.0.1", served.server.port)
    assert served.server.secret(lease_id).hex() not in str(shown)
    (peer,), (lease,) = shown.peers, shown.leases
    # A forger says what D's ranks would, under D's name and start, and knows all that is shown.
    forger = ControlClient(engine_id=peer.engine_id, incarnation=peer.incarnation)
    with forger:
        for rank in range(2):
            forged = forger.finish(
                served.address,
                shown.incarnation,
                lease.lease_id,
                b"guessed",
                rank=rank,
                ok=True,
                nonce=b"forged",
            )
            assert forged.result(WAIT_S) is FinishAnswer.REVOKED
        forger.release(served.address, shown.incarnation, {lease_id: b"guessed"}).result(WAIT_S)
    assert served.leases.sweep() == []
    assert [finish(client, served, lease_id, rank=rank) for rank in range(2)] == ["held", "held"]
    counters = served.server.status().counters
    assert counters["errors.authority"] == 3


def test_strangers_handshakes_leave_a_reader_its_place_and_nothing_in_memory(serve, describe):
    served = serve(options=ControlOptions(max_peers=100))
    real = target(served, describe, incarnation="d1")
    lease_id = served.grant()
    assert renew(real, served, lease_id) == {lease_id: LeaseAnswer.HELD}
    stranger = describe("stranger", "0")
    noise = msgspec.structs.replace(
        stranger.ranks[0], endpoints={"shm": b"", "tcp": bytes(2 << 20)}
    )
    client = served.client(stranger)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(120):
            knocks = msgspec.structs.replace(
                stranger, engine_id=f"stranger-{number}", ranks=(noise,)
            )
            client.handshake(served.address, knocks).result(WAIT_S)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 4 << 20  # one message's worth and a few names, of the 240 MiB that came
    assert renew(real, served, lease_id) == {lease_id: LeaseAnswer.HELD}
    assert len(served.server.status().peers) == 100


def test_a_restarted_source_answers_under_the_same_port_and_confirms_nothing_old(serve, describe):
    served = serve(engine_id="prefill")
    client = target(served, describe)
    lease_id = served.grant()
    renew(client, served, lease_id)
    served.server.close()
    port = served.server.port
    again = serve(engine_id="prefill", incarnation="second", port=port)
    with pytest.raises(HandshakeNeededError, match="now runs as second"):
        renew(client, served, lease_id)
    assert finish(client, served, lease_id) == FinishAnswer.REVOKED
    with pytest.raises(HandshakeNeededError):
        served.release(client, lease_id).result(WAIT_S)
    description = describe("decode-0", "d1")
    found = client.handshake(again.address, description).result(WAIT_S)
    assert found.incarnation == "second"
    fresh = again.grant()
    assert renew(client, again, fresh) == {fresh: LeaseAnswer.HELD}


def test_clocks_an_hour_apart_make_no_difference(monkeypatch, serve, describe):
    clock = Clock.install(monkeypatch)
    clock.ahead_s = 3600.0
    table = LeaseTable(duration_s=60.0, max_blocks=100, clock=clock)
    served = serve(leases=table, clock=clock)
    client = target(served, describe)
    kept, dropped = served.grant(), served.grant()
    renew(client, served, kept, dropped)

    def is_dropped():
        assert renew(client, served, kept) == {kept: LeaseAnswer.HELD}
        return dropped not in {lease.lease_id for lease in table.snapshot()}

    until(clock.passing(is_dropped), what="the end of the lease that nobody renews")
    assert finish(client, served, kept) == FinishAnswer.HELD
    assert finish(client, served, dropped) == FinishAnswer.REVOKED
    assert {ended.outcome for ended in table.sweep()} == {LeaseOutcome.DONE, LeaseOutcome.EXPIRED}


def test_released_leases_end_or_are_left_to_another_target(serve, describe):
    served = serve()
    one, two = target(served, describe), target(served, describe, engine_id="decode-1")
    ended, kept = served.grant(), served.grant()
    renew(one, served, ended, kept)
    assert renew(two, served, ended, kept) == dict.fromkeys((ended, kept), LeaseAnswer.TAKEN)
    served.release(one, ended).result(WAIT_S)
    served.release(one, kept, keep=True).result(WAIT_S)
    assert renew(two, served, ended, kept) == {ended: LeaseAnswer.REVOKED, kept: LeaseAnswer.HELD}


def test_a_lease_of_a_target_that_has_gone_is_another_ones_at_once(serve, describe):
    served = serve()
    one, two = target(served, describe), target(served, describe, engine_id="decode-1")
    lease_id = served.grant()
    renew(one, served, lease_id)
    assert renew(two, served, lease_id) == {lease_id: LeaseAnswer.TAKEN}
    one.close()
    # ZeroMQ's thread notices it.
    until(lambda: renew(two, served, lease_id) == {lease_id: LeaseAnswer.HELD}, what="the lease")
    assert finish(two, served, lease_id) == FinishAnswer.HELD


def test_a_rank_that_the_target_does_not_have_is_an_error_and_changes_nothing(serve, describe):
    served = serve()
    client = target(served, describe)
    lease_id = served.grant()
    with pytest.raises(ProtocolError, match="reports rank 1"):
        finish(client, served, lease_id, rank=1)
    assert served.leases.snapshot()[0].target == ""


def test_finishes_that_wait_together_share_a_message_and_each_gets_its_own_answer(serve, describe):
    client = serve().client(describe("decode-0"))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.rcvtimeo = int(WAIT_S * 1000)
        address = f"127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        futures = [
            client.finish(
                address, "i", f"lease-{number}", b"s", rank=0, ok=number % 2 == 0, nonce=b"n"
            )
            for number in range(1000)
        ]
        asked = [router.recv_multipart()]
        assert not router.poll(100)  # the others wait for this one
        counts = []
        while asked:
            who, payload = asked.pop(0)
            finishes = messages.decode_request(payload)
            assert isinstance(finishes, messages.Finishes)
            counts.append(len(finishes.items))
            router.send_multipart([who, messages.encode(confirmed(finishes))])
            if not asked and sum(counts) < 1000:
                asked.append(router.recv_multipart())
        answers = [future.result(WAIT_S) for future in futures]
        assert answers == [FinishAnswer.HELD, FinishAnswer.REVOKED] * 500
    assert counts == [1, 999]


def confirmed(finishes):
    """The answer of a source that confirms what was ok."""
    answer = {True: FinishAnswer.HELD, False: FinishAnswer.REVOKED}
    return messages.FinishReply(
        id=finishes.id, answers=tuple(answer[item.ok] for item in finishes.items)
    )


def test_the_status_shows_everything_an_operator_asks_for(serve, describe):
    served = serve()
    client = target(served, describe, tp=2)
    lease_id = served.grant(num_blocks=5, request_id="cmpl-7")
    renew(client, served, lease_id)
    finish(client, served, lease_id, rank=1)
    transfer = TransferStatus(
        request_id="cmpl-8",
        lease_id="l",
        peer="p",
        bytes_done=3,
        bytes_total=10,
        age_s=1.0,
        progress_s=0.5,
    )
    served.server.set_transfers(lambda: [transfer])
    told = msgspec.structs.replace(served.description, serving_engine="vLLM 0.32.0")
    served.server.set_description(told)
    before = time.time()
    served.server.note_error("transport", "stalled for 10 s")
    report = fetch_status("127.0.0.1", served.server.port, timeout_s=WAIT_S)
    assert (report.engine_id, report.role) == (served.description.engine_id, "kv_producer")
    assert report.incarnation == served.incarnation
    assert report.uptime_s > 0
    assert report.serving_engine == "vLLM 0.32.0"
    (peer,) = report.peers
    assert (peer.engine_id, peer.incarnation, peer.state, peer.ranks) == (
        *("decode-0", "d1", "ready"),
        2,
    )
    (lease,) = report.leases
    assert (lease.lease_id, lease.request_id, lease.num_blocks) == (lease_id, "cmpl-7", 5)
    assert (lease.target, lease.ranks_done) == ("decode-0", (1,))
    assert 0 < lease.remaining_s <= 30
    assert report.transfers == (transfer,)
    assert report.counters["requests.Renew"] == 1
    assert report.counters["errors.transport"] == 1
    (error,) = report.errors
    assert error.message == "stalled for 10 s"
    assert before <= error.time <= time.time()


def test_a_failing_list_of_transfers_is_noted_and_the_rest_is_shown(serve):
    served = serve()

    def fails():
        raise RuntimeError("no list today")

    served.server.set_transfers(fails)
    for _ in range(2):
        report = fetch_status("127.0.0.1", served.server.port, timeout_s=WAIT_S)
    assert report.transfers == ()
    assert "no list today" in report.errors[0].message


def test_a_port_in_use_is_named_with_its_remedy(serve):
    served = serve()
    with pytest.raises(PortInUseError, match=rf"{served.server.port} is taken.*or 0"):
        serve(port=served.server.port)
    fetch_status("127.0.0.1", served.server.port, timeout_s=WAIT_S)


def test_a_port_taken_by_something_else_is_in_use_too():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(PortInUseError):
            ControlServer(
                engine_id="p",
                incarnation="i",
                role="kv_both",
                leases=LeaseTable(max_blocks=1),
                port=other.getsockname()[1],
            )


def test_an_address_that_is_not_of_this_machine_is_a_host_error():
    with pytest.raises(HostError, match="an address of this machine"):
        ControlServer(
            engine_id="p",
            incarnation="i",
            role="kv_both",
            leases=LeaseTable(max_blocks=1),
            host="203.0.113.7",
        )


def test_where_nobody_listens_the_peer_is_lost_at_once_and_found_once_it_is_there(serve, describe):
    description = describe("decode-0")
    client = serve().client(description)
    with socket.socket() as bound:  # does not listen, and keeps other processes from the port
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(PeerLostError, match="nobody listens"):
            client.handshake(f"127.0.0.1:{port}", description).result(WAIT_S)
    served = serve(port=port)
    client.handshake(served.address, description).result(WAIT_S)


def test_when_the_peer_ends_everything_asked_of_it_fails_at_once(serve, describe):
    served = serve()
    description = describe("decode-0")
    # A call is answered just before the end, or it fails; it never waits for its timeout.
    client = served.client(description, ControlOptions(request_timeout_s=2 * WAIT_S))
    client.handshake(served.address, description).result(WAIT_S)
    blocked, resume = threading.Event(), threading.Event()

    def block():
        blocked.set()
        resume.wait(WAIT_S)
        return []

    served.server.set_transfers(block)
    future = client.status(served.address)
    assert blocked.wait(WAIT_S)
    resume.set()
    served.server.close()
    with contextlib.suppress(PeerLostError):
        future.result(WAIT_S)
    with pytest.raises(PeerLostError):
        client.status(served.address).result(WAIT_S)


def test_a_peer_that_does_not_answer_is_lost_after_the_timeout(describe, serve):
    options = ControlOptions(request_timeout_s=0.3)
    description = describe("decode-0")
    client = serve().client(description, options)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        began = time.monotonic()
        futures = [client.status(address) for _ in range(3)]
        for future in futures:
            with pytest.raises(PeerLostError, match="no answer within"):
                future.result(WAIT_S)
        assert time.monotonic() - began > 0.2


def test_an_answer_that_is_none_is_dropped_and_the_thread_goes_on(serve, describe):
    """A peer that answers nonsense, answers what was not asked, or answers with another kind."""
    description = describe("decode-0")
    served = serve()
    client = served.client(description)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        future = client.status(f"127.0.0.1:{port}")
        who, payload = router.recv_multipart()
        asked = messages.decode_request(payload)
        router.send_multipart([who, b"\xc1 nonsense"])
        router.send_multipart([who, b"two", b"frames"])
        router.send_multipart([who, messages.encode(messages.Released(id=asked.id + 1))])
        router.send_multipart([who, messages.encode(messages.Released(id=asked.id))])
        with pytest.raises(ProtocolError, match="expected StatusReply, the peer answered Released"):
            future.result(WAIT_S)
        future = client.renew(f"127.0.0.1:{port}", "i", {"a": b"s"})
        who, payload = router.recv_multipart()
        asked = messages.decode_request(payload)
        router.send_multipart([who, messages.encode(messages.Renewed(id=asked.id, states={}))])
        with pytest.raises(ProtocolError, match="0 leases, asked for 1"):
            future.result(WAIT_S)
        future = client.finish(f"127.0.0.1:{port}", "i", "a", b"s", rank=0, ok=True, nonce=b"n")
        who, payload = router.recv_multipart()
        asked = messages.decode_request(payload)
        odd = messages.FinishReply(id=asked.id, answers=(FinishAnswer.HELD,) * 2)
        router.send_multipart([who, messages.encode(odd)])
        with pytest.raises(ProtocolError, match="2 answers to 1 reports"):
            future.result(WAIT_S)
        future = client.status(f"127.0.0.1:{port}")
        who, payload = router.recv_multipart()
        asked = messages.decode_request(payload)
        error = messages.ErrorReply(id=asked.id, name="NoSuchError", message="hm")
        router.send_multipart([who, messages.encode(error)])
        with pytest.raises(ProtocolError, match="the peer answers: hm"):
            future.result(WAIT_S)
    client.status(served.address).result(WAIT_S)


def test_a_message_over_the_limit_is_refused_before_it_is_sent(serve, describe):
    served = serve()
    description = describe("decode-0")
    client = served.client(description, ControlOptions(max_message_bytes=1000))
    with pytest.raises(ProtocolError, match="max_message_bytes"):
        served.renew(client, *(f"{number:040}" for number in range(100))).result(WAIT_S)


def test_closing_the_client_cancels_what_is_open_and_refuses_what_comes(serve, describe):
    description = describe("decode-0")
    client = serve().client(description)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        futures = [
            client.status(address),
            client.finish(address, "i", "l", b"s", rank=0, ok=True, nonce=b"n"),
        ]
        client.close()
        client.close()
        futures += [
            client.status(address),
            client.finish(address, "i", "l", b"s", rank=0, ok=True, nonce=b"n"),
        ]
        for future in futures:
            with pytest.raises(CancelledError):
                future.result(WAIT_S)


@pytest.mark.parametrize("address", ["nohost", "host:", ":1", "host:0", "host:65536", "host:x", ""])
def test_an_address_that_is_none_is_the_callers_mistake(serve, describe, address):
    client = serve().client(describe("decode-0"))
    with pytest.raises(ValueError, match="address"):
        client.status(address)
    with pytest.raises(ValueError, match="address"):
        client.finish(address, "i", "l", b"s", rank=0, ok=True, nonce=b"n")


def test_a_callback_that_raises_harms_nobody(serve, describe, caplog):
    served = serve()
    client = served.client(describe("decode-0"))

    def raises(future):
        raise RuntimeError("in a callback")

    future = client.status(served.address)
    future.add_done_callback(raises)
    future.result(WAIT_S)
    client.status(served.address).result(WAIT_S)


def test_many_clients_ask_at_once(serve, describe):
    served = serve()
    clients = [target(served, describe, engine_id=f"decode-{number}") for number in range(4)]
    leases = {client: [served.grant() for _ in range(50)] for client in clients}
    futures = []
    for index in range(50):
        for client in clients:
            lease_id = leases[client][index]
            served.renew(client, lease_id)
            futures.append(served.finish(client, lease_id))
    assert {future.result(WAIT_S) for future in futures} == {FinishAnswer.HELD}
    assert len(served.leases.sweep()) == 200


def test_a_client_that_gets_no_socket_says_what_to_raise(monkeypatch):
    monkeypatch.setattr(links, "MAX_SOCKETS", 2)
    with ControlClient(engine_id="d", incarnation="one") as client:
        calls = [client.status(f"127.0.0.1:{port}") for port in (1, 2, 3)]
        said = [str(call.exception(WAIT_S)) for call in calls]
    assert any("ulimit -n" in text for text in said)
