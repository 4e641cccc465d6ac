"""What benchmarks/ report is what was measured: ratios, targets, tables, pictures. The times here are made up."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import ratios
import report
import shapes
import simulated
import torch
from columns import NAMES, plans_to_compare
from factors import Plain, Scaled

from streamoverlap import PlanSpec, simulate

ROOT = Path(__file__).resolve().parents[1]
DIRECT = {"algorithm": "direct", "chunks": 1, "compute_streams": 1, "reduce": "accumulate"}
RING = DIRECT | {"algorithm": "ring"}
TIMES = dict(zip(NAMES, (100.0, 98.0, 30.0, 140.0, 120.0, 110.0, 99.0, 93.0), strict=True))
BF16 = Plain(torch.bfloat16)


def result_of(shape: shapes.Shape, times: dict[str, float] = TIMES, world: int = 2) -> dict:
    times = {name: time for name, time in times.items() if name != "wire" or not shape.gathers}
    plans = {name: RING if name == "wire" else DIRECT for name in ("untuned", "tuned", "wire") if name in times}
    return {
        **shape.as_json(),
        "link_bytes": shape.link_bytes(world, BF16),
        "microseconds": {"eager": dict(times), "graph": dict(times)},
        "plans": plans,
        "graph_plans": dict(plans),
        "absent": {"eager": {}, "graph": {}},
        "tuning_seconds": 1.0,
    }


def document_of(results: list[dict], world: int = 2, gpus: int = 2, scaling: str | None = None) -> dict:
    """As a rank gives it, of GPUs that are not here."""
    about = {"device": "NVIDIA H200", "devices": ["NVIDIA H200"] * world, "device_type": "cuda", "gpus": gpus}
    about |= {"cores": 16, "streamoverlap": "0", "commit": None, "torch": "2", "date": "2026-01-01", "driver": "580"}
    return {
        "device": "NVIDIA H200",
        "world": world,
        "torch": "2",
        "dtype": "float8_e4m3fn" if scaling else "bfloat16",
        "scaling": scaling,
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
    assert gather.link_bytes(2, BF16) == 4096 * 8192 * 2
    assert scatter.link_bytes(4, BF16) == 3 * 2048 * 8192 * 2
    for kind in map(Scaled, ("row", "tensor")):
        assert gather.link_bytes(2, kind) == 4096 * (8192 + 4)  # a scale a row
        assert scatter.link_bytes(4, kind) == 3 * 2048 * 8192 * 2


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
    bounds = [max(100.0, 1e6 * shape.link_bytes(2, BF16) / 385e9) for shape in shapes.load() if shape.as_tp]
    assert value == pytest.approx(ratios.geomean(99 / bound for bound in bounds)) and count == of == 4
    assert found["as_tp 8, fp8 wire over bf16 wire: largest wire/tuned"] == (pytest.approx(93 / 99), "yes", 2, 2)


def test_targets_of_float8() -> None:
    results = [result_of(shape) for shape in shapes.load()]
    found = values_of(ratios.targets_of(results, 2, scaled=True))
    assert found == {
        "M = 8192, eager: geomean t/mm": (pytest.approx(0.99), "yes", 10, 10),
        "M = 8192, graph: geomean t/mm": (pytest.approx(0.99), "yes", 10, 10),
        "any shape, against serial: largest t/serial": (pytest.approx(99 / 140), "yes", 38, 38),
    }
    for result in results:
        if result["M"] == 8192:
            result["microseconds"]["graph"]["tuned"] = 106.0
    results[-1]["microseconds"]["eager"]["tuned"] = 144.0
    found = values_of(ratios.targets_of(results, 2, scaled=True))
    assert [reached for _, reached, *_ in found.values()] == ["yes", "no", "no"]
    assert [target.limit for target in ratios.targets_of(results, 2, scaled=True)] == [1.05, 1.05, 1.02]
    assert [target.limit for target in ratios.targets_of(results, 4, scaled=True)] == [1.02]


def test_a_slower_float8_wire_misses_its_target() -> None:
    results = [result_of(shape) for shape in shapes.load(only="8 M8192")]
    results[-1]["microseconds"]["graph"]["wire"] = 100.0
    found = values_of(ratios.targets_of(results, 2))
    assert found["as_tp 8, fp8 wire over bf16 wire: largest wire/tuned"] == (pytest.approx(100 / 99), "no", 2, 2)


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
    head, plan = "| 98.0 | 30.0 | 140.0 | 120.0 | 110.0 | 99.0", "direct, 1, 1, accumulate"
    gather, scatter = f"{head} | - | {plan} | -", f"{head} | 93.0 | {plan} | ring, 1, 1, accumulate"
    assert text.count(f"{gather} | 0.990 | 1.010 | 0.707 | 0.825 | ") == 15  # and one without `fused`
    assert text.count(f"{scatter} | 0.990 | 1.010 | 0.707 | 0.825 | ") == text.count(" | 0.939 |\n") == 16
    assert "| 140.0 | - | 110.0 |" in text and "- `fused`, graph: rank 0: no capture" in text
    assert "| M = 8192, eager: geomean t/mm | 0.990 | at most 1.00 | yes | 10 of 10 |" in text
    assert "| as_tp 8, fp8 wire over bf16 wire: largest wire/tuned | 0.939 | at most 1.00 | yes | 2 of 2 |" in text
    assert (
        "- bfloat16, `mm` is torch.mm, median of 7 rounds" in text
        and "driver 580" in text
        and "plan given 31.0 us" in text
        and "![t/mm of each shape](bench.png)" in text
    )
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_the_report_of_float8_says_so(tmp_path: Path) -> None:
    results = [result_of(shape) for shape in shapes.load(["core"])]
    document = document_of(results, scaling="row")
    text = report.write(document, tmp_path / "bench")
    assert "- float8_e4m3fn with row-wise scales, `mm` is torch._scaled_mm, median of 7 rounds" in text
    assert "| M = 8192, eager: geomean t/mm | 0.990 | at most 1.05 | yes | 10 of 10 |" in text
    assert "largest wire/tuned" not in text and (tmp_path / "bench.png").stat().st_size > 10_000
    assert report.prefix_of(None, document) == ROOT / "benchmarks/results/bench_2xH200_fp8-row"


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


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (PlanSpec("serial"), "serial"),
        (PlanSpec("ring", 4, 2, "sum"), "ring, 4, 2, sum"),
        (PlanSpec("direct", 2, 2, transfer="store"), "direct, 2, 2, accumulate, transfer store"),
        (PlanSpec("direct", 3, 2, taper="both"), "direct, 3, 2, accumulate, taper both"),
        (PlanSpec("ring", 3, transfer="store", taper="last"), "ring, 3, 1, accumulate, transfer store, taper last"),
    ],
)
def test_the_report_has_every_choice_of_a_plan(plan: PlanSpec, text: str) -> None:
    result = result_of(shapes.load(only="RS l70b.proj8")[0])
    result["plans"]["tuned"] = asdict(plan)
    assert f" | {text} | ring, 1, 1, accumulate | " in report.markdown(document_of([result]), "a.png")


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
    ring = PlanSpec("ring").to_text()
    result["plans"][ring] = RING
    result["microseconds"]["graph"][ring] = 95.0
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document_of([result])))
    monkeypatch.setattr(sys, "argv", ["simulated.py", str(path), *best])
    simulated.main()
    out = capsys.readouterr().out
    assert f"| RS l70b.proj8 M8192 | {ring} | 0.95 |" in out and " 0.93 |" not in out  # of `wire`
    others = {PlanSpec("serial"): "1.40", PlanSpec(): "0.99"}
    assert all((f"| {plan.to_text()} | {time} |" in out) == (not best) for plan, time in others.items())


def test_simulated_takes_the_prototypes(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["simulated.py", str(ROOT / "benchmarks/results/prototype_h200.json")])
    simulated.main()
    assert "in the median" in capsys.readouterr().out


def test_simulated_takes_no_cpus_and_no_float8(tmp_path: Path, monkeypatch, capsys) -> None:
    of_cpu = result_of(shapes.ON_CPU[0])
    del of_cpu["microseconds"]["graph"]
    scaled = document_of([result_of(shapes.load()[0])], scaling="row")
    path = tmp_path / "a.json"
    monkeypatch.setattr(sys, "argv", ["simulated.py", str(path)])
    for document, said in ((document_of([of_cpu]), "was measured on a CPU"), (scaled, "has products of float8")):
        path.write_text(json.dumps(document))
        with pytest.raises(SystemExit):
            simulated.main()
        assert said in capsys.readouterr().err
