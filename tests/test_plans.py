"""Plans as data: what builders write, what the checker says of it, how it prints, and plans made by hand."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from streamoverlap import plans
from streamoverlap.plans import Flag, Op, Plan, Region, Spec

GATHERS = ("all_gather_gemm", "all_gather")
SCATTERS = ("gemm_reduce_scatter", "reduce_scatter")
WORLDS = range(1, 9)


def of_kind(plan: Plan, *kinds: str) -> list[Op]:
    return [op for op in plan.ops if op.kind in kinds]


def writes_a_peer(op: Op, rank: int) -> bool:
    return any(region.rank != rank for region in op.writes)


def as_rows(put: Op) -> tuple[list[Region], list[Region]]:
    """What a Put of scales reads and writes, as that of their rows would."""
    buffers = {"scales": "input", "slot_scales": "slot"}
    return tuple([Region(buffers[r.buffer], r.rank, r.shard, r.chunk) for r in of] for of in (put.reads, put.writes))


def built(world: int, chunks=(1, 2, 3), compute_streams=(1, 2, 3)):
    """Every variant with its plans, as written and pruned."""
    for spec, pruned in product(plans.variants(world, chunks, compute_streams), (False, True)):
        yield spec, plans.build_spec(spec, pruned=pruned)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("pruned", [False, True], ids=["as written", "pruned"])
def test_the_checker_finds_no_fault_in_any_variant(world: int, pruned: bool) -> None:
    chunks = (1, 2, 3, 5) if world <= 4 else (1, 3)
    for spec in plans.variants(world, chunks):
        assert plans.check(plans.build_spec(spec, pruned=pruned)) == [], spec


@pytest.mark.parametrize("world", [2, 3])
def test_any_two_plans_in_a_row_on_one_slot_are_free_of_faults(world: int) -> None:
    calls = [plans.build_spec(spec) for spec in plans.variants(world, chunks=(1, 2), compute_streams=(1, 2))]
    for first, second in product(calls, calls):
        assert plans.check_sequence([first, second]) == [], (first[0].spec, second[0].spec)


def test_variants_cover_every_operation_and_option() -> None:
    specs = list(plans.variants(3))
    assert len(specs) == len(set(specs))
    assert {spec.operation for spec in specs} == set(plans.OPERATIONS)
    for field, values in {
        "algorithm": {"ring", "direct"},
        "reduction": {"accumulate", "sum"},
        "chunks": {1, 2, 3, 4},
        "compute_streams": {1, 2, 3},
        "keep_gathered": {False, True},
        "copy_input": {False, True},
        "scaled": {False, True},
        "transfer": {"copy", "store"},
    }.items():
        assert {getattr(spec, field) for spec in specs} == values


@pytest.mark.parametrize("world", WORLDS)
def test_a_gather_multiplies_its_own_shard_first_and_in_place(world: int) -> None:
    for spec, ranks in built(world):
        if spec.operation != "all_gather_gemm":
            continue
        for plan in ranks:
            gemms = of_kind(plan, "gemm")
            own = [Region("input", plan.rank, plan.rank, chunk) for chunk in range(spec.chunks)]
            assert [gemm.reads[0] for gemm in gemms[: spec.chunks]] == own
            assert len(gemms) == world * spec.chunks
            assert all(gemm.bias for gemm in gemms)


@pytest.mark.parametrize("world", WORLDS)
def test_a_sum_of_products_takes_the_own_shard_last_and_adds_the_bias_there(world: int) -> None:
    for spec, ranks in built(world):
        if spec.operation not in ("gemm_reduce_scatter", "gemm_all_reduce"):
            continue
        for plan in ranks:
            gemms = of_kind(plan, "gemm")
            assert {gemm.reads[0].shard for gemm in gemms[-spec.chunks :]} == {plan.rank}
            assert [gemm.bias for gemm in gemms] == [gemm.reads[0].shard == plan.rank for gemm in gemms]


@pytest.mark.parametrize("world", WORLDS)
def test_only_what_must_travel_travels(world: int) -> None:
    for spec, ranks in built(world):
        for plan in ranks:
            puts = [op for op in plan.ops if writes_a_peer(op, plan.rank) and op.writes[0].buffer == "slot"]
            assert all(put.kind == "put" or (put.kind, spec.transfer) == ("gemm", "store") for put in puts)
            of_scales = [put for put in of_kind(plan, "put") if put.writes[0].buffer == "slot_scales"]
            scaled = spec.scaled and spec.operation == "all_gather_gemm"
            assert [as_rows(put) for put in of_scales] == ([(put.reads, put.writes) for put in puts] if scaled else [])
            assert spec.transfer == "store" or len(puts) + len(of_scales) == len(of_kind(plan, "put"))
            exchanges = 2 if spec.operation.endswith("all_reduce") else 1
            assert len(puts) == exchanges * (world - 1) * spec.chunks
            assert all(put.writes[0].rank != plan.rank for put in puts)
            receivers = {put.writes[0].rank for put in puts}
            if spec.algorithm == "ring":
                assert receivers <= {(plan.rank + 1) % world}
            else:
                assert receivers == set(range(world)) - {plan.rank}
            written = {region for op in plan.ops for region in op.writes}
            assert Region("slot", plan.rank, plan.rank, 0) not in written


@pytest.mark.parametrize("world", WORLDS)
def test_credits_are_taken_before_the_first_put_and_returned_once(world: int) -> None:
    for _, ranks in built(world, chunks=(1, 2), compute_streams=(2,)):
        for plan in ranks:
            peers = set(range(world)) - {plan.rank}
            kinds = [op.kind for op in plan.ops]
            taken = [i for i, op in enumerate(plan.ops) if op.kind == "await" and op.flag.kind == "empty"]
            given = [i for i, op in enumerate(plan.ops) if op.kind == "notify" and op.flag.kind == "empty"]
            assert sorted(plan.ops[i].flag.receiver for i in taken) == sorted(peers)
            assert sorted(plan.ops[i].flag.sender for i in given) == sorted(peers)
            if world > 1:
                assert max(taken) < min(i for i, op in enumerate(plan.ops) if writes_a_peer(op, plan.rank))
                assert all(plan.ops[i].stream == "send" for i in taken)
                assert min(given) > max(i for i, kind in enumerate(kinds) if kind in ("gemm", "put", "copy", "reduce"))


@pytest.mark.parametrize("world", WORLDS)
def test_every_put_is_followed_by_the_notify_of_its_receiver(world: int) -> None:
    for _, ranks in built(world, compute_streams=(1,)):
        flags = set()
        for plan in ranks:
            send = [op for op in plan.ops if op.stream == "send" and op.kind not in ("wait", "record")]
            assert not send or send[-1].kind != "put"
            for put, notify in pairwise(send):
                if put.kind == "put" and notify.kind == "put":  # of scales, which belong to the rows
                    assert as_rows(notify) == (put.reads, put.writes)
                elif put.kind == "put":
                    assert notify.kind == "notify"
                    assert (notify.flag.kind, notify.flag.receiver) == ("full", put.writes[0].rank)
                    flags.add((notify.flag.sender, notify.flag.receiver, notify.flag.index))
        sent = [put for plan in ranks for put in of_kind(plan, "put") if put.writes[0].buffer == "slot"]
        assert len(flags) == len(sent), "each message has a flag of its own"


@pytest.mark.parametrize("world", WORLDS)
def test_a_product_of_scaled_rows_reads_the_scales_of_these_rows(world: int) -> None:
    scales = {"input": "scales", "slot": "slot_scales"}
    for spec, ranks in built(world):
        for gemm in (gemm for plan in ranks for gemm in of_kind(plan, "gemm")):
            rows, *others = gemm.reads
            found = [region for region in others if region.buffer in scales.values()]
            own = Region(scales[rows.buffer], rows.rank, rows.shard, rows.chunk)
            assert found == ([own] if spec.scaled else []), (spec, str(gemm))


def test_the_checker_sees_scales_as_it_sees_rows() -> None:
    def kinds(edit) -> set[str]:
        ranks = plans.build("all_gather_gemm", world=2, chunks=2, compute_streams=2, scaled=True)
        ops = ranks[0].ops
        edit(ops)
        ranks[0].ops = ops
        return {fault.kind for fault in plans.check(ranks)}

    def of_scales(ops: list[Op], kind: str) -> list[int]:
        buffers = ("scales", "slot_scales")
        return [i for i, op in enumerate(ops) if op.kind == kind and any(r.buffer in buffers for r in op.reads)]

    def put_later(ops: list[Op]) -> None:
        at = of_scales(ops, "put")[0]
        ops.insert(at + 1, ops.pop(at))  # after the flag is set

    def never(ops: list[Op]) -> None:
        del ops[of_scales(ops, "put")[0]]

    def others(ops: list[Op]) -> None:
        gemm = ops[of_scales(ops, "gemm")[0]]
        rows, scales = gemm.reads
        gemm.reads = [rows, Region(scales.buffer, scales.rank, scales.shard, 1 - scales.chunk)]

    def none(ops: list[Op]) -> None:
        gemm = ops[of_scales(ops, "gemm")[0]]
        gemm.reads = gemm.reads[:1]

    assert kinds(lambda ops: None) == set()
    assert "race" in kinds(put_later)
    assert "wrong value" in kinds(never)
    assert kinds(others) == {"wrong value"}
    assert kinds(none) == {"malformed"}


def test_scales_in_a_slot_lie_where_rows_of_another_call_may_lie() -> None:
    """A product on a stream that the credits do not wait for reads nothing of the slot but scales."""
    ranks = plans.build("all_gather_gemm", world=2, scaled=True)
    ops = ranks[0].ops
    last = next(op for op in ops if op.kind == "gemm" and op.reads[0].buffer == "slot")
    last.reads = [Region("input", 0, 0, 0), last.reads[1]]
    del ops[max(i for i, op in enumerate(ops) if op.kind == "wait" and op.stream == "recv")]
    ranks[0].ops = ops
    faults = plans.check_sequence([ranks, plans.build("all_gather", world=2)])
    race = next(fault.message for fault in faults if "race on slot@0 across calls" in fault.message)
    assert "put    slot@0[1.0]" in race and "slot_scales@0[1.0] W^T" in race


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_gemms_go_round_robin_over_the_compute_streams(streams: int) -> None:
    plan = plans.build("all_gather_gemm", world=4, chunks=3, compute_streams=streams)[1]
    assert [op.stream for op in of_kind(plan, "gemm")] == [f"compute{i % streams}" for i in range(12)]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_pruning_removes_waits_and_records_alone_and_is_deterministic(world: int) -> None:
    for spec in plans.variants(world, chunks=(1, 2), compute_streams=(2,)):
        for full, pruned in zip(plans.build_spec(spec, pruned=False), plans.build_spec(spec), strict=True):
            kept = [op for op in full.ops if op.kind not in ("wait", "record")]
            assert [op for op in pruned.ops if op.kind not in ("wait", "record")] == kept
            assert len(pruned.ops) <= len(full.ops)
        assert plans.build_spec(spec) == plans.build_spec(spec)


def test_pruning_leaves_no_wait_that_can_go() -> None:
    ranks = plans.build("all_gather_gemm", world=2, chunks=2, compute_streams=2)
    waits = [i for i, op in enumerate(ranks[0].ops) if op.kind == "wait"]
    assert waits
    for index in waits:
        edited = plans.build("all_gather_gemm", world=2, chunks=2, compute_streams=2)
        for plan in edited:
            plan.ops = [op for i, op in enumerate(plan.ops) if i != index]
        assert plans.check(edited) or plans.check_sequence([edited, edited]), ranks[0].ops[index]


def test_a_plan_prints_one_line_an_op_that_names_stream_and_regions() -> None:
    plan = plans.build("all_gather_gemm", world=2)[0]
    head, *lines = str(plan).splitlines()
    assert head == "all_gather_gemm(direct, world=2, chunks=1, compute_streams=1), rank 0"
    assert len(lines) == len(plan.ops)
    for line, op in zip(lines, plan.ops, strict=True):
        assert op.stream in line and str(op) in line
    text = str(plan)
    for expected in (
        "put    slot@1[0.0] = input@0[0.0]",
        "notify full(0->1, 0)",
        "await  full(1->0, 0)",
        "await  empty(0->1)",
        "notify empty(1->0)",
        "gemm   output@0[0.0] = input@0[0.0] W^T + bias",
        "gemm   output@0[1.0] = slot@0[1.0] W^T + bias",
    ):
        assert expected in text


def exchange_by_hand(rank: int) -> Plan:
    """The all-gather of two ranks, written op by op."""
    me, peer = rank, 1 - rank
    ops = [
        Op("record", "main", event=0),
        Op("wait", "send", event=0),
        Op("await", "send", flag=Flag("empty", me, peer)),
        Op("put", "send", [Region("input", me, me, 0)], [Region("slot", peer, me, 0)]),
        Op("notify", "send", flag=Flag("full", me, peer)),
        Op("record", "send", event=1),
        Op("copy", "send", [Region("input", me, me, 0)], [Region("output", me, me, 0)]),
        Op("wait", "recv", event=1),
        Op("await", "recv", flag=Flag("full", peer, me)),
        Op("record", "recv", event=2),
        Op("wait", "send", event=2),
        Op("copy", "send", [Region("slot", me, peer, 0)], [Region("output", me, peer, 0)]),
        Op("record", "send", event=3),
        Op("wait", "recv", event=3),
        Op("notify", "recv", flag=Flag("empty", peer, me)),
        Op("record", "recv", event=4),
        Op("wait", "main", event=4),
    ]
    return Plan(spec=Spec("all_gather", world=2), rank=rank, events=5, ops=ops)


def test_a_plan_made_by_hand_is_checked_like_any_other() -> None:
    ranks = [exchange_by_hand(0), exchange_by_hand(1)]
    assert plans.check(ranks) == []
    assert plans.check_sequence([ranks, ranks, plans.build("all_gather_gemm", world=2)]) == []

    ops = ranks[0].ops
    del ops[10]  # the send stream no longer waits for the arrival
    assert plans.check(ranks) == [], "`ops` is a copy: only assigning it changes the plan"
    ranks[0].ops = ops
    assert "race" in {fault.kind for fault in plans.check(ranks)}


def test_ops_are_read_and_written_from_python() -> None:
    op = Op("gemm", "compute0", reads=[Region("input", 0, 0, 0)], writes=[Region("output", 0, 0, 0)], bias=True)
    op.stream = "compute2"
    op.writes = [Region("scratch", 0, 1, 2)]
    op.bias = False
    assert (op.kind, op.stream, op.bias, op.event) == ("gemm", "compute2", False, -1)
    assert str(op) == "gemm   scratch@0[1.2] = input@0[0.0] W^T"


def test_two_plans_are_equal_when_all_they_say_is() -> None:
    first, second = (plans.build("reduce_scatter", world=3, chunks=2, algorithm="ring")[2] for _ in range(2))
    assert first == second
    second.ops = second.ops[:-1]
    assert first != second


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operation": "broadcast"}, "operation is 'broadcast'; expected one of all_gather_gemm, "),
        ({"world": 0}, "world is 0; expected 1 to 64"),
        ({"world": 65}, "world is 65; expected 1 to 64"),
        ({"algorithm": "tree"}, "algorithm is 'tree'; expected one of ring, direct"),
        ({"chunks": 0}, "chunks is 0; expected 1 to 64"),
        ({"compute_streams": 4}, "compute_streams is 4; expected 1 to 3"),
        ({"reduce": "mean"}, "reduce is 'mean'; expected one of accumulate, sum"),
        ({"transfer": "put"}, "transfer is 'put'; expected one of copy, store"),
        ({"transfer": "store"}, "transfer is store for all_gather_gemm; expected copy: only gemm_reduce_scatter and"),
        (
            {"operation": "gemm_all_reduce", "algorithm": "ring", "reduce": "sum", "transfer": "store"},
            "transfer is store with algorithm ring and reduce sum; expected reduce accumulate",
        ),
        ({"taper": "middle"}, "taper is 'middle'; expected one of none, first, last, both"),
        ({"operation": "all_gather", "keep_gathered": True}, "keep_gathered is set for all_gather"),
        ({"operation": "all_gather", "scaled": True}, "scaled is set for all_gather; expected only for products"),
        ({"keep_gathered": True, "scaled": True}, "scaled and keep_gathered are set; expected one of them"),
    ],
)
def test_a_builder_names_the_argument_it_cannot_take(options: dict, message: str) -> None:
    arguments = {"operation": "all_gather_gemm", "world": 2, **options}
    with pytest.raises(ValueError, match=message):
        plans.build(arguments.pop("operation"), **arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Op("send", "main"), "kind is 'send'; expected one of gemm, put, "),
        (lambda: Op("gemm", "compute3"), "stream is 'compute3'; expected main, send, "),
        (lambda: Region("heap", 0, 0, 0), "buffer is 'heap'; expected one of input, output, "),
        (lambda: Flag("half", 0, 1), "flag kind is 'half'; expected full or empty"),
    ],
)
def test_the_parts_of_a_plan_name_what_they_cannot_take(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "edit",
    [
        lambda op: setattr(op, "stream", "main"),
        lambda op: setattr(op, "reads", []),
        lambda op: setattr(op, "writes", [Region("slot", 7, 0, 0)]),
        lambda op: setattr(op, "writes", [Region("slot", 1, 9, 0)]),
        lambda op: setattr(op, "writes", [Region("slot", 1, 0, 5)]),
        lambda op: setattr(op, "writes", [Region("slot", 0, 0, 0)]),
        lambda op: setattr(op, "reads", [Region("input", 1, 1, 0)]),
    ],
    ids=["stream", "no read", "rank", "shard", "chunk", "own slot", "read of a peer"],
)
def test_an_op_that_lacks_what_its_kind_needs_is_malformed(edit) -> None:
    ranks = [exchange_by_hand(0), exchange_by_hand(1)]
    ops = ranks[0].ops
    edit(next(op for op in ops if op.kind == "put"))
    ranks[0].ops = ops
    assert "malformed" in {fault.kind for fault in plans.check(ranks)}


GROUPS = [(0, 1), (1, 2), (2, 0), (0, 1, 2)]


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
@pytest.mark.parametrize("operation", plans.OPERATIONS)
def test_groups_that_share_ranks_cannot_hang_in_one_order(operation: str, algorithm: str) -> None:
    calls = [
        (plans.build(operation, world=len(members), algorithm=algorithm, chunks=2), list(members))
        for members in (*GROUPS, *reversed(GROUPS))
    ]
    assert plans.check_groups(calls) == []


def test_groups_that_share_ranks_hang_in_different_orders() -> None:
    calls = [(plans.build("all_gather", world=2), list(members)) for members in GROUPS[:3]]
    assert plans.check_groups(calls, [[0, 2], [0, 1], [1, 2]]) == []
    faults = plans.check_groups(calls, [[2, 0], [0, 1], [1, 2]])
    assert [fault.kind for fault in faults] == ["deadlock"] * 3
    assert "process 0 call 2" in faults[0].message
    for model in ("independent", "one queue", "any order"):
        assert any(model in fault.message for fault in faults)


def test_a_member_that_leaves_a_call_out_hangs_the_others() -> None:
    calls = [(plans.build("all_gather", world=2), [0, 1]) for _ in range(2)]
    faults = plans.check_groups(calls, [[0, 1], [0]])
    assert faults
    assert all("a flag that nobody sets" in fault.message for fault in faults if "process 0 call 1" in fault.message)
    assert any("a flag that nobody sets" in fault.message for fault in faults)


def test_a_call_of_groups_must_name_its_members() -> None:
    ranks = plans.build("all_gather", world=2)
    with pytest.raises(ValueError, match="2 plans; expected one for each of 3 members"):
        plans.check_groups([(ranks, [0, 1, 2])])
    with pytest.raises(ValueError, match=r"orders\[1\] has call 1"):
        plans.check_groups([(ranks, [0, 1])], [[0], [1]])
    with pytest.raises(ValueError, match=r"orders\[0\] has call 0; expected calls that process 0 is a member of, once"):
        plans.check_groups([(ranks, [0, 1])], [[0, 0], [0]])
