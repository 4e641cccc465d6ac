"""Adds tables of tuned plans to those that the package ships: one command, once their results have been looked at.

    python benchmarks/ship.py "$STREAMOVERLAP_CACHE"

What is there already for other problems is kept; for the same problem the new measurement holds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from streamoverlap import table


def ship(folder: Path, shipped: Path = table._SHIPPED) -> list[str]:
    """Returns what was done, a line for each table; ValueError if `folder` has none, or a file is no table."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ValueError(f"{folder} has no table of tuned plans; expected what overlap.py --save has kept")
    told = []
    for path in paths:
        found, target = table.Table.read(path), shipped / path.name
        found.save(target, json.loads(path.read_text())["device"])
        target.with_suffix(".lock").unlink(missing_ok=True)  # of a folder that nobody else writes
        told.append(f"{target}: {len(found.plans)} plans and {len(found.gemms)} products of {path}")
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with tables of tuned plans")
    try:
        print("\n".join(ship(parser.parse_args().folder)))
    except ValueError as error:
        print(f"ship.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
