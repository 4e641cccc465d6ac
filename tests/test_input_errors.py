"""Bad input is refused on every rank that makes it, with a message that helps, before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import subgroups
from references import Case, verify
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.fx.experimental.proxy_tensor import make_fx

import streamoverlap as so
from streamoverlap.plans import OPERATIONS

X = torch.ones(6, 4)  # 2 ranks divide its rows
W = torch.ones(3, 4)
B = torch.ones(3)


def gather(x=X, weight=W, group=None, **options):
    return so.all_gather_gemm(x, weight, group, **options)


def scatter(x=X, weight=W, group=None, **options):
    return so.gemm_reduce_scatter(x, weight, group, **options)


def wants_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


def under_torch_func(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.func.vmap(call)(torch.ones(2, 6, 4))


def with_tangent(x: torch.Tensor) -> None:
    with torch.autograd.forward_ad.dual_level():
        so.all_gather(torch.autograd.forward_ad.make_dual(x, x))


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(6, 4)


def distributed() -> torch.Tensor:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    return DTensor.from_local(X, mesh, [Replicate()], run_check=False)


def without_storage() -> torch.Tensor:
    x = X.clone()
    x.untyped_storage().resize_(0)
    return x


def under(mode: FakeTensorMode, call: Callable[[], object]) -> object:
    with mode:
        return call(X)


SERIAL = so.PlanSpec("serial")
TRACED = "this function was called under torch.jit.trace, make_fx, FakeTensorMode or torch.func"
WRAPPER = "is a tensor that wraps or stands for others"

# What is wrong: the call that does it, the error's type, and what its message must say.
BAD_INPUT: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "x is no tensor": (lambda: gather([1.0]), TypeError, "x is a list; expected a torch.Tensor"),
    "plain x is no tensor": (lambda: so.all_gather(3), TypeError, "x is a int; expected a torch.Tensor"),
    "weight is no tensor": (lambda: gather(weight=3), TypeError, "weight is a int; expected a torch.Tensor"),
    "weight is no tensor, scatter": (
        lambda: scatter(weight=3),
        TypeError,
        "weight is a int; expected a torch.Tensor",
    ),
    "list of no tensors": (
        lambda: gather(weight=[W, 3]),
        TypeError,
        "weight[1] is a int; expected a torch.Tensor",
    ),
    "list for the scatter": (
        lambda: scatter(weight=[W]),
        TypeError,
        "weight is a list; expected a torch.Tensor",
    ),
    "no weights": (
        lambda: gather(weight=[]),
        ValueError,
        "weight is an empty list; expected at least one tensor",
    ),
    "bias is no tensor": (lambda: gather(bias=3), TypeError, "bias is a int"),
    "bias is no tensor, scatter": (lambda: scatter(bias=3), TypeError, "bias is a int"),
    "integer x": (
        lambda: gather(X.long(), W.long()),
        TypeError,
        "x has dtype torch.int64; expected float32, float64, ",
    ),
    "integer x, plain": (
        lambda: so.all_gather(X.int()),
        TypeError,
        "x has dtype torch.int32; expected float32, float64, ",
    ),
    "complex x": (
        lambda: so.reduce_scatter(X.cfloat()),
        TypeError,
        "x has dtype torch.complex64; expected float32",
    ),
    "bool x": (lambda: so.reduce_scatter(X.bool()), TypeError, "x has dtype torch.bool; expected float32"),
    "weight of another dtype": (
        lambda: gather(weight=W.double()),
        TypeError,
        "weight has dtype torch.float64; expected that",
    ),
    "weight of half dtype": (
        lambda: scatter(X.bfloat16(), W.half()),
        TypeError,
        "weight has dtype torch.float16; expected",
    ),
    "second weight's dtype": (
        lambda: gather(weight=[W, W.half()]),
        TypeError,
        "weight[1] has dtype torch.float16; expected",
    ),
    "bias of another dtype": (
        lambda: gather(bias=B.double()),
        TypeError,
        "bias has dtype torch.float64; expected that of x",
    ),
    "sparse x": (lambda: gather(X.to_sparse()), TypeError, "x has layout Sparse; expected a dense"),
    "a DTensor": (lambda: so.all_gather(distributed()), TypeError, f"x {WRAPPER}"),
    "weight is a DTensor": (lambda: gather(weight=distributed()), TypeError, f"weight {WRAPPER}"),
    "a FakeTensor": (lambda: so.all_gather(fake()), TypeError, f"x {WRAPPER}"),
    "a FakeTensor in serial": (
        lambda: so.all_gather(fake(), plan=so.PlanSpec("serial")),
        TypeError,
        f"x {WRAPPER}",
    ),
    "a zero tensor": (lambda: scatter(torch._efficientzerotensor(6, 4)), TypeError, f"x {WRAPPER}"),
    "a nested tensor": (
        lambda: so.all_gather(torch.nested.nested_tensor([X, X])),
        TypeError,
        f"x {WRAPPER}",
    ),
    "a jagged tensor": (
        lambda: so.all_gather(torch.nested.nested_tensor([X, X], layout=torch.jagged)),
        TypeError,
        f"x {WRAPPER}",
    ),
    "vmap": (lambda: under_torch_func(so.all_gather), TypeError, f"x {WRAPPER}"),
    "vmap over a GEMM": (lambda: under_torch_func(gather), TypeError, f"x {WRAPPER}"),
    "functionalize": (lambda: torch.func.functionalize(so.all_gather)(X), TypeError, f"x {WRAPPER}"),
    "jvp": (lambda: torch.func.jvp(so.all_gather, (X,), (X,)), TypeError, f"x {WRAPPER}"),
    "a forward-mode gradient": (lambda: with_tangent(X), TypeError, "x has a forward-mode gradient"),
    "FakeTensorMode": (lambda: under(FakeTensorMode(allow_non_fake_inputs=True), so.all_gather), RuntimeError, TRACED),
    "FakeTensorMode, GEMM": (lambda: under(FakeTensorMode(allow_non_fake_inputs=True), scatter), RuntimeError, TRACED),
    "functionalize with a closure": (
        lambda: torch.func.functionalize(lambda x: so.reduce_scatter(X))(X),
        RuntimeError,
        TRACED,
    ),
    "make_fx": (lambda: make_fx(lambda x: so.all_gather(x))(X), RuntimeError, TRACED),
    "make_fx, serial": (lambda: make_fx(lambda x: so.all_gather(x, plan=SERIAL))(X), RuntimeError, TRACED),
    "jit.trace": (lambda: torch.jit.trace(so.all_gather, X), RuntimeError, TRACED),
    "no storage": (
        lambda: so.all_gather(without_storage()),
        ValueError,
        "x needs 96 bytes but its storage has 0; expected",
    ),
    "weight's K": (
        lambda: gather(weight=torch.ones(3, 5)),
        ValueError,
        "weight.shape[1] is 5 but x.shape[-1] is 4; expected them equal",
    ),
    "weight's K, scatter": (
        lambda: scatter(weight=torch.ones(3, 5)),
        ValueError,
        "weight.shape[1] is 5 but x.shape[-1] is 4; expected them equal",
    ),
    "second weight's K": (
        lambda: gather(weight=[W, torch.ones(3, 5)]),
        ValueError,
        "weight[1].shape[1] is 5 but",
    ),
    "weight of 3 dimensions": (
        lambda: gather(weight=W[None]),
        ValueError,
        "weight has shape [1, 3, 4]; expected 2 ",
    ),
    "weight of 1 dimension": (
        lambda: scatter(weight=W[0]),
        ValueError,
        "weight has shape [4]; expected 2 dimensions",
    ),
    "weight in neither order": (
        lambda: gather(weight=torch.ones(6, 8)[::2, ::2]),
        ValueError,
        "weight has shape [3, 4] and strides [16, 2]; expected a row-major or column-major matrix",
    ),
    "weight of repeated rows": (
        lambda: scatter(weight=torch.ones(1, 4).expand(3, 4)),
        ValueError,
        "weight has shape [3, 4] and strides [0, 1]; expected a row-major or column-major matrix",
    ),
    "bias of another size": (
        lambda: gather(bias=torch.ones(4)),
        ValueError,
        "bias has shape [4]; expected [3]",
    ),
    "bias of 2 dimensions": (
        lambda: scatter(bias=B[None]),
        ValueError,
        "bias has shape [1, 3]; expected [3]",
    ),
    "too few biases": (
        lambda: gather(weight=[W, W], bias=[B]),
        ValueError,
        "bias has 1 tensors; expected one for each",
    ),
    "one bias for a list": (
        lambda: gather(weight=[W, W], bias=B),
        TypeError,
        "bias is one tensor but weight is a list",
    ),
    "list of biases for one": (
        lambda: gather(bias=[B]),
        TypeError,
        "bias is a list but weight is one tensor",
    ),
    "x of 1 dimension": (
        lambda: gather(X[0]),
        ValueError,
        "x has shape [4]; expected 2 dimensions [rows, K] or 3",
    ),
    "x of 4 dimensions": (lambda: scatter(X[None, None]), ValueError, "x has shape [1, 1, 6, 4]; expected 2"),
    "x without columns": (
        lambda: gather(torch.ones(6, 0), torch.ones(3, 0)),
        ValueError,
        "x has shape [6, 0]; expected",
    ),
    "scalar x": (
        lambda: so.all_gather(torch.tensor(1.0)),
        ValueError,
        "x is a scalar; expected at least 1 dimension",
    ),
    "rows of the scatter": (
        lambda: scatter(torch.ones(5, 4)),
        ValueError,
        "x.shape[0] is 5; expected a multiple of the group's 2 ranks",
    ),
    "rows of the plain scatter": (
        lambda: so.reduce_scatter(torch.ones(5, 4)),
        ValueError,
        "x.shape[0] is 5; expected a multiple of the group's 2 ranks",
    ),
    "weight on another device": (
        lambda: gather(weight=W.to("meta")),
        ValueError,
        "weight is on meta; expected the dev",
    ),
    "bias on another device": (
        lambda: scatter(bias=B.to("meta")),
        ValueError,
        "bias is on meta; expected the device",
    ),
    "x on a device without ranks": (
        lambda: so.all_gather(X.to("meta")),
        ValueError,
        "is meta; expected cpu or cuda",
    ),
    "scalar x, all-reduce": (
        lambda: so.all_reduce(torch.tensor(1.0)),
        ValueError,
        "x is a scalar; expected at least 1 dimension",
    ),
    "integer x, all-reduce": (
        lambda: so.all_reduce(X.long()),
        TypeError,
        "x has dtype torch.int64; expected float32, float64, ",
    ),
    "all-reduced x is no tensor": (lambda: so.all_reduce([1.0]), TypeError, "x is a list; expected a torch.Tensor"),
    "all-reduced x that wants a gradient": (
        lambda: so.all_reduce(wants_grad(X), async_op=True),
        RuntimeError,
        "x requires grad, but this function",
    ),
    "copy_input as text": (
        lambda: so.all_gather(X, copy_input="yes"),
        TypeError,
        "copy_input is a str; expected a bool",
    ),
    "copy_input as a number": (
        lambda: so.all_reduce(X, copy_input=1),
        TypeError,
        "copy_input is a int; expected a bool",
    ),
    "x that wants a gradient": (
        lambda: so.all_gather(wants_grad(X), async_op=True),
        RuntimeError,
        "x requires grad, but this function",
    ),
    "weight that wants a gradient": (
        lambda: gather(weight=wants_grad(W), async_op=True),
        RuntimeError,
        "weight requires grad, but",
    ),
    "bias that wants a gradient": (
        lambda: scatter(bias=wants_grad(B), async_op=True),
        RuntimeError,
        "bias requires grad, but",
    ),
    "plan as text": (
        lambda: gather(plan="ring"),
        TypeError,
        "plan is a str; expected streamoverlap.PlanSpec or None",
    ),
    "group as text": (
        lambda: gather(group="tp"),
        TypeError,
        "group is a str; expected a torch.distributed.ProcessGroup",
    ),
}


def call_badly(rank: int, world: int, group, name: str, bad_ranks: tuple[int, ...]) -> tuple[str, str] | None:
    """The bad call on `bad_ranks`, then a good one on all."""
    verify(Case("all_gather"), rank, world, group)
    caught = None
    if rank in bad_ranks:
        try:
            BAD_INPUT[name][0]()
        except Exception as error:
            caught = type(error).__name__, str(error)
    verify(Case("all_gather_gemm", bias=True, seed=3), rank, world, group)
    return caught


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_refused_before_anything_is_sent(ranks, name: str) -> None:
    _, kind, message = BAD_INPUT[name]
    for bad_ranks in ((0, 1), (1,)):
        answers = ranks(2).run(call_badly, name, bad_ranks)
        for rank in bad_ranks:
            assert answers[rank] is not None, "the call went through"
            found, text = answers[rank]
            assert found == kind.__name__, text
            assert message in text


def call_badly_in_serial(rank: int, world: int, group) -> None:
    serial = so.PlanSpec("serial")
    bad = {
        "weight.shape[1] is 5 but x.shape[-1] is 4": lambda: gather(weight=torch.ones(3, 5), plan=serial),
        "bias has shape [4]; expected [3]": lambda: scatter(bias=torch.ones(4), plan=serial),
        "x has dtype torch.int32; expected": lambda: so.all_gather(X.int(), plan=serial),
        "x.shape[0] is 5; expected a multiple": lambda: so.reduce_scatter(torch.ones(5, 4), plan=serial),
        "x has dtype torch.int64; expected": lambda: so.all_reduce(X.long(), plan=serial),
    }
    for message, call in bad.items():
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            call()
        verify(Case("reduce_scatter", serial), rank, world, group)


def test_serial_refuses_the_same(ranks) -> None:
    ranks(2).run(call_badly_in_serial)


def without_grad(rank: int, world: int, group) -> None:
    with torch.no_grad():
        gather(wants_grad(X), wants_grad(W), bias=wants_grad(B))
        result = scatter(wants_grad(X), wants_grad(W))
    assert not result.requires_grad


def test_parameters_are_taken_under_no_grad(ranks) -> None:
    ranks(2).run(without_grad)


def in_a_group_of_others(rank: int, world: int, group) -> str | None:
    members = subgroups((0, 1))
    own = members[(0, 1)]
    if rank == 2:
        with pytest.raises(ValueError, match=r"group does not have this rank \(global rank 2\)") as caught:
            so.all_gather(X, dist.GroupMember.NON_GROUP_MEMBER)
        return str(caught.value)
    verify(Case("all_gather"), rank, 2, own)
    return None


def test_a_group_that_this_rank_is_not_in(ranks) -> None:
    assert ranks(3).run(in_a_group_of_others)[2]


def use_closed(rank: int, world: int, group) -> None:
    comm = so.Communicator(group)
    comm.close()
    comm.close()
    with pytest.raises(RuntimeError, match=r"the communicator of group '.*' is closed; expected an open one"):
        comm.all_gather(X, None)


def test_a_closed_communicator(ranks) -> None:
    ranks(2).run(use_closed)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), "3", None, True, 1e300, timedelta(days=60)])
def test_a_timeout_that_is_none(ranks, timeout: object) -> None:
    ranks(1).run(refuse_timeout, timeout)


def refuse_report_path(rank: int, world: int, group) -> None:
    with pytest.raises(TypeError, match="report_path is a int; expected a str or Path"):
        so.Communicator(group, report_path=5)


def test_a_report_path_that_is_none(ranks) -> None:
    ranks(1).run(refuse_report_path)


def refuse_timeout(rank: int, world: int, group, timeout: object) -> None:
    message = re.escape(f"timeout is {timeout!r}; expected a positive number of seconds or a timedelta, of at most")
    with pytest.raises(ValueError, match=message):
        so.Communicator(group, timeout=timeout)
    with pytest.raises(ValueError, match=message):
        so.Communicator.of(group, "cpu").set_timeout(timeout)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"algorithm": "tree"}, "algorithm is 'tree'; expected one of 'direct', 'ring', 'serial'"),
        ({"algorithm": None}, "algorithm is None; expected one of 'direct', 'ring', 'serial'"),
        ({"reduce": "mean"}, "reduce is 'mean'; expected one of 'accumulate', 'sum'"),
        ({"transfer": "put"}, "transfer is 'put'; expected one of 'copy', 'store'"),
        ({"taper": "middle"}, "taper is 'middle'; expected one of 'none', 'first', 'last', 'both'"),
        ({"chunks": 0}, "chunks is 0; expected an integer from 1 to 64"),
        ({"chunks": 65}, "chunks is 65; expected an integer from 1 to 64"),
        ({"chunks": 1.5}, "chunks is 1.5; expected an integer from 1 to 64"),
        ({"chunks": True}, "chunks is True; expected an integer from 1 to 64"),
        ({"compute_streams": 0}, "compute_streams is 0; expected an integer from 1 to 3"),
        ({"compute_streams": 4}, "compute_streams is 4; expected an integer from 1 to 3"),
    ],
)
def test_a_plan_spec_names_its_bad_field(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        so.PlanSpec(**fields)


def test_no_group_without_torch_distributed() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"group is None but torch\.distributed is not initialised"):
        so.all_gather(X)


def empty_results(rank: int, world: int, group) -> None:
    for operation in OPERATIONS:
        for plan in (None, so.PlanSpec("ring", chunks=3), so.PlanSpec("serial")):
            for lead in ((0,), (0, 3), (3, 0)):
                gathered = operation == "all_gather_gemm"
                [first, *_] = verify(Case(operation, plan, lead=lead, bias=True, gathered=gathered), rank, world, group)
                assert first.numel() == 0
    verify(Case("all_gather_gemm", n=(0,)), rank, world, group)


def test_zero_rows_give_the_empty_result(ranks) -> None:
    ranks(2).run(empty_results)
    ranks(3).run(empty_results)
