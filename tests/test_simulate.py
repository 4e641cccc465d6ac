"""The simulator: times worked out by hand, what holds for every plan, its constants and its command."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import pytest

from streamoverlap import _C, calibrate, plans, simulate
from streamoverlap.__main__ import main
from streamoverlap.plans import Flag, Op, Plan, Region, Spec
from streamoverlap.simulate import Costs
from streamoverlap.spec import PlanSpec
from streamoverlap.timeline import Timeline

H200 = Costs.load("h200")
# All that is not work costs nothing, so that a time can be worked out by hand.
FREE = replace(
    H200,
    gemm_flops=1e12,
    sms=1,
    tile_m=1,
    tile_n=1,
    gemm_latency=0.0,
    gemm_accumulate=1.0,
    link_bandwidth=((1.0, 1e9),),
    put_latency=0.0,
    copy_latency=0.0,
    notify=0.0,
    await_=0.0,
    record=0.0,
    wait=0.0,
    flag_latency=0.0,
    issue=dict.fromkeys(simulate.KINDS, 0.0),
)
M, N, K = 96, 48, 240  # a multiple of 1 to 4 each


def gemm(rows: float, n: float, k: float) -> float:
    return 2 * rows * n * k / 1e12


def put(rows: float, width: float) -> float:
    return rows * width * 2 / 1e9


def seconds(spec: Spec, m: int = M, n: int = N, k: int = K, costs: Costs = FREE, **options) -> float:
    return simulate.predicted_seconds(simulate.simulate(spec, m, n, k, costs=costs, **options))


@pytest.mark.parametrize("operation", ["all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"])
def test_one_rank_takes_the_time_of_its_gemm(operation: str) -> None:
    spec = Spec(operation, world=1)
    assert seconds(spec) == pytest.approx(gemm(M, N, K))
    assert simulate.gemm_seconds(operation, 1, M, N, K, costs=FREE) == pytest.approx(gemm(M, N, K))


def test_an_all_gather_gemm_of_two_is_bound_by_the_longer_of_exchange_and_gemm() -> None:
    spec = Spec("all_gather_gemm", world=2)
    half = gemm(M / 2, N / 2, K)
    assert seconds(spec) == pytest.approx(put(M / 2, K) + half)  # the link is slower than the first GEMM
    fast = replace(FREE, link_bandwidth=((1.0, 1e15),))
    assert seconds(spec, costs=fast) == pytest.approx(2 * half)


def test_a_gemm_reduce_scatter_of_two_sends_the_peers_half_first() -> None:
    spec = Spec("gemm_reduce_scatter", world=2, reduction="accumulate")
    half = gemm(M / 2, N, K / 2)
    assert seconds(spec) == pytest.approx(half + put(M / 2, N) + half)  # the sum waits for the peer's partial


def test_a_gemm_that_stores_takes_the_longer_of_its_tiles_and_their_way() -> None:
    spec = Spec("gemm_reduce_scatter", world=2, transfer="store")
    half, sent = gemm(M / 2, N, K / 2), put(M / 2, N)
    near = {"rel": 2e-3}  # the first tile is made before it goes, the last one goes after it is made
    slow = replace(FREE, store_efficiency=0.5)
    assert seconds(spec, costs=slow) == pytest.approx(2 * sent + half, **near)
    fast = replace(FREE, link_bandwidth=((1.0, 1e15),))
    assert seconds(spec, costs=fast) == pytest.approx(2 * half, **near)
    waves = replace(FREE, tile_m=M // 2, tile_n=N, store_efficiency=1.0)  # all tiles of a product are one
    assert seconds(spec, costs=waves) > half + sent


def test_two_gemms_that_store_share_the_link() -> None:
    spec = Spec("gemm_reduce_scatter", world=2, compute_streams=2, chunks=2, transfer="store")
    one, two = (_simulated(_storing(spec, streams), FREE) for streams in (["compute0"] * 2, ["compute0", "compute1"]))
    assert max(end for _, end in one.times[0]) == pytest.approx(max(end for _, end in two.times[0]), rel=2e-3)


def test_costs_of_sync_ops_add_up_along_the_path() -> None:
    costs = replace(FREE, put_latency=1.0, notify=0.1, flag_latency=0.01, await_=0.001, gemm_latency=10.0, wait=1e-4)
    ranks = [
        Plan(Spec("all_gather_gemm", world=2), 0, 1, [_put(0, 1), _flag("notify", 0, 1)]),
        Plan(Spec("all_gather_gemm", world=2), 1, 1, [_flag("await", 0, 1), Op("record", "recv", event=0), _wait()]),
    ]
    timeline = _simulated(ranks, costs)
    spans = timeline.times
    arrived = 1.0 + put(M / 2, K)
    assert spans[0][1] == pytest.approx((arrived, arrived + 0.1))
    assert spans[1][0] == pytest.approx((0.0, arrived + 0.1 + 0.01 + 0.001))  # an await's span is its waiting
    assert spans[1][2] == pytest.approx((0.0, spans[1][1][1] + 1e-4))


def test_two_gemms_at_once_share_the_gpu_and_two_puts_the_link() -> None:
    def ops(streams: tuple[str, str]) -> list[Op]:
        return [Op("gemm", s, [Region("input", 0, 0, 0)], [Region("output", 0, i, 0)]) for i, s in enumerate(streams)]

    spec = Spec("all_gather_gemm", world=2, compute_streams=2)
    idle = Plan(spec, 1, 0, [])
    one = _simulated([Plan(spec, 0, 0, ops(("compute0", "compute0"))), idle], FREE)
    two = _simulated([Plan(spec, 0, 0, ops(("compute0", "compute1"))), idle], FREE)
    assert simulate.predicted_seconds(one) == pytest.approx(simulate.predicted_seconds(two))
    assert two.times[0][0] == pytest.approx((0.0, simulate.predicted_seconds(two)))
    both_to_two = [Plan(Spec("all_gather", world=3), rank, 0, [_put(rank, 2)] if rank < 2 else []) for rank in range(3)]
    assert simulate.predicted_seconds(_simulated(both_to_two, FREE, M // 3)) == pytest.approx(2 * put(M / 3, K))


def test_the_cpu_issues_one_op_after_the_other_but_not_in_a_graph() -> None:
    costs = replace(FREE, issue=dict.fromkeys(simulate.KINDS, 1.0))
    spec = Spec("all_gather_gemm", world=2)
    timeline = simulate.simulate(spec, M, N, K, costs=costs)
    for plan, times in zip(timeline.plans, timeline.times, strict=True):
        assert all(start >= index + 1 for index, (start, _) in enumerate(times))
        assert times[-1][0] >= len(plan.ops)
    assert seconds(spec, costs=costs, graph=True) == pytest.approx(seconds(spec))


def test_a_gemm_takes_the_shape_of_tiles_that_leaves_least_idle() -> None:
    costs = replace(FREE, sms=4, tile_m=8, tile_n=16)
    wave = 4 * gemm(8, 16, K)
    cases = [
        (16, 32, 1.0),  # four large tiles
        (32, 32, 2.0),
        (8, 80, 2 * 5 / 8),  # 8 tiles of 5/8 of the columns: 2 such waves, not 2 of large ones for 5 tiles
        (8, 16, 2 * 0.125 / 0.97),  # a single tile: half the columns and k in quarters, 8 of them in 2 waves
    ]
    for rows, n, waves in cases:
        assert simulate.gemm_seconds("all_gather_gemm", 1, rows, n, K, costs=costs) == pytest.approx(waves * wave)


def test_bandwidth_is_interpolated_in_the_logarithm_of_the_size() -> None:
    spec = Spec("all_gather", world=2)
    costs = replace(FREE, link_bandwidth=((M * K / 2, 1e9), (M * K * 8, 3e9)), copy_bandwidth=1e30)
    sent = M // 2 * K * 2  # bytes; twice the first size of the table, a quarter of the way to 16 times of it
    assert seconds(spec, costs=costs) == pytest.approx(sent / 1.5e9)
    beyond = replace(costs, link_bandwidth=((1.0, 1e9), (2.0, 3e9)))
    assert seconds(spec, costs=beyond) == pytest.approx(sent / 3e9)


@lru_cache
def every_variant() -> list[Timeline]:
    cases = [
        (spec, M + (5 if "all_reduce" in spec.operation else 0)) for w in range(1, 5) for spec in plans.variants(w)
    ]
    return [simulate.simulate(spec, m, N, K, costs=costs) for spec, m in cases for costs in (H200, FREE)]


def test_streams_run_in_order_and_nothing_starts_before_it_is_free_to() -> None:
    for timeline in every_variant():
        for plan, times in zip(timeline.plans, timeline.times, strict=True):
            free: dict[str, float] = {}
            for op, (start, end) in zip(plan.ops, times, strict=True):
                assert end >= start >= free.get(op.stream, 0.0), timeline.title
                free[op.stream] = end
        for arrow in timeline.arrows():
            setter, waiter = timeline.times[arrow.from_rank][arrow.from_op], timeline.times[arrow.to_rank][arrow.to_op]
            assert waiter[1] >= setter[1], timeline.title


def test_no_call_is_faster_than_its_gemm_or_its_bytes() -> None:
    for spec in (spec for world in range(1, 5) for spec in plans.variants(world)):
        for costs, graph in ((FREE, True), (H200, True), (H200, False)):
            taken = seconds(spec, costs=costs, graph=graph)
            alone = simulate.gemm_seconds(spec.operation, spec.world, M, N, K, costs=costs)
            width = K if spec.operation.startswith("all_gather") else N
            row = width if spec.quantised else width * 2
            sent = (spec.world - 1) * M // spec.world * row
            fastest = max(bandwidth for _, bandwidth in costs.link_bandwidth)
            assert taken >= max(alone, sent / fastest) * (1 - 1e-9), spec


def test_more_bandwidth_is_never_slower_with_one_compute_stream() -> None:
    for spec in (spec for world in range(2, 5) for spec in plans.variants(world, compute_streams=(1,))):
        times = [seconds(spec, costs=replace(FREE, link_bandwidth=((1.0, rate),))) for rate in (1e8, 1e9, 1e10, 1e12)]
        assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(times)), (spec, times)


def test_uneven_and_empty_chunks_are_those_of_the_executors() -> None:
    # 5 rows of a shard in 4 chunks: 2, 2, 1 and none.
    timeline = simulate.simulate(Spec("all_gather_gemm", world=2, chunks=4), 10, N, K, costs=FREE)
    spans = [span for op, span in zip(timeline.plans[0].ops, timeline.times[0], strict=True) if op.kind == "put"]
    assert [end - start for start, end in spans] == pytest.approx([put(2, K), put(2, K), put(1, K), 0.0], abs=1e-15)


@pytest.mark.parametrize("kind", ["notify", "put"])
def test_plans_that_deadlock_are_an_error_that_names_the_op(kind: str) -> None:
    ranks = plans.build("all_gather_gemm", world=2)
    if kind == "notify":
        ranks[1].ops = [op for op in ranks[1].ops if not (op.kind == "notify" and op.flag.kind == "full")]
        said = r"deadlock: rank 0 recv \[await  full\(1->0, 0\)\] waits for ever: nobody sets its flag"
    else:  # each waits for the other's data before it sends its own
        spec = ranks[0].spec
        ranks = [Plan(spec, r, 0, [_flag("await", 1 - r, r, "send"), _flag("notify", r, 1 - r)]) for r in range(2)]
        said = r"deadlock: rank 0 send \[await  full\(1->0, 0\)\] waits for ever for rank 1 send \[notify"
    with pytest.raises(ValueError, match=said):
        _simulated(ranks, FREE)


def test_malformed_plans_are_an_error() -> None:
    ranks = plans.build("all_gather_gemm", world=2)
    with pytest.raises(ValueError, match="rank"):
        _simulated([ranks[0], ranks[0]], FREE)
    with pytest.raises(ValueError, match="plans is empty"):
        _simulated([], FREE)


def test_the_ranking_has_every_candidate_and_serial_and_rises() -> None:
    ranking = simulate.best("gemm_reduce_scatter", 4, 8192, 8192, 8192, costs=H200)
    assert {plan for plan, _ in ranking} == {PlanSpec("serial"), *simulate.candidates("gemm_reduce_scatter")}
    times = [taken for _, taken in ranking]
    assert times == sorted(times) and all(map(math.isfinite, times))
    assert dict(ranking)[PlanSpec("serial")] > times[0]


def test_sizes_are_sharded_as_the_benchmarks_do() -> None:
    gather = simulate.local_problem("all_gather_gemm", 2, 8192, 10240, 8192, as_tp=8)
    assert gather == (8192, 4096, 1280, 8192, 8192)
    scatter = simulate.local_problem("gemm_reduce_scatter", 2, 8192, 8192, 28672)
    assert scatter == (8192, 4096, 8192, 14336, 8192)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("all_gather_gemm", 4, 6, 8, 8), "M is 6; expected a multiple of the group's 4 ranks"),
        (("all_gather_gemm", 4, 8, 6, 8), "N is 6; expected a multiple of 4"),
        (("gemm_reduce_scatter", 4, 8, 8, 6), "K is 6; expected a multiple of 4"),
        (("all_gather_gemm", 4, 0, 8, 8), "M is 0; expected an integer from 1 to 268435456"),
        (("all_to_all", 4, 8, 8, 8), "operation is 'all_to_all'"),
    ],
)
def test_sizes_that_cannot_be_are_errors(arguments: tuple, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        simulate.local_problem(*arguments)


@pytest.mark.parametrize(
    ("constant", "value", "said"),
    [
        ("gemm_flops", 0.0, "gemm_flops is 0"),
        ("sms", 1.5, "sms is 1.5; expected an integer"),
        ("notify", -1e-6, "notify is -0.000001; expected seconds"),
        ("link_bandwidth", (), "link_bandwidth is empty"),
        ("link_bandwidth", ((2.0, 1.0), (1.0, 1.0)), "sizes above 0, rising"),
        ("wait", math.nan, "wait is nan"),
        ("store_efficiency", 1.5, "store_efficiency is 1.500000; expected more than 0, 1 at most"),
        ("issue", {"gemm": 1.0}, "expected seconds of each of gemm"),
        ("serial_bandwidth", 0, "serial_bandwidth is 0"),
    ],
)
def test_costs_that_cannot_be_are_errors(constant: str, value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(H200, **{constant: value})


def test_costs_come_back_from_a_file_and_every_constant_has_a_source(tmp_path) -> None:
    H200.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == H200
    document = H200.as_json()["constants"]
    assert all(constant["source"] and constant["unit"] for constant in document.values())
    older = H200.as_json()
    del older["constants"]["store_efficiency"]
    (tmp_path / "older.json").write_text(json.dumps(older))
    assert Costs.load(tmp_path / "older.json").sources["store_efficiency"] == "assumed"
    (tmp_path / "short.json").write_text('{"device": "x", "constants": {}}')
    with pytest.raises(ValueError, match="lacks 'gemm_flops'"):
        Costs.load(tmp_path / "short.json")
    (tmp_path / "not.json").write_text("no")
    with pytest.raises(ValueError, match="is no file of costs"):
        Costs.load(tmp_path / "not.json")


def run(line: str) -> int:
    return main(line.split())


def test_the_command_prints_the_ranking_and_the_constants(capsys) -> None:
    assert run("simulate --world 8 --shape 8192,57344,8192") == 0
    out = capsys.readouterr().out
    assert "GEMM alone" in out and "t/GEMM" in out and "serial" in out
    assert "788 TFLOP/s" in out and "measured: peer copy" in out
    assert run("simulate --world 2 --shape 97,64,64 --op all_reduce") == 0
    assert "GEMM alone" not in capsys.readouterr().out


def test_the_command_prints_json(capsys) -> None:
    line = "simulate --world 2 --shape 8192,8192,28672 --op gemm_reduce_scatter --as-tp 8 --graph --json"
    assert run(line) == 0
    printed = json.loads(capsys.readouterr().out)
    options = {"costs": H200, "as_tp": 8, "graph": True}
    ranking = simulate.best("gemm_reduce_scatter", 2, 8192, 8192, 28672, **options)
    assert [row["seconds"] for row in printed["plans"]] == [taken for _, taken in ranking]
    assert all(0 <= row["exposed"] <= 1 and row["over_gemm"] >= 1 for row in printed["plans"])
    assert printed["costs"] == json.loads(json.dumps(H200.as_json()))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--world 2", "--shape is missing"),
        ("--shape 1,2,3", "--world is missing"),
        ("--world 2 --shape 8,8", "argument --shape: is '8,8'; expected M,N,K"),
        ("--world 2 --shape 8,0,8", "is '8,0,8'; expected M,N,K"),
        ("--world 3 --shape 8,6,8", "M is 8; expected a multiple of the group's 3 ranks"),
        ("--world 65 --shape 65,65,65", "world is 65"),
        ("--world 2 --shape 8,8,8 --device a100", "--device: a100 is neither a file nor a device"),
        ("--world 2 --shape 8,8,8 --op add", "'add'"),
        (
            "--world 2 --shape 8,8,8 --wire fp8",
            "--wire is fp8 for all_gather_gemm; expected only for ",
        ),
        (
            "--world 2 --shape 8,8,8 --op all_reduce --wire fp8 --dtype-bytes 8",
            "--dtype-bytes is 8 with --wire fp8; expected 2 or 4",
        ),
    ],
)
def test_wrong_use_is_one_line(line: str, said: str, capsys) -> None:
    assert run(f"simulate {line}") == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1


def test_calibration_without_a_gpu_says_what_it_needs(monkeypatch, capsys) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert run("simulate --calibrate out.json") == 2
    err = capsys.readouterr().err
    assert "--calibrate needs a CUDA GPU, 2 to measure the link" in err and err.count("\n") == 1


@pytest.mark.parametrize("count", [1, 2])
def test_calibration_keeps_what_it_cannot_measure_and_says_so(count: int, monkeypatch, tmp_path, capsys) -> None:
    link = {"put_latency": 1e-6, "link_bandwidth": ((1.0, 5e9),)}
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "a GPU")
    monkeypatch.setattr("torch.cuda.device", lambda index: nullcontext())
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(calibrate, "_gemm", lambda base: {"gemm_flops": 1e12})
    monkeypatch.setattr(calibrate, "_local", lambda base: {"copy_bandwidth": 1e9})
    monkeypatch.setattr(calibrate, "_link", lambda: link)
    monkeypatch.setattr(calibrate, "_issue", lambda: {"gemm": 1e-5})
    assert run(f"simulate --calibrate {tmp_path}/here.json") == 0
    assert ("needs 2 GPUs, found 1" in capsys.readouterr().out) == (count == 1)
    costs = Costs.load(tmp_path / "here.json")
    assert (costs.gemm_flops, costs.copy_bandwidth, costs.issue["gemm"]) == (1e12, 1e9, 1e-5)
    assert costs.link_bandwidth == (link["link_bandwidth"] if count == 2 else H200.link_bandwidth)
    assert costs.issue["wait"] == H200.issue["wait"]
    assert "a GPU" in costs.sources["gemm_flops"] and costs.sources["notify"] == H200.sources["notify"]


@pytest.mark.gpu(1)
def test_calibration_measures_this_machine(tmp_path) -> None:
    assert run(f"simulate --calibrate {tmp_path}/here.json") == 0
    costs = Costs.load(tmp_path / "here.json")
    assert costs.gemm_flops > 1e12 and costs.copy_bandwidth > 1e10
    assert all(0 < costs.issue[kind] < 1e-3 for kind in simulate.KINDS)


def _put(sender: int, receiver: int) -> Op:
    return Op("put", "send", [Region("input", sender, sender, 0)], [Region("slot", receiver, sender, 0)])


def _storing(spec: Spec, streams: list[str]) -> list[Plan]:
    """Plans of two ranks, of which the first stores a chunk on each stream."""
    ops = [
        Op("gemm", stream, [Region("input", 0, 1, chunk)], [Region("slot", 1, 0, chunk)])
        for chunk, stream in enumerate(streams)
    ]
    return [Plan(spec, 0, 0, ops), Plan(spec, 1, 0, [])]


def _flag(kind: str, sender: int, receiver: int, stream: str = "") -> Op:
    return Op(kind, stream or ("send" if kind == "notify" else "recv"), flag=Flag("full", sender, receiver, 0))


def _wait() -> Op:
    return Op("wait", "main", event=0)


def _simulated(ranks: list[Plan], costs: Costs, shard_rows: int = M // 2) -> Timeline:
    times = simulate._C.simulate(ranks, costs.compiled(), shard_rows, 0, N // 2, K, K, 2, True)
    return Timeline(tuple(ranks), tuple(map(tuple, times)), "by hand")


@pytest.mark.parametrize("world", [2, 3])
def test_what_is_simulated_is_what_runs(world: int) -> None:
    """Of plans, that is: the quick way to prune finds all that asking the checker finds."""
    for spec in plans.variants(world, chunks=(1, 2), compute_streams=(1, 2)):
        built = plans.build_spec(spec, pruned=False)
        assert _C.prune_implied(built) == plans.build_spec(spec), spec


def test_costs_that_give_no_time_are_an_error() -> None:
    costs = replace(FREE, gemm_flops=1e-300)
    with pytest.raises(ValueError, match=r"costs and sizes are such that rank 0 compute0 .* would take for ever"):
        simulate.simulate(Spec("all_gather_gemm", world=2), 1 << 20, 1 << 20, 1 << 20, costs=costs)
    with pytest.raises(ValueError, match="N is 268435457; expected an integer from 1 to 268435456"):
        simulate.local_problem("all_gather_gemm", 1, 1, (1 << 28) + 1, 1)
