"""What a communicator must survive besides calls that go well: threads, fallback, odd but valid tensors."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import NoReturn
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import Pool

import streamoverlap as so
import streamoverlap.communicator as module
from streamoverlap.meeting import Meeting

TIMEOUT = 5.0


def use_first_in_threads(rank: int, world: int, group) -> bool:
    """Two groups, first used by two threads, on each rank in another order."""
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    results: dict[int, torch.Tensor] = {}

    def use(i: int) -> None:
        results[i] = so.all_gather(torch.full((2, 3), float(rank)), groups[i])

    order = (0, 1) if rank == 0 else (1, 0)
    threads = [threading.Thread(target=use, args=(i,)) for i in order]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join(TIMEOUT)
    wanted = torch.arange(world, dtype=torch.float32).repeat_interleave(2)[:, None].expand(-1, 3)
    return len(results) == 2 and all(torch.equal(y, wanted) for y in results.values())


def test_groups_may_be_used_first_by_threads_in_any_order() -> None:
    with Pool(2) as pool:
        assert pool.run(use_first_in_threads, timeout=20) == [True, True]


LATE = 2.0


def ask_while_calls_wait(rank: int, world: int, group) -> float:
    """Seconds that it takes to start two threads that wait for a late peer and one that asks for the slots' size."""
    with closing(so.Communicator(group, timeout=TIMEOUT, _slots=1)) as comm:
        dist.barrier(group)
        if rank == 1:
            time.sleep(LATE)
            for _ in range(2):
                comm.all_gather(torch.ones(4, 4), None)
            return 0.0
        # The second call waits for the only slot, and holds the order of calls meanwhile.
        threads = [threading.Thread(target=comm.all_gather, args=(torch.ones(4, 4), None)) for _ in range(2)]
        threads.append(threading.Thread(target=lambda: comm.slot_bytes))
        begin = time.monotonic()
        for thread in threads:
            thread.start()
            time.sleep(0.1)
        seconds = time.monotonic() - begin
        for thread in threads:
            thread.join()
        return seconds


def test_no_question_holds_all_threads_while_a_call_waits() -> None:
    with Pool(2) as pool:
        assert max(pool.run(ask_while_calls_wait, timeout=20)) < LATE / 2


def fall_back(rank: int, world: int, group) -> tuple[str | None, bool]:
    original = module.host_id
    module.host_id = lambda: f"host {rank}"
    try:
        with closing(so.Communicator(group, timeout=TIMEOUT)) as comm:
            comm.set_timeout(3)
            y = comm.all_gather(torch.full((1, 2), float(rank)), so.PlanSpec("direct"))
            right = torch.equal(y[:, 0], torch.arange(world, dtype=torch.float32))
            assert comm.errored() is None
            assert comm.slot_bytes == 0
            assert comm.last_choice.plan.algorithm == "serial"
            return comm.fallback, right and comm.last_choice.reason == comm.fallback
    finally:
        module.host_id = original


def test_ranks_on_several_hosts_agree_on_serial() -> None:
    with Pool(2) as pool:
        for reason, right in pool.run(fall_back, timeout=20):
            assert reason == "its 2 ranks are on 2 hosts and share no memory"
            assert right


def call_with_odd_tensors(rank: int, world: int, group) -> list[bool]:
    x = torch.arange(12.0).reshape(4, 3) + rank
    w = torch.arange(6.0).reshape(2, 3)
    whole = torch.cat([torch.arange(12.0).reshape(4, 3) + r for r in range(world)])
    empty = so.gemm_reduce_scatter(x, w[:0], group)  # the first call of all: no slot has grown yet
    with torch.inference_mode():
        first, second = so.all_gather_gemm(x, [w, w[:0]], group, bias=[torch.ones(2), None])
    negated = so.all_gather(torch._neg_view(x), group)
    return [
        empty.shape == (4 // world, 0),
        torch.equal(first, whole @ w.t() + 1),
        second.shape == (4 * world, 0),
        torch.equal(negated, -whole),
    ]


def test_odd_but_valid_tensors() -> None:
    with Pool(2) as pool:
        for answers in pool.run(call_with_odd_tensors, timeout=20):
            assert all(answers), answers


def call_on_other_devices(rank: int, world: int, group) -> list[str]:
    messages = []
    with closing(so.Communicator(group, timeout=TIMEOUT)) as comm:
        for plan in (so.PlanSpec(), so.PlanSpec("serial")):
            with pytest.raises(ValueError, match="x is on meta; expected cpu") as caught:
                comm.all_gather(torch.ones(2, 2, device="meta"), plan)
            messages.append(str(caught.value))
        assert torch.equal(comm.all_gather(torch.ones(2, 2), None), torch.ones(2 * world, 2))
    return messages


def test_tensors_of_another_device_are_refused() -> None:
    with Pool(2) as pool:
        for messages in pool.run(call_on_other_devices, timeout=20):
            assert len(messages) == 2


def in_a_child(function: Callable[[], object]) -> str:
    """What `function` returns or raises in a forked child, as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = str(function())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


def fork(rank: int, world: int, group) -> list[str]:
    x = torch.ones(2, 2)
    so.all_gather(x, group)
    comm = so.Communicator.of(group, "cpu")
    answers = [
        in_a_child(lambda: so.all_gather(x, group)),
        in_a_child(lambda: so.all_gather(x, group, plan=so.PlanSpec("serial"))),
        in_a_child(comm.close),
    ]
    work = so.all_gather(x, group, async_op=True)
    work.then(lambda y: y).wait()  # its thread does not exist in the child
    for follow in (lambda: work.then(lambda y: y).wait(1), work.get_future):
        assert "of which this one is a fork" in in_a_child(follow)
    dist.barrier(group)
    for seed in range(3):
        assert torch.equal(so.all_gather(x + seed, group), torch.full((2 * world, 2), 1.0 + seed))
    return answers


def test_a_forked_child_is_refused_and_does_no_harm() -> None:
    with Pool(2) as pool:
        for refused in pool.run(fork, timeout=30):
            for answer in refused:
                assert answer.startswith("RuntimeError: the communicator of group"), answer
                assert answer.endswith("or a process group of this process' own"), answer
                assert "of which this one is a fork" in answer


PARENT_OF_A_FORK = """
import os, sys, torch, torch.distributed as dist
import streamoverlap as so
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
so.all_gather(torch.ones(2, 2))
child = os.fork()
if child == 0:
    sys.exit(7)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert torch.equal(so.all_gather(torch.ones(2, 2)), torch.ones(2, 2))
sys.exit(status)
"""


def test_a_forked_child_ends_as_any_program() -> None:
    ended = subprocess.run([sys.executable, "-c", PARENT_OF_A_FORK], timeout=60, capture_output=True, text=True)
    assert ended.returncode == 7, ended.stderr


def make_one_first(rank: int, world: int, group) -> list[bool]:
    first = so.Communicator(group, timeout=TIMEOUT)
    second = so.Communicator(group, timeout=TIMEOUT + 1)
    functional = so.Communicator.of(group, "cpu")
    so.all_gather(torch.ones(2, 2), group)
    answers = [functional is first, first.last_choice is not None, second.last_choice is None]
    first.close()
    with closing(so.Communicator(group, timeout=TIMEOUT)) as third:
        answers.append(so.Communicator.of(group, "cpu") is third)
    second.close()
    answers.append(so.Communicator.of(group, "cpu") not in (first, second, third))
    return answers


def test_the_first_explicit_communicator_is_the_one_that_ops_use() -> None:
    with Pool(2) as pool:
        for answers in pool.run(make_one_first, timeout=20):
            assert all(answers), answers


def fail_to_set_up(rank: int, world: int, group, step: str) -> list[str]:
    """A step fails on rank 1 alone, once."""
    original = getattr(so.Communicator, step)
    if rank == 1:

        def fail(self: so.Communicator, *args: object) -> NoReturn:
            raise RuntimeError("no descriptors are left")

        setattr(so.Communicator, step, fail)
    begin = time.monotonic()
    try:
        with closing(so.Communicator(group, timeout=TIMEOUT)) as comm:
            answer = comm.fallback
            assert torch.equal(comm.all_gather(torch.ones(2, 2), None), torch.ones(2 * world, 2))
    except RuntimeError as error:
        answer = str(error)
    finally:
        setattr(so.Communicator, step, original)
    seconds = time.monotonic() - begin
    with closing(so.Communicator(group, timeout=TIMEOUT)) as comm:  # and later ones are not out of step
        assert comm.fallback is None
        assert torch.equal(comm.all_gather(torch.ones(2, 2), None), torch.ones(2 * world, 2))
    return [answer, f"{seconds < TIMEOUT}"]


def test_all_ranks_learn_why_one_could_not_set_up() -> None:
    with Pool(3) as pool:
        for answer, in_time in pool.run(fail_to_set_up, "_make", timeout=30):
            assert answer.startswith("could not set up the communicator of group")
            assert answer.endswith("rank 1: no descriptors are left")
            assert in_time == "True"
        for answer, in_time in pool.run(fail_to_set_up, "_attach", timeout=30):
            assert answer == "rank 1: no descriptors are left"
            assert in_time == "True"


def ask_a_fallback(rank: int, world: int, group) -> list[str]:
    original = module.host_id
    module.host_id = lambda: f"host {rank}"
    answers = []
    try:
        with closing(so.Communicator(group, timeout=TIMEOUT)) as comm:
            for question in (comm._set_hook, comm._clear_hook, comm._impl.check, comm._impl.slot_bytes):
                with pytest.raises(RuntimeError) as caught:
                    question()
                answers.append(str(caught.value))
    finally:
        module.host_id = original
    return answers


def test_a_communicator_that_cannot_overlap_says_so_when_asked_to() -> None:
    with Pool(2) as pool:
        for answers in pool.run(ask_a_fallback, timeout=20):
            assert all("runs serial" in answer or "share no memory" in answer for answer in answers), answers


def make_one_badly(rank: int, world: int, group) -> bool:
    """Rank 1 gives a bad argument once, or stays away from one set-up: later ones are in step again."""
    if rank == 1:
        with pytest.raises(ValueError, match="timeout is -1"):
            so.Communicator(group, timeout=-1)
    with closing(so.Communicator(group, timeout=TIMEOUT)):
        pass
    dist.barrier(group)
    if rank == 0:
        with pytest.raises(RuntimeError, match="could not set up the communicator of group"):
            so.Communicator(group, timeout=0.3)
    dist.barrier(group)
    with closing(so.Communicator(group, timeout=TIMEOUT)) as comm:
        return torch.equal(comm.all_gather(torch.ones(2, 2), None), torch.ones(2 * world, 2))


def test_a_set_up_that_failed_on_one_rank_leaves_the_next_ones_in_step() -> None:
    with Pool(2) as pool:
        assert pool.run(make_one_badly, timeout=30) == [True, True]


def meet(rank: int, world: int, group, hello: str) -> list:
    return Meeting(group, "streamoverlap/test", hello, TIMEOUT).hellos


def test_a_process_that_is_new_meets_one_that_is_not() -> None:
    """As after a re-initialisation on the old store: nobody counts how often they have met."""
    with Pool(2) as pool:
        for hello in ("first", "second"):
            assert pool.run(meet, hello) == [[hello] * 2] * 2
        left = pool.run(keys_left)
    assert left == [0, 0], "nothing is left in the store"


def keys_left(rank: int, world: int, group) -> int:
    store = dist.PrefixStore("streamoverlap/test", group.get_group_store())
    return sum(store.check([f"hello/{r}"]) for r in range(world))


DAEMON = """
import os, sys, threading, time, torch, torch.distributed as dist
import streamoverlap as so
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
so.all_gather(torch.ones(2, 2))
if rank == 0:
    threading.Thread(target=so.all_gather, args=(torch.ones(2, 2),), daemon=True).start()
    time.sleep(0.5)
else:
    time.sleep(1.5)
    os._exit(0)
"""


def test_a_program_ends_well_while_a_daemon_thread_waits_in_a_call() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen([sys.executable, "-c", DAEMON, str(rank), port], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 0, errors


def set_up_late(rank: int, world: int, group) -> None:
    """Rank 1 comes back, after the ranks have met, when rank 0 has given up."""
    if rank == 1:

        def late(*args: object) -> Meeting:
            met = Meeting(*args)
            time.sleep(4.5)
            return met

        with patch.object(module, "Meeting", late), pytest.raises(RuntimeError, match="could not set up"):
            so.Communicator(group, timeout=1.5)
    else:
        with pytest.raises(RuntimeError, match="could not set up"):
            so.Communicator(group, timeout=1.5)
        time.sleep(1)
    dist.barrier(group)
    assert torch.equal(so.all_gather(torch.ones(2), group), torch.ones(2 * world))
    assert so.Communicator.of(group, "cpu").fallback is None


def test_a_rank_that_is_late_in_the_set_up_gives_up_with_the_others() -> None:
    with Pool(2) as pool:
        pool.run(set_up_late, timeout=40)


def bad_first_call(rank: int, world: int, group, options: dict, error: type, message: str) -> None:
    own = dist.new_group([0, 1])
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(error, match=message):
            so.all_gather(torch.ones(2), own, **options)
        assert time.monotonic() - begin < 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"plan": "ring"}, TypeError, "plan is a str"),
        ({"timeout": -1}, ValueError, "timeout is -1"),
        ({"async_op": "yes"}, TypeError, "async_op is a str; expected a bool"),
        ({"streams": 3}, TypeError, "streams is a int"),
    ],
)
def test_a_bad_first_call_waits_for_nobody(ranks, options: dict, error: type, message: str) -> None:
    ranks(2).run(bad_first_call, options, error, message)
