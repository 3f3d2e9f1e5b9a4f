"""The errors of kvferry, named by what the caller should do.

    KVFerryError                     something outside this process's own arguments went wrong
    ├── ConfigError                  correct the configuration, then start again
    │   └── PluginError              install or correct a connector or transport plugin
    ├── HostError                    repair the machine: a port in use, a full /dev/shm
    │   ├── PortInUseError
    │   └── SharedMemoryError
    ├── BlockError                   correct the block table; nothing was moved
    │   ├── BlockTableError          a table is too short, or names a block twice
    │   ├── BlockIdError             a block id lies outside the memory
    │   ├── NullBlockError           a source table holds the null block inside the span
    │   └── OutOfBlocksError         more tokens than blocks; wait, or enlarge the pool
    ├── IncompatibleError            the two engines can never exchange KV; lists every mismatch
    ├── NotReadyError                the peer cannot answer yet; ask again later
    │   └── HandshakeNeededError     one side was restarted; handshake, then ask again
    ├── ProtocolError                a peer sent something invalid; only that peer is affected
    │   ├── DecodeError              bytes that do not decode against the schema
    │   └── BoundsError              numbers that lie outside the memory that they name
    ├── TicketError                  do not load with this ticket
    │   ├── TicketForgedError
    │   └── TicketExpiredError       too old, replayed, or from an earlier start of the engine
    ├── LeaseError                   the source no longer holds the blocks for us; recompute or fail
    │   ├── LeaseRevokedError
    │   └── LeaseTakenError          another target engine holds the lease
    ├── TransferError                this load failed; the request may recompute or fail
    │   ├── PeerLostError            the peer is gone
    │   │   └── PeerEndedError       the peer's process has ended: nothing listens at its address
    │   ├── StalledError             no progress for the configured number of seconds
    │   ├── StagingFullError         staging memory is held by reads that may still land
    │   └── CancelledError           this side gave the load up
    └── EngineError                  the reference engine cannot go on
        ├── RequestError             correct the request; the engine goes on without it
        ├── DrainingError            the engine is about to leave; ask another one
        ├── StuckStepError           a rank of the engine hangs; ask another one
        ├── ModelError               the model folder cannot be used
        └── WorkerDiedError          a rank of the engine is gone

``ValueError`` and ``TypeError`` are for a caller's own arguments, ``KVFerryError`` for the outside
world, ``assert`` for facts that kvferry's own code has just made true. A message contains the
field, both values and the remedy.
"""

from collections.abc import Sequence


class KVFerryError(Exception):
    """Base of all errors that kvferry raises about the outside world."""


class ConfigError(KVFerryError):
    """The configuration is wrong; correct it and start again."""


class PluginError(ConfigError):
    """A connector or transport plugin is unknown, registered twice, or does not fit."""


class HostError(KVFerryError):
    """The machine lacks something; repair the machine and start again."""


class PortInUseError(HostError):
    """The configured port to listen on is taken."""


class SharedMemoryError(HostError):
    """Shared memory could not be created or mapped (a full ``/dev/shm``, a missing segment)."""


class BlockError(KVFerryError):
    """A block table cannot be used in this form; nothing was moved."""


class BlockTableError(BlockError):
    """A block table is too short for the span, or contains a target block twice."""


class BlockIdError(BlockError):
    """A block id lies outside the memory that it indexes."""


class NullBlockError(BlockError):
    """A source table contains the null block (id 0) inside the span to be moved."""


class OutOfBlocksError(BlockError):
    """The request has more tokens than blocks exist: it can never fit in the pool."""


class IncompatibleError(KVFerryError):
    """The two engines can never exchange KV.

    ``mismatches`` contains one sentence per difference, each with both values and the remedy.
    """

    def __init__(self, peer: str, mismatches: Sequence[str]) -> None:
        self.peer = peer
        self.mismatches = tuple(mismatches)
        told = "; ".join(self.mismatches)
        if len(self.mismatches) > 1:  # still a single line, for logs
            told = "; ".join(f"({n}) {each}" for n, each in enumerate(self.mismatches, 1))
        super().__init__(f"engine {peer!r} is incompatible with this one: {told}")


class NotReadyError(KVFerryError):
    """The peer exists but cannot answer yet; ask again later."""


class HandshakeNeededError(NotReadyError):
    """One of the two engines was restarted since the last handshake; handshake first."""


class ProtocolError(KVFerryError):
    """A peer sent something that kvferry cannot accept; only this message is dropped."""


class DecodeError(ProtocolError):
    """Bytes that do not decode against the message schema."""


class BoundsError(ProtocolError):
    """A message names memory outside its region."""


class TicketError(KVFerryError):
    """A ticket may not be used; no peer was contacted."""


class TicketForgedError(TicketError):
    """The signature does not match the cluster's key."""


class TicketExpiredError(TicketError):
    """The ticket is too old, was used before, or is from an earlier start of its engine."""


class LeaseError(KVFerryError):
    """The source no longer holds the blocks for this engine; recompute or fail the request."""


class LeaseRevokedError(LeaseError):
    """The lease ended before the load was confirmed; the data that was read must not be used."""


class LeaseTakenError(LeaseError):
    """Another target engine holds the lease."""


class TransferError(KVFerryError):
    """A load failed; the request may recompute or fail."""


class PeerLostError(TransferError):
    """The peer is gone: its process died, the connection closed, or a segment was removed."""


class PeerEndedError(PeerLostError):
    """Nothing listens at the peer's address: its process has ended, and all leases with it."""


class StalledError(TransferError):
    """A load made no progress for the configured number of seconds."""


class StagingFullError(TransferError):
    """Abandoned reads hold the staging memory: their data may still arrive there."""


class CancelledError(TransferError):
    """This side gave the load up."""


class EngineError(KVFerryError):
    """The reference engine cannot go on."""


class DrainingError(EngineError):
    """The engine takes no new requests: it ends after its present requests are over."""


class StuckStepError(EngineError):
    """A step does not end: requests that wait for the step fail, and new requests are refused."""


class RequestError(EngineError):
    """A request has values that cannot be served; only this request ends."""


class ModelError(EngineError):
    """A model folder cannot be loaded, or does not match the request for it."""


class WorkerDiedError(EngineError):
    """A rank of the engine is gone."""
