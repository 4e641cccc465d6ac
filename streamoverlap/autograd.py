"""The ops with gradients in eager mode. A compiler takes those of `streamoverlap.library`, which say the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import Parameter

from streamoverlap import _C, gradients
from streamoverlap.call import current_mode, in_mode
from streamoverlap.gradients import Exchange, Needs, WeightGradient
from streamoverlap.spec import of_wire


class Options(NamedTuple):
    """What an op is called with besides tensors."""

    exchange: Exchange
    parameter: Parameter | None = None  # whose main_grad takes the gradient of the one weight
    save_gathered: bool = False  # of an all-gather-GEMM: for the backward pass
    of_call: dict[str, Any] = {}  # noqa: RUF012  the timeout, streams and wire of the forward call; nobody writes it

    @property
    def weight_gradient(self) -> WeightGradient | None:
        if self.parameter is None:
            return None
        gradients.expect_main_grad(self.parameter)
        return lambda _, grad, x: gradients.into_main_grad(self.parameter, grad, x)


def needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def all_gather_gemm(
    options: Options, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], return_gathered: bool
) -> tuple[list[Tensor], Tensor | None]:
    every_bias = biases or [None] * len(weights)
    found = _AllGatherGemm.apply(options, len(weights), return_gathered, x, *weights, *every_bias)
    return list(found[: len(weights)]), found[-1] if return_gathered else None


def gemm_reduce_scatter(options: Options, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _GemmReduceScatter.apply(options, x, weight, bias)


def gemm_all_reduce(options: Options, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _GemmAllReduce.apply(options, x, weight, bias)


def gathered_products(
    exchange: Exchange,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    keeps: bool,
    **of_call: Any,
) -> tuple[list[Tensor], Tensor | None]:
    """all_gather_gemm without gradients; also the gathered x if `keeps`."""
    factors = exchange.precision.forward(x, weights)

    def validate(world: int) -> object:
        return _C.validate_all_gather_gemm(factors.x, factors.weights, biases, world, factors.scaling)

    return factors.all_gather_gemm(exchange.on(x, validate), x, biases, keeps, exchange.plan, **of_call)


def summed_products(
    operation: str, exchange: Exchange, x: Tensor, weight: Tensor, bias: Tensor | None, **of_call: Any
) -> Tensor:
    """gemm_reduce_scatter or gemm_all_reduce without gradients."""
    factors = exchange.precision.forward(x, [weight])

    def validate(world: int) -> object:
        check = getattr(_C, f"validate_{operation}")
        return check(factors.x, factors.weights[0], bias, world, factors.scaling, of_call.get("quantised", False))

    return factors.sum_of_products(exchange.on(x, validate), operation, bias, exchange.plan, **of_call)


def exchange(options: Options, operation: str, x: Tensor) -> Tensor:
    """all_gather, reduce_scatter or all_reduce."""
    return _Exchange.apply(options, operation, x)


def column_linear(options: Options, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of an x that is the same on all ranks: exchanges in the backward pass alone."""
    return _ColumnLinear.apply(options, x, weight, bias)


def _backward(function: Callable) -> Callable:
    """Of a forward pass that was prepared, the backward pass is too. Autograd has threads of its own."""

    @once_differentiable
    @wraps(function)
    def run(ctx: FunctionCtx, *grads: Tensor | None) -> tuple:
        with in_mode(ctx.mode):
            return function(ctx, *grads)

    return run


class _AllGatherGemm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, options: Options, count: int, return_gathered: bool, x: Tensor, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = tensors[:count], tensors[count:]
        needs_weights = ctx.needs_input_grad[4 : 4 + count]
        saves_gathered = options.save_gathered and any(needs_weights)
        keeps = return_gathered or saves_gathered
        outputs, gathered = gathered_products(options.exchange, x, weights, biases, keeps, **options.of_call)
        kept = (gathered if saves_gathered else x) if any(needs_weights) else None
        ctx.save_for_backward(kept, *(weights if ctx.needs_input_grad[3] else ()))
        ctx.options, ctx.mode, ctx.count = options, current_mode(), count
        ctx.x_is = "gathered" if saves_gathered else "shard"
        ctx.set_materialize_grads(False)  # where nobody has used the gathered x, its gradient is not exchanged
        ctx.shapes = [gradients.shape_of(output) for output in outputs]
        return (*outputs, gathered) if return_gathered else tuple(outputs)

    @staticmethod
    @_backward
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        kept, *weights = ctx.saved_tensors
        count = ctx.count
        exchange = ctx.options.exchange
        needs = Needs(
            ctx.needs_input_grad[3],
            ctx.needs_input_grad[4 : 4 + count],
            ctx.needs_input_grad[4 + count : 4 + 2 * count],
        )
        of_outputs = gradients.of_outputs(grads[:count], ctx.shapes)
        of_x, of_weights, of_biases = gradients.of_column(
            of_outputs, kept, ctx.x_is, weights, needs, exchange, ctx.options.weight_gradient
        )
        if needs.x and len(grads) > count and grads[count] is not None:
            of_x = of_x + exchange.on(of_x).reduce_scatter(grads[count], exchange.plan)
        return None, None, None, of_x, *of_weights, *of_biases


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, options: Options, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _save(ctx, options, x, weight)
        return options.exchange.precision.forward(x, [weight]).linear(bias)

    @staticmethod
    @_backward
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weights, of_biases = gradients.of_column(
            [grad], x, "replicated", [weight], _needs(ctx), ctx.options.exchange, ctx.options.weight_gradient
        )
        return None, of_x, *of_weights, *of_biases


class _GemmReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, options: Options, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _save(ctx, options, x, weight)
        return summed_products("gemm_reduce_scatter", options.exchange, x, weight, bias, **options.of_call)

    @staticmethod
    @_backward
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, plan, precision = exchange = ctx.options.exchange
        comm = exchange.on(grad)

        def all_gather_gemm(grad: Tensor, weight: Tensor, keeps: bool) -> tuple[Tensor, Tensor | None]:
            factors = precision.dgrad(grad, [weight])
            outputs, gathered = factors.all_gather_gemm(comm, grad, [], keeps, plan)
            return outputs[0], gathered

        return None, *gradients.of_row(
            grad,
            x,
            weight,
            _needs(ctx),
            all_gather_gemm,
            lambda grad: comm.all_gather(grad, plan),
            ctx.options.weight_gradient,
        )


class _GemmAllReduce(torch.autograd.Function):
    """The result is the same on all ranks, and so is its gradient: the backward pass exchanges nothing."""

    @staticmethod
    def forward(ctx: FunctionCtx, options: Options, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _save(ctx, options, x, weight)
        return summed_products("gemm_all_reduce", options.exchange, x, weight, bias, **options.of_call)

    @staticmethod
    @_backward
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dgrad = ctx.options.exchange.precision.dgrad
        return None, *gradients.of_row(
            grad,
            x,
            weight,
            _needs(ctx),
            lambda grad, weight, _: (dgrad(grad, [weight]).linear(), grad),
            lambda grad: grad,
            ctx.options.weight_gradient,
        )


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, options: Options, operation: str, x: Tensor) -> Tensor:
        ctx.exchange, ctx.mode, ctx.operation = options.exchange, current_mode(), operation
        wire = of_wire(options.of_call.get("quantised", False))
        comm = options.exchange.on(x, lambda world: getattr(_C, f"validate_{operation}")(x, world, **wire))
        return getattr(comm, operation)(x, options.exchange.plan, **options.of_call)

    @staticmethod
    @_backward
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[None, None, Tensor]:
        operation = gradients.OF_COLLECTIVES[ctx.operation]
        return None, None, getattr(ctx.exchange.on(grad), operation)(grad, ctx.exchange.plan)


def _save(ctx: FunctionCtx, options: Options, x: Tensor, weight: Tensor) -> None:
    """Of the two what the gradient of the other needs."""
    _, needs_x, needs_weight, _ = ctx.needs_input_grad
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
    ctx.options, ctx.mode = options, current_mode()


def _needs(ctx: FunctionCtx) -> Needs:
    _, x, weight, bias = ctx.needs_input_grad
    return Needs(x, [weight], [bias])
