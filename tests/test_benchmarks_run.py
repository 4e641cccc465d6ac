"""benchmarks/ as it runs: wrong results are found, one command measures and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import overlap
import pytest
import ratios
import report
import shapes
import torch
from columns import NAMES, NO_PARTIALS, ON_CPU, Column, Groups, Rotated, call_of, columns_of, plans_to_compare
from factors import Plain, Scaled
from overlap_rank import _check, _check_exactly, _variants
from problem import ROTATION, Problem

from streamoverlap import PlanSpec

ROOT = Path(__file__).resolve().parents[1]
KINDS = (Plain(torch.float32), Scaled("row"), Scaled("tensor"))


def wrong_results_are_found(rank: int, world: int, group, kind: Plain) -> None:
    groups = Groups.make(torch.device("cpu"))
    for shape in (shapes.ON_CPU[0], shapes.ON_CPU[2]):
        problem = Problem(shape, kind, torch.device("cpu"))
        columns, absent = columns_of(problem, groups, {"ring": PlanSpec("ring", 2)})
        assert set(columns) == {*NAMES, "ring"} - set(absent)
        assert set(absent) == {"best gemm", "fused", *(["wire"] if shape.gathers else [])}
        timed = {("eager", name): Rotated(column) for name, column in columns.items()}
        _check_exactly(columns, timed, problem)
        problem.fill(integers=False)
        for call in timed.values():
            for _ in range(ROTATION + 1):
                call()
        _check(timed, columns, problem)

        for name, column in columns.items():

            def late(i: int, call=column.call) -> torch.Tensor:
                out = call(i).clone()
                out[-1] = call((i + 1) % ROTATION)[-1]  # as if a slot had been read too early
                return out

            expect_to_be_found(name, column._replace(call=late), problem)


def expect_to_be_found(name: str, bad: Column, problem: Problem) -> None:
    with pytest.raises(RuntimeError, match=rf"eager, column '{name}', inputs 0: a wrong result: [0-9]+ of"):
        _check_exactly({name: bad}, {("eager", name): Rotated(bad)}, problem)
    problem.fill(integers=False)
    rotated = Rotated(bad)
    rotated()
    said = "[0-9]+ of" if bad.exact else r"off by .* of the largest value; expected 0.02 at most"
    with pytest.raises(RuntimeError, match=f"a wrong result: {said}"):
        _check({("eager", name): rotated}, {name: bad}, problem)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.scaling))
def test_wrong_results_are_found(ranks, kind: Plain) -> None:
    ranks(2).run(wrong_results_are_found, kind)


def wrong_scales_are_found(rank: int, world: int, group) -> None:
    groups = Groups.make(torch.device("cpu"))
    for shape in (shapes.ON_CPU[0], shapes.ON_CPU[2]):
        problem = Problem(shape, Scaled("row"), torch.device("cpu"))

        def of_the_next_row(i: int, problem: Problem = problem) -> torch.Tensor:
            call = call_of(problem, i, groups.tuned)
            return call(scale_x=call.keywords["scale_x"].roll(1, 0))

        expect_to_be_found("tuned", Column(of_the_next_row, "output"), problem)


def test_scales_of_other_rows_are_found(ranks) -> None:
    ranks(2).run(wrong_scales_are_found)


def a_float8_wire_is_off_by_what_it_may_be(rank: int, world: int, group, kind: Plain) -> None:
    groups = Groups.make(torch.device("cpu"))
    problem = Problem(shapes.ON_CPU[2], kind, torch.device("cpu"))
    for algorithm in ("direct", "ring"):
        call = partial(call_of, problem, group=groups.tuned, plan=PlanSpec(algorithm), wire="fp8")
        column = Column(lambda i, call=call: call(i=i)(), "output", allowed="wire_error")
        _check_exactly({"wire": column}, {("eager", "wire"): Rotated(column)}, problem)
        for exact in (column._replace(allowed=None), column._replace(call=lambda i, call=column.call: 1.1 * call(i))):
            expect_to_be_found("wire", exact, problem)


@pytest.mark.parametrize("world", [2, 4])
def test_a_float8_wire_is_off_by_what_it_may_be(ranks, world: int) -> None:
    ranks(world).run(a_float8_wire_is_off_by_what_it_may_be, KINDS[0])


def pytorch_takes_the_arguments(rank: int, world: int, group) -> None:
    """Shapes alone, without data."""
    for kind in map(Scaled, overlap.SCALINGS):
        x, weight = kind.new(64, 32, torch.device("meta")), kind.new(48, 32, torch.device("meta"))
        for op, size in ((kind.fused_gather, (64 * world, 48)), (kind.fused_scatter, (64 // world, 48))):
            result = op(x, weight, group.group_name)
            assert (tuple(result.shape), result.dtype) == (size, torch.bfloat16)


def test_pytorchs_scaled_ops_take_the_arguments(ranks) -> None:
    ranks(2).run(pytorch_takes_the_arguments)


def a_fused_op_fails(rank: int, world: int, group) -> dict:
    problem = Problem(shapes.ON_CPU[0], KINDS[0], torch.device("cpu"))

    def fails_on_one(i: int) -> torch.Tensor:
        if rank == 1:
            raise RuntimeError("no symmetric memory\nand more")
        return problem.product(i)

    columns = {"mm": Column(problem.mm, "product"), "fused": Column(fails_on_one, "product")}
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
        missing = dict.fromkeys(("best gemm", "fused"), ON_CPU)
        if result["op"] == "all_gather_gemm":
            missing["wire"] = NO_PARTIALS
        assert result["absent"] == {"eager": missing}
        assert set(result["microseconds"]["eager"]) == set(NAMES) - set(missing)
    text = Path(f"{out}.md").read_text()
    assert report.ON_CPU in text and "Targets" not in text and text in done.stdout
    assert Path(f"{out}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("scaling", overlap.SCALINGS)
def test_float8_is_measured_on_the_cpu(scaling: str, tmp_path: Path) -> None:
    out = tmp_path / "bench"
    words = ("--rounds", "1", "--only", "M256", "--scaling", scaling, "--out", str(out))
    done = run(*words, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    document = json.loads(Path(f"{out}_fp8-{scaling}.json").read_text())
    assert (document["dtype"], document["scaling"]) == ("float8_e4m3fn", scaling)
    gather, scatter = (set(result["microseconds"]["eager"]) for result in document["results"])
    assert gather == set(NAMES) - {"best gemm", "fused", "wire"} and scatter == gather | {"wire"}
    assert f"float8_e4m3fn with {scaling}-wise scales, `mm` is torch._scaled_mm" in done.stdout


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("shape", "words", "name"),
    [
        ("l70b.qkv M64", ["--plans"], "bench"),
        ("l70b.down M64", [], "bench"),
        ("l70b.qkv M64", ["--scaling", "row"], "bench_fp8-row"),
        ("l70b.down M64", ["--scaling", "tensor"], "bench_fp8-tensor"),
    ],
)
def test_all_columns_are_right_on_gpus(shape: str, words: list[str], name: str, tmp_path: Path) -> None:
    """On one GPU two ranks share it, and `serial` and `fused` are missing."""
    out = str(tmp_path / "bench")
    done = run("--rounds", "1", "--only", shape, *words, "--out", out, **{overlap.OVERLAPPING: "1"})
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / f"{name}.json").read_text())["results"]
    missing = {"serial", "fused"} if torch.cuda.device_count() < 2 else set()
    if result["op"] == "all_gather_gemm":
        missing |= {"wire"}
    for mode in ratios.MODES:
        assert set(NAMES) - set(result["microseconds"][mode]) == missing
    if "--plans" in words:
        assert set(plans_to_compare(True, 2)) <= set(result["microseconds"]["graph"])
