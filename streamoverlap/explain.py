"""Why a call runs as it does: its plan, who chose it, and what it takes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from streamoverlap.spec import PlanSpec

_thread = threading.local()


@dataclass(frozen=True)
class Explanation:
    """Of a call that `streamoverlap.explain` was asked about.

    Attributes:
        operation: its name.
        plan: what it runs.
        reason: why: given; simulated; default; or why the group runs serial whatever is asked for.
        predicted: seconds, as simulated with the costs of an H200 for calls on CUDA; None on the CPU, of which there
            are no costs, and of a call without data.
        measured: seconds of the last such call in a `streamoverlap.trace` of this group, of its slowest rank; None
            where there was none. Tracing itself takes some microseconds.
    """

    operation: str
    plan: PlanSpec
    reason: str
    predicted: float | None
    measured: float | None

    def __str__(self) -> str:
        times = [
            f"{name} {1e6 * seconds:,.1f} us" if seconds is not None else f"not {name}"
            for name, seconds in (("predicted", self.predicted), ("measured", self.measured))
        ]
        return f"{self.operation}: {self.plan}\n  why: {self.reason}\n  time: {', '.join(times)}"


class Explained(Exception):  # noqa: N818  no error
    """Ends a call that is explained and not made."""

    def __init__(self, explanation: Explanation) -> None:
        self.explanation = explanation


def is_explaining() -> bool:
    return getattr(_thread, "explaining", False)


@contextmanager
def _explaining() -> Iterator[None]:
    _thread.explaining = True
    try:
        yield
    finally:
        _thread.explaining = False


def explain(function: Callable, *args: Any, **options: Any) -> Explanation:
    """What a call would run, why, and how long that takes; the call is not made.

    Args:
        function: an op of this package, such as `streamoverlap.all_gather_gemm`.
        *args, **options: its arguments.

    Raises:
        TypeError: `function` is none of them.
        What the call would raise of its arguments.

    Nothing is sent, so one rank may ask alone, unless the group's communicator must be made first, which is collective.
    Where ranks bring weights of different sizes, rank 0 chooses for all, so what another rank is told before the first
    such call may change then.

    Example:
        >>> print(so.explain(so.all_gather_gemm, x, weight, group))
    """
    from streamoverlap.ops import EXCHANGES  # which imports the communicator, which imports this

    if function not in EXCHANGES:
        names = ", ".join(op.__name__ for op in EXCHANGES)
        raise TypeError(f"function is {getattr(function, '__name__', function)!r}; expected one of {names}")
    try:
        with torch.no_grad(), _explaining():
            function(*args, **options)
    except Explained as ended:
        return ended.explanation
    raise AssertionError("a call was made that was to be explained")
