"""Forward and backward pass of transformer blocks' linear layers: overlapped, serial, and PyTorch's async-TP.

    torchrun --nproc-per-node 2 benchmarks/layers.py --out benchmarks/results/layers.json

Blocks of Llama-70B's shape, tokens sharded between layers: `mlp` (gate and up in one weight, SwiGLU, down) and
`attention` (the projections before and after it). `serial` are this package's layers on the group's own collectives
(NCCL), `async-TP` is PyTorch's: DTensor styles compiled with `_micro_pipeline_tp`. Times are taken as in overlap.py:
medians over rounds of the slowest rank's mean. Memory is what a pass allocates at its peak, and what the exchange
keeps: slots, workspaces. Outputs and gradients of all variants are compared before they are timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from columns import SERIAL
from measure import has_a_gpu_a_rank, join, measure
from problem import ROTATION, TOLERANCE
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import silu

import streamoverlap as so

HIDDEN, FFN, QKV = 8192, 28672, 10240


class Block(nn.Module):
    """On one rank: `first` and `last` are whole, and sharded by what makes the block parallel."""

    def __init__(self, middle: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        options = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        self.first, self.last = nn.Linear(HIDDEN, middle, **options), nn.Linear(self.width(middle), HIDDEN, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


class Mlp(Block):
    def __init__(self) -> None:
        super().__init__(2 * FFN)

    def width(self, middle: int) -> int:
        return middle // 2

    def between(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return silu(gate) * up


class Attention(Block):
    """Without what is between the projections: each rank's queries go on as they are."""

    def __init__(self) -> None:
        super().__init__(QKV)

    def width(self, middle: int) -> int:
        return HIDDEN

    def between(self, x: Tensor) -> Tensor:
        return x[..., : x.shape[-1] * HIDDEN // QKV]


BLOCKS = {"mlp": Mlp, "attention": Attention}


def ours(block: Block, plan: so.PlanSpec | None) -> nn.Module:
    block.first = so.ColumnParallelLinear.from_linear(block.first, plan=plan)
    block.last = so.RowParallelLinear.from_linear(block.last, plan=plan)
    return block


def torchs(block: Block, mesh: DeviceMesh) -> nn.Module:
    symm_mem.enable_symm_mem_for_group(mesh.get_group().group_name)
    torch._inductor.config._micro_pipeline_tp = True
    first = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    parallelize_module(block, mesh, {"first": first})
    styles = {"first": ColwiseParallel(), "last": RowwiseParallel(output_layouts=Shard(0))}
    return torch.compile(parallelize_module(block, mesh, styles), fullgraph=True)


def makers(mesh: DeviceMesh) -> dict[str, Callable[[Block], nn.Module]]:
    return {
        "serial": lambda block: ours(block, SERIAL),
        "overlapped": lambda block: ours(block, None),
        "overlapped, compiled": lambda block: torch.compile(ours(block, None), fullgraph=True),
        "async-TP": lambda block: torchs(block, mesh),
    }


def step_of(module: nn.Module, inputs: list[Tensor]) -> Callable[[], list[Tensor]]:
    """A pass forward and back on the next input, which returns the output and gradients."""
    turn = 0

    def step() -> list[Tensor]:
        nonlocal turn
        x = inputs[turn % len(inputs)]
        turn += 1
        module.zero_grad(set_to_none=True)
        x.grad = None
        y = module(x)
        y.backward(torch.ones_like(y))
        return [y.detach(), x.grad]

    return step


def in_use() -> int:
    """Bytes of the GPU, this process' and all others'."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def differ(one: Tensor, other: Tensor) -> bool:
    return ((one - other).abs().max() > TOLERANCE * other.abs().max()).item()


def run_block(name: str, tokens: int, mesh: DeviceMesh, rounds: int) -> dict[str, dict[str, float]]:
    """By variant, milliseconds and MiB."""
    device, world = torch.device("cuda", torch.cuda.current_device()), dist.get_world_size()
    inputs = [
        torch.randn(tokens // world, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True)
        for _ in range(ROTATION)
    ]
    steps, found, reference = {}, {}, None
    for variant, make in makers(mesh).items():
        torch._dynamo.reset()
        before = in_use()
        module = make(BLOCKS[name]())
        weights = sum(p.numel() * p.element_size() for p in module.parameters()) // (
            1 if variant != "async-TP" else world
        )
        step = step_of(module, inputs)
        got = [tensor.clone() for tensor in step()]
        if reference is None:
            reference = got
        elif any(differ(one, other) for one, other in zip(got, reference, strict=True)):
            raise RuntimeError(f"{variant} of {name} does not give what serial gives")
        for _ in range(ROTATION - 1):
            step()
        del got
        kept = max(in_use() - before - 2 * weights, 0)  # weights and their gradients
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        for _ in range(ROTATION):
            step()
        torch.cuda.synchronize()
        found[variant] = {
            "pass MiB": (torch.cuda.max_memory_allocated() - allocated) / 2**20,
            "kept MiB": kept / 2**20,
        }
        steps[variant] = step
    for variant, seconds in measure(steps, rounds, device).items():
        found[variant]["ms"] = seconds * 1e3
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], metavar="M", help="default 2048 8192")
    parser.add_argument("--blocks", nargs="+", default=list(BLOCKS), choices=list(BLOCKS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    args = parser.parse_args()
    if not has_a_gpu_a_rank("layers.py"):
        return 2
    join()
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")
    is_first = dist.get_rank() == 0
    if is_first:
        name = torch.cuda.get_device_name()
        print(f"{dist.get_world_size()} x {name}, torch {torch.__version__}, bfloat16; forward and backward")
        print("| block | M | variant | ms | / serial | pass MiB | kept MiB |\n|---|---|---|---|---|---|---|")
    results = []
    for name in args.blocks:
        for tokens in args.tokens:
            found = run_block(name, tokens, mesh, args.rounds)
            results.append({"block": name, "tokens": tokens, "variants": found})
            for variant, values in found.items() if is_first else ():
                ratio = values["ms"] / found["serial"]["ms"]
                memory = f"{values['pass MiB']:.0f} | {values['kept MiB']:.0f}"
                print(f"| {name} | {tokens} | {variant} | {values['ms']:.3f} | {ratio:.3f} | {memory} |", flush=True)
    if is_first and args.out:
        about = {"device": torch.cuda.get_device_name(), "world": dist.get_world_size(), "torch": torch.__version__}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
