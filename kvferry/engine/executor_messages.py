"""What an executor and the process of a rank say to each other: MessagePack over a socket pair."""

import msgspec

from kvferry.engine.messages import RankOutput, SchedulerOutput
from kvferry.engine.worker_spec import WorkerSpec


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The first message to a rank; answered by ``Ready`` or ``Failed``."""

    spec: WorkerSpec
    rank: int
    init_method: str
    """Where the ranks meet; see :class:`~kvferry.engine.communicator_gloo.GlooCommunicator`."""
    log_level: int
    """Of the logger ``kvferry``, as in :mod:`logging`."""


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Answered by ``Done`` or ``Failed``."""

    output: SchedulerOutput


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """The last message to a rank, which closes its worker and ends."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The worker is open."""

    handshake: bytes


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """A step was executed."""

    output: RankOutput


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The rank raised, and ends."""

    kind: str
    """Class name of the error."""
    text: str


#: What a rank receives.
Command = Start | Step | Stop

#: What a rank answers.
Answer = Ready | Done | Failed
