"""The serial algorithm: the group's own collective (NCCL, Gloo), then one GEMM. Nothing is overlapped.

It is what every overlapped plan is compared with, and what runs where ranks share no memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from streamoverlap.errors import CommunicatorError, MismatchError, PeerTimeoutError

# torch 2.14 renamed the single-tensor collectives; 2.11 knows the old names only.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_POLL = 0.05  # seconds
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


class Collectives(NamedTuple):
    """A group's own collectives, bounded by a timeout in seconds, of a group that may fail at any time."""

    group: dist.ProcessGroup
    timeout: float
    check: Callable[[], None]  # raises if the group has failed
    failed: Callable[[CommunicatorError], None]  # is told what this rank raises: no further call is in step with peers

    def start(self, collective: Callable, output: Tensor, x: Tensor) -> Started:
        if not output.numel():
            return Started(lambda: None, lambda: output)
        begin = time.monotonic()
        with self._failures_told(begin):
            work = collective(output, x.contiguous(), group=self.group, async_op=True)
        if x.device.type == "cuda":  # NCCL's own watchdog bounds it
            return Started(work.wait, lambda: output)
        return Started(partial(self._wait, work, begin), lambda: output)

    def _wait(self, work: dist.Work, begin: float) -> None:
        """In a thread of its own: Gloo's wait ignores its timeout, and some of its works never say they are done."""
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                errors.append(error)

        with self._failures_told(begin):
            thread = threading.Thread(target=wait, name="streamoverlap serial", daemon=True)
            thread.start()
            while thread.is_alive():
                left = begin + self.timeout - time.monotonic()
                if left <= 0:
                    raise RuntimeError("timed out")
                thread.join(min(left, _POLL))
                self.check()
            self.check()  # what has arrived may be of another call
            if errors:
                raise errors[0]

    @contextmanager
    def _failures_told(self, begin: float) -> Iterator[None]:
        try:
            yield
        except CommunicatorError:
            raise
        except BaseException as failure:
            error = self._error(failure, time.monotonic() - begin)
            self.failed(error)
            if isinstance(failure, RuntimeError):
                raise error from failure
            raise

    def _error(self, failure: BaseException, elapsed: float) -> CommunicatorError:
        name = self.group.group_name
        timed_out = isinstance(failure, RuntimeError)
        cause = f"a peer is gone, or called something else ({failure})" if timed_out else type(failure).__name__
        text = (
            f"a serial exchange on group '{name}' failed after {elapsed:.1f} s, of the {self.timeout:g} s that it may "
            f"take: {cause}; the group cannot be used any more"
        )
        if timed_out:
            return PeerTimeoutError(text, group=name, elapsed=elapsed)
        return CommunicatorError(text, group=name, peer=self.group.rank(), elapsed=elapsed)


def agree(call: tuple[int, str], number: int, on: Collectives) -> None:
    """Compares this rank's call, the group's `number`-th serial one, with all peers'. On the CPU; collective, and waits.

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
        on.failed(error)
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


def all_gather_gemm(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], on: Collectives) -> Started:
    wait, gather = all_gather(x, on)

    def finish() -> tuple[list[Tensor], Tensor]:
        gathered = gather()
        return [_linear(gathered, w, b) for w, b in zip(weights, biases, strict=True)], gathered

    return Started(wait, finish)


def gemm_reduce_scatter(x: Tensor, weight: Tensor, bias: Tensor | None, on: Collectives) -> Started:
    wait, scatter = reduce_scatter(_linear(_plain(x), weight, None), on)
    return Started(wait, scatter if bias is None else lambda: scatter().add_(_plain(bias)))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, _plain(weight), None if bias is None else _plain(bias))


def _plain(tensor: Tensor) -> Tensor:
    """Of a subclass the tensor itself, so that results are plain tensors, as an overlapped plan's."""
    if type(tensor) is Tensor:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)
