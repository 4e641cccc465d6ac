"""torch.compile: registered ops as compilers want them, whole blocks in one graph, exchanges in the program's order."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from blocks import ResidualMlp
from ranks import Pools
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

import streamoverlap as so

D, F, ROWS = 8, 16, 4  # ROWS of a rank
OPS = torch.ops.streamoverlap
COMPILING = 300.0  # seconds for the ranks, which share few cores


def randoms(*shape: int, seed: int, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_(grad)


# --- the ops ---


def cases(group_name: str) -> dict[str, tuple[Callable, tuple]]:
    x, rows, columns = randoms(3, 4, seed=1, grad=True), randoms(6, 4, seed=2, grad=True), randoms(6, 5, seed=3)
    w, v, b, c = (randoms(*s, seed=9, grad=True) for s in ((5, 4), (2, 4), (5,), (2,)))
    needs = (True, [True], [True])
    return {
        "all_gather_gemm of two, gathered": (OPS.all_gather_gemm, (x, [w, v], [b, c], group_name, True, "", "")),
        "all_gather_gemm, ring": (OPS.all_gather_gemm, (x, [w], [], group_name, False, "ring,2,1,sum", "")),
        "all_gather_gemm, frozen": (OPS.all_gather_gemm, (x, [w.detach()], [], group_name, False, "", "")),
        "gemm_reduce_scatter": (OPS.gemm_reduce_scatter, (rows, w, b, group_name, "", "")),
        "gemm_all_reduce": (OPS.gemm_all_reduce, (rows, w, None, group_name, "", "")),
        "column_linear": (OPS.column_linear, (rows, w, b, group_name, "", "")),
        "all_gather": (OPS.all_gather, (x, group_name, "")),
        "reduce_scatter": (OPS.reduce_scatter, (rows, group_name, "serial,1,1,accumulate")),
        "all_reduce": (OPS.all_reduce, (rows, group_name, "")),
        "column_backward": (
            OPS.column_backward,
            ([columns], x.detach(), "shard", [w.detach()], *needs, group_name, "", ""),
        ),
    }


def check_op(rank: int, world: int, group: dist.ProcessGroup, name: str) -> dict[str, str]:
    op, args = cases(group.group_name)[name]
    return torch.library.opcheck(op.default, args)


@pytest.mark.parametrize("name", list(cases("")))
def test_opcheck(ranks: Pools, name: str) -> None:
    for found in ranks(2).run(check_op, name, timeout=COMPILING):
        assert len(found) == 4 and set(found.values()) == {"SUCCESS"}


def call_compiled(rank: int, world: int, group: dist.ProcessGroup) -> None:
    x, w, rows = randoms(3, 4, seed=rank), randoms(5, 4, seed=rank + 9), randoms(2 * world + 1, 4, seed=rank + 20)
    plan = so.PlanSpec("ring", 2)
    calls = [
        lambda: so.all_gather_gemm(x, w, group, plan=plan),
        lambda: so.all_gather_gemm(x, [w, w], group, bias=[None, w[:, 0]], return_gathered=True)[0][1],
        lambda: so.gemm_reduce_scatter(rows[1:], w, group),
        lambda: so.gemm_all_reduce(rows, w, bias=w[:, 0]),
        lambda: so.all_gather(x, plan=plan),
        lambda: so.reduce_scatter(rows[1:], group),
        lambda: so.all_reduce(rows, group, copy_input=True),
    ]
    for call in calls:
        torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(), call())


def test_every_function_compiles(ranks: Pools) -> None:
    ranks(2).run(call_compiled, timeout=COMPILING)


PATIENCE = timedelta(seconds=15)
EAGER = {
    "async_op is True": lambda x: so.all_reduce(x, async_op=True).wait(),
    "timeout is 7.5": lambda x: so.all_reduce(x, timeout=7.5),
    "timeout is a timedelta": lambda x: so.all_reduce(x, timeout=PATIENCE),
    "wire is 'fp8'": lambda x: so.all_reduce(x, wire="fp8"),
}


def break_a_graph(rank: int, world: int, group: dist.ProcessGroup) -> None:
    x = torch.randn(4, 600, generator=torch.Generator().manual_seed(rank))
    for told, call in EAGER.items():
        torch._dynamo.reset()
        with pytest.raises(Exception, match=f"{told} in a compiled call; expected the default with fullgraph=True"):
            torch.compile(call, fullgraph=True, backend="eager")(x)
        counter = CompileCounterWithBackend("eager")
        assert torch.equal(torch.compile(lambda x, call=call: call(x + 1) * 2, backend=counter)(x), call(x + 1) * 2)
        assert counter.frame_count == 2, "what is before the call and what is after it, and nothing of the call"
    assert not torch.equal(so.all_reduce(x, wire="fp8"), so.all_reduce(x)), "so that it shows above"
    defaults = {"wire": None, "timeout": None, "async_op": False, "streams": None}
    plain = torch.compile(lambda x: so.all_reduce(x, **defaults), fullgraph=True, backend="eager")
    assert torch.equal(plain(x), so.all_reduce(x))


def test_what_a_graph_cannot_have_breaks_it_or_is_refused(ranks: Pools) -> None:
    ranks(2).run(break_a_graph, timeout=COMPILING)


def wire_with_gradients(rank: int, world: int, group: dist.ProcessGroup) -> None:
    x, w = (torch.randn(4, 600, generator=torch.Generator().manual_seed(rank + i)) for i in (0, 5))

    def step(x: Tensor, w: Tensor) -> Tensor:
        return so.gemm_reduce_scatter(x * 2, w, group, wire="fp8").square().sum()

    found = []
    for run in (step, torch.compile(step, backend="aot_eager")):
        given = x.clone().requires_grad_(), w.clone().requires_grad_()
        found.append(torch.autograd.grad(run(*given), given))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_gradients_go_through_a_call_that_breaks_a_graph(ranks: Pools) -> None:
    ranks(2).run(wire_with_gradients, timeout=COMPILING)


def bad_plan_in_a_graph(rank: int, world: int, group: dist.ProcessGroup) -> None:
    for options in ({}, {"fullgraph": True}):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"plan is a str; expected streamoverlap\.PlanSpec or None"):
            torch.compile(lambda x: so.all_reduce(x, plan="ring"), backend="eager", **options)(torch.ones(2, 2))


def test_a_bad_plan_in_a_graph_is_named(ranks: Pools) -> None:
    ranks(1).run(bad_plan_in_a_graph, timeout=COMPILING)


class Exported(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return so.all_reduce(x, wire="fp8")


def export(rank: int, world: int, group: dist.ProcessGroup) -> None:
    for strict in (False, True):
        with pytest.raises(Exception, match="wire is 'fp8' in a compiled call; expected the default"):
            torch.export.export(Exported(), (torch.ones(2, 2),), strict=strict)


def test_what_an_exported_program_cannot_have_is_refused(ranks: Pools) -> None:
    ranks(1).run(export, timeout=COMPILING)


# --- layers ---


class Block(ResidualMlp):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        sequence_parallel = options.get("sequence_parallel", True)
        self.up = so.ColumnParallelLinear(D, F, dtype=torch.float64, **options)
        self.down = so.RowParallelLinear(F, D, dtype=torch.float64, sequence_parallel=sequence_parallel)


def compile_block(rank: int, world: int, group: dist.ProcessGroup, options: dict, backend: str) -> int:
    """Compares with eager, for changing numbers of tokens; returns how many graphs were made."""
    torch._dynamo.reset()
    block = Block(**options)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for step, rows in enumerate((4, 4, 6, 10, 8, 2, 6)):
        x = randoms(rows, D, seed=step + (rank if block.up.sequence_parallel else 0))
        for got, wanted in zip(block.train_on(compiled, x), block.train_on(block, x), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    return counter.frame_count


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "options", [{}, {"save_gathered": True}, {"sequence_parallel": False}], ids=["", "gathered", "no sequence parallel"]
)
def test_a_block_is_one_graph_for_any_number_of_tokens(ranks: Pools, world: int, options: dict) -> None:
    """One for the first number, and one for all others."""
    assert set(ranks(world).run(compile_block, options, "aot_eager", timeout=COMPILING)) == {2}


def exchanges_of(step: Callable[[], object], group: dist.ProcessGroup) -> list[str]:
    with so.trace(group=group) as trace:
        step()
    return [line.title.partition("(")[0] for line in trace.timelines]


def train_with_gathered(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """What nobody has used has no gradient to be exchanged, and what somebody has used has one."""
    torch._dynamo.reset()
    layer = so.ColumnParallelLinear(D, F, dtype=torch.float64, save_gathered=True)
    x, w = randoms(ROWS, D, seed=rank, grad=True), randoms(F, D, seed=7, grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    forward_and_backward = ["all_gather_gemm", "gemm_reduce_scatter"]
    for _ in range(2):
        assert exchanges_of(lambda: compiled(x).sum().backward(), group) == forward_and_backward

    def gradient(*used: int) -> Tensor:
        found = OPS.all_gather_gemm(x, [w, 2 * w], [], group.group_name, True, "", "")
        return torch.autograd.grad(sum(found[i].sum() for i in used), x)[0]

    assert exchanges_of(lambda: gradient(0), group) == forward_and_backward
    torch.testing.assert_close(gradient(0, 1, 2), gradient(0) + gradient(1) + gradient(2))


def test_what_is_gathered_for_the_backward_pass_has_no_gradient_to_exchange(ranks: Pools) -> None:
    ranks(2).run(train_with_gathered, timeout=COMPILING)


def test_inductor(ranks: Pools) -> None:
    assert set(ranks(2).run(compile_block, {}, "inductor", timeout=COMPILING)) == {2}


def fuse_in_a_graph(rank: int, world: int, group: dist.ProcessGroup) -> None:
    torch._dynamo.reset()
    block = Block(gradient_accumulation_fusion=True)
    weight = block.up.weight
    x = randoms(ROWS, D, seed=rank)

    def run(function: Callable) -> Tensor:
        weight.main_grad = torch.zeros_like(weight)
        weight.grad = None
        function(x).sum().backward()
        assert weight.grad is None
        return weight.main_grad

    torch.testing.assert_close(run(torch.compile(block, backend="aot_eager")), run(block))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"gradient_accumulation_fusion writes|FUSION_WRITES_MAIN_GRAD"):
        torch.compile(block, fullgraph=True, backend="aot_eager")(x)


def test_fusion_breaks_the_graph_and_says_so(ranks: Pools) -> None:
    ranks(2).run(fuse_in_a_graph, timeout=COMPILING)


# --- order ---


def program(x: Tensor, w: Tensor, v: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Ours, none of which depends on all before it, among torch's own collectives, which Inductor moves."""
    first = functional.all_reduce(v, "sum", group)
    y = so.all_gather_gemm(x, w, group)
    second = functional.all_reduce(y * 2, "sum", group)
    total = so.all_reduce(x, group)
    z = so.gemm_reduce_scatter(y, w.t(), group)
    third = functional.all_gather_tensor(v, 0, group)
    so.reduce_scatter(y, group)  # nobody uses it, but the peers make it
    return first, second, z, third, so.all_gather(v, group), total


OURS = ["all_gather_gemm", "all_reduce", "gemm_reduce_scatter", "reduce_scatter", "all_gather"]


def order_of_exchanges(rank: int, world: int, group: dist.ProcessGroup, reorder: bool) -> list[str]:
    torch._dynamo.reset()
    inputs = [randoms(4, 8, seed=rank), randoms(6, 8, seed=9), randoms(7, seed=rank)]
    with torch._inductor.config.patch(reorder_for_compute_comm_overlap=reorder, force_disable_caches=True):
        got, code = run_and_get_code(torch.compile(program, fullgraph=True), *inputs, group)
    for one, other in zip(got, program(*inputs, group), strict=True):
        torch.testing.assert_close(one, other)
    assert len(code) == 1
    return re.findall(r"torch\.ops\.(\w+\.\w+)\.default\(", code[0])


@pytest.mark.parametrize("reorder", [False, True])
def test_inductor_keeps_the_order_of_exchanges(ranks: Pools, reorder: bool) -> None:
    orders = ranks(2).run(order_of_exchanges, reorder, timeout=COMPILING)
    assert orders[0] == orders[1]
    ours = [op.removeprefix("streamoverlap.") for op in orders[0] if op.startswith("streamoverlap.")]
    assert ours == OURS
    assert sum(op.startswith("_c10d_functional.all_") for op in orders[0]) == 3
