"""The projections of a model that make K and V, and the weights in them.

vLLM tells a connector the number of a layer's KV heads on one rank. The layer's QKV projection
knows the number over all ranks, and the loaded rows.
"""

from collections.abc import Iterable
from typing import Any

import torch

from kvferry.topology.heads import probed_columns


def owner_of_cache(layer: Any) -> str | None:
    """Name of the layer whose cache an attention layer reads; ``None`` if the layer has a cache."""
    name = getattr(layer, "kv_sharing_target_layer_name", None)
    return None if name is None else str(name)


def qkv_projections(
    vllm_config: Any, models: Iterable[torch.nn.Module], layer_names: Iterable[str]
) -> dict[str, Any]:
    """Layer name → the linear layer that makes the K and V of the attention layer.

    The function looks for the smallest part of a model that holds the attention layer, or is the
    layer, and has a QKV projection among its children. The projection is this child. If the part
    has several projections, none counts. If the part has several attention layers, the projection
    serves all of them.

    Args:
        vllm_config: the engine's config.
        models: the models of the rank.
        layer_names: names of the wanted attention layers.
    """
    from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear

    context = vllm_config.compilation_config.static_forward_context
    names = {id(context[name]): name for name in layer_names if name in context}
    found: dict[str, Any] = {}

    def look(module: torch.nn.Module) -> list[str]:
        """The attention layers in a part of a model that still lack a projection."""
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
    """KV heads of a projection over all ranks; ``None`` if it has others on this rank."""
    if getattr(projection, "num_kv_heads", on_this_rank) != on_this_rank:
        return None
    # A projection that TP does not divide has all heads on each rank.
    return int(getattr(projection, "total_num_kv_heads", on_this_rank))


def kv_weights(projection: Any, layer: Any) -> tuple[torch.Tensor, torch.Tensor] | str:
    """Some columns of the weights behind K and behind V, by heads of this rank.

    The rows of a projection::

        | Q: num_heads * head_size | K: num_kv_heads * head_size | V: ... * v_head_size | others |

    Args:
        projection: see :func:`qkv_projections`.
        layer: an attention layer that the projection serves.

    Returns:
        float32 on the host, ``[heads, head size, columns]``, with the columns of
        :func:`~kvferry.topology.heads.probed_columns`; or the reason why there are none.
    """
    rows_RC = _columns(projection)
    if isinstance(rows_RC, str):
        return rows_RC
    if hasattr(projection, "num_kv_heads"):
        heads, size, size_v = projection.num_kv_heads, projection.head_size, projection.v_head_size
        first = projection.num_heads * size
    else:  # each rank has all rows, and the rows end with V
        heads, size, size_v = layer.num_kv_heads, layer.head_size, layer.head_size_v
        first = len(rows_RC) - heads * (size + size_v)
    middle, end = first + heads * size, first + heads * (size + size_v)
    if first < 0 or len(rows_RC) < end:
        return f"the QKV projection makes {len(rows_RC)} rows, of which K and V would end at {end}"
    k, v = (rows.float().cpu() for rows in (rows_RC[first:middle], rows_RC[middle:end]))
    return k.view(heads, size, -1), v.view(heads, size_v, -1)


def _columns(projection: Any) -> torch.Tensor | str:
    """The probed columns of a projection's weights, ``[rows, columns]``; or the reason for none.

    If the weights lie in a kernel's own memory, unit vectors are sent through the kernel, without
    the bias; the results are columns of the weights. They are exact, because only 0 is added to a
    product by 1. A kernel with quantised weights would round.
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
