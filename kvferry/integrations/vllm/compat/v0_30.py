"""vLLM 0.30: DCP spreads the tokens of every cache, or vLLM refuses to start."""

from typing import Any

from kvferry.integrations.vllm.compat import v0_31


class Release(v0_31.Release):
    """Adapts :class:`v0_31.Release` to this release."""

    lacks = v0_31.Release.lacks | {"AttentionSpec.dcp_sharded"}

    def is_dcp_sharded(self, spec: Any) -> bool:
        """Always true, as every cache of this release is sharded under DCP."""
        return True
