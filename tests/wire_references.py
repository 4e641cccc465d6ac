"""What a sum is whose partials travel as float8: the same steps in plain PyTorch, and how far it may be from exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, product

import torch
from references import Case
from torch import Tensor

import streamoverlap as so
from streamoverlap.spec import TAPERS

SUMS = ("gemm_reduce_scatter", "gemm_all_reduce", "reduce_scatter", "all_reduce")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = (7, 1, 12, 0, 2)
WIDTHS = (1, 5, 16, 520, 1031)  # of rows that travel: short ones share scales, long ones need not divide


def sweep(operation: str, world: int) -> Iterator[Case]:
    numbers = count()
    plans_tried = [so.PlanSpec("serial"), None]
    reductions = ("accumulate", "sum") if "gemm" in operation else ("accumulate",)
    plans_tried += [so.PlanSpec(*each) for each in product(("direct", "ring"), (1, 2, 3, 5), (1, 2), reductions)]
    for plan, lead in product(plans_tried, ROWS):
        i = next(numbers)
        width, multiplies = WIDTHS[i % len(WIDTHS)], "gemm" in operation
        if plan is not None and plan.algorithm != "serial":
            plan = replace(plan, taper=TAPERS[i % 4])
        yield Case(
            operation,
            plan,
            DTYPES[i % 3],
            lead=(lead, 2) if i % 4 == 0 else (lead,),
            k=1 + i % 6 if multiplies else width,
            n=(width,),
            bias=i % 2 == 0,
            column_major=i % 5 < 2,
            copy_input=not multiplies and i % 2 == 0,
            wire="fp8",
            seed=i,
        )


LARGEST = 448  # of float8_e4m3fn
SMALLEST = torch.finfo(torch.float32).tiny  # scale
SHORT = 1024  # elements that share a scale where rows have fewer than half of that


def travelled(partial: Tensor, row: int) -> Tensor:
    """`partial`, a chunk of rows of `row` elements, after its way as float8; float32."""
    length = row if row >= SHORT // 2 else SHORT
    values = partial.float().flatten()
    rows = torch.nn.functional.pad(values, (0, -len(values) % length)).view(-1, length)
    finite = rows.isfinite()
    scale = (torch.where(finite, rows.abs(), 0).amax(1, keepdim=True) / LARGEST).clamp(min=SMALLEST)
    scaled = (rows * scale.reciprocal()).where(finite, torch.nan)
    back = scaled.to(torch.float8_e4m3fn).float() * scale
    return back.flatten()[: len(values)].view(partial.shape)


def quantised_sum(partials: Sequence[Tensor], rank: int, row: int, dtype: torch.dtype) -> Tensor:
    """Of a chunk, as `rank` sums it in a direct plan: its own partial has not travelled."""
    total = torch.zeros(partials[0].shape)
    for r, partial in enumerate(partials):
        total = total + (partial.float() if r == rank else travelled(partial, row))
    return total.to(dtype)


def bound(partials: Sequence[Tensor], rank: int, algorithm: str, dtype: torch.dtype) -> Tensor:
    """How far a sum may be from the exact one, as docs/fp8.md has it, in float64; all of it shares one scale."""
    exact = [partial.double() for partial in partials]
    world = len(exact)
    if algorithm == "direct":
        sent = [partial for r, partial in enumerate(exact) if r != rank]
    else:  # the sum of the ranks after this one, hop by hop, each time with the errors of the hops before
        order = [exact[(rank + 1 + step) % world] for step in range(world - 1)]
        sent = [torch.stack(order[: hops + 1]).sum(0) for hops in range(world - 1)]
    error = torch.zeros_like(exact[0])
    for partial in sent:
        largest = partial.abs() + (error if algorithm == "ring" else 0)
        scale = largest.max() / LARGEST
        error = error + torch.maximum(largest / 16, scale / 1024)
    size = sum(partial.abs() for partial in exact) + error
    return error + world * torch.finfo(dtype).eps * size


def partials_of(operation: str, world: int, dtype: torch.dtype, width: int, spread: float) -> tuple[list, list, list]:
    """x, weight and the partial of every rank; magnitudes of rows, and of what is in them, are apart by `spread`."""
    source = torch.Generator().manual_seed(world * 1000 + width)

    def values(*shape: int) -> torch.Tensor:
        sizes = 10.0 ** (spread * (torch.rand(*shape, generator=source) - 0.5))
        return torch.randn(*shape, generator=source) * sizes

    if "gemm" not in operation:
        x = [(values(6 * world, width) * values(6 * world, 1).abs()).to(dtype) for _ in range(world)]
        return x, [], x
    # Rows with a single element, so that products are exact in any order of adding.
    x = [torch.eye(16)[torch.arange(6 * world) % 16].to(dtype) for _ in range(world)]
    weights = [values(width, 16).to(dtype) for _ in range(world)]
    return x, weights, [a @ w.t() for a, w in zip(x, weights, strict=True)]
