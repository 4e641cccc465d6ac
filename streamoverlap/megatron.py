"""Megatron-Core's tensor-parallel linear layers, their exchanges hidden behind their products.

Needs megatron-core 0.16. The layers are subclasses of Megatron's own: parameters, initialisation, checkpoints and
arguments are inherited, the product and what it exchanges is replaced. The sum over ranks of the gradients of
sequence-parallel parameters stays with ``megatron.core.distributed.finalize_model_grads``.

>>> from streamoverlap.megatron import gpt_block_spec
>>> model = GPTModel(config, transformer_layer_spec=gpt_block_spec(config), ...)
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor, nn

try:
    import megatron.core
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.utils import get_tensor_model_parallel_group_if_none
except ImportError as error:
    raise ImportError(
        "streamoverlap.megatron needs megatron-core 0.16, which cannot be imported; "
        "expected after: pip install 'streamoverlap[megatron]'"
    ) from error

from streamoverlap.linear import Place, column_linear, gather_features, own_features, row_linear
from streamoverlap.precision import expect_weight, name_of
from streamoverlap.spec import PlanSpec

if not megatron.core.__version__.startswith("0.16."):
    raise ImportError(f"megatron-core is {megatron.core.__version__}; streamoverlap.megatron expected 0.16")

Spec = TypeVar("Spec", ModuleSpec, TransformerBlockSubmodules)

# Of the config: the only value with which these layers do what it says. TransformerConfig alone has some of the fields.
_ONLY = {
    "cpu_offloading": False,
    "cuda_graph_impl": "none",
    "defer_embedding_wgrad_compute": False,
    "delay_wgrad_compute": False,
    "fp4": None,
    "fp8": None,
}


class _Overlapped(nn.Module):
    """Before a class of Megatron's in the order of bases: refuses what it cannot do, and lets that class construct.

    Class attributes:
        sharded: the name of the size that ranks share out among them.
        plan: how to exchange; None takes the default. A subclass may set another, the same on all ranks.
        precision: as of `streamoverlap.ColumnParallelLinear`: None, or ``"fp8"`` in the subclasses of that name.
    """

    sharded: str
    plan: PlanSpec | None = None
    precision: str | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        config = given["config"]
        group = given["tp_group"] = get_tensor_model_parallel_group_if_none(given.get("tp_group"))
        self._refuse(given)
        # Megatron's constructor demands Apex's kernel for this, which is not used here.
        given["config"] = copy.copy(config)
        given["config"].gradient_accumulation_fusion = False
        super().__init__(**given)
        self.config = config
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        self.place = Place.of(group, self.plan, self.precision)

    def backward_dw(self) -> None:
        """Does nothing: the backward pass has computed the weight's gradient, since delaying it is refused."""

    def _refuse(self, given: dict[str, Any]) -> None:
        for name, only in _ONLY.items():
            if (value := getattr(given["config"], name, only)) != only:
                raise ValueError(f"config.{name} is {value!r}; expected {only!r} with {_name(self)}")
        if given.get("is_expert"):
            raise ValueError(
                "is_expert is True; expected False: what an expert exchanges is Megatron's token dispatcher's, so that "
                f"nothing is left to hide behind its product; use megatron.core's {type(self).__name__}"
            )
        if given.get("disable_grad_reduce"):
            raise ValueError(f"disable_grad_reduce is True; expected False with {_name(self)}")
        for name in ("embedding_activation_buffer", "grad_output_buffer"):
            if given.get(name) is not None:
                raise ValueError(f"{name} is a {type(given[name]).__name__}; expected None with {_name(self)}")
        if given["tp_group"] is None:
            raise ValueError(
                "tp_group is None; expected a process group, or a call of "
                "megatron.core.parallel_state.initialize_model_parallel() before"
            )
        size, world = given[self.sharded], given["tp_group"].size()
        if size % world:
            raise ValueError(f"{self.sharded} is {size}; expected a multiple of the {world} ranks of tp_group")
        name_of(self.precision)
        sizes = {name: given[name] for name in ("input_size", "output_size")}
        dtype = given["config"].params_dtype
        expect_weight(self.precision, dtype, world, self.sharded, dtype_is="config.params_dtype is", **sizes)

    def _expect_own_exchange(self) -> None:
        """Megatron sets the flag after construction, in shared experts that exchange outside of their layers."""
        if self.explicit_expert_comm:
            raise RuntimeError(
                f"config.moe_shared_expert_overlap is True; expected False with {_name(self)}, "
                "or megatron.core's own layers in the shared experts"
            )

    def _accumulates(self, weight: Tensor) -> bool:
        if not self.gradient_accumulation_fusion or not weight.requires_grad:
            return False
        if hasattr(weight, "__fsdp_param__"):
            raise RuntimeError(
                "config.gradient_accumulation_fusion is True with weights of Megatron-FSDP; expected False with them"
            )
        return True


class ColumnParallelLinear(_Overlapped, layers.ColumnParallelLinear):
    """Megatron's class of this name: ``y = gather(x) @ weight.T + bias``, output features shared out.

    Args:
        As Megatron's, by the same names and in the same order. With ``config.sequence_parallel`` the all-gather hides
        behind the product, and in the backward pass another one and the reduce-scatter behind the two products there;
        without it the all-reduce of x's gradient hides. ``config.gradient_accumulation_fusion`` needs no Apex.

    Shapes:
        x ``[s, b, input_size]`` (``[s / W, b, input_size]`` with sequence parallelism) gives
        ``[s, b, output_size / W]``, or ``[s, b, output_size]`` with `gather_output`, and the bias ``[output_size / W]``
        with `skip_bias_add`, else None.

    Raises:
        ValueError: an argument or a field of config that this class cannot honour; the message names it.
        RuntimeError: forward has no weight, one of another shape, or one that is Megatron-FSDP's, with fusion.
    """

    sharded = "output_size"

    @wraps(layers.ColumnParallelLinear.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        self._expect_own_exchange()
        gathers = self.gather_output if runtime_gather_output is None else runtime_gather_output
        output, output_bias = super().forward(input_, weight, runtime_gather_output=False)
        return gather_features(self.place, output) if gathers else output, output_bias

    def _forward_impl(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, sequence_parallel: bool, **options: Any
    ) -> Tensor:
        if self.config.sequence_parallel and not sequence_parallel and self.tp_group.size() > 1:
            # GPTModel turns it off for the last token's logits: Megatron's forward has seen to the gradient of x, and
            # there is nothing to hide.
            return super()._forward_impl(input, weight, bias=bias, sequence_parallel=False, **options)
        accumulates = self._accumulates(weight)
        return column_linear(
            self.place, input, weight, bias, sequence_parallel=sequence_parallel, accumulate=accumulates
        )


class RowParallelLinear(_Overlapped, layers.RowParallelLinear):
    """Megatron's class of this name: ``y = reduce_scatter(x @ weight.T) + bias``, input features shared out.

    Args:
        As Megatron's, by the same names and in the same order. With ``config.sequence_parallel`` the reduce-scatter
        hides behind the product, without it the all-reduce; the bias, the same on all ranks, is added once.

    Shapes:
        x ``[s, b, input_size / W]`` gives ``[s / W, b, output_size]`` with sequence parallelism, else
        ``[s, b, output_size]``, and the bias ``[output_size]`` with `skip_bias_add`, else None.

    Raises:
        As `ColumnParallelLinear`.
    """

    sharded = "input_size"

    @wraps(layers.RowParallelLinear.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        self._expect_own_exchange()
        output = row_linear(
            self.place,
            input_ if self.input_is_parallel else own_features(self.place, input_),
            self.weight,
            None if self.skip_bias_add else self.bias,
            sequence_parallel=self.sequence_parallel,
            accumulate=self._accumulates(self.weight),
        )
        return output, self.bias if self.skip_bias_add else None


class Fp8ColumnParallelLinear(ColumnParallelLinear):
    """With ``precision="fp8"``, as of `streamoverlap.ColumnParallelLinear`."""

    precision = "fp8"


class Fp8RowParallelLinear(RowParallelLinear):
    """With ``precision="fp8"``, as of `streamoverlap.RowParallelLinear`."""

    precision = "fp8"


class TorchNorm:
    """Torch's LayerNorm or RMSNorm, also with sequence parallelism, for where Apex's is not installed.

    Megatron's `WrappedTorchNorm` refuses sequence parallelism, since torch's norms do not say of their parameters that
    gradients are to be summed over ranks. Here they do.
    """

    def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        without = copy.copy(config)
        without.sequence_parallel = False
        norm = WrappedTorchNorm(without, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


_REPLACED = {
    layers.ColumnParallelLinear: ColumnParallelLinear,
    layers.RowParallelLinear: RowParallelLinear,
    WrappedTorchNorm: TorchNorm,
}
_IN_FP8 = {ColumnParallelLinear: Fp8ColumnParallelLinear, RowParallelLinear: Fp8RowParallelLinear}

# Experts exchange nothing themselves; multi-latent attention takes no other class for these two.
_KEPT = ("experts", "linear_q_down_proj", "linear_kv_down_proj")


def overlapped(spec: Spec, precision: str | None = None) -> Spec:
    """A copy of any spec of Megatron's local modules, with the layers of this module in place of Megatron's.

    Left as they are: routed experts, and the two down projections of multi-latent attention.

    Args:
        spec: any; it stays as it is.
        precision: of the layers: as they multiply now (None), or ``"fp8"``; see `streamoverlap.ColumnParallelLinear`.

    Raises:
        ValueError: `precision` is another.
    """
    if not name_of(precision):
        return _replaced(spec, _REPLACED)
    return _replaced(spec, {old: _IN_FP8.get(new, new) for old, new in _REPLACED.items()})


def gpt_layer_spec(precision: str | None = None, **options: Any) -> ModuleSpec:
    """The spec of one GPT layer, for use in other specs; for a whole GPTModel see `gpt_block_spec`.

    Args:
        precision: as of `overlapped`.
        **options: those of ``megatron.core.models.gpt.gpt_layer_specs.get_gpt_layer_local_spec``: `num_experts`,
            `qk_layernorm`, `multi_latent_attention`, `normalization` and so on.

    Raises:
        ValueError: `use_kitchen` or `fp8` is set, or `precision` is another.
    """
    for name in ("use_kitchen", "fp8"):
        if options.get(name):
            raise ValueError(f"{name} is {options[name]!r}; expected it not to be set, with layers of streamoverlap")
    return overlapped(get_gpt_layer_local_spec(**options), precision)


def gpt_block_spec(config: Any, precision: str | None = None, **options: Any) -> TransformerBlockSubmodules:
    """The spec of all GPT layers of a rank and the final norm: GPTModel's `transformer_layer_spec`.

    From the spec of one layer alone GPTModel would make a final norm that, without Apex, refuses sequence parallelism.

    Args:
        config: a `TransformerConfig`.
        precision: as of `overlapped`.
        **options: further ones of ``megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec``:
            `normalization` (by default that of config), `qk_l2_norm`, `vp_stage`, `pp_rank`.

    Raises:
        ValueError: ``config.use_kitchen`` is set, or `precision` is another.
    """
    if config.use_kitchen:
        raise ValueError("config.use_kitchen is True; expected False with layers of streamoverlap")
    options.setdefault("normalization", config.normalization)
    return overlapped(get_gpt_decoder_block_spec(config, use_transformer_engine=False, **options), precision)


class SpecProvider(LocalSpecProvider):
    """Megatron's local modules with these layers, for its ``get_..._for_backend``, as of multi-token prediction."""

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return _replaced(super().layer_norm(rms_norm, for_qk), _REPLACED)


def _replaced(node: Any, replaced: dict[type, type]) -> Any:
    if isinstance(node, type):
        return replaced.get(node, node)
    if isinstance(node, list):
        return [_replaced(item, replaced) for item in node]
    if dataclasses.is_dataclass(node):
        fields = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
        return dataclasses.replace(
            node, **{name: value if name in _KEPT else _replaced(value, replaced) for name, value in fields.items()}
        )
    return node


def _name(layer: _Overlapped) -> str:
    return f"streamoverlap's {type(layer).__name__}"
