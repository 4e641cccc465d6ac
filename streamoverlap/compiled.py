"""Loads the compiled part, first of all; where it cannot be loaded, says so in one line, and leaves that to the doctor.

Python imports a package before it runs a command of it, so this is where `streamoverlap doctor` begins on a machine on
which nothing else of the package can run.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path


def _words_of_command() -> list[str] | None:
    """What follows ``streamoverlap`` or ``python -m streamoverlap``; None where this process is another program."""
    program, *words = sys.argv or [""]
    if program == "-m":  # what Python puts there until it has found the module
        return words if sys.orig_argv[-len(sys.argv)] == "streamoverlap" else None
    return words if Path(program).name == "streamoverlap" else None


try:
    import_module("torch")  # whose libraries the compiled part is linked with
    import_module("streamoverlap._C")  # where it is missing, "from streamoverlap import" would speak of a circle
except (ImportError, OSError) as error:
    words = _words_of_command()
    if words and words[0] == "doctor":
        from streamoverlap.cli.doctor import run_without_package

        sys.exit(run_without_package(error, words[1:]))
    told = f"streamoverlap cannot be used: {error}; `streamoverlap doctor` says why and what to do"
    if words is not None:
        sys.exit(told)
    raise ImportError(told) from error
