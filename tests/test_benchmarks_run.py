"""benchmarks/ as it runs: wrong results are found, one command does all, bad arguments are named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import overlap
import pytest
import ratios
import report
import shapes
import ship
import torch
from columns import NAMES, Column, Groups, Rotated, columns_of, plans_to_compare
from overlap_rank import _check, _check_exactly, _variants
from problem import ROTATION, Problem

from streamoverlap import PlanSpec, table

ROOT = Path(__file__).resolve().parents[1]


# --- what is measured ---


def wrong_results_are_found(rank: int, world: int, group) -> None:
    groups = Groups.make(torch.device("cpu"))
    for shape in (shapes.ON_CPU[0], shapes.ON_CPU[2]):
        problem = Problem(shape, torch.float32, torch.device("cpu"))
        columns, absent = columns_of(problem, groups, {"ring": PlanSpec("ring", 2)})
        assert set(columns) == {*NAMES, "ring"} - set(absent) and set(absent) == {"best gemm", "fused"}
        timed = {("eager", name): Rotated(column) for name, column in columns.items()}
        _check_exactly(columns, timed, problem)
        problem.fill(integers=False)
        for call in timed.values():
            for _ in range(ROTATION + 1):
                call()
        _check(timed, columns, problem)

        def late(i: int, call=columns["tuned"].call) -> torch.Tensor:
            out = call(i)
            out[-1] = call((i + 1) % ROTATION)[-1]  # as if a slot had been read too early
            return out

        bad = {"tuned": columns["tuned"]._replace(call=late)}
        with pytest.raises(RuntimeError, match=r"eager, column 'tuned', inputs 0: a wrong result: [0-9]+ of"):
            _check_exactly(bad, {("eager", "tuned"): Rotated(bad["tuned"])}, problem)
        problem.fill(integers=False)
        rotated = Rotated(bad["tuned"])
        rotated()
        with pytest.raises(RuntimeError, match=r"off by .* of the largest value; expected 0.02 at most"):
            _check({("eager", "tuned"): rotated}, bad, problem)


def test_wrong_results_are_found(ranks) -> None:
    ranks(2).run(wrong_results_are_found)


def a_fused_op_fails(rank: int, world: int, group) -> dict:
    problem = Problem(shapes.ON_CPU[0], torch.float32, torch.device("cpu"))

    def fails_on_one(i: int) -> torch.Tensor:
        if rank == 1:
            raise RuntimeError("no symmetric memory\nand more")
        return problem.product(i)

    columns = {"mm": Column(problem.product, "product"), "fused": Column(fails_on_one, "product")}
    found, missing = _variants(columns, torch.device("cpu"))
    assert set(found) == {("eager", "mm")}
    return missing["eager"]


def test_where_pytorchs_op_fails_the_column_says_why_on_all_ranks(ranks) -> None:
    assert ranks(2).run(a_fused_op_fails) == [{"fused": "rank 1: no symmetric memory"}] * 2


def test_nan_and_other_sizes_are_wrong() -> None:
    problem = Problem.__new__(Problem)
    for problem.integers in (True, False):
        assert problem.wrong(torch.ones(3), torch.ones(3)) is None
        assert problem.wrong(torch.tensor([1.0, float("nan")]), torch.ones(2)) is not None
        assert problem.wrong(torch.ones(2), torch.ones(3)) == "its shape is [2]; expected [3]"


def run(*words: str, **variables: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, str(ROOT / "benchmarks/overlap.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=150)


def test_one_command_measures_and_reports_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "new" / "bench"
    done = run("--rounds", "1", "--only", "M256", "--out", str(out), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "[2/2] RS scatter M256: eager: mm" in done.stdout and f"written: {out}.json" in done.stdout
    document = json.loads(Path(f"{out}.json").read_text())
    assert [result["label"] for result in document["results"]] == ["AG gather M256", "RS scatter M256"]
    for result in document["results"]:
        assert set(result["microseconds"]["eager"]) == {"mm", "comm", "serial", "untuned", "tuned"}
        assert result["absent"] == {"eager": {"best gemm": "needs a GPU", "fused": "needs a GPU"}}
    text = Path(f"{out}.md").read_text()
    assert report.ON_CPU in text and "Targets" not in text and text in done.stdout
    assert Path(f"{out}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu(1)
def test_all_columns_are_right_on_gpus(tmp_path: Path) -> None:
    """On one GPU two ranks share it, and `serial` and `fused` are missing."""
    out = tmp_path / "bench"
    done = run("--rounds", "1", "--only", "l70b.qkv M64", "--plans", "--out", str(out), **{overlap.OVERLAPPING: "1"})
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(Path(f"{out}.json").read_text())["results"]
    shared = torch.cuda.device_count() < 2
    for mode in ratios.MODES:
        assert set(NAMES) - set(result["microseconds"][mode]) == ({"serial", "fused"} if shared else set())
    assert set(plans_to_compare(True, 2)) <= set(result["microseconds"]["graph"])


# --- commands ---


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "1"], "--ranks is 1; expected an integer from 2 to"),
        (["--ranks", "3"], "--ranks is 3: AG gather M256: M is 256; expected a multiple of the group's 3 ranks"),
        (["--rounds", "0"], "--rounds is 0; expected an integer from 1 to"),
        (["--only", "none"], "--only 'none': no shape has that in its label"),
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
        ["doctor", "tests", "bench", "more", "simulated", "async", "layers", "ship"]
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
    for step in ("bench", "more"):
        words = (
            everything(tmp_path, 4, "4", step).stdout.split("run: benchmarks/overlap.py ")[1].splitlines()[0].split()
        )
        assert overlap.parse_arguments(words).ranks == 4


def test_everything_on_fewer_gpus_is_what_means_something_there(tmp_path: Path) -> None:
    done = everything(tmp_path, 2, "4")
    outcomes = done.stdout.split("=== outcomes\n")[1].splitlines()
    assert outcomes == ["doctor: done", "tests: done", "bench: done"] and done.returncode == 0
    assert everything(tmp_path, 2, "4", "ship").stdout.endswith("=== outcomes\n")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("target", ["bench", "bench-all", "bench-async", "bench-layers"])
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
