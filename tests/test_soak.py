"""A random sequence of everything, as long as one likes, compared with serial integers.

``STREAMOVERLAP_SOAK_SECONDS`` says how long (default 10), ``STREAMOVERLAP_SOAK_SEED`` which sequence: the one that a
failure printed, to see it again.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Pool, subgroups
from references import DTYPES, PLAIN, Case, call, can_be_built, differences, expected, inputs, with_wire

import streamoverlap as so
from streamoverlap.plans import OPERATIONS
from streamoverlap.spec import TAPERS

SECONDS = float(os.environ.get("STREAMOVERLAP_SOAK_SECONDS", "10"))
SEED = int(os.environ.get("STREAMOVERLAP_SOAK_SEED", str(time.time_ns() % 1_000_000)))
WORLD = 3
ROUND = 40  # calls between two looks at the clock
GROUPS = ((0, 1, 2), (0, 2), (0, 1), (1, 2))  # some share ranks; all ranks go through them in one order


@dataclass(frozen=True)
class Step:
    """One call: on which group, how, and when what it gives is looked at."""

    case: Case
    members: tuple[int, ...]
    async_op: bool
    held: int  # calls on any group that are made before this one is waited for
    what: str  # wait, wait from another thread, then, get_future, drop
    slow: tuple[int, ...]  # ranks whose streams are held back


def steps(seed: int) -> list[Step]:
    draw = random.Random(seed)
    made = []
    for number in range(ROUND):
        operation = draw.choice(OPERATIONS)
        plan = so.PlanSpec(
            draw.choice(("direct", "direct", "ring", "ring", "serial")),
            draw.randint(1, 4),
            draw.randint(1, 3),
            draw.choice(("accumulate", "sum")),
            taper=draw.choice(TAPERS),
        )
        stored = replace(plan, transfer="store")
        if can_be_built(stored) and draw.random() < 0.3:
            plan = stored
        case = Case(
            operation,
            draw.choice((None, plan, plan, plan)),
            draw.choice(DTYPES),
            lead=draw.choice(((draw.randint(0, 9),), (draw.randint(1, 4), 2), (draw.choice((40, 1500)),))),
            k=draw.randint(1, 16),
            n=tuple(draw.randint(1, 8) for _ in range(draw.choice((1, 1, 2)) if operation == "all_gather_gemm" else 1)),
            bias=draw.random() < 0.5,
            column_major=draw.random() < 0.5,
            gathered=operation == "all_gather_gemm" and draw.random() < 0.3,
            copy_input=operation in PLAIN and draw.random() < 0.5,
            seed=seed * ROUND + number,
        )
        if draw.random() < 0.3:
            case = with_wire(case)
        members = draw.choice(GROUPS)
        what = draw.choice(("wait", "wait", "thread", "then", "future", "drop"))
        slow = tuple(rank for rank in range(WORLD) if draw.random() < 0.3)
        made.append(Step(case, members, draw.random() < 0.7, draw.randint(0, 4), what, slow))
    return made


class Waiting:
    """A call that was made, and how its result is come by."""

    def __init__(self, step: Step, rank: int, work: so.Work) -> None:
        self.step = step
        self.due = step.held
        self._rank = rank
        self._wrong: list[str] = []
        self._thread: threading.Thread | None = None
        if step.what == "thread":
            self._thread = threading.Thread(target=lambda: self._look(work.wait()))
            self._thread.start()
        elif step.what == "then":
            self._finish = work.then(self._look).wait
        elif step.what == "future":
            self._finish = work.get_future().then(lambda done: self._look(done.value())).wait
        elif step.what == "wait":
            self._finish = lambda: self._look(work.wait(timeout=60))

    def wrong(self) -> list[str]:
        if self._thread is not None:
            self._thread.join(60)
        elif self.step.what != "drop":
            self._finish()
        return self._wrong

    def _look(self, results: list[torch.Tensor]) -> None:
        case = self.step.case
        self._wrong += filter(None, [differences(case, results, expected(case, self._rank, len(self.step.members)))])


def soak(rank: int, world: int, group, seed: int) -> list[str]:
    """One round of calls; returns what is wrong."""
    groups = subgroups(*GROUPS)
    waiting: list[Waiting] = []
    wrong: list[str] = []
    for step in steps(seed):
        if rank not in step.members:
            continue
        on = groups[step.members]
        own, size = dist.get_rank(on), len(step.members)
        comm = so.Communicator.of(on, "cpu")
        if rank in step.slow:
            comm._set_hook(seed=step.case.seed, max_delay_ms=1.5)
        else:
            comm._clear_hook()
        given = inputs(step.case, own, size)
        if step.async_op:
            waiting.append(Waiting(step, own, call(step.case, given, on, async_op=True)))
            del given
        else:
            found = differences(step.case, call(step.case, given, on), expected(step.case, own, size))
            wrong += filter(None, [found])
        for late in waiting:
            late.due -= 1
        for late in [late for late in waiting if late.due < 0]:
            waiting.remove(late)
            wrong += late.wrong()
    for late in waiting:
        wrong += late.wrong()
    return wrong


@pytest.mark.timeout(SECONDS + 120)
def test_soak(capsys) -> None:
    start = time.monotonic()
    rounds = 0
    with capsys.disabled():
        print(f"\nsoak: STREAMOVERLAP_SOAK_SEED={SEED}, {SECONDS:g} s", end=" ", flush=True)
    with Pool(WORLD) as pool:
        while rounds == 0 or time.monotonic() - start < SECONDS:
            # Each round is by itself, so that a failure needs the rounds before it only if it is about what is left.
            seed = SEED + rounds
            for rank, wrong in enumerate(pool.run(soak, seed, timeout=90)):
                assert not wrong, f"STREAMOVERLAP_SOAK_SEED={seed}, rank {rank}: {wrong[0]}"
            rounds += 1
    with capsys.disabled():
        print(f"{rounds * ROUND} calls", end=" ", flush=True)


@dataclass(frozen=True)
class Held:
    descriptors: int
    threads: int
    bytes: int

    @staticmethod
    def now() -> Held:
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Held(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident)


def small_calls(rank: int, world: int, group, count: int) -> tuple[Held, Held]:
    """What the process holds after a tenth of the calls, and after all of them."""
    with closing(so.Communicator(group, timeout=30)) as comm:
        x = torch.full((1,), float(rank))
        before = None
        for number in range(count):
            if number == count // 10:
                before = Held.now()
            if number % 2:
                comm.all_gather(x, None)
            elif number % 100:
                comm.all_gather(x, None, async_op=True)
            else:
                assert comm.all_gather(x, None, async_op=True).then(sum).wait() == sum(range(world))
        assert torch.equal(comm.all_gather(x, None), torch.arange(float(world)))
        return before, Held.now()


@pytest.mark.timeout(300)
def test_100_000_small_calls_leave_memory_descriptors_and_threads_flat(ranks) -> None:
    for before, after in ranks(2).run(small_calls, 100_000, timeout=240):
        assert after.descriptors == before.descriptors
        assert after.threads == before.threads
        assert after.bytes - before.bytes < 4 << 20
