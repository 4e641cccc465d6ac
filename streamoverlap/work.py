"""What an op with ``async_op=True`` returns, and what follows it."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from torch.futures import Future

_LONGEST_TIMEOUT = 4_000_000.0  # seconds: some 46 days, which 32 bits hold in milliseconds
_GRACE = 3.0  # seconds after the group's timeout by which its watchdog has reported what is wrong


class Handle(Protocol):
    """A call in flight. `join` and `wait_for` raise what it failed with; so does `check`, if that is known by now."""

    def join(self) -> None: ...
    def wait_for(self, seconds: float) -> bool: ...
    def is_completed(self) -> bool: ...
    def check(self) -> None: ...


class Work:
    """An op in flight. Drop it and the op goes on: its inputs and outputs stay alive until its streams have done.

    The op's results must not be read, nor its inputs written, before `wait`. If the group fails, a Work that was not
    known to be complete by then withholds its result: every method that would give it raises.

    On CUDA, results belong to the stream that was current at issue, as those of any op: `wait` on another stream tells
    the caching allocator of it.
    """

    def __init__(self, handle: Handle, result: Callable[[], Any], follow: Follow) -> None:
        self._handle = handle
        self._result = result
        self._follow = follow
        self._process = os.getpid()

    def wait(self, timeout: float | timedelta | None = None) -> Any:
        """What the caller does next comes after the op; returns the result.

        On CUDA the current stream waits, whichever it is, and the CPU does not. On the CPU the calling thread waits.
        With `timeout` (seconds or timedelta) the CPU waits in either case, as in `synchronize`.

        Raises:
            PeerTimeoutError, MismatchError, CommunicatorError: the op has failed.
            TimeoutError: not completed within `timeout`. The op goes on and can be waited for again.
        """
        if timeout is None:
            self._here()
            self._handle.join()
        else:
            self._wait_for(seconds_of(timeout), f"{timeout!r} (timeout)")
        return self._result()

    def synchronize(self, timeout: float | timedelta | None = None) -> None:
        """Blocks the CPU until the op is complete. Raises as `wait`; without `timeout` within that of its group."""
        limit = self._follow.timeout() + _GRACE if timeout is None else seconds_of(timeout)
        self._wait_for(limit, f"{limit:g} s")

    def is_completed(self) -> bool:
        """Whether the op has ended, well or not. Never blocks."""
        return self._handle.is_completed()

    def exception(self) -> Exception | None:
        """What the op has failed with, as far as it is known by now; None if it has not. Never waits for it."""
        try:
            self._handle.check()
        except Exception as error:
            return error
        return None

    def result(self) -> Any:
        """What the op returns where it is not asynchronous, after `wait`."""
        return self.wait()

    def then(self, function: Callable[[Any], Any]) -> Work:
        """Runs ``function(result)`` in order after the op, where the op's own stream is current; returns its Work.

        On CUDA the function is called now, with the op's last stream (the set's `recv`) as current, so what it launches
        follows the op; it must not make the CPU wait. On the CPU a thread of the communicator calls it once the op has
        ended; there such functions run one after the other. A failed op is carried through: the function is not called
        (or, where the failure shows later, its result is withheld) and the new Work raises the same.
        """
        return self._follow.run(self._handle, lambda: function(self._result()), uses=self._result)

    def get_future(self) -> Future:
        """A `torch.futures.Future` of the result, with torch's semantics.

        On CUDA it is complete at once, in the sense of CUDA: `Future.wait` makes current streams wait, and callbacks
        run on streams from torch's pool that wait for the op. A failure that shows later is not in it. On the CPU it is
        completed when the op has ended, by a thread of the communicator, which runs its callbacks too.
        """
        return self._follow.future(self._handle, self._result)

    def with_result(self, change: Callable[[Any], Any]) -> Work:
        """The same op, with another view of its result; nothing runs."""
        return Work(self._handle, lambda: change(self._result()), self._follow)

    def _here(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(f"this Work was made in process {self._process}, of which this one is a fork")

    def _wait_for(self, seconds: float, limit: str) -> None:
        self._here()
        if not self._handle.wait_for(seconds):
            raise TimeoutError(f"the op was not completed within {limit}; it goes on")


class Follow(Protocol):
    """Runs what comes after a call, as its device does."""

    def timeout(self) -> float: ...
    def run(
        self, before: Handle | None, function: Callable[[], Any], uses: Callable[[], Any] | None = None
    ) -> Work: ...
    def future(self, before: Handle, result: Callable[[], Any]) -> Future: ...


def seconds_of(timeout: float | timedelta) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= _LONGEST_TIMEOUT:
        raise ValueError(
            f"timeout is {timeout!r}; expected a positive number of seconds or a timedelta, of at most "
            f"{_LONGEST_TIMEOUT:g} s"
        )
    return float(seconds)
