"""Ranks on GPUs, and what tests do on one: compare calls, hold back streams, meet the other ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from references import Case, Inputs, call, differences, expected, inputs
from torch import Tensor

import streamoverlap as so

STREAMS = ("main", "send", "recv", "compute0", "compute1", "compute2")
_CYCLES_PER_MS = 1_800_000  # of an H200, about


def on_gpu(rank: int, world: int, connections: int | None = None) -> str:
    """For `ranks.Pool`. `connections`: CUDA_DEVICE_MAX_CONNECTIONS."""
    os.environ.update(
        TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1"
    )
    if connections is not None:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(connections)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.cuda._sleep(1)  # loads it, so that later ones do not block the host
    torch.cuda.synchronize()
    return "cpu:gloo,cuda:nccl" if world <= torch.cuda.device_count() else "gloo"


def algorithms(world: int) -> tuple[str, ...]:
    """All that this machine can run: `serial` is NCCL's, which refuses several ranks a GPU."""
    return ("direct", "ring", "serial") if world <= torch.cuda.device_count() else ("direct", "ring")


def communicator(group: dist.ProcessGroup, timeout: float = 40.0) -> so.Communicator:
    """The group's own, with a timeout that ends a test which hangs."""
    comm = so.Communicator.of(group, "cuda")
    assert comm.fallback is None, comm.fallback
    comm.set_timeout(timeout)
    return comm


@contextmanager
def new_group(world: int) -> Iterator[dist.ProcessGroup]:
    """Another group of all ranks, whose communicator has used nothing yet. Collective."""
    group = dist.new_group(list(range(world)))
    yield group
    so.Communicator.of(group, "cuda").close()


def meet(group: dist.ProcessGroup) -> None:
    """A barrier on the CPU."""
    dist.all_reduce(torch.zeros(1), group=group)


def streams_of(comm: so.Communicator) -> dict[str, torch.cuda.Stream]:
    """The streams of its eager calls by role; main is the current stream."""
    private = {name: torch.cuda.ExternalStream(handle) for name, handle in comm._open().raw_streams().items()}
    assert set(private) == set(STREAMS) - {"main"}
    return {"main": torch.cuda.current_stream(), **private}


def hold_back(stream: torch.cuda.Stream, milliseconds: float) -> None:
    """By a kernel that spins."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(milliseconds * _CYCLES_PER_MS))


def hold_back_in_turn(comm: so.Communicator, rank: int, world: int, number: int, milliseconds: float) -> None:
    """Before call `number`: one stream of one rank, and as calls go on every stream of every rank."""
    victim, stream = divmod(number % (world * len(STREAMS)), len(STREAMS))
    if victim == rank:
        hold_back(streams_of(comm)[STREAMS[stream]], milliseconds)


def on_device(given: Inputs) -> Inputs:
    def move(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.cuda() for tensor in tensors]

    moved = Inputs(given.x.cuda(), move(given.weights), move(given.biases))
    assert [w.stride() for w in moved.weights] == [w.stride() for w in given.weights]
    return moved


def gpu_inputs(case: Case, rank: int, world: int) -> Inputs:
    return on_device(inputs(case, rank, world))


def wrong_in(case: Case, results: list[Tensor], wanted: list[Tensor]) -> str | None:
    """As `references.differences`, of results on the GPU."""
    assert all(result.is_cuda for result in results)
    return differences(case, [result.cpu() for result in results], wanted)


def verify(case: Case, rank: int, world: int, on: dist.ProcessGroup | so.Communicator) -> None:
    """Makes the call and compares it with the exact result. `rank` is within the group."""
    results = call(case, gpu_inputs(case, rank, world), on)
    problem = wrong_in(case, results, expected(case, rank, world))
    assert problem is None, problem


class InFlight:
    """Calls whose results nobody has looked at yet, so that many are under way at once."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._wanted: dict[Case, list[Tensor]] = {}
        self._given: dict[Case, Inputs] = {}
        self._results: list[tuple[Case, list[Tensor]]] = []

    def ready(self, *cases: Case) -> None:
        """Makes inputs and expected results now: done between calls, it would leave none under way."""
        for case in cases:
            if case not in self._given:
                self._given[case] = gpu_inputs(case, self._rank, self._world)
                self._wanted[case] = expected(case, self._rank, self._world)
        torch.cuda.synchronize()

    def make(self, case: Case, on: dist.ProcessGroup | so.Communicator) -> None:
        self._results.append((case, call(case, self._given[case], on)))

    def settle(self) -> list[list[Tensor]]:
        """Waits and compares; returns the results, on the CPU, in the order of calls."""
        torch.cuda.synchronize()
        settled = []
        for case, results in self._results:
            settled.append([result.cpu() for result in results])
            problem = differences(case, settled[-1], self._wanted[case])
            assert problem is None, problem
        self._results.clear()
        return settled


# Functions of float64 that nothing here uses: each launches a kernel of its own, not loaded before it is first used.
_COLD = ["erfinv", "logit", "exp2", "atanh", "asinh", "acosh", "tan", "sinh", "frac", "trunc", "expm1", "log1p"]


class ColdKernels:
    """Made before calls are under way, as memory and modules are; `launch` is then the first use of a kernel."""

    def __init__(self) -> None:
        self._x = torch.full((64,), 0.5, dtype=torch.float64, device="cuda")
        self._y = torch.zeros_like(self._x)
        self._names = iter(_COLD)

    def launch(self) -> float:
        """Seconds that it took."""
        started = time.monotonic()
        getattr(torch, next(self._names))(self._x, out=self._y)
        return time.monotonic() - started
