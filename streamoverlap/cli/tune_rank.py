"""A rank of ``streamoverlap tune``: tunes shapes one after the other; rank 0 shows how far it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

import streamoverlap as so
from streamoverlap import table
from streamoverlap.cli.launch import join_group, of_wire, sizes_of

_TIMEOUT = 120.0  # seconds that a rank waits for its peers


@dataclass(frozen=True)
class Shape:
    """Sizes before sharding; N or K is split by `as_tp`."""

    name: str
    operation: str
    m: int
    n: int
    k: int
    as_tp: int


@dataclass(frozen=True)
class Job:
    world: int
    device: str
    dtype: str
    rounds: int
    shapes: tuple[Shape, ...]
    wire: str | None
    graph: bool
    save: bool


@dataclass(frozen=True)
class Found:
    shape: Shape
    plan: so.PlanSpec
    seconds: float
    serial_seconds: float | None
    tried: int


def run_rank(job: Job, threads: int) -> tuple[list[Found], str]:
    """Returns what was found, and the file that has it."""
    join_group(job.device, threads, _TIMEOUT)
    communicator = so.Communicator(None, device=job.device, timeout=_TIMEOUT)
    if communicator.fallback is not None:
        raise RuntimeError(f"nothing to tune, the ranks run serial: {communicator.fallback}")
    found = []
    with _progress(job.shapes) as shapes:
        for shape in shapes:
            options = {"device": job.device, "dtype": getattr(torch, job.dtype)}
            of = sizes_of(shape.operation, job.world, shape.m, shape.n, shape.k, split=shape.as_tp, row=shape.n)
            tensors = [torch.empty(sizes, **options) for sizes in of]
            options = {"rounds": job.rounds, "graph": job.graph, "save": job.save, **of_wire(job.wire)}
            tuned = so.tune(getattr(so, shape.operation), *tensors, **options)
            serial = tuned.seconds.get(so.PlanSpec("serial"))
            found.append(Found(shape, tuned.plan, tuned.seconds[tuned.plan], serial, len(tuned.seconds)))
    name = table.device_name(communicator.device)
    communicator.close()
    dist.destroy_process_group()
    return found, str(table.path_of(name))


@contextmanager
def _progress(shapes: Sequence[Shape]) -> Iterator[Iterator[Shape]]:
    """Rank 0 shows a bar, if it has a terminal."""
    if int(os.environ["RANK"]) != 0 or not sys.stderr.isatty():
        yield iter(shapes)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        yield iter(bar.track(shapes, description="tuning"))
