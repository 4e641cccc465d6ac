"""Each shape's time with its communication hidden, beside the GEMM alone, the exchange alone, serial and PyTorch's own.

    make bench GPUS=2                                   all of shapes.json
    python benchmarks/overlap.py --ranks 2 --set core   the same without make, of one set

Every column runs eagerly and inside a CUDA graph of several calls, on inputs that rotate, all in turn, several rounds
of them, so that clocks and temperature are the same for all. A time is the median over rounds of the slowest rank's
mean of one call. Each column is first checked on small integers, exactly, its outputs full of NaN before; what the
timed calls gave, on normal numbers, is checked after: within 2 % of the largest value.

Columns: `mm`, one rank's whole product by torch.mm; `best gemm`, the same by the fastest of cuBLASLt's algorithms;
`comm`, the exchange alone, by copy engines; `serial`, the group's collective and the GEMM; `fused`, PyTorch's
symmetric-memory op; `untuned`, ours as the simulator chooses; `tuned`, ours after streamoverlap.tune, whose time is in
no column; `wire`, the same with partial products that travel as float8, and so may be off by what that rounds.
Results go to OUT.json, OUT.md and OUT.png.

With --scaling x and weight are float8 with scales, results are bfloat16, `mm` is torch._scaled_mm, and `fused` the
scaled ones of PyTorch's ops.

Where there is no GPU it runs the host executor on a few small shapes. With fewer GPUs than ranks set
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1: it shows that the code works, and nothing of speed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

import torch
from factors import Plain, Scaled
from overlap_rank import Job, run_rank
from report import prefix_of, write
from shapes import SETS, load

from streamoverlap import _C
from streamoverlap.cli.launch import RanksFailed, launch

OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
DTYPES = ("bfloat16", "float16", "float32")
SCALINGS = ("row", "tensor")


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, metavar="W", help="a GPU each (2)")
    parser.add_argument("--set", nargs="+", default=list(SETS), choices=SETS, help="of shapes.json (all)")
    parser.add_argument("--only", default="", metavar="TEXT", help="shapes whose label contains this")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="times each column is timed (7)")
    parser.add_argument("--dtype", choices=DTYPES, help="default bfloat16, on the CPU float32")
    parser.add_argument("--scaling", choices=SCALINGS, help="float8; files are PREFIX_fp8-row or -tensor")
    parser.add_argument("--plans", action="store_true", help="also direct and ring, 1 to 3 compute streams, chunks")
    parser.add_argument("--save", action="store_true", help="keep what was tuned in the user's table")
    parser.add_argument("--out", type=Path, metavar="PREFIX", help="default benchmarks/results/bench_WxDEVICE")
    args = parser.parse_args(words)
    for name, low, high in (("ranks", 2, _C.MAX_WORLD), ("rounds", 1, 1000)):
        if not low <= getattr(args, name) <= high:
            parser.error(f"--{name} is {getattr(args, name)}; expected an integer from {low} to {high}")
    gpus = torch.cuda.device_count()
    if 0 < gpus < args.ranks and os.environ.get(OVERLAPPING) != "1":
        parser.error(
            f"--ranks is {args.ranks}, and torch finds {gpus} GPUs; expected a GPU each, or {OVERLAPPING}=1 to try the "
            "code with several ranks a GPU"
        )
    args.shapes = load(args.set, args.only, on_gpus=gpus > 0)
    if not args.shapes:
        parser.error(f"--only {args.only!r}: no shape has that in its label")
    for shape in args.shapes:
        try:
            shape.sizes(args.ranks)
        except ValueError as error:
            parser.error(f"--ranks is {args.ranks}: {shape.label}: {error}")
    if args.scaling is not None and args.dtype is not None:
        parser.error(f"--dtype is {args.dtype} with --scaling; expected none: of float8 results are bfloat16")
    default = "bfloat16" if gpus else "float32"
    args.kind = Scaled(args.scaling) if args.scaling else Plain(getattr(torch, args.dtype or default))
    if args.out is not None:
        try:  # before anything has run for nothing
            args.out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out is {args.out}: {error}")
    return args


def main() -> int:
    args = parse_arguments()
    command = shlex.join(["benchmarks/overlap.py", *sys.argv[1:]])
    job = Job(tuple(args.shapes), args.kind, args.rounds, args.plans, args.save, command, args.out)
    try:
        document = launch(run_rank, args.ranks, job)[0]
    except RanksFailed as error:
        print(error, file=sys.stderr)
        return 1
    out = prefix_of(args.out, document)
    print(write(document, out))
    print(f"written: {out}.json, .md, .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
