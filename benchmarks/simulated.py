"""What the simulator predicts beside what was measured: time over that of the GEMM alone, shape by shape.

    python benchmarks/simulated.py benchmarks/results/prototype_h200.json
    python benchmarks/simulated.py benchmarks/results/bench_2xH200.json    of `make bench`: its plans, in a graph

No GPU is needed. Both are ratios, so that the clock of the day counts for little.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

import streamoverlap as so
from streamoverlap import simulate
from streamoverlap.spec import spec_of


def measured(result: dict) -> Iterator[tuple[so.PlanSpec, float]]:
    """Plans of one shape and their time over that of the GEMM."""
    if "plan" in result:  # of the prototype
        yield so.PlanSpec(**result["plan"]), result["overlapped_over_gemm"]
        return
    times = result["microseconds"]["graph"]
    serial = {"serial": asdict(so.PlanSpec("serial"))} if "serial" in times else {}
    plans = serial | result["plans"] | result["graph_plans"]
    plans.pop("wire", None)  # whose partial products travel as float8
    for name, plan in plans.items():
        yield so.PlanSpec(**plan), times[name] / times["mm"]


def predicted(result: dict, plan: so.PlanSpec, world: int, costs: simulate.Costs, options: dict) -> float:
    operation, sizes = result["op"], (result["M"], result["N"], result["K"])
    of = {"costs": costs, "as_tp": result.get("as_tp")}
    if plan.algorithm == "serial":
        seconds = simulate.serial_seconds(operation, world, *sizes, **of, **options)
    else:
        timeline = simulate.simulate(spec_of(operation, plan, world), *sizes, **of, **options)
        seconds = simulate.predicted_seconds(timeline)
    return seconds / simulate.gemm_seconds(operation, world, *sizes, **of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="FILE", help="results of overlap.py, or of the prototype")
    parser.add_argument("--device", default="h200", metavar="NAME|FILE", help="whose costs (h200)")
    parser.add_argument("--best", action="store_true", help="of each shape only the plan that was measured fastest")
    args = parser.parse_args()
    document = json.loads(args.path.read_text())
    costs, world = simulate.Costs.load(args.device), document["world"]
    dtype = getattr(torch, document.get("dtype", "bfloat16"))
    if any("graph" not in result.get("microseconds", ("graph",)) for result in document["results"]):
        parser.error(f"{args.path} was measured on a CPU; expected results of GPUs, whose costs there are")
    if document.get("scaling"):
        parser.error(f"{args.path} has products of float8; expected others, whose rate the costs have")
    options = {"graph": True, "dtype_bytes": dtype.itemsize}
    print(f"{document['device']}, {world} ranks; costs of {costs.device or args.device}")
    print("| shape | plan | measured | predicted | predicted/measured |")
    print("|---|---|---|---|---|")
    ratios = {}
    for result in document["results"]:
        plans = dict(measured(result))
        best = [min(plans.items(), key=lambda each: each[1])]
        for plan, time in best if args.best else plans.items():
            guess = predicted(result, plan, world, costs, options)
            ratios[result["label"], plan.to_text()] = guess / time
            print(f"| {result['label']} | {plan.to_text()} | {time:.2f} | {guess:.2f} | {guess / time:.2f} |")
    errors = {key: abs(ratio - 1) for key, ratio in ratios.items()}
    worst = max(errors, key=errors.__getitem__)
    median = statistics.median(errors.values())
    print(f"off by {median:.1%} in the median, at most {errors[worst]:.1%}: {', '.join(worst)}")


if __name__ == "__main__":
    main()
