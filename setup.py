"""Builds the two extension modules; all else that describes the package is in pyproject.toml.

- ``streamoverlap._C``: the plans and their executors, with torch. Its CUDA part is built where nvcc and a
  CUDA build of torch are found; ``STREAMOVERLAP_CUDA=0`` leaves it out, ``=1`` makes its absence an error.
- ``streamoverlap._interpreter``: the independent interpreter of plans, without torch.

``TORCH_CUDA_ARCH_LIST`` (default ``9.0+PTX``), ``CUDA_HOME``, ``CXX`` and ``MAX_JOBS`` are read as by torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import NoReturn

from setuptools import Extension, setup

ROOT = Path(__file__).parent
TORCH_NEEDED = (2, 11)
COMPILER_NEEDED = "needed is g++ 10 or newer (Debian: apt-get install g++; or set CXX)"
CFLAGS = ["-O2", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden"]


def stop(message: str) -> NoReturn:
    sys.exit(f"streamoverlap: {message}")


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, text=True, capture_output=True, check=False).stdout


def files(*folders: str) -> list[str]:
    """Sources in these folders, not those below, relative to the root as setuptools wants them."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).glob("*"))]
    return [str(path.relative_to(ROOT)) for path in paths if path.suffix in (".cpp", ".cu")]


def links_its_own_runtime(compiler: list[str]) -> bool:
    """Some toolchains link libstdc++ statically. Two copies of it beside torch's end in crashes, not in errors."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "probe.so")
        probe = "#include <iostream>\nvoid f() { std::cout << 1L; }"
        command = [*compiler, "-x", "c++", "-fPIC", "-shared", "-o", str(library), "-"]
        subprocess.run(command, input=probe, text=True, capture_output=True, check=False)
        return library.exists() and b"libstdc++.so" not in library.read_bytes()


def check_compiler() -> None:
    compiler = os.environ.get("CXX", "c++").split()
    if shutil.which(compiler[0]) is None:
        stop(f"found no C++ compiler '{compiler[0]}'; {COMPILER_NEEDED}")
    if links_its_own_runtime(compiler):
        if shutil.which("g++") is None or links_its_own_runtime(["g++"]):
            stop(f"found {compiler[0]}, which links libstdc++ statically; {COMPILER_NEEDED}")
        print(f"streamoverlap: using g++, since {compiler[0]} links libstdc++ statically", flush=True)
        os.environ.update(CXX="g++", CC="gcc", CUDAHOSTCXX="g++")
        compiler = ["g++"]
    probe = "#include <span>\nint main() { return std::span<int>{}.size(); }"
    command = [*compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    if subprocess.run(command, input=probe, text=True, capture_output=True, check=False).returncode != 0:
        found = output_of(*compiler, "--version").partition("\n")[0] or compiler[0]
        stop(f"found a compiler without C++20 ({found}); {COMPILER_NEEDED}")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        stop(f"found no Python.h for {sys.executable}; needed are Python's headers (Debian: {package})")


def import_torch():
    needed = f"needed is torch {'.'.join(map(str, TORCH_NEEDED))} or newer: pip install torch"
    try:
        import torch
    except (ImportError, OSError) as error:
        stop(f"found no usable torch in {sys.executable} ({error}); {needed}")
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < TORCH_NEEDED:
        stop(f"found torch {torch.__version__}; {needed}")
    return torch


def find_cuda_home() -> Path | None:
    """The CUDA toolkit: an nvcc on the PATH may be a script elsewhere, so the headers decide."""
    nvcc = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", nvcc and Path(nvcc).resolve().parents[1]]
    for home in map(Path, filter(None, candidates)):
        if (home / "bin/nvcc").exists() and (home / "include/cuda_runtime.h").exists():
            return home
    return None


def nvcc_version(home: Path) -> str:
    release = re.search(r"release (\d+\.\d+)", output_of(home / "bin/nvcc", "--version"))
    return release.group(1) if release else "of unknown version"


def why_no_cuda(torch, home: Path | None) -> str | None:
    if os.environ.get("STREAMOVERLAP_CUDA") == "0":
        return "STREAMOVERLAP_CUDA=0"
    if not files("csrc/cuda"):
        return "no sources in csrc/cuda"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build"
    if home is None:
        return "no nvcc on PATH, nor in CUDA_HOME or /usr/local/cuda"
    found = nvcc_version(home)
    if found.split(".")[0] != torch.version.cuda.split(".")[0]:
        return f"nvcc is {found}, but torch {torch.__version__} is built for CUDA {torch.version.cuda}"
    return None


def cublas_folders(cuda_major: str) -> tuple[list[str], list[str]]:
    """Where pip put the cuBLAS that torch loads: a toolkit may have no headers of it, or another version."""
    homes = [Path(entry) / "nvidia" / f"cu{cuda_major}" for entry in sys.path]
    found = [home for home in homes if (home / "include/cublasLt.h").exists()][:1]
    return [str(home / "include") for home in found], [str(home / "lib") for home in found]


def without_their_warnings(folders: list[str]) -> list[str]:
    """Compiler options that make these, which torch passes as -I, system folders: only our own code is warned about."""
    return [option for folder in folders for option in ("-isystem", folder)]


def record(torch, home: Path | None, why_no_cuda_part: str | None) -> dict:
    """What `streamoverlap doctor` tells of this build."""
    with_cuda = why_no_cuda_part is None
    return {
        "torch": torch.__version__,
        "nvcc": nvcc_version(home) if with_cuda else None,
        "architectures": os.environ["TORCH_CUDA_ARCH_LIST"] if with_cuda else None,
        "why_no_cuda": why_no_cuda_part,
    }


def modified(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def extensions() -> dict:
    check_compiler()
    torch = import_torch()
    home = find_cuda_home()
    if home is not None:
        os.environ["CUDA_HOME"] = str(home)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0+PTX")
    # A file that includes torch takes gigabytes to compile; ninja's own choice is more jobs than cores.
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    # Imported late: it reads CUDA_HOME when it is imported.
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension, include_paths

    headers = [str(path) for folder in ("csrc", "tests/interpreter") for path in Path(folder).rglob("*.h")]
    sources = files("csrc", "csrc/bindings", "csrc/plan", "csrc/group", "csrc/host")
    reason = why_no_cuda(torch, home)
    if reason is None:
        found = f"nvcc {nvcc_version(home)}, torch {torch.__version__}"
        print(f"streamoverlap: building host and CUDA parts ({found})", flush=True)
        major = torch.version.cuda.split(".")[0]
        includes, libraries = cublas_folders(major)
        main = CUDAExtension(
            "streamoverlap._C",
            [*sources, *files("csrc/bindings/cuda", "csrc/cuda")],
            include_dirs=includes,
            library_dirs=libraries,
            define_macros=[("STREAMOVERLAP_WITH_CUDA", None)],
            extra_compile_args={
                "cxx": [*CFLAGS, *without_their_warnings([*includes, *include_paths("cuda")])],
                "nvcc": ["-O2"],
            },
            # A wheel has no libcublasLt.so, only the versioned name.
            extra_link_args=[f"-l:libcublasLt.so.{major}" if libraries else "-lcublasLt"],
            depends=headers,
        )
    elif os.environ.get("STREAMOVERLAP_CUDA") == "1":
        stop(f"STREAMOVERLAP_CUDA=1 asks for the CUDA part, which cannot be built here: {reason}")
    else:
        print(f"streamoverlap: building the host part only: {reason}", flush=True)
        options = {"cxx": [*CFLAGS, *without_their_warnings(include_paths("cpu"))]}
        main = CppExtension("streamoverlap._C", sources, extra_compile_args=options, depends=headers)
    torch_headers = str(Path(torch.__file__).parent / "include")  # for the pybind11 that torch carries
    interpreter = Extension(
        "streamoverlap._interpreter",
        files("csrc/plan", "tests/interpreter"),
        extra_compile_args={"cxx": [*CFLAGS, *without_their_warnings([torch_headers])]},
        language="c++",
        depends=headers,
    )

    class Build(BuildExtension):
        def run(self) -> None:
            path = Path(self.get_ext_fullpath(main.name))
            before = modified(path)
            super().run()
            if modified(path) != before:  # one that was not compiled anew keeps its record
                path.with_name("_built.json").write_text(json.dumps(record(torch, home, reason), indent=2) + "\n")

        def build_extension(self, extension: Extension) -> None:
            # Both modules compile csrc/plan, each with its flags: in one folder they would undo each other's.
            base = self.build_temp
            if extension is interpreter:
                self.build_temp = os.path.join(base, "interpreter")
            super().build_extension(extension)
            self.build_temp = base

    return {"ext_modules": [main, interpreter], "cmdclass": {"build_ext": Build}}


setup(**extensions())
