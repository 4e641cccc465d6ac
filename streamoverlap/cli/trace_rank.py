"""A rank of ``streamoverlap trace``: makes some calls, and traces the last one."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

import streamoverlap as so
from streamoverlap import tracing
from streamoverlap.cli.launch import join_group, of_wire, sizes_of
from streamoverlap.timeline import Timeline

_TIMEOUT = 60.0  # seconds that a rank waits for its peers
_WARM_UPS = 3


@dataclass(frozen=True)
class Job:
    """What to trace. `m`, `n`, `k`: the GEMM of all ranks together; a plain collective moves x of m by k."""

    operation: str
    world: int
    m: int
    n: int
    k: int
    dtype: str
    plan: so.PlanSpec
    wire: str | None
    device: str  # cpu or cuda: a GPU a rank
    graph: bool  # captured in a CUDA graph, replayed
    files: tuple[str, ...]


@dataclass(frozen=True)
class RankTimes:
    """Of one rank in the traced call, in seconds. Times of GEMMs and waits are sums over streams."""

    rank: int
    seconds: float
    gemm_seconds: float
    exposed_fraction: float  # 0 to 1, of `seconds`
    waits: int  # Await and Wait, but main's, which is the caller's
    wait_seconds: float


def run_rank(job: Job, threads: int) -> tuple[str, list[RankTimes]]:
    """Returns the title of the traced call and the times of all ranks; rank 0 writes the files."""
    join_group(job.device, threads, _TIMEOUT)
    communicator = so.Communicator.of(None, job.device)
    communicator.set_timeout(_TIMEOUT)
    if communicator.fallback is not None:
        raise RuntimeError(f"nothing to trace, the ranks run serial: {communicator.fallback}")
    call = _call(job)
    for _ in range(_WARM_UPS):
        call()
    if job.graph:
        so.prepare(call)
    _meet(job)
    with so.trace(device=job.device) as traced:
        if job.graph:
            _replay(job, call)
        else:
            call()
    timeline = traced.timelines[0]
    if int(os.environ["RANK"]) == 0:
        for path in job.files:
            tracing.write([timeline], path)
    communicator.close()
    dist.destroy_process_group()
    return timeline.title, [times_of(timeline, rank) for rank in range(job.world)]


def _call(job: Job):
    operation = getattr(so, job.operation)
    shapes = sizes_of(job.operation, job.world, job.m, job.n, job.k, split=job.world, row=job.k)
    tensors = [torch.randn(shape).to(job.device, getattr(torch, job.dtype)) for shape in shapes]
    options = {"plan": job.plan, **of_wire(job.wire)}
    return lambda: operation(*tensors, **options)


def _meet(job: Job) -> None:
    """So that the ranks begin together: on the GPU too, all that was issued before has ended."""
    if job.device == "cuda":
        torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))


def _replay(job: Job, call) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(_WARM_UPS):
        _meet(job)
        graph.replay()
    torch.cuda.synchronize()


def times_of(timeline: Timeline, rank: int) -> RankTimes:
    ops = list(zip(timeline.plans[rank].ops, timeline.times[rank], strict=True))
    gemms = [end - start for op, (start, end) in ops if op.kind == "gemm"]
    waits = [end - start for op, (start, end) in ops if op.kind in ("await", "wait") and op.stream != "main"]
    return RankTimes(rank, timeline.seconds(rank), sum(gemms), timeline.exposed_fraction(rank), len(waits), sum(waits))
