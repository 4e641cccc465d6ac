"""A rank of benchmarks/overlap.py: one shape after the other, checked, timed, and checked again."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from columns import DIRECT, NAMES, Column, Groups, Replayed, Rotated, columns_of, plans_to_compare
from environment import environment
from measure import align, issue_seconds, join, measure, synchronize
from problem import ROTATION, Problem
from report import prefix_of, write_json
from shapes import Shape

import streamoverlap as so
from streamoverlap.call import Mode, in_mode
from streamoverlap.meeting import attempt, first_error

MODES = {"eager": Rotated, "graph": Replayed}


@dataclass(frozen=True)
class Job:
    shapes: tuple[Shape, ...]
    dtype: str
    rounds: int
    plans: bool  # to be compared
    save: bool  # what was tuned
    command: str
    out: Path | None


def run_rank(job: Job, threads: int) -> dict:
    """Returns the document of all results, the same on every rank but for the environment."""
    torch.set_num_threads(threads)
    device = join()
    rank, world = dist.get_rank(), dist.get_world_size()
    if device.type == "cuda":
        # For `fused`, whose first call tells why if it cannot be.
        attempt(lambda: symm_mem.enable_symm_mem_for_group(dist.group.WORLD.group_name))
    groups = Groups.make(device)
    about = environment(device)
    document = {
        "device": about["device"],
        "world": world,
        "torch": torch.__version__,
        "dtype": job.dtype,
        "rounds": job.rounds,
        "command": job.command,
        "environment": about,
        "results": [],
    }
    with torch.no_grad():
        document["issue_microseconds"] = _issue(groups, device, getattr(torch, job.dtype))
        for number, shape in enumerate(job.shapes, 1):
            result = run_shape(shape, groups, job, device)
            document["results"].append(result)
            if rank == 0:
                print(f"[{number}/{len(job.shapes)}] {progress_of(result)}", flush=True)
                write_json(document, prefix_of(job.out, document))  # should a later one fail
    align(device)  # calls of peers may need this rank's memory until here
    groups.close(device)
    dist.destroy_process_group()
    return document


def run_shape(shape: Shape, groups: Groups, job: Job, device: torch.device) -> dict:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # slots are not torch's, and need what the last shape has left
    problem = Problem(shape, getattr(torch, job.dtype), device)
    world = problem.world
    compared = plans_to_compare(shape.gathers, world) if job.plans else {}
    columns, absent = columns_of(problem, groups, compared)
    begin = time.perf_counter()
    _tune(problem, groups, job)
    plans = _chosen(problem, groups) | {name: asdict(plan) for name, plan in compared.items()}
    with in_mode(Mode(prepare=True)):
        captured = _chosen(problem, groups)  # as for a capture
    tuning = time.perf_counter() - begin
    timed, missing = _variants(columns, device)
    _check_exactly(columns, timed, problem)
    problem.fill(integers=False)
    for variant in timed.values():
        variant.poison()
    seconds = measure(timed, job.rounds, device)
    _check(timed, columns, problem)
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for (mode, name), value in seconds.items():
        times[mode][name] = 1e6 * value / timed[mode, name].calls
    return {
        **shape.as_json(),
        "link_bytes": shape.link_bytes(world, getattr(torch, job.dtype)),
        "microseconds": dict(times),
        "plans": plans,
        "graph_plans": captured,
        "absent": {mode: absent | missing[mode] for mode in times},
        "tuning_seconds": tuning,
    }


def progress_of(result: dict) -> str:
    """A line for each shape while others are measured: times over that of `mm`."""
    parts = []
    for mode, times in result["microseconds"].items():
        shown = [name for name in ("serial", "fused", "untuned", "tuned") if name in times]
        ratios = ", ".join(f"{name} {times[name] / times['mm']:.2f}" for name in shown)
        parts.append(f"{mode}: mm {times['mm']:.0f} us, {ratios}")
    return f"{result['label']}: {'; '.join(parts)}"


def _tune(problem: Problem, groups: Groups, job: Job) -> None:
    """Tunes the shape, on GPUs in graphs as well, and there the product alone."""
    call = _op(problem), problem.x[0], problem.weights[0]
    so.tune(*call, groups.tuned, save=job.save)
    if groups.alone is not None:
        so.tune(*call, groups.tuned, graph=True, save=job.save)
        _tune_product(problem, groups.alone)


def _chosen(problem: Problem, groups: Groups) -> dict[str, dict]:
    """The plans of `untuned` and `tuned`."""
    call = _op(problem), problem.x[0], problem.weights[0]
    named = {"untuned": groups.untuned, "tuned": groups.tuned}
    return {name: asdict(so.explain(*call, group).plan) for name, group in named.items()}


def _op(problem: Problem) -> Callable:
    return so.all_gather_gemm if problem.shape.gathers else so.gemm_reduce_scatter


def _tune_product(problem: Problem, alone: dist.ProcessGroup) -> None:
    """As the tuner does, but for one product alone: with the fastest of cuBLASLt's algorithms it runs from here on."""
    impl = so.Communicator.of(alone, problem.x[0].device)._open()
    impl.set_tuning(True)
    try:
        so.all_gather_gemm(problem.whole_x(0), problem.weights[0], alone, plan=DIRECT)
    finally:
        impl.set_tuning(False)


Variant = Rotated | Replayed


def _variants(
    columns: dict[str, Column], device: torch.device
) -> tuple[dict[tuple[str, str], Variant], dict[str, dict[str, str]]]:
    """By mode and column; and by mode, why columns are missing: PyTorch's own op may fail, ours may not."""
    found: dict[tuple[str, str], Variant] = {}
    missing: dict[str, dict[str, str]] = {mode: {} for mode in MODES}
    reason = None
    modes = {mode: variant for mode, variant in MODES.items() if mode == "eager" or device.type == "cuda"}
    for mode, variant in modes.items():
        for name, column in columns.items():
            if name not in NAMES and mode != list(modes)[-1]:
                continue  # plans that are compared: where the CPU hides least
            if name != "fused":
                found[mode, name] = variant(column)
                continue
            made, reason = (None, reason) if reason else _try_together(variant, column, device)
            if reason is None:
                found[mode, name] = made
            else:
                missing[mode][name] = reason
    return found, missing


def _try_together(variant: type[Variant], column: Column, device: torch.device) -> tuple[Variant | None, str | None]:
    """Makes it, and one call; or gives why some rank could not, the same on all ranks."""
    made: list[Variant] = []

    def make_and_call() -> None:
        made.append(variant(column))
        column.call(0)
        synchronize(device)

    everyone: list[tuple[float, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, attempt(make_and_call))
    reason = first_error(everyone)
    return (made[0], None) if reason is None else (None, reason.splitlines()[0])


def _check_exactly(columns: dict[str, Column], timed: dict[tuple[str, str], Variant], problem: Problem) -> None:
    """All columns on all sets of inputs, small integers, from memory full of NaN."""
    problem.fill(integers=True)
    for i in range(ROTATION):
        expected = {}
        for (mode, name), variant in timed.items():
            column = columns[name]
            if column.expected not in expected:
                expected[column.expected] = getattr(problem, column.expected)(i)
            wanted = expected[column.expected]
            if mode == "eager":
                torch.full_like(wanted, float("nan"))  # the next output is likely to get its memory
                results = [(i, column.call(i))]
            else:
                variant.poison()
                variant()
                results = [(which, result) for which, result in variant.results() if which == i]
            for _, result in results:
                _expect(problem, mode, name, i, result, wanted)


def _check(timed: dict[tuple[str, str], Variant], columns: dict[str, Column], problem: Problem) -> None:
    """What the last timed calls have given."""
    by_set = defaultdict(list)
    for (mode, name), variant in timed.items():
        for i, result in variant.results():
            by_set[i, columns[name].expected].append((mode, name, result))
    for (i, expected), results in by_set.items():
        wanted = getattr(problem, expected)(i)
        for mode, name, result in results:
            _expect(problem, mode, name, i, result, wanted)


def _expect(problem: Problem, mode: str, name: str, i: int, result: torch.Tensor, wanted: torch.Tensor) -> None:
    if (wrong := problem.wrong(result, wanted)) is not None:
        raise RuntimeError(f"{problem.shape.label}, {mode}, column {name!r}, inputs {i}: a wrong result: {wrong}")


def _issue(groups: Groups, device: torch.device, dtype: torch.dtype) -> dict[str, float] | None:
    """CPU time of one all_gather_gemm from Python; on the CPU a call ends with its result, so there is none."""
    if device.type == "cpu":
        return None
    x = torch.randn(256, 1024, dtype=dtype, device=device)
    weight = torch.randn(1024, 1024, dtype=dtype, device=device)
    plans = {"plan given": DIRECT, "plan=None": None}
    return {
        name: 1e6 * issue_seconds(lambda plan=plan: so.all_gather_gemm(x, weight, groups.tuned, plan=plan), device)
        for name, plan in plans.items()
    }
