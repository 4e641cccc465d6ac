"""Inputs of one shape, several sets of them, and the results they must give: every rank can make those of any rank."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from factors import Factor, Plain
from shapes import Shape
from torch import Tensor

ROTATION = 3  # sets of inputs: what the last call has read is no longer in the L2 cache
TOLERANCE = 0.02  # of the largest value: bfloat16, summed in other orders
# Sums of integers have this deviation: beyond 256, 8 of them, bfloat16 would round.
_DEVIATION = 32
_X, _WEIGHT, _PARTIAL, _KINDS = range(4)


class Problem:
    """On one rank, sets of x, weight and, of a reduce-scatter, partial products; and of an all-gather all ranks' x."""

    def __init__(self, shape: Shape, kind: Plain, device: torch.device) -> None:
        self.shape, self.kind, self._device = shape, kind, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._x_size, self._weight_size = shape.sizes(self.world)
        self.weights = [self._new(*self._weight_size) for _ in range(ROTATION)]
        if shape.gathers:
            rows, k = self._x_size
            self.gathered = [self._new(rows * self.world, k) for _ in range(ROTATION)]
            self.x = [self._of_rank(whole, self.rank) for whole in self.gathered]
        else:
            self.x = [self._new(*self._x_size) for _ in range(ROTATION)]
            self.partials = [self._new_partial() for _ in range(ROTATION)]
        self.integers = False
        self.fill(integers=False)

    def fill(self, integers: bool) -> None:
        """In place, for graphs. Small integers, whose sums are exact in any order, or what activations look like."""
        self.integers = integers
        for i in range(ROTATION):
            self._draw(self.weights[i], _WEIGHT, i, self.rank)
            if self.shape.gathers:
                for rank in range(self.world):
                    self._draw_values(self._of_rank(self.gathered[i], rank).values, _X, i, rank)
                self._draw_scale(self.gathered[i].scale, _X, i)
            else:
                self._draw(self.x[i], _X, i, self.rank)
                self._draw_partial(self.partials[i], i, self.rank)

    def whole_x(self, i: int) -> Factor:
        """Of the rank's whole product."""
        return self.gathered[i] if self.shape.gathers else self.x[i]

    def sent(self) -> list[Tensor]:
        """What the exchange alone takes."""
        return [self.kind.as_sent(x.values) for x in self.x] if self.shape.gathers else self.partials

    def mm(self, i: int) -> Tensor:
        """One rank's whole product without communication, by PyTorch."""
        return self.kind.mm(self.whole_x(i), self.weights[i])

    def product(self, i: int) -> Tensor:
        """What one rank's whole product is to be."""
        return self.kind.product(self.whole_x(i), self.weights[i])

    def output(self, i: int) -> Tensor:
        """What the op gives on this rank."""
        if self.shape.gathers:
            return self.product(i)
        return self._sum(self._products(i))

    def exchanged(self, i: int) -> Tensor:
        """What the exchange alone gives on this rank."""
        if self.shape.gathers:
            return self.kind.as_sent(self.gathered[i].values)
        partials = (self._draw_partial(self._new_partial(), i, rank) for rank in range(self.world))
        return self._sum(partial.chunk(self.world)[self.rank] for partial in partials)

    def wire_error(self, i: int) -> Tensor:
        """How far `output` may be off where partials travel as float8, each in a row that has its own scale.

        docs/fp8.md: what is sent arrives off by max(|p| / 16, a / 458752), a being the largest of its row. A ring sends
        sums of peers' partials, with the errors of the hops before, so W - 1 of them are off by (17 / 16)^(W - 1) - 1
        at most of what all peers' partials, without signs, come to. And sums are rounded, once a rank at most.
        """
        every = sent = 0.0
        for rank, partial in enumerate(self._products(i)):
            size = partial.float().abs()
            every = every + size
            if rank != self.rank:
                sent = sent + size + size.amax(1, keepdim=True) * (16 / 458752)
        rounded = self.world * torch.finfo(self.kind.results).eps * every
        return ((17 / 16) ** (self.world - 1) - 1) * sent + rounded

    def wrong(self, found: Tensor, expected: Tensor, allowed: Tensor | float = 0.0, exact: bool = False) -> str | None:
        """What is wrong with a result that may be off by `allowed`: where sums are `exact`, as of integers, by no more,
        else by TOLERANCE more."""
        if found.shape != expected.shape:
            return f"its shape is {list(found.shape)}; expected {list(expected.shape)}"
        beyond = (found.float() - expected.float()).abs() - allowed
        if exact or self.integers:
            different = int((~(beyond <= 0)).sum())  # NaN is not
            return f"{different} of {found.numel()} values differ" if different else None
        off = (beyond.max() / expected.abs().max()).item()
        return None if off <= TOLERANCE else f"off by {off:.3g} of the largest value; expected {TOLERANCE} at most"

    def _products(self, i: int) -> Iterator[Tensor]:
        """Partial products of all ranks in turn, the rows that this rank sums."""
        for rank in range(self.world):
            x = self._draw(self._new(*self._x_size), _X, i, rank)
            weight = self._draw(self._new(*self._weight_size), _WEIGHT, i, rank)
            yield self.kind.product(self._of_rank(x, self.rank), weight)

    def _sum(self, partials: Iterator[Tensor]) -> Tensor:
        return sum(partial.float() for partial in partials).to(self.kind.results)

    def _new(self, rows: int, k: int) -> Factor:
        return self.kind.new(rows, k, self._device)

    def _new_partial(self) -> Tensor:
        return torch.empty(self.shape.M, self.shape.N, dtype=self.kind.results, device=self._device)

    def _of_rank(self, whole: Factor, rank: int) -> Factor:
        return whole.part(rank, self.world)

    def _draw(self, factor: Factor, which: int, i: int, rank: int) -> Factor:
        self._draw_values(factor.values, which, i, rank)
        self._draw_scale(factor.scale, which, i)
        return factor

    def _draw_values(self, values: Tensor, which: int, i: int, rank: int) -> None:
        generator = self._generator(which, i, rank)
        drawn = torch.empty_like(values, dtype=self.kind.results)  # float8 cannot be drawn
        if not self.integers:
            values.copy_(drawn.normal_(0.0, self._deviations(which)[0], generator=generator))
            return
        drawn.random_(-1, 2, generator=generator)
        if which == _WEIGHT:  # with zeros, so that sums stay small; two of three factors of x are not 0
            kept = min(1.0, _DEVIATION**2 / self.shape.K * 9 / 4)
            drawn.mul_(torch.empty_like(drawn).bernoulli_(kept, generator=generator))
        values.copy_(drawn)

    def _draw_scale(self, scale: Tensor | None, which: int, i: int) -> None:
        """The same on all ranks, so that their integers have sums that are exact; powers of two for those."""
        if scale is None:
            return
        generator = self._generator(which, i, self.world)
        if self.integers:
            torch.exp2(scale.random_(-1, 2, generator=generator), out=scale)
        else:
            scale.uniform_(0.5, 2.0, generator=generator).mul_(self._deviations(which)[1])

    def _draw_partial(self, partial: Tensor, i: int, rank: int) -> Tensor:
        self._draw_values(partial, _PARTIAL, i, rank)
        return partial

    def _deviations(self, which: int) -> tuple[float, float]:
        if which == _PARTIAL:
            return 1.0, 1.0
        return self.kind.deviations(1 / math.sqrt(self.shape.K) if which == _WEIGHT else 1.0)

    def _generator(self, which: int, i: int, rank: int) -> torch.Generator:
        seed = (i * (self.world + 1) + rank) * _KINDS + which
        return torch.Generator(self._device).manual_seed(seed)
