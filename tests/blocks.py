"""A block of two tensor-parallel layers, for tests of what trains it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import silu


class ResidualMlp(nn.Module):
    """Whoever extends it makes `up`, column-parallel, and `down`, row-parallel."""

    up: nn.Module
    down: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(silu(self.up(x)))

    def train_on(self, function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
        """The output and all gradients."""
        self.zero_grad()
        x = x.clone().requires_grad_()
        y = function(x)
        (y * y).sum().backward()
        return [y.detach(), x.grad, *(parameter.grad.clone() for parameter in self.parameters())]
