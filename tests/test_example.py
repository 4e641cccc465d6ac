"""examples/train_gpt.py as users run it: one process or torchrun, on the CPU, at a tiny size."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STEPS = 20
TINY = ["--device", "cpu", "--d-model", "32", "--layers", "2", "--heads", "4", "--seq", "32", "--batch", "4"]
SAME = {"rel": 1e-5, "abs": 0.0}  # float32; only the order of sums differs


def train(folder: Path, world: int, *options: str) -> list[float]:
    """The losses of a run."""
    start = [] if world == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    losses = folder / "losses.json"
    command = [sys.executable, *start, "examples/train_gpt.py", *TINY, "--losses", str(losses), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = process.communicate(timeout=150)[1]
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its ranks
            raise
    assert process.returncode == 0, said[-4000:]
    return json.loads(losses.read_text())["losses"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> list[float]:
    losses = train(tmp_path_factory.mktemp("none"), 1, "--parallel", "none", "--steps", f"{STEPS}")
    assert losses[-1] < losses[0] - 1, "nothing was learnt"
    return losses


def test_serial_layers_train_as_one_process(one_process, tmp_path: Path) -> None:
    losses = train(tmp_path, 2, "--parallel", "serial", "--steps", f"{STEPS}")
    assert losses == pytest.approx(one_process, **SAME)


def test_overlapped_layers_train_as_one_process_and_two_ranks_go_on_as_four(one_process, tmp_path: Path) -> None:
    folder, plot = tmp_path / "checkpoints", tmp_path / "losses.png"
    options = ["--steps", f"{STEPS}", "--checkpoint", str(folder)]
    losses = train(tmp_path, 2, *options, "--save-every", f"{STEPS // 2}")
    assert losses == pytest.approx(one_process, **SAME)
    shutil.rmtree(folder / f"step-{STEPS:06}")  # as if the run had been stopped half-way
    half = tmp_path / "half.json"
    half.write_text(json.dumps({"name": "two ranks", "losses": losses}))
    resumed = train(tmp_path, 4, *options, "--resume", "--against", str(half), "--plot", str(plot))
    assert resumed[: STEPS // 2] == losses[: STEPS // 2]
    assert resumed == pytest.approx(losses, **SAME)
    assert plot.stat().st_size > 10_000


def test_compiled_layers_train_as_one_process(one_process, tmp_path: Path) -> None:
    losses = train(tmp_path, 2, "--compile", "--steps", f"{STEPS}")
    assert losses == pytest.approx(one_process, **SAME)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--heads 6 --d-model 36", "--heads is 6; expected a multiple of the 4 ranks"),
        ("--seq 34", "--seq is 34; expected a multiple of the 4 ranks"),
        ("--d-model 100", "--d-model is 100; expected a multiple of the 8 heads"),
        ("--layers 0", "argument --layers: '0' is not a positive integer"),
        ("--parallel none", "--parallel none is for one process; found 4 ranks"),
        ("--resume", "--resume and --save-every need --checkpoint DIR"),
        ("--resume --checkpoint /nowhere", "--resume found no checkpoint in /nowhere"),
        ("--against /nowhere", "--against /nowhere: no such file"),
        ("--plot /nowhere/losses.png", "/nowhere/losses.png: no such folder"),
    ],
)
def test_wrong_use_is_one_clear_line(options: str, said: str, monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("train_gpt")
    monkeypatch.setattr(example, "WORLD", 4)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *options.split()])
    with pytest.raises(SystemExit) as ended:
        example.arguments()
    assert ended.value.code == 2
    assert capsys.readouterr().err.strip().endswith(f"error: {said}")
