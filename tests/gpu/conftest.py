"""Here `ranks` are on GPUs: one each where there are enough, else several to a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpu_ranks import on_gpu
from ranks import Pools


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    pools = Pools(on_gpu)
    yield pools
    pools.close()
