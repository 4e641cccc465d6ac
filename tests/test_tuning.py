"""Tuning on real ranks (CPU): what is measured is kept, found again by other runs, shared by jobs, and right."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from pathlib import Path

import pytest
import torch
from ranks import Pools

import streamoverlap as so
from streamoverlap import table
from streamoverlap.__main__ import main
from streamoverlap.table import Problem, Table, TunedGemm, TunedPlan


@pytest.fixture(scope="module")
def ranks():
    pools = Pools()
    yield pools
    pools.close()


def inputs(world: int, rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(rows, 16), torch.ones(8 * world, 16)


def tune_and_call(rank: int, world: int, group, folder: str) -> tuple:
    os.environ["STREAMOVERLAP_CACHE"] = folder
    comm = so.Communicator(group)
    x, w = inputs(world)
    tuned = so.tune(so.all_gather_gemm, x, w, group, rounds=2)
    y = so.all_gather_gemm(x, w, group)
    assert (y == 16).all() and y.shape == (12 * world, 8 * world)
    choice = comm.last_choice
    so.tune(so.reduce_scatter, torch.ones(4 * world, 3), group, rounds=1, save=False)
    scattered = so.reduce_scatter(torch.ones(4 * world, 3), group)
    assert (scattered == world).all()
    reasons = [choice.reason, comm.last_choice.reason, so.explain(so.all_gather_gemm, x, w, group).measured]
    so.all_gather_gemm(torch.ones(500, 16), w, group)
    reasons.append(comm.last_choice.reason)
    comm.close()
    return tuned, choice.plan, reasons


def call_again(rank: int, world: int, group, folder: str, tuning: str | None, rows: int) -> tuple[so.PlanSpec, str]:
    os.environ["STREAMOVERLAP_CACHE"] = folder
    comm = so.Communicator(group, tuning=tuning)
    x, w = inputs(world, rows)
    assert (so.all_gather_gemm(x, w, group) == 16).all()
    choice = comm.last_choice
    comm.close()
    return choice.plan, choice.reason


def test_what_is_tuned_runs_from_then_on_and_in_other_runs(ranks, tmp_path) -> None:
    answers = ranks(2).run(tune_and_call, str(tmp_path))
    (tuned, plan, reasons), *_ = answers
    assert all(answer[0].plan == tuned.plan and answer[1] == plan for answer in answers)
    assert plan == tuned.plan == min(tuned.seconds, key=tuned.seconds.__getitem__)
    assert so.PlanSpec("serial") in tuned.seconds and len(tuned.seconds) > 4
    assert reasons[0].startswith("measured: ") and "; serial " in reasons[0] and reasons[1].startswith("measured: ")
    assert reasons[2] == pytest.approx(tuned.seconds[plan]) and reasons[3].startswith("default")
    (path,) = tmp_path.glob("*.json")
    (entry,) = json.loads(path.read_text())["plans"]  # the other was not to be saved
    assert (entry["operation"], entry["m"], entry["layout"]) == ("all_gather_gemm", 24, "row")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    for tuning, rows, reason in (("table", 12, "measured"), ("table", 11, "measured"), ("table", 100, "default")):
        for found, told in ranks(2).run(call_again, str(tmp_path), tuning, rows):
            assert told.startswith(reason) and (found == plan or reason == "default")
    assert all(told.startswith("default") for _, told in ranks(2).run(call_again, str(tmp_path), "off", 12))
    assert all(told.startswith("default") for _, told in ranks(2).run(call_again, str(tmp_path), None, 12))


def test_first_use_measures_once(ranks, tmp_path) -> None:
    first = ranks(3).run(call_again, str(tmp_path), "first-use", 12)
    assert all(told.startswith("measured") for _, told in first) and len({plan for plan, _ in first}) == 1
    (path,) = tmp_path.glob("*.json")
    before = path.stat().st_mtime_ns
    assert ranks(3).run(call_again, str(tmp_path), "first-use", 12) == first
    assert path.stat().st_mtime_ns == before


def uneven(rank: int, world: int, group, folder: str) -> tuple[so.PlanSpec, str]:
    """Weights of different sizes, and tables that only rank 0 can read."""
    os.environ["STREAMOVERLAP_CACHE"] = folder if rank == 0 else os.devnull
    comm = so.Communicator(group, tuning="first-use" if rank == 0 else "off")
    x, w = torch.ones(12, 16), torch.ones(8 + 24 * rank, 16)
    for _ in range(2):
        assert (so.all_gather_gemm(x, w, group) == 16).all()
    choice = comm.last_choice
    comm.close()
    return choice.plan, choice.reason


def test_ranks_of_different_weights_and_tables_agree(ranks, tmp_path) -> None:
    found = ranks(2).run(uneven, str(tmp_path))
    assert found[0][0] == found[1][0]
    assert all(told.startswith("measured") for _, told in found)


def errors(rank: int, world: int, group) -> list[str]:
    os.environ["STREAMOVERLAP_CACHE"] = os.devnull
    x, w = inputs(world)
    told = []
    for call in (
        lambda: so.tune(so.all_gather_gemm, x, w, group, rounds=0),
        lambda: so.tune(torch.mm, x, w),
        lambda: so.tune(so.all_gather_gemm, x, w, group, graph=1),
        lambda: so.tune(so.all_gather_gemm, x, w, group, graph=True),
        lambda: so.tune(so.all_gather_gemm, x, torch.ones(4, 5), group),
        lambda: so.tune(so.all_gather, x[:0], group),
        lambda: so.Communicator(group, tuning="sometimes"),
        lambda: so.tune(so.all_gather, x, group, rounds=1),
    ):
        with pytest.raises((TypeError, ValueError, OSError)) as caught:
            call()
        told.append(f"{caught.type.__name__}: {caught.value}")
    assert (so.all_gather(x, group) == 1).all()
    return told


def test_errors_are_the_same_on_all_ranks(ranks) -> None:
    first, second = ranks(2).run(errors)
    assert first == second
    rounds, function, kind, graph, shape, empty, tuning, saved = first
    assert kind == "TypeError: graph is a int; expected a bool"
    assert graph == "ValueError: graph is True but x is on the cpu; expected False, or x on a CUDA device"
    assert rounds == "ValueError: rounds is 0; expected an integer of at least 1"
    assert function.startswith("TypeError: function is 'mm'")
    assert "weight.shape[1] is 5" in shape
    assert empty == "ValueError: x has no elements, its shape is [0, 16]; expected some to measure with"
    assert tuning == "ValueError: tuning is 'sometimes'; expected one of 'off', 'table', 'first-use', or None"
    assert saved.startswith("OSError: rank 0 could not save what was measured: ")


PROBLEM = Problem("all_gather_gemm", 2, 1024, 512, 256, "bfloat16", "row")


def entry(number: int) -> Table:
    plan = TunedPlan(so.PlanSpec("ring", 1 + number % 8), 1e-6 * (number + 1), None if number % 2 else 2e-3)
    return Table(
        {PROBLEM._replace(m=number, graph=number == 2): plan}, {(number, 2, 3, 4, 5, 6, 7, 8): TunedGemm(3, 1e-5, 2e-5)}
    )


def test_a_table_reads_what_it_wrote(tmp_path) -> None:
    path, whole = tmp_path / "new" / "table.json", Table()
    for number in range(4):
        entry(number).save(path, "some device")
        whole.update(entry(number))
    found = Table.read(path)
    assert found.plans.keys() == whole.plans.keys() and found.gemms.keys() == whole.gemms.keys()
    for problem, tuned in whole.plans.items():
        assert found.plans[problem].plan == tuned.plan
        assert found.plans[problem].seconds == pytest.approx(tuned.seconds)
        assert (found.plans[problem].serial_seconds is None) == (tuned.serial_seconds is None)
    document = json.loads(path.read_text())
    assert document["device"] == "some device" and document["versions"]["torch"] == torch.__version__
    assert sorted(path.parent.iterdir()) == [path.with_suffix(".json"), path.with_suffix(".lock")]


def test_a_table_of_before_there_were_graphs_is_read(tmp_path) -> None:
    path = tmp_path / "table.json"
    entry(1).save(path, "cpu")
    document = json.loads(path.read_text())
    del document["plans"][0]["graph"]
    path.write_text(json.dumps(document))
    assert Table.read(path).plans.keys() == entry(1).plans.keys()


@pytest.mark.parametrize("text", ["", "{}", '{"format": 9, "plans": [], "gemms": []}', '{"format": 1, "plans": [{}]}'])
def test_a_broken_table_is_named_and_not_overwritten(tmp_path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    for use in (lambda: Table.read(path), lambda: entry(1).save(path, "cpu")):
        with pytest.raises(ValueError, match=r"table\.json is no table of tuned plans"):
            use()
    assert path.read_text() == text


def add_entries(path: Path, first: int) -> None:
    for number in range(first, first + 20):
        entry(number).save(path, "cpu")


def test_jobs_may_share_a_table(tmp_path) -> None:
    path = tmp_path / "table.json"
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=add_entries, args=(path, 100 * job)) for job in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
        assert job.exitcode == 0
    assert {problem.m for problem in Table.read(path).plans} == {100 * job + i for job in range(4) for i in range(20)}


def test_tables_are_of_a_device_and_of_versions(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("STREAMOVERLAP_CACHE", str(tmp_path))
    path = table.path_of("NVIDIA H200 (a/b)")
    assert path.parent == tmp_path and path.name.startswith("NVIDIA-H200-a-b-_streamoverlap-")
    assert f"torch-{torch.__version__}" in path.name
    monkeypatch.delenv("STREAMOVERLAP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert table.path_of("cpu").parent == tmp_path / "cache" / "streamoverlap"
    assert table.load("cpu") == Table()


def test_the_command_keeps_what_it_finds(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("STREAMOVERLAP_CACHE", str(tmp_path))
    shapes = tmp_path / "shapes.json"
    entries = [
        {"name": "up", "op": "all_gather_gemm", "M": 24, "N": 32, "K": 16},
        {"name": "down", "op": "gemm_reduce_scatter", "M": 24, "N": 16, "K": 64, "as_tp": 8},
    ]
    shapes.write_text(json.dumps({"about": "two", "core": entries, "more": []}))
    assert main(["tune", "--shapes", str(shapes), "--set", "core", "--rounds", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [each["shape"]["name"] for each in printed["found"]] == ["up", "down"]
    document = json.loads(Path(printed["file"]).read_text())
    assert [(plan["operation"], plan["k"]) for plan in document["plans"]] == [
        ("all_gather_gemm", 16),
        ("gemm_reduce_scatter", 16),  # of 8 ranks, on 2
    ]
    monkeypatch.setenv("STREAMOVERLAP_CACHE", str(tmp_path / "other"))  # which ranks see that start later
    options = ["--op", "all_gather", "--shape", "24,1,8", "--rounds", "1"]
    assert main(["tune", "--world", "1", *options, "--json"]) == 0
    assert Path(json.loads(capsys.readouterr().out)["file"]).parent == tmp_path / "other"
    options.append("--dry-run")
    assert main(["tune", "--world", "1", *options]) == 0
    assert "nothing was kept" in capsys.readouterr().out


def test_the_command_tunes_calls_with_a_wire(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("STREAMOVERLAP_CACHE", str(tmp_path))
    options = ["--op", "gemm_reduce_scatter", "--shape", "24,16,8", "--rounds", "1", "--wire", "fp8"]
    assert main(["tune", *options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["wire"] == "fp8"
    (kept,) = json.loads(Path(printed["file"]).read_text())["plans"]
    assert (kept["operation"], kept["dtype"]) == ("gemm_reduce_scatter", "float32, fp8 wire")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "expected one of --shape and --shapes"),
        (["--shape", "3,4,4"], "shape -: M is 3; expected a multiple of the group's 2 ranks"),
        (["--shapes", "/no/such/file"], "--shapes /no/such/file: "),
        (["--shapes", "SHAPES", "--set", "most"], "has no list 'most'; expected one of core"),
        (["--shapes", "SHAPES"], "lacks 'K'"),
        (["--world", "65", "--shape", "4,4,4"], "--world is 65; expected at most 64"),
        (["--graph", "--shape", "4,4,4"], "--graph needs --device cuda"),
        (["--wire", "fp8", "--shape", "4,4,4"], "shape -: --wire is fp8 for all_gather_gemm; expected only for gemm_"),
        (
            ["--wire", "fp8", "--op", "all_reduce", "--shape", "4,4,4", "--dtype", "float64"],
            "--dtype is float64 with --wire fp8; expected float32, float16 or bfloat16",
        ),
        (["--rounds", "0", "--shape", "4,4,4"], "--rounds: is '0'; expected an integer of at least 1"),
    ],
)
def test_wrong_use_is_one_line(capsys, tmp_path, options: list[str], told: str) -> None:
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps({"core": [{"op": "all_gather_gemm", "M": 4, "N": 4}]}))
    assert main(["tune", *(str(shapes) if option == "SHAPES" else option for option in options)]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
