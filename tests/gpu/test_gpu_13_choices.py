"""Calls without a plan on GPUs: the simulated choice, the same on all ranks."""

from __future__ import annotations

import pytest
import torch
from gpu_ranks import communicator, meet

import streamoverlap as so

pytestmark = pytest.mark.gpu(1)


def uneven(rank: int, world: int, group) -> tuple:
    """Ranks bring weights of sizes for which they would choose differently; the results must be exact all the same."""
    comm = communicator(group)
    rows, k = 1024, 512
    n = 64 if rank else 16384
    x = torch.full((rows, k), float(rank + 1), device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(n, k, device="cuda", dtype=torch.bfloat16)
    before = so.explain(so.all_gather_gemm, x, weight, group)
    meet(group)
    for _ in range(3):
        y = so.all_gather_gemm(x, weight, group)
        for peer in range(world):
            assert (y[peer * rows : (peer + 1) * rows] == k * (peer + 1)).all()
    return before.plan, comm.last_choice.plan, comm.last_choice.reason, comm.last_choice.predicted


def test_weights_of_different_sizes(ranks) -> None:
    (own, *zero), (other, *one) = ranks(2).run(uneven)
    assert own != other, "the shapes of this test must be such that ranks would choose differently"
    assert zero[0] == one[0] == own
    assert zero[1].startswith("simulated: the fastest of") and "rank 0" in one[1]
    assert zero[2] > 0 and one[2] is None


def captured(rank: int, world: int, group) -> bool:
    """A call without a plan, prepared and captured, has the plan that it was prepared for."""
    comm = communicator(group)
    x = torch.ones(96, 64, device="cuda")
    weight = torch.ones(32, 64, device="cuda")

    def call() -> torch.Tensor:
        return so.gemm_reduce_scatter(x, weight, group)

    so.prepare(call)
    plan = comm.last_choice.plan
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 64 * world).all()
    return comm.last_choice.plan == plan


def test_captures(ranks) -> None:
    assert ranks(2).run(captured) == [True, True]


def few_streams(rank: int, world: int, group) -> int:
    comm = communicator(group)
    x = torch.ones(2048, 1024, device="cuda", dtype=torch.bfloat16)
    streams = so.StreamSet.from_pool(compute=1)
    y = so.all_gather_gemm(x, x, group, streams=streams)
    assert (y == 1024).all()
    return comm.last_choice.plan.compute_streams


def test_a_stream_set_with_one_compute_stream(ranks) -> None:
    assert ranks(2).run(few_streams) == [1, 1]
