"""Which group, device, GPU and host: what users name and what ranks compare."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
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


def group_of(name: str) -> dist.ProcessGroup:
    """The process group of that `group_name`."""
    return dist.distributed_c10d._resolve_process_group(name)


def type_of(device: str | torch.device) -> str:
    try:
        if not isinstance(device, str | torch.device):
            raise TypeError(f"device is a {type(device).__name__}; expected 'cpu', 'cuda' or a torch.device")
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(f"device is {device!r}; expected 'cpu', 'cuda' or a torch.device") from None
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device is {kind}; expected cpu or cuda")
    return kind


def device_of(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("device is cuda but torch finds no GPU; expected one, or tensors on the CPU")
    return torch.device("cuda", torch.cuda.current_device())


def gpu_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def host_id() -> str:
    """Equal for processes that run under one kernel, so may share memory."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
