"""Without megatron-core the rest of the package works, and `streamoverlap.megatron` says what it lacks."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys

sys.modules["megatron"] = None
import streamoverlap

try:
    import streamoverlap.megatron
except ImportError as error:
    print(error)
"""


def test_the_missing_extra_is_named() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout == (
        "streamoverlap.megatron needs megatron-core 0.16, which cannot be imported; "
        "expected after: pip install 'streamoverlap[megatron]'\n"
    )
