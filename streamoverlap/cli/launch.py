"""Ranks of a command: processes of this host, in one group."""

from __future__ import annotations

import logging
import multiprocessing
import os
import uuid
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


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
        returned = elastic_launch(config, function)(*args, threads)
    except ChildFailedError as error:
        lines = [f"rank {rank} failed: {_reason(failure)}" for rank, failure in sorted(error.failures.items())]
        raise RanksFailed("\n".join(lines)) from error
    return [returned[rank] for rank in range(world)]


def _reason(failure) -> str:
    """The last line of the traceback that the rank left, or how its process ended."""
    message = failure.message
    if isinstance(message, dict):
        message = message.get("message", "")
    return (message.strip().splitlines() or [f"exit code {failure.exitcode}"])[-1]
