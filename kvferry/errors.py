"""The errors of kvferry, named by what the caller should do.

    KVFerryError                     something outside this process's own arguments went wrong
    ├── ConfigError                  correct the configuration, then start again
    │   └── PluginError              install or correct a connector or transport plugin
    ├── HostError                    mend the machine: a port in use, a full /dev/shm
    │   ├── PortInUseError
    │   └── SharedMemoryError
    ├── BlockError                   correct the block table; nothing was moved
    │   ├── BlockTableError          a table is too short, or names a block twice
    │   ├── BlockIdError             a block id lies outside the memory
    │   ├── NullBlockError           a source table holds the null block inside the span
    │   └── OutOfBlocksError         more tokens than blocks; wait, or enlarge the pool
    ├── IncompatibleError            the two engines can never exchange KV; lists every mismatch
    ├── NotReadyError                the peer cannot answer yet; ask again later
    │   └── HandshakeNeededError     one side is a new start; handshake, then ask again
    ├── ProtocolError                a peer sent what we cannot accept; it harms itself only
    │   ├── DecodeError              bytes that do not decode against the schema
    │   └── BoundsError              numbers that leave the memory they speak of
    ├── TicketError                  do not load with this ticket
    │   ├── TicketForgedError
    │   └── TicketExpiredError       too old, replayed, or from an earlier start of the engine
    ├── LeaseError                   the source no longer holds the blocks for us; recompute or fail
    │   ├── LeaseRevokedError
    │   └── LeaseTakenError          another target engine holds it
    ├── TransferError                this load failed; the request may recompute or fail
    │   ├── PeerLostError            the peer is gone
    │   │   └── PeerEndedError       its process has ended: nothing listens at its address
    │   ├── StalledError             no progress for the configured number of seconds
    │   ├── StagingFullError         staging memory is held by reads that may still land
    │   └── CancelledError           we gave it up ourselves
    └── EngineError                  the reference engine cannot go on
        ├── RequestError             correct the request; the engine goes on without it
        ├── DrainingError            the engine is about to leave; ask another one
        ├── StuckStepError           a rank of the engine hangs; ask another one
        ├── ModelError               the model folder cannot be used
        └── WorkerDiedError          a rank of the engine is gone

``ValueError`` and ``TypeError`` are for a caller's own arguments, ``KVFerryError`` for the world,
``assert`` for what our own code has just made true. A message names the field, both values and
the remedy.
"""

from collections.abc import Sequence


class KVFerryError(Exception):
    """Base of everything kvferry raises about the world around it."""


class ConfigError(KVFerryError):
    """The configuration is wrong; correct it and start again."""


class PluginError(ConfigError):
    """A connector or transport plugin is unknown, registered twice, or does not fit."""


class HostError(KVFerryError):
    """The machine lacks something; mend it and start again."""


class PortInUseError(HostError):
    """A port that we were told to listen on is taken."""


class SharedMemoryError(HostError):
    """Shared memory could not be created or mapped (a full ``/dev/shm``, a missing segment)."""


class BlockError(KVFerryError):
    """A block table cannot be used as it is; nothing was moved."""


class BlockTableError(BlockError):
    """A block table is too short for the span, or names a target block twice."""


class BlockIdError(BlockError):
    """A block id lies outside the memory it indexes."""


class NullBlockError(BlockError):
    """A source table holds the null block (id 0) inside the span to be moved."""


class OutOfBlocksError(BlockError):
    """More tokens than blocks: the request can never fit in the pool."""


class IncompatibleError(KVFerryError):
    """The two engines can never exchange KV.

    ``mismatches`` holds one sentence per difference, each with both values and the remedy.
    """

    def __init__(self, peer: str, mismatches: Sequence[str]) -> None:
        self.peer = peer
        self.mismatches = tuple(mismatches)
        told = "; ".join(self.mismatches)
        if len(self.mismatches) > 1:  # still one line: it stands in logs
            told = "; ".join(f"({n}) {each}" for n, each in enumerate(self.mismatches, 1))
        super().__init__(f"engine {peer!r} is incompatible with this one: {told}")


class NotReadyError(KVFerryError):
    """The peer is there and cannot answer yet; ask again later."""


class HandshakeNeededError(NotReadyError):
    """One of the two engines was started again since the last handshake; handshake first."""


class ProtocolError(KVFerryError):
    """A peer sent something that we cannot accept; only that message is dropped."""


class DecodeError(ProtocolError):
    """Bytes that do not decode against the message schema."""


class BoundsError(ProtocolError):
    """A message speaks of memory outside the region it names."""


class TicketError(KVFerryError):
    """A ticket may not be used; nobody was contacted."""


class TicketForgedError(TicketError):
    """The signature does not match the cluster's key."""


class TicketExpiredError(TicketError):
    """The ticket is too old, was used before, or is from an earlier start of its engine."""


class LeaseError(KVFerryError):
    """The source does not hold the blocks for us; recompute or fail the request."""


class LeaseRevokedError(LeaseError):
    """The lease ended before the load was confirmed; what was read must not be used."""


class LeaseTakenError(LeaseError):
    """Another target engine holds the lease."""


class TransferError(KVFerryError):
    """A load failed; the request may recompute or fail."""


class PeerLostError(TransferError):
    """The peer is gone: process dead, connection closed, segment removed."""


class PeerEndedError(PeerLostError):
    """Nothing listens at the peer's address: the process that did has ended, with all it lent."""


class StalledError(TransferError):
    """A load made no progress for the configured number of seconds."""


class StagingFullError(TransferError):
    """Reads that were given up hold the staging memory: what they read may still land there."""


class CancelledError(TransferError):
    """The load was given up on this side."""


class EngineError(KVFerryError):
    """The reference engine cannot go on."""


class DrainingError(EngineError):
    """The engine takes no new requests: it ends once those that it has are over."""


class StuckStepError(EngineError):
    """A step does not end: requests that wait for it are given up, and new ones are refused."""


class RequestError(EngineError):
    """A request holds values that cannot be served; only it ends."""


class ModelError(EngineError):
    """A model folder cannot be loaded, or does not match what was asked for."""


class WorkerDiedError(EngineError):
    """A rank of the engine is gone."""
