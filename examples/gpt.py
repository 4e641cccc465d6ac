"""A small GPT over bytes, tensor parallel with sequence parallelism.

Activations are ``[s, b, d_model]``. Between the parallel layers a rank has its rows of s alone; inside attention and
MLP it has all rows, with its own heads and features. With `nn.Linear` in one process it is an ordinary GPT.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

BYTES = 256

Linear = Callable[..., nn.Module]  # (in_features, out_features, bias=True), of all ranks together


def replicated(module: nn.Module) -> nn.Module:
    """Every rank has the whole of `module` and feeds it its own rows: gradients are parts, `so` is told to sum them."""
    for parameter in module.parameters():
        parameter.sequence_parallel = True
    return module


class Attention(nn.Module):
    def __init__(self, d_model: int, heads: int, column: Linear, row: Linear) -> None:
        super().__init__()
        self.head_size = d_model // heads
        # Features are ordered head by head, each with its q, k and v, so that a rank's part of them is whole heads.
        # No bias: that of a key has no gradient but rounding errors, which Adam would scale up to full steps.
        self.qkv = column(d_model, 3 * d_model, bias=False)
        self.out = row(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x)
        q, k, v = y.view(*y.shape[:2], -1, 3, self.head_size).permute(3, 1, 2, 0, 4)  # of [b, heads, s, head_size]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.permute(2, 0, 1, 3).flatten(2))


class MLP(nn.Module):
    def __init__(self, d_model: int, column: Linear, row: Linear) -> None:
        super().__init__()
        self.up = column(d_model, 4 * d_model)
        self.down = row(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, d_model: int, heads: int, column: Linear, row: Linear) -> None:
        super().__init__()
        self.attention_norm = replicated(nn.RMSNorm(d_model))
        self.attention = Attention(d_model, heads, column, row)
        self.mlp_norm = replicated(nn.RMSNorm(d_model))
        self.mlp = MLP(d_model, column, row)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Args: column and row make the layers: those of streamoverlap, or `nn.Linear` for both in one process."""

    def __init__(self, d_model: int, layers: int, heads: int, seq: int, column: Linear, row: Linear) -> None:
        super().__init__()
        self.embedding = replicated(nn.Embedding(BYTES, d_model))
        self.position = replicated(nn.Embedding(seq, d_model))
        self.blocks = nn.Sequential(*(Block(d_model, heads, column, row) for _ in range(layers)))
        self.norm = replicated(nn.RMSNorm(d_model))
        self.head = replicated(nn.Linear(d_model, BYTES, bias=False))

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        """The loss summed over this rank's rows: ``[rows, b]`` tokens and targets, ``[rows, 1]`` positions."""
        x = self.blocks(self.embedding(tokens) + self.position(positions))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
