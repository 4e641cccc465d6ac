"""The plan of a call that was given none: what the simulator predicts to be fastest, the same on all ranks."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from streamoverlap import _C, simulate
from streamoverlap.call import current_mode
from streamoverlap.intercept import Asked
from streamoverlap.scaling import name_of
from streamoverlap.spec import ALGORITHMS, DEFAULT, GATHERS, REDUCTIONS, TAPERS, TRANSFERS, Choice, PlanSpec, spec_of

_COSTS = "h200"  # there are no others yet
# Rates of GEMMs over that of bfloat16, which the costs have. Of float32 and float64 assumed: an H200's data sheet,
# without TF32. Of float8 measured, 1.4 to 2.1: benchmarks/results/float8_rates_h200.json.
_RATES = {torch.bfloat16: 1.0, torch.float16: 1.0, torch.float32: 0.07, torch.float64: 0.07}
_RATES |= {torch.float8_e4m3fn: 2.0, torch.float8_e5m2: 2.0}
_STEPS = 4  # of rows an octave: token counts that change from call to call are not each simulated
_MOST_KNOWN = 4096  # shapes
_TUNE = 0xFFFFFFFF  # what ranks agree on where all of them are to measure


class Shape(NamedTuple):
    """A call before sharding, as the simulator takes it."""

    operation: str
    world: int
    m: int
    n: int
    k: int
    dtype: torch.dtype
    compute_streams: int = _C.MAX_COMPUTE_STREAMS  # that there are for it
    graph: bool = False  # captured in a CUDA graph, so that issuing it costs nothing
    out_dtype: torch.dtype | None = None  # None: that of x
    scaling: str = ""  # of float8
    quantised: bool = False  # partials travel as float8

    def sizes(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k

    def bucket(self) -> Shape:
        """With rows rounded up, by a quarter at most, to a multiple of the world size."""
        step = max(1, 1 << max(0, self.m.bit_length() - 1) >> (_STEPS.bit_length() - 1))
        rows = -(-self.m // step) * step
        return self._replace(m=-(-rows // self.world) * self.world)

    def shared(self) -> tuple:
        """What all ranks know: their weights may differ in the size that is their own."""
        width = self.k if self.operation in GATHERS else self.n
        return self.operation, self.m, width, str(self.dtype), self.compute_streams, self.scaling, self.quantised

    @property
    def exchanged_bytes(self) -> int:
        """Of an element: x travels, or partial products do."""
        travels = self.dtype if self.operation in GATHERS else self.out_dtype or self.dtype
        return travels.itemsize


def shape_of(
    operation: str,
    world: int,
    x: Tensor,
    weights: Sequence[Tensor],
    scaling: _C.Scaling | None = None,
    quantised: bool = False,
) -> Shape:
    """Of valid arguments."""
    gathers = operation in GATHERS
    if weights:
        rows, k, n = prod(x.shape[:-1]), x.shape[-1], sum(weight.shape[0] for weight in weights)
        m, n, k = (rows * world, n * world, k) if gathers else (rows, n, k * world)
    else:
        rows, row = x.shape[0], prod(x.shape[1:])
        m, n, k = (rows * world, 1, row) if gathers else (rows, row, 1)
    shape = Shape(operation, world, m, n, k, x.dtype, quantised=quantised)
    return shape if scaling is None else shape._replace(out_dtype=scaling.out_dtype, scaling=name_of(scaling))


def costs_of(dtype: torch.dtype) -> simulate.Costs:
    costs = _shipped()
    return replace(costs, gemm_flops=costs.gemm_flops * _RATES[dtype])


def predicted(shape: Shape, plan: PlanSpec) -> float:
    """Seconds of one call on idle ranks, H200s."""
    costs = costs_of(shape.dtype)
    options = {"costs": costs, "dtype_bytes": shape.exchanged_bytes, "graph": shape.graph}
    if plan.algorithm == "serial":
        return simulate.serial_seconds(shape.operation, shape.world, *shape.sizes(), **options)
    spec = spec_of(shape.operation, plan, shape.world, scaled=bool(shape.scaling), quantised=shape.quantised)
    return simulate.predicted_seconds(simulate.simulate(spec, *shape.sizes(), **options))


@lru_cache(maxsize=256)
def ranked(shape: Shape, stores: bool = False) -> list[tuple[float, PlanSpec]]:
    """Predicted seconds of the overlapped plans worth trying, the fastest first.

    Those that store are among them only if asked for: what a store costs nobody has measured, so they are for the tuner
    to try, not for a prediction to choose.
    """
    tried = [
        plan
        for plan in simulate.candidates(shape.operation, shape.quantised)
        if shape.world * plan.chunks <= _C.MAX_CHUNKS
        and plan.compute_streams <= shape.compute_streams
        and (stores or plan.transfer == "copy")
    ]
    return sorted(((predicted(shape, plan), plan) for plan in tried), key=lambda each: each[0])


def fastest(shape: Shape) -> Choice:
    """As predicted. `serial`, whose cost nobody has measured, must be asked for."""
    ranking = ranked(shape)
    seconds, plan = ranking[0]
    m, n, k = shape.sizes()
    sizes = f"M={m} N={n} K={k}" if "gemm" in shape.operation else f"{m} rows of {max(n, k)}"
    where = " in a graph" if shape.graph else ""
    reason = f"simulated: the fastest of {len(ranking)} plans for {sizes}{where}, with costs of {_COSTS}"
    return Choice(plan, reason, seconds)


def measured(seconds: float, serial_seconds: float | None, plan: PlanSpec) -> Choice:
    serial = "" if serial_seconds is None else f"; serial {1e6 * serial_seconds:,.1f} us"
    return Choice(plan, f"measured: {1e6 * seconds:,.1f} us{serial}", measured=seconds)


class Agreement(NamedTuple):
    """What a rank brings to a choice that rank 0 makes for all; see csrc/group/group.h."""

    shared: int  # hash of what all ranks know of the call
    own: int  # of all that this rank knows
    choice: int
    call: str  # for messages


class _Known(NamedTuple):
    choice: Choice
    agreement: Agreement


class Chooser:
    """Chooses for the calls of one communicator that were given no plan.

    Args:
        world: its size.
        agree: given the number of such a call, an Agreement and seconds to wait for rank 0 (0: the group's timeout),
            gives rank 0's choice, and whether rank 0 knows the same of the call.
        look_up: what this rank's table has for a shape and its weights.
        tune: measures, together with all other ranks.
        tunes: whether it is to be done where nothing is measured yet; only rank 0's counts.
        simulates: else one chunk, straight to its user, where nothing is measured.
    """

    def __init__(
        self,
        world: int,
        agree: Callable[[int, Agreement, float], tuple[int, bool]],
        look_up: Callable[[Shape, Sequence[Tensor]], Choice | None],
        tune: Callable[[Asked], Choice],
        tunes: Callable[[], bool],
        simulates: bool,
    ) -> None:
        self._world = world
        self._agree = agree
        self._look_up = look_up
        self._tune = tune
        self._tunes = tunes
        self._simulates = simulates
        self._calls = 0
        self._order = threading.Lock()  # of calls by several threads
        self._publishes = False  # rank 0 does so at every call, as another rank may see this one for the first time
        self._known: dict[tuple, _Known] = {}
        self._found: dict[Shape, Choice] = {}  # measured by this process

    def publish(self) -> None:
        """This is rank 0, of several."""
        self._publishes = True

    def choose(self, asked: Asked, timeout: float = 0.0) -> Choice:
        """For one call, the same on all ranks; `timeout` in seconds, 0: the group's."""
        try:
            key = _key(asked)
        except RuntimeError:  # of a tensor without sizes, such as a nested one
            asked.identity()
            raise
        known = self._known.get(key)
        if known is not None:
            self._ask(known.agreement, timeout, knows=True)
            return known.choice
        asked.identity()  # raises what is wrong with the arguments
        choice, alike, agreement = self._settle(asked, timeout)
        # Where rank 0's weight has another size it may choose differently next time, for a call that looks alike here.
        if alike:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = _Known(choice, agreement)
        return choice

    def _ask(self, agreement: Agreement, timeout: float, knows: bool) -> tuple[int, bool]:
        """Rank 0's choice, and whether it knows the same of the call; a rank that `knows` need not wait for it."""
        if self._world == 1:
            return agreement.choice, True
        with self._order:  # what rank 0 says of a call comes before what it says of the next one, in any thread
            self._calls += 1
            number = self._calls
            if self._publishes:
                return self._agree(number, agreement, timeout)
        return (agreement.choice, True) if knows else self._agree(number, agreement, timeout)

    def own(self, asked: Asked) -> Choice:
        """What this rank would choose; for one that has made such a call, what it ran."""
        known = self._known.get(_key(asked))
        if known is not None:
            return known.choice
        if not has_data(asked):
            return DEFAULT
        shape = self.bucket(asked, is_for_graph(asked))
        choice = self._measured(shape, asked.weights)
        if choice is None and shape.graph:
            choice = self._measured(shape._replace(graph=False), asked.weights)
        if choice is None:
            choice = fastest(shape) if self._simulates else DEFAULT
        return choice

    def bucket(self, asked: Asked, graph: bool) -> Shape:
        shape = shape_of(asked.operation, self._world, asked.x, asked.weights, asked.scaling, asked.quantised)
        return shape._replace(compute_streams=asked.compute_streams, graph=graph).bucket()

    def found(self, shape: Shape, choice: Choice) -> None:
        """From here on `choice` holds for calls of that bucket. On all ranks alike."""
        self._found[shape] = choice
        self._known.clear()

    @property
    def has_found(self) -> bool:
        return bool(self._found)

    def _measured(self, shape: Shape, weights: Sequence[Tensor]) -> Choice | None:
        return self._found.get(shape) or self._look_up(shape, weights)

    def _settle(self, asked: Asked, timeout: float) -> tuple[Choice, bool, Agreement]:
        choice = self.own(asked)
        shape = self.bucket(asked, is_for_graph(asked))
        capturing = asked.x.is_cuda and torch.cuda.is_current_stream_capturing()
        tunes = self._tunes() and choice.measured is None and not capturing and has_data(asked)
        agreement = Agreement(
            _hash(shape.shared()),
            _hash((shape, layout_of(asked.weights))),
            _TUNE if tunes else _code(choice.plan),
            f"{asked.operation} on x of {list(asked.x.shape)}, {asked.x.dtype}",
        )
        code, alike = self._ask(agreement, timeout, knows=False)
        if code == _TUNE:
            choice = self._tune(asked)
        elif (plan := _plan(code)) != choice.plan:
            choice = Choice(plan, "rank 0 chose it, whose weight, or whose table of measured plans, is another one")
        return choice, alike, agreement._replace(choice=_code(choice.plan))


def _key(asked: Asked) -> tuple:
    layouts = [(weight.shape, weight.stride()) for weight in asked.weights]
    x, scaling = asked.x, name_of(asked.scaling)
    kinds = asked.compute_streams, is_for_graph(asked), scaling, asked.quantised
    return (asked.operation, x.dtype, x.shape, *kinds, *layouts)


def is_for_graph(asked: Asked) -> bool:
    """Whether the call is captured, or prepared for that."""
    return asked.x.is_cuda and (current_mode().prepare or torch.cuda.is_current_stream_capturing())


def has_data(asked: Asked) -> bool:
    return asked.x.numel() > 0 and all(weight.numel() > 0 for weight in asked.weights)


def layout_of(weights: Sequence[Tensor]) -> str:
    """Row- or column-major, of each."""
    return ",".join("row" if weight.stride(-1) == 1 else "column" for weight in weights)


def _hash(value: object) -> int:
    return zlib.crc32(repr(value).encode())


@lru_cache
def _shipped() -> simulate.Costs:
    return simulate.Costs.load(_COSTS)


def _code(plan: PlanSpec) -> int:
    algorithm, reduction = ALGORITHMS.index(plan.algorithm), REDUCTIONS.index(plan.reduce)
    transfer, taper = TRANSFERS.index(plan.transfer), TAPERS.index(plan.taper)
    shape = (plan.chunks << 8) | (plan.compute_streams << 4)  # chunks have 7 bits, streams 2
    return (taper << 17) | (transfer << 16) | shape | (reduction << 2) | algorithm


def _plan(code: int) -> PlanSpec:
    ways = REDUCTIONS[code >> 2 & 3], TRANSFERS[code >> 16 & 1], TAPERS[code >> 17]
    return PlanSpec(ALGORITHMS[code & 3], code >> 8 & 0xFF, code >> 4 & 15, *ways)
