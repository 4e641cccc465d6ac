"""README.md, CHANGELOG.md and docs/ say what is so: their links, commands, names, numbers, messages and outputs.

Above a block, ``<!-- runs -->`` or ``<!-- runs, ends with 1 -->`` says that it can be run here, ``<!-- prints -->``
that the block before prints this (a line ``...`` stands for any others), and ``<!-- runs on 2 ranks -->`` that it is a
whole program for ranks.
"""

from __future__ import annotations

import ast
import re
import shlex
import unicodedata
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple
from unittest.mock import patch

import pytest

import streamoverlap as so
from streamoverlap import plans, simulate
from streamoverlap.__main__ import main, make_parser
from streamoverlap.cli.usage import UsageError

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"(?:^<!-- (?P<mark>[^>]*) -->\n)?^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```$", re.M | re.S)
SHORTEST = 6  # letters of a message that are looked for
LARGEST = 200_000  # bytes of a picture


class Block(NamedTuple):
    mark: str
    language: str
    code: str


def blocks_of(text: str) -> list[Block]:
    return [Block(match["mark"] or "", match["language"], match["code"]) for match in FENCE.finditer(text)]


def prose_of(text: str) -> str:
    return FENCE.sub("", text)


def inline_code_of(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose_of(text))


# --- links ---


def anchors_of(path: Path) -> set[str]:
    text = path.read_text()
    anchors: set[str] = set(re.findall(r"^::: ([\w.]+)$", text, re.M))
    for heading in re.findall(r"^#+ (.+)$", prose_of(text), re.M):
        # As Python-Markdown makes them.
        plain = unicodedata.normalize("NFKD", re.sub(r"[`*]", "", heading)).encode("ascii", "ignore").decode()
        anchors.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return anchors


def wrong_links(path: Path, text: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(text)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.is_file():
            yield f"{target}: no such file"
        elif path.parent.name == "docs" and not file.is_relative_to(path.parent):
            yield f"{target}: not among the pages of the site"
        elif anchor and anchor not in anchors_of(file):
            yield f"{target}: no such heading"


# --- commands ---


def commands_of(text: str) -> Iterator[tuple[list[str], bool]]:
    """The words of each command, and whether it is whole (in prose one may lack what it needs)."""
    for block in blocks_of(text):
        if block.language == "sh":
            for line in block.code.replace("\\\n", " ").splitlines():
                yield shlex.split(line, comments=True), True
    for code in inline_code_of(text):
        if re.match(r"(make|streamoverlap) \S", code):
            yield shlex.split(code), False


@cache
def make_targets() -> dict[str, str]:
    """By name, the text of a rule."""
    text = (ROOT / "Makefile").read_text()
    return {rule[1]: rule[0] for rule in re.finditer(r"^([a-z][a-z0-9-]*):.*(?:\n\t.*)*", text, re.M)}


def unknown_options(script: str, words: list[str]) -> Iterator[str]:
    if not (ROOT / script).is_file():
        yield f"{script}: no such file"
        return
    source = (ROOT / script).read_text()
    for word in words:
        if word.startswith("--") and word != "--help" and word.lstrip("-").split("=")[0] not in source:
            yield f"{script}: no option {word}"


def wrong_command(words: list[str], whole: bool) -> Iterator[str]:
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    if not words:
        return
    if "-m" in words and words[words.index("-m") + 1 :][:1] == ["streamoverlap"]:
        words = words[words.index("-m") + 1 :]
    if words[0] == "streamoverlap":
        try:
            make_parser().parse_args(words[1:])
        except UsageError as error:
            if whole or "the following arguments are required" not in str(error):
                yield str(error)
    elif words[0] == "make":
        for word in words[1:]:
            name, is_variable, value = word.partition("=")
            if not is_variable and name not in make_targets():
                yield f"make {name}: no such target"
            elif name == "ARGS":
                (rule,) = (make_targets()[target] for target in words[1:] if target in make_targets())
                scripts = re.findall(r"(?:benchmarks|examples)/\w+\.py", rule)
                for script in scripts:
                    yield from unknown_options(script, shlex.split(value))
    else:
        for index, word in enumerate(words):
            if re.fullmatch(r"(benchmarks|examples)/\w+\.py", word):
                yield from unknown_options(word, words[index + 1 :])


def wrong_commands(path: Path, text: str) -> Iterator[str]:
    for words, whole in commands_of(text):
        yield from wrong_command(words, whole)


# --- names ---


def exists(name: str) -> bool:
    """Of a dotted name that begins with streamoverlap."""
    if name.startswith("streamoverlap.megatron."):  # which needs megatron-core
        source = (ROOT / "streamoverlap/megatron.py").read_text()
        return re.search(rf"^(class|def) {name.split('.')[2]}\b", source, re.M) is not None
    try:
        resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True


def wrong_names(path: Path, text: str) -> Iterator[str]:
    names = {f"streamoverlap.{name}" for name in re.findall(r"(?<![\w./])so\.([A-Za-z_]\w*)", text)}
    names |= {name for code in inline_code_of(text) for name in re.findall(r"^streamoverlap(?:\.\w+)+", code)}
    names |= set(re.findall(r"^::: ([\w.]+)$", text, re.M))
    for block in blocks_of(text):
        if block.language != "python":
            continue
        for node in ast.walk(ast.parse(block.code)):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "streamoverlap":
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    for name in sorted(names - {"streamoverlap.megatron"}):
        if not exists(name):
            yield f"{name}: no such name"
    for code in inline_code_of(text):
        is_path = re.fullmatch(r"(csrc|tests|docs|examples|benchmarks|streamoverlap)/[\w./-]+", code)
        if is_path and not (ROOT / code).exists():
            yield f"{code}: no such file"


def wrong_lists(path: Path, text: str) -> Iterator[str]:
    """Python-Markdown takes a list for text where no empty line is before it."""
    for before, line in pairwise(prose_of(text).splitlines()):
        if re.match(r"(- |1\. )", line) and before and not re.match(r"- | |#", before):
            yield f"{line}: no empty line before it"


CHECKS = (wrong_links, wrong_commands, wrong_names, wrong_lists)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_has_no_wrong_link_command_or_name(path: Path, check) -> None:
    assert list(check(path, path.read_text())) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a](none.md)", "none.md: no such file"),
        ("[a](tuning.md#none)", "tuning.md#none: no such heading"),
        ("[a](../README.md)", "../README.md: not among the pages of the site"),
        ("```sh\nstreamoverlap plan all_gather --world 2 --paint\n```", "unrecognized arguments: --paint"),
        ("```sh\npython -m streamoverlap plan all_gather\n```", "--world"),
        ("`streamoverlap paint`", "'paint'"),
        ("```sh\nmake dem\n```", "make dem: no such target"),
        ("`make dem`", "make dem: no such target"),
        ("```sh\nmake bench ARGS='--paint'\n```", "benchmarks/overlap.py: no option --paint"),
        ("```sh\ntorchrun examples/train_gpt.py --paint\n```", "examples/train_gpt.py: no option --paint"),
        ("`so.all_gather_gem`", "streamoverlap.all_gather_gem: no such name"),
        ("`streamoverlap.plans.chek(plans)`", "streamoverlap.plans.chek: no such name"),
        ("```python\nfrom streamoverlap.plans import chek\n```", "streamoverlap.plans.chek: no such name"),
        ("`csrc/plan/paint.cpp`", "csrc/plan/paint.cpp: no such file"),
        ("A list:\n- of one", "- of one: no empty line before it"),
        ("::: streamoverlap.megatron.Paint", "streamoverlap.megatron.Paint: no such name"),
    ],
)
def test_what_is_wrong_is_found(text: str, said: str) -> None:
    path = ROOT / "docs/index.md"
    assert [said in problem for check in CHECKS for problem in check(path, f"# Page\n\n{text}\n")] == [True]


# --- what blocks do ---


def missing_lines(shown: str, printed: str) -> list[str]:
    """Lines of `shown` that `printed` has not, in that order; without ``...``, all that is printed is shown."""
    lines = [line.rstrip() for line in printed.splitlines() if line.strip(" ─")]
    if "..." not in shown.splitlines() and len(lines) != len(shown.splitlines()):
        return [f"{len(lines)} lines, not {len(shown.splitlines())}"]
    left = iter(lines)
    return [line for line in shown.splitlines() if line != "..." and line.rstrip() not in left]


RUNNABLE = [
    pytest.param(block, after, id=f"{path.stem} {number}")
    for path in PAGES
    for number, (block, after) in enumerate(pairwise([*blocks_of(path.read_text()), None]))
    if block.mark in ("runs", "runs, ends with 1")
]


@pytest.mark.parametrize(("block", "after"), RUNNABLE)
def test_a_block_prints_what_the_page_shows(block: Block, after: Block | None, capsys) -> None:
    if block.language == "sh":
        for line in block.code.splitlines():
            program, *words = shlex.split(line, comments=True)
            assert program == "streamoverlap"
            assert main(words) == int("ends with 1" in block.mark)
    else:
        exec(compile(block.code, "block", "exec"), {})
    if after is not None and after.mark == "prints":
        assert missing_lines(after.code, capsys.readouterr().out) == []


def test_other_output_is_found() -> None:
    assert missing_lines("a\nb\n", "a\nb\n") == []
    assert missing_lines("a\n...\nc\n", "a\nb\nc\n") == []
    assert missing_lines("a\n", "a\nb\n") == ["2 lines, not 1"]
    assert missing_lines("b\n...\na\n", "a\nb\n") == ["a"]


def run_programs(rank: int, world: int, group, programs: list[str]) -> None:
    with patch("torch.distributed.init_process_group") as init:
        for program in programs:
            exec(compile(program, "block", "exec"), {"__name__": "__main__"})
            init.assert_called_once_with("gloo")
            init.reset_mock()


def test_programs_run_on_two_ranks(ranks) -> None:
    blocks = [block for path in PAGES for block in blocks_of(path.read_text())]
    programs = [block.code for block in blocks if block.mark == "runs on 2 ranks"]
    assert len(programs) >= 3
    ranks(2).run(run_programs, programs)


# --- numbers ---


def simulated_rows(text: str) -> Iterator[tuple[str, list[int], int, list[str]]]:
    """Operation, M, N and K, ranks, and what the other columns say."""
    for table in re.findall(r"^<!-- simulated in a graph -->\n((?:\|.*\n)+)", text, re.M):
        for line in table.splitlines()[2:]:
            operation, shape, world, *values = (cell.strip(" `") for cell in line.strip("|").split("|"))
            yield operation, [int(size) for size in shape.split(",")], int(world), values


def predicted_row(operation: str, shape: list[int], world: int) -> list[str]:
    costs = simulate.Costs.load("h200")
    gemm = simulate.gemm_seconds(operation, world, *shape, costs=costs)
    ranking = simulate.best(operation, world, *shape, costs=costs, graph=True)
    seconds = dict(ranking)
    best = next(plan for plan, _ in ranking if plan.transfer == "copy")
    numbers = [seconds[plan] / gemm for plan in (so.PlanSpec("serial"), so.PlanSpec(), best)]
    which = [
        best.algorithm,
        f"{best.chunks} chunks" if best.chunks > 1 else "",
        f"{best.compute_streams} compute streams" if best.compute_streams > 1 else "",
        best.reduce if operation != "all_gather_gemm" else "",
        f"taper {best.taper}" if best.taper != "none" else "",
    ]
    return [*(f"{number:.2f}" for number in numbers), ", ".join(filter(None, which))]


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md"])
def test_simulated_tables_are_what_the_simulator_says(name: str) -> None:
    rows = list(simulated_rows((ROOT / name).read_text()))
    assert len(rows) >= 4
    for operation, shape, world, values in rows:
        assert values == predicted_row(operation, shape, world), (operation, shape, world)


# --- messages ---


@cache
def sources() -> str:
    """All messages as one text, with string literals joined that the languages join."""
    paths = [ROOT / "setup.py", ROOT / "Makefile"]
    for folder, suffixes in {"streamoverlap": (".py",), "csrc": (".cpp", ".h", ".cu")}.items():
        paths += [path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    text = "\n".join(path.read_text() for path in paths)
    return re.sub(r'"\s*\+?\s*f?"', "", text)


def unknown_parts(message: str) -> list[str]:
    """Of a message in which … stands for what changes, what no source has."""
    return [part for part in message.split("…") if len(part) >= SHORTEST and part not in sources()]


def messages_of(text: str) -> Iterator[str]:
    """The code in the first column of tables, and all with an ellipsis."""
    for line in prose_of(text).splitlines():
        first = line.split(" | ")[0] if line.startswith("| ") else ""
        for code in re.findall(r"`([^`]+)`", line):
            if f"`{code}`" in first or "…" in code:
                yield code


def test_messages_of_the_troubleshooting_page_are_in_the_sources() -> None:
    messages = list(messages_of((ROOT / "docs/troubleshooting.md").read_text()))
    assert len(messages) > 60
    assert {message: parts for message in messages if (parts := unknown_parts(message))} == {}
    assert unknown_parts("x is on …; expected … paint it") == [" paint it"]


# --- completeness ---


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs/reference.md").read_text()
    assert [name for name in so.__all__ if name != "__version__" and f"::: streamoverlap.{name}\n" not in text] == []


def test_the_reference_has_every_field_of_a_spec() -> None:
    row = re.search(r"`(streamoverlap\.plans\.Spec\(.*?\))`", (ROOT / "docs/reference.md").read_text())
    call = ast.parse(row[1], mode="eval").body
    told = [call.args[0].id, *(keyword.arg for keyword in call.keywords)]
    assert told == re.findall(r"(\w+): ", plans.Spec.__init__.__doc__)[1:]  # but self
    spec = plans.Spec("all_gather_gemm")
    assert [(k.arg, k.value.value) for k in call.keywords] == [(k.arg, getattr(spec, k.arg)) for k in call.keywords]


def test_every_command_has_a_section() -> None:
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs/cli.md").read_text(), re.M)
    listed = re.findall(r"\{([\w,]+)\}|^    (\w+)  ", make_parser().format_help(), re.M)
    assert headings == [name for _, name in listed if name]


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert named == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_every_picture_is_small_shown_and_has_its_command() -> None:
    texts = "\n".join(path.read_text() for path in PAGES)
    pictures = list((ROOT / "docs/pictures").iterdir())
    assert pictures
    for picture in pictures:
        assert picture.stat().st_size <= LARGEST, picture
        assert f"(pictures/{picture.name})" in texts
        assert f"--draw docs/pictures/{picture.name}" in texts
