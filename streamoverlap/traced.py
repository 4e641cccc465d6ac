"""The functional ops as a compiler sees them: registered ops, with groups and plans as values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamoverlap.spec import PlanSpec

_ops = torch.ops.streamoverlap
_OF_FLOAT8 = ("scale_x", "scale_weight", "out_dtype", "use_fast_accum")


def traceable(traced: Callable) -> Callable[[Callable], Callable]:
    """Of functions that a compiler is to see as `traced`, which takes the same arguments."""

    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():
                return traced(*args, **options)
            return function(*args, **options)

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
    **eager: Any,
):
    _expect_none(eager)
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
        **eager: Any,
    ) -> Tensor:
        _expect_none(eager)
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
        **eager: Any,
    ) -> Tensor:
        _expect_none(eager)
        return getattr(_ops, operation)(x, *_place(group, plan))

    return traced


def _place(group: dist.ProcessGroup | None, plan: PlanSpec | None, *between: Any) -> tuple:
    name = (dist.group.WORLD if group is None else group).group_name
    return name, *between, "" if plan is None else plan.to_text()


def _expect_none(eager: dict[str, Any]) -> None:
    """`async_op`, `timeout` and `streams` are for eager calls: a compiler orders and overlaps on its own."""
    for name, value in eager.items():
        if name in _OF_FLOAT8 and not (value is None or value is False):
            raise ValueError(
                f"{name} is given in a compiled call; expected None: products of float8 are for eager calls, so leave "
                "them out of what is compiled (torch.compiler.disable)"
            )
        if value not in (None, False):
            raise ValueError(f"{name} is {value!r} in a compiled call; expected the default")
