"""Groups of recurrent layers, built from what their models say."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvferry.topology.description import StatePart
from kvferry.topology.geometry import EngineGeometry
from kvferry.topology.states import NO_ATTENTION, state_part

if TYPE_CHECKING:
    from kvferry.layouts.layout import Layout
    from kvferry.topology.parallel import ParallelShape


def recurrent_group(
    *,
    num_layers: int,
    states: Sequence[StatePart],
    block_size: int,
    parallel: "ParallelShape",
    layout: "Layout | str" = "BHD",
    layer_split: Sequence[int] | None = None,
    layer_names: Sequence[str] | None = None,
    layer_indices: Sequence[int] | None = None,
    page_size_padded: int | None = None,
) -> EngineGeometry:
    """A KV cache group of recurrent layers.

    >>> from kvferry.topology import ParallelShape
    >>> group = recurrent_group(
    ...     num_layers=2, block_size=2048, parallel=ParallelShape(tp=2), layout="B(conv=DH,ssm=HD)",
    ...     states=mamba2_states(num_heads=6, head_size=64, state_size=128, num_groups=1,
    ...                          conv_kernel=4, dtype="bfloat16"))
    >>> group.tensor_names(0)
    ('layer.0.conv', 'layer.0.ssm', 'layer.1.conv', 'layer.1.ssm')
    >>> group.cache_shape(1, 10, "conv"), group.cache_shape(1, 10, "ssm")
    ((10, 3, 448), (10, 3, 8192))

    Args:
        num_layers: layers of the group.
        states: what each keeps, one tensor per state.
        block_size: tokens per block. A block holds one state, that after the last token of the
            request in it: with vLLM's ``mamba_cache_mode`` ``"none"`` the one block of a request,
            as long as the longest; with ``"all"`` one per so many tokens.
        parallel: of the engine, without context parallelism.
        layout: where channels (H) and their elements (D) lie in a state of one block: ``"BHD"``,
            ``"BDH"``, or by the names of states, ``"B(conv=DH,ssm=HD)"``.
        layer_split: see :class:`EngineGeometry`, like what follows.
        layer_names: see above; a tensor's name is the layer's and the state's, ``.conv``.
        layer_indices: see above.
        page_size_padded: bytes to which the page of a layer, all its states, is padded.

    Raises:
        ValueError: a value is out of its range, or the layout cannot hold a state.
    """
    return EngineGeometry(
        num_layers=num_layers,
        block_size=block_size,
        parallel=parallel,
        layout=layout,
        layer_split=layer_split,
        layer_names=layer_names,
        layer_indices=layer_indices,
        page_size_padded=page_size_padded,
        states=states,
        **NO_ATTENTION,
    )


def mamba2_states(
    *,
    num_heads: int,
    head_size: int,
    state_size: int,
    num_groups: int,
    conv_kernel: int,
    dtype: Any,
    ssm_dtype: Any = None,
) -> tuple[StatePart, ...]:
    """The two states of a Mamba2 layer: the last inputs of its convolution, and the SSM's state.

    Shapes as in vLLM 0.32 (``MambaStateShapeCalculator.mamba2_state_shape``): the convolution runs
    over x, B and C, and keeps the last ``conv_kernel - 1`` inputs of each channel; the SSM keeps
    ``head_size * state_size`` numbers per head.

    >>> [part.num_channels for part in mamba2_states(num_heads=48, head_size=64, state_size=128,
    ...                                              num_groups=1, conv_kernel=4, dtype="bfloat16")]
    [3328, 48]

    Args:
        num_heads: heads of the mixer; x has ``head_size`` channels for each.
        head_size: channels per head.
        state_size: elements of the SSM's state per channel; channels of B and C per group.
        num_groups: groups of B and C; replicated where there are more TP ranks.
        conv_kernel: inputs that one output of the convolution depends on.
        dtype: of the convolution's state.
        ssm_dtype: of the SSM's state, if it differs.

    Raises:
        ValueError: a value is out of its range.
    """
    conv = {"x": (num_heads, head_size), **dict.fromkeys("BC", (num_groups, state_size))}
    ssm = {"heads": (num_heads, 1)}
    return (
        state_part("conv", dtype, conv, conv_kernel - 1),
        state_part("ssm", ssm_dtype or dtype, ssm, head_size * state_size),
    )
