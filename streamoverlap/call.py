"""How one call is made: at once or asynchronously, overlapped or serial."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamoverlap import _C
from streamoverlap.follow import FollowOnCpu, FollowOnStream
from streamoverlap.serial import Started
from streamoverlap.streams import StreamSet, choose_streams
from streamoverlap.work import Work, seconds_of

_mode = threading.local()


@contextmanager
def preparing() -> Iterator[None]:
    """Calls of this thread are prepared only; see `streamoverlap.prepare`."""
    _mode.preparing = True
    try:
        yield
    finally:
        _mode.preparing = False


class Call:
    """One call of a communicator.

    Args:
        impl: the communicator's C++ part.
        overlapped: by a plan, or else serial, by the collectives of the group.
        device: where its tensors are.
        follow: runs what follows calls on the CPU.
        async_op, timeout, streams: as in `streamoverlap.all_gather_gemm`.
    """

    def __init__(
        self,
        impl: _C.Communicator,
        overlapped: bool,
        device: torch.device,
        follow: FollowOnCpu,
        async_op: bool,
        timeout: float | timedelta | None,
        streams: StreamSet | None,
    ) -> None:
        self.impl = impl
        self.overlapped = overlapped
        self.async_op = async_op
        self._device = device
        self._follow = follow
        self._streams = choose_streams(streams, device.type)
        self._timeout = 0.0 if timeout is None else seconds_of(timeout)

    @property
    def options(self) -> _C.CallOptions:
        options = _C.CallOptions(getattr(_mode, "preparing", False), self.async_op, self._timeout)
        if self._streams is not None:
            options.streams = self._streams._impl
        return options

    def finish(self, result: Any, work: _C.Work | None) -> Any:
        """What the caller gets for an overlapped call: its result, or the Work that gives it."""
        if work is None:
            return result
        follow = self._follow if self._device.type == "cpu" else self._follow_on(work.stream())
        return Work(work, lambda: result, follow)

    def serial(self, start: Callable[[bool], Started], inputs: Sequence[Tensor | None]) -> Any:
        """The same for a serial call; `start(async_op)` issues its collective."""
        if self._device.type == "cuda":
            return self._serial_on_stream(start, inputs) if self.async_op else start(False).finish()
        collective, finish = start(True)
        if self.async_op:
            return self._follow.run(None if collective is None else _Collective(collective), finish)
        if collective is not None:
            _wait(collective, self._timeout)
        return finish()

    def _serial_on_stream(self, start: Callable[[bool], Started], inputs: Sequence[Tensor | None]) -> Work:
        if self._streams is None:
            handle = torch.cuda.Stream(self._device, priority=-1).cuda_stream  # of torch's pool: it lives
        else:
            handle = self._streams.recv_handle
        follow = self._follow_on(handle)
        follow.stream.wait_stream(torch.cuda.current_stream(self._device))
        return follow.run(None, lambda: start(False).finish(), uses=lambda: inputs)

    def _follow_on(self, handle: int) -> FollowOnStream:
        return FollowOnStream(handle, self._device, self._follow.timeout, self._streams)


class _Collective:
    """A collective of a process group, as what comes before a function on the CPU."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def join(self) -> None:
        self._work.wait()


def _wait(collective: dist.Work, timeout: float) -> None:
    if timeout:
        collective.wait(timedelta(seconds=timeout))
    else:
        collective.wait()
