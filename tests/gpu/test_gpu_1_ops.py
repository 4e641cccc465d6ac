"""On GPUs: every operation, algorithm, chunking, dtype and layout, compared exactly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from itertools import count, product

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import algorithms, communicator, gpu_inputs, hold_back, on_device, streams_of, verify, wrong_in
from ranks import Pool, subgroups
from references import DTYPES, PLAIN, Case, call, expected, inputs, overlapped_plans

import streamoverlap as so
from streamoverlap.plans import OPERATIONS

pytestmark = pytest.mark.gpu(1)

ROWS = (37, 1, 12, 0, 2)  # none that 5 divides; fewer than chunks; zero; one
COLUMNS = (5, 8, 17, 24, 31)  # bfloat16 holds the sums of eight ranks; few are what cuBLASLt likes
OUTPUTS = (1, 8, 13, 64, 31, 4)
INTEGERS_UP_TO = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24, torch.float64: 2**53}


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plans(operation: str, world: int, streams: tuple[int, ...]) -> list[so.PlanSpec]:
    serial = [so.PlanSpec("serial")] if "serial" in algorithms(world) else []
    return serial + list(overlapped_plans(operation, (1, 2, 3, 5), streams))


def number_cases(operation: str, combinations: Iterator[tuple]) -> list[Case]:
    """Layout, bias, dimensions and number of weights vary along the way."""
    numbers = count()
    return [
        Case(
            operation,
            plan,
            dtype,
            lead=(rows, 2) if i % 3 == 0 else (rows,),
            k=COLUMNS[i % len(COLUMNS)],
            n=(4, 3, 16) if operation == "all_gather_gemm" and i % 4 == 0 else (OUTPUTS[i % len(OUTPUTS)],),
            bias=i % 2 == 0,
            column_major=i % 7 < 3,
            gathered=operation == "all_gather_gemm" and i % 9 < 4,
            copy_input=operation in PLAIN and i % 2 == 0,
            seed=i,
        )
        for (plan, dtype, rows), i in zip(combinations, numbers, strict=False)
    ]


def run_all(rank: int, world: int, group, cases: list[Case]) -> list[str]:
    comm = communicator(group)
    wrong = []
    for case in cases:
        results = call(case, gpu_inputs(case, rank, world), group)
        wrong += filter(None, [wrong_in(case, results, expected(case, rank, world))])
        assert comm.last_choice.plan == case.plan, (case, comm.last_choice)
    return wrong[:3]


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_two_ranks_every_plan_gives_the_exact_result(ranks, operation: str, dtype: torch.dtype) -> None:
    cases = number_cases(operation, product(plans(operation, 2, (1, 2, 3)), (dtype,), ROWS))
    assert ranks(2).run(run_all, cases, timeout=120) == [[], []]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("world", [1, 3, 4, 8])
def test_other_worlds_give_the_exact_result(ranks, world: int, operation: str) -> None:
    given = product(plans(operation, world, (2,)), DTYPES)
    cases = number_cases(operation, ((*each, ROWS[i % len(ROWS)]) for i, each in enumerate(given)))
    assert {case.lead[0] for case in cases} == set(ROWS)
    assert ranks(world).run(run_all, cases, timeout=150) == [[]] * world


def differing_matrices(rank: int, world: int, group) -> None:
    """All that ranks must agree on is what they exchange: each may have another N, or another K."""
    communicator(group)
    for rows, plan in product((5, 64), (so.PlanSpec("direct", 2), so.PlanSpec("ring", 3))):
        xs = [torch.full((rows, 8), r + 1.0) for r in range(world)]
        y = so.all_gather_gemm(xs[rank].cuda(), torch.ones(4 + 3 * rank, 8).cuda(), group, plan=plan)
        assert torch.equal(y.cpu(), (torch.cat(xs) @ torch.ones(8, 4 + 3 * rank)))
        x = torch.ones(rows * world, 8 * (rank + 1))
        y = so.gemm_reduce_scatter(x.cuda(), torch.ones(6, 8 * (rank + 1)).cuda(), group, plan=plan)
        assert torch.equal(y.cpu(), torch.full((rows, 6), 8.0 * sum(range(1, world + 1))))


def test_ranks_may_have_different_matrices(ranks) -> None:
    ranks(2).run(differing_matrices)
    ranks(3).run(differing_matrices)


def large_products(rank: int, world: int, group, dtype: torch.dtype) -> None:
    """Many tiles, ragged at every edge. With entries of -1, 0 and 1 all sums stay integers that the dtype holds."""
    communicator(group)
    for rows, k, n in ((515, 1000, 771), (512, 1024, 768), (1, 129, 1)):

        def draw(rank: int, *shape: int) -> torch.Tensor:
            source = torch.Generator().manual_seed(rank)
            return torch.randint(-1, 2, shape, generator=source).to("cuda", dtype)

        everyone = [(draw(r, rows * world, k), draw(100 + r, n, k)) for r in range(world)]
        partials = [x.double() @ weight.double().t() for x, weight in everyone]
        assert sum(partial.abs() for partial in partials).max() <= INTEGERS_UP_TO[dtype]
        x, weight = everyone[rank]
        for plan in (*plans("gemm_reduce_scatter", world, (2,)), None):
            y = so.all_gather_gemm(x[:rows], weight, group, plan=plan)
            gathered = torch.cat([x[:rows] for x, _ in everyone])
            assert torch.equal(y.double(), gathered.double() @ weight.double().t()), (plan, rows, k, n)
            y = so.gemm_reduce_scatter(x, weight, group, plan=plan)
            assert torch.equal(y.double(), sum(partials).chunk(world)[rank]), (plan, rows, k, n)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("world", [2, 3])
def test_products_of_many_tiles(ranks, world: int, dtype: torch.dtype) -> None:
    ranks(world).run(large_products, dtype)


def in_float32(rank: int, world: int, group, tf32: bool) -> bool:
    """Whether a product whose factors need 13 bits is exact, as TF32 makes it not."""
    communicator(group)
    x, weight = torch.full((256, 256), 1 + 2.0**-12, device="cuda"), torch.eye(256, device="cuda")
    try:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        y = so.all_gather_gemm(x, weight, group)
        assert torch.equal(y[: len(x)], torch.nn.functional.linear(x, weight))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    return torch.equal(y, torch.cat([x] * world))


def test_float32_follows_the_tf32_setting(ranks) -> None:
    for tf32 in (False, True, False):
        assert ranks(2).run(in_float32, tf32) == [not tf32] * 2


def sliced_and_misaligned(rank: int, world: int, group, dtype: torch.dtype) -> None:
    """Views into larger tensors: as they lie, at addresses that only an element is aligned to."""
    communicator(group)
    for operation, plan in product(("all_gather_gemm", "gemm_reduce_scatter"), plans("all_gather_gemm", world, (1,))):
        case = Case(operation, plan, dtype, lead=(6,), k=16, n=(8,), bias=True)
        given, wanted = on_device(inputs(case, rank, world)), expected(case, rank, world)
        x, [weight], [bias] = given.x, given.weights, given.biases
        flat_x = torch.full((x.numel() + 1,), 99, dtype=dtype, device="cuda")
        odd_x = flat_x[1:].view(x.shape)
        odd_x.copy_(x)
        spaced_x = torch.full((2 * len(x), 32), 99, dtype=dtype, device="cuda")[::2, ::2]
        spaced_x.copy_(x)
        wide = torch.full((10, 19), 99, dtype=dtype, device="cuda")[1:9, 3:]
        wide.copy_(weight)
        tall = torch.full((19, 10), 99, dtype=dtype, device="cuda")[3:, 1:9].t()
        tall.copy_(weight)
        given.biases = [torch.cat([bias, bias])[3:11].copy_(bias)]
        assert (odd_x.data_ptr() - dtype.itemsize) % 16 == 0 and odd_x.is_contiguous()
        for given.x, given.weights in product((x, odd_x, spaced_x), ([weight], [wide], [tall])):
            pointer, strides = given.weights[0].data_ptr(), given.weights[0].stride()
            problem = wrong_in(case, call(case, given, group), wanted)
            assert problem is None, problem
            assert (given.weights[0].data_ptr(), given.weights[0].stride()) == (pointer, strides)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_slices_and_odd_addresses(ranks, dtype: torch.dtype) -> None:
    ranks(2).run(sliced_and_misaligned, dtype)


def peak_of_a_call(rank: int, world: int, group, column_major: bool) -> tuple[int, int]:
    """Bytes that torch allocates at most during a call of each op, and bytes of the weight."""
    communicator(group)
    weight = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")
    weight = weight.t() if column_major else weight
    x = torch.ones(2 * world, 4096, dtype=torch.bfloat16, device="cuda")
    peak = 0
    for op in (so.all_gather_gemm, so.gemm_reduce_scatter):
        op(x, weight, group)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        op(x, weight, group)
        peak = max(peak, torch.cuda.max_memory_allocated() - before)
    return peak, weight.nbytes


@pytest.mark.parametrize("column_major", [False, True], ids=["row-major", "column-major"])
def test_neither_stride_order_of_the_weight_is_copied(ranks, column_major: bool) -> None:
    for peak, size in ranks(2).run(peak_of_a_call, column_major):
        assert peak < size / 8


def held_back_one_at_a_time(rank: int, world: int, group) -> list[tuple[str, float]]:
    """Seconds until the result is there, with each stream held back for 100 ms on this rank."""
    comm = communicator(group)
    case = Case("all_gather_gemm", so.PlanSpec("direct", 3, 3), lead=(9,))
    verify(case, rank, world, group)
    given = gpu_inputs(case, rank, world)
    times = []
    for stream_name, stream in streams_of(comm).items():
        torch.cuda.synchronize()
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        hold_back(stream, 100)
        call(case, given, group)
        ended.record()
        ended.synchronize()
        times.append((stream_name, started.elapsed_time(ended)))
    return times


def test_calls_use_the_streams_that_these_tests_hold_back(ranks) -> None:
    for times in ranks(2).run(held_back_one_at_a_time):
        assert len(times) == 6
        for stream, milliseconds in times:
            assert milliseconds > 70, stream


def in_two_strided_groups(rank: int, world: int, group) -> None:
    groups = subgroups((0, 2), (1, 3))
    members, own = next((members, own) for members, own in groups.items() if rank in members)
    communicator(own)
    for seed, (operation, algorithm) in enumerate(product(OPERATIONS, ("direct", "ring")), 100 * (rank % 2)):
        verify(Case(operation, so.PlanSpec(algorithm, chunks=2), seed=seed), members.index(rank), 2, own)


def test_strided_subgroups_work_at_the_same_time(ranks) -> None:
    ranks(4).run(in_two_strided_groups)


def in_groups_that_share_ranks(rank: int, world: int, group) -> None:
    order = [(0, 1), (1, 2), (2, 0), (0, 1, 2)]
    groups = subgroups(*order)
    for seed in range(6):
        for members in filter(lambda members: rank in members, order):
            own = groups[members]
            communicator(own)
            case = Case("gemm_reduce_scatter", so.PlanSpec("ring", chunks=2), bias=True, seed=seed)
            verify(case, dist.get_rank(own), len(members), own)


def test_groups_that_share_ranks_work_in_one_order(ranks) -> None:
    ranks(3).run(in_groups_that_share_ranks)


def beyond_32_bits(rank: int, world: int, group) -> None:
    """More than 2^31 elements in what is gathered, and in what is scattered. Values tell the row."""
    k = 4096
    rows = 2**31 // (world * k) + 3
    own = torch.arange(rows * world, device="cuda").remainder_(101).to(torch.bfloat16)
    with closing(so.Communicator(group, timeout=40, device="cuda")) as comm:
        x = own[:, None].expand(-1, k).contiguous()
        assert x.numel() > 2**31
        y = comm.reduce_scatter(x, so.PlanSpec("direct"))
        wanted = world * own.view(world, rows)[rank]
        assert torch.equal(y.amin(1), wanted) and torch.equal(y.amax(1), wanted)
        del y
        shard = x[:rows].add_(rank)
        wanted = torch.cat([own[:rows] + r for r in range(world)])
        weight = torch.zeros(8, k, dtype=torch.bfloat16, device="cuda")
        weight[:, k - 1] = torch.arange(8)
        y, gathered = comm.all_gather_gemm(shard, [weight], [], True, so.PlanSpec("ring", 2))
        assert torch.equal(gathered.amin(1), wanted) and torch.equal(gathered.amax(1), wanted)
        assert torch.equal(y[0], (wanted[:, None].float() * torch.arange(8, device="cuda")).bfloat16())
    del x, y, gathered, shard
    torch.cuda.empty_cache()


def test_more_than_2_to_the_31_elements(ranks) -> None:
    ranks(2).run(beyond_32_bits, timeout=100)


def untouched(rank: int, world: int) -> str:
    """In a process that has not used its GPU, so that no thread of it has a context."""
    os.environ.update(TORCH_SYMM_MEM_DISABLE_MULTICAST="1", TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1")
    return "gloo"


def first_of_all(rank: int, world: int, group) -> None:
    with closing(so.Communicator(group, timeout=40, device="cuda")) as comm:
        assert comm.fallback is None, comm.fallback
        x = torch.full((4 * world, 8), float(rank + 1), device="cuda")
        assert (comm.reduce_scatter(x, so.PlanSpec()) == world * (world + 1) / 2).all()


def test_a_communicator_may_be_the_first_to_use_the_gpu() -> None:
    with Pool(2, untouched) as two:
        two.run(first_of_all, timeout=100)
