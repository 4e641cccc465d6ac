"""Every operation, algorithm, chunking, dtype and layout on real ranks, compared exactly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count, product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import subgroups
from references import (
    DTYPES,
    PLAIN,
    Case,
    call,
    can_be_built,
    differences,
    expected,
    inputs,
    overlapped_plans,
    verify,
)

import streamoverlap as so
from streamoverlap.plans import OPERATIONS
from streamoverlap.spec import TAPERS

WORLDS = (1, 2, 3, 4, 8)
ROWS = (7, 1, 12, 0, 2)  # none that 5 divides; fewer than chunks; zero; one


def sweep(operation: str, world: int, dtype: torch.dtype) -> Iterator[Case]:
    """Every plan with every row count; layout, bias, dimensions and number of weights vary along the way."""
    thorough = dtype == torch.float32 and world <= 3
    chunks = (1, 2, 3, 5) if world <= 4 else (1, 3)
    streams = (1, 2, 3) if thorough else (2,)
    rows = ROWS if world <= 4 else ROWS[:3]
    numbers = count()
    for plan, lead in product((so.PlanSpec("serial"), *overlapped_plans(operation, chunks, streams)), rows):
        i = next(numbers)
        yield Case(
            operation,
            plan,
            dtype,
            lead=(lead, 2) if i % 3 == 0 else (lead,),
            k=3 + i % 8,
            n=(4, 3) if operation == "all_gather_gemm" and i % 4 == 0 else (1 + i % 6,),
            bias=i % 2 == 0,
            column_major=i % 5 < 2,
            gathered=operation == "all_gather_gemm" and i % 7 < 3,
            copy_input=operation in PLAIN and i % 2 == 0,
            seed=i,
        )


def run_all(rank: int, world: int, group, cases: list[Case]) -> list[str]:
    wrong = []
    for case in cases:
        results = call(case, inputs(case, rank, world), group)
        wrong += filter(None, [differences(case, results, expected(case, rank, world))])
        choice = so.Communicator.of(group, "cpu").last_choice
        assert case.plan is None or choice.plan == case.plan, (case, choice)
    return wrong[:3]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("world", WORLDS)
def test_every_plan_gives_the_exact_result(ranks, world: int, operation: str, dtype: torch.dtype) -> None:
    cases = list(sweep(operation, world, dtype))
    assert ranks(world).run(run_all, cases) == [[]] * world


def only_where_it_can_be(case: Case) -> Case:
    return replace(case, copy_input=case.copy_input and case.operation in PLAIN)


cases = st.builds(
    Case,
    operation=st.sampled_from(OPERATIONS),
    plan=st.none()
    | st.builds(
        so.PlanSpec,
        algorithm=st.sampled_from(["direct", "ring", "serial"]),
        chunks=st.integers(1, 9),
        compute_streams=st.integers(1, 3),
        reduce=st.sampled_from(["accumulate", "sum"]),
        transfer=st.sampled_from(["copy", "copy", "store"]),
        taper=st.sampled_from(TAPERS),
    ).filter(can_be_built),
    dtype=st.sampled_from(DTYPES),
    lead=st.lists(st.integers(0, 9), min_size=1, max_size=2).map(tuple),
    k=st.integers(1, 20),
    n=st.integers(0, 9).map(lambda n: (n,)),
    bias=st.booleans(),
    column_major=st.booleans(),
    copy_input=st.booleans(),
    seed=st.integers(0, 999),
).map(only_where_it_can_be)


@pytest.mark.parametrize("world", [2, 3])
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(drawn=st.lists(cases, min_size=1, max_size=6))
def test_drawn_calls_give_the_exact_result(ranks, world: int, drawn: list[Case]) -> None:
    assert ranks(world).run(run_all, drawn) == [[]] * world


def rounded_sums(rank: int, world: int, group) -> list[bytes]:
    """Sums of what no order of adding leaves unrounded."""
    source = torch.Generator().manual_seed(rank)
    results = []
    for algorithm, dtype, rows in product(("direct", "ring"), DTYPES, (1, 7, 64)):
        x = torch.randn(rows, 33, generator=source).to(dtype)
        y = so.all_reduce(x, group, plan=so.PlanSpec(algorithm, 2))
        results.append(y.view(torch.uint8).numpy().tobytes())
    return results


@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_ranks_get_the_same_sum_bit_for_bit(ranks, world: int) -> None:
    first, *others = ranks(world).run(rounded_sums)
    assert all(other == first for other in others)


def odd_shapes(rank: int, world: int, group) -> None:
    for shape in ((5,), (2, 3, 4), (3, 0), (0,), (1, 1)):
        for plan in (None, so.PlanSpec("ring", 3), so.PlanSpec("serial")):
            x = torch.full(shape, float(rank + 1))
            y = so.all_reduce(x, group, plan=plan)
            assert torch.equal(y, torch.full(shape, world * (world + 1) / 2))
            assert torch.equal(x, torch.full(shape, float(rank + 1))), "x is the caller's"
            wide = torch.full((6, 8), 99.0)
            wide[::2, ::3] = rank
            y = so.all_reduce(wide[::2, ::3], group, plan=plan, copy_input=True)
            assert torch.equal(y, torch.full((3, 3), world * (world - 1) / 2))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_all_reduce_takes_any_shape(ranks, world: int) -> None:
    ranks(world).run(odd_shapes)


def test_the_comparison_sees_a_single_wrong_element() -> None:
    case = Case("all_gather_gemm", lead=(3,), bias=True)
    wanted = expected(case, rank=0, world=2)
    assert differences(case, [wanted[0].float()], wanted) is None
    wrong = wanted[0].float()
    wrong[4, 1] += 1
    assert "rows [4] of 6" in differences(case, [wrong], wanted)


def weights_stay_in_place(rank: int, world: int, group, column_major: bool, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that the process grew by at most during a call of each op, and bytes of the weight."""
    weight = torch.ones(4096, 4096, dtype=dtype)
    weight = weight.t() if column_major else weight
    x = torch.ones(2 * world, 4096, dtype=dtype)
    pointer, strides = weight.data_ptr(), weight.stride()
    grown = 0
    for op in (so.all_gather_gemm, so.gemm_reduce_scatter):
        op(x, weight, group)  # slots and whatever the library keeps are there from now on
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets the peak
        before = memory("VmRSS")
        op(x, weight, group)
        grown = max(grown, memory("VmHWM") - before)
    assert (weight.data_ptr(), weight.stride()) == (pointer, strides)
    return grown, weight.nbytes


def memory(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("column_major", [False, True], ids=["row-major", "column-major"])
def test_neither_stride_order_of_the_weight_is_copied(ranks, column_major: bool, dtype: torch.dtype) -> None:
    for grown, size in ranks(2).run(weights_stay_in_place, column_major, dtype):
        assert grown < size / 4


def sliced_and_strided(rank: int, world: int, group) -> None:
    case = Case("all_gather_gemm", lead=(5,), k=6, n=(4,), bias=True)
    given, wanted = inputs(case, rank, world), expected(case, rank, world)
    x, weight = given.x, given.weights[0]
    wide_x = torch.full((10, 12), 99.0)
    wide_x[::2, ::2] = x
    wide_weight = torch.full((7, 9), 99.0)
    wide_weight[1:5, 2:8] = weight
    tall_weight = torch.full((9, 7), 99.0)
    tall_weight[2:8, 1:5] = weight.t()
    for view in (wide_weight[1:5, 2:8], tall_weight[2:8, 1:5].t()):
        given.x, given.weights = wide_x[::2, ::2], [view]
        assert differences(case, call(case, given, group), wanted) is None
    for untouched, inside in ((wide_x, 30), (wide_weight, 24), (tall_weight, 24)):
        assert int((untouched == 99).sum()) == untouched.numel() - inside


def test_slices_of_larger_tensors_are_right(ranks) -> None:
    ranks(2).run(sliced_and_strided)


def reuse_inputs_at_once(rank: int, world: int, group) -> None:
    case = Case("all_gather_gemm", so.PlanSpec(chunks=3), lead=(50,), gathered=True)
    for seed in range(20):
        case = Case("all_gather_gemm", so.PlanSpec(chunks=3), lead=(50,), gathered=True, seed=seed)
        given = inputs(case, rank, world)
        results = call(case, given, group)
        given.x.fill_(77)
        given.weights[0].fill_(77)
        assert differences(case, results, expected(case, rank, world)) is None


def test_inputs_may_be_overwritten_right_after_the_call(ranks) -> None:
    ranks(3).run(reuse_inputs_at_once)


def in_two_strided_groups(rank: int, world: int, group) -> str:
    groups = subgroups((0, 2), (1, 3))
    members, own = next((members, own) for members, own in groups.items() if rank in members)
    for seed, (operation, algorithm) in enumerate(product(OPERATIONS, ("direct", "ring", "serial")), 100 * (rank % 2)):
        verify(Case(operation, so.PlanSpec(algorithm, chunks=2), seed=seed), members.index(rank), 2, own)
    return own.group_name


def test_strided_subgroups_work_at_the_same_time(ranks) -> None:
    names = ranks(4).run(in_two_strided_groups)
    assert names[0] == names[2] != names[1] == names[3]


def in_groups_that_share_ranks(rank: int, world: int, group) -> None:
    order = [(0, 1), (1, 2), (2, 0), (0, 1, 2)]
    groups = subgroups(*order)
    for seed in range(12):
        for members in order:
            if rank in members:
                case = Case("gemm_reduce_scatter", so.PlanSpec("ring", chunks=2), bias=True, seed=seed)
                own = groups[members]
                verify(case, torch.distributed.get_rank(own), len(members), own)


def test_groups_that_share_ranks_work_in_one_order(ranks) -> None:
    ranks(3).run(in_groups_that_share_ranks)


def of_the_world(rank: int, world: int, group) -> tuple[str, str, str]:
    case = Case("all_gather_gemm", bias=True, seed=5)
    verify(case, rank, world, None)
    default = so.Communicator.of(None, "cpu").last_choice
    verify(Case("all_gather", so.PlanSpec("serial")), rank, world, group)
    asked = so.Communicator.of(group, "cpu").last_choice
    assert so.Communicator.of(None, "cpu") is so.Communicator.of(group, "cpu")
    return default.plan.algorithm, default.reason, asked.plan.algorithm


def test_no_group_is_the_world_and_what_ran_is_reported(ranks) -> None:
    for algorithm, reason, asked in ranks(3).run(of_the_world):
        assert algorithm in ("direct", "ring")
        assert reason
        assert asked == "serial"


def explicit(rank: int, world: int, group) -> None:
    with closing(so.Communicator(group, timeout=30.0)) as comm:
        for seed, operation in enumerate(OPERATIONS):
            verify(Case(operation, so.PlanSpec("ring"), bias=True, seed=seed), rank, world, comm)
        assert comm.last_choice.plan == so.PlanSpec("ring")


def test_an_explicit_communicator_has_the_same_ops(ranks) -> None:
    ranks(2).run(explicit)


def many_rows(rank: int, world: int, group) -> None:
    """Enough for chunks of whole tiles, of a size of their own each."""
    for seed, (operation, taper) in enumerate(product(OPERATIONS, TAPERS)):
        plan = so.PlanSpec("direct", 3, 2, taper=taper, transfer="store" if seed % 2 else "copy")
        verify(Case(operation, plan, lead=(700 + seed,), k=3, n=(4,), bias=True, seed=seed), rank, world, group)


def test_chunks_of_whole_tiles_are_right(ranks) -> None:
    ranks(2).run(many_rows)


def a_ring_that_cannot_store(rank: int, world: int, group) -> None:
    plan = so.PlanSpec("ring", reduce="sum", transfer="store")
    with pytest.raises(ValueError, match="transfer is store with algorithm ring and reduce sum; expected reduce accum"):
        so.gemm_reduce_scatter(torch.ones(4, 3), torch.ones(2, 3), group, plan=plan)
    y = so.all_gather_gemm(torch.ones(4, 3), torch.ones(2, 3), group, plan=plan)  # where it is ignored
    assert torch.equal(y, torch.full((4 * world, 2), 3.0))
    verify(Case("gemm_reduce_scatter", so.PlanSpec("ring", transfer="store")), rank, world, group)


def test_a_plan_that_stores_what_is_no_product_is_refused(ranks) -> None:
    ranks(2).run(a_ring_that_cannot_store)
