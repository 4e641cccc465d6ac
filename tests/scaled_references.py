"""Calls with float8 and scales, and what they must give: the same in float64 from dequantised data of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

import streamoverlap as so

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPERATIONS = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}  # of a rounding, at least


@dataclass(frozen=True)
class Case:
    operation: str
    plan: so.PlanSpec
    x_dtype: torch.dtype = E4M3
    out_dtype: torch.dtype | None = None
    rows: bool = False  # row-wise scales
    lead: tuple[int, ...] = (6,)
    k: int = 16
    n: tuple[int, ...] = (16,)
    bias: bool = False
    transposed: bool = False  # scale_weight as [N, 1]
    integers: bool = True
    seed: int = 0

    @property
    def out(self) -> torch.dtype:
        return self.out_dtype or torch.bfloat16


@dataclass
class Inputs:
    x: Tensor
    weights: list[Tensor]
    biases: list[Tensor]
    scale_x: Tensor
    scale_weights: list[Tensor]

    def cuda(self) -> Inputs:
        def move(tensors: list[Tensor]) -> list[Tensor]:
            return [tensor.cuda() for tensor in tensors]

        return Inputs(
            self.x.cuda(), move(self.weights), move(self.biases), self.scale_x.cuda(), move(self.scale_weights)
        )


def inputs(case: Case, rank: int, world: int) -> Inputs:
    """Integers of -1 to 1 and scales of powers of two, whose sums bfloat16 holds exactly; or what has to be rounded."""
    source = torch.Generator().manual_seed(case.seed * 1009 + rank)
    shared = torch.Generator().manual_seed(case.seed * 1009 + 1008)
    scatters = case.operation == "gemm_reduce_scatter"
    lead = (case.lead[0] * world, *case.lead[1:]) if scatters else case.lead

    def draw(*shape: int, generator: torch.Generator = source) -> Tensor:
        if case.integers:
            return torch.randint(-1, 2, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    def scale(*shape: int, power: int) -> Tensor:
        if case.integers:
            return 2.0 ** (torch.randint(0, 2, shape, generator=source) - power)
        return (
            10.0 ** (8 * torch.rand(shape, generator=source) - 4) if case.out == torch.float32 else draw(*shape).abs()
        )

    x = draw(*lead, case.k).to(case.x_dtype)
    weights = [draw(n, case.k).to(E4M3) for n in case.n]
    generator = source if case.operation == "all_gather_gemm" else shared
    biases = [draw(n, generator=generator).to(case.out) for n in case.n] if case.bias else []
    scale_x = scale(*lead, 1, power=1) if case.rows else scale(1, power=1)
    shapes = [((n, 1) if case.transposed else (1, n)) if case.rows else (1,) for n in case.n]
    return Inputs(x, weights, biases, scale_x, [scale(*shape, power=0) for shape in shapes])


def dequantised(given: Inputs) -> tuple[Tensor, list[Tensor]]:
    def of_weight(weight: Tensor, scale: Tensor) -> Tensor:
        return weight.double() * scale.double().reshape(-1, 1)

    return given.x.double() * given.scale_x.double(), list(map(of_weight, given.weights, given.scale_weights))


def expected(case: Case, rank: int, world: int) -> tuple[list[Tensor], list[Tensor]]:
    """In float64; and the sums of magnitudes, by which errors are bounded."""
    everyone = [inputs(case, r, world) for r in range(world)]
    own = everyone[rank]
    bias = [b.double() for b in own.biases] or [torch.zeros(n, dtype=torch.float64) for n in case.n]
    factors = [dequantised(each) for each in everyone]
    if case.operation == "all_gather_gemm":
        gathered = torch.cat([x for x, _ in factors])
        of_own = list(zip(factors[rank][1], bias, strict=True))
        return [gathered @ w.t() + b for w, b in of_own], [gathered.abs() @ w.abs().t() + b.abs() for w, b in of_own]
    total = sum(x @ w[0].t() for x, w in factors) + bias[0]
    largest = sum(x.abs() @ w[0].abs().t() for x, w in factors) + bias[0].abs()
    if case.operation == "gemm_all_reduce" or not len(total):
        return [total], [largest]
    return [total.chunk(world)[rank]], [largest.chunk(world)[rank]]


def call(case: Case, given: Inputs, group, **options):
    single = len(given.weights) == 1

    def one_or_all(values: list[Tensor]):
        return values[0] if single else values

    return getattr(so, case.operation)(
        given.x,
        one_or_all(given.weights),
        group,
        bias=one_or_all(given.biases) if given.biases else None,
        scale_x=given.scale_x,
        scale_weight=one_or_all(given.scale_weights),
        out_dtype=case.out_dtype,
        plan=case.plan,
        **options,
    )


def flat(result) -> list[Tensor]:
    return list(result) if isinstance(result, list | tuple) else [result]


def wrong_in(case: Case, results: list[Tensor], wanted: tuple[list[Tensor], list[Tensor]], world: int) -> str | None:
    for result, want, largest in zip(results, *wanted, strict=True):
        if result.dtype != case.out or result.shape != want.shape or not result.is_contiguous():
            return f"{case}: {result.dtype} {tuple(result.shape)}; expected {case.out} {tuple(want.shape)}"
        error = (result.double() - want).abs()
        # Partial sums are rounded once a rank at most.
        allowed = torch.zeros_like(want) if case.integers else (world + 1) * (EPSILON[case.out] + 1e-6) * largest
        if (error > allowed).any() or error.isnan().any():
            return f"{case}: off by {error.max()}:\n{result}\n{want}"
    return None


def sweep(operation: str, plans: Sequence[so.PlanSpec], counts: Sequence[int]) -> list[Case]:
    """Every plan with every row count; the rest varies along the way."""
    cases = []
    for i, (plan, rows) in enumerate(product(plans, counts)):
        gathers = operation == "all_gather_gemm"
        given = {
            "x_dtype": (E4M3, E4M3, E5M2)[i % 3],
            "out_dtype": (None, *OUT_DTYPES)[i % 4],
            "rows": i % 2 == 0,
            "lead": (rows, 2) if i % 5 == 0 else (rows,),
            "k": 32 if gathers else 16,
            "n": (16, 32) if gathers and i % 3 == 0 else (16 * (1 + i % 3),),
            "bias": i % 7 < 3,
            "transposed": i % 11 < 5,
            "seed": i,
        }
        cases.append(Case(operation, plan, **given))
    return cases
