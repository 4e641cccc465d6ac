"""On GPUs: what a communicator takes, and that it gives it back."""

from __future__ import annotations

import gc
import os
from contextlib import closing

import pytest
import torch
from gpu_ranks import meet, verify
from references import Case

import streamoverlap as so
from streamoverlap.call import Mode, in_mode

pytestmark = pytest.mark.gpu(1)

MIB = 2**20
ROWS, K = 8192, 8192  # of the gathered x, and of the partial products
WORKSPACE = 32 * MIB  # of cuBLASLt, for each compute stream
ODDS = 12 * MIB  # pages that drivers round up to


def free_bytes(group) -> int:
    """Of this rank's GPU once all ranks have let go of what they no longer use."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    meet(group)
    free = torch.cuda.mem_get_info()[0]
    meet(group)
    return free


def footprint(rank: int, world: int, group) -> dict[str, float]:
    """Bytes a rank that were taken after each step, and the size of a slot."""
    x = torch.ones(ROWS // world, K, dtype=torch.bfloat16, device="cuda")
    weight = torch.ones(1024, K, dtype=torch.bfloat16, device="cuda")
    wide_x = torch.ones(ROWS, 1024, dtype=torch.bfloat16, device="cuda")
    wide_weight = torch.ones(K, 1024, dtype=torch.bfloat16, device="cuda")
    plan = so.PlanSpec("direct")
    gpus = torch.cuda.device_count()
    sharing = sum(r % gpus == rank % gpus for r in range(world))
    taken: dict[str, float] = {}
    for _ in range(2):  # the first round loads kernels, which stay
        start = free_bytes(group)

        def note(step: str, start: int = start) -> None:
            taken[step] = (start - free_bytes(group)) / sharing

        with closing(so.Communicator(group, timeout=40, device="cuda")) as comm:
            note("nothing")
            y = comm.all_gather_gemm(x, [weight], [], False, plan)[0][0]
            assert torch.equal(y, torch.full_like(y, K))
            del y
            note("gather")
            y = comm.gemm_reduce_scatter(wide_x, wide_weight, None, plan)
            assert torch.equal(y, torch.full_like(y, 1024 * world))
            del y
            note("scatter")
            with in_mode(Mode(prepare=True)):
                comm.all_gather_gemm(x, [weight], [], False, plan)
            note("captured")
            taken["slot"] = comm.slot_bytes
        note("closed")
    return taken


def test_slots_are_as_large_as_what_is_exchanged_and_are_given_back(ranks) -> None:
    for taken in ranks(2).run(footprint, timeout=90):
        assert taken["slot"] == 128 * MIB
        assert taken["nothing"] <= ODDS
        slots = 2 * 128 * MIB
        assert slots <= taken["gather"] <= slots + WORKSPACE + ODDS, taken
        scratch = 2 * 128 * MIB
        assert scratch <= taken["scatter"] - taken["gather"] <= scratch + ODDS, taken
        captured = slots + WORKSPACE  # replays may run beside eager calls: they have their own
        assert captured <= taken["captured"] - taken["scatter"] <= captured + ODDS, taken
        assert taken["closed"] <= ODDS, taken


def make_and_close(rank: int, world: int, group, times: int) -> tuple[float, int, int]:
    """How much memory, descriptors and threads have grown by."""

    def use_one() -> None:
        with closing(so.Communicator(group, timeout=40, device="cuda")) as comm:
            verify(Case("gemm_reduce_scatter", so.PlanSpec("ring"), lead=(100_000,), k=2, n=(8,)), rank, world, comm)
            meet(group)

    for _ in range(3):
        use_one()
    memory, held = free_bytes(group), descriptors_and_threads()
    for _ in range(times):
        use_one()
    grown = memory - free_bytes(group)
    return grown, *(after - before for after, before in zip(descriptors_and_threads(), held, strict=True))


def descriptors_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_30_communicators_leave_no_memory_descriptor_or_thread(ranks) -> None:
    for grown, descriptors, threads in ranks(2).run(make_and_close, 30, timeout=90):
        assert grown <= ODDS
        assert descriptors == 0
        assert threads <= 0
