"""Mistakes that somebody could make, each in one class of the product.

Each has the name of the invariant that must find it.
"""

import math
from concurrent.futures import Future
from typing import Any, ClassVar, TypeAlias

import msgspec
from msgspec.structs import replace

from kvferry.connectors.aggregator import REMEMBERED, KVOutputAggregator, _Ledger
from kvferry.connectors.pull.asks import Asks
from kvferry.connectors.pull.loads import Loads, RankLoadState
from kvferry.connectors.pull.pursuit import PursuitState
from kvferry.connectors.pull.pursuits import Pursuits
from kvferry.connectors.pull.renewals import Renewals
from kvferry.connectors.pull.scheduler import PullScheduler
from kvferry.control import messages
from kvferry.control.client import ControlClient
from kvferry.control.connection import Connection, Ended
from kvferry.control.leases import Lease, LeaseOutcome, LeaseTable
from kvferry.control.messages import AskState, FinishAnswer
from kvferry.control.server import ControlService
from kvferry.control.tickets import SeenTickets, sign
from kvferry.errors import PeerLostError
from tests.control.simulation.play import SLOWNESS
from tests.control.simulation.shapes import Build

# ---- the source ---------------------------------------------------------------------------------


class ConfirmsAfterTheEnd(LeaseTable):
    """A late report is confirmed although the lease has ended."""

    def _late_finish(self, lease_id, target, rank, report):
        return FinishAnswer.HELD


class CountsReports(LeaseTable):
    """Reports are counted, not ranks."""

    def _report(self, entry, rank, report):
        entry.reports[len(entry.reports)] = report
        return FinishAnswer.HELD


class ForgetsFormerHolders(LeaseTable):
    """A target that has lost a lease may have it again."""

    def _renew(self, lease_id, target, now, lives, **more):
        if (entry := self._open.get(lease_id)) is not None:
            entry.former.clear()
        return super()._renew(lease_id, target, now, lives, **more)


class SweepsBeforeEveryRank(LeaseTable):
    """A lease is done when the first rank has reported."""

    def _is_done(self, entry, world_size):
        return bool(entry.reports)


class ChargesPauses(LeaseTable):
    """A lease is charged for time in which its source, or its holder, did not run."""

    def expire(self, **said):
        super().expire()


class RefusesLateRenewals(LeaseTable):
    """A renewal after the deadline is refused, though the blocks are there."""

    def _renew(self, lease_id, target, now, lives, **more):
        entry = self._open.get(lease_id)
        if entry is not None and now >= entry.deadline:
            self._end(entry, LeaseOutcome.EXPIRED)
        return super()._renew(lease_id, target, now, lives, **more)


class ExpectsTargetsAtOnce(LeaseTable):
    """A lease that nobody has taken expires after one duration."""

    def grant(self, request_id, num_blocks, **how):
        lease = super().grant(request_id, num_blocks, **how)
        if isinstance(lease, Lease):
            self._open[lease.lease_id].deadline = self._clock() + lease.duration_s
        return lease


class SweepsTwice(LeaseTable):
    """A lease that has ended is swept again when somebody gives it up."""

    def release(self, engine_id, incarnation, lease_ids, *, keep=False):
        super().release(engine_id, incarnation, lease_ids, keep=keep)
        self._unswept += [self._ended[id] for id in lease_ids if id in self._ended]


class KeepsReports(LeaseTable):
    """The reports of a former holder count for the next one."""

    def _renew(self, lease_id, target, now, lives, **more):
        entry = self._open.get(lease_id)
        reports = {} if entry is None else entry.reports
        answer = super()._renew(lease_id, target, now, lives, **more)
        if entry is not None:
            entry.reports = reports
        return answer


class FreesAfterTheFirstTaker(LeaseTable):
    """A shared lease is over when the first request has loaded."""

    def _end_claim(self, base, ended):
        super()._end_claim(base, ended)
        if ended.outcome is LeaseOutcome.DONE and base.lease.lease_id in self._open:
            self._end(base, LeaseOutcome.DONE)


class KeepsClaims(LeaseTable):
    """The claims on a shared lease outlive it."""

    def _end(self, entry, outcome):
        entry.claims = {}
        super()._end(entry, outcome)

    def _end_claim(self, base, ended):
        base.claims[ended.lease_id] = ended
        super()._end_claim(base, ended)


class KeepsClaimsOnWhatIsFreed(KeepsClaims, FreesAfterTheFirstTaker):
    """A shared lease is over when the first request has loaded, and the others are told held."""


class PublishesTheFastestRank(LeaseTable):
    """A lease is whole as soon as one rank of its source has written it."""

    def _readable(self, entry):
        base = entry.base or entry
        tokens = max(base.written.values(), default=base.num_tokens)
        return tokens if tokens < base.num_tokens else None


class ConfirmsParts(LeaseTable):
    """A lease of which a part is written is confirmed."""

    def _is_whole(self, entry):
        return True


class NeverExpires(LeaseTable):
    """A lease that nobody took is kept for ever."""

    def expire(self, **said):
        pass


class BelievesAnybody(ControlService):
    """Nobody has to prove anything."""

    def _is_proven(self, peer, proof, action, lease_id, *said):
        return True


class AcceptsProofsOfOtherRanks(ControlService):
    """The proof of a Finish may be another rank's."""

    def _is_proven(self, peer, proof, action, lease_id, *said):
        if action == "Finish":
            names, rest = said[:3], said[4:]
            for rank in range(peer.world_size):
                if self._key.accepts(proof, action, lease_id, *names, rank, *rest):
                    return True
        return super()._is_proven(peer, proof, action, lease_id, *said)


class IsEndedByNoise(ControlService):
    """What cannot be decoded is raised."""

    def handle(self, payload, connection=b""):
        messages.decode_request(payload)
        return super().handle(payload, connection)


class KnowsPeersOfTheFormerIncarnation(ControlService):
    """Who has shaken hands before the caches were let go need not do so again."""

    def begin_anew(self, incarnation):
        self.incarnation = incarnation


class KeepsLeasesAtRestart(ControlService):
    """A source that was started again goes on as the start before, with its leases and peers."""

    kept: ClassVar[dict[str, ControlService]] = {}

    def __init__(self, **said):
        super().__init__(**said)
        before = self.kept.get(self.engine_id)
        if before is not None and not self.incarnation.endswith(".1"):  # else it is another run's
            self._key, self.peers, self.incarnation = before._key, before.peers, before.incarnation
            for lease_id, entry in before.leases._open.items():
                self.leases._open[lease_id] = entry
        self.kept[self.engine_id] = self

    def set_description(self, description):
        super().set_description(msgspec.structs.replace(description, incarnation=self.incarnation))


class AnswersWithTheLastTicket(ControlService):
    """Who asks for what is lent is given the ticket of what was lent last."""

    def lend(self, transfer, ticket):
        super().lend(transfer, ticket)
        self.last = self.asks.lend(transfer.transfer_id, sign(ticket, self._cluster_key))[1].ticket

    def _answer_ask(self, request, connection):
        answer = super()._answer_ask(request, connection)
        is_lent = answer.state is AskState.LENT
        return msgspec.structs.replace(answer, ticket=self.last) if is_lent else answer


class KeepsWhatIsPreempted(ControlService):
    """The lease of a prompt that is preempted or aborted is not revoked."""

    def revoke(self, lease_ids):
        pass


# ---- the client ---------------------------------------------------------------------------------


class TakesATimeoutForAYes(ControlClient):
    """A Finish without an answer counts as confirmed."""

    def finish(self, *said, **more):
        confirmed: Future[Any] = Future()

        def answered(future):
            lost = isinstance(future.exception(), PeerLostError)
            if future.exception() is None or lost:
                confirmed.set_result(FinishAnswer.HELD if lost else future.result())
            else:
                confirmed.set_exception(future.exception())

        super().finish(*said, **more).add_done_callback(answered)
        return confirmed


class RenewsForTheFirstStart(ControlClient):
    """Renewals are for the start of the source that this client met first."""

    def renew(self, address, source_incarnation, leases):
        first = self.__dict__.setdefault("first", {})
        return super().renew(address, first.setdefault(address, source_incarnation), leases)


class ForgetsCallsOfBrokenConnections(ControlClient):
    """What was asked on a connection that breaks is never answered."""

    def _drop(self, connection):
        connection.calls.clear()
        super()._drop(connection)


class TakesSlowForLost(ControlClient):
    """A call that is not answered for five seconds fails, though the connection lives."""

    def __init__(self, *, options, **more):
        super().__init__(options=msgspec.structs.replace(options, request_timeout_s=5.0), **more)


class _FirstComeFirstServed(Connection):
    def receive(self):
        ended: Ended = []
        while not self.is_closed and (payload := self.link.receive()) is not None:
            reply = messages.decode_reply(payload)
            if self.calls and reply.id:  # else it is news
                call = self.calls.pop(next(iter(self.calls)))
                ended.append((call, reply))
                ended += self._send_waiting()
        return ended


class TakesAnAnswerForAnothers(ControlClient):
    """Answers are taken for those of the oldest open call, whatever their id."""

    def _connection(self, address, resolved):
        connection = super()._connection(address, resolved)
        if connection is not None:
            connection.__class__ = _FirstComeFirstServed
        return connection


# ---- the sources and loads of a target ----------------------------------------------------------


class GivesUpAtTheFirstLoss(Renewals):
    """A renewal without an answer is the end of its loads."""

    def _renewed(self, source, pursuits, future):
        super()._renewed(source, pursuits, future)
        if isinstance(future.exception(), PeerLostError):
            for pursuit in pursuits:
                self._give_up(pursuit, future.exception())


class TakesSlowForUnreachable(Pursuits):
    """A load fails that has waited for the handshake's time, though nothing has gone wrong."""

    def expire(self, source, now):
        for pursuit in list(source.pursuits.values()):
            if pursuit.awaits_source and not pursuit.is_read and now >= pursuit.deadline:
                self._lose(pursuit, PeerLostError("no answer in time"))


class ForgetsDroppedAsks(Pursuits):
    """A ticket that comes when nobody wants it any more is not given back."""

    def _ticket_came(self, pursuit, text):
        if pursuit.standing.state is not PursuitState.UNWANTED:
            super()._ticket_came(pursuit, text)


class AsksOnce(Asks):
    """A source is asked for a ticket, and not again."""

    def send_due(self, source, now):
        for pursuit in self._of(source.address):
            pursuit.due = math.inf if pursuit.due else 0.0
        super().send_due(source, now)


class ChargesWhoOwesAnAnswer(Asks):
    """A source that does not get to answer has as long as one that has not got the request."""

    def _is_owed(self, pursuit, source):
        return False


class LeavesTheRevokedToTheConfirm(Renewals):
    """A load whose lease is lost goes on, also where it waits for more to read."""

    def _give_up(self, pursuit, error):
        pursuit.due = math.inf
        if not pursuit.is_read:
            self._on_loss(pursuit, error)


class CountsWhatWasLetGo(Loads):
    """Loads that were confirmed count, although their memory was let go before the report."""

    def end(self):
        self._loads.clear()


class EndsAfterAPart(Loads):
    """The first part of a load is taken for all of it."""

    def _read(self, load, peer):
        super()._read(load, peer)
        if load.moves and load.state is RankLoadState.READING:
            load.state = RankLoadState.ALL_BEGUN
            self._look(load)


class KeepsWhatWasRead(Loads):
    """What was read under a lease that was revoked counts under the next one."""

    def _read_on(self, spec):
        if spec.replaces in self._loads:
            self._loads[spec.ticket.lease_id] = self._loads.pop(spec.replaces)
        super()._read_on(replace(spec, replaces=""))


class ReportsWithANewNonce(Loads):
    """A Finish is repeated as another report."""

    def _ask(self, load):
        load.confirm.nonce = load.confirm.attempts.to_bytes(8)
        super()._ask(load)


class ReportsWhatIsCancelled(Loads):
    """A load that is given up is reported at once, while it is still read."""

    def _give_up(self, load, error):
        super()._give_up(load, error)
        if load.state is not RankLoadState.CONFIRMING:
            self._confirm(load)


class TakesTicketsTwice(PullScheduler):
    """A ticket may be used again."""

    def on_new_request(self, request):
        self.sources.pursuits.tickets.seen = SeenTickets()
        super().on_new_request(request)


class PublishesWhatIsPlanned(PullScheduler):
    """What a step will write is published before the ranks have written it."""

    def build_connector_meta(self, scheduler_output):
        step = super().build_connector_meta(scheduler_output)
        for lent in step.writes:
            for rank in range(self._context.world_size):
                self.server.written(lent.lease_id, rank, lent.num_tokens)
        return step


class CountsReportsOfRanks(KVOutputAggregator):
    """A request is finished when so many reports have come as there are ranks."""

    def __init__(self, world_size):
        super().__init__(world_size)
        self._recving = _Counting(REMEMBERED)


class _Counting(_Ledger):
    def report(self, rank, request_ids, expected):
        completed = set()
        for request_id in request_ids:
            if request_id not in self.finished:
                _, reports = self.pending.setdefault(request_id, (expected, set()))
                reports.add(len(reports))
                if len(reports) >= expected:
                    del self.pending[request_id]
                    self._remember(request_id)
                    completed.add(request_id)
        return completed


_FREED = "a confirmed read ended before its blocks were freed"
_DONE = "a lease is done when each rank has reported"
_SLOW = "slow is not dead"
_HEALED = "once all is well, loads succeed"

_FINISH = "a finish follows the end of its reads"
_LET_GO = "no load counts whose memory was let go"
_FOUND = "no load counts that read other blocks"
_ENDS = "every load and every lease ends"
_HELD = "a load counts only when its source said held"
_STRANGER = "a stranger is not believed"
_PART = "a part is never confirmed"
_REVOKED = "a revoked lease is never confirmed"
_SHARED = "a shared lease is kept while it is read"

Found: TypeAlias = tuple[str, tuple[str, ...]]

DEFECTS: dict[Build, Found] = {
    Build(table=ConfirmsAfterTheEnd): (_FREED, ("restart a target",)),
    Build(table=CountsReports): (_DONE, ("break", "breaks")),
    Build(table=KeepsReports): (_DONE, ("twin", "slow_reads")),
    Build(table=SweepsBeforeEveryRank): (_DONE, ()),
    Build(table=ForgetsFormerHolders): ("one target holds a lease", ("twin", "slow_reads")),
    Build(table=SweepsTwice): ("a block is freed once", ("twin",)),
    Build(table=FreesAfterTheFirstTaker): (_SHARED, ()),
    Build(table=KeepsClaimsOnWhatIsFreed): (_FREED, ()),
    Build(table=PublishesTheFastestRank): (_PART, ()),
    Build(table=ConfirmsParts, loads=EndsAfterAPart): (_PART, ()),
    Build(scheduler=PublishesWhatIsPlanned): (_FOUND, ()),
    Build(service=KeepsWhatIsPreempted): (_REVOKED, ("preempts",)),
    Build(renewals=LeavesTheRevokedToTheConfirm): (_ENDS, ("preempts",)),
    Build(service=AnswersWithTheLastTicket): ("an ask is answered with its own ticket", ()),
    Build(pursuits=ForgetsDroppedAsks): ("what nobody wants any more is given back", ()),
    Build(asks=AsksOnce): (_HEALED, ()),
    Build(asks=ChargesWhoOwesAnAnswer): (_SLOW, (SLOWNESS,)),
    Build(table=NeverExpires): (_ENDS, ("restart a target",)),
    Build(table=ChargesPauses): (_SLOW, (SLOWNESS,)),
    Build(table=RefusesLateRenewals): (_SLOW, (SLOWNESS,)),
    Build(table=ExpectsTargetsAtOnce): (_SLOW, (SLOWNESS,)),
    Build(service=BelievesAnybody): (_STRANGER, ("forge",)),
    Build(service=AcceptsProofsOfOtherRanks): (_STRANGER, ("alter",)),
    Build(service=IsEndedByNoise): ("bad messages harm only their sender", ("babble",)),
    Build(service=KnowsPeersOfTheFormerIncarnation): ("nothing before a handshake", ("nap",)),
    Build(loads=CountsWhatWasLetGo): (_LET_GO, ("nap",)),
    Build(service=KeepsLeasesAtRestart): ("nothing before a handshake", ("restart a source",)),
    Build(client=TakesATimeoutForAYes): (_HELD, ("restart a source",)),
    Build(client=TakesAnAnswerForAnothers): (_HELD, ("delay", "repeat", "twin")),
    Build(client=RenewsForTheFirstStart): (_HEALED, ("restart a source",)),
    Build(client=ForgetsCallsOfBrokenConnections): (_ENDS, ("breaks",)),
    Build(renewals=GivesUpAtTheFirstLoss): (_SLOW, ()),
    Build(client=TakesSlowForLost): (_SLOW, (SLOWNESS,)),
    Build(pursuits=TakesSlowForUnreachable): (_SLOW, (SLOWNESS,)),
    Build(loads=KeepsWhatWasRead): (_FOUND, ("preempts",)),
    Build(loads=ReportsWithANewNonce): (_SLOW, ()),
    Build(loads=ReportsWhatIsCancelled): (_FINISH, ("abort", "slow_reads")),
    Build(scheduler=TakesTicketsTwice): ("a rank reads a lease once", ()),
    Build(aggregator=CountsReportsOfRanks): ("one report per rank", ("stutter",)),
}
"""What is wrong → the invariant that finds it, and what must happen in a run for that."""
