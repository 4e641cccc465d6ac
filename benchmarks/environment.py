"""On what something was measured."""

from __future__ import annotations

import os
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
from measure import NO_MULTICAST

import streamoverlap as so
from streamoverlap import _C
from streamoverlap.doctor.driver import Nvml
from streamoverlap.places import gpu_uuid


def environment(device: torch.device) -> dict:
    """Of all ranks; collective."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (name, gpu_uuid(device)))
    uuids = list(dict.fromkeys(uuid for _, uuid in ranks))
    found = {
        "device": name,
        "devices": [name for name, _ in ranks],
        "device_type": device.type,
        "gpus": len(uuids) if device.type == "cuda" else 0,
        "cores": len(os.sched_getaffinity(0)),
        "streamoverlap": so.__version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if device.type == "cuda":
        found |= {
            "cuda": torch.version.cuda,
            "cublaslt": _C.cublaslt_version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            **_of_driver(uuids),
            "variables": {name: os.environ.get(name) for name in NO_MULTICAST},
        }
    return found


def _of_driver(uuids: list[str]) -> dict[str, str | None]:
    try:
        nvml = Nvml()
        link = nvml.link(*uuids[:2]) if len(uuids) > 1 else None
        return {"driver": nvml.driver_version(), "link": link}
    except (OSError, RuntimeError) as error:  # a machine without NVML can measure, too
        return {"driver": None, "link": f"unknown: {error}"}


def _commit() -> str | None:
    """None outside a checkout; with what was not committed, it says so."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit} and changes" if changed.stdout.strip() else commit


def _cpu_name() -> str:
    match = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    return match[1].strip() if match else "CPU"
