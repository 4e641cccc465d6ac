"""The campaign of ``streamoverlap check --mutate``: does the checker report every plan that can break?"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields

from rich.console import Console

from streamoverlap import _interpreter, plans
from streamoverlap.cli.terminal import make_table

WORLDS = (2, 3, 4)
_SAMPLED_FROM = 4  # as in tests/interpreter/campaign.cpp

# Enough states to see every interleaving of nearly all plans of two ranks; beyond, every op is delayed.
_STATES = {2: 20_000, 3: 5_000, 4: 0}
# Options by world size: chunks, compute streams. The search grows too fast for more.
_OPTIONS = {2: ((1, 2), (1, 2)), 3: ((1,), (1, 2)), 4: ((1,), (1,))}

_LEGEND = (
    "broken: the interpreter found an order of ops in which the plan hangs or reads a wrong value",
    "missed: broken, but the checker reports no fault",
    "reported only: the checker reports a fault, the interpreter found no such order",
    "redundant: neither; the op is not needed there",
    "all orders seen: of those not broken, how many were tried in every order of ops; in the rest every op was "
    f"delayed in turn, and at world {_SAMPLED_FROM} the interpreter samples orders",
)

_COUNTS = ("mutants", "broken", "missed", "by_sequence", "stricter", "redundant", "undecided", "exhaustive")


@dataclass
class Campaign:
    """Counts of mutants at one world size; see tests/interpreter/campaign.h."""

    world: int
    mutants: int = 0
    broken: int = 0
    missed: int = 0
    by_sequence: int = 0
    stricter: int = 0
    redundant: int = 0
    undecided: int = 0
    exhaustive: int = 0
    missed_texts: list[str] = field(default_factory=list)
    seconds: float = 0.0  # of CPU time, over all processes

    def add(self, other: Campaign) -> None:
        for counted in fields(self):
            if counted.name != "world":
                setattr(self, counted.name, getattr(self, counted.name) + getattr(other, counted.name))


def tasks(world: int) -> list[tuple[int, tuple]]:
    """The longest first, so that no process is left with one at the end."""
    chunks, compute_streams = _OPTIONS[world]
    specs = plans.variants(world, chunks, compute_streams)
    ordered = sorted(specs, key=lambda spec: (spec.chunks, spec.compute_streams, spec.keep_gathered), reverse=True)
    return [(world, plans.spec_tuple(spec)) for spec in ordered]


def run_task(task: tuple[int, tuple]) -> Campaign:
    world, spec = task
    started = time.process_time()
    found = _interpreter.mutate(spec, prune=True, max_states=_STATES[world], seed=0)
    counts = {name: found[name] for name in _COUNTS}
    return Campaign(world, **counts, missed_texts=found["missed_texts"], seconds=time.process_time() - started)


def print_campaigns(console: Console, campaigns: list[Campaign]) -> None:
    counts = ("mutants", "broken", "missed", "reported only", "redundant", "undecided")
    columns = ("world", *counts, "all orders seen", "CPU time")
    table = make_table(*columns, right=columns)
    for c in campaigns:
        table.add_row(
            str(c.world),
            *(f"{n:,}" for n in (c.mutants, c.broken, c.missed, c.stricter, c.redundant, c.undecided)),
            "sampled" if c.world >= _SAMPLED_FROM else f"{c.exhaustive:,}",
            f"{c.seconds:.1f} s",
            style="red" if c.missed else None,
        )
    console.print("\nMutants: each sync op deleted, moved and redirected in turn, on one rank and on all")
    console.print(table)
    for line in _LEGEND:
        console.print(line, style="dim")
    missed = [text for c in campaigns for text in c.missed_texts]
    for text in missed:
        console.print(f"missed: {text}", style="red")
    broken = sum(c.broken for c in campaigns)
    console.print(
        f"The checker reports {broken - len(missed):,} of {broken:,} mutants that the interpreter breaks.",
        style="red" if missed else "green",
    )
