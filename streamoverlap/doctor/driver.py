"""The NVIDIA driver and NVML through ctypes: no package is needed, and where there is no driver nothing breaks."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from ctypes import byref, c_char_p, c_int, c_uint, c_uint32, c_uint64, c_void_p

# Of cuda.h.
_HOST_REGISTER_SUPPORTED, _VIRTUAL_MEMORY, _FILE_DESCRIPTORS = 99, 102, 103
_PORTABLE_DEVICEMAP = 1 | 2
_WRITE_DEFAULT, _WAIT_EQUAL = 0, 1
# Of nvml.h.
_CAPS_NVLINK, _P2P_OK = 2, 0
_ANCESTORS = {
    0: "on one board",
    10: "PCIe, one switch",
    20: "PCIe, several switches",
    30: "PCIe, through the CPU's host bridge",
    40: "PCIe, through host bridges of one NUMA node",
    50: "PCIe, between NUMA nodes",
}
_MOST_LINKS = 18  # NVLinks of a GPU
_TRIAL = 10.0  # seconds that a stream gets for three memory operations


class Driver:
    """libcuda. OSError: there is none. RuntimeError: a call failed; the message has the driver's error."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)

    def version(self) -> tuple[int, int]:
        """The newest CUDA that the driver is for."""
        number = c_int()
        self._call("cuDriverGetVersion", byref(number))
        return number.value // 1000, number.value % 1000 // 10

    def registers_host_memory(self, gpu: int) -> bool:
        return self._attribute(gpu, _HOST_REGISTER_SUPPORTED)

    def shares_memory(self, gpu: int) -> bool:
        """Whether memory of the GPU can be handed to other processes, as torch's symmetric memory is."""
        return self._attribute(gpu, _VIRTUAL_MEMORY) and self._attribute(gpu, _FILE_DESCRIPTORS)

    def try_memory_operations(self, stream: int) -> str | None:
        """Why `stream` (a cudaStream_t) does not set and await flags in shared memory of the host; None if it does.

        The context of its GPU must be current. After a failure the stream may never end.
        """
        word = c_uint32.from_buffer(_page())
        address, queue = c_uint64(), c_void_p(stream)
        host = c_void_p(ctypes.addressof(word))
        self._call("cuMemHostRegister_v2", host, ctypes.c_size_t(mmap.PAGESIZE), c_uint(_PORTABLE_DEVICEMAP))
        self._call("cuMemHostGetDevicePointer_v2", byref(address), host, c_uint(0))
        self._call("cuStreamWriteValue32_v2", queue, address, c_uint32(1), c_uint(_WRITE_DEFAULT))
        self._call("cuStreamWaitValue32_v2", queue, address, c_uint32(1), c_uint(_WAIT_EQUAL))
        self._call("cuStreamWriteValue32_v2", queue, address, c_uint32(2), c_uint(_WRITE_DEFAULT))
        deadline = time.monotonic() + _TRIAL
        while word.value != 2:
            if time.monotonic() > deadline:
                return f"its streams did not carry out memory operations within {_TRIAL:g} s"
            time.sleep(1e-4)
        self._call("cuStreamSynchronize", queue)
        self._call("cuMemHostUnregister", host)
        return None

    def _attribute(self, gpu: int, attribute: int) -> bool:
        device, value = c_int(), c_int()
        self._call("cuDeviceGet", byref(device), c_int(gpu))
        self._call("cuDeviceGetAttribute", byref(value), c_int(attribute), device)
        return value.value != 0

    def _call(self, name: str, *args) -> None:
        code = getattr(self._library, name)(*args)
        if code != 0:
            text = c_char_p()
            self._library.cuGetErrorName(c_int(code), byref(text))
            raise RuntimeError(f"{name} failed: {text.value.decode() if text.value else f'error {code}'}")


class Nvml:
    """libnvidia-ml. OSError: there is none. RuntimeError: a call failed."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")

    def driver_version(self) -> str:
        text = ctypes.create_string_buffer(96)
        self._call("nvmlSystemGetDriverVersion", text, c_uint(len(text)))
        return text.value.decode()

    def count(self) -> int:
        """GPUs of the machine (of the container), whatever CUDA_VISIBLE_DEVICES hides."""
        number = c_uint()
        self._call("nvmlDeviceGetCount_v2", byref(number))
        return number.value

    def link(self, first: str, second: str) -> str:
        """What is between two GPUs, given by UUID."""
        one, other = self._handle(first), self._handle(second)
        status, level = c_int(), c_int()
        self._call("nvmlDeviceGetP2PStatus", one, other, c_int(_CAPS_NVLINK), byref(status))
        if status.value == _P2P_OK:
            return f"NVLink ({min(self._links(one), self._links(other))} links a GPU)"
        self._call("nvmlDeviceGetTopologyCommonAncestor", one, other, byref(level))
        return _ANCESTORS.get(level.value, f"topology level {level.value}")

    def _links(self, gpu: c_void_p) -> int:
        active = c_int()
        state = self._library.nvmlDeviceGetNvLinkState  # fails for links that the GPU has not got
        return sum(state(gpu, c_uint(i), byref(active)) == 0 and active.value == 1 for i in range(_MOST_LINKS))

    def _handle(self, uuid: str) -> c_void_p:
        handle = c_void_p()
        named = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"  # torch leaves it out
        self._call("nvmlDeviceGetHandleByUUID", c_char_p(named.encode()), byref(handle))
        return handle

    def _call(self, name: str, *args) -> None:
        code = getattr(self._library, name)(*args)
        if code != 0:
            self._library.nvmlErrorString.restype = c_char_p
            raise RuntimeError(f"{name} failed: {self._library.nvmlErrorString(c_int(code)).decode()}")


def _page() -> mmap.mmap:
    """A page of shared memory, of the kind that flags are in."""
    descriptor = os.memfd_create("streamoverlap", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
        return mmap.mmap(descriptor, mmap.PAGESIZE)
    finally:
        os.close(descriptor)
