"""Plans as data: build, print, check and walk what every rank does on every stream.

Example:
    >>> from streamoverlap import plans
    >>> ranks = plans.build("all_gather_gemm", world=2)
    >>> print(ranks[0])
    >>> plans.check(ranks)
    []
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from streamoverlap._C import Fault, Flag, Op, Plan, Region, Spec, build_all, check, check_groups, check_sequence, prune
from streamoverlap.spec import GATHERS, SUMS_OF_PRODUCTS, TAPERS, TRANSFERS

__all__ = [
    "KINDS",
    "OPERATIONS",
    "STREAMS",
    "Fault",
    "Flag",
    "Op",
    "Plan",
    "Region",
    "Spec",
    "as_tuple",
    "build",
    "build_spec",
    "check",
    "check_groups",
    "check_sequence",
    "spec_options",
    "spec_tuple",
    "variants",
]

OPERATIONS = ("all_gather_gemm", "gemm_reduce_scatter", "all_gather", "reduce_scatter", "all_reduce", "gemm_all_reduce")

# The order of the enumerators in csrc/plan/plan.h, for `as_tuple`.
_ALGORITHMS = ("ring", "direct")
_REDUCTIONS = ("accumulate", "sum")
KINDS = ("gemm", "put", "copy", "quantise", "reduce", "notify", "await", "record", "wait")
STREAMS = ("main", "send", "recv", "compute0", "compute1", "compute2")
_BUFFERS = ("input", "output", "gathered", "slot", "scratch", "copied", "scales", "slot_scales", "packed")
_FLAGS = ("full", "empty")


def build(
    operation: str,
    *,
    world: int,
    algorithm: str = "direct",
    chunks: int = 1,
    compute_streams: int = 1,
    reduce: str = "accumulate",
    keep_gathered: bool = False,
    copy_input: bool = False,
    scaled: bool = False,
    transfer: str = "copy",
    taper: str = "none",
    quantised: bool = False,
    pruned: bool = True,
) -> list[Plan]:
    """The plans of all ranks for one operation.

    Args:
        operation: one of `OPERATIONS`.
        world: ranks, 1 to 64.
        algorithm, chunks, compute_streams, reduce, transfer, taper: as in `streamoverlap.PlanSpec` ("serial" has no
            plan).
        keep_gathered: all_gather_gemm also hands out the gathered input.
        copy_input: all_gather, reduce_scatter and all_reduce copy the input first, so that the caller may write it as
            soon as the call is issued.
        scaled: of products: rows of the input have scales (float8), which go where the rows go.
        quantised: of sums: partials travel in fewer bits, each row with its scale. A ring takes ``reduce="sum"``.
        pruned: without the waits that the checker finds redundant, as the executors run it.

    Raises:
        ValueError: naming the argument, what it was and what was expected.
    """
    numbers, flags = (world, chunks, compute_streams), (keep_gathered, copy_input, scaled)
    spec = Spec(operation, algorithm, reduce, *numbers, *flags, transfer, taper, quantised)
    return build_spec(spec, pruned=pruned)


def build_spec(spec: Spec, *, pruned: bool = True) -> list[Plan]:
    """The plans of all ranks for `spec`; see `build`."""
    ranks = build_all(spec)
    return prune(ranks) if pruned else ranks


def variants(
    world: int, chunks: Sequence[int] = (1, 2, 3, 4), compute_streams: Sequence[int] = (1, 2, 3)
) -> Iterator[Spec]:
    """Every builder with every option at this world size; but `taper`, which changes no plan."""
    for operation, algorithm, parts in product(OPERATIONS, _ALGORITHMS, chunks):
        multiplies = "gemm" in operation
        sums_products = operation in SUMS_OF_PRODUCTS
        # A plain reduce-scatter sums on compute streams too; a plain all-gather uses none.
        streams = (1,) if operation == "all_gather" else compute_streams
        reductions = _REDUCTIONS if sums_products else ("accumulate",)
        keeps = (False, True) if multiplies and not sums_products else (False,)
        copies = (False,) if multiplies else (False, True)
        for count, reduction, keep, copy in product(streams, reductions, keeps, copies):
            yield Spec(operation, algorithm, reduction, world, parts, count, keep, copy)
            if sums_products and (algorithm, reduction) != ("ring", "sum"):
                yield Spec(operation, algorithm, reduction, world, parts, count, transfer="store")
            if operation not in GATHERS and (not sums_products or (algorithm, reduction) != ("ring", "accumulate")):
                yield Spec(operation, algorithm, reduction, world, parts, count, keep, copy, quantised=True)
            # Scales of what is summed never travel: their plans differ from the others in what a GEMM reads alone.
            if multiplies and not keep and (not sums_products or (count, reduction) == (streams[0], "accumulate")):
                yield Spec(operation, algorithm, reduction, world, parts, count, keep, copy, scaled=True)
                if sums_products:
                    yield Spec(operation, algorithm, reduction, world, parts, count, scaled=True, transfer="store")
                    summed = "sum" if algorithm == "ring" else reduction
                    yield Spec(operation, algorithm, summed, world, parts, count, scaled=True, quantised=True)


def spec_options(spec: Spec) -> dict:
    """`spec` as the arguments that `build` takes."""
    return {
        "operation": spec.operation,
        "algorithm": spec.algorithm,
        "reduce": spec.reduction,
        "world": spec.world,
        "chunks": spec.chunks,
        "compute_streams": spec.compute_streams,
        "keep_gathered": spec.keep_gathered,
        "copy_input": spec.copy_input,
        "scaled": spec.scaled,
        "transfer": spec.transfer,
        "taper": spec.taper,
        "quantised": spec.quantised,
    }


def spec_tuple(spec: Spec) -> tuple:
    """`spec` as plain numbers, for the interpreter that lives with the tests."""
    return (
        OPERATIONS.index(spec.operation),
        _ALGORITHMS.index(spec.algorithm),
        _REDUCTIONS.index(spec.reduction),
        spec.world,
        spec.chunks,
        spec.compute_streams,
        spec.keep_gathered,
        spec.copy_input,
        spec.scaled,
        TRANSFERS.index(spec.transfer),
        TAPERS.index(spec.taper),
        spec.quantised,
    )


def as_tuple(plan: Plan) -> tuple:
    """`plan` as plain numbers, for the interpreter that lives with the tests."""
    return (*spec_tuple(plan.spec), plan.rank, plan.events, [_op_tuple(op) for op in plan.ops])


def _op_tuple(op: Op) -> tuple:
    flag = op.flag
    return (
        KINDS.index(op.kind),
        STREAMS.index(op.stream),
        [_region_tuple(region) for region in op.reads],
        [_region_tuple(region) for region in op.writes],
        op.bias,
        (_FLAGS.index(flag.kind), flag.sender, flag.receiver, flag.index),
        op.event,
    )


def _region_tuple(region: Region) -> tuple[int, int, int, int]:
    return (_BUFFERS.index(region.buffer), region.rank, region.shard, region.chunk)
