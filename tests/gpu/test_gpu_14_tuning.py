"""Tuning on GPUs: plans and algorithms that were measured, right in every use, found again by other communicators."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from gpu_ranks import communicator, meet, new_group

import streamoverlap as so

pytestmark = pytest.mark.gpu(1)


def inputs(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers, so that sums are exact; the weight column-major."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randint(-2, 3, (1000, 512 * world), generator=generator).chunk(world, 1)[rank]
    weight = torch.randint(-2, 3, (512 * world, 768), generator=generator).chunk(world, 0)[rank]
    return x.to("cuda", torch.bfloat16).contiguous(), weight.to("cuda", torch.bfloat16).contiguous().t()


def product(rank: int, world: int) -> torch.Tensor:
    whole = sum(x.double() @ weight.double().t() for x, weight in (inputs(r, world) for r in range(world)))
    return whole.chunk(world)[rank].to(torch.bfloat16)


def tune(rank: int, world: int, group, folder: str) -> dict:
    os.environ["STREAMOVERLAP_CACHE"] = folder
    x, weight = inputs(rank, world)
    wanted = product(rank, world)
    found: dict = {}
    with new_group(world) as other:
        comm = communicator(other)
        before = so.gemm_reduce_scatter(x, weight, other)
        found["before"] = comm.last_choice.reason
        tuned = so.tune(so.gemm_reduce_scatter, x, weight, other, rounds=2)
        after = so.gemm_reduce_scatter(x, weight, other)
        found.update(tuned=tuned.plan, plan=comm.last_choice.plan, reason=comm.last_choice.reason)
        assert torch.equal(before, wanted) and torch.equal(after, wanted)
        so.prepare(so.gemm_reduce_scatter, x, weight, other)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = so.gemm_reduce_scatter(x, weight, other)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(replayed, wanted)
        found["gemms"] = len(comm._open().measured_gemms())
    with new_group(world) as third:
        comm = communicator(third)
        again = so.gemm_reduce_scatter(x, weight, third)
        assert torch.equal(again, wanted)
        found["again"] = comm.last_choice.plan
        meet(group)
    return found


def test_tuned_calls_are_right_and_found_again(ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(tune, str(tmp_path))
    assert first["before"].startswith("simulated") and first["reason"].startswith("measured")
    assert first["tuned"] == first["plan"] == first["again"] == second["plan"] == second["again"]
    (path,) = tmp_path.glob("*.json")
    document = json.loads(path.read_text())
    assert document["device"] == torch.cuda.get_device_name() and document["versions"]["cublaslt"].isdecimal()
    (plan,) = document["plans"]
    assert plan["layout"] == "column" and plan["operation"] == "gemm_reduce_scatter"
    assert len(document["gemms"]) == first["gemms"] >= 2
    for gemm in document["gemms"]:
        assert 0 <= gemm["algorithm"] < 8 and 0 < gemm["us"] <= gemm["first_us"]


def tune_graph(rank: int, world: int, group, folder: str) -> dict:
    """Tuned in graphs; `graph` is where captured calls run what was found, and eager ones do not."""
    os.environ["STREAMOVERLAP_CACHE"] = folder
    x, weight = inputs(rank, world)
    wanted = product(rank, world)
    with new_group(world) as other:
        comm = communicator(other)
        tuned = so.tune(so.gemm_reduce_scatter, x, weight, other, rounds=2, graph=True)
        eager = so.gemm_reduce_scatter(x, weight, other)
        eager_reason = comm.last_choice.reason
        so.prepare(so.gemm_reduce_scatter, x, weight, other)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = so.gemm_reduce_scatter(x, weight, other)
        captured = comm.last_choice
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(replayed, wanted) and torch.equal(eager, wanted)
        meet(group)
    return {"tuned": tuned.plan, "eager": eager_reason, "plan": captured.plan, "reason": captured.reason}


def test_what_is_tuned_in_graphs_is_for_graphs(ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(tune_graph, str(tmp_path))
    assert first["eager"].startswith("simulated") and first["reason"].startswith("measured")
    assert first["tuned"] == first["plan"] == second["plan"]
    (path,) = tmp_path.glob("*.json")
    (plan,) = json.loads(path.read_text())["plans"]
    assert plan["graph"] is True


def first_use(rank: int, world: int, group, folder: str) -> tuple[str, bool]:
    os.environ["STREAMOVERLAP_CACHE"] = folder
    with new_group(world) as other:
        comm = so.Communicator(other, device="cuda", timeout=40, tuning="first-use")
        x = torch.ones(512, 256, device="cuda", dtype=torch.bfloat16)
        for _ in range(2):
            assert (so.all_gather_gemm(x, x, other) == 256).all()
        return comm.last_choice.reason, (so.all_reduce(x, other) == world).all().item()


def test_first_use(ranks, tmp_path: Path) -> None:
    for reason, right in ranks(2).run(first_use, str(tmp_path)):
        assert reason.startswith("measured") and right
