"""Sums whose partials travel as float8, on GPUs: exact, or bit for bit what the same steps give on the CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from gpu_ranks import communicator, gpu_inputs, hold_back_in_turn, on_device, wrong_in
from references import Case, call, expected, inputs
from wire_references import DTYPES, SUMS, partials_of, quantised_sum, sweep

import streamoverlap as so
from streamoverlap import _C

pytestmark = pytest.mark.gpu(1)


def quantised_rows() -> list[str]:
    """As on the CPU, bit for bit; rows that are aligned and not, long and short, of all magnitudes."""
    source = torch.Generator().manual_seed(0)
    wrong = []
    for dtype, rows, width, skip in product(DTYPES, (1, 3, 700), (1, 8, 16, 100, 512, 1031, 8192), (0, 1)):
        sizes = 10.0 ** (6 * torch.rand(rows, 1, generator=source) - 3)
        x = (torch.randn(rows, width, generator=source) * sizes).to(dtype)
        x[0, 0], x[rows // 2, width // 2] = float("inf"), float("nan")
        memory = torch.empty(rows * width + skip, dtype=dtype, device="cuda")
        on_gpu = memory[skip:].view(rows, width).copy_(x)
        for want, found in zip(_C.quantise_rows(x), _C.quantise_rows(on_gpu), strict=True):
            if want.dtype == torch.float8_e4m3fn:  # a NaN may have either sign
                want, found = (each.float().nan_to_num(1e9) for each in (want, found))
            if not torch.equal(want, found.cpu()):
                wrong.append(f"{dtype} {rows} x {width}, {skip} elements off")
    return wrong


def every_plan(rank: int, world: int, group, operation: str) -> list[str]:
    communicator(group)
    wrong = quantised_rows() if operation == "reduce_scatter" else []
    for case in sweep(operation, world):
        if case.plan is not None and case.plan.algorithm == "serial":
            continue
        results = call(case, gpu_inputs(case, rank, world), group)
        wrong += filter(None, [wrong_in(case, results, expected(case, rank, world))])
    return wrong[:3]


@pytest.mark.parametrize("operation", SUMS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_plan_gives_the_exact_result(ranks, world: int, operation: str) -> None:
    assert ranks(world).run(every_plan, operation, timeout=150) == [[]] * world


def rounded(rank: int, world: int, group, operation: str) -> None:
    communicator(group)
    for dtype, width in product(DTYPES, (40, 520, 1031, 4096)):
        x, weights, partials = partials_of(operation, world, dtype, width, 3.0)
        given = [each[rank].cuda() for each in (x, weights) if each]
        y = getattr(so, operation)(*given, group, plan=so.PlanSpec(reduce="sum"), wire="fp8").cpu()
        for shard in range(world) if operation.endswith("all_reduce") else [rank]:
            found = y.chunk(world)[shard] if operation.endswith("all_reduce") else y
            of_shard = [partial.chunk(world)[shard] for partial in partials]
            assert torch.equal(found, quantised_sum(of_shard, shard, width, dtype)), (dtype, width)


@pytest.mark.parametrize("operation", SUMS)
def test_what_is_rounded_is_what_the_cpu_gives(ranks, operation: str) -> None:
    ranks(3).run(rounded, operation, timeout=100)


def mixed(world: int) -> list[Case]:
    ways = product(SUMS, ("direct", "ring"), (1, 3))
    return [
        Case(operation, so.PlanSpec(algorithm, chunks, 2), DTYPES[i % 3], (17 + i,), 8, (520,), wire="fp8", seed=i)
        for i, (operation, algorithm, chunks) in enumerate(ways)
    ]


def held_back(rank: int, world: int, group) -> list[str]:
    """Many calls in flight on the same slots, each stream held back in turn, and calls in between that pack nothing."""
    comm = communicator(group)
    cases = mixed(world)
    given = [gpu_inputs(case, rank, world) for case in cases]
    between = torch.full((300 * world, 16), float("nan"), device="cuda")
    for case, each in zip(cases, given, strict=True):  # all kernels are loaded before streams are held back
        call(case, each, group)
    so.reduce_scatter(between, group, plan=so.PlanSpec("ring"))
    torch.cuda.synchronize()
    made = []
    for number in range(3 * len(cases)):
        hold_back_in_turn(comm, rank, world, number, 0.5)
        at = number % len(cases)
        made.append((cases[at], call(cases[at], given[at], group, async_op=number % 3 == 0)))
        if number % 4 == 3:
            so.reduce_scatter(between, group, plan=so.PlanSpec("ring"))
    wrong = []
    for case, results in made:
        found = results.wait() if isinstance(results, so.Work) else results
        wrong += filter(None, [wrong_in(case, found, expected(case, rank, world))])
    return wrong[:3]


@pytest.mark.parametrize("world", [2, 3])
def test_calls_in_flight_with_streams_held_back(ranks, world: int) -> None:
    assert ranks(world).run(held_back, timeout=100) == [[]] * world


def captured(rank: int, world: int, group, operation: str) -> list[str]:
    """Replays pack what their input holds then, among eager calls on other data."""
    communicator(group)
    case = Case(operation, so.PlanSpec("ring", 2, 2), torch.bfloat16, (19,), 8, (520,), wire="fp8", seed=50)
    given = gpu_inputs(case, rank, world)
    so.prepare(call, case, given, group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (result,) = call(case, given, group)
    wrong = []
    for number in range(20):
        now = replace(case, seed=51 + number)
        data = on_device(inputs(now, rank, world))
        given.x.copy_(data.x)
        for mine, new in zip(given.weights, data.weights, strict=True):
            mine.copy_(new)
        graph.replay()
        if number % 3 == 0:
            other = replace(case, seed=200 + number)
            found = call(other, gpu_inputs(other, rank, world), group)
            wrong += filter(None, [wrong_in(other, found, expected(other, rank, world))])
        wrong += filter(None, [wrong_in(now, [result], expected(now, rank, world))])
    return wrong[:3]


@pytest.mark.parametrize("operation", SUMS)
def test_captured_calls_pack_what_is_there_at_their_replay(ranks, operation: str) -> None:
    assert ranks(2).run(captured, operation, timeout=100) == [[], []]
