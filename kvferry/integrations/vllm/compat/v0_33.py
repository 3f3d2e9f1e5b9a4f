"""vLLM 0.33, the release that the adapter is written for. Newer releases are tried with this
class.
"""

from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from kvferry.connectors.base import KVConnectorOutput


class Release:
    """Answers that differ between releases of vLLM.

    The class of an older release inherits from the class of the next newer release and overrides
    the differences. When kvferry stops serving a release, a single file goes. Names of vLLM are
    imported on use, because an older release may not have them.
    """

    lacks: ClassVar[frozenset[str]] = frozenset()
    """Names of :data:`kvferry.integrations.vllm.contract.NEEDED` missing in this release and not
    required by the adapter."""

    serves_states: ClassVar[bool] = True
    """Whether recurrent layers are served. The connector must name the blocks that vLLM may leave
    as they are, and vLLM must zero all other blocks before attention reads old states."""

    serves_packed: ClassVar[bool] = True
    """Whether caches with scales beside the values are served: their packing was compared with this
    release."""

    gives_cache_manager: ClassVar[bool] = True
    """Whether vLLM hands a connector the cache manager."""

    takes_failed_requests: ClassVar[bool] = True
    """Whether vLLM can be told which request's load failed. Otherwise vLLM searches for the
    request's blocks, in a single KV cache group only."""

    @cached_property
    def cache_hit_source(self) -> Any:
        """Source of loaded tokens for vLLM's statistics: a peer."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        return CacheHitSource.P2P

    @cached_property
    def _results(self) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        return KVConnectorTransferResults

    @cached_property
    def _no_results(self) -> Any:
        """Results for the many steps without any; shared, which is safe because the sets are
        frozen.
        """
        return self._results(frozenset(), frozenset(), frozenset())

    def transfer_results(self, output: "KVConnectorOutput | None") -> Any:
        """The transfers that ended on a rank, as vLLM's type; before 0.30 vLLM never calls this."""
        if output is None:
            return self._no_results
        return self._results(
            finished_sending=output.finished_sending,
            finished_recving=output.finished_recving,
            failed_recving=output.failed_recving,
        )

    def is_transferred(self, group: Any) -> bool:
        """Whether connectors transfer a KV cache group."""
        return bool(group.enable_kv_transfer)

    def tokens_per_state(self, spec: Any) -> Any:
        """Number of tokens per state of a cache; an int or a fraction."""
        return spec.tokens_per_state

    def cache_view(self, name: str, spec: Any, tensor: "torch.Tensor") -> "torch.Tensor":
        """A layer's cache as ``[B, H, N, C]``.

        Raises:
            ConfigError: the cache cannot be viewed in this shape.
        """
        return tensor

    def isa_of(self, layer: Any) -> str:
        """The instruction set that decides the layout of a layer's blocks in CPU attention."""
        return str(layer.isa)

    def is_dcp_sharded(self, spec: Any) -> bool:
        """Whether DCP ranks share the tokens of a layer's cache; otherwise each rank holds all
        tokens.
        """
        return bool(spec.dcp_sharded)
