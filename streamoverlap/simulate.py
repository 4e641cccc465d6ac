"""Predicted times of calls: the plans of all ranks, run by discrete events on a machine of given costs.

No GPU is needed, and any world size can be asked about. What is modelled, and what is not, is in docs/simulate.md.

Example:
    >>> from streamoverlap import plans, simulate
    >>> spec = plans.Spec("all_gather_gemm", world=8, chunks=2)
    >>> timeline = simulate.simulate(spec, 8192, 10240, 8192, costs=simulate.Costs.load("h200"))
    >>> max(timeline.seconds(rank) for rank in range(8))
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import NamedTuple

from streamoverlap import _C, plans
from streamoverlap.plans import KINDS
from streamoverlap.spec import GATHERS, SUMS_OF_PRODUCTS, PlanSpec, spec_of
from streamoverlap.timeline import Timeline

_SHIPPED = Path(__file__).with_name("costs")
_UNITS = {
    "gemm_flops": "FLOP/s",
    "sms": "multiprocessors",
    "tile_m": "rows",
    "tile_n": "columns",
    "gemm_accumulate": "factor",
    "store_efficiency": "factor",
    "link_bandwidth": "[bytes, bytes/s]",
    "copy_bandwidth": "bytes/s",
    "reduce_bandwidth": "bytes/s",
    "serial_bandwidth": "bytes/s",
}
_MOST = 1 << 28  # of a size: products of sizes and bytes must fit into 64 bits
_WHOLE = ("sms", "tile_m", "tile_n")


@dataclass(frozen=True)
class Costs:
    """What ops cost on a machine, in seconds, bytes, bytes/s and FLOP/s.

    Attributes:
        gemm_flops: of a full wave of tiles, one on each of `sms` multiprocessors, tile_m x tile_n each.
        gemm_latency: of any GEMM, besides its tiles; another GEMM may use the GPU meanwhile.
        gemm_accumulate: factor of a GEMM that reads C, 1 or more.
        link_bandwidth: of a Put alone on its links: (bytes, bytes/s), sizes rising; in between linear in the logarithm
            of the size, constant beyond the ends.
        put_latency, copy_latency: before the bytes move; copy_latency also before a Reduce or Quantise.
        copy_bandwidth: bytes copied inside a GPU.
        reduce_bandwidth: bytes read and written, of a Reduce or Quantise.
        notify, await_, record, wait: on the stream; "await" in files.
        flag_latency: from the end of a notify until a peer sees the flag.
        issue: CPU time by kind of op.
        serial_latency, serial_bandwidth: of the group's own collective, by the bytes a rank sends.
        store_efficiency: of link_bandwidth, for a GEMM that stores in a peer's slot: a factor of at most 1.
        device: what was measured.
        sources: by constant, where it comes from.

    Raises:
        ValueError: a constant that cannot be; the message names it.
    """

    gemm_flops: float
    sms: int
    tile_m: int
    tile_n: int
    gemm_latency: float
    gemm_accumulate: float
    link_bandwidth: tuple[tuple[float, float], ...]
    put_latency: float
    copy_bandwidth: float
    copy_latency: float
    reduce_bandwidth: float
    notify: float
    await_: float
    record: float
    wait: float
    flag_latency: float
    issue: dict[str, float]
    serial_latency: float
    serial_bandwidth: float
    store_efficiency: float = 0.8  # files of older versions have none
    device: str = ""
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.compiled()
        for name, value in (("serial_bandwidth", self.serial_bandwidth), ("serial_latency", self.serial_latency)):
            if not _is_number(value) or value < 0 or (value == 0 and name == "serial_bandwidth"):
                raise ValueError(f"{name} is {value!r}; expected a number above 0 (serial_latency: or 0)")

    def compiled(self) -> _C.Costs:
        """As the simulator takes it."""
        costs = _C.Costs()
        for name in _names():
            if name.startswith("serial_"):
                continue
            value = getattr(self, name)
            if name == "issue":
                if not isinstance(value, dict) or set(value) != set(KINDS):
                    raise ValueError(f"issue is {value!r}; expected seconds of each of {', '.join(KINDS)}")
                value = [value[kind] for kind in KINDS]
            try:
                setattr(costs, name, value)
            except TypeError as error:
                unit = _UNITS.get(name, "seconds")
                expected = "an integer" if name in _WHOLE else unit if unit.startswith("[") else f"a number, in {unit}"
                raise ValueError(f"{name} is {value!r}; expected {expected}") from error
        costs.validate()
        return costs

    @classmethod
    def load(cls, source: str | Path = "h200") -> Costs:
        """From a file, or by the name of a device whose constants are shipped ("h200").

        Raises:
            ValueError: no such file or device, or not what `save` writes.
        """
        path = Path(source)
        shipped = _SHIPPED / f"{source}.json"
        if not path.is_file() and shipped.is_file():
            path = shipped
        if not path.is_file():
            names = ", ".join(sorted(file.stem for file in _SHIPPED.glob("*.json")))
            raise ValueError(f"{source} is neither a file nor a device with shipped constants ({names})")
        try:
            document = json.loads(path.read_text())
            constants = {
                "store_efficiency": {"value": cls.store_efficiency, "source": "assumed"},
                **document["constants"],
            }
            values = {name: constants[_in_file(name)]["value"] for name in _names()}
            values["issue"] = {"quantise": values["issue"]["reduce"], **values["issue"]}
            sources = {name: constants[_in_file(name)]["source"] for name in _names()}
            values["link_bandwidth"] = tuple((size, rate) for size, rate in values["link_bandwidth"])
            for name, text in {"device": document["device"], **sources}.items():
                if not isinstance(text, str):
                    raise ValueError(f"{name if name == 'device' else f'source of {name}'} is {text!r}; expected text")
            return cls(**values, device=document["device"], sources=sources)
        except KeyError as error:
            raise ValueError(f"{path} lacks {error}; expected what Costs.save writes") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is no file of costs: {error}") from error

    def as_json(self) -> dict:
        """All constants with unit and source."""
        constants = {
            _in_file(name): {
                "value": getattr(self, name),
                "unit": _UNITS.get(name, "s"),
                "source": self.sources.get(name, "given"),
            }
            for name in _names()
        }
        return {"device": self.device, "constants": constants}

    def save(self, path: str | Path) -> None:
        """Writes what `load` reads."""
        Path(path).write_text(json.dumps(self.as_json(), indent=1) + "\n")


def _names() -> list[str]:
    return [each.name for each in fields(Costs) if each.name not in ("device", "sources")]


def _in_file(name: str) -> str:
    return name.rstrip("_")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


class Local(NamedTuple):
    """One rank's problem: what is left of M, N and K after sharding."""

    rows: int  # of its GEMMs together; M
    shard_rows: int
    n: int
    k: int
    row: int  # elements of a row that is exchanged


def local_problem(operation: str, world: int, m: int, n: int, k: int, as_tp: int | None = None) -> Local:
    """Shards M, N, K as benchmarks/overlap.py does.

    all_gather_gemm gathers x [M, K] and shards N; gemm_reduce_scatter and gemm_all_reduce shard K and sum [M, N]. The
    plain collectives exchange what those do: all_gather rows of K elements, reduce_scatter and all_reduce rows of N.

    Args:
        m, n, k: sizes before sharding.
        as_tp: N or K is split by this instead of `world`, for the GEMM of a larger group on fewer ranks.

    Raises:
        ValueError: a size that cannot be split; the message names it.
    """
    if operation not in plans.OPERATIONS:
        raise ValueError(f"operation is {operation!r}; expected one of {', '.join(plans.OPERATIONS)}")
    split = world if as_tp is None else as_tp
    for name, value in (("world", world), ("M", m), ("N", n), ("K", k), ("as_tp", split)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
            raise ValueError(f"{name} is {value!r}; expected an integer from 1 to {_MOST}")
    gathers = operation in GATHERS
    if "all_reduce" not in operation and m % world:
        raise ValueError(f"M is {m}; expected a multiple of the group's {world} ranks")
    if "gemm" in operation:
        name, value = ("N", n) if gathers else ("K", k)
        if value % split:
            raise ValueError(f"{name} is {value}; expected a multiple of {split}, by which it is sharded")
    shard_rows = -(-m // world)
    if gathers:
        return Local(m, shard_rows, n // split, k, k)
    return Local(m, shard_rows, n, k // split, n)


def simulate(
    spec: plans.Spec | Sequence[plans.Plan],
    m: int,
    n: int,
    k: int,
    *,
    costs: Costs,
    dtype_bytes: int = 2,
    graph: bool = False,
    as_tp: int | None = None,
) -> Timeline:
    """One call on idle ranks that all begin at 0.

    Args:
        spec: whose plans, pruned, are run; or the plans of all ranks themselves.
        m, n, k, as_tp: sizes before sharding; see `local_problem`.
        costs: of the machine; gemm_flops must be that of the dtype.
        dtype_bytes: of an element that is exchanged.
        graph: replayed from a CUDA graph, so that no op waits until the CPU has issued it.

    Raises:
        ValueError: naming the argument; or the plans hang, and the message says where.
    """
    if isinstance(dtype_bytes, bool) or not isinstance(dtype_bytes, int) or not 1 <= dtype_bytes <= 16:
        raise ValueError(f"dtype_bytes is {dtype_bytes!r}; expected an integer from 1 to 16")
    if isinstance(spec, plans.Spec):
        ranks = _C.prune_implied(_C.build_all(spec))
    else:
        ranks = list(spec)
        if not ranks:
            raise ValueError("spec is an empty list of plans; expected the plan of every rank")
        spec = ranks[0].spec
    local = local_problem(spec.operation, spec.world, m, n, k, as_tp)
    missing = spec.world * local.shard_rows - local.rows
    times = _C.simulate(
        ranks, costs.compiled(), local.shard_rows, missing, local.n, local.k, local.row, dtype_bytes, graph
    )
    issued = "in a CUDA graph" if graph else "issued by the CPU"
    title = f"{spec}, M={m} N={n} K={k}, {issued}, simulated on {costs.device or 'given costs'}"
    return Timeline(tuple(ranks), tuple(tuple(rank) for rank in times), title)


def predicted_seconds(timeline: Timeline) -> float:
    """From the begin of the call until the last rank has done."""
    return max((end for rank in timeline.times for _, end in rank), default=0.0)


def gemm_seconds(
    operation: str, world: int, m: int, n: int, k: int, *, costs: Costs, as_tp: int | None = None
) -> float:
    """One rank's whole product alone on its GPU: what perfect overlap takes. 0 for the plain collectives."""
    local = local_problem(operation, world, m, n, k, as_tp)
    return costs.compiled().gemm_seconds(local.rows, local.n, local.k) if "gemm" in operation else 0.0


def serial_seconds(
    operation: str,
    world: int,
    m: int,
    n: int,
    k: int,
    *,
    costs: Costs,
    dtype_bytes: int = 2,
    graph: bool = False,
    as_tp: int | None = None,
) -> float:
    """The group's own collective and the GEMM, one after the other; a ring, so W-1 shards over each link."""
    local = local_problem(operation, world, m, n, k, as_tp)
    sent = (world - 1) * local.shard_rows * local.row * dtype_bytes * (2 if "all_reduce" in operation else 1)
    exchange = costs.serial_latency + sent / costs.serial_bandwidth if world > 1 else 0.0
    issue = costs.issue["gemm"] if "gemm" in operation and not graph else 0.0
    return exchange + issue + gemm_seconds(operation, world, m, n, k, costs=costs, as_tp=as_tp)


def candidates(operation: str, quantised: bool = False) -> list[PlanSpec]:
    """Plans worth trying: direct and ring, 1 to 8 chunks, 1 and 2 compute streams, both ways to sum.

    And those few of the other options that were seen to win by more than 1 % over benchmarks/shapes.json on 2, 4 and 8
    ranks.

    `quantised`: of partials that travel as float8, which a ring sums in a Reduce.
    """
    algorithms = ("direct", "ring")
    streams = (1,) if operation == "all_gather" else (1, 2)
    sums = operation in SUMS_OF_PRODUCTS
    reductions = ("accumulate", "sum") if sums else ("accumulate",)
    found = [PlanSpec(*each) for each in product(algorithms, (1, 2, 4, 8), streams, reductions)]
    if "gemm" not in operation:
        return found
    tapers = ((3, "both"), (3, "first"), (3, "last"), (2, "first" if sums else "last"))
    for algorithm, (chunks, taper), reduce in product(algorithms, tapers, reductions):
        found.append(PlanSpec(algorithm, chunks, 2, reduce, taper=taper))
    if quantised:
        return [plan for plan in found if (plan.algorithm, plan.reduce) != ("ring", "accumulate") or not sums]
    if sums:
        found += [PlanSpec("direct", *each, transfer="store") for each in product((1, 2), (2,), reductions)]
    return found


def best(
    operation: str,
    world: int,
    m: int,
    n: int,
    k: int,
    *,
    costs: Costs,
    dtype_bytes: int = 2,
    graph: bool = False,
    as_tp: int | None = None,
    quantised: bool = False,
) -> list[tuple[PlanSpec, float]]:
    """All `candidates` and ``serial`` with their predicted seconds, the fastest first; arguments as of `simulate`."""
    options = {"costs": costs, "dtype_bytes": dtype_bytes, "graph": graph, "as_tp": as_tp}
    ranking = [(PlanSpec("serial"), serial_seconds(operation, world, m, n, k, **options))]
    for plan in candidates(operation, quantised):
        timeline = simulate(spec_of(operation, plan, world, quantised=quantised), m, n, k, **options)
        ranking.append((plan, predicted_seconds(timeline)))
    return sorted(ranking, key=lambda each: each[1])
