"""What is timed beside what: calls that give one shape's result, or a part of it, and graphs of such calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from factors import Factor
from measure import has_nccl
from problem import ROTATION, Problem
from torch import Tensor

import streamoverlap as so

SERIAL = so.PlanSpec("serial")
DIRECT = so.PlanSpec()
WIRE = "fp8"
NAMES = ("mm", "best gemm", "comm", "serial", "fused", "untuned", "tuned", "wire")
CALLS = 2 * ROTATION  # in one graph
ON_CPU = "needs a GPU"
NO_NCCL = "several ranks share a GPU, which NCCL refuses"
NO_PARTIALS = "an all-gather has no partial products"


class Groups(NamedTuple):
    """Of all ranks, each with a communicator of its own; what is tuned in one does not change calls in the other."""

    tuned: dist.ProcessGroup
    untuned: dist.ProcessGroup
    alone: dist.ProcessGroup | None  # this rank's, on GPUs

    @classmethod
    def make(cls, device: torch.device) -> Groups:
        found = {}
        for tuning in ("table", "off"):
            found[tuning] = dist.new_group()
            communicator = so.Communicator(found[tuning], device=device.type, tuning=tuning, timeout=120.0)
            if communicator.fallback is not None:
                raise RuntimeError(f"there is nothing to measure, the ranks run serial: {communicator.fallback}")
        alone = None
        if device.type == "cuda":
            alone, _ = dist.new_subgroups(1, backend="gloo")
            so.Communicator(alone, device="cuda", tuning="off")
        return cls(found["table"], found["off"], alone)

    def close(self, device: torch.device) -> None:
        for group in filter(None, self):
            so.Communicator.of(group, device).close()


class Column(NamedTuple):
    """Calls, each on set `i` of the inputs, and what they must give."""

    call: Callable[[int], Tensor]
    expected: str  # the method of Problem that gives it
    prepare: Callable[[int], object] | None = None  # before a capture; None: one call
    allowed: str | None = None  # the method of Problem that says how far off it may be; None: by rounding alone
    exact: bool = False  # whatever numbers there are: nothing is rounded


def columns_of(problem: Problem, groups: Groups, plans: dict[str, so.PlanSpec]) -> tuple[dict[str, Column], dict]:
    """By name; and why others are missing. `plans` are further ones of ours, by name."""
    exchange = so.all_gather if problem.shape.gathers else so.reduce_scatter

    def ours(group: dist.ProcessGroup, **options: object) -> list[partial]:
        return [call_of(problem, i, group, **options) for i in range(ROTATION)]

    comm = _of_package((partial(exchange, x, groups.tuned, plan=DIRECT) for x in problem.sent()), "exchanged")
    found = {
        "mm": Column(problem.mm, "product"),
        "best gemm": _of_package((product_alone(problem, i, groups) for i in range(ROTATION)), "product"),
        "comm": comm._replace(exact=problem.shape.gathers),
        "serial": _of_package(ours(groups.tuned, plan=SERIAL)),
        "fused": Column(_fused(problem), "output"),
        "untuned": _of_package(ours(groups.untuned)),
        "tuned": _of_package(ours(groups.tuned)),
        **{name: _of_package(ours(groups.tuned, plan=plan)) for name, plan in plans.items()},
    }
    absent = {}
    if groups.alone is None:
        absent |= dict.fromkeys(("best gemm", "fused"), ON_CPU)
    elif not has_nccl():
        absent |= dict.fromkeys(("serial", "fused"), NO_NCCL)
    if problem.shape.gathers:
        absent["wire"] = NO_PARTIALS
    else:
        found["wire"] = _of_package(ours(groups.tuned, wire=WIRE))._replace(allowed="wire_error")
    return {name: column for name, column in found.items() if name not in absent}, absent


def call_of(problem: Problem, i: int, group: dist.ProcessGroup, **options: object) -> partial:
    """Of our op on set `i` of the inputs."""
    op = so.all_gather_gemm if problem.shape.gathers else so.gemm_reduce_scatter
    return _call(op, problem, problem.x[i], i, group, options)


def product_alone(problem: Problem, i: int, groups: Groups) -> partial:
    """In a group of one this is one product, by the algorithm of cuBLASLt's that was measured to be fastest."""
    return _call(so.all_gather_gemm, problem, problem.whole_x(i), i, groups.alone, {"plan": DIRECT})


def _call(
    op: Callable, problem: Problem, x: Factor, i: int, group: dist.ProcessGroup | None, options: dict[str, object]
) -> partial:
    weight = problem.weights[i]
    return partial(op, x.values, weight.values, group, **problem.kind.options(x, weight), **options)


def _of_package(calls: Iterable[partial], expected: str = "output") -> Column:
    """Of calls of this package's ops, one for each set of inputs."""
    of_sets = list(calls)

    def prepare(i: int) -> None:
        call = of_sets[i]
        so.prepare(call.func, *call.args, **call.keywords)

    return Column(lambda i: of_sets[i](), expected, prepare)


def _fused(problem: Problem) -> Callable[[int], Tensor]:
    """PyTorch's own, on symmetric memory of the default group."""
    kind, name = problem.kind, dist.group.WORLD.group_name
    op = kind.fused_gather if problem.shape.gathers else kind.fused_scatter
    return lambda i: op(problem.x[i], problem.weights[i], name)


def plans_to_compare(gathers: bool, world: int) -> dict[str, so.PlanSpec]:
    """Direct and ring, 1 to 3 compute streams, chunks and ways to sum."""
    reductions = ("accumulate",) if gathers else ("accumulate", "sum")
    fields = product(("direct", "ring"), (1, 2, 4), (1, 2, 3), reductions)
    plans = [so.PlanSpec(*each) for each in fields]
    return {plan.to_text(): plan for plan in plans if plan.compute_streams <= world * plan.chunks}


class Rotated:
    """A call on the next set of inputs; remembers what the last one gave."""

    calls = 1

    def __init__(self, column: Column) -> None:
        self._call, self._turn = column.call, 0
        self._last: tuple[int, Tensor] | None = None

    def __call__(self) -> None:
        i = self._turn % ROTATION
        self._turn += 1
        self._last = i, self._call(i)

    def poison(self) -> None:
        """The memory that the next output is likely to get."""
        if self._last is not None:
            self._last[1].fill_(float("nan"))
            self._last = None

    def results(self) -> list[tuple[int, Tensor]]:
        """Set of inputs and result of the last call."""
        return [] if self._last is None else [self._last]


class Replayed:
    """A CUDA graph of several calls, the sets of inputs in turn."""

    calls = CALLS

    def __init__(self, column: Column) -> None:
        for i in range(ROTATION):
            (column.prepare or column.call)(i)
        torch.cuda.synchronize()
        self._graph, self._outputs = torch.cuda.CUDAGraph(), {}
        # Threads of NCCL and of this package ask the driver for things meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            for call in range(CALLS):
                i = call % ROTATION
                self._outputs[i] = column.call(i)

    def __call__(self) -> None:
        self._graph.replay()

    def poison(self) -> None:
        for output in self._outputs.values():
            output.fill_(float("nan"))

    def results(self) -> list[tuple[int, Tensor]]:
        return list(self._outputs.items())
