"""Tests marked ``gpu``, or ``gpu(count)``, need that many GPUs (2 if not said) and are skipped elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ranks import Pools


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("gpu")
        # Processes that run tests side by side take files whole, for the fixtures in them, and do not share GPUs.
        item.add_marker(pytest.mark.xdist_group(item.path.stem if marker is None else "gpu"))
        if marker is None:
            continue
        needed = marker.args[0] if marker.args else 2
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, found {found}"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()
