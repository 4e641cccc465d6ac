"""What a call raises when the other ranks let it down."""

from __future__ import annotations

import logging

_log = logging.getLogger("streamoverlap")


class CommunicatorError(RuntimeError):
    """The communicator can no longer be used; make a new one on a new group.

    Attributes:
        group: name of the process group.
        op: the operation that failed, as its plan prints it.
        peer: rank within the group that was missing or disagreed; -1 where it is not known.
        elapsed: seconds from the start of the op.
        report: what the watchdog of this rank saw, of all ranks, for a person to read.
    """

    def __init__(
        self,
        message: str,
        group: str = "",
        op: str = "",
        peer: int = -1,
        elapsed: float = 0.0,
        report: str = "",
    ) -> None:
        super().__init__(message)
        self.group = group
        self.op = op
        self.peer = peer
        self.elapsed = elapsed
        self.report = report


class PeerTimeoutError(CommunicatorError):
    """A peer did not do its part of an exchange within the timeout: it is dead, stopped, or elsewhere."""


class MismatchError(CommunicatorError):
    """Ranks of one group called different things: another op, plan, shape or dtype."""


def log_failure(error: CommunicatorError) -> None:
    """Called once for each communicator that fails, with the first error that it raises."""
    _log.error("%s", error.report or error)
