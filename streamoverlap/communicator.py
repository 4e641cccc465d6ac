"""A communicator: what the ranks of one process group share to overlap their exchanges. One is made when needed."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from streamoverlap import _C, symmetric
from streamoverlap.calls import Calls
from streamoverlap.errors import CommunicatorError
from streamoverlap.follow import FollowOnCpu
from streamoverlap.meeting import Meeting, attempt, first_error
from streamoverlap.places import device_of, gpu_uuid, host_id, resolve_group, type_of
from streamoverlap.plan_source import PlanSource
from streamoverlap.spec import Choice
from streamoverlap.work import seconds_of

_log = logging.getLogger("streamoverlap")
_DEFAULT_TIMEOUT = timedelta(minutes=10)

# By group, then device type. A cached communicator goes with its ProcessGroup object.
_cache: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Communicator]] = weakref.WeakKeyDictionary()
_cache_lock = threading.Lock()
# Held while a communicator is set up: one lock each, since threads may set up different groups in any order.
_set_up_locks: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, threading.RLock]] = weakref.WeakKeyDictionary()
# To be closed before the interpreter ends: their threads let go of tensors.
_open_ones: weakref.WeakSet[Communicator] = weakref.WeakSet()
_EXIT_WAIT = 5.0  # seconds that calls in flight get to end then
_ENDED = "its process ended with calls in flight"
_LAST_MOMENT = 0.1  # seconds for threads on their way out of such calls to get the GIL: later it ends them, in C++


class Communicator(Calls):
    """Shared memory, flags, slots and streams of one process group on one kind of device.

    The functional ops use `Communicator.of(group, device)`: the first that was made for a group and a kind of device,
    explicitly or by the first op. It lives as long as the group, or until `close`. Any further one that is made
    explicitly is apart from it, with slots of its own. Making one is collective: every rank of the group does it, in
    the same order as its other calls.

    Args:
        group: any process group that has this rank; None is the default group.
        timeout: how long a call may wait for its peers, from its start: seconds or a `datetime.timedelta`. Default 10
            minutes, as in torch.distributed.
        device: ``"cpu"`` or ``"cuda"``: where the tensors of its calls are.
        report_path: a file of this rank's own. If the group fails, its watchdog adds to it what it saw of all ranks:
            calls, missing flags, signs of life. The first error has the same as `CommunicatorError.report`, and the
            logger ``streamoverlap`` gets it.
        tuning: where plans of calls without one come from, and algorithms of products on CUDA. ``"table"``: what was
            measured before, see `streamoverlap.tune`, and where nothing was, the simulator (on the CPU the default
            plan); ``"first-use"``: what was measured before, else the first call of a shape measures, and rank 0 saves
            it; ``"off"``: nothing that was measured, so that results are the same bit for bit from run to run. None is
            ``"table"`` on CUDA, ``"off"`` on the CPU. Rank 0's holds for all.

    Raises:
        TypeError, ValueError: an argument is not as described, or `group` does not have this rank.
        RuntimeError: torch.distributed is not initialised, a peer did not take part in the set-up in time, or a rank
            could not; the message has its rank and its error.

    A forked child process cannot use the communicators of its parent.

    Slots are sized to fit: for each of two calls in flight, the bytes of the gathered x (``M * K``) or of all partial
    products (``M * N``). They grow, collectively, when a larger call comes, and never shrink.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float | timedelta = _DEFAULT_TIMEOUT,
        device: str | torch.device = "cpu",
        report_path: str | Path | None = None,
        tuning: str | None = None,
        _slots: int = 2,  # for tests: with one, every call follows the last one on the same slot
    ) -> None:
        if not isinstance(report_path, str | Path | None):
            raise TypeError(f"report_path is a {type(report_path).__name__}; expected a str or Path")
        group = resolve_group(group)
        self._group = weakref.ref(group)  # weak: the cache must not keep its own key alive
        self.device_type = type_of(device)
        self.rank, self.world = group.rank(), group.size()
        self.last_choice: Choice | None = None
        self._timeout = seconds_of(timeout)
        self.name = group.group_name
        self.device = device_of(self.device_type)
        self._process = os.getpid()
        self._connected = False
        self._error: CommunicatorError | None = None  # where there is no shared memory to keep it in
        self._serial_calls = itertools.count(1)
        self._serial_made = 0
        self._traces = 0  # that have begun
        self._impl: _C.Communicator | None = None
        reference = weakref.ref(self)
        self._follow = FollowOnCpu(lambda: getattr(reference(), "_timeout", 0.0))
        self._plans = PlanSource(self, tuning)
        with _set_up_lock(group, self.device_type):
            self._fallback = self._set_up(_slots)
        self._plans.load()
        if report_path is not None and self._connected:
            self._impl.set_report_path(str(report_path))
        if self._fallback is None:
            _log.info("group '%s' is set up: rank %d of %d on %s", self.name, self.rank, self.world, self.device)
        elif self.rank == 0:
            _log.warning("group '%s' runs serial: %s", self.name, self._fallback)
        with _cache_lock:
            _open_ones.add(self)
            _cache.setdefault(group, {}).setdefault(self.device_type, self)

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup | None,
        device: str | torch.device,
        validate: Callable[[int], None] | None = None,
    ) -> Communicator:
        """The communicator of `group` for tensors on `device`; made, collectively, at first use.

        `validate` is called with the group's size before one is made: a bad call must not wait for peers.
        """
        group = resolve_group(group)
        device_type = type_of(device)
        found = cls.made_for(group, device_type)
        if found is not None:
            return found._here()
        if validate is not None:
            validate(group.size())
        with _set_up_lock(group, device_type):
            return cls.made_for(group, device_type) or cls(group, device=device_type)

    @staticmethod
    def made_for(group: dist.ProcessGroup, device_type: str) -> Communicator | None:
        """The communicator that ops on `group` use, if it has been made."""
        return _cache.get(group, {}).get(device_type)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        group = self._group()
        if group is None:
            raise RuntimeError(f"the process group '{self.name}' of this communicator has been destroyed")
        return group

    @property
    def fallback(self) -> str | None:
        """Why this group runs serial whatever was asked for; None where it can overlap."""
        return self._fallback

    @property
    def slot_bytes(self) -> int:
        """Bytes of one of the two data slots; 0 in a group of one, or one that runs serial."""
        return self._open().slot_bytes() if self._fallback is None else 0

    @property
    def timeout(self) -> float:
        """Seconds that a call may wait for its peers."""
        return self._timeout

    def set_timeout(self, timeout: float | timedelta) -> None:
        """Changes the timeout (seconds or timedelta), of calls in flight too."""
        seconds = seconds_of(timeout)
        impl = self._open()
        if self._connected:
            impl.set_timeout(seconds)
        self._timeout = seconds

    def errored(self) -> Exception | None:
        """The error that every further call raises, or None."""
        try:
            self._check()
        except RuntimeError as error:
            return error
        return None

    def abort(self, reason: str = "abort was called") -> None:
        """Ends the communicator on all ranks: what is in flight, and every later call, raises `CommunicatorError`.

        Results of calls in flight are withheld. Where ranks share no memory this rank alone ends it.
        """
        impl = self._open()
        if self._connected:
            impl.abort(reason)
        elif self._error is None:
            text = f"group '{self.name}' was aborted: {reason}"
            self._error = CommunicatorError(text, self.name, peer=self.rank)

    def close(self) -> None:
        """Gives back memory, threads and file descriptors, once calls in flight on this rank have ended.

        Peers need not close at the same time, but a call that they make afterwards waits for this rank in vain. Slots
        of an aborted communicator are never used for anything else while a peer may write to them: on the CPU each rank
        maps them until it closes; on CUDA they are given back when all ranks have closed, and are lost if one is gone.
        """
        # While this waits Ctrl-C is heard, and leaves the communicator open. Calls in flight obey their timeouts.
        while self._here()._fallback is None and self._impl is not None and not self._impl.drain(_EXIT_WAIT):
            pass
        while not self._follow.drain(_EXIT_WAIT):
            pass
        self._let_go()

    def _let_go(self, seconds: float | None = None) -> None:
        """Of what has ended; waits for functions that follow calls, for `seconds` at most if given."""
        self._follow.close(seconds)
        self._impl = None
        group = self._group()
        with _cache_lock:
            by_device = _cache.get(group, {}) if group is not None else {}
            if by_device.get(self.device_type) is self:
                del by_device[self.device_type]

    def _set_hook(
        self,
        seed: int = 0,
        max_delay_ms: float = 0.0,
        streams: Sequence[str] = (),
        kill_at: int = -1,
        stop_at: int = -1,
    ) -> None:
        """For tests: delays ops at random, or kills or stops the process before the op of that number."""
        self._open().set_test_hook(seed, max_delay_ms, list(streams or ()), kill_at, stop_at)

    def _end(self, deadline: float) -> None:
        """The process ends: what is in flight may end by `deadline` (of time.monotonic), and is aborted then."""
        ended = False
        try:
            calls = self._fallback is not None or self._impl.drain(max(deadline - time.monotonic(), 1e-3))
            ended = calls and self._follow.drain(deadline - time.monotonic())
        finally:
            if not ended:
                self.abort(_ENDED)

    def _clear_hook(self) -> None:
        self._open().clear_test_hook()

    def _start_trace(self) -> None:
        """From now on calls are traced; see `streamoverlap.trace`."""
        impl = self._open()
        self._check()
        if self._fallback is None:
            impl.start_trace()
        self._traces += 1
        self._serial_before = self._serial_made

    def _stop_trace(self, wait: bool) -> tuple[list[_C.CallTrace], int]:
        """The traces of calls, filled once calls in flight have ended, and how many more ran serial."""
        impl = self._open()
        serial_calls = self._serial_made - self._serial_before
        if self._fallback is not None:
            return [], serial_calls
        traces = impl.stop_trace()
        if wait:
            while not impl.drain(_EXIT_WAIT):  # hears Ctrl-C; the calls obey their timeouts
                pass
            impl.finish_traces()
        return traces, serial_calls

    def _check(self) -> None:
        """Raises what further calls raise, if the group has failed."""
        impl = self._open()
        if self._connected:
            impl.check()
        elif self._error is not None:
            raise self._error

    def _fail(self, error: CommunicatorError) -> None:
        """No further call; peers that wait in one need not wait any longer, where they can be told."""
        if self._connected:
            self._impl.abort(str(error))
        elif self._error is None:
            self._error = error

    def _here(self) -> Communicator:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the communicator of group '{self.name}' was made in process {self._process}, of which this one is a "
                "fork; expected a call there, or a process group of this process' own"
            )
        return self

    def _open(self) -> _C.Communicator:
        impl = self._here()._impl
        if impl is None:
            raise RuntimeError(f"the communicator of group '{self.name}' is closed; expected an open one")
        return impl

    def _set_up(self, slots: int) -> str | None:
        """Connects the ranks; returns why they cannot overlap, the same on all of them, or None."""
        hello: dict[str, Any] = {"tuning": self._plans.tuning}
        hello["error"] = attempt(lambda: hello.update(self._make(slots)))
        meeting = Meeting(self.group, f"streamoverlap/{self.device_type}", hello, self._timeout)
        ranks = meeting.hellos
        if (failure := first_error(entry["error"] for entry in ranks)) is not None:
            raise RuntimeError(f"could not set up the communicator of group '{self.name}': {failure}")
        self._plans.tuning = ranks[0]["tuning"]
        hosts = {entry["host"] for entry in ranks}
        if len(hosts) > 1:
            return f"its {self.world} ranks are on {len(hosts)} hosts and share no memory"
        self._prefix = f"streamoverlap/{self.device_type}/{meeting.session}"
        addresses = [entry["address"] for entry in ranks]

        def reserve() -> None:  # if ranks cannot share memory, it shows here and not in the first call
            self._impl.set_timeout(meeting.left)
            self._impl.reserve(1)
            self._impl.set_timeout(self._timeout)

        steps = {
            "connected": lambda: self._impl.connect(addresses, meeting.left),
            "attached": lambda: self._attach(ranks),
            "reserved": reserve,
        }
        for name, step in steps.items():
            if (failure := first_error(meeting.all_gather(name, attempt(step)))) is not None:
                meeting.all_gather("agreed", None)  # a rank so late that the others have given up must give up, too
                self._connected = self._connected and self.errored() is None
                return failure
            self._connected = True
        return None

    def _make(self, slots: int) -> dict[str, str]:
        """This rank's part alone; returns what it tells the others."""
        index = self.device.index if _C.WITH_CUDA and self.device_type == "cuda" else -1
        self._impl = _C.Communicator(self.name, self.rank, self.world, self._timeout, index, slots)
        return {"host": host_id(), "address": self._impl.address(), "gpu": gpu_uuid(self.device)}

    def _attach(self, ranks: list[dict]) -> None:
        if self.device_type == "cuda" and not _C.WITH_CUDA:
            raise RuntimeError("streamoverlap was built without its CUDA part")
        peers, allocate = self._symmetric(ranks) if self.device_type == "cuda" else ([], None)
        self._impl.attach(peers, allocate, partial(_log_growth, self.name))

    def _symmetric(self, ranks: list[dict]):
        """The peers' GPUs as this process numbers them, and how to allocate memory that all of them reach."""
        mine = {gpu_uuid(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
        unseen = [rank for rank, entry in enumerate(ranks) if entry["gpu"] not in mine]
        if unseen:
            raise RuntimeError(
                f"it does not see the GPU of rank {unseen[0]} (CUDA_VISIBLE_DEVICES hides it); expected every rank to "
                "see the GPUs of all"
            )
        return [mine[entry["gpu"]] for entry in ranks], partial(
            _allocate, itertools.count(), self._prefix, self._group, weakref.ref(self)
        )


def _log_growth(name: str, size: int) -> None:
    _log.info("group '%s' has slots of %d bytes now", name, size)


def _allocate(
    numbers: Iterator[int],
    prefix: str,
    group: weakref.ref[dist.ProcessGroup],
    owner: weakref.ref[Communicator],
    size: int,
) -> tuple[object, list[int]]:
    """No method: the compiled part keeps it, and would keep the communicator and so itself."""
    ranks, comm = group(), owner()
    if ranks is None or comm is None:
        raise RuntimeError("the process group has been destroyed; expected it to outlive the calls on it")
    store = dist.PrefixStore(f"{prefix}/slots/{next(numbers)}", ranks.get_group_store())
    timeout = timedelta(seconds=comm.timeout)
    return symmetric.allocate(size, store, ranks.rank(), ranks.size(), comm.device, timeout, comm._check)


@atexit.register
def _end_all() -> None:
    deadline = time.monotonic() + _EXIT_WAIT
    ours = [one for one in list(_open_ones) if one._impl is not None and one._process == os.getpid()]
    for communicator in ours:
        try:
            communicator._end(deadline)
        except KeyboardInterrupt:  # no more waiting, but peers are told
            deadline = time.monotonic()
    if not _C.wait_until_outside(max(deadline - time.monotonic(), 0.0)):
        for communicator in ours:  # another thread's slots grow, or it makes a serial call
            communicator.abort(_ENDED)
    for communicator in ours:  # all that waited for another one has ended by now
        communicator._let_go(_LAST_MOMENT)
    _C.wait_until_outside(_EXIT_WAIT)  # what other threads were in has been aborted
    if threading.active_count() > 1:
        time.sleep(_LAST_MOMENT)


def _set_up_lock(group: dist.ProcessGroup, device_type: str) -> threading.RLock:
    with _cache_lock:
        return _set_up_locks.setdefault(group, {}).setdefault(device_type, threading.RLock())
