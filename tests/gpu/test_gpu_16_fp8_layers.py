"""On GPUs: layers in float8, exact for integers, beside torch._scaled_mm, and captured with their backward passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_layers import KINDS, Step, dequantised, integers, normal
from gpu_ranks import communicator, new_group
from torch import Tensor

import streamoverlap as so
from streamoverlap import _C

pytestmark = pytest.mark.gpu(1)

OPTIONS = [{}, {"sequence_parallel": False}]
EXACT = {torch.float32: 1e-4, torch.bfloat16: 2**-7}  # of integers below 10,000, and of a rounding a rank


def on_gpu(kind: type, rank: int, world: int, group, **options: Any) -> Step:
    return Step(kind, rank, world, group, device="cuda", **options)


def quantised_alike(rank: int, world: int, group) -> None:
    """As on the CPU, where it is checked: also of a transposed matrix, zeros, infinities and NaN."""
    x = normal(40, 64, seed=1).float()
    x[0], x[1, 3], x[2, 5] = 0, float("inf"), float("nan")
    for given in (x, x.t(), x.bfloat16(), x.half()):
        found, wanted = _C.quantise_rows(given.cuda()), _C.quantise_rows(given)
        assert found[0].is_contiguous()
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.cpu().float(), other.float(), rtol=0, atol=0, equal_nan=True)


def test_float8_is_made_as_on_the_cpu(ranks) -> None:
    ranks(1).run(quantised_alike)


def step_by_step(rank: int, world: int, group, kind: type) -> list[str]:
    communicator(group)
    wrong = []
    for dtype, tolerance in EXACT.items():
        for options in [*OPTIONS, *([{"save_gathered": True}] if kind is KINDS[0] else [])]:
            for lead in ((), (2 * world, 3)):
                step = on_gpu(kind, rank, world, group, dtype=dtype, lead=lead, **options)
                wrong += step.wrong(tolerance)
                step = on_gpu(kind, rank, world, group, draw=normal, quantise=dequantised, dtype=dtype, **options)
                wrong += step.wrong(2**-6)  # tensor cores sum in fewer bits than float32 has
    return wrong[:2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_steps_are_those_of_one_process(ranks, world: int, kind: type) -> None:
    assert ranks(world).run(step_by_step, kind, timeout=150) == [[]] * world


def beside_torch(rank: int, world: int, group) -> None:
    """The same x on all ranks: what torch multiplies at once."""
    communicator(group)
    torch.manual_seed(1)
    x = torch.randn(192, 512, device="cuda", dtype=torch.bfloat16)
    options = {"group": group, "precision": "fp8", "device": "cuda", "dtype": torch.bfloat16}
    layer = so.ColumnParallelLinear(512, 256 * world, False, **options)
    (values, of_x), (weight, of_weight) = _C.quantise_rows(x), _C.quantise_rows(layer.weight.detach())
    wanted = torch._scaled_mm(
        values, weight.t(), scale_a=of_x, scale_b=of_weight.t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )
    close = {"rtol": 2**-6, "atol": 2**-8 * wanted.abs().max().item()}
    torch.testing.assert_close(layer(x).detach(), wanted.repeat(world, 1), **close)
    layer.sequence_parallel = False
    torch.testing.assert_close(layer(x).detach(), wanted, **close)


def test_results_are_those_of_torch(ranks) -> None:
    ranks(2).run(beside_torch, timeout=100)


def captured(rank: int, world: int, group, kind: type, options: dict) -> list[str]:
    """Replays make float8 of what x, the weight and the gradient hold then."""
    with new_group(world) as own:
        communicator(own)
        step = on_gpu(kind, rank, world, own, dtype=torch.bfloat16, **options)
        sample = step.own(step.x, not step.column).clone().requires_grad_()
        # Nothing of this pass may live on: its nodes that accumulate gradients are of the stream they were made on.
        so.prepare(step.layer, sample).backward(step.own(step.g, step.column))
        step.layer.zero_grad()
        graphed = torch.cuda.make_graphed_callables(step.layer, (sample,))
        wrong = []
        for number in range(6):
            scale = 2.0 ** (number - 3)

            def draw(like: Tensor, seed: int, scale: float = scale) -> Tensor:
                return (scale * integers(*like.shape, seed=seed)).to(like)

            step.x, step.g = draw(step.x, 10 + number), draw(step.g, 20 + number)
            with torch.no_grad():
                step.whole.weight.copy_(draw(step.whole.weight, 30 + number))
                step.layer.load_whole(step.whole.weight, step.whole.bias)
            wrong += step.wrong(EXACT[torch.bfloat16], graphed)
        torch.cuda.synchronize()
        return wrong[:2]


@pytest.mark.parametrize("options", OPTIONS, ids=["", "no sequence parallel"])
@pytest.mark.parametrize("kind", KINDS)
def test_replays_make_float8_anew(ranks, kind: type, options: dict) -> None:
    assert ranks(2).run(captured, kind, options, timeout=100) == [[], []]
