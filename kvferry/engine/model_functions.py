"""Functions of tensors that all models compute: normalisation and rotary embeddings.

Legend of the dims::

    T  tokens of the step    H  heads of this rank    D  element of a head
"""

import math

import torch

from kvferry.engine.model_config import RopeParameters


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divides by the root mean square over the last dim; 16-bit inputs are summed in float32."""
    wide = x if x.dtype == torch.float64 else x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def inverse_frequencies(rope: RopeParameters, size: int) -> torch.Tensor:
    """Angle per position of each pair of elements, float32 ``[size / 2]``.

    float32 whatever the model's dtype, because the weights were trained with it: at position
    2,000 the difference to float64 is 1e-4.
    """
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    frequencies = 1.0 / (rope.rope_theta**exponents)
    if rope.rope_type == "default":
        return frequencies
    assert rope.factor is not None
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    assert rope.original_max_position_embeddings is not None
    # Llama 3.1's rule: waves that fit the original context often enough stay, waves longer than
    # it are stretched by `factor`, and those between are blended by how often they fit.
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def rotation(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[T, 1, D / 2]`` of the tokens' angles."""
    angles = positions.float()[:, None, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate_halves(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding as Llama has it: element ``d`` is paired with element ``d + D / 2``."""
    first, second = x_THD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotate_neighbours(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding as DeepSeek has it: element ``2 d`` is paired with element ``2 d + 1``."""
    first, second = x_THD[..., 0::2], x_THD[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
