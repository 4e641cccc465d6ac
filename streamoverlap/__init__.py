"""Tensor parallelism that hides communication behind matrix products, with its ordering checked before it runs.

>>> import streamoverlap as so
>>> y = so.all_gather_gemm(x, weight, group)       # x [M/W, K], weight [N_local, K]    -> [M, N_local]
>>> y = so.gemm_reduce_scatter(x, weight, group)   # x [M, K_local], weight [N, K_local] -> [M/W, N]
"""

from streamoverlap import compiled, library  # noqa: F401  the first says so if it cannot be loaded, the other registers the ops
from streamoverlap._version import __version__
from streamoverlap.checkpoint import sharded_state_dict
from streamoverlap.communicator import Communicator
from streamoverlap.errors import CommunicatorError, MismatchError, PeerTimeoutError
from streamoverlap.explain import Explanation, explain
from streamoverlap.layers import ColumnParallelLinear, RowParallelLinear
from streamoverlap.ops import (
    all_gather,
    all_gather_gemm,
    all_reduce,
    gemm_all_reduce,
    gemm_reduce_scatter,
    prepare,
    reduce_scatter,
)
from streamoverlap.sequence_parallel import sync_sequence_parallel_grads
from streamoverlap.spec import PlanSpec
from streamoverlap.streams import StreamSet, use_streams
from streamoverlap.styles import ColwiseParallel, RowwiseParallel
from streamoverlap.tracing import trace
from streamoverlap.tuner import Tuned, tune
from streamoverlap.work import Work

__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "Communicator",
    "CommunicatorError",
    "Explanation",
    "MismatchError",
    "PeerTimeoutError",
    "PlanSpec",
    "RowParallelLinear",
    "RowwiseParallel",
    "StreamSet",
    "Tuned",
    "Work",
    "__version__",
    "all_gather",
    "all_gather_gemm",
    "all_reduce",
    "explain",
    "gemm_all_reduce",
    "gemm_reduce_scatter",
    "prepare",
    "reduce_scatter",
    "sharded_state_dict",
    "sync_sequence_parallel_grads",
    "trace",
    "tune",
    "use_streams",
]
