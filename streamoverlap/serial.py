"""The serial algorithm: the group's own collective (NCCL, Gloo), then one GEMM. Nothing is overlapped.

It is what every overlapped plan is compared with, and what runs where ranks share no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.14 renamed the single-tensor collectives; 2.11 knows the old names only.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Started(NamedTuple):
    """An op whose collective has been issued on the caller's thread, so in the order of the group's other ones."""

    collective: dist.Work | None  # to be waited for; None where the current stream or thread has done so
    finish: Callable[[], Any]  # what comes after it; gives the result


def all_gather(x: Tensor, group: dist.ProcessGroup, async_op: bool) -> Started:
    gathered = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    work = _all_gather_single(gathered, x.contiguous(), group=group, async_op=async_op) if gathered.numel() else None
    return Started(work, lambda: gathered)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup, async_op: bool) -> Started:
    part = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    work = _reduce_scatter_single(part, x.contiguous(), group=group, async_op=async_op) if part.numel() else None
    return Started(work, lambda: part)


def all_gather_gemm(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], group: dist.ProcessGroup, async_op: bool
) -> Started:
    collective, gather = all_gather(x, group, async_op)

    def finish() -> tuple[list[Tensor], Tensor]:
        gathered = gather()
        return [torch.nn.functional.linear(gathered, w, b) for w, b in zip(weights, biases, strict=True)], gathered

    return Started(collective, finish)


def gemm_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup, async_op: bool
) -> Started:
    collective, scatter = reduce_scatter(torch.nn.functional.linear(x, weight), group, async_op)
    return Started(collective, scatter if bias is None else lambda: scatter().add_(bias))
