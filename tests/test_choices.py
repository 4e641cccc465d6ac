"""Which plan runs where none is given: what the simulator picks, how ranks agree on it, and `streamoverlap.explain`."""

from __future__ import annotations

import time

import pytest
import torch
from ranks import Pools

import streamoverlap as so
from streamoverlap import chooser, simulate
from streamoverlap.chooser import Chooser, Shape
from streamoverlap.intercept import Asked
from streamoverlap.plans import OPERATIONS
from streamoverlap.spec import DEFAULT


@pytest.fixture(scope="module")
def ranks():
    pools = Pools()
    yield pools
    pools.close()


def shape(operation: str = "all_gather_gemm", world: int = 4, m: int = 8192, **given) -> Shape:
    return Shape(operation, world, m, 10240, 8192, **{"dtype": torch.bfloat16, **given})


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_fastest_is_what_the_simulator_ranks_first(operation: str) -> None:
    asked = shape(operation)
    choice = chooser.fastest(asked)
    options = {"costs": simulate.Costs.load("h200"), "dtype_bytes": 2}
    ranking = dict(simulate.best(operation, 4, *asked.sizes(), **options))
    least = min(seconds for plan, seconds in ranking.items() if plan.algorithm != "serial")
    assert choice.predicted == ranking[choice.plan] == least
    assert choice.reason.startswith("simulated: the fastest of ")


def test_it_heeds_the_streams_there_are_and_slots_of_64_chunks() -> None:
    assert chooser.fastest(shape("all_gather_gemm", 2)).plan.compute_streams == 2
    assert chooser.fastest(shape("all_gather_gemm", 2, compute_streams=1)).plan.compute_streams == 1
    assert chooser.fastest(shape("gemm_reduce_scatter", 64)).plan.chunks == 1


def test_a_slow_dtype_has_less_to_hide() -> None:
    half, single = (chooser.predicted(shape(dtype=dtype), so.PlanSpec()) for dtype in (torch.float16, torch.float32))
    assert single > 5 * half


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_rows_fall_into_few_buckets(world: int) -> None:
    buckets = {shape(world=world, m=world * rows).bucket().m for rows in range(1, 4097)}
    assert len(buckets) <= 4 * 14
    for rows in (1, 3, 64, 100, 4095):
        m = shape(world=world, m=world * rows).bucket().m
        assert m % world == 0 and world * rows <= m <= 1.25 * world * rows + world


def test_shapes_are_those_of_the_call() -> None:
    x, weights = torch.empty(2, 3, 8), [torch.empty(5, 8), torch.empty(7, 8)]
    assert chooser.shape_of("all_gather_gemm", 4, x, weights).sizes() == (24, 48, 8)
    assert chooser.shape_of("gemm_reduce_scatter", 4, x, weights[:1]).sizes() == (6, 5, 32)
    assert chooser.shape_of("gemm_all_reduce", 4, x, weights[:1]).sizes() == (6, 5, 32)
    assert chooser.shape_of("all_gather", 4, x, ()).sizes() == (8, 1, 24)
    assert chooser.shape_of("all_reduce", 4, x, ()).sizes() == (2, 24, 1)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_choice_travels_as_a_number(operation: str) -> None:
    for plan in [so.PlanSpec("serial"), *simulate.candidates(operation)]:
        assert 0 < chooser._code(plan) < 2**32 and chooser._plan(chooser._code(plan)) == plan


class Agreed:
    """Stands for the group's table; `answer` for what rank 0 has chosen, None for this rank's own choice."""

    def __init__(self, answer: int | None = None) -> None:
        self.answer, self.keys = answer, []

    def __call__(self, key: int, choice: int, call: str) -> int:
        self.keys.append(key)
        return choice if self.answer is None else self.answer


TUNED = so.PlanSpec("ring", 4)


def chooser_of(world: int, agreed: Agreed, table: bool = False, tunes: bool = False, simulates: bool = True) -> Chooser:
    found = chooser.measured(1e-4, None, TUNED)
    return Chooser(world, agreed, lambda *_: found if table else None, lambda _: found, lambda: tunes, simulates)


def asked_for(rows: int, n: int = 512) -> Asked:
    x, weight = torch.empty(rows, 256, dtype=torch.bfloat16), torch.empty(n, 256, dtype=torch.bfloat16)
    return Asked("all_gather_gemm", x, [weight], [None], lambda: (0, ""))


def test_ranks_are_asked_once_a_shape_and_by_what_all_of_them_know() -> None:
    agreed = Agreed()
    made = chooser_of(2, agreed)
    first = made.choose(asked_for(1000), settle=True)
    assert made.choose(asked_for(1000), settle=True) == first and len(agreed.keys) == 1
    made.choose(asked_for(1001), settle=True)  # of the same bucket
    made.choose(asked_for(1000, n=640), settle=True)  # a weight of another size
    assert len(set(agreed.keys)) == 1
    made.choose(asked_for(2000), settle=True)
    assert len(set(agreed.keys)) == 2


def test_what_rank_0_has_chosen_is_taken() -> None:
    other = so.PlanSpec("ring", 8)
    choice = chooser_of(2, Agreed(chooser._code(other))).choose(asked_for(1000), settle=True)
    assert choice.plan == other and "rank 0" in choice.reason
    assert chooser_of(2, Agreed(0)).choose(asked_for(1000), settle=True).plan == DEFAULT.plan
    untold = Agreed()
    assert chooser_of(2, untold).choose(asked_for(1000), settle=False).predicted > 0 and not untold.keys
    alone = Agreed()
    assert chooser_of(1, alone).choose(asked_for(1000), settle=True).predicted > 0 and not alone.keys


def test_what_was_measured_comes_before_what_is_predicted() -> None:
    choice = chooser_of(2, Agreed(), table=True).choose(asked_for(1000), settle=True)
    assert choice.plan == TUNED and choice.measured == 1e-4 and choice.reason.startswith("measured: 100.0 us")
    assert chooser_of(2, Agreed(), simulates=False).choose(asked_for(1000), settle=True) == DEFAULT
    agreed = Agreed()
    tuning = chooser_of(2, agreed, tunes=True, simulates=False)
    assert tuning.choose(asked_for(1000), settle=True).plan == TUNED
    also = chooser_of(2, Agreed(chooser._TUNE))  # rank 0 wants it measured
    assert also.choose(asked_for(1000), settle=True).plan == TUNED
    later = chooser_of(2, agreed)
    later.choose(asked_for(1000), settle=True)
    later.found(asked_for(1000), chooser.measured(1e-4, 2e-4, TUNED))
    assert later.choose(asked_for(1000), settle=True).reason == "measured: 100.0 us; serial 200.0 us"
    assert later.choose(asked_for(3000), settle=True).plan != TUNED


def test_arguments_are_validated_before_anything_is_simulated() -> None:
    def refuse() -> None:
        raise ValueError("x is wrong")

    wrong = Asked("all_gather_gemm", torch.empty(()), [torch.empty(())], [None], refuse)
    with pytest.raises(ValueError, match="x is wrong"):
        chooser_of(2, Agreed()).choose(wrong, settle=True)


def agree(rank: int, world: int, group) -> list[int]:
    comm = so.Communicator.of(group, "cpu")
    impl, found = comm._open(), []
    for key in range(1, 9):
        if rank == key % world:
            time.sleep(0.02)  # each is late in turn
        found.append(impl.agree(key << 8, 100 * rank + key, f"call {key}"))
        so.all_reduce(torch.ones(3), group)
    found.append(impl.agree(1 << 8, 7, "call 1"))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_take_the_choice_of_rank_0(ranks, world: int) -> None:
    assert ranks(world).run(agree) == [[*range(1, 9), 1]] * world


def fill(rank: int, world: int, group) -> list[int]:
    impl = so.Communicator(group)._open()
    return [impl.agree(3 * key, key, "") for key in range(1, 1027)]


def test_a_full_table_is_full_for_all(ranks) -> None:
    assert ranks(2).run(fill) == [[*range(1, 1025), 0, 0]] * 2


def differ(rank: int, world: int, group) -> tuple[str, float]:
    comm = so.Communicator(group, timeout=20)
    begin = time.monotonic()
    with pytest.raises(so.MismatchError) as caught:
        if rank == 0:
            comm.all_gather(torch.ones(4), None)
        else:
            comm._open().agree(12, 1, "all_gather_gemm of something")
    return str(caught.value), time.monotonic() - begin


def test_a_rank_whose_call_rank_0_does_not_make_is_told_at_once(ranks) -> None:
    for message, seconds in ranks(2).run(differ):
        assert "all_gather_gemm of something" in message
        assert seconds < 10, "of a timeout of 20 s"


def wait_alone(rank: int, world: int, group) -> str | None:
    comm = so.Communicator(group, timeout=0.5)
    if rank == 0:
        while comm.errored() is None:
            time.sleep(0.01)
        return None
    begin = time.monotonic()
    with pytest.raises(so.PeerTimeoutError) as caught:
        comm._open().agree(12, 1, "all_gather_gemm of something")
    assert 0.4 < time.monotonic() - begin < 2.5
    return str(caught.value)


def test_a_rank_0_that_does_not_come_is_named(ranks) -> None:
    _, message = ranks(2).run(wait_alone)
    assert "for rank 0, which chooses the plan and has not come to this call" in message


def explained(rank: int, world: int, group) -> list:
    x, weight = torch.ones(4, 8), torch.ones(6, 8)
    so.Communicator.of(group, "cpu")
    if rank == 1:
        return []
    found = [
        so.explain(so.all_gather_gemm, x, weight, group),
        so.explain(so.gemm_reduce_scatter, x, weight, group, plan=so.PlanSpec("ring", 2)),
        so.explain(so.all_reduce, x.requires_grad_(), group, plan=so.PlanSpec("serial"), async_op=False),
    ]
    for wrong in (
        lambda: so.explain(so.all_gather_gemm, x, torch.ones(6, 9), group),
        lambda: so.explain(so.gemm_reduce_scatter, torch.ones(3, 8), weight, group),
        lambda: so.explain(torch.mm, x, weight),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            wrong()
        found.append(str(caught.value))
    assert so.Communicator.of(group, "cpu").errored() is None
    return found


def test_explain_asks_nobody_else(ranks) -> None:
    default, given, serial, *wrong = ranks(2).run(explained)[0]
    assert (default.operation, default.plan, default.reason) == ("all_gather_gemm", so.PlanSpec(), DEFAULT.reason)
    assert (given.plan, given.reason) == (so.PlanSpec("ring", 2), "given")
    assert (serial.plan.algorithm, serial.reason) == ("serial", "given")
    assert [each.predicted for each in (default, given, serial)] == [None] * 3
    assert "weight.shape[1] is 9" in wrong[0]
    assert "3" in wrong[1]
    assert "function is 'mm'; expected one of all_gather_gemm" in wrong[2]
    text = str(given)
    assert "gemm_reduce_scatter" in text and "why: given" in text and "not predicted, not measured" in text


def measured(rank: int, world: int, group) -> tuple[so.Explanation, so.Explanation, float]:
    x, weight = torch.ones(64, 128), torch.ones(32, 128)
    with so.trace(group=group) as trace:
        so.all_gather_gemm(x, weight, group, return_gathered=True)
    line = trace.timelines[0]
    traced = so.explain(so.all_gather_gemm, x, weight, group, return_gathered=True)
    other = so.explain(so.all_gather_gemm, x, weight, group)
    return traced, other, max(line.seconds(rank) for rank in range(world))


def test_explain_tells_what_a_trace_has_measured(ranks) -> None:
    for traced, other, seconds in ranks(2).run(measured):
        assert traced.measured == seconds > 0
        assert other.measured is None, "another plan: it does not keep what is gathered"
