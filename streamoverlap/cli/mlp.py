"""The demo's model: one Llama-style MLP block over embedded bytes, sharded, and its float64 reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu

import streamoverlap as so

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_SEED = 20_260_101
_FLOAT8_ERROR = 2**-4  # of float8_e4m3fn, relative


@dataclass(frozen=True)
class Problem:
    """What all ranks must agree on. `tokens` and `ffn` are multiples of `world`."""

    world: int
    device: str
    dtype: str
    tokens: int
    hidden: int
    ffn: int
    text: str  # path of a file of at least `tokens` bytes
    wire: str | None = None  # of the partial products of down, where they are overlapped

    @property
    def bound(self) -> float:
        """As `serial_bound`, where partial products may travel as float8.

        What travels is off by half a step of float8, 1/16 of itself, at most: W - 1 partials in a direct plan, in a
        ring the sums of 1 to W - 1 of them. No one is larger than the result, nearly always, and they are off
        independently, so their errors together grow as sqrt(W - 1). A missing chunk shows on up to 16 ranks.
        """
        travelled = 0.0 if self.wire is None else _FLOAT8_ERROR * (self.world - 1) ** 0.5
        return self.serial_bound + travelled

    @property
    def serial_bound(self) -> float:
        """The largest error allowed, relative to the largest element of the float64 result.

        Four roundings to the dtype itself, to which h = silu(gate) * up and the partial products of the ranks
        are rounded, and four times the rounding error of sums of `hidden` and of `ffn` terms, which grows
        about as the square root of their number; low-precision products are summed in float32. A chunk that
        is missing, stale or summed twice is an error of the order of 1, or of 1/sqrt(world).
        """
        dtype = DTYPES[self.dtype]
        accumulated = torch.float64 if dtype == torch.float64 else torch.float32
        terms = (self.hidden + self.ffn) ** 0.5
        return 4 * torch.finfo(dtype).eps + 4 * terms * torch.finfo(accumulated).eps


@dataclass(frozen=True)
class Shard:
    """The weights of a rank, ``[out, in]``: gate and up ``[ffn / W, hidden]``, down ``[hidden, ffn / W]``."""

    gate: Tensor
    up: Tensor
    down: Tensor

    def double(self) -> Shard:
        return Shard(self.gate.double(), self.up.double(), self.down.double())


def make_shard(problem: Problem, rank: int, device: torch.device) -> Shard:
    """Any rank can make the weights of any other: that is how it checks itself without a message."""
    generator = torch.Generator(device).manual_seed(_SEED + rank)
    width = problem.ffn // problem.world

    def random(rows: int, columns: int, fan_in: int) -> Tensor:
        weight = torch.empty(rows, columns, dtype=DTYPES[problem.dtype], device=device)
        return weight.normal_(std=fan_in**-0.5, generator=generator)

    return Shard(
        gate=random(width, problem.hidden, problem.hidden),
        up=random(width, problem.hidden, problem.hidden),
        down=random(problem.hidden, width, problem.ffn),
    )


def embed(problem: Problem, rank: int, device: torch.device) -> Tensor:
    """The rank's tokens ``[tokens / W, hidden]``: bytes of the text, looked up in a table of random rows.

    With sinusoidal positions (Vaswani et al., 2017), so that no two rows are alike: one out of place shows.
    """
    rows = problem.tokens // problem.world
    with Path(problem.text).open("rb") as file:
        file.seek(rank * rows)
        tokens = torch.frombuffer(bytearray(file.read(rows)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(_SEED)
    table = torch.randn(256, problem.hidden, generator=generator)
    positions = torch.arange(rank * rows, (rank + 1) * rows).unsqueeze(1)
    angles = positions * 10_000 ** -torch.linspace(0, 1, problem.hidden)
    return (table[tokens.int()] + angles.sin()).to(device, DTYPES[problem.dtype])


def forward(x: Tensor, shard: Shard, plan: so.PlanSpec | None, wire: str | None) -> Iterator[Tensor]:
    """The block as a user writes it: one exchange in, two weights; one out. Yields after each exchange."""
    gate, up = so.all_gather_gemm(x, [shard.gate, shard.up], plan=plan)
    yield gate
    yield so.gemm_reduce_scatter(silu(gate) * up, shard.down, plan=plan, wire=wire)


def reference(problem: Problem, x: Tensor) -> Tensor:
    """The block for rows `x` in float64, by this process alone: a shard at a time, never all weights."""
    x = x.double()
    y = torch.zeros_like(x)
    for rank in range(problem.world):
        shard = make_shard(problem, rank, x.device).double()
        y += (silu(x @ shard.gate.T) * (x @ shard.up.T)) @ shard.down.T
    return y
