"""Wrong use: one clear line, no page of usage."""

from __future__ import annotations

import argparse
from typing import NoReturn

from streamoverlap._C import MAX_WORLD


class UsageError(Exception):
    """The command line asks for something that cannot be; the message is all that is printed."""


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} (see {self.prog} --help)")


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected an integer of at least 1")
    return int(text)


def shape(text: str) -> tuple[int, int, int]:
    """An argparse type: M,N,K."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"is {text!r}; expected M,N,K, three integers of at least 1")
    m, n, k = map(int, parts)
    return m, n, k


def worlds(text: str) -> list[int]:
    """An argparse type: world sizes such as ``4``, ``1-16`` or ``2,3,8-10``, in ascending order."""
    sizes: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise argparse.ArgumentTypeError(f"is {text!r}; expected world sizes such as 4, 1-16 or 2,3")
        first, last = int(low), int(high) if dash else int(low)
        if not 1 <= first <= last <= MAX_WORLD:
            raise argparse.ArgumentTypeError(f"is {text!r}; expected sizes from 1 to {MAX_WORLD}, rising")
        sizes.update(range(first, last + 1))
    return sorted(sizes)
