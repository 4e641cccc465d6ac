"""The correctness check: both GEMM ops by every algorithm on real ranks, compared without tolerance."""

from __future__ import annotations

import os
from dataclasses import dataclass

from streamoverlap.doctor.findings import one_line

DTYPES = ("float32", "bfloat16")
_ROUNDS = 3  # with data of their own, so that each slot is used again
_ROWS = {"cpu": 24, "cuda": 512}  # of a rank
_COLUMNS = 40
_DEPTH = 256  # of all ranks: sums of so many products of -1, 0 and 1 are exact in bfloat16, in any order
_RANK_TIMEOUT = 60.0  # seconds that a rank waits for its peers


@dataclass(frozen=True)
class Trial:
    """Calls of one op on one rank, and how many of the elements that they returned are wrong."""

    operation: str
    algorithm: str  # that was asked for
    dtype: str
    wrong: int
    elements: int

    def __str__(self) -> str:
        share = f"{self.wrong} of {self.elements} elements"
        return f"{share} of {self.operation} ({self.algorithm}, {self.dtype}) are wrong"


@dataclass(frozen=True)
class Outcome:
    """What one rank found. `fallback`: why the group runs serial, None where it overlaps; `error`: what stopped it."""

    rank: int
    fallback: str | None
    trials: tuple[Trial, ...]
    error: str = ""


def run_ranks(device: str, world: int) -> list[Outcome] | str:
    """What the ranks found, one for each GPU or as many on the CPU; where some failed, a line for each of those."""
    from streamoverlap.cli.launch import RanksFailed, launch

    try:
        return launch(run_rank, world, device)
    except RanksFailed as error:
        return str(error)


def run_rank(device: str, threads: int) -> Outcome:
    """On a rank."""
    import torch.distributed as dist

    import streamoverlap as so
    from streamoverlap.cli.launch import join_group

    # As in symmetric.py: multicast is not what is checked, and setting it up can put a host's GPUs out of service.
    if device == "cuda":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    # NCCL comes into it at `serial`, which is tried last: where it fails, the rest has been seen.
    join_group(device, threads, _RANK_TIMEOUT)
    communicator = so.Communicator(timeout=_RANK_TIMEOUT, device=device)
    rank = communicator.rank
    trials: list[Trial] = []
    try:
        for plan in (so.PlanSpec("direct", 2, 2), so.PlanSpec("ring", 2, 1, "sum"), so.PlanSpec("serial")):
            for dtype in DTYPES:
                trials += _trials(device, dtype, plan)
    except Exception as error:
        communicator.abort(one_line(error))  # or the peers would wait for this rank
        return Outcome(rank, communicator.fallback, tuple(trials), f"{plan.algorithm}, {dtype}: {one_line(error)}")
    fallback = communicator.fallback
    communicator.close()
    dist.destroy_process_group()
    return Outcome(rank, fallback, tuple(trials))


def _trials(device: str, dtype: str, plan) -> list[Trial]:
    """Collective."""
    import torch.distributed as dist

    import streamoverlap as so

    rank, world = dist.get_rank(), dist.get_world_size()
    wrong, elements = {}, 0
    for seed in range(_ROUNDS):
        everyone = [_operands(device, dtype, world, seed * world + peer) for peer in range(world)]
        x, weight, wide, tall = (tensor.to(device) for tensor in everyone[rank])
        results = {
            "all_gather_gemm": so.all_gather_gemm(x, weight, plan=plan),
            "gemm_reduce_scatter": so.gemm_reduce_scatter(wide, tall, plan=plan),
        }
        for operation, y in results.items():
            wrong[operation] = wrong.get(operation, 0) + count_wrong(operation, y, everyone, rank)
        elements += x.shape[0] * world * _COLUMNS
    shares = {"all_gather_gemm": 1, "gemm_reduce_scatter": world}  # a scatter gives each rank one of its rows' shares
    return [Trial(op, plan.algorithm, dtype, count, elements // shares[op]) for op, count in wrong.items()]


def _operands(device: str, dtype: str, world: int, seed: int) -> list:
    """x and weight of an all_gather_gemm, then of a gemm_reduce_scatter: any rank can make those of any other."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    rows, share = _ROWS[device], _DEPTH // world
    shapes = [(rows, _DEPTH), (_COLUMNS, _DEPTH), (rows * world, share), (_COLUMNS, share)]
    return [torch.randint(-1, 2, shape, generator=generator).to(getattr(torch, dtype)) for shape in shapes]


def count_wrong(operation: str, y, everyone: list, rank: int) -> int:
    """Elements of `y`, the result of `rank`, that are not what the operands of all ranks give; NaN is wrong."""
    import torch

    if operation == "all_gather_gemm":
        expected = torch.cat([x for x, *_ in everyone]).double() @ everyone[rank][1].double().T
    else:
        expected = sum(wide.double() @ tall.double().T for *_, wide, tall in everyone).chunk(len(everyone))[rank]
    if y.shape != expected.shape:
        return expected.numel()
    return int((y.cpu().double() != expected).sum())
