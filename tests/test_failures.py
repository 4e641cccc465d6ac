"""A rank dies, stops or calls something else: the others raise in time, say whom they miss, leave nothing."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Pool, quick_to_fail
from references import Case, verify

import streamoverlap as so

TIMEOUT = 1.5
SLACK = 2.0  # seconds after the timeout within which every rank must have raised
CASE = Case("gemm_reduce_scatter", so.PlanSpec("ring", chunks=2), lead=(8,), bias=True)


@dataclass(frozen=True)
class Failure:
    """What a rank saw: the error of its first failing call, how long that call took, and what came after."""

    kind: str
    message: str
    peer: int
    op: str
    group: str
    elapsed: float
    seconds: float
    later: str
    later_seconds: float
    errored: bool


def first_failure(comm: so.Communicator, make_call: Callable[[], object], calls: int = 4) -> Failure:
    """Calls until it raises. A rank killed late in a call may be missed only in the next."""
    for _ in range(calls):
        start = time.monotonic()
        try:
            make_call()
        except so.CommunicatorError as error:
            seconds = time.monotonic() - start
            later, later_seconds = later_call(make_call)
            return Failure(
                type(error).__name__,
                str(error),
                error.peer,
                error.op,
                error.group,
                error.elapsed,
                seconds,
                later,
                later_seconds,
                isinstance(comm.errored(), so.CommunicatorError),
            )
    raise AssertionError(f"{calls} calls went through")


def later_call(make_call: Callable[[], object]) -> tuple[str, float]:
    start = time.monotonic()
    try:
        make_call()
    except so.CommunicatorError as error:
        return type(error).__name__, time.monotonic() - start
    return "no error", time.monotonic() - start


def assert_in_time(failure: Failure, peer: int) -> None:
    assert failure.seconds <= TIMEOUT + SLACK, failure
    assert failure.peer == peer, failure
    assert f"rank {peer}" in failure.message, failure
    assert failure.later == failure.kind, failure
    assert failure.later_seconds < 0.5, failure
    assert failure.errored, failure


@dataclass(frozen=True)
class Held:
    """What a process holds that a communicator needs; not all descriptors, as Gloo closes some on its own."""

    shared_memory: int
    unix_sockets: int
    mappings: int
    threads: int

    @staticmethod
    def now() -> Held:
        unix = {f"socket:[{line.split()[6]}]" for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
        links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        return Held(
            sum(link.startswith("/memfd:") for link in links),
            sum(link in unix for link in links),
            Path("/proc/self/maps").read_text().count("/memfd:"),
            len(os.listdir("/proc/self/task")),
        )


def lose_a_rank(rank: int, world: int, group, victim: int, hook: dict[str, int]) -> tuple[Failure, Held, Held]:
    """`victim` dies or stops before one of its ops; the others fail, clean up, and go on without it."""
    with closing(quick_to_fail(group, TIMEOUT)) as comm:
        verify(CASE, rank, world, comm)
    before = Held.now()
    failure = fail(rank, world, group, hook if rank == victim else None)
    after = Held.now()
    if rank != victim:
        go_on(rank, [r for r in range(world) if r != victim])
    return failure, before, after


def fail(rank: int, world: int, group, hook: dict[str, int] | None) -> Failure:
    with closing(quick_to_fail(group, TIMEOUT)) as comm:
        verify(CASE, rank, world, comm)
        if hook is not None:
            comm._set_hook(**hook)
        return first_failure(comm, lambda: verify(CASE, rank, world, comm))


def go_on(rank: int, survivors: list[int]) -> None:
    """A new communicator on a new group of the survivors works, also while a stopped rank wakes."""
    group = dist.new_group(survivors, use_local_synchronization=True)
    for seed in range(30):
        case = Case("gemm_reduce_scatter", so.PlanSpec("direct", chunks=2), lead=(8,), seed=seed)
        verify(case, survivors.index(rank), len(survivors), group)
        time.sleep(0.01)


@contextmanager
def no_file_left_behind() -> Iterator[None]:
    """There are no other names: sockets and memory without one go with the last process that holds them."""
    before = set(os.listdir("/dev/shm"))
    yield
    # Other programs on the machine may put something there for a moment.
    wait_until(lambda: set(os.listdir("/dev/shm")) <= before, 5)


# World, victim, and the op before which it is lost: the first, among credits and sends, later, near the end.
KILLS = [(2, 0, 0), (2, 1, 17), (3, 1, 5), (3, 2, 29), (4, 0, 17), (4, 3, 0), (4, 0, 5), (3, 0, 29)]
STOPS = [(2, 0, 5), (3, 1, 0), (4, 3, 17), (4, 0, 29)]


@pytest.mark.parametrize(("world", "victim", "point"), KILLS)
def test_a_killed_rank_is_named_in_time_by_all_others(world: int, victim: int, point: int) -> None:
    survivors = [r for r in range(world) if r != victim]
    with no_file_left_behind(), Pool(world) as pool:
        pool.start(lose_a_rank, victim, {"kill_at": point})
        for failure, before, after in pool.finish(30, survivors):
            assert failure.kind == "PeerTimeoutError"
            assert_in_time(failure, victim)
            assert "gemm_reduce_scatter(ring" in failure.op
            assert failure.group
            assert 0 <= failure.elapsed <= TIMEOUT + SLACK
            assert after == before


@pytest.mark.parametrize(("world", "victim", "point"), STOPS)
def test_a_stopped_rank_is_named_in_time_and_does_no_harm_when_it_wakes(world: int, victim: int, point: int) -> None:
    survivors = [r for r in range(world) if r != victim]
    with no_file_left_behind(), Pool(world) as pool:
        pool.start(lose_a_rank, victim, {"stop_at": point})
        wait_until(lambda: state(pool.pid(victim)) == "T", 30)
        time.sleep(TIMEOUT + 1.0)
        os.kill(pool.pid(victim), signal.SIGCONT)
        for failure, before, after in pool.finish(30, survivors):
            assert failure.kind == "PeerTimeoutError"
            assert_in_time(failure, victim)
            assert after == before
        [(failure, _, _)] = pool.finish(30, [victim])
        assert failure.later == failure.kind == "PeerTimeoutError"


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.02)


RING = so.PlanSpec("ring")
DIRECT = so.PlanSpec("direct")
DISAGREEMENTS = {
    "rows": (CASE, replace(CASE, lead=(9,))),
    "columns": (CASE, replace(CASE, n=(5,))),
    "chunks": (CASE, replace(CASE, plan=so.PlanSpec("ring", chunks=1))),
    "algorithm": (CASE, replace(CASE, plan=DIRECT)),
    "way of summing": (CASE, replace(CASE, plan=so.PlanSpec("ring", chunks=2, reduce="sum"))),
    "operation": (Case("all_gather", RING), Case("reduce_scatter", RING)),
    # On two ranks the shards are of 4 rows in either case.
    "rows within a shard": (Case("all_reduce", DIRECT, lead=(7,)), Case("all_reduce", DIRECT, lead=(8,))),
    "no rows at all": (Case("all_gather", DIRECT, lead=(0,)), Case("all_gather", DIRECT, lead=(4,))),
    "no rows in a ring": (replace(CASE, lead=(0,)), CASE),
    "copy of the input": (Case("all_gather", DIRECT), Case("all_gather", DIRECT, copy_input=True)),
    # Both need larger slots than there are, of different sizes.
    "size of the slots": tuple(Case("all_gather", DIRECT, lead=(rows,), k=8) for rows in (200_000, 400_000)),
    "dtype of the same size": tuple(Case("all_gather", DIRECT, dtype) for dtype in (torch.bfloat16, torch.float16)),
}


def disagree(rank: int, world: int, group, cases: tuple[Case, Case]) -> Failure:
    comm = quick_to_fail(group, TIMEOUT)
    verify(CASE, rank, world, comm)
    dist.barrier(group)  # nobody is still in the call before
    mine = cases[rank == 1]
    return first_failure(comm, lambda: verify(mine, rank, world, comm), calls=1)


@pytest.mark.parametrize("what", DISAGREEMENTS)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_call_different_things_all_learn_of_it(world: int, what: str) -> None:
    with Pool(world) as pool:
        failures = pool.run(disagree, DISAGREEMENTS[what], timeout=20)
    for failure in failures:
        assert failure.kind == "MismatchError", failure
        assert failure.seconds <= TIMEOUT + SLACK
        assert failure.later == "MismatchError"
        assert failure.errored
        assert failure.peer in range(world)
        assert failure.op
    ours, theirs = DISAGREEMENTS[what]
    assert ours.operation in failures[0].message, "a message tells the call of its own rank"
    assert theirs.operation in failures[1].message


def call_serial_alone(rank: int, world: int, group) -> Failure:
    comm = quick_to_fail(group, TIMEOUT)
    verify(CASE, rank, world, comm)
    dist.barrier(group)
    mine = replace(CASE, plan=so.PlanSpec("serial")) if rank == 1 else CASE
    return first_failure(comm, lambda: verify(mine, rank, world, comm), calls=1)


def test_a_rank_that_runs_serial_alone_hangs_nobody() -> None:
    with Pool(2) as pool:
        failures = pool.run(call_serial_alone, timeout=20)
    for failure in failures:
        assert failure.seconds <= TIMEOUT + SLACK
        assert failure.errored
    assert failures[0].kind in ("PeerTimeoutError", "CommunicatorError")
    assert failures[1].kind == "PeerTimeoutError"


def stay_away(rank: int, world: int, group, absent: int) -> Failure | None:
    so.Communicator.of(group, "cpu").set_timeout(TIMEOUT)
    verify(CASE, rank, world, group)
    if rank == absent:
        time.sleep(TIMEOUT + SLACK)
        return None
    return first_failure(so.Communicator.of(group, "cpu"), lambda: verify(CASE, rank, world, group), calls=1)


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_does_not_call_is_named(world: int) -> None:
    with Pool(world) as pool:
        failures = pool.run(stay_away, 1, timeout=20)
    for failure in failures:
        if failure is not None:
            assert failure.kind == "PeerTimeoutError"
            assert_in_time(failure, 1)


def grow_alone(rank: int, world: int, group) -> tuple[str, float]:
    comm = quick_to_fail(group, TIMEOUT)
    verify(CASE, rank, world, comm)
    dist.barrier(group)
    large = Case("all_gather", DIRECT, lead=(200_000,), k=8)
    start = time.monotonic()
    with pytest.raises(so.CommunicatorError) as caught:
        verify(large if rank == 1 else CASE, rank, world, comm)
    seconds = time.monotonic() - start
    assert later_call(lambda: verify(CASE, rank, world, comm))[0] != "no error"
    return str(caught.value), seconds


def test_a_rank_that_alone_needs_more_memory_is_no_hang() -> None:
    with Pool(3) as pool:
        for message, seconds in pool.run(grow_alone, timeout=20):
            assert seconds <= TIMEOUT + SLACK, message


def grow_beyond_memory(rank: int, world: int, group, own_limit: bool) -> tuple[str, float]:
    """Rank 1 cannot: for want of descriptors, or all: for want of memory. The others learn of it at once."""
    comm = so.Communicator(group, timeout=20.0)
    verify(CASE, rank, world, comm)
    dist.barrier(group)
    size = 1 << 50
    if own_limit:
        size = 64 << 20
        if rank == 1:
            lowest_free = os.dup(0)
            os.close(lowest_free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, lowest_free))
    start = time.monotonic()
    with pytest.raises(so.CommunicatorError) as caught:
        comm._impl.reserve(size)
    seconds = time.monotonic() - start
    assert later_call(lambda: verify(CASE, rank, world, comm))[0] == "CommunicatorError"
    return str(caught.value), seconds


@pytest.mark.parametrize("own_limit", [True, False], ids=["descriptors", "memory"])
def test_a_rank_that_cannot_grow_is_named_at_once(own_limit: bool) -> None:
    with Pool(3) as pool:
        for message, seconds in pool.run(grow_beyond_memory, own_limit, timeout=20):
            assert re.search(r"rank \d (\(this rank\) )?failed: could not set up slots of \d+ bytes", message), message
            assert seconds < 3, "nobody waits for the timeout"
            if own_limit:
                assert "rank 1" in message
                assert "Too many open files" in message
            else:
                assert "left, of which" in message, "it is refused before it is tried"


def set_up_without_peers(rank: int, world: int, group) -> tuple[str, float] | None:
    if rank == 1:
        return None
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        so.Communicator(group, timeout=0.5)
    return str(caught.value), time.monotonic() - start


def test_set_up_does_not_wait_for_ever() -> None:
    with Pool(3) as pool:
        for answer in pool.run(set_up_without_peers, timeout=20):
            if answer is not None:
                message, seconds = answer
                assert "could not set up the communicator of group" in message
                assert seconds <= 0.5 + SLACK


def make_and_close(rank: int, world: int, group, times: int) -> tuple[Held, Held, int, int]:
    """What the process holds before and after, and by how many descriptors and bytes it has grown."""

    def use_one() -> None:
        with closing(so.Communicator(group, timeout=30)) as comm:
            verify(Case("all_gather", RING, lead=(20_000,), k=8), rank, world, comm)

    for _ in range(5):
        use_one()
    before, descriptors, memory = Held.now(), open_descriptors(), resident_bytes()
    for _ in range(times):
        use_one()
    gc.collect()
    return before, Held.now(), open_descriptors() - descriptors, resident_bytes() - memory


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    """Without what malloc keeps for later: some MiB, more or less of it at each look."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def keys_left(rank: int, world: int, group) -> int:
    """By a second and third communicator in the group's store."""
    store = group.get_group_store()
    counts = []
    for _ in range(3):
        with closing(so.Communicator(group, timeout=30)) as comm:
            verify(CASE, rank, world, comm)
        dist.barrier(group)
        counts.append(store.num_keys())
        dist.barrier(group)
    return counts[2] - counts[0]


def test_set_ups_leave_no_keys_in_the_store(ranks) -> None:
    assert ranks(2).run(keys_left) == [0, 0]


def test_100_communicators_leave_no_descriptor_thread_or_memory(ranks) -> None:
    with no_file_left_behind():
        for before, after, descriptors, grown in ranks(2).run(make_and_close, 100):
            assert after == before
            assert descriptors == 0
            assert grown < 2 << 20
