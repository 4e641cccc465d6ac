"""Two views of a plan: the ops in issue order with what they wait for, and the streams side by side."""

from __future__ import annotations

from collections import defaultdict, deque

from rich.table import Table

from streamoverlap.cli.terminal import make_table
from streamoverlap.plans import STREAMS, Flag, Op, Plan

_STYLES = {
    "gemm": "green",
    "reduce": "green",
    "quantise": "cyan",
    "put": "cyan",
    "copy": "cyan",
    "notify": "magenta",
    "await": "magenta",
}

Place = tuple[int, int]  # rank, index into its ops


def _key(flag: Flag) -> tuple:
    return (flag.kind, flag.sender, flag.receiver, flag.index)


def _places(ranks: list[Plan], kind: str) -> dict[tuple, Place]:
    """Where each flag is set ("notify") or awaited ("await"): once in a call."""
    return {
        _key(op.flag): (rank, index)
        for rank, plan in enumerate(ranks)
        for index, op in enumerate(plan.ops)
        if op.kind == kind
    }


def list_of_ops(ranks: list[Plan], rank: int) -> Table:
    """One row an op, in issue order; the last column says which other op it orders itself with."""
    ops, join_begin = ranks[rank].ops, ranks[rank].join_begin
    notified, awaited = _places(ranks, "notify"), _places(ranks, "await")
    recorded: dict[int, int] = {}
    waited: dict[int, list[int]] = defaultdict(list)
    for index, op in enumerate(ops):
        if op.kind == "record":
            recorded[op.event] = index
        elif op.kind == "wait":
            waited[op.event].append(index)

    def order(index: int, op: Op) -> str:
        if op.kind == "wait":
            source = recorded.get(op.event)
            joins = " (join)" if op.stream == "main" and index >= join_begin else ""
            return "never recorded" if source is None else f"after #{source} on {ops[source].stream}{joins}"
        if op.kind == "record":
            return "before " + ", ".join(f"#{index} on {ops[index].stream}" for index in waited[op.event])
        if op.kind == "await":
            if op.flag.kind == "empty":
                return f"rank {op.flag.receiver} has ended the call before on this slot"
            return _place("after", notified.get(_key(op.flag)))
        if op.kind == "notify":
            if op.flag.kind == "empty":
                return f"rank {op.flag.sender} may write here in the next call"
            return _place("before", awaited.get(_key(op.flag)))
        return f"to rank {op.writes[0].rank}" if op.kind == "put" else ""

    table = make_table("#", "stream", "op", "does", "order", right=("#",))
    for index, op in enumerate(ops):
        does = str(op)[len(op.kind) :].strip()
        table.add_row(str(index), op.stream, op.kind, does, order(index, op), style=_STYLES.get(op.kind))
    return table


def _place(relation: str, place: Place | None) -> str:
    return "nobody" if place is None else f"{relation} #{place[1]} of rank {place[0]}"


def steps(ranks: list[Plan]) -> list[list[int]]:
    """For every op of every rank the earliest step it can start in, were all ops equally long.

    The longest path over stream order, Record -> Wait and Notify -> Await. Zero for ops that can never start.
    """
    notified = _places(ranks, "notify")
    recorded = [{op.event: i for i, op in enumerate(plan.ops) if op.kind == "record"} for plan in ranks]
    found = [[0] * len(plan.ops) for plan in ranks]
    last: dict[tuple[int, str], int] = defaultdict(int)  # the step each stream of each rank has got to
    queues: dict[tuple[int, str], deque[int]] = defaultdict(deque)
    for rank, plan in enumerate(ranks):
        for index, op in enumerate(plan.ops):
            queues[rank, op.stream].append(index)

    def source(rank: int, op: Op) -> Place | None:
        if op.kind == "wait":
            return (rank, recorded[rank][op.event]) if op.event in recorded[rank] else None
        # A credit is there before the call begins.
        return notified.get(_key(op.flag)) if op.kind == "await" and op.flag.kind == "full" else None

    moved = True
    while moved:
        moved = False
        for (rank, stream), indices in queues.items():
            while indices:
                index = indices[0]
                place = source(rank, ranks[rank].ops[index])
                after = found[place[0]][place[1]] if place else 0
                if place and after == 0:
                    break
                found[rank][index] = last[rank, stream] = 1 + max(last[rank, stream], after)
                indices.popleft()
                moved = True
    return found


def side_by_side(plan: Plan, step_of: list[int]) -> Table:
    """A column for every stream, a row for every step."""
    streams = [stream for stream in STREAMS if any(op.stream == stream for op in plan.ops)]
    rows: dict[int, dict[str, str]] = defaultdict(dict)
    for index, op in enumerate(plan.ops):
        rows[step_of[index]][op.stream] = f"{index} {_short(op)}"
    table = make_table("step", *streams, right=("step",))
    for step in sorted(rows):
        table.add_row(str(step), *(rows[step].get(stream, "") for stream in streams))
    return table


def _short(op: Op) -> str:
    if op.kind in ("record", "wait"):
        return f"{op.kind} event {op.event}"
    if op.kind in ("notify", "await"):
        flag = op.flag
        peer = flag.receiver if (flag.kind == "full") == (op.kind == "notify") else flag.sender
        return f"{op.kind} {flag.kind} {'to' if op.kind == 'notify' else 'from'} {peer}"
    region = op.writes[0]
    target = f" to {region.rank}" if op.kind == "put" else f" {region.buffer}"
    return f"{op.kind}{target} [{region.shard}.{region.chunk}]"
