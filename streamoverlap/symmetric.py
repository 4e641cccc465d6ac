"""Symmetric device memory, from torch. Its API is alpha, so it is touched here alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem


def allocate(size: int, group: dist.ProcessGroup, device: torch.device) -> tuple[object, list[int]]:
    """`size` bytes on every rank of `group` (collective): their owner, and where each rank's are in this process."""
    tensor = symm_mem.empty(size, dtype=torch.uint8, device=device)
    handle = symm_mem.rendezvous(tensor, group.group_name)
    offset = tensor.data_ptr() - handle.buffer_ptrs[group.rank()]
    return (tensor, handle), [pointer + offset for pointer in handle.buffer_ptrs]
