"""On GPUs: a rank dies, stops or calls something else. The others raise in time, and go on without it.

A call on a GPU returns before it is done, so its failure shows once the GPU has been waited for: `errored()` is set
by then, and every later call raises.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import ColdKernels, communicator, gpu_inputs, hold_back, new_group, on_gpu, streams_of, verify, wrong_in
from ranks import Pool
from references import Case, call, expected
from test_failures import CASE, SLACK, no_file_left_behind, state, wait_until

import streamoverlap as so

pytestmark = pytest.mark.gpu(1)

TIMEOUT = 3.0


@dataclass(frozen=True)
class Failure:
    """What a rank saw: the error of its first failing call, how long that call took, and what came after."""

    kind: str
    message: str
    peer: int
    seconds: float
    later: str
    later_seconds: float


def first_failure(comm: so.Communicator, make_call: Callable[[], object], calls: int = 4) -> Failure:
    """Calls and waits for the GPU until that fails. A rank lost late in a call may be missed only in the next."""
    for _ in range(calls):
        start = time.monotonic()
        error = outcome(comm, make_call)
        if error is None:
            continue
        seconds = time.monotonic() - start
        assert_usable_device()
        start = time.monotonic()
        with pytest.raises(so.CommunicatorError) as later:
            make_call()
        later_seconds = time.monotonic() - start
        return Failure(type(error).__name__, str(error), error.peer, seconds, later.typename, later_seconds)
    raise AssertionError(f"{calls} calls went through")


def outcome(comm: so.Communicator, make_call: Callable[[], object]) -> Exception | None:
    try:
        make_call()
    except so.CommunicatorError as error:
        return error
    torch.cuda.synchronize()
    return comm.errored()


def assert_usable_device() -> None:
    ones = torch.ones(256, 256, device="cuda")
    assert torch.equal(ones @ ones, torch.full_like(ones, 256))


def assert_in_time(failure: Failure, kind: str, peer: int) -> None:
    assert failure.kind == failure.later == kind, failure
    assert failure.seconds <= TIMEOUT + SLACK, failure
    assert failure.later_seconds < 0.5, failure
    assert failure.peer == peer, failure
    assert f"rank {peer}" in failure.message, failure


def lose_a_rank(rank: int, world: int, group, victim: int, how: int, during: bool) -> Failure:
    """`victim` gets the signal `how` before its call, or right after it with the call held back."""
    survivors = [r for r in range(world) if r != victim]
    with closing(so.Communicator(group, timeout=TIMEOUT, device="cuda")) as comm:
        given, wanted = gpu_inputs(CASE, rank, world), expected(CASE, rank, world)
        for _ in range(3):
            assert wrong_in(CASE, call(CASE, given, comm), wanted) is None
        if rank == victim:
            if during:
                hold_back(streams_of(comm)["send"], 1000)
                call(CASE, given, comm)
            os.kill(os.getpid(), how)
        failure = first_failure(comm, lambda: call(CASE, given, comm))
        if rank in survivors:
            go_on(rank, survivors)
    return failure


def go_on(rank: int, survivors: list[int]) -> None:
    """A new communicator on a new group of the survivors works, also while a stopped rank wakes."""
    group = dist.new_group(survivors, use_local_synchronization=True)
    communicator(group)
    for seed in range(20):
        case = Case("gemm_reduce_scatter", so.PlanSpec("direct", chunks=2), lead=(8,), seed=seed)
        verify(case, survivors.index(rank), len(survivors), group)
        time.sleep(0.01)


@pytest.mark.parametrize(("world", "victim", "during"), [(2, 0, True), (2, 1, False), (3, 1, True)])
def test_a_killed_rank_is_named_in_time_by_all_others(world: int, victim: int, during: bool) -> None:
    survivors = [r for r in range(world) if r != victim]
    with no_file_left_behind(), Pool(world, on_gpu) as pool:
        pool.start(lose_a_rank, victim, signal.SIGKILL, during)
        for failure in pool.finish(40, survivors):
            assert_in_time(failure, "PeerTimeoutError", victim)


@pytest.mark.parametrize(("world", "victim", "during"), [(2, 1, True), (3, 0, False)])
def test_a_stopped_rank_is_named_in_time_and_does_no_harm_when_it_wakes(world: int, victim: int, during: bool) -> None:
    survivors = [r for r in range(world) if r != victim]
    with no_file_left_behind(), Pool(world, on_gpu) as pool:
        pool.start(lose_a_rank, victim, signal.SIGSTOP, during)
        wait_until(lambda: state(pool.pid(victim)) == "T", 30)
        time.sleep(TIMEOUT + SLACK)
        os.kill(pool.pid(victim), signal.SIGCONT)
        for failure in pool.finish(40, survivors):
            assert_in_time(failure, "PeerTimeoutError", victim)
        [failure] = pool.finish(20, [victim])
        assert failure.kind == failure.later == "PeerTimeoutError"


RING = so.PlanSpec("ring")
DIRECT = so.PlanSpec("direct")
DISAGREEMENTS = {
    "rows": (CASE, replace(CASE, lead=(9,))),
    "columns": (CASE, replace(CASE, n=(5,))),
    "chunks": (CASE, replace(CASE, plan=RING)),
    "algorithm": (CASE, replace(CASE, plan=DIRECT)),
    "way of summing": (CASE, replace(CASE, plan=so.PlanSpec("ring", chunks=2, reduce="sum"))),
    "operation": (Case("all_gather", RING), Case("reduce_scatter", RING)),
    "dtype of the same size": tuple(Case("all_gather", DIRECT, dtype) for dtype in (torch.bfloat16, torch.float16)),
}


def disagree(rank: int, world: int, group) -> dict[str, Failure]:
    failures = {}
    for what, cases in DISAGREEMENTS.items():
        with new_group(world) as own:
            comm = communicator(own, TIMEOUT)
            verify(CASE, rank, world, own)
            mine = cases[rank == 1]
            given = gpu_inputs(mine, rank, world)
            failures[what] = first_failure(comm, lambda mine=mine, given=given, own=own: call(mine, given, own), 1)
    return failures


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_call_different_things_all_learn_of_it(world: int) -> None:
    with Pool(world, on_gpu) as pool:
        answers = pool.run(disagree, timeout=100)
    for what in DISAGREEMENTS:
        for answer in answers:
            failure = answer[what]
            assert failure.kind == failure.later == "MismatchError", (what, failure)
            assert failure.seconds <= TIMEOUT + SLACK, (what, failure)
            assert failure.peer in range(world)
        ours, theirs = DISAGREEMENTS[what]
        assert ours.operation in answers[0][what].message, "a message tells the call of its own rank"
        assert theirs.operation in answers[1][what].message


def disagree_in_replays(rank: int, world: int, group) -> tuple[Failure, float]:
    """Two graphs that all ranks have; then rank 1 replays the other one. Seconds that a replay takes afterwards."""
    comm = communicator(group, TIMEOUT)
    graphs = []
    for rows in (8, 9):
        x = torch.ones(rows, 4, device="cuda")
        so.prepare(so.all_gather, x, group, plan=RING)
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            gathered = so.all_gather(x, group, plan=RING)
        for _ in range(20):
            graphs[-1].replay()
        assert torch.equal(gathered, torch.ones_like(gathered))
    mine = graphs[rank == 1]
    start = time.monotonic()
    mine.replay()
    torch.cuda.synchronize()
    assert isinstance(comm.errored(), so.MismatchError), comm.errored()
    seconds = time.monotonic() - start
    failure = first_failure(comm, lambda: so.all_gather(x, group, plan=RING), 1)
    start = time.monotonic()
    mine.replay()
    torch.cuda.synchronize()
    return replace(failure, seconds=seconds), time.monotonic() - start


@pytest.mark.parametrize("world", [2, 3])
def test_replays_of_different_calls_are_told_apart(world: int) -> None:
    with Pool(world, on_gpu) as pool:
        for failure, again in pool.run(disagree_in_replays, timeout=40):
            assert failure.kind == failure.later == "MismatchError"
            assert failure.seconds <= TIMEOUT + SLACK
            assert again <= SLACK, "a replay after the abort hung"


def lose_a_rank_in_replays(rank: int, world: int, group) -> Failure:
    comm = communicator(group, TIMEOUT)
    x = torch.ones(8, 4, device="cuda")
    so.prepare(so.all_gather, x, group, plan=RING)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        so.all_gather(x, group, plan=RING)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    graph.replay()
    torch.cuda.synchronize()
    seconds = time.monotonic() - start
    return replace(first_failure(comm, lambda: so.all_gather(x, group, plan=RING), 1), seconds=seconds)


def test_a_killed_rank_ends_a_replay_in_time() -> None:
    with Pool(2, on_gpu) as pool:
        pool.start(lose_a_rank_in_replays)
        [failure] = pool.finish(30, [0])
    assert_in_time(failure, "PeerTimeoutError", 1)


def block_the_driver(rank: int, world: int, group) -> tuple[Failure, float] | Failure:
    """Rank 1 stays away, and rank 0's only thread is inside the driver: what it launches is not loaded yet."""
    comm = communicator(group, TIMEOUT)
    cold = ColdKernels()
    given = gpu_inputs(CASE, rank, world)
    verify(CASE, rank, world, group)
    if rank == 1:
        time.sleep(TIMEOUT + SLACK)
        return first_failure(comm, lambda: call(CASE, given, group), 1)
    blocked = 0.0

    def call_and_launch() -> None:
        nonlocal blocked
        call(CASE, given, group)
        blocked = max(blocked, cold.launch())

    failure = first_failure(comm, call_and_launch, 1)
    return failure, blocked


def test_an_abort_gets_through_while_the_driver_is_blocked() -> None:
    with Pool(2, on_gpu) as pool:
        (failure, blocked), absent = pool.run(block_the_driver, timeout=40)
    assert blocked > TIMEOUT / 2, "this driver does not block, so the test showed nothing"
    assert_in_time(failure, "PeerTimeoutError", 1)
    assert absent.kind == "PeerTimeoutError"
