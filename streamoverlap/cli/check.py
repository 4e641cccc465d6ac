"""``streamoverlap check``: checks every builder with every option, and (``--mutate``) checks the checker."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache

from rich.console import Console

from streamoverlap import plans
from streamoverlap.cli import mutate
from streamoverlap.cli.terminal import make_console, make_progress, make_table
from streamoverlap.cli.usage import UsageError, positive, worlds

_EXAMPLE = """\
examples:
  streamoverlap check --world 1-16
  streamoverlap check --world 2-4 --mutate
"""

_PAIR_WORLDS = range(1, 5)  # every two calls in a row are checked here; the slot contract covers the rest
_SHOWN = 20  # faults printed in full; --json has all

# What a task is given: a Spec's arguments, since a Spec does not travel between processes.
SpecArgs = tuple[str, str, str, int, int, int, bool, bool, bool, str, str, bool]


@dataclass
class Tally:
    """What was checked at one world size."""

    world: int
    variants: int = 0
    plans: int = 0  # of single ranks
    pairs: int = 0
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0  # of CPU time, over all processes

    def add(self, other: Tally) -> None:
        self.variants += other.variants
        self.plans += other.plans
        self.pairs += other.pairs
        self.faults += other.faults
        self.seconds += other.seconds


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "check",
        help="check every plan there is",
        description=(
            "Checks every operation, algorithm and option, as written and pruned, and up to world 4 every\n"
            "two consecutive calls on one slot: no race, no deadlock, nothing left open. With --mutate also\n"
            "checks the checker: each sync op is deleted, moved and redirected in turn, and what an\n"
            "independent interpreter then breaks, the checker must report."
        ),
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--world", metavar="W", type=worlds, help="4, 1-16 or 2,3 (1-16; with --mutate 2-4)")
    parser.add_argument("--mutate", action="store_true", help="also check the checker (world 2 to 4)")
    parser.add_argument("--jobs", metavar="N", type=positive, help="processes (default: one for each core)")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    sizes = args.world or (mutate.WORLDS if args.mutate else range(1, 17))
    if args.mutate and not set(sizes) <= set(mutate.WORLDS):
        raise UsageError(
            f"streamoverlap check: --world is {','.join(map(str, sizes))}; expected 2 to 4 with --mutate, "
            "as the interpreter explores small groups only"
        )
    started = time.perf_counter()
    console = make_console()
    tallies = {world: Tally(world) for world in sizes}
    campaigns = {world: mutate.Campaign(world) for world in sizes} if args.mutate else {}
    with _processes(args.jobs or len(os.sched_getaffinity(0))) as run_all:
        for tally in _with_progress(console, "checking", run_all, _check_task, _check_tasks(sizes)):
            tallies[tally.world].add(tally)
        if args.mutate:
            tasks = [task for world in sizes for task in mutate.tasks(world)]
            for campaign in _with_progress(console, "mutating", run_all, mutate.run_task, tasks):
                campaigns[campaign.world].add(campaign)
    elapsed = time.perf_counter() - started

    if args.json:
        result = {"checked": [asdict(tally) for tally in tallies.values()], "seconds": elapsed}
        if campaigns:
            result["mutated"] = [asdict(campaign) for campaign in campaigns.values()]
        print(json.dumps(result, indent=2))
    else:
        _print(console, list(tallies.values()))
        if campaigns:
            mutate.print_campaigns(console, list(campaigns.values()))
        console.print(f"{elapsed:.1f} s")
    return 1 if any(t.faults for t in tallies.values()) or any(c.missed for c in campaigns.values()) else 0


def _check_tasks(sizes) -> list[tuple[str, SpecArgs | int, int]]:
    """The longest first, so that no process is left with one at the end."""
    singles = [("plan", _spec_args(spec), 0) for world in sorted(sizes, reverse=True) for spec in plans.variants(world)]
    pairs = [("pairs", world, first) for world in sizes if world in _PAIR_WORLDS for first in range(len(_calls(world)))]
    return singles + pairs


def _check_task(task: tuple[str, SpecArgs | int, int]) -> Tally:
    kind, subject, first = task
    started = time.process_time()
    tally = _check_pairs(subject, first) if kind == "pairs" else _check_variant(plans.Spec(*subject))
    tally.seconds = time.process_time() - started
    return tally


def _spec_args(spec: plans.Spec) -> SpecArgs:
    return (
        spec.operation,
        spec.algorithm,
        spec.reduction,
        spec.world,
        spec.chunks,
        spec.compute_streams,
        spec.keep_gathered,
        spec.copy_input,
        spec.scaled,
        spec.transfer,
        spec.taper,
        spec.quantised,
    )


def _check_variant(spec: plans.Spec) -> Tally:
    tally = Tally(spec.world, variants=1)
    for form, pruned in (("as written", False), ("pruned", True)):
        ranks = plans.build_spec(spec, pruned=pruned)
        tally.plans += len(ranks)
        faults = plans.check_sequence([ranks, ranks])  # a call, and the same again on its slot
        tally.faults += [f"{spec}, {form}: {fault.kind}: {fault.message}" for fault in faults]
    return tally


@lru_cache
def _calls(world: int) -> list[list[plans.Plan]]:
    return [plans.build_spec(spec) for spec in plans.variants(world, chunks=(1, 2), compute_streams=(1, 2))]


def _check_pairs(world: int, first: int) -> Tally:
    """One call followed by each of all calls."""
    calls = _calls(world)
    tally = Tally(world, pairs=len(calls))
    for second in calls:
        faults = plans.check_sequence([calls[first], second])
        name = f"{calls[first][0].spec}, then {second[0].spec}"
        tally.faults += [f"{name}: {fault.kind}: {fault.message}" for fault in faults]
    return tally


@contextmanager
def _processes(jobs: int) -> Iterator[Callable]:
    """Yields a map over worker processes, in no order; over none where one job is asked for."""
    if jobs == 1:
        yield map
        return
    # Forked from a server without threads that has done the imports: safe, and quick to start.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with context.Pool(jobs, initializer=_ignore_interrupt) as pool:
        yield pool.imap_unordered


def _ignore_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers


def _with_progress(console: Console, text: str, run_all: Callable, function: Callable, tasks: list) -> Iterator:
    with make_progress(console) as progress:
        yield from progress.track(run_all(function, tasks), total=len(tasks), description=text)


def _print(console: Console, tallies: list[Tally]) -> None:
    numbers = ("world", "variants", "plans", "pairs of calls", "faults", "CPU time")
    table = make_table(*numbers, right=numbers)
    for tally in tallies:
        pairs = f"{tally.pairs:,}" if tally.world in _PAIR_WORLDS else "-"
        table.add_row(
            str(tally.world),
            f"{tally.variants:,}",
            f"{tally.plans:,}",
            pairs,
            f"{len(tally.faults):,}",
            f"{tally.seconds:.1f} s",
            style="red" if tally.faults else None,
        )
    console.print(table)
    faults = [fault for tally in tallies for fault in tally.faults]
    for fault in faults[:_SHOWN]:
        console.print(f"fault: {fault}", style="red")
    if len(faults) > _SHOWN:
        console.print(f"... and {len(faults) - _SHOWN:,} more (--json has all)", style="red")
    totals = defaultdict(int)
    for tally in tallies:
        totals["plans"] += tally.plans
        totals["pairs"] += tally.pairs
    verdict = f"{len(faults):,} faults" if faults else "No fault"
    console.print(
        f"{verdict} in {totals['plans']:,} plans and {totals['pairs']:,} pairs of consecutive calls.",
        style="red" if faults else "green",
    )
