"""Why a call runs as it does: its plan, who chose it, and what it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from streamoverlap.intercept import intercept
from streamoverlap.spec import PlanSpec


@dataclass(frozen=True)
class Explanation:
    """Of a call that `streamoverlap.explain` was asked about.

    Attributes:
        operation: its name.
        plan: what it runs.
        reason: why: given; measured; simulated; default; or why the group runs serial whatever is asked for.
        predicted: seconds, as simulated with the costs of an H200 for calls on CUDA; None on the CPU, of which there
            are no costs, and of a call without data.
        measured: seconds of its slowest rank in the last `streamoverlap.trace` of this group that had such a call, else
            as `streamoverlap.tune` measured it; None where nobody has. Tracing itself takes some microseconds.
        wire: as what partial products travel: ``"fp8"``, or None: as they are, as with all that runs serial.
    """

    operation: str
    plan: PlanSpec
    reason: str
    predicted: float | None
    measured: float | None
    wire: str | None = None

    def __str__(self) -> str:
        times = [
            f"{name} {1e6 * seconds:,.1f} us" if seconds is not None else f"not {name}"
            for name, seconds in (("predicted", self.predicted), ("measured", self.measured))
        ]
        wire = "" if self.wire is None else ", float8 wire"
        return f"{self.operation}: {self.plan}{wire}\n  why: {self.reason}\n  time: {', '.join(times)}"


def explain(function: Callable, *args: Any, **options: Any) -> Explanation:
    """What a call would run, why, and how long that takes; the call is not made.

    Args:
        function: an op of this package, such as `streamoverlap.all_gather_gemm`.
        *args, **options: its arguments.

    Raises:
        TypeError: `function` is none of them.
        What the call would raise of its arguments, `plan` among them.

    Nothing is sent, so one rank may ask alone, unless the group's communicator must be made first, which is collective.
    Where ranks bring weights of different sizes, rank 0 chooses for all, so what another rank is told before the first
    such call may change then.

    Example:
        >>> print(so.explain(so.all_gather_gemm, x, weight, group))
    """
    with torch.no_grad():  # whether gradients are recorded changes nothing of what is told
        communicator, asked, plan = intercept(function, args, options)
        return communicator._plans.explain(asked, plan)
