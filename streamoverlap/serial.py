"""The serial algorithm: the group's own collective (NCCL, Gloo), then one GEMM. Nothing is overlapped.

It is what every overlapped plan is compared with, and what runs where ranks share no memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from streamoverlap.errors import CommunicatorError, MismatchError, PeerTimeoutError

# torch 2.14 renamed the single-tensor collectives; 2.11 knows the old names only.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_POLL = 0.05  # seconds
_HEADER = 256  # bytes


class Collectives(NamedTuple):
    """A group's own collectives, bounded by a timeout in seconds, of a group that may fail at any time."""

    group: dist.ProcessGroup
    timeout: float
    check: Callable[[], None]  # raises if the group has failed
    failed: Callable[[CommunicatorError], None]  # is told what this rank raises: no further call is in step with peers

    def run(self, collective: Callable, output: Tensor, x: Tensor) -> None:
        if not output.numel():
            return
        if x.device.type == "cuda":  # only the stream waits; NCCL's own watchdog bounds it
            collective(output, x.contiguous(), group=self.group, async_op=True).wait()
            return
        begin = time.monotonic()
        try:
            self._wait(collective(output, x.contiguous(), group=self.group, async_op=True))
        except BaseException as failure:
            if not isinstance(failure, CommunicatorError):
                elapsed = time.monotonic() - begin
                error = self._error(failure, elapsed)
                self.failed(error)
                if isinstance(failure, RuntimeError):
                    raise error from failure
            raise

    def _wait(self, work: dist.Work) -> None:
        """In a thread of its own: Gloo's wait ignores its timeout, and some of its works never say they are done."""
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                errors.append(error)

        deadline = time.monotonic() + self.timeout
        thread = threading.Thread(target=wait, name="streamoverlap serial", daemon=True)
        thread.start()
        while thread.is_alive():
            left = deadline - time.monotonic()
            if left <= 0:
                raise RuntimeError("timed out")
            thread.join(min(left, _POLL))
            self.check()
        self.check()  # what has arrived may be of another call
        if errors:
            raise errors[0]

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
    """Compares this rank's call, the group's `number`-th serial one, with all peers'. On the CPU; collective.

    For groups without shared memory to do it in. The message has one size whatever ranks call, as Gloo needs.

    Raises:
        MismatchError: on every rank, if they differ.
    """
    signature, text = call
    header = f"{signature:08x} {number} {text}".encode()[:_HEADER].ljust(_HEADER)
    headers = torch.empty(on.group.size(), _HEADER, dtype=torch.uint8)
    on.run(_all_gather_single, headers, torch.frombuffer(bytearray(header), dtype=torch.uint8)[None])
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


def all_gather(x: Tensor, on: Collectives) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors, as an overlapped plan's
        gathered = x.new_empty((x.shape[0] * on.group.size(), *x.shape[1:]))
        on.run(_all_gather_single, gathered, x)
        return gathered


def reduce_scatter(x: Tensor, on: Collectives) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        scattered = x.new_empty((x.shape[0] // on.group.size(), *x.shape[1:]))
        on.run(_reduce_scatter_single, scattered, x)
        return scattered


def all_gather_gemm(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], on: Collectives
) -> tuple[list[Tensor], Tensor]:
    gathered = all_gather(x, on)
    with torch._C.DisableTorchFunctionSubclass():
        return [torch.nn.functional.linear(gathered, w, b) for w, b in zip(weights, biases, strict=True)], gathered


def gemm_reduce_scatter(x: Tensor, weight: Tensor, bias: Tensor | None, on: Collectives) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        scattered = reduce_scatter(torch.nn.functional.linear(x, weight), on)
        return scattered if bias is None else scattered.add_(bias)
