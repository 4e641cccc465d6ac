"""The serial algorithm: the group's own collective (NCCL, Gloo), then one GEMM. Nothing is overlapped.

It is what every overlapped plan is compared with, and what runs where ranks share no memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.14 renamed the single-tensor collectives; 2.11 knows the old names only.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    if gathered.numel():
        _all_gather_single(gathered, x.contiguous(), group=group)
    return gathered


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    scattered = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    if scattered.numel():
        _reduce_scatter_single(scattered, x.contiguous(), group=group)
    return scattered


def all_gather_gemm(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], group: dist.ProcessGroup
) -> tuple[list[Tensor], Tensor]:
    gathered = all_gather(x, group)
    return [torch.nn.functional.linear(gathered, w, b) for w, b in zip(weights, biases, strict=True)], gathered


def gemm_reduce_scatter(x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    scattered = reduce_scatter(torch.nn.functional.linear(x, weight), group)
    return scattered if bias is None else scattered.add_(bias)
