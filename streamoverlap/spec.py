"""How an operation is carried out: the caller's choice, and the default where there is none."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from streamoverlap import _C

ALGORITHMS = ("direct", "ring", "serial")
REDUCTIONS = ("accumulate", "sum")
TRANSFERS = ("copy", "store")
TAPERS = ("none", "first", "last", "both")
GATHERS = ("all_gather_gemm", "all_gather")  # the operations whose x is a shard of what is exchanged
SUMS_OF_PRODUCTS = ("gemm_reduce_scatter", "gemm_all_reduce")  # those that PlanSpec.reduce and transfer are for


def _expect_one_of(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{field} is {value!r}; expected one of {', '.join(map(repr, allowed))}")


def _expect_range(field: str, value: object, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise ValueError(f"{field} is {value!r}; expected an integer from 1 to {high}")


@dataclass(frozen=True)
class PlanSpec:
    """A way to carry out an operation. All ranks of a group must use the same one.

    Args:
        algorithm: ``"direct"`` (each shard goes straight to its user), ``"ring"`` (shards travel from neighbour to
            neighbour) or ``"serial"`` (the group's own collective, then one GEMM: nothing is overlapped).
        chunks: parts that each shard is exchanged and multiplied in, 1 to 64. Rows need not divide.
        compute_streams: GEMMs go round robin over this many streams, 1 to 3.
        reduce: how partial products are summed: ``"accumulate"`` folds a received partial into the next GEMM,
            ``"sum"`` adds products in float32 (float64 for float64), rounded once (``"direct"``) or once a hop
            (``"ring"``). Partial products travel in the dtype of the result. For gemm_reduce_scatter and
            gemm_all_reduce; ignored elsewhere. With ``wire="fp8"`` a ``"ring"`` sums in any case.
        transfer: how a partial product gets to the peer that needs it: ``"copy"``, by the copy engine, or ``"store"``,
            by the GEMM itself. For gemm_reduce_scatter and gemm_all_reduce; ignored elsewhere, and with ``wire="fp8"``,
            which copies. A ring stores only where it accumulates.
        taper: which chunks of a shard have half the rows of the others: ``"none"``, the ``"first"``, the ``"last"`` or
            ``"both"``. What is sent first or arrives last hides behind nothing, so it had better be small.

    Raises:
        ValueError: a field is out of range; the message names it.
    """

    algorithm: str = "direct"
    chunks: int = 1
    compute_streams: int = 1
    reduce: str = "accumulate"
    transfer: str = "copy"
    taper: str = "none"

    def __post_init__(self) -> None:
        _expect_one_of("algorithm", self.algorithm, ALGORITHMS)
        _expect_one_of("reduce", self.reduce, REDUCTIONS)
        _expect_one_of("transfer", self.transfer, TRANSFERS)
        _expect_one_of("taper", self.taper, TAPERS)
        _expect_range("chunks", self.chunks, _C.MAX_CHUNKS)
        _expect_range("compute_streams", self.compute_streams, _C.MAX_COMPUTE_STREAMS)

    def to_text(self) -> str:
        """As registered ops take it, which know no class of this package."""
        text = f"{self.algorithm},{self.chunks},{self.compute_streams},{self.reduce}"
        if (self.transfer, self.taper) != ("copy", "none"):  # else as versions without them wrote it
            text += f",{self.transfer},{self.taper}"
        return text


def text_of(plan: PlanSpec | None) -> str:
    """What `plan_of_text` gives the plan of."""
    if plan is None:
        return ""
    validate_plan(plan)
    return plan.to_text()


@lru_cache
def plan_of_text(text: str) -> PlanSpec | None:
    """The PlanSpec that `PlanSpec.to_text` gave; None, the default, for an empty text."""
    if not text:
        return None
    match = re.fullmatch(r"(\w+),(\d+),(\d+),(\w+)(?:,(\w+),(\w+))?", text)
    if match is None:
        raise ValueError(f"plan is {text!r}; expected '' or the text of a PlanSpec, such as {PlanSpec().to_text()!r}")
    algorithm, chunks, compute_streams, *ways = filter(None, match.groups())
    return PlanSpec(algorithm, int(chunks), int(compute_streams), *ways)


def is_quantised(wire: object) -> bool:
    """Of the argument `wire` of an op."""
    if wire is not None and not (isinstance(wire, str) and wire == "fp8"):
        raise ValueError(f"wire is {wire!r}; expected 'fp8' or None")
    return wire is not None


@lru_cache(maxsize=1024)
def spec_of(
    operation: str,
    plan: PlanSpec,
    world: int,
    keep_gathered: bool = False,
    copy_input: bool = False,
    scaled: bool = False,
    quantised: bool = False,
) -> _C.Spec:
    """The plan of an overlapped PlanSpec; what it ignores is the same for all, so that there is no mismatch either.

    Raises:
        ValueError: there is no such plan, such as one whose ring sums and stores.
    """
    reduce, transfer = "accumulate", "copy"
    if operation in SUMS_OF_PRODUCTS:
        reduce, transfer = plan.reduce, plan.transfer
        if quantised:
            reduce, transfer = "sum" if plan.algorithm == "ring" else reduce, "copy"
    flags, ways = (keep_gathered, copy_input, scaled), (transfer, plan.taper, quantised)
    _C.build_all(_C.Spec(operation, plan.algorithm, reduce, 1, 1, 1, *flags, *ways))  # the smallest: it is to refuse
    return _C.Spec(operation, plan.algorithm, reduce, world, plan.chunks, plan.compute_streams, *flags, *ways)


def of_wire(quantised: bool) -> dict[str, bool]:
    """As keyword arguments of what also makes calls that know no wire."""
    return {"quantised": True} if quantised else {}


class Choice(NamedTuple):
    """What ran, and why; the seconds that the simulator predicts for it, or that it was measured to take, if known."""

    plan: PlanSpec
    reason: str
    predicted: float | None = None
    measured: float | None = None


DEFAULT = Choice(PlanSpec(), "default: one chunk, straight to its user")
_SERIAL = PlanSpec(algorithm="serial")


def given_or_forced(plan: PlanSpec | None, fallback: str | None) -> Choice | None:
    """What was asked for, unless the group cannot overlap at all (`fallback` says why); None: it is free."""
    if fallback is not None:
        return Choice(_SERIAL, fallback)
    if plan is None:
        return None
    validate_plan(plan)
    return Choice(plan, "given")


def validate_plan(plan: object, *operations: str) -> None:
    """Raises what a call of any of `operations` raises of this plan."""
    if not isinstance(plan, PlanSpec):
        raise TypeError(f"plan is a {type(plan).__name__}; expected streamoverlap.PlanSpec or None")
    if plan.algorithm != "serial":
        for operation in operations:
            spec_of(operation, plan, world=1)
