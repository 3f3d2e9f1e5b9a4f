"""What a rank is started from, as plain data that crosses process borders."""

from pathlib import Path

import msgspec

from kvferry.config import KVTransferConfig
from kvferry.topology.description import GroupDescription
from kvferry.topology.geometry import EngineGeometry


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The same for every rank of an engine."""

    engine: str
    """Name of the engine, for logs and messages."""
    model_folder: str
    """A converted model folder, see :func:`kvferry.engine.weights.prepare_model`."""
    group: GroupDescription
    """``EngineGeometry.description()``; its dtype is also that of weights and activations."""
    num_blocks: int
    """KV blocks per rank, the null block included."""
    incarnation: str
    """Random per start of the engine."""
    kv_transfer_config: KVTransferConfig | None = None
    """``None`` for an engine that exchanges no KV."""
    threads: int = 1
    """Compute threads per rank."""
    start_timeout_s: float = 300.0
    """Seconds in which every rank must be ready."""
    step_timeout_s: float = 600.0
    """Seconds after which a rank that has not answered a step counts as dead."""

    @property
    def geometry(self) -> EngineGeometry:
        """The engine's KV cache group."""
        return EngineGeometry.from_description(self.group)

    @property
    def folder(self) -> Path:
        """The model folder."""
        return Path(self.model_folder)
