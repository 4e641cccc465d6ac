"""A communicator: what the ranks of one process group share to overlap their exchanges. One is made when needed."""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from streamoverlap import _C, serial, symmetric
from streamoverlap.errors import CommunicatorError
from streamoverlap.spec import Choice, PlanSpec, choose
from streamoverlap.store import wait_for

_log = logging.getLogger("streamoverlap")
_DEFAULT_TIMEOUT = timedelta(minutes=10)
_LONGEST_TIMEOUT = 4_000_000.0  # seconds: some 46 days, which 32 bits hold in milliseconds
# Seconds that set-up waits, besides the timeout, for the error of a rank that waited for another one.
_GRACE = 1.0

# By group, then device type. A cached communicator goes with its ProcessGroup object.
_cache: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Communicator]] = weakref.WeakKeyDictionary()
_cache_lock = threading.Lock()
# Held while a communicator is set up: one lock each, since threads may set up different groups in any order.
_set_up_locks: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, threading.Lock]] = weakref.WeakKeyDictionary()
# Communicators begun so far by group name, so that each set-up has keys of its own in the store.
_begun: Counter[str] = Counter()


_mode = threading.local()


@contextmanager
def preparing() -> Iterator[None]:
    """Calls of this thread are prepared only; see `streamoverlap.prepare`."""
    _mode.preparing = True
    try:
        yield
    finally:
        _mode.preparing = False


class Communicator:
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
        _slots: int = 2,  # for tests: with one, every call follows the last one on the same slot
    ) -> None:
        group = _resolve(group)
        self._group = weakref.ref(group)  # weak: the cache must not keep its own key alive
        self.device_type = _device_type(device)
        self.rank, self.world = group.rank(), group.size()
        self.last_choice: Choice | None = None
        self._timeout = _seconds(timeout)
        self.name = group.group_name
        self.device = _device(self.device_type)
        self._process = os.getpid()
        self._connected = False
        self._error: CommunicatorError | None = None  # where there is no shared memory to keep it in
        self._serial_calls = itertools.count(1)
        with _cache_lock:  # before anything can fail, so that the ranks' counts stay equal
            _begun[self.name] += 1
            self._prefix = f"streamoverlap/{self.device_type}/{_begun[self.name]}"
        self._impl: _C.Communicator | None = None
        self._fallback = self._set_up(_slots)
        if self._fallback is not None and self.rank == 0:
            _log.warning("group '%s' runs serial: %s", self.name, self._fallback)
        with _cache_lock:
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
        group = _resolve(group)
        device_type = _device_type(device)
        found = _cache.get(group, {}).get(device_type)
        if found is not None:
            return found._here()
        if validate is not None:
            validate(group.size())
        with _cache_lock:
            by_device = _cache.setdefault(group, {})
            set_up = _set_up_locks.setdefault(group, {}).setdefault(device_type, threading.Lock())
        with set_up:
            return by_device.get(device_type) or cls(group, device=device_type)

    def all_gather_gemm(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        return_gathered: bool,
        plan: PlanSpec | None,
    ) -> tuple[list[Tensor], Tensor | None]:
        """As `streamoverlap.all_gather_gemm`, on lists."""
        impl, choice = self._begin(x, plan)
        if choice.plan.algorithm != "serial":
            spec = _spec("all_gather_gemm", choice.plan, self.world, return_gathered)
            return impl.all_gather_gemm(x, weights, biases, return_gathered, spec, self._preparing)
        on = self._enter_serial(_C.validate_all_gather_gemm(x, weights, biases, self.world))
        outputs, gathered = serial.all_gather_gemm(x, weights, biases or [None] * len(weights), on)
        return outputs, gathered if return_gathered else None

    def gemm_reduce_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, plan: PlanSpec | None) -> Tensor:
        """As `streamoverlap.gemm_reduce_scatter`."""
        impl, choice = self._begin(x, plan)
        if choice.plan.algorithm != "serial":
            return impl.gemm_reduce_scatter(
                x, weight, bias, _spec("gemm_reduce_scatter", choice.plan, self.world), self._preparing
            )
        on = self._enter_serial(_C.validate_gemm_reduce_scatter(x, weight, bias, self.world))
        return serial.gemm_reduce_scatter(x, weight, bias, on)

    def all_gather(self, x: Tensor, plan: PlanSpec | None) -> Tensor:
        """As `streamoverlap.all_gather`."""
        impl, choice = self._begin(x, plan)
        if choice.plan.algorithm != "serial":
            return impl.all_gather(x, _spec("all_gather", choice.plan, self.world), self._preparing)
        return serial.all_gather(x, self._enter_serial(_C.validate_all_gather(x, self.world)))

    def reduce_scatter(self, x: Tensor, plan: PlanSpec | None) -> Tensor:
        """As `streamoverlap.reduce_scatter`."""
        impl, choice = self._begin(x, plan)
        if choice.plan.algorithm != "serial":
            return impl.reduce_scatter(x, _spec("reduce_scatter", choice.plan, self.world), self._preparing)
        return serial.reduce_scatter(x, self._enter_serial(_C.validate_reduce_scatter(x, self.world)))

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
        seconds = _seconds(timeout)
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

    def close(self) -> None:
        """Gives back memory, threads and file descriptors. No call may be in flight on this rank.

        Peers need not close at the same time, but a call that they make afterwards waits for this rank in vain.
        """
        self._here()._impl = None
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

    def _clear_hook(self) -> None:
        self._open().clear_test_hook()

    def _enter_serial(self, call: tuple[int, str]) -> serial.Collectives:
        """Agrees with the peers on the call, so far as that goes without waiting for them."""
        on = serial.Collectives(self.group, self._timeout, self._check, self._fail)
        if self._connected:
            self._impl.enter_serial(*call)
        elif self.device_type == "cpu":
            serial.agree(call, next(self._serial_calls), on)
        return on

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

    @property
    def _preparing(self) -> bool:
        return getattr(_mode, "preparing", False)

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

    def _begin(self, x: Tensor, plan: PlanSpec | None) -> tuple[_C.Communicator, Choice]:
        if x.device != self.device:
            raise ValueError(f"x is on {x.device}; expected {self.device}, the device of this communicator")
        choice = choose(plan, self._fallback)
        self.last_choice = choice
        impl = self._open()
        self._check()
        return impl, choice

    def _set_up(self, slots: int) -> str | None:
        """Connects the ranks; returns why they cannot overlap, the same on all of them, or None."""
        deadline = time.monotonic() + self._timeout
        error = self._attempt(lambda: self._make(slots))
        address = self._impl.address() if self._impl is not None else ""
        hello = {"error": error, "host": _host(), "address": address, "gpu": _gpu_uuid(self.device)}
        ranks = self._all_gather_object("hello", hello, deadline)
        if (failure := _first(entry["error"] for entry in ranks)) is not None:
            raise RuntimeError(f"could not set up the communicator of group '{self.name}': {failure}")
        hosts = {entry["host"] for entry in ranks}
        if len(hosts) > 1:
            return f"its {self.world} ranks are on {len(hosts)} hosts and share no memory"
        addresses = [entry["address"] for entry in ranks]

        def left() -> float:
            return max(deadline - time.monotonic(), _GRACE)

        def reserve() -> None:  # if ranks cannot share memory, it shows here and not in the first call
            self._impl.set_timeout(left())
            self._impl.reserve(1)
            self._impl.set_timeout(self._timeout)

        steps = {
            "connected": lambda: self._impl.connect(addresses, left()),
            "attached": lambda: self._attach(ranks),
            "reserved": reserve,
        }
        for name, step in steps.items():
            errors = self._all_gather_object(name, self._attempt(step), deadline + _GRACE)
            if (failure := _first(errors)) is not None:
                self._connected = self._connected and self.errored() is None
                return failure
            self._connected = True
        return None

    def _make(self, slots: int) -> None:
        index = self.device.index if _C.WITH_CUDA and self.device_type == "cuda" else -1
        self._impl = _C.Communicator(self.name, self.rank, self.world, self._timeout, index, slots)

    def _attach(self, ranks: list[dict]) -> None:
        if self.device_type == "cuda" and not _C.WITH_CUDA:
            raise RuntimeError("streamoverlap was built without its CUDA part")
        self._impl.attach(*(self._symmetric(ranks) if self.device_type == "cuda" else ()))

    @staticmethod
    def _attempt(step: Callable[[], None]) -> tuple[float, str] | None:
        """When and why it failed. The earliest failure of all ranks is the cause: others come of waiting for it."""
        try:
            step()
        except (RuntimeError, ValueError, OSError) as failure:
            return time.time(), str(failure)
        return None

    def _symmetric(self, ranks: list[dict]):
        """The peers' GPUs as this process numbers them, and how to allocate memory that all of them reach."""
        mine = {_gpu_uuid(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
        unseen = [rank for rank, entry in enumerate(ranks) if entry["gpu"] not in mine]
        if unseen:
            raise RuntimeError(
                f"it does not see the GPU of rank {unseen[0]} (CUDA_VISIBLE_DEVICES hides it); expected every rank to "
                "see the GPUs of all"
            )
        return [mine[entry["gpu"]] for entry in ranks], partial(
            _allocate, itertools.count(), self._prefix, self._group, weakref.ref(self)
        )

    def _all_gather_object(self, key: str, value: object, deadline: float) -> list:
        """Through the store, bounded: the group's own collectives may be on a device, or hang."""
        if self.world == 1:
            return [value]
        store = dist.PrefixStore(f"{self._prefix}/{key}", self.group.get_group_store())
        try:
            store.set(str(self.rank), json.dumps(value))
            keys = [str(rank) for rank in range(self.world)]
            wait_for(store, keys, max(deadline - time.monotonic(), _GRACE))
            return [json.loads(store.get(key)) for key in keys]
        except dist.DistError as failure:
            raise RuntimeError(
                f"could not set up the communicator of group '{self.name}': not all of its {self.world} "
                f"ranks made one within {self._timeout:g} s, or the store is gone ({failure})"
            ) from failure


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


def _first(errors: Iterable[tuple[float, str] | None]) -> str | None:
    """The earliest of the ranks' errors, with its rank."""
    found = [(*error, rank) for rank, error in enumerate(errors) if error]
    return "rank {2}: {1}".format(*min(found)) if found else None


@lru_cache(maxsize=1024)
def _spec(operation: str, plan: PlanSpec, world: int, keep_gathered: bool = False) -> _C.Spec:
    reduce = plan.reduce if operation == "gemm_reduce_scatter" else "accumulate"  # ignored, so no mismatch either
    return _C.Spec(operation, plan.algorithm, reduce, world, plan.chunks, plan.compute_streams, keep_gathered)


def _resolve(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(
                "group is None but torch.distributed is not initialised; expected a ProcessGroup, or a call of "
                "torch.distributed.init_process_group() before"
            )
        return dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"group does not have this rank (global rank {dist.get_rank()}); expected a group that it is in"
        )
    raise TypeError(f"group is a {type(group).__name__}; expected a torch.distributed.ProcessGroup or None")


def _device_type(device: str | torch.device) -> str:
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device is {kind}; expected cpu or cuda")
    return kind


def _device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("device is cuda but torch finds no GPU; expected one, or tensors on the CPU")
    return torch.device("cuda", torch.cuda.current_device())


def _gpu_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _seconds(timeout: float | timedelta) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= _LONGEST_TIMEOUT:
        raise ValueError(
            f"timeout is {timeout!r}; expected a positive number of seconds or a timedelta, of at most "
            f"{_LONGEST_TIMEOUT:g} s"
        )
    return float(seconds)


def _host() -> str:
    """Equal for processes that run under one kernel, so may share memory."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
