"""The functional ops as a compiler sees them: registered ops, with groups and plans as values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamoverlap.spec import PlanSpec, text_of

_ops = torch.ops.streamoverlap
# Of eager calls: a compiler orders and overlaps on its own, and registered ops take no more arguments.
_EAGER = ("async_op", "timeout", "streams", "wire", "scale_x", "scale_weight", "out_dtype", "use_fast_accum")


def traceable(traced: Callable) -> Callable[[Callable], Callable]:
    """Of functions that a compiler is to see as `traced`, which takes the same arguments but those of eager calls.

    A call with one of these breaks the graph and is made in eager mode; with ``fullgraph=True`` it is refused.
    """

    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if not torch.compiler.is_compiling():
                return function(*args, **options)
            if (reason := _why_uncompiled(options)) is None:
                return traced(*args, **{name: value for name, value in options.items() if name not in _EAGER})
            if not torch.compiler.is_dynamo_compiling():  # torch.export, which has nothing to break
                raise ValueError(reason)
            torch._dynamo.graph_break(msg=reason)
            return torch.compiler.disable(function)(*args, **options)

        return call

    return decorate


def all_gather_gemm(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    return_gathered: bool = False,
    plan: PlanSpec | None = None,
):
    several = not isinstance(weight, Tensor)
    weights = list(weight) if several else [weight]
    biases: list[Tensor] = []
    if bias is not None:
        given = list(bias) if several else [bias]
        # A list with gaps has no gradients as an argument of an op.
        biases = [w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, given, strict=True)]
    found = _ops.all_gather_gemm(x, weights, biases, *_place(group, plan, return_gathered), "")
    outputs = found[: len(weights)] if several else found[0]
    return (outputs, found[-1]) if return_gathered else outputs


def sum_of_products(operation: str) -> Callable[..., Tensor]:
    """gemm_reduce_scatter or gemm_all_reduce."""

    def traced(
        x: Tensor,
        weight: Tensor,
        group: dist.ProcessGroup | None = None,
        *,
        bias: Tensor | None = None,
        plan: PlanSpec | None = None,
    ) -> Tensor:
        return getattr(_ops, operation)(x, weight, bias, *_place(group, plan), "")

    return traced


def plain(operation: str) -> Callable[..., Tensor]:
    """all_gather, reduce_scatter or all_reduce. A compiler knows what is written when: `copy_input` changes nothing."""

    def traced(
        x: Tensor,
        group: dist.ProcessGroup | None = None,
        *,
        plan: PlanSpec | None = None,
        copy_input: bool = False,
    ) -> Tensor:
        return getattr(_ops, operation)(x, *_place(group, plan))

    return traced


def _place(group: dist.ProcessGroup | None, plan: PlanSpec | None, *between: Any) -> tuple:
    return (dist.group.WORLD if group is None else group).group_name, *between, text_of(plan)


def _why_uncompiled(options: dict[str, Any]) -> str | None:
    """What is among `options` that no registered op takes; None: nothing."""
    for name in _EAGER:
        value = options.get(name)
        if value is not None and value is not False:
            told = repr(value) if isinstance(value, str | float | int) else f"a {type(value).__name__}"
            return (
                f"{name} is {told} in a compiled call; expected the default with fullgraph=True, as such a call is "
                "eager and breaks the graph"
            )
    return None
