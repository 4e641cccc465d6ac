"""`streamoverlap doctor` on GPUs: what it says of them, and how it looks, at a driver that is played here."""

from __future__ import annotations

import ctypes
import json
import os
from types import SimpleNamespace

import pytest
import torch
from played_machine import doctor, gpu_facts, named, play, record

from streamoverlap import _C
from streamoverlap.doctor import driver, gpu_findings, gpus
from streamoverlap.doctor.gpus import Facts, Gpu, Pair, Speeds
from streamoverlap.doctor.isolated import CallFailed


@pytest.fixture
def machine(monkeypatch) -> dict:
    return play(monkeypatch)


@pytest.fixture
def with_cuda_part(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(_C, "WITH_CUDA", True)
    record(monkeypatch, tmp_path, torch=torch.__version__, nvcc="13.0", architectures="9.0+PTX")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


def test_gpus_that_are_well(with_cuda_part, machine, capsys) -> None:
    machine[gpus.look] = gpu_facts
    code, out = doctor(capsys)
    assert code == 0 and out.rstrip().endswith("Nothing is wrong.")
    for said in (
        "host and CUDA parts (nvcc 13.0, for 9.0+PTX)",
        "580.1, for CUDA 13.0 and older; torch is built for 13.0",
        "2 x a GPU (10 GB, compute capability 9.0)",
        "flags in host memory: all 2 can",
        "NVLink (18 links a GPU): 380 GB/s each way, 2.0 us",
        "600 TFLOP/s",
        "CUDA tensors: overlap on streams and copy engines (2 GPUs tried)",
    ):
        assert said in out


def test_links_of_many_gpus_are_a_table(with_cuda_part, machine, capsys) -> None:
    machine[gpus.look] = lambda: gpu_facts(3)
    machine[gpus.measure] = lambda pairs: Speeds([6e14] * 3, [(3.8e11, 2e-6), (3e11, 2e-6), "out of memory"])
    code, out = doctor(capsys)
    assert code == 1
    rows = [line.split() for line in out.splitlines() if line.strip().startswith(("0-1", "0-2", "1-2"))]
    assert [row[-3:] for row in rows] == [["yes", "380.0", "2.0"], ["yes", "300.0", "2.0"], ["yes", "-", "-"]]
    assert json.loads(doctor(capsys, "--json")[1])["failures"] == 1


@pytest.mark.parametrize(
    ("changes", "name", "state", "said"),
    [
        ({"pairs": [Pair(0, 1, "PCIe", False)]}, "peer access", "warning", "none between GPUs 0-1"),
        ({"driver_cuda": (11, 8)}, "driver", "warning", "for CUDA 11.8 and older"),
        ({"gpus": [Gpu(0, "old", 1, (8, 0), "", "")], "pairs": []}, "CUDA part", "failure", "GPU 0 has 8.0"),
        ({"gpus": [Gpu(0, "new", 1, (9, 0), "it hangs", "")]}, "stream memory operations", "warning", "it hangs"),
        (
            {"gpus": [Gpu(0, "new", 1, (9, 0), "", "no vmm")]},
            "IPC",
            "warning",
            "GPU 0: no vmm; groups on it run serial",
        ),
    ],
)
def test_what_gpus_lack(changes: dict, name: str, state: str, said: str, with_cuda_part) -> None:
    found = named(gpu_findings.of_facts(gpu_facts(**changes)), name)
    assert found.state == state and said in found.found and found.advice


def test_hidden_gpus(with_cuda_part, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    one = named(gpu_findings.of_facts(gpu_facts(1, all_gpus=8)), "CUDA_VISIBLE_DEVICES")
    assert one.state == "warning" and "1 of 8 GPUs are seen; ranks that do not see each other's run serial" in one.found
    assert named(gpu_findings.of_facts(gpu_facts(2, all_gpus=8)), "CUDA_VISIBLE_DEVICES").state == "info"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = gpu_findings.of_facts(Facts("13.0", None, "", "cuInit failed: CUDA_ERROR_NO_DEVICE", True, 8))[0]
    assert (
        hidden.state == "warning" and "torch finds none of 8" in hidden.found and "CUDA_VISIBLE_DEVICES" in hidden.found
    )


@pytest.mark.parametrize(("why", "state"), [("CUDA_ERROR_NO_DEVICE", "info"), ("DRIVER_MISMATCH", "warning")])
def test_a_driver_without_a_gpu_is_no_fault_but_one_that_fails_is(why: str, state: str) -> None:
    assert gpu_findings.of_facts(Facts("13.0", None, "", why, True, None))[0].state == state


def test_a_slow_gpu_and_a_slow_link_are_warnings() -> None:
    speeds = Speeds([6e14, 6e14, 2e14], [(3.8e11, 2e-6), (3.8e11, 2e-6), (2e10, 2e-5)])
    gemm, links = gpu_findings.of_speeds(gpu_facts(3), speeds)
    assert (gemm.state, links.state) == ("warning", "warning")
    assert "3.0 times slower" in gemm.found and "19.0 times slower" in links.found


def test_a_gpu_that_hangs_is_a_failure(machine, capsys) -> None:
    def hangs() -> Facts:
        raise CallFailed("no answer within 90 s")

    machine[gpus.look] = hangs
    code, out = doctor(capsys)
    assert code == 1
    assert "GPUs" in out and "cannot be looked at: no answer within 90 s" in out
    assert "CUDA tensors: do not work: see GPUs above" in out


# The driver and NVML, played by objects that take what ctypes would pass on.


class FakeCuda:
    """Carries out memory operations at once, or (`stuck`) never."""

    stuck = False

    def __init__(self) -> None:
        self.registered: list[int] = []

    def cuInit(self, flags) -> int:  # noqa: N802
        return 0

    def cuDriverGetVersion(self, version) -> int:  # noqa: N802
        version._obj.value = 13020
        return 0

    def cuDeviceGet(self, device, ordinal) -> int:  # noqa: N802
        device._obj.value = ordinal.value
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device) -> int:  # noqa: N802
        value._obj.value = int(device.value == 0)
        return 0

    def cuMemHostRegister_v2(self, host_, size, flags) -> int:  # noqa: N802
        self.registered.append(host_.value)
        return 0

    def cuMemHostGetDevicePointer_v2(self, address, host_, flags) -> int:  # noqa: N802
        address._obj.value = host_.value
        return 0

    def cuStreamWriteValue32_v2(self, stream, address, value, flags) -> int:  # noqa: N802
        if not self.stuck:
            ctypes.c_uint32.from_address(address.value).value = value.value
        return 0

    def cuStreamWaitValue32_v2(self, stream, address, value, flags) -> int:  # noqa: N802
        assert self.stuck or ctypes.c_uint32.from_address(address.value).value == value.value
        return 0

    def cuStreamSynchronize(self, stream) -> int:  # noqa: N802
        return 0

    def cuMemHostUnregister(self, host_) -> int:  # noqa: N802
        self.registered.remove(host_.value)
        return 0

    def cuGetErrorName(self, code, text) -> int:  # noqa: N802
        text._obj.value = b"CUDA_ERROR_NO_DEVICE"
        return 0


class FakeNvml:
    """GPUs a and b have NVLink, a and c a host bridge between them."""

    def __init__(self) -> None:
        self.nvmlErrorString = lambda code: b"Not Found"  # an attribute is set on it

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 0

    def nvmlSystemGetDriverVersion(self, text, size) -> int:  # noqa: N802
        text.value = b"580.1"
        return 0

    def nvmlDeviceGetCount_v2(self, count) -> int:  # noqa: N802
        count._obj.value = 3
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle) -> int:  # noqa: N802
        handle._obj.value = {b"GPU-a": 1, b"GPU-b": 2, b"GPU-c": 3}.get(uuid.value)
        return 0 if handle._obj.value else 6

    def nvmlDeviceGetP2PStatus(self, one, other, index, status) -> int:  # noqa: N802
        status._obj.value = 0 if index.value == 2 and {one.value, other.value} == {1, 2} else 5
        return 0

    def nvmlDeviceGetNvLinkState(self, gpu, link, active) -> int:  # noqa: N802
        active._obj.value = 1
        return 0 if link.value < 4 else 2

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other, level) -> int:  # noqa: N802
        level._obj.value = 30
        return 0


@pytest.fixture
def fake_libraries(monkeypatch) -> FakeCuda:
    cuda = FakeCuda()
    libraries = {"libcuda.so.1": cuda, "libnvidia-ml.so.1": FakeNvml()}
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: libraries[name])
    monkeypatch.setattr(driver, "_TRIAL", 0.05)
    return cuda


def test_driver_and_nvml(fake_libraries) -> None:
    cuda, nvml = driver.Driver(), driver.Nvml()
    assert cuda.version() == (13, 2) and cuda.registers_host_memory(0) and not cuda.shares_memory(1)
    assert cuda.try_memory_operations(7) is None and fake_libraries.registered == []
    assert (nvml.driver_version(), nvml.count()) == ("580.1", 3)
    assert nvml.link("a", "b") == "NVLink (4 links a GPU)"
    assert nvml.link("a", "GPU-c") == "PCIe, through the CPU's host bridge"
    with pytest.raises(RuntimeError, match="nvmlDeviceGetHandleByUUID failed: Not Found"):
        nvml.link("a", "z")


def test_memory_operations_that_are_not_carried_out(fake_libraries) -> None:
    fake_libraries.stuck = True
    assert "did not carry out memory operations" in driver.Driver().try_memory_operations(7)


def test_a_driver_that_does_not_start(fake_libraries, monkeypatch) -> None:
    monkeypatch.setattr(fake_libraries, "cuInit", lambda flags: 100, raising=False)
    with pytest.raises(RuntimeError, match="cuInit failed: CUDA_ERROR_NO_DEVICE"):
        driver.Driver()


@pytest.fixture
def fake_torch(fake_libraries, monkeypatch) -> None:
    """Three GPUs, a, b and c; the last one reaches no other."""

    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(name=f"GPU {index}", total_memory=8, major=9, minor=0, uuid="abc"[index])

    cuda = {
        "device_count": lambda: 3,
        "get_device_properties": properties,
        "device": lambda index: memoryview(b""),  # any context manager
        "synchronize": lambda: None,
        "Stream": lambda: SimpleNamespace(cuda_stream=7),
        "can_device_access_peer": lambda one, other: 2 not in (one, other),
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)


def test_look_at_gpus(fake_torch) -> None:
    facts = gpus.look()
    assert (facts.driver_cuda, facts.driver_version, facts.why_none, facts.all_gpus) == ((13, 2), "580.1", "", 3)
    assert [gpu.no_flags for gpu in facts.gpus] == ["", *["it cannot register host memory"] * 2]
    assert [bool(gpu.no_sharing) for gpu in facts.gpus] == [False, True, True]
    pairs = [(pair.first, pair.second, pair.peer_access) for pair in facts.pairs]
    assert pairs == [(0, 1, True), (0, 2, False), (1, 2, False)]
    assert [pair.link.split()[0] for pair in facts.pairs] == ["NVLink", "PCIe,", "PCIe,"]


def test_look_where_libraries_fail(fake_torch, monkeypatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver.ctypes, "CDLL", missing)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    facts = gpus.look()
    assert facts.why_none == "there is no NVIDIA driver (no libcuda.so.1)" and not facts.driver_present
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is not a CUDA build" in gpus.look().why_none


def test_what_cannot_be_measured_is_its_error(fake_torch, monkeypatch) -> None:
    def out_of_memory(*_, **__) -> float:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr("streamoverlap.calibrate.gemm_seconds", lambda repeats: 2.0)
    monkeypatch.setattr("streamoverlap.calibrate.measure_link", lambda *_: (1e-6, ((64.0, 5e9),)))
    assert gpus.measure([(0, 1)]) == Speeds([8192.0**3] * 3, [(5e9, 1e-6)])
    monkeypatch.setattr("streamoverlap.calibrate.measure_link", out_of_memory)
    assert gpus.measure([(0, 1)]).links == ["RuntimeError: out of memory"]


@pytest.mark.gpu(1)
def test_gpus_of_this_machine(capsys) -> None:
    code, out = doctor(capsys, "--json")
    found = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    assert code == 0, out
    count = torch.cuda.device_count()
    checked = found[f"results on {count} GPU{'s' * (count > 1)}"]
    assert checked["state"] in ("ok", "warning") and checked["values"]["elements"] > 0
    assert found["stream memory operations"]["state"] == "ok"
    assert all(rate > 1e11 for rate in found["GEMM"]["values"]["flops_per_second"])
    if count > 1:
        assert all(row["bytes_per_second"] > 1e9 for row in found["links"]["values"]["links"])
