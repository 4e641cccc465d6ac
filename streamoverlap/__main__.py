"""The command line: ``python -m streamoverlap`` or ``streamoverlap``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from streamoverlap import __version__
from streamoverlap.cli import check, demo, doctor, plan, simulate, trace, tune
from streamoverlap.cli.usage import Parser, UsageError

_DESCRIPTION = """\
Tensor parallelism that hides communication behind matrix products.

What happens on which stream is a plan: data that is printed, checked and run.
These commands need no GPU."""

_EXAMPLES = """\
examples:
  streamoverlap demo                                       run an MLP block on several ranks, compare, time
  streamoverlap plan all_gather_gemm --world 4 --rank 0    read a plan
  streamoverlap check --world 1-16                         check every plan there is
  streamoverlap simulate --world 8 --shape 8192,57344,8192 predict times of its plans
  streamoverlap tune --shapes shapes.json                  measure plans, keep the fastest for later runs
  streamoverlap trace --out call.png                       run an op, show when each part of it ran
  streamoverlap doctor                                     look at this machine: what works, what is missing
"""

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_BROKEN_PIPE = 141  # 128 + SIGPIPE


def make_parser() -> Parser:
    parser = Parser(
        prog="streamoverlap",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"streamoverlap {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for module in (demo, plan, check, simulate, tune, trace, doctor):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0 right, 1 a fault or a wrong result, 2 wrong use."""
    try:
        args = make_parser().parse_args(argv)
        return args.run(args)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone; Python must not try to flush to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


if __name__ == "__main__":
    sys.exit(main())
