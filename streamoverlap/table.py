"""Measured choices: which plan, and which of cuBLASLt's algorithms, was fastest for which problem on which device.

One readable file for each device and each set of library versions, in the user's cache folder, or shipped with the
package. Jobs may share it: it is replaced as a whole, and what others have added meanwhile is kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from streamoverlap import _C
from streamoverlap._version import __version__
from streamoverlap.spec import PlanSpec

_SHIPPED = Path(__file__).with_name("tuned")
_FORMAT = 1


class Problem(NamedTuple):
    """What a plan was measured for: sizes before sharding, rows as `chooser.Shape.bucket` rounds them."""

    operation: str
    world: int
    m: int
    n: int
    k: int
    dtype: str
    layout: str  # of weights: "row" or "column" for each that is there
    graph: bool = False  # in a CUDA graph, else issued by the CPU


class TunedPlan(NamedTuple):
    plan: PlanSpec
    seconds: float
    serial_seconds: float | None  # None: this group could not be measured with it


class TunedGemm(NamedTuple):
    """Of one product: cuBLASLt's candidates by number, in its own order."""

    algorithm: int
    seconds: float
    first_seconds: float  # of the first candidate


@dataclass
class Table:
    """`plans` by problem, `gemms` by the key that `_C.Communicator.measured_gemms` gives."""

    plans: dict[Problem, TunedPlan] = field(default_factory=dict)
    gemms: dict[tuple[int, ...], TunedGemm] = field(default_factory=dict)

    def update(self, other: Table) -> None:
        self.plans.update(other.plans)
        self.gemms.update(other.gemms)

    @classmethod
    def read(cls, path: Path) -> Table:
        """Raises ValueError where the file is not what `save` writes."""
        try:
            document = json.loads(path.read_text())
            if document["format"] != _FORMAT:
                raise ValueError(f"format is {document['format']}; expected {_FORMAT}")
            plans = {
                _problem(entry): TunedPlan(PlanSpec(**entry["plan"]), 1e-6 * entry["us"], _seconds(entry["serial_us"]))
                for entry in document["plans"]
            }
            gemms = {
                tuple(entry["key"]): TunedGemm(entry["algorithm"], 1e-6 * entry["us"], 1e-6 * entry["first_us"])
                for entry in document["gemms"]
            }
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no table of tuned plans: {type(error).__name__}: {error}") from error
        return cls(plans, gemms)

    def save(self, path: Path, device: str) -> None:
        """Adds this table to the file, which is made if there is none; OSError if that cannot be."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            whole = Table.read(path) if path.exists() else Table()
            whole.update(self)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
                try:
                    file.write(whole._as_text(device))
                    file.flush()
                    os.fsync(file.fileno())
                    os.chmod(file.name, 0o644)
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise

    def _as_text(self, device: str) -> str:
        plans = [
            {
                **problem._asdict(),
                "plan": asdict(tuned.plan),
                "us": _microseconds(tuned.seconds),
                "serial_us": None if tuned.serial_seconds is None else _microseconds(tuned.serial_seconds),
            }
            for problem, tuned in sorted(self.plans.items())
        ]
        gemms = [
            {
                "m": key[0],
                "n": key[1],
                "k": key[2],
                "algorithm": tuned.algorithm,
                "us": _microseconds(tuned.seconds),
                "first_us": _microseconds(tuned.first_seconds),
                "key": list(key),
            }
            for key, tuned in sorted(self.gemms.items())
        ]
        head = {"format": _FORMAT, "device": device, "versions": versions()}
        lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        for name, entries in (("plans", plans), ("gemms", gemms)):
            rows = ",\n  ".join(json.dumps(entry) for entry in entries)
            lines.append(f' "{name}": [\n  {rows}\n ]' if rows else f' "{name}": []')
        return "{\n" + ",\n".join(lines) + "\n}\n"


def _problem(entry: dict[str, Any]) -> Problem:
    return Problem(**{name: entry[name] for name in Problem._fields if name in entry or name != "graph"})


def as_kept(seconds: float) -> float:
    """As a file has it, so that a run tells of what it has measured just what later ones will."""
    return 1e-6 * _microseconds(seconds)


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 2)


def _seconds(microseconds: float | None) -> float | None:
    return None if microseconds is None else 1e-6 * microseconds


def versions() -> dict[str, str]:
    """Of all that a choice hangs on."""
    found = {"streamoverlap": __version__, "torch": torch.__version__}
    if _C.WITH_CUDA:
        found["cublaslt"] = str(_C.cublaslt_version())
    return found


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def path_of(device: str) -> Path:
    """Where this user's table for a device is: $STREAMOVERLAP_CACHE, else $XDG_CACHE_HOME/streamoverlap or ~/.cache."""
    folder = os.environ.get("STREAMOVERLAP_CACHE")
    if not folder:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamoverlap"
    return Path(folder) / _file_name(device)


def load(device: str) -> Table:
    """The shipped table for the device, if there is one, and over it the user's own. ValueError as `Table.read`."""
    table = Table()
    for path in (_SHIPPED / _file_name(device), path_of(device)):
        if path.is_file():
            table.update(Table.read(path))
    return table


def _file_name(device: str) -> str:
    parts = [device, *(f"{name}-{version}" for name, version in versions().items())]
    return "_".join(re.sub(r"[^A-Za-z0-9.+-]+", "-", part) for part in parts) + ".json"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go of by closing it, also where the process dies
        yield
