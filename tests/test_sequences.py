"""Many calls in a row, with changing data, sizes and plans, while streams of some ranks are held back."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch.distributed as dist
from ranks import subgroups
from references import DTYPES, PLAIN, SUMS_OF_PRODUCTS, Case, can_be_built, verify, with_wire

import streamoverlap as so
from streamoverlap.plans import OPERATIONS
from streamoverlap.spec import TAPERS

STREAMS = ("main", "send", "recv", "compute0", "compute1", "compute2")


def mixed_calls(count: int, seed: int, algorithms: Iterable[str] = ("direct", "ring", "serial")) -> list[Case]:
    """Any op, plan, dtype and size after any other. Every hundredth is large: the slots grow each time."""
    draw = random.Random(seed)
    calls = []
    for i in range(count):
        operation = draw.choice(OPERATIONS)
        large = i % 100 == 50
        plan = so.PlanSpec(
            draw.choice(tuple(algorithms)),
            draw.randint(1, 4),
            draw.randint(1, 3),
            draw.choice(("accumulate", "sum")),
            taper=draw.choice(TAPERS),
        )
        stored = replace(plan, transfer="store")
        if can_be_built(stored) and draw.random() < 0.3:
            plan = stored
        calls.append(
            Case(
                "all_gather" if large else operation,
                draw.choice((None, plan)) if not large else plan,
                draw.choice(DTYPES),
                lead=(20_000 * (1 + i // 100),) if large else (draw.choice((0, 1, 2, 5, 16, 33)),),
                k=32 if large else draw.randint(1, 16),
                n=(draw.randint(1, 8),),
                bias=draw.random() < 0.5,
                column_major=draw.random() < 0.5,
                gathered=operation == "all_gather_gemm" and not large and draw.random() < 0.3,
                copy_input=operation in PLAIN and not large and draw.random() < 0.5,
                seed=1000 * seed + i,
            )
        )
    return [with_wire(case) if case.seed % 3 == 0 else case for case in calls]


def hold_back(comm: so.Communicator, rank: int, world: int, number: int) -> None:
    """Random delays for the next calls: of one stream or all of them, of one rank or all of them."""
    draw = random.Random(number)
    slow_rank = draw.choice((None, *range(world)))
    streams = draw.choice((None, *STREAMS))
    if slow_rank in (None, rank):
        comm._set_hook(seed=number * world + rank, max_delay_ms=draw.choice((1, 5)), streams=streams and [streams])
    else:
        comm._clear_hook()


def run_sequence(rank: int, world: int, on, calls: list[Case], delayed: bool) -> str:
    """Makes the calls, each compared with the exact result; returns a digest of all results."""
    comm = on if isinstance(on, so.Communicator) else so.Communicator.of(on, "cpu")
    digest = hashlib.sha256()
    try:
        for number, case in enumerate(calls):
            if delayed and number % 5 == 0:
                hold_back(comm, rank, world, number)
            for result in verify(case, rank, world, on):
                digest.update(result.double().numpy().tobytes())
    finally:
        comm._clear_hook()
    return digest.hexdigest()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_300_mixed_calls_are_bit_equal_with_and_without_delays(ranks, world: int) -> None:
    calls = mixed_calls(300, seed=world)
    assert {case.operation for case in calls} == set(OPERATIONS)
    undelayed = ranks(world).run(run_sequence, calls, False)
    assert ranks(world).run(run_sequence, calls, True, timeout=100) == undelayed


def run_on_one_slot(rank: int, world: int, group, calls: list[Case], delayed: bool) -> str:
    """With two slots a rank cannot get far enough ahead to overwrite a slot in use, so credits would go untested."""
    with closing(so.Communicator(group, timeout=30, _slots=1)) as comm:
        return run_sequence(rank, world, comm, calls, delayed)


@pytest.mark.parametrize("world", [2, 4])
def test_mixed_calls_on_one_slot_are_bit_equal_with_and_without_delays(ranks, world: int) -> None:
    calls = mixed_calls(120, seed=10 + world)
    undelayed = ranks(world).run(run_on_one_slot, calls, False)
    assert ranks(world).run(run_on_one_slot, calls, True, timeout=100) == undelayed


def every_pair_in_a_row(items: list) -> list:
    """A cycle in which every ordered pair of `items` is side by side (a de Bruijn sequence of order 2)."""
    cycle = []
    for i, first in enumerate(items):
        cycle.append(first)
        for second in items[i + 1 :]:
            cycle += [first, second]
    return [*cycle, items[0]]


def test_the_sequence_has_every_pair_in_a_row() -> None:
    items = list("abcdef")
    sequence = every_pair_in_a_row(items)
    assert set(pairwise(sequence)) == set(product(items, items))


def test_any_two_plans_in_a_row_on_one_slot(ranks) -> None:
    kinds = [*product(OPERATIONS, ("direct", "ring"), (1, 2), ("copy",))]
    kinds += product(SUMS_OF_PRODUCTS, ("direct", "ring"), (2,), ("store",))
    kinds += product(("reduce_scatter", "gemm_all_reduce"), ("direct", "ring"), (2,), ("fp8",))
    sequence = every_pair_in_a_row(kinds)
    calls = [
        Case(
            operation,
            so.PlanSpec(algorithm, chunks, 2, transfer=way if way != "fp8" else "copy"),
            lead=(3 + i % 4,),
            k=4 + i % 5,
            bias=True,
            wire=way if way == "fp8" else None,
            seed=i,
        )
        for i, (operation, algorithm, chunks, way) in enumerate(sequence)
    ]
    assert len(calls) == len(kinds) ** 2 + 1
    undelayed = ranks(3).run(run_on_one_slot, calls, False)
    assert ranks(3).run(run_on_one_slot, calls, True, timeout=100) == undelayed


def interleave(rank: int, world: int, group, calls: list[Case]) -> None:
    """Calls alternately on the world and on the strided half that this rank is in."""
    halves = subgroups((0, 2), (1, 3))
    members = (0, 2) if rank in (0, 2) else (1, 3)
    half = halves[members]
    for number, case in enumerate(calls):
        on, size = (group, world) if number % 2 else (half, 2)
        hold_back(so.Communicator.of(on, "cpu"), rank, world, number)
        verify(case, dist.get_rank(on), size, on)
    for on in (group, half):
        so.Communicator.of(on, "cpu")._clear_hook()


def test_two_groups_interleaved(ranks) -> None:
    ranks(4).run(interleave, mixed_calls(120, seed=7, algorithms=("direct", "ring")), timeout=100)


def in_threads(*tasks: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def two_communicators(rank: int, world: int, group) -> None:
    with (
        closing(so.Communicator(group, timeout=30)) as first,
        closing(so.Communicator(group, timeout=30)) as second,
    ):
        overlapped = ("direct", "ring")
        in_threads(
            lambda: run_sequence(rank, world, first, mixed_calls(60, seed=21, algorithms=overlapped), True),
            lambda: run_sequence(rank, world, second, mixed_calls(60, seed=22, algorithms=overlapped), True),
        )


@pytest.mark.parametrize("world", [2, 3])
def test_two_threads_on_two_communicators(ranks, world: int) -> None:
    ranks(world).run(two_communicators)


def same_call_from_two_threads(rank: int, world: int, group) -> None:
    """Both threads make the same call with the same data, so it matters not which is first on which rank."""
    with closing(so.Communicator(group, timeout=30)) as comm:
        for number, case in enumerate(mixed_calls(60, seed=31, algorithms=("direct", "ring"))):
            hold_back(comm, rank, world, number)
            in_threads(*[lambda case=case: verify(case, rank, world, comm)] * 2)


def turns_from_two_threads(rank: int, world: int, group) -> None:
    """The threads take turns, so the order of calls is the same on all ranks."""
    calls = mixed_calls(60, seed=32, algorithms=("direct", "ring"))
    done = [threading.Event() for _ in calls]

    def every_second(first: int) -> None:
        for number in range(first, len(calls), 2):
            assert number == 0 or done[number - 1].wait(30)
            verify(calls[number], rank, world, group)
            done[number].set()

    in_threads(lambda: every_second(0), lambda: every_second(1))


@pytest.mark.parametrize("function", [same_call_from_two_threads, turns_from_two_threads])
@pytest.mark.parametrize("world", [2, 3])
def test_two_threads_on_one_communicator(ranks, world: int, function: Callable) -> None:
    ranks(world).run(function)
