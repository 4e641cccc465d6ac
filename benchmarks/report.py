"""Results of overlap.py as a Markdown page and a picture; also of a JSON file that is there:

python benchmarks/report.py benchmarks/results/bench_2xH200.json
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from columns import NAMES
from picture import draw
from ratios import MODES, RATIOS, described, mm_of, ratios_of, targets_of

from streamoverlap import PlanSpec

RESULTS = Path(__file__).with_name("results")
TUNED = ("tuned", "wire")  # columns whose plans are shown
ON_CPU = (
    "These times are of the host executor: ranks are processes of one machine, streams are threads, a copy is a memcpy "
    "and a product runs on the cores that copy. They show that the columns run and agree. They predict nothing of "
    "GPUs, where other engines copy while the SMs multiply; there are no targets for them, and no graphs, no cuBLASLt "
    "and no fused op here. `untuned` is the default plan: the simulator has no costs of a CPU."
)
SHARED = (
    "**Several ranks shared a GPU**: the columns run and agree, and their times mean nothing for ranks on GPUs of "
    "their own."
)
_SEPARATOR = re.compile(r"[^A-Za-z0-9.+-]+")


def prefix_of(out: Path | None, document: dict) -> Path:
    """Of the files with the results; by default named after ranks and device. Those of float8 are told apart."""
    device = document["device"] if document["environment"]["device_type"] == "cuda" else "CPU"
    name = _SEPARATOR.sub("-", device.removeprefix("NVIDIA "))
    scaled = f"_fp8-{document['scaling']}" if document["scaling"] else ""
    prefix = out or RESULTS / f"bench_{document['world']}x{name}"
    return prefix.with_name(f"{prefix.name}{scaled}")


def write_json(document: dict, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{out}.json").write_text(json.dumps(document, indent=1) + "\n")


def write(document: dict, out: Path) -> str:
    """Writes OUT.json, OUT.md and OUT.png; returns what OUT.md says."""
    write_json(document, out)
    text = markdown(document, f"{out.name}.png")
    Path(f"{out}.md").write_text(text)
    draw(document, Path(f"{out}.png"))
    return text


def markdown(document: dict, picture: str) -> str:
    on_gpus = document["environment"]["device_type"] == "cuda"
    parts = [f"# {document['world']} x {document['device']}", "\n".join(_environment_lines(document))]
    if not on_gpus:
        parts.append(ON_CPU)
    elif document["environment"]["gpus"] < document["world"]:
        parts.append(SHARED)
    else:
        parts.append("## Targets\n\n" + _table(*_target_rows(document)))
    for mode in modes_of(document):
        heading = {"eager": "## Eager", "graph": "## In a CUDA graph"}[mode]
        parts.append(f"{heading}, in microseconds\n\n" + _table(*_time_rows(document, mode)))
    compared = _table(*_plan_rows(document))
    if compared:
        parts.append("## Plans\n\nTime over `mm`, the fastest of its chunks and ways to sum.\n\n" + compared)
    if reasons := sorted(set(_absences(document))):
        parts.append("## Not measured\n\n" + "\n".join(f"- {reason}" for reason in reasons))
    parts.append(f"![t/mm of each shape]({picture})")
    return "\n\n".join(parts) + "\n"


def modes_of(document: dict) -> list[str]:
    return [mode for mode in MODES if any(mode in result["microseconds"] for result in document["results"])]


def _environment_lines(document: dict) -> Iterator[str]:
    about = document["environment"]
    yield f"    {document['command']}"
    yield ""
    yield f"- devices: {', '.join(dict.fromkeys(about['devices']))}; {document['world']} ranks, {about['cores']} cores"
    versions = [f"{name} {about[name]}" for name in ("torch", "cuda", "cublaslt", "nccl", "driver") if about.get(name)]
    yield f"- {', '.join(versions)}; streamoverlap {about['streamoverlap']}, commit {about['commit'] or 'unknown'}"
    if about.get("link"):
        yield f"- link: {about['link']}"
    yield f"- {described(document)}, `mm` is {mm_of(document)}, median of {document['rounds']} rounds, {about['date']}"
    if issue := document["issue_microseconds"]:
        told = ", ".join(f"{name} {microseconds:.1f} us" for name, microseconds in issue.items())
        yield f"- CPU time to issue one `all_gather_gemm`: {told}"


def _target_rows(document: dict) -> tuple[Sequence[str], list[list[str]]]:
    rows = [
        [
            target.what,
            "-" if target.value is None else f"{target.value:.3f}{target.unit}",
            f"at most {target.limit:.2f}{target.unit}",
            target.reached,
            f"{target.shapes} of {target.of}",
        ]
        for target in targets_of(document["results"], document["world"], document["scaling"] is not None)
    ]
    return ("`tuned`", "measured", "target", "reached", "shapes"), rows


def _time_rows(document: dict, mode: str) -> tuple[Sequence[str], list[list[str]]]:
    rows = []
    for result in document["results"]:
        times, ratios = result["microseconds"].get(mode, {}), ratios_of(result, mode)
        plans = result["graph_plans" if mode == "graph" else "plans"]
        rows.append(
            [
                result["label"],
                *(f"{times[name]:.1f}" if name in times else "-" for name in NAMES),
                *(plan_text(plans[name]) if name in plans else "-" for name in TUNED),
                *(f"{ratios[name]:.3f}" if name in ratios else "-" for name in RATIOS),
            ]
        )
    head = ("shape", *(f"`{name}`" for name in NAMES), *(f"plan of `{name}`" for name in TUNED), *RATIOS)
    return head, rows


def plan_text(plan: dict) -> str:
    """The fields of a PlanSpec, short; `transfer` and `taper` where they are not those of most plans."""
    spec = PlanSpec(**plan)
    if spec.algorithm == "serial":
        return "serial"
    text = f"{spec.algorithm}, {spec.chunks}, {spec.compute_streams}, {spec.reduce}"
    rare = (name for name in ("transfer", "taper") if getattr(spec, name) != getattr(PlanSpec, name))
    return ", ".join([text, *(f"{name} {getattr(spec, name)}" for name in rare)])


def _plan_rows(document: dict) -> tuple[Sequence[str], list[list[str]]]:
    """Of `--plans`: by shape, ring against direct by compute streams, in a graph where there is one."""
    kinds = [(algorithm, streams) for algorithm in ("direct", "ring") for streams in (1, 2, 3)]
    rows = []
    for result in document["results"]:
        times = result["microseconds"].get("graph") or result["microseconds"]["eager"]
        compared = {name: plan for name, plan in result["plans"].items() if name not in NAMES}
        cells = []
        for kind in kinds:
            found = [
                (times[name] / times["mm"], plan)
                for name, plan in compared.items()
                if (plan["algorithm"], plan["compute_streams"]) == kind
            ]
            best, plan = min(found, key=lambda each: each[0], default=(None, None))
            cells.append("-" if best is None else f"{best:.3f} ({plan['chunks']}, {plan['reduce']})")
        if compared:
            rows.append([result["label"], *cells])
    return ("shape", *(f"{algorithm}, {streams} compute" for algorithm, streams in kinds)), rows


def _absences(document: dict) -> Iterator[str]:
    for result in document["results"]:
        for mode, columns in result["absent"].items():
            yield from (f"`{name}`, {mode}: {reason}" for name, reason in columns.items())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="FILE.json", help="what overlap.py has written")
    path = parser.parse_args().path
    print(write(json.loads(path.read_text()), path.with_suffix("")))


if __name__ == "__main__":
    main()
