"""A member of the cluster that speaks the protocol perfectly and lies, in one field at a time.

It has shaken hands, holds a lease of its own, and makes its proofs as every member does; what it
does not have is the ticket of the honest engine's lease. Whatever it says, the honest engine keeps
its lease and is told ``held``, and nothing of it ends before it has finished.
"""

import itertools
from typing import Any

import msgspec
import pytest

from kvferry.control import messages
from kvferry.control.leases import Lease, LeaseOutcome, LeaseTable
from kvferry.control.messages import (
    Ask,
    Asked,
    AskState,
    ErrorReply,
    Finish,
    Finishes,
    FinishReply,
    Handshake,
    LeaseAnswer,
    Refused,
    Release,
    Renew,
    Renewed,
)
from kvferry.control.proofs import prove
from kvferry.control.server import ControlService
from kvferry.control.tickets import TransferId

WORD = b"the word: router"
"""With which the router may give back the honest engine's lease, until that engine holds it."""
HONEST, MEMBER, SOURCE = ("d", "d1"), ("m", "m1"), "p1"


class Cluster:
    """A source, an honest engine of two ranks that holds a lease, and the member."""

    def __init__(self, describe):
        self.describe = describe
        self.leases = LeaseTable(max_blocks=100)
        self.service = ControlService(
            engine_id="p", incarnation=SOURCE, role="kv_producer", leases=self.leases
        )
        self.service.set_description(describe("p", SOURCE))
        self.shake_hands(describe(*HONEST, tp=2))
        self.shake_hands(describe(*MEMBER))
        self.lease, self.own = self.grant(), self.grant()
        self.service.give_backs.granted(WORD, self.lease)
        self.transfer = TransferId.begin("127.0.0.1:14579", None)
        self.service.expect(self.transfer)
        assert self.renew(HONEST, self.lease) == LeaseAnswer.HELD
        assert self.renew(MEMBER, self.own) == LeaseAnswer.HELD

    def tell(self, message):
        return messages.decode_reply(self.service.handle(messages.encode(message)))

    def shake_hands(self, description):
        return self.tell(Handshake(id=1, description=description))

    def grant(self):
        lease = self.leases.grant("r", 10)
        assert isinstance(lease, Lease)
        return lease.lease_id

    def proof(self, action, target, lease_id, *said, ticket=None):
        secret = self.service.secret(ticket or lease_id)
        return prove(secret, action, lease_id, *target, SOURCE, *said)

    def renew(self, target, lease_id):
        header = self.header(target)
        proofs = {lease_id: self.proof("Renew", target, lease_id)}
        return self.tell(Renew(**header, leases=proofs)).states[lease_id]

    def finish(self, rank):
        said = (rank, True, b"honest")
        item = Finish(
            lease_id=self.lease,
            rank=rank,
            ok=True,
            nonce=b"honest",
            proof=self.proof("Finish", HONEST, self.lease, *said),
        )
        (answer,) = self.tell(Finishes(**self.header(HONEST), items=(item,))).answers
        return answer

    def header(self, target):
        engine_id, incarnation = target
        return {
            "id": 1,
            "engine_id": engine_id,
            "incarnation": incarnation,
            "source_incarnation": SOURCE,
        }

    def check_unharmed(self):
        """The honest engine goes on as if nobody had said anything."""
        assert self.renew(HONEST, self.lease) == LeaseAnswer.HELD
        for rank in range(2):
            assert self.lease not in {ended.lease_id for ended in self.leases.sweep()}
            assert self.finish(rank) == "held"
        ended = {ended.lease_id: ended for ended in self.leases.sweep()}
        assert ended[self.lease].outcome is LeaseOutcome.DONE
        assert ended[self.lease].target == HONEST


@pytest.fixture
def cluster(describe):
    return Cluster(describe)


NAMES = ("m", "d", "p", "", "x" * 256, "x" * 257, "d\n")
STARTS = ("m1", "d1", "p1", "", "d2")
SOURCES = ("p1", "p2", "", "d1")
PROOFS = ("own", "own as another", "empty", "long")


def proof_of(cluster, kind, action, target, lease_id, *said):
    """The member has no ticket but its own."""
    match kind:
        case "own":
            return cluster.proof(action, target, lease_id, *said, ticket=cluster.own)
        case "own as another":
            return cluster.proof(action, HONEST, lease_id, *said, ticket=cluster.own)
        case "empty":
            return b""
        case _:
            return bytes(65)


def lies():
    """Target, source incarnation and proof, of which one or two are lies."""
    for name, start in itertools.product(NAMES, STARTS):
        yield (name, start), "p1", "own"
    for source, kind in itertools.product(SOURCES, PROOFS):
        yield MEMBER, source, kind
        yield HONEST, source, kind


def is_no_gain(reply):
    """Whether a reply grants nothing."""
    match reply:
        case Renewed():
            return set(reply.states.values()) <= {LeaseAnswer.REVOKED}
        case Asked():
            return reply.state is AskState.NEVER and not reply.ticket
        case FinishReply():
            return set(reply.answers) <= {"revoked"}
        case _:
            return isinstance(reply, ErrorReply | messages.Released)


@pytest.mark.parametrize("lie", range(len(list(lies()))))
@pytest.mark.parametrize("what", ["renew", "release", "keep", "finish", "fail", "ask"])
def test_a_member_that_lies_about_a_lease_gains_nothing_and_harms_nobody(cluster, what, lie):
    target, source, kind = list(lies())[lie]
    header = cluster.header(target) | {"source_incarnation": source}
    lease = cluster.lease
    message: Renew | Release | Ask | Finishes
    for rank in (0, 1, -1, 1 << 40):
        match what:
            case "renew":
                proofs = {lease: proof_of(cluster, kind, "Renew", target, lease)}
                message = Renew(**header, leases=proofs)
            case "release" | "keep":
                keep = what == "keep"
                proofs = {lease: proof_of(cluster, kind, "Release", target, lease, keep)}
                message = Release(**header, leases=proofs, keep=keep)
            case "ask":
                name = cluster.transfer.transfer_id
                proof = proof_of(cluster, kind, "Ask", target, name)
                message = Ask(**header, transfer_id=name, proof=proof)
            case _:
                ok, nonce = what == "finish", b"honest"  # the honest engine's, say it was guessed
                proof = proof_of(cluster, kind, "Finish", target, lease, rank, ok, nonce)
                item = Finish(lease_id=lease, rank=rank, ok=ok, nonce=nonce, proof=proof)
                message = Finishes(**header, items=(item,))
        assert is_no_gain(cluster.tell(message))
    cluster.check_unharmed()


DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "the honest engine, another start": {"engine_id": "d", "incarnation": "d2"},
    "the honest engine's start": {"engine_id": "d", "incarnation": "d1"},
    "the honest engine's start, one rank": {"engine_id": "d", "incarnation": "d1", "tp": 1},
    "the source": {"engine_id": "p", "incarnation": "p1"},
    "the source, another start": {"engine_id": "p", "incarnation": "p2"},
    "an empty name": {"engine_id": "", "incarnation": "m1"},
    "a name that writes on terminals": {"engine_id": "m\x1b[2J", "incarnation": "m1"},
    "no rank": {"ranks": ()},
    "a rank twice": {"ranks": 2},
    "no groups": {"groups": ()},
    "another protocol": {"protocol_min": 99, "protocol_max": 99},
    "no protocol": {"protocol_min": 3, "protocol_max": 1},
}


@pytest.mark.parametrize("lie", DESCRIPTIONS)
def test_a_member_that_lies_about_itself_harms_nobody(cluster, lie):
    said = {"engine_id": "m", "incarnation": "m1", "tp": 2} | DESCRIPTIONS[lie]
    fields = {name: said.pop(name) for name in ("ranks", "groups") if name in said}
    protocol = {name: said.pop(name) for name in list(said) if name.startswith("protocol")}
    described = cluster.describe(said.pop("engine_id"), said.pop("incarnation"), **said)
    if fields.get("ranks") == 2:
        fields["ranks"] = (described.ranks[0],) * 2
    reply = cluster.shake_hands(msgspec.structs.replace(described, **fields, **protocol))
    assert isinstance(reply, ErrorReply | Refused | messages.HandshakeReply)
    cluster.check_unharmed()


def test_a_member_may_end_its_own_lease_as_it_likes_and_nothing_else(cluster):
    """What is left to it: to refuse service to itself."""
    header = cluster.header(MEMBER)
    proofs = {cluster.own: cluster.proof("Release", MEMBER, cluster.own, False)}
    cluster.tell(Release(**header, leases=proofs))
    assert [ended.lease_id for ended in cluster.leases.sweep()] == [cluster.own]
    cluster.check_unharmed()


def test_the_table_fails_for_a_source_that_believes_anybody(cluster, monkeypatch):
    monkeypatch.setattr(ControlService, "_is_proven", lambda *_: True)
    with pytest.raises(AssertionError):
        test_a_member_that_lies_about_a_lease_gains_nothing_and_harms_nobody(
            cluster, "release", next(i for i, lie in enumerate(lies()) if lie[0] == HONEST)
        )
