"""The projections of a model that make K and V, and the weights in them.

What vLLM tells a connector of a layer is how many KV heads lie on one rank. The layer's QKV
projection knows how many all ranks have together, and which rows it has loaded.
"""

from collections.abc import Iterable
from typing import Any

import torch

from kvferry.topology.heads import probed_columns


def owner_of_cache(layer: Any) -> str | None:
    """Name of the layer whose cache an attention layer reads; ``None`` where it has its own."""
    name = getattr(layer, "kv_sharing_target_layer_name", None)
    return None if name is None else str(name)


def qkv_projections(
    vllm_config: Any, models: Iterable[torch.nn.Module], layer_names: Iterable[str]
) -> dict[str, Any]:
    """Layer name → the linear layer that makes the K and V of that attention layer.

    The projection is a child of the smallest part of a model that holds the attention layer, or is
    it, and has any projection of Q, K and V among its children. Where that part has several
    projections none of them counts; where it has several attention layers the one projection
    serves them all.

    Args:
        vllm_config: the engine's config.
        models: the models of the rank.
        layer_names: the attention layers that are asked for.
    """
    from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear

    context = vllm_config.compilation_config.static_forward_context
    names = {id(context[name]): name for name in layer_names if name in context}
    found: dict[str, Any] = {}

    def look(module: torch.nn.Module) -> list[str]:
        """The attention layers in a part of a model around which no projection was found yet."""
        layers = [names[id(module)]] if id(module) in names else []
        projections = []
        for name, child in module.named_children():
            base = getattr(child, "base_layer", child)  # inside a LoRA adapter
            is_replicated = isinstance(base, ReplicatedLinear) and "qkv" in name
            if is_replicated or isinstance(base, QKVParallelLinear):
                projections.append(base)
            else:
                layers += look(child)
        if len(projections) == 1:
            found.update(dict.fromkeys(layers, projections[0]))
        return [] if projections else layers

    for model in models:
        look(model)
    return found


def total_kv_heads(projection: Any, on_this_rank: int) -> int | None:
    """KV heads of a projection over all ranks; ``None`` where its heads on this rank are others."""
    if getattr(projection, "num_kv_heads", on_this_rank) != on_this_rank:
        return None
    # A projection that TP does not divide has all its heads on each rank.
    return int(getattr(projection, "total_num_kv_heads", on_this_rank))


def kv_weights(projection: Any, layer: Any) -> tuple[torch.Tensor, torch.Tensor] | str:
    """What a projection makes K of, and what V: some columns of its weights, by heads of this rank.

    The rows of a projection::

        | Q: num_heads * head_size | K: num_kv_heads * head_size | V: ... * v_head_size | others |

    Args:
        projection: see :func:`qkv_projections`.
        layer: an attention layer that it serves.

    Returns:
        float32 on the host, ``[heads, head size, columns]``, of the columns that
        :func:`~kvferry.topology.heads.probed_columns` names; or why they cannot be had.
    """
    rows_RC = _columns(projection)
    if isinstance(rows_RC, str):
        return rows_RC
    if hasattr(projection, "num_kv_heads"):
        heads, size, size_v = projection.num_kv_heads, projection.head_size, projection.v_head_size
        first = projection.num_heads * size
    else:  # each rank has all rows, and they end with V
        heads, size, size_v = layer.num_kv_heads, layer.head_size, layer.head_size_v
        first = len(rows_RC) - heads * (size + size_v)
    middle, end = first + heads * size, first + heads * (size + size_v)
    if first < 0 or len(rows_RC) < end:
        return f"the QKV projection makes {len(rows_RC)} rows, of which K and V would end at {end}"
    k, v = (rows.float().cpu() for rows in (rows_RC[first:middle], rows_RC[middle:end]))
    return k.view(heads, size, -1), v.view(heads, size_v, -1)


def _columns(projection: Any) -> torch.Tensor | str:
    """The probed columns of a projection's weights, ``[rows, columns]``; or why there are none.

    Where the weights lie in a kernel's own memory the kernel is asked: its answers to unit vectors,
    without the bias, are columns of the weights. That is exact, as all that is added to a product
    by 1 is 0; a kernel with quantised weights rounds.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.offloader import PrefetchOffloader, get_offloader

    method = projection.quant_method
    if not isinstance(method, UnquantizedLinearMethod):
        return f"weights are quantised ({type(method).__name__})"
    if isinstance(get_offloader(), PrefetchOffloader):
        return "weights are fetched from the host for each step"
    weight = projection.weight
    if weight.is_meta:
        return "weights are being replaced"
    width = projection.input_size
    columns = torch.from_numpy(probed_columns(width)).to(weight.device)
    if type(weight.data) is torch.Tensor and weight.dim() == 2 and weight.shape[1] == width:
        return weight.data[:, columns]
    units = torch.zeros(len(columns), width, dtype=weight.dtype, device=weight.device)
    units.scatter_(1, columns[:, None], 1)
    with torch.inference_mode():
        answers: torch.Tensor = method.apply(projection, units, None)
    return answers.t()
