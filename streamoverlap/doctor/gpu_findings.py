"""What is found of GPUs, in words: of `gpus.Facts` and `gpus.Speeds`."""

from __future__ import annotations

import os
from collections import Counter

from streamoverlap.doctor import built
from streamoverlap.doctor.findings import Finding
from streamoverlap.doctor.gpus import Facts, Gpu, Speeds

_AREA = "GPUs"
_UNEVEN = 1.5  # times; ranks wait for the slowest of them
_SERIAL = "groups on it run serial"


def of_facts(facts: Facts) -> list[Finding]:
    if not facts.gpus:
        return [_none(facts)]
    found = [_driver(facts), _gpus(facts), _visible(facts)]
    found += _cuda_part(facts)
    found.append(_capable("stream memory operations", "flags in host memory", [(g, g.no_flags) for g in facts.gpus]))
    found.append(_capable("IPC", "memory shared between processes", [(g, g.no_sharing) for g in facts.gpus]))
    return found + ([_peer_access(facts)] if facts.pairs else [])


def of_speeds(facts: Facts, speeds: Speeds) -> list[Finding]:
    return [_gemms(facts, speeds), *([_links(facts, speeds)] if facts.pairs else [])]


def _none(facts: Facts) -> Finding:
    """No GPU is as it should be, unless there is one that torch cannot use."""
    usable = facts.all_gpus or (facts.driver_present and "NO_DEVICE" not in facts.why_none)
    if not usable:
        return Finding(_AREA, "GPUs", "info", f"none: {facts.why_none}")
    seen = f"torch finds none of {facts.all_gpus}" if facts.all_gpus else "torch finds none"
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        hides = f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}"
        return Finding(_AREA, "GPUs", "warning", f"{seen}: {facts.why_none} ({hides})", "set it to those to be used")
    advice = "let a CUDA build of torch and the driver fit each other: nvidia-smi shows what the driver is for"
    return Finding(_AREA, "GPUs", "warning", f"{seen}: {facts.why_none}", advice)


def _driver(facts: Facts) -> Finding:
    name = f"{facts.driver_version or 'of unknown version'}"
    newest = ".".join(map(str, facts.driver_cuda)) if facts.driver_cuda else "unknown"
    values = {"version": facts.driver_version, "cuda": newest, "torch_cuda": facts.torch_cuda}
    found = f"{name}, for CUDA {newest} and older; torch is built for {facts.torch_cuda}"
    if facts.driver_cuda and facts.driver_cuda < (12, 0):
        return Finding(_AREA, "driver", "warning", found, "install a driver for CUDA 12 or newer", values)
    return Finding(_AREA, "driver", "ok", found, values=values)


def _gpus(facts: Facts) -> Finding:
    kinds = Counter((gpu.name, gpu.capability, gpu.memory_bytes) for gpu in facts.gpus)
    found = ", ".join(
        f"{count} x {name} ({memory / 1e9:.0f} GB, compute capability {major}.{minor})"
        for (name, (major, minor), memory), count in kinds.items()
    )
    values = {"gpus": [{"index": g.index, "name": g.name, "memory_bytes": g.memory_bytes} for g in facts.gpus]}
    cpus = len(os.sched_getaffinity(0))
    if cpus < len(facts.gpus):
        advice = f"give the job a CPU for each rank: a process has {cpus} here"
        return Finding(_AREA, "GPUs", "warning", found, advice, values)
    return Finding(_AREA, "GPUs", "ok", found, values=values)


def _visible(facts: Facts) -> Finding:
    name = "CUDA_VISIBLE_DEVICES"
    value, count = os.environ.get(name), len(facts.gpus)
    if value is None or not facts.all_gpus or facts.all_gpus == count:
        return Finding(_AREA, name, "ok", "not set" if value is None else f"{value}: all are seen")
    found = f"{value}: {count} of {facts.all_gpus} GPUs are seen"
    if count == 1:
        advice = "let every rank see the GPUs of all ranks of its group, and choose with torch.cuda.set_device"
        return Finding(_AREA, name, "warning", f"{found}; ranks that do not see each other's run serial", advice)
    return Finding(_AREA, name, "info", found)


def _cuda_part(facts: Facts) -> list[Finding]:
    """Of the package: not built although there are GPUs, or not for these."""
    name = "CUDA part"
    if not built.has_cuda_part():
        found = f"not built ({built.why_no_cuda_part()}), so {_SERIAL}"
        return [Finding(_AREA, name, "warning", found, built.how_to_get_cuda_part())]
    compiled = built.architectures()
    old = [gpu for gpu in facts.gpus if compiled and gpu.capability < min(compiled)]
    if old:
        needed = ".".join(map(str, old[0].capability))
        found = f"its kernels are for compute capability {min(compiled)[0]}.{min(compiled)[1]} and newer"
        advice = f"set TORCH_CUDA_ARCH_LIST={needed}+PTX and {built.AGAIN}"
        return [Finding(_AREA, name, "failure", f"{found}; GPU {old[0].index} has {needed}", advice)]
    return []


def _capable(name: str, what: str, reasons: list[tuple[Gpu, str]]) -> Finding:
    lacking = [(gpu, reason) for gpu, reason in reasons if reason]
    values = {"lacking": {str(gpu.index): reason for gpu, reason in lacking}}
    if not lacking:
        return Finding(_AREA, name, "ok", f"{what}: all {len(reasons)} can", values=values)
    gpu, reason = lacking[0]
    others = f", and so {len(lacking) - 1} more" if len(lacking) > 1 else ""
    advice = "update the driver; in a container or a virtual machine, ask for whole GPUs"
    return Finding(_AREA, name, "warning", f"{what}: GPU {gpu.index}: {reason}{others}; {_SERIAL}", advice, values)


def _peer_access(facts: Facts) -> Finding:
    lacking = [f"{pair.first}-{pair.second}" for pair in facts.pairs if not pair.peer_access]
    if not lacking:
        return Finding(_AREA, "peer access", "ok", f"between all {len(facts.gpus)} GPUs, both ways")
    found = f"none between GPUs {', '.join(lacking)}; groups of them run serial"
    advice = "peer access needs NVLink, or PCIe without ACS and IOMMU between the GPUs; consumer cards have none"
    return Finding(_AREA, "peer access", "warning", found, advice, {"lacking": lacking})


def _gemms(facts: Facts, speeds: Speeds) -> Finding:
    errors = [f"GPU {i}: {rate}" for i, rate in enumerate(speeds.gemms) if isinstance(rate, str)]
    if errors:
        return Finding(_AREA, "GEMM", "failure", "; ".join(errors), "free the GPU's memory; see whether torch.mm works")
    values = {"flops_per_second": speeds.gemms}
    found = f"{_span([rate / 1e12 for rate in speeds.gemms])} TFLOP/s, 8192 x 8192 x 8192 in bfloat16"
    return _even(Finding(_AREA, "GEMM", "ok", found, values=values), speeds.gemms, "GPU")


def _links(facts: Facts, speeds: Speeds) -> Finding:
    rows = []
    for pair, speed in zip(facts.pairs, speeds.links, strict=True):
        measured = (speed, None, None) if isinstance(speed, str) else ("", *speed)
        names = ("error", "bytes_per_second", "latency_seconds")
        ends = {"first": pair.first, "second": pair.second, "link": pair.link, "peer_access": pair.peer_access}
        rows.append({**ends, **dict(zip(names, measured, strict=True))})
    values = {"links": rows}
    errors = [f"GPUs {row['first']}-{row['second']}: {row['error']}" for row in rows if row["error"]]
    if errors:
        return Finding(_AREA, "links", "failure", "; ".join(errors), "see whether torch copies between them", values)
    rates, latencies = ([row[name] for row in rows] for name in ("bytes_per_second", "latency_seconds"))
    kinds = ", ".join(dict.fromkeys(row["link"] for row in rows))
    found = f"{kinds}: {_span([r / 1e9 for r in rates])} GB/s each way, {_span([s * 1e6 for s in latencies], 1)} us"
    return _even(Finding(_AREA, "links", "ok", found, values=values), rates, "pair of GPUs")


def _even(finding: Finding, rates: list[float], what: str) -> Finding:
    """A warning instead, where one is much slower than another."""
    if max(rates) <= _UNEVEN * min(rates):
        return finding
    found = f"{finding.found}: the slowest {what} is {max(rates) / min(rates):.1f} times slower than the fastest"
    advice = "every rank waits for the slowest: see nvidia-smi for other users, clocks and links"
    return Finding(finding.area, finding.name, "warning", found, advice, finding.values)


def _span(numbers: list[float], digits: int = 0) -> str:
    low, high = (f"{number:,.{digits}f}" for number in (min(numbers), max(numbers)))
    return low if low == high else f"{low} to {high}"
