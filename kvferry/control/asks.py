"""Asks: who wants the lease of a transfer, before its source can grant one, and what became of it.

A router that sends a request to a prefill and a decode engine at once gives both a
:class:`~kvferry.control.tickets.Transfer`. The target asks the source for the ticket, with a proof
that the router sent it. The source may not have heard of the request, or still compute it; it tells
every asker as soon as there is a ticket, or it is certain that there will be none::

    unknown ──the request comes──> coming ──a lease is granted──> lent ──it ends──> never
       │                             │ └<── it is revoked, another will follow ─┘      │
       │                             └────────── it is certain that none will be ──────┘
       └─ forgotten after KEPT_S, as is never

Nothing here grants, takes or frees anything: a ticket that came so is a ticket like any other.
"""

import hmac
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvferry.control.messages import Ask, Asked, AskState
from kvferry.control.proofs import prove
from kvferry.control.tickets import Transfer, transfer_secret

KEPT_S = 60.0
"""Seconds for which an ask for an unknown transfer is remembered, and that nothing was lent."""
MAX_UNKNOWN = 1024
"""Transfers that are remembered although no request here has them; the oldest make room."""
MAX_ASKERS = 4
"""Connections that are told of one transfer; the oldest makes room."""


@dataclass(slots=True)
class _Transfer:
    """What is known of one."""

    heard: float
    """Clock reading at which it was last spoken of."""
    secret: bytes | None
    """``None`` until its request has come, where there is no cluster key to make it from."""
    answer: Asked
    """What who asks now is told."""
    askers: OrderedDict[bytes, Ask] = field(default_factory=OrderedDict)
    """Connection → the last ask on it."""


def ask_proof(secret: bytes, ask: Ask) -> bytes:
    """The proof that an ask carries: its sender was given the transfer by the router."""
    said = (ask.engine_id, ask.incarnation, ask.source_incarnation)
    return prove(secret, "Ask", ask.transfer_id, *said)


class AskTable:
    """The transfers of one source that somebody may ask for. Thread-safe; nothing waits."""

    def __init__(self, key: bytes | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Args:
        key: the cluster's, from which the secret of any transfer follows; ``None`` where there is
            none, so that an ask is judged only once the request itself has brought the secret.
        clock: seconds that never run backwards.
        """
        self._key = key
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, _Transfer] = {}
        """Those of live requests and open leases; as many as the engine has of them."""
        self._unknown: OrderedDict[str, _Transfer] = OrderedDict()
        """Those that no request here has, or has any more; the one spoken of last is the last."""

    def ask(self, ask: Ask, connection: bytes) -> Asked | None:
        """Answers an ask, and remembers where to tell more; ``None`` if the proof is wrong."""
        with self._lock:
            now = self._clock()
            one = self._known.get(ask.transfer_id) or self._unknown.get(ask.transfer_id)
            secret = one.secret if one else transfer_secret(ask.transfer_id, self._key)
            if secret is not None and not _is_proven(ask, secret):
                return None
            if one is None:
                nothing = Asked(id=0, transfer_id=ask.transfer_id, state=AskState.UNKNOWN)
                one = self._unknown[ask.transfer_id] = _Transfer(now, secret, nothing)
                if len(self._unknown) > MAX_UNKNOWN:
                    self._unknown.popitem(last=False)
            one.heard = now
            if ask.transfer_id in self._unknown:
                self._unknown.move_to_end(ask.transfer_id)
            one.askers.pop(connection, None)
            one.askers[connection] = ask
            if len(one.askers) > MAX_ASKERS:
                one.askers.popitem(last=False)
            return replace(one.answer, id=ask.id)

    def expect(self, transfer: Transfer) -> list[bytes]:
        """A request with this transfer has come, and is going to be lent.

        Returns:
            The connections on which somebody asked for it without a right to.
        """
        with self._lock:
            name = transfer.transfer_id
            if name in self._known:
                return []  # the router gives each to one request
            one = self._unknown.pop(name, None)
            answer = Asked(id=0, transfer_id=name, state=AskState.COMING)
            if one is None:
                one = _Transfer(self._clock(), transfer.secret, answer)
            one.secret, one.answer = transfer.secret, answer
            wrong = [at for at, ask in one.askers.items() if not _is_proven(ask, transfer.secret)]
            for connection in wrong:
                del one.askers[connection]
            self._known[name] = one
            return wrong

    def lend(self, transfer_id: str, ticket: str) -> tuple[list[bytes], Asked]:
        """A lease was granted.

        Returns:
            The connections on which to tell who asked, and what.
        """
        with self._lock:
            answer = Asked(id=0, transfer_id=transfer_id, state=AskState.LENT, ticket=ticket)
            one = self._known.get(transfer_id)
            if one is None:
                return [], answer
            one.answer = answer
            return list(one.askers), answer

    def recall(self, transfer_id: str) -> None:
        """The lease that was granted is about to be revoked, and another one will be."""
        with self._lock:
            if (one := self._known.get(transfer_id)) is not None:
                one.answer = Asked(id=0, transfer_id=transfer_id, state=AskState.COMING)

    def deny(self, transfer_id: str, reason: str) -> tuple[list[bytes], Asked]:
        """Nothing will be lent, or is any more; nobody is told if that was known.

        Returns:
            See :meth:`lend`.
        """
        with self._lock:
            answer = Asked(id=0, transfer_id=transfer_id, state=AskState.NEVER, reason=reason)
            one = self._known.pop(transfer_id, None)
            if one is None:
                return [], answer
            # Who was told of the lease hears of its end as everybody does who has a ticket.
            told = [] if one.answer.state is AskState.LENT else list(one.askers)
            one.answer, one.heard = answer, self._clock()
            one.askers.clear()
            self._unknown[transfer_id] = one
            if len(self._unknown) > MAX_UNKNOWN:
                self._unknown.popitem(last=False)
            return told, answer

    def expire(self) -> None:
        """Forgets what is unknown and was not spoken of for long."""
        with self._lock:
            oldest = self._clock() - KEPT_S
            while self._unknown and next(iter(self._unknown.values())).heard <= oldest:
                self._unknown.popitem(last=False)

    def __len__(self) -> int:
        return len(self._known) + len(self._unknown)


def _is_proven(ask: Ask, secret: bytes) -> bool:
    return hmac.compare_digest(ask.proof, ask_proof(secret, ask))
