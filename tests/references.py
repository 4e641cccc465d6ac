"""Calls with integer data, and what they must give: the same computed in float64 from the data of all ranks.

The integers are so small that every product, partial sum and result is one that the dtype holds exactly
(bfloat16 up to 256, float16 up to 2048), so no order of summing rounds, and results are compared with ``==``,
without tolerance. What travels as float8 is of multiples of 7 that have powers of two between them: each row's scale is
then a power of two, and all its values are ones that float8 holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import streamoverlap as so
from streamoverlap.spec import SUMS_OF_PRODUCTS, TAPERS, TRANSFERS

PLAIN = ("all_gather", "reduce_scatter", "all_reduce")


def can_be_built(plan: so.PlanSpec) -> bool:
    return (plan.algorithm, plan.reduce, plan.transfer) != ("ring", "sum", "store")


def with_wire(case: Case) -> Case:
    """The same with partials that travel as float8, if it has any that can."""
    gathers = case.operation.startswith("all_gather")
    return case if gathers or case.dtype == torch.float64 else replace(case, wire="fp8")


def overlapped_plans(operation: str, chunks: Iterable[int], streams: Iterable[int]) -> Iterator[so.PlanSpec]:
    """Every plan with these; the tapers, which change only how many rows there are of what, vary along the way."""
    sums = operation in SUMS_OF_PRODUCTS
    reductions, transfers = (("accumulate", "sum"), TRANSFERS) if sums else (("accumulate",), ("copy",))
    tapers = cycle((*TAPERS, "none"))
    for options in product(("direct", "ring"), chunks, streams, reductions, transfers):
        plan = so.PlanSpec(*options, taper=next(tapers))
        if can_be_built(plan):
            yield plan


_EXACT = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24, torch.float64: 2**53}
DTYPES = tuple(_EXACT)
_LARGEST = 8  # larger values find nothing more


@dataclass(frozen=True)
class Case:
    """One call, alike on all ranks."""

    operation: str
    plan: so.PlanSpec | None = None
    dtype: torch.dtype = torch.float32
    lead: tuple[int, ...] = (6,)  # rows (or s, b) of a rank: of its result in a scatter, of its x in all else
    k: int = 5
    n: tuple[int, ...] = (4,)  # rows of each weight
    bias: bool = False
    column_major: bool = False
    gathered: bool = False
    copy_input: bool = False  # of the plain collectives; then x is overwritten as soon as the call has been made
    wire: str | None = None  # of operations that sum
    seed: int = 0


@dataclass
class Inputs:
    """What one rank hands in."""

    x: Tensor
    weights: list[Tensor]
    biases: list[Tensor]


def inputs(case: Case, rank: int, world: int) -> Inputs:
    scatters = case.operation.endswith("reduce_scatter")
    multiplies = "gemm" in case.operation
    lead = (case.lead[0] * world, *case.lead[1:]) if scatters else case.lead
    sums = scatters or case.operation.endswith("all_reduce")
    high = _high(case, world if sums else 1)
    source = torch.Generator().manual_seed(case.seed * 1009 + rank)
    shared = torch.Generator().manual_seed(case.seed * 1009 + 1008)  # the bias of a scatter is every rank's

    def integers(shape: Iterable[int], generator: torch.Generator = source) -> Tensor:
        return torch.randint(-high, high + 1, tuple(shape), generator=generator).to(case.dtype)

    if case.wire is None:
        x = integers((*lead, case.k))
        weights = [integers((n, case.k)) for n in case.n] if multiplies else []
    else:
        x, weights = _quantisable(case, rank, world, lead, source)
    if case.column_major:
        weights = [weight.t().contiguous().t() for weight in weights]
    biases = [integers((n,), shared if sums else source) for n in case.n] if multiplies and case.bias else []
    return Inputs(x, weights, biases)


def _quantisable(
    case: Case, rank: int, world: int, lead: tuple[int, ...], source: torch.Generator
) -> tuple[Tensor, list[Tensor]]:
    """Every partial is 0 or +-7, 14 or 28; where sums of some ranks travel, too, all but one rank have 0."""

    def sevens(shape: tuple[int, ...]) -> Tensor:
        sizes = 7 * 2 ** torch.randint(0, 3, shape, generator=source)
        return (sizes * torch.randint(-1, 2, shape, generator=source)).to(case.dtype)

    def is_own(size: int) -> Tensor:
        alone = case.plan is None or case.plan.algorithm == "ring"
        return torch.arange(size) % world == rank if alone else torch.ones(size, dtype=torch.bool)

    if "gemm" not in case.operation:
        x = sevens((*lead, case.k))
        return x * is_own(x.numel()).view(x.shape), []
    x = torch.eye(case.k, dtype=case.dtype)[torch.randint(0, case.k, lead, generator=source)]
    return x, [sevens((n, case.k)) * is_own(n)[:, None] for n in case.n]


def _high(case: Case, ranks: int) -> int:
    """The largest value whose sums the dtype still holds exactly."""
    limit = _EXACT[case.dtype]
    if "gemm" not in case.operation:
        return min(_LARGEST, limit // ranks)
    fitting = [high for high in range(1, _LARGEST + 1) if high * high * case.k * ranks + high <= limit]
    assert fitting, f"{case} does not fit {case.dtype}"
    return fitting[-1]


def expected(case: Case, rank: int, world: int) -> list[Tensor]:
    """The results of `rank`, in float64: outputs, then the gathered input if asked for."""
    everyone = [inputs(case, r, world) for r in range(world)]
    own = everyone[rank]
    bias = [b.double() for b in own.biases] or [0.0] * len(case.n)
    if case.operation.startswith("all_gather"):
        gathered = torch.cat([each.x for each in everyone]).double()
        if case.operation == "all_gather":
            return [gathered]
        outputs = [gathered @ w.double().t() + b for w, b in zip(own.weights, bias, strict=True)]
        return [*outputs, gathered] if case.gathered else outputs
    if case.operation in ("reduce_scatter", "all_reduce"):
        total = sum(each.x.double() for each in everyone)
        if case.operation == "all_reduce":
            return [total]
    else:
        total = sum(each.x.double() @ each.weights[0].double().t() for each in everyone) + bias[0]
        if case.operation == "gemm_all_reduce":
            return [total]
    return [total.chunk(world)[rank] if len(total) else total]


def call(
    case: Case, given: Inputs, on: ProcessGroup | so.Communicator | None, **options: Any
) -> list[Tensor] | so.Work:
    """Makes the call on a group, or on a communicator; the results in the order of `expected`, or a Work of them."""
    if case.operation in PLAIN:
        options["copy_input"] = case.copy_input
    if case.wire is not None:
        options |= {"quantised": True} if isinstance(on, so.Communicator) else {"wire": case.wire}
    found = (_call_communicator if isinstance(on, so.Communicator) else _call_group)(case, given, on, options)
    if case.copy_input:
        given.x.fill_(77)
    return found.with_result(_flat) if isinstance(found, so.Work) else _flat(found)


def _flat(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result if part is not None for tensor in _flat(part)]


def _call_group(case: Case, given: Inputs, on: ProcessGroup | None, options: dict[str, Any]) -> Any:
    if "gemm" not in case.operation:
        return getattr(so, case.operation)(given.x, on, plan=case.plan, **options)
    if case.operation in SUMS_OF_PRODUCTS:
        bias = given.biases[0] if given.biases else None
        return getattr(so, case.operation)(given.x, given.weights[0], on, bias=bias, plan=case.plan, **options)
    single = len(given.weights) == 1
    return so.all_gather_gemm(
        given.x,
        given.weights[0] if single else given.weights,
        on,
        bias=(given.biases[0] if single else given.biases) if given.biases else None,
        return_gathered=case.gathered,
        plan=case.plan,
        **options,
    )


def _call_communicator(case: Case, given: Inputs, comm: so.Communicator, options: dict[str, Any]) -> Any:
    if case.operation == "all_gather_gemm":
        return comm.all_gather_gemm(given.x, given.weights, given.biases, case.gathered, case.plan, **options)
    if case.operation in SUMS_OF_PRODUCTS:
        bias = given.biases[0] if given.biases else None
        return getattr(comm, case.operation)(given.x, given.weights[0], bias, case.plan, **options)
    return getattr(comm, case.operation)(given.x, case.plan, **options)


def differences(case: Case, results: list[Tensor], wanted: list[Tensor]) -> str | None:
    """What is wrong with `results`; None if they are exact."""
    if len(results) != len(wanted):
        return f"{case}: {len(results)} results; expected {len(wanted)}"
    for i, (result, want) in enumerate(zip(results, wanted, strict=True)):
        if result.dtype != case.dtype or result.shape != want.shape or not result.is_contiguous():
            found = f"{result.dtype} {tuple(result.shape)} with strides {result.stride()}"
            return f"{case}: result {i} is {found}; expected {tuple(want.shape)}, row-major"
        wrong = result.double() != want
        if wrong.any():
            rows = sorted({row[0] for row in wrong.nonzero().tolist()})
            return f"{case}: result {i} is wrong in rows {rows[:20]} of {len(want)}:\n{result}\n{want}"
    return None


def verify(case: Case, rank: int, world: int, on: ProcessGroup | so.Communicator | None) -> list[Tensor]:
    """Makes the call on this rank and compares it with the exact result. `rank` is within the group."""
    results = call(case, inputs(case, rank, world), on)
    problem = differences(case, results, expected(case, rank, world))
    assert problem is None, problem
    return results
