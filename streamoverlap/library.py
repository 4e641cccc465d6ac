"""The ops as ``torch.ops.streamoverlap.*``, for compilers: what they do, what they return, and their gradients.

Their schemas are in csrc/bindings/library.cpp. A group is given by its ``group_name``, a plan by `PlanSpec.to_text`.
All ranks must make the calls of a group in one order, so each op has an ordered effect: a compiler neither drops nor
reorders them, nor moves them past each other.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.nn.functional import linear

from streamoverlap import autograd, gradients, ops
from streamoverlap.call import Mode, in_mode
from streamoverlap.gradients import Exchange, Needs
from streamoverlap.inductor import keep_order
from streamoverlap.places import group_of
from streamoverlap.precision import DGRAD, precision_of
from streamoverlap.spec import plan_of_text

_implementations = torch.library.Library("streamoverlap", "IMPL")
_ops = torch.ops.streamoverlap
_names: list[str] = []


def _register(function: Any) -> Any:
    """For the op of that name, on the CPU and on CUDA."""

    def without_gradients(*args: Any) -> Any:
        with torch.no_grad(), in_mode(Mode(prepare=True)) if _is_captured_next() else nullcontext():
            return function(*args)

    name = function.__name__.removeprefix("_")
    for device in ("CPU", "CUDA"):
        _implementations.impl(name, without_gradients, device)
    _register_effectful_op(f"streamoverlap::{name}", _EffectType.ORDERED)
    _names.append(name)
    return function


def _is_captured_next() -> bool:
    """Whether Inductor runs this once, in order to capture it in a CUDA graph when it comes again."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not torch._C._is_key_in_tls("tree_manager_containers"):
        return False
    manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return manager is not None and manager.in_warmup


def _fake(function: Any) -> Any:
    name = function.__name__.removeprefix("_fake_")

    @wraps(function)
    def traced(*args: Any) -> Any:
        keep_order(tuple(_names))  # a compiler is at work
        return function(*args)

    return torch.library.register_fake(f"streamoverlap::{name}")(traced)


def _exchange(group_name: str, plan: str, precision: str) -> Exchange:
    return Exchange(group_of(group_name), plan_of_text(plan), precision_of(precision))


def _like(x: Tensor, rows: int, columns: int) -> Tensor:
    return x.new_empty((rows, *x.shape[1:-1], columns))


# --- all_gather_gemm ---


@_register
def _all_gather_gemm(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    group_name: str,
    return_gathered: bool,
    plan: str,
    precision: str,
) -> list[Tensor]:
    exchange = _exchange(group_name, plan, precision)
    outputs, gathered = autograd.gathered_products(exchange, x, weights, biases, return_gathered)
    return outputs if gathered is None else [*outputs, gathered]


@_fake
def _fake_all_gather_gemm(x, weights, biases, group_name, return_gathered, plan, precision):
    rows = x.shape[0] * group_of(group_name).size()
    outputs = [_like(x, rows, weight.shape[0]) for weight in weights]
    return [*outputs, _like(x, rows, x.shape[-1])] if return_gathered else outputs


def _save_column(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    x, weights, biases, ctx.group_name, return_gathered, ctx.plan, ctx.precision = inputs
    needs_weights = any(weight.requires_grad for weight in weights)
    kept = (output[-1] if return_gathered else x) if needs_weights else None
    ctx.x_is = "gathered" if return_gathered else "shard"
    ctx.save_for_backward(kept, *weights)
    ctx.biases = len(biases)
    ctx.set_materialize_grads(False)  # where nobody has used the gathered x, its gradient is not exchanged
    ctx.shapes = [gradients.shape_of(each) for each in output[: len(weights)]]


def _column_gradients(ctx: Any, grads: list[Tensor | None]) -> tuple:
    kept, *weights = ctx.saved_tensors
    needs_x, needs_weights, needs_biases = ctx.needs_input_grad[:3]
    count = len(weights)
    needs_biases = list(needs_biases) if ctx.biases else [False] * count
    where = ctx.group_name, ctx.plan, ctx.precision
    of_outputs = gradients.of_outputs(grads[:count], ctx.shapes)
    found = _ops.column_backward(
        of_outputs, kept, ctx.x_is, weights, needs_x, list(needs_weights), needs_biases, *where
    )
    of_x, of_weights, of_biases = _unpack(found, Needs(needs_x, needs_weights, needs_biases))
    if needs_x and len(grads) > count and grads[count] is not None:
        of_x = of_x + _ops.reduce_scatter(grads[count], ctx.group_name, ctx.plan)
    return of_x, of_weights, of_biases if ctx.biases else [], None, None, None, None


torch.library.register_autograd("streamoverlap::all_gather_gemm", _column_gradients, setup_context=_save_column)


@_register
def _column_backward(
    grads: Sequence[Tensor],
    x: Tensor | None,
    x_is: str,
    weights: Sequence[Tensor],
    needs_x: bool,
    needs_weights: Sequence[bool],
    needs_biases: Sequence[bool],
    group_name: str,
    plan: str,
    precision: str,
) -> list[Tensor]:
    needs = Needs(needs_x, needs_weights, needs_biases)
    exchange = _exchange(group_name, plan, precision)
    of_x, of_weights, of_biases = gradients.of_column(grads, x, x_is, weights, needs, exchange)
    return [gradient for gradient in (of_x, *of_weights, *of_biases) if gradient is not None]


@_fake
def _fake_column_backward(grads, x, x_is, weights, needs_x, needs_weights, needs_biases, group_name, plan, precision):
    rows, *middle, _ = grads[0].shape
    rows = rows if x_is == "replicated" else rows // group_of(group_name).size()
    of_x = [grads[0].new_empty((rows, *middle, weights[0].shape[1]))] if needs_x else []
    of_weights = [weight.new_empty(weight.shape) for weight, need in zip(weights, needs_weights, strict=True) if need]
    of_biases = [grad.new_empty(grad.shape[-1:]) for grad, need in zip(grads, needs_biases, strict=True) if need]
    return [*of_x, *of_weights, *of_biases]


def _unpack(found: list[Tensor], needs: Needs) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    left = iter(found)
    take = [next(left) if need else None for need in (needs.x, *needs.weights, *needs.biases)]
    count = len(needs.weights)
    return take[0], take[1 : 1 + count], take[1 + count :]


# --- column_linear ---


@_register
def _column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group_name: str, plan: str, precision: str
) -> Tensor:
    return precision_of(precision).forward(x, [weight]).linear(bias)


@_fake
def _fake_column_linear(x, weight, bias, group_name, plan, precision):
    return _like(x, x.shape[0], weight.shape[0])


def _save_both(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, _, ctx.group_name, ctx.plan, ctx.precision = inputs
    ctx.save_for_backward(x if weight.requires_grad else None, weight)


def _column_linear_gradients(ctx: Any, grad: Tensor) -> tuple:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    needs = Needs(needs_x, [needs_weight], [needs_bias])
    where = ctx.group_name, ctx.plan, ctx.precision
    found = _ops.column_backward([grad], x, "replicated", [weight], needs_x, needs.weights, needs.biases, *where)
    of_x, of_weights, of_biases = _unpack(found, needs)
    return of_x, *of_weights, *of_biases, None, None, None


torch.library.register_autograd("streamoverlap::column_linear", _column_linear_gradients, setup_context=_save_both)


# --- gemm_reduce_scatter, gemm_all_reduce ---


@_register
def _gemm_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, group_name: str, plan: str, precision: str
) -> Tensor:
    exchange = _exchange(group_name, plan, precision)
    return autograd.summed_products("gemm_reduce_scatter", exchange, x, weight, bias)


@_fake
def _fake_gemm_reduce_scatter(x, weight, bias, group_name, plan, precision):
    return _like(x, x.shape[0] // group_of(group_name).size(), weight.shape[0])


@_register
def _gemm_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None, group_name: str, plan: str, precision: str
) -> Tensor:
    exchange = _exchange(group_name, plan, precision)
    return autograd.summed_products("gemm_all_reduce", exchange, x, weight, bias)


@_fake
def _fake_gemm_all_reduce(x, weight, bias, group_name, plan, precision):
    return _like(x, x.shape[0], weight.shape[0])


def _scatter_gradients(ctx: Any, grad: Tensor) -> tuple:
    def all_gather_gemm(grad: Tensor, weight: Tensor, keeps: bool) -> tuple[Tensor, Tensor | None]:
        found = _ops.all_gather_gemm(grad, [weight], [], ctx.group_name, keeps, ctx.plan, DGRAD[ctx.precision])
        return found[0], found[-1]

    return _row_gradients(ctx, grad, all_gather_gemm, lambda grad: _ops.all_gather(grad, ctx.group_name, ctx.plan))


def _replicated_gradients(ctx: Any, grad: Tensor) -> tuple:
    def multiply(grad: Tensor, weight: Tensor, _: bool) -> tuple[Tensor, Tensor]:
        if not ctx.precision:
            return linear(grad, weight), grad  # which a compiler knows
        return _ops.column_linear(grad, weight, None, ctx.group_name, ctx.plan, DGRAD[ctx.precision]), grad

    return _row_gradients(ctx, grad, multiply, lambda grad: grad)


def _row_gradients(ctx: Any, grad: Tensor, all_gather_gemm: Any, all_gather: Any) -> tuple:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    needs = Needs(needs_x, [needs_weight], [needs_bias])
    return *gradients.of_row(grad, x, weight, needs, all_gather_gemm, all_gather), None, None, None


torch.library.register_autograd("streamoverlap::gemm_reduce_scatter", _scatter_gradients, setup_context=_save_both)
torch.library.register_autograd("streamoverlap::gemm_all_reduce", _replicated_gradients, setup_context=_save_both)


# --- the plain collectives: each one's gradient is another ---


@_register
def _all_gather(x: Tensor, group_name: str, plan: str) -> Tensor:
    return ops.all_gather(x, group_of(group_name), plan=plan_of_text(plan))


@_register
def _reduce_scatter(x: Tensor, group_name: str, plan: str) -> Tensor:
    return ops.reduce_scatter(x, group_of(group_name), plan=plan_of_text(plan))


@_register
def _all_reduce(x: Tensor, group_name: str, plan: str) -> Tensor:
    return ops.all_reduce(x, group_of(group_name), plan=plan_of_text(plan))


@_fake
def _fake_all_gather(x, group_name, plan):
    return x.new_empty((x.shape[0] * group_of(group_name).size(), *x.shape[1:]))


@_fake
def _fake_reduce_scatter(x, group_name, plan):
    return x.new_empty((x.shape[0] // group_of(group_name).size(), *x.shape[1:]))


@_fake
def _fake_all_reduce(x, group_name, plan):
    return x.new_empty(x.shape)


def _save_place(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, ctx.group_name, ctx.plan = inputs


def _gradient_is(op: str) -> Any:
    return lambda ctx, grad: (getattr(_ops, op)(grad, ctx.group_name, ctx.plan), None, None)


for _op, _gradient in gradients.OF_COLLECTIVES.items():
    torch.library.register_autograd(f"streamoverlap::{_op}", _gradient_is(_gradient), setup_context=_save_place)
