"""A small GPT of Megatron-Core's in bf16, sequence parallel, trained with our layers and with Megatron's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core", reason="needs megatron-core: pip install 'streamoverlap[megatron]'")

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from streamoverlap import megatron as ours

pytestmark = pytest.mark.gpu(2)

STEPS, BATCH, LENGTH = 50, 4, 128


@contextmanager
def model_parallel(world: int) -> Iterator[None]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def gpt(world: int, layers: Any, bf16: bool) -> tuple[TransformerConfig, GPTModel]:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=256,
        num_attention_heads=8,
        tensor_model_parallel_size=world,
        sequence_parallel=True,
        bf16=bf16,  # of weights drawn in float32, so that all runs start alike
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
    )
    spec = ours.gpt_block_spec(config)
    for layer in spec.layer_specs:
        # Of our spec, also for Megatron's layers: its own has no norm for sequence parallelism without Apex.
        attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
        attention.linear_qkv = mlp.linear_fc1 = layers.ColumnParallelLinear
        attention.linear_proj = mlp.linear_fc2 = layers.RowParallelLinear
    tensor_parallel.model_parallel_cuda_manual_seed(11, force_reset_rng=True)
    torch.manual_seed(11)
    return config, GPTModel(config, spec, vocab_size=256, max_sequence_length=LENGTH)


def batch(text: Tensor, step: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step))
    pieces = torch.stack([text[start : start + LENGTH + 1] for start in starts]).cuda()
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def train(world: int, layers: Any, bf16: bool = True, fuses: bool = False) -> list[float]:
    """The losses. Masters of the parameters and sums of gradients are in float32, as with Megatron's optimizer."""
    config, model = gpt(world, layers, bf16)
    kinds = (layers.ColumnParallelLinear, layers.RowParallelLinear)
    found = [module for module in model.decoder.modules() if type(module) in kinds]
    assert len(found) == 4 * config.num_layers
    for module in found:
        module.gradient_accumulation_fusion = fuses
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = Float16Module(config, model.cuda()) if bf16 else model.cuda()
    wrapped = DistributedDataParallel(config, options, model)
    parameters = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    masters = [parameter.detach().float().clone() for parameter in parameters]
    optimizer = torch.optim.Adam(masters, lr=3e-4)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH).cuda()
    losses = []
    for step in range(STEPS):
        wrapped.zero_grad_buffer()
        tokens, labels = batch(text, step)
        loss = wrapped(tokens, positions, None, labels=labels).float().mean()
        loss.backward()
        finalize_model_grads([wrapped])
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad = parameter.main_grad.float()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
        losses.append(loss.item())
    return losses


def train_all(rank: int, world: int, group) -> list[list[float]]:
    with model_parallel(world):
        return [
            train(world, tensor_parallel, bf16=False),
            train(world, tensor_parallel),
            train(world, ours),
            train(world, ours, fuses=True),
        ]


def test_a_gpt_trains_as_with_megatrons_layers(ranks) -> None:
    """Noise is how far Megatron's own layers in bf16 go from the same in float32."""
    for found in ranks(2).run(train_all, timeout=170):
        exact, megatrons, overlapped, fused = torch.tensor(found, dtype=torch.float64)
        assert megatrons[-1] < 0.7 * megatrons[0], "it has learnt nothing, so the comparison says little"
        noise = (megatrons / exact - 1).abs().max()
        assert noise < 0.05
        for losses in (overlapped, fused):
            assert abs(losses[0] / megatrons[0] - 1) < 1e-3
            assert (losses / megatrons - 1).abs().max() < 2 * noise
            assert abs((losses / megatrons - 1).mean()) < 1e-3, "off to one side"
