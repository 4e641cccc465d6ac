"""What times mean: ratios of one shape, geometric means of groups of shapes, and the targets they are held against."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from shapes import Shape, load

LINK_RATE = 385e9  # bytes/s each way between two H200s, both directions at once, 64 MiB and up: docs/benchmarks.md
MODES = ("eager", "graph")
RATIOS = ("t/mm", "t/best gemm", "t/serial", "t/fused", "t/bound", "wire/tuned")
_FEW_ROWS = 1024  # with fewer, eager calls are bound by the CPU


def described(document: dict) -> str:
    """What is multiplied."""
    scaling = document["scaling"]
    return f"{document['dtype']} with {scaling}-wise scales" if scaling else document["dtype"]


def mm_of(document: dict) -> str:
    """What `mm` times."""
    return "torch._scaled_mm" if document["scaling"] else "torch.mm"


def geomean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def bound(result: dict, mode: str) -> float:
    """Microseconds that hidden communication cannot beat: the longer of `mm` and the bytes on the link."""
    return max(result["microseconds"][mode]["mm"], 1e6 * result["link_bytes"] / LINK_RATE)


def ratios_of(result: dict, mode: str, column: str = "tuned") -> dict[str, float]:
    """Of one shape's `column`; those that can be told."""
    times = result["microseconds"].get(mode, {})
    if column not in times:
        return {}
    found = {
        f"t/{name}": times[column] / times[name] for name in ("mm", "best gemm", "serial", "fused") if name in times
    }
    if {"wire", "tuned"} <= set(times):
        found["wire/tuned"] = times["wire"] / times["tuned"]
    return found | ({"t/bound": times[column] / bound(result, mode)} if result["set"] != "cpu" else {})


class Target(NamedTuple):
    """A number of `tuned` over some shapes, and what it is to be at most."""

    what: str
    limit: float
    unit: str
    value: float | None  # None: nothing was measured of it
    shapes: int
    of: int  # shapes, were all of shapes.json measured

    @property
    def reached(self) -> str:
        if self.value is None:
            return "-"
        answer = "yes" if self.value <= self.limit else "no"
        return answer if self.shapes == self.of else f"{answer}, of these"


class _Goal(NamedTuple):
    what: str
    limit: float
    ratio: str
    modes: tuple[str, ...]
    takes: Callable[[Shape], bool]
    combine: Callable[[Iterable[float]], float] = geomean
    unit: str = ""


def _core(rows: int) -> Callable[[Shape], bool]:
    return lambda shape: shape.set == "core" and rows == shape.M


def _any(shape: Shape) -> bool:
    return True


def _scatters_as_8(shape: Shape) -> bool:
    return shape.as_tp == 8 and not shape.gathers


_OF_TWO = (
    _Goal("M = 8192, eager: geomean t/mm", 1.00, "t/mm", ("eager",), _core(8192)),
    _Goal("M = 8192, graph: geomean t/mm", 1.00, "t/mm", ("graph",), _core(8192)),
    _Goal("M = 8192, eager: geomean t/best gemm", 1.03, "t/best gemm", ("eager",), _core(8192)),
    _Goal("M = 8192, graph: geomean t/best gemm", 1.03, "t/best gemm", ("graph",), _core(8192)),
    _Goal("M = 2048, graph: geomean t/mm", 1.04, "t/mm", ("graph",), _core(2048)),
    _Goal("M = 2048, eager: geomean t/mm", 1.06, "t/mm", ("eager",), _core(2048)),
    _Goal("as_tp 8, eager: geomean t/bound", 1.04, "t/bound", ("eager",), lambda shape: shape.as_tp == 8),
    _Goal("as_tp 8, graph: geomean t/bound", 1.04, "t/bound", ("graph",), lambda shape: shape.as_tp == 8),
    _Goal("any shape, against PyTorch's fused op: largest t/fused", 0.97, "t/fused", MODES, _any, max),
    _Goal("as_tp 8, fp8 wire over bf16 wire: largest wire/tuned", 1.00, "wire/tuned", MODES, _scatters_as_8, max),
)
_OF_MORE = (
    _Goal("M = 8192, eager: geomean t/bound", 1.06, "t/bound", ("eager",), _core(8192)),
    _Goal("M = 8192, graph: geomean t/bound", 1.06, "t/bound", ("graph",), _core(8192)),
    _Goal("any shape, against PyTorch's fused op: largest t/fused", 1.00, "t/fused", MODES, _any, max),
)
_AGAINST_SERIAL = (
    _Goal(
        "M >= 1024, against serial: largest t/serial", 1.02, "t/serial", MODES, lambda shape: shape.M >= _FEW_ROWS, max
    ),
    _Goal("M < 1024, graph: largest t/serial", 1.02, "t/serial", ("graph",), lambda shape: shape.M < _FEW_ROWS, max),
    _Goal("M < 1024, eager: t - serial", 5.0, "difference", ("eager",), lambda shape: shape.M < _FEW_ROWS, max, " us"),
)
_SCALED_OF_TWO = (
    _Goal("M = 8192, eager: geomean t/mm", 1.05, "t/mm", ("eager",), _core(8192)),
    _Goal("M = 8192, graph: geomean t/mm", 1.05, "t/mm", ("graph",), _core(8192)),
)
_SCALED = (_Goal("any shape, against serial: largest t/serial", 1.02, "t/serial", MODES, _any, max),)


def _goals(world: int, scaled: bool) -> tuple[_Goal, ...]:
    if scaled:
        return (*(_SCALED_OF_TWO if world == 2 else ()), *_SCALED)
    return (*(_OF_TWO if world == 2 else _OF_MORE), *_AGAINST_SERIAL)


def targets_of(results: Sequence[dict], world: int, scaled: bool = False) -> list[Target]:
    """What the project has set itself, for two GPUs or for more, and for float8, beside what was measured."""
    by_key = {(result["label"], result["set"]): result for result in results}
    found = []
    for goal in _goals(world, scaled):
        shapes = [shape for shape in load() if goal.takes(shape)]
        measured = [by_key[shape.label, shape.set] for shape in shapes if (shape.label, shape.set) in by_key]
        values = [_values(goal, result) for result in measured]
        flat = [value for of_shape in values for value in of_shape]
        whole = sum(len(of_shape) == len(goal.modes) for of_shape in values)
        value = goal.combine(flat) if flat else None
        found.append(Target(goal.what, goal.limit, goal.unit, value, whole, len(shapes)))
    return found


def _values(goal: _Goal, result: dict) -> list[float]:
    if goal.ratio == "difference":
        times = result["microseconds"].get(goal.modes[0], {})
        return [times["tuned"] - times["serial"]] if {"tuned", "serial"} <= set(times) else []
    ratios = [ratios_of(result, mode).get(goal.ratio) for mode in goal.modes]
    return [ratio for ratio in ratios if ratio is not None]
