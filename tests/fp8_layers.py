"""One step of a layer in float8, and what it must give: the same in float64, of the factors that float8 stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import streamoverlap as so
from streamoverlap import _C

K, N, ROWS = 32, 16, 5  # of a rank


def integers(*shape: int, seed: int) -> Tensor:
    """Small ones, with a 7 in every 16 of each row and column: so is every row a layer may make float8 of exact."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, shape, generator=generator).double()
    rows, columns = torch.arange(x.numel() // shape[-1])[:, None], torch.arange(shape[-1])
    return torch.where(((rows - columns) % 16 == 0).view(shape), 7.0, x)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dequantised(x: Tensor) -> Tensor:
    """In float64, of x as the layer has it: `quantise_rows` is checked above."""
    values, scales = _C.quantise_rows(x)
    return values.double() * scales.double()


class Step:
    """One layer, forward and backward, on this rank's part of what all ranks draw alike; and what one process has.

    Args:
        kind: of layer.
        draw: x, the weight and y's gradient.
        quantise: what one process makes of each factor.
    """

    def __init__(
        self,
        kind: type,
        rank: int,
        world: int,
        group: Any,
        draw: Callable[..., Tensor] = integers,
        quantise: Callable[[Tensor], Tensor] = Tensor.double,
        lead: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
        bias: bool = True,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.rank, self.world, self.dtype, self.quantise = rank, world, dtype, quantise
        self.column = kind is so.ColumnParallelLinear
        self.sharded = options.get("sequence_parallel", True)
        sizes = (K, N * world) if self.column else (K * world, N)
        lead = lead or (ROWS * world,)
        self.whole = nn.Linear(*sizes, bias, dtype=dtype)
        with torch.no_grad():
            self.whole.weight.copy_(draw(sizes[1], sizes[0], seed=1))
            if bias:
                self.whole.bias.copy_(draw(sizes[1], seed=2))
        self.whole.to(device)
        self.x, self.g = (
            draw(*lead, size, seed=seed).to(device, dtype) for size, seed in zip(sizes, (3, 4), strict=True)
        )
        self.layer = kind.from_linear(self.whole, group, precision="fp8", **options)

    def part(self, whole: Tensor, dim: int) -> Tensor:
        return whole.chunk(self.world, dim)[self.rank]

    def own(self, whole: Tensor, features: bool) -> Tensor:
        """This rank's part of x or y, of which ranks have their features, or else their tokens."""
        if features:
            return self.part(whole, -1)
        return self.part(whole, 0) if self.sharded else whole

    def run(self, function: Callable | None = None) -> dict[str, Tensor]:
        self.layer.zero_grad()
        x = self.own(self.x, not self.column).clone().requires_grad_()
        y = (function or self.layer)(x)
        y.backward(self.own(self.g, self.column))
        so.sync_sequence_parallel_grads(self.layer)
        found = {"y": y.detach(), "x.grad": x.grad}
        return found | {f"{name}.grad": each.grad for name, each in self.layer.named_parameters()}

    def wanted(self) -> dict[str, Tensor]:
        """In float64. Each rank makes float8 of its features apart, where ranks share out what a product sums over."""
        weight, x, g, quantise = self.whole.weight.detach(), self.x, self.g, self.quantise
        features = x.dim() - 1

        def by_rank(tensor: Tensor, dim: int, split: bool) -> list[Tensor]:
            return [quantise(part) for part in (tensor.chunk(self.world, dim) if split else [tensor])]

        xs, ws = by_rank(x, features, not self.column), by_rank(weight, 1, not self.column)
        y = sum(a @ b.t() for a, b in zip(xs, ws, strict=True))
        gs, ts = by_rank(g, features, self.column), by_rank(weight.t(), 1, self.column)
        dgrad = sum(a @ b.t() for a, b in zip(gs, ts, strict=True))
        wgrad = g.flatten(0, -2).double().t() @ x.flatten(0, -2).double()
        found = {"x.grad": self.own(dgrad, not self.column), "weight.grad": self.part(wgrad, self.layer.shard_dim)}
        if self.whole.bias is not None:
            y = y + self.whole.bias.double()
            of_bias = g.double().flatten(0, -2).sum(0)
            found["bias.grad"] = self.part(of_bias, 0) if self.column else of_bias
        return {"y": self.own(y, self.column)} | found

    def wrong(self, tolerance: float = 0.0, function: Callable | None = None) -> list[str]:
        """What differs, relative to the largest."""
        found, wanted = self.run(function), self.wanted()
        assert found.keys() == wanted.keys()
        return [
            f"{name} is {found[name]} instead of {want}"
            for name, want in wanted.items()
            if found[name].dtype != self.dtype
            or found[name].shape != want.shape
            or not ((found[name].double() - want).abs() <= tolerance * want.abs().max()).all()
        ]


KINDS = (so.ColumnParallelLinear, so.RowParallelLinear)
