"""``streamoverlap plan``: prints or draws the plan of one rank, for a person to follow, with the checker's verdict."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from streamoverlap import draw, plans
from streamoverlap import simulate as simulator
from streamoverlap.cli.plan_options import add_plan, add_wire, given_plan
from streamoverlap.cli.plan_view import list_of_ops, side_by_side, steps
from streamoverlap.cli.terminal import UNBOUNDED, make_console
from streamoverlap.cli.usage import UsageError, positive, shape
from streamoverlap.spec import PlanSpec, spec_of
from streamoverlap.timeline import Timeline

_EXAMPLE = """\
examples:
  streamoverlap plan gemm_reduce_scatter --world 4 --rank 1 --algorithm ring --chunks 2
  streamoverlap plan all_gather_gemm --world 8 --draw plan.svg --shape 8192,57344,8192
  streamoverlap plan all_gather_gemm --world 2 --without 5 --draw wrong.svg
"""
_RANKS = 4  # in a picture, at most
_SIZE = 8192  # M, N and K of a picture where no shape is given

_PURPOSE = {
    "all_gather_gemm": "x of every rank is gathered, multiplied as it arrives: x [M/W, K] -> y [M, N_local]",
    "gemm_reduce_scatter": "x W^T is summed over ranks, each gets its rows: x [M, K_local] -> y [M/W, N]",
    "all_gather": "x of every rank is gathered: x [M/W, ...] -> y [M, ...]",
    "reduce_scatter": "x is summed over ranks, each gets its rows: x [M, ...] -> y [M/W, ...]",
    "gemm_all_reduce": "x W^T is summed over ranks, each gets all rows: x [M, K_local] -> y [M, N]",
    "all_reduce": "x is summed over ranks, each gets all rows: x [M, ...] -> y [M, ...]",
}

_Plans = list[plans.Plan]  # of all ranks

_LEGEND = (
    "buffer@rank[shard.chunk] is a region; full(s->r, i) says that data of rank s has arrived at rank r; "
    "empty(s->r) is the credit: rank s may write to the slot of rank r. What main waits for in the join is left to "
    "wait() of an async call."
)


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="print the plan of one rank and check it",
        description="Prints what a rank does on which stream, what it waits for, what the checker says.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("operation", metavar="OP", choices=plans.OPERATIONS, help=", ".join(plans.OPERATIONS))
    parser.add_argument("--world", metavar="W", type=positive, required=True, help="number of ranks")
    parser.add_argument("--rank", metavar="R", type=int, help="whose plan (0; drawn: the first 4)")
    add_plan(parser)
    add_wire(parser)
    parser.add_argument("--keep-gathered", action="store_true", help="all_gather_gemm: also hand out the gathered x")
    parser.add_argument(
        "--copy-input", action="store_true", help="plain collectives: copy x first, so that the caller may write it"
    )
    parser.add_argument("--scaled", action="store_true", help="products: of float8, with scales")
    parser.add_argument("--unpruned", action="store_true", help="with the waits that the checker finds needless")
    parser.add_argument("--without", metavar="#", type=int, help="leave this op out: what would the checker say?")
    parser.add_argument("--draw", metavar="FILE", type=Path, help=".png or .svg: the plan as simulated, and its faults")
    parser.add_argument(
        "--shape", metavar="M,N,K", type=shape, help=f"of the picture, before sharding (about {_SIZE} each)"
    )
    parser.add_argument("--device", metavar="NAME|FILE", help="whose costs the picture has (h200)")
    parser.add_argument("--graph", action="store_true", help="the picture is of a CUDA graph: no CPU cost")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.draw is None:
        for name, given in (("--shape", args.shape), ("--device", args.device), ("--graph", args.graph or None)):
            if given is not None:
                raise UsageError(f"streamoverlap plan: {name} is for --draw")
    rank = args.rank or 0
    if not 0 <= rank < args.world:
        raise UsageError(f"streamoverlap plan: --rank is {args.rank}; expected 0 to {args.world - 1} (--world - 1)")
    try:
        plan = given_plan(args, args.operation) or PlanSpec()
        flags = (args.keep_gathered, args.copy_input, args.scaled, args.wire is not None)
        built = plans.build_spec(spec_of(args.operation, plan, args.world, *flags), pruned=not args.unpruned)
        ranks = built if args.without is None else _without(built, rank, args.without)
        faults = plans.check(ranks)
        if args.draw is not None:
            _draw(args, built, ranks, faults)
    except (ValueError, ImportError) as error:
        raise UsageError(f"streamoverlap plan: {error}") from error
    except OSError as error:
        raise UsageError(f"streamoverlap plan: --draw is {args.draw}: {error.strerror}") from error
    if args.json:
        print(json.dumps(_as_json(ranks, rank, not args.unpruned, faults), indent=2))
    else:
        _print(ranks, rank, not args.unpruned, faults)
        if args.draw is not None:
            make_console().print(f"wrote {args.draw}")
    return 1 if faults else 0


def _without(built: _Plans, rank: int, index: int) -> _Plans:
    plan = built[rank]
    if not 0 <= index < len(plan.ops):
        raise ValueError(f"--without is {index}; expected an op of rank {rank}, 0 to {len(plan.ops) - 1}")
    left = plans.Plan(plan.spec, rank, plan.events, plan.ops[:index] + plan.ops[index + 1 :])
    return [*built[:rank], left, *built[rank + 1 :]]


def _draw(
    args: argparse.Namespace, built: list[plans.Plan], ranks: list[plans.Plan], faults: list[plans.Fault]
) -> None:
    try:
        draw.require(args.draw)
    except ValueError as error:
        raise ValueError(f"--draw: {error}") from error
    about = sorted({rank for fault in faults for _, rank, _ in fault.ops})
    if args.rank is None:
        shown = sorted(list(dict.fromkeys([*about, *range(args.world)]))[:_RANKS])
    else:
        shown = list(dict.fromkeys([args.rank, *about]))[:_RANKS]
    draw.draw(_timeline(args, built, ranks), args.draw, shown, faults)


def _timeline(args: argparse.Namespace, built: _Plans, ranks: _Plans) -> Timeline:
    """Of `ranks`; where they hang, with the times of `built`, which have one op more."""
    # A default gives way to any world size; what was asked for does not.
    sizes = args.shape or [-(-_SIZE // args.world) * args.world] * 3
    options = {"costs": simulator.Costs.load(args.device or "h200"), "graph": args.graph}
    whole = simulator.simulate(built, *sizes, **options)
    if args.without is None:
        return whole
    rank, index = args.rank or 0, args.without
    title = f"{whole.title}, without op {index} of rank {rank}, {' '.join(str(built[rank].ops[index]).split())}"
    try:
        return replace(simulator.simulate(ranks, *sizes, **options), title=title)
    except ValueError:
        times = list(whole.times)
        times[rank] = times[rank][:index] + times[rank][index + 1 :]
        return Timeline(tuple(ranks), tuple(times), f"{title}: it hangs; times are of the plan that has it")


def _print(ranks: _Plans, rank: int, pruned: bool, faults: list[plans.Fault]) -> None:
    console = make_console()
    plan = ranks[rank]
    form = "as run" if pruned else "as written (unpruned)"
    console.print(f"{plan.spec}, rank {rank}, {form}", style="bold")
    console.print(_PURPOSE[plan.spec.operation])
    console.print(_LEGEND, style="dim")

    console.print(f"\n{len(plan.ops)} ops in issue order")
    console.print(list_of_ops(ranks, rank))

    view = side_by_side(plan, steps(ranks)[rank])
    needed = console.measure(view, options=console.options.update(width=UNBOUNDED)).maximum
    if needed <= console.width:
        console.print("Streams side by side; an op is in the first row where it can start, were all ops equally long")
        console.print(view)
    else:
        console.print(f"The streams side by side need {needed} columns, this terminal has {console.width}.\n")

    if not faults:
        console.print(f"The checker finds no fault in the plans of all {len(ranks)} ranks.", style="green")
    for fault in faults:
        console.print(f"fault: {fault.kind}: {fault.message}", style="red")


def _as_json(ranks: _Plans, rank: int, pruned: bool, faults: list[plans.Fault]) -> dict:
    return {
        "spec": plans.spec_options(ranks[rank].spec),
        "rank": rank,
        "pruned": pruned,
        "events": ranks[rank].events,
        "join_begin": ranks[rank].join_begin,
        "ops": [
            {"step": step, **_op_as_json(op)} for op, step in zip(ranks[rank].ops, steps(ranks)[rank], strict=True)
        ],
        "faults": [
            {
                "kind": fault.kind,
                "message": fault.message,
                "ops": [{"rank": rank, "#": op} for _, rank, op in fault.ops],
            }
            for fault in faults
        ],
    }


def _op_as_json(op: plans.Op) -> dict:
    fields: dict = {"kind": op.kind, "stream": op.stream}
    if op.kind in ("notify", "await"):
        flag = op.flag
        fields["flag"] = {
            "kind": flag.kind,
            "sender": flag.sender,
            "receiver": flag.receiver,
            "index": flag.index,
        }
    elif op.kind in ("record", "wait"):
        fields["event"] = op.event
    else:
        fields["reads"] = [_region_as_json(region) for region in op.reads]
        fields["writes"] = [_region_as_json(region) for region in op.writes]
        fields["bias"] = op.bias
    return fields


def _region_as_json(region: plans.Region) -> dict:
    return {"buffer": region.buffer, "rank": region.rank, "shard": region.shard, "chunk": region.chunk}
