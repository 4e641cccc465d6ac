"""Where the plans of one communicator's calls come from: given, measured, simulated, or the default."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from streamoverlap import _C, table, tuner
from streamoverlap.chooser import Chooser, Shape, has_data, measured, predicted, shape_of
from streamoverlap.explain import Explanation
from streamoverlap.intercept import Asked
from streamoverlap.spec import DEFAULT, Choice, PlanSpec, given_or_forced
from streamoverlap.timeline import Timeline

if TYPE_CHECKING:
    from streamoverlap.communicator import Communicator

_log = logging.getLogger("streamoverlap")
_TUNINGS = ("off", "table", "first-use")


class PlanSource:
    """See `Communicator` for `tuning`, which is rank 0's once the ranks have met."""

    def __init__(self, communicator: Communicator, tuning: str | None) -> None:
        on_cpu = communicator.device_type == "cpu"
        if tuning is None:
            tuning = "off" if on_cpu else "table"
        elif tuning not in _TUNINGS:
            raise ValueError(f"tuning is {tuning!r}; expected one of {', '.join(map(repr, _TUNINGS))}, or None")
        self._reference = weakref.ref(communicator)  # which owns this
        self.tuning = tuning
        self._table, self._unsaved = table.Table(), table.Table()
        self._traced: dict[str, float] = {}  # seconds, by the title of a call
        source = weakref.ref(self)
        # Asked at a call, and not at set-up: by then it is rank 0's.
        self._chooser = Chooser(
            communicator.world,
            agree=lambda number, agreement, timeout: source()._communicator._open().agree(number, *agreement, timeout),
            look_up=lambda *shape: source()._look_up(*shape),
            tune=lambda asked: source()._tune_first_use(asked),
            tunes=lambda: source().tuning == "first-use",
            simulates=not on_cpu,
        )

    def load(self) -> None:
        """What was measured before, once the communicator is set up."""
        comm = self._communicator
        if comm.fallback is not None:
            return
        if comm.rank == 0 and comm.world > 1:
            self._chooser.publish()
        if self.tuning == "off":
            return
        try:
            self._table = table.load(table.device_name(comm.device))
        except (OSError, ValueError) as error:
            _log.warning("measured plans are not used: %s", error)
        if self._table.gemms:
            comm._open().prefer_gemms([(key, tuned.algorithm) for key, tuned in self._table.gemms.items()])

    def choose(self, asked: Asked, plan: PlanSpec | None, timeout: float) -> Choice:
        """For one call, `plan` being what it asks for; `timeout` in seconds, 0: the group's."""
        if (choice := self._without_asking(plan)) is not None:
            return choice
        return self._chooser.choose(asked, timeout)

    def explain(self, asked: Asked, plan: PlanSpec | None) -> Explanation:
        comm = self._communicator
        asked.identity()
        choice = self._without_asking(plan) or self._chooser.own(asked)
        spec, seconds = comm._spec_of(asked, choice.plan), None
        if comm.device_type == "cuda" and has_data(asked):
            shape = shape_of(asked.operation, comm.world, asked.x, asked.weights, asked.scaling, asked.quantised)
            seconds = predicted(shape, choice.plan)
        traced = None
        if spec is not None:
            traced = self._traced.get(title_of(spec, asked.x, asked.weights, asked.scaling))
        wire = "fp8" if asked.quantised and spec is not None else None
        return Explanation(asked.operation, choice.plan, choice.reason, seconds, traced or choice.measured, wire)

    def note_traced(self, timelines: Iterable[Timeline]) -> None:
        """See `Explanation.measured`."""
        for timeline in timelines:
            self._traced[timeline.title] = max(timeline.seconds(rank) for rank in range(len(timeline.plans)))

    def tune(self, asked: Asked, rounds: int, graph: bool = False) -> tuner.Tuned:
        """Measures a call, from here on calls like it run what is found. Collective."""
        comm = self._communicator
        shape = self._chooser.bucket(asked, graph)
        tuned, found = tuner.measure(comm, asked, shape, rounds)
        self._table.update(found)
        self._unsaved.update(found)
        (entry,) = found.plans.values()
        self._chooser.found(shape, measured(entry.seconds, entry.serial_seconds, entry.plan))
        return tuned

    def save(self) -> None:
        """Adds what was measured to the user's table; OSError, ValueError: it cannot be written, or read."""
        name = table.device_name(self._communicator.device)
        self._unsaved.save(table.path_of(name), name)
        self._unsaved = table.Table()

    @property
    def _communicator(self) -> Communicator:
        return self._reference()

    def _without_asking(self, plan: PlanSpec | None) -> Choice | None:
        comm = self._communicator
        if (choice := given_or_forced(plan, comm.fallback)) is not None:
            return choice
        if self.tuning == "off" and comm.device_type == "cpu" and not self._chooser.has_found:
            return DEFAULT
        return None

    def _tune_first_use(self, asked: Asked) -> Choice:
        self.tune(asked, tuner.ROUNDS)
        if self._communicator.rank == 0:
            try:
                self.save()
            except (OSError, ValueError) as error:  # the call goes on: peers are in it
                _log.warning("what was measured is not kept for later runs: %s", error)
        return self._chooser.own(asked)

    def _look_up(self, shape: Shape, weights: Sequence[Tensor]) -> Choice | None:
        entry = self._table.plans.get(tuner.problem_of(shape, weights))
        if entry is None or entry.plan.compute_streams > shape.compute_streams:
            return None
        return measured(entry.seconds, entry.serial_seconds, entry.plan)


def title_of(spec: _C.Spec, x: Tensor, weights: Sequence[Tensor], scaling: _C.Scaling | None = None) -> str:
    """Of the traces of such calls, to tell them apart."""
    sizes = "".join(f", weight of {list(weight.shape)}" for weight in weights)
    scales = "" if scaling is None else f", {scaling}"
    return f"{spec} on x of {list(x.shape)}, {x.dtype}{scales}{sizes}"
