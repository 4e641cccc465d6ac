"""How the benchmarks measure: ranks that begin together, variants in turn, medians of the slowest rank's means."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

WARM_UP = 3
MEASURE_SECONDS = 0.02  # of one variant in one round
MOST_REPEATS = 200
_TIMEOUT = timedelta(minutes=5)
# NVLink multicast can put a borrowed host's GPUs out of service, see streamoverlap/symmetric.py.
NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}


def has_a_gpu_a_rank(script: str) -> bool:
    """Of a rank that torchrun has started; says what is missing."""
    if "LOCAL_RANK" not in os.environ:
        print(f"{script} runs under torchrun: torchrun --nproc-per-node 2 benchmarks/{script}", file=sys.stderr)
        return False
    gpus, world = torch.cuda.device_count(), int(os.environ["WORLD_SIZE"])
    if gpus < world and os.environ["RANK"] == "0":
        print(f"{script} needs a GPU for each of {world} ranks; torch finds {gpus}", file=sys.stderr)
    return gpus >= world


def join() -> torch.device:
    """Makes the default group, from the environment, on GPUs if there are any, and returns this rank's device.

    With fewer GPUs than ranks several ranks share one, and the group has no NCCL, which refuses that.
    """
    gpus, world = torch.cuda.device_count(), int(os.environ["WORLD_SIZE"])
    if gpus == 0:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
        return torch.device("cpu")
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if world <= gpus else "gloo", timeout=_TIMEOUT)
    return device


def has_nccl() -> bool:
    return "nccl" in dist.get_backend_config()


def align(device: torch.device) -> None:
    """Ranks go on from here within microseconds of each other, where NCCL aligns them, and with idle GPUs."""
    synchronize(device)
    dist.all_reduce(torch.zeros(1, device=device if has_nccl() else "cpu"))
    synchronize(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def slowest(seconds: float) -> float:
    """The largest of all ranks."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def time_of(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of one call on the slowest rank."""
    align(device)
    if device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        return slowest((time.perf_counter() - begin) / repeats)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return slowest(start.elapsed_time(end) / 1e3 / repeats)


def measure(variants: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """By variant, the median over rounds of `time_of`; all variants in turn, so that clocks are the same for all."""
    repeats = {}
    for name, call in variants.items():
        for _ in range(WARM_UP):
            call()
        repeats[name] = min(max(1, round(MEASURE_SECONDS / time_of(call, 3, device))), MOST_REPEATS)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, call in variants.items():
            times[name].append(time_of(call, repeats[name], device))
    return {name: statistics.median(values) for name, values in times.items()}


def issue_seconds(call: Callable[[], object], device: torch.device, samples: int = 300) -> float:
    """Median CPU seconds of one call from Python, on an idle GPU, the slowest rank's."""
    seconds = []
    for i in range(samples + WARM_UP):
        align(device)
        begin = time.perf_counter()
        call()
        if i >= WARM_UP:
            seconds.append(time.perf_counter() - begin)
    synchronize(device)
    return slowest(statistics.median(seconds))
