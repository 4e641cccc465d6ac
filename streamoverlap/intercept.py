"""Calls that are not made, but handed to whoever wants to know what they would be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from streamoverlap import _C

if TYPE_CHECKING:
    from streamoverlap.communicator import Communicator
    from streamoverlap.spec import PlanSpec
    from streamoverlap.streams import StreamSet

_thread = threading.local()


class Asked(NamedTuple):
    """A call, before anybody has chosen how it is done."""

    operation: str
    x: Tensor
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    identity: Callable[[], tuple[int, str]]  # what ranks compare of a serial call; raises what is wrong with arguments
    keep_gathered: bool = False
    copy_input: bool = False
    streams: StreamSet | None = None
    scaling: _C.Scaling | None = None
    quantised: bool = False  # partials travel as float8

    @property
    def compute_streams(self) -> int:
        return _C.MAX_COMPUTE_STREAMS if self.streams is None else self.streams.compute_streams


class Intercepted(Exception):  # noqa: N818  no error
    """Ends the call."""

    def __init__(self, communicator: Communicator, asked: Asked, plan: PlanSpec | None) -> None:
        self.call = communicator, asked, plan


def is_intercepting() -> bool:
    return getattr(_thread, "intercepting", False)


@contextmanager
def _intercepting():
    _thread.intercepting = True
    try:
        yield
    finally:
        _thread.intercepting = False


def intercept(function: Callable, args: tuple, options: dict[str, Any]) -> tuple[Communicator, Asked, PlanSpec | None]:
    """The call that ``function(*args, **options)`` would make; TypeError if that is no op of this package.

    Gradients must not be recorded: calls that record them are wrapped.
    """
    from streamoverlap.ops import EXCHANGES  # which imports the communicator, which imports this

    if not any(function is op for op in EXCHANGES):  # `in` would compare, which arrays do by element
        names = ", ".join(op.__name__ for op in EXCHANGES)
        raise TypeError(f"function is {getattr(function, '__name__', function)!r}; expected one of {names}")
    try:
        with _intercepting():
            function(*args, **options)
    except Intercepted as ended:
        return ended.call
    raise AssertionError("a call was made that was to be intercepted")
