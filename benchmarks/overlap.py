"""GEMM alone, serial and overlapped times of the benchmark shapes, and the CPU time to issue a call.

    torchrun --nproc-per-node 2 benchmarks/overlap.py --set core --out benchmarks/results/overlap.json

Each rank times every variant in turn, several rounds of them, so that clocks and temperature are the same for
all; the ranks are aligned by a barrier before each time. A time is the median over rounds of the slowest
rank's mean of one call. `gemm` is one rank's whole product without communication: what perfect overlap takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import streamoverlap as so

SHAPES = Path(__file__).with_name("shapes.json")
SERIAL = so.PlanSpec(algorithm="serial")
PLANS = {
    "direct": so.PlanSpec(),
    "direct, 2 chunks": so.PlanSpec(chunks=2),
    "direct, 2 chunks, 2 compute": so.PlanSpec(chunks=2, compute_streams=2),
    "direct, 4 chunks": so.PlanSpec(chunks=4),
    "direct, 1 chunk, sum": so.PlanSpec(reduce="sum"),
    "direct, 2 chunks, sum": so.PlanSpec(chunks=2, reduce="sum"),
}
WARM_UP = 3
ROTATION = 3  # sets of inputs
MEASURE_SECONDS = 0.02  # of one variant in one round


def local_problem(
    shape: dict, world: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and weight of one rank."""
    m, n, k = shape["M"], shape["N"], shape["K"]
    split = shape.get("as_tp", world)
    if shape["op"] == "all_gather_gemm":
        x_shape, weight_shape = (m // world, k), (n // split, k)
    else:
        x_shape, weight_shape = (m, k // split), (n, k // split)
    x = torch.randn(x_shape, dtype=dtype, device=device)
    return x, torch.randn(weight_shape, dtype=dtype, device=device) / math.sqrt(k)


def variants_of(shape: dict, problems: list[tuple], world: int) -> dict[str, Callable[[], object]]:
    """By name, a call on the next of `problems`: one after the other, so that no input waits in the L2 cache."""
    gathers = shape["op"] == "all_gather_gemm"
    op = so.all_gather_gemm if gathers else so.gemm_reduce_scatter
    wholes = [(torch.cat([x] * world) if gathers else x, weight) for x, weight in problems]
    (x, weight), *_ = wholes
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)

    def rotated(inputs: list[tuple], call: Callable) -> Callable[[], object]:
        turn = itertools.cycle(inputs)
        return lambda: call(*next(turn))

    variants = {
        "gemm": rotated(wholes, lambda x, weight: torch.mm(x, weight.t(), out=out)),
        "serial": rotated(problems, lambda x, weight: op(x, weight, plan=SERIAL)),
    }
    for name, plan in PLANS.items():
        if not (gathers and plan.reduce == "sum"):
            variants[name] = rotated(problems, lambda x, weight, plan=plan: op(x, weight, plan=plan))
    return variants


def slowest(seconds: float, device: torch.device) -> float:
    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def time_of(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of one call on the slowest rank."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return slowest(start.elapsed_time(end) / 1e3 / repeats, device)


def measure(variants: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    repeats = {}
    for name, call in variants.items():
        for _ in range(WARM_UP):
            call()
        repeats[name] = min(max(3, round(MEASURE_SECONDS / time_of(call, 3, device))), 200)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, call in variants.items():
            times[name].append(time_of(call, repeats[name], device))
    return {name: statistics.median(values) for name, values in times.items()}


def issue_time(device: torch.device, dtype: torch.dtype, samples: int = 300) -> float:
    """Median CPU seconds of one all_gather_gemm call from Python, on an idle GPU, the slowest rank's."""
    x = torch.randn(256, 1024, dtype=dtype, device=device)
    weight = torch.randn(1024, 1024, dtype=dtype, device=device)
    seconds = []
    for i in range(samples + WARM_UP):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        so.all_gather_gemm(x, weight, plan=PLANS["direct"])
        if i >= WARM_UP:
            seconds.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return slowest(statistics.median(seconds), device)


def label(shape: dict) -> str:
    return f"{'AG' if shape['op'] == 'all_gather_gemm' else 'RS'} {shape['name']} M{shape['M']}"


def report(shape: dict, times: dict[str, float]) -> dict:
    overlapped = {name: seconds for name, seconds in times.items() if name not in ("gemm", "serial")}
    best = min(overlapped, key=overlapped.__getitem__)
    return {
        **shape,
        "label": label(shape),
        "microseconds": {name: seconds * 1e6 for name, seconds in times.items()},
        "best": best,
        "serial_over_gemm": times["serial"] / times["gemm"],
        "overlapped_over_gemm": times[best] / times["gemm"],
        "serial_over_overlapped": times["serial"] / times[best],
    }


def markdown_row(result: dict) -> str:
    times = result["microseconds"]
    return (
        f"| {result['label']} | {times['gemm']:.0f} | {times['serial']:.0f} | {times[result['best']]:.0f} "
        f"| {result['serial_over_gemm']:.2f} | {result['overlapped_over_gemm']:.2f} "
        f"| {result['serial_over_overlapped']:.2f} | {result['best']} |"
    )


def geomean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="core", choices=("core", "more", "small"), help="which shapes of shapes.json")
    parser.add_argument("--only", default="", metavar="TEXT", help="shapes whose label contains this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if "LOCAL_RANK" not in os.environ:
        print(
            "overlap.py runs under torchrun: torchrun --nproc-per-node 2 benchmarks/overlap.py",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    world, is_first = dist.get_world_size(), dist.get_rank() == 0
    dtype = getattr(torch, arguments.dtype)
    torch.manual_seed(dist.get_rank())

    def show(text: str) -> None:
        if is_first:
            print(text, flush=True)

    show(f"{world} x {torch.cuda.get_device_name()}, torch {torch.__version__}, {dtype}; in microseconds")
    show("| shape | gemm | serial | overlapped | serial/gemm | overlapped/gemm | serial/overlapped | plan |")
    show("|---|---|---|---|---|---|---|---|")
    results = []
    for shape in json.loads(SHAPES.read_text())[arguments.set]:
        if arguments.only not in label(shape):
            continue
        problems = [local_problem(shape, world, dtype, device) for _ in range(ROTATION)]
        results.append(report(shape, measure(variants_of(shape, problems, world), arguments.rounds, device)))
        show(markdown_row(results[-1]))
    issue = issue_time(device, dtype)
    if results:
        show(f"geomean overlapped/gemm: {geomean([r['overlapped_over_gemm'] for r in results]):.3f}")
    show(f"CPU time to issue one all_gather_gemm: {issue * 1e6:.1f} us")
    if is_first and arguments.out:
        about = {"device": torch.cuda.get_device_name(), "world": world, "torch": torch.__version__}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        document = {**about, "dtype": arguments.dtype, "issue_microseconds": issue * 1e6, "results": results}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
