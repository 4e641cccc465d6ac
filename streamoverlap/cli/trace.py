"""``streamoverlap trace``: runs an op on several ranks, and shows when each part of one call ran."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch

import streamoverlap as so
from streamoverlap._C import MAX_WORLD
from streamoverlap.cli import trace_rank
from streamoverlap.cli.launch import RanksFailed, launch
from streamoverlap.cli.mlp import DTYPES
from streamoverlap.cli.plan_options import add_plan, add_wire, given_plan
from streamoverlap.cli.terminal import make_console, make_table
from streamoverlap.cli.trace_rank import Job, RankTimes
from streamoverlap.cli.usage import UsageError, positive, shape
from streamoverlap.plans import OPERATIONS
from streamoverlap.tracing import validate_path

_EXAMPLE = """\
examples:
  streamoverlap trace --out call.png --out call.json
  streamoverlap trace gemm_reduce_scatter --world 3 --shape 1536,1024,1536 --algorithm ring --chunks 2 --out call.svg
"""

# What is split over the ranks, by operation.
_SPLIT = {
    "all_gather_gemm": "MN",
    "gemm_reduce_scatter": "MK",
    "gemm_all_reduce": "K",
    "all_gather": "M",
    "reduce_scatter": "M",
    "all_reduce": "",
}
_SIZE = 1024  # M, N and K where no shape is given


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "trace",
        help="run an op on several ranks and show when each part of it ran",
        description=(
            "Runs an op some times on ranks of its own, and records of the last call when each op of its plan began\n"
            "and ended on which stream. A .json file is for https://ui.perfetto.dev; a .png or .svg is a picture."
        ),
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "operation",
        metavar="OP",
        nargs="?",
        choices=OPERATIONS,
        default="all_gather_gemm",
        help=f"{', '.join(OPERATIONS)} (default all_gather_gemm)",
    )
    parser.add_argument("--world", metavar="W", type=positive, default=2, help="ranks (2)")
    parser.add_argument(
        "--shape",
        metavar="M,N,K",
        type=shape,
        help=f"of the GEMM of all ranks together; plain collectives move M by K (about {_SIZE} each)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU a rank (default cpu)")
    parser.add_argument("--dtype", choices=DTYPES, help="default float32, on cuda bfloat16")
    parser.add_argument("--graph", action="store_true", help="on cuda: captured in a CUDA graph, and replayed")
    add_plan(parser)
    add_wire(parser)
    parser.add_argument(
        "--out", metavar="FILE", action="append", type=Path, default=[], help=".json, .png or .svg; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    job = _job(args)
    console = make_console()
    status = console.status(f"{job.world} ranks are at work") if console.is_terminal else nullcontext()
    try:
        with status:
            title, ranks = launch(trace_rank.run_rank, job.world, job)[0]
    except RanksFailed as error:
        console.print(str(error), style="red")
        return 1
    if args.json:
        print(json.dumps(_as_json(job, title, ranks), indent=2))
        return 0
    console.print(title, style="bold")
    numbers = ("rank", "time", "GEMM", "exposed", "waits", "waited")
    table = make_table(*numbers, right=numbers)
    for times in ranks:
        table.add_row(
            str(times.rank),
            f"{1e3 * times.seconds:.3f} ms",
            f"{1e3 * times.gemm_seconds:.3f} ms",
            f"{100 * times.exposed_fraction:.1f} %",
            str(times.waits),
            f"{1e3 * times.wait_seconds:.3f} ms",
        )
    console.print(table)
    console.print("exposed: no compute stream multiplies or sums; GEMM, waits: all streams but main together")
    for path in job.files:
        console.print(f"wrote {path}")
    if job.device == "cpu":
        console.print("On CPU the same cores multiply and copy, so these times do not say what GPUs do.", style="dim")
    return 0


def _job(args: argparse.Namespace) -> Job:
    world = args.world
    if world > MAX_WORLD:
        raise UsageError(f"streamoverlap trace: --world is {world}; expected at most {MAX_WORLD}")
    if args.device == "cuda" and world > torch.cuda.device_count():
        raise UsageError(
            f"streamoverlap trace: --device cuda needs a GPU for each of {world} ranks; torch finds "
            f"{torch.cuda.device_count()}"
        )
    if args.graph and args.device != "cuda":
        raise UsageError("streamoverlap trace: --graph is for --device cuda")
    # A default gives way to any world size; what was asked for does not.
    m, n, k = args.shape or [max(_SIZE // world, 1) * world] * 3
    for name, value in (("M", m), ("N", n), ("K", k)):
        if name in _SPLIT[args.operation] and value % world:
            raise UsageError(
                f"streamoverlap trace: {name} of --shape is {value}; expected a multiple of --world, {world}"
            )
    try:
        plan = given_plan(args, args.operation) or so.PlanSpec()
    except ValueError as error:
        raise UsageError(f"streamoverlap trace: {error}") from error
    for path in args.out:
        try:
            validate_path(path)
        except (ValueError, ImportError) as error:
            raise UsageError(f"streamoverlap trace: --out: {error}") from error
    dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    files = tuple(str(path.resolve()) for path in args.out)
    return Job(args.operation, world, m, n, k, dtype, plan, args.wire, args.device, args.graph, files)


def _as_json(job: Job, title: str, ranks: list[RankTimes]) -> dict:
    return {**asdict(job), "title": title, "ranks": [asdict(times) for times in ranks]}
