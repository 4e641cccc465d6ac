"""The serial algorithm when ranks fail it: no other step's data, no crash of Gloo, no hang."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
import torch
import torch.distributed as dist
from ranks import Pool

import streamoverlap as so
import streamoverlap.communicator as module

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
    assert kinds[0] == ["PeerTimeoutError", *([kinds[0][1]] * 2)]
    assert kinds[0][1] in ("PeerTimeoutError", "CommunicatorError")
    assert "no error" not in kinds[1][1:]
    assert all(seconds < TIMEOUT + SLACK for of_rank in answers for _, _, seconds in of_rank)


def interrupt_a_wait(rank: int, world: int, group, plan: so.PlanSpec, shared: bool) -> list[tuple[str, str, float]]:
    with communicator(rank, group, shared) as comm:
        comm.set_timeout(20)
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
        interrupted, _ = pool.run(interrupt_alone, timeout=30)
    assert [kind for kind, _, _ in interrupted] == ["KeyboardInterrupt", "CommunicatorError"]


def interrupt_alone(rank: int, world: int, group) -> list[tuple[str, str, float]]:
    if rank == 0:
        return interrupt_a_wait(rank, world, group, SERIAL, False)
    with communicator(rank, group, False) as comm:
        comm.all_gather(torch.zeros(2, 2), SERIAL)
        time.sleep(1.5)
        return []


def results_of_a_subclass(rank: int, world: int, group) -> list[type]:
    class Marked(torch.Tensor):
        pass

    x = torch.ones(2, 4).as_subclass(Marked)
    w = torch.ones(3, 4).as_subclass(Marked)
    return [
        type(result)
        for plan in (SERIAL, so.PlanSpec("direct"))
        for result in (
            so.all_gather(x, group, plan=plan),
            so.reduce_scatter(x, group, plan=plan),
            so.all_gather_gemm(x, w, group, plan=plan),
            so.gemm_reduce_scatter(x, w, group, plan=plan),
        )
    ] == [torch.Tensor] * 8


def test_results_are_plain_tensors(ranks) -> None:
    assert ranks(2).run(results_of_a_subclass) == [True, True]
