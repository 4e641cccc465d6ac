"""Gradients of parameters that every rank holds whole but uses on its own tokens alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from streamoverlap.layers import parallel_groups
from streamoverlap.ops import all_reduce
from streamoverlap.places import resolve_group


@torch.no_grad()
def sync_sequence_parallel_grads(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Sums, over the ranks of a group, the gradients of all parameters with ``parameter.sequence_parallel = True``.

    With sequence parallelism, what is not sharded (norms, biases of row-parallel layers) sees only the tokens of its
    rank, so that its gradient there is a part of the sum. Set the attribute on such parameters (`RowParallelLinear`
    sets it on its bias) and call this after the backward pass, before gradients are clipped or used. Collective: one
    all-reduce a dtype. Megatron does the same on its own, for layers of `streamoverlap.megatron` too.

    Args:
        module: whose parameters, with those of its submodules. Where a parameter has a ``main_grad`` and no ``grad``,
            that is summed.
        group: the tensor-parallel group; None is that of the tensor-parallel layers in `module`, the default group if
            there are none.

    Raises:
        ValueError: `group` is None and the layers in `module` have several.
    """
    if group is None:
        groups = parallel_groups(module)
        if len(groups) > 1:
            names = [found.group_name for found in groups]
            raise ValueError(
                f"group is None and the layers of module have the groups {names}; expected one to be given"
            )
        group = groups[0] if groups else resolve_group(None)
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in module.parameters():
        grad = _gradient(parameter)
        if getattr(parameter, "sequence_parallel", False) and grad is not None:
            by_kind.setdefault((grad.dtype, grad.device), []).append(grad)
    for grads in by_kind.values():
        total = all_reduce(torch.cat([grad.reshape(-1) for grad in grads]), group)
        for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    return parameter.grad if parameter.grad is not None else getattr(parameter, "main_grad", None)
