"""On GPUs: many calls under way at once, with changing data, sizes and plans, while streams are held back."""

from __future__ import annotations

import hashlib
from itertools import product

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import InFlight, algorithms, communicator, gpu_inputs, hold_back, hold_back_in_turn, new_group
from ranks import subgroups
from references import SUMS_OF_PRODUCTS, Case, Inputs, call, expected
from test_sequences import every_pair_in_a_row, in_threads, mixed_calls

import streamoverlap as so
from streamoverlap.plans import OPERATIONS

pytestmark = pytest.mark.gpu(1)

WINDOW = 10  # calls made before anyone looks at a result


def run_sequence(rank: int, world: int, group, calls: list[Case], milliseconds: float) -> str:
    """Makes the calls, with one stream of one rank held back before each; returns a digest of all results."""
    comm = communicator(group)
    digest = hashlib.sha256()
    for first in range(0, len(calls), WINDOW):
        window = InFlight(rank, world)
        window.ready(*calls[first : first + WINDOW])
        for number, case in enumerate(calls[first : first + WINDOW], first):
            if milliseconds:
                hold_back_in_turn(comm, rank, world, number, milliseconds)
            window.make(case, group)
        for results in window.settle():
            for result in results:
                digest.update(result.double().numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_300_mixed_calls_are_bit_equal_with_each_stream_of_each_rank_held_back(ranks, world: int) -> None:
    calls = mixed_calls(300, seed=world, algorithms=algorithms(world))
    assert {case.operation for case in calls} == set(OPERATIONS)
    undelayed = ranks(world).run(run_sequence, calls, 0.0, timeout=100)
    # All plans are prepared now: from here on no call waits for those before it.
    for milliseconds in (0.3, 3.0):
        assert ranks(world).run(run_sequence, calls, milliseconds, timeout=100) == undelayed


def test_any_two_plans_in_a_row_on_one_slot(ranks) -> None:
    kinds = [*product(OPERATIONS, ("direct", "ring"), (1, 2), ("copy",))]
    kinds += product(SUMS_OF_PRODUCTS, ("direct", "ring"), (2,), ("store",))
    # Calls go round the two slots, so each is made twice: both slots see the sequence.
    sequence = [kind for kind in every_pair_in_a_row(kinds) for _ in range(2)]
    calls = [
        Case(
            operation,
            so.PlanSpec(algorithm, chunks, 2, transfer=transfer),
            lead=(3 + i % 4,),
            k=4 + i % 5,
            bias=True,
            seed=i,
        )
        for i, (operation, algorithm, chunks, transfer) in enumerate(sequence)
    ]
    undelayed = ranks(3).run(run_sequence, calls, 0.0, timeout=100)
    assert ranks(3).run(run_sequence, calls, 1.0, timeout=100) == undelayed


def far_ahead(rank: int, world: int, group, slow: int) -> None:
    """The slow rank's GPU starts seconds after the others have made all their calls."""
    comm = communicator(group)
    cases = [
        Case(operation, so.PlanSpec(algorithm, 2, 2), lead=(16,), k=8, bias=True, seed=seed)
        for seed, operation, algorithm in product(range(5), OPERATIONS, ("direct", "ring"))
    ]
    calls = InFlight(rank, world)
    calls.ready(*cases)
    for repeat in range(2):
        if repeat and rank == slow:
            for _ in range(2):
                hold_back(torch.cuda.current_stream(), 1000)
        for case in cases:
            calls.make(case, group)
        calls.settle()
    assert comm.errored() is None


@pytest.mark.parametrize("slow", [0, 1])
def test_ranks_may_be_40_calls_apart(ranks, slow: int) -> None:
    ranks(2).run(far_ahead, slow)


def interleave(rank: int, world: int, group, calls: list[Case]) -> None:
    """Calls alternately on the world and on the strided half that this rank is in."""
    halves = subgroups((0, 2), (1, 3))
    half = halves[(0, 2) if rank in (0, 2) else (1, 3)]
    on = [(group, rank, world), (half, dist.get_rank(half), 2)]
    for number, case in enumerate(calls):
        own, own_rank, size = on[number % 2]
        hold_back_in_turn(communicator(own), own_rank, size, number, 1.0)
        window = InFlight(own_rank, size)
        window.ready(case)
        window.make(case, own)
        window.settle()


def test_a_group_and_its_halves_interleaved(ranks) -> None:
    ranks(4).run(interleave, mixed_calls(100, seed=7, algorithms=("direct", "ring")), timeout=100)


def on_two_groups_and_two_streams(rank: int, world: int, group, calls: list[Case]) -> None:
    """All four pairs of a group and a user's stream take turns; one of the streams is held back."""
    users = [torch.cuda.Stream() for _ in range(2)]
    with new_group(world) as other:
        groups = (group, other)
        for repeat, first in product(range(2), range(0, len(calls), WINDOW)):
            window = InFlight(rank, world)
            window.ready(*calls[first : first + WINDOW])
            for number, case in enumerate(calls[first : first + WINDOW], first):
                on, user = groups[number % 2], users[number // 2 % 2]
                with torch.cuda.stream(user):
                    if repeat:
                        hold_back(users[number // 4 % 2], 0.5)
                        hold_back_in_turn(communicator(on), rank, world, number, 1.0)
                    window.make(case, on)
            window.settle()


@pytest.mark.parametrize("world", [2, 3])
def test_two_groups_and_two_user_streams(ranks, world: int) -> None:
    calls = mixed_calls(100, seed=40 + world, algorithms=("direct", "ring"))
    ranks(world).run(on_two_groups_and_two_streams, calls, timeout=100)


def same_call_from_two_threads(rank: int, world: int, group) -> None:
    """Both threads make the same call with the same data, so it matters not which is first on which rank."""
    comm = communicator(group)
    for number, case in enumerate(mixed_calls(40, seed=31, algorithms=("direct", "ring"))):
        calls = InFlight(rank, world)
        calls.ready(case)
        hold_back_in_turn(comm, rank, world, number, 1.0)

        def on_own_stream(case: Case = case, calls: InFlight = calls) -> None:
            torch.cuda.set_device(comm.device)
            with torch.cuda.stream(torch.cuda.Stream()):
                calls.make(case, group)

        in_threads(*[on_own_stream] * 2)
        assert len(calls.settle()) == 2


def test_two_threads_on_one_communicator(ranks) -> None:
    ranks(2).run(same_call_from_two_threads)


def freed_at_once(rank: int, world: int, group, operation: str, algorithm: str) -> int:
    """Inputs are freed, and their memory is overwritten, right after each call; how often that really happened."""
    comm = communicator(group)
    plan = so.PlanSpec(algorithm, chunks=2, compute_streams=2)
    cases = [Case(operation, plan, lead=(64,), k=48, n=(40,), bias=True, seed=seed) for seed in range(8)]
    sources = [gpu_inputs(case, rank, world) for case in cases]
    wanted = [expected(case, rank, world) for case in cases]
    call(cases[0], sources[0], group)
    torch.cuda.synchronize()
    reused, pending = 0, []
    for number in range(96):
        case, source = cases[number % 8], sources[number % 8]
        hold_back_in_turn(comm, rank, world, number, 1.0)
        given = copy_of(source)
        pointers = {tensor.data_ptr() for tensor in (given.x, *given.weights, *given.biases)}
        results = call(case, given, group)
        del given
        poison = [torch.full_like(tensor, 99) for tensor in (source.x, *source.weights, *source.biases)]
        reused += len(pointers & {tensor.data_ptr() for tensor in poison})
        pending.append((wanted[number % 8], results))
        del poison
        if number % 8 == 7:
            for want, found in pending:
                for one, other in zip(want, found, strict=True):
                    assert torch.equal(one, other.double().cpu()), (case, number)
            pending.clear()
    return reused


def copy_of(given: Inputs) -> Inputs:
    return Inputs(given.x.clone(), [w.clone() for w in given.weights], [b.clone() for b in given.biases])


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_inputs_freed_right_after_the_call_are_safe(ranks, operation: str, algorithm: str) -> None:
    for reused in ranks(2).run(freed_at_once, operation, algorithm):
        assert reused > 50, "the memory was not given to somebody else, so this showed nothing"
