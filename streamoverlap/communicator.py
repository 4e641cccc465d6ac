"""A communicator: what the ranks of one process group share to overlap their exchanges. One is made when needed."""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamoverlap import _C, serial, symmetric
from streamoverlap.call import Call
from streamoverlap.errors import CommunicatorError
from streamoverlap.follow import FollowOnCpu
from streamoverlap.places import device_of, gpu_uuid, host_id, resolve_group, type_of
from streamoverlap.spec import Choice, PlanSpec, choose
from streamoverlap.store import wait_for
from streamoverlap.streams import StreamSet
from streamoverlap.work import Work, seconds_of

_log = logging.getLogger("streamoverlap")
_DEFAULT_TIMEOUT = timedelta(minutes=10)

# By group, then device type. A cached communicator goes with its ProcessGroup object.
_cache: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Communicator]] = weakref.WeakKeyDictionary()
_cache_lock = threading.Lock()
# Held while a communicator is set up: one lock each, since threads may set up different groups in any order.
_set_up_locks: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, threading.Lock]] = weakref.WeakKeyDictionary()
# To be closed before the interpreter ends: their threads let go of tensors.
_open_ones: weakref.WeakSet[Communicator] = weakref.WeakSet()
_EXIT_WAIT = 5.0  # seconds that calls in flight get to end then


class Communicator:
    """Shared memory, flags, slots and streams of one process group on one kind of device.

    The functional ops use `Communicator.of(group, device)`, made when a group is first used; change its timeout with
    `set_timeout`. One made explicitly is apart from it, with slots of its own. Making one is collective: every rank of
    the group does it, in the same order as its other calls.

    Args:
        group: any process group that has this rank; None is the default group.
        timeout: how long a call may wait for its peers, from its start: seconds or a `datetime.timedelta`. Default 10
            minutes, as in torch.distributed.
        device: ``"cpu"`` or ``"cuda"``: where the tensors of its calls are.
        report_path: a file of this rank's own. If the group fails, its watchdog adds to it what it saw of all ranks:
            calls, missing flags, signs of life. The first error has the same as `CommunicatorError.report`, and the
            logger ``streamoverlap`` gets it.

    Raises:
        TypeError, ValueError: an argument is not as described, or `group` does not have this rank.
        RuntimeError: torch.distributed is not initialised, or a peer did not take part in the set-up in time.

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
        _slots: int = 2,  # for tests: with one, every call follows the last one on the same slot
    ) -> None:
        group = resolve_group(group)
        self._group = weakref.ref(group)  # weak: the cache must not keep its own key alive
        self.device_type = type_of(device)
        self.rank, self.world = group.rank(), group.size()
        self.last_choice: Choice | None = None
        self._timeout = seconds_of(timeout)
        self._aborted: CommunicatorError | None = None
        self.name = group.group_name
        self.device = device_of(self.device_type)
        index = -1 if self.device.index is None else self.device.index
        self._impl: _C.Communicator | None = _C.Communicator(
            self.name, self.rank, self.world, self._timeout, index if _C.WITH_CUDA else -1, _slots
        )
        reference = weakref.ref(self)
        self._follow = FollowOnCpu(lambda: getattr(reference(), "_timeout", 0.0))
        self._prefix = f"streamoverlap/{self.device_type}"
        self._fallback = self._set_up()
        if self._fallback is None:
            if report_path is not None:
                self._impl.set_report_path(str(report_path))
            _log.info("group '%s' is set up: rank %d of %d on %s", self.name, self.rank, self.world, self.device)
        elif self.rank == 0:
            _log.warning("group '%s' runs serial: %s", self.name, self._fallback)
        _open_ones.add(self)

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
        found = _cache.get(group, {}).get(device_type)
        if found is not None:
            return found
        if validate is not None:
            validate(group.size())
        with _cache_lock:
            by_device = _cache.setdefault(group, {})
            set_up = _set_up_locks.setdefault(group, {}).setdefault(device_type, threading.Lock())
        with set_up:
            if device_type not in by_device:
                by_device[device_type] = cls(group, device=device_type)
            return by_device[device_type]

    def all_gather_gemm(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        return_gathered: bool,
        plan: PlanSpec | None,
        **options: Any,
    ) -> tuple[list[Tensor], Tensor | None] | Work:
        """As `streamoverlap.all_gather_gemm`, on lists; so are the methods below, and so their keyword arguments."""
        call = self._call(x, plan, **options)
        if call.overlapped:
            spec = _spec("all_gather_gemm", call.plan, self.world, return_gathered)
            *result, work = call.impl.all_gather_gemm(x, weights, biases, return_gathered, spec, call.options)
            return call.finish(tuple(result), work)
        _C.validate_all_gather_gemm(x, weights, biases, self.world)
        every_bias = list(biases) or [None] * len(weights)

        def start(on: serial.Collectives) -> serial.Started:
            wait, finish = serial.all_gather_gemm(x, weights, every_bias, on)
            return serial.Started(wait, finish if return_gathered else lambda: (finish()[0], None))

        return call.serial(start, self._collectives(), [x, *weights, *every_bias])

    def gemm_reduce_scatter(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, plan: PlanSpec | None, **options: Any
    ) -> Tensor | Work:
        call = self._call(x, plan, **options)
        if call.overlapped:
            spec = _spec("gemm_reduce_scatter", call.plan, self.world)
            return call.finish(*call.impl.gemm_reduce_scatter(x, weight, bias, spec, call.options))
        _C.validate_gemm_reduce_scatter(x, weight, bias, self.world)
        start = partial(serial.gemm_reduce_scatter, x, weight, bias)
        return call.serial(start, self._collectives(), [x, weight, bias])

    def all_gather(self, x: Tensor, plan: PlanSpec | None, **options: Any) -> Tensor | Work:
        return self._exchange("all_gather", x, plan, **options)

    def reduce_scatter(self, x: Tensor, plan: PlanSpec | None, **options: Any) -> Tensor | Work:
        return self._exchange("reduce_scatter", x, plan, **options)

    def all_reduce(self, x: Tensor, plan: PlanSpec | None, **options: Any) -> Tensor | Work:
        return self._exchange("all_reduce", x, plan, **options)

    def _exchange(
        self, operation: str, x: Tensor, plan: PlanSpec | None, copy_input: bool = False, **options: Any
    ) -> Tensor | Work:
        """A plain collective, which has the same name everywhere."""
        call = self._call(x, plan, **options)
        if call.overlapped:
            spec = _spec(operation, call.plan, self.world, copy_input=copy_input)
            return call.finish(*getattr(call.impl, operation)(x, spec, call.options))
        getattr(_C, f"validate_{operation}")(x, self.world)
        if copy_input and call.async_op:
            x = x.clone()
        return call.serial(partial(getattr(serial, operation), x), self._collectives(), [x])

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
        if self._fallback is None:
            self._open().set_timeout(seconds)
        self._timeout = seconds

    def errored(self) -> Exception | None:
        """The error that every further call raises, or None."""
        if self._fallback is not None:
            return self._aborted
        try:
            self._open().check()
        except RuntimeError as error:
            return error
        return None

    def abort(self, reason: str = "abort was called") -> None:
        """Ends the communicator on all ranks: what is in flight, and every later call, raises `CommunicatorError`.

        Results of calls in flight are withheld. Where the group runs serial this rank alone ends it.
        """
        if self._fallback is None:
            self._open().abort(reason)
        elif self._aborted is None:
            self._aborted = CommunicatorError(f"group '{self.name}' was aborted: {reason}", self.name, peer=self.rank)

    def close(self) -> None:
        """Gives back memory, threads and file descriptors, once calls in flight on this rank have ended.

        Peers need not close at the same time, but a call that they make afterwards waits for this rank in vain. Slots
        of an aborted communicator are never used for anything else while a peer may write to them: on the CPU each rank
        maps them until it closes; on CUDA they are given back when all ranks have closed, and are lost if one is gone.
        """
        self._follow.close()
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

    def _end(self) -> None:
        if self._impl is not None:
            if self._fallback is None:
                self._impl.finish(_EXIT_WAIT)
            self.close()

    def _clear_hook(self) -> None:
        self._open().clear_test_hook()

    def _collectives(self) -> serial.Collectives:
        return serial.Collectives(self.group, self._timeout, self._fail)

    def _fail(self, cause: str) -> None:
        """Peers that wait in an overlapped call need not wait any longer."""
        if self._fallback is None:
            self._open().abort(cause)

    def _open(self) -> _C.Communicator:
        if self._impl is None:
            raise RuntimeError(f"the communicator of group '{self.name}' is closed; expected an open one")
        return self._impl

    def _call(
        self,
        x: Tensor,
        plan: PlanSpec | None,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
        streams: StreamSet | None = None,
    ) -> Call:
        if x.device != self.device:
            raise ValueError(f"x is on {x.device}; expected {self.device}, the device of this communicator")
        self.last_choice = choice = choose(plan, self._fallback)
        if self._aborted is not None:
            raise self._aborted
        return Call(self._open(), choice.plan, self.device, self._follow, async_op, timeout, streams)

    def _set_up(self) -> str | None:
        """Connects the ranks; returns why they cannot overlap, the same on all of them, or None."""
        if self.device_type == "cuda" and not _C.WITH_CUDA:
            return "streamoverlap was built without its CUDA part"
        self._prefix += f"/{self._generation()}"
        hello = {"host": host_id(), "address": self._impl.address(), "gpu": gpu_uuid(self.device)}
        ranks = self._all_gather_object("hello", hello)
        hosts = {entry["host"] for entry in ranks}
        if len(hosts) > 1:
            return f"its {self.world} ranks are on {len(hosts)} hosts and share no memory"
        error = ""
        try:
            peers, allocate = self._symmetric(ranks) if self.device_type == "cuda" else ([], None)
            addresses = [entry["address"] for entry in ranks]
            self._impl.connect(addresses, self._timeout, peers, allocate, partial(_log_growth, self.name))
            self._impl.reserve(1)  # if ranks cannot share memory, it shows here and not in the first call
        except (RuntimeError, ValueError) as failure:
            error = str(failure)
        errors = self._all_gather_object("connected", error)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(errors) if text), None)

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
            _allocate, itertools.count(), self._prefix, self._group, self.device, timedelta(seconds=self._timeout)
        )

    def _generation(self) -> int:
        """How many communicators this group has had, so that each has keys of its own in the store.

        Counted there: ranks may have come at different times, and the group's name may have been in use before.
        """
        if self.world == 1:
            return 0
        with self._told_if_store_fails():
            return (self.group.get_group_store().add(f"{self._prefix}/arrivals", 1) - 1) // self.world

    @contextmanager
    def _told_if_store_fails(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as failure:  # of which torch's DistError is one
            raise RuntimeError(
                f"could not set up the communicator of group '{self.name}': not all of its {self.world} "
                f"ranks made one within {2 * self._timeout:g} s, or the store is gone ({failure})"
            ) from failure

    def _all_gather_object(self, key: str, value: object) -> list:
        """Through the store, bounded by twice the timeout: the group's own collectives may be on a device, or hang."""
        if self.world == 1:
            return [value]
        with self._told_if_store_fails():
            store = dist.PrefixStore(f"{self._prefix}/{key}", self.group.get_group_store())
            store.set(str(self.rank), json.dumps(value))
            keys = [str(rank) for rank in range(self.world)]
            wait_for(store, keys, 2 * self._timeout)
            return [json.loads(store.get(key)) for key in keys]


def _log_growth(name: str, size: int) -> None:
    _log.info("group '%s' has slots of %d bytes now", name, size)


def _allocate(
    numbers: Iterator[int],
    prefix: str,
    group: weakref.ref[dist.ProcessGroup],
    device: torch.device,
    timeout: timedelta,
    size: int,
) -> tuple[object, list[int]]:
    """No method: the compiled part keeps it, and would keep the communicator and so itself."""
    ranks = group()
    if ranks is None:
        raise RuntimeError("the process group has been destroyed; expected it to outlive the calls on it")
    store = dist.PrefixStore(f"{prefix}/slots/{next(numbers)}", ranks.get_group_store())
    return symmetric.allocate(size, store, ranks.rank(), ranks.size(), device, timeout)


@lru_cache(maxsize=1024)
def _spec(operation: str, plan: PlanSpec, world: int, keep_gathered: bool = False, copy_input: bool = False) -> _C.Spec:
    reduce = plan.reduce if operation == "gemm_reduce_scatter" else "accumulate"  # ignored, so no mismatch either
    chunks, streams = plan.chunks, plan.compute_streams
    return _C.Spec(operation, plan.algorithm, reduce, world, chunks, streams, keep_gathered, copy_input)


@atexit.register
def _end_all() -> None:
    for communicator in list(_open_ones):
        communicator._end()
