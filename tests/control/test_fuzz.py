"""Nearly right messages at the control port, in tickets, and in what a server answers.

After each batch the honest engine's lease still stands, and nothing has piled up.
"""

import contextlib
import tracemalloc

import msgspec
import pytest

from kvferry.control import messages
from kvferry.control.asks import ask_proof
from kvferry.control.messages import (
    Ask,
    Asked,
    AskState,
    DescriptionReply,
    DescriptionRequest,
    Finish,
    FinishAnswer,
    Finishes,
    FinishReply,
    Handshake,
    HandshakeReply,
    LeaseAnswer,
    Refused,
    Release,
    Renew,
    Renewed,
    StatusReply,
    StatusRequest,
    TakeBack,
)
from kvferry.control.tickets import Ticket, TransferId, read_transfer, sign, verify
from kvferry.errors import DecodeError, TicketError
from tests.control.test_members import HONEST, MEMBER, WORD, Cluster
from tests.fuzzing import nearly

BATCH = 1000
COUNTS = [
    pytest.param(10_000, 0, id="short"),
    pytest.param(100_000, 1, id="long", marks=pytest.mark.slow),
    # A million, in parts that a slow machine ends in time.
    *(
        pytest.param(100_000, seed, id=f"soak-{seed}", marks=pytest.mark.soak)
        for seed in range(2, 11)
    ),
]


def requests_of(cluster):
    """What the member may say, with good proofs of its own lease; and the same in D's name."""
    for target in (MEMBER, HONEST):
        header, own = cluster.header(target), cluster.own
        said = (0, True, b"nonce")
        item = Finish(
            lease_id=own,
            rank=0,
            ok=True,
            nonce=b"nonce",
            proof=cluster.proof("Finish", target, own, *said),
        )
        yield Handshake(id=1, description=cluster.describe(*target, tp=2, pp=1))
        yield Renew(**header, leases={own: cluster.proof("Renew", target, own)})
        yield Release(
            **header, leases={own: cluster.proof("Release", target, own, True)}, keep=True
        )
        yield Finishes(**header, items=(item, item))
        transfer = TransferId("a" * 32 + "@127.0.0.1:14579", bytes(16))
        ask = Ask(**header, transfer_id=transfer.transfer_id, proof=b"")
        yield msgspec.structs.replace(ask, proof=ask_proof(transfer.secret, ask))
    yield StatusRequest(id=3)
    yield TakeBack(id=5, word=WORD)
    yield DescriptionRequest(id=4)


@pytest.mark.parametrize(("count", "seed"), COUNTS)
def test_nearly_right_requests_harm_nobody(describe, count, seed):
    cluster = Cluster(describe)
    tracemalloc.start()
    try:
        for number, data in enumerate(nearly(list(requests_of(cluster)), count, seed=seed)):
            messages.decode_reply(cluster.service.handle(data))  # there is always a good reply
            if number % BATCH == 0:
                assert cluster.renew(HONEST, cluster.lease) == LeaseAnswer.HELD
                if number == BATCH:
                    before = tracemalloc.get_traced_memory()[0]
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # A thousand peers with names, and the last errors; no description, however many came.
    assert grown < 8 << 20, grown
    assert "errors.internal" not in cluster.service.status().counters
    cluster.check_unharmed()


@pytest.mark.parametrize(("count", "seed"), COUNTS)
def test_nearly_right_answers_are_decoded_or_refused(describe, count, seed):
    cluster = Cluster(describe)
    replies = [
        HandshakeReply(id=1, description=describe("p", "p1", tp=2)),
        Refused(id=1, engine_id="p", mismatches=("a", "b")),
        Renewed(id=1, states={"a": LeaseAnswer.HELD}),
        FinishReply(id=1, answers=(FinishAnswer.HELD, FinishAnswer.REVOKED)),
        Asked(id=1, transfer_id="a", state=AskState.LENT, ticket="t"),
        StatusReply(id=1, report=cluster.service.status()),
        DescriptionReply(id=1, role="kv_both", description=describe("p", "p1")),
    ]
    for data in nearly(replies, count, seed=seed):
        with contextlib.suppress(DecodeError):  # nothing else may be raised
            messages.decode_reply(data)


@pytest.mark.parametrize(("count", "seed"), COUNTS)
def test_nearly_right_tickets_are_refused_by_name(count, seed):
    key = b"k" * 32
    ticket = Ticket(
        lease_id="a" * 32,
        engine_id="p",
        incarnation="p1",
        secret=bytes(16),
        host="127.0.0.1",
        port=14579,
        request_id="r",
        num_tokens=40,
        block_ids=((3, 9, 200_000), (1,)),
        lease_duration_s=30.0,
        content={"lora": "x"},
    )
    good = sign(ticket, key)
    for data in nearly([ticket, good], count, seed=seed):
        for text in (_signed(data, key), data.decode("latin-1")):
            with contextlib.suppress(TicketError):  # nothing else may be raised
                verify(text, key)


@pytest.mark.parametrize(("count", "seed"), COUNTS)
def test_nearly_right_transfers_are_refused_by_name(count, seed):
    good = TransferId.begin("[fd00::1]:14579", b"k" * 32).text
    for data in nearly([good], count, seed=seed):
        for key in (b"k" * 32, None):
            with contextlib.suppress(TicketError):  # nothing else may be raised
                read_transfer(data.decode("latin-1"), key)


def _signed(data, key):
    """Any bytes as a ticket that carries a good signature."""
    from kvferry.control import tickets

    return f"{tickets.to_text(data)}.{tickets.to_text(tickets.mac(data, key))}"


def test_the_mutations_reach_the_code_behind_the_schema(describe):
    """Most are refused by the schema; enough are not, and are answered as requests."""
    cluster = Cluster(describe)
    answered = 0
    for data in nearly(list(requests_of(cluster)), 2000, seed=7):
        try:
            messages.decode_request(data)
        except DecodeError:
            continue
        answered += 1
    assert 200 < answered < 1800
    assert msgspec.msgpack.decode(next(nearly([StatusRequest(id=1)], 1, seed=0))) is not None
