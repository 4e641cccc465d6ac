"""Megatron-Core's layers with our exchanges, on ranks on the CPU: against whole weights and against Megatron's own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import streamoverlap as so

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'streamoverlap[megatron]'")

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads as finalize
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlock

from streamoverlap import megatron as ours

HIDDEN, FFN, TOKENS, BATCH = 8, 12, 8, 2
NAMES = ("ColumnParallelLinear", "RowParallelLinear")


def config_of(world: int, **options: Any) -> TransformerConfig:
    given = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "ffn_hidden_size": FFN,
        "tensor_model_parallel_size": world,
        "sequence_parallel": world > 1,
        "use_cpu_initialization": True,
        "params_dtype": torch.float64,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
    }
    return TransformerConfig(**given | options)


@contextmanager
def model_parallel(world: int) -> Iterator[None]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def column(config: TransformerConfig, module: Any = ours, **options: Any) -> nn.Module:
    given = {"config": config, "init_method": nn.init.normal_, "bias": True}
    return module.ColumnParallelLinear(HIDDEN, FFN, **given | options)


def row(config: TransformerConfig, module: Any = ours, **options: Any) -> nn.Module:
    given = {
        "config": config,
        "init_method": nn.init.normal_,
        "bias": True,
        "input_is_parallel": True,
        "skip_bias_add": False,
    }
    return module.RowParallelLinear(FFN, HIDDEN, **given | options)


def pair_on_whole_weights() -> tuple[nn.Linear, nn.Linear]:
    up, down = nn.Linear(HIDDEN, FFN, dtype=torch.float64), nn.Linear(FFN, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        for seed, parameter in enumerate([*up.parameters(), *down.parameters()]):
            parameter.copy_(normal(*parameter.shape, seed=seed))
    return up, down


def equal(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


class Pair:
    """Column, then row, with the weights of `pair_on_whole_weights`; and what these compute."""

    def __init__(self, rank: int, world: int, kinds: Any = ours, skip_bias_add: bool = False, **options: Any) -> None:
        self.rank, self.world = rank, world
        self.whole = pair_on_whole_weights()
        config = config_of(world, **options)
        self.up = column(config, kinds, skip_bias_add=skip_bias_add)
        self.down = row(config, kinds, skip_bias_add=skip_bias_add)
        up, down = self.whole
        with torch.no_grad():
            self.up.weight.copy_(self.part(up.weight, 0))
            self.up.bias.copy_(self.part(up.bias, 0))
            self.down.weight.copy_(self.part(down.weight, 1))
            self.down.bias.copy_(down.bias)

    def part(self, whole: Tensor, dim: int) -> Tensor:
        return whole.chunk(self.world, dim)[self.rank]

    def run(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Output and gradient of x, of this rank's tokens; and what they should be."""
        x = normal(TOKENS, BATCH, HIDDEN, seed=10).requires_grad_()
        probe = normal(TOKENS, BATCH, HIDDEN, seed=11)
        up, down = self.whole
        y = down(nn.functional.gelu(up(x)))
        y.backward(probe)
        own = self.part(x.detach(), 0).clone().requires_grad_()
        between, bias = self.up(own)
        between = between if bias is None else between + bias
        found, bias = self.down(nn.functional.gelu(between))
        found = found if bias is None else found + bias
        found.backward(self.part(probe, 0))
        return found.detach(), own.grad, self.part(y.detach(), 0), self.part(x.grad, 0)


def compare_with_whole_weights(rank: int, world: int, group, skip_bias_add: bool, plan: so.PlanSpec | None) -> None:
    kinds = SimpleNamespace(**{name: type(name, (getattr(ours, name),), {"plan": plan}) for name in NAMES})
    with model_parallel(world):
        pair = Pair(rank, world, kinds, skip_bias_add)
        y, of_x, wanted_y, wanted_of_x = pair.run()
        equal(y, wanted_y)
        equal(of_x, wanted_of_x)
        up, down = pair.whole
        equal(pair.up.weight.grad, pair.part(up.weight.grad, 0))
        equal(pair.up.bias.grad, pair.part(up.bias.grad, 0))
        equal(pair.down.weight.grad, pair.part(down.weight.grad, 1))
        assert pair.down.bias.sequence_parallel, "Megatron would not sum its gradient"
        dist.all_reduce(pair.down.bias.grad, group=group)
        equal(pair.down.bias.grad, down.bias.grad)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("skip_bias_add", [False, True])
def test_a_pair_computes_what_whole_weights_do(ranks, world: int, skip_bias_add: bool) -> None:
    ranks(world).run(compare_with_whole_weights, skip_bias_add, None)


@pytest.mark.parametrize("plan", [so.PlanSpec("ring", chunks=2), so.PlanSpec("serial")])
def test_a_subclass_chooses_the_plan(ranks, plan: so.PlanSpec) -> None:
    ranks(2).run(compare_with_whole_weights, False, plan)


def compare_without_sequence_parallelism(rank: int, world: int, group, splits: bool) -> None:
    """`splits`: the column layer gathers its outputs, and the row layer takes its part of them."""
    with model_parallel(world):
        config = config_of(world, sequence_parallel=False)
        up, down = pair_on_whole_weights()
        pair = Pair(rank, world, sequence_parallel=False)
        mine_up = column(config, gather_output=splits)
        mine_down = row(config, input_is_parallel=not splits)
        mine_up.load_state_dict(pair.up.state_dict())
        mine_down.load_state_dict(pair.down.state_dict())
        x = normal(TOKENS, BATCH, HIDDEN, seed=10).requires_grad_()
        own = x.detach().clone().requires_grad_()
        probe = normal(TOKENS, BATCH, HIDDEN, seed=11)
        y, found = down(nn.functional.gelu(up(x))), mine_down(nn.functional.gelu(mine_up(own)[0]))[0]
        y.backward(probe)
        found.backward(probe)
        equal(found, y)
        equal(own.grad, x.grad)
        equal(mine_up.weight.grad, pair.part(up.weight.grad, 0))
        equal(mine_up.bias.grad, pair.part(up.bias.grad, 0))
        equal(mine_down.weight.grad, pair.part(down.weight.grad, 1))
        equal(mine_down.bias.grad, down.bias.grad)
        assert not mine_down.bias.sequence_parallel, "Megatron would sum its gradient"


@pytest.mark.skipif(not hasattr(so.Communicator, "gemm_all_reduce"), reason="needs Communicator.gemm_all_reduce")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("splits", [False, True])
def test_a_pair_without_sequence_parallelism(ranks, world: int, splits: bool) -> None:
    ranks(world).run(compare_without_sequence_parallelism, splits)


def fuse_gradient_accumulation(rank: int, world: int, group, zero_out: bool) -> None:
    with model_parallel(world):
        pair = Pair(rank, world, gradient_accumulation_fusion=True)
        for layer in (pair.up, pair.down):
            assert layer.config.gradient_accumulation_fusion
            layer.weight.main_grad = torch.ones_like(layer.weight)
            layer.weight.grad_added_to_main_grad = False
            layer.weight.zero_out_wgrad = zero_out
        pair.run()
        for layer, whole, dim in ((pair.up, pair.whole[0], 0), (pair.down, pair.whole[1], 1)):
            equal(layer.weight.main_grad, 1 + pair.part(whole.weight.grad, dim))
            assert layer.weight.grad_added_to_main_grad
            assert layer.weight.grad.shape == layer.weight.shape
            assert not zero_out or not layer.weight.grad.any()


@pytest.mark.parametrize("zero_out", [False, True])
def test_gradients_go_into_main_grad_without_apex(ranks, zero_out: bool) -> None:
    ranks(2).run(fuse_gradient_accumulation, zero_out)


def freeze_weights(rank: int, world: int, group) -> None:
    with model_parallel(world):
        pair = Pair(rank, world, gradient_accumulation_fusion=True)
        for layer in (pair.up, pair.down):
            layer.weight.requires_grad_(False)
        _, of_x, _, wanted = pair.run()
        equal(of_x, wanted)
        assert pair.up.weight.grad is None and pair.down.weight.grad is None


def test_frozen_weights_need_no_main_grad(ranks) -> None:
    ranks(2).run(freeze_weights)


def attributes(parameter: nn.Parameter) -> dict[str, Any]:
    return {**vars(parameter), "shape": parameter.shape, "dtype": parameter.dtype}


def sharded(layer: nn.Module) -> dict[str, Any]:
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    described = {}
    for name, entry in layer.sharded_state_dict("layer.", metadata=groups).items():
        fields = ("key", "global_shape", "global_offset", "replica_id", "local_shape", "axis_fragmentations")
        described[name] = {field: getattr(entry, field, None) for field in fields}
    return described


def compare_in_fp8(rank: int, world: int, group, sequence_parallel: bool) -> None:
    """The layers of streamoverlap are checked in test_layers_fp8.py: these are to do the same."""
    sizes, plain = {"up": (32, 64), "down": (64, 32)}, {"sequence_parallel": sequence_parallel, "precision": "fp8"}
    wanted = nn.ModuleDict(
        {
            "up": so.ColumnParallelLinear(*sizes["up"], **plain),
            "down": so.RowParallelLinear(*sizes["down"], **plain),
        }
    )
    with model_parallel(world):
        given = {
            "config": config_of(world, sequence_parallel=sequence_parallel, params_dtype=torch.float32),
            "init_method": nn.init.normal_,
            "bias": True,
            "skip_bias_add": False,
        }
        up = ours.Fp8ColumnParallelLinear(*sizes["up"], **given)
        down = ours.Fp8RowParallelLinear(*sizes["down"], input_is_parallel=True, **given)
        for name, layer in (("up", up), ("down", down)):
            layer.load_state_dict(wanted[name].state_dict(), strict=False)  # Megatron's has _extra_state
        x = normal(TOKENS, BATCH, 32, seed=10).float()
        x = x.chunk(world)[rank] if sequence_parallel else x
        results = []
        for run in (lambda x: wanted["down"](wanted["up"](x)), lambda x: down(up(x)[0])[0]):
            own = x.clone().requires_grad_()
            y = run(own)
            y.square().sum().backward()
            results.append((y.detach(), own.grad))
        (y, of_x), found = results
        assert torch.equal(found[0], y) and torch.equal(found[1], of_x)
        assert torch.equal(up.weight.grad, wanted["up"].weight.grad)
        assert torch.equal(down.weight.grad, wanted["down"].weight.grad)
        block = ours.gpt_block_spec(given["config"], precision="fp8")
        assert block.layer_specs[0].submodules.mlp.submodules.linear_fc1 is ours.Fp8ColumnParallelLinear
        with pytest.raises(ValueError, match="output_size is 48; expected a multiple of 16 times the group's 2 ranks"):
            ours.Fp8ColumnParallelLinear(32, 48, **given)
        with pytest.raises(ValueError, match="output_size is 24; expected a multiple of 16 with precision='fp8'"):
            ours.Fp8RowParallelLinear(32, 24, input_is_parallel=True, **given)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_layers_in_fp8(ranks, sequence_parallel: bool) -> None:
    ranks(2).run(compare_in_fp8, sequence_parallel)


def compare_with_megatrons(rank: int, world: int, group) -> None:
    with model_parallel(world):
        config = config_of(world)
        for make, options in ((column, {}), (column, {"stride": 3}), (row, {}), (row, {"bias": False})):
            torch.manual_seed(3)
            mine = make(config, **options, keep_master_weight_for_test=True)
            torch.manual_seed(3)
            own = make(config, tensor_parallel, **options, keep_master_weight_for_test=True)
            assert dict(mine.named_parameters()).keys() == dict(own.named_parameters()).keys()
            for (name, a), b in zip(mine.named_parameters(), own.parameters(), strict=True):
                assert attributes(a) == attributes(b), name
                assert torch.equal(a, b), name
            assert torch.equal(mine.master_weight, own.master_weight)
            assert sharded(mine) == sharded(own)
            assert repr(mine) == repr(own)
            assert mine.get_extra_state() is None
            mine.load_state_dict(own.state_dict())
            mine.load_state_dict(dict(own.named_parameters()))  # of an old checkpoint, without _extra_state
            mine.backward_dw()
        shapes = {name: entry["global_shape"] for name, entry in sharded(row(config)).items()}
        assert shapes["layer.weight"] == (HIDDEN, FFN)
        assert shapes["layer.bias"] == (HIDDEN,)
        assert "layer._extra_state" in shapes


def test_parameters_and_checkpoints_are_megatrons(ranks) -> None:
    ranks(2).run(compare_with_megatrons)


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_megatrons(name: str) -> None:
    assert inspect.signature(getattr(ours, name)) == inspect.signature(getattr(tensor_parallel, name))


def take_a_weight(rank: int, world: int, group) -> None:
    """As GPTModel's output layer does where it shares the embedding's weight."""
    with model_parallel(world):
        layer = column(config_of(world), skip_weight_param_allocation=True, bias=False, gather_output=True)
        whole = normal(FFN, HIDDEN, seed=1).requires_grad_()
        weight = whole.detach().chunk(world)[rank].clone().requires_grad_()
        x, probe = normal(TOKENS, BATCH, HIDDEN, seed=2), normal(TOKENS, BATCH, FFN, seed=3)
        y = x @ whole.t()
        y.backward(probe)
        own = x.chunk(world)[rank].clone().requires_grad_()
        found, bias = layer(own, weight)
        assert bias is None
        equal(found, y)
        found.backward(probe)
        equal(weight.grad, whole.grad.chunk(world)[rank])
        equal(own.grad, (probe @ whole.detach()).chunk(world)[rank])
        equal(layer(own, weight, runtime_gather_output=False)[0], y.chunk(world, -1)[rank])
        layer.sequence_parallel = False  # as GPTModel does, which then hands in all tokens, for the last one's logits
        every = x.clone().requires_grad_()
        found, _ = layer(every, weight)
        equal(found, y)
        found.backward(probe)
        equal(every.grad, probe @ whole.detach())
        with pytest.raises(RuntimeError, match="weight was not supplied"):
            layer(own)
        with pytest.raises(RuntimeError, match="supplied weight's shape"):
            layer(own, whole)


def test_a_weight_handed_in_and_gathered_outputs(ranks) -> None:
    ranks(2).run(take_a_weight)


REFUSED = [
    (column, {"is_expert": True}, {}, "is_expert is True; expected False"),
    (row, {"is_expert": True}, {}, "is_expert is True; expected False"),
    (column, {"disable_grad_reduce": True}, {}, "disable_grad_reduce is True; expected False"),
    (column, {"embedding_activation_buffer": []}, {}, "embedding_activation_buffer is a list; expected None"),
    (column, {"grad_output_buffer": []}, {}, "grad_output_buffer is a list; expected None"),
    (
        column,
        {},
        {"defer_embedding_wgrad_compute": True},
        "config.defer_embedding_wgrad_compute is True; expected False",
    ),
    (row, {}, {"delay_wgrad_compute": True}, "config.delay_wgrad_compute is True; expected False"),
    (column, {}, {"cpu_offloading": True}, "config.cpu_offloading is True; expected False"),
    (column, {}, {"fp8": "hybrid"}, "config.fp8 is 'hybrid'; expected None"),
    (row, {}, {"fp4": "e2m1"}, "config.fp4 is 'e2m1'; expected None"),
    (column, {}, {"cuda_graph_impl": "local"}, "config.cuda_graph_impl is 'local'; expected 'none'"),
]


def refuse(rank: int, world: int, group) -> list[str]:
    messages = []
    with model_parallel(world):
        for make, options, fields, _ in REFUSED:
            config = config_of(world)
            for name, value in fields.items():
                setattr(config, name, value)  # some need Transformer Engine already in the config's constructor
            with pytest.raises(ValueError) as caught:
                make(config, **options)
            messages.append(str(caught.value))
        given = {"config": config_of(world), "init_method": nn.init.normal_}
        with pytest.raises(ValueError, match="output_size is 13; expected a multiple of the 2 ranks of tp_group"):
            ours.ColumnParallelLinear(HIDDEN, 13, **given)
        with pytest.raises(ValueError, match="input_size is 13; expected a multiple of the 2 ranks of tp_group"):
            ours.RowParallelLinear(13, HIDDEN, **given, bias=True, input_is_parallel=True, skip_bias_add=False)
        with pytest.raises(RuntimeError, match="`input_is_parallel` must be `True`"):
            row(config_of(world), input_is_parallel=False)
        with pytest.raises(TypeError, match="init_method"):
            ours.ColumnParallelLinear(HIDDEN, FFN, config=config_of(world))
        shared_expert = column(config_of(world))
        shared_expert.explicit_expert_comm = True
        with pytest.raises(RuntimeError, match="moe_shared_expert_overlap is True; expected False"):
            shared_expert(torch.ones(TOKENS, BATCH, HIDDEN))
        of_fsdp = column(config_of(world, gradient_accumulation_fusion=True))
        of_fsdp.weight.__fsdp_param__ = True
        with pytest.raises(RuntimeError, match="gradient_accumulation_fusion is True with weights of Megatron-FSDP"):
            of_fsdp(torch.ones(TOKENS, BATCH, HIDDEN))
    with pytest.raises(ValueError, match="tp_group is None; expected a process group"):
        column(config_of(world))
    column(config_of(world), tp_group=group)
    return messages


def test_what_is_not_supported_is_refused(ranks) -> None:
    for messages in ranks(2).run(refuse):
        for message, (*_, wanted) in zip(messages, REFUSED, strict=True):
            assert wanted in message


class Attention(nn.Module):
    """In place of Megatron's, which needs a GPU."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        heads = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


def block_of(config: TransformerConfig, spec: Any, groups: ProcessGroupCollection | None) -> TransformerBlock:
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = Attention
    torch.manual_seed(7)
    return TransformerBlock(config, spec, pg_collection=groups).double()


def through(block: TransformerBlock, x: Tensor) -> Tensor:
    """As the block's forward, which also forks CUDA's random state, so needs a GPU."""
    for layer in block.layers:
        x, _ = layer(x, attention_mask=None)
    return block.final_layernorm(x)


def compare_blocks(rank: int, world: int, group, normalization: str) -> None:
    """Two GPT layers and the final norm: ours on all ranks, sequence parallel, against Megatron's on one."""
    alone = [dist.new_group([r]) for r in range(world)][rank]
    with model_parallel(world):
        config, config_alone = (config_of(size, normalization=normalization) for size in (world, 1))
        groups = ProcessGroupCollection.use_mpu_process_groups()
        groups.tp = alone
        own_spec = get_gpt_decoder_block_spec(config_alone, False, normalization=normalization)
        own = block_of(config_alone, own_spec, groups)
        mine = block_of(config, ours.gpt_block_spec(config), None)
        assert {type(m) for m in mine.modules() if "Parallel" in type(m).__name__} == {
            ours.ColumnParallelLinear,
            ours.RowParallelLinear,
        }
        x = normal(TOKENS, BATCH, HIDDEN, seed=20).requires_grad_()
        probe = normal(TOKENS, BATCH, HIDDEN, seed=21)
        y = through(own, x)
        y.backward(probe)
        part = x.detach().chunk(world)[rank].clone().requires_grad_()
        found = through(mine, part)
        found.backward(probe.chunk(world)[rank])
        equal(found.detach(), y.detach().chunk(world)[rank])
        equal(part.grad, x.grad.chunk(world)[rank])
        mine.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
        finalize_sequence_parallel_gradients(mine, config)
        for (name, a), b in zip(mine.named_parameters(), own.parameters(), strict=True):
            dim = getattr(a, "partition_dim", -1)
            equal(a.grad, b.grad if dim < 0 else b.grad.chunk(world, dim)[rank])
            assert a.requires_grad, name


def finalize_sequence_parallel_gradients(model: nn.Module, config: TransformerConfig) -> None:
    """The part of Megatron's finalize_model_grads that needs no GPU and no data parallelism."""
    inspect.getmodule(finalize)._allreduce_non_tensor_model_parallel_grads([model], config)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_gpt_layers_compute_what_megatrons_do(ranks, normalization: str) -> None:
    ranks(2).run(compare_blocks, normalization)


def test_specs_keep_experts_and_down_projections() -> None:
    spec = ours.gpt_layer_spec(num_experts=4, multi_latent_attention=True)
    attention = spec.submodules.self_attention.submodules
    assert attention.linear_kv_down_proj is attention.linear_q_down_proj is tensor_parallel.ColumnParallelLinear
    assert attention.linear_q_up_proj is ours.ColumnParallelLinear
    assert attention.linear_proj is ours.RowParallelLinear
    moe = spec.submodules.mlp.submodules
    assert moe.experts.submodules.linear_fc1 is tensor_parallel.ColumnParallelLinear
    assert moe.shared_experts.submodules.linear_fc2 is ours.RowParallelLinear
    assert ours.SpecProvider().column_parallel_linear() is ours.ColumnParallelLinear
    assert ours.SpecProvider().row_parallel_linear() is ours.RowParallelLinear


def test_specs_in_fp8() -> None:
    spec = ours.gpt_layer_spec("fp8")
    attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp.submodules
    assert attention.linear_qkv is mlp.linear_fc1 is ours.Fp8ColumnParallelLinear
    assert attention.linear_proj is mlp.linear_fc2 is ours.Fp8RowParallelLinear
    with pytest.raises(ValueError, match="precision is 'e4m3'; expected None or 'fp8'"):
        ours.overlapped(spec, "e4m3")


@pytest.mark.parametrize("option", [{"use_kitchen": True}, {"fp8": "hybrid"}])
def test_specs_refuse(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(option))} is .*; expected it not to be set"):
        ours.gpt_layer_spec(**option)
