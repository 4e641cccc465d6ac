"""State dicts that say how parameters are sharded, so that a checkpoint loads at another number of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from streamoverlap.layers import ParallelLinear


def sharded_state_dict(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """The state of a module, and of its optimizer, for `torch.distributed.checkpoint`.

    What tensor-parallel layers share out is in it as a `DTensor` over the layer's group. All tensors are those of the
    module and the optimizer themselves, not copies, so that loading in place is all there is to loading:

    >>> torch.distributed.checkpoint.save(so.sharded_state_dict(model, optimizer), checkpoint_id=path)
    >>> torch.distributed.checkpoint.load(so.sharded_state_dict(model, optimizer), checkpoint_id=path)

    Args:
        module: any module; of layers that are not tensor-parallel every rank has the same state.
        optimizer: of parameters of `module`. One that has not stepped yet is given its state first, by a step that
            changes no parameter; so call this before gradients are there.

    Returns:
        ``{"model": ..., "optimizer": ...}``; the optimizer's state by the names of parameters.
    """
    dims = {name: (layer, dim) for name, layer, dim in _sharded(module)}
    meshes: dict[str, DeviceMesh] = {}

    def wrap(name: str, tensor: Tensor) -> Tensor:
        if name not in dims:
            return tensor
        layer, dim = dims[name]
        key = layer.place.group_name
        if key not in meshes:
            meshes[key] = DeviceMesh.from_group(layer.group, tensor.device.type)
        return DTensor.from_local(tensor, meshes[key], [Shard(dim)], run_check=False)

    state: dict[str, Any] = {"model": {name: wrap(name, value.detach()) for name, value in module.state_dict().items()}}
    if optimizer is not None:
        names = {parameter: name for name, parameter in module.named_parameters()}
        _give_state(optimizer)
        state["optimizer"] = {
            names[parameter]: {
                key: wrap(names[parameter], value)
                if isinstance(value, Tensor) and value.shape == parameter.shape
                else value
                for key, value in entries.items()
            }
            for parameter, entries in optimizer.state.items()
        }
    return state


def _sharded(module: nn.Module) -> list[tuple[str, ParallelLinear, int]]:
    found = []
    for prefix, layer in module.named_modules():
        if isinstance(layer, ParallelLinear):
            for name, dim in layer.shard_dims().items():
                found.append((f"{prefix}.{name}" if prefix else name, layer, dim))
    return found


def _give_state(optimizer: torch.optim.Optimizer) -> None:
    """As after a step; one with a learning rate of 0 and no gradients changes nothing else."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(parameter.grad is not None for parameter in parameters):
        raise RuntimeError("optimizer has no state yet but gradients are there; expected the call before the backward")
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
