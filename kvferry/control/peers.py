"""The peers of an engine: a :class:`PeerRecord` for each incarnation of each other engine, in a
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
"""Largest number of characters of an error kept for a peer."""
KEPT_S = 600.0
"""Seconds without a message after which a peer without a connection is forgotten."""
LOOK_S = 60.0
"""Seconds between two checks for such peers."""


@dataclass(slots=True)
class PeerRecord:
    """An incarnation of another engine. Of its description, only names and size are kept."""

    engine_id: str
    incarnation: str
    world_size: int
    """Number of ranks of the engine."""
    state: Literal["ready", "refused"]
    """State of the peer. Refused peers are kept for the status only; nothing is exchanged with
    them."""
    since: float
    """Clock reading at which the peer was first seen."""
    last_seen: float
    """Clock reading of the peer's last message."""
    last_error: str = ""
    connection: bytes = b""
    """The socket's name of the connection on which the peer last renewed a lease; empty before."""
    is_trusted: bool = False
    """Whether the peer has shown a ticket of this engine, or this engine asked the peer for KV.
    Other peers make room first."""
    is_source: bool = False
    """Whether this engine asks the peer for KV; such a peer is kept even if it sends nothing."""
    loaded_bytes: int = 0
    """Number of KV bytes loaded from the peer by ranks of this engine."""
    transport: str = ""
    """Name of the transport that moved the last of these bytes."""


class PeerTable:
    """All engines with which an engine has shaken hands. Thread-safe.

    Any engine may shake hands under any name, so a handshake removes no other peer: two
    incarnations of an engine coexist until either of them is silent. Their rights are decided lease
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
        max_peers: number of remembered peers. First refused peers make room, then peers that have
            shown no ticket or are silent; among these, the peer that was silent for longest.
        silence_s: seconds without a message after which a peer counts as silent; a silent
            incarnation with a successor is dropped.
        clock: monotonic clock, in seconds.
        """
        self._max_peers = max_peers
        self._silence_s = silence_s
        self._clock = clock
        self._lock = threading.Lock()
        self._peers: dict[tuple[str, str], PeerRecord] = {}
        self._starts: dict[str, dict[str, PeerRecord]] = {}
        """Engine id → incarnation → peer; the newest incarnation is last."""
        self._next_look = 0.0

    def admit(self, description: EngineDescription, *, asked: bool = False) -> None:
        """Applies a handshake that both sides agreed on.

        Args:
            description: the description of the other engine.
            asked: whether this engine began the handshake, at the address of a ticket or of
                ``peers``.

        Raises:
            IncompatibleError: this incarnation has shaken hands with another number of ranks.
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
                peer = PeerRecord(*key, ranks, "ready", now, now)
                self._enter(peer)
            peer.is_trusted |= asked
            peer.is_source |= asked

    def refuse(self, description: EngineDescription, reason: str) -> None:
        """Records a peer that does not fit; an incarnation that fits does not change."""
        key, reason = _key(description), reason[:MAX_ERROR_CHARS]
        with self._lock:
            now = self._clock()
            peer = self._peers.get(key)
            if peer is not None and peer.state == "ready":
                peer.last_error = reason
            else:
                self._enter(PeerRecord(*key, len(description.ranks), "refused", now, now, reason))

    def current(self, engine_id: str, incarnation: str) -> PeerRecord:
        """The peer of a message, if this incarnation has shaken hands; marks the peer as seen.

        Raises:
            HandshakeNeededError: the incarnation has not shaken hands, or was dropped since.
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
        """The connection on which an incarnation last renewed a lease; empty if there is none."""
        with self._lock:
            peer = self._peers.get((engine_id, incarnation))
            return b"" if peer is None else peer.connection

    def loaded(self, engine_id: str, nbytes: int, transport: str) -> None:
        """Counts bytes that a rank of this engine has loaded from an engine's newest start."""
        with self._lock:
            if starts := self._starts.get(engine_id):
                peer = next(reversed(starts.values()))
                peer.loaded_bytes += nbytes
                peer.transport = transport

    def forget(self, engine_id: str) -> None:
        """Drops all incarnations of an engine; unknown ids are ignored."""
        with self._lock:
            for peer in list(self._starts.get(engine_id, {}).values()):
                self._drop(peer)

    def forget_all(self) -> None:
        """Drops all peers."""
        with self._lock:
            self._peers.clear()
            self._starts.clear()

    def let_go(self, description: EngineDescription) -> None:
        """Records that this engine asks an incarnation for KV no more; unknown ones are ignored."""
        with self._lock:
            if (peer := self._peers.get(_key(description))) is not None:
                peer.is_source = False

    def expire(self, lives: Callable[[tuple[str, str]], bool]) -> None:
        """Forgets peers that have sent nothing for :data:`KEPT_S` and are gone. Call this method
        often; it checks every :data:`LOOK_S`. A forgotten peer must shake hands before its next
        message.

        Args:
            lives: whether the connection of an incarnation is alive; called without this table's
                lock.
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
        """The status of every peer, in the order in which peers arrived."""
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

    def _enter(self, peer: PeerRecord) -> None:
        gone = peer.since - self._silence_s
        for other in list(self._starts.get(peer.engine_id, {}).values()):
            if other.incarnation == peer.incarnation or other.last_seen <= gone:
                self._drop(other)  # also the same incarnation, so that it becomes the newest
        self._peers[peer.engine_id, peer.incarnation] = peer
        self._starts.setdefault(peer.engine_id, {})[peer.incarnation] = peer
        if len(self._peers) > self._max_peers:
            # Handshakes, however many, must not displace a peer that reads or is read from.
            least = min(
                self._peers.values(),
                key=lambda one: (
                    one.is_trusted and one.last_seen > gone,
                    one.state == "ready",
                    one.last_seen,
                ),
            )
            self._drop(least)

    def _drop(self, peer: PeerRecord) -> None:
        key = peer.engine_id, peer.incarnation
        if self._peers.get(key) is not peer:
            return  # another peer has taken its place
        del self._peers[key]
        starts = self._starts[peer.engine_id]
        del starts[peer.incarnation]
        if not starts:
            del self._starts[peer.engine_id]


def _key(description: EngineDescription) -> tuple[str, str]:
    return description.engine_id, description.incarnation


def _twin(peer: PeerRecord, newest: PeerRecord) -> str:
    """The remark about an incarnation that sent a message after its engine was restarted."""
    if peer is newest or peer.last_seen <= newest.since:
        return ""
    return (
        f"it was heard beside start {newest.incarnation} of the same engine_id; give each engine "
        "its own engine_id"
    )
