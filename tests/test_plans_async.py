"""What a plan says of async calls: where the issue ends, when the input is the caller's again, the all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from streamoverlap import _interpreter, plans
from streamoverlap.plans import Op, Plan, Region, Spec

COPYING = ("all_gather", "reduce_scatter", "all_reduce")
WORLDS = range(1, 7)


def variants(world: int, operations=plans.OPERATIONS, **options):
    options = {"chunks": (1, 2, 3), "compute_streams": (1, 2), **options}
    return [spec for spec in plans.variants(world, **options) if spec.operation in operations]


def split(plan: Plan) -> tuple[list[Op], list[Op]]:
    """What main does at the issue, and in the join."""
    main = [(index >= plan.join_begin, op) for index, op in enumerate(plan.ops) if op.stream == "main"]
    return [op for joins, op in main if not joins], [op for joins, op in main if joins]


def kinds(ranks: list[Plan]) -> set[str]:
    return {fault.kind for fault in plans.check(ranks)}


def interpreted(ranks: list[Plan]) -> list[str]:
    return _interpreter.interpret([[plans.as_tuple(plan) for plan in ranks]])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("pruned", [False, True], ids=["as written", "pruned"])
def test_main_waits_in_the_join_alone_and_does_nothing_else_there(world: int, pruned: bool) -> None:
    for spec in variants(world):
        for plan in plans.build_spec(spec, pruned=pruned):
            issue, join = split(plan)
            assert {op.kind for op in join} <= {"wait"}
            assert [op.kind for op in issue if op.kind != "copy"] == ["record"]
            assert any(op.kind == "copy" for op in issue) == spec.copy_input


@pytest.mark.parametrize("world", WORLDS)
def test_a_copied_input_is_read_by_its_copies_alone_and_before_the_exchange(world: int) -> None:
    for spec in variants(world, COPYING):
        for plan in plans.build_spec(spec):
            readers = [i for i, op in enumerate(plan.ops) if any(region.buffer == "input" for region in op.reads)]
            assert readers
            if not spec.copy_input:
                continue
            assert all(plan.ops[i].kind == "copy" for i in readers)
            shards = {plan.rank} if spec.operation == "all_gather" else set(range(world))
            copied = [plan.ops[i].reads[0] for i in readers]
            expected = {Region("input", plan.rank, shard, chunk) for shard in shards for chunk in range(spec.chunks)}
            assert len(copied) == len(expected) and set(copied) == expected
            exchange = [i for i, op in enumerate(plan.ops) if op.kind in ("await", "put", "notify")]
            assert not exchange or max(readers) < min(exchange)


def test_only_the_reduce_scatter_needs_memory_for_the_copy() -> None:
    for spec in variants(3, COPYING):
        for plan in plans.build_spec(spec):
            written = {region.buffer for op in plan.ops for region in op.writes}
            assert ("copied" in written) == (spec.copy_input and spec.operation == "reduce_scatter")
            assert spec.operation != "all_reduce" or "scratch" not in written


@pytest.mark.parametrize("world", WORLDS)
def test_an_all_reduce_sums_its_own_shard_last_and_sends_it_on_first(world: int) -> None:
    for spec in variants(world, ("all_reduce", "gemm_all_reduce")):
        for plan in plans.build_spec(spec):
            own = [Region("output", plan.rank, plan.rank, chunk) for chunk in range(spec.chunks)]
            sums = [
                op.writes[0] for op in plan.ops if op.kind in ("gemm", "reduce") and op.writes[0].buffer == "output"
            ]
            if world > 1 or not spec.copy_input:  # else the copy is the sum
                assert [*dict.fromkeys(reversed(sums))][spec.chunks - 1 :: -1] == own
            puts = [op for op in plan.ops if any(region.rank != plan.rank for region in op.writes)]
            assert len(puts) == 2 * (world - 1) * spec.chunks
            if world > 1:
                gathers = puts[len(puts) // 2 :]
                first = gathers[: spec.chunks] if spec.algorithm == "ring" else gathers
                assert {op.reads[0] for op in first} == set(own)


@pytest.mark.parametrize(("operation", "algorithm"), [*product(("all_reduce", "gemm_all_reduce"), ("ring", "direct"))])
def test_an_all_reduce_gathers_a_chunk_before_it_sums_the_next(operation: str, algorithm: str) -> None:
    plan = plans.build(operation, world=3, algorithm=algorithm, chunks=2)[1]
    own = [Region("output", 1, 1, chunk) for chunk in (0, 1)]

    def position(kind: str, wanted: Callable[[Op], bool]) -> int:
        return next(i for i, op in enumerate(plan.ops) if op.kind == kind and wanted(op))

    sent = position("put", lambda op: op.reads[0] == own[0])
    summed = position("reduce" if operation == "all_reduce" else "gemm", lambda op: op.writes[0] == own[1])
    assert sent < summed


def test_a_direct_all_reduce_keeps_partials_and_sums_apart_in_the_slot() -> None:
    world = 4
    for algorithm, shards in (("direct", 2 * world), ("ring", world)):
        for plan in plans.build("all_reduce", world=world, algorithm=algorithm):
            received = {op.reads[0].shard for op in plan.ops if op.kind == "copy"}
            assert max(received) < shards
            assert (min(received) >= world) == (algorithm == "direct")


def test_partials_and_sums_of_a_direct_all_reduce_in_one_place_are_a_race() -> None:
    ranks = plans.build("all_reduce", world=2)
    for plan in ranks:
        ops = plan.ops
        for op in ops:
            op.reads = [fold(region) for region in op.reads]
            op.writes = [fold(region) for region in op.writes]
        plan.ops = ops
    # The sum of the peer may come while its partial is still being added.
    assert "race" in kinds(ranks)
    assert any("torn" in text for text in interpreted(ranks))


def fold(region: Region) -> Region:
    return Region("slot", region.rank, region.shard % 2, region.chunk) if region.buffer == "slot" else region


def test_a_slot_of_another_operation_has_no_room_for_sums() -> None:
    ranks = plans.build("reduce_scatter", world=2)
    ops = ranks[0].ops
    next(op for op in ops if op.kind == "put").writes = [Region("slot", 1, 2, 0)]
    ranks[0].ops = ops
    (fault,) = plans.check(ranks)
    assert (fault.kind, "the shard of slot@1[2.0] is 2, expected 0 to 1" in fault.message) == ("malformed", True)


@pytest.mark.parametrize("operation", COPYING)
def test_writing_the_input_before_it_is_copied_is_a_race(operation: str) -> None:
    """As where the copy is made by another stream, which main would have to wait for."""
    ranks = plans.build(operation, world=2, copy_input=True)
    for plan in ranks:
        copies = [op for op in plan.ops if op.stream == "main" and op.kind == "copy"]
        rest = [op for op in plan.ops if op not in copies]
        for copy in copies:
            copy.stream = "send"
        start = next(i for i, op in enumerate(rest) if op.stream == "send") + 1
        plan.ops = [*rest[:start], *copies, *rest[start:]]
    faults = plans.check(ranks)
    assert any(
        fault.kind == "race" and "[the caller, once the call is issued]" in fault.message and "copy" in fault.message
        for fault in faults
    ), faults
    assert any("torn" in text for text in interpreted(ranks))


@pytest.mark.parametrize("operation", COPYING)
def test_reading_the_input_itself_is_a_race_with_the_caller(operation: str) -> None:
    ranks = plans.build(operation, world=2, copy_input=True)
    for plan in ranks:
        ops = plan.ops
        put = next(op for op in ops if op.kind == "put")
        put.reads = [Region("input", plan.rank, put.reads[0].shard, 0)]
        plan.ops = ops
    assert "race" in kinds(ranks)
    assert any("torn" in text for text in interpreted(ranks))


@pytest.mark.parametrize("operation", COPYING)
def test_a_copy_after_a_wait_of_main_is_part_of_the_join(operation: str) -> None:
    """Which the caller may never do."""
    ranks = plans.build(operation, world=2, copy_input=True)
    for plan in ranks:
        join = plan.join_begin
        plan.ops = [*plan.ops[1:], plan.ops[0]] if join < len(plan.ops) else plan.ops
    faults = plans.check(ranks)
    assert any(
        fault.kind == "held up"
        and "which is part of the join, and the caller may join at any time or never" in fault.message
        for fault in faults
    ), faults
    assert interpreted(ranks)


def with_main_copying(read: Region, written: Region) -> list[Plan]:
    ranks = plans.build("reduce_scatter", world=2, copy_input=True)
    plan = ranks[0]
    plan.ops = [Op("copy", "main", reads=[read], writes=[written]), *plan.ops]
    return ranks


@pytest.mark.parametrize(
    ("read", "written"),
    [
        (Region("input", 0, 0, 0), Region("scratch", 0, 0, 0)),
        (Region("input", 0, 0, 0), Region("slot", 0, 0, 0)),
        (Region("slot", 0, 0, 0), Region("output", 0, 0, 0)),
    ],
    ids=["to scratch", "to the slot", "from the slot"],
)
def test_main_touches_nothing_that_the_last_call_on_the_slot_may_still_use(read: Region, written: Region) -> None:
    (fault,) = plans.check(with_main_copying(read, written))
    assert (fault.kind, "main copies" in fault.message) == ("malformed", True)


def test_an_exchange_that_waits_for_the_join_is_held_up() -> None:
    """The caller may join late, or never: the credit must go back all the same."""
    ranks = plans.build("all_gather", world=2, pruned=False)
    for plan in ranks:
        ops, event = plan.ops, plan.events
        credit = next(i for i, op in enumerate(ops) if op.kind == "notify" and op.flag.kind == "empty")
        copied = next(op.event for op in reversed(ops[:credit]) if (op.kind, op.stream) == ("record", "send"))
        joined = [Op("wait", "main", event=copied), Op("record", "main", event=event), Op("wait", "recv", event=event)]
        plan.ops, plan.events = [*ops[:credit], *joined, *ops[credit:]], event + 1
    faults = plans.check(ranks)
    assert {fault.kind for fault in faults} == {"held up"}
    assert "the caller may join at any time or never" in faults[0].message
    assert any("the exchange is held up" in text for text in interpreted(ranks))


@pytest.mark.parametrize(("operation", "copy_input"), [("all_gather", True), ("reduce_scatter", False)])
def test_only_a_reduce_scatter_that_copies_has_a_buffer_for_it(operation: str, copy_input: bool) -> None:
    ranks = plans.build(operation, world=2, copy_input=copy_input)
    ops = ranks[0].ops
    put = next(op for op in ops if op.kind == "put")
    put.reads = [Region("copied", 0, put.reads[0].shard, 0)]
    ranks[0].ops = ops
    (fault,) = plans.check(ranks)
    assert (fault.kind, "no copy of the input apart from its output" in fault.message) == ("malformed", True)


@pytest.mark.parametrize("operation", ["all_gather_gemm", "gemm_reduce_scatter"])
def test_a_gemm_reads_its_input_in_place(operation: str) -> None:
    with pytest.raises(ValueError, match=f"copy_input is set for {operation}; expected only for all_gather, reduce_"):
        plans.build(operation, world=2, copy_input=True)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_join_alone_waits_for_all_since_it_may_be_done_on_another_stream(world: int) -> None:
    for spec in variants(world, COPYING):
        ranks = plans.build_spec(spec)
        assert all(split(plan)[1] for plan in ranks)
        for plan in ranks:
            ops = plan.ops
            del ops[plan.join_begin]
            plan.ops = ops
        assert "not joined" in kinds(ranks), spec
        assert any("not joined" in text for text in interpreted(ranks)), spec


def test_a_plan_prints_what_main_leaves_to_the_join() -> None:
    plan = plans.build("all_gather", world=2, copy_input=True)[0]
    head, *lines = str(plan).splitlines()
    assert head == "all_gather(direct, world=2, chunks=1, compute_streams=1, copy_input), rank 0"
    joins = [op for line, op in zip(lines, plan.ops, strict=True) if line.endswith("(join)")]
    assert joins == split(plan)[1] != []


def test_plans_that_copy_differ_from_those_that_do_not() -> None:
    plain, copying = Spec("all_gather", world=2), Spec("all_gather", world=2, copy_input=True)
    assert plain != copying
    assert plans.build_spec(copying) == plans.build_spec(copying) != plans.build_spec(plain)
