"""On GPUs: few hardware queues, and kernels that are not loaded yet while a peer is late."""

from __future__ import annotations

import functools
import importlib.util
import time

import pytest
import torch
from gpu_ranks import ColdKernels, InFlight, communicator, hold_back, hold_back_in_turn, new_group, on_gpu, streams_of
from ranks import Pool
from references import Case
from test_sequences import mixed_calls

import streamoverlap as so

pytestmark = pytest.mark.gpu(1)


def crowd(rank: int, world: int, group, calls: list[Case]) -> None:
    """Two groups, two user streams and a graph at once, among other work, with streams held back."""
    users = [torch.cuda.Stream() for _ in range(2)]
    work = torch.ones(512, 512, device="cuda")
    x = torch.ones(40, 16, device="cuda")
    weight = torch.ones(8, 16, device="cuda")
    with new_group(world) as other:
        groups = (group, other)
        plan = so.PlanSpec("ring", 2, 2)
        so.prepare(so.all_gather_gemm, x, weight, group, plan=plan)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            product = so.all_gather_gemm(x, weight, group, plan=plan)
        for repeat in range(3):
            for first in range(0, len(calls), 20):
                window = InFlight(rank, world)
                window.ready(*calls[first : first + 20])
                for number, case in enumerate(calls[first : first + 20], first):
                    on = groups[number % 2]
                    with torch.cuda.stream(users[number // 2 % 2]):
                        if repeat:
                            hold_back_in_turn(communicator(on), rank, world, number + repeat, 1.0)
                        window.make(case, on)
                        torch.mm(work, work)
                    x.fill_(number)
                    graph.replay()
                window.settle()
                assert torch.equal(product, torch.full_like(product, 16.0 * number))


@pytest.mark.parametrize(("connections", "world"), [(1, 2), (1, 3), (8, 2), (32, 2)])
def test_any_number_of_hardware_queues(connections: int, world: int) -> None:
    calls = mixed_calls(60, seed=50, algorithms=("direct", "ring"))
    with Pool(world, functools.partial(on_gpu, connections=connections)) as pool:
        pool.run(crowd, calls, timeout=100)


def cold_while_a_peer_is_late(rank: int, world: int, group) -> None:
    """Each way of being late in turn: the process, and the streams of its calls."""
    comm = communicator(group)
    cases = [Case(op, so.PlanSpec("ring", 2), lead=(8,), seed=i) for i, op in enumerate(("all_gather_gemm",) * 3)]
    cold = ColdKernels()
    calls = InFlight(rank, world)
    calls.ready(*cases)
    calls.make(cases[0], group)
    calls.settle()
    for number, late in enumerate(("process", "main", "send", "recv", "compute0")):
        if rank == number % world:
            if late == "process":
                time.sleep(2)
            else:
                hold_back(streams_of(comm)[late], 2000)
        started = time.monotonic()
        for case in cases[:2]:
            calls.make(case, group)
            cold.launch()
        calls.make(cases[2], group)
        calls.settle()
        assert time.monotonic() - started < 15, late


def test_cold_kernels_between_calls_while_a_peer_is_seconds_late() -> None:
    with Pool(2, on_gpu) as pool:
        pool.run(cold_while_a_peer_is_late, timeout=90)


def cold_cupy_kernel(rank: int, world: int, group) -> None:
    import cupy

    communicator(group)
    cupy.cuda.Device(torch.cuda.current_device()).use()
    case = Case("gemm_reduce_scatter", so.PlanSpec("direct", 2), lead=(8,), bias=True)
    source = 'extern "C" __global__ void fill(float* x) { x[threadIdx.x] = threadIdx.x; }'
    kernel = cupy.RawKernel(source, "fill")
    kernel.compile()
    x = cupy.zeros(32, dtype=cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    calls = InFlight(rank, world)
    calls.ready(case)
    calls.make(case, group)
    calls.settle()
    if rank == 0:
        time.sleep(2)
    calls.make(case, group)
    with stream:
        kernel((1,), (32,), (x,))
    calls.make(case, group)
    calls.settle()
    assert (x.get() == range(32)).all()


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy")
def test_a_cold_kernel_of_cupy_between_calls() -> None:
    with Pool(2, on_gpu) as pool:
        pool.run(cold_cupy_kernel, timeout=60)
