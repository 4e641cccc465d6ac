"""A tensor-parallel linear map, column- or row-parallel, with gradients: eager, or as registered ops for a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from streamoverlap import autograd
from streamoverlap.autograd import Options
from streamoverlap.call import current_mode, in_mode
from streamoverlap.gradients import Exchange
from streamoverlap.places import group_of
from streamoverlap.precision import name_of, precision_of
from streamoverlap.spec import SUMS_OF_PRODUCTS, PlanSpec, plan_of_text, text_of, validate_plan

_ops = torch.ops.streamoverlap

FUSION_WRITES_MAIN_GRAD = (
    "gradient_accumulation_fusion writes weight.main_grad in the backward pass, which no compiled graph does: expected "
    "it to be False with fullgraph=True"
)


class Place(NamedTuple):
    """Where and how a layer exchanges and multiplies, as values: a compiler knows no process group."""

    group_name: str
    plan: str = ""  # PlanSpec.to_text
    precision: str = ""

    @classmethod
    def of(cls, group: torch.distributed.ProcessGroup, plan: PlanSpec | None, precision: str | None = None) -> Place:
        if plan is not None:
            validate_plan(plan, *SUMS_OF_PRODUCTS)  # one of them, forward or backward, is any layer's
        return cls(group.group_name, text_of(plan), name_of(precision))

    @property
    def exchange(self) -> Exchange:
        return Exchange(group_of(self.group_name), plan_of_text(self.plan), precision_of(self.precision))


def column_linear(
    place: Place,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    sequence_parallel: bool = True,
    save_gathered: bool = False,
    accumulate: bool = False,
) -> Tensor:
    """``gather(x) @ weight.T + bias``, or without the gathering where x is the same on all ranks.

    Args:
        x: ``[rows, K]`` or ``[s, b, K]``: this rank's shard with `sequence_parallel`, else the whole.
        weight, bias: ``[N / W, K]`` and ``[N / W]``, this rank's.
        save_gathered: keep the gathered x for the backward pass, which then gathers nothing.
        accumulate: the weight's gradient goes into ``weight.main_grad``. Not compiled: breaks a graph.
    """
    if not torch.compiler.is_compiling():
        return _eager_column_linear(place, x, weight, bias, sequence_parallel, save_gathered, accumulate)
    if accumulate:
        return _uncompiled(_eager_column_linear)(place, x, weight, bias, sequence_parallel, save_gathered, accumulate)
    x, weight, bias = _autocast(x, weight, bias)
    if not sequence_parallel:
        return _ops.column_linear(x, weight, bias, *place)
    biases = [] if bias is None else [bias]
    keeps = save_gathered and torch.is_grad_enabled()
    return _ops.all_gather_gemm(x, [weight], biases, place.group_name, keeps, place.plan, place.precision)[0]


def row_linear(
    place: Place,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    sequence_parallel: bool = True,
    accumulate: bool = False,
) -> Tensor:
    """``reduce_scatter(x @ weight.T) + bias``; the whole sum on every rank without `sequence_parallel`.

    Args:
        x: ``[M, K / W]`` or ``[s, b, K / W]``, this rank's columns.
        weight: ``[N, K / W]``, this rank's columns.
        bias: ``[N]``, the same on all ranks, added once.
        accumulate: the weight's gradient goes into ``weight.main_grad``.
    """
    if not torch.compiler.is_compiling():
        return _eager_row_linear(place, x, weight, bias, sequence_parallel, accumulate)
    if accumulate:
        return _uncompiled(_eager_row_linear)(place, x, weight, bias, sequence_parallel, accumulate)
    x, weight, bias = _autocast(x, weight, bias)
    op = _ops.gemm_reduce_scatter if sequence_parallel else _ops.gemm_all_reduce
    return op(x, weight, bias, *place)


def _uncompiled(function: Callable) -> Callable:
    return torch.compiler.disable(function, reason=FUSION_WRITES_MAIN_GRAD)  # torch 2.11 shows this line alone


def _eager_column_linear(
    place: Place,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sequence_parallel: bool,
    save_gathered: bool,
    accumulate: bool,
) -> Tensor:
    options = Options(place.exchange, weight if accumulate and weight.requires_grad else None, save_gathered)
    x, weight, bias = _autocast(x, weight, bias)
    if not sequence_parallel:
        return autograd.column_linear(options, x, weight, bias)
    return autograd.all_gather_gemm(options, x, [weight], [] if bias is None else [bias], False)[0][0]


def _eager_row_linear(
    place: Place, x: Tensor, weight: Tensor, bias: Tensor | None, sequence_parallel: bool, accumulate: bool
) -> Tensor:
    options = Options(place.exchange, weight if accumulate and weight.requires_grad else None)
    x, weight, bias = _autocast(x, weight, bias)
    op = autograd.gemm_reduce_scatter if sequence_parallel else autograd.gemm_all_reduce
    return op(options, x, weight, bias)


def gather_features(place: Place, x: Tensor) -> Tensor:
    """The features (last dimension) of all ranks, on all ranks alike; the gradient of each is its own part."""
    return _GatherFeatures.apply(x, place)


def own_features(place: Place, x: Tensor) -> Tensor:
    """This rank's part of the features of an x that all have; the gradient is gathered, the same on all ranks."""
    return _OwnFeatures.apply(x, place)


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, place: Place) -> Tensor:
        ctx.place = place
        return _gathered(x, place)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _own(grad, ctx.place), None


class _OwnFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, place: Place) -> Tensor:
        ctx.place = place
        if not torch.compiler.is_compiling():
            ctx.mode = current_mode()
        return _own(x, place)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        if torch.compiler.is_compiling():
            return _gathered(grad, ctx.place), None
        with in_mode(ctx.mode):
            return _gathered(grad, ctx.place), None


def _gathered(x: Tensor, place: Place) -> Tensor:
    gathered = _ops.all_gather(x.movedim(-1, 0).contiguous(), place.group_name, place.plan)
    return gathered.movedim(0, -1).contiguous()


def _own(x: Tensor, place: Place) -> Tensor:
    group = group_of(place.group_name)
    size = x.shape[-1] // group.size()
    return x.narrow(-1, group.rank() * size, size).contiguous()


def _autocast(x: Tensor, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """As `torch.autocast` does for a linear map; float64 stays, as there."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x, *tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in (x, *tensors)
    )
