"""A rank of ``streamoverlap demo``: runs the block, compares its rows with float64, times both ways."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import streamoverlap as so
from streamoverlap.cli.mlp import Problem, Shard, embed, forward, make_shard, reference

_TIMEOUT = 60.0  # seconds that a rank waits for its peers
_CHECKED_ROWS = 64  # on a GPU; on a CPU, where the default problem is small, all rows
_WARM_UPS = {"cpu": 2, "cuda": 5}
_REPEATS = {"cpu": 7, "cuda": 20}
_SERIAL = so.PlanSpec(algorithm="serial")


@dataclass(frozen=True)
class Outcome:
    """What one rank found. Errors are the largest over its checked rows; relative to the largest element."""

    rank: int
    plans: tuple[tuple[str, so.PlanSpec, str], ...]  # op, what ran, why
    checked_rows: int
    absolute_error: float
    relative_error: float
    serial_relative_error: float
    overlapped_seconds: float  # median
    serial_seconds: float


def run_rank(problem: Problem, plan: so.PlanSpec | None, threads: int) -> Outcome:
    torch.set_num_threads(threads)
    rank = int(os.environ["RANK"])
    device = torch.device(problem.device, rank) if problem.device == "cuda" else torch.device("cpu")
    timeout = timedelta(seconds=_TIMEOUT)
    if problem.device == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    communicator = so.Communicator.of(None, device)
    communicator.set_timeout(_TIMEOUT)
    outcome = _run(problem, plan, rank, device, communicator)
    communicator.close()
    dist.destroy_process_group()
    return outcome


def _run(
    problem: Problem,
    plan: so.PlanSpec | None,
    rank: int,
    device: torch.device,
    communicator: so.Communicator,
) -> Outcome:
    x = embed(problem, rank, device)
    shard = make_shard(problem, rank, device)

    ran = []
    results = forward(x, shard, plan, problem.wire)
    for op, result in zip(("all_gather_gemm", "gemm_reduce_scatter"), results, strict=True):
        ran.append((op, *communicator.last_choice[:2]))
        y = result
    serial_y = _last(x, shard, _SERIAL, problem.wire)

    rows = torch.arange(x.shape[0], device=device)
    if problem.device == "cuda":
        rows = torch.linspace(0, x.shape[0] - 1, min(_CHECKED_ROWS, x.shape[0]), device=device).long()
    expected = reference(problem, x[rows])
    largest = expected.abs().max().item()
    error = _largest_error(y[rows], expected)
    serial_error = _largest_error(serial_y[rows], expected)

    overlapped, serial = _time(x, shard, (plan, _SERIAL), problem.wire)
    return Outcome(rank, tuple(ran), len(rows), error, error / largest, serial_error / largest, overlapped, serial)


def _last(x: Tensor, shard: Shard, plan: so.PlanSpec | None, wire: str | None) -> Tensor:
    *_, y = forward(x, shard, plan, wire)
    return y


def _largest_error(y: Tensor, expected: Tensor) -> float:
    """NaN if `y` has one, so that it compares as wrong."""
    return (y.double() - expected).abs().max().item()


def _time(x: Tensor, shard: Shard, ways: tuple[so.PlanSpec | None, ...], wire: str | None) -> list[float]:
    """Median seconds of each way, taken in turns so that a drift of the machine meets all alike."""
    kind = x.device.type
    seconds: list[list[float]] = [[] for _ in ways]
    for repeat in range(_WARM_UPS[kind] + _REPEATS[kind]):
        for way, taken in zip(ways, seconds, strict=True):
            dist.barrier()
            _synchronize(kind)
            started = time.perf_counter()
            _last(x, shard, way, wire)
            _synchronize(kind)
            if repeat >= _WARM_UPS[kind]:
                taken.append(time.perf_counter() - started)
    return [statistics.median(taken) for taken in seconds]


def _synchronize(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()
