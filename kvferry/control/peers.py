"""What an engine knows of the other engines: one :class:`Peer` each, in one :class:`PeerTable`."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from kvferry.control.messages import PeerStatus
from kvferry.errors import HandshakeNeededError, IncompatibleError
from kvferry.topology.description import EngineDescription


@dataclass(slots=True)
class Peer:
    """One other engine."""

    description: EngineDescription
    """Without groups and ranks where the peer was refused."""
    state: Literal["ready", "refused"]
    """Refused peers are kept to be shown; nothing is exchanged with them."""
    since: float
    """Clock reading at which this incarnation was first seen."""
    last_seen: float
    """Clock reading of its last message."""
    last_error: str = ""
    superseded: deque[str] = field(default_factory=lambda: deque(maxlen=8))
    """Incarnations that this one has replaced."""

    @property
    def world_size(self) -> int:
        """Ranks of the engine."""
        return len(self.description.ranks)


class PeerTable:
    """All engines that one engine has shaken hands with. Thread-safe."""

    def __init__(
        self,
        *,
        max_peers: int = 1024,
        twin_silence_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        max_peers: peers remembered; the one silent for longest makes room.
        twin_silence_s: seconds for which the newest start of an engine must have been silent
            before an earlier start is listened to again.
        clock: seconds that never run backwards.
        """
        self._max_peers = max_peers
        self._twin_silence_s = twin_silence_s
        self._clock = clock
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}

    def admit(self, description: EngineDescription) -> bool:
        """Applies a handshake that both sides agreed on; says whether an older start was replaced.

        Raises:
            IncompatibleError: a later start of the same engine id is alive: two engines use one id.
        """
        engine_id, incarnation = description.engine_id, description.incarnation
        with self._lock:
            now = self._clock()
            peer = self._peers.get(engine_id)
            if peer is None or peer.state == "refused":
                self._peers[engine_id] = Peer(description, "ready", now, now)
                self._make_room()
                return False
            if peer.description.incarnation == incarnation:
                peer.description, peer.last_seen = description, now
                return False
            if incarnation in peer.superseded and now - peer.last_seen < self._twin_silence_s:
                peer.last_error = f"start {incarnation} came back beside its successor"
                mismatch = (
                    f"engine_id: {engine_id!r} runs as {peer.description.incarnation}, and its "
                    f"earlier start {incarnation} is still alive; give each engine its own "
                    "engine_id"
                )
                raise IncompatibleError(engine_id, [mismatch])
            replaced = Peer(description, "ready", now, now, superseded=peer.superseded)
            replaced.superseded.append(peer.description.incarnation)
            self._peers[engine_id] = replaced
            return True

    def refuse(self, description: EngineDescription, reason: str) -> None:
        """Notes a peer that does not fit; a peer of that id that fits stays as it is."""
        with self._lock:
            now = self._clock()
            peer = self._peers.get(description.engine_id)
            if peer is not None and peer.state == "ready":
                peer.last_error = reason
                return
            # Who can claim to be anybody must not fill our memory with descriptions.
            short = msgspec.structs.replace(description, groups=(), ranks=())
            self._peers[description.engine_id] = Peer(short, "refused", now, now, reason)
            self._make_room()

    def current(self, engine_id: str, incarnation: str) -> Peer:
        """The peer that speaks, if this start of it has shaken hands; marks it as seen.

        Raises:
            HandshakeNeededError: it is unknown, or known as another start.
        """
        with self._lock:
            peer = self._peers.get(engine_id)
            if peer is None or peer.state != "ready":
                raise HandshakeNeededError(
                    f"engine_id: {engine_id!r} has not shaken hands with this engine; do so first"
                )
            if peer.description.incarnation != incarnation:
                raise HandshakeNeededError(
                    f"incarnation: engine {engine_id!r} is known as "
                    f"{peer.description.incarnation}, this message is from {incarnation}; "
                    "handshake again"
                )
            peer.last_seen = self._clock()
            return peer

    def forget(self, engine_id: str) -> None:
        """Drops all state of a peer; unknown ids are ignored."""
        with self._lock:
            self._peers.pop(engine_id, None)

    def snapshot(self) -> tuple[PeerStatus, ...]:
        """Every peer, in the order in which they came."""
        with self._lock:
            now = self._clock()
            return tuple(
                PeerStatus(
                    engine_id=engine_id,
                    incarnation=peer.description.incarnation,
                    state=peer.state,
                    age_s=now - peer.since,
                    last_seen_s=now - peer.last_seen,
                    ranks=peer.world_size,
                    last_error=peer.last_error,
                )
                for engine_id, peer in self._peers.items()
            )

    def _make_room(self) -> None:
        while len(self._peers) > self._max_peers:
            # Refused ones go first: however many of them knock, they displace nobody who fits.
            _, _, engine_id = min(
                (peer.state == "ready", peer.last_seen, name) for name, peer in self._peers.items()
            )
            del self._peers[engine_id]
