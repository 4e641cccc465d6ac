"""What is multiplied: x and weight of one dtype, or float8 with scales, and the calls that do it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

FAST_ACCUM = False  # `use_fast_accum`, the same in all columns
_SPREAD = 32.0  # deviation of float8 values: few are subnormal, none is beyond the largest, 448


class Factor(NamedTuple):
    values: Tensor  # [rows, K]
    scale: Tensor | None  # float32, what values are multiplied by: [rows, 1], or one for all

    def part(self, rank: int, world: int) -> Factor:
        """A rank's rows."""
        row_wise = self.scale is not None and self.scale.dim() > 0
        return Factor(self.values.chunk(world)[rank], self.scale.chunk(world)[rank] if row_wise else self.scale)


class Plain:
    """Of one dtype, as results are."""

    scaling: str | None = None

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = self.results = dtype

    def new(self, rows: int, k: int, device: torch.device) -> Factor:
        """Full of zeros."""
        return Factor(torch.zeros(rows, k, dtype=self.dtype, device=device), self._scale(rows, device))

    def _scale(self, rows: int, device: torch.device) -> Tensor | None:
        return None

    def deviations(self, deviation: float) -> tuple[float, float]:
        """What values and their scale are drawn with, whose product is to have this deviation."""
        return deviation, 1.0

    def sent_bytes(self, k: int) -> int:
        """Of a row of x that travels."""
        return k * self.dtype.itemsize

    def as_sent(self, values: Tensor) -> Tensor:
        """As plain collectives take it, bit for bit."""
        return values

    def options(self, x: Factor, weight: Factor) -> dict[str, Any]:
        """Of this package's ops, besides values."""
        return {}

    def mm(self, x: Factor, weight: Factor) -> Tensor:
        """By PyTorch, as it is timed."""
        return torch.mm(x.values, weight.values.t())

    def product(self, x: Factor, weight: Factor) -> Tensor:
        """What others are compared with."""
        return self.mm(x, weight)

    def fused_gather(self, x: Factor, weight: Factor, group: str) -> Tensor:
        """PyTorch's own all-gather and product, on symmetric memory of the group of that name."""
        return torch.ops.symm_mem.fused_all_gather_matmul(x.values, [weight.values.t()], 0, group, return_A=False)[1][0]

    def fused_scatter(self, x: Factor, weight: Factor, group: str) -> Tensor:
        """PyTorch's own product and reduce-scatter."""
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x.values, weight.values.t(), "sum", 0, group)


class Scaled(Plain):
    """Of float8_e4m3fn with scales, "row"- or "tensor"-wise; results are bfloat16, which all row-wise products have."""

    def __init__(self, scaling: str) -> None:
        super().__init__(torch.float8_e4m3fn)
        self.scaling, self.results = scaling, torch.bfloat16

    def _scale(self, rows: int, device: torch.device) -> Tensor:
        return torch.zeros((rows, 1) if self.scaling == "row" else (), device=device)

    def deviations(self, deviation: float) -> tuple[float, float]:
        return _SPREAD, deviation / _SPREAD

    def sent_bytes(self, k: int) -> int:
        return super().sent_bytes(k) + 4  # its scale, tensor-wise too

    def as_sent(self, values: Tensor) -> Tensor:
        return values.view(torch.bfloat16)  # they take no float8

    def options(self, x: Factor, weight: Factor) -> dict[str, Any]:
        scales = {"scale_x": x.scale, "scale_weight": weight.scale}
        return scales | {"out_dtype": self.results, "use_fast_accum": FAST_ACCUM}

    def mm(self, x: Factor, weight: Factor) -> Tensor:
        options = {"out_dtype": self.results, "use_fast_accum": FAST_ACCUM}
        return torch._scaled_mm(x.values, weight.values.t(), x.scale, weight.scale.t(), **options)

    def product(self, x: Factor, weight: Factor) -> Tensor:
        product = torch.mm(x.values.float(), weight.values.float().t())
        return product.mul_(x.scale).mul_(weight.scale.t()).to(self.results)

    def fused_gather(self, x: Factor, weight: Factor, group: str) -> Tensor:
        factors = x.values, [weight.values.t()], x.scale, [weight.scale.t()]
        options = [None], [None], [self.results], [FAST_ACCUM]  # bias, scale of the result, its dtype
        return torch.ops.symm_mem.fused_all_gather_scaled_matmul(*factors, 0, group, *options)[1][0]

    def fused_scatter(self, x: Factor, weight: Factor, group: str) -> Tensor:
        factors = x.values, weight.values.t(), x.scale, weight.scale.t()
        size = [len(x.values), len(weight.values)]
        options = {"out_dtype": self.results, "use_fast_accum": FAST_ACCUM}
        return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(*factors, "sum", 0, 0, group, size, **options)
