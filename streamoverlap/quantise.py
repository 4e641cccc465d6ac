"""Float8 of wider floats, with scales that are found anew each time. Nothing else in the package makes any."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max  # 448
_SMALLEST = torch.finfo(torch.float32).tiny


def rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales, so that ``values.float() * scales`` is x but for rounding: the largest of a row becomes 448.

    Dynamic row-wise scaling, as in torchao. Waits for no GPU, so that it can be captured in a CUDA graph.

    Args:
        x: ``[..., K]``, float32, bfloat16 or float16, with any strides.

    Returns:
        float8_e4m3fn of the shape of x, row-major, and float32 of ``[..., 1]``, a row's largest magnitude / 448. Where
        that is 0, or so small that float32 has no full precision there, the scale is 1 and the values are 0. A row with
        an infinity or NaN has an infinite or NaN scale and a NaN among its values, and so has what is made of it.
    """
    largest = x.abs().amax(dim=-1, keepdim=True).float()
    scales = largest / torch.full_like(largest, LARGEST)  # by a number CUDA does not divide: it takes the reciprocal
    scales.masked_fill_(scales < _SMALLEST, 1.0)
    return (x / scales).to(DTYPE).contiguous(), scales
