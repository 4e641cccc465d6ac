"""Sums whose partials travel as float8: exact where float8 holds all, else bit for bit the documented steps."""

from __future__ import annotations

from contextlib import closing
from itertools import product

import pytest
import torch
import torch.distributed as dist
from ranks import quick_to_fail
from references import Case, call, differences, expected, inputs
from wire_references import DTYPES, SUMS, bound, partials_of, quantised_sum, sweep

import streamoverlap as so
from streamoverlap import _C, chooser, plans, simulate


def run_all(rank: int, world: int, group, cases: list[Case], in_flight: bool) -> list[str]:
    wrong, works = [], []
    for case in cases:
        given = inputs(case, rank, world)
        if in_flight:
            works.append((case, call(case, given, group, async_op=True)))
        else:
            works.append((case, call(case, given, group)))
    for case, results in works:
        found = results.wait() if in_flight else results
        wrong += filter(None, [differences(case, found, expected(case, rank, world))])
    return wrong[:3]


@pytest.mark.parametrize("operation", SUMS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_plan_gives_the_exact_result(ranks, world: int, operation: str) -> None:
    cases = list(sweep(operation, world))
    for in_flight in (False, True):
        assert ranks(world).run(run_all, cases, in_flight) == [[]] * world


def rounded(rank: int, world: int, group, operation: str, dtype: torch.dtype, width: int, plan: so.PlanSpec) -> None:
    x, weights, partials = partials_of(operation, world, dtype, width, 3.0)
    given = (x[rank], weights[rank]) if weights else (x[rank],)
    y = getattr(so, operation)(*given, group, plan=plan, wire="fp8")
    for shard in range(world) if operation.endswith("all_reduce") else [rank]:
        of_shard = [partial.chunk(world)[shard] for partial in partials]
        found = y.chunk(world)[shard] if operation.endswith("all_reduce") else y
        if plan.algorithm == "direct" and (plan.reduce == "sum" or not weights):
            assert torch.equal(found, quantised_sum(of_shard, shard, width, dtype))
        rows = [[part[i] for part in of_shard] for i in range(len(found))]
        if width < 512:  # the whole chunk shares one scale
            rows, found = [of_shard], found[None]
        for row, sums in zip(rows, found, strict=True):
            off = (sums.double() - sum(part.double() for part in row)).abs()
            assert (off <= bound(row, shard, plan.algorithm, dtype)).all()
            assert world == 1 or off.max() > 0


@pytest.mark.parametrize(
    "plan", [so.PlanSpec(reduce="sum"), so.PlanSpec(), so.PlanSpec("ring")], ids=so.PlanSpec.to_text
)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("operation", SUMS)
def test_what_is_rounded_is_what_the_documented_steps_give(ranks, operation, dtype, plan) -> None:
    for world, width in ((2, 40), (3, 520), (4, 1031)):
        ranks(world).run(rounded, operation, dtype, width, plan)


def same_on_all(rank: int, world: int, group) -> list[bytes]:
    results = []
    source = torch.Generator().manual_seed(rank)
    for algorithm, dtype, rows in product(("direct", "ring"), DTYPES, (1, 7, 64)):
        x = torch.randn(rows, 33, generator=source).to(dtype)
        y = so.all_reduce(x, group, plan=so.PlanSpec(algorithm, 2), wire="fp8")
        results.append(y.view(torch.uint8).numpy().tobytes())
    return results


def test_an_all_reduce_is_the_same_on_all_ranks_bit_for_bit(ranks) -> None:
    first, *others = ranks(3).run(same_on_all)
    assert all(other == first for other in others)


def special_values(rank: int, world: int, group, algorithm: str) -> None:
    """Infinite values and NaN arrive as NaN, and take nothing else of their row along."""
    x = torch.full((world, 600), 7.0)
    x[:, 3], x[:, 5], x[:, 7], x[:, 9] = float("inf"), -float("inf"), float("nan"), 0.0
    y = so.reduce_scatter(x, group, plan=so.PlanSpec(algorithm), wire="fp8")
    special = torch.zeros(600, dtype=torch.bool)
    special[[3, 5, 7]] = True
    assert torch.equal(y[0].isnan(), special)
    assert (y[0][~special] == torch.where(torch.arange(600) == 9, 0.0, 7.0 * world)[~special]).all()
    for value in (0.0, 1e-45, 3e-39, 2.0**-126, 1e30, 3e38 / world):
        y = so.all_reduce(torch.full((4, 600), value), group, plan=so.PlanSpec(algorithm), wire="fp8")
        assert torch.allclose(
            y.double(), torch.full((4, 600), value * world).double(), rtol=0.1, atol=world * 2.0**-136
        ), value
    assert y.isfinite().all()


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_zeros_denormals_and_what_is_not_finite(ranks, algorithm: str) -> None:
    ranks(3).run(special_values, algorithm)


def with_float8_products(rank: int, world: int, group) -> None:
    x = torch.eye(16)[torch.arange(8 * world) % 16].to(torch.float8_e4m3fn)
    weight = (7.0 * 2 ** (torch.arange(32 * 16).view(32, 16) % 3)).to(torch.float8_e4m3fn)
    scales = {"scale_x": torch.tensor(2.0), "scale_weight": torch.tensor(0.5)}
    want = world * (x.float() @ weight.float().t())
    for plan in (so.PlanSpec("direct", 2), so.PlanSpec("serial")):
        y = so.gemm_reduce_scatter(x, weight, group, **scales, plan=plan, wire="fp8")
        assert y.dtype == torch.bfloat16 and torch.equal(y.float(), want.chunk(world)[rank])


def test_products_of_float8_travel_so_too(ranks) -> None:
    ranks(2).run(with_float8_products)


def gradients(rank: int, world: int, group) -> None:
    """Straight through: those of the same call without `wire`."""
    source = torch.Generator().manual_seed(rank)
    x, weight = (torch.randn(6, 8, generator=source, requires_grad=True) for _ in range(2))
    for operation in SUMS:
        found = []
        for wire in (None, "fp8"):
            given = (x, weight) if "gemm" in operation else (x,)
            y = getattr(so, operation)(*given, group, wire=wire)
            found.append(torch.autograd.grad(y, given, torch.ones_like(y)))
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_gradients_pass_straight_through(ranks) -> None:
    ranks(3).run(gradients)


def refused(rank: int, world: int, group) -> None:
    x, weight = torch.ones(4, 8), torch.ones(2, 8)
    for operation in SUMS:
        given = (x, weight) if "gemm" in operation else (x,)
        call = getattr(so, operation)
        for wire in ("fp16", 8, True, ["fp8"]):
            with pytest.raises(ValueError, match=r"wire is .*; expected 'fp8' or None"):
                call(*given, group, wire=wire)
        with pytest.raises(TypeError, match=r"x has dtype torch.float64 but wire is 'fp8'; expected float32, float16"):
            call(*[each.double() for each in given], group, wire="fp8")
    with pytest.raises(TypeError, match="wire"):
        so.all_gather(x, group, wire="fp8")
    assert (so.all_reduce(x, group, wire="fp8") == world).all()  # peers are none the wiser


def test_bad_arguments_are_named(ranks) -> None:
    ranks(2).run(refused)


def one_rank_without(rank: int, world: int, group) -> None:
    with (
        closing(quick_to_fail(group, 5.0, device="cpu")) as comm,
        pytest.raises(so.MismatchError, match="different calls"),
    ):
        for _ in range(2):  # the first call of a rank may end before it can know
            comm.all_reduce(torch.ones(4, 8), None, quantised=rank == 0)


def test_ranks_that_do_not_agree_raise(ranks) -> None:
    ranks(2).run(one_rank_without)


def slots(rank: int, world: int, group) -> tuple[int, int]:
    sizes = []
    for wire in (False, True):
        with closing(so.Communicator(group)) as comm:
            comm.reduce_scatter(torch.ones(1024 * world, 4096), None, quantised=wire)
            sizes.append(comm.slot_bytes)
    return sizes[0], sizes[1]


def test_slots_hold_what_travels(ranks) -> None:
    plain, packed = ranks(2).run(slots)[0]
    assert 0.25 <= packed / plain < 0.33  # a byte for the four of float32


SERIAL = so.PlanSpec("serial")


def explained(rank: int, world: int, group) -> None:
    group = dist.new_group(list(range(world)))  # what is found holds for later calls
    x = torch.ones(8, 600)
    with closing(so.Communicator(group)) as comm:
        comm.all_reduce(x, so.PlanSpec("ring", 2, reduce="accumulate", transfer="store"), quantised=True)
    told = so.explain(so.all_reduce, x, group, wire="fp8")
    assert told.reason.startswith("default") and told.wire == "fp8" and ", float8 wire\n" in str(told)
    for plain in (so.explain(so.all_reduce, x, group), so.explain(so.all_reduce, x, group, plan=SERIAL, wire="fp8")):
        assert plain.wire is None and "float8" not in str(plain), "partials travel as they are"
    ignored = so.PlanSpec("ring", reduce="sum", transfer="store")  # refused without a wire
    assert so.explain(so.gemm_reduce_scatter, x, torch.ones(16, 600), group, wire="fp8", plan=ignored).plan == ignored
    y = so.tune(so.gemm_reduce_scatter, x, torch.ones(16, 600), group, wire="fp8", rounds=1, save=False)
    assert {plan.transfer for plan in y.seconds} == {"copy"}
    rings = [plan for plan in simulate.candidates("gemm_reduce_scatter", True) if plan.algorithm == "ring"]
    assert {plan.reduce for plan in rings} == {"sum"}
    of_wire = so.explain(so.gemm_reduce_scatter, x, torch.ones(16, 600), group, wire="fp8")
    assert of_wire.reason.startswith("measured") and of_wire.plan == y.plan
    assert not so.explain(so.gemm_reduce_scatter, x, torch.ones(16, 600), group).reason.startswith("measured")


def test_calls_are_explained_and_tuned_apart(ranks) -> None:
    ranks(2).run(explained)


def test_less_on_the_wire_is_predicted_to_be_faster_where_the_link_is_what_bounds() -> None:
    shape = chooser.Shape("gemm_reduce_scatter", 8, 8192, 8192, 8192, torch.bfloat16)
    seconds = [chooser.fastest(each).predicted for each in (shape, shape._replace(quantised=True))]
    assert 0.5 < seconds[1] / seconds[0] < 0.9


def test_the_simulator_counts_what_is_packed() -> None:
    """A chunk of 4 rows of 1000 elements: a byte each, and 16 aligned ones for the scale."""
    costs = simulate.Costs.load("h200")
    times = {}
    for quantised in (False, True):
        spec = plans.Spec("reduce_scatter", world=2, quantised=quantised)
        timeline = simulate.simulate(spec, 2 * 4096, 1000, 1, costs=costs, graph=True)
        ops = timeline.plans[0].ops
        times[quantised] = {op.kind: end - start for op, (start, end) in zip(ops, timeline.times[0], strict=True)}
    on_the_way = {each: times[each]["put"] - costs.put_latency for each in times}
    rates = {each: bytes / on_the_way[each] for each, bytes in ((False, 4096 * 2000), (True, 4096 * 1024))}
    assert rates[True] == pytest.approx(rates[False], rel=0.4)  # smaller copies are slower
    touched = 4096 * 2000 + 4096 * 1024
    assert times[True]["quantise"] == pytest.approx(costs.copy_latency + touched / costs.reduce_bandwidth)


# --- plans ---


def without_packing(plan: plans.Plan) -> plans.Plan:
    return plans.Plan(plans.Spec("reduce_scatter", world=2), plan.rank, plan.events, plan.ops)


def test_what_packs_in_a_plan_that_does_not_is_malformed() -> None:
    ranks = plans.build("reduce_scatter", world=2, quantised=True)
    faults = plans.check([without_packing(plan) for plan in ranks])
    assert any("the plan packs nothing" in fault.message for fault in faults)


@pytest.mark.parametrize("operation", SUMS)
def test_rows_that_are_packed_are_never_taken_for_others(operation: str) -> None:
    def broken(change) -> set[str]:
        ranks = plans.build(operation, world=2, reduce="sum" if "gemm" in operation else "accumulate", quantised=True)
        ops = ranks[0].ops
        change(ops)
        ranks[0].ops = ops
        faults = plans.check(ranks)
        assert faults
        return {fault.message.rsplit("expected", 1)[-1].strip() for fault in faults}

    def send_as_it_is(ops) -> None:  # not what was packed, but what it was made of
        packing = next(op for op in ops if op.kind == "quantise")
        put = next(op for op in ops if op.kind == "put")
        put.reads = packing.reads

    def pack_into_another(ops) -> None:
        packing = next(op for op in ops if op.kind == "quantise")
        packing.writes = [plans.Region("output", 0, 0, 0)]

    def copy_packed(ops) -> None:
        ops.append(plans.Op("copy", "send", [plans.Region("packed", 0, 1, 0)], [plans.Region("output", 0, 0, 0)]))

    assert broken(send_as_it_is) & {"a region that is not packed"}
    assert broken(pack_into_another) & {"a region that is packed"}
    assert broken(copy_packed) & {"a region that is not packed"}


def test_wrong_options_are_named() -> None:
    for options, message in (
        ({"operation": "all_gather"}, "quantised is set for all_gather; expected only for gemm_reduce_scatter"),
        (
            {"operation": "gemm_reduce_scatter", "algorithm": "ring"},
            "quantised is set with algorithm ring and reduce accumulate; expected reduce sum",
        ),
        (
            {"operation": "gemm_all_reduce", "reduce": "sum", "transfer": "store"},
            "quantised is set with transfer store; expected transfer copy",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            plans.build(world=2, quantised=True, **options)


def test_quantised_rows() -> None:
    rows = torch.tensor([[448.0, 1.0, -0.4375, 0.0], [0.0, 0.0, 0.0, 0.0], [float("inf"), 7.0, float("nan"), -3.5]])
    values, scales = _C.quantise_rows(rows)
    assert values.dtype == torch.float8_e4m3fn and scales.tolist() == [[1.0], [2.0**-126], [2.0**-6]]
    assert values[:2].tolist() == rows[:2].tolist()
    assert values[2].float().isnan().tolist() == [True, False, True, False] and values[2, 1] == 448
    for wrong in (rows.double(), torch.ones(3, 0), torch.tensor(1.0)):
        with pytest.raises((TypeError, ValueError), match="x has"):
            _C.quantise_rows(wrong)
