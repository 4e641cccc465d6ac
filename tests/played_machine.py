"""Machines for the tests of `streamoverlap doctor`: what its other processes would find there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from streamoverlap.__main__ import main
from streamoverlap.doctor import built, check, examination, gpus
from streamoverlap.doctor.check import Outcome, Trial
from streamoverlap.doctor.findings import Finding
from streamoverlap.doctor.gpus import Facts, Gpu, Pair, Speeds

NO_GPU = Facts("13.0", None, "", "there is no NVIDIA driver (no libcuda.so.1)", False, None)


def gpu_facts(count: int = 2, **changes) -> Facts:
    gpus_ = [Gpu(i, "a GPU", 10**10, (9, 0), "", "") for i in range(count)]
    pairs = [Pair(i, j, "NVLink (18 links a GPU)", True) for j in range(count) for i in range(j)]
    facts = {"torch_cuda": "13.0", "driver_cuda": (13, 0), "driver_version": "580.1", "why_none": ""}
    return Facts(**{**facts, "driver_present": True, "all_gpus": count, "gpus": gpus_, "pairs": pairs, **changes})


def outcomes(device: str, world: int, wrong: int = 0, fallback: str | None = None, error: str = "") -> list[Outcome]:
    trials = [Trial("all_gather_gemm", name, "float32", 0, 96) for name in ("direct", "ring", "serial")]
    last = [*trials[:-1], Trial("all_gather_gemm", "serial", "float32", wrong, 96)]
    return [Outcome(rank, fallback, tuple(trials if rank else last), error) for rank in range(world)]


def play(monkeypatch: pytest.MonkeyPatch) -> dict[Callable, Callable]:
    """What the calls to other processes give, by function; a machine without GPUs on which all is right."""
    answers = {
        gpus.look: lambda: NO_GPU,
        gpus.measure: lambda pairs: Speeds([6e14, 6e14], [(3.8e11, 2e-6)] * len(pairs)),
        check.run_ranks: outcomes,
    }
    monkeypatch.setattr(examination, "call", lambda function, *args, timeout: answers[function](*args))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return answers


def doctor(capsys, *options: str) -> tuple[int, str]:
    code = main(["doctor", *options])
    return code, capsys.readouterr().out


def named(findings: list[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


def record(monkeypatch, tmp_path: Path, **values) -> None:
    (tmp_path / built.RECORD).write_text(json.dumps(values))
    monkeypatch.setattr(built, "_FOLDER", tmp_path)
