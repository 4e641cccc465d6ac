"""The independent interpreter: plans written out by hand, good and broken, and the mutation run on a small plan."""

import pytest

from streamoverlap import _interpreter, plans

GEMM, PUT, COPY, QUANTISE, REDUCE, NOTIFY, AWAIT, RECORD, WAIT = range(9)
MAIN, SEND, RECV, COMPUTE = range(4)
INPUT, OUTPUT, GATHERED, SLOT, SCRATCH = range(5)
FULL, EMPTY = range(2)
NO_FLAG = (FULL, -1, -1, 0)
ALL_GATHER, DIRECT, ACCUMULATE, COPIES, EVEN, AS_IT_IS = 2, 1, 0, 0, 0, False


def data(kind, stream, read, written):
    return (kind, stream, [read], [written], False, NO_FLAG, -1)


def flag(kind, stream, which, sender, receiver):
    return (kind, stream, [], [], False, (which, sender, receiver, 0), -1)


def event(kind, stream, number):
    return (kind, stream, [], [], False, NO_FLAG, number)


def good_ops(rank):
    """A direct all-gather between two ranks; every op has a name."""
    peer = 1 - rank
    return {
        "began": event(RECORD, MAIN, 0),
        "send after began": event(WAIT, SEND, 0),
        "take credit": flag(AWAIT, SEND, EMPTY, rank, peer),
        "put": data(PUT, SEND, (INPUT, rank, rank, 0), (SLOT, peer, rank, 0)),
        "notify": flag(NOTIFY, SEND, FULL, rank, peer),
        "sent": event(RECORD, SEND, 1),
        "copy own": data(COPY, SEND, (INPUT, rank, rank, 0), (OUTPUT, rank, rank, 0)),
        "recv after sent": event(WAIT, RECV, 1),
        "await": flag(AWAIT, RECV, FULL, peer, rank),
        "arrived": event(RECORD, RECV, 2),
        "send after arrived": event(WAIT, SEND, 2),
        "copy other": data(COPY, SEND, (SLOT, rank, peer, 0), (OUTPUT, rank, peer, 0)),
        "copied": event(RECORD, SEND, 3),
        "recv after copied": event(WAIT, RECV, 3),
        "return credit": flag(NOTIFY, RECV, EMPTY, peer, rank),
        "returned": event(RECORD, RECV, 4),
        "join send": event(WAIT, MAIN, 3),
        "join recv": event(WAIT, MAIN, 4),
    }


def call(change=None, ranks=(0, 1), copy_input=False):
    """One call; `change` edits the named ops of `ranks`."""
    both = []
    for rank in (0, 1):
        ops = good_ops(rank)
        if change is not None and rank in ranks:
            ops = change(ops, rank) or ops
        spec = (ALL_GATHER, DIRECT, ACCUMULATE, 2, 1, 1, False, copy_input, False, COPIES, EVEN, AS_IT_IS)
        both.append((*spec, rank, 5, list(ops.values())))
    return both


def without(*names):
    return lambda ops, rank: {name: op for name, op in ops.items() if name not in names}


def moved(name, before):
    def change(ops, rank):
        names = [n for n in ops if n != name]
        names.insert(names.index(before), name)
        return {n: ops[n] for n in names}

    return change


def replaced(name, make):
    return lambda ops, rank: {**ops, name: make(rank)}


def breaks(calls, what):
    said = _interpreter.interpret(calls)
    assert any(what in text for text in said), said


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_good_plan_passes(calls):
    assert _interpreter.interpret([call()] * calls) == []


BROKEN = {
    # A copied buffer read, or a result handed out, too early.
    "copy not joined": (without("join send", "recv after copied"), "not joined"),
    "credit not joined": (without("join recv"), "not joined"),
    # The slot is read before the data has arrived.
    "slot read early": (without("send after arrived"), "torn"),
    # The input is sent before the caller has written it.
    "input read early": (without("send after began"), "torn"),
    "flag before data": (moved("notify", "put"), "torn"),
    "shard never copied": (without("copy own"), "wrong value in output@0[0.0]"),
    "own shard twice": (
        replaced("copy other", lambda r: data(COPY, SEND, (INPUT, r, r, 0), (OUTPUT, r, 1 - r, 0))),
        "wrong value in output@0[1.0]",
    ),
    "scratch never written": (
        replaced("copy own", lambda r: data(COPY, SEND, (SCRATCH, r, r, 0), (OUTPUT, r, r, 0))),
        "unwritten read of scratch@0[0.0]",
    ),
    "no one notifies": (without("notify"), "deadlock, streams independent"),
    "data never awaited": (without("await", "send after arrived"), "flag full(0->1, 0) is set at the end"),
    "credit never taken": (without("take credit"), "flag set while it is already set"),
    "credit never returned": (without("return credit"), "flag empty(0->1) is clear at the end"),
    "await before notify in one queue": (moved("await", "put"), "deadlock, one queue a rank"),
    # Right in issue order; a graph may run the await first.
    "await not after the send": (without("recv after sent"), "deadlock, any topological order"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_plan_is_seen(name):
    change, what = BROKEN[name]
    breaks([call(change)], what)


def test_wait_issued_before_its_record_is_seen():
    breaks([call(moved("recv after copied", "copied"), ranks=(0,))], "wait on an event not yet recorded")


def test_one_broken_rank_is_enough():
    breaks([call(without("send after arrived"), ranks=(1,))], "rank 1 send")


def test_slow_reader_is_overwritten_by_the_next_call():
    early = without("recv after copied")  # the credit goes back before the slot has been read
    assert not any("overwritten" in text for text in _interpreter.interpret([call(early)]))
    breaks([call(early), call(early)], "overwritten across calls")


def test_credit_taken_before_the_call_began_breaks_the_call_before():
    early = moved("take credit", "send after began")
    assert _interpreter.interpret([call(early)]) == []
    breaks([call(early), call(early)], "deadlock")


def copying_ops(ops, rank):
    """The same all-gather with its input copied first: the own shard is sent from where it is handed out."""
    own = (OUTPUT, rank, rank, 0)
    return {
        "copy own": data(COPY, MAIN, (INPUT, rank, rank, 0), own),
        **{name: op for name, op in ops.items() if name != "copy own"},
        "put": data(PUT, SEND, own, (SLOT, 1 - rank, rank, 0)),
    }


def copying_call(change=lambda ops, rank: ops):
    return call(lambda ops, rank: change(copying_ops(ops, rank), rank), copy_input=True)


@pytest.mark.parametrize("calls", [1, 2])
def test_the_caller_may_write_an_input_that_was_copied(calls):
    assert _interpreter.interpret([copying_call()] * calls) == []


def test_input_overwritten_before_it_is_copied():
    by_send = replaced("copy own", lambda r: data(COPY, SEND, (INPUT, r, r, 0), (OUTPUT, r, r, 0)))
    breaks([copying_call(by_send)], "torn")


def test_copy_sent_before_it_is_made():
    breaks([copying_call(moved("began", "copy own"))], "torn")


def test_input_read_after_the_caller_has_overwritten_it():
    breaks([copying_call(replaced("put", lambda r: data(PUT, SEND, (INPUT, r, r, 0), (SLOT, 1 - r, r, 0))))], "torn")


def test_exchange_held_up_by_the_caller():
    """The credit goes back only once the caller has joined the copy."""

    def change(ops, rank):
        names = list(ops)
        joined = {**ops, "joined": event(RECORD, MAIN, 5), "recv after joined": event(WAIT, RECV, 5)}
        names.remove("join send")
        at = names.index("return credit")
        return {name: joined[name] for name in [*names[:at], "join send", "joined", "recv after joined", *names[at:]]}

    breaks([[(*plan[:13], 6, plan[14]) for plan in call(change)]], "the exchange is held up")


def test_says_so_where_it_cannot_decide():
    early = moved("take credit", "send after began")
    # Two calls compete for the credit, so the order of all else matters: only the full search can tell.
    (said,) = _interpreter.interpret([call(early), call(early)], max_states=3)
    assert said.startswith("undecided: nothing broke in")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda plan: plan[:9], "plan has 9 fields; expected 15"),
        (lambda plan: (7, *plan[1:]), "operation is 7; expected 0 to 5"),
        (lambda plan: (*plan[:14], [(9, *plan[14][0][1:])]), "kind is 9; expected 0 to 8"),
    ],
)
def test_bad_tuples_are_refused(spoil, message):
    with pytest.raises(ValueError, match=message):
        _interpreter.interpret([[spoil(plan) for plan in call()]])


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("pruned", [False, True])
def test_builders_pass_in_every_interleaving(world, pruned):
    for spec in plans.variants(world, chunks=(1,), compute_streams=(1, 2)):
        ranks = [plans.as_tuple(plan) for plan in plans.build_spec(spec, pruned=pruned)]
        assert _interpreter.interpret([ranks]) == [], str(spec)


@pytest.mark.parametrize(
    ("operation", "scaled"),
    [*((operation, False) for operation in plans.OPERATIONS), ("all_gather_gemm", True), ("gemm_all_reduce", True)],
)
@pytest.mark.parametrize("pruned", [False, True])
def test_checker_misses_no_mutant(operation, scaled, pruned):
    for spec in plans.variants(2, chunks=(1,), compute_streams=(1,)):
        others = spec.keep_gathered or spec.copy_input or spec.reduction != "accumulate"
        if (spec.operation, spec.scaled) != (operation, scaled) or others:
            continue
        counts = _interpreter.mutate(plans.spec_tuple(spec), prune=pruned)
        assert counts["missed"] == 0, counts["missed_texts"]
        assert counts["undecided"] == 0
        assert counts["broken"] > 100
        judged = counts["broken"] + counts["stricter"] + counts["redundant"]
        assert judged == counts["mutants"]


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_scales_that_are_late_or_of_other_rows_break_a_plan(algorithm):
    def broken(edit):
        ranks = plans.build("all_gather_gemm", world=2, chunks=2, algorithm=algorithm, scaled=True)
        ops = ranks[0].ops
        edit(ops)
        ranks[0].ops = ops
        assert plans.check(ranks) or edit is keep
        return _interpreter.interpret([[plans.as_tuple(plan) for plan in ranks]])

    def keep(ops):
        pass

    def swap(ops):  # the flag is set before the scales are there
        at = next(i for i, op in enumerate(ops) if op.kind == "put" and op.reads[0].buffer == "scales")
        ops.insert(at + 1, ops.pop(at))

    def other_rows(ops):
        gemm = next(op for op in ops if op.kind == "gemm" and op.reads[1].buffer == "slot_scales")
        at = ops.index(gemm)
        gemm.reads = [gemm.reads[0], plans.Region("scales", 0, 0, 0)]
        ops[at] = gemm

    assert broken(keep) == []
    assert broken(swap)
    assert any("wrong value in output@0" in text for text in broken(other_rows))
