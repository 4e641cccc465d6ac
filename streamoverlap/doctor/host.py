"""What the machine gives a process, and what the environment asks for."""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import resource
from collections.abc import Callable
from pathlib import Path

from streamoverlap.doctor.findings import Finding, one_line

_MACHINE, _ENVIRONMENT = "machine", "environment"
_TRIED_BYTES = 16 << 20
_LITTLE_MEMORY = 1 << 30  # the slots leave 256 MiB to others, so little is left for them
_FEW_FILES = 256


def machine() -> list[Finding]:
    return [_guarded(_MACHINE, probe) for probe in (system, shared_memory, memory, open_files, cpus)]


def environment() -> list[Finding]:
    probes = (max_connections, launch_blocking, module_loading, openmp_threads)
    return [_guarded(_ENVIRONMENT, probe) for probe in probes]


def _guarded(area: str, probe: Callable[[], Finding]) -> Finding:
    try:
        return probe()
    except Exception as error:
        return Finding(area, probe.__name__.replace("_", " "), "warning", f"cannot be told: {one_line(error)}")


def system() -> Finding:
    found = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    if platform.system() != "Linux":
        return Finding(_MACHINE, "system", "failure", found, "use Linux: flags and slots are Linux' anonymous memory")
    return Finding(_MACHINE, "system", "ok", found)


def shared_memory() -> Finding:
    """As csrc/group/segment.cpp makes it."""
    size = f"{_TRIED_BYTES >> 20} MiB"
    try:
        descriptor = os.memfd_create("streamoverlap", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, _TRIED_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            mmap.mmap(descriptor, _TRIED_BYTES).close()
        finally:
            os.close(descriptor)
    except OSError as error:
        found = f"a memfd of {size} cannot be made: {error.strerror}"
        advice = "free memory, and let the container's seccomp profile allow memfd_create: it has all that ranks share"
        return Finding(_MACHINE, "shared memory", "failure", found, advice)
    return Finding(_MACHINE, "shared memory", "ok", f"a memfd of {size} was made, sealed and mapped (/dev/shm unused)")


def memory() -> Finding:
    left = min(_available(), _left_in_cgroup())
    state, advice = ("ok", "") if left >= _LITTLE_MEMORY else ("warning", "free some: slots leave 256 MiB to others")
    return Finding(_MACHINE, "memory", state, f"{left / 1e9:,.1f} GB left", advice, {"left_bytes": left})


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _left_in_cgroup() -> float:
    """Bytes; infinite where nothing limits them. A container sees its own group at the root of the mount."""
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no such file, or "max"
        return float("inf")
    return max(limit - used, 0)


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found, values = f"{soft} for a process (at most {hard})", {"soft": soft, "hard": hard}
    if soft < _FEW_FILES:
        advice = "ulimit -n 4096: groups of many ranks hand each other descriptors"
        return Finding(_MACHINE, "open files", "warning", found, advice, values)
    return Finding(_MACHINE, "open files", "ok", found, values=values)


def cpus() -> Finding:
    count = len(os.sched_getaffinity(0))
    found = f"{count} for this process; more CPU ranks than that work, and take turns"
    return Finding(_MACHINE, "CPUs", "ok", found, values={"count": count})


def max_connections() -> Finding:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = os.environ.get(name)
    if value is None:
        found = "not set; right with any value, as plans are proved free of deadlocks for one queue, too"
    elif value == "1":
        found = "1: a GPU's streams share one queue; plans are proved free of deadlocks for that, too"
    else:
        found = f"{value}: a GPU's streams are spread over so many queues; right with any value"
    return Finding(_ENVIRONMENT, name, "ok", found)


def launch_blocking() -> Finding:
    name = "CUDA_LAUNCH_BLOCKING"
    if os.environ.get(name, "0") == "0":
        return Finding(_ENVIRONMENT, name, "ok", "not set")
    found = f"{os.environ[name]}: every kernel is waited for, so nothing overlaps on GPUs"
    return Finding(_ENVIRONMENT, name, "warning", found, f"unset {name}, but for debugging")


def module_loading() -> Finding:
    name = "CUDA_MODULE_LOADING"
    found = f"{os.environ.get(name, 'not set')}; right with any value, as kernels are loaded before flags are awaited"
    return Finding(_ENVIRONMENT, name, "ok", found)


def openmp_threads() -> Finding:
    name, count = "OMP_NUM_THREADS", len(os.sched_getaffinity(0))
    if (value := os.environ.get(name)) is not None:
        return Finding(_ENVIRONMENT, name, "ok", f"{value} for each rank, on {count} CPUs")
    found = f"not set: torchrun sets 1 for each rank; without it every rank's GEMMs use all {count} CPUs"
    return Finding(_ENVIRONMENT, name, "info", found)
