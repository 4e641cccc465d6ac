"""How well the simulator knows the time of a GEMM, and what it would have to know to do better.

    python benchmarks/gemm_model.py --measure benchmarks/results/gemm_h200.json    torch.mm on this GPU
    python benchmarks/gemm_model.py benchmarks/results/gemm_h200.json              errors of the model, no GPU needed
    python benchmarks/gemm_model.py benchmarks/results/gemm_h200.json --fit        rates that fit: csrc/plan/costs.cpp

A time is the median of five replays of a CUDA graph, divided by its products, each on other matrices so that none is in
the L2 cache. Short, so at the clock of a GPU that is not at its power limit yet.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path

from streamoverlap import simulate

ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
# N, K of weights of Llama-8B and -70B: split by columns, split by rows. A rank has one part of 2, 4 or 8.
COLUMNS = ((6144, 4096), (28672, 4096), (10240, 8192), (57344, 8192))
LINES = ((4096, 4096), (4096, 14336), (8192, 8192), (8192, 28672))
PARTS = (2, 4, 8)
WEIGHTS = (
    *((n // parts, k) for n, k in COLUMNS for parts in PARTS),
    *((n, k // parts) for n, k in LINES for parts in PARTS),
)
L2_BYTES = 200e6  # more than any cache, over all sets of matrices
MULTIPLIED = 256  # rows from which on a GEMM multiplies longer than it reads: the model has no memory bandwidth
# As kShapes of csrc/plan/costs.cpp: by what the large tile's rows are divided, eighths of its columns, parts of K.
SHAPES = ((1, 8, 1), (1, 6, 1), (1, 5, 1), (1, 4, 1), (2, 4, 1), (2, 2, 1), (1, 8, 2), (1, 4, 2), (1, 4, 4), (1, 4, 8))

Row = tuple[int, int, int, float]  # M, N, K, microseconds


def measure(m: int, n: int, k: int) -> float:
    import torch

    sets = max(3, min(16, int(L2_BYTES / (2 * (m * k + n * k))) + 1))
    options = {"device": "cuda", "dtype": torch.bfloat16}
    xs = [torch.randn(m, k, **options) for _ in range(sets)]
    weights = [torch.randn(n, k, **options) for _ in range(sets)]
    out = torch.empty(m, n, **options)

    def multiply() -> None:
        for x, weight in zip(xs, weights, strict=True):
            torch.mm(x, weight.t(), out=out)

    multiply()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply()
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / sets)
    return statistics.median(times[1:])


def measure_all(path: Path) -> None:
    import torch

    rows = [(m, n, k, round(measure(m, n, k), 2)) for n, k in WEIGHTS for m in ROWS]
    text = ",\n  ".join(json.dumps(row) for row in rows)
    head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "dtype": "bfloat16"}
    fields = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
    path.write_text(f'{{\n{fields} "columns": ["M", "N", "K", "us"],\n "rows": [\n  {text}\n ]\n}}\n')


def errors(rows: list[Row], model: Callable[[int, int, int], float]) -> list[float]:
    """Of each row: 0.1 is about 10 % too long or too short."""
    return [abs(math.log(1e6 * model(m, n, k) / us)) for m, n, k, us in rows]


def describe(found: list[float]) -> str:
    ordered = sorted(found)
    return f"median {statistics.median(ordered):.1%}, p90 {ordered[int(0.9 * len(ordered))]:.1%}, max {ordered[-1]:.1%}"


def model_of(parameters: list[float], costs: simulate.Costs) -> Callable[[int, int, int], float]:
    """The model of csrc/plan/costs.cpp with other rates, FLOP/s and latency."""
    *rates, flops, latency = parameters

    def seconds(m: int, n: int, k: int) -> float:
        waves = math.inf
        for (rows, eighths, splits), rate in zip(SHAPES, [1.0, *rates], strict=True):
            tile_m, tile_n = costs.tile_m // rows, costs.tile_n * eighths // 8
            count = math.ceil(math.ceil(m / tile_m) * math.ceil(n / tile_n) * splits / costs.sms)
            waves = min(waves, count * eighths / (8 * rows * splits * rate))
        return latency + waves * 2 * costs.sms * costs.tile_m * costs.tile_n * k / flops

    return seconds


def fit(rows: list[Row], costs: simulate.Costs, steps: int) -> list[float]:
    """By a random walk that takes what is better; the largest error counts, too."""
    draw = random.Random(0)

    def loss(parameters: list[float]) -> float:
        found = errors(rows, model_of(parameters, costs))
        return statistics.mean(found) + 0.3 * max(found)

    best = [*[0.8 if splits > 1 else 0.9 for _, _, splits in SHAPES[1:]], costs.gemm_flops, costs.gemm_latency]
    least = loss(best)
    for _ in range(steps):
        tried = list(best)
        place = draw.randrange(len(tried))
        tried[place] *= math.exp(draw.gauss(0, 0.06))
        if max(tried[: len(SHAPES) - 1]) > 1 or not 2e-6 <= tried[-1] <= 6e-6:
            continue
        if (found := loss(tried)) < least:
            best, least = tried, found
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="FILE", help="measured times")
    parser.add_argument("--measure", action="store_true", help="measure them first, on the current GPU")
    parser.add_argument("--fit", action="store_true", help="and find rates that fit them")
    parser.add_argument("--steps", type=int, default=20_000, help="of the fit (20,000)")
    args = parser.parse_args()
    if args.measure:
        measure_all(args.path)
    document = json.loads(args.path.read_text())
    rows: list[Row] = [tuple(row) for row in document["rows"]]
    costs = simulate.Costs.load("h200")
    model = costs.compiled().gemm_seconds
    print(f"{document['device']}, torch {document['torch']}: {len(rows)} shapes")
    print(f"all: {describe(errors(rows, model))}")
    multiplied = [row for row in rows if row[0] >= MULTIPLIED]
    print(f"M of {MULTIPLIED} and more: {describe(errors(multiplied, model))}")
    if args.fit:
        found = fit(multiplied, costs, args.steps)
        for shape, rate in zip(SHAPES, [1.0, *found[:-2]], strict=True):
            print(f"{shape}: {rate:.2f}")
        print(f"{found[-2] / 1e12:.0f} TFLOP/s, {found[-1] * 1e6:.1f} us")
        print(f"fitted: {describe(errors(multiplied, model_of(found, costs)))}")


if __name__ == "__main__":
    main()
