"""Layers in float8: exact where float8 holds what is multiplied, else against float64 of dequantised factors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from blocks import ResidualMlp
from fp8_layers import KINDS, ROWS, K, N, Step, dequantised, integers, normal
from ranks import Pools
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

import streamoverlap as so
from streamoverlap import _C

E4M3 = torch.float8_e4m3fn
PLANS = (None, so.PlanSpec("ring", 2, 2, "sum"), so.PlanSpec("serial"))
OPS = torch.ops.streamoverlap
COMPILING = 300.0


# --- what float8 is made of ---


def test_rows_that_float8_holds_are_exact() -> None:
    x = torch.randint(-7, 8, (3, 5, 32), generator=torch.Generator().manual_seed(1)).float()
    x[..., 0] = 7
    x *= 3.0 * 2.0 ** torch.arange(-7, 8).view(3, 5, 1)
    for given in (x, x.bfloat16(), x.clone().half()):
        values, scales = _C.quantise_rows(given)
        assert (values.dtype, scales.dtype, scales.shape) == (E4M3, torch.float32, (3, 5, 1))
        assert torch.equal(values.float() * scales, x)
        assert values[..., 0].float().eq(448).all()


def test_rows_are_within_a_rounding_of_float8() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(2)) * 10.0 ** torch.linspace(-30, 30, 64)[:, None]
    for given in (x, x.t().contiguous().t()):
        values, scales = _C.quantise_rows(given)
        assert values.is_contiguous()
        error = (values.double() * scales.double() - x.double()).abs()
        assert (error <= (x.double().abs() * 2**-4).maximum(scales.double() * 2**-10) * (1 + 1e-6)).all()


def test_rows_of_zeros_and_of_nearly_nothing_stay_so() -> None:
    x = torch.tensor([[0.0, -0.0], [1e-44, 0.0], [1e-37, -1e-37]])
    values, scales = _C.quantise_rows(x)
    assert scales.eq(2.0**-126).all() and values[:2].float().eq(0).all()
    torch.testing.assert_close(values.float() * scales, x, rtol=2**-4, atol=2.0**-136)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_nan_and_alone(bad: float) -> None:
    x = torch.ones(3, 16)
    x[1, 5] = bad
    values, scales = _C.quantise_rows(x)
    assert values.float().isnan().nonzero().tolist() == [[1, 5]]
    assert scales.eq(1 / 448).all() and values.float().eq(448).sum() == 3 * 16 - 1


# --- layers against one process ---


def options_of(kind: type) -> list[dict[str, Any]]:
    column = kind is so.ColumnParallelLinear
    gathers = [{"save_gathered": True}] if column else []
    return [{}, {"sequence_parallel": False}, *gathers]


def exact(rank: int, world: int, group, kind: type) -> list[str]:
    wrong = []
    for i, (plan, options) in enumerate(product(PLANS, options_of(kind))):
        given = {"dtype": (torch.float32, torch.float16)[i % 2], "bias": i % 3 > 0, "lead": ((), (2 * world, 3))[i % 2]}
        wrong += Step(kind, rank, world, group, plan=plan, **given, **options).wrong()
        given["lead"] = (7,) if not options.get("sequence_parallel", True) else (2 * world,)
        wrong += Step(kind, rank, world, group, plan=plan, **given, **options).wrong()
    return wrong[:2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_what_float8_holds_is_multiplied_exactly(ranks: Pools, world: int, kind: type) -> None:
    assert ranks(world).run(exact, kind) == [[]] * world


TOLERANCES = {torch.float32: 1e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def rounded(rank: int, world: int, group, kind: type) -> list[str]:
    wrong = []
    for (dtype, tolerance), options in product(TOLERANCES.items(), options_of(kind)):
        given = {"draw": normal, "quantise": dequantised, "dtype": dtype, "lead": (2 * world, 5)}
        wrong += Step(kind, rank, world, group, **given, **options).wrong(tolerance)
    return wrong[:2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_must_be_rounded_is_as_of_dequantised_factors(ranks: Pools, world: int, kind: type) -> None:
    assert ranks(world).run(rounded, kind) == [[]] * world


def beside_the_layer_as_it_was(rank: int, world: int, group, kind: type) -> None:
    step = Step(kind, rank, world, group, draw=normal, lead=(8 * world, 4))
    found = step.run()
    step.layer = kind.from_linear(step.whole, group)
    wanted = step.run()
    for name in ("y", "x.grad"):
        error = (found[name] - wanted[name]).norm() / wanted[name].norm()
        assert 0.005 < error < 0.05, (name, error)
    for name in ("weight.grad", "bias.grad"):
        assert torch.equal(found[name], wanted[name])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_weights_are_not_of_float8_and_the_rest_is_near(ranks: Pools, kind: type) -> None:
    ranks(2).run(beside_the_layer_as_it_was, kind)


@contextmanager
def told() -> Iterator[list[tuple]]:
    """What a communicator is asked for: the operation, the dtype of x, and with scales whether sums are short."""
    calls: list[tuple] = []
    call = so.Communicator._call

    def tell(self: so.Communicator, asked: Any, *args: Any, **options: Any) -> Any:
        calls.append((asked.operation, asked.x.dtype, *([asked.scaling.use_fast_accum] if asked.scaling else [])))
        return call(self, asked, *args, **options)

    so.Communicator._call = tell
    try:
        yield calls
    finally:
        so.Communicator._call = call


GATHERED = ("all_gather", torch.bfloat16)
CALLS = [
    (KINDS[0], {}, [("all_gather_gemm", E4M3, True)], [GATHERED, ("gemm_reduce_scatter", E4M3, False)]),
    (
        KINDS[0],
        {"save_gathered": True},
        [("all_gather_gemm", E4M3, True), GATHERED],
        [("gemm_reduce_scatter", E4M3, False)],
    ),
    (KINDS[0], {"sequence_parallel": False}, [], [("gemm_all_reduce", E4M3, False)]),
    (KINDS[1], {}, [("gemm_reduce_scatter", E4M3, True)], [("all_gather_gemm", E4M3, False), GATHERED]),
    (KINDS[1], {"sequence_parallel": False}, [("gemm_all_reduce", E4M3, True)], []),
]


def exchanges(rank: int, world: int, group, kind: type, options: dict, compiles: bool) -> tuple[list, list]:
    torch._dynamo.reset()
    layer = Step(kind, rank, world, group, dtype=torch.bfloat16, **options).layer
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiles else layer
    x = torch.ones(ROWS * world, K, dtype=torch.bfloat16, requires_grad=True)
    with told() as forward:
        y = run(x)
    with told() as backward:
        y.sum().backward()
    return forward, backward


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("kind", "options", "forward", "backward"), CALLS)
def test_float8_is_what_travels_to_products(
    ranks: Pools, kind: type, options: dict, forward: list, backward: list, compiles: bool
) -> None:
    for found in ranks(2).run(exchanges, kind, options, compiles, timeout=COMPILING):
        assert found == (forward, backward)


def whole_features(rank: int, world: int, group) -> None:
    """Gathered, or taken apart, by the layer itself."""
    options = {"sequence_parallel": False}
    column, row = Step(KINDS[0], rank, world, group, **options), Step(KINDS[1], rank, world, group, **options)
    wanted = column.run()["y"], row.run()["y"]
    column = Step(KINDS[0], rank, world, group, gather_output=True, **options)
    y = column.layer(column.x)
    assert torch.equal(column.own(y, features=True), wanted[0])
    row = Step(KINDS[1], rank, world, group, input_is_parallel=False, **options)
    assert torch.equal(row.layer(row.x), wanted[1])


def test_whole_features(ranks: Pools) -> None:
    ranks(2).run(whole_features)


def delayed(rank: int, world: int, group, kind: type, options: dict) -> list[str]:
    """With any stream of any rank late, call after call, also of two calls in flight."""
    wrong = []
    comm = so.Communicator.of(group, "cpu")
    for seed in range(8):
        comm._set_hook(seed=seed * world + rank, max_delay_ms=3.0)
        wrong += Step(kind, rank, world, group, **options).wrong()
    comm._clear_hook()
    return wrong[:2]


@pytest.mark.parametrize(("kind", "options"), [(KINDS[0], {"save_gathered": True}), (KINDS[1], {})])
def test_random_delays_in_any_stream(ranks: Pools, kind: type, options: dict) -> None:
    assert ranks(3).run(delayed, kind, options) == [[]] * 3


# --- what layers are used with ---


def frozen(rank: int, world: int, group, kind: type, options: dict) -> None:
    step = Step(kind, rank, world, group, **options)
    step.layer.weight.requires_grad_(False)
    saved: list[int] = []
    x = step.own(step.x, not step.column).clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        y = step.layer(x)
    assert saved == [step.layer.weight.data_ptr()]
    y.backward(step.own(step.g, step.column))
    assert step.layer.weight.grad is None
    assert torch.equal(x.grad.double(), step.wanted()["x.grad"])


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_save_no_input(ranks: Pools, kind: type) -> None:
    for options in options_of(kind):
        ranks(2).run(frozen, kind, options)


def first_of_a_model(rank: int, world: int, group, kind: type) -> None:
    step = Step(kind, rank, world, group)
    x = step.own(step.x, not step.column)
    step.layer(x).backward(step.own(step.g, step.column))
    assert torch.equal(step.layer.weight.grad.double(), step.wanted()["weight.grad"])


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_without_gradient(ranks: Pools, kind: type) -> None:
    ranks(2).run(first_of_a_model, kind)


def fused(rank: int, world: int, group, kind: type, options: dict) -> None:
    step = Step(kind, rank, world, group, dtype=torch.bfloat16, gradient_accumulation_fusion=True, **options)
    weight = step.layer.weight
    weight.main_grad = torch.full(weight.shape, 2.0**16)  # to which bfloat16 could add nothing
    assert step.run()["weight.grad"] is None
    assert torch.equal(weight.main_grad.double() - 2.0**16, step.wanted()["weight.grad"])


@pytest.mark.parametrize("kind", KINDS)
def test_weight_gradients_accumulate_into_main_grad(ranks: Pools, kind: type) -> None:
    for options in options_of(kind):
        ranks(2).run(fused, kind, options)


def autocast(rank: int, world: int, group, kind: type, options: dict) -> None:
    """Results are rounded once, also where a product's scales are not powers of two."""
    step = Step(kind, rank, world, group, draw=lambda *shape, seed: 3 * integers(*shape, seed=seed), **options)
    with torch.autocast("cpu", torch.bfloat16):
        y = step.layer(step.own(step.x, not step.column).clone().requires_grad_())
        assert torch.equal(y, step.layer(step.own(step.x, not step.column)))
    wanted = step.wanted()["y"]
    assert y.dtype == torch.bfloat16
    if step.column:
        assert torch.equal(y, wanted.bfloat16())
    torch.testing.assert_close(y.double(), wanted, rtol=2**-6, atol=2**-6 * wanted.abs().max().item())
    y.float().sum().backward()
    assert step.layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_casts_and_products_round_once(ranks: Pools, kind: type) -> None:
    for options in options_of(kind):
        ranks(2).run(autocast, kind, options)


def checkpointed(rank: int, world: int, group, kind: type) -> list[str]:
    step = Step(kind, rank, world, group)
    return step.wrong(function=lambda x: checkpoint(step.layer, x, use_reentrant=False))


@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing(ranks: Pools, kind: type) -> None:
    assert ranks(2).run(checkpointed, kind) == [[]] * 2


def not_finite(rank: int, world: int, group, kind: type, options: dict, bad: float) -> None:
    """In row 2 of x, row 3 of y's gradient, and for output feature 5 and input feature 9 in the weight."""
    step = Step(kind, rank, world, group, bias=False, **options)
    clean = step.run()
    step.x[2, -1] = step.g[3, 0] = bad
    found = step.run()
    step = Step(kind, rank, world, group, bias=False, **options)
    step.whole.weight.data[5, 9] = bad
    step.layer.load_whole(step.whole.weight)
    of_weight = step.run()
    for name, row, column in (("y", 2, 5), ("x.grad", 3, 9)):
        features = (name == "y") == step.column
        shape = (len(step.x), (step.g if name == "y" else step.x).shape[-1])
        hit = torch.zeros(shape, dtype=torch.bool)
        hit[row] = True
        assert same(found[name], clean[name], step.own(hit, features)), name
        hit = torch.zeros(shape, dtype=torch.bool)
        hit[:, column] = True
        assert same(of_weight[name], clean[name], step.own(hit, features)), name


def same(found: Tensor, clean: Tensor, but: Tensor) -> bool:
    return bool(found[but].isnan().all()) and torch.equal(found[~but], clean[~but])


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_arrives(ranks: Pools, kind: type, bad: float) -> None:
    for options in options_of(kind):
        ranks(2).run(not_finite, kind, options, bad)


def special_values(rank: int, world: int, group) -> None:
    layer = so.ColumnParallelLinear(K, N * world, group=group, precision="fp8")
    x = torch.zeros(4, K, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, layer.bias.detach().expand_as(y))
    y.backward(torch.zeros_like(y))
    assert x.grad.eq(0).all() and layer.weight.grad.eq(0).all()
    nn.init.zeros_(layer.weight)
    assert torch.equal(layer(torch.ones(4, K)), layer.bias.detach().expand_as(y))


def test_zeros_give_zeros(ranks: Pools) -> None:
    ranks(2).run(special_values)


class Mlp(ResidualMlp):
    def __init__(self, group: Any, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        up = {"save_gathered": options.pop("save_gathered", False)}
        self.up = so.ColumnParallelLinear(32, 64, group=group, **up, **options)
        self.down = so.RowParallelLinear(64, 32, group=group, **options)


def losses(rank: int, world: int, group, precision: str | None, dtype: torch.dtype) -> list[float]:
    """Of a small map that is learnt from a fixed one, on all ranks."""
    model = Mlp(group, precision=precision, dtype=dtype)
    before = {name: (value.dtype, value.shape) for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    teacher = normal(32, 32, seed=5).to(dtype) / 6
    found = []
    for step in range(120):
        x = normal(32 * world, 32, seed=100 + step).to(dtype).chunk(world)[rank]
        loss = (model(x) - x - silu(x @ teacher)).square().mean()
        loss.backward()
        so.sync_sequence_parallel_grads(model)
        optimizer.step()
        optimizer.zero_grad()
        found.append(so.all_reduce(loss.detach()[None].float(), group).item() / world)
    assert {name: (value.dtype, value.shape) for name, value in model.state_dict().items()} == before
    return found


def test_a_model_trains_as_it_does_without(ranks: Pools) -> None:
    (float8, other), (wide, _) = (ranks(2).run(losses, precision, torch.float32) for precision in ("fp8", None))
    assert float8 == other
    begin, end = sum(wide[:10]) / 10, sum(wide[-10:]) / 10
    assert end < 0.3 * begin
    assert sum(float8[-10:]) / 10 == pytest.approx(end, rel=0.15)
    assert float8 != wide


# --- compiled ---


def compile_mlp(rank: int, world: int, group, options: dict, backend: str) -> int:
    """Compares with eager, for changing numbers of tokens; returns how many graphs were made."""
    torch._dynamo.reset()
    model = Mlp(group, precision="fp8", **options)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for step, rows in enumerate((4, 4, 6, 10, 2)):
        x = normal(rows, 32, seed=step + (rank if model.up.sequence_parallel else 0)).float()
        for got, wanted in zip(model.train_on(compiled, x), model.train_on(model, x), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    return counter.frame_count


@pytest.mark.parametrize("options", [{}, {"save_gathered": True}, {"sequence_parallel": False}])
def test_a_block_is_one_graph_for_any_number_of_tokens(ranks: Pools, options: dict) -> None:
    """One for the first number, and one for all others."""
    assert set(ranks(2).run(compile_mlp, options, "aot_eager", timeout=COMPILING)) == {2}


def test_inductor(ranks: Pools) -> None:
    assert set(ranks(2).run(compile_mlp, {}, "inductor", timeout=COMPILING)) == {2}


def cases(group_name: str) -> dict[str, tuple[Callable, tuple]]:
    x, rows, g = (normal(*shape, seed=1).bfloat16() for shape in ((3, 32), (6, 2, 32), (6, 16)))
    w, b = normal(16, 32, seed=2).bfloat16(), normal(16, seed=3).bfloat16()
    where = group_name, ""
    for tensor in (x, rows, w, b):
        tensor.requires_grad_()
    needs = (True, [True], [True])
    return {
        "all_gather_gemm": (OPS.all_gather_gemm, (x, [w], [b], group_name, False, "", "fp8")),
        "all_gather_gemm, gathered": (OPS.all_gather_gemm, (x, [w], [], group_name, True, "", "fp8")),
        "gemm_reduce_scatter": (OPS.gemm_reduce_scatter, (rows, w, b, *where, "fp8")),
        "gemm_all_reduce": (OPS.gemm_all_reduce, (rows, w, b, *where, "fp8")),
        "column_linear": (OPS.column_linear, (rows, w, b, *where, "fp8")),
        "column_backward": (
            OPS.column_backward,
            ([g], x.detach(), "shard", [w.detach()], *needs, *where, "fp8"),
        ),
    }


def check_op(rank: int, world: int, group, name: str) -> dict[str, str]:
    op, args = cases(group.group_name)[name]
    return torch.library.opcheck(op.default, args)


@pytest.mark.parametrize("name", list(cases("")))
def test_opcheck(ranks: Pools, name: str) -> None:
    for found in ranks(2).run(check_op, name, timeout=COMPILING):
        assert len(found) == 4 and set(found.values()) == {"SUCCESS"}


# --- parallelize_module ---


class Whole(Mlp):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)


def styled(rank: int, world: int, group, layout: Any) -> None:
    """The same as the layers, which are checked above."""
    sharded = layout != Replicate()
    layers = Mlp(group, precision="fp8", sequence_parallel=sharded)
    model = Whole()
    for name, whole in (("up", model.up), ("down", model.down)):
        getattr(layers, name).load_whole(whole.weight, whole.bias)
    styles = {
        "up": so.ColwiseParallel(input_layouts=layout, precision="fp8"),
        "down": so.RowwiseParallel(output_layouts=layout, precision="fp8"),
    }
    parallelize_module(model, init_device_mesh("cpu", (world,)), styles)
    x = normal(6, 32, seed=rank if sharded else 0).float()
    got, wanted = model.train_on(model, x), layers.train_on(layers, x)
    so.sync_sequence_parallel_grads(layers)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    for one, other in zip(model.parameters(), layers.parameters(), strict=True):
        torch.testing.assert_close(one.grad.to_local(), other.grad)


@pytest.mark.parametrize("layout", [Shard(0), Replicate()], ids=str)
def test_styles_give_the_same(ranks: Pools, layout: Any) -> None:
    ranks(2).run(styled, layout)


# --- errors ---


def bad_layers(rank: int, world: int, group) -> None:
    column, row = KINDS
    fp8 = {"group": group, "precision": "fp8"}
    for kind, sizes, options, message in (
        (column, (32, 32), {"precision": "fp16"}, "precision is 'fp16'; expected None or 'fp8'"),
        (row, (32, 32), {"precision": True}, "precision is True; expected None or 'fp8'"),
        (column, (24, 32), fp8, r"in_features is 24; expected a multiple of 16 with precision='fp8', as products of"),
        (column, (32, 48), fp8, r"out_features is 48; expected a multiple of 16 times the group's 2 ranks with prec"),
        (row, (48, 32), fp8, r"in_features is 48; expected a multiple of 16 times the group's 2 ranks with precision"),
        (row, (32, 24), fp8, r"out_features is 24; expected a multiple of 16 with precision='fp8', as products of f"),
    ):
        with pytest.raises(ValueError, match=message):
            kind(*sizes, **options)
        if len(options) == 2:
            with pytest.raises(ValueError, match=message):
                kind.from_linear(nn.Linear(*sizes), **options)
    with pytest.raises(ValueError, match="precision is 'fp4'; expected None or 'fp8'"):
        so.ColwiseParallel(precision="fp4")
    wrong = r"dtype is torch\.float64; expected float32, bfloat16 or float16 with precision='fp8'"
    for kind in KINDS:
        with pytest.raises(TypeError, match=wrong):
            kind(32, 32, dtype=torch.float64, **fp8)
        with pytest.raises(TypeError, match=wrong):
            kind.from_linear(nn.Linear(32, 32).double(), **fp8)
    mesh = init_device_mesh("cpu", (world,))
    with pytest.raises(ValueError, match="out_features is 24; expected a multiple of 16 with"):
        parallelize_module(nn.Linear(32, 24), mesh, so.RowwiseParallel(precision="fp8"))
    with pytest.raises(TypeError, match=r"weight has dtype torch\.float64; expected float32, bfloat16 or float16 with"):
        parallelize_module(nn.Linear(32, 32).double(), mesh, so.RowwiseParallel(precision="fp8"))
    assert column(32, 32, **fp8).precision == "fp8" and "precision='fp8'" in repr(column(32, 32, **fp8))
    assert column(24, 48, group=group).precision is None


def test_bad_layers_are_refused_by_name(ranks: Pools) -> None:
    ranks(2).run(bad_layers)


def bad_inputs(rank: int, world: int, group) -> None:
    for sharded in (True, False):
        layer = so.ColumnParallelLinear(32, 32, group=group, precision="fp8", sequence_parallel=sharded)
        with pytest.raises(TypeError, match=r"weight has dtype torch\.float32; expected that of x, torch\.bfloat16"):
            layer(torch.ones(4, 32, dtype=torch.bfloat16))
        layer.bias.data = layer.bias.data.bfloat16()
        with pytest.raises(TypeError, match=r"bias has dtype torch\.bfloat16; expected out_dtype, torch\.float32"):
            layer(torch.ones(4, 32))
        with pytest.raises(TypeError, match=r"x has dtype torch\.float64; expected float32, bfloat16 or float16"):
            layer.double()(torch.ones(4, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"precision is 'fp9'; expected '' \(x and weight as they are\), 'fp8'"):
        OPS.column_linear(torch.ones(4, 32), torch.ones(32, 32), None, group.group_name, "", "fp9")


def test_bad_inputs_are_refused_by_name(ranks: Pools) -> None:
    ranks(2).run(bad_inputs)
