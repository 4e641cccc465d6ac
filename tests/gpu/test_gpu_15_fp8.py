"""On GPUs: products of float8, compared exactly, with torch._scaled_mm and with float64; eager, async and captured.

torch's product is of the same factors on one GPU, so several ranks may share one.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from gpu_ranks import algorithms, communicator, hold_back_in_turn, new_group
from scaled_references import E4M3, E5M2, OPERATIONS, Case, call, expected, flat, inputs, sweep, wrong_in

import streamoverlap as so

pytestmark = pytest.mark.gpu(1)

ROWS = (37, 1, 12, 0, 130)


def plans(operation: str, world: int) -> list[so.PlanSpec]:
    reductions = ("accumulate", "sum") if operation != "all_gather_gemm" else ("accumulate",)
    overlapped = [so.PlanSpec(*each) for each in product(("direct", "ring"), (1, 2, 3), (1, 2), reductions)]
    return overlapped + ([so.PlanSpec("serial")] if "serial" in algorithms(world) else [])


def cases_of(operation: str, world: int) -> list[Case]:
    """torch's row-wise product, which `serial` is, gives bfloat16 on some devices alone; there x is e4m3."""
    return [
        replace(case, x_dtype=E4M3, out_dtype=None) if case.plan.algorithm == "serial" else case
        for case in sweep(operation, plans(operation, world), ROWS)
    ]


def run_all(rank: int, world: int, group, cases: list[Case]) -> list[str]:
    comm = communicator(group)
    wrong = []
    for case in cases:
        results = [result.cpu() for result in flat(call(case, inputs(case, rank, world).cuda(), group))]
        wrong += filter(None, [wrong_in(case, results, expected(case, rank, world), world)])
        assert comm.last_choice.plan == case.plan, (case, comm.last_choice)
    return wrong[:3]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_plan_gives_the_exact_result(ranks, world: int, operation: str) -> None:
    assert ranks(world).run(run_all, cases_of(operation, world), timeout=150) == [[]] * world


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_must_be_rounded_is_within_rounding(ranks, operation: str) -> None:
    """The tensor cores' own sums are shorter than float32, so float32 results are as good as bfloat16 here."""
    cases = [
        Case(operation, so.PlanSpec(algorithm, 2), x_dtype, out, rows, (65,), 256, (128,), True, integers=False, seed=7)
        for algorithm, x_dtype, out, rows in product(
            ("direct", "ring"), (E4M3, E5M2), (torch.bfloat16, torch.float16), (False, True)
        )
    ]
    assert ranks(2).run(run_all, cases, timeout=100) == [[], []]


def beside_torch(rank: int, world: int, group) -> None:
    """Row- and tensor-wise, with and without fast accumulation, scales from 1e-4 to 1e4, zeros, infinities and NaN."""
    communicator(group)
    source = torch.Generator().manual_seed(3)  # the same x on all ranks: what torch multiplies at once
    x = torch.randn(192, 512, generator=source).to("cuda", E4M3)
    weight = torch.randn(256, 512, generator=source).to("cuda", E4M3)
    special = torch.tensor([0.0, float("inf"), float("nan"), 1e-4, 1e4])
    of_rows = 10.0 ** (8 * torch.rand(192, 1, generator=source) - 4)
    of_rows[:5, 0] = special
    of_weight = 10.0 ** (8 * torch.rand(1, 256, generator=source) - 4)
    tensor_wise = [(torch.tensor(a), torch.tensor(b)) for a, b in ((1e-4, 1e4), (1e4, 1.0), (0.0, 2.0))]
    tensor_wise += [(torch.tensor(value), torch.tensor(1.0)) for value in special.tolist()]
    for (scale_x, scale_weight), fast in product([(of_rows, of_weight), *tensor_wise], (False, True)):
        scale_x, scale_weight = scale_x.cuda(), scale_weight.cuda()
        want = torch._scaled_mm(
            x, weight.t(), scale_a=scale_x, scale_b=scale_weight, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
        for plan in (so.PlanSpec("direct", 2), so.PlanSpec("ring", 3)):
            options = {"scale_x": scale_x, "scale_weight": scale_weight, "use_fast_accum": fast, "plan": plan}
            y = so.all_gather_gemm(x, weight, group, **options)
            close = {"rtol": 2**-6, "atol": 1e-2 * want.nan_to_num(0, 0, 0).abs().max().item(), "equal_nan": True}
            torch.testing.assert_close(y, want.repeat(world, 1), **close)


def test_results_are_those_of_torch(ranks) -> None:
    ranks(2).run(beside_torch, timeout=100)


def scales_that_change(rank: int, world: int, group, rows: bool) -> list[str]:
    """Many calls in flight on the same slots, streams held back in turn, and calls without scales in between."""
    comm = communicator(group)
    cases = [
        Case("all_gather_gemm", so.PlanSpec(("direct", "ring")[i % 2], 1 + i % 3, 2), rows=rows, lead=(21,), seed=i)
        for i in range(24)
    ]
    given = [inputs(case, rank, world).cuda() for case in cases]
    between = torch.full((300, 16), float("nan"), device="cuda")
    for case, each in zip(cases, given, strict=True):  # all kernels are loaded before streams are held back
        call(case, each, group)
    so.all_gather(between, group, plan=so.PlanSpec("ring"))
    torch.cuda.synchronize()
    results = []
    for number, (case, each) in enumerate(zip(cases, given, strict=True)):
        hold_back_in_turn(comm, rank, world, number, 0.5)
        results.append(call(case, each, group, async_op=number % 3 == 0))
        if number % 4 == 3:
            so.all_gather(between, group, plan=so.PlanSpec("ring"))
    wrong = []
    for case, result in zip(cases, results, strict=True):
        found = flat(result.wait() if isinstance(result, so.Work) else result)
        wrong += filter(None, [wrong_in(case, [y.cpu() for y in found], expected(case, rank, world), world)])
    return wrong[:3]


@pytest.mark.parametrize("rows", [False, True], ids=["tensor-wise", "row-wise"])
@pytest.mark.parametrize("world", [2, 3])
def test_scales_that_change_from_call_to_call_are_never_mixed_up(ranks, world: int, rows: bool) -> None:
    assert ranks(world).run(scales_that_change, rows, timeout=100) == [[]] * world


def captured(rank: int, world: int, group, operation: str, rows: bool) -> list[str]:
    """Replays read what x and scales hold then, among eager calls on other data."""
    communicator(group)
    case = Case(operation, so.PlanSpec("ring", 2, 2), rows=rows, lead=(19,), bias=True, seed=50)
    given = inputs(case, rank, world).cuda()
    so.prepare(call, case, given, group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (result,) = flat(call(case, given, group))
    wrong = []
    for number in range(20):
        now = replace(case, seed=51 + number)
        data = inputs(now, rank, world)
        given.x.view(torch.uint8).copy_(data.x.view(torch.uint8))
        given.scale_x.copy_(data.scale_x)
        given.scale_weights[0].copy_(data.scale_weights[0])
        given.weights[0].view(torch.uint8).copy_(data.weights[0].view(torch.uint8))
        given.biases[0].copy_(data.biases[0])
        graph.replay()
        if number % 3 == 0:
            other = replace(case, seed=200 + number)
            found = [y.cpu() for y in flat(call(other, inputs(other, rank, world).cuda(), group))]
            wrong += filter(None, [wrong_in(other, found, expected(other, rank, world), world)])
        wrong += filter(None, [wrong_in(now, [result.cpu()], expected(now, rank, world), world)])
    return wrong[:3]


@pytest.mark.parametrize("rows", [False, True], ids=["tensor-wise", "row-wise"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_captured_calls_read_the_scales_of_their_replay(ranks, operation: str, rows: bool) -> None:
    assert ranks(2).run(captured, operation, rows, timeout=100) == [[], []]


def explained_and_tuned(rank: int, world: int, group) -> None:
    with new_group(world) as own:  # what is found holds for later calls
        communicator(own)
        explain_and_tune(rank, world, own)


def explain_and_tune(rank: int, world: int, group) -> None:
    case = Case("all_gather_gemm", None, rows=True, lead=(64,), k=64, n=(64,), seed=9)
    given = inputs(case, rank, world).cuda()
    options = {"scale_x": given.scale_x, "scale_weight": given.scale_weights[0]}
    assert so.explain(so.all_gather_gemm, given.x, given.weights[0], group, **options).predicted > 0
    assert so.tune(so.all_gather_gemm, given.x, given.weights[0], group, rounds=1, save=False, **options).seconds
    found = [y.cpu() for y in flat(call(case, given, group))]
    assert wrong_in(case, found, expected(case, rank, world), world) is None


def test_calls_are_explained_and_tuned(ranks) -> None:
    ranks(2).run(explained_and_tuned, timeout=100)
