"""Asynchronous ops on the CPU: they run behind the caller, and what is done with their Work."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import closing
from itertools import product

import pytest
import torch
import torch.distributed as dist
from references import DTYPES, PLAIN, Case, call, differences, expected, inputs

import streamoverlap as so
from streamoverlap.plans import OPERATIONS

ALGORITHMS = ("direct", "ring", "serial")
LATE = 0.6  # seconds that a rank comes late


def cases(count: int) -> list[Case]:
    kinds = list(product(OPERATIONS, ALGORITHMS, DTYPES))
    return [
        Case(
            operation,
            so.PlanSpec(algorithm, 1 + i % 3, 1 + i % 2),
            dtype,
            lead=(i % 6,),
            k=2 + i % 5,
            n=(3, 2) if operation == "all_gather_gemm" and i % 2 else (4,),
            bias=i % 3 == 0,
            gathered=operation == "all_gather_gemm" and i % 5 < 2,
            copy_input=operation in PLAIN and i % 4 < 2,
            seed=i,
        )
        for i, (operation, algorithm, dtype) in ((i, kinds[i * 7 % len(kinds)]) for i in range(count))
    ]


def in_flight(rank: int, world: int, group, calls: list[Case], depth: int) -> list[str]:
    """Up to `depth` calls are issued before one of them is waited for, the last or the first in turn."""
    wrong: list[str] = []
    under_way: list[tuple[Case, so.Work]] = []
    for number, case in enumerate(calls):
        under_way.append((case, call(case, inputs(case, rank, world), group, async_op=True)))
        if len(under_way) == depth:
            first, work = under_way.pop(number % 2 * -1)
            wrong += filter(None, [differences(first, work.wait(), expected(first, rank, world))])
            assert work.is_completed()
            assert work.exception() is None
    for case, work in under_way:
        work.synchronize()
        wrong += filter(None, [differences(case, work.result(), expected(case, rank, world))])
    return wrong[:3]


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_are_those_of_synchronous_calls(ranks, world: int, depth: int) -> None:
    calls = cases(len(OPERATIONS) * len(ALGORITHMS) * len(DTYPES))
    assert ranks(world).run(in_flight, calls, depth) == [[]] * world


def run_behind(rank: int, world: int, group, algorithm: str) -> None:
    with closing(so.Communicator(group, timeout=30)) as comm:
        x = torch.full((2, 3), float(rank))
        comm.all_gather(x, so.PlanSpec(algorithm))
        if rank == world - 1:
            time.sleep(LATE)
        start = time.monotonic()
        work = comm.all_gather(x, so.PlanSpec(algorithm), async_op=True)
        issued = time.monotonic() - start
        if rank < world - 1:
            assert issued < LATE / 2
            assert not work.is_completed()
            assert work.exception() is None
            with pytest.raises(TimeoutError, match="was not completed within"):
                work.wait(timeout=0.05)
            with pytest.raises(TimeoutError, match="it goes on"):
                work.synchronize(timeout=0.05)
        assert torch.equal(work.wait(timeout=20), torch.arange(world).repeat_interleave(2)[:, None].expand(-1, 3))
        assert work.is_completed()
        for bad in (0, -1, "soon", True):
            with pytest.raises(ValueError, match="expected a positive number of seconds"):
                work.wait(timeout=bad)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_op_runs_behind_the_caller(ranks, algorithm: str) -> None:
    ranks(2).run(run_behind, algorithm)


def overwrite(rank: int, world: int, group, algorithm: str, copy_input: bool) -> list[str | None]:
    """The input is overwritten while a peer is late, with as many calls in flight as there are slots."""
    wrong = []
    with closing(so.Communicator(group, timeout=30)) as comm:
        for operation in PLAIN:
            calls = [
                Case(operation, so.PlanSpec(algorithm, 2), lead=(7,), copy_input=copy_input, seed=i) for i in range(2)
            ]
            given = [inputs(case, rank, world) for case in calls]
            call(calls[0], inputs(calls[0], rank, world), comm)
            dist.barrier(group)
            if rank == world - 1:
                time.sleep(LATE)
            start = time.monotonic()
            works = [call(case, each, comm, async_op=True) for case, each in zip(calls, given, strict=True)]
            for each in given:
                each.x.fill_(77)
            if rank < world - 1:
                assert time.monotonic() - start < LATE / 2, "the caller waits for the exchange, or for that before it"
            for case, work in zip(calls, works, strict=True):
                wrong.append(differences(case, work.wait(), expected(case, rank, world)))
    return wrong


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_copied_input_may_be_written_at_once(ranks, algorithm: str) -> None:
    assert ranks(2).run(overwrite, algorithm, True) == [[None] * 2 * len(PLAIN)] * 2


def test_an_input_that_is_not_copied_must_not_be_written(ranks) -> None:
    """Else the test above shows nothing."""
    early, _ = ranks(2).run(overwrite, "direct", False)
    assert all(wrong is not None for wrong in early[2:]), "sums, of which the own part is read last"


def follow(rank: int, world: int, group, algorithm: str) -> None:
    with closing(so.Communicator(group, timeout=30)) as comm:
        x = torch.ones(2, 3) * (rank + 1)
        total = world * (world + 1) / 2
        threads: list[str] = []
        order: list[int] = []

        def double(gathered: torch.Tensor) -> torch.Tensor:
            threads.append(threading.current_thread().name)
            return gathered.sum() * 2

        comm._set_hook(seed=rank, max_delay_ms=20)
        works = [comm.all_gather(x, so.PlanSpec(algorithm), async_op=True) for _ in range(2)]
        doubled = [
            work.then(double).then(lambda value, i=i: (order.append(i), value)[1]) for i, work in enumerate(works)
        ]
        assert [chained.wait().item() for chained in doubled] == [total * 6 * 2] * 2
        assert set(threads) == {"streamoverlap-then"}, "all on the op's own thread"
        assert order == [0, 1]

        def fail(_: torch.Tensor) -> None:
            raise LookupError("not there")

        failed = works[0].then(fail)
        carried = failed.then(lambda _: order.append(9))
        for work in (failed, carried):
            with pytest.raises(LookupError, match="not there"):
                work.wait(timeout=10)
            assert isinstance(work.exception(), LookupError)
        assert order == [0, 1]

        # A function may call and wait itself, also for what would run on its own thread after it.
        def call_again(gathered: torch.Tensor) -> torch.Tensor:
            inner = comm.reduce_scatter(gathered, so.PlanSpec(algorithm), async_op=True)
            return inner.then(lambda part: part + 1).wait(timeout=10)

        assert torch.equal(works[1].then(call_again).wait(), world * torch.ones(2, 3) * (rank + 1) + 1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_then_runs_in_order_after_the_op_on_its_thread(ranks, algorithm: str) -> None:
    ranks(2).run(follow, algorithm)


def futures(rank: int, world: int, group) -> None:
    with closing(so.Communicator(group, timeout=30)) as comm:
        x = torch.ones(1, 2)
        if rank:
            time.sleep(0.2)
        future = comm.all_gather(x, None, async_op=True).get_future()
        assert isinstance(future, torch.futures.Future)
        assert rank or not future.done()
        assert future.then(lambda done: done.value().sum().item()).wait() == 2 * world
        failed = comm.all_gather(x, None, async_op=True).then(lambda _: 1 / 0).get_future()
        with pytest.raises(ZeroDivisionError):
            failed.wait()


def test_get_future_has_the_semantics_of_torch(ranks) -> None:
    ranks(2).run(futures)


def abort_in_flight(rank: int, world: int, group) -> list[str]:
    """Rank 1 stays away, then aborts; rank 0 has calls in flight, and what follows them."""
    with closing(so.Communicator(group, timeout=30)) as comm:
        x = torch.ones(2, 2)
        done = comm.all_gather(x, None, async_op=True)
        done.wait()
        if rank:
            time.sleep(0.3)
            comm.abort("the operator said so")
            return [str(comm.errored())]
        calls: list[int] = []
        work = comm.all_gather(x, None, async_op=True)
        followed = work.then(lambda _: calls.append(1))
        future = work.get_future()
        messages = []
        for wait in (
            work.wait,
            work.result,
            work.synchronize,
            followed.wait,
            future.wait,
            lambda: comm.all_gather(x, None),
        ):
            with pytest.raises(RuntimeError, match="the operator said so") as caught:
                wait()
            messages.append(str(caught.value))
        assert work.is_completed()
        assert isinstance(work.exception(), so.CommunicatorError)
        assert not calls
        assert done.result().sum() == 4 * world, "it was complete before"
        return messages


def test_abort_withholds_results_and_is_carried_through(ranks) -> None:
    messages = [message for some in ranks(2).run(abort_in_flight) for message in some]
    assert all("rank 1" in message and "the operator said so" in message for message in messages), messages


def drop(rank: int, world: int, group, algorithm: str) -> None:
    """Nobody holds the Work, the inputs or the outputs: peers get the right data, and then all is let go of."""
    with closing(so.Communicator(group, timeout=30)) as comm:
        comm._set_hook(seed=rank, max_delay_ms=3)
        left: list[weakref.ref] = []
        for number in range(60):
            x = torch.full((64, 8), float(rank + number))
            dropped = rank == number % world
            work = comm.all_gather(x, so.PlanSpec(algorithm, 2), async_op=True)
            if dropped:
                left.append(weakref.ref(x))
                if number % 3 == 0:
                    work.then(lambda gathered: gathered.sum())
                del work, x
                torch.full((64, 8), -1.0)  # the allocator may give this what was let go of
            else:
                want = torch.arange(world).repeat_interleave(64)[:, None].expand(-1, 8) + number
                assert torch.equal(work.wait(), want)
        comm._clear_hook()
        comm.all_gather(torch.ones(1), None)
        deadline = time.monotonic() + 10
        while any(reference() is not None for reference in left):
            assert time.monotonic() < deadline, "inputs of ops that have ended are still held"
            gc.collect()
            time.sleep(0.01)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", [2, 3])
def test_a_dropped_work_keeps_its_tensors_until_the_op_has_ended(ranks, world: int, algorithm: str) -> None:
    ranks(world).run(drop, algorithm)


def from_other_threads(rank: int, world: int, group) -> None:
    """Any thread may wait for a Work, and several at once."""
    with closing(so.Communicator(group, timeout=30)) as comm:
        comm._set_hook(seed=rank, max_delay_ms=10)
        for number in range(20):
            work = comm.all_gather(torch.full((3,), float(number)), None, async_op=True)
            seen: list[bool] = []
            waits: list[Callable[[], object]] = [work.wait, work.synchronize, lambda work=work: work.wait(timeout=20)]
            threads = [
                threading.Thread(target=lambda wait=wait, seen=seen: (wait(), seen.append(True))) for wait in waits
            ]
            for thread in threads:
                thread.start()
            assert torch.equal(work.wait(), torch.full((3 * world,), float(number)))
            for thread in threads:
                thread.join(20)
            assert seen == [True] * 3


def test_any_thread_may_wait(ranks) -> None:
    ranks(2).run(from_other_threads)


def close_with_calls_in_flight(rank: int, world: int, group) -> None:
    comm = so.Communicator(group, timeout=30)
    comm._set_hook(seed=rank, max_delay_ms=20)
    work = comm.all_gather(torch.ones(2), None, async_op=True)
    followed = work.then(lambda gathered: gathered + 1)
    comm.close()
    assert torch.equal(followed.wait(), torch.full((2 * world,), 2.0))
    assert torch.equal(work.wait(), torch.ones(2 * world))
    with pytest.raises(RuntimeError, match="closed"):
        work.then(lambda gathered: gathered)


def test_close_waits_for_calls_in_flight(ranks) -> None:
    ranks(2).run(close_with_calls_in_flight)


def late_timeout(rank: int, world: int, group) -> str | None:
    """The timeout of one call, though that of the communicator is long; `serial` as well."""
    with closing(so.Communicator(group, timeout=60)) as comm:
        x = torch.ones(2)
        comm.all_gather(x, None)
        if rank:
            time.sleep(3)
            return None
        start = time.monotonic()
        work = comm.all_gather(x, None, async_op=True, timeout=0.5)
        with pytest.raises(so.PeerTimeoutError) as caught:
            work.wait()
        assert 0.4 < time.monotonic() - start < 2.5
        return str(caught.value)


def test_a_call_has_a_timeout_of_its_own(ranks) -> None:
    message, _ = ranks(2).run(late_timeout)
    assert "rank 1" in message


END = """
    import sys, torch, torch.distributed as dist, streamoverlap as so
    rank, path, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    comm = so.Communicator(None, timeout=60)
    comm._set_hook(seed=rank, max_delay_ms=30)
    for _ in range(3):
        so.all_gather(torch.ones(1000), async_op=True).then(lambda gathered: gathered.sum())
        comm.all_gather(torch.ones(1000), None, async_op=True)
    if how == "alone" and rank == 0:
        comm.all_gather(torch.ones(1000), None, async_op=True)
"""


@pytest.mark.parametrize("how", ["together", "alone"])
def test_a_process_may_end_with_calls_in_flight(tmp_path, how: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(END)]
    start = time.monotonic()
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), how], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert time.monotonic() - start < 30


def record_nothing(rank: int, world: int, group: dist.ProcessGroup) -> None:
    weight, bias = torch.ones(3, 4, requires_grad=True), torch.ones(3, requires_grad=True)
    for operation, algorithm in product(("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"), ALGORITHMS):
        with torch.no_grad():
            work = getattr(so, operation)(
                torch.ones(2 * world, 4), weight, group, bias=bias, plan=so.PlanSpec(algorithm), async_op=True
            )
        assert not work.wait().requires_grad, (operation, algorithm)


def test_a_call_under_no_grad_records_no_gradient(ranks) -> None:
    ranks(2).run(record_nothing)


def test_a_group_of_one(ranks) -> None:
    ranks(1).run(follow_alone)


def follow_alone(rank: int, world: int, group: dist.ProcessGroup) -> None:
    work = so.gemm_reduce_scatter(torch.eye(3), torch.eye(3), group, async_op=True)
    assert torch.equal(work.then(lambda y: y + y).wait(), 2 * torch.eye(3))
    empty = so.all_gather(torch.ones(0, 3), group, async_op=True)
    assert empty.is_completed()
    assert empty.then(lambda y: y.shape).wait() == (0, 3)
