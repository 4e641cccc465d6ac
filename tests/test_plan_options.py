"""Options of plans: GEMMs that store in a peer's slot, and chunks that taper."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plans import of_kind, writes_a_peer

from streamoverlap import _C, plans, table
from streamoverlap.spec import TAPERS, PlanSpec, plan_of_text


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_gemm_that_stores_waits_for_the_credit_and_needs_neither_put_nor_scratch(world: int) -> None:
    for algorithm in ("direct", "ring"):
        ranks = plans.build("gemm_reduce_scatter", world=world, algorithm=algorithm, chunks=2, transfer="store")
        for plan in ranks:
            storing = [op for op in plan.ops if op.kind == "gemm" and writes_a_peer(op, plan.rank)]
            assert len(storing) == 2 * (world - 1) and not of_kind(plan, "put")
            partials = [region for op in storing for region in (*op.reads, *op.writes)]
            assert all(region.buffer in ("input", "slot") for region in partials)
            plan.ops = [op for op in plan.ops if op.kind != "await" or op.flag.kind != "empty"]
        assert {fault.kind for fault in plans.check(ranks)} >= {"credit"}


def test_what_stores_in_a_plan_that_copies_is_malformed() -> None:
    ranks = plans.build("gemm_reduce_scatter", world=2, transfer="store")
    copying = plans.Spec("gemm_reduce_scatter", world=2)
    faults = plans.check([plans.Plan(copying, plan.rank, plan.events, plan.ops) for plan in ranks])
    assert any("expected a region of its own rank other than the input" in fault.message for fault in faults)


def test_a_taper_changes_no_plan() -> None:
    for spec in plans.variants(3, chunks=(2, 3), compute_streams=(2,)):
        tapered = plans.build(**{**plans.spec_options(spec), "taper": "both"})
        assert [plan.ops for plan in tapered] == [plan.ops for plan in plans.build_spec(spec)]
        assert tapered[0].spec != spec and "taper=both" in str(tapered[0].spec)


@given(
    taper=st.sampled_from(TAPERS),
    chunks=st.integers(1, 64),
    shard_rows=st.integers(0, 1 << 14) | st.integers(0, 1 << 40),
    missing=st.integers(0, 300),
)
def test_chunks_partition_the_shard(taper: str, chunks: int, shard_rows: int, missing: int) -> None:
    available = max(0, shard_rows - missing)
    spec = plans.Spec("all_gather_gemm", world=2, chunks=chunks, taper=taper)
    begin = 0
    for chunk in range(chunks):
        first, count = _C.chunk_rows(spec, shard_rows, chunk, available)
        assert (first, count >= 0) == (begin, True)
        begin += count
    assert begin == available


@pytest.mark.parametrize(
    ("taper", "chunks", "rows", "sizes"),
    [
        ("none", 3, 1000, [334, 334, 332]),
        ("first", 1, 1000, [1000]),
        ("both", 1, 1000, [1000]),
        ("last", 2, 4096, [2688, 1408]),  # of 128 rows each, the nearest to 2 to 1
        ("first", 3, 1000, [256, 384, 360]),
        ("both", 3, 4096, [1024, 2048, 1024]),
        ("both", 2, 4096, [2048, 2048]),
        ("both", 4, 96, [16, 32, 32, 16]),  # too few for whole tiles
        ("last", 3, 2, [1, 1, 0]),
    ],
)
def test_a_taper_halves_chunks_and_keeps_tiles_whole(taper: str, chunks: int, rows: int, sizes: list[int]) -> None:
    spec = plans.Spec("all_gather_gemm", world=2, chunks=chunks, taper=taper)
    assert [_C.chunk_rows(spec, rows, chunk, rows)[1] for chunk in range(chunks)] == sizes


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (PlanSpec("ring", 2, 1, "sum"), "ring,2,1,sum"),  # as versions without transfer and taper wrote it
        (PlanSpec("ring", 2, 1, "accumulate", "store"), "ring,2,1,accumulate,store,none"),
        (PlanSpec("direct", 3, 2, taper="both"), "direct,3,2,accumulate,copy,both"),
    ],
)
def test_the_text_of_a_plan_gives_the_plan(plan: PlanSpec, text: str) -> None:
    assert plan.to_text() == text
    assert plan_of_text(text) == plan


@pytest.mark.parametrize("text", ["ring,2,1,sum,copy", "ring,2,1", "ring,2,1,sum,copy,none,more", "ring"])
def test_what_is_no_text_of_a_plan_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="expected '' or the text of a PlanSpec"):
        plan_of_text(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ring,2,1,sum,put,none", "transfer is 'put'; expected one of 'copy', 'store'"),
        ("ring,2,1,sum,copy,middle", "taper is 'middle'; expected one of 'none', 'first', 'last', 'both'"),
    ],
)
def test_the_text_of_a_plan_with_an_unknown_value_names_it(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of_text(text)


PROBLEM = table.Problem("gemm_reduce_scatter", 2, 64, 8, 8, "float32", "row")


def write_table(path: Path, change: Callable[[dict], object]) -> None:
    """Of one plan, whose fields are changed."""
    tuned = table.TunedPlan(PlanSpec("ring", 2, 1, "sum"), 1e-4, 2e-4)
    table.Table({PROBLEM: tuned}).save(path, "a device")
    document = json.loads(path.read_text())
    change(document["plans"][0]["plan"])
    path.write_text(json.dumps(document))


def test_tables_of_versions_without_these_options_are_read(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    write_table(path, lambda plan: [plan.pop(field) for field in ("transfer", "taper")])
    assert table.Table.read(path).plans[PROBLEM].plan == PlanSpec("ring", 2, 1, "sum")


@pytest.mark.parametrize("option", ["transfer", "taper"])
def test_a_table_with_an_unknown_value_is_named_with_it(tmp_path: Path, option: str) -> None:
    path = tmp_path / "table.json"
    write_table(path, lambda plan: plan.update({option: "other"}))
    with pytest.raises(ValueError, match=rf"table\.json is no table .*: {option} is 'other'; expected one of"):
        table.Table.read(path)
