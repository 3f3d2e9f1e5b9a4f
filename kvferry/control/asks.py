"""Asks: the targets that want the lease of a transfer before the source can grant a lease.

A router that sends a request to a prefill engine and a decode engine at once gives both engines a
:class:`~kvferry.control.tickets.TransferId`. The target asks the source for the ticket, with a
proof that the router sent the transfer. The source may not have the request yet, or may still
compute it. The source tells every asking target as soon as there is a ticket, or as soon as it is
certain that there will be no ticket::

    unknown ──the request comes──> coming ──a lease is granted──> lent ──it ends──> never
       │                             │ └<── it is revoked, another will follow ─┘      │
       │                             └────────── it is certain that none will be ──────┘
       └─ forgotten after KEPT_S, as is never

This module grants, takes and frees nothing: a ticket from an ask is a ticket like any other.
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
from kvferry.control.tickets import TransferId, transfer_secret

KEPT_S = 60.0
"""Seconds for which the source remembers an ask for an unknown transfer, or a refused transfer."""
MAX_UNKNOWN = 1024
"""Largest number of remembered transfers without a request; the oldest transfer makes room."""
MAX_ASKERS = 4
"""Largest number of connections that hear about a transfer; the oldest connection makes room."""


@dataclass(slots=True)
class _Transfer:
    """The state of a transfer."""

    heard: float
    """Clock reading of the last message about the transfer."""
    secret: bytes | None
    """Secret of the transfer; without a cluster key, ``None`` until the request arrives."""
    answer: Asked
    """Answer to the next ask for this transfer."""
    askers: OrderedDict[bytes, Ask] = field(default_factory=OrderedDict)
    """Connection → last ask on this connection."""


def ask_proof(secret: bytes, ask: Ask) -> bytes:
    """The proof of an ask: the router gave the transfer to the sender of the ask."""
    said = (ask.engine_id, ask.incarnation, ask.source_incarnation)
    return prove(secret, "Ask", ask.transfer_id, *said)


class AskTable:
    """The transfers of a source for which targets may ask. Thread-safe; no method waits."""

    def __init__(self, key: bytes | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Args:
        key: the key of the cluster, from which the secret of any transfer derives. Without a key
            (``None``), the source can check an ask only after the request has brought the secret.
        clock: monotonic clock, in seconds.
        """
        self._key = key
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, _Transfer] = {}
        """Transfers of live requests and open leases, and at most as many as there are of these."""
        self._unknown: OrderedDict[str, _Transfer] = OrderedDict()
        """Transfers without a live request; the transfer with the latest message is last."""

    def ask(self, ask: Ask, connection: bytes) -> Asked | None:
        """Answers an ask and remembers its connection for news; ``None`` if the proof is wrong."""
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

    def expect(self, transfer: TransferId) -> list[bytes]:
        """Records that a request with this transfer has arrived and will be lent.

        Returns:
            The connections whose asks had no valid proof.
        """
        with self._lock:
            name = transfer.transfer_id
            if name in self._known:
                return []  # the router gives each transfer to a single request
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

    def is_asked(self, transfer_id: str) -> bool:
        """Whether a target has asked for an expected transfer, with a valid proof."""
        with self._lock:
            one = self._known.get(transfer_id)
            return one is not None and bool(one.askers)

    def lend(self, transfer_id: str, ticket: str) -> tuple[list[bytes], Asked]:
        """Records the ticket of a granted lease.

        Returns:
            The connections of the asking targets, and the answer for them.
        """
        with self._lock:
            answer = Asked(id=0, transfer_id=transfer_id, state=AskState.LENT, ticket=ticket)
            one = self._known.get(transfer_id)
            if one is None:
                return [], answer
            one.answer = answer
            return list(one.askers), answer

    def recall(self, transfer_id: str) -> None:
        """Records that the granted lease is about to be revoked and another lease will follow.

        Returns:
            See :meth:`lend`.
        """
        with self._lock:
            if (one := self._known.get(transfer_id)) is not None:
                one.answer = Asked(id=0, transfer_id=transfer_id, state=AskState.COMING)

    def deny(self, transfer_id: str, reason: str) -> tuple[list[bytes], Asked]:
        """Records that nothing is lent, now or later. Targets that already know this are not told
        again.

        Returns:
            See :meth:`lend`.
        """
        with self._lock:
            answer = Asked(id=0, transfer_id=transfer_id, state=AskState.NEVER, reason=reason)
            one = self._known.pop(transfer_id, None)
            if one is None:
                return [], answer
            # A target that was told of the lease learns of its end like every target with a ticket.
            told = [] if one.answer.state is AskState.LENT else list(one.askers)
            one.answer, one.heard = answer, self._clock()
            one.askers.clear()
            self._unknown[transfer_id] = one
            if len(self._unknown) > MAX_UNKNOWN:
                self._unknown.popitem(last=False)
            return told, answer

    def expire(self) -> None:
        """Forgets unknown transfers without a message for :data:`KEPT_S` seconds."""
        with self._lock:
            oldest = self._clock() - KEPT_S
            while self._unknown and next(iter(self._unknown.values())).heard <= oldest:
                self._unknown.popitem(last=False)

    def __len__(self) -> int:
        return len(self._known) + len(self._unknown)


def _is_proven(ask: Ask, secret: bytes) -> bool:
    return hmac.compare_digest(ask.proof, ask_proof(secret, ask))
