"""What a backward pass of tensor-parallel products exchanges and multiplies, the exchanges hidden behind the products.

For ``y = gather(x) @ weight.T``, column-parallel (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", MLSys 2023):

    dgrad   x.grad      = reduce_scatter(y.grad @ weight)
    wgrad   weight.grad = y.grad.T @ gather(x)

The all-gather of x hides behind dgrad, and the tail of dgrad's reduce-scatter behind wgrad. Where x is the same on all
ranks, dgrad ends in an all-reduce and nothing is gathered. For ``y = reduce_scatter(x @ weight.T)``, row-parallel,
dgrad is an all-gather-GEMM, which hands the gathered y.grad to wgrad.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from streamoverlap.communicator import Communicator
from streamoverlap.precision import AS_IT_IS, Precision
from streamoverlap.spec import PlanSpec

# weight_gradient(i, grad, x): that of weight i, or None where it has gone elsewhere.
WeightGradient = Callable[[int, Tensor, Tensor], Tensor | None]

# Of a sum of losses over ranks the gradient of each of these is another one of them.
OF_COLLECTIVES = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_reduce": "all_reduce"}


class Exchange(NamedTuple):
    """Where and how to exchange, and in which precision to multiply."""

    group: dist.ProcessGroup
    plan: PlanSpec | None
    precision: Precision = AS_IT_IS

    def on(self, x: Tensor, validate: Callable[[int], object] | None = None) -> Communicator:
        return Communicator.of(self.group, x.device, validate)


class Needs(NamedTuple):
    """Whose gradients are needed."""

    x: bool
    weights: Sequence[bool]
    biases: Sequence[bool]


def of_column(
    grads: Sequence[Tensor],
    x: Tensor | None,
    x_is: str,
    weights: Sequence[Tensor],
    needs: Needs,
    exchange: Exchange,
    weight_gradient: WeightGradient | None = None,
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """The gradients of x, of each weight and of each bias.

    Args:
        grads: of each output.
        x: what was kept of x, None if no weight needs a gradient.
        x_is: its own ``"shard"``, the ``"gathered"`` whole, or x itself where it is ``"replicated"``.
    """
    comm = exchange.on(grads[0])
    several = len(grads) > 1
    gathering: Any = None
    if any(needs.weights) and x_is == "shard":
        gathering = comm.all_gather(x, exchange.plan, async_op=True)
    dgrad: Any = None
    if needs.x:
        grad = torch.cat(list(grads), dim=-1) if several else grads[0]
        weight = torch.cat(list(weights)) if several else weights[0]
        factors = exchange.precision.dgrad(grad, [weight.t()])
        operation = "gemm_all_reduce" if x_is == "replicated" else "gemm_reduce_scatter"
        dgrad = factors.sum_of_products(comm, operation, None, exchange.plan, async_op=True)
    bias_gradients = [of_bias(grad) if need else None for grad, need in zip(grads, needs.biases, strict=True)]
    if gathering is not None:
        x = gathering.wait()
    weight_gradients = [
        (weight_gradient or _plain)(i, grad, x) if need else None
        for i, (grad, need) in enumerate(zip(grads, needs.weights, strict=True))
    ]
    return dgrad.wait() if dgrad is not None else None, weight_gradients, bias_gradients


def shape_of(output: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """As `of_outputs` takes it."""
    return output.shape, output.dtype, output.device


def of_outputs(grads: Sequence[Tensor | None], shapes: Sequence[tuple]) -> list[Tensor]:
    """Of outputs of those shapes, zero for those that nobody has used."""
    return [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
        for grad, (shape, dtype, device) in zip(grads, shapes, strict=True)
    ]


def of_row(
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    needs: Needs,
    all_gather_gemm: Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]],
    all_gather: Callable[[Tensor], Tensor],
    weight_gradient: WeightGradient | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, of the weight and of the bias, which is this rank's part: the sum over ranks is the whole.

    Args:
        grad: of this rank's rows of y.
        x, weight: None where the gradient of the other is not needed.
        all_gather_gemm: gathers a gradient and multiplies it; also returns the gathered one if asked to.
        all_gather: gathers a gradient.
    """
    x_gradient = gathered = weight_grad = None
    if needs.x:
        x_gradient, gathered = all_gather_gemm(grad, weight.t(), needs.weights[0])
    elif needs.weights[0]:
        gathered = all_gather(grad)
    if needs.weights[0]:
        weight_grad = (weight_gradient or _plain)(0, gathered, x)
    return x_gradient, weight_grad, of_bias(grad) if needs.biases[0] else None


def of_weight(grad: Tensor, x: Tensor) -> Tensor:
    """``grad.T @ x`` over all tokens."""
    return _rows(grad).t() @ _rows(x)


def of_bias(grad: Tensor) -> Tensor:
    return _rows(grad).sum(dim=0)


def accumulate(main_grad: Tensor, grad: Tensor, x: Tensor) -> None:
    """Adds ``grad.T @ x`` to `main_grad`, unrounded where that is wider than x."""
    grad, x = _rows(grad).t(), _rows(x)
    if main_grad.dtype == x.dtype:
        main_grad.addmm_(grad, x)
    elif x.is_cuda and main_grad.dtype == torch.float32:
        torch.addmm(main_grad, grad, x, out_dtype=torch.float32, out=main_grad)
    else:
        main_grad.addmm_(grad.to(main_grad.dtype), x.to(main_grad.dtype))


def into_main_grad(parameter: torch.nn.Parameter, grad: Tensor, x: Tensor) -> Tensor | None:
    """Accumulates a weight's gradient into its ``main_grad``; returns what autograd is to have as the gradient.

    As Megatron's data parallelism expects: with ``grad_added_to_main_grad`` the parameter's hook must run, so there is
    a gradient that nobody reads, zero if the parameter has ``zero_out_wgrad``.
    """
    accumulate(parameter.main_grad, grad, x)
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    make = torch.zeros if getattr(parameter, "zero_out_wgrad", False) else torch.empty
    return make(parameter.main_grad.shape, dtype=x.dtype, device=x.device)


def expect_main_grad(parameter: torch.nn.Parameter) -> None:
    """Before anything is exchanged in a backward pass."""
    main_grad = getattr(parameter, "main_grad", None)
    if not isinstance(main_grad, Tensor):
        raise RuntimeError(
            f"gradient_accumulation_fusion is True and weight.main_grad is {_kind(main_grad)}; expected a tensor of "
            f"shape {tuple(parameter.shape)}"
        )
    if main_grad.shape != parameter.shape or main_grad.device != parameter.device:
        raise RuntimeError(
            f"weight.main_grad is a tensor of shape {tuple(main_grad.shape)} on {main_grad.device}; expected "
            f"{tuple(parameter.shape)} on {parameter.device}"
        )


def _kind(value: object) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"


def _plain(_: int, grad: Tensor, x: Tensor) -> Tensor:
    return of_weight(grad, x)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
