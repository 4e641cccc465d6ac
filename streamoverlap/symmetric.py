"""Symmetric device memory, from torch. Its API is alpha, so it is touched here alone."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import (
    ProcessGroup,
    _register_process_group,
    _SymmetricMemory,
    _unregister_process_group,
)

from streamoverlap.store import wait_for

_allocations = itertools.count()


def _on_a_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """What this one allocates may be directed to a pool, such as a CUDA graph's; a rendezvous allocates a little."""

    @wraps(function)
    def call(*args: Any) -> Any:
        result: Future = Future()

        def run() -> None:
            try:
                result.set_result(function(*args))
            except BaseException as error:
                result.set_exception(error)

        Thread(target=run, daemon=True).start()
        return result.result()  # after Ctrl-C here its group has failed, so that thread's next check raises

    return call


@_on_a_thread
def allocate(
    size: int,
    store: dist.Store,
    rank: int,
    world: int,
    device: torch.device,
    timeout: timedelta,
    check: Callable[[], None],
) -> tuple[object, list[int]]:
    """Allocates `size` bytes on every rank, collectively; `store` must be new to all of them.

    `check` is called while this rank waits for the others, and may raise.

    Returns:
        What keeps the memory, and where each rank's is in this process.
    """
    torch.cuda.set_device(device)
    tensor = symm_mem.empty(size, dtype=torch.uint8, device=device)
    # Torch finds ranks and store by the name of a group; this one is a name, ranks and store, and nothing else.
    name = f"streamoverlap/{next(_allocations)}"
    numbered = _Renumbered(store, timeout, check)
    group = ProcessGroup(numbered, rank, world)
    _register_process_group(name, group)
    try:
        with _no_multicast():
            handle = _SymmetricMemory.rendezvous(tensor, name)
    finally:
        _unregister_process_group(name)
    offset = tensor.data_ptr() - handle.buffer_ptrs[rank]
    return (tensor, handle, group, numbered), [pointer + offset for pointer in handle.buffer_ptrs]


@contextmanager
def _no_multicast() -> Iterator[None]:
    """NVLink multicast is of no use here, and a rendezvous that sets it up can put a host's GPUs out of service."""
    variable = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


class _Renumbered(dist.Store):
    """A store whose keys count this rendezvous' exchanges only.

    Torch numbers the exchanges of a process, not those of a group (StoreExchange in CUDASymmetricMemoryUtils.hpp), so
    ranks that are in different numbers of groups wait for keys that nobody sets.
    """

    _KEY = re.compile(r"(.*)/(\d+)/(\d+)")

    def __init__(self, store: dist.Store, timeout: timedelta, check: Callable[[], None]) -> None:
        super().__init__()
        self._store = store
        self._timeout = timeout
        self._check = check
        self._numbers: dict[str, int] = {}

    def _renumber(self, key: str) -> str:
        match = self._KEY.fullmatch(key)
        if match is None:
            return key
        prefix, number, rank = match.groups()
        return f"{prefix}/{self._numbers.setdefault(number, len(self._numbers))}/{rank}"

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._renumber(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._renumber(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = (timeout or self._timeout).total_seconds()
        wait_for(self._store, [self._renumber(key) for key in keys], seconds, self._check)
