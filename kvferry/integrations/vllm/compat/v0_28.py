"""vLLM 0.28: latents have one dim less, and specs name a compression by its ratio.

Methods of connectors that only this release has and kvferry leaves to the base class:

| `prefer_cross_layer_blocks` | the base class says no: each layer is described as it lies |
| `register_cross_layers_kv_cache` | vLLM calls it only if the method above says yes |
"""

from typing import Any

import torch

from kvferry.errors import ConfigError
from kvferry.integrations.vllm.compat import v0_29


class Release(v0_29.Release):
    """Adapts :class:`v0_29.Release` to this release."""

    lacks = v0_29.Release.lacks | {
        "KVCacheGroupSpec.enable_kv_transfer",
        "AttentionSpec.tokens_per_state",
    }

    def is_transferred(self, group: Any) -> bool:
        """Always true, as every group of this release is transferred."""
        return True

    def tokens_per_state(self, spec: Any) -> Any:
        """The compression ratio; kinds of caches that never compress have no ratio."""
        return getattr(spec, "compress_ratio", 1)

    def isa_of(self, layer: Any) -> str:
        """The instruction set, which the backend's implementation knows."""
        return str(layer.impl.isa)

    def cache_view(self, name: str, spec: Any, tensor: torch.Tensor) -> torch.Tensor:
        """A layer's cache as ``[B, H, N, C]``; nearly all backends have the shape of later
        releases.

        Raises:
            ConfigError: the backend shapes the cache in another way.
        """
        if not isinstance(tensor, torch.Tensor):
            return tensor  # states of a recurrent layer, refused elsewhere
        if tensor.dim() == 3:  # a latent per token: [B, N, C]
            return tensor.unsqueeze(1)
        content = (spec.num_kv_heads, spec.head_size + spec.head_size_v)
        if tensor.dim() != 4 or (tensor.shape[1], tensor.shape[3]) != content:
            raise ConfigError(
                f"KV cache of {name}: shape {tuple(tensor.shape)}; of vLLM 0.28 this adapter "
                "serves caches of blocks, KV heads, tokens, and keys and values side by side; take "
                "another attention backend, or vLLM 0.29 or later"
            )
        return tensor
