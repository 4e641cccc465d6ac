"""Tensor parallelism that hides communication behind matrix products, with its ordering checked before it runs.

>>> import streamoverlap as so
>>> y = so.all_gather_gemm(x, weight, group)       # x [M/W, K], weight [N_local, K]    -> [M, N_local]
>>> y = so.gemm_reduce_scatter(x, weight, group)   # x [M, K_local], weight [N, K_local] -> [M/W, N]
"""

from streamoverlap._version import __version__
from streamoverlap.communicator import Communicator
from streamoverlap.errors import CommunicatorError, MismatchError, PeerTimeoutError
from streamoverlap.ops import all_gather, all_gather_gemm, all_reduce, gemm_reduce_scatter, prepare, reduce_scatter
from streamoverlap.spec import PlanSpec
from streamoverlap.streams import StreamSet, use_streams
from streamoverlap.work import Work

__all__ = [
    "Communicator",
    "CommunicatorError",
    "MismatchError",
    "PeerTimeoutError",
    "PlanSpec",
    "StreamSet",
    "Work",
    "__version__",
    "all_gather",
    "all_gather_gemm",
    "all_reduce",
    "gemm_reduce_scatter",
    "prepare",
    "reduce_scatter",
    "use_streams",
]
