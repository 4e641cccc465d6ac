"""``streamoverlap doctor``: what is built, what the machine has, whether results are right, what will be used."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from streamoverlap.cli.terminal import make_console, make_progress, make_table
from streamoverlap.doctor.examination import Examination
from streamoverlap.doctor.findings import Finding, with_state

_DESCRIPTION = """\
Says what is built and why not more, looks at driver, GPUs, links, shared memory and environment,
measures links and a GEMM, and compares results on CPU ranks and on all GPUs with torch's, exactly.
Ends with 1 if the package would fail or give wrong results here; what is merely slow is a warning."""
_EXAMPLE = """\
examples:
  streamoverlap doctor
  streamoverlap doctor --json > doctor.json            for a report of a fault
"""
_STYLES = {"ok": "green", "info": "dim", "skipped": "dim", "warning": "yellow", "failure": "red"}
_TENSORS = {"cpu": "CPU tensors", "cuda": "CUDA tensors"}


def add_parser(commands) -> None:
    _set_up(commands.add_parser("doctor", help="look at this machine: what works, what is missing", **_TEXTS))


def run(args: argparse.Namespace) -> int:
    return _examine(args, Examination())


def run_without_package(broken: BaseException, words: list[str]) -> int:
    """As `run`, where the package cannot be imported: `broken` is why, `words` follow ``doctor``."""
    parser = argparse.ArgumentParser(prog="streamoverlap doctor", **_TEXTS)
    _set_up(parser)
    return _examine(parser.parse_args(words), Examination(broken))


_TEXTS = {"description": _DESCRIPTION, "epilog": _EXAMPLE, "formatter_class": argparse.RawDescriptionHelpFormatter}


def _set_up(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.set_defaults(run=run)


def _examine(args: argparse.Namespace, examination: Examination) -> int:
    console = make_console()
    steps = examination.steps()
    with make_progress(console) as progress:
        task = progress.add_task("", total=len(steps))
        for step in steps:
            progress.update(task, description=f"examining {step.title}")
            examination.run(step)
            progress.advance(task)
    failures = with_state(examination.findings, "failure")
    if args.json:
        findings = [asdict(finding) for finding in examination.findings]
        result = {"findings": findings, "uses": examination.uses, "failures": len(failures), "right": not failures}
        print(json.dumps(result, indent=2))
    else:
        _print(console, examination)
    return 1 if failures else 0


def _print(console: Console, examination: Examination) -> None:
    table = make_table("", "what", "state", "found, and what to do")
    area = None
    for finding in examination.findings:
        said = "\n-> ".join(filter(None, (finding.found, finding.advice)))
        title = "" if finding.area == area else finding.area
        table.add_row(title, finding.name, Text(finding.state, style=_STYLES[finding.state]), said)
        area = finding.area
    console.print(table)
    for finding in examination.findings:
        if len(finding.values.get("links", ())) > 1:
            _print_links(console, finding)
    console.print("Groups on this machine:", style="bold")
    for device, uses in examination.uses.items():
        console.print(f"  {_TENSORS[device]}: {uses}")
    failures, warnings = (with_state(examination.findings, state) for state in ("failure", "warning"))
    if failures:
        console.print(f"{_count(failures, 'failure')}: it would fail or be wrong here, see above.", style="red")
    elif warnings:
        console.print(f"Results are right; {_count(warnings, 'warning')}, see above.", style="yellow")
    else:
        console.print("Nothing is wrong.", style="green")


def _print_links(console: Console, finding: Finding) -> None:
    numbers = ("GB/s each way", "latency (us)")
    table = make_table("GPUs", "link", "peer access", *numbers, right=numbers)
    for row in finding.values["links"]:
        measured = ("-", "-") if row["error"] else (row["bytes_per_second"] / 1e9, row["latency_seconds"] * 1e6)
        texts = [value if isinstance(value, str) else f"{value:,.1f}" for value in measured]
        access = "yes" if row["peer_access"] else "no"
        table.add_row(f"{row['first']}-{row['second']}", row["link"], access, *texts)
    console.print(table)


def _count(findings: list[Finding], name: str) -> str:
    return f"{len(findings)} {name}{'s' * (len(findings) > 1)}"
