"""vLLM 0.32, for which the adapter is written. Newer releases are tried as this one."""

from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from kvferry.connectors.base import KVConnectorOutput


class Release:
    """What older releases of vLLM keep elsewhere or do not have.

    The class of an older release inherits from that of the next newer one and overrides what
    differs, so that a release which is no longer served is one file less. Names of vLLM are
    imported when they are asked for: an older release may not have them.
    """

    lacks: ClassVar[frozenset[str]] = frozenset()
    """Names of :data:`kvferry.integrations.vllm.contract.NEEDED` that this release does not have
    and the adapter does without."""

    serves_states: ClassVar[bool] = True
    """Whether recurrent layers are served: the connector says which blocks a load leaves as they
    are, and vLLM zeroes the others before attention sees what states left in them."""

    serves_packed: ClassVar[bool] = True
    """Whether caches that keep scales beside their values are served: how they are packed was
    compared with this release."""

    gives_cache_manager: ClassVar[bool] = True
    """Whether vLLM hands a connector its cache manager."""

    takes_failed_requests: ClassVar[bool] = True
    """Whether vLLM can be told which request's load failed. Otherwise it looks for its blocks,
    which it can in one KV cache group only."""

    @cached_property
    def cache_hit_source(self) -> Any:
        """Where loaded tokens come from, for vLLM's figures: a peer."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        return CacheHitSource.P2P

    @cached_property
    def _results(self) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        return KVConnectorTransferResults

    @cached_property
    def _no_results(self) -> Any:
        """For the many steps without any; that its sets cannot be changed holds for all of them."""
        return self._results(frozenset(), frozenset(), frozenset())

    def transfer_results(self, output: "KVConnectorOutput | None") -> Any:
        """What ended on a rank, in vLLM's words; before 0.30 vLLM never asks for it in one."""
        if output is None:
            return self._no_results
        return self._results(
            finished_sending=output.finished_sending,
            finished_recving=output.finished_recving,
            failed_recving=output.failed_recving,
        )

    def is_transferred(self, group: Any) -> bool:
        """Whether a KV cache group is one that connectors move."""
        return bool(group.enable_kv_transfer)

    def tokens_per_state(self, spec: Any) -> Any:
        """How many tokens one state of a cache stands for; an int or a fraction."""
        return spec.tokens_per_state

    def cache_view(self, name: str, spec: Any, tensor: "torch.Tensor") -> "torch.Tensor":
        """A layer's cache as ``[B, H, N, C]``.

        Raises:
            ConfigError: it cannot be seen so.
        """
        return tensor

    def isa_of(self, layer: Any) -> str:
        """The instruction set for which CPU attention lays out a layer's blocks."""
        return str(layer.isa)

    def is_dcp_sharded(self, spec: Any) -> bool:
        """Whether DCP ranks share the tokens of a layer's cache; otherwise each holds all."""
        return bool(spec.dcp_sharded)
