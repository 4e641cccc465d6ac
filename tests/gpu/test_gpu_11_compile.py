"""Compiled blocks in CUDA graphs that Inductor captures, and layers that the user captures, backward passes too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import communicator, new_group
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import silu

import streamoverlap as so

pytestmark = pytest.mark.gpu(1)

D, F, ROWS = 64, 256, 32  # ROWS of a rank
COMPILING = 300.0  # seconds


class Block(nn.Module):
    def __init__(self, group: dist.ProcessGroup, sequence_parallel: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        options = {"group": group, "sequence_parallel": sequence_parallel, "device": "cuda"}
        self.up, self.down = so.ColumnParallelLinear(D, F, **options), so.RowParallelLinear(F, D, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(silu(self.up(x)))

    def train_on(self, function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
        """The output and all gradients."""
        self.zero_grad()
        x = x.clone().requires_grad_()
        y = function(x)
        y.square().mean().backward()
        return [y.detach().clone(), x.grad.clone(), *(parameter.grad.clone() for parameter in self.parameters())]


def inputs(rank: int, step: int, sequence_parallel: bool) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + (rank if sequence_parallel else 0))
    return torch.randn(ROWS, D, generator=generator).cuda()


def equal(got: list[Tensor], wanted: list[Tensor], what: object) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda text: f"{what}: {text}")


def reduce_overhead(rank: int, world: int, group: dist.ProcessGroup, sequence_parallel: bool) -> int:
    """Returns how many graphs Inductor captured."""
    torch._dynamo.reset()
    counters.clear()
    with new_group(world) as own:
        communicator(own)
        block = Block(own, sequence_parallel)
        compiled = torch.compile(block, fullgraph=True, mode="reduce-overhead")
        for step in range(6):
            x = inputs(rank, step, sequence_parallel)
            torch.compiler.cudagraph_mark_step_begin()
            equal(block.train_on(compiled, x), block.train_on(block, x), f"step {step}")
        trees = torch._inductor.cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
        assert counters["inductor"]["cudagraph_skips"] == 0
        captured = next(trees.graph_counter)
        torch.cuda.synchronize()
        del compiled
        torch._dynamo.reset()
        return captured


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_inductor_captures_forward_and_backward(ranks, sequence_parallel: bool) -> None:
    assert all(captured >= 2 for captured in ranks(2).run(reduce_overhead, sequence_parallel, timeout=COMPILING))


def graphed_callables(rank: int, world: int, group: dist.ProcessGroup) -> None:
    with new_group(world) as own:
        communicator(own)
        block, sample = Block(own), inputs(rank, 0, True).requires_grad_()
        so.prepare(block, sample).square().mean().backward()
        eager = [block.train_on(block, inputs(rank, step, True)) for step in range(4)]
        graphed = torch.cuda.make_graphed_callables(block, (sample,))
        for step, wanted in enumerate(eager):
            equal(block.train_on(graphed, inputs(rank, step, True)), wanted, f"step {step}")
        torch.cuda.synchronize()


@pytest.mark.parametrize("world", [2, 4])
def test_a_prepared_layer_is_captured_with_its_backward_pass(ranks, world: int) -> None:
    ranks(world).run(graphed_callables, timeout=COMPILING)


def unprepared_backward(rank: int, world: int, group: dist.ProcessGroup) -> None:
    with new_group(world) as own:
        communicator(own)
        block, sample = Block(own), inputs(rank, 0, True).requires_grad_()
        with pytest.raises(RuntimeError, match=r"was not prepared; call streamoverlap\.prepare"):
            torch.cuda.make_graphed_callables(block, (sample,))


def test_a_layer_that_was_not_prepared_says_so(ranks) -> None:
    ranks(2).run(unprepared_backward, timeout=COMPILING)
