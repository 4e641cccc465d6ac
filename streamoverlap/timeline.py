"""When each op of a call's plans began and ended: what the simulator predicts and a trace records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from streamoverlap._C import Plan

COMPUTES = ("gemm", "reduce")


class Arrow(NamedTuple):
    """What lets a waiting op go on: the ops by rank and index in its plan."""

    from_rank: int
    from_op: int
    to_rank: int
    to_op: int


@dataclass(frozen=True)
class Timeline:
    """One call on all ranks.

    Attributes:
        plans: of all ranks, by rank.
        times: ``times[rank][op]`` are the start and end of ``plans[rank].ops[op]`` in seconds, on one clock for all
            ranks, the start of the call being about 0.
        title: what it shows, for people.
        began: where 0 is, in seconds on a clock that the timelines of one trace share; None: unknown.
    """

    plans: tuple[Plan, ...]
    times: tuple[tuple[tuple[float, float], ...], ...]
    title: str
    began: float | None = None

    def seconds(self, rank: int) -> float:
        """From the first start to the last end on `rank`."""
        times = self.times[rank]
        return max((end for _, end in times), default=0.0) - min((start for start, _ in times), default=0.0)

    def exposed(self, rank: int) -> list[tuple[float, float]]:
        """The spans of the call in which no compute stream of `rank` multiplies or sums: what communication costs."""
        times = self.times[rank]
        if not times:
            return []
        busy = sorted(span for op, span in zip(self.plans[rank].ops, times, strict=True) if op.kind in COMPUTES)
        reached, last = min(start for start, _ in times), max(end for _, end in times)
        gaps = []
        for start, end in [*busy, (last, last)]:
            if start > reached:
                gaps.append((reached, start))
            reached = max(reached, end)
        return gaps

    def exposed_fraction(self, rank: int) -> float:
        """Of the call's time on `rank`; 0 to 1."""
        total = self.seconds(rank)
        return sum(end - start for start, end in self.exposed(rank)) / total if total else 0.0

    def arrows(self) -> Iterator[Arrow]:
        """Record to Wait on a rank, Notify to Await between ranks."""
        setters = {}
        for rank, plan in enumerate(self.plans):
            for index, op in enumerate(plan.ops):
                if op.kind == "record":
                    setters[rank, op.event] = rank, index
                elif op.kind == "notify" and op.flag.kind == "full":  # a credit is for the next call
                    setters[_key(op.flag)] = rank, index
        for rank, plan in enumerate(self.plans):
            for index, op in enumerate(plan.ops):
                if op.kind in ("wait", "await"):
                    key = (rank, op.event) if op.kind == "wait" else _key(op.flag)
                    if key in setters:
                        yield Arrow(*setters[key], rank, index)


def _key(flag) -> tuple:
    return flag.kind, flag.sender, flag.receiver, flag.index
