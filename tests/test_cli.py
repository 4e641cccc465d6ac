"""The command line: what it prints, what it ends with, and one clear line for wrong use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamoverlap import PlanSpec, __version__, plans
from streamoverlap.__main__ import main
from streamoverlap.cli import mutate
from streamoverlap.cli.demo_rank import Outcome
from streamoverlap.cli.plan_view import steps
from streamoverlap.plans import Fault
from streamoverlap.spec import spec_of

SMALL = ("--device", "cpu", "--tokens", "36", "--hidden", "16", "--ffn", "24")


def command(*args: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "streamoverlap", *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run(line: str) -> int:
    return main(line.split())


def a_fault() -> Fault:
    """A real one: the plan of one rank twice, where two belong."""
    ranks = plans.build("all_gather", world=2)
    return plans.check([ranks[0], ranks[0]])[0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "COMMAND"),
        ("paint", "'paint'"),
        ("plan all_gather", "--world"),
        ("plan all_gather --world 4 --rank 4", "--rank is 4; expected 0 to 3"),
        ("plan all_gather --world 0", "argument --world: is '0'; expected an integer of at least 1"),
        ("plan all_gather --world 65", "world is 65"),
        ("plan all_gather --world 2 --chunks 99", "chunks is 99"),
        ("plan all_to_all --world 2", "'all_to_all'"),
        (
            "plan all_gather --world 2 --wire fp8",
            "--wire is fp8 for all_gather; expected only for gemm_",
        ),
        ("plan all_reduce --world 2 --wire fp4", "argument --wire: invalid choice: 'fp4'"),
        ("plan reduce_scatter --world 2 --quantised", "unrecognized arguments: --quantised"),
        (
            "plan gemm_all_reduce --world 2 --wire fp8 --transfer store",
            "--transfer is store with --wire fp8; expected copy",
        ),
        (
            "plan gemm_all_reduce --world 2 --wire fp8 --algorithm ring --reduce accumulate",
            "--reduce is accumulate with --algorithm ring and --wire fp8; expected sum",
        ),
        (
            "plan all_gather_gemm --world 2 --reduce sum",
            "--reduce is sum for all_gather_gemm; expected only for gemm_reduce_scatter or gemm_all_reduce",
        ),
        ("plan all_reduce --world 2 --transfer store", "--transfer is store for all_reduce; expected only for gemm_"),
        ("check --world 3-1", "is '3-1'; expected sizes from 1 to 64, rising"),
        ("check --world 0", "is '0'; expected sizes from 1 to 64, rising"),
        ("check --world two", "is 'two'; expected world sizes such as 4, 1-16 or 2,3"),
        ("check --mutate --world 1-8", "--world is 1,2,3,4,5,6,7,8; expected 2 to 4 with --mutate"),
        ("demo --device cpu --world 65", "--world is 65; expected at most 64"),
        ("demo --world 3 --tokens 10", "--tokens is 10; expected a multiple of --world, 3"),
        ("demo --device cpu --world 4 --ffn 10", "--ffn is 10; expected a multiple of --world, 4"),
        ("demo --device cpu --text /no/such/file", "--text is /no/such/file; expected a file"),
        ("demo --device cpu --tokens 100000000", "bytes; expected at least --tokens, 100000000"),
        ("demo --device cpu --chunks 65", "chunks is 65; expected an integer from 1 to 64"),
        ("demo --dtype int8", "'int8'"),
        (
            "demo --dtype float64 --wire fp8",
            "--dtype is float64 with --wire fp8; expected float32, float16 or bfloat16",
        ),
    ],
)
def test_wrong_use_ends_with_2_and_one_line(line: str, said: str, capsys) -> None:
    device = [] if "--device" in line or not line.startswith("demo") else ["--device", "cpu"]
    assert main([*line.split(), *device]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.startswith("streamoverlap") and err.count("\n") == 1


def test_cuda_without_a_gpu_is_a_clear_error(monkeypatch, capsys) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["demo", "--device", "cuda"]) == 2
    assert "--device is cuda but torch finds no GPU" in capsys.readouterr().err


def test_more_ranks_than_gpus_is_a_clear_error(monkeypatch, capsys) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert main(["demo", "--world", "3"]) == 2
    assert "--world is 3; expected at most 2, one rank a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "plan", "check", "demo", "doctor"])
def test_help_has_an_example(name: str, capsys) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*name.split(), "--help"])
    assert exit_.value.code == 0
    assert f"  streamoverlap {name}" in capsys.readouterr().out.split("example")[1]


def test_version_and_running_as_a_module() -> None:
    result = command("--version")
    assert (result.returncode, result.stdout) == (0, f"streamoverlap {__version__}\n")


def test_plan_prints_every_op_in_issue_order_and_the_verdict(capsys) -> None:
    assert run("plan gemm_reduce_scatter --world 3 --rank 1 --algorithm ring --chunks 2") == 0
    out = capsys.readouterr().out
    plan = plans.build("gemm_reduce_scatter", world=3, algorithm="ring", chunks=2)[1]
    assert out.startswith(f"{plan.spec}, rank 1, as run\n")
    listing = out.split("in issue order")[1].split("side by side")[0]
    rows = [line.split() for line in listing.splitlines() if line[:3].strip().isdecimal()]
    assert [int(row[0]) for row in rows] == list(range(len(plan.ops)))
    assert [(row[1], row[2]) for row in rows] == [(op.stream, op.kind) for op in plan.ops]
    assert "The checker finds no fault in the plans of all 3 ranks." in out
    assert "\x1b" not in out  # no colour in a file or a pipe


def test_plan_names_the_other_end_of_every_sync_op(capsys) -> None:
    assert run("plan all_gather_gemm --world 2") == 0
    lines = capsys.readouterr().out.split("side by side")[0].splitlines()
    ranks = plans.build("all_gather_gemm", world=2)
    awaited = next(i for i, op in enumerate(ranks[1].ops) if op.kind == "await" and op.flag.kind == "full")
    notify = next(line for line in lines if "full(0->1, 0)" in line and " notify " in line)
    assert notify.rstrip().endswith(f"before #{awaited} of rank 1")


def test_plan_is_narrow_where_the_terminal_is(monkeypatch, capsys) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    assert run("plan all_gather_gemm --world 4 --compute-streams 3") == 0
    assert "this terminal has 60" in " ".join(capsys.readouterr().out.split())


def test_plan_as_json_is_the_plan(capsys) -> None:
    assert run("plan all_gather_gemm --world 2 --rank 1 --keep-gathered --unpruned --json") == 0
    result = json.loads(capsys.readouterr().out)
    plan = plans.build("all_gather_gemm", world=2, keep_gathered=True, pruned=False)[1]
    assert (result["rank"], result["pruned"], result["faults"]) == (1, False, [])
    assert result["spec"]["keep_gathered"] is True
    assert [(op["kind"], op["stream"]) for op in result["ops"]] == [(op.kind, op.stream) for op in plan.ops]
    events = [op["event"] for op in result["ops"] if "event" in op]
    assert events == [op.event for op in plan.ops if op.kind in ("record", "wait")]


@pytest.mark.parametrize("algorithm", [None, "direct", "ring"])
@pytest.mark.parametrize("operation", ["gemm_reduce_scatter", "gemm_all_reduce", "reduce_scatter", "all_reduce"])
def test_plan_with_a_wire_is_that_of_a_call(operation: str, algorithm: str | None, capsys) -> None:
    chosen = f"--algorithm {algorithm}" if algorithm else ""
    assert run(f"plan {operation} --world 3 --wire fp8 {chosen} --json") == 0
    built = plans.build_spec(spec_of(operation, PlanSpec(algorithm or "direct"), 3, quantised=True))
    result = json.loads(capsys.readouterr().out)
    assert result["spec"] == plans.spec_options(built[0].spec)
    assert [op["kind"] for op in result["ops"]] == [op.kind for op in built[0].ops]


def test_plan_ends_with_1_on_a_fault(monkeypatch, capsys) -> None:
    fault = a_fault()
    monkeypatch.setattr(plans, "check", lambda _: [fault])
    assert run("plan all_gather --world 2") == 1
    assert f"fault: {fault.kind}: {fault.message}" in capsys.readouterr().out


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_steps_respect_streams_events_and_flags(world: int) -> None:
    for spec in plans.variants(world, chunks=(1, 2), compute_streams=(1, 2)):
        ranks = plans.build_spec(spec)
        found = steps(ranks)
        set_at = {
            repr(op.flag): found[r][i] for r, p in enumerate(ranks) for i, op in enumerate(p.ops) if op.kind == "notify"
        }
        for plan, numbers in zip(ranks, found, strict=True):
            last: dict[str, int] = {}
            recorded: dict[int, int] = {}
            for op, step in zip(plan.ops, numbers, strict=True):
                assert step > last.get(op.stream, 0)
                last[op.stream] = step
                if op.kind == "record":
                    recorded[op.event] = step
                elif op.kind == "wait":
                    assert step > recorded[op.event]
                elif op.kind == "await" and op.flag.kind == "full":
                    assert step > set_at[repr(op.flag)]


def test_check_finds_no_fault_in_worker_processes(capsys) -> None:
    assert run("check --world 1-3,5 --jobs 2 --json") == 0
    result = json.loads(capsys.readouterr().out)
    for world, tally in zip((1, 2, 3, 5), result["checked"], strict=True):
        variants = len(list(plans.variants(world)))
        assert (tally["world"], tally["variants"], tally["faults"]) == (world, variants, [])
        assert tally["plans"] == 2 * world * variants  # as written and pruned
        assert (tally["pairs"] > 1000) == (world <= 4)


def test_check_prints_faults_and_ends_with_1(monkeypatch, capsys) -> None:
    fault = a_fault()
    monkeypatch.setattr(plans, "check_sequence", lambda calls: [fault] if calls[0][0].spec.chunks == 4 else [])
    assert run("check --world 2 --jobs 1") == 1
    out = capsys.readouterr().out
    assert f"fault: all_gather_gemm(ring, world=2, chunks=4, compute_streams=1), as written: {fault.kind}: " in out
    assert "more (--json has all)" in out


def test_check_reports_faults_of_consecutive_calls(monkeypatch, capsys) -> None:
    fault = a_fault()
    monkeypatch.setattr(plans, "check_sequence", lambda calls: [fault] if calls[0] != calls[1] else [])
    assert run("check --world 1 --jobs 1") == 1
    assert "all_gather_gemm(ring, world=1, chunks=1, compute_streams=1), then " in capsys.readouterr().out


@pytest.fixture
def few_mutants(monkeypatch) -> None:
    monkeypatch.setattr(mutate, "_OPTIONS", {2: ((1,), (1,)), 3: ((1,), (1,)), 4: ((1,), (1,))})


def test_mutation_misses_nothing_at_world_2(few_mutants, capsys) -> None:
    assert run("check --mutate --world 2 --jobs 1") == 0
    row = next(
        line.split() for line in capsys.readouterr().out.split("Mutants")[1].splitlines() if line[:6].strip() == "2"
    )
    mutants, broken, missed = (int(number.replace(",", "")) for number in row[1:4])
    assert mutants > 1000 and broken > 1000 and missed == 0


def test_mutation_ends_with_1_on_a_miss_and_says_where_it_samples(few_mutants, monkeypatch, capsys) -> None:
    found = dict.fromkeys(mutate._COUNTS, 0) | {"broken": 2, "missed": 1, "missed_texts": ["op 3 deleted: torn read"]}
    monkeypatch.setattr(mutate._interpreter, "mutate", lambda *_, **__: found)
    assert run("check --mutate --world 4 --jobs 1") == 1
    out = capsys.readouterr().out
    assert "missed: op 3 deleted: torn read" in out
    assert "sampled" in out


@pytest.mark.parametrize(
    "options",
    [
        ("--world", "2"),
        ("--world", "3", "--dtype", "bfloat16", "--algorithm", "ring", "--chunks", "5", "--reduce", "sum"),
        ("--world", "3", "--algorithm", "ring", "--chunks", "5", "--wire", "fp8"),
    ],
    ids=["default", "ring", "wire"],
)
def test_demo_is_right_on_every_rank(options: tuple[str, ...]) -> None:
    result = command("demo", *SMALL, *options, "--json")
    assert result.returncode == 0, result.stderr
    demo = json.loads(result.stdout)
    assert demo["right"] and len(demo["ranks"]) == demo["world"] == int(options[1])
    for rank, outcome in enumerate(demo["ranks"]):
        assert outcome["rank"] == rank
        assert outcome["checked_rows"] == 36 // demo["world"]
        assert 0 < outcome["relative_error"] <= demo["bound"]
        of_float8 = outcome["relative_error"] > 100 * outcome["serial_relative_error"]  # which serial does not send
        assert of_float8 == (demo["wire"] is not None)
        assert outcome["overlapped_seconds"] > 0 and outcome["serial_seconds"] > 0
        assert [plan["op"] for plan in outcome["plans"]] == ["all_gather_gemm", "gemm_reduce_scatter"]
        if "--algorithm" in options:
            assert all((p["algorithm"], p["chunks"], p["reduce"]) == ("ring", 5, "sum") for p in outcome["plans"])


def test_demo_prints_plan_error_and_both_times(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(os.urandom(36))
    result = command("demo", *SMALL, "--world", "2", "--dtype", "float64", "--text", str(text))
    assert result.returncode == 0, result.stderr
    for words in ("all_gather_gemm: direct", "overlapped", "serial", f"text: {text}", "Right: "):
        assert words in result.stdout


def test_demo_reports_ranks_that_failed() -> None:
    # More than any address space holds.
    result = command("demo", "--device", "cpu", "--world", "2", "--hidden", str(10**12))
    assert result.returncode == 1
    assert "failed: RuntimeError" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


@pytest.mark.parametrize("error", [1.0, float("nan")])
def test_demo_ends_with_1_where_a_rank_is_wrong(error: float, monkeypatch, capsys) -> None:
    a_plan = (("all_gather_gemm", PlanSpec(), "given"),)

    def outcomes(problem, plan):
        return [Outcome(rank, a_plan, 9, error * rank, error * rank, 0.0, 1e-3, 1e-3) for rank in range(problem.world)]

    monkeypatch.setattr("streamoverlap.cli.demo._launch", outcomes)
    assert main(["demo", *SMALL, "--world", "2"]) == 1
    # NaN times rank 0 is NaN too.
    assert ("WRONG on rank 1" if error == 1.0 else "WRONG on rank 0, 1") in capsys.readouterr().out
    assert main(["demo", *SMALL, "--world", "2", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["right"] is False
