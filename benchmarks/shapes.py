"""The shapes that the benchmarks run: those of shapes.json on GPUs, a few small ones on the CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from factors import Plain

from streamoverlap import simulate

SETS = ("core", "more", "small")
_FILE = Path(__file__).with_name("shapes.json")


@dataclass(frozen=True)
class Shape:
    """Sizes before sharding, as shapes.json has them; N or K is split by `as_tp`, if given, and not by the ranks."""

    name: str
    op: str
    M: int
    N: int
    K: int
    as_tp: int | None = None
    set: str = "core"

    @property
    def gathers(self) -> bool:
        return self.op == "all_gather_gemm"

    @property
    def label(self) -> str:
        return f"{'AG' if self.gathers else 'RS'} {self.name} M{self.M}"

    def sizes(self, world: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of x and weight on one rank; ValueError if `world` ranks cannot share the shape."""
        simulate.local_problem(self.op, world, self.M, self.N, self.K, self.as_tp)
        split = self.as_tp or world
        if self.gathers:
            return (self.M // world, self.K), (self.N // split, self.K)
        return (self.M, self.K // split), (self.N, self.K // split)

    def link_bytes(self, world: int, kind: Plain) -> int:
        """What each rank must send, and receive: the shards, or partial sums, of its peers."""
        row = kind.sent_bytes(self.K) if self.gathers else self.N * kind.results.itemsize
        return (world - 1) * (self.M // world) * row

    def as_json(self) -> dict:
        return {name: value for name, value in asdict(self).items() if value is not None} | {"label": self.label}


# Some milliseconds of a core each, so that the whole run takes seconds.
ON_CPU = tuple(
    Shape(name, op, m, n, k, set="cpu")
    for name, op, m, n, k in [
        ("gather", "all_gather_gemm", 256, 512, 512),
        ("gather", "all_gather_gemm", 1024, 1024, 512),
        ("scatter", "gemm_reduce_scatter", 256, 512, 512),
        ("scatter", "gemm_reduce_scatter", 1024, 512, 1024),
    ]
)


def load(sets: Sequence[str] = SETS, only: str = "", on_gpus: bool = True) -> list[Shape]:
    """Shapes whose label contains `only`, of some sets of shapes.json, or those for the CPU."""
    if not on_gpus:
        return [shape for shape in ON_CPU if only in shape.label]
    document = json.loads(_FILE.read_text())
    shapes = [Shape(**entry, set=name) for name in sets for entry in document[name]]
    return [shape for shape in shapes if only in shape.label]
