"""Asynchronous calls whose peers fail, what is told of it, and how survivors go on in the same process."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Pool, quick_to_fail
from references import Case, call, inputs, verify
from test_failures import SLACK, TIMEOUT, Held, state, wait_until

import streamoverlap as so

CASE = Case("gemm_reduce_scatter", so.PlanSpec("ring", chunks=2), lead=(8,), bias=True)


class Log(logging.Handler):
    """What the package's logger was given since this was made."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, str]] = []
        logging.getLogger("streamoverlap").addHandler(self)
        logging.getLogger("streamoverlap").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.levelname, record.getMessage()))

    def of(self, level: str) -> list[str]:
        return [message for name, message in self.records if name == level]


@dataclass(frozen=True)
class Seen:
    """What a survivor saw."""

    kind: str
    message: str
    peer: int
    seconds: float
    report: str
    file: str = ""
    logged: tuple[str, ...] = ()
    before: Held | None = None
    after: Held | None = None


def lose_a_rank(rank: int, world: int, group, victim: int, hook: dict[str, int], folder: str) -> Seen:
    with closing(quick_to_fail(group, TIMEOUT)) as comm:
        verify(CASE, rank, world, comm)
    before = Held.now()
    log = Log()
    path = Path(folder, f"{rank}.txt")
    with closing(quick_to_fail(group, TIMEOUT, report_path=path)) as comm:
        seen = fail(rank, world, comm, hook if rank == victim else None)
    after = Held.now()
    logging.getLogger("streamoverlap").removeHandler(log)
    if rank != victim:
        go_on(rank, [r for r in range(world) if r != victim])
    return replace(seen, file=path.read_text(), logged=tuple(log.of("ERROR")), before=before, after=after)


def fail(rank: int, world: int, comm: so.Communicator, hook: dict[str, int] | None) -> Seen:
    """Two calls are in flight, one of them followed by something, when the victim is lost."""
    verify(CASE, rank, world, comm)
    if hook is not None:
        comm._set_hook(**hook)
    called: list[int] = []
    seen: list[Seen] = []
    start = time.monotonic()

    def guarded(use: Callable[[], object]) -> None:
        try:
            use()
        except so.CommunicatorError as error:
            seconds = time.monotonic() - start
            seen.append(Seen(type(error).__name__, str(error), error.peer, seconds, error.report))

    works: list[so.Work] = []
    for _ in range(2):  # a rank that was stopped in one call cannot make the next
        guarded(lambda: works.append(call(CASE, inputs(CASE, rank, world), comm, async_op=True)))
    works.append(works[-1].then(lambda _: called.append(1)))
    for work in (works[-2], works[-1], works[0]):
        before = len(seen)
        guarded(work.wait)
        if len(seen) > before:
            assert type(work.exception()).__name__ == seen[-1].kind
            assert work.is_completed()
            with pytest.raises(so.CommunicatorError):
                work.result()
    assert seen, "all went well"
    assert bool(called) == (works[-1].exception() is None)
    return seen[0]


def go_on(rank: int, survivors: list[int]) -> None:
    """New groups of the same ranks, one after the other, as a trainer makes that loses one rank after another."""
    for _ in range(3):
        group = dist.new_group(survivors, use_local_synchronization=True)
        own, size = survivors.index(rank), len(survivors)
        for seed in range(10):
            case = Case("gemm_reduce_scatter", so.PlanSpec("direct", chunks=2), lead=(8,), seed=seed)
            call(case, inputs(case, own, size), group, async_op=True)
            verify(case, own, size, group)
        so.Communicator.of(group, "cpu").close()


def check_what_was_seen(seen: Seen, victim: int) -> None:
    assert seen.kind == "PeerTimeoutError", seen
    assert seen.peer == victim, seen
    assert seen.seconds <= TIMEOUT + SLACK, seen
    assert seen.after == seen.before
    assert seen.logged == (seen.report,), "once"
    assert seen.file.startswith(seen.report.rpartition("\n")[0])
    assert "(this rank)" in seen.report
    assert f"rank {victim}: process" in seen.report
    assert "calls issued, last sign of life" in seen.report
    assert "slot" in seen.report
    assert "gemm_reduce_scatter(ring" in seen.report
    assert "waits for" in seen.report, seen.report


KILLS = [(2, 0, 0), (2, 1, 17), (3, 1, 5), (4, 0, 40), (4, 3, 29)]
STOPS = [(2, 0, 5), (3, 2, 20), (4, 1, 33)]


@pytest.mark.parametrize(("world", "victim", "point"), KILLS)
def test_a_killed_rank_fails_what_is_in_flight(tmp_path, world: int, victim: int, point: int) -> None:
    with Pool(world) as pool:
        pool.start(lose_a_rank, victim, {"kill_at": point}, str(tmp_path))
        for seen in pool.finish(30, [r for r in range(world) if r != victim]):
            check_what_was_seen(seen, victim)


@pytest.mark.parametrize(("world", "victim", "point"), STOPS)
def test_a_stopped_rank_that_wakes_harms_nothing(tmp_path, world: int, victim: int, point: int) -> None:
    with Pool(world) as pool:
        pool.start(lose_a_rank, victim, {"stop_at": point}, str(tmp_path))
        wait_until(lambda: state(pool.pid(victim)) == "T", 30)
        time.sleep(TIMEOUT + 1.0)
        os.kill(pool.pid(victim), signal.SIGCONT)  # it writes to slots that survivors have left
        for seen in pool.finish(30, [r for r in range(world) if r != victim]):
            check_what_was_seen(seen, victim)
        [seen] = pool.finish(30, [victim])
        assert seen.kind == "PeerTimeoutError"


def log_once(rank: int, world: int, group) -> list[tuple[str, str]]:
    log = Log()
    with closing(so.Communicator(group, timeout=20)) as comm:
        for _ in range(3):
            comm.all_gather(torch.ones(200_000, 8), None)
        dist.all_reduce(torch.ones(1), group=group)  # all have what they called for
        comm.abort("enough")
        for _ in range(3):
            with pytest.raises(so.CommunicatorError, match="enough"):
                comm.all_gather(torch.ones(2), None)
    logging.getLogger("streamoverlap").removeHandler(log)
    return log.records


def test_set_up_growth_and_abort_are_logged_once(ranks) -> None:
    for rank, records in enumerate(ranks(2).run(log_once)):
        text = [f"{level} {message.splitlines()[0]}" for level, message in records]
        assert [line.split()[0] for line in text] == ["INFO", "INFO", "INFO", "ERROR"], text
        assert "has slots of 2097152 bytes" in text[0], "made with the communicator"
        assert f"is set up: rank {rank} of 2 on cpu" in text[1]
        assert "has slots of 14680064 bytes" in text[2]
        assert "enough" in text[3]


def meet_again(rank: int, world: int, group, folder: str) -> None:
    """A new rendezvous, whose ranks have made different numbers of communicators under the same names."""
    for number in range(3):
        for _ in range(1 + number):
            with closing(so.Communicator(dist.group.WORLD, timeout=10)) as comm:
                verify(CASE, rank, world, comm)
        if number == 1:
            with closing(so.Communicator(dist.group.WORLD, timeout=10)) as comm:
                comm.abort("to be left")
        dist.destroy_process_group()
        store = dist.FileStore(str(Path(folder, str(number))), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def test_a_new_rendezvous_in_the_same_process(tmp_path) -> None:
    with Pool(2) as pool:
        pool.run(meet_again, str(tmp_path))


HOST = """
    import sys, time, torch.distributed as dist
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    time.sleep(600)
"""
CLIENT = """
    import sys, time, datetime, torch, torch.distributed as dist, streamoverlap as so
    rank, port, first = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if not first:
        comm = so.Communicator(None, timeout=3)
    print("ready", flush=True)
    sys.stdin.readline()  # the store is gone now
    start = time.monotonic()
    try:
        if first:
            so.Communicator(None, timeout=3)
        else:
            so_far = comm.all_gather(torch.ones(2), None)  # needs no store
            assert so_far.sum() == 4
            comm.close()
            so.Communicator(None, timeout=3)
    except RuntimeError as error:
        print(f"{time.monotonic() - start:.1f}", str(error).replace("\\n", " "), flush=True)
    import os
    os._exit(0)  # torch itself may wait for the store
"""


@pytest.mark.parametrize("first", [True, False])
def test_a_dead_store_is_an_error_and_no_hang(first: bool) -> None:
    host = subprocess.Popen([sys.executable, "-c", textwrap.dedent(HOST)], stdout=subprocess.PIPE, text=True)
    port = host.stdout.readline().strip()
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CLIENT), str(rank), port, str(first)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for client in clients:
            assert client.stdout.readline().strip() == "ready"
        host.kill()
        host.wait()
        for client in clients:
            client.stdin.write("\n")
            client.stdin.flush()
        for client in clients:
            seconds, _, message = client.stdout.readline().partition(" ")
            assert "could not set up the communicator of group" in message
            assert float(seconds) < 2 * 3 + SLACK
    finally:
        for process in (host, *clients):
            process.kill()
            process.wait()
            process.stdout.close()
