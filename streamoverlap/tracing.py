"""What calls really did: when each op ran, on every rank, by one clock."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from streamoverlap import _C, draw, plans
from streamoverlap.chrome import write_chrome
from streamoverlap.communicator import Communicator
from streamoverlap.meeting import Meeting
from streamoverlap.places import resolve_group, type_of
from streamoverlap.timeline import Timeline

_log = logging.getLogger("streamoverlap")

# What a rank tells the others of one call: its plan's spec, its title, and the spans of its ops in nanoseconds.
_Call = tuple[dict, str, list[tuple[int, int]]]


class Trace:
    """What `streamoverlap.trace` gives; see there.

    Attributes:
        timelines: one a call, in the order of the calls; on every rank, once the block has ended.
        serial_calls: calls that ran serial, which no timeline shows.
        failed_calls: calls that did not run to their end, or were captured and never replayed; no timeline either.
    """

    def __init__(
        self, path: str | Path | None, group: dist.ProcessGroup | None, device: str | torch.device | None
    ) -> None:
        if path is not None:
            validate_path(path)
        self.timelines: list[Timeline] = []
        self.serial_calls = 0
        self.failed_calls = 0
        self._path = path
        self._group = resolve_group(group)
        if device is None:
            device = "cpu" if Communicator.made_for(self._group, "cuda") is None else "cuda"
        self._device = type_of(device)

    def __enter__(self) -> Trace:
        self._communicator = Communicator.of(self._group, self._device)
        self._communicator._start_trace()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        comm = self._communicator
        if error is not None:  # peers may never get here: nothing is gathered, and the error goes on as it is
            with suppress(RuntimeError):
                comm._stop_trace(wait=False)
            return
        traces, self.serial_calls = comm._stop_trace(wait=True)
        comm._check()
        timelines = [_timeline(calls) for calls in zip_longest(*self._gather(traces))]
        self.timelines = [timeline for timeline in timelines if timeline is not None]
        self._communicator._plans.note_traced(self.timelines)
        self.failed_calls = len(timelines) - len(self.timelines)
        if self._group.rank() != 0:
            return
        if self.serial_calls:
            _log.warning("%d calls ran serial: the trace has no timeline of them", self.serial_calls)
        if self.failed_calls:
            _log.warning("%d calls did not run to their end: the trace has no timeline of them", self.failed_calls)
        if self._path is not None:
            write(self.timelines, self._path)

    def _gather(self, traces: Sequence[_C.CallTrace]) -> list[list[_Call]]:
        """By rank; bounded by the communicator's timeout, whatever the group's own is."""
        comm = self._communicator
        mine = [(plans.spec_options(trace.spec), trace.title, trace.spans()) for trace in traces]
        hello = {"number": comm._traces, "calls": mine}
        purpose, prefix = "gather a trace", f"streamoverlap/trace/{self._device}"
        ranks = Meeting(self._group, prefix, hello, comm.timeout, purpose, comm._check).hellos
        numbers = [entry["number"] for entry in ranks]
        if len(set(numbers)) > 1:
            told = ", ".join(f"{number} of rank {rank}" for rank, number in enumerate(numbers))
            raise RuntimeError(f"ranks left different traces of group '{comm.name}': trace {told}")
        return [entry["calls"] for entry in ranks]


def trace(
    path: str | Path | None = None,
    group: dist.ProcessGroup | None = None,
    device: str | torch.device | None = None,
) -> Trace:
    """Records when each op of the calls on `group` ran, on which stream: for a ``with`` block.

    Collective: all ranks of the group enter and leave the block, and make the same calls in it. Entering makes the
    group's communicator, if there is none yet. Leaving waits for calls in flight, async ones too, then gathers the
    records of all ranks through the group's store. Where the block raises, nothing is gathered; peers that leave theirs
    wait for that rank until the communicator's timeout.

    Times are of CLOCK_MONOTONIC, which all processes of a host share; an op's span has what the op did and waited for,
    not the time it was queued. On CUDA they are those of events beside each op, placed on that clock to some
    microseconds; a captured call is shown as it last ran, if captured and replayed within the block, and its graph
    keeps the events. Of an async call whose join came after its end, or never, the join is shown at its end. Calls that
    run serial have no plan, and no timeline.

    Args:
        path: rank 0 writes it at the end: all calls as a Chrome trace (``.json``; see https://ui.perfetto.dev), or a
            picture of the last one (``.png``, ``.svg``; needs matplotlib). None: nothing is written.
        group: the process group whose calls are recorded; None is the default group.
        device: where its calls are: ``"cpu"`` or ``"cuda"``; None is CUDA in a group that has called there.

    Raises:
        TypeError, ValueError: `path` is not such a file, or in no folder that can be written; `group` does not have
            this rank.
        ImportError: a picture is asked for without matplotlib.
        RuntimeError: the group is being traced already, or has failed; not all ranks have left the block in time, or
            they left different ones; or as `Communicator`, which is made if there is none.

    Example:
        >>> with so.trace("calls.json") as traced:
        ...     y = so.all_gather_gemm(x, weight)
        >>> traced.timelines[0].exposed_fraction(rank=0)
    """
    return Trace(path, group, device)


def validate_path(path: str | Path) -> None:
    """Raises where `write` could not write to it: TypeError, ValueError, ImportError."""
    if not isinstance(path, str | Path):
        raise TypeError(f"path is a {type(path).__name__}; expected a str or Path")
    suffix = Path(path).suffix
    if suffix not in (".json", *draw.PICTURES):
        raise ValueError(f"path is {str(path)!r}; expected a file that ends in .json, .png or .svg")
    folder = Path(path).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"path is {str(path)!r}; expected a file in a folder that exists and can be written")
    if suffix != ".json":
        draw.require(path)


def write(timelines: Sequence[Timeline], path: str | Path) -> None:
    """As JSON or a picture, by the suffix of `path`; see `trace`. A picture of no call is not written."""
    if Path(path).suffix == ".json":
        write_chrome(timelines, path)
    elif timelines:
        draw.draw(timelines[-1], path)
    else:
        _log.warning("%s was not written: there was no call on a plan to draw", path)


def _timeline(calls: Sequence[_Call | None]) -> Timeline | None:
    """Of one call, from what every rank tells of it; None if it failed: not all ops were done, or not by all ranks."""
    if any(call is None or call[0] != calls[0][0] for call in calls):
        return None
    spec, title, _ = calls[0]
    ranks = _build(tuple(spec.items()))
    spans = [_complete(plan, spans) for plan, (_, _, spans) in zip(ranks, calls, strict=True)]
    if any(start == 0 for times in spans for start, _ in times):
        return None
    first = min((start for times in spans for start, _ in times), default=0)
    times = tuple(tuple((1e-9 * (start - first), 1e-9 * (end - first)) for start, end in rank) for rank in spans)
    return _clip(Timeline(tuple(ranks), times, title, began=1e-9 * first))


@lru_cache
def _build(spec: tuple) -> list[plans.Plan]:
    return plans.build(**dict(spec))


def _clip(timeline: Timeline) -> Timeline:
    """A thread may be put aside between setting an event or a flag and noting the time: who waited knows better."""
    times = [list(rank) for rank in timeline.times]
    for arrow in timeline.arrows():
        start, end = times[arrow.from_rank][arrow.from_op]
        seen = timeline.times[arrow.to_rank][arrow.to_op][1]
        times[arrow.from_rank][arrow.from_op] = start, max(start, min(end, seen))
    return replace(timeline, times=tuple(map(tuple, times)))


def _complete(plan: plans.Plan, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """With the join at the end of the call where it came later, or never: nobody waited for it before."""
    joins = [op.stream == "main" and index >= plan.join_begin for index, op in enumerate(plan.ops)]
    end = max((end for (_, end), join in zip(spans, joins, strict=True) if not join), default=0)
    return [
        (end, end) if join and (start == 0 or start > end) else (start, stop)
        for (start, stop), join in zip(spans, joins, strict=True)
    ]
