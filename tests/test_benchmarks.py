"""What benchmarks/ report is what was measured: ratios, targets, tables, pictures. The times here are made up."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import ratios
import report
import shapes
import simulated
import torch
from columns import NAMES, plans_to_compare

from streamoverlap import simulate

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
        "graph_plans": {"untuned": DIRECT, "tuned": DIRECT},
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
