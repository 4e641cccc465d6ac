"""What follows a call: functions in order after it, on a thread of the CPU or on a CUDA stream."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from streamoverlap.work import Handle, Work


class FollowOnCpu:
    """A thread that runs what follows the calls of one communicator, in the order in which it is told."""

    def __init__(self, timeout: Callable[[], float]) -> None:
        self.timeout = timeout
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stop: weakref.finalize | None = None
        self._closed = False
        self._process = os.getpid()

    def run(self, before: Handle | None, function: Callable[[], Any], uses: object = None) -> Work:
        task = _Task(before, function, self._is_current)
        self._submit(task)
        return Work(task, task.value, self)

    def future(self, before: Handle, result: Callable[[], Any]) -> Future:
        future: Future = Future()

        def complete() -> None:
            try:
                before.join()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result())

        self._submit(_Task(None, complete, self._is_current))
        return future

    def close(self, seconds: float | None = None) -> None:
        """Ends the thread once it has run what it was given; waits for that, for `seconds` at most if given."""
        with self._lock:
            self._closed = True
        if self._stop is None:
            return
        if seconds is None:
            self._stop()
        elif self._stop.detach() is not None:
            _end(self._tasks, self._thread, seconds)

    def drain(self, seconds: float) -> bool:
        """Waits until all that it was given has run; false: not in time."""
        if self._thread is None or self._closed:
            return True
        last = _Task(None, lambda: None, self._is_current)
        self._submit(last)
        return last.wait_for(max(seconds, 0.0))

    def require_open(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the op was made in process {self._process}, of which this one is a fork; expected a call there"
            )
        if self._closed:
            raise RuntimeError("the communicator of this op is closed; expected an open one")

    def _submit(self, task: _Task) -> None:
        self.require_open()  # in a fork the lock may be held for ever
        with self._lock:
            self.require_open()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_run_tasks, args=(self._tasks,), name="streamoverlap-then", daemon=True
                )
                self._thread.start()
                self._stop = weakref.finalize(self, _end, self._tasks, self._thread)
                self._stop.atexit = False  # the communicator sees to it, and does not wait for ever
            self._tasks.put(task)

    def _is_current(self) -> bool:
        return threading.current_thread() is self._thread


class FollowOnStream:
    """Enqueues what follows a call on the stream where the call ends.

    Args:
        handle: that stream, of `device`.
        communicator: has the stream, as long as it is open, unless `owner` has it.
    """

    def __init__(self, handle: int, device: torch.device, communicator: FollowOnCpu, owner: object) -> None:
        self.timeout = communicator.timeout
        self._handle = handle
        self._device = device
        self._communicator = communicator
        self._owner = owner

    @property
    def stream(self) -> torch.cuda.Stream:
        self._communicator.require_open()
        return torch.cuda.ExternalStream(self._handle, device=self._device)

    def run(self, before: Handle | None, function: Callable[[], Any], uses: Callable[[], Any] | None = None) -> Work:
        task = _StreamTask(self.stream, before, function, uses)
        return Work(task, task.value, self)

    def future(self, before: Handle, result: Callable[[], Any]) -> Future:
        future: Future = Future(devices=[self._device])
        try:
            before.check()
        except Exception as error:
            future.set_exception(error)
            return future
        with torch.cuda.stream(self.stream):
            future.set_result(result())
        return future


class _Task:
    """A function on the thread of a `FollowOnCpu`."""

    def __init__(self, before: Handle | None, function: Callable[[], Any], on_its_thread: Callable[[], bool]) -> None:
        self._before = before
        self._function = function
        self._on_its_thread = on_its_thread
        self._claimed = threading.Lock()
        self._ended = threading.Event()
        self._value: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        if not self._claimed.acquire(blocking=False):
            return
        try:
            if self._before is not None:
                self._before.join()
            self._value = self._function()
        except Exception as error:
            self._error = error
        except BaseException as error:  # which would end whoever waits for this
            self._error = RuntimeError(f"a function that follows an op raised {error!r}")
            self._error.__cause__ = error
        self._before = self._function = None  # and with them the tensors they hold
        self._ended.set()

    def join(self) -> None:
        if self._on_its_thread():
            self.run()  # nobody else will
        self._ended.wait()
        self.check()

    def wait_for(self, seconds: float) -> bool:
        if self._on_its_thread():
            self.run()
        if not self._ended.wait(min(seconds, threading.TIMEOUT_MAX)):
            return False
        self.check()
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def value(self) -> Any:
        return self._value


class _StreamTask:
    """What a function has launched on a stream."""

    def __init__(
        self,
        stream: torch.cuda.Stream,
        before: Handle | None,
        function: Callable[[], Any],
        uses: Callable[[], Any] | None,
    ) -> None:
        self._stream = stream
        self._before = before
        self._value: Any = None
        self._error: Exception | None = None
        try:
            if before is not None:
                before.check()
            if uses is not None:
                _record(uses(), stream)
            with torch.cuda.stream(stream):
                self._value = function()
        except Exception as error:
            self._error = error
        self._event = stream.record_event()

    def join(self) -> None:
        self.check()
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(self._event)
        _record(self._value, current)

    def wait_for(self, seconds: float) -> bool:
        if self._before is not None and not self._before.wait_for(seconds):
            return False
        if not _poll(self._event.query, seconds):
            return False
        self.join()
        return True

    def is_completed(self) -> bool:
        return (self._before is None or self._before.is_completed()) and self._event.query()

    def check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._before is not None:
            self._before.check()

    def value(self) -> Any:
        return self._value


def _poll(done: Callable[[], bool], seconds: float) -> bool:
    """Whether `done` becomes true in time; a wait of CUDA has no bound."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-4)
    return True


def _run_tasks(tasks: queue.SimpleQueue) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # not until the next one comes


def _end(tasks: queue.SimpleQueue, thread: threading.Thread, seconds: float | None = None) -> None:
    tasks.put(None)
    if threading.current_thread() is not thread:
        thread.join(seconds)


def _record(value: Any, stream: torch.cuda.Stream) -> None:
    for tensor in _tensors(value):
        if tensor.is_cuda:
            tensor.record_stream(stream)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
