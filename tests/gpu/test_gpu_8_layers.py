"""Layers that exchange alike and multiply by other matrices, as in every transformer block."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import communicator, new_group

import streamoverlap as so

pytestmark = pytest.mark.gpu(1)


def layers_in_a_graph(rank: int, world: int, group) -> bool:
    """One x with two N, one N with two K: captured one after the other, replayed with new data, beside eager calls."""
    with new_group(world) as own:
        communicator(own)
        random = torch.Generator().manual_seed(5)

        def integers(*shape: int) -> torch.Tensor:
            return torch.randint(-2, 3, shape, generator=random).float().cuda()

        x, qkv, up = integers(8, 16), integers(24, 16), integers(40, 16)
        narrow, wide = integers(8 * world, 12), integers(8 * world, 28)
        proj, down = integers(16, 12), integers(16, 28)

        def block() -> list[torch.Tensor]:
            return [
                so.all_gather_gemm(x, qkv, own),
                so.all_gather_gemm(x, up, own),
                so.gemm_reduce_scatter(narrow, proj, own),
                so.gemm_reduce_scatter(wide, down, own),
            ]

        for op, left, right in (
            (so.all_gather_gemm, x, qkv),
            (so.all_gather_gemm, x, up),
            (so.gemm_reduce_scatter, narrow, proj),
            (so.gemm_reduce_scatter, wide, down),
        ):
            so.prepare(op, left, right, own)
        dist.barrier(own)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = block()
        right = True
        for step in range(20):
            x.fill_(step % 5 + rank)
            narrow.fill_(step % 3)
            graph.replay()
            eager = block()
            torch.cuda.synchronize()
            whole = torch.cat([torch.full_like(x, step % 5 + r) for r in range(world)])
            right &= torch.equal(eager[1], whole @ up.t())
            right &= all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True))
        return right


@pytest.mark.parametrize("world", [2, 4])
def test_layers_that_exchange_alike_share_a_graph(ranks, world: int) -> None:
    assert all(ranks(world).run(layers_in_a_graph))


def multiply_under_new_precision_setting(rank: int, world: int, group) -> bool:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with new_group(world) as own:
            communicator(own)
            x = torch.full((4, 8), float(rank + 1), device="cuda")
            y = so.all_gather_gemm(x, torch.ones(3, 8, device="cuda"), own)
            wanted = torch.arange(1.0, world + 1, device="cuda").repeat_interleave(4) * 8
            return torch.equal(y, wanted[:, None].expand(-1, 3))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_torch_s_new_precision_setting_is_understood(ranks) -> None:
    assert all(ranks(2).run(multiply_under_new_precision_setting))
