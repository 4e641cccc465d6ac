"""Commands of benchmarks/: bad arguments are named, one command does all that a machine is to tell."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import overlap
import pytest
import ship
import torch

from streamoverlap import PlanSpec, table

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "1"], "--ranks is 1; expected an integer from 2 to"),
        (["--ranks", "3"], "--ranks is 3: AG gather M256: M is 256; expected a multiple of the group's 3 ranks"),
        (["--rounds", "0"], "--rounds is 0; expected an integer from 1 to"),
        (["--only", "none"], "--only 'none': no shape has that in its label"),
        (["--scaling", "row", "--dtype", "bfloat16"], "--dtype is bfloat16 with --scaling; expected none"),
        (["--scaling", "block"], "argument --scaling: invalid choice: 'block'"),
        (["--set", "huge"], "argument --set: invalid choice: 'huge'"),
        (["--out", "/proc/none/bench"], "--out is /proc/none/bench: [Errno"),
    ],
)
def test_bad_arguments_are_named(words: list[str], said: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit):
        overlap.parse_arguments(words)
    assert said in capsys.readouterr().err


def test_fewer_gpus_than_ranks_must_be_asked_for(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv(overlap.OVERLAPPING, raising=False)
    with pytest.raises(SystemExit):
        overlap.parse_arguments(["--ranks", "4"])
    assert f"--ranks is 4, and torch finds 2 GPUs; expected a GPU each, or {overlap.OVERLAPPING}=1" in (
        capsys.readouterr().err
    )
    monkeypatch.setenv(overlap.OVERLAPPING, "1")
    assert len(overlap.parse_arguments(["--ranks", "4"]).shapes) == 38


@pytest.mark.parametrize(
    ("words", "said"),
    [(["x"], "GPUS is 'x'"), (["1"], "GPUS is '1'"), (["4", "paint"], "step 'paint'; expected one of doctor tests")],
)
def test_bad_arguments_of_everything_are_named(words: list[str], said: str) -> None:
    done = subprocess.run(["bash", ROOT / "benchmarks/everything.sh", *words], capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr


def everything(folder: Path, gpus: int, *words: str) -> subprocess.CompletedProcess:
    """Runs it in another tree, with a Python that finds so many GPUs, tells what it runs, and fails in layers.py."""
    (folder / "benchmarks").mkdir(exist_ok=True)
    shutil.copy(ROOT / "benchmarks/everything.sh", folder / "benchmarks")
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && echo {gpus} && exit\necho run: "$@"\ncase "$*" in *layers*) exit 3; esac\n'
    )
    python.chmod(0o755)
    command = ["bash", folder / "benchmarks/everything.sh", *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PY": str(python)}, timeout=60)


def test_everything_goes_on_after_a_failure_and_tells_of_it(tmp_path: Path) -> None:
    done = everything(tmp_path, 4, "4")
    outcomes = done.stdout.split("=== outcomes\n")[1].splitlines()
    assert [line.split(":")[0] for line in outcomes] == (
        ["doctor", "tests", "bench", "fp8-row", "fp8-tensor", "more", "simulated", "async", "layers", "ship"]
    )
    assert [line for line in outcomes if not line.endswith(": done")] == [
        "layers: FAILED, exit status 3, see benchmarks/results/everything_4x/layers.log"
    ]
    assert done.returncode == 1
    wanted = "run: benchmarks/overlap.py --ranks 4 --set core --plans --save --out benchmarks/results/bench_4x\n"
    assert (tmp_path / "benchmarks/results/everything_4x/bench.log").read_text() == wanted


def test_options_of_everything_are_those_of_the_programs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.chdir(tmp_path)
    for step, scaling in (("bench", None), ("fp8-row", "row"), ("fp8-tensor", "tensor"), ("more", None)):
        words = (
            everything(tmp_path, 4, "4", step).stdout.split("run: benchmarks/overlap.py ")[1].splitlines()[0].split()
        )
        args = overlap.parse_arguments(words)
        assert (args.ranks, args.kind.scaling) == (4, scaling)
        assert args.out == Path("benchmarks/results/bench_4x" + ("_more" if step == "more" else ""))


def test_everything_on_fewer_gpus_is_what_means_something_there(tmp_path: Path) -> None:
    done = everything(tmp_path, 2, "4")
    outcomes = done.stdout.split("=== outcomes\n")[1].splitlines()
    assert outcomes == ["doctor: done", "tests: done", "bench: done"] and done.returncode == 0
    assert everything(tmp_path, 2, "4", "ship").stdout.endswith("=== outcomes\n")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("target", ["bench", "bench-all", "bench-async", "bench-fp8", "bench-layers"])
def test_make_runs_files_that_are_there(target: str) -> None:
    done = subprocess.run(["make", "-n", target, "VENV=", "GPUS=4"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (script,) = (word for word in done.stdout.split() if word.startswith("benchmarks/"))
    assert (ROOT / script).is_file()


def test_tuned_tables_are_shipped_beside_what_is_there(tmp_path: Path) -> None:
    problems = [table.Problem("all_gather_gemm", world, 64, 64, 64, "bfloat16", "row") for world in (2, 4)]
    entries = [table.TunedPlan(PlanSpec(chunks=chunks), table.as_kept(1e-5), None) for chunks in (1, 2)]
    table.Table({problems[0]: entries[0], problems[1]: entries[0]}).save(tmp_path / "shipped" / "a.json", "H200")
    table.Table({problems[1]: entries[1]}, {(1, 2, 3): table.TunedGemm(3, 1e-6, 2e-6)}).save(
        tmp_path / "a.json", "H200"
    )
    (told,) = ship.ship(tmp_path, tmp_path / "shipped")
    assert "1 plans and 1 products" in told
    assert [path.name for path in (tmp_path / "shipped").iterdir()] == ["a.json"]
    found = table.Table.read(tmp_path / "shipped" / "a.json")
    assert found.plans == {problems[0]: entries[0], problems[1]: entries[1]} and len(found.gemms) == 1
    with pytest.raises(ValueError, match="has no table of tuned plans"):
        ship.ship(tmp_path / "none", tmp_path / "shipped")
