"""Measures the constants of `streamoverlap.simulate` on the GPUs of this machine, from one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch

from streamoverlap.simulate import Costs

GEMM_SIZE = 8192  # rows, columns and depth: many waves, so that the rate is that of full ones
_LOCAL_BYTES = 1 << 30
_LINK_SIZES = [1 << power for power in range(16, 29, 2)]  # 64 KiB to 256 MiB
_SMALL = 4096  # bytes that take no time, so that what is left is latency
_ROUNDS = 5
_CYCLES = 40_000_000  # of the GPU: some 20 ms, in which the CPU issues a thousand copies


def calibrate(base: Costs) -> tuple[Costs, list[str]]:
    """`base` with what can be measured here in its place, and by constant what was kept and why.

    Needs a GPU; with two or more that reach each other's memory it measures the link between the first two. Seconds.

    Raises:
        RuntimeError: no GPU.
    """
    count = torch.cuda.device_count()
    if count == 0:
        raise RuntimeError("torch finds no GPU")
    name = torch.cuda.get_device_name(0)
    with torch.cuda.device(0):
        found = {**_gemm(base), **_local(base), "issue": {**base.issue, **_issue()}}
    kept = ["flags, record, wait, gemm_latency, tile_m, tile_n, reduce_bandwidth, serial_*: not measured here"]
    if count < 2:
        kept.append("link_bandwidth, put_latency: needs 2 GPUs, found 1")
    elif not torch.cuda.can_device_access_peer(0, 1):
        kept.append("link_bandwidth, put_latency: GPU 0 has no peer access to GPU 1")
    else:
        found.update(_link())
    sources = {**base.sources, **{constant: f"measured on {name} by --calibrate" for constant in found}}
    sources["issue"] = (
        "gemm, copy, put, quantise, reduce: measured by --calibrate in Python, an upper bound; others kept"
    )
    return replace(base, **found, device=f"{name}, torch {torch.__version__}", sources=sources), kept


def gemm_seconds(repeats: int = 30) -> float:
    """Seconds of a bfloat16 product of square matrices of `GEMM_SIZE` on the current GPU, several in a row."""
    a, b, c = _matrices()
    return _seconds(lambda: torch.mm(a, b.t(), out=c), repeats)


def _matrices() -> list[torch.Tensor]:
    return [torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(3)]


def _gemm(base: Costs) -> dict:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    alone = gemm_seconds()
    a, b, c = _matrices()
    writing = _seconds(lambda: torch.addmm(c, a, b.t(), beta=0.0, alpha=1e-3, out=c), repeats=30)
    accumulating = _seconds(lambda: torch.addmm(c, a, b.t(), beta=1.0, alpha=1e-3, out=c), repeats=30)
    # The rate at which the model gives the measured time.
    unit = replace(base, sms=sms, gemm_flops=1.0, gemm_latency=0.0).compiled()
    model = unit.gemm_seconds(GEMM_SIZE, GEMM_SIZE, GEMM_SIZE)
    return {
        "sms": sms,
        "gemm_flops": model / (alone - base.gemm_latency),
        "gemm_accumulate": max(1.0, accumulating / writing),
    }


def _local(base: Costs) -> dict:
    source, target = (torch.empty(_LOCAL_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    latency = _seconds(lambda: target[:_SMALL].copy_(source[:_SMALL]), repeats=100)
    seconds = _seconds(lambda: target.copy_(source), repeats=20)
    return {"copy_latency": latency, "copy_bandwidth": _LOCAL_BYTES / max(seconds - latency, 1e-9)}


def _link() -> dict:
    latency, table = measure_link()
    return {"put_latency": latency, "link_bandwidth": table}


def measure_link(
    first: int = 0, second: int = 1, sizes: Sequence[int] = _LINK_SIZES
) -> tuple[float, tuple[tuple[float, float], ...]]:
    """Copies between two GPUs, both directions at once, as in an exchange.

    Returns:
        Seconds of the smallest copy, and (bytes, bytes/s each way beyond that latency) for each of `sizes`.
    """
    gpus = (first, second)
    sources = [torch.empty(max(sizes), dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in gpus]
    targets = [torch.empty_like(sources[1 - i]) for i in range(2)]  # where rank i writes to
    streams = [torch.cuda.Stream(gpu) for gpu in gpus]

    def seconds(size: int) -> float:
        times = []
        for _ in range(_ROUNDS):
            for gpu in gpus:
                torch.cuda.synchronize(gpu)
            events = []
            repeats = max(4, min(100, (1 << 28) // size))
            for i in range(2):
                with torch.cuda.stream(streams[i]):
                    _hold_back()
                    events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
                    events[i][0].record()
            for _ in range(repeats):
                for i in range(2):
                    with torch.cuda.stream(streams[i]):
                        targets[i][:size].copy_(sources[i][:size], non_blocking=True)
            for i in range(2):
                with torch.cuda.stream(streams[i]):
                    events[i][1].record()
            for gpu in gpus:
                torch.cuda.synchronize(gpu)
            times.append(max(begin.elapsed_time(end) for begin, end in events) / 1e3 / repeats)
        return median(times)

    latency = seconds(_SMALL)
    return latency, tuple((float(size), size / max(seconds(size) - latency, 1e-9)) for size in sizes)


def _issue() -> dict[str, float]:
    a = torch.zeros(64, 64, dtype=torch.bfloat16, device="cuda")
    b, c = torch.zeros_like(a), torch.zeros_like(a)
    copy, kernel = _cpu_seconds(lambda: a.copy_(b)), _cpu_seconds(lambda: a.add_(b))
    return {
        "gemm": _cpu_seconds(lambda: torch.mm(a, b, out=c)),
        "put": copy,
        "copy": copy,
        "quantise": kernel,
        "reduce": kernel,
    }


def _hold_back() -> None:
    """The current stream, until the CPU has issued all that is timed: else short copies would show how fast it is."""
    torch.cuda._sleep(_CYCLES)


def _seconds(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _hold_back()
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / repeats)
    return median(times)


def _cpu_seconds(call: Callable[[], object], repeats: int = 200) -> float:
    call()
    times = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append((time.perf_counter() - begin) / repeats)
    torch.cuda.synchronize()
    return median(times)
