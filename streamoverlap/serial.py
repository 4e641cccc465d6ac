"""The serial algorithm: the group's own collective (NCCL, Gloo), then one GEMM. Nothing is overlapped.

It is what every overlapped plan is compared with, and what runs where ranks share no memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from streamoverlap.errors import PeerTimeoutError

# torch 2.14 renamed the single-tensor collectives; 2.11 knows the old names only.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _all_reduce_into(output: Tensor, x: Tensor, **options: Any) -> dist.Work:
    return dist.all_reduce(output.copy_(x), **options)


def _wait(work: dist.Work, timeout: float) -> None:
    """In a thread of its own: Gloo's wait ignores its timeout, and some of its works never say that they are done."""
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            work.wait()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=wait, name="streamoverlap serial", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise RuntimeError("timed out")
    if errors:
        raise errors[0]


class Started(NamedTuple):
    """An op whose collective has been issued on the caller's thread, so in the order of the group's other ones."""

    wait: Callable[[], None]  # for the collective: on the CPU the thread waits, on CUDA the current stream
    finish: Callable[[], Any]  # what comes after it; gives the result

    def complete(self) -> Any:
        self.wait()
        return self.finish()


class Collectives(NamedTuple):
    """A group's own collectives, bounded by a timeout in seconds."""

    group: dist.ProcessGroup
    timeout: float
    failed: Callable[[str], None]  # is told the cause

    def start(self, collective: Callable, output: Tensor, x: Tensor) -> Started:
        if not output.numel():
            return Started(lambda: None, lambda: output)
        work = collective(output, x.contiguous(), group=self.group, async_op=True)
        if x.device.type == "cuda":  # NCCL's own watchdog bounds it
            return Started(work.wait, lambda: output)
        return Started(partial(self._wait, work, time.monotonic()), lambda: output)

    def _wait(self, work: dist.Work, begin: float) -> None:
        try:
            _wait(work, self.timeout)
        except RuntimeError as failure:
            elapsed = time.monotonic() - begin
            text = (
                f"a serial exchange on group '{self.group.group_name}' failed after {elapsed:.1f} s, of the "
                f"{self.timeout:g} s that it may take: a peer is gone, or called something else ({failure})"
            )
            self.failed(text)
            raise PeerTimeoutError(text, group=self.group.group_name, elapsed=elapsed) from failure


def all_gather(x: Tensor, on: Collectives) -> Started:
    return on.start(_all_gather_single, x.new_empty((x.shape[0] * on.group.size(), *x.shape[1:])), x)


def reduce_scatter(x: Tensor, on: Collectives) -> Started:
    return on.start(_reduce_scatter_single, x.new_empty((x.shape[0] // on.group.size(), *x.shape[1:])), x)


def all_reduce(x: Tensor, on: Collectives) -> Started:
    return on.start(_all_reduce_into, torch.empty_like(x, memory_format=torch.contiguous_format), x)


def all_gather_gemm(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], on: Collectives) -> Started:
    wait, gather = all_gather(x, on)

    def finish() -> tuple[list[Tensor], Tensor]:
        gathered = gather()
        return [torch.nn.functional.linear(gathered, w, b) for w, b in zip(weights, biases, strict=True)], gathered

    return Started(wait, finish)


def gemm_reduce_scatter(x: Tensor, weight: Tensor, bias: Tensor | None, on: Collectives) -> Started:
    wait, scatter = reduce_scatter(torch.nn.functional.linear(x, weight), on)
    return Started(wait, scatter if bias is None else lambda: scatter().add_(bias))
