"""PyTorch's own tensor parallelism: styles for `torch.distributed.tensor.parallel.parallelize_module`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from streamoverlap import linear
from streamoverlap.linear import Place
from streamoverlap.precision import expect_weight, name_of
from streamoverlap.spec import SUMS_OF_PRODUCTS, PlanSpec, validate_plan


class _Style(ParallelStyle):
    """Turns an `nn.Linear` into a tensor-parallel one in place: its parameters become DTensors, its forward ours."""

    shard_dim: int

    def __init__(
        self,
        input_layouts: Placement,
        output_layouts: Placement,
        use_local_output: bool,
        precision: str | None,
        plan: PlanSpec | None,
    ) -> None:
        super().__init__()
        self.input_layouts = input_layouts
        self.output_layouts = output_layouts
        self.use_local_output = use_local_output
        name_of(precision)  # refuses another one
        if plan is not None:
            validate_plan(plan, *SUMS_OF_PRODUCTS)
        self.precision = precision
        self.plan = plan

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise TypeError(f"module is a {type(module).__name__}; expected a torch.nn.Linear for {self!r}")
        if device_mesh.ndim != 1:
            raise ValueError(f"device_mesh has {device_mesh.ndim} dimensions; expected 1, the tensor-parallel one")
        name = ("out_features", "in_features")[self.shard_dim]
        if getattr(module, name) % device_mesh.size():
            raise ValueError(
                f"{name} is {getattr(module, name)}; expected a multiple of the mesh's {device_mesh.size()} ranks"
            )
        sizes = {"in_features": module.in_features, "out_features": module.out_features}
        dtype = module.weight.dtype
        expect_weight(self.precision, dtype, device_mesh.size(), name, dtype_is="weight has dtype", **sizes)
        for parameter, placement in (("weight", Shard(self.shard_dim)), ("bias", self._bias_placement())):
            old = getattr(module, parameter)
            if old is not None:
                new = nn.Parameter(distribute_tensor(old, device_mesh, [placement]), requires_grad=old.requires_grad)
                module.register_parameter(parameter, new)
        place = Place.of(device_mesh.get_group(), self.plan, self.precision)
        module.forward = partial(self._forward, module, device_mesh, place)
        return module

    def _forward(self, module: nn.Linear, mesh: DeviceMesh, place: Place, x: Tensor) -> Tensor:
        if isinstance(x, DTensor):
            x = x.redistribute(mesh, [self.input_layouts]).to_local()
        bias = None if module.bias is None else module.bias.to_local()
        y = self._linear(place, x, module.weight.to_local(), bias)
        return y if self.use_local_output else DTensor.from_local(y, mesh, [self.output_layouts], run_check=False)

    def _bias_placement(self) -> Placement:
        raise NotImplementedError

    def _linear(self, place: Place, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, output_layouts={self.output_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class ColwiseParallel(_Style):
    """As `torch.distributed.tensor.parallel.ColwiseParallel`, with the exchanges hidden behind the products.

    Args:
        input_layouts: ``Shard(0)`` or ``Shard(1)``: x is sharded along its tokens, and gathered by the layer itself
            (leave out the `PrepareModuleInput` or `SequenceParallel` output that would gather it); ``Replicate()``:
            x is the same on all ranks. Along dimension 1 of more than one sequence x and y are transposed.
        output_layouts: ``Shard(-1)``: each rank has its features.
        use_local_output: return a plain tensor, not a DTensor.
        precision, plan: as of `streamoverlap.ColumnParallelLinear`.

    Raises:
        TypeError, ValueError: the layouts, or the module, are not as described.
    """

    shard_dim = 0

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        precision: str | None = None,
        plan: PlanSpec | None = None,
    ) -> None:
        given = Replicate() if input_layouts is None else input_layouts
        produced = Shard(-1) if output_layouts is None else output_layouts
        _expect("input_layouts", given, _TOKENS)
        _expect("output_layouts", produced, (Shard(-1),))
        super().__init__(given, produced, use_local_output, precision, plan)

    def _bias_placement(self) -> Placement:
        return Shard(0)

    def _linear(self, place: Place, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        run = partial(linear.column_linear, place, sequence_parallel=self.input_layouts != Replicate())
        return _along(self.input_layouts, lambda x: run(x, weight, bias), x)


class RowwiseParallel(_Style):
    """As `torch.distributed.tensor.parallel.RowwiseParallel`, with the exchanges hidden behind the products.

    Args:
        input_layouts: ``Shard(-1)``: each rank has its features.
        output_layouts: ``Shard(0)`` or ``Shard(1)``: y is scattered along its tokens; ``Replicate()``: every rank gets
            the whole y.
        use_local_output, precision, plan: as of `ColwiseParallel`.

    Raises:
        TypeError, ValueError: the layouts, or the module, are not as described.
    """

    shard_dim = 1

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        precision: str | None = None,
        plan: PlanSpec | None = None,
    ) -> None:
        given = Shard(-1) if input_layouts is None else input_layouts
        produced = Replicate() if output_layouts is None else output_layouts
        _expect("input_layouts", given, (Shard(-1),))
        _expect("output_layouts", produced, _TOKENS)
        super().__init__(given, produced, use_local_output, precision, plan)

    def _bias_placement(self) -> Placement:
        return Replicate()

    def _linear(self, place: Place, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        scatters = self.output_layouts != Replicate()
        if bias is not None and scatters:
            bias = _SumGradient.apply(bias, place)
        run = partial(linear.row_linear, place, sequence_parallel=scatters)
        return _along(self.output_layouts, lambda x: run(x, weight, bias), x)


_TOKENS = (Shard(0), Shard(1), Replicate())


def _expect(argument: str, layout: object, allowed: tuple[Placement, ...]) -> None:
    if not isinstance(layout, Placement):
        raise TypeError(f"{argument} is a {type(layout).__name__}; expected one Placement")
    if layout not in allowed:
        raise ValueError(f"{argument} is {layout}; expected one of {', '.join(map(str, allowed))}")


def _along(layout: Placement, run, x: Tensor) -> Tensor:
    """Exchanges are along dimension 0."""
    if layout != Shard(1):
        return run(x)
    return run(x.transpose(0, 1).contiguous()).transpose(0, 1)


class _SumGradient(torch.autograd.Function):
    """Of what all ranks hold whole but use on their own tokens."""

    @staticmethod
    def forward(ctx, x: Tensor, place: Place) -> Tensor:
        ctx.place = place
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return torch.ops.streamoverlap.all_reduce(grad, ctx.place.group_name, ctx.place.plan), None
