"""Ctrl-C while a call waits, in whichever way, and programs that end with calls in flight."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Pool

import streamoverlap as so

TIMEOUT = 8.0  # seconds; an interrupt is heard long before
SOON = 1.5


def interrupted(call: Callable[[], object]) -> float:
    """Presses Ctrl-C in a call; returns the seconds until it is heard."""
    begin = time.monotonic()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        call()
    return time.monotonic() - begin


def be_told(comm: so.Communicator) -> None:
    """On the peer of a rank that is interrupted."""
    with pytest.raises(so.CommunicatorError, match="rank 0 failed: interrupted"):
        while True:
            comm._check()
            time.sleep(0.01)


def interrupt_a_wait(rank: int, world: int, group, how: str) -> None:
    comm = so.Communicator(group, timeout=TIMEOUT)
    x = torch.ones(2, 2)
    if rank == 1:
        be_told(comm)
        return
    work = comm.all_gather(x, None, async_op=True)
    following = work.then(lambda y: y) if how == "then" else None
    assert interrupted(work.wait) < SOON
    # The interrupt was for the one who waited; for all others the call has failed.
    if following is not None:
        with pytest.raises(so.CommunicatorError, match="interrupted"):
            following.wait()
    if how == "exception":
        assert isinstance(work.exception(), so.CommunicatorError)
    for _ in range(2):
        with pytest.raises(so.CommunicatorError, match="interrupted"):
            work.wait()


@pytest.mark.parametrize("how", ["wait", "exception", "then"])
def test_a_work_whose_wait_was_interrupted_has_failed(how: str) -> None:
    with Pool(2) as pool:
        pool.run(interrupt_a_wait, how, timeout=30)


def interrupt_a_bounded_wait(rank: int, world: int, group) -> None:
    comm = so.Communicator(group, timeout=TIMEOUT)
    if rank == 0:
        work = comm.all_gather(torch.ones(2, 2), None, async_op=True)
        assert interrupted(lambda: work.wait(timeout=TIMEOUT / 2)) < SOON
        assert interrupted(work.synchronize) < SOON
        assert interrupted(comm.close) < SOON
        dist.barrier(group)
        assert torch.equal(work.wait(), torch.ones(4, 2))  # the op went on, the communicator is still open
    else:
        dist.barrier(group)
        comm.all_gather(torch.ones(2, 2), None)


def test_a_bounded_wait_that_is_interrupted_leaves_the_op_alone() -> None:
    with Pool(2) as pool:
        pool.run(interrupt_a_bounded_wait, timeout=30)


def interrupt_behind_another_thread(rank: int, world: int, group) -> None:
    comm = so.Communicator(group, timeout=TIMEOUT, _slots=1)
    if rank == 1:
        with pytest.raises(so.CommunicatorError):
            while True:
                comm._check()
                time.sleep(0.01)
        return
    x = torch.ones(2, 2)
    errors: list[Exception] = []

    def two_calls() -> None:
        try:
            comm.all_gather(x, None, async_op=True)
            comm.all_gather(x, None, async_op=True)  # waits for the slot
        except so.CommunicatorError as error:
            errors.append(error)

    thread = threading.Thread(target=two_calls)
    thread.start()
    time.sleep(0.3)
    assert interrupted(lambda: comm.all_gather(x, None)) < SOON
    thread.join(SOON)
    assert len(errors) == 1


def test_a_call_behind_that_of_another_thread_hears_ctrl_c() -> None:
    with Pool(2) as pool:
        pool.run(interrupt_behind_another_thread, timeout=30)


def interrupt_a_destructor(rank: int, world: int, group) -> None:
    own = dist.new_group(list(range(world)))
    comm = so.Communicator(own, timeout=TIMEOUT)
    x = torch.ones(2, 2)
    if rank == 1:
        be_told(comm)
        return
    comm.all_gather(x, None, async_op=True)

    def let_go() -> None:
        nonlocal comm, own
        dist.destroy_process_group(own)
        own = comm = None
        for _ in range(1000):  # heard in the destructor, raised after it
            time.sleep(0.001)

    assert interrupted(let_go) < SOON


def test_ctrl_c_is_heard_while_a_group_is_destroyed_with_a_call_in_flight() -> None:
    with Pool(2) as pool:
        pool.run(interrupt_a_destructor, timeout=30)


END = textwrap.dedent(
    """
    import os, signal, sys, threading, time, torch, torch.distributed as dist, streamoverlap as so
    rank, store, how = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2), sys.argv[3]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    plan = so.PlanSpec("serial") if "serial" in how else None
    comm = so.Communicator(timeout=60)
    own = dist.new_group([0, 1])
    if rank == 1 and how == "behind another group":
        other = so.Communicator(own, timeout=60)
    x = torch.ones(2, 2)
    if rank == 1:  # makes no call, and is there until it is told that rank 0 has ended
        while comm.errored() is None:
            time.sleep(0.01)
        assert "ended with calls in flight" in str(comm.errored())
    elif how == "blocked thread":
        def calls():
            for _ in range(4):
                comm.all_gather(x, plan, async_op=True)
        threading.Thread(target=calls, daemon=True).start()
        time.sleep(0.3)
    elif how in ("growing thread", "serial thread"):
        x = x if how == "serial thread" else torch.ones(1 << 20, 8)
        threading.Thread(target=comm.all_gather, args=(x, plan), daemon=True).start()
        time.sleep(0.5)
    elif how == "behind another group":
        other = so.Communicator(own, timeout=60)
        behind = other.all_gather(x, plan, async_op=True)
        works = comm.all_gather(x, plan, async_op=True).then(lambda _: behind.wait())
    else:
        if "Ctrl-C" in how:
            threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        works = [comm.all_gather(x, plan, async_op=True) for _ in range(2)]
    print(time.monotonic())
    """
)


ENDS = (
    "overlapped",
    "serial",
    "blocked thread",
    "growing thread",
    "serial thread",
    "overlapped, Ctrl-C",
    "serial, Ctrl-C",
    "behind another group",
)


@pytest.fixture(scope="module")
def ends(tmp_path_factory) -> Iterator[dict[str, Future]]:
    """Some side by side, since they mostly wait; by `how` the future of (seconds from their last line, what failed)."""
    with ThreadPoolExecutor(max_workers=3) as pool:
        yield {how: pool.submit(end, tmp_path_factory.mktemp("end"), how) for how in ENDS}


def end(folder: Path, how: str) -> tuple[float, list[str]]:
    command = [sys.executable, "-c", END]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(rank), str(folder / "store"), how], **pipes) for rank in range(2)]
    outputs, errors = zip(*(process.communicate(timeout=50) for process in processes), strict=True)
    ended = time.monotonic()
    failed = [error for process, error in zip(processes, errors, strict=True) if process.returncode != 0]
    return ended - float(outputs[0]) if not failed else 0.0, failed


@pytest.mark.parametrize("how", ENDS)
def test_a_program_that_ends_with_calls_in_flight_ends_in_seconds(ends: dict[str, Future], how: str) -> None:
    seconds, failed = ends[how].result()
    assert not failed, failed
    assert seconds < 20, "of a timeout of 60 s"


def test_a_program_does_not_wait_for_a_function_that_never_ends() -> None:
    program = textwrap.dedent(
        """
        import time, torch, torch.distributed as dist, streamoverlap as so
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        comm = so.Communicator(timeout=60)
        work = comm.all_gather(torch.ones(2), None, async_op=True).then(lambda _: time.sleep(100))
        """
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


def wait_for_room(rank: int, world: int, group) -> None:
    comm = so.Communicator(group, timeout=60)
    if rank == 0:
        plan, x = so.PlanSpec("serial"), torch.ones(2)
        works = [comm.all_gather(x, plan, async_op=True) for _ in range(255)]
        begin = time.monotonic()
        with pytest.raises(so.PeerTimeoutError, match="serial calls behind"):
            comm.all_gather(x, plan, async_op=True, timeout=0.5)
        assert time.monotonic() - begin < 0.5 + 2
        del works
    else:
        while comm.errored() is None:
            time.sleep(0.01)


def test_a_wait_for_room_obeys_the_timeout_of_its_call() -> None:
    with Pool(2) as pool:
        pool.run(wait_for_room, timeout=30)


def grow_alone(rank: int, world: int, group) -> None:
    with closing(so.Communicator(group, timeout=60)) as comm:
        comm.all_gather(torch.ones(2, 2), None)
        big = torch.ones(comm.slot_bytes, 2)
        dist.barrier(group)
        if rank == 0:
            begin = time.monotonic()
            with pytest.raises(so.PeerTimeoutError, match=r"waited 1\.\d s for rank 1, which gave no memory") as failed:
                comm.all_gather(big, None, timeout=1)
            assert time.monotonic() - begin < 1 + 2
            assert failed.value.peer == 1
            assert "all_gather" in failed.value.op
        else:
            while comm.errored() is None:
                time.sleep(0.01)


def test_growth_obeys_the_timeout_of_its_call_and_names_the_peer() -> None:
    with Pool(2) as pool:
        pool.run(grow_alone, timeout=30)


def abort_in_any_language(rank: int, world: int, group) -> None:
    comm = so.Communicator(group, timeout=TIMEOUT)
    if rank == 0:
        comm.abort("é" * 400)
    while comm.errored() is None:
        time.sleep(0.01)
    with pytest.raises(so.CommunicatorError, match=r"é{100}"):
        comm.all_gather(torch.ones(2), None)


def test_a_reason_may_be_longer_than_its_place() -> None:
    with Pool(2) as pool:
        pool.run(abort_in_any_language, timeout=30)


def serial_behind_a_slow_function(rank: int, world: int, group) -> None:
    with closing(so.Communicator(group, timeout=60)) as comm:
        plan, x = so.PlanSpec("serial"), torch.ones(2)
        slow = comm.all_gather(x, plan, async_op=True).then(lambda _: time.sleep(2.5))
        quick = comm.all_gather(x, plan, async_op=True, timeout=0.5)
        slow.wait()
        assert torch.equal(quick.wait(), torch.ones(4))


def test_what_a_function_takes_is_not_the_time_of_the_next_serial_call(ranks) -> None:
    ranks(2).run(serial_behind_a_slow_function)


def serial_far_ahead(rank: int, world: int, group) -> str:
    comm = so.Communicator(group, timeout=TIMEOUT)
    plan = so.PlanSpec("serial")
    x = torch.ones(2, 2) if rank == 0 else torch.ones(2, 4, dtype=torch.float16)
    if rank == 1:
        time.sleep(1)  # meanwhile the other makes as many calls as it may
    try:
        works = [comm.all_gather(x, plan, async_op=True) for _ in range(300)]
        works[0].wait()
    except so.MismatchError as error:
        return str(error)
    return "no error"


def test_a_rank_that_is_far_ahead_in_serial_calls_still_compares() -> None:
    with Pool(2) as pool:
        for message in pool.run(serial_far_ahead, timeout=40):
            assert message.startswith("ranks made different calls")


def fail_to_copy(rank: int, world: int, group) -> str:
    comm = so.Communicator(group, timeout=TIMEOUT)
    plan, x = so.PlanSpec("serial"), torch.ones(2)
    if rank == 0:
        torch.Tensor.clone, clone = fail, torch.Tensor.clone
        with pytest.raises(RuntimeError, match="no memory"):
            comm.all_gather(x, plan, copy_input=True, async_op=True)
        torch.Tensor.clone = clone
    try:
        comm.all_gather(x, plan, copy_input=True, async_op=True).wait()
    except so.CommunicatorError as error:
        return str(error)
    return "no error"


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("no memory")


def test_a_serial_call_that_cannot_copy_its_input_fails_on_all_ranks() -> None:
    with Pool(2) as pool:
        for message in pool.run(fail_to_copy, timeout=30):
            assert "no memory" in message


def raise_system_exit(rank: int, world: int, group) -> None:
    with closing(so.Communicator(group, timeout=TIMEOUT)) as comm:
        work = comm.all_gather(torch.ones(2), None, async_op=True).then(lambda _: sys.exit(3))
        with pytest.raises(RuntimeError, match=r"raised SystemExit\(3\)"):
            work.wait()
        assert isinstance(work.exception(), RuntimeError)


def test_a_function_that_exits_ends_no_program(ranks) -> None:
    ranks(2).run(raise_system_exit)
