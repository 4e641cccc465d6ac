"""``streamoverlap simulate``: predicted times of all plans of a shape, on GPUs that need not be there."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from streamoverlap import plans
from streamoverlap import simulate as simulator
from streamoverlap.cli.plan_options import add_wire, validate_wire
from streamoverlap.cli.terminal import make_console, make_table
from streamoverlap.cli.usage import UsageError, positive, shape
from streamoverlap.spec import SUMS_OF_PRODUCTS, PlanSpec, spec_of

_EXAMPLE = """\
examples:
  streamoverlap simulate --world 8 --shape 8192,57344,8192
  streamoverlap simulate --world 2 --shape 8192,8192,28672 --op gemm_reduce_scatter --graph
  streamoverlap simulate --calibrate here.json         measure the constants of this machine
"""
_NEEDS = "needs a CUDA GPU, 2 to measure the link between them"


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "simulate",
        help="predict times of plans",
        description=(
            "Simulates the plans of all ranks with the costs of a machine, for any number of ranks, and ranks\n"
            "them. M, N, K are sizes before sharding. What is modelled: docs/simulate.md."
        ),
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--world", metavar="W", type=positive, help="number of ranks")
    parser.add_argument("--shape", metavar="M,N,K", type=shape, help="rows, columns and depth before sharding")
    parser.add_argument("--op", choices=plans.OPERATIONS, default="all_gather_gemm", help="default all_gather_gemm")
    parser.add_argument("--as-tp", metavar="W", type=positive, help="split N or K by this, not by --world")
    parser.add_argument("--dtype-bytes", metavar="B", type=positive, default=2, help="bytes of an element (2)")
    add_wire(parser)
    parser.add_argument("--device", metavar="NAME|FILE", default="h200", help="whose costs: h200, or a file (h200)")
    parser.add_argument("--graph", action="store_true", help="replayed from a CUDA graph: no CPU cost")
    parser.add_argument("--calibrate", metavar="OUT.json", type=Path, help="measure the costs here, write them there")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        costs = simulator.Costs.load(args.device)
    except ValueError as error:
        raise UsageError(f"streamoverlap simulate: --device: {error}") from error
    if args.calibrate is not None:
        return _calibrate(args.calibrate, costs)
    for name, value in (("--world", args.world), ("--shape", args.shape)):
        if value is None:
            raise UsageError(f"streamoverlap simulate: {name} is missing (see streamoverlap simulate --help)")
    quantised = args.wire is not None
    sizes = (args.op, args.world, *args.shape)
    options = {"costs": costs, "as_tp": args.as_tp}
    simulated = {**options, "dtype_bytes": args.dtype_bytes, "graph": args.graph}
    errors = Console(stderr=True)
    status = errors.status("plans are simulated") if errors.is_terminal else nullcontext()
    try:
        validate_wire(args, args.op)
        with status:
            gemm = simulator.gemm_seconds(*sizes, **options)
            ranking = simulator.best(*sizes, **simulated, quantised=quantised)
            rows = [_row(plan, seconds, gemm, sizes, quantised, simulated) for plan, seconds in ranking]
    except ValueError as error:
        raise UsageError(f"streamoverlap simulate: {error}") from error
    if args.json:
        print(json.dumps(_as_json(args, costs, gemm, rows), indent=2))
    else:
        _print(args, costs, gemm, rows)
    return 0


def _row(plan: PlanSpec, seconds: float, gemm: float, sizes: tuple, quantised: bool, simulated: dict) -> dict:
    operation, world, *shape = sizes
    if plan.algorithm == "serial":
        exposed = 1 - gemm / seconds if seconds else 0.0
    else:
        timeline = simulator.simulate(spec_of(operation, plan, world, quantised=quantised), *shape, **simulated)
        exposed = max(timeline.exposed_fraction(rank) for rank in range(world))
    return {
        "algorithm": plan.algorithm,
        "chunks": plan.chunks,
        "compute_streams": plan.compute_streams,
        "reduce": plan.reduce,
        "transfer": plan.transfer,
        "taper": plan.taper,
        "seconds": seconds,
        "over_gemm": seconds / gemm if gemm else None,
        "exposed": exposed,
    }


def _print(args: argparse.Namespace, costs: simulator.Costs, gemm: float, rows: list[dict]) -> None:
    console = make_console()
    m, n, k = args.shape
    issued = "CUDA graph" if args.graph else "issued by the CPU"
    wire = f", wire {args.wire}" if args.wire else ""
    console.print(f"{args.op}, {args.world} ranks, M={m} N={n} K={k}{wire}, {issued}; simulated", style="bold")
    best = rows[0]
    predicted = f"predicted {best['seconds'] * 1e6:,.1f} us, exposed {best['exposed']:.1%}"
    if gemm:
        predicted += f"; GEMM alone {gemm * 1e6:,.1f} us, t/GEMM {best['over_gemm']:.3f}"
    console.print(predicted)
    numbers = ("chunks", "compute streams", "time (us)", "t/GEMM", "exposed")
    ways = ("reduce", "transfer", "taper")
    table = make_table("algorithm", "chunks", "compute streams", *ways, *numbers[2:], right=numbers)
    sums = args.op in SUMS_OF_PRODUCTS
    for row in rows:
        overlaps = row["algorithm"] != "serial"
        table.add_row(
            row["algorithm"],
            str(row["chunks"]) if overlaps else "-",
            str(row["compute_streams"]) if overlaps else "-",
            row["reduce"] if overlaps and sums else "-",
            row["transfer"] if overlaps and sums else "-",
            row["taper"] if overlaps else "-",
            f"{row['seconds'] * 1e6:,.1f}",
            f"{row['over_gemm']:.3f}" if gemm else "-",
            f"{row['exposed']:.1%}",
        )
    console.print(table)
    console.print(f"Constants: {costs.device or args.device}")
    constants = make_table("constant", "value", "source")
    for name, constant in costs.as_json()["constants"].items():
        constants.add_row(name, _value_text(constant["value"], constant["unit"]), constant["source"])
    console.print(constants)


def _value_text(value, unit: str) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {seconds * 1e6:.3g}" for name, seconds in value.items()) + " us"
    if isinstance(value, list | tuple):
        return ", ".join(f"{size / 2**20:g} MiB: {rate / 1e9:.4g}" for size, rate in value) + " GB/s"
    scaled = {"s": (1e6, "us"), "bytes/s": (1e-9, "GB/s"), "FLOP/s": (1e-12, "TFLOP/s")}
    factor, shown = scaled.get(unit, (1, unit))
    return f"{value * factor:.4g} {shown}"


def _as_json(args: argparse.Namespace, costs: simulator.Costs, gemm: float, rows: list[dict]) -> dict:
    m, n, k = args.shape
    return {
        "operation": args.op,
        "world": args.world,
        "M": m,
        "N": n,
        "K": k,
        "as_tp": args.as_tp,
        "dtype_bytes": args.dtype_bytes,
        "graph": args.graph,
        "wire": args.wire,
        "gemm_seconds": gemm,
        "plans": rows,
        "costs": costs.as_json(),
    }


def _calibrate(path: Path, costs: simulator.Costs) -> int:
    import torch

    if torch.cuda.device_count() == 0:
        raise UsageError(f"streamoverlap simulate: --calibrate {_NEEDS}; torch finds none")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"streamoverlap simulate: --calibrate is {path}; expected a file in a folder that exists")
    from streamoverlap.calibrate import calibrate

    measured, kept = calibrate(costs)
    measured.save(path)
    console = make_console()
    console.print(f"{measured.device}: written to {path}", style="green")
    for line in kept:
        console.print(f"kept: {line}")
    return 0
