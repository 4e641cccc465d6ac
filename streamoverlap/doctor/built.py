"""What is built, from what, and why not more."""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from importlib import util
from pathlib import Path

from streamoverlap.doctor.findings import Finding, one_line

_AREA = "build"
_FOLDER = Path(__file__).parents[1]
RECORD = "_built.json"  # setup.py writes it beside the compiled part
AGAIN = "build it again: `make build` in a clone, else `pip install --no-build-isolation --force-reinstall .`"


def look(broken: BaseException | None) -> list[Finding]:
    """`broken`: why the compiled part cannot be loaded."""
    record = _record(_FOLDER)
    return [_compiled_part(broken, record), _torch(record), _interpreter()]


def has_cuda_part() -> bool:
    from streamoverlap import _C

    return _C.WITH_CUDA


def why_no_cuda_part() -> str:
    return _record(_FOLDER).get("why_no_cuda") or "why was not recorded"


def architectures() -> list[tuple[int, int]]:
    """The compute capabilities that kernels were compiled for; none where that is not known."""
    found = re.findall(r"(\d+)\.(\d+)", _record(_FOLDER).get("architectures") or "")
    return [(int(major), int(minor)) for major, minor in found]


def _record(folder: Path) -> dict:
    path = folder / RECORD
    try:
        record = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError):
        return {}  # less is known, which the findings say
    return record if isinstance(record, dict) else {}


def _compiled_part(broken: BaseException | None, record: dict) -> Finding:
    if broken is not None:
        reason, advice = _why_broken(_FOLDER, record)
        found = "cannot be loaded: " + "; ".join(filter(None, (reason, one_line(broken))))
        return Finding(_AREA, "compiled part", "failure", found, advice)
    values = {**record, "with_cuda": has_cuda_part()}
    if has_cuda_part():
        toolkit = f" (nvcc {record['nvcc']}, for {record['architectures']})" if record.get("nvcc") else ""
        return Finding(_AREA, "compiled part", "ok", f"host and CUDA parts{toolkit}", values=values)
    return Finding(_AREA, "compiled part", "info", f"host part alone: {why_no_cuda_part()}", values=values)


def how_to_get_cuda_part() -> str:
    import torch

    if torch.version.cuda is None:
        return f"install a CUDA build of torch (https://pytorch.org/get-started), then {AGAIN}"
    return f"install nvcc of CUDA {torch.version.cuda.split('.')[0]} or set CUDA_HOME to it, then {AGAIN}"


def _why_broken(folder: Path, record: dict) -> tuple[str, str]:
    """A reason, if the files have one, and what to do."""
    if util.find_spec("torch") is None:
        return f"{sys.executable} has no torch", "pip install torch, or use the Python that has it"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    built = sorted(path.name for path in folder.glob("_C.*.so"))
    if not built:
        return f"there is no _C{suffix} in {folder}", AGAIN
    if f"_C{suffix}" not in built:
        return f"built for another Python: {', '.join(built)}; this one loads _C{suffix}", AGAIN
    found = _torch_version()
    if record.get("torch") and record["torch"] != found:
        return f"built with torch {record['torch']}, found {found or 'one that cannot be loaded'}", AGAIN
    return "", AGAIN


def _torch(record: dict) -> Finding:
    version = _torch_version()
    if version is None:
        return Finding(_AREA, "torch", "failure", "cannot be loaded", "pip install torch")
    built = record.get("torch")
    values = {"found": version, "built_with": built}
    if not built:
        return Finding(
            _AREA, "torch", "info", f"{version}; what the package was built with is not recorded", "", values
        )
    # Torch keeps its C++ interface within a minor version only.
    if _minor(built) != _minor(version):
        found = f"{version}, but the package was built with {built}: torch's C++ interface differs"
        return Finding(_AREA, "torch", "failure", found, AGAIN, values)
    return Finding(_AREA, "torch", "ok", f"{version}, built with {built}", values=values)


def _minor(version: str) -> list[str]:
    return re.findall(r"\d+", version)[:2]


def _torch_version() -> str | None:
    try:
        import torch
    except (ImportError, OSError):
        return None
    return torch.__version__


def _interpreter() -> Finding:
    """Of plans, which `streamoverlap check --mutate` needs."""
    try:
        from streamoverlap import _interpreter
    except ImportError as error:
        return Finding(_AREA, "interpreter", "warning", f"no `check --mutate`: {one_line(error)}", AGAIN)
    return Finding(_AREA, "interpreter", "ok", f"of plans, for `check --mutate` ({Path(_interpreter.__file__).name})")
