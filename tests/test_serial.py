"""The serial algorithm when ranks fail it: no other step's data, no crash of Gloo, no hang."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from ranks import Pool

import streamoverlap as so
import streamoverlap.communicator as module
from streamoverlap import ops, serial

TIMEOUT = 1.5
SLACK = 2.0  # seconds after the timeout within which every rank must have raised
SERIAL = so.PlanSpec("serial")


@contextmanager
def communicator(rank: int, group, shared: bool) -> Iterator[so.Communicator]:
    """Of ranks that share memory, or of ranks that believe to be on hosts of their own."""
    original = module.host_id
    if not shared:
        module.host_id = lambda: f"host {rank}"
    try:
        with closing(so.Communicator(group, timeout=TIMEOUT)) as comm:
            assert (comm.fallback is None) == shared
            yield comm
    finally:
        module.host_id = original


def outcome(call: Callable[[], object]) -> tuple[str, str, float]:
    begin = time.monotonic()
    try:
        call()
    except (so.CommunicatorError, KeyboardInterrupt) as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "no error", "", time.monotonic() - begin


WEIGHT = torch.ones(3, 4)
# What rank 1 calls and what the others call; the first three have messages of one size, which Gloo cannot tell apart.
DISAGREEMENTS: dict[str, tuple[Callable, Callable]] = {
    "dtype": (
        lambda comm: comm.all_gather(torch.ones(4, 4, dtype=torch.float16), SERIAL),
        lambda comm: comm.all_gather(torch.ones(4, 4, dtype=torch.bfloat16), SERIAL),
    ),
    "shape of one size": (
        lambda comm: comm.all_gather(torch.ones(2, 8), SERIAL),
        lambda comm: comm.all_gather(torch.ones(4, 4), SERIAL),
    ),
    "op of one size": (
        lambda comm: comm.all_gather_gemm(torch.ones(6, 4), [WEIGHT], [], False, SERIAL),
        lambda comm: comm.all_gather(torch.ones(6, 4), SERIAL),
    ),
    "rows": (
        lambda comm: comm.all_gather(torch.ones(5, 4), SERIAL),
        lambda comm: comm.all_gather(torch.ones(4, 4), SERIAL),
    ),
    "op": (
        lambda comm: comm.reduce_scatter(torch.ones(6, 4), SERIAL),
        lambda comm: comm.all_gather(torch.ones(6, 4), SERIAL),
    ),
    "zero rows": (
        lambda comm: comm.all_gather(torch.ones(0, 4), SERIAL),
        lambda comm: comm.all_gather(torch.ones(6, 4), SERIAL),
    ),
}


def disagree(rank: int, world: int, group, what: str, shared: bool, late: int) -> list[tuple[str, str, float]]:
    with communicator(rank, group, shared) as comm:
        comm.all_gather(torch.ones(2, 2), SERIAL)
        dist.barrier(group)
        if rank == late:
            time.sleep(0.3)
        mine = DISAGREEMENTS[what][rank != 1]
        answers = [outcome(lambda: mine(comm)), outcome(lambda: comm.all_gather(torch.ones(2, 2), SERIAL))]
        assert isinstance(comm.errored(), so.MismatchError)
        return answers


SHARED = pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "hosts apart"])


@SHARED
@pytest.mark.parametrize(
    ("what", "world", "late"),
    [*((what, 2, 0) for what in DISAGREEMENTS), ("dtype", 2, 1), ("rows", 2, 1), ("dtype", 3, 2), ("rows", 3, 2)],
)
def test_ranks_that_call_different_things_in_serial_all_learn_of_it(
    what: str, world: int, late: int, shared: bool
) -> None:
    with Pool(world) as pool:
        answers = pool.run(disagree, what, shared, late, timeout=20)
    for rank, (now, later) in enumerate(answers):
        assert later[0] == "MismatchError", later
        assert now[2] < TIMEOUT, "nobody waits for the timeout"
        if what == "zero rows" and rank == 1 and shared and now[0] == "no error":
            continue  # it had nothing to wait for
        assert now[0] == "MismatchError", now
        assert "called" in now[1] or "made call" in now[1]


def miss_a_step(rank: int, world: int, group, shared: bool) -> list[tuple[str, str, float]]:
    """Rank 1 comes too late to the first call, and goes on as if nothing had been."""
    with communicator(rank, group, shared) as comm:
        comm.all_gather(torch.zeros(2, 2), SERIAL)
        if rank == 1:
            time.sleep(TIMEOUT + 1.0)
        answers = []
        for step in (1, 2, 3):
            answers.append(outcome(lambda step=step: check_step(comm, rank, world, step)))
        assert comm.errored() is not None
        return answers


def check_step(comm: so.Communicator, rank: int, world: int, step: int) -> None:
    got = comm.all_gather(torch.full((2, 2), 10.0 * step + rank), SERIAL)
    want = torch.cat([torch.full((2, 2), 10.0 * step + r) for r in range(world)])
    assert torch.equal(got, want), f"step {step} has the data of another one: {got}"


@SHARED
def test_after_a_timeout_no_step_gets_the_data_of_another(shared: bool) -> None:
    with Pool(2) as pool:
        answers = pool.run(miss_a_step, shared, timeout=30)
    kinds = [[kind for kind, _, _ in of_rank] for of_rank in answers]
    assert kinds[0] == ["PeerTimeoutError"] * 3
    assert "no error" not in kinds[1][1:]
    assert all(seconds < TIMEOUT + SLACK for of_rank in answers for _, _, seconds in of_rank)


def interrupt_a_wait(rank: int, world: int, group, plan: so.PlanSpec, shared: bool) -> list[tuple[str, str, float]]:
    with communicator(rank, group, shared) as comm:
        comm.set_timeout(20 if shared else 4)  # peers can only be told in shared memory
        comm.all_gather(torch.zeros(2, 2), plan)
        if rank == 1:
            time.sleep(1.5)
        else:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        return [outcome(lambda: comm.all_gather(torch.zeros(2, 2), plan)) for _ in range(2)]


@pytest.mark.parametrize("plan", [SERIAL, so.PlanSpec("direct"), so.PlanSpec("ring", chunks=2)], ids=str)
def test_ctrl_c_ends_a_wait_and_tells_the_peers(plan: so.PlanSpec) -> None:
    with Pool(2) as pool:
        interrupted, peer = pool.run(interrupt_a_wait, plan, True, timeout=20)
    assert interrupted[0][0] == "KeyboardInterrupt"
    assert interrupted[0][2] < 1.2, "it is seen at once, not when the peer comes"
    assert interrupted[1][0] == "CommunicatorError"
    for kind, message, seconds in peer:
        assert kind == "CommunicatorError"
        assert "rank 0 failed" in message
        assert "interrupted" in message or "KeyboardInterrupt" in message
        assert seconds < 1.0


def test_ctrl_c_in_serial_without_shared_memory() -> None:
    with Pool(2) as pool:
        interrupted, peer = pool.run(interrupt_a_wait, SERIAL, False, timeout=60)
    assert [kind for kind, _, _ in interrupted] == ["KeyboardInterrupt", "CommunicatorError"]
    assert peer[1][0] != "no error", "the interrupted rank takes part in nothing more"


INTERRUPTS = {"serial": SERIAL, "direct": so.PlanSpec("direct")}


def interrupt_anywhere(rank: int, world: int, group, name: str, trials: int) -> list[str]:
    """Rank 0 gets a signal at any moment of one of many calls, then goes on as if nothing had been."""
    random = Random(7)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    # Gloo itself is out of step after a collective that one rank has left, so each trial has a group of its own.
    groups = [dist.new_group(list(range(world))) for _ in range(trials)]
    return [interrupt_once(rank, world, of_trial, INTERRUPTS[name], random) for of_trial in groups]


def interrupt_once(rank: int, world: int, group, plan: so.PlanSpec, random: Random) -> str:
    comm = so.Communicator(group, timeout=TIMEOUT)
    comm.all_gather(torch.zeros(1, 2), plan)
    dist.barrier(group)  # nobody is still in that
    where = "nowhere"
    try:
        if rank == 0:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 4e-3))
        for step in range(60):
            try:
                check_one(rank, world, step, group, plan)
            except so.CommunicatorError:
                break
            except KeyboardInterrupt as interrupt:
                files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(interrupt.__traceback__)]
                where = "within" if ops.__file__ in files else "outside"
                if where == "outside":
                    comm.abort()  # the test cannot know whether this step was made
                assert comm.errored() is not None, f"interrupted in {files}, and goes on"
    except KeyboardInterrupt:
        where = "outside"
    signal.setitimer(signal.ITIMER_REAL, 0)
    if where == "outside" and comm.errored() is None:
        comm.abort()
    comm.close()
    return where


def check_one(rank: int, world: int, step: int, group, plan: so.PlanSpec) -> None:
    got = so.all_gather(torch.full((1, 2), 10.0 * step + rank), group, plan=plan)
    assert got[:, 0].tolist() == [10.0 * step + r for r in range(world)], f"step {step} got {got[:, 0].tolist()}"


@pytest.mark.parametrize("name", INTERRUPTS)
def test_ctrl_c_at_any_moment_of_a_call_mixes_no_steps(name: str) -> None:
    with Pool(2) as pool:
        interrupted, _ = pool.run(interrupt_anywhere, name, 30, timeout=200)
    assert interrupted.count("within") > 15, "the signal mostly comes within a call"


def fail_between(rank: int, world: int, group, shared: bool) -> list[tuple[str, str, float]]:
    """On rank 0 the first call fails after the ranks have agreed on it, before it sends."""
    with communicator(rank, group, shared) as comm:
        check_step(comm, rank, world, 0)
        dist.barrier(group)  # nobody is still in that step when rank 0 fails
        original = serial.all_gather

        def fail(x: torch.Tensor, on: serial.Collectives) -> NoReturn:
            raise RuntimeError("out of memory")

        if rank == 0:
            serial.all_gather = fail
        try:
            answers = [outcome(lambda: check_step(comm, rank, world, 1)) if rank else raised(comm)]
        finally:
            serial.all_gather = original
        return answers + [outcome(lambda step=step: check_step(comm, rank, world, step)) for step in (2, 3)]


def raised(comm: so.Communicator) -> tuple[str, str, float]:
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        comm.all_gather(torch.zeros(2, 2), SERIAL)
    return type(caught.value).__name__, str(caught.value), 0.0


@SHARED
def test_a_serial_call_that_fails_on_one_rank_fails_on_all(shared: bool) -> None:
    with Pool(2) as pool:
        answers = pool.run(fail_between, shared, timeout=30)
    assert [kind for kind, _, _ in answers[0][1:]] == ["CommunicatorError"] * 2
    assert "no error" not in [kind for kind, _, _ in answers[1]]


def settled_size() -> int:
    """Bytes of address space, once threads have let go of the last call's tensors."""
    sizes = [0, 1]
    while sizes[-1] != sizes[-2]:
        time.sleep(0.2)
        sizes.append(int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE"))
    return sizes[-1]


def run_out_of_memory(rank: int, world: int, group, name: str, gathers: bool) -> list[tuple[str, str, float]]:
    """Rank 0 cannot allocate its tensors in the second call; what every rank has of further ones."""
    with communicator(rank, group, True) as comm:
        comm.set_timeout(20)
        x, weight = torch.ones(8, 4), torch.ones(3 << 20, 4)  # 48 MiB and more: beyond what malloc keeps
        if gathers:
            call = partial(comm.all_gather_gemm, x, [weight], [], False, INTERRUPTS[name])
        else:
            call = partial(comm.gemm_reduce_scatter, x, weight, None, INTERRUPTS[name])
        call()
        dist.barrier(group)
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_AS, (settled_size() + (8 << 20), resource.RLIM_INFINITY))
            with pytest.raises(RuntimeError, match="allocate memory"):
                call()
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return [outcome(call) for _ in range(2)]


# In a serial all_gather_gemm the large output comes after the exchange, in which the rank is in step.
@pytest.mark.parametrize(("name", "gathers"), [("direct", True), ("direct", False), ("serial", False)])
def test_a_rank_out_of_memory_lets_nobody_go_on(name: str, gathers: bool) -> None:
    with Pool(2) as pool:
        for answers in pool.run(run_out_of_memory, name, gathers, timeout=60):
            assert all(kind == "CommunicatorError" for kind, _, _ in answers), answers
            assert "rank 0" in answers[0][1]


def lose_one(rank: int, world: int, group, how: int) -> so.CommunicatorError | None:
    with communicator(rank, group, True) as comm:
        check_step(comm, rank, world, 0)
        dist.barrier(group)
        if rank == 1:
            os.kill(os.getpid(), how)
        with pytest.raises(so.PeerTimeoutError) as caught:
            check_step(comm, rank, world, 1)
        with pytest.raises(so.PeerTimeoutError):
            check_step(comm, rank, world, 2)
        return (caught.value.peer, caught.value.op, str(caught.value))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_serial_names_the_rank_that_is_gone(how: int) -> None:
    with Pool(3) as pool:
        pool.start(lose_one, how)
        for peer, op, message in pool.finish(30, [0, 2]):
            assert peer == 1
            assert op == "serial all_gather on x of [2, 2], torch.float32"
            assert "rank 1" in message
            assert message.count("cannot be used any more") == 1


def change_the_timeout(rank: int, world: int, group) -> float:
    with communicator(rank, group, True) as comm:
        comm.set_timeout(30)
        check_step(comm, rank, world, 0)
        dist.barrier(group)
        if rank == 1:
            time.sleep(TIMEOUT + SLACK + 1)
            return 0.0
        threading.Timer(0.2, comm.set_timeout, (TIMEOUT,)).start()
        begin = time.monotonic()
        with pytest.raises(so.PeerTimeoutError, match="has not made this call"):
            check_step(comm, rank, world, 1)
        return time.monotonic() - begin


def test_a_new_timeout_holds_for_a_serial_call_in_flight() -> None:
    with Pool(2) as pool:
        assert pool.run(change_the_timeout, timeout=30)[0] < TIMEOUT + SLACK


def under_autocast(rank: int, world: int, group) -> set[str]:
    x, weight = torch.ones(2, 4), torch.ones(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        return {
            str(result.dtype)
            for plan in (SERIAL, so.PlanSpec("direct"))
            for result in (
                so.all_gather_gemm(x, weight, group, plan=plan),
                so.gemm_reduce_scatter(x, weight, group, plan=plan),
            )
        }


def test_autocast_changes_neither_serial_nor_overlapped(ranks) -> None:
    assert ranks(2).run(under_autocast) == [{"torch.float32"}] * 2


def results_of_a_subclass(rank: int, world: int, group) -> list[str]:
    class Marked(torch.Tensor):
        pass

    x = torch.ones(2, 4).as_subclass(Marked)
    w = torch.ones(3, 4).as_subclass(Marked)
    return [
        type(result).__name__
        for plan in (SERIAL, so.PlanSpec("direct"))
        for result in (
            so.all_gather(x, group, plan=plan),
            so.reduce_scatter(x, group, plan=plan),
            so.all_gather_gemm(x, w, group, plan=plan),
            so.gemm_reduce_scatter(x, w, group, plan=plan),
        )
    ]


def test_results_are_plain_tensors(ranks) -> None:
    assert ranks(2).run(results_of_a_subclass) == [["Tensor"] * 8] * 2
