"""`streamoverlap doctor`: what it says of machines that are well, lack something, or are broken."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from played_machine import doctor, gpu_facts, named, outcomes, play, record

import streamoverlap
from streamoverlap import _C
from streamoverlap.doctor import built, check, gpus, host, isolated
from streamoverlap.doctor.check import Outcome
from streamoverlap.doctor.findings import STATES, Finding
from streamoverlap.doctor.isolated import CallFailed, call

PACKAGE = Path(streamoverlap.__file__).parent
KEYS = {"area", "name", "state", "found", "advice", "values"}


@pytest.fixture
def machine(monkeypatch) -> dict:
    return play(monkeypatch)


def test_this_machine_without_anything_faked() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-m", "streamoverlap", "doctor", "--json"],
        capture_output=True, text=True, timeout=150, check=False, env=environment,
    )  # fmt: skip
    found = json.loads(result.stdout)
    assert result.returncode == 0, result.stdout
    checked = next(finding for finding in found["findings"] if finding["name"] == "results on 2 CPU ranks")
    assert checked["state"] == "ok"
    gathered, scattered = 2 * 24 * 40 * 3, 24 * 40 * 3  # elements of a rank in three rounds
    assert checked["values"]["elements"] == (gathered + scattered) * 2 * len(check.DTYPES) * 3
    assert found["uses"]["cpu"].startswith("overlap on threads")
    assert found["uses"]["cuda"].startswith("not available: ")


def test_json_has_every_finding(machine, capsys) -> None:
    code, out = doctor(capsys, "--json")
    found = json.loads(out)
    assert code == 0 and set(found) == {"findings", "uses", "failures", "right"}
    assert found["right"] and found["failures"] == 0 and set(found["uses"]) == {"cpu", "cuda"}
    assert all(set(finding) == KEYS and finding["state"] in STATES for finding in found["findings"])
    assert {finding["area"] for finding in found["findings"]} == {"build", "machine", "environment", "GPUs", "check"}


def test_a_machine_without_gpus_is_well(machine, capsys) -> None:
    code, out = doctor(capsys)
    assert code == 0
    assert "\x1b" not in out  # no colour in a file or a pipe
    assert "CPU tensors: overlap on threads (2 CPU ranks tried)" in out
    assert "CUDA tensors: not available: there is no NVIDIA driver (no libcuda.so.1)" in out
    assert out.rstrip().endswith("Nothing is wrong.")


def test_colour_on_a_terminal(machine, monkeypatch, capsys) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[32mok" in doctor(capsys)[1]


def test_a_wrong_result_ends_with_1(machine, capsys) -> None:
    machine[check.run_ranks] = lambda device, world: outcomes(device, world, wrong=12)
    code, out = doctor(capsys)
    assert code == 1
    assert "rank 0: 12 of 96 elements of all_gather_gemm (serial, float32) are wrong" in out
    assert "CPU tensors: give wrong results" in out and "1 failure" in out


@pytest.mark.parametrize("how", ["raised", "died", "error"])
def test_a_check_that_fails_ends_with_1(how: str, machine, capsys) -> None:
    def fails(device: str, world: int) -> list[Outcome] | str:
        if how == "raised":
            raise CallFailed("no answer within 180 s")
        return (
            "rank 1 failed: no memory" if how == "died" else outcomes(device, world, error="ring, float32: no memory")
        )

    machine[check.run_ranks] = fails
    code, out = doctor(capsys)
    said = {
        "raised": "no answer within 180 s",
        "died": "rank 1 failed: no memory",
        "error": "rank 0: ring, float32: no",
    }
    assert code == 1 and said[how] in out and "CPU tensors: do not work: see results on 2 CPU ranks above" in out


def test_ranks_that_run_serial_are_a_warning(machine, capsys) -> None:
    machine[check.run_ranks] = lambda device, world: outcomes(device, world, fallback="rank 0: no memory")
    code, out = doctor(capsys)
    assert code == 0
    assert "CPU tensors: run serial, right but not hidden: rank 0: no memory" in out and "1 warning" in out


def test_no_shared_memory_ends_with_1(machine, monkeypatch, capsys) -> None:
    def refuse(*_) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    code, out = doctor(capsys)
    assert code == 1
    assert "a memfd of 16 MiB cannot be made: Operation not permitted" in out and "seccomp" in out


def test_too_little_shared_memory_is_a_failure_and_leaves_no_descriptor(monkeypatch) -> None:
    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    found = host.shared_memory()
    assert (found.state, len(os.listdir("/proc/self/fd"))) == ("failure", before)
    assert "No space left" in found.found


def test_a_probe_that_raises_is_a_finding(machine, monkeypatch, capsys) -> None:
    def broken() -> Finding:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(host, "memory", broken)
    monkeypatch.setattr(built, "look", lambda _: 1 / 0)
    code, out = doctor(capsys)
    assert code == 1
    assert "cannot be told: RuntimeError: first line" in out and "second line" not in out
    assert "cannot be told: ZeroDivisionError" in out


@pytest.mark.parametrize(
    ("setting", "state", "said"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS=1", "ok", "1: a GPU's streams share one queue"),
        ("CUDA_DEVICE_MAX_CONNECTIONS=32", "ok", "32: a GPU's streams are spread"),
        ("CUDA_LAUNCH_BLOCKING=1", "warning", "nothing overlaps"),
        ("CUDA_LAUNCH_BLOCKING=0", "ok", "not set"),
        ("CUDA_MODULE_LOADING=EAGER", "ok", "EAGER"),
        ("OMP_NUM_THREADS=3", "ok", "3 for each rank"),
    ],
)
def test_environment(setting: str, state: str, said: str, monkeypatch) -> None:
    name, _, value = setting.partition("=")
    monkeypatch.setenv(name, value)
    found = named(host.environment(), name)
    assert found.state == state and said in found.found


def test_few_open_files_and_little_memory_are_warnings(monkeypatch) -> None:
    monkeypatch.setattr(host.resource, "getrlimit", lambda _: (64, 4096))
    monkeypatch.setattr(host, "_available", lambda: 300 << 20)
    assert [named(host.machine(), name).state for name in ("open files", "memory")] == ["warning", "warning"]


@pytest.mark.parametrize(
    ("changes", "state"), [({}, "ok"), ({"torch": "2.3.0"}, "failure"), ({"torch": None}, "info")], ids=str
)
def test_torch_of_another_minor_version_is_a_failure(changes: dict, state: str, monkeypatch, tmp_path) -> None:
    record(monkeypatch, tmp_path, **{"torch": torch.__version__, **changes})
    assert named(built.look(None), "torch").state == state


@pytest.mark.parametrize("reason", ["no nvcc on PATH, nor in CUDA_HOME or /usr/local/cuda", None])
def test_why_there_is_no_cuda_part(reason: str | None, machine, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(_C, "WITH_CUDA", False)
    record(monkeypatch, tmp_path, why_no_cuda=reason)
    said = reason or "why was not recorded"
    code, out = doctor(capsys)
    assert code == 0 and f"host part alone: {said}" in out and out.rstrip().endswith("Nothing is wrong.")

    machine[gpus.look] = gpu_facts  # where there are GPUs, something is amiss
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    code, out = doctor(capsys)
    assert code == 0 and f"not built ({said}), so groups on it run serial" in out and "install nvcc of CUDA 13" in out
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "install a CUDA build of torch" in doctor(capsys)[1]


def copy_of_package(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "_C*.so")
    return Path(shutil.copytree(PACKAGE, folder / "streamoverlap", ignore=ignored))


def run_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=60, check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip


def test_where_the_compiled_part_is_missing_the_doctor_runs(tmp_path) -> None:
    package = copy_of_package(tmp_path)
    result = run_in(tmp_path, "-m", "streamoverlap", "doctor")
    assert result.returncode == 1 and result.stderr == ""
    assert (
        f"cannot be loaded: there is no _C{built.sysconfig.get_config_var('EXT_SUFFIX')} in {package}" in result.stdout
    )
    assert "make build" in result.stdout and "CPU tensors: do not work" in result.stdout


def test_where_the_compiled_part_is_broken_all_else_says_so_in_one_line(tmp_path) -> None:
    package = copy_of_package(tmp_path)
    (package / f"_C{built.sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"")
    (package / built.RECORD).write_text('{"torch": "2.3.0"}')
    told = "`streamoverlap doctor` says why and what to do"
    script = tmp_path / "streamoverlap.d" / "streamoverlap"  # as pip installs it
    script.parent.mkdir()
    script.write_text(f"import sys\nsys.path.insert(0, '{tmp_path}')\nfrom streamoverlap.__main__ import main\nmain()")
    command = run_in(tmp_path, str(script), "check", "--world", "2")
    assert command.returncode == 1 and told in command.stderr and command.stderr.count("\n") == 1
    found = json.loads(run_in(tmp_path, str(script), "doctor", "--json").stdout)
    assert found["right"] is False and "built with torch 2.3.0, found" in found["findings"][0]["found"]
    program = run_in(tmp_path, "-c", "import streamoverlap", "doctor")
    assert program.returncode == 1
    assert (
        program.stderr.splitlines()[-1].startswith("ImportError: streamoverlap cannot be used: ")
        and told in program.stderr
    )


def test_a_part_for_another_python_is_named(monkeypatch, tmp_path) -> None:
    (tmp_path / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(built, "_FOLDER", tmp_path)
    assert "another Python: _C.cpython-39" in named(built.look(ImportError("no")), "compiled part").found


# The check itself, and the process that it runs in.


@pytest.mark.parametrize("operation", ["all_gather_gemm", "gemm_reduce_scatter"])
def test_the_check_counts_wrong_elements(operation: str) -> None:
    everyone = [check._operands("cpu", "float32", 2, seed) for seed in (5, 6)]
    if operation == "all_gather_gemm":
        right = torch.cat([everyone[0][0], everyone[1][0]]) @ everyone[1][1].T
    else:
        right = sum(wide @ tall.T for *_, wide, tall in everyone)[check._ROWS["cpu"] :]
    assert check.count_wrong(operation, right, everyone, rank=1) == 0
    right[3, 4] += 1
    right[0, 0] = float("nan")
    assert check.count_wrong(operation, right, everyone, rank=1) == 2
    assert check.count_wrong(operation, right[1:], everyone, rank=1) == right.numel()


def started(path: str) -> None:
    """Leaves its process' id and that of a child there; never ends."""
    child = subprocess.Popen(["sleep", "100"])
    Path(path).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(100)


def raises(text: str) -> None:
    raise ValueError(text)


def ends(number: int) -> None:
    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), number)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_call_elsewhere_gives_its_result() -> None:
    assert call(os.path.join, "a", "b", timeout=60) == "a/b"
    with pytest.raises(CallFailed, match=r"^ValueError: one$"):
        call(raises, "one\ntwo", timeout=60)
    with pytest.raises(CallFailed, match=r"^its process ended with signal SIGSEGV: last words$"):
        call(ends, int(signal.SIGSEGV), timeout=60)


def all_end(path: Path) -> bool:
    pids = [int(pid) for pid in path.read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, pids))


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["hangs", "is interrupted"])
def test_a_call_that_gives_nothing_is_ended_with_all_it_started(how: str, tmp_path, monkeypatch) -> None:
    path = tmp_path / "pids"

    class Pipe:
        """A connection on which nothing comes until its time is up, which is when the function has begun."""

        def __init__(self, connection) -> None:
            self.send, self.connection = connection.send, connection

        def poll(self, timeout: float) -> bool:
            wait_for(path)
            if how == "is interrupted":
                raise KeyboardInterrupt
            return False

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_) -> None:
            pass  # so that it is not the closed connection that ends the process

    def pipe() -> tuple:
        ours, theirs = multiprocessing.Pipe()
        return Pipe(ours), theirs

    monkeypatch.setattr(isolated, "Pipe", pipe)
    with pytest.raises((CallFailed, KeyboardInterrupt)) as raised:
        call(started, str(path), timeout=7)
    assert raised.type is KeyboardInterrupt or str(raised.value) == "no answer within 7 s"
    assert all_end(path)


def test_a_killed_caller_leaves_nothing_behind(tmp_path) -> None:
    path = tmp_path / "pids"
    program = f"from streamoverlap.doctor.isolated import call; from {__name__} import started"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), str(Path(__file__).parent)])}
    with subprocess.Popen(
        [sys.executable, "-c", f"{program}; call(started, {str(path)!r}, timeout=100)"], env=environment
    ) as caller:
        wait_for(path)
        caller.kill()
    assert all_end(path)


def test_ctrl_c_ends_with_130(machine, monkeypatch, capsys) -> None:
    def interrupted(*_) -> None:
        raise KeyboardInterrupt

    machine[check.run_ranks] = interrupted
    assert doctor(capsys)[0] == 130
