"""Calls that can neither hang nor end this process: each in a process of its own, for a bounded time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any

from streamoverlap.doctor.findings import one_line

_LAST_WAIT = 5.0  # seconds for a process to go once it is killed; one that a driver holds never does


class CallFailed(Exception):  # noqa: N818  what happened, not what is wrong
    """The function raised, its process died, or it took too long; the message is one line."""


def call(function: Callable, *args: Any, timeout: float) -> Any:
    """Returns ``function(*args)``, called in a new process that is ended, with all it started, when this returns.

    `function` is one of a module, by its name there; arguments and result are pickled. `timeout`: seconds.

    Raises:
        CallFailed: there is no result.
    """
    ours, theirs = Pipe()
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with tempfile.TemporaryFile() as said, ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve({theirs.fileno()})"],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that ranks, which are its children, can be ended with it
            )
        try:
            ours.send((function, args))
            if not ours.poll(timeout):
                raise CallFailed(f"no answer within {timeout:g} s")
            result, error = ours.recv()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WAIT)
            raise CallFailed(_how_it_ended(process.returncode, said)) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WAIT)
    if error is not None:
        raise CallFailed(error)
    return result


def serve(descriptor: int) -> None:
    """What the process does: takes one call from the connection and answers it."""
    connection = Connection(descriptor)
    os.set_inheritable(descriptor, False)
    try:
        function, args = connection.recv()
        threading.Thread(target=_end_with_caller, args=(connection,), daemon=True).start()
        answer = function(*args), None
    except Exception as error:
        answer = None, one_line(error)
    connection.send(answer)


def _end_with_caller(connection: Connection) -> None:
    """Nobody is left behind if the caller is killed."""
    with suppress(EOFError, OSError):
        connection.recv()
    os.killpg(0, signal.SIGKILL)


def _how_it_ended(code: int | None, said: IO[bytes]) -> str:
    said.seek(0)
    last = (said.read().decode(errors="replace").strip().splitlines() or [""])[-1]
    how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    return f"its process ended with {how}" + (f": {last}" if last else "")
