"""Tensor-parallel linear layers that hide their exchanges behind their products, forward and backward."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from streamoverlap.linear import Place, column_linear, gather_features, own_features, row_linear
from streamoverlap.places import group_of, resolve_group
from streamoverlap.precision import expect_weight
from streamoverlap.spec import PlanSpec

_OF_THE_LINEAR = ("in_features", "out_features", "bias", "device", "dtype")


class ParallelLinear(nn.Module):
    """What the two layers share. `shard_dim`: the dimension of the weight that ranks share out among them."""

    shard_dim: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        group: dist.ProcessGroup | None,
        sequence_parallel: bool,
        gradient_accumulation_fusion: bool,
        precision: str | None,
        plan: PlanSpec | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        group = resolve_group(group)
        self.rank, self.world = group.rank(), group.size()
        self.in_features, self.out_features = _size("in_features", in_features), _size("out_features", out_features)
        self.sequence_parallel = sequence_parallel
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        self.place = Place.of(group, plan, precision)
        shape = [out_features, in_features]
        name = ("out_features", "in_features")[self.shard_dim]
        if shape[self.shard_dim] % self.world:
            raise ValueError(
                f"{name} is {shape[self.shard_dim]}; expected a multiple of the group's {self.world} ranks"
            )
        shape[self.shard_dim] //= self.world
        dtype = torch.get_default_dtype() if dtype is None else dtype
        expect_weight(self.precision, dtype, self.world, name, in_features=in_features, out_features=out_features)
        self.weight = Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        self.mark_parameters()
        self.register_load_state_dict_post_hook(_mark_again)
        self.reset_parameters()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group whose ranks share the layer."""
        return group_of(self.place.group_name)

    @property
    def precision(self) -> str | None:
        """None, or ``"fp8"``."""
        return self.place.precision or None

    def shard_dims(self) -> dict[str, int]:
        """By the name of each parameter that ranks share out, the dimension along which they do."""
        return {"weight": self.shard_dim}

    def mark_parameters(self) -> None:
        """Says on the parameters how they are sharded, by the attributes that Megatron's optimizers read."""
        for name, dim in self.shard_dims().items():
            parameter = getattr(self, name)
            parameter.tensor_model_parallel = True
            parameter.partition_dim = dim
            parameter.partition_stride = 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also of a deep copy, whose parameters are new objects."""
        super().__setstate__(state)
        self.mark_parameters()

    def _apply(self, fn: Any, recurse: bool = True) -> ParallelLinear:
        """Moved to another device, as from meta, parameters are new objects."""
        super()._apply(fn, recurse)
        self.mark_parameters()
        return self

    def reset_parameters(self) -> None:
        """Draws the weights anew, as `torch.nn.Linear` does.

        Every rank draws the whole matrix and keeps its slice, so that ranks with the same seed hold the slices of one
        matrix, that which one process with this seed has, and go on with the same random state.
        """
        if self.weight.is_meta:
            return
        bound = 1 / math.sqrt(self.in_features)
        whole = torch.empty(self.out_features, self.in_features, device=self.weight.device, dtype=self.weight.dtype)
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
        with torch.no_grad():
            self.weight.copy_(self._slice(whole, self.shard_dim))
            del whole
            if self.bias is None:
                return
            bias = torch.empty(self.out_features, device=self.bias.device, dtype=self.bias.dtype).uniform_(
                -bound, bound
            )
            self.bias.copy_(self._bias_slice(bias))

    @classmethod
    def from_linear(cls, linear: nn.Linear, group: dist.ProcessGroup | None = None, **options: Any):
        """A layer with this rank's part of the weights of `linear`, which every rank has whole.

        Args:
            linear: any `torch.nn.Linear`; its weights are copied.
            group: as of the class.
            **options: further arguments of the class, but sizes, bias, device and dtype, which are those of `linear`.

        Raises:
            TypeError, ValueError: an argument is not as described; the message names it.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear is a {type(linear).__name__}; expected a torch.nn.Linear")
        for name in _OF_THE_LINEAR:
            if name in options:
                raise TypeError(f"{name} is {options[name]!r}; expected to be left out, as that of linear is taken")
        made = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            group=group,
            device="meta",
            dtype=linear.weight.dtype,
            **options,
        )
        made = made.to_empty(device=linear.weight.device)
        made.load_whole(linear.weight, linear.bias)
        for name, parameter in linear.named_parameters():
            getattr(made, name).requires_grad_(parameter.requires_grad)
        return made.train(linear.training)

    @torch.no_grad()
    def load_whole(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Takes this rank's slices of a whole ``[out_features, in_features]`` weight and ``[out_features]`` bias."""
        expected = (self.out_features, self.in_features)
        if tuple(weight.shape) != expected:
            raise ValueError(f"weight has shape {tuple(weight.shape)}; expected {expected}")
        if (bias is None) != (self.bias is None) or (bias is not None and tuple(bias.shape) != expected[:1]):
            was = "None" if bias is None else f"of shape {tuple(bias.shape)}"
            raise ValueError(f"bias is {was}; expected {'None' if self.bias is None else f'shape {expected[:1]}'}")
        self.weight.copy_(self._slice(weight, self.shard_dim))
        if bias is not None:
            self.bias.copy_(self._bias_slice(bias))

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank {self.rank} of {self.world}, sequence_parallel={self.sequence_parallel}"
            + ("" if self.precision is None else f", precision={self.precision!r}")
        )

    def _slice(self, whole: Tensor, dim: int) -> Tensor:
        return whole.chunk(self.world, dim)[self.rank]

    def _bias_slice(self, bias: Tensor) -> Tensor:
        raise NotImplementedError

    def _expect_features(self, x: Tensor, expected: int) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"x is a {type(x).__name__}; expected a torch.Tensor")
        if x.dim() not in (2, 3) or x.shape[-1] != expected:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected [rows, {expected}] or [s, b, {expected}]")


class ColumnParallelLinear(ParallelLinear):
    """A linear layer whose output features are shared out among the ranks: ``y = gather(x) @ weight.T + bias``.

    Args:
        in_features: of x.
        out_features: of all ranks together, a multiple of the group's size W.
        bias: add one.
        group: any process group that has this rank; None is the default group.
        sequence_parallel: x is this rank's shard of the tokens, and gathered; the exchange hides behind the product,
            that of the backward pass behind the products there. Without it x is the same on all ranks, and only the
            backward pass exchanges: the gradient of x is summed over ranks.
        gather_output: return the output features of all ranks, on all ranks. Not with `sequence_parallel`.
        save_gathered: keep the gathered x for the backward pass, which then need not gather it again: W times the
            memory for x. With ``precision="fp8"`` the forward pass gathers it besides its float8.
        gradient_accumulation_fusion: add the weight's gradient to ``weight.main_grad`` (float32 or the dtype of x),
            which must be there in the backward pass, with Megatron's ``grad_added_to_main_grad`` and
            ``zero_out_wgrad``. Breaks the graph under ``torch.compile``.
        precision: None multiplies x and the weight as they are. ``"fp8"``: the forward pass and x's gradient multiply
            float8_e4m3fn, made of x, the weight and the gradient in each pass with a scale a row, and float8 is what
            they gather; the weight's gradient is taken of the tensors themselves. Parameters, x, y and all gradients
            keep their dtype: float32, bfloat16 or float16; others are refused. Both sizes of a rank's weight must be
            multiples of 16. On CUDA it needs a Hopper GPU.
        plan: how to exchange, forward and backward; None takes the default. One that sums in a ring and stores, which
            no GEMM-reduce-scatter can, is refused.
        device, dtype: of the parameters; ``device="meta"`` allocates and draws nothing.

    Shapes:
        x ``[rows, in_features]`` or ``[s, b, in_features]`` gives ``[W * rows, out_features / W]`` or
        ``[W * s, b, out_features / W]`` (rows and s not multiplied without `sequence_parallel`, features not divided
        with `gather_output`). ``weight`` is ``[out_features / W, in_features]``, ``bias`` ``[out_features / W]``: as
        Megatron shards them.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
    """

    shard_dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = True,
        gather_output: bool = False,
        save_gathered: bool = False,
        gradient_accumulation_fusion: bool = False,
        precision: str | None = None,
        plan: PlanSpec | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if gather_output and sequence_parallel:
            raise ValueError("gather_output and sequence_parallel are both set; expected at most one of them")
        super().__init__(
            in_features,
            out_features,
            bias,
            group,
            sequence_parallel,
            gradient_accumulation_fusion,
            precision,
            plan,
            device,
            dtype,
        )
        self.gather_output = gather_output
        self.save_gathered = save_gathered

    def shard_dims(self) -> dict[str, int]:
        return {"weight": 0} if self.bias is None else {"weight": 0, "bias": 0}

    def forward(self, x: Tensor) -> Tensor:
        self._expect_features(x, self.in_features)
        y = column_linear(
            self.place,
            x,
            self.weight,
            self.bias,
            sequence_parallel=self.sequence_parallel,
            save_gathered=self.save_gathered,
            accumulate=self.gradient_accumulation_fusion,
        )
        return gather_features(self.place, y) if self.gather_output else y

    def _bias_slice(self, bias: Tensor) -> Tensor:
        return self._slice(bias, 0)


class RowParallelLinear(ParallelLinear):
    """A linear layer whose input features are shared out: ``y = reduce_scatter(x @ weight.T) + bias``.

    Args:
        in_features: of all ranks together, a multiple of the group's size W.
        out_features: of y.
        bias: add one, once. Every rank holds the whole of it. With `sequence_parallel` its gradient on a rank is only
            the part of that rank's tokens: it has the attribute ``sequence_parallel``, and
            `streamoverlap.sync_sequence_parallel_grads` sums it.
        sequence_parallel: y is this rank's shard of the tokens. Without it every rank gets the whole y (the sums are
            gathered, in the same plan), for any number of rows.
        input_is_parallel: x has this rank's features already. Otherwise x has the features of all, the same on all
            ranks, and the layer takes its part. Not with `sequence_parallel`.
        precision: as of `ColumnParallelLinear`; partial products travel, and are summed, in the dtype of x.
        group, gradient_accumulation_fusion, plan, device, dtype: as of `ColumnParallelLinear`.

    Shapes:
        x ``[M, in_features / W]`` or ``[s, b, in_features / W]`` gives ``[M / W, out_features]`` or
        ``[s / W, b, out_features]`` (M and s not divided without `sequence_parallel`). ``weight`` is
        ``[out_features, in_features / W]``, ``bias`` ``[out_features]``.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
    """

    shard_dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = True,
        input_is_parallel: bool = True,
        gradient_accumulation_fusion: bool = False,
        precision: str | None = None,
        plan: PlanSpec | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if sequence_parallel and not input_is_parallel:
            raise ValueError("input_is_parallel is False with sequence_parallel; expected at most one of these")
        super().__init__(
            in_features,
            out_features,
            bias,
            group,
            sequence_parallel,
            gradient_accumulation_fusion,
            precision,
            plan,
            device,
            dtype,
        )
        self.input_is_parallel = input_is_parallel

    def mark_parameters(self) -> None:
        super().mark_parameters()
        if self.bias is not None:
            self.bias.sequence_parallel = self.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        if self.input_is_parallel:
            self._expect_features(x, self.in_features // self.world)
        else:
            self._expect_features(x, self.in_features)
            x = own_features(self.place, x)
        return row_linear(
            self.place,
            x,
            self.weight,
            self.bias,
            sequence_parallel=self.sequence_parallel,
            accumulate=self.gradient_accumulation_fusion,
        )

    def _bias_slice(self, bias: Tensor) -> Tensor:
        return bias


def _mark_again(module: ParallelLinear, _: object) -> None:
    """`load_state_dict(..., assign=True)` makes parameters of what it loads."""
    module.mark_parameters()


def parallel_groups(module: nn.Module) -> list[dist.ProcessGroup]:
    """Of the tensor-parallel layers in `module`, each once."""
    layers = [layer for layer in module.modules() if isinstance(layer, ParallelLinear)]
    return [group_of(name) for name in dict.fromkeys(layer.place.group_name for layer in layers)]


def _size(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected a positive integer")
    return value
