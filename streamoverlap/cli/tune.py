"""``streamoverlap tune``: measures plans for shapes ahead of time, so that later runs take the fastest."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from streamoverlap import simulate
from streamoverlap._C import MAX_WORLD
from streamoverlap.cli import tune_rank
from streamoverlap.cli.launch import RanksFailed, launch
from streamoverlap.cli.mlp import DTYPES
from streamoverlap.cli.plan_options import add_wire, validate_wire
from streamoverlap.cli.terminal import make_console, make_table
from streamoverlap.cli.tune_rank import Found, Job, Shape
from streamoverlap.cli.usage import UsageError, positive, shape
from streamoverlap.plans import OPERATIONS

_EXAMPLE = """\
examples:
  streamoverlap tune --device cuda --world 2 --shapes benchmarks/shapes.json --set core
  streamoverlap tune --world 2 --op gemm_reduce_scatter --shape 512,256,512
"""


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "tune",
        help="measure plans for shapes, and keep the fastest for later runs",
        description=(
            "Measures, on ranks of its own, the plans worth trying and serial, and on GPUs cuBLASLt's algorithms.\n"
            "What is found goes to a file in $STREAMOVERLAP_CACHE, or ~/.cache/streamoverlap: runs on CUDA take it."
        ),
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--world", metavar="W", type=positive, default=2, help="ranks (2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU a rank (default cpu)")
    parser.add_argument("--dtype", choices=DTYPES, help="default float32, on cuda bfloat16")
    parser.add_argument("--op", choices=OPERATIONS, default="all_gather_gemm", help="of --shape (all_gather_gemm)")
    parser.add_argument("--shape", metavar="M,N,K", type=shape, help="rows, columns and depth before sharding")
    parser.add_argument("--shapes", metavar="FILE", type=Path, help="JSON: a list of shapes, or lists by name")
    parser.add_argument("--set", metavar="NAME", help="which list of the file (all)")
    add_wire(parser)
    parser.add_argument("--rounds", metavar="N", type=positive, default=5, help="times each plan is timed (5)")
    parser.add_argument("--graph", action="store_true", help="in CUDA graphs, for calls that are captured (cuda)")
    parser.add_argument("--dry-run", action="store_true", help="measure and print, keep nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    job = _job(args)
    console = make_console()
    try:
        found, path = launch(tune_rank.run_rank, job.world, job)[0]
    except RanksFailed as error:
        console.print(str(error), style="red")
        return 1
    kept = path if job.save else None
    if args.json:
        about = {"file": kept, "world": job.world, "wire": job.wire, "graph": job.graph}
        print(json.dumps({**about, "found": [asdict(each) for each in found]}, indent=2))
        return 0
    if job.wire is not None:
        console.print(f"wire {job.wire}", style="bold")
    _print(console, found)
    console.print(f"kept in {kept}" if kept else "nothing was kept")
    if job.device == "cpu":
        console.print('On the CPU a communicator takes what was measured with tuning="table" alone.', style="dim")
    return 0


def _print(console, found: list[Found]) -> None:
    numbers = ("M", "N", "K", "time", "serial", "serial/time", "tried")
    table = make_table("shape", "op", *numbers[:3], "plan", *numbers[3:], right=numbers)
    for each in found:
        sizes = (str(size) for size in (each.shape.m, each.shape.n, each.shape.k))
        serial = each.serial_seconds
        table.add_row(
            each.shape.name,
            each.shape.operation,
            *sizes,
            each.plan.to_text() if each.plan.algorithm != "serial" else "serial",
            f"{1e6 * each.seconds:,.1f} us",
            f"{1e6 * serial:,.1f} us" if serial is not None else "-",
            f"{serial / each.seconds:.2f}" if serial is not None else "-",
            str(each.tried),
        )
    console.print(table)


def _job(args: argparse.Namespace) -> Job:
    if args.world > MAX_WORLD:
        raise UsageError(f"streamoverlap tune: --world is {args.world}; expected at most {MAX_WORLD}")
    if args.device == "cuda" and args.world > torch.cuda.device_count():
        raise UsageError(
            f"streamoverlap tune: --device cuda needs a GPU for each of {args.world} ranks; torch finds "
            f"{torch.cuda.device_count()}"
        )
    if args.graph and args.device != "cuda":
        raise UsageError("streamoverlap tune: --graph needs --device cuda: there are no CUDA graphs on the CPU")
    if (args.shape is None) == (args.shapes is None):
        raise UsageError("streamoverlap tune: expected one of --shape and --shapes")
    if args.shape is not None:
        shapes = [Shape("-", args.op, *args.shape, args.world)]
    else:
        try:
            shapes = _read(args.shapes, args.set, args.world)
        except (OSError, KeyError, TypeError, ValueError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise UsageError(f"streamoverlap tune: --shapes {args.shapes}: {reason}") from error
    for each in shapes:
        try:
            validate_wire(args, each.operation)
            simulate.local_problem(each.operation, args.world, each.m, each.n, each.k, each.as_tp)
        except ValueError as error:
            raise UsageError(f"streamoverlap tune: shape {each.name}: {error}") from error
    dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    return Job(args.world, args.device, dtype, args.rounds, tuple(shapes), args.wire, args.graph, not args.dry_run)


def _read(path: Path, chosen: str | None, world: int) -> list[Shape]:
    document = json.loads(path.read_text())
    if isinstance(document, dict):
        lists = {name: entries for name, entries in document.items() if isinstance(entries, list)}
        if chosen is not None and chosen not in lists:
            raise ValueError(f"has no list {chosen!r}; expected one of {', '.join(lists)}")
        entries = lists[chosen] if chosen is not None else [entry for each in lists.values() for entry in each]
    elif chosen is not None:
        raise ValueError("is one list; expected none of --set")
    else:
        entries = document
    return [
        Shape(entry.get("name", "-"), entry["op"], entry["M"], entry["N"], entry["K"], entry.get("as_tp", world))
        for entry in entries
    ]
