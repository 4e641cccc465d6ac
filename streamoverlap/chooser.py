"""The plan of a call that was given none: what the simulator predicts to be fastest, the same on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from streamoverlap import _C, simulate
from streamoverlap.spec import ALGORITHMS, DEFAULT, REDUCTIONS, Choice, PlanSpec

_COSTS = "h200"  # there are no others yet
# Rates of GEMMs over that of bfloat16, which the costs have. Assumed: an H200's data sheet, without TF32.
_RATES = {torch.bfloat16: 1.0, torch.float16: 1.0, torch.float32: 0.07, torch.float64: 0.07}
_STEPS = 4  # of rows an octave: token counts that change from call to call are not each simulated
_MOST_KNOWN = 4096  # shapes


class Shape(NamedTuple):
    """A call before sharding, as the simulator takes it."""

    operation: str
    world: int
    m: int
    n: int
    k: int
    dtype: torch.dtype
    compute_streams: int = _C.MAX_COMPUTE_STREAMS  # that there are for it

    def sizes(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k

    def bucket(self) -> Shape:
        """With rows rounded up, by a quarter at most, to a multiple of the world size."""
        step = max(1, 1 << max(0, self.m.bit_length() - 1) >> (_STEPS.bit_length() - 1))
        rows = -(-self.m // step) * step
        return self._replace(m=-(-rows // self.world) * self.world)

    def shared(self) -> tuple:
        """What all ranks know: their weights may differ in the size that is their own."""
        width = self.k if self.operation in ("all_gather_gemm", "all_gather") else self.n
        return self.operation, self.m, width, str(self.dtype), self.compute_streams


def shape_of(operation: str, world: int, x: Tensor, weights: Sequence[Tensor]) -> Shape:
    """Of valid arguments."""
    gathers = operation in ("all_gather_gemm", "all_gather")
    if weights:
        rows, k, n = prod(x.shape[:-1]), x.shape[-1], sum(weight.shape[0] for weight in weights)
        m, n, k = (rows * world, n * world, k) if gathers else (rows, n, k * world)
    else:
        rows, row = x.shape[0], prod(x.shape[1:])
        m, n, k = (rows * world, 1, row) if gathers else (rows, row, 1)
    return Shape(operation, world, m, n, k, x.dtype)


def costs_of(dtype: torch.dtype) -> simulate.Costs:
    costs = _shipped()
    return replace(costs, gemm_flops=costs.gemm_flops * _RATES[dtype])


def predicted(shape: Shape, plan: PlanSpec, graph: bool = False) -> float:
    """Seconds of one call on idle ranks, H200s."""
    options = {"costs": costs_of(shape.dtype), "dtype_bytes": shape.dtype.itemsize, "graph": graph}
    if plan.algorithm == "serial":
        return simulate.serial_seconds(shape.operation, shape.world, *shape.sizes(), **options)
    spec = simulate.spec_of(plan, shape.operation, shape.world)
    return simulate.predicted_seconds(simulate.simulate(spec, *shape.sizes(), **options))


@lru_cache(maxsize=256)
def fastest(shape: Shape) -> Choice:
    """Of the overlapped plans worth trying. `serial`, whose cost nobody has measured, must be asked for."""
    tried = [
        plan
        for plan in simulate.candidates(shape.operation)
        if shape.world * plan.chunks <= _C.MAX_CHUNKS and plan.compute_streams <= shape.compute_streams
    ]
    seconds, plan = min(((predicted(shape, plan), plan) for plan in tried), key=lambda each: each[0])
    m, n, k = shape.sizes()
    sizes = f"M={m} N={n} K={k}" if "gemm" in shape.operation else f"{m} rows of {max(n, k)}"
    return Choice(plan, f"simulated: the fastest of {len(tried)} plans for {sizes}, with costs of {_COSTS}", seconds)


class Chooser:
    """Chooses for the calls of one communicator on CUDA.

    Args:
        world: its size.
        agree: given a key, this rank's choice and a text for messages, gives rank 0's choice for all of them.
    """

    def __init__(self, world: int, agree: Callable[[int, int, str], int]) -> None:
        self._world = world
        self._agree = agree
        self._known: dict[tuple, Choice] = {}

    def choose(
        self,
        operation: str,
        x: Tensor,
        weights: Sequence[Tensor],
        validate: Callable[[], object],
        compute_streams: int,
        settle: bool,
    ) -> Choice:
        """For one call.

        Args:
            operation, x, weights: its own.
            validate: raises what is wrong with its arguments.
            compute_streams: that it has, as many on all ranks.
            settle: else a choice that is not agreed on yet is this rank's alone.
        """
        key = (operation, x.dtype, x.shape, compute_streams, *[weight.shape for weight in weights])
        if (choice := self._known.get(key)) is not None:
            return choice
        validate()
        if x.numel() == 0:
            return DEFAULT
        shape = shape_of(operation, self._world, x, weights)._replace(compute_streams=compute_streams).bucket()
        choice = fastest(shape)
        if self._world > 1:
            if not settle:
                return choice
            choice = self._settle(shape, choice)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = choice
        return choice

    def _settle(self, shape: Shape, choice: Choice) -> Choice:
        shared = repr(shape.shared())
        code = self._agree(zlib.crc32(shared.encode()) or 1, _code(choice.plan), f"{shape.operation} of {shared}")
        if code == 0:
            return DEFAULT._replace(reason="default: there were too many shapes for ranks to agree on a plan for each")
        plan = _plan(code)
        if plan == choice.plan:
            return choice
        return Choice(plan, "simulated: rank 0 chose it, whose weight has another size", predicted(shape, plan))


@lru_cache
def _shipped() -> simulate.Costs:
    return simulate.Costs.load(_COSTS)


def _code(plan: PlanSpec) -> int:
    algorithm, reduction = ALGORITHMS.index(plan.algorithm), REDUCTIONS.index(plan.reduce)
    return (plan.chunks << 8) | (plan.compute_streams << 4) | (reduction << 2) | algorithm


def _plan(code: int) -> PlanSpec:
    return PlanSpec(ALGORITHMS[code & 3], code >> 8, code >> 4 & 15, REDUCTIONS[code >> 2 & 3])
