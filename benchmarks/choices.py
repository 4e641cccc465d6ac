"""Plans of the columns that are given none: measured here, and told."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from columns import WIRE, Groups, call_of, product_alone
from problem import Problem

import streamoverlap as so


def tune(problem: Problem, groups: Groups, save: bool) -> None:
    """Tunes the shape, on GPUs in graphs as well, and there the product alone."""
    ways = (False,) if groups.alone is None else (False, True)
    for name, call in _calls_without_plan(problem, groups).items():
        for graph in ways if name != "untuned" else ():
            so.tune(call.func, *call.args, **call.keywords, graph=graph, save=save)
    if groups.alone is not None:
        _tune_product(problem, groups)


def chosen(problem: Problem, groups: Groups) -> dict[str, dict]:
    """The plans, by column."""
    return {
        name: asdict(so.explain(call.func, *call.args, **call.keywords).plan)
        for name, call in _calls_without_plan(problem, groups).items()
    }


def _calls_without_plan(problem: Problem, groups: Groups) -> dict[str, partial]:
    found = {"untuned": call_of(problem, 0, groups.untuned), "tuned": call_of(problem, 0, groups.tuned)}
    return found if problem.shape.gathers else found | {"wire": call_of(problem, 0, groups.tuned, wire=WIRE)}


def _tune_product(problem: Problem, groups: Groups) -> None:
    """As the tuner does, but for one product alone: with the fastest of cuBLASLt's algorithms it runs from here on."""
    impl = so.Communicator.of(groups.alone, problem.x[0].values.device)._open()
    impl.set_tuning(True)
    try:
        product_alone(problem, 0, groups)()
    finally:
        impl.set_tuning(False)
