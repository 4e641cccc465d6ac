"""Looks at GPUs and measures them; both run in a process of their own, since a broken driver hangs or ends it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from streamoverlap.doctor.driver import Driver, Nvml
from streamoverlap.doctor.findings import one_line

_GEMM_REPEATS = 10
_LINK_BYTES = 1 << 26


@dataclass(frozen=True)
class Gpu:
    """A GPU by torch's number. `no_flags`, `no_sharing`: why it cannot, empty where it can."""

    index: int
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    no_flags: str  # set and awaited by streams, in shared memory of the host
    no_sharing: str  # of its memory with other processes


@dataclass(frozen=True)
class Pair:
    """Two GPUs: what connects them, and whether each reaches the other's memory."""

    first: int
    second: int
    link: str
    peer_access: bool


@dataclass(frozen=True)
class Facts:
    """What there is. None and empty texts: not known, or not there."""

    torch_cuda: str | None  # the CUDA that torch is built for
    driver_cuda: tuple[int, int] | None  # the newest CUDA that the driver is for
    driver_version: str
    why_none: str  # where torch finds no GPU
    driver_present: bool
    all_gpus: int | None  # of the machine, hidden ones too
    gpus: list[Gpu] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)


@dataclass(frozen=True)
class Speeds:
    """FLOP/s by GPU, bytes/s each way and seconds by pair; an error's text where it could not be measured."""

    gemms: list[float | str]
    links: list[tuple[float, float] | str]


def look() -> Facts:
    import torch

    driver, no_driver = _try(Driver)
    nvml, _ = _try(Nvml)
    count = torch.cuda.device_count()
    facts = {
        "torch_cuda": torch.version.cuda,
        "driver_cuda": driver.version() if driver else None,
        "driver_version": _try(nvml.driver_version)[0] or "" if nvml else "",
        "why_none": "" if count else _why_no_gpu(no_driver),
        "driver_present": driver is not None or not no_driver.startswith("OSError"),
        "all_gpus": _try(nvml.count)[0] if nvml else None,
    }
    if driver is None:
        return Facts(**facts)
    gpus = [_look_at(i, driver) for i in range(count)]
    pairs = [_pair(first, second, nvml) for first, second in itertools.combinations(range(count), 2)]
    return Facts(**facts, gpus=gpus, pairs=pairs)


def measure(pairs: list[tuple[int, int]]) -> Speeds:
    """A bfloat16 GEMM on every GPU, and copies both ways at once between the two of every pair."""
    import torch

    from streamoverlap.calibrate import GEMM_SIZE, gemm_seconds, measure_link

    def rate(gpu: int) -> float:
        with torch.cuda.device(gpu):
            return 2 * GEMM_SIZE**3 / gemm_seconds(repeats=_GEMM_REPEATS)

    def link(first: int, second: int) -> tuple[float, float]:
        latency, ((_, bandwidth),) = measure_link(first, second, [_LINK_BYTES])
        return bandwidth, latency

    gemms = [_value_or_error(rate, gpu) for gpu in range(torch.cuda.device_count())]
    return Speeds(gemms, [_value_or_error(link, *pair) for pair in pairs])


def _look_at(index: int, driver: Driver) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)

    def flags() -> str:
        if not driver.registers_host_memory(index):
            return "it cannot register host memory"
        with torch.cuda.device(index):
            torch.cuda.synchronize()  # makes its context, which the driver's calls need
            return driver.try_memory_operations(torch.cuda.Stream().cuda_stream) or ""

    def sharing() -> str:
        return "" if driver.shares_memory(index) else "its memory cannot be handed to other processes"

    capability = (properties.major, properties.minor)
    no_flags, no_sharing = _value_or_error(flags), _value_or_error(sharing)
    return Gpu(index, properties.name, properties.total_memory, capability, no_flags, no_sharing)


def _pair(first: int, second: int, nvml: Nvml | None) -> Pair:
    import torch

    uuids = [str(torch.cuda.get_device_properties(gpu).uuid) for gpu in (first, second)]
    link = _try(nvml.link, *uuids)[0] if nvml else None
    access = all(torch.cuda.can_device_access_peer(*way) for way in ((first, second), (second, first)))
    return Pair(first, second, link or "unknown", access)


def _why_no_gpu(no_driver: str) -> str:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build"
    if no_driver.startswith("OSError"):
        return "there is no NVIDIA driver (no libcuda.so.1)"
    if no_driver:
        return f"the NVIDIA driver does not start ({no_driver})"
    return _try(torch.cuda.init)[1] or "torch finds no GPU, and gives no reason"


def _try(function: Callable, *args: Any) -> tuple[Any, str]:
    """The result and an empty text, or None and the error."""
    try:
        return function(*args), ""
    except Exception as error:
        return None, one_line(error)


def _value_or_error(function: Callable, *args: Any) -> Any:
    value, error = _try(function, *args)
    return error if value is None else value
