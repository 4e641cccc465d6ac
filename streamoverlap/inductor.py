"""Keeps the order of exchanges in what Inductor makes.

That they have ordered effects is meant to do so. But Inductor (of torch 2.12 to 2.14 at least) keeps the edge from one
such op to the next under the name of a buffer, and looks it up under the name of an operation, so it is lost
(pytorch/pytorch#189209): what has no data in common was seen to change places. The lowerings here keep the edges under
the name by which they are looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType


@cache
def keep_order(names: tuple[str, ...]) -> None:
    """Of the ops of those names, in all that is lowered from now on in this process."""
    from torch._inductor.lowering import fallback_handler, register_lowering

    for name in names:
        op = getattr(torch.ops.streamoverlap, name).default
        register_lowering(op, type_promotion_kind=None)(_after_the_last_one(fallback_handler(op)))


def _after_the_last_one(lower: Callable) -> Callable:
    def lower_in_order(*args: Any, **options: Any) -> Any:
        from torch._inductor.virtualized import V

        graph = V.graph
        before = len(graph.operations)
        result = lower(*args, **options)
        last = graph.effectful_ops.get(_EffectType.ORDERED)
        if last is not None:
            for operation in graph.operations[before:]:
                graph.additional_buffer_deps[operation.get_operation_name()].add(last.get_name())
        return result

    return lower_in_order
