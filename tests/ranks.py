"""Real ranks for the tests: processes that stay, each a rank of a Gloo group, and run what a test sends them.

A test sends a function of its module, called as ``function(rank, world, group, *args)`` on all ranks at once.
Nothing waits for ever: a rank that has not answered in time is reported with the stacks of its threads, and
its whole pool is replaced, as it is after any failure, since its ranks may be out of step.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Ranks are forked from a server that has imported torch and runs no thread: they start in milliseconds.
_processes = get_context("forkserver")
_processes.set_forkserver_preload(["torch.distributed"])

_STORE_TIMEOUT = timedelta(seconds=60)
_DIED = "the process has died"
_GRACE = 5.0  # seconds that ranks get to end on their own once one of them has failed


def quick_to_fail(group, seconds: float, **options):
    """A communicator whose calls wait so long for peers; its set-up may take what it takes on a busy machine."""
    import streamoverlap as so

    comm = so.Communicator(group, timeout=30.0, **options)
    comm.set_timeout(seconds)
    return comm


class RankError(AssertionError):
    """A function raised on some ranks, or did not end; the message has their tracebacks or stacks."""


@dataclass(frozen=True)
class Answer:
    """What a rank sends back: a value, or the traceback of an exception."""

    value: Any = None
    error: str | None = None


def on_cpu(rank: int, world: int) -> str:
    """What a process does first; returns the backend of its group."""
    return "gloo"


class Pool:
    """`world` processes, the ranks of one group. `begin` is called first in each, and returns the group's backend."""

    def __init__(self, world: int, begin: Callable[[int, int], str] = on_cpu) -> None:
        self.world = world
        self.broken = False
        # Hosted here, so that it outlives any rank that a test kills.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        pipes = [_processes.Pipe() for _ in range(world)]
        self._pipes = [ours for ours, _ in pipes]
        self._workers = [
            _processes.Process(
                target=_work, args=(rank, world, self._store.port, theirs, str(self._log(rank)), begin), daemon=True
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for worker, (_, theirs) in zip(self._workers, pipes, strict=True):
            worker.start()
            theirs.close()

    def pid(self, rank: int) -> int:
        return self._workers[rank].pid

    def run(self, function: Callable, *args: Any, timeout: float = 60.0) -> list[Any]:
        """Calls `function` on all ranks; returns what each returned, in rank order."""
        self.start(function, *args)
        return self.finish(timeout)

    def start(self, function: Callable, *args: Any) -> None:
        for pipe in self._pipes:
            pipe.send((function, args))

    def finish(self, timeout: float, ranks: Sequence[int] | None = None) -> list[Any]:
        """Waits for what `start` started, on `ranks` alone if given (the others need not answer)."""
        waiting = {self._pipes[rank]: rank for rank in (range(self.world) if ranks is None else ranks)}
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in connection.wait(list(waiting), left):
                rank = waiting.pop(pipe)
                answers[rank] = _receive(pipe)
                if answers[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        if waiting or any(answer.error is not None for answer in answers.values()):
            report = self._report(answers, waiting.values(), timeout)
            self.close()
            raise RankError(report)
        return [answers[rank].value for rank in sorted(answers)]

    def close(self) -> None:
        if self.broken:
            return
        self.broken = True
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join(10)
            assert worker.exitcode is not None, f"process {worker.pid} survived SIGKILL"
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.log"

    def _report(self, answers: dict[int, Answer], missing: Sequence[int], timeout: float) -> str:
        for rank in missing:
            if self._workers[rank].is_alive():
                os.kill(self.pid(rank), signal.SIGUSR1)  # writes the stacks of all threads to the log
        time.sleep(0.5 if missing else 0.0)
        parts = [f"rank {rank}: {answer.error}" for rank, answer in sorted(answers.items()) if answer.error is not None]
        died = [rank for rank, answer in answers.items() if answer.error == _DIED]
        for rank in [*missing, *died]:
            self._workers[rank].join(0.5)
            state = "alive" if self._workers[rank].is_alive() else f"exit code {self._workers[rank].exitcode}"
            parts.append(f"rank {rank}: no answer ({state}; limit {timeout} s)\n{self._log(rank).read_text()[-6000:]}")
        return "\n\n".join(parts)


class Pools:
    """A pool for each world size, started when asked for and replaced when broken: ``pools(4).run(...)``."""

    def __init__(self, begin: Callable[[int, int], str] = on_cpu) -> None:
        self._begin = begin
        self._pools: dict[int, Pool] = {}

    def __call__(self, world: int) -> Pool:
        if world not in self._pools or self._pools[world].broken:
            self._pools[world] = Pool(world, self._begin)
        return self._pools[world]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def subgroups(*partition: Sequence[int]) -> dict[tuple[int, ...], dist.ProcessGroup | None]:
    """On a rank: a group for each list of ranks, made once; None where it is no member. Collective."""
    for ranks in map(tuple, partition):
        if ranks not in _groups:
            group = dist.new_group(list(ranks))
            _groups[ranks] = group if dist.get_rank() in ranks else None
    return {tuple(ranks): _groups[tuple(ranks)] for ranks in partition}


def _receive(pipe: connection.Connection) -> Answer:
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return Answer(error=_DIED)


def _work(
    rank: int, world: int, port: int, pipe: connection.Connection, log: str, begin: Callable[[int, int], str]
) -> None:
    with open(log, "w", buffering=1) as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_STORE_TIMEOUT)
    backend = begin(rank, world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_STORE_TIMEOUT)
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, args = pickle.loads(message)
            answer = Answer(value=function(rank, world, dist.group.WORLD, *args))
        except BaseException:
            answer = Answer(error=traceback.format_exc())
        pipe.send(answer)
