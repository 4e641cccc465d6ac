"""The CUDA streams that a call runs on besides the current one: the caller's choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from streamoverlap import _C

_in_use: ContextVar[StreamSet | None] = ContextVar("streamoverlap_streams", default=None)


class StreamSet:
    """Streams of one device for the roles of a plan. Keep it: its workspaces are allocated at the first use.

    Args:
        send: where copies to peers are enqueued.
        recv: where peers are awaited. Asynchronous calls end on it, and `Work.then` launches on it.
        compute: 1 to 3 streams for the products, at least as many as a plan uses (`PlanSpec.compute_streams`).
            Each gets a workspace of 32 MiB.

    Every stream is a `torch.cuda.Stream`, a CuPy stream, another object with ``__cuda_stream__``, or a handle
    (``cudaStream_t`` as an int) of the current device. They may be shared with other work and other communicators, and
    must live as long as the set, and as tensors that `Work.then` has used on them. Calls that hand in no set use a
    private one of highest priority. A call that is captured in a CUDA graph always uses the private one, as a graph has
    no streams.

    Raises:
        TypeError, ValueError: an argument is not as described.
        RuntimeError: this build of the package has no CUDA part.
    """

    def __init__(self, *, send: Any, recv: Any, compute: Sequence[Any]) -> None:
        if not _C.WITH_CUDA:
            raise RuntimeError("streamoverlap was built without its CUDA part; a StreamSet is of CUDA streams")
        if not isinstance(compute, Sequence):
            raise TypeError(f"compute is a {type(compute).__name__}; expected a list of 1 to 3 streams")
        named = {"send": send, "recv": recv, **{f"compute[{i}]": stream for i, stream in enumerate(compute)}}
        devices = {_device_of(stream) for stream in named.values()} - {None}
        if len(devices) > 1:
            raise ValueError(f"streams are of devices {sorted(devices)}; expected all of one device")
        handles = [_handle(name, stream) for name, stream in named.items()]
        self.device = devices.pop() if devices else torch.cuda.current_device()
        self.recv_handle = handles[1]
        self.compute_streams = len(compute)
        self._streams = named  # so that they live
        self._impl = _C.StreamSet(self.device, handles[0], handles[1], handles[2:])

    @classmethod
    def from_pool(cls, compute: int = 1, device: int | torch.device | None = None) -> StreamSet:
        """A set of torch's pooled streams (of high priority), which other code may be given as well."""
        if isinstance(compute, bool) or not isinstance(compute, int) or not 1 <= compute <= _C.MAX_COMPUTE_STREAMS:
            raise ValueError(f"compute is {compute!r}; expected an integer from 1 to {_C.MAX_COMPUTE_STREAMS}")
        send, recv, *rest = (torch.cuda.Stream(device, priority=-1) for _ in range(2 + compute))
        return cls(send=send, recv=recv, compute=rest)


@contextmanager
def use_streams(streams: StreamSet | None) -> Iterator[None]:
    """Calls of this thread (or asyncio task) that name no `streams` use these; None: private ones. CPU calls do not."""
    token = _in_use.set(_expect_set(streams))
    try:
        yield
    finally:
        _in_use.reset(token)


def choose_streams(streams: StreamSet | None, device_type: str) -> StreamSet | None:
    """The set for a call on a kind of device, given what the call names."""
    if streams is None:
        return _in_use.get() if device_type == "cuda" else None
    _expect_set(streams)
    if device_type != "cuda":
        raise ValueError(f"streams is given but x is on the {device_type}; expected None, or x on a CUDA device")
    return streams


def _expect_set(streams: StreamSet | None) -> StreamSet | None:
    if streams is not None and not isinstance(streams, StreamSet):
        raise TypeError(f"streams is a {type(streams).__name__}; expected streamoverlap.StreamSet or None")
    return streams


def _handle(name: str, stream: Any) -> int:
    if isinstance(stream, torch.cuda.Stream):
        return stream.cuda_stream
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__  # a method, or a property in early versions of the protocol
        return int((protocol() if callable(protocol) else protocol)[1])
    if isinstance(getattr(stream, "ptr", None), int):
        return stream.ptr  # CuPy
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    raise TypeError(f"{name} is a {type(stream).__name__}; expected a torch or CuPy stream, or a handle as an int")


def _device_of(stream: Any) -> int | None:
    if isinstance(stream, torch.cuda.Stream):
        return stream.device_index
    device = getattr(stream, "device_id", None)  # CuPy; -1 where it does not know
    return device if isinstance(device, int) and device >= 0 else None
