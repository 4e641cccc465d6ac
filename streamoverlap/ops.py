"""The functional ops: exchanges over a process group, hidden behind matrix products.

Every rank of the group makes the same calls in the same order, with the same shapes, dtype and plan, as for any
collective. A rank that dies, stalls or calls something else makes the others raise; see `streamoverlap.errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamoverlap import _C, autograd, traced
from streamoverlap.autograd import Options, needs_gradient
from streamoverlap.call import Mode, in_mode, validate_options
from streamoverlap.calls import one_call
from streamoverlap.communicator import Communicator
from streamoverlap.gradients import Exchange
from streamoverlap.places import resolve_group
from streamoverlap.scaling import scaling_of
from streamoverlap.spec import PlanSpec, is_quantised, of_wire
from streamoverlap.streams import StreamSet
from streamoverlap.traced import traceable
from streamoverlap.work import Work


def _made_for(x: Tensor, group: dist.ProcessGroup | None = None, **_: object) -> Communicator | None:
    return Communicator.made_for(resolve_group(group), _device(x).type)


_plain_call = one_call(_made_for)
_gemm_call = one_call(lambda x, _weight=None, group=None, **_: _made_for(x, group))


@traceable(traced.all_gather_gemm)
@_gemm_call
def all_gather_gemm(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | Sequence[Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    return_gathered: bool = False,
    plan: PlanSpec | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
    streams: StreamSet | None = None,
):
    """Gathers `x` from all ranks along dim 0 and multiplies it by the rank's own weight: ``cat(x) @ weight.T + bias``.

    Each shard is multiplied as soon as it has arrived, the rank's own first, so the exchange hides behind the
    products (Wang et al., "Overlap Communication with Dependent Computation via Decomposition", ASPLOS 2023).

    Args:
        x: this rank's shard, ``[rows, K]`` or ``[s, b, K]``; float32, float64, bfloat16 or float16, or with scales
            float8_e4m3fn or float8_e5m2. The same shape on every rank. Copied first if it is not contiguous.
        weight: ``[N, K]`` as in `torch.nn.functional.linear`, row- or column-major (neither is copied), or a list
            of such weights that share one exchange.
        group: any process group that has this rank; None is the default group.
        bias: ``[N]``, or a list with one for each weight (None for those without).
        scale_x, scale_weight: of float8, as `torch._scaled_mm` has them: ``(x * scale_x) @ (weight * scale_weight).T``.
            float32; both of one element (tensor-wise; each rank may have its own), or row-wise ``[rows, 1]`` (or
            ``[s, b, 1]``) and ``[1, N]`` (or ``[N, 1]``). A list for a list of weights. weight is float8_e4m3fn then,
            row-major, with N and K multiples of 16. x's rows and their scales travel together. No gradient is recorded.
        out_dtype: of the result and of bias, with scales: bfloat16 (None), float16 or float32. Equal on all ranks.
        use_fast_accum: with scales, on CUDA: accumulate with fewer bits, as in `torch._scaled_mm`.
        return_gathered: also return the gathered input. Not with scales.
        plan: how to do it, equal on all ranks. None: on CUDA what the simulator predicts to be fastest, as told by
            `streamoverlap.explain`; on the CPU one chunk, straight to its user.
        async_op: return a `streamoverlap.Work` that gives the result, and go on at once; x, weight and bias must not be
            written before `Work.wait`. On CUDA the current stream waits for nothing of the exchange until then. On the
            CPU, where the op runs on threads, a third call waits until the first of two in flight has ended.
        timeout: how long this call may wait for its peers, from its start: seconds or a timedelta; None takes the
            communicator's. What runs serial on CUDA obeys that of its process group alone.
        streams: a `streamoverlap.StreamSet`, for tensors on CUDA; None takes that of `use_streams`, or a private one.

    Returns:
        ``[W * rows, N]`` (or ``[W * s, b, N]``), a list of those if `weight` is a list; with `return_gathered` a pair
        of that and the gathered input ``[W * rows, K]``. With `async_op` a Work of the same.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it. Nothing was sent.
        RuntimeError: a tensor requires grad, while gradients are recorded, in an asynchronous call; or the communicator
            was made before a fork.
        PeerTimeoutError: a peer did not take part in time.
        MismatchError: a peer called something else.
    """
    device = _device(x)
    validate_options(device, plan, async_op, timeout, streams, return_gathered=return_gathered)
    several = not isinstance(weight, Tensor)
    weights = _tensors("weight", weight) if several else [weight]
    biases = _bias_list(bias, several)
    scaling = scaling_of(scale_x, scale_weight, out_dtype, use_fast_accum, several)
    if scaling is not None and return_gathered:
        raise ValueError("return_gathered is True with scales; expected False: the gathered scales are not returned")

    def as_asked(both: tuple[list[Tensor], Tensor | None]):
        outputs, gathered = both
        result = outputs if several else outputs[0]
        return (result, gathered) if return_gathered else result

    if scaling is None and needs_gradient(x, *weights, *biases) and not async_op:
        options = _options(group, plan, timeout, streams)
        return as_asked(autograd.all_gather_gemm(options, x, weights, biases, return_gathered))
    comm = Communicator.of(group, device, lambda world: _C.validate_all_gather_gemm(x, weights, biases, world, scaling))
    options = {"async_op": async_op, "timeout": timeout, "streams": streams}
    found = comm.all_gather_gemm(x, weights, biases, return_gathered, plan, scaling=scaling, **options)
    return found.with_result(as_asked) if isinstance(found, Work) else as_asked(found)


@traceable(traced.sum_of_products("gemm_reduce_scatter"))
@_gemm_call
def gemm_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    wire: str | None = None,
    plan: PlanSpec | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
    streams: StreamSet | None = None,
) -> Tensor | Work:
    """Multiplies and sums over ranks; each rank gets its rows of the sum: ``reduce_scatter(x @ weight.T) + bias``.

    Partial products leave for their rank while the next ones are computed; the rank's own rows come last.

    Args:
        x: ``[M, K]`` or ``[s, b, K]``, this rank's slice along K; dim 0 must be a multiple of the group's size.
            float32, float64, bfloat16 or float16, or with scales float8. Copied first if it is not contiguous.
        weight: ``[N, K]``, this rank's slice along K, row- or column-major (neither is copied).
        group: any process group that has this rank; None is the default group.
        bias: ``[N]``, the whole bias, the same on every rank; added exactly once.
        scale_x, scale_weight, out_dtype, use_fast_accum: as in `all_gather_gemm`. Each rank scales its own slices;
            partial products travel, and are summed, in out_dtype.
        wire: ``"fp8"``: partial products travel as float8_e4m3fn, each row with a scale of its own, and are summed in
            float32; see docs/fp8.md for the error. Not of float64. Equal on all ranks. Gradients travel as they are.
        plan, async_op, timeout, streams: as in `all_gather_gemm`.

    Returns:
        ``[M / W, N]`` (or ``[s / W, b, N]``): this rank's rows of the sum (never an average). With `async_op` a Work.

    Raises:
        As `all_gather_gemm`.
    """
    scaling = scaling_of(scale_x, scale_weight, out_dtype, use_fast_accum)
    options = (plan, async_op, timeout, streams)
    return _sum_of_products("gemm_reduce_scatter", x, weight, group, bias, scaling, wire, *options)


@traceable(traced.sum_of_products("gemm_all_reduce"))
@_gemm_call
def gemm_all_reduce(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    wire: str | None = None,
    plan: PlanSpec | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
    streams: StreamSet | None = None,
) -> Tensor | Work:
    """Multiplies and sums over ranks; every rank gets the whole sum, bit for bit: ``all_reduce(x @ weight.T) + bias``.

    A GEMM-reduce-scatter, then an all-gather of the sums, chunk by chunk in one plan: for layers without sequence
    parallelism.

    Args:
        x: ``[M, K]`` or ``[s, b, K]``, this rank's slice along K; M and s need not be multiples of the group's size.
            float32, float64, bfloat16 or float16, or with scales float8. Copied first if it is not contiguous.
        weight: ``[N, K]``, this rank's slice along K, row- or column-major (neither is copied).
        group: any process group that has this rank; None is the default group.
        bias: ``[N]``, the whole bias, the same on every rank; added exactly once.
        scale_x, scale_weight, out_dtype, use_fast_accum: as in `all_gather_gemm`. Each rank scales its own slices;
            partial products travel, and are summed, in out_dtype.
        wire: as in `gemm_reduce_scatter`; the sums travel as they are.
        plan, async_op, timeout, streams: as in `all_gather_gemm`.

    Returns:
        ``[M, N]`` (or ``[s, b, N]``): the sum (never an average). With `async_op` a Work. Its gradient is taken to be
        the same on all ranks, too, as the result is.

    Raises:
        As `all_gather_gemm`.
    """
    scaling = scaling_of(scale_x, scale_weight, out_dtype, use_fast_accum)
    options = (plan, async_op, timeout, streams)
    return _sum_of_products("gemm_all_reduce", x, weight, group, bias, scaling, wire, *options)


@traceable(traced.plain("all_gather"))
@_plain_call
def all_gather(
    x: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    plan: PlanSpec | None = None,
    copy_input: bool = False,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
    streams: StreamSet | None = None,
) -> Tensor | Work:
    """Concatenates `x` of all ranks along dim 0.

    Args:
        x: at least one dimension, the same shape on every rank; float32, float64, bfloat16 or float16.
        copy_input: copy x first, in the order of the current stream (on the CPU before this returns), so that it may be
            written at once, also with `async_op`. Equal on all ranks. Costs no memory but in a reduce-scatter, where it
            is as large as x.
        group, plan, async_op, timeout, streams: as in `all_gather_gemm`.

    Returns:
        ``[W * x.shape[0], ...]``. With `async_op` a Work.

    Raises:
        As `all_gather_gemm`.
    """
    return _exchange("all_gather", x, group, plan, copy_input, async_op, timeout, streams)


@traceable(traced.plain("reduce_scatter"))
@_plain_call
def reduce_scatter(
    x: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    plan: PlanSpec | None = None,
    copy_input: bool = False,
    wire: str | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
    streams: StreamSet | None = None,
) -> Tensor | Work:
    """Sums `x` over all ranks and returns this rank's part along dim 0.

    Args:
        x: at least one dimension, the same shape on every rank, dim 0 a multiple of the group's size; float32,
            float64, bfloat16 or float16. Low-precision sums are taken in float32 and rounded once (``"direct"``) or
            once a hop (``"ring"``).
        copy_input: as in `all_gather`.
        wire: ``"fp8"``: as in `gemm_reduce_scatter`, with x for partial products. Of an x whose rows have fewer than
            512 elements, 1024 share a scale.
        group, plan, async_op, timeout, streams: as in `all_gather_gemm`.

    Returns:
        ``[x.shape[0] / W, ...]``, the sum (never an average). With `async_op` a Work.

    Raises:
        As `all_gather_gemm`.
    """
    return _exchange("reduce_scatter", x, group, plan, copy_input, async_op, timeout, streams, wire)


@traceable(traced.plain("all_reduce"))
@_plain_call
def all_reduce(
    x: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    plan: PlanSpec | None = None,
    copy_input: bool = False,
    wire: str | None = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
    streams: StreamSet | None = None,
) -> Tensor | Work:
    """Sums `x` over all ranks; every rank gets the whole sum, the same bit for bit. `x` stays as it is.

    A reduce-scatter, then an all-gather of the sums, chunk by chunk in one plan (Patarasuk and Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", JPDC 2009). Ranks share the work by rows, so that of a tensor
    with fewer rows than ranks (a flat view has enough) some ranks sum nothing.

    Args:
        x: at least one dimension, the same shape on every rank; dim 0 need not be a multiple of the group's size.
            float32, float64, bfloat16 or float16, summed as in `reduce_scatter`.
        copy_input: as in `all_gather`.
        wire: as in `reduce_scatter`; the sums travel as they are.
        group, plan, async_op, timeout, streams: as in `all_gather_gemm`.

    Returns:
        A new tensor of the shape of x, the sum (never an average). With `async_op` a Work.

    Raises:
        As `all_gather_gemm`.

    Example:
        >>> works = [so.all_reduce(bucket, group, async_op=True) for bucket in gradients]
        >>> sums = [work.wait() for work in works]
    """
    return _exchange("all_reduce", x, group, plan, copy_input, async_op, timeout, streams, wire)


def prepare(function: Callable, *args, **kwargs) -> Any:
    """Does all that the first use of a call costs, so that the call itself can be captured in a CUDA graph.

    Collective. A captured call never grows slots, loads kernels or chooses algorithms, so every call that a capture
    contains must be prepared before, with the same shapes, dtypes, strides and plan. Calls that are captured have slots
    of their own (as many bytes again), since their replays may run beside eager calls. Replays of several graphs of one
    group must not overlap each other, and run in the same order on all ranks, as with NCCL.

    Under ``torch.compile(..., mode="reduce-overhead")`` nobody needs to call this: what Inductor runs once before it
    captures is prepared by that.

    Args:
        function: any of this module's functions that exchange, such as `all_gather_gemm`, which is prepared but not
            called: no data is sent (`serial` runs once, so that its collective is set up). Or anything else that makes
            such calls, such as a layer or a step of training, which is called, once.
        *args, **kwargs: its arguments.

    Returns:
        None for a function of this module. Else what `function` returns; backward passes from there on are prepared as
        they run.

    Example:
        >>> so.prepare(so.all_gather_gemm, x, weight, group)
        >>> with torch.cuda.graph(graph):
        ...     y = so.all_gather_gemm(x, weight, group)

        >>> so.prepare(layer, x).sum().backward()
        >>> layer = torch.cuda.make_graphed_callables(layer, (x,))
    """
    if not callable(function):
        raise TypeError(f"function is a {type(function).__name__}; expected one, such as streamoverlap.all_gather_gemm")
    if function not in EXCHANGES:
        with in_mode(Mode(prepare=True)):
            return function(*args, **kwargs)
    with in_mode(Mode(prepare=True, issue=False)):
        function(*args, **kwargs)
    return None


EXCHANGES = (all_gather_gemm, gemm_reduce_scatter, gemm_all_reduce, all_gather, reduce_scatter, all_reduce)


def _sum_of_products(
    operation: str,
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None,
    bias: Tensor | None,
    scaling: _C.Scaling | None,
    wire: str | None,
    plan: PlanSpec | None,
    async_op: bool,
    timeout: float | timedelta | None,
    streams: StreamSet | None,
) -> Tensor | Work:
    """gemm_reduce_scatter or gemm_all_reduce, which has the same name everywhere."""
    _expect_tensor("weight", weight)
    if bias is not None:
        _expect_tensor("bias", bias)
    device = _device(x)
    validate_options(device, plan, async_op, timeout, streams)
    quantised = is_quantised(wire)
    if scaling is None and needs_gradient(x, weight, bias) and not async_op:
        return getattr(autograd, operation)(_options(group, plan, timeout, streams, quantised), x, weight, bias)
    validate = getattr(_C, f"validate_{operation}")
    comm = Communicator.of(group, device, lambda world: validate(x, weight, bias, world, scaling, quantised))
    options = {"async_op": async_op, "timeout": timeout, "streams": streams, "quantised": quantised}
    return getattr(comm, operation)(x, weight, bias, plan, scaling=scaling, **options)


def _exchange(
    operation: str,
    x: Tensor,
    group: dist.ProcessGroup | None,
    plan: PlanSpec | None,
    copy_input: bool,
    async_op: bool,
    timeout: float | timedelta | None,
    streams: StreamSet | None,
    wire: str | None = None,
) -> Tensor | Work:
    """A plain collective, which has the same name everywhere."""
    device = _device(x)
    validate_options(device, plan, async_op, timeout, streams, copy_input=copy_input)
    quantised = is_quantised(wire)
    if needs_gradient(x) and not async_op:
        return autograd.exchange(_options(group, plan, timeout, streams, quantised), operation, x)
    validate = partial(getattr(_C, f"validate_{operation}"), x, **of_wire(quantised))
    comm = Communicator.of(group, device, lambda world: validate(world=world))
    options = {"copy_input": copy_input, "async_op": async_op, "timeout": timeout, "streams": streams}
    return getattr(comm, operation)(x, plan, **options, quantised=quantised)


def _options(
    group: dist.ProcessGroup | None,
    plan: PlanSpec | None,
    timeout: float | timedelta | None,
    streams: StreamSet | None,
    quantised: bool = False,
) -> Options:
    of_call = {"timeout": timeout, "streams": streams, **of_wire(quantised)}
    return Options(Exchange(resolve_group(group), plan), of_call=of_call)


def _expect_tensor(argument: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{argument} is a {type(value).__name__}; expected a torch.Tensor")


def _tensors(argument: str, values: object, optional: bool = False) -> list:
    if not isinstance(values, Sequence):
        raise TypeError(f"{argument} is a {type(values).__name__}; expected a torch.Tensor or a list of them")
    for i, value in enumerate(values):
        if not (optional and value is None):
            _expect_tensor(f"{argument}[{i}]", value)
    return list(values)


def _device(x: Tensor) -> torch.device:
    _expect_tensor("x", x)
    return x.device


def _bias_list(bias: object, several: bool) -> list[Tensor | None]:
    if bias is None:
        return []
    if several:
        if isinstance(bias, Tensor):
            raise TypeError("bias is one tensor but weight is a list; expected a list with one bias for each weight")
        return _tensors("bias", bias, optional=True)
    if not isinstance(bias, Tensor):
        raise TypeError(f"bias is a {type(bias).__name__} but weight is one tensor; expected a torch.Tensor or None")
    return [bias]
