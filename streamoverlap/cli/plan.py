"""``streamoverlap plan``: prints the plan of one rank, for a person to follow, with the checker's verdict."""

from __future__ import annotations

import argparse
import json

from streamoverlap import plans
from streamoverlap.cli.plan_view import list_of_ops, side_by_side, steps
from streamoverlap.cli.terminal import UNBOUNDED, make_console
from streamoverlap.cli.usage import UsageError, positive

_EXAMPLE = """\
example:
  streamoverlap plan gemm_reduce_scatter --world 4 --rank 1 --algorithm ring --chunks 2
"""

_PURPOSE = {
    "all_gather_gemm": "x of every rank is gathered, multiplied as it arrives: x [M/W, K] -> y [M, N_local]",
    "gemm_reduce_scatter": "x W^T is summed over ranks, each gets its rows: x [M, K_local] -> y [M/W, N]",
    "all_gather": "x of every rank is gathered: x [M/W, ...] -> y [M, ...]",
    "reduce_scatter": "x is summed over ranks, each gets its rows: x [M, ...] -> y [M/W, ...]",
    "gemm_all_reduce": "x W^T is summed over ranks, each gets all rows: x [M, K_local] -> y [M, N]",
    "all_reduce": "x is summed over ranks, each gets all rows: x [M, ...] -> y [M, ...]",
}

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
    parser.add_argument("--rank", metavar="R", type=int, default=0, help="whose plan to print (default 0)")
    parser.add_argument("--algorithm", choices=("direct", "ring"), default="direct", help="default direct")
    parser.add_argument("--chunks", metavar="N", type=positive, default=1, help="parts of a shard (1)")
    parser.add_argument(
        "--compute-streams", metavar="N", type=positive, default=1, help="GEMMs go round robin over these (1)"
    )
    parser.add_argument("--reduce", choices=("accumulate", "sum"), default="accumulate", help="how partials are summed")
    parser.add_argument("--keep-gathered", action="store_true", help="all_gather_gemm: also hand out the gathered x")
    parser.add_argument(
        "--copy-input", action="store_true", help="plain collectives: copy x first, so that the caller may write it"
    )
    parser.add_argument("--unpruned", action="store_true", help="with the waits that the checker finds needless")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.rank < args.world:
        raise UsageError(f"streamoverlap plan: --rank is {args.rank}; expected 0 to {args.world - 1} (--world - 1)")
    try:
        ranks = plans.build(
            args.operation,
            world=args.world,
            algorithm=args.algorithm,
            chunks=args.chunks,
            compute_streams=args.compute_streams,
            reduce=args.reduce,
            keep_gathered=args.keep_gathered,
            copy_input=args.copy_input,
            pruned=not args.unpruned,
        )
    except ValueError as error:
        raise UsageError(f"streamoverlap plan: {error}") from error
    faults = plans.check(ranks)
    if args.json:
        print(json.dumps(_as_json(ranks, args.rank, not args.unpruned, faults), indent=2))
    else:
        _print(ranks, args.rank, not args.unpruned, faults)
    return 1 if faults else 0


def _print(ranks: list[plans.Plan], rank: int, pruned: bool, faults: list[plans.Fault]) -> None:
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


def _as_json(ranks: list[plans.Plan], rank: int, pruned: bool, faults: list[plans.Fault]) -> dict:
    return {
        "spec": plans.spec_options(ranks[rank].spec),
        "rank": rank,
        "pruned": pruned,
        "events": ranks[rank].events,
        "join_begin": ranks[rank].join_begin,
        "ops": [
            {"step": step, **_op_as_json(op)} for op, step in zip(ranks[rank].ops, steps(ranks)[rank], strict=True)
        ],
        "faults": [{"kind": fault.kind, "message": fault.message} for fault in faults],
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
