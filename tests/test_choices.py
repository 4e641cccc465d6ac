"""Which plan runs where none is given: what the simulator picks, how ranks agree on it, and `streamoverlap.explain`."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from ranks import Pools

import streamoverlap as so
from streamoverlap import chooser, simulate
from streamoverlap.chooser import Agreement, Chooser, Shape
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


def test_a_plan_that_stores_is_tried_but_not_chosen_unmeasured() -> None:
    few = shape("gemm_all_reduce", 8, m=64)
    assert chooser.ranked(few, stores=True)[0][1].transfer == "store"
    assert {plan.transfer for _, plan in chooser.ranked(few)} == {"copy"} == {chooser.fastest(few).plan.transfer}


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
    """Stands for the group; `answer` for what rank 0 has chosen, None for this rank's own choice."""

    def __init__(self, answer: int | None = None, alike: bool = True) -> None:
        self.answer, self.alike = answer, alike
        self.calls: list[tuple[int, Agreement]] = []

    def __call__(self, number: int, agreement: Agreement, timeout: float) -> tuple[int, bool]:
        self.calls.append((number, agreement))
        return (agreement.choice if self.answer is None else self.answer), self.alike


TUNED = so.PlanSpec("ring", 4)


def chooser_of(world: int, agreed: Agreed, table: bool = False, tunes: bool = False, simulates: bool = True) -> Chooser:
    found = chooser.measured(1e-4, None, TUNED)
    return Chooser(world, agreed, lambda *_: found if table else None, lambda _: found, lambda: tunes, simulates)


def asked_for(rows: int, n: int = 512, column_major: bool = False) -> Asked:
    x, weight = torch.empty(rows, 256, dtype=torch.bfloat16), torch.empty(n, 256, dtype=torch.bfloat16)
    if column_major:
        weight = torch.empty(256, n, dtype=torch.bfloat16).t()
    return Asked("all_gather_gemm", x, [weight], [None], lambda: (0, ""))


def test_rank_0_is_asked_once_for_calls_that_are_alike() -> None:
    agreed = Agreed()
    made = chooser_of(2, agreed)
    first = made.choose(asked_for(1000))
    assert made.choose(asked_for(1000)) == first and len(agreed.calls) == 1
    made.choose(asked_for(1001))  # of the same bucket
    made.choose(asked_for(1000, n=640))  # a weight of another size
    made.choose(asked_for(1000, column_major=True))
    made.choose(asked_for(2000))
    numbers, agreements = zip(*agreed.calls, strict=True)
    assert numbers == (1, 3, 4, 5, 6), "calls are numbered, asked or not"
    assert [each.shared == agreements[0].shared for each in agreements] == [True, True, True, True, False]
    assert [each.own == agreements[0].own for each in agreements] == [True, True, False, False, False]


def test_layers_that_share_an_input_have_plans_of_their_own() -> None:
    """The attention and the MLP of a block gather the same x for weights of very different sizes."""
    made = chooser_of(8, Agreed())
    for n in (10240, 57344):
        x, weight = (
            torch.empty(1024, 8192, dtype=torch.bfloat16, device="meta"),
            torch.empty(n // 8, 8192, device="meta"),
        )
        choice = made.choose(Asked("all_gather_gemm", x, [weight], [None], lambda: (0, "")))
        asked = Shape("all_gather_gemm", 8, 8192, n, 8192, torch.bfloat16)
        assert choice.predicted == min(seconds for seconds, _ in chooser.ranked(asked))


def test_rank_0_says_at_every_call_what_it_runs() -> None:
    agreed = Agreed()
    made = chooser_of(2, agreed)
    made.publish()
    for rows in (1000, 1000, 2000, 1000):
        made.choose(asked_for(rows))
    numbers, agreements = zip(*agreed.calls, strict=True)
    assert numbers == (1, 2, 3, 4) and agreements[0] == agreements[1] == agreements[3] != agreements[2]


def test_where_rank_0_has_another_weight_it_is_asked_every_time() -> None:
    agreed = Agreed(alike=False)
    made = chooser_of(2, agreed)
    for _ in range(3):
        made.choose(asked_for(1000))
    assert [number for number, _ in agreed.calls] == [1, 2, 3]


def test_what_rank_0_has_chosen_is_taken() -> None:
    other = so.PlanSpec("ring", 8)
    choice = chooser_of(2, Agreed(chooser._code(other))).choose(asked_for(1000))
    assert choice.plan == other and "rank 0" in choice.reason
    untold = Agreed()
    assert chooser_of(2, untold).own(asked_for(1000)).predicted > 0 and not untold.calls
    alone = Agreed()
    assert chooser_of(1, alone).choose(asked_for(1000)).predicted > 0 and not alone.calls


def test_what_was_measured_comes_before_what_is_predicted() -> None:
    choice = chooser_of(2, Agreed(), table=True).choose(asked_for(1000))
    assert choice.plan == TUNED and choice.measured == 1e-4 and choice.reason.startswith("measured: 100.0 us")
    assert chooser_of(2, Agreed(), simulates=False).choose(asked_for(1000)) == DEFAULT
    assert chooser_of(2, Agreed(), tunes=True, simulates=False).choose(asked_for(1000)).plan == TUNED
    also = chooser_of(2, Agreed(chooser._TUNE))  # rank 0 wants it measured
    assert also.choose(asked_for(1000)).plan == TUNED
    later = chooser_of(2, Agreed())
    later.choose(asked_for(1000))
    later.found(later.bucket(asked_for(1000), graph=False), chooser.measured(1e-4, 2e-4, TUNED))
    assert later.choose(asked_for(1000)).reason == "measured: 100.0 us; serial 200.0 us"
    assert later.choose(asked_for(3000)).plan != TUNED


@pytest.mark.parametrize(("rows", "n"), [(0, 512), (1000, 0)])
def test_a_rank_without_data_takes_part(rows: int, n: int) -> None:
    agreed = Agreed()
    assert chooser_of(2, agreed, tunes=True).choose(asked_for(rows, n)) == DEFAULT and len(agreed.calls) == 1
    other = Agreed(chooser._code(TUNED))
    assert chooser_of(2, other).choose(asked_for(rows, n)).plan == TUNED


def test_arguments_are_validated_before_anything_is_simulated() -> None:
    def refuse() -> None:
        raise ValueError("x is wrong")

    wrong = Asked("all_gather_gemm", torch.empty(3, 4), [torch.empty(3, 4)], [None], refuse)
    agreed = Agreed()
    with pytest.raises(ValueError, match="x is wrong"):
        chooser_of(2, agreed).choose(wrong)
    assert not agreed.calls


def agree(rank: int, world: int, group) -> list[tuple[int, bool]]:
    comm = so.Communicator.of(group, "cpu")
    impl, found = comm._open(), []
    for number in range(1, 9):
        if rank == number % world:
            time.sleep(0.02)  # each is late in turn
        own = 5 if number == 3 and rank == 1 else 4
        found.append(impl.agree(number, number << 8, own, 100 * rank + number, "a call"))
        so.all_reduce(torch.ones(3), group)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_take_the_choice_of_rank_0(ranks, world: int) -> None:
    for rank, found in enumerate(ranks(world).run(agree)):
        assert [choice for choice, _ in found] == list(range(1, 9))
        assert [alike for _, alike in found] == [not (rank == 1 and number == 3) for number in range(1, 9)]


def run_ahead(rank: int, world: int, group) -> list[int]:
    """Rank 0 is many choices ahead, and the table goes round."""
    impl = so.Communicator(group)._open()
    found = []
    for block in range(3):
        numbers = range(block * 4000 + 1, block * 4000 + 4001)
        if rank == 0:
            found += [impl.agree(number, 8, 4, number, "a call")[0] for number in numbers]
        dist.barrier(group)
        if rank != 0:
            found += [impl.agree(number, 8, 4, 1, "a call")[0] for number in numbers]
        dist.barrier(group)
    return found


def test_rank_0_may_be_far_ahead(ranks) -> None:
    assert ranks(2).run(run_ahead) == [list(range(1, 12001))] * 2


def same_calls_from_two_threads(rank: int, world: int, group) -> int:
    """Without a plan, each of a shape that is new; it matters not which thread is first on which rank."""
    comm = so.Communicator(group, timeout=20, tuning="table")

    def call(rows: int) -> None:
        assert (comm.all_gather(torch.ones(rows, 3), None) == 1).all()

    with ThreadPoolExecutor(max_workers=2) as pool:
        for rows in range(1, 101):
            for done in [pool.submit(call, rows) for _ in range(2)]:
                done.result()
    return comm._plans._chooser._calls


def test_threads_may_make_the_same_call(ranks) -> None:
    assert ranks(2).run(same_calls_from_two_threads) == [200, 200]


def differ(rank: int, world: int, group) -> tuple[str, float]:
    comm = so.Communicator(group, timeout=20)
    begin = time.monotonic()
    with pytest.raises(so.MismatchError) as caught:
        if rank == 0:
            comm.all_gather(torch.ones(4), None)
        else:
            comm._open().agree(1, 12, 4, 1, "all_gather_gemm of something")
    return str(caught.value), time.monotonic() - begin


def test_a_rank_whose_call_rank_0_does_not_make_is_told_at_once(ranks) -> None:
    for message, seconds in ranks(2).run(differ):
        assert "all_gather_gemm of something" in message
        assert seconds < 10, "of a timeout of 20 s"


def choose_differently(rank: int, world: int, group) -> str:
    comm = so.Communicator(group, timeout=20)
    if rank == 0:
        comm._open().agree(1, 16, 4, 1, "all_reduce of something else")
        while comm.errored() is None:
            time.sleep(0.01)
        return str(comm.errored())
    with pytest.raises(so.MismatchError) as caught:
        comm._open().agree(1, 12, 4, 1, "all_gather_gemm of something")
    return str(caught.value)


def test_a_rank_that_chooses_for_another_call_is_told_at_once(ranks) -> None:
    for message in ranks(2).run(choose_differently):
        assert "all_gather_gemm of something" in message


def call_timeout(rank: int, world: int, group) -> float:
    comm = so.Communicator(group, timeout=60)
    if rank == 0:
        while comm.errored() is None:
            time.sleep(0.01)
        return 0.0
    begin = time.monotonic()
    with pytest.raises(so.PeerTimeoutError):
        comm._open().agree(1, 12, 4, 1, "all_gather_gemm of something", 0.5)
    return time.monotonic() - begin


def test_it_obeys_the_timeout_of_its_call(ranks) -> None:
    assert 0.4 < ranks(2).run(call_timeout)[1] < 2.5


def wait_alone(rank: int, world: int, group) -> str | None:
    comm = so.Communicator(group, timeout=0.5)
    if rank == 0:
        while comm.errored() is None:
            time.sleep(0.01)
        return None
    begin = time.monotonic()
    with pytest.raises(so.PeerTimeoutError) as caught:
        comm._open().agree(1, 12, 4, 1, "all_gather_gemm of something")
    assert 0.4 < time.monotonic() - begin < 2.5
    return str(caught.value)


def test_a_rank_0_that_does_not_come_is_named(ranks) -> None:
    _, message = ranks(2).run(wait_alone)
    assert "for rank 0, which chooses the plan and has not come to this call" in message


NO_PLAN = so.PlanSpec("ring", reduce="sum", transfer="store")


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
        lambda: so.explain(so.gemm_reduce_scatter, x, weight, group, plan=NO_PLAN),
        lambda: so.gemm_reduce_scatter(x, weight, group, plan=NO_PLAN),
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
    assert wrong[3].startswith("transfer is store with algorithm ring and reduce sum; expected reduce accumulate")
    assert wrong[3] == wrong[4]
    text = str(given)
    assert "gemm_reduce_scatter" in text and "why: given" in text and "not predicted, not measured" in text


def measured(rank: int, world: int, group) -> tuple[so.Explanation, so.Explanation, float]:
    x, weight = torch.ones(64, 128), torch.ones(32, 128)
    with so.trace(group=group) as trace:
        so.all_gather_gemm(x, weight, group, return_gathered=True)
    line = trace.timelines[0]
    traced = so.explain(so.all_gather_gemm, x, weight, group, return_gathered=True)
    other = so.explain(so.all_gather_gemm, x, torch.ones(64, 128), group, return_gathered=True)
    return traced, other, max(line.seconds(rank) for rank in range(world))


def test_explain_tells_what_a_trace_has_measured(ranks) -> None:
    for traced, other, seconds in ranks(2).run(measured):
        assert traced.measured == seconds > 0
        assert other.measured is None, "another weight"


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether calls are captured: [False], to be changed."""
    captured = [False]
    monkeypatch.setattr(chooser, "is_for_graph", lambda _: captured[0])
    return captured


def test_captured_calls_have_plans_of_their_own(captures: list[bool]) -> None:
    found = {False: chooser.measured(2e-4, None, so.PlanSpec()), True: chooser.measured(1e-4, None, TUNED)}
    agreed = Agreed()
    made = Chooser(2, agreed, lambda shape, _: found.get(shape.graph), lambda _: found[True], lambda: False, True)
    plans = []
    for captures[0] in (False, True, False, True):
        plans.append(made.choose(asked_for(1000)).plan)
    assert plans == [so.PlanSpec(), TUNED] * 2
    assert len(agreed.calls) == 2 and agreed.calls[0][1].own != agreed.calls[1][1].own
    del found[True]
    assert made.choose(asked_for(2000)).plan == so.PlanSpec(), "what was measured without a graph comes next"
    del found[False]
    assert "in a graph" in made.choose(asked_for(4000)).reason


def test_predictions_for_graphs_leave_the_cpu_out() -> None:
    small = shape("all_gather_gemm", 2, m=256)
    eager, captured = (chooser.predicted(small._replace(graph=graph), so.PlanSpec(chunks=4)) for graph in (False, True))
    assert captured < eager


def test_what_is_wrong_with_a_tensor_without_sizes_is_told() -> None:
    def identity() -> tuple[int, str]:
        raise TypeError("x is a nested tensor")

    nested = torch.nested.nested_tensor([torch.ones(2, 3)])
    with pytest.raises(TypeError, match="x is a nested tensor"):
        chooser_of(2, Agreed()).choose(Asked("all_gather", nested, [], [], identity))
