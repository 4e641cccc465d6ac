"""Which streams a call runs on, where no GPU is needed to tell: what is refused. tests/gpu has the rest."""

from __future__ import annotations

import pytest
import torch

import streamoverlap as so
from streamoverlap import _C

no_set = object.__new__(so.StreamSet)  # there may be no GPU to make one on


def refusals(rank: int, world: int, group) -> None:
    x = torch.ones(2, 2)
    for call in (
        lambda streams: so.all_gather(x, group, streams=streams),
        lambda streams: so.reduce_scatter(x, group, streams=streams, plan=so.PlanSpec("serial")),
        lambda streams: so.all_gather_gemm(x, x, group, streams=streams, async_op=True),
        lambda streams: so.gemm_reduce_scatter(x, x, group, streams=streams),
    ):
        with pytest.raises(ValueError, match="streams is given but x is on the cpu"):
            call(no_set)
        with pytest.raises(TypeError, match="streams is a list; expected"):
            call([])
    with so.use_streams(no_set):  # of CUDA calls in a region that makes both
        assert torch.equal(so.all_gather(x, group), torch.ones(2 * world, 2))


def test_calls_on_the_cpu_take_no_streams(ranks) -> None:
    ranks(2).run(refusals)


def test_a_region_takes_a_set() -> None:
    with pytest.raises(TypeError, match="streams is a int"), so.use_streams(3):
        pass
    with so.use_streams(None), so.use_streams(no_set), so.use_streams(None):
        pass


@pytest.mark.skipif(_C.WITH_CUDA, reason="of builds without CUDA")
def test_a_set_needs_cuda() -> None:
    with pytest.raises(RuntimeError, match="built without its CUDA part"):
        so.StreamSet(send=1, recv=2, compute=[3])


@pytest.mark.skipif(not _C.WITH_CUDA, reason="of builds with CUDA")
@pytest.mark.parametrize(
    ("streams", "kind", "message"),
    [
        ({"send": "0", "recv": 1, "compute": [1]}, TypeError, "send is a str; expected a torch or CuPy stream"),
        ({"send": 1, "recv": None, "compute": [1]}, TypeError, "recv is a NoneType"),
        ({"send": 1, "recv": 1, "compute": [1, 1.5]}, TypeError, r"compute\[1\] is a float"),
        ({"send": 1, "recv": 1, "compute": 1}, TypeError, "compute is a int; expected a list"),
    ],
)
def test_what_is_no_stream_is_refused(streams: dict, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        so.StreamSet(**streams)


@pytest.mark.parametrize("count", [0, 4, True, "1"])
def test_a_set_from_the_pool_has_one_to_three_compute_streams(count) -> None:
    with pytest.raises(ValueError, match="expected an integer from 1 to 3"):
        so.StreamSet.from_pool(count)
