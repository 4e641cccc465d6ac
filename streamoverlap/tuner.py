"""Measures the plans worth trying for one call, all ranks together, and keeps the fastest."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from streamoverlap import table
from streamoverlap.call import PLAIN, Mode
from streamoverlap.chooser import Shape, layout_of, ranked
from streamoverlap.intercept import Asked, intercept
from streamoverlap.meeting import attempt
from streamoverlap.scaling import ones_like
from streamoverlap.spec import GATHERS, PlanSpec

if TYPE_CHECKING:
    from streamoverlap.communicator import Communicator

TRIED = 8  # plans, the fastest as simulated, besides serial and one that stores
ROUNDS = 5
_CALLS = 5  # in a row, for one time
_WARM_UPS = 2
_SETS = 3  # of inputs in turn, so that none waits in a cache
_SERIAL = PlanSpec("serial")


class Tuned(NamedTuple):
    """What `streamoverlap.tune` has found.

    Attributes:
        plan: the fastest; calls of this shape without a plan run it from here on.
        seconds: of it, by plan that was tried: the median over rounds of the slowest rank's mean.
    """

    plan: PlanSpec
    seconds: dict[PlanSpec, float]


@torch.no_grad()
def tune(
    function: Callable, *args: Any, rounds: int = ROUNDS, graph: bool = False, save: bool = True, **options: Any
) -> Tuned:
    """Measures plans, `serial` among them, for a call, and on CUDA the algorithms that cuBLASLt has for its products.

    Collective. The call itself is not made: what is measured runs on other tensors of its shapes, strides and dtypes,
    several sets in turn, so there must be memory for some of them.

    Args:
        function: an op of this package, such as `streamoverlap.all_gather_gemm`.
        *args, **options: its arguments. `plan`, `async_op` and `timeout` count for nothing.
        rounds: how often each plan is timed, all of them in turn.
        graph: measure the call in CUDA graphs, for calls that are captured; those for which nothing was measured so
            take what was measured without. Takes slots as `prepare` does.
        save: rank 0 adds what was found to the user's table, which later runs of this version on such devices take;
            see docs/tuning.md.

    Raises:
        TypeError, ValueError: `function` is no such op, `rounds` is not an integer of at least 1, `graph` is no bool or
            is True with x on the CPU; or as the call.
        RuntimeError: the group cannot overlap.
        OSError: the table cannot be written; what was found holds in this process.

    Example:
        >>> so.tune(so.all_gather_gemm, x, weight, group).plan
    """
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise ValueError(f"rounds is {rounds!r}; expected an integer of at least 1")
    if not isinstance(graph, bool):
        raise TypeError(f"graph is a {type(graph).__name__}; expected a bool")
    communicator, asked = intercept(function, args, options)[:2]
    asked.identity()
    if graph and not asked.x.is_cuda:
        raise ValueError(f"graph is True but x is on the {asked.x.device}; expected False, or x on a CUDA device")
    if communicator.fallback is not None:
        raise RuntimeError(
            f"there is nothing to tune: group '{communicator.name}' runs serial: {communicator.fallback}"
        )
    if asked.x.numel() == 0:
        raise ValueError(f"x has no elements, its shape is {list(asked.x.shape)}; expected some to measure with")
    found = communicator._plans.tune(asked, rounds, graph)
    if save:
        failed = [attempt(communicator._plans.save) if communicator.rank == 0 else None]
        dist.broadcast_object_list(failed, group_src=0, group=communicator.group)
        if failed[0] is not None:
            raise OSError(f"rank 0 could not save what was measured: {failed[0]}")
    return found


@torch.no_grad()
def measure(communicator: Communicator, asked: Asked, shape: Shape, rounds: int) -> tuple[Tuned, table.Table]:
    """Returns the fastest plan for calls of `shape`, the same on all ranks, and what is new for the table."""
    group, device, impl = communicator.group, communicator.device, communicator._open()
    # Rank 0's for all: where weights differ in size, so would plans, and a rank without data has none to try.
    box = [_plans_for(communicator, shape) if communicator.rank == 0 else None]
    dist.broadcast_object_list(box, group_src=0, group=group)
    plans = box[0]
    turn = itertools.cycle([_copies(asked, shape) for _ in range(_SETS)])

    def call(plan: PlanSpec, mode: Mode = PLAIN) -> object:
        return communicator._again(next(turn), plan, mode)

    impl.set_tuning(True)
    try:
        for plan in plans:
            for _ in range(_WARM_UPS):
                call(plan)
    finally:
        impl.set_tuning(False)
    calls = {plan: _several(call, plan, device, shape.graph) for plan in plans}
    times: dict[PlanSpec, list[float]] = {plan: [] for plan in plans}
    for _ in range(rounds):
        for plan, made in calls.items():
            times[plan].append(_time_of(made, device) / _CALLS)
    mine = [statistics.median(times[plan]) for plan in plans]
    everyone: list[Any] = [None] * communicator.world
    dist.all_gather_object(everyone, mine, group=group)
    slowest = (table.as_kept(max(of_ranks)) for of_ranks in zip(*everyone, strict=True))
    seconds = dict(zip(plans, slowest, strict=True))
    best = min(seconds, key=seconds.__getitem__)
    found = table.Table()
    found.plans[problem_of(shape, asked.weights)] = table.TunedPlan(best, seconds[best], seconds.get(_SERIAL))
    found.gemms.update({tuple(key): table.TunedGemm(*tuned) for key, *tuned in impl.measured_gemms()})
    return Tuned(best, seconds), found


def _plans_for(communicator: Communicator, shape: Shape) -> list[PlanSpec]:
    order = [plan for _, plan in ranked(shape, stores=True)]
    plans = order[:TRIED]
    if all(plan.transfer == "copy" for plan in plans):  # what a store costs is assumed, so it gets its chance
        plans += [plan for plan in order if plan.transfer == "store"][:1]
    # Gloo's collectives on CUDA tensors are not what anybody would run.
    serial = communicator.device_type == "cpu" or "nccl" in dist.get_backend_config(communicator.group)
    return [_SERIAL, *plans] if serial else plans


def problem_of(shape: Shape, weights: Sequence[Tensor]) -> table.Problem:
    """By which a call with rows as in the bucket is found in a table."""
    dtype, layout = str(shape.dtype).removeprefix("torch."), layout_of(weights)
    if shape.scaling:
        dtype = f"{dtype}, {shape.scaling}"
    if shape.quantised:
        dtype = f"{dtype}, fp8 wire"
    return table.Problem(shape.operation, shape.world, *shape.sizes(), dtype, layout, shape.graph)


def _copies(asked: Asked, shape: Shape) -> Asked:
    """Other tensors for the same call, with the rows of its bucket."""
    rows = shape.m // shape.world if asked.operation in GATHERS else shape.m
    x = asked.x
    trailing = x.shape[-1:] if asked.weights else x.shape[1:]
    filled = _normal(torch.empty(rows, *trailing, dtype=x.dtype, device=x.device))
    weights = [_normal(torch.empty_like(weight)) for weight in asked.weights]
    biases = [None if bias is None else _normal(torch.empty_like(bias)) for bias in asked.biases]
    scaling = None if asked.scaling is None else ones_like(asked.scaling, filled)
    return asked._replace(x=filled, weights=weights, biases=biases, scaling=scaling)


def _normal(tensor: Tensor) -> Tensor:
    if tensor.element_size() > 1:
        return tensor.normal_()
    return tensor.copy_(torch.empty_like(tensor, dtype=torch.float32).normal_())  # float8 has no normal_


def _several(call: Callable, plan: PlanSpec, device: torch.device, graph: bool) -> Callable[[], object]:
    """Makes _CALLS calls in a row, from a graph if asked for."""
    if not graph:
        return lambda: [call(plan) for _ in range(_CALLS)]
    call(plan, Mode(prepare=True, issue=False))
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(captured):
        for _ in range(_CALLS):
            call(plan)
    captured.replay()  # the first has to upload it
    return captured.replay


def _time_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of it on this rank; ranks begin together as far as their exchanges make them."""
    if device.type == "cpu":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
