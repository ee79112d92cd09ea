"""The sinusoidal encodings R of relative distances (paper, section 3.3; Vaswani et al. 2017)."""

import torch
from torch import Tensor


def sinusoid(distances: Tensor, d_model: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Encodings [T, d_model], row t for distance d = distances[t].

    Row: [sin(d f_0), sin(d f_1), .. | cos(d f_0), cos(d f_1), ..] with f_c = 10000^(-2c / d_model).
    Computed in float32 whatever the dtype: bfloat16 holds integers exactly to 256 only.

    Args:
        distances: [T], integers or floats.
        d_model: width, even.

    Raises:
        ValueError: d_model is odd or not positive, or distances is not one-dimensional.
    """
    if d_model <= 0 or d_model % 2:
        raise ValueError(f"d_model must be even and positive for sinusoidal encodings, got {d_model}")
    if distances.dim() != 1:
        raise ValueError(f"distances must be one-dimensional, got shape {list(distances.shape)}")
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    inv_freq = 10000.0 ** -(torch.arange(0, d_model, 2, device=distances.device, dtype=exact) / d_model)
    angle = distances.to(exact).unsqueeze(1) * inv_freq
    return torch.cat([angle.sin(), angle.cos()], 1).to(dtype)
