"""A communicator: what the ranks of one process group share to overlap their exchanges. One is made when needed."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from streamoverlap import _C, serial, symmetric
from streamoverlap.spec import Choice, PlanSpec, choose
from streamoverlap.store import wait_for

_log = logging.getLogger("streamoverlap")
_DEFAULT_TIMEOUT = timedelta(minutes=10)

# By group, then device type. A cached communicator goes with its ProcessGroup object.
_cache: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Communicator]] = weakref.WeakKeyDictionary()
_cache_lock = threading.Lock()
# Held while a communicator is set up: one lock each, since threads may set up different groups in any order.
_set_up_locks: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, threading.Lock]] = weakref.WeakKeyDictionary()
# Communicators made so far by group name, so that each set-up has keys of its own in the store.
_made: Counter[str] = Counter()


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

    The functional ops use `Communicator.of(group, device)`, made when a group is first used; change its timeout with
    `set_timeout`. One made explicitly is apart from it, with slots of its own. Making one is collective: every rank of
    the group does it, in the same order as its other calls.

    Args:
        group: any process group that has this rank; None is the default group.
        timeout: how long a call may wait for its peers, from its start: seconds or a `datetime.timedelta`. Default 10
            minutes, as in torch.distributed.
        device: ``"cpu"`` or ``"cuda"``: where the tensors of its calls are.

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
        index = -1 if self.device.index is None else self.device.index
        self._impl: _C.Communicator | None = _C.Communicator(
            self.name, self.rank, self.world, self._timeout, index if _C.WITH_CUDA else -1, _slots
        )
        with _cache_lock:
            _made[self.name] += 1
            self._prefix = f"streamoverlap/{self.device_type}/{_made[self.name]}"
        self._fallback = self._set_up()
        if self._fallback is not None and self.rank == 0:
            _log.warning("group '%s' runs serial: %s", self.name, self._fallback)

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
    ) -> tuple[list[Tensor], Tensor | None]:
        """As `streamoverlap.all_gather_gemm`, on lists."""
        impl, choice = self._begin(x, plan)
        if choice.plan.algorithm != "serial":
            spec = _spec("all_gather_gemm", choice.plan, self.world, return_gathered)
            return impl.all_gather_gemm(x, weights, biases, return_gathered, spec, self._preparing)
        _C.validate_all_gather_gemm(x, weights, biases, self.world)
        outputs, gathered = serial.all_gather_gemm(x, weights, biases or [None] * len(weights), self._collectives())
        return outputs, gathered if return_gathered else None

    def gemm_reduce_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None, plan: PlanSpec | None) -> Tensor:
        """As `streamoverlap.gemm_reduce_scatter`."""
        impl, choice = self._begin(x, plan)
        if choice.plan.algorithm != "serial":
            return impl.gemm_reduce_scatter(
                x, weight, bias, _spec("gemm_reduce_scatter", choice.plan, self.world), self._preparing
            )
        _C.validate_gemm_reduce_scatter(x, weight, bias, self.world)
        return serial.gemm_reduce_scatter(x, weight, bias, self._collectives())

    def all_gather(self, x: Tensor, plan: PlanSpec | None) -> Tensor:
        """As `streamoverlap.all_gather`."""
        impl, choice = self._begin(x, plan)
        if choice.plan.algorithm != "serial":
            return impl.all_gather(x, _spec("all_gather", choice.plan, self.world), self._preparing)
        _C.validate_all_gather(x, self.world)
        return serial.all_gather(x, self._collectives())

    def reduce_scatter(self, x: Tensor, plan: PlanSpec | None) -> Tensor:
        """As `streamoverlap.reduce_scatter`."""
        impl, choice = self._begin(x, plan)
        if choice.plan.algorithm != "serial":
            return impl.reduce_scatter(x, _spec("reduce_scatter", choice.plan, self.world), self._preparing)
        _C.validate_reduce_scatter(x, self.world)
        return serial.reduce_scatter(x, self._collectives())

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
        if self._fallback is None:
            self._open().set_timeout(seconds)
        self._timeout = seconds

    def errored(self) -> Exception | None:
        """The error that every further call raises, or None."""
        if self._fallback is not None:
            return None
        try:
            self._open().check()
        except RuntimeError as error:
            return error
        return None

    def close(self) -> None:
        """Gives back memory, threads and file descriptors. No call may be in flight on this rank.

        Peers need not close at the same time, but a call that they make afterwards waits for this rank in vain.
        """
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

    def _clear_hook(self) -> None:
        self._open().clear_test_hook()

    def _collectives(self) -> serial.Collectives:
        return serial.Collectives(self.group, self._timeout, self._fail)

    def _fail(self, cause: str) -> None:
        """Peers that wait in an overlapped call need not wait any longer."""
        if self._fallback is None:
            self._open().abort(cause)

    @property
    def _preparing(self) -> bool:
        return getattr(_mode, "preparing", False)

    def _open(self) -> _C.Communicator:
        if self._impl is None:
            raise RuntimeError(f"the communicator of group '{self.name}' is closed; expected an open one")
        return self._impl

    def _begin(self, x: Tensor, plan: PlanSpec | None) -> tuple[_C.Communicator, Choice]:
        if x.device != self.device:
            raise ValueError(f"x is on {x.device}; expected {self.device}, the device of this communicator")
        choice = choose(plan, self._fallback)
        self.last_choice = choice
        return self._open(), choice

    def _set_up(self) -> str | None:
        """Connects the ranks; returns why they cannot overlap, the same on all of them, or None."""
        if self.device_type == "cuda" and not _C.WITH_CUDA:
            return "streamoverlap was built without its CUDA part"
        hello = {"host": _host(), "address": self._impl.address(), "gpu": _gpu_uuid(self.device)}
        ranks = self._all_gather_object("hello", hello)
        hosts = {entry["host"] for entry in ranks}
        if len(hosts) > 1:
            return f"its {self.world} ranks are on {len(hosts)} hosts and share no memory"
        error = ""
        try:
            peers, allocate = self._symmetric(ranks) if self.device_type == "cuda" else ([], None)
            self._impl.connect([entry["address"] for entry in ranks], self._timeout, peers, allocate)
            self._impl.reserve(1)  # if ranks cannot share memory, it shows here and not in the first call
        except (RuntimeError, ValueError) as failure:
            error = str(failure)
        errors = self._all_gather_object("connected", error)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(errors) if text), None)

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
            _allocate, itertools.count(), self._prefix, self._group, self.device, timedelta(seconds=self._timeout)
        )

    def _all_gather_object(self, key: str, value: object) -> list:
        """Through the store, bounded by twice the timeout: the group's own collectives may be on a device, or hang."""
        if self.world == 1:
            return [value]
        store = dist.PrefixStore(f"{self._prefix}/{key}", self.group.get_group_store())
        try:
            store.set(str(self.rank), json.dumps(value))
            keys = [str(rank) for rank in range(self.world)]
            wait_for(store, keys, 2 * self._timeout)
            return [json.loads(store.get(key)) for key in keys]
        except dist.DistError as failure:
            raise RuntimeError(
                f"could not set up the communicator of group '{self.name}': not all of its {self.world} "
                f"ranks made one within {2 * self._timeout:g} s, or the store is gone ({failure})"
            ) from failure


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
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise ValueError(f"timeout is {timeout!r}; expected a positive number of seconds or a timedelta")
    return float(seconds)


def _host() -> str:
    """Equal for processes that run under one kernel, so may share memory."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
