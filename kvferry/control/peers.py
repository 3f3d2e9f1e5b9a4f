"""What an engine knows of the other engines: one :class:`Peer` for each start of each, in one
:class:`PeerTable`.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvferry.control.messages import PeerStatus
from kvferry.errors import HandshakeNeededError, IncompatibleError
from kvferry.topology.description import EngineDescription

MAX_ERROR_CHARS = 1000
"""Characters of an error that are kept of a peer."""
KEPT_S = 600.0
"""Seconds without a message after which a peer that is not connected is forgotten."""
LOOK_S = 60.0
"""Seconds between two looks for such peers."""


@dataclass(slots=True)
class Peer:
    """One start of another engine. Nothing that it sent is kept but its names and its size."""

    engine_id: str
    incarnation: str
    world_size: int
    """Ranks of the engine."""
    state: Literal["ready", "refused"]
    """Refused peers are kept to be shown; nothing is exchanged with them."""
    since: float
    """Clock reading at which it was first seen."""
    last_seen: float
    """Clock reading of its last message."""
    last_error: str = ""
    connection: bytes = b""
    """How our socket names the connection on which it last renewed a lease; empty before."""
    is_trusted: bool = False
    """Whether it has shown a ticket of ours, or we asked it for KV: who has done neither makes
    room first."""
    is_source: bool = False
    """Whether we ask it for KV: it need not say anything itself to be kept."""
    loaded_bytes: int = 0
    """KV bytes that our ranks have loaded from it."""
    transport: str = ""
    """What moved the last of them."""


class PeerTable:
    """All engines that one engine has shaken hands with. Thread-safe.

    Anybody may shake hands under any name, so a handshake takes nothing from anybody: two starts
    of one engine stand side by side until one of them is silent. What they may do is decided lease
    by lease, see :mod:`kvferry.control.proofs`.
    """

    def __init__(
        self,
        *,
        max_peers: int = 1024,
        silence_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        max_peers: peers remembered. First refused ones make room, then such as have shown no
            ticket or are silent, the longest silent one first.
        silence_s: seconds without a message after which a peer counts as silent; a start that
            has a successor is dropped then.
        clock: seconds that never run backwards.
        """
        self._max_peers = max_peers
        self._silence_s = silence_s
        self._clock = clock
        self._lock = threading.Lock()
        self._peers: dict[tuple[str, str], Peer] = {}
        self._starts: dict[str, dict[str, Peer]] = {}
        """The same by engine id and incarnation, the newest start of an engine last."""
        self._next_look = 0.0

    def admit(self, description: EngineDescription, *, asked: bool = False) -> None:
        """Applies a handshake that both sides agreed on.

        Args:
            description: of the other engine.
            asked: whether we asked for the handshake, at the address of a ticket or of ``peers``.

        Raises:
            IncompatibleError: this start has shaken hands with another number of ranks.
        """
        key, ranks = _key(description), len(description.ranks)
        with self._lock:
            now = self._clock()
            peer = self._peers.get(key)
            if peer is not None and peer.state == "ready":
                if peer.world_size != ranks:
                    mismatch = (
                        f"ranks: start {key[1]} of engine {key[0]!r} shook hands with "
                        f"{peer.world_size} ranks, now it describes {ranks}; give each engine its "
                        "own engine_id"
                    )
                    raise IncompatibleError(key[0], [mismatch])
                peer.last_seen = now
            else:
                peer = Peer(*key, ranks, "ready", now, now)
                self._enter(peer)
            peer.is_trusted |= asked
            peer.is_source |= asked

    def refuse(self, description: EngineDescription, reason: str) -> None:
        """Notes a peer that does not fit; a start that fits stays as it is."""
        key, reason = _key(description), reason[:MAX_ERROR_CHARS]
        with self._lock:
            now = self._clock()
            peer = self._peers.get(key)
            if peer is not None and peer.state == "ready":
                peer.last_error = reason
            else:
                self._enter(Peer(*key, len(description.ranks), "refused", now, now, reason))

    def current(self, engine_id: str, incarnation: str) -> Peer:
        """The peer that speaks, if this start of it has shaken hands; marks it as seen.

        Raises:
            HandshakeNeededError: it has not, or it was dropped since.
        """
        with self._lock:
            peer = self._peers.get((engine_id, incarnation))
            if peer is None or peer.state != "ready":
                raise HandshakeNeededError(
                    f"engine_id: start {incarnation} of {engine_id!r} has not shaken hands with "
                    "this engine; do so first"
                )
            peer.last_seen = self._clock()
            return peer

    def connection(self, engine_id: str, incarnation: str) -> bytes:
        """The connection on which a start of an engine last renewed a lease; empty if none did."""
        with self._lock:
            peer = self._peers.get((engine_id, incarnation))
            return b"" if peer is None else peer.connection

    def loaded(self, engine_id: str, nbytes: int, transport: str) -> None:
        """Counts what one of our ranks has loaded from an engine, for its newest start."""
        with self._lock:
            if starts := self._starts.get(engine_id):
                peer = next(reversed(starts.values()))
                peer.loaded_bytes += nbytes
                peer.transport = transport

    def forget(self, engine_id: str) -> None:
        """Drops all starts of an engine; unknown ids are ignored."""
        with self._lock:
            for peer in list(self._starts.get(engine_id, {}).values()):
                self._drop(peer)

    def let_go(self, description: EngineDescription) -> None:
        """A start of an engine is not asked for KV any more; unknown ones are ignored."""
        with self._lock:
            if (peer := self._peers.get(_key(description))) is not None:
                peer.is_source = False

    def expire(self, lives: Callable[[tuple[str, str]], bool]) -> None:
        """Forgets those who have said nothing for :data:`KEPT_S` and are gone. To be called often;
        it looks every :data:`LOOK_S`. Who was forgotten and speaks again is to shake hands.

        Args:
            lives: whether the connection of an engine's start lives; called without our lock.
        """
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        with self._lock:
            silent = [
                peer
                for peer in self._peers.values()
                if peer.last_seen <= now - KEPT_S and not peer.is_source
            ]
        gone = [peer for peer in silent if not lives((peer.engine_id, peer.incarnation))]
        with self._lock:
            for peer in gone:
                if peer.last_seen <= now - KEPT_S:
                    self._drop(peer)

    def snapshot(self) -> tuple[PeerStatus, ...]:
        """Every peer, in the order in which they came."""
        with self._lock:
            now = self._clock()
            newest = {peer.engine_id: peer for peer in self._peers.values()}
            return tuple(
                PeerStatus(
                    engine_id=peer.engine_id,
                    incarnation=peer.incarnation,
                    state=peer.state,
                    age_s=now - peer.since,
                    last_seen_s=now - peer.last_seen,
                    ranks=peer.world_size,
                    last_error=peer.last_error or _twin(peer, newest[peer.engine_id]),
                    loaded_bytes=peer.loaded_bytes,
                    transport=peer.transport,
                )
                for peer in self._peers.values()
            )

    def _enter(self, peer: Peer) -> None:
        gone = peer.since - self._silence_s
        for other in list(self._starts.get(peer.engine_id, {}).values()):
            if other.incarnation == peer.incarnation or other.last_seen <= gone:
                self._drop(other)  # the same start too, so that it is the newest
        self._peers[peer.engine_id, peer.incarnation] = peer
        self._starts.setdefault(peer.engine_id, {})[peer.incarnation] = peer
        if len(self._peers) > self._max_peers:
            # Whoever knocks, however often, displaces nobody who reads or is read from.
            least = min(
                self._peers.values(),
                key=lambda one: (
                    one.is_trusted and one.last_seen > gone,
                    one.state == "ready",
                    one.last_seen,
                ),
            )
            self._drop(least)

    def _drop(self, peer: Peer) -> None:
        key = peer.engine_id, peer.incarnation
        if self._peers.get(key) is not peer:
            return  # another has taken its place
        del self._peers[key]
        starts = self._starts[peer.engine_id]
        del starts[peer.incarnation]
        if not starts:
            del self._starts[peer.engine_id]


def _key(description: EngineDescription) -> tuple[str, str]:
    return description.engine_id, description.incarnation


def _twin(peer: Peer, newest: Peer) -> str:
    """What there is to say of a start that was heard after its engine was started again."""
    if peer is newest or peer.last_seen <= newest.since:
        return ""
    return (
        f"it was heard beside start {newest.incarnation} of the same engine_id; give each engine "
        "its own engine_id"
    )
