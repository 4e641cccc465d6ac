"""How one call is made: at once or asynchronously, overlapped or serial."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamoverlap import _C
from streamoverlap.follow import FollowOnCpu, FollowOnStream
from streamoverlap.serial import Started
from streamoverlap.spec import validate_plan
from streamoverlap.streams import StreamSet, choose_streams
from streamoverlap.work import Work, seconds_of


class Mode(NamedTuple):
    """Whether calls are prepared for a capture first, and whether they are made then; see `streamoverlap.prepare`."""

    prepare: bool = False
    issue: bool = True


PLAIN = Mode()
_thread = threading.local()
_PLAIN = _C.CallOptions(*PLAIN, async_op=False, timeout=0.0)


def current_mode() -> Mode:
    return getattr(_thread, "mode", PLAIN)


@contextmanager
def in_mode(mode: Mode) -> Iterator[None]:
    """Of the calls of this thread."""
    before = current_mode()
    _thread.mode = mode
    try:
        yield
    finally:
        _thread.mode = before


def validate_options(
    device: torch.device, plan: object, async_op: object, timeout: object, streams: object, **flags: object
) -> None:
    """Before a communicator is made for the call: a bad one must not wait for peers."""
    for name, value in {"async_op": async_op, **flags}.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is a {type(value).__name__}; expected a bool")
    if plan is not None:
        validate_plan(plan)
    if timeout is not None:
        seconds_of(timeout)
    if streams is not None:
        choose_streams(streams, device.type)


class Call:
    """One call of a communicator.

    Args:
        impl: the communicator's C++ part.
        spec: its plan; None: it runs serial.
        device: where its tensors are.
        follow: runs what follows calls on the CPU.
        async_op: as in `streamoverlap.all_gather_gemm`.
        timeout: seconds; 0 is the communicator's.
        streams: the set that it uses; None: a private one, or none on the CPU.
    """

    def __init__(
        self,
        impl: _C.Communicator,
        spec: _C.Spec | None,
        device: torch.device,
        follow: FollowOnCpu,
        async_op: bool,
        timeout: float,
        streams: StreamSet | None,
    ) -> None:
        self.impl = impl
        self.spec = spec
        self.overlapped = spec is not None
        self.async_op = async_op
        self._device = device
        self._follow = follow
        self._streams = streams
        self.timeout = timeout

    @property
    def options(self) -> _C.CallOptions:
        mode = current_mode()
        if not (self.async_op or self.timeout or self._streams or mode.prepare):
            return _PLAIN
        options = _C.CallOptions(*mode, self.async_op, self.timeout)
        if self._streams is not None:
            options.streams = self._streams._impl
        return options

    def finish(self, result: Any, work: _C.Work | None) -> Any:
        """What the caller gets for an overlapped call: its result, or the Work that gives it."""
        if work is None:
            return result
        follow = self._follow if self._device.type == "cpu" else self._follow_on(work.stream())
        return Work(work, lambda: result, follow)

    def serial(self, start: Callable[[], Started], fail: Callable[[Exception], None], inputs: Sequence[Any]) -> Any:
        """The same for a serial call; `start` issues its collective, `fail` is told why that was not done."""

        def begin() -> Started:
            try:
                return start()
            except Exception as error:
                fail(error)
                raise

        if not self.async_op:
            return begin().complete()
        if self._device.type == "cuda":
            return self._serial_on_stream(lambda: begin().complete(), inputs)
        wait, finish = begin()
        return self._follow.run(_Before(wait), torch.no_grad()(finish))  # each thread has a grad mode of its own

    def _serial_on_stream(self, function: Callable[[], Any], inputs: Sequence[Tensor | None]) -> Work:
        if self._streams is None:
            handle = torch.cuda.Stream(self._device, priority=-1).cuda_stream  # of torch's pool: it lives
        else:
            handle = self._streams.recv_handle
        follow = self._follow_on(handle)
        follow.stream.wait_stream(torch.cuda.current_stream(self._device))
        return follow.run(None, function, uses=lambda: inputs)

    def _follow_on(self, handle: int) -> FollowOnStream:
        return FollowOnStream(handle, self._device, self._follow, self._streams)


class _Before:
    """A collective of a process group, as what comes before a function on the CPU."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.join = wait
