"""CuPy arrays through DLPack, and calls on CuPy's streams."""

from __future__ import annotations

import pytest
import torch
from gpu_ranks import communicator
from references import Case, expected, inputs

import streamoverlap as so

pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu(1)


def through_dlpack(rank: int, world: int, group) -> None:
    """Arrays go in and come out without a copy."""
    import cupy

    communicator(group)
    cupy.cuda.Device(torch.cuda.current_device()).use()
    for seed, plan in enumerate((so.PlanSpec("direct"), so.PlanSpec("ring", 2))):
        case = Case("all_gather_gemm", plan, lead=(12,), k=16, n=(8,), seed=seed)
        given = inputs(case, rank, world)
        x, weight = (cupy.asarray(tensor.numpy()) for tensor in (given.x, given.weights[0]))
        shared = torch.from_dlpack(x)
        assert shared.data_ptr() == x.data.ptr
        y = so.all_gather_gemm(shared, torch.from_dlpack(weight), group, plan=plan)
        result = cupy.from_dlpack(y)
        assert result.data.ptr == y.data_ptr()
        assert (result.get() == expected(case, rank, world)[0].numpy()).all()
        with pytest.raises(TypeError, match=r"x is a ndarray; expected a torch\.Tensor"):
            so.all_gather_gemm(x, torch.from_dlpack(weight), group)


def test_arrays_of_cupy(ranks) -> None:
    ranks(2).run(through_dlpack)


# Slow to write its array, so a call that did not wait for the stream would read the last one's data.
PRODUCER = r"""
extern "C" __global__ void produce(float* x, int count, float value, long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x) x[i] = value + i % 5;
}
"""


def on_a_stream_of_cupy(rank: int, world: int, group) -> None:
    """Producer, call and consumer on one CuPy stream, twenty times with nothing else between them."""
    import cupy

    communicator(group)
    cupy.cuda.Device(torch.cuda.current_device()).use()
    kernel = cupy.RawKernel(PRODUCER, "produce")
    rows, k, n = 10, 8, 6
    x, weight = cupy.zeros((rows, k), cupy.float32), cupy.ones((n, k), cupy.float32)
    shared_x, shared_weight = torch.from_dlpack(x), torch.from_dlpack(weight)
    so.all_gather_gemm(shared_x, shared_weight, group)
    torch.cuda.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    results = []
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        for value in range(20):
            arguments = (x, cupy.int32(x.size), cupy.float32(value + 10 * rank), cupy.int64(2_000_000))
            kernel((1,), (32,), arguments)
            y = so.all_gather_gemm(shared_x, shared_weight, group)
            results.append(cupy.from_dlpack(y) + 1)
    stream.synchronize()
    pattern = (torch.arange(rows * k) % 5).view(rows, k)
    for value, result in enumerate(results):
        gathered = torch.cat([pattern + value + 10 * r for r in range(world)])
        wanted = gathered.sum(1, keepdim=True).expand(-1, n) + 1
        assert (result.get() == wanted.numpy()).all(), value


def test_calls_on_a_stream_of_cupy(ranks) -> None:
    ranks(2).run(on_a_stream_of_cupy)
