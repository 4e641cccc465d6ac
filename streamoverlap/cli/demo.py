"""``streamoverlap demo``: an MLP block on several ranks, compared with float64, overlapped and serial."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

import streamoverlap as so
from streamoverlap._C import MAX_WORLD
from streamoverlap.cli import demo_rank
from streamoverlap.cli.demo_rank import Outcome
from streamoverlap.cli.launch import RanksFailed, launch
from streamoverlap.cli.mlp import DTYPES, Problem
from streamoverlap.cli.plan_options import add_plan, add_wire, given_plan
from streamoverlap.cli.terminal import make_console, make_table
from streamoverlap.cli.usage import UsageError, positive
from streamoverlap.spec import ALGORITHMS

_EXAMPLE = """\
examples:
  streamoverlap demo --world 4
  streamoverlap demo --device cpu --world 2 --algorithm ring --chunks 4 --dtype bfloat16
"""

# Defaults: tokens, hidden, ffn, dtype. On GPUs the MLP of Llama-3 70B.
_SIZES = {"cpu": (1024, 512, 1408, "float32"), "cuda": (8192, 8192, 28672, "bfloat16")}
_CPU_WORLD = 4


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="run an MLP block on several ranks, compare and time it",
        description=(
            "Runs a Llama-style MLP block over the bytes of a text file, tensor-parallel, on its own ranks:\n"
            "gate and up as one all_gather_gemm, down as gemm_reduce_scatter. Each rank compares its rows\n"
            "with the block computed by one process in float64, and times the overlapped and serial way."
        ),
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--world", metavar="W", type=positive, help="ranks (4 on CPU, on GPU all there are)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there are two GPUs")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on CPU, bfloat16 on GPU")
    parser.add_argument("--tokens", metavar="M", type=positive, help="rows over all ranks (1024; GPU 8192)")
    parser.add_argument("--hidden", metavar="K", type=positive, help="model width (512; GPU 8192)")
    parser.add_argument("--ffn", metavar="F", type=positive, help="inner width (1408; GPU 28672)")
    parser.add_argument("--text", metavar="FILE", type=Path, help="default: Python's pydoc_data/topics.py")
    chosen = parser.add_argument_group("the plan to run; with none of these, the package's default")
    add_plan(chosen, ALGORITHMS)
    add_wire(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    problem, plan = _problem(args), _plan(args)
    console = make_console()
    status = console.status(f"{problem.world} ranks are at work") if console.is_terminal else nullcontext()
    try:
        with status:
            outcomes = _launch(problem, plan)
    except RanksFailed as error:
        console.print(str(error), style="red")
        return 1
    wrong = [outcome.rank for outcome in outcomes if not _is_right(outcome, problem)]
    if args.json:
        print(json.dumps(_as_json(problem, outcomes, wrong), indent=2))
    else:
        _print(console, problem, outcomes, wrong)
    return 1 if wrong else 0


def _problem(args: argparse.Namespace) -> Problem:
    gpus = torch.cuda.device_count()
    device = args.device or ("cuda" if gpus >= 2 else "cpu")
    if device == "cuda" and gpus == 0:
        raise UsageError("streamoverlap demo: --device is cuda but torch finds no GPU; expected --device cpu here")
    world = args.world or (_CPU_WORLD if device == "cpu" else gpus)
    if world > MAX_WORLD:
        raise UsageError(f"streamoverlap demo: --world is {world}; expected at most {MAX_WORLD}")
    if device == "cuda" and world > gpus:
        raise UsageError(f"streamoverlap demo: --world is {world}; expected at most {gpus}, one rank a GPU")
    tokens, hidden, ffn, dtype = _SIZES[device]
    # A default gives way to any world size; what was asked for does not.
    tokens = args.tokens or _multiple(tokens, world)
    ffn = args.ffn or _multiple(ffn, world)
    for name, value in (("tokens", tokens), ("ffn", ffn)):
        if value % world:
            raise UsageError(f"streamoverlap demo: --{name} is {value}; expected a multiple of --world, {world}")
    text = args.text or _default_text()
    if not text.is_file():
        raise UsageError(f"streamoverlap demo: --text is {text}; expected a file")
    size = text.stat().st_size
    if size < tokens:
        raise UsageError(f"streamoverlap demo: --text {text} has {size} bytes; expected at least --tokens, {tokens}")
    hidden = args.hidden or hidden
    return Problem(world, device, args.dtype or dtype, tokens, hidden, ffn, str(text.resolve()), args.wire)


def _multiple(value: int, world: int) -> int:
    return max(value // world, 1) * world


def _default_text() -> Path:
    return Path(importlib.util.find_spec("pydoc_data.topics").origin)


def _plan(args: argparse.Namespace) -> so.PlanSpec | None:
    try:
        return given_plan(args, "gemm_reduce_scatter")  # which every option is for
    except ValueError as error:
        raise UsageError(f"streamoverlap demo: {error}") from error


def _launch(problem: Problem, plan: so.PlanSpec | None) -> list[Outcome]:
    return launch(demo_rank.run_rank, problem.world, problem, plan)


def _is_right(outcome: Outcome, problem: Problem) -> bool:
    """Both ways; NaN is not."""
    return outcome.relative_error <= problem.bound and outcome.serial_relative_error <= problem.serial_bound


def _print(console: Console, problem: Problem, outcomes: list[Outcome], wrong: list[int]) -> None:
    ranks = f"{problem.world} rank{'s' * (problem.world > 1)}"
    console.print(
        f"Llama-style MLP block on {ranks} ({problem.device}): {problem.tokens} tokens, hidden {problem.hidden}, "
        f"ffn {problem.ffn}, {problem.dtype}" + (f", wire {problem.wire}" if problem.wire else ""),
        style="bold",
    )
    console.print(f"text: {problem.text}")
    numbers = ("rank", "rows checked", "largest error", "relative", "overlapped", "serial")
    table = make_table("rank", "op: plan", *numbers[1:], right=numbers)
    for outcome in outcomes:
        table.add_row(
            str(outcome.rank),
            "\n".join(f"{op}: {_describe(op, plan)}" for op, plan, _ in outcome.plans),
            str(outcome.checked_rows),
            f"{outcome.absolute_error:.2e}",
            f"{outcome.relative_error:.2e}",
            f"{1e3 * outcome.overlapped_seconds:.3f} ms",
            f"{1e3 * outcome.serial_seconds:.3f} ms",
            style="red" if outcome.rank in wrong else None,
        )
    console.print(table)
    for reason in sorted({reason for outcome in outcomes for _, _, reason in outcome.plans}):
        console.print(f"why these plans: {reason}")
    if all(plan.algorithm == "serial" for outcome in outcomes for _, plan, _ in outcome.plans):
        console.print("Nothing was overlapped: every op ran serial.", style="yellow")
    # The block is done when its slowest rank is.
    overlapped = max(outcome.overlapped_seconds for outcome in outcomes)
    serial = max(outcome.serial_seconds for outcome in outcomes)
    console.print(
        f"slowest rank, median: overlapped {1e3 * overlapped:.3f} ms, serial {1e3 * serial:.3f} ms "
        f"({serial / overlapped:.2f} x)"
    )
    if problem.device == "cpu":
        console.print(
            "On CPU the same cores multiply and copy, so these times do not say what is gained on GPUs.",
            style="dim",
        )
    if wrong:
        console.print(
            f"WRONG on rank {', '.join(map(str, wrong))}: relative error above {problem.bound:.1e}",
            style="red",
        )
    else:
        worst = max(outcome.relative_error for outcome in outcomes)
        console.print(
            f"Right: checked rows agree with float64 (error {worst:.1e}, bound {problem.bound:.1e}).",
            style="green",
        )


def _describe(op: str, plan: so.PlanSpec) -> str:
    if plan.algorithm == "serial":
        return "serial"
    text = f"{plan.algorithm}, chunks={plan.chunks}, compute_streams={plan.compute_streams}"
    if op == "gemm_reduce_scatter":
        text += f", reduce={plan.reduce}" + (f", transfer={plan.transfer}" if plan.transfer != "copy" else "")
    return text + (f", taper={plan.taper}" if plan.taper != "none" else "")


def _as_json(problem: Problem, outcomes: list[Outcome], wrong: list[int]) -> dict:
    return {
        **asdict(problem),
        "bound": problem.bound,
        "right": not wrong,
        "ranks": [_rank_as_json(outcome) for outcome in outcomes],
    }


def _rank_as_json(outcome: Outcome) -> dict:
    fields = asdict(outcome)
    fields["plans"] = [{"op": op, **asdict(plan), "reason": reason} for op, plan, reason in outcome.plans]
    # NaN is not JSON.
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
