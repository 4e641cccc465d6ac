"""The ordering faults that users of packages like this one have met, each as a small edit of a sound plan.

The checker has to name it (the right kind, and both ops), and the interpreter, which tries every interleaving
and shares no code with the checker, has to see it do harm.
"""

from __future__ import annotations

from collections.abc import Callable

from streamoverlap import _interpreter, plans
from streamoverlap.plans import Fault, Op, Plan

Calls = list[list[Plan]]


def broken(calls: Calls) -> list[str]:
    """What the interpreter sees go wrong."""
    return _interpreter.interpret([[plans.as_tuple(plan) for plan in ranks] for ranks in calls])


def assert_broken(calls: Calls, harm: str) -> None:
    seen = broken(calls)
    assert any(harm in text for text in seen), (harm, seen)


def assert_sound(calls: Calls) -> None:
    assert plans.check_sequence(calls) == []
    assert broken(calls) == []


def kinds(faults: list[Fault]) -> set[str]:
    return {fault.kind for fault in faults}


def assert_reported(faults: list[Fault], kind: str, *named: Op | str) -> None:
    texts = [fault.message for fault in faults if fault.kind == kind]
    assert any(all(str(op) in text for op in named) for text in texts), (
        kind,
        [str(op) for op in named],
        faults,
    )


def edit(ranks: list[Plan], change: Callable[[Plan, list[Op]], list[Op]]) -> None:
    """Rewrites the ops of every rank's plan."""
    for plan in ranks:
        plan.ops = change(plan, plan.ops)


def index_of(ops: list[Op], wanted: Callable[[Op], bool]) -> int:
    found = [i for i, op in enumerate(ops) if wanted(op)]
    assert found, "the plan is not what this test was written for"
    return found[-1]


def without(ops: list[Op], index: int) -> list[Op]:
    return ops[:index] + ops[index + 1 :]


def test_copied_buffer_read_early() -> None:
    """The caller gets the gathered input while the send stream is still copying it."""
    ranks = plans.build("all_gather_gemm", world=2, keep_gathered=True)
    assert_sound([ranks])

    def copy_after_the_event_that_joins_it(_: Plan, ops: list[Op]) -> list[Op]:
        copy = index_of(ops, lambda op: op.kind == "copy")
        record = index_of(ops, lambda op: op.kind == "record" and op.stream == "send")
        assert copy < record
        return [*ops[:copy], *ops[copy + 1 : record + 1], ops[copy], *ops[record + 1 :]]

    edit(ranks, copy_after_the_event_that_joins_it)
    copy = ranks[0].ops[index_of(ranks[0].ops, lambda op: op.kind == "copy")]
    assert_reported(plans.check(ranks), "race", copy, "gathered@0[1.0]")
    assert_broken([ranks], "and rank 0 main [end of the call] touch one region at the same time")


def test_stream_not_joined() -> None:
    """Main does not wait for the streams: the result is handed out while it is still being computed."""
    ranks = plans.build("all_gather_gemm", world=2)
    assert_sound([ranks])
    edit(ranks, lambda _, ops: [op for op in ops if not (op.kind == "wait" and op.stream == "main")])
    last = ranks[0].ops[index_of(ranks[0].ops, lambda op: op.kind == "gemm")]
    faults = plans.check(ranks)
    assert_reported(faults, "not joined", "rank 0")
    assert_reported(faults, "race", last)
    assert_broken([ranks], "not joined")


def test_no_credit() -> None:
    """The next call's data lands in a slot that a slow peer is still reading."""
    ranks = plans.build("all_gather_gemm", world=2)
    assert_sound([ranks, ranks])
    edit(ranks, lambda _, ops: [op for op in ops if op.flag.kind != "empty"])
    put = next(op for op in ranks[0].ops if op.kind == "put")
    reader = next(op for op in ranks[1].ops if op.kind == "gemm" and op.reads[0].buffer == "slot")
    assert_reported(plans.check(ranks), "credit", put)
    assert_reported(plans.check_sequence([ranks, ranks]), "race", put, reader)
    assert broken([ranks]) == [], "one call alone does no harm"
    assert_broken([ranks, ranks], "overwritten across calls")


def test_credit_not_taken() -> None:
    """One rank alone sends without asking."""
    ranks = plans.build("all_gather_gemm", world=2)
    ops = ranks[0].ops
    ranks[0].ops = without(ops, index_of(ops, lambda op: op.kind == "await" and op.flag.kind == "empty"))
    put = next(op for op in ranks[0].ops if op.kind == "put")
    assert_reported(plans.check(ranks), "credit", put)
    assert_broken([ranks, ranks], "overwritten across calls")


def test_credit_returned_before_the_last_read() -> None:
    """The slot is given back while the GEMM that reads it has yet to run."""
    ranks = plans.build("all_gather_gemm", world=2, pruned=False)

    def give_back_at_once(_: Plan, ops: list[Op]) -> list[Op]:
        notify = index_of(ops, lambda op: op.kind == "notify" and op.flag.kind == "empty")
        wait = max(i for i, op in enumerate(ops[:notify]) if op.kind == "wait" and op.stream == "recv")
        return without(ops, wait)

    edit(ranks, give_back_at_once)
    reader = next(op for op in ranks[0].ops if op.kind == "gemm" and op.reads[0].buffer == "slot")
    assert_reported(plans.check(ranks), "credit", reader)
    assert kinds(plans.check(ranks)) == {"credit"}
    assert_broken([ranks, ranks], "overwritten across calls")


def test_last_gemm_on_another_stream_than_the_exchange_waits_for() -> None:
    """The exchange waits for compute1, but the GEMM that makes what it sends runs on compute0."""
    ranks = plans.build("gemm_reduce_scatter", world=2, chunks=2, compute_streams=2)
    assert_sound([ranks])

    def move_last_partial(_: Plan, ops: list[Op]) -> list[Op]:
        ops[index_of(ops, is_partial)].stream = "compute0"
        return ops

    def is_partial(op: Op) -> bool:
        return op.kind == "gemm" and op.writes[0].buffer == "scratch" and not op.bias and op.stream == "compute1"

    edit(ranks, move_last_partial)
    gemm = next(op for op in ranks[0].ops if op.writes and (op.writes[0].buffer, op.writes[0].chunk) == ("scratch", 1))
    put = next(op for op in ranks[0].ops if op.kind == "put" and op.reads[0] == gemm.writes[0])
    assert_reported(plans.check(ranks), "race", gemm, put)
    assert kinds(plans.check(ranks)) == {"race"}
    assert_broken([ranks], "torn")


def test_last_gemm_on_main() -> None:
    """The same with main, where no GEMM belongs."""
    ranks = plans.build("gemm_reduce_scatter", world=2)
    edit(ranks, lambda _, ops: [on_main(op) if op.kind == "gemm" and not op.bias else op for op in ops])
    assert_reported(plans.check(ranks), "malformed", "gemm", "main")
    assert_broken([ranks], "torn")


def on_main(op: Op) -> Op:
    op.stream = "main"
    return op


def is_full_await(op: Op) -> bool:
    return op.kind == "await" and op.flag.kind == "full"


def test_wait_before_the_send_it_depends_on_in_a_graph() -> None:
    """No edge says "send before you await": fine on streams, a hang where a graph picks the order."""
    ranks = plans.build("all_gather_gemm", world=2, pruned=False)
    assert_sound([ranks])

    def drop_the_edge(_: Plan, ops: list[Op]) -> list[Op]:
        wait = max(i for i in range(index_of(ops, is_full_await)) if (ops[i].kind, ops[i].stream) == ("wait", "recv"))
        begin = next(op.event for op in ops if op.kind == "record" and op.stream == "main")
        assert ops[wait].event != begin
        ops[wait].event = begin
        return ops

    edit(ranks, drop_the_edge)
    assert_reported(plans.check(ranks), "deadlock", "topological", ranks[0].ops[index_of(ranks[0].ops, is_full_await)])
    assert kinds(plans.check(ranks)) == {"deadlock"}
    assert_broken([ranks], "deadlock, any topological order")
    assert not any("one queue" in text for text in broken([ranks]))


def test_wait_issued_before_the_send_it_depends_on_under_one_queue() -> None:
    """The await is issued first: a hang where the hardware folds a rank's streams into one queue."""
    ranks = plans.build("all_gather_gemm", world=2, pruned=False)

    def await_first(_: Plan, ops: list[Op]) -> list[Op]:
        index = index_of(ops, is_full_await)
        awaiting = ops[index]
        wait = max(i for i in range(index) if (ops[i].kind, ops[i].stream) == ("wait", "recv"))
        begin = index_of(ops, lambda op: op.kind == "record" and op.stream == "main")
        started = Op("wait", "recv", event=ops[begin].event)
        rest = [op for i, op in enumerate(ops) if i > begin and i not in (wait, index)]
        return [*ops[: begin + 1], started, awaiting, *rest]

    edit(ranks, await_first)
    assert_reported(plans.check(ranks), "deadlock", "queue", ranks[0].ops[index_of(ranks[0].ops, is_full_await)])
    assert kinds(plans.check(ranks)) == {"deadlock"}
    assert_broken([ranks], "deadlock, one queue")


def test_ring_then_direct_on_one_slot() -> None:
    """A ring that asks only its neighbour for credit leaves the others' credits to the next call."""
    ring = plans.build("all_gather_gemm", world=3, algorithm="ring")
    direct = plans.build("all_gather_gemm", world=3, algorithm="direct")
    assert plans.check_sequence([ring, direct]) == []

    def neighbours_alone(_: Plan, ops: list[Op]) -> list[Op]:
        return [op for op in ops if op.flag.kind != "empty" or op.flag.receiver == (op.flag.sender + 1) % 3]

    edit(ring, neighbours_alone)
    # Rank 0 sends to rank 2, which may still be multiplying what rank 1 sent it in the call before.
    put = next(op for op in direct[0].ops if op.kind == "put" and op.writes[0].rank == 2)
    reader = next(op for op in ring[2].ops if op.kind == "gemm" and op.reads[0].buffer == "slot")
    assert_reported(plans.check(ring), "credit", "empty")
    assert_reported(plans.check_sequence([ring, direct]), "race", put, reader)
    assert broken([ring, ring]) == [], "a ring after a ring does no harm"
    assert_broken([ring, direct], "overwritten across calls")


def test_wait_on_an_event_not_yet_recorded() -> None:
    """CUDA makes this a silent no-op."""
    ranks = plans.build("all_gather_gemm", world=2)

    def record_late(_: Plan, ops: list[Op]) -> list[Op]:
        record = index_of(ops, lambda op: op.kind == "record" and op.stream == "recv")
        return [*ops[:record], *ops[record + 1 :], ops[record]]

    edit(ranks, record_late)
    late = ranks[0].ops[-1]
    assert_reported(plans.check(ranks), "unrecorded event", f"event {late.event}")
    assert_broken([ranks], "wait on an event not yet recorded")


def test_partial_used_twice() -> None:
    """A shard multiplied twice, another never."""
    ranks = plans.build("gemm_reduce_scatter", world=2)

    def same_shard_again(plan: Plan, ops: list[Op]) -> list[Op]:
        gemms = [op for op in ops if op.kind == "gemm"]
        gemms[0].reads = gemms[-1].reads[:1]
        return ops

    edit(ranks, same_shard_again)
    assert_reported(plans.check(ranks), "wrong value", "the product of input@1[0.0] is used 0 times, expected once")
    assert_broken([ranks], "wrong value")


def test_bias_added_by_every_rank() -> None:
    ranks = plans.build("gemm_reduce_scatter", world=2)

    def bias_everywhere(_: Plan, ops: list[Op]) -> list[Op]:
        for op in ops:
            op.bias = op.kind == "gemm"
        return ops

    edit(ranks, bias_everywhere)
    assert_reported(plans.check(ranks), "wrong value", "bias")
    assert_broken([ranks], "wrong value")


def test_flag_set_twice() -> None:
    """Two messages share a flag: the second may come before the first has been seen."""
    ranks = plans.build("all_gather_gemm", world=2, chunks=2)

    def one_flag_for_both(_: Plan, ops: list[Op]) -> list[Op]:
        for op in ops:
            if op.flag.kind == "full" and op.flag.index == 1:
                op.flag = plans.Flag("full", op.flag.sender, op.flag.receiver, 0)
        return ops

    edit(ranks, one_flag_for_both)
    assert_reported(plans.check(ranks), "flag state", "full(0->1, 0)")
    assert_broken([ranks], "flag set while it is already set")
