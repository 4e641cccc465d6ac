"""Waiting for keys of a torch.distributed store."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

_LONGEST_PAUSE = 0.01


def wait_for(store: dist.Store, keys: list[str], seconds: float, check: Callable[[], None] = lambda: None) -> None:
    """Until all `keys` are set. Polls: a thread in TCPStore's own wait keeps all others of the process from it.

    Raises:
        torch.distributed.DistStoreError: they are not set in time, or the store is gone.
        Exception: what `check` raises meanwhile.
    """
    deadline = time.monotonic() + seconds
    pause = 0.0005
    while not store.check(keys):
        check()
        if time.monotonic() > deadline:
            missing = [key for key in keys if not store.check([key])]
            raise dist.DistStoreError(f"waited {seconds:g} s for {', '.join(missing)}")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
