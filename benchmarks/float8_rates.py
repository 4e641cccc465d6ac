"""How fast one GPU multiplies float8, and makes it of rows: what a float8 layer gains, and what that costs it.

    python benchmarks/float8_rates.py --measure benchmarks/results/float8_rates_h200.json    on this GPU
    python benchmarks/float8_rates.py benchmarks/results/float8_rates_h200.json              a table of them

Products of one rank's sizes by torch.mm in bfloat16, and by torch._scaled_mm with scales of the whole tensor, or of
rows with and without fast accumulation. A time is the median of five, of ten calls on three sets of inputs in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from streamoverlap import _C

SETS, CALLS, TIMES = 3, 10, 5
PRODUCTS = (  # M, N, K
    (2048, 5120, 8192),
    (4096, 8192, 4096),
    (8192, 1280, 8192),
    (8192, 8192, 1024),
    (8192, 8192, 4096),
    (8192, 5120, 8192),
    (8192, 8192, 14336),
    (8192, 28672, 8192),
)
ROWS = ((1024, 8192), (4096, 4096), (4096, 8192), (8192, 8192), (8192, 28672))  # rows, columns
COLUMNS = ("torch.mm", "tensor-wise, fast", "row-wise, fast", "row-wise")


def microseconds(call: Callable[[int], object]) -> float:
    for i in range(SETS):
        call(i)
    torch.cuda.synchronize()
    times = []
    for _ in range(TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for i in range(CALLS):
            call(i % SETS)
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / CALLS)
    return statistics.median(times)


def product(m: int, n: int, k: int) -> dict:
    x = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)]
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    values, of_rows = zip(*map(_C.quantise_rows, x), strict=True)
    of_weight, of_columns = _C.quantise_rows(weight)
    one = torch.ones((), device="cuda")

    def scaled(i: int, rows: bool, fast: bool) -> object:
        scales = {"scale_a": of_rows[i], "scale_b": of_columns.t()} if rows else {"scale_a": one, "scale_b": one}
        return torch._scaled_mm(values[i], of_weight.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=fast)

    calls = [
        lambda i: torch.mm(x[i], weight.t()),
        partial(scaled, rows=False, fast=True),
        partial(scaled, rows=True, fast=True),
        partial(scaled, rows=True, fast=False),
    ]
    times = {name: round(microseconds(call), 2) for name, call in zip(COLUMNS, calls, strict=True)}
    return {"M": m, "N": n, "K": k, "us": times}


def quantising(rows: int, columns: int) -> dict:
    x = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)]

    def by_torch(i: int) -> object:
        scales = x[i].abs().amax(-1, keepdim=True).float() / 448
        return (x[i] / scales).to(torch.float8_e4m3fn)

    times = {"kernel": microseconds(lambda i: _C.quantise_rows(x[i])), "torch": microseconds(by_torch)}
    return {"rows": rows, "columns": columns, "us": {name: round(time, 2) for name, time in times.items()}}


def measure_all(path: Path) -> None:
    head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    found = {"products": [product(*sizes) for sizes in PRODUCTS], "quantised": [quantising(*sizes) for sizes in ROWS]}
    path.write_text(json.dumps(head | found, indent=1) + "\n")


def table(document: dict) -> str:
    lines = [
        f"{document['device']}, torch {document['torch']}: microseconds, and times as fast as torch.mm",
        "",
        f"| M x N x K | {' | '.join(COLUMNS)} |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for row in document["products"]:
        times = row["us"]
        cells = [f"{times[name]:.0f} ({times[COLUMNS[0]] / times[name]:.2f})" for name in COLUMNS]
        lines.append(f"| {row['M']} x {row['N']} x {row['K']} | {' | '.join(cells)} |")
    lines += ["", "| bfloat16 rows | quantised by the kernel | GB/s read and written | by torch |", "|---|---|---|---|"]
    for row in document["quantised"]:
        kernel, by_torch = row["us"]["kernel"], row["us"]["torch"]
        rate = row["rows"] * row["columns"] * 3 / kernel / 1e3
        lines.append(f"| {row['rows']} x {row['columns']} | {kernel:.1f} | {rate:.0f} | {by_torch:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="FILE", help="measured times")
    parser.add_argument("--measure", action="store_true", help="measure them first, on the current GPU")
    args = parser.parse_args()
    if args.measure:
        measure_all(args.path)
    print(table(json.loads(args.path.read_text())))


if __name__ == "__main__":
    main()
