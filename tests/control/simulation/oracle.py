"""The laws as invariants, judged by what the product cannot see.

The oracle knows when each read began and ended, what it found in the source's blocks, when blocks
were given out and freed, who was told ``held`` in which order, and who gave what up.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvferry.connectors.pull.loads import RankLoad
from kvferry.control import messages
from kvferry.control.leases import EndedLease, LeaseOutcome
from kvferry.control.messages import (
    Ask,
    Asked,
    AskState,
    ErrorReply,
    Finish,
    Finishes,
    FinishReply,
    Handshake,
    HandshakeReply,
    LeaseAnswer,
    Release,
    Renew,
    Renewed,
)
from kvferry.control.options import ControlOptions
from kvferry.control.proofs import lease_of
from kvferry.control.tickets import Ticket, TransferId, verify
from kvferry.errors import DecodeError, KVFerryError
from tests.control.simulation.ranks import SimTransfer
from tests.control.simulation.shapes import KEY
from tests.control.simulation.world import World

if TYPE_CHECKING:
    from tests.control.simulation.engines import Start
    from tests.control.simulation.shapes import Want

LAWS = {
    "a confirmed read ended before its blocks were freed": 3,
    "no load counts that read other blocks": 3,
    "no load counts whose memory was let go": 3,
    "a load counts only when its source said held": 3,
    "a finish follows the end of its reads": 3,
    "a lease is done when each rank has reported": 3,
    "a lease is released by who holds it": 3,
    "a part is never confirmed": 3,
    "a revoked lease is never confirmed": 3,
    "what nobody wants any more is given back": 3,
    "a shared lease is kept while it is read": 3,
    "one target holds a lease": 3,
    "a rank reads a lease once": 3,
    "a block is freed once": 3,
    "no read lands in a block that was freed": 3,
    "one report per rank": 4,
    "a stranger is not believed": 5,
    "an ask is answered with its own ticket": 5,
    "bad messages harm only their sender": 5,
    "nothing before a handshake": 6,
    "slow is not dead": 7,
    "every load and every lease ends": 7,
    "once all is well, loads succeed": 7,
    "no defect of ours": 0,
}
"""Name of each invariant → the law of DESIGN.md that it belongs to."""

PROBE = "probe"
"""How the ids of requests end that come when all has been well for long."""
DROPPED = "dropped"
"""And of those that are aborted at their target, which then must give back what it has asked for.
"""

Target = tuple[str, str]
"""An engine id and an incarnation."""


@dataclass
class Kept:
    """What is known of the blocks of one lease."""

    freed: int | None = None
    """Step in which they were freed."""
    is_swept: bool = False
    is_taken_back: bool = False
    is_revoked: bool = False
    unwritten: set[int] = field(default_factory=set)
    """Ranks of the source that have not written all of it yet."""


@dataclass
class Lent:
    """What is known of one lease, or of one claim on a shared lease."""

    name: str
    ticket: Ticket
    """As it is used: of a claim, with the claim's id."""
    kept: Kept
    """The same for a shared lease and the claims on it."""
    heard: float = 0.0
    """When its last holder took or renewed it."""
    holders: list[Target] = field(default_factory=list)
    """Targets that were told held, in the order of the first time."""
    reported: set[tuple[Target, int]] = field(default_factory=set)
    """Targets and ranks that sent a Finish, or in whose place somebody did who saw the ticket."""
    confirmed: set[tuple[Target, int]] = field(default_factory=set)
    """Targets and ranks whose Finish was answered held."""
    given_up: set[Target] = field(default_factory=set)


class Oracle:
    """Watches one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.leases: dict[str, Lent] = {}
        self.wants: list[Want] = []
        """Every request that a target engine was given."""
        self.handshaken: defaultdict[str, set[Target]] = defaultdict(set)
        """Incarnation of a source → who has shaken hands with it."""
        self.lent_as: defaultdict[str, set[str]] = defaultdict(set)
        """Transfer → its leases."""
        self.refused: set[str] = set()
        """Transfers of which nothing is lent because there is no room."""
        self.given_back: set[str] = set()
        """Names of leases that the router gives back by the word of their requests."""
        self.forged: set[bytes] = set()
        """Messages of strangers who cannot make their proofs."""
        self.must_load = False
        """Whether nothing worse happens than slowness that the product promises to bear."""
        self.outcomes: defaultdict[str, int] = defaultdict(int)

    def require(self, holds: bool, law: str, text: str) -> None:
        """``law`` is broken unless something holds."""
        assert law in LAWS
        if not holds:
            self.world.broken(law, text)

    def name(self, lease_id: str) -> str:
        """A lease's name in the trace, the same in every run."""
        return (
            self.find(lease_id).name if lease_of(lease_id) in self.leases else "a lease of nobody"
        )

    def find(self, lease_id: str) -> Lent:
        """A lease, or a claim on one, which may be heard of for the first time."""
        if lease_id not in self.leases:
            lease = self.leases[lease_of(lease_id)]
            number = sum(other.kept is lease.kept for other in self.leases.values())
            ticket = replace(lease.ticket, lease_id=lease_id)
            self.leases[lease_id] = Lent(f"{lease.name}#{number}", ticket, lease.kept)
        return self.leases[lease_id]

    def plain(self, error: Exception) -> str:
        """An error in the trace, with the names of leases."""
        text = re.sub("[0-9a-f]{32}(/[0-9a-f]+)?", lambda found: self.name(found[0]), str(error))
        return f"{type(error).__name__}: {text}"

    # ---- the source ---------------------------------------------------------------------------

    def given_back_by_word(self, name: str) -> None:
        """The router gives back what a request lends, now and later."""
        self.given_back.add(name)
        for lent in self.leases.values():
            if lent.name == name:
                lent.kept.is_taken_back = True

    def lent(self, ticket: Ticket) -> None:
        """A source has granted a lease."""
        name = f"{ticket.incarnation}/{ticket.request_id}"
        kept = Kept(is_taken_back=name in self.given_back)
        self.leases[ticket.lease_id] = Lent(name, ticket, kept)
        shared = " to anybody" if ticket.shared else ""
        self.world.note(f"{ticket.engine_id} lends {name}{shared}")

    def denied(self, transfer: TransferId, reason: str) -> None:
        """A source says that it lends nothing for a transfer."""
        self.world.note(f"nothing is lent: {self.plain(KVFerryError(reason))}")
        if reason.startswith("max_leased_blocks"):
            self.refused.add(transfer.transfer_id)

    def asked(self, source: "Start", news: Asked) -> None:
        """A source says what became of a transfer."""
        names = ""
        if news.state is AskState.LENT:
            ticket = verify(news.ticket, KEY.encode())
            names = self.name(ticket.lease_id)
            self.require(
                ticket.lease_id in self.lent_as[news.transfer_id],
                "an ask is answered with its own ticket",
                f"{source.incarnation} gives the ticket of {names}",
            )
        self.world.note(f"{source.incarnation} says: {news.state} {names}")

    def swept(self, ended: EndedLease, world_sizes: dict[str, int]) -> None:
        """The lease table says that the blocks of a lease may be freed."""
        lent = self.leases[ended.lease_id]
        self.world.note(f"{lent.name} has ended: {ended.outcome}, {ended.target}")
        kept, law = lent.kept, "a block is freed once"
        self.require(not kept.is_swept, law, f"{lent.name} is swept twice")
        kept.is_swept = True
        if lent.ticket.shared:
            for claim in [one for one in self.leases.values() if one.kept is kept]:
                self._check_claim(claim, world_sizes)
        elif ended.outcome is LeaseOutcome.DONE:
            assert ended.target is not None
            reported = {rank for target, rank in lent.reported if target == ended.target}
            self.require(
                reported == set(range(world_sizes[ended.target[0]])),
                "a lease is done when each rank has reported",
                f"{lent.name} is done, of {ended.target} the ranks {sorted(reported)} reported",
            )
        if lent.ticket.request_id.endswith(DROPPED):
            self._check_dropped(lent, ended)
        if ended.outcome is LeaseOutcome.RELEASED:
            self.require(
                kept.is_taken_back or ended.target in lent.given_up,
                "a lease is released by who holds it",
                f"{lent.name} was released, and {ended.target} did not give it up",
            )

    def _check_dropped(self, lent: Lent, ended: EndedLease) -> None:
        """Of requests whose target is well and has no use for them any more."""
        self.require(
            lent.ticket.shared or ended.outcome is not LeaseOutcome.EXPIRED,
            "what nobody wants any more is given back",
            f"{lent.name} has expired",
        )

    def _check_claim(self, claim: Lent, world_sizes: dict[str, int]) -> None:
        """The lease that a claim is on has ended."""
        if not claim.holders or claim.kept.is_revoked:
            return
        target = claim.holders[-1]
        reported = {rank for who, rank in claim.reported if who == target}
        self.require(
            reported == set(range(world_sizes[target[0]]))
            or target in claim.given_up
            or self.world.now - claim.heard >= 0.99 * ControlOptions().lease_duration_s,
            "a shared lease is kept while it is read",
            f"{claim.name} has ended, of {target} only the ranks {sorted(reported)} have reported",
        )

    def freed(self, lease_id: str) -> None:
        """A source frees the blocks of a lease."""
        lent = self.leases[lease_id]
        self.require(lent.kept.freed is None, "a block is freed once", lent.name)
        lent.kept.freed = self.world.step

    def answered(self, source: "Start", payload: bytes, reply_payload: bytes) -> None:
        """A source has answered a request."""
        reply = messages.decode_reply(reply_payload)
        try:
            request = messages.decode_request(payload)
        except DecodeError:
            law = "bad messages harm only their sender"
            self.require(isinstance(reply, ErrorReply), law, "noise is answered as a request")
            return
        if isinstance(request, Handshake):
            if isinstance(reply, HandshakeReply):
                their = request.description
                self.handshaken[source.incarnation].add((their.engine_id, their.incarnation))
            return
        if isinstance(request, Ask) and isinstance(reply, Asked):
            self._check_asked(source, request, payload, reply)
        if not isinstance(request, Renew | Finishes | Release):
            return
        held: list[str] = []
        target = (request.engine_id, request.incarnation)
        if isinstance(reply, Renewed):
            held = [id for id, answer in reply.states.items() if answer is LeaseAnswer.HELD]
        elif isinstance(reply, FinishReply) and isinstance(request, Finishes):
            pairs = zip(request.items, reply.answers, strict=True)
            items = [item for item, answer in pairs if answer == "held"]
            held = [item.lease_id for item in items]
            for item in items:
                self._check_confirm(self.find(item.lease_id), target, item)
        said = type(reply).__name__ if not isinstance(reply, ErrorReply) else reply.name
        names = ", ".join(self.name(id) for id in held)
        self.world.note(
            f"{source.incarnation} answers {type(request).__name__} of {target[1]}: {said} {names}"
        )
        if held:
            self._check_held(source, request, payload, target, held)

    def _check_asked(self, source: "Start", request: Ask, payload: bytes, reply: Asked) -> None:
        """An ask was answered."""
        target = (request.engine_id, request.incarnation)
        self.asked(source, reply)
        self.require(
            payload not in self.forged or reply.state is AskState.NEVER,
            "a stranger is not believed",
            f"{source.incarnation} answers {target}, who was not given the transfer",
        )
        is_ours = request.source_incarnation == source.incarnation
        self.require(
            is_ours and target in self.handshaken[source.incarnation],
            "nothing before a handshake",
            f"{target} asks {source.incarnation}, and has not shaken hands",
        )

    def _check_confirm(self, lent: Lent, target: Target, item: Finish) -> None:
        """A Finish was answered held; that may be repeated after the end."""
        rank, kept, is_first = item.rank, lent.kept, (target, item.rank) not in lent.confirmed
        where = f"{lent.name} is confirmed to rank {rank} of {target}"
        self.require(
            kept.freed is None or not is_first,
            "a confirmed read ended before its blocks were freed",
            f"{where}, and was freed before",
        )
        self.require(
            not (kept.is_revoked and is_first),
            "a revoked lease is never confirmed",
            f"{where}, and was revoked before",
        )
        self.require(
            not (item.ok and kept.unwritten),
            "a part is never confirmed",
            f"{where}, and ranks {sorted(kept.unwritten)} have not written all of it",
        )
        lent.confirmed.add((target, rank))

    def _check_held(
        self,
        source: "Start",
        request: Renew | Finishes | Release,
        payload: bytes,
        target: Target,
        held: list[str],
    ) -> None:
        names = ", ".join(self.name(id) for id in held)
        self.require(
            payload not in self.forged,
            "a stranger is not believed",
            f"{source.incarnation} says that {target} holds {names} to one who has no ticket",
        )
        law = "nothing before a handshake"
        knows = target in self.handshaken[source.incarnation]
        self.require(knows, law, f"{target} holds {names} and never shook hands")
        is_ours = request.source_incarnation == source.incarnation
        self.require(is_ours, law, f"{names}: the message was for another start of the source")
        for lease_id in held:
            lent = self.find(lease_id)
            if target not in lent.holders:
                lent.holders.append(target)
                lent.heard = self.world.now
            if isinstance(request, Renew):
                lent.heard = self.world.now
            self.require(
                lent.holders[-1] == target,
                "one target holds a lease",
                f"{target} is told that it holds {lent.name}, which is {lent.holders[-1]}'s",
            )

    # ---- the target ---------------------------------------------------------------------------

    def reports(self, target: Target, rank: int, lease_id: str, *, is_reading: bool) -> None:
        """A rank sends a Finish; ``is_reading`` says whether any read of its blocks goes on."""
        lent = self.find(lease_id)
        lent.reported.add((target, rank))
        self.require(
            not is_reading,
            "a finish follows the end of its reads",
            f"rank {rank} of {target} reports {lent.name} and still reads",
        )

    def confirmed(self, target: Target, rank: int, load: RankLoad) -> None:
        """A load has ended on one rank, and counts there."""
        lent = self.find(load.spec.ticket.lease_id)
        ticket, freed = lent.ticket, lent.kept.freed
        self.require(
            (target, rank) in lent.confirmed,
            "a load counts only when its source said held",
            f"rank {rank} of {target}, {lent.name}",
        )
        right = f"{ticket.engine_id}/{ticket.incarnation}/{ticket.request_id}"
        for move in load.moves:
            transfer, where = move.transfer, f"rank {rank} of {target}, {lent.name}"
            assert isinstance(transfer, SimTransfer)
            self.require(
                transfer.is_terminal and (freed is None or freed > transfer.ended_in),
                "a confirmed read ended before its blocks were freed",
                f"{where}: read until step {transfer.ended_in}, freed in step {freed}",
            )
            self.require(
                transfer.found == {right},
                "no load counts that read other blocks",
                f"{where}: it found {sorted(transfer.found)}",
            )

    # ---- the end ------------------------------------------------------------------------------

    def check_end(self, starts: list["Start"]) -> None:
        """After the faults have been over for so long that everything must have ended."""
        law = "every load and every lease ends"
        for want in self.wants:
            self.require(want.outcome != "", law, f"{want.request_id} is still {want.state}")
            self.outcomes[want.outcome] += 1
            is_denied = want.outcome == "denied" and want.transfer_id in self.refused
            ok = want.outcome == "loaded" or is_denied
            if self.must_load and not want.is_aborted:
                self.require(ok, "slow is not dead", f"{want.request_id}: {want.outcome}")
            if want.request_id.endswith(PROBE):
                law2 = "once all is well, loads succeed"
                self.require(ok, law2, f"{want.request_id}: {want.outcome}")
        for start in starts:
            if start.is_dead:
                continue
            where = start.incarnation
            pinned = start.table.num_open, start.table.pinned_blocks
            self.require(pinned == (0, 0), law, f"{where}: {pinned[0]} leases, {pinned[1]} blocks")
            lacking = start.pool.num_held
            self.require(lacking == 0, law, f"{where}: {lacking} blocks are still held")
            counters = start.server.status().counters
            law5 = "bad messages harm only their sender"
            self.require("errors.internal" not in counters, law5, f"{where}: {counters}")
