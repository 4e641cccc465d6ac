"""What the doctor finds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# "failure": the package would fail or give wrong results. "warning": it works, but slower than it could, or not all of
# it. "info" has no right or wrong; "skipped" could not be looked at here.
STATES = ("ok", "info", "skipped", "warning", "failure")


@dataclass(frozen=True)
class Finding:
    """One line of the report. `values` are the numbers behind `found`, in the units that their names say."""

    area: str
    name: str
    state: str
    found: str
    advice: str = ""  # what to do; empty where there is nothing to do
    values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"state is {self.state!r}; expected one of {', '.join(STATES)}")


def with_state(findings: Iterable[Finding], state: str) -> list[Finding]:
    return [finding for finding in findings if finding.state == state]


def one_line(error: BaseException) -> str:
    """An error as a part of a sentence: CUDA's have pages."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
