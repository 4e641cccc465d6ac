"""Timelines of real calls: carried out of the ranks that made them, and what must be true of any."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from streamoverlap import plans
from streamoverlap.timeline import Timeline


def pack(timelines: list[Timeline]) -> list[tuple]:
    return [(plans.spec_options(line.plans[0].spec), line.times, line.title, line.began) for line in timelines]


def unpack(packed: list[tuple]) -> list[Timeline]:
    return [Timeline(tuple(plans.build(**spec)), times, title, began) for spec, times, title, began in packed]


def verify_order(line: Timeline, clocks: float = 0.0) -> None:
    """`clocks`: by how many seconds the clocks of ranks may differ."""
    for plan, times in zip(line.plans, line.times, strict=True):
        assert len(plan.ops) == len(times)
        streams = defaultdict(list)
        for op, (start, end) in zip(plan.ops, times, strict=True):
            assert 0 <= start <= end
            streams[op.stream].append((start, end))
        for spans in streams.values():
            assert all(before[1] <= after[0] for before, after in pairwise(spans))
    arrows = list(line.arrows())
    assert any(arrow.from_rank != arrow.to_rank for arrow in arrows)
    for arrow in arrows:
        set_from = line.times[arrow.from_rank][arrow.from_op][0]
        seen = line.times[arrow.to_rank][arrow.to_op][1]
        apart = clocks if arrow.from_rank != arrow.to_rank else 0.0
        assert set_from <= seen + apart, "nothing goes on before what it waits for has begun"
