"""What a communicator must survive besides calls that go well: threads, fallback, odd but valid tensors."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from ranks import Pool

import streamoverlap as so
import streamoverlap.communicator as module

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
