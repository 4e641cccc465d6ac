"""Inputs of one shape, several sets of them, and the results they must give: every rank can make those of any rank."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from shapes import Shape
from torch import Tensor

ROTATION = 3  # sets of inputs: what the last call has read is no longer in the L2 cache
TOLERANCE = 0.02  # of the largest value: bfloat16, summed in other orders
# Sums of integers have this deviation: beyond 256, 8 of them, bfloat16 would round.
_DEVIATION = 32
_X, _WEIGHT, _PARTIAL = range(3)


class Problem:
    """On one rank, sets of x, weight and, of a reduce-scatter, partial products; and of an all-gather all ranks' x."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.rank, self.world = shape, dist.get_rank(), dist.get_world_size()
        self._options = {"dtype": dtype, "device": device}
        self._x_size, self._weight_size = shape.sizes(self.world)
        self.weights = [self._new(*self._weight_size) for _ in range(ROTATION)]
        if shape.gathers:
            rows, k = self._x_size
            self.gathered = [self._new(rows * self.world, k) for _ in range(ROTATION)]
            self.x = [self._of_rank(whole, self.rank) for whole in self.gathered]
        else:
            self.x = [self._new(*self._x_size) for _ in range(ROTATION)]
            self.partials = [self._new(shape.M, shape.N) for _ in range(ROTATION)]
        self.integers = False
        self.fill(integers=False)

    def fill(self, integers: bool) -> None:
        """In place, for graphs. Small integers, whose sums are exact in any order, or what activations look like."""
        self.integers = integers
        for i in range(ROTATION):
            self._draw(self.weights[i], _WEIGHT, i, self.rank)
            if self.shape.gathers:
                for rank in range(self.world):
                    self._draw(self._of_rank(self.gathered[i], rank), _X, i, rank)
            else:
                self._draw(self.x[i], _X, i, self.rank)
                self._draw(self.partials[i], _PARTIAL, i, self.rank)

    def inputs(self) -> list[tuple[Tensor, Tensor]]:
        """Sets of x and weight."""
        return list(zip(self.x, self.weights, strict=True))

    def whole_x(self, i: int) -> Tensor:
        """Of the rank's whole product."""
        return self.gathered[i] if self.shape.gathers else self.x[i]

    def product(self, i: int) -> Tensor:
        """One rank's whole product without communication."""
        return torch.mm(self.whole_x(i), self.weights[i].t())

    def output(self, i: int) -> Tensor:
        """What the op gives on this rank."""
        if self.shape.gathers:
            return self.product(i)
        total = 0.0
        for rank in range(self.world):
            x = self._draw(self._new(*self._x_size), _X, i, rank)
            weight = self._draw(self._new(*self._weight_size), _WEIGHT, i, rank)
            total = total + torch.mm(self._of_rank(x, self.rank), weight.t()).float()
        return total.to(self._options["dtype"])

    def exchanged(self, i: int) -> Tensor:
        """What the exchange alone gives on this rank."""
        if self.shape.gathers:
            return self.gathered[i]
        total = 0.0
        for rank in range(self.world):
            partial = self._draw(self._new(self.shape.M, self.shape.N), _PARTIAL, i, rank)
            total = total + self._of_rank(partial, self.rank).float()
        return total.to(self._options["dtype"])

    def wrong(self, found: Tensor, expected: Tensor) -> str | None:
        """What is wrong with a result: integers must be exact, all else within TOLERANCE."""
        if found.shape != expected.shape:
            return f"its shape is {list(found.shape)}; expected {list(expected.shape)}"
        if self.integers:
            different = int((found != expected).sum())
            return f"{different} of {found.numel()} values differ" if different else None
        off = ((found - expected).abs().max() / expected.abs().max()).item()
        return None if off <= TOLERANCE else f"off by {off:.3g} of the largest value; expected {TOLERANCE} at most"

    def _new(self, *size: int) -> Tensor:
        return torch.empty(size, **self._options)

    def _of_rank(self, whole: Tensor, rank: int) -> Tensor:
        return whole.chunk(self.world)[rank]

    def _draw(self, tensor: Tensor, which: int, i: int, rank: int) -> Tensor:
        seed = (i * self.world + rank) * 3 + which
        generator = torch.Generator(tensor.device).manual_seed(seed)
        if not self.integers:
            scale = 1 / math.sqrt(self.shape.K) if which == _WEIGHT else 1.0
            return tensor.normal_(0.0, scale, generator=generator)
        tensor.random_(-1, 2, generator=generator)
        if which == _WEIGHT:  # with zeros, so that sums stay small; two of three factors of x are not 0
            kept = min(1.0, _DEVIATION**2 / self.shape.K * 9 / 4)
            tensor.mul_(torch.empty_like(tensor).bernoulli_(kept, generator=generator))
        return tensor
