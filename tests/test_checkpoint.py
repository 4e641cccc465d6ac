"""Checkpoints by torch.distributed.checkpoint that are loaded by another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import Pools
from torch import nn

import streamoverlap as so

D, F, ROWS = 8, 24, 12


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        options = {"dtype": torch.float64}
        self.norm = nn.LayerNorm(D, **options)
        self.up, self.down = so.ColumnParallelLinear(D, F, **options), so.RowParallelLinear(F, D, **options)
        for parameter in self.norm.parameters():
            parameter.sequence_parallel = True
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)

    def step(self, rank: int, world: int, number: int) -> torch.Tensor:
        """Returns the loss, of all ranks."""
        torch.manual_seed(number)
        x = torch.randn(ROWS, D, dtype=torch.float64).chunk(world)[rank]
        loss = (x + self.down(self.up(self.norm(x)).relu())).square().sum()
        loss.backward()
        so.sync_sequence_parallel_grads(self)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return so.all_reduce(loss.detach()[None])[0]


def save(rank: int, world: int, group, path: Path) -> list[float]:
    """Returns the losses after it."""
    block = Block(1)
    for number in range(3):
        block.step(rank, world, number)
    dcp.save(so.sharded_state_dict(block, block.optimizer), checkpoint_id=path)
    return [block.step(rank, world, number).item() for number in range(3, 6)]


def load(rank: int, world: int, group, path: Path) -> list[float]:
    block = Block(2)
    dcp.load(so.sharded_state_dict(block, block.optimizer), checkpoint_id=path)
    return [block.step(rank, world, number).item() for number in range(3, 6)]


@pytest.mark.parametrize(("saved", "loaded"), [(2, 4), (4, 2), (1, 3)])
def test_training_goes_on_at_another_number_of_ranks(ranks: Pools, tmp_path: Path, saved: int, loaded: int) -> None:
    wanted = ranks(saved).run(save, tmp_path)[0]
    for losses in ranks(loaded).run(load, tmp_path):
        assert losses == pytest.approx(wanted, rel=1e-12)


def late(rank: int, world: int, group) -> None:
    block = Block(1)
    block.norm.weight.grad = torch.ones(D, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="optimizer has no state yet but gradients are there"):
        so.sharded_state_dict(block, block.optimizer)


def test_a_state_made_when_gradients_are_there_is_refused(ranks: Pools) -> None:
    ranks(2).run(late)
