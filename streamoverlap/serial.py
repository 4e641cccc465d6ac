"""The serial algorithm: the group's own collective (NCCL, Gloo), then one GEMM. Nothing is overlapped.

It is what every overlapped plan is compared with, and what runs where ranks share no memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from streamoverlap import _C
from streamoverlap.errors import CommunicatorError, MismatchError, PeerTimeoutError

# torch 2.14 renamed the single-tensor collectives; 2.11 knows the old names only.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_POLL = 0.05  # seconds
_WATCH_GRACE = 2.0  # seconds after which the watchdog has found out whom to blame
_HEADER = 256  # bytes


def _all_reduce_into(output: Tensor, x: Tensor, **options: Any) -> dist.Work:
    return dist.all_reduce(output.copy_(x), **options)


class Started(NamedTuple):
    """An op whose collective has been issued on the caller's thread, so in the order of the group's other ones."""

    wait: Callable[[], None]  # for the collective: on the CPU the thread waits, on CUDA the current stream
    finish: Callable[[], Any]  # what comes after it; gives the result

    def complete(self) -> Any:
        self.wait()
        return self.finish()


class Watch(NamedTuple):
    """Of one serial call, by number, in shared memory: the group is aborted, `check` raises with the peer to blame."""

    communicator: _C.Communicator
    number: int

    def failed(self, cause: str) -> None:
        self.communicator.fail_serial(self.number, cause)

    def leave(self) -> None:
        self.communicator.leave_serial(self.number)


class Collectives(NamedTuple):
    """A group's own collectives, for one call of a group that may fail at any time."""

    group: dist.ProcessGroup
    timeout: Callable[[], float]  # seconds; may change meanwhile
    check: Callable[[], None]  # raises if the group has failed
    fail: Callable[[CommunicatorError], None]  # is told what this rank raises: no further call is in step with peers
    watch: Watch | None  # None where ranks share no memory

    def start(self, collective: Callable, output: Tensor, x: Tensor) -> Started:
        if not output.numel():
            return Started(self._leave, lambda: output)
        begin = time.monotonic()
        work = collective(output, x.contiguous(), group=self.group, async_op=True)
        if x.device.type == "cuda":  # NCCL's own watchdog bounds it
            return Started(work.wait, lambda: output)
        waiter = _C.Waiter(work, *((None, 0) if self.watch is None else self.watch))
        return Started(partial(self._wait, waiter, begin), lambda: output)

    def _wait(self, waiter: _C.Waiter, begin: float) -> None:
        grace = 0.0 if self.watch is None else _WATCH_GRACE
        while not waiter.wait(_POLL):
            self.check()
            if time.monotonic() > begin + self.timeout() + grace:
                raise self._error("a peer is gone, or called something else", begin)
        if (cause := waiter.error()) is not None:
            self._blame(cause)
            raise self._error(cause, begin)
        self.check()  # what has arrived may be of another call

    def _blame(self, cause: str) -> None:
        """Raises who is to blame, where that can be found out."""
        if self.watch is None:
            return
        self.watch.failed(cause)
        deadline = time.monotonic() + _WATCH_GRACE
        while time.monotonic() < deadline:
            self.check()
            time.sleep(_POLL)

    def _leave(self) -> None:
        if self.watch is not None:
            self.watch.leave()

    def _error(self, cause: str, begin: float) -> CommunicatorError:
        name, elapsed = self.group.group_name, time.monotonic() - begin
        text = (
            f"a serial exchange on group '{name}' failed after {elapsed:.1f} s, of the {self.timeout():g} s that it "
            f"may take: {cause}; the group cannot be used any more"
        )
        error = PeerTimeoutError(text, group=name, elapsed=elapsed)
        self.fail(error)
        return error


def agree(call: tuple[int, str], number: int, on: Collectives) -> None:
    """Compares this rank's call, the group's `number`-th serial one, with all peers'. On the CPU; waits for them.

    For groups without shared memory to do it in. The message has one size whatever ranks call, as Gloo needs.

    Raises:
        MismatchError: on every rank, if they differ.
    """
    signature, text = call
    header = f"{signature:08x} {number} {text}".encode()[:_HEADER].ljust(_HEADER)
    headers = torch.empty(on.group.size(), _HEADER, dtype=torch.uint8)
    on.start(_all_gather_single, headers, torch.frombuffer(bytearray(header), dtype=torch.uint8)[None]).complete()
    own = on.group.rank()
    for peer, theirs in enumerate(bytes(row.tolist()) for row in headers):
        if theirs == header:
            continue
        name = on.group.group_name
        called, told = (each.rstrip().decode(errors="replace").partition(" ")[2] for each in (header, theirs))
        error = MismatchError(
            f"ranks made different calls on group '{name}': rank {own} (this rank) made call {called}, but rank {peer} "
            f"call {told}; the group cannot be used any more",
            group=name,
            op=text,
            peer=peer,
        )
        on.fail(error)
        raise error


def all_gather(x: Tensor, on: Collectives) -> Started:
    x = _plain(x)
    return on.start(_all_gather_single, x.new_empty((x.shape[0] * on.group.size(), *x.shape[1:])), x)


def reduce_scatter(x: Tensor, on: Collectives) -> Started:
    x = _plain(x)
    return on.start(_reduce_scatter_single, x.new_empty((x.shape[0] // on.group.size(), *x.shape[1:])), x)


def all_reduce(x: Tensor, on: Collectives) -> Started:
    x = _plain(x)
    return on.start(_all_reduce_into, torch.empty_like(x, memory_format=torch.contiguous_format), x)


def all_gather_gemm(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    on: Collectives,
    scaling: _C.Scaling | None = None,
) -> Started:
    if scaling is not None:
        return _scaled_all_gather_gemm(_plain(x), weights, biases, on, scaling)
    wait, gather = all_gather(x, on)

    def finish() -> tuple[list[Tensor], Tensor]:
        gathered = gather()
        return [_linear(gathered, w, b) for w, b in zip(weights, biases, strict=True)], gathered

    return Started(wait, finish)


def _scaled_all_gather_gemm(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], on: Collectives, scaling: _C.Scaling
) -> Started:
    """One collective, of bytes: rows, and their scales behind them. Each rank has scales of its own, so what came from
    each is a product of its own."""
    k = x.shape[-1]
    rows, scales = x.numel() // k, scaling.x.numel()
    begin, end = rows * k, rows * k + 4 * scales
    size = -(-end // 16) * 16  # where products may begin
    packed = torch.zeros(size, dtype=torch.uint8, device=x.device)
    packed[:begin] = x.contiguous().view(torch.uint8).flatten()
    packed[begin:end] = _plain(scaling.x).contiguous().flatten().view(torch.uint8)
    wait, gather = on.start(_all_gather_single, packed.new_empty(size * on.group.size()), packed)

    def finish() -> tuple[list[Tensor], None]:
        parts = gather().view(on.group.size(), size)
        results = []
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            lead = (x.shape[0] * len(parts), *x.shape[1:-1])
            result = torch.empty(*lead, weight.shape[0], dtype=scaling.out_dtype, device=x.device)
            for part, of_part in zip(parts, result.view(len(parts), rows, weight.shape[0]), strict=True):
                of_x = part[:begin].view(x.dtype).view(rows, k), part[begin:end].view(torch.float32)
                of_part.copy_(_scaled_linear(*of_x, weight, bias, scaling, i))
            results.append(result)
        return results, None

    return Started(wait, finish)


def scaled_product(x: Tensor, weight: Tensor, bias: Tensor | None, scaling: _C.Scaling) -> Tensor:
    """Of x of any number of dimensions; exchanges nothing."""
    x = _plain(x)
    matrix = x.contiguous().view(-1, x.shape[-1])
    return _scaled_linear(matrix, _plain(scaling.x), weight, bias, scaling).view(*x.shape[:-1], len(weight))


def _scaled_linear(
    x: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, scaling: _C.Scaling, number: int = 0
) -> Tensor:
    """Of a matrix, with the scales of weight `number`."""
    weight, of_weight = _plain(weight), _plain(scaling.weights[number])
    bias = None if bias is None else _plain(bias)
    of_x = scale.reshape(-1, 1)
    if not x.numel() or not weight.numel():
        return torch.empty(len(x), len(weight), dtype=scaling.out_dtype, device=x.device)
    if x.device.type == "cpu":
        with torch.autocast("cpu", enabled=False):
            product = x.float() @ weight.float().t()
        product.mul_(of_x).mul_(of_weight.reshape(1, -1))
        return (product if bias is None else product.add_(bias)).to(scaling.out_dtype)
    in_product = bias is not None and bias.dtype != torch.float32  # which torch does not add there
    product = torch._scaled_mm(
        x,
        weight.t(),
        scale_a=of_x.contiguous() if scaling.row_wise else of_x.reshape(()),
        scale_b=of_weight.reshape(1, -1).contiguous() if scaling.row_wise else of_weight.reshape(()),
        bias=bias if in_product else None,
        out_dtype=scaling.out_dtype,
        use_fast_accum=scaling.use_fast_accum,
    )
    return product if bias is None or in_product else product.add_(bias)


def _partial(x: Tensor, weight: Tensor, scaling: _C.Scaling | None) -> Tensor:
    """This rank's term of a sum of products."""
    return _linear(_plain(x), weight, None) if scaling is None else scaled_product(x, weight, None, scaling)


def gemm_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, on: Collectives, scaling: _C.Scaling | None = None
) -> Started:
    wait, scatter = reduce_scatter(_partial(x, weight, scaling), on)
    return Started(wait, scatter if bias is None else lambda: scatter().add_(_plain(bias)))


def gemm_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None, on: Collectives, scaling: _C.Scaling | None = None
) -> Started:
    wait, reduce = all_reduce(_partial(x, weight, scaling), on)
    return Started(wait, reduce if bias is None else lambda: reduce().add_(_plain(bias)))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):  # which overlapped plans do not see either
        return torch.nn.functional.linear(x, _plain(weight), None if bias is None else _plain(bias))


def _plain(tensor: Tensor) -> Tensor:
    """Of a subclass the tensor itself, so that results are plain tensors, as an overlapped plan's."""
    if type(tensor) is Tensor:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)
