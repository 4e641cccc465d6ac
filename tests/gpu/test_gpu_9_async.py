"""On GPUs: asynchronous calls, the streams they run on, and what follows them."""

from __future__ import annotations

import gc
import random
import time
from contextlib import closing
from itertools import product

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import algorithms, communicator, gpu_inputs, hold_back, meet, streams_of, wrong_in
from references import PLAIN, Case, call, expected
from test_sequences import mixed_calls

import streamoverlap as so
from streamoverlap.plans import OPERATIONS

pytestmark = pytest.mark.gpu(1)

CASES = [
    Case(operation, so.PlanSpec(algorithm, 2, 2), lead=(16,), k=8, bias=True, seed=seed)
    for seed, (operation, algorithm) in enumerate(product(OPERATIONS, ("direct", "ring")))
]


def warm_up(rank: int, world: int, group, cases: list[Case]) -> so.Communicator:
    """The first use of a call waits for those before it; later ones do not."""
    comm = communicator(group)
    for case in cases:
        call(case, gpu_inputs(case, rank, world), group)
    torch.cuda.synchronize()
    meet(group)
    return comm


def run_behind(rank: int, world: int, group) -> None:
    """The current stream is never held up, not even by the slot's last call, and any stream may wait."""
    warm_up(rank, world, group, CASES)
    given = [gpu_inputs(case, rank, world) for case in CASES]
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    if rank == world - 1:
        meet(group)  # comes late
    works = [call(case, inputs, group, async_op=True) for case, inputs in zip(CASES, given, strict=True)]
    free = torch.cuda.Event()
    free.record()
    if rank < world - 1:
        time.sleep(0.2)
        assert free.query(), "the current stream waits for the exchange"
        assert not any(work.is_completed() for work in works)
        with pytest.raises(TimeoutError):
            works[0].wait(timeout=0.05)
        meet(group)
    results = []
    for number, work in enumerate(works):
        with torch.cuda.stream(other if number % 2 else torch.cuda.current_stream()):
            results.append([result + 0 for result in work.wait()])
    torch.cuda.synchronize()
    for case, result, work in zip(CASES, results, works, strict=True):
        assert wrong_in(case, result, expected(case, rank, world)) is None
        work.synchronize(timeout=20)
        assert work.is_completed()
        assert work.exception() is None


def test_the_current_stream_waits_for_nothing_until_wait(ranks) -> None:
    ranks(2).run(run_behind)


def mixed(rank: int, world: int, group, calls: list[Case], seed: int) -> list[str]:
    """Async or not, on streams of any kind, from two user streams, dropped or waited for late; inputs are let go of."""
    communicator(group)
    draw, own = random.Random(seed), random.Random(seed * 100 + rank)
    sets = [None, so.StreamSet.from_pool(3), so.StreamSet.from_pool(3)]
    users = [torch.cuda.current_stream(), torch.cuda.Stream()]
    waiting: list[tuple[Case, so.Work]] = []
    wrong: list[str] = []

    def look(case: Case, work: so.Work) -> None:
        with torch.cuda.stream(own.choice(users)):
            results = [result.clone() for result in work.wait()]
        torch.cuda.synchronize()
        wrong.extend(filter(None, [wrong_in(case, results, expected(case, rank, world))]))

    for case in calls:
        if own.random() < 0.3:
            hold_back(own.choice(users), own.random())
        streams = own.choice(sets)
        with torch.cuda.stream(draw.choice(users)), so.use_streams(streams):
            given = gpu_inputs(case, rank, world)
            if draw.random() < 0.3:
                results = [result.clone() for result in call(case, given, group)]
                torch.cuda.synchronize()
                wrong.extend(filter(None, [wrong_in(case, results, expected(case, rank, world))]))
                continue
            work = call(case, given, group, async_op=True, timeout=20)
        del given
        torch.empty(1 << 16, device="cuda").fill_(-1)  # what was let go of may be given to this
        if own.random() < 0.7:
            waiting.append((case, work))
        if len(waiting) > 3:
            look(*waiting.pop(own.randrange(len(waiting))))
    for case, work in waiting:
        look(case, work)
    return wrong[:3]


@pytest.mark.parametrize("world", [2, 3])
def test_mixed_asynchronous_calls_are_exact(ranks, world: int) -> None:
    calls = mixed_calls(200, seed=90 + world, algorithms=algorithms(world))
    assert ranks(world).run(mixed, calls, world, timeout=150) == [[]] * world


def follow(rank: int, world: int, group) -> None:
    comm = warm_up(rank, world, group, CASES)
    recv = streams_of(comm)["recv"]
    own = so.StreamSet.from_pool(2)
    for streams, case in product((None, own), CASES):
        given = gpu_inputs(case, rank, world)
        call(case, given, group, streams=streams)
        hold_back(recv if streams is None else torch.cuda.ExternalStream(own.recv_handle), 20)
        seen: list[int] = []

        def plus_one(results: list[torch.Tensor], seen: list[int] = seen) -> list[torch.Tensor]:
            seen.append(torch.cuda.current_stream().cuda_stream)
            return [result + 1 for result in results]

        work = call(case, given, group, async_op=True, streams=streams)
        followed = work.then(plus_one).then(lambda results: [result - 1 for result in results])
        assert seen == [recv.cuda_stream if streams is None else own.recv_handle]
        assert not followed.is_completed(), "it ran before the op that it follows"
        future = work.get_future().then(lambda done: [result * 1 for result in done.value()])
        results, doubles = followed.wait(), future.wait()
        torch.cuda.synchronize()
        assert wrong_in(case, results, expected(case, rank, world)) is None
        assert wrong_in(case, doubles, expected(case, rank, world)) is None
        failed = work.then(lambda _: 1 / 0)
        assert isinstance(failed.exception(), ZeroDivisionError)
        with pytest.raises(ZeroDivisionError):
            failed.then(lambda _: None).wait()


def test_then_launches_on_the_stream_of_the_op(ranks) -> None:
    ranks(2).run(follow)


def own_streams(rank: int, world: int, group) -> None:
    comm = warm_up(rank, world, group, CASES)
    private = list(streams_of(comm).values())[1:]
    send, recv, *compute = (torch.cuda.Stream() for _ in range(4))
    own = so.StreamSet(send=send, recv=recv.cuda_stream, compute=compute)
    call(CASES[0], gpu_inputs(CASES[0], rank, world), group, streams=own)
    torch.cuda.synchronize()
    for stream in private:
        hold_back(stream, 2000)
    ends = [stream.record_event() for stream in private]
    for case in CASES:
        results = call(case, gpu_inputs(case, rank, world), group, streams=own, async_op=True).wait(timeout=20)
        assert wrong_in(case, results, expected(case, rank, world)) is None
    assert not any(end.query() for end in ends), "the private streams were in the way"
    small = so.StreamSet.from_pool(1)
    with pytest.raises(ValueError, match="streams has 1 compute streams, the plan needs 2"):
        call(CASES[0], gpu_inputs(CASES[0], rank, world), group, streams=small)
    torch.cuda.synchronize()


def test_calls_run_on_the_streams_they_are_given(ranks) -> None:
    ranks(2).run(own_streams)


def in_a_graph(rank: int, world: int, group) -> None:
    case = CASES[0]
    given = gpu_inputs(case, rank, world)
    bias = given.biases[0]
    communicator(group)
    so.prepare(so.all_gather_gemm, given.x, given.weights[0], group, bias=bias, plan=case.plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        works = [
            so.all_gather_gemm(given.x, given.weights[0], group, bias=bias, plan=case.plan, async_op=True)
            for _ in range(3)
        ]
        followed = works[1].then(lambda y: y + 1)
        outputs = [works[0].wait(), followed.wait() - 1, works[2].wait()]
    for _ in range(20):
        graph.replay()
        eager = call(case, given, group, async_op=True)
        torch.cuda.synchronize()
        for output in (*outputs, *eager.wait()):
            assert wrong_in(case, [output], expected(case, rank, world)) is None
    with pytest.raises(RuntimeError, match="captured"):
        works[0].is_completed()
    with pytest.raises(RuntimeError, match="captured"):
        works[0].wait()


def test_asynchronous_calls_are_captured(ranks) -> None:
    ranks(2).run(in_a_graph)


def copied_in_a_graph(rank: int, world: int, group) -> None:
    """Each replay sums what x holds when it starts, and then counts x up beside the exchange."""
    communicator(group)
    for plan in (so.PlanSpec("direct", 2), so.PlanSpec("ring")):
        x = torch.full((33, 16), float(rank), device="cuda")
        so.prepare(so.all_reduce, x, group, plan=plan, copy_input=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work = so.all_reduce(x, group, plan=plan, copy_input=True, async_op=True)
            x.add_(1)
            total = work.wait()
        for number in range(20):
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(total.cpu(), torch.full((33, 16), sum(range(world)) + world * number))


def test_a_captured_all_reduce_copies_its_input(ranks) -> None:
    ranks(2).run(copied_in_a_graph)


def abort(rank: int, world: int, group) -> str:
    with closing(so.Communicator(group, timeout=30, device="cuda")) as comm:
        x = torch.ones(4, 4, device="cuda")
        done = comm.all_gather(x, None, async_op=True)
        done.synchronize()
        meet(group)
        if rank:
            time.sleep(0.3)
            comm.abort("the operator said so")
            return str(comm.errored())
        work = comm.all_gather(x, None, async_op=True)
        followed = work.then(lambda y: y + 1)
        for wait in (work.synchronize, work.wait, followed.wait, followed.synchronize):
            with pytest.raises(so.CommunicatorError, match="the operator said so") as caught:
                wait()
        assert "missing or taken" in caught.value.report
        assert torch.equal(done.wait(), torch.ones(4 * world, 4, device="cuda"))
        return str(caught.value)


def test_abort_withholds_results(ranks) -> None:
    assert all("rank 1" in message for message in ranks(2).run(abort))


def outlive(rank: int, world: int, group) -> None:
    """Tensors that `then` has used on a communicator's own stream are freed after the communicator."""
    kept = []
    for number in range(3):
        with closing(so.Communicator(group, timeout=30, device="cuda")) as comm:
            x = torch.full((4, 4), float(number), device="cuda")
            kept.append(comm.all_gather(x, None, async_op=True).then(lambda y: y + 1).wait())
            torch.cuda.synchronize()
    assert [int(y[0, 0]) for y in kept] == [1, 2, 3]
    del kept, x
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def test_tensors_may_outlive_the_streams_that_used_them(ranks) -> None:
    ranks(2).run(outlive)


def many(rank: int, world: int, group, count: int) -> tuple[int, int]:
    communicator(group)
    x = torch.full((1,), float(rank), device="cuda")
    held = []
    for number in range(count):
        if number in (count // 10, count - 1):
            torch.cuda.synchronize()
            gc.collect()
            held.append(torch.cuda.memory_allocated())
        work = so.all_gather(x, group, async_op=True)
        if number % 1000 == 0:
            assert torch.equal(work.wait(), torch.arange(float(world), device="cuda"))
    return tuple(held)


def test_5_000_dropped_works_leave_memory_flat(ranks) -> None:
    for before, after in ranks(2).run(many, 5_000, timeout=120):
        assert after - before < 1 << 20


def behind_a_product(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """What an exchange and an independent product make side by side; how fast: benchmarks/async_overlap.py."""
    communicator(group)
    a = torch.eye(2048, device="cuda").mul_(3)
    given = [Case(operation, so.PlanSpec(algorithm, 2), lead=(512,), k=64) for operation, algorithm in EXCHANGES]
    for case in given:
        call(case, gpu_inputs(case, rank, world), group)
        x = gpu_inputs(case, rank, world)
        work = call(case, x, group, async_op=True)
        square = a @ a
        results = work.wait()
        torch.cuda.synchronize()
        assert wrong_in(case, results, expected(case, rank, world)) is None
        assert torch.equal(square, 3 * a)


EXCHANGES = tuple(product(PLAIN, ("direct", "ring")))


def test_an_exchange_beside_a_product(ranks) -> None:
    ranks(2).run(behind_a_product)


def copied_at_once(rank: int, world: int, group: dist.ProcessGroup) -> None:
    """The input is overwritten while the last rank is late, with as many calls under way as there are slots."""
    cases = [
        Case(operation, so.PlanSpec(algorithm, 2), lead=(64,), copy_input=True) for operation, algorithm in EXCHANGES
    ]
    warm_up(rank, world, group, cases)
    for case in cases:
        given = [gpu_inputs(case, rank, world) for _ in range(2)]
        torch.cuda.synchronize()
        if rank == world - 1:
            meet(group)  # comes late
        works = [call(case, each, group, async_op=True) for each in given]  # and overwrites its x
        free = torch.cuda.Event()
        free.record()
        if rank < world - 1:
            time.sleep(0.2)
            assert free.query(), "the current stream waits for the exchange, or for that before it"
            assert not any(work.is_completed() for work in works)
            meet(group)
        for work in works:
            results = work.wait()
            torch.cuda.synchronize()
            assert wrong_in(case, results, expected(case, rank, world)) is None


def test_a_copied_input_may_be_written_at_once(ranks) -> None:
    ranks(2).run(copied_at_once)
