"""How well asynchronous collectives hide behind an independent GEMM.

    torchrun --nproc-per-node 2 benchmarks/async_overlap.py

Prints t / max for each: the time of both together over that of the longer of the two alone. 1.00 is perfect. Times are
those of overlap.py: medians over rounds of the slowest rank's mean. The GEMM is as long as it takes to multiply an
[N, N] by an [N, N] matrix; N is chosen with --gemm so that it is about as long as the exchanges, where hiding is
hardest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from measure import has_a_gpu_a_rank, join, measure

import streamoverlap as so

PLANS = {"direct": so.PlanSpec(), "ring": so.PlanSpec("ring"), "direct, 4 chunks": so.PlanSpec(chunks=4)}
OPS = (so.all_gather, so.reduce_scatter, so.all_reduce)


def input_of(op: Callable, args: argparse.Namespace, world: int, device: torch.device) -> torch.Tensor:
    """This rank's; each rank gets, or has, --rows rows a rank."""
    rows = args.rows if op is so.all_gather else args.rows * world
    return torch.randn(rows, args.columns, dtype=torch.bfloat16, device=device)


def variants_of(op: Callable, x: torch.Tensor, a: torch.Tensor, plan: so.PlanSpec) -> dict[str, Callable[[], object]]:
    out = torch.empty_like(a)

    def behind(copy_input: bool) -> None:
        work = op(x, plan=plan, copy_input=copy_input, async_op=True)
        torch.mm(a, a, out=out)
        work.wait()

    return {
        "gemm": lambda: torch.mm(a, a, out=out),
        "exchange": lambda: op(x, plan=plan),
        "both": lambda: behind(False),
        "both, copied": lambda: behind(True),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096, help="of a rank's shard (default 4096)")
    parser.add_argument("--columns", type=int, default=8192, help="default 8192")
    parser.add_argument("--gemm", type=int, nargs="+", default=[4096, 8192], metavar="N", help="default 4096 8192")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    if not has_a_gpu_a_rank("async_overlap.py"):
        return 2
    device = join()
    world, is_first = dist.get_world_size(), dist.get_rank() == 0

    def show(text: str) -> None:
        if is_first:
            print(text, flush=True)

    show(f"{world} x {torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16; in microseconds")
    show(f"[{args.rows}, {args.columns}] a rank; copied: with copy_input=True")
    show("| op | plan | N | gemm | exchange | both | copied | t/max | t/max, copied |")
    show("|---|---|---|---|---|---|---|---|---|")
    for op in OPS:
        x = input_of(op, args, world, device)
        for (name, plan), n in ((plan, n) for plan in PLANS.items() for n in args.gemm):
            a = torch.randn(n, n, dtype=torch.bfloat16, device=device)
            times = measure(variants_of(op, x, a, plan), args.rounds, device)
            longer = max(times["gemm"], times["exchange"])
            columns = " | ".join(f"{seconds * 1e6:.0f}" for seconds in times.values())
            ratios = f"{times['both'] / longer:.3f} | {times['both, copied'] / longer:.3f}"
            show(f"| {op.__name__} | {name} | {n} | {columns} | {ratios} |")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
