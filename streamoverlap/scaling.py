"""Scales of products of 8-bit floats: the arguments of the ops that take them, and what stands for them in a choice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from streamoverlap import _C


def scaling_of(
    scale_x: object, scale_weight: object, out_dtype: object, use_fast_accum: object, several: bool = False
) -> _C.Scaling | None:
    """As the compiled part takes it; None without scales. What hangs on x and weight is checked there.

    Args:
        several: weight is a list, and so is scale_weight.
    """
    if not isinstance(use_fast_accum, bool):
        raise TypeError(f"use_fast_accum is a {type(use_fast_accum).__name__}; expected a bool")
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype is a {type(out_dtype).__name__}; expected a torch.dtype or None")
    if scale_x is None and scale_weight is None:
        for name, given, default in (("out_dtype", out_dtype, None), ("use_fast_accum", use_fast_accum, False)):
            if given != default:
                raise ValueError(f"{name} is {given} but scale_x is None; expected {default}, or scales of float8")
        return None
    for name, given, other in (("scale_x", scale_x, "scale_weight"), ("scale_weight", scale_weight, "scale_x")):
        if given is None:
            raise TypeError(f"{name} is None but {other} is given; expected both or none")
    if several and isinstance(scale_weight, Tensor):
        raise TypeError("scale_weight is one tensor but weight is a list; expected a list with one for each weight")
    scales = {"scale_x": scale_x}
    if several:
        if not isinstance(scale_weight, Sequence):
            raise TypeError(f"scale_weight is a {type(scale_weight).__name__}; expected a list with one a weight")
        scales |= {f"scale_weight[{i}]": each for i, each in enumerate(scale_weight)}
    else:
        scales["scale_weight"] = scale_weight
    for name, given in scales.items():
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} is a {type(given).__name__}; expected a torch.Tensor")
    of_x, *of_weights = scales.values()
    return _C.Scaling(of_x, of_weights, torch.bfloat16 if out_dtype is None else out_dtype, use_fast_accum)


def name_of(scaling: _C.Scaling | None) -> str:
    """What plans and products are measured apart for."""
    if scaling is None:
        return ""
    return f"{scaling}{', fast' if scaling.use_fast_accum else ''}"


def ones_like(scaling: _C.Scaling, x: Tensor) -> _C.Scaling:
    """Scales for another x."""
    of_x = scaling.x.new_ones((*x.shape[:-1], 1) if scaling.row_wise else scaling.x.shape)
    of_weights = [torch.ones_like(each) for each in scaling.weights]
    return _C.Scaling(of_x, of_weights, scaling.out_dtype, scaling.use_fast_accum)
