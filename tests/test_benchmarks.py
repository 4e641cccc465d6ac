"""benchmarks/: what they measure is checked, what they report is what was measured. No test looks at a time."""

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
import simulated
import torch
from columns import NAMES, Column, Groups, Rotated, columns_of, plans_to_compare
from overlap_rank import _check, _check_exactly, _variants
from problem import ROTATION, Problem

from streamoverlap import PlanSpec, simulate, table

ROOT = Path(__file__).resolve().parents[1]
DIRECT = {"algorithm": "direct", "chunks": 1, "compute_streams": 1, "reduce": "accumulate"}
RING = DIRECT | {"algorithm": "ring"}
TIMES = dict(zip(NAMES, (100.0, 98.0, 30.0, 140.0, 120.0, 110.0, 99.0), strict=True))


def result_of(shape: shapes.Shape, times: dict[str, float] = TIMES, world: int = 2) -> dict:
    return {
        **shape.as_json(),
        "link_bytes": shape.link_bytes(world, torch.bfloat16),
        "microseconds": {"eager": dict(times), "graph": dict(times)},
        "plans": {"untuned": DIRECT, "tuned": DIRECT},
        "absent": {"eager": {}, "graph": {}},
        "tuning_seconds": 1.0,
    }


def document_of(results: list[dict], world: int = 2, gpus: int = 2) -> dict:
    """As a rank gives it, of GPUs that are not here."""
    about = {"device": "NVIDIA H200", "devices": ["NVIDIA H200"] * world, "device_type": "cuda", "gpus": gpus}
    about |= {"cores": 16, "streamoverlap": "0", "commit": None, "torch": "2", "date": "2026-01-01", "driver": "580"}
    return {
        "device": "NVIDIA H200",
        "world": world,
        "torch": "2",
        "dtype": "bfloat16",
        "rounds": 7,
        "command": "benchmarks/overlap.py",
        "environment": about,
        "issue_microseconds": {"plan given": 31.0, "plan=None": 33.0},
        "results": results,
    }


# --- shapes ---


def test_shapes_are_those_of_the_file_and_sharded_as_the_simulator_does() -> None:
    found = shapes.load()
    assert [len(shapes.load([name])) for name in shapes.SETS] == [16, 14, 8]
    assert len({(shape.label, shape.set) for shape in found}) == len(found)
    for shape in found:
        (rows, _), (n, k) = shape.sizes(2)
        local = simulate.local_problem(shape.op, 2, shape.M, shape.N, shape.K, shape.as_tp)
        assert (rows * (2 if shape.gathers else 1), n, k) == (local.rows, local.n, local.k)


def test_bytes_of_the_link() -> None:
    gather, scatter = shapes.load(only="AG l70b.qkv8 M8192") + shapes.load(only="RS l70b.down M8192")
    assert gather.link_bytes(2, torch.bfloat16) == 4096 * 8192 * 2
    assert scatter.link_bytes(4, torch.bfloat16) == 3 * 2048 * 8192 * 2


# --- targets ---


def values_of(found: list[ratios.Target]) -> dict[str, tuple]:
    return {target.what: (target.value, target.reached, target.shapes, target.of) for target in found}


def test_geomean() -> None:
    assert ratios.geomean([1.0, 4.0]) == pytest.approx(2.0)


def test_targets_of_two_gpus() -> None:
    found = values_of(ratios.targets_of([result_of(shape) for shape in shapes.load()], 2))
    assert found["M = 8192, eager: geomean t/mm"] == (pytest.approx(0.99), "yes", 10, 10)
    assert found["M = 2048, graph: geomean t/mm"] == (pytest.approx(0.99), "yes", 6, 6)
    assert found["M = 8192, graph: geomean t/best gemm"] == (pytest.approx(99 / 98), "yes", 10, 10)
    assert found["any shape, against PyTorch's fused op: largest t/fused"] == (pytest.approx(99 / 120), "yes", 38, 38)
    assert found["M >= 1024, against serial: largest t/serial"] == (pytest.approx(99 / 140), "yes", 32, 32)
    assert found["M < 1024, eager: t - serial"] == (pytest.approx(-41), "yes", 6, 6)
    value, _, count, of = found["as_tp 8, graph: geomean t/bound"]
    bounds = [max(100.0, 1e6 * shape.link_bytes(2, torch.bfloat16) / 385e9) for shape in shapes.load() if shape.as_tp]
    assert value == pytest.approx(ratios.geomean(99 / bound for bound in bounds)) and count == of == 4


def test_one_slow_shape_misses_a_target_that_holds_for_any() -> None:
    results = [result_of(shape) for shape in shapes.load()]
    results[3]["microseconds"]["graph"]["tuned"] = 200.0
    found = values_of(ratios.targets_of(results, 2))
    assert found["M >= 1024, against serial: largest t/serial"][:2] == (pytest.approx(200 / 140), "no")
    assert found["any shape, against PyTorch's fused op: largest t/fused"][:2] == (pytest.approx(200 / 120), "no")


def test_targets_of_some_shapes_or_columns() -> None:
    without_fused = {name: time for name, time in TIMES.items() if name != "fused"}
    few = shapes.load(["core"], "M2048")[:2]
    found = values_of(ratios.targets_of([result_of(shape, without_fused) for shape in few], 2))
    assert found["M = 2048, eager: geomean t/mm"] == (pytest.approx(0.99), "yes, of these", 2, 6)
    assert found["M = 8192, eager: geomean t/mm"] == (None, "-", 0, 10)
    assert found["any shape, against PyTorch's fused op: largest t/fused"] == (None, "-", 0, 38)


def test_targets_of_four_gpus() -> None:
    found = ratios.targets_of([result_of(shape, world=4) for shape in shapes.load()], 4)
    assert [target.limit for target in found if "t/bound" in target.what] == [1.06, 1.06]
    assert not any("t/mm" in target.what for target in found)


# --- the report ---


def test_the_report_has_every_number_and_what_is_missing(tmp_path: Path) -> None:
    results = [result_of(shape) for shape in shapes.load(["core"])]
    del results[0]["microseconds"]["graph"]["fused"]
    results[0]["absent"]["graph"]["fused"] = "rank 0: no capture"
    text = report.write(document_of(results), tmp_path / "bench")
    assert (tmp_path / "bench.md").read_text() == text
    row = "| 98.0 | 30.0 | 140.0 | 120.0 | 110.0 | 99.0 | direct, 1, 1, accumulate | 0.990 | 1.010 | 0.707 | 0.825 |"
    assert text.count(row) == 31
    assert "| 140.0 | - | 110.0 |" in text and "- `fused`, graph: rank 0: no capture" in text
    assert "| M = 8192, eager: geomean t/mm | 0.990 | at most 1.00 | yes | 10 of 10 |" in text
    assert "driver 580" in text and "plan given 31.0 us" in text and "![t/mm of each shape](bench.png)" in text
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_the_report_is_made_again_from_its_json(tmp_path: Path, monkeypatch, capsys) -> None:
    report.write(document_of([result_of(shapes.load()[0])]), tmp_path / "a.b")
    before = (tmp_path / "a.b.md").read_text()
    (tmp_path / "a.b.md").unlink()
    monkeypatch.setattr(sys, "argv", ["report.py", str(tmp_path / "a.b.json")])
    report.main()
    assert (tmp_path / "a.b.md").read_text() == before == capsys.readouterr().out[:-1]


def test_ranks_that_share_a_gpu_are_held_against_no_target() -> None:
    text = report.markdown(document_of([result_of(shapes.load()[0])], world=4, gpus=1), "a.png")
    assert "Several ranks shared a GPU" in text and "Targets" not in text


def test_compared_plans_have_a_table() -> None:
    result = result_of(shapes.load()[0])
    result["plans"] |= {"ring,1,1,accumulate": RING, "ring,2,1,accumulate": RING | {"chunks": 2}}
    result["microseconds"]["graph"] |= {"ring,1,1,accumulate": 130.0, "ring,2,1,accumulate": 115.0}
    assert "| AG l8b.qkv M2048 | - | - | - | 1.150 (2, accumulate) | - | - |" in report.markdown(
        document_of([result]), "a.png"
    )


def test_results_are_named_after_ranks_and_device() -> None:
    assert report.prefix_of(None, document_of([], world=4)) == ROOT / "benchmarks/results/bench_4xH200"


def test_plans_to_compare() -> None:
    for gathers in (True, False):
        plans = plans_to_compare(gathers, 2)
        assert {(plan.algorithm, plan.compute_streams) for plan in plans.values()} == {
            (algorithm, streams) for algorithm in ("direct", "ring") for streams in (1, 2, 3)
        }
        assert all(name == plan.to_text() for name, plan in plans.items())


# --- simulated beside measured ---


@pytest.mark.parametrize("best", [[], ["--best"]])
def test_simulated_takes_these_results(best: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    result = result_of(shapes.load(only="RS l70b.proj8")[0])
    result["plans"]["ring,1,1,accumulate"] = RING
    result["microseconds"]["graph"]["ring,1,1,accumulate"] = 95.0
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document_of([result])))
    monkeypatch.setattr(sys, "argv", ["simulated.py", str(path), *best])
    simulated.main()
    out = capsys.readouterr().out
    assert "| RS l70b.proj8 M8192 | ring,1,1,accumulate | 0.95 |" in out
    assert ("| serial,1,1,accumulate | 1.40 |" in out, "| direct,1,1,accumulate | 0.99 |" in out) == (not best,) * 2


def test_simulated_takes_the_prototypes_and_no_cpus(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["simulated.py", str(ROOT / "benchmarks/results/prototype_h200.json")])
    simulated.main()
    assert "in the median" in capsys.readouterr().out
    result = result_of(shapes.ON_CPU[0])
    del result["microseconds"]["graph"]
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(document_of([result])))
    monkeypatch.setattr(sys, "argv", ["simulated.py", str(path)])
    with pytest.raises(SystemExit):
        simulated.main()
    assert "was measured on a CPU" in capsys.readouterr().err


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
    found, missing = _variants(columns, problem, torch.device("cpu"))
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
    """Runs it in another tree, with a Python that finds so many GPUs, tells what it is to run, and fails in layers.py."""
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
