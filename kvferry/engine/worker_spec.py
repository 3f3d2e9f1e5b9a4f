"""What a rank is started from, as plain data that crosses process borders."""

from pathlib import Path

import msgspec

from kvferry.config import KVTransferConfig
from kvferry.topology.description import GroupDescription
from kvferry.topology.geometry import EngineGeometry, ParallelShape


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The same for every rank of an engine."""

    engine: str
    """Name of the engine, for logs and messages."""
    model_folder: str
    """A converted model folder, see :func:`kvferry.engine.weights.prepare_model`."""
    groups: tuple[GroupDescription, ...]
    """``EngineGeometry.description()`` of each KV cache group; their dtype is also that of weights
    and activations."""
    num_blocks: int
    """KV blocks per rank, the null block included."""
    incarnation: str
    """Random per start of the engine."""
    layer_windows: dict[int, int] = msgspec.field(default_factory=dict)
    """Model layer → sliding window that it computes within."""
    kv_transfer_config: KVTransferConfig | None = None
    """``None`` for an engine that exchanges no KV."""
    threads: int = 1
    """Compute threads per rank."""
    start_timeout_s: float = 300.0
    """Seconds in which every rank must be ready."""
    step_timeout_s: float = 600.0
    """Seconds after which a rank that has not answered a step counts as dead."""

    @property
    def geometries(self) -> tuple[EngineGeometry, ...]:
        """The engine's KV cache groups."""
        return tuple(EngineGeometry.from_description(group) for group in self.groups)

    @property
    def parallel(self) -> ParallelShape:
        """The shape of the engine, the same for every group."""
        return self.geometries[0].parallel

    @property
    def dtype(self) -> str:
        """Of weights, activations and KV cache."""
        return self.groups[0].dtype

    @property
    def folder(self) -> Path:
        """The model folder."""
        return Path(self.model_folder)
