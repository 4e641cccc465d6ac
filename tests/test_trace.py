"""Traces: what a call's streams did when, on real ranks; pictures and Chrome traces of it; the command."""

from __future__ import annotations

import json
import re
import struct
import sys
import time
from collections import defaultdict
from contextlib import suppress
from xml.etree import ElementTree

import pytest
import torch
from ranks import Pool, Pools
from timelines import pack, unpack, verify_order

import streamoverlap as so
from streamoverlap import plans, tracing
from streamoverlap.__main__ import main
from streamoverlap.chrome import trace_events
from streamoverlap.draw import draw
from streamoverlap.timeline import Timeline

DELAY = 0.1  # seconds, at most, before an op


@pytest.fixture(scope="module")
def ranks():
    pools = Pools()
    yield pools
    pools.close()


def calls(world: int, plan: so.PlanSpec) -> None:
    """Three on plans, the second async, and a serial one."""
    x, w = torch.ones(8, 16), torch.ones(8 * world, 16)
    so.all_gather_gemm(x, w, plan=plan)
    work = so.gemm_reduce_scatter(torch.ones(4 * world, 16), w, plan=plan, async_op=True)
    so.all_gather(x, plan=so.PlanSpec("serial"))
    so.all_reduce(x, plan=plan)
    work.wait()


def traced(rank: int, world: int, group, plan: so.PlanSpec, path: str | None = None) -> tuple:
    calls(world, plan)  # not traced
    before = time.monotonic()
    with so.trace(path) as trace:
        calls(world, plan)
    after = time.monotonic()
    calls(world, plan)
    return pack(trace.timelines), trace.serial_calls, before, after


def delayed(rank: int, world: int, group, stream: str, slow: int) -> list[tuple]:
    comm = so.Communicator.of(group, "cpu")
    x, w = torch.ones(8, 16), torch.ones(16, 16)
    so.all_gather_gemm(x, w)
    try:
        if rank == slow:
            comm._set_hook(seed=1, max_delay_ms=1e3 * DELAY, streams=[stream])
        with so.trace() as trace:
            so.all_gather_gemm(x, w)
    finally:
        comm._clear_hook()
    return pack(trace.timelines)


def left_async(rank: int, world: int, group) -> tuple[list[tuple], bool]:
    with so.trace() as trace:
        work = so.all_gather(torch.ones(1 << 16, 4), plan=so.PlanSpec("ring", 4), async_op=True)
    ended = work.is_completed()
    work.wait()
    return pack(trace.timelines), ended


def errors(rank: int, world: int, group) -> list[str]:
    told = []

    def attempt(function) -> None:
        try:
            function()
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")

    def nested() -> None:
        with so.trace(), so.trace():
            pass

    def raising() -> None:
        with so.trace() as trace:
            calls(world, so.PlanSpec())
            raise KeyError("of the block")
        told.append(f"not reached: {trace}")

    attempt(lambda: so.trace("calls.gif"))
    attempt(lambda: so.trace(device="xpu"))
    attempt(lambda: so.trace(group="world"))
    attempt(nested)
    attempt(raising)
    with so.trace() as trace:  # neither has left anything behind
        calls(world, so.PlanSpec())
    told.append(str(len(trace.timelines)))
    return told


@pytest.mark.parametrize(
    ("world", "plan"), [(2, so.PlanSpec("direct", 2, 2, "sum")), (3, so.PlanSpec("ring", 2, 2))], ids=str
)
def test_times_are_those_of_the_plan(ranks, world: int, plan: so.PlanSpec) -> None:
    answers = ranks(world).run(traced, plan)
    packed, serial_calls, *_ = answers[0]
    assert all(answer[:2] == (packed, serial_calls) for answer in answers), "every rank has the same timelines"
    timelines = unpack(packed)
    assert serial_calls == 1
    assert [line.plans[0].spec.operation for line in timelines] == [
        "all_gather_gemm",
        "gemm_reduce_scatter",
        "all_reduce",
    ]
    assert [line.began for line in timelines] == sorted(line.began for line in timelines)
    for line in timelines:
        assert line.title.startswith(str(line.plans[0].spec))
        assert len(line.plans) == world
        assert min(start for times in line.times for start, _ in times) == 0
        for times, (*_, before, after) in zip(line.times, answers, strict=True):
            assert all(before <= line.began + start and line.began + end <= after for start, end in times)
        verify_order(line)


@pytest.mark.parametrize("stream", ["send", "compute0"])
def test_a_delay_shows_where_it_is(ranks, stream: str) -> None:
    slow = 1
    (line,) = unpack(ranks(2).run(delayed, stream, slow)[0])

    def busy(rank: int, on: str) -> float:
        """Of ops that wait for nothing."""
        ops = zip(line.plans[rank].ops, line.times[rank], strict=True)
        return sum(end - start for op, (start, end) in ops if op.stream == on and op.kind not in ("wait", "await"))

    verify_order(line)
    others = [(0, "send"), (0, "compute0"), (1, "send"), (1, "compute0")]
    others.remove((slow, stream))
    assert busy(slow, stream) > 0.5 * DELAY
    assert all(busy(slow, stream) > 2 * busy(*other) for other in others)


def test_leaving_waits_for_async_calls(ranks) -> None:
    for packed, ended in ranks(2).run(left_async):
        assert ended
        (line,) = unpack(packed)
        verify_order(line)
        joins = [
            span
            for plan, times in zip(line.plans, line.times, strict=True)
            for index, (op, span) in enumerate(zip(plan.ops, times, strict=True))
            if op.stream == "main" and index >= plan.join_begin
        ]
        assert joins and all(start == end for start, end in joins), "nobody waited in the block"


def test_errors_name_the_argument_and_leave_no_trace_on(ranks) -> None:
    answers = ranks(2).run(errors)
    assert answers[0] == answers[1]
    suffix, device, group, nested, raised, count = answers[0]
    assert suffix == "ValueError: path is 'calls.gif'; expected a file that ends in .json, .png or .svg"
    assert device == "ValueError: device is xpu; expected cpu or cuda"
    assert group.startswith("TypeError: group")
    assert nested.startswith("RuntimeError") and "one trace at a time" in nested
    assert raised == "KeyError: 'of the block'"
    assert count == "3"


def leave_badly(rank: int, world: int, group, how: str) -> tuple[str, float]:
    """What a rank is told at the end of its block, and after how many seconds."""
    comm = so.Communicator(group, timeout=2)
    calls(world, so.PlanSpec())
    begin = time.monotonic()
    try:
        if how == "a rank leaves a trace before" and rank == 0:
            with suppress(KeyError), so.trace(group=group):
                raise KeyError
        with so.trace(group=group):
            calls(world, so.PlanSpec())
            begin = time.monotonic()
            if how == "the group fails" and rank == 0:
                comm.abort("enough")
            if how == "a rank raises" and rank == 0:
                comm.close()  # nor may that change what is raised
                raise KeyError("mine")
    except (KeyError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "nothing", time.monotonic() - begin


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("the group fails", ["CommunicatorError: .*enough"] * 2),
        ("a rank raises", ["KeyError: 'mine'", "RuntimeError: could not gather a trace of group .*within the timeout"]),
        (
            "a rank leaves a trace before",
            ["RuntimeError: ranks left different traces .*trace 2 of rank 0, 1 of rank 1"] * 2,
        ),
    ],
)
def test_a_block_that_ends_badly_ends_in_time(how: str, told: list[str]) -> None:
    with Pool(2) as pool:
        for (message, seconds), expected in zip(pool.run(leave_badly, how, timeout=30), told, strict=True):
            assert re.match(expected, message), message
            assert seconds < 2 + 2


def test_a_chrome_trace_has_tracks_and_matching_flows(ranks, tmp_path) -> None:
    path = tmp_path / "calls.json"
    packed, *_ = ranks(3).run(traced, so.PlanSpec("ring", 2, 2), str(path))[0]
    found = json.loads(path.read_text())
    timelines = unpack(packed)
    assert found == json.loads(json.dumps(trace_events(timelines)))
    events = defaultdict(list)
    for event in found["traceEvents"]:
        events[event["ph"]].append(event)
    assert set(events) == {"M", "X", "s", "f"}

    named = {(event["pid"], event["tid"]) for event in events["M"] if event["name"] == "thread_name"}
    assert {event["pid"] for event in events["M"] if event["name"] == "process_name"} == {0, 1, 2}
    assert {(event["pid"], event["tid"]) for event in events["X"]} == named
    assert len(events["X"]) == sum(len(plan.ops) for line in timelines for plan in line.plans)
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events["X"])

    starts = {event["id"]: event for event in events["s"]}
    ends = {event["id"]: event for event in events["f"]}
    assert len(starts) == len(events["s"]) == len(list(arrow for line in timelines for arrow in line.arrows()))
    assert starts.keys() == ends.keys() and len(ends) == len(events["f"])
    slices = defaultdict(list)
    for event in events["X"]:
        slices[event["pid"], event["tid"]].append(event)
    for number, start in starts.items():
        assert in_one_of(slices, start, ("record", "notify"))
        assert in_one_of(slices, ends[number], ("wait", "await"))


def in_one_of(slices: dict, flow: dict, kinds: tuple[str, str]) -> bool:
    near = 1e-3  # microseconds
    return any(
        event["ts"] - near <= flow["ts"] <= event["ts"] + event["dur"] + near
        for event in slices[flow["pid"], flow["tid"]]
        if event["cat"] in kinds
    )


def made_up(world: int = 6) -> Timeline:
    """Every op takes 10 us, one after another on its rank: not in the order that flags impose."""
    ranks = plans.build("gemm_reduce_scatter", world=world, reduce="sum")
    times = [tuple((1e-5 * i, 1e-5 * (i + 1)) for i in range(len(plan.ops))) for plan in ranks]
    return Timeline(tuple(ranks), tuple(times), "made up, with a title that is long " * 6)


def test_pictures(tmp_path) -> None:
    line = made_up()
    draw(line, tmp_path / "few.png", ranks=[5])
    draw(line, tmp_path / "all.png", ranks=range(6))
    draw(line, tmp_path / "default.svg")
    few, every = ((tmp_path / name).read_bytes() for name in ("few.png", "all.png"))
    assert few.startswith(b"\x89PNG") and every.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", every[16:24])
    assert width == 1800 and height > 3 * struct.unpack(">II", few[16:24])[1]
    assert len(every) > 40_000
    svg = ElementTree.parse(tmp_path / "default.svg").getroot()
    assert svg.tag.endswith("svg") and len(list(svg.iter())) > 500
    for bad in ([], [0, 0], [6]):
        with pytest.raises(ValueError, match=r"ranks is .*; expected some of 0 to 5, each once"):
            draw(line, tmp_path / "bad.png", ranks=bad)
    with pytest.raises(ValueError, match=r"expected a file that ends in \.png or \.svg"):
        draw(line, tmp_path / "bad.pdf")


def test_calls_of_unknown_times_come_one_after_another() -> None:
    line = made_up(2)
    slices = [event for event in trace_events([line, line])["traceEvents"] if event["ph"] == "X"]
    first, second = ([event for event in slices if event["args"]["call"] == call] for call in (0, 1))
    assert max(event["ts"] + event["dur"] for event in first) < min(event["ts"] for event in second)


def test_without_matplotlib_one_line_says_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        draw(made_up(2), tmp_path / "picture.png")
    tracing.write([made_up(2)], tmp_path / "calls.json")


def test_the_command(tmp_path, capsys) -> None:
    outs = [tmp_path / name for name in ("call.json", "call.png")]
    options = [word for out in outs for word in ("--out", str(out))]
    assert main(["trace", "--shape", "64,32,16", "--chunks", "2", "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [times["rank"] for times in found["ranks"]] == [0, 1]
    assert all(times["gemm_seconds"] > 0 and 0 <= times["exposed_fraction"] <= 1 for times in found["ranks"])
    assert all(out.stat().st_size > 1000 for out in outs)


def test_the_command_traces_a_wire(tmp_path, capsys) -> None:
    out = tmp_path / "call.json"
    options = ["--shape", "64,32,16", "--algorithm", "ring", "--wire", "fp8", "--json", "--out", str(out)]
    assert main(["trace", "gemm_reduce_scatter", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["wire"], found["plan"]["reduce"]) == ("fp8", "sum")
    assert any(event["name"].startswith("quantise") for event in json.loads(out.read_text())["traceEvents"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_the_command_says_what_it_needs(capsys) -> None:
    assert main(["trace", "--device", "cuda"]) == 2
    assert "--device cuda needs a GPU for each of 2 ranks; torch finds 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--out", "x.gif"], "--out: path is 'x.gif'; expected a file that ends in .json, .png or .svg"),
        (
            ["--out", "/no/such/x.png"],
            "--out: path is '/no/such/x.png'; expected a file in a folder that exists and can be written",
        ),
        (["--shape", "4,4"], "is '4,4'; expected M,N,K"),
        (["--shape", "5,4,4"], "M of --shape is 5; expected a multiple of --world, 2"),
        (["--graph"], "--graph is for --device cuda"),
        (["--world", "65"], "--world is 65; expected at most 64"),
        (["--chunks", "65"], "chunks is 65"),
        (["--reduce", "sum"], "--reduce is sum for all_gather_gemm; expected only for gemm_reduce_scatter or gemm_all"),
        (["--wire", "fp8"], "--wire is fp8 for all_gather_gemm; expected only for gemm_reduce_scatter, "),
        (["all_reduce", "--wire", "fp8", "--dtype", "float64"], "--dtype is float64 with --wire fp8; expected float32"),
    ],
)
def test_wrong_use_is_one_line(capsys, options: list[str], told: str) -> None:
    assert main(["trace", *options]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
