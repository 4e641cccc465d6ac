"""Traces of calls on CUDA streams: eager, async and in graphs."""

from __future__ import annotations

import pytest
import torch
from gpu_ranks import communicator, hold_back, meet, streams_of
from timelines import pack, unpack, verify_order

import streamoverlap as so
from streamoverlap.timeline import Timeline

pytestmark = pytest.mark.gpu(1)

DELAY = 0.2  # seconds a stream is held back: ranks that share a GPU take turns of some milliseconds
PLAN = so.PlanSpec("direct", 2, 2, "sum")
# Times of several ranks are placed on one clock to some microseconds; those that share a GPU, by its time slices.
CLOCKS = 5e-3


def make(world: int, plan: so.PlanSpec) -> None:
    """Three calls, the second async. Of three rows in two chunks one has one row, and of one row one has none."""
    x, w = torch.ones(3, 16, device="cuda"), torch.ones(8 * world, 16, device="cuda")
    so.all_gather_gemm(x, w, plan=plan)
    work = so.gemm_reduce_scatter(torch.ones(world, 16, device="cuda"), w, plan=plan, async_op=True)
    so.all_reduce(x, plan=plan)
    work.wait()


def eager(rank: int, world: int, group, plan: so.PlanSpec) -> tuple:
    communicator(group)
    make(world, plan)
    with so.trace() as trace:
        make(world, plan)
    make(world, plan)
    return pack(trace.timelines), trace.serial_calls, trace.failed_calls


@pytest.mark.parametrize("plan", [PLAN, so.PlanSpec("ring", 2)], ids=str)
def test_times_of_eager_calls(ranks, plan: so.PlanSpec) -> None:
    answers = ranks(2).run(eager, plan)
    assert answers[0] == answers[1]
    packed, *missing = answers[0]
    assert missing == [0, 0]
    timelines = unpack(packed)
    operations = [line.plans[0].spec.operation for line in timelines]
    assert operations == ["all_gather_gemm", "gemm_reduce_scatter", "all_reduce"]
    for line in timelines:
        verify_order(line, CLOCKS)
        assert 0 < line.seconds(0) < 1


def held_back(rank: int, world: int, group, stream: str) -> list[tuple]:
    comm = communicator(group)
    make(world, PLAN)
    meet(group)
    with so.trace() as trace:
        if rank == 1:
            hold_back(streams_of(comm)[stream], 1e3 * DELAY)
        so.all_gather_gemm(torch.ones(8, 16, device="cuda"), torch.ones(16, 16, device="cuda"), plan=PLAN)
    return pack(trace.timelines)


def starts(line: Timeline, rank: int, stream: str) -> float:
    """When the first op that waits for nothing else began."""
    ops = zip(line.plans[rank].ops, line.times[rank], strict=True)
    return min(end for op, (_, end) in ops if op.stream == stream)


def test_a_stream_held_back_shows_where_it_is(ranks) -> None:
    """And on the peer, as the flag that came late."""
    (line,) = unpack(ranks(2).run(held_back, "send")[0])
    verify_order(line, CLOCKS)
    assert starts(line, 1, "send") > 0.5 * DELAY
    assert starts(line, 0, "send") < 0.5 * DELAY
    awaits = [
        end for op, (_, end) in zip(line.plans[0].ops, line.times[0], strict=True) if str(op).startswith("await full")
    ]
    assert awaits and min(awaits) > 0.5 * DELAY


def captured(rank: int, world: int, group) -> tuple:
    comm = communicator(group)
    x, w = torch.ones(8, 16, device="cuda"), torch.ones(16, 16, device="cuda")

    def call() -> None:
        so.all_gather_gemm(x, w, plan=PLAN)

    so.prepare(call)
    meet(group)
    graph, never = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with so.trace() as trace:
        with torch.cuda.graph(graph):
            call()
        with torch.cuda.graph(never):
            call()
        for late in (False, False, True):
            torch.cuda.synchronize()
            meet(group)
            if late and rank == 1:
                hold_back(torch.cuda.current_stream(), 1e3 * DELAY)
            graph.replay()
        torch.cuda.synchronize()
    graph.replay()  # its events are recorded still
    torch.cuda.synchronize()
    assert comm.errored() is None
    return pack(trace.timelines), trace.failed_calls


def test_a_graph_is_shown_as_it_last_ran(ranks) -> None:
    packed, failed = ranks(2).run(captured)[0]
    assert failed == 1, "the one that was never replayed"
    (line,) = unpack(packed)
    verify_order(line, CLOCKS)
    assert starts(line, 1, "send") - starts(line, 0, "send") > 0.5 * DELAY


def alone(rank: int, world: int, group) -> list[tuple]:
    communicator(group)
    with so.trace() as trace:
        so.all_gather_gemm(torch.ones(8, 16, device="cuda"), torch.ones(16, 16, device="cuda"))
    return pack(trace.timelines)


def test_a_group_of_one(ranks) -> None:
    (packed,) = ranks(1).run(alone)
    (line,) = unpack(packed)
    assert line.seconds(0) > 0
