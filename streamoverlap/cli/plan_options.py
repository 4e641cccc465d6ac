"""Options that say how an op is carried out: the fields of a PlanSpec, and what its partials travel as."""

from __future__ import annotations

import argparse
from dataclasses import fields

from streamoverlap.cli.usage import positive
from streamoverlap.plans import OPERATIONS
from streamoverlap.spec import GATHERS, REDUCTIONS, SUMS_OF_PRODUCTS, TAPERS, TRANSFERS, PlanSpec

_OVERLAPPED = ("direct", "ring")
_SUMS = tuple(operation for operation in OPERATIONS if operation not in GATHERS)
_PACKED = {"dtype": ("float32", "float16", "bfloat16"), "dtype-bytes": (2, 4)}  # what a wire takes, by option


def add_plan(parser: argparse._ActionsContainer, algorithms: tuple[str, ...] = _OVERLAPPED) -> None:
    """None where not given: a default that somebody asks for is refused where it counts for nothing, as others are."""
    parser.add_argument("--algorithm", choices=algorithms, help="how shards travel (direct)")
    parser.add_argument("--chunks", metavar="N", type=positive, help="parts of a shard (1)")
    parser.add_argument("--compute-streams", metavar="N", type=positive, help="GEMMs go round robin over these (1)")
    parser.add_argument("--reduce", choices=REDUCTIONS, help="how partial products are summed (accumulate)")
    parser.add_argument("--transfer", choices=TRANSFERS, help="how partial products get to a peer (copy)")
    parser.add_argument("--taper", choices=TAPERS, help="which chunks have half the rows (none)")


def add_wire(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--wire", choices=("fp8",), help="of ops that sum: partials travel as float8")


def validate_wire(args: argparse.Namespace, operation: str) -> None:
    """Of commands with `--dtype` or `--dtype-bytes`, or with neither.

    Raises:
        ValueError: partials of that operation and dtype cannot travel so.
    """
    if args.wire is None:
        return
    _expect_one_of(f"--wire is {args.wire}", operation, _SUMS)
    for name, packed in _PACKED.items():
        value = getattr(args, name.replace("-", "_"), None)
        if value is not None and value not in packed:
            raise ValueError(f"--{name} is {value} with --wire {args.wire}; expected {_either(packed)}")


def given_plan(args: argparse.Namespace, operation: str) -> PlanSpec | None:
    """What `add_plan` and `add_wire` have read; None where no field was given.

    Raises:
        ValueError: a field is out of range, or counts for nothing with this operation and wire; or as `validate_wire`.
    """
    validate_wire(args, operation)
    given = {field.name: getattr(args, field.name) for field in fields(PlanSpec)}
    given = {name: value for name, value in given.items() if value is not None}
    for name in ("reduce", "transfer"):
        if name in given:
            _expect_one_of(f"--{name} is {given[name]}", operation, SUMS_OF_PRODUCTS)
    if args.wire is not None and operation in SUMS_OF_PRODUCTS:
        _fit_to_wire(given, args.wire)
    return PlanSpec(**given) if given else None


def _fit_to_wire(given: dict, wire: str) -> None:
    """As a call does, whose ring sums where a wire is given; but what it would pass over is refused."""
    if given.get("transfer", "copy") != "copy":
        raise ValueError(f"--transfer is {given['transfer']} with --wire {wire}; expected copy")
    if given.get("algorithm") == "ring" and given.setdefault("reduce", "sum") != "sum":
        raise ValueError(f"--reduce is {given['reduce']} with --algorithm ring and --wire {wire}; expected sum")


def _expect_one_of(given: str, operation: str, allowed: tuple[str, ...]) -> None:
    if operation not in allowed:
        raise ValueError(f"{given} for {operation}; expected only for {_either(allowed)}")


def _either(values: tuple) -> str:
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}"
