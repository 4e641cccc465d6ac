"""Timelines as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing show.

The format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from streamoverlap._C import Op
from streamoverlap.plans import STREAMS
from streamoverlap.timeline import Timeline

_GAP = 20e-6  # seconds between calls of which nobody knows when they were


def trace_events(timelines: Sequence[Timeline]) -> dict:
    """The trace as what its JSON holds.

    A process is a rank and a thread a stream; an op is a complete event ("X", in microseconds); flow events go from a
    Record to its Waits and from a Notify to its Await. Calls are where they were in time, as far as it is known, else
    one after another.
    """
    events: list[dict] = []
    ids = count(1)
    offsets = _offsets(timelines)
    for number, (timeline, offset) in enumerate(zip(timelines, offsets, strict=True)):
        for rank in range(len(timeline.plans)):
            events += _ops(timeline, rank, number, offset)
        events += _flows(timeline, offset, ids)
    return {
        "traceEvents": [*_tracks(timelines), *events],
        "displayTimeUnit": "ns",
        "otherData": {f"call {number}": timeline.title for number, timeline in enumerate(timelines)},
    }


def write_chrome(timelines: Sequence[Timeline], path: str | Path) -> None:
    """Writes `timelines` to `path` as JSON; see `trace_events`."""
    Path(path).write_text(json.dumps(trace_events(timelines)))


def _offsets(timelines: Sequence[Timeline]) -> list[float]:
    """Seconds to add to the times of each timeline."""
    if all(timeline.began is not None for timeline in timelines):
        first = min((timeline.began for timeline in timelines), default=0.0)
        return [timeline.began - first for timeline in timelines]
    offsets, end = [], 0.0
    for timeline in timelines:
        spans = [span for times in timeline.times for span in times]
        offsets.append(end - min((start for start, _ in spans), default=0.0))
        end = offsets[-1] + max((stop for _, stop in spans), default=0.0) + _GAP
    return offsets


def _tracks(timelines: Sequence[Timeline]) -> Iterator[dict]:
    """Names and order of processes and threads."""
    ranks = [(rank, plan) for timeline in timelines for rank, plan in enumerate(timeline.plans)]
    used = sorted({(rank, STREAMS.index(op.stream)) for rank, plan in ranks for op in plan.ops})
    for rank in sorted({rank for rank, _ in used}):
        yield _named("process_name", rank, 0, name=f"rank {rank}")
        yield _named("process_sort_index", rank, 0, sort_index=rank)
    for rank, stream in used:
        yield _named("thread_name", rank, stream, name=STREAMS[stream])
        yield _named("thread_sort_index", rank, stream, sort_index=stream)


def _named(what: str, rank: int, stream: int, **args) -> dict:
    return {"name": what, "ph": "M", "pid": rank, "tid": stream, "args": args}


def _ops(timeline: Timeline, rank: int, call: int, offset: float) -> Iterator[dict]:
    for index, (op, (start, end)) in enumerate(zip(timeline.plans[rank].ops, timeline.times[rank], strict=True)):
        yield {
            "name": _name(op),
            "cat": op.kind,
            "ph": "X",
            "pid": rank,
            "tid": STREAMS.index(op.stream),
            "ts": 1e6 * (start + offset),
            "dur": 1e6 * (end - start),
            "args": {"call": call, "op": index, **_args(op)},
        }


def _name(op: Op) -> str:
    if op.kind in ("record", "wait"):
        return f"{op.kind} {op.event}"
    if op.kind in ("notify", "await"):
        return f"{op.kind} {op.flag.kind} {op.flag.sender}->{op.flag.receiver}"
    region = op.writes[0]
    return f"{op.kind} {region.shard}.{region.chunk}" + (f" to {region.rank}" if op.kind == "put" else "")


def _args(op: Op) -> dict:
    if op.kind in ("record", "wait"):
        return {"event": op.event}
    if op.kind in ("notify", "await"):
        flag = op.flag
        return {"flag": {"kind": flag.kind, "sender": flag.sender, "receiver": flag.receiver, "index": flag.index}}
    return {"reads": [_region(region) for region in op.reads], "writes": [_region(region) for region in op.writes]}


def _region(region) -> str:
    """As plans print it."""
    return f"{region.buffer}@{region.rank}[{region.shard}.{region.chunk}]"


def _flows(timeline: Timeline, offset: float, ids: Iterator[int]) -> Iterator[dict]:
    for arrow in timeline.arrows():
        number = next(ids)
        for phase, rank, op in (("s", arrow.from_rank, arrow.from_op), ("f", arrow.to_rank, arrow.to_op)):
            # Viewers tie an end of a flow to the event that it lies in. So the first lies where the one begins, and
            # the last just before the other ends.
            start, end = timeline.times[rank][op]
            at = start if phase == "s" else max(start, end - 1e-9)
            flow = {
                "name": "event" if arrow.from_rank == arrow.to_rank else "flag",
                "cat": "order",
                "ph": phase,
                "id": number,
                "pid": rank,
                "tid": STREAMS.index(timeline.plans[rank].ops[op].stream),
                "ts": 1e6 * (at + offset),
            }
            yield flow if phase == "s" else {**flow, "bp": "e"}
