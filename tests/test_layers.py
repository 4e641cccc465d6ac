"""Tensor-parallel layers and differentiable ops against one process on the whole weights."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.utils.checkpoint import checkpoint

import streamoverlap as so

D, F, ROWS = 6, 24, 3  # ROWS of a rank
PLANS = (None, so.PlanSpec("ring", 2, 2, "sum"), so.PlanSpec("serial"))


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


class Whole(nn.Module):
    """What one process computes."""

    def __init__(self, dtype: torch.dtype = torch.float64, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, F, bias, dtype=dtype), nn.Linear(F, D, bias, dtype=dtype)
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(integers(*parameter.shape, seed=seed))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))

    def between(self, x: Tensor) -> Tensor:
        return x * 2

    def parallel(self, group, up: dict | None = None, down: dict | None = None, **both) -> Parallel:
        made = Parallel()
        made.up = so.ColumnParallelLinear.from_linear(self.up, group, **both, **(up or {}))
        made.down = so.RowParallelLinear.from_linear(self.down, group, **both, **(down or {}))
        return made


class Parallel(Whole):
    def __init__(self) -> None:
        nn.Module.__init__(self)


class Smooth(Whole):
    def between(self, x: Tensor) -> Tensor:
        return silu(x)


def own(tensor: Tensor, dim: int, rank: int, world: int) -> Tensor:
    return tensor.chunk(world, dim)[rank]


def compare(
    rank: int, world: int, group, whole: Whole, parallel: Whole, lead: tuple[int, ...], sharded: bool, tolerance=0.0
):
    """The same step on both; returns what differs."""
    x = integers(*lead, D, seed=9)
    g = integers(*lead, D, seed=10)
    x_whole = x.clone().requires_grad_()
    y_whole = whole(x_whole)
    y_whole.backward(g)
    mine = (lambda t: own(t, 0, rank, world)) if sharded else (lambda t: t)
    x_own = mine(x).clone().requires_grad_()
    y = parallel(x_own)
    y.backward(mine(g))
    so.sync_sequence_parallel_grads(parallel)
    pairs = {
        "y": (y, mine(y_whole)),
        "x.grad": (x_own.grad, mine(x_whole.grad)),
        "up.weight.grad": (parallel.up.weight.grad, own(whole.up.weight.grad, 0, rank, world)),
        "down.weight.grad": (parallel.down.weight.grad, own(whole.down.weight.grad, 1, rank, world)),
    }
    if whole.up.bias is not None:
        pairs["up.bias.grad"] = (parallel.up.bias.grad, own(whole.up.bias.grad, 0, rank, world))
        pairs["down.bias.grad"] = (parallel.down.bias.grad, whole.down.bias.grad)
    whole.zero_grad()
    parallel.zero_grad()
    return [
        f"{name}: {found} instead of {expected}"
        for name, (found, expected) in pairs.items()
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=0, atol=tolerance)
    ]


def every_option(rank: int, world: int, group, dtype: torch.dtype) -> list[str]:
    wrong = []
    for plan, bias, save, lead in product(PLANS, (True, False), (True, False), ((world * ROWS,), (world * ROWS, 2))):
        whole = Whole(dtype, bias)
        parallel = whole.parallel(group, {"save_gathered": save}, plan=plan)
        for _ in range(2):
            wrong += compare(rank, world, group, whole.double(), parallel.double(), lead, True)
    return wrong[:2]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sequence_parallel_layers_are_one_process_exactly(ranks, world: int) -> None:
    assert ranks(world).run(every_option, torch.float64) == [[]] * world


def without_sequence_parallelism(rank: int, world: int, group) -> list[str]:
    wrong = []
    for plan, lead in product(PLANS, ((7,), (1,), (5, 2), (world * ROWS,))):
        whole = Whole()
        parallel = whole.parallel(group, plan=plan, sequence_parallel=False)
        wrong += compare(rank, world, group, whole, parallel, lead, False)
        up = {"gather_output": True}
        parallel = whole.parallel(group, up, {"input_is_parallel": False}, plan=plan, sequence_parallel=False)
        wrong += compare(rank, world, group, whole, parallel, lead, False)
    return wrong[:2]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_layers_without_sequence_parallelism_are_one_process_exactly(ranks, world: int) -> None:
    assert ranks(world).run(without_sequence_parallelism) == [[]] * world


def smooth_in_float64(rank: int, world: int, group, sharded: bool) -> list[str]:
    whole = Smooth()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(0.3)
    parallel = whole.parallel(group, sequence_parallel=sharded)
    parallel.between = silu
    wrong = compare(rank, world, group, whole, parallel, (world * ROWS, 2), sharded, 1e-10)
    checkpointed = Parallel()
    checkpointed.up, checkpointed.down = parallel.up, parallel.down
    checkpointed.forward = lambda x: checkpoint(parallel, x, use_reentrant=False)
    return wrong + compare(rank, world, group, whole, checkpointed, (world * ROWS, 2), sharded, 1e-10)


@pytest.mark.parametrize(("world", "sharded"), [*product((2, 4), (True, False))])
def test_an_mlp_in_float64_also_under_activation_checkpointing(ranks, world: int, sharded: bool) -> None:
    assert ranks(world).run(smooth_in_float64, sharded) == [[]] * world


def frozen(rank: int, world: int, group, sequence_parallel: bool) -> None:
    whole = Whole()
    parallel = whole.parallel(group, sequence_parallel=sequence_parallel)
    saved: list[tuple[int, ...]] = []
    for layer in (parallel.up, parallel.down):
        layer.weight.requires_grad_(False)
    x = integers(world * ROWS, D, seed=1)
    x = (own(x, 0, rank, world) if sequence_parallel else x).clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        y = parallel(x)
    weights = {parallel.up.weight.data_ptr(), parallel.down.weight.data_ptr()}
    assert set(saved) <= weights, "an input was saved for a weight that needs no gradient"
    y.sum().backward()
    assert parallel.up.weight.grad is None
    assert parallel.up.bias.grad is not None
    expected = torch.ones(world * ROWS, D, dtype=torch.float64) @ whole.down.weight * 2 @ whole.up.weight
    assert torch.equal(x.grad, own(expected, 0, rank, world) if sequence_parallel else expected)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_frozen_weights_compute_no_gradient_and_save_no_input(ranks, sequence_parallel: bool) -> None:
    ranks(2).run(frozen, sequence_parallel)


def needs_only_weights(rank: int, world: int, group) -> None:
    whole = Whole()
    parallel = whole.parallel(group)
    x = integers(world * ROWS, D, seed=1)
    whole(x).sum().backward()
    parallel(own(x, 0, rank, world)).sum().backward()
    assert torch.equal(parallel.up.weight.grad, own(whole.up.weight.grad, 0, rank, world))
    row = so.RowParallelLinear.from_linear(whole.down, group)
    h = integers(world * ROWS, F, seed=2)
    whole.zero_grad()
    whole.down(h).sum().backward()
    row(own(h, 1, rank, world)).sum().backward()
    assert torch.equal(row.weight.grad, own(whole.down.weight.grad, 1, rank, world))


def test_the_first_layer_of_a_model_has_no_gradient_of_x(ranks) -> None:
    ranks(2).run(needs_only_weights)


def main_grads(rank: int, world: int, group, sequence_parallel: bool, dtype: torch.dtype, main: torch.dtype) -> None:
    whole = Whole(dtype)
    fused = whole.parallel(group, sequence_parallel=sequence_parallel, gradient_accumulation_fusion=True)
    plain = whole.parallel(group, sequence_parallel=sequence_parallel)
    weights = [fused.up.weight, fused.down.weight]
    for number, weight in enumerate(weights):
        weight.main_grad = integers(*weight.shape, seed=20, dtype=main)
        if number == 0:
            weight.grad_added_to_main_grad = False
            weight.zero_out_wgrad = True
    before = [weight.main_grad.clone() for weight in weights]
    x = (
        integers(world * ROWS, D, seed=1, dtype=dtype)
        if not sequence_parallel
        else integers(ROWS, D, seed=rank, dtype=dtype)
    )
    for model in (fused, plain):
        model(x.clone().requires_grad_()).sum().backward()
    for weight, was, other in zip(weights, before, (plain.up.weight, plain.down.weight), strict=True):
        assert torch.equal(weight.main_grad, was + other.grad)
    assert fused.up.weight.grad_added_to_main_grad
    assert torch.equal(fused.up.weight.grad, torch.zeros_like(fused.up.weight))  # as zero_out_wgrad asks
    assert fused.down.weight.grad is None
    assert not hasattr(fused.down.weight, "grad_added_to_main_grad")


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(
    ("dtype", "main"),
    [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.float32, torch.float64)],
)
def test_weight_gradients_accumulate_into_main_grad(ranks, sequence_parallel: bool, dtype, main) -> None:
    ranks(2).run(main_grads, sequence_parallel, dtype, main)


def wide_main_grad(rank: int, world: int, group) -> None:
    layer = so.ColumnParallelLinear(
        2, world, False, group=group, gradient_accumulation_fusion=True, dtype=torch.bfloat16
    )
    layer.weight.main_grad = torch.full((1, 2), 4096.0)  # to which bfloat16 could not add 1
    layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    assert torch.equal(layer.weight.main_grad, torch.full((1, 2), 4096.0 + world))
    assert layer.weight.grad is None


def test_a_float32_main_grad_of_bfloat16_layers_is_not_rounded(ranks) -> None:
    ranks(2).run(wide_main_grad)


def autocast(rank: int, world: int, group) -> None:
    whole = Whole(torch.float32)
    parallel = whole.parallel(group)
    x = integers(world * ROWS, D, seed=1, dtype=torch.float32)
    x_own = own(x, 0, rank, world).clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = parallel(x_own)
        expected = whole(x)
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.float(), own(expected, 0, rank, world).float(), rtol=0.02, atol=0.5)
    y.float().sum().backward()
    assert x_own.grad.dtype == torch.float32
    assert parallel.up.weight.grad.dtype == torch.float32


def test_autocast_casts_as_it_does_for_a_linear_layer(ranks) -> None:
    ranks(2).run(autocast)


def drawn_weights(rank: int, world: int, group) -> None:
    for make, dim, one in (
        (so.ColumnParallelLinear, 0, nn.Linear),
        (so.RowParallelLinear, 1, nn.Linear),
    ):
        torch.manual_seed(3)
        layer = make(D * world, F, group=group)
        after = torch.rand(1)
        torch.manual_seed(3)
        linear = one(D * world, F)
        assert torch.equal(layer.weight, own(linear.weight, dim, rank, world))
        assert torch.equal(layer.bias, own(linear.bias, 0, rank, world) if dim == 0 else linear.bias)
        assert torch.equal(after, torch.rand(1)), "ranks go on with another random state"
        meta = make(D * world, F, group=group, device="meta")
        assert meta.weight.is_meta
        meta = meta.to_empty(device="cpu")
        torch.manual_seed(3)
        meta.reset_parameters()
        assert torch.equal(meta.weight, layer.weight)


def test_ranks_draw_the_slices_of_one_matrix(ranks) -> None:
    ranks(2).run(drawn_weights)


def bad_layers(rank: int, world: int, group) -> list[str]:
    x = torch.ones(4, 8)
    column = so.ColumnParallelLinear(8, 8, group=group)
    tries = [
        lambda: so.ColumnParallelLinear(8, 9, group=group),
        lambda: so.RowParallelLinear(9, 8, group=group),
        lambda: so.RowParallelLinear(0, 8, group=group),
        lambda: so.ColumnParallelLinear(8, 8, group=group, gather_output=True),
        lambda: so.RowParallelLinear(8, 8, group=group, input_is_parallel=False),
        lambda: so.RowParallelLinear.from_linear("linear", group),
        lambda: so.RowParallelLinear.from_linear(torch.nn.Linear(8, 8), group, bias=False),
        lambda: so.ColumnParallelLinear.from_linear(torch.nn.Linear(8, 8), group, dtype=torch.float64),
        lambda: column(x[:, :7]),
        lambda: column(x[0]),
        lambda: column([x]),
        lambda: column.load_whole(torch.ones(4, 8)),
        lambda: column.load_whole(torch.ones(8, 8)),
        lambda: column(x.double()),
    ]
    messages = []
    for attempt in tries:
        try:
            attempt()
            messages.append("no error")
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    return messages


def test_bad_layers_and_inputs_are_refused_by_name(ranks) -> None:
    expected = [
        "out_features is 9; expected a multiple of the group's 2 ranks",
        "in_features is 9; expected a multiple of the group's 2 ranks",
        "in_features is 0; expected a positive integer",
        "gather_output and sequence_parallel are both set; expected at most one",
        "input_is_parallel is False with sequence_parallel; expected",
        "linear is a str; expected a torch.nn.Linear",
        "bias is False; expected to be left out, as that of linear is taken",
        "dtype is torch.float64; expected to be left out, as that of linear is taken",
        "x has shape (4, 7); expected [rows, 8] or [s, b, 8]",
        "x has shape (8,); expected [rows, 8] or [s, b, 8]",
        "x is a list; expected a torch.Tensor",
        "weight has shape (4, 8); expected (8, 8)",
        "bias is None; expected shape (8,)",
        "weight has dtype torch.float32; expected that of x, torch.float64",
    ]
    for messages in ranks(2).run(bad_layers):
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(start)


def finite_differences(rank: int, world: int, group, op: str) -> float:
    """Of the sum over ranks of a loss, each rank's inputs being perturbed in turn; returns the largest error."""
    generator = torch.Generator().manual_seed(rank)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weights = [draw(3, 2), draw(2, 2)] if op == "all_gather_gemm" else [draw(3, 2)]
    rows = 2 * (1 if op == "all_gather_gemm" else world)
    tensors = [draw(rows, 2), *weights]
    if op == "all_gather_gemm":
        tensors += [draw(3)]
    for tensor in tensors:
        tensor.requires_grad_()

    def results() -> list[Tensor]:
        if op == "all_gather_gemm":
            x, w, v, b = tensors
            (y, z), gathered = so.all_gather_gemm(x, [w, v], group, bias=[None, b[:2]], return_gathered=True)
            return [y, z, gathered]
        if op == "gemm_reduce_scatter":
            return [so.gemm_reduce_scatter(*tensors, group)]
        return [getattr(so, op)(tensors[0], group)]

    factors = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in results()]

    def loss() -> Tensor:
        return sum((y.sin() * factor).sum() for y, factor in zip(results(), factors, strict=True))

    loss().backward()
    largest, step = 0.0, 1e-5
    for who in range(world):
        for number in range(len(tensors)):
            for index in range(tensors[number].numel() if who == rank else int(shape_of(tensors, number))):
                around = []
                for sign in (1, -1):
                    with torch.no_grad():
                        if who == rank:
                            tensors[number].view(-1)[index] += sign * step
                        total = loss().detach().reshape(1)
                        dist.all_reduce(total, group=group)
                        around.append(total.item())
                        if who == rank:
                            tensors[number].view(-1)[index] -= sign * step
                if who == rank:
                    slope = (around[0] - around[1]) / (2 * step)
                    grad = tensors[number].grad
                    largest = max(largest, abs(slope - (0.0 if grad is None else grad.view(-1)[index].item())))
    return largest


def shape_of(tensors: list[Tensor], number: int) -> int:
    return tensors[number].numel()  # alike on all ranks


@pytest.mark.parametrize("op", ["all_gather_gemm", "gemm_reduce_scatter", "all_gather", "reduce_scatter", "all_reduce"])
def test_gradients_are_finite_differences_of_the_loss_summed_over_ranks(ranks, op: str) -> None:
    assert max(ranks(2).run(finite_differences, op)) < 1e-7


def other_groups(rank: int, world: int, group) -> list[str]:
    """Two strided sub-groups, each with layers of its own."""
    halves = [dist.new_group(range(start, world, 2)) for start in (0, 1)]
    mine = halves[rank % 2]
    whole = Whole()
    return compare(mine.rank(), mine.size(), mine, whole, whole.parallel(mine), (2 * ROWS,), True)


def test_layers_of_strided_sub_groups(ranks) -> None:
    assert ranks(4).run(other_groups) == [[]] * 4


def delayed(rank: int, world: int, group) -> list[str]:
    """Gradients stay right with any stream of any rank late, call after call."""
    whole = Whole()
    parallel = whole.parallel(group)
    wrong = compare(rank, world, group, whole, parallel, (world * ROWS,), True)
    comm = so.Communicator.of(group, "cpu")
    for seed in range(12):
        comm._set_hook(seed=seed * world + rank, max_delay_ms=4.0)
        wrong += compare(rank, world, group, whole, parallel, (world * ROWS,), True)
    comm._clear_hook()
    return wrong


def test_gradients_with_random_delays_in_any_stream(ranks) -> None:
    assert ranks(3).run(delayed) == [[]] * 3


def marks_of_copies(rank: int, world: int, group) -> None:
    """Whose gradients are partial sums is said on parameters, which are other objects then."""
    layer = so.RowParallelLinear(8 * world, 4, group=group)
    loaded = so.RowParallelLinear(8 * world, 4, group=group, device="meta")
    loaded.load_state_dict(layer.state_dict(), assign=True)
    for each in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert each.bias is not layer.bias and each.bias.sequence_parallel
        assert each.weight.tensor_model_parallel and each.weight.partition_dim == 1


def test_copies_and_loaded_layers_know_whose_gradients_are_partial_sums(ranks) -> None:
    ranks(2).run(marks_of_copies)


def test_a_plan_that_no_call_can_have_is_refused(ranks) -> None:
    ranks(1).run(plans_that_no_call_can_have)


def plans_that_no_call_can_have(rank: int, world: int, group) -> None:
    column, row = so.ColumnParallelLinear, so.RowParallelLinear

    def style(kind: type, _in: int, _out: int, group, **options: object) -> object:
        return kind(**options)

    for make in (column, row, partial(style, so.ColwiseParallel), partial(style, so.RowwiseParallel)):
        with pytest.raises(TypeError, match=r"plan is a str; expected streamoverlap\.PlanSpec or None"):
            make(8, 8, group=group, plan="ring")
        with pytest.raises(ValueError, match="transfer is store with algorithm ring and reduce sum; expected reduce"):
            make(8, 8, group=group, plan=so.PlanSpec("ring", reduce="sum", transfer="store"))
        make(8, 8, group=group, plan=so.PlanSpec("serial", reduce="sum", transfer="store"))
