"""How the ranks of a group meet before they share memory: through the group's store, bounded."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from streamoverlap.errors import CommunicatorError
from streamoverlap.store import wait_for

# Seconds that a step waits at least, also for the error of a rank that has itself waited until the deadline.
_GRACE = 1.0


class Meeting:
    """All ranks of a group, each with what it says of itself.

    Rank 0 takes everybody's hello from the store and answers each one, so a hello is used once: no count of earlier
    set-ups is needed, which ranks could disagree on after a failure, or where one of them is a new process.

    Args:
        group: the process group; its own collectives may be on a device, or hang.
        prefix: of keys in its store, for this kind of meeting alone.
        hello: what this rank says; anything that JSON can tell.
        timeout: seconds until all must have said hello; `all_gather` waits no longer either, but for a grace.
        purpose: for messages: what could not be done, of the group.
        check: called while this rank waits; raises a CommunicatorError if there is no use in it.

    Raises:
        RuntimeError: not all ranks came in time, or the store is gone.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        prefix: str,
        hello: Any,
        timeout: float,
        purpose: str = "set up the communicator",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank, self._world = group.rank(), group.size()
        self._name = group.group_name
        self._timeout = timeout
        self._purpose = purpose
        self._check = check
        self._deadline = time.monotonic() + timeout
        if self._world == 1:
            self.session, self.hellos = "", [hello]
            return
        self._store = dist.PrefixStore(prefix, group.get_group_store())
        self.session, self.hellos = self._tell_if_store_fails(lambda: self._meet(hello))

    @property
    def left(self) -> float:
        """Seconds."""
        return max(self._deadline - time.monotonic(), _GRACE)

    def all_gather(self, key: str, value: Any) -> list:
        """Everybody's `value`, by rank."""
        if self._world == 1:
            return [value]
        return self._tell_if_store_fails(lambda: self._all_gather(f"{self.session}/{key}", value))

    def _meet(self, hello: Any) -> tuple[str, list]:
        own, answer = f"hello/{self._rank}", uuid.uuid4().hex
        self._store.set(own, json.dumps([answer, hello]))
        try:
            if self._rank == 0:
                self._answer_all()
            wait_for(self._store, [answer], self.left, self._check)
        except BaseException:
            self._store.delete_key(own)  # or the next set-up would meet who is not there any more
            raise
        session, hellos = json.loads(self._store.get(answer))
        self._store.delete_key(answer)
        return session, hellos

    def _answer_all(self) -> None:
        keys = [f"hello/{rank}" for rank in range(self._world)]
        wait_for(self._store, keys, self.left, self._check)
        answers, hellos = zip(*(json.loads(self._store.get(key)) for key in keys), strict=True)
        for key in keys:
            self._store.delete_key(key)
        for answer in answers:
            self._store.set(answer, json.dumps([uuid.uuid5(uuid.NAMESPACE_OID, answers[0]).hex, hellos]))

    def _all_gather(self, key: str, value: Any) -> list:
        self._store.set(f"{key}/{self._rank}", json.dumps(value))
        keys = [f"{key}/{rank}" for rank in range(self._world)]
        wait_for(self._store, keys, self.left + _GRACE, self._check)
        values = [json.loads(self._store.get(key)) for key in keys]
        readers = f"{key}/readers"
        if self._store.add(readers, 1) == self._world:  # a job that makes many communicators keeps one store
            for done in (*keys, readers):
                self._store.delete_key(done)
        return values

    def _tell_if_store_fails(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except CommunicatorError:
            raise
        except RuntimeError as failure:  # of which torch's DistError is one
            raise RuntimeError(
                f"could not {self._purpose} of group '{self._name}': not all of its {self._world} ranks took "
                f"part within the timeout of {self._timeout:g} s, or the store is gone ({failure})"
            ) from failure


def attempt(step: Callable[[], None]) -> tuple[float, str] | None:
    """When and why `step` failed, to be told to all ranks; None if it did not."""
    try:
        step()
    except Exception as failure:
        return time.time(), str(failure) or type(failure).__name__
    return None


def first_error(errors: Iterable[tuple[float, str] | None]) -> str | None:
    """The earliest of the ranks' errors, with its rank: the others come of waiting for that one."""
    found = [(*error, rank) for rank, error in enumerate(errors) if error]
    return "rank {2}: {1}".format(*min(found)) if found else None
