"""Products of float8 with scales, tensor- and row-wise, on real ranks: exact for integers, else within rounding."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from ranks import quick_to_fail
from scaled_references import E4M3, E5M2, OPERATIONS, OUT_DTYPES, Case, call, expected, flat, inputs, sweep, wrong_in
from torch import Tensor

import streamoverlap as so
from streamoverlap import chooser

ROWS = (7, 1, 12, 0, 33)


def plans_of(operation: str) -> list[so.PlanSpec]:
    reductions = ("accumulate", "sum") if operation != "all_gather_gemm" else ("accumulate",)
    overlapped = [so.PlanSpec(*each) for each in product(("direct", "ring"), (1, 2, 3), (2,), reductions)]
    return [so.PlanSpec("serial"), *overlapped]


def run_all(rank: int, world: int, group, cases: list[Case]) -> list[str]:
    wrong = []
    for case in cases:
        results = flat(call(case, inputs(case, rank, world), group))
        wrong += filter(None, [wrong_in(case, results, expected(case, rank, world), world)])
        assert so.Communicator.of(group, "cpu").last_choice.plan == case.plan
    return wrong[:3]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_plan_gives_the_exact_result(ranks, world: int, operation: str) -> None:
    assert ranks(world).run(run_all, sweep(operation, plans_of(operation), ROWS)) == [[]] * world


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_must_be_rounded_is_within_rounding(ranks, operation: str) -> None:
    plans = [so.PlanSpec(algorithm, 2) for algorithm in ("direct", "ring")] + [so.PlanSpec("serial")]
    cases = [
        Case(operation, plan, x_dtype, out, rows, (9,), 64, (32,), bias=True, integers=False, seed=7)
        for plan, x_dtype, out, rows in product(plans, (E4M3, E5M2), OUT_DTYPES, (False, True))
    ]
    assert ranks(3).run(run_all, cases) == [[]] * 3


def special_values(rank: int, world: int, group) -> None:
    """As torch._scaled_mm on CUDA: the product, then its scales."""
    values = torch.tensor([1e-4, 1e4, 0.0, float("inf"), float("nan"), 1.0, -1.0, 3.0])
    x = torch.eye(8, 16).to(E4M3)
    x[6, 3] = float("nan")
    weight = torch.ones(16, 16).to(E4M3)
    weight[2] = 0
    of_weight = torch.ones(1, 16)
    of_weight[0, 3], of_weight[0, 4], of_weight[0, 5] = 0.0, float("inf"), 1e4
    want = ((x.float() @ weight.float().t()) * values[:, None] * of_weight).repeat(world, 1)
    assert want.isnan().any() and want.isinf().any()
    for algorithm in ("direct", "ring", "serial"):
        plan = so.PlanSpec(algorithm, 2)
        options = {"scale_x": values[:, None], "scale_weight": of_weight, "out_dtype": torch.float32, "plan": plan}
        y = so.all_gather_gemm(x, weight, group, **options)
        torch.testing.assert_close(y, want, rtol=0, atol=0, equal_nan=True)
    assert (want[:8][0][[0, 5]] == torch.tensor([1e-4, 1.0])).all()


def test_special_scales_and_values_are_treated_as_by_torch(ranks) -> None:
    ranks(2).run(special_values)


def scales_that_change(rank: int, world: int, group) -> list[str]:
    """On slots used again and again, with ops delayed at random."""
    comm = so.Communicator(group, device="cpu")
    comm._set_hook(seed=5 + rank, max_delay_ms=2.0)
    wrong, works = [], []
    for i in range(24):
        algorithm = ("direct", "ring")[i % 2]
        case = Case("all_gather_gemm", so.PlanSpec(algorithm, 1 + i % 3, 2), rows=i % 3 > 0, lead=(9,), seed=100 + i)
        given = inputs(case, rank, world)
        scaling = so.scaling.scaling_of(given.scale_x, given.scale_weights, None, False, several=True)
        if i % 4 == 3:  # what has no scales lies where they were
            comm.all_gather(torch.full((50, 16), float("nan")), so.PlanSpec("ring"))
        work = comm.all_gather_gemm(given.x, given.weights, [], False, case.plan, scaling=scaling, async_op=True)
        works.append((case, work))
        if len(works) > 1 or i == 23:
            for done, pending in works:
                results, _ = pending.wait()
                wrong += filter(None, [wrong_in(done, results, expected(done, rank, world), world)])
            works.clear()
    comm.close()
    return wrong[:3]


@pytest.mark.parametrize("world", [2, 3])
def test_scales_that_change_from_call_to_call_are_never_mixed_up(ranks, world: int) -> None:
    assert ranks(world).run(scales_that_change) == [[]] * world


def asynchronous(rank: int, world: int, group) -> list[str]:
    wrong = []
    for operation, algorithm in product(OPERATIONS, ("direct", "serial")):
        case = Case(operation, so.PlanSpec(algorithm, 2), rows=True, bias=True, seed=3)
        work = call(case, inputs(case, rank, world), group, async_op=True)
        wrong += filter(None, [wrong_in(case, flat(work.wait()), expected(case, rank, world), world)])
    return wrong


def test_asynchronous_calls_give_the_same(ranks) -> None:
    assert ranks(2).run(asynchronous) == [[]] * 2


def views(rank: int, world: int, group) -> None:
    """Of anything: x and scales are copied where products cannot read them in place."""
    case = Case("all_gather_gemm", so.PlanSpec("ring", 2), rows=True, lead=(6,), seed=1)
    given = inputs(case, rank, world)
    storage = torch.zeros(6 * 16 + 1, dtype=torch.uint8)
    storage[1:] = given.x.view(torch.uint8).flatten()
    given.x = storage[1:].view(E4M3).view(6, 16)
    given.scale_x = given.scale_x.repeat(1, 3)[:, 1:2]
    assert wrong_in(case, flat(call(case, given, group)), expected(case, rank, world), world) is None
    given.x = given.x.t().contiguous().t()
    assert wrong_in(case, flat(call(case, given, group)), expected(case, rank, world), world) is None


def test_views_are_read_rightly(ranks) -> None:
    ranks(2).run(views)


def mismatched(rank: int, world: int, group, different: str) -> str:
    own = dist.new_group(list(range(world)))
    comm = quick_to_fail(own, 10.0, device="cpu")
    case = Case("all_gather_gemm", so.PlanSpec("direct"), out_dtype=torch.bfloat16)
    if rank == 1:
        changed = {"dtype": {"x_dtype": E5M2}, "out_dtype": {"out_dtype": torch.float32}, "scales": {"rows": True}}
        case = Case("all_gather_gemm", case.plan, **{"out_dtype": torch.bfloat16, **changed[different]})
    try:
        call(case, inputs(case, rank, world), own)
    except so.MismatchError as error:
        return str(error)
    finally:
        comm.close()
    return "no error"


@pytest.mark.parametrize("different", ["dtype", "out_dtype", "scales"])
def test_ranks_that_differ_are_told(ranks, different: str) -> None:
    for told in ranks(2).run(mismatched, different):
        assert "different" in told or "rank" in told, told
        assert told != "no error"


def wide(*shape: int) -> Tensor:
    return torch.ones(shape)


def f8(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.ones(shape).to(dtype)


ONE = {"scale_x": torch.ones(1), "scale_weight": torch.ones(1)}
ROW = {"scale_x": torch.ones(4, 1), "scale_weight": torch.ones(1, 32)}

# x, weight, options; error, message
BAD = {
    "no scales": (f8(4, 16), f8(32, 16), {}, TypeError, "x has dtype torch.float8_e4m3fn but scale_x is None"),
    "scales of float32": (wide(4, 16), wide(32, 16), ONE, TypeError, "x has dtype torch.float32 but scale_x is given"),
    "one scale": (f8(4, 16), f8(32, 16), {"scale_x": torch.ones(1)}, TypeError, "scale_weight is None but scale_x is"),
    "a number": (f8(4, 16), f8(32, 16), {**ONE, "scale_x": 1.0}, TypeError, "scale_x is a float; expected a torch.T"),
    "e5m2 twice": (
        f8(4, 16, dtype=E5M2),
        f8(32, 16, dtype=E5M2),
        ONE,
        TypeError,
        "weight has dtype torch.float8_e5m2; expected torch.float8_e4m3fn",
    ),
    "K": (f8(4, 24), f8(32, 24), ONE, ValueError, r"x.shape\[-1\] is 24; expected a multiple of 16"),
    "N": (f8(4, 16), f8(20, 16), ONE, ValueError, r"weight.shape\[0\] is 20; expected a multiple of 16"),
    "column-major": (f8(4, 32), f8(32, 32).t(), ONE, ValueError, r"strides \[1, 32\]; expected a row-major matrix"),
    "strides": (f8(4, 16), f8(32, 24)[:, :16], ONE, ValueError, "expected rows at multiples of 16 bytes"),
    "scale dtype": (
        f8(4, 16),
        f8(32, 16),
        {**ONE, "scale_x": torch.ones(1, dtype=torch.float64)},
        TypeError,
        "scale_x has dtype torch.float64; expected torch.float32",
    ),
    "scale device": (
        f8(4, 16),
        f8(32, 16),
        {**ONE, "scale_weight": torch.ones(1, device="meta")},
        (TypeError, ValueError),
        "scale_weight is on meta; expected the device of x, cpu",
    ),
    "scale_x shape": (
        f8(4, 16),
        f8(32, 16),
        {**ROW, "scale_x": torch.ones(4)},
        ValueError,
        r"scale_x has shape \[4\]; expected \[4, 1\], one value a row of x, as scale_weight is row-wise",
    ),
    "mixed": (f8(4, 16), f8(32, 16), {**ONE, "scale_x": torch.ones(4, 1)}, ValueError, "expected one element, as"),
    "scale_weight shape": (
        f8(4, 16),
        f8(32, 16),
        {**ROW, "scale_weight": torch.ones(32)},
        ValueError,
        r"scale_weight has shape \[32\]; expected one element, or \[1, 32\] or \[32, 1\]",
    ),
    "out_dtype": (f8(4, 16), f8(32, 16), {**ONE, "out_dtype": torch.float64}, TypeError, "out_dtype is torch.float64"),
    "out_dtype alone": (wide(4, 16), wide(32, 16), {"out_dtype": torch.float32}, ValueError, "but scale_x is None"),
    "fast": (f8(4, 16), f8(32, 16), {**ONE, "use_fast_accum": 1}, TypeError, "use_fast_accum is a int; expected a b"),
    "bias": (
        f8(4, 16),
        f8(32, 16),
        {**ONE, "bias": torch.ones(32)},
        TypeError,
        "bias has dtype torch.float32; expected out_dtype, torch.bfloat16",
    ),
    "scale needs grad": (
        f8(4, 16),
        f8(32, 16),
        {**ONE, "scale_x": torch.ones(1, requires_grad=True)},
        RuntimeError,
        "scale_x requires grad, but this function records no gradient",
    ),
    "bias needs grad": (
        f8(4, 16),
        f8(32, 16),
        {**ONE, "bias": torch.ones(32, dtype=torch.bfloat16, requires_grad=True)},
        RuntimeError,
        "bias requires grad, but this function records no gradient",
    ),
}
BAD_GATHERS = {
    "gathered": (f8(4, 16), f8(32, 16), {**ONE, "return_gathered": True}, ValueError, "return_gathered is True with"),
    "list": (f8(4, 16), [f8(32, 16)], ONE, TypeError, "scale_weight is one tensor but weight is a list"),
    "too few": (
        f8(4, 16),
        [f8(32, 16), f8(32, 16)],
        {"scale_x": torch.ones(1), "scale_weight": [torch.ones(1)]},
        ValueError,
        "scale_weight has 1 tensors; expected one for each of the 2 weights",
    ),
    "both modes": (
        f8(4, 16),
        [f8(32, 16), f8(32, 16)],
        {"scale_x": torch.ones(1), "scale_weight": [torch.ones(1), torch.ones(1, 32)]},
        ValueError,
        r"scale_weight\[1\] has shape \[1, 32\]; expected all of scale_weight to be tensor-wise, or all row-wise",
    ),
}


def bad_inputs(rank: int, world: int, group, operation: str, names: list[str]) -> None:
    for name in names:
        x, weight, options, error, message = (BAD | BAD_GATHERS)[name]
        with pytest.raises(error, match=message):
            getattr(so, operation)(x, weight, group, **options)
    with pytest.raises(TypeError, match="expected float32, float64, bfloat16 or float16"):
        so.all_gather(f8(4, 16), group)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_bad_input_is_named_before_anything_is_sent(ranks, operation: str) -> None:
    names = [*BAD, *(BAD_GATHERS if operation == "all_gather_gemm" else ())]
    ranks(1).run(bad_inputs, operation, names)


def explained_and_tuned(rank: int, world: int, group) -> None:
    group = dist.new_group(list(range(world)))  # what is found holds for later calls
    case = Case("all_gather_gemm", None, rows=True, lead=(8,), bias=True)
    given = inputs(case, rank, world)
    options = {"bias": given.biases[0], "scale_x": given.scale_x, "scale_weight": given.scale_weights[0]}
    assert so.explain(so.all_gather_gemm, given.x, given.weights[0], group, **options).plan is not None
    tuned = so.tune(so.all_gather_gemm, given.x, given.weights[0], group, rounds=1, save=False, **options)
    assert so.explain(so.all_gather_gemm, given.x, given.weights[0], group, **options).plan == tuned.plan
    results = flat(call(case, given, group))
    assert wrong_in(case, results, expected(case, rank, world), world) is None
    so.Communicator.of(group, "cpu").close()


def test_calls_are_explained_and_tuned(ranks) -> None:
    ranks(2).run(explained_and_tuned)


def test_the_simulator_knows_bytes_and_rates() -> None:
    x, weight = f8(64, 32), f8(32, 32)
    scaling = so.scaling.scaling_of(torch.ones(1), torch.ones(1), torch.float32, True)
    gather = chooser.shape_of("all_gather_gemm", 2, x, [weight], scaling)
    scatter = chooser.shape_of("gemm_reduce_scatter", 2, x, [weight], scaling)
    assert (gather.exchanged_bytes, scatter.exchanged_bytes) == (1, 4)
    assert chooser.costs_of(E4M3).gemm_flops == 2 * chooser.costs_of(torch.bfloat16).gemm_flops
    large = gather._replace(m=8192, n=8192, k=8192)
    wide = large._replace(dtype=torch.bfloat16, out_dtype=None, scaling="")
    plan = so.PlanSpec("ring", 2)
    assert 0.3 < chooser.predicted(large, plan) / chooser.predicted(wide, plan) < 0.8


def compiled(rank: int, world: int, group) -> None:
    given = inputs(Case("all_gather_gemm", None), rank, world)

    def function(x, weight, scale_x, scale_weight):
        return so.all_gather_gemm(x, weight, group, scale_x=scale_x, scale_weight=scale_weight)

    given = given.x, given.weights[0], given.scale_x, given.scale_weights[0]
    with pytest.raises(Exception, match=r"scale_x is a .*Tensor.* in a compiled call; expected the default with"):
        torch.compile(function, fullgraph=True, backend="eager")(*given)
    assert torch.equal(torch.compile(function, backend="eager")(*given), function(*given))


def test_a_compiler_is_told(ranks) -> None:
    ranks(1).run(compiled)
