"""On GPUs: calls captured in CUDA graphs, replayed many times, mixed with eager calls."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice

import pytest
import torch
from gpu_ranks import InFlight, communicator, hold_back, hold_back_in_turn, new_group, verify
from references import Case

import streamoverlap as so
from streamoverlap.plans import OPERATIONS

pytestmark = pytest.mark.gpu(1)

PLAN = so.PlanSpec("direct", chunks=2, compute_streams=2)
RING = so.PlanSpec("ring", chunks=3, reduce="sum")
EAGER = [
    Case(operation, plan, lead=(10,), k=6, n=(7,), bias=True, seed=seed)
    for seed, (operation, plan) in enumerate((op, plan) for op in OPERATIONS for plan in (PLAN, RING, None))
]


def integers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Block:
    """Two column-parallel products, one row-parallel, and work around them, on tensors whose data changes in place."""

    def __init__(self, rank: int, world: int, group, rows: int, plan: so.PlanSpec) -> None:
        self.rank, self.world, self.group, self.plan = rank, world, group, plan
        self.xs = [[integers(100 * i + r, rows, 16) for r in range(world)] for i in range(5)]
        self.up = [integers(1000 + r, 24, 16) for r in range(world)]
        self.gate = [integers(2000 + r, 24, 16) for r in range(world)]
        self.down = [integers(3000 + r, 16, 24) for r in range(world)]
        self.x = torch.zeros(rows, 16, device="cuda")
        self.weights = [self.gate[rank].cuda(), self.up[rank].cuda()]
        self.down_weight = self.down[rank].cuda().t().contiguous().t()
        self.data = [xs[rank].cuda() for xs in self.xs]
        self.wanted = [self._expected(xs) for xs in self.xs]
        torch.relu(2 * self.x) + self.x + 1  # loads what is not this package's before a capture

    def _expected(self, xs: list[torch.Tensor]) -> torch.Tensor:
        gathered = 2 * torch.cat(xs).double()
        total = sum(
            (torch.relu(gathered @ gate.double().t()) + gathered @ up.double().t()) @ down.double().t()
            for gate, up, down in zip(self.gate, self.up, self.down, strict=True)
        )
        assert total.abs().max() < 2**24
        return total.chunk(self.world)[self.rank] + 1

    def load(self, number: int) -> None:
        self.x.copy_(self.data[number % len(self.data)])

    def prepare(self) -> None:
        so.prepare(so.all_gather_gemm, self.x, self.weights, self.group, plan=self.plan)
        hidden = self.x.new_zeros(len(self.x) * self.world, 24)
        so.prepare(so.gemm_reduce_scatter, hidden, self.down_weight, self.group, plan=self.plan)

    def run(self) -> torch.Tensor:
        gate, up = so.all_gather_gemm(2 * self.x, self.weights, self.group, plan=self.plan)
        return so.gemm_reduce_scatter(torch.relu(gate) + up, self.down_weight, self.group, plan=self.plan) + 1

    def capture(self) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = self.run()
        return graph, result

    def check(self, number: int, result: torch.Tensor) -> None:
        assert torch.equal(result.double().cpu(), self.wanted[number % len(self.data)]), number


def replay_among_eager_calls(rank: int, world: int, group, plan: so.PlanSpec, replays: int) -> None:
    comm = communicator(group)
    block = Block(rank, world, group, 20, plan)
    eager = InFlight(rank, world)
    eager.ready(*EAGER)
    eager_cases = cycle(EAGER)
    for case in EAGER:
        eager.make(case, group)
    block.prepare()
    graph, result = block.capture()
    side = torch.cuda.Stream()
    kept = []
    for number in range(replays):
        block.load(number)
        if number % 4 == 0:
            hold_back_in_turn(comm, rank, world, number // 4, 0.5)
        graph.replay()
        kept.append((number, result.clone()))
        if number % 3 == 0:
            eager.make(next(eager_cases), group)
        if number % 5 == 0:
            with torch.cuda.stream(side):
                eager.make(next(eager_cases), group)
        if number % 7 == 0:
            kept.append((number, block.run()))
        if number % 50 == 49:
            eager.settle()
            for one in kept:
                block.check(*one)
            kept.clear()
    assert not kept and comm.errored() is None


@pytest.mark.parametrize(("world", "replays"), [(2, 1000), (3, 200), (4, 100)])
@pytest.mark.parametrize("plan", [PLAN, RING], ids=lambda plan: plan.algorithm)
def test_replays_mixed_with_eager_calls(ranks, world: int, replays: int, plan: so.PlanSpec) -> None:
    ranks(world).run(replay_among_eager_calls, plan, replays, timeout=100)


def parallel_branches(rank: int, world: int, group, replays: int) -> None:
    """Three branches of one graph, each with calls and other work, beside eager calls on another stream."""
    comm = communicator(group)
    blocks = [Block(rank, world, group, rows, plan) for rows, plan in ((12, PLAN), (7, RING))]
    x = torch.zeros(5, 8, device="cuda")
    for block in blocks:
        block.prepare()
    so.prepare(so.all_gather, x, group, plan=PLAN)
    (blocks[0].x @ blocks[0].x.t()).sum().clone()
    graph, main = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    branches = [torch.cuda.Stream() for _ in blocks]
    with torch.cuda.graph(graph, stream=main):
        results = []
        for block, branch in zip(blocks, branches, strict=True):
            branch.wait_stream(main)
            with torch.cuda.stream(branch):
                results.append(block.run())
        gathered = so.all_gather(x, group, plan=PLAN).clone()
        product = blocks[0].x @ blocks[0].x.t()
        for branch in branches:
            main.wait_stream(branch)
        summed = results[0].sum() + results[1].sum()
    eager, side = InFlight(rank, world), torch.cuda.Stream()
    eager.ready(*EAGER)
    for number, case in zip(range(replays), cycle(EAGER), strict=False):
        for block in blocks:
            block.load(number)
        x.fill_(number + rank)
        hold_back_in_turn(comm, rank, world, number, 0.5)
        graph.replay()
        with torch.cuda.stream(side):
            eager.make(case, group)
        for block, result in zip(blocks, results, strict=True):
            block.check(number, result)
        assert torch.equal(gathered, torch.cat([torch.full_like(x, number + r) for r in range(world)]))
        assert torch.equal(product, blocks[0].x @ blocks[0].x.t())
        assert summed == sum(block.wanted[number % 5].sum() for block in blocks)
    assert len(eager.settle()) == replays


@pytest.mark.parametrize(("world", "replays"), [(2, 200), (3, 50)])
def test_several_calls_in_parallel_branches(ranks, world: int, replays: int) -> None:
    ranks(world).run(parallel_branches, replays, timeout=100)


def several_graphs(rank: int, world: int, group) -> None:
    """The second graph needs larger slots than the first, which keeps its own."""
    with new_group(world) as own:
        communicator(own)
        small, large = Block(rank, world, own, 9, PLAN), Block(rank, world, own, 30_000, RING)
        replayed = []
        for block in (small, large):
            block.prepare()
            replayed.append((block, *block.capture()))
            for number, (each, graph, result) in islice(enumerate(cycle(replayed)), 12):
                each.load(number)
                graph.replay()
                each.check(number, result)
                verify(replace(EAGER[number], seed=number), rank, world, own)


def test_graphs_captured_before_slots_grew_stay_right(ranks) -> None:
    ranks(2).run(several_graphs)


def replays_in_a_row(rank: int, world: int, group) -> None:
    """Nothing but replays, as fast as they go; one rank's stream is held back now and then."""
    communicator(group)
    block = Block(rank, world, group, 20, PLAN)
    block.prepare()
    graph, result = block.capture()
    for number in range(20):
        block.load(number)
        for i in range(50):
            if i == number and number % world == rank:
                hold_back(torch.cuda.current_stream(), 2.0)
            graph.replay()
        block.check(number, result)


def test_a_thousand_replays_in_a_row(ranks) -> None:
    ranks(2).run(replays_in_a_row)


def layers(rank: int, world: int, group) -> None:
    """Three layers captured as one graph: equal to the eager run bit by bit, and to one process."""
    communicator(group)
    rows, k, hidden, depth = 12, 16, 8, 3
    up = [[integers(10 * i + r, hidden, k, dtype=torch.float64) for r in range(world)] for i in range(depth)]
    down = [[integers(500 + 10 * i + r, k, hidden, dtype=torch.float64) for r in range(world)] for i in range(depth)]
    own_up, own_down = ([layer[rank].cuda() for layer in each] for each in (up, down))
    x = torch.zeros(rows, k, dtype=torch.float64, device="cuda")

    def forward() -> torch.Tensor:
        y = x
        for i in range(depth):
            inner, gathered = so.all_gather_gemm(y, own_up[i], group, return_gathered=True, plan=PLAN)
            y = so.gemm_reduce_scatter(torch.relu(inner), own_down[i], group, plan=RING)
            y = y + gathered.view(world, rows, k)[rank]
        return y

    torch.relu(x) + x
    so.prepare(so.all_gather_gemm, x, own_up[0], group, return_gathered=True, plan=PLAN)
    so.prepare(so.gemm_reduce_scatter, x.new_zeros(rows * world, hidden), own_down[0], group, plan=RING)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = forward()
    for seed in range(30):
        xs = [integers(9000 + 50 * seed + r, rows, k, dtype=torch.float64) for r in range(world)]
        wanted = torch.cat(xs)
        for i in range(depth):
            inner = torch.relu(wanted @ torch.cat(up[i]).t())
            wanted = wanted + inner @ torch.cat(down[i], 1).t()
        x.copy_(xs[rank])
        graph.replay()
        assert torch.equal(result, forward())
        assert torch.equal(result.cpu(), wanted.chunk(world)[rank])


@pytest.mark.parametrize("world", [2, 3])
def test_a_forward_of_several_layers(ranks, world: int) -> None:
    ranks(world).run(layers)


COLD = "was not prepared; call streamoverlap.prepare"


def capture_unprepared(rank: int, world: int, group, rows: int) -> None:
    with new_group(world) as own:
        communicator(own)
        case = Case("all_gather_gemm", PLAN, lead=(9,), k=8)
        verify(case, rank, world, own)
        x, weight = torch.ones(rows, 8, device="cuda"), torch.ones(8, 8, device="cuda")
        wanted = torch.full((rows * world, 8), 8.0, device="cuda")
        with pytest.raises(RuntimeError, match=COLD), torch.cuda.graph(torch.cuda.CUDAGraph()):
            so.all_gather_gemm(x, weight, own, plan=PLAN)
        assert so.Communicator.of(own, "cuda").errored() is None
        assert torch.equal(so.all_gather_gemm(x, weight, own, plan=PLAN), wanted)
        verify(case, rank, world, own)
        so.prepare(so.all_gather_gemm, x, weight, own, plan=PLAN)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = so.all_gather_gemm(x, weight, own, plan=PLAN)
        graph.replay()
        assert torch.equal(result, wanted)


@pytest.mark.parametrize("rows", [10, 200_000], ids=["new-shape", "larger-slots"])
def test_a_capture_of_an_unprepared_call_is_refused_and_does_no_harm(ranks, rows: int) -> None:
    ranks(2).run(capture_unprepared, rows)


def let_go_in_capture(rank: int, world: int, group) -> None:
    """As a garbage collection may, at any moment."""
    communicator(group)
    x = torch.full((6, 8), rank + 1.0, device="cuda")
    so.prepare(so.all_gather, x, group, plan=PLAN)
    another = so.Communicator(group, device="cuda")
    another.all_gather(x, PLAN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        del another
        result = so.all_gather(x, group, plan=PLAN)
    graph.replay()
    assert torch.equal(result, torch.arange(1.0, world + 1, device="cuda").repeat_interleave(6)[:, None].expand(-1, 8))


def test_a_communicator_may_be_let_go_in_a_capture(ranks) -> None:
    ranks(2).run(let_go_in_capture)


def prepare_in_capture(rank: int, world: int, group) -> None:
    communicator(group)
    x = torch.ones(6, 8, device="cuda")
    message = "prepare was called in a capture; expected it before"
    with pytest.raises(RuntimeError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        so.prepare(so.all_gather, x, group)
    verify(EAGER[0], rank, world, group)


def test_prepare_in_a_capture_is_refused(ranks) -> None:
    ranks(2).run(prepare_in_capture)
