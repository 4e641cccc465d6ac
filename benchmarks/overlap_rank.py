"""A rank of benchmarks/overlap.py: one shape after the other, checked, timed, and checked again."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from choices import chosen, tune
from columns import DIRECT, NAMES, Column, Groups, Replayed, Rotated, columns_of, plans_to_compare
from environment import environment
from factors import Plain
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
    kind: Plain
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
        "dtype": str(job.kind.dtype).removeprefix("torch."),
        "scaling": job.kind.scaling,
        "rounds": job.rounds,
        "command": job.command,
        "environment": about,
        "results": [],
    }
    with torch.no_grad():
        document["issue_microseconds"] = _issue(groups, device, job.kind)
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
    problem = Problem(shape, job.kind, device)
    world = problem.world
    compared = plans_to_compare(shape.gathers, world) if job.plans else {}
    columns, absent = columns_of(problem, groups, compared)
    begin = time.perf_counter()
    tune(problem, groups, job.save)
    plans = chosen(problem, groups) | {name: asdict(plan) for name, plan in compared.items()}
    with in_mode(Mode(prepare=True)):
        captured = chosen(problem, groups)  # as for a capture
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
        "link_bytes": shape.link_bytes(world, job.kind),
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
        shown = [name for name in ("serial", "fused", "untuned", "tuned", "wire") if name in times]
        ratios = ", ".join(f"{name} {times[name] / times['mm']:.2f}" for name in shown)
        parts.append(f"{mode}: mm {times['mm']:.0f} us, {ratios}")
    return f"{result['label']}: {'; '.join(parts)}"


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
        wanted_of = _Wanted(problem, i)
        for (mode, name), variant in timed.items():
            column = columns[name]
            wanted = wanted_of(column.expected)
            if mode == "eager":
                torch.full_like(wanted, float("nan"))  # the next output is likely to get its memory
                results = [(i, column.call(i))]
            else:
                variant.poison()
                variant()
                results = [(which, result) for which, result in variant.results() if which == i]
            for _, result in results:
                _expect(wanted_of, mode, name, column, result)


def _check(timed: dict[tuple[str, str], Variant], columns: dict[str, Column], problem: Problem) -> None:
    """What the last timed calls have given."""
    by_set = defaultdict(list)
    for (mode, name), variant in timed.items():
        for i, result in variant.results():
            by_set[i].append((mode, name, result))
    for i, results in by_set.items():
        wanted_of = _Wanted(problem, i)
        for mode, name, result in results:
            _expect(wanted_of, mode, name, columns[name], result)


class _Wanted:
    """What methods of Problem give for set `i` of the inputs, each asked once."""

    def __init__(self, problem: Problem, i: int) -> None:
        self.problem, self.i = problem, i
        self._known: dict[str, torch.Tensor] = {}

    def __call__(self, method: str) -> torch.Tensor:
        if method not in self._known:
            self._known[method] = getattr(self.problem, method)(self.i)
        return self._known[method]


def _expect(wanted_of: _Wanted, mode: str, name: str, column: Column, result: torch.Tensor) -> None:
    problem, allowed = wanted_of.problem, 0.0 if column.allowed is None else wanted_of(column.allowed)
    if (wrong := problem.wrong(result, wanted_of(column.expected), allowed, column.exact)) is not None:
        where = f"{problem.shape.label}, {mode}, column {name!r}, inputs {wanted_of.i}"
        raise RuntimeError(f"{where}: a wrong result: {wrong}")


def _issue(groups: Groups, device: torch.device, kind: Plain) -> dict[str, float] | None:
    """CPU time of one all_gather_gemm from Python; on the CPU a call ends with its result, so there is none."""
    if device.type == "cpu":
        return None
    x, weight = kind.new(256, 1024, device), kind.new(1024, 1024, device)
    call = partial(so.all_gather_gemm, x.values, weight.values, groups.tuned, **kind.options(x, weight))
    plans = {"plan given": DIRECT, "plan=None": None}
    return {name: 1e6 * issue_seconds(partial(call, plan=plan), device) for name, plan in plans.items()}
