"""Ranks of a command: processes of this host, in one group."""

from __future__ import annotations

import logging
import multiprocessing
import os
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from streamoverlap.spec import SUMS_OF_PRODUCTS


class RanksFailed(Exception):  # noqa: N818  what happened, not what is wrong
    """Some ranks failed; the message has a line for each."""


def launch(function: Callable, world: int, *args: Any) -> list:
    """Calls ``function(*args, threads)`` on `world` ranks; returns what each returned, by rank.

    `threads` are those that a rank may compute with. The function sets up its process group, from the environment.

    Raises:
        RanksFailed: some did.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // world)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # A failing rank is reported in one line; torch would print pages.
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Ranks are forked from a server that has imported torch and runs no thread: quick to start.
    multiprocessing.get_context("forkserver").set_forkserver_preload([function.__module__])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method="forkserver",
    )
    try:
        returned = elastic_launch(config, _run)(_settings(), function, *args, threads)
    except ChildFailedError as error:
        lines = [f"rank {rank} failed: {_reason(failure)}" for rank, failure in sorted(error.failures.items())]
        raise RanksFailed("\n".join(lines)) from error
    return [returned[rank] for rank in range(world)]


def _settings() -> dict[str, str]:
    """The variables that this package obeys: a server that was started before keeps those of then."""
    return {name: value for name, value in os.environ.items() if _is_setting(name)}


def _is_setting(name: str) -> bool:
    return name.startswith("STREAMOVERLAP_") or name == "XDG_CACHE_HOME"


def _run(settings: dict[str, str], function: Callable, *args: Any) -> Any:
    for name in filter(_is_setting, list(os.environ)):
        del os.environ[name]
    os.environ.update(settings)
    return function(*args)


def join_group(device: str, threads: int, timeout: float) -> None:
    """What a rank does first: its threads, its GPU if `device` is cuda, the default group; `timeout` in seconds."""
    torch.set_num_threads(threads)
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))


def sizes_of(operation: str, world: int, m: int, n: int, k: int, split: int, row: int) -> list[tuple[int, int]]:
    """Of x, and of the weight if there is one, on each rank.

    N or K is split by `split`. A plain collective but all_gather moves x of m by `row`.
    """
    if operation == "all_gather_gemm":
        return [(m // world, k), (n // split, k)]
    if operation in SUMS_OF_PRODUCTS:
        return [(m, k // split), (n, k // split)]
    return [(m // world, k) if operation == "all_gather" else (m, row)]


def of_wire(wire: str | None) -> dict[str, str]:
    """Arguments of an op: those that gather know no wire."""
    return {} if wire is None else {"wire": wire}


def _reason(failure) -> str:
    """The last line of the traceback that the rank left, or how its process ended."""
    message = failure.message
    if isinstance(message, dict):
        message = message.get("message", "")
    return (message.strip().splitlines() or [f"exit code {failure.exitcode}"])[-1]
