"""PyTorch's own tensor parallelism, parallelize_module and FSDP2, with the styles of this package."""

from __future__ import annotations

import copy

import pytest
import torch
from ranks import Pools
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import silu

import streamoverlap as so

D, F, S, B = 6, 24, 8, 3


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up, self.down = nn.Linear(D, F, dtype=torch.float64), nn.Linear(F, D, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.up(x)))


def sequences(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(S, B, D, dtype=torch.float64, generator=generator)


def mesh_of(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,))


def full(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def train(rank: int, world: int, group, dim: int | None, plan: so.PlanSpec | None, compiles: bool) -> None:
    """`dim`: along which dimension of [S, B, D] tokens are sharded; None: they are not."""
    layout = Replicate() if dim is None else Shard(dim)
    whole = Whole()
    model = copy.deepcopy(whole)
    styles = {
        "up": so.ColwiseParallel(input_layouts=layout, plan=plan),
        "down": so.RowwiseParallel(output_layouts=layout, plan=plan),
    }
    parallelize_module(model, mesh_of(world), styles)
    assert model.up.weight.placements == (Shard(0),) and model.down.weight.placements == (Shard(1),)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model

    def own(tensor: Tensor) -> Tensor:
        return tensor if dim is None else tensor.chunk(world, dim)[rank]

    for step in range(2):
        x = sequences(step)
        if dim == 1:
            x = torch.cat([x, x[:, :1]], dim=1)  # 4 sequences
        wanted_x, got_x = x.clone().requires_grad_(), own(x).clone().requires_grad_()
        whole.zero_grad()
        model.zero_grad()
        wanted, got = whole(wanted_x), run(got_x)
        (wanted * x).sum().backward()
        (got * own(x)).sum().backward()
        close = {"rtol": 1e-10, "atol": 1e-10}
        torch.testing.assert_close(got, own(wanted), **close)
        torch.testing.assert_close(got_x.grad, own(wanted_x.grad), **close)
        for (name, parameter), other in zip(whole.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(full(other.grad), parameter.grad, **close, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("plan", [None, so.PlanSpec("ring", 2, 2)], ids=["", "ring"])
def test_equal_to_one_process(ranks: Pools, world: int, dim: int | None, plan: so.PlanSpec | None) -> None:
    ranks(world).run(train, dim, plan, False)


def test_compiled(ranks: Pools) -> None:
    ranks(2).run(train, 0, None, True, timeout=200)


def with_fsdp(rank: int, world: int, group) -> None:
    """Two data-parallel halves of two tensor-parallel ranks: FSDP2 takes the mean of the halves' gradients."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    half, place = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    whole = Whole()
    model = copy.deepcopy(whole)
    styles = {"up": so.ColwiseParallel(input_layouts=Shard(0)), "down": so.RowwiseParallel(output_layouts=Shard(0))}
    parallelize_module(model, mesh["tp"], styles)
    for layer in (model.up, model.down, model):
        fully_shard(layer, mesh=mesh["dp"])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (whole, model)]
    for step in range(3):
        batches = [sequences(2 * step), sequences(2 * step + 1)]
        sum(whole(x).square().sum() for x in batches).div(2).backward()
        model(batches[half].chunk(world // 2)[place]).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for parameter, other in zip(whole.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(other.detach()), parameter.detach(), rtol=1e-9, atol=1e-9)


def test_beside_fsdp2(ranks: Pools) -> None:
    ranks(4).run(with_fsdp, timeout=120)


def refusals(rank: int, world: int, group) -> None:
    mesh = mesh_of(world)
    with pytest.raises(ValueError, match=r"out_features is 7; expected a multiple of the mesh's 2 ranks"):
        parallelize_module(nn.Linear(4, 7), mesh, so.ColwiseParallel())
    with pytest.raises(ValueError, match=r"in_features is 7; expected a multiple of the mesh's 2 ranks"):
        parallelize_module(nn.Linear(7, 4), mesh, so.RowwiseParallel())
    with pytest.raises(TypeError, match=r"module is a Embedding; expected a torch\.nn\.Linear"):
        parallelize_module(nn.Embedding(4, 4), mesh, so.ColwiseParallel())
    with pytest.raises(ValueError, match=r"output_layouts is R; expected one of S\(-1\)"):
        so.ColwiseParallel(output_layouts=Replicate())
    with pytest.raises(ValueError, match=r"input_layouts is S\(0\); expected one of S\(-1\)"):
        so.RowwiseParallel(input_layouts=Shard(0))
    with pytest.raises(TypeError, match="input_layouts is a str; expected one Placement"):
        so.ColwiseParallel(input_layouts="shard")


def test_refusals(ranks: Pools) -> None:
    ranks(2).run(refusals)
