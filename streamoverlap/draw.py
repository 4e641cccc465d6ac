"""A timeline as a picture: a lane for every stream of every rank, exposed communication shaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

from streamoverlap.plans import STREAMS, Fault
from streamoverlap.timeline import Timeline

PICTURES = (".png", ".svg")
_SHOWN = 4  # ranks, where none are asked for

# Okabe and Ito's colours, which colour-blind people tell apart: https://jfly.uni-koeln.de/color/
_BLUE, _GREEN, _ORANGE, _SKY, _VERMILION = "#0072B2", "#009E73", "#E69F00", "#56B4E9", "#D55E00"
_PURPLE = "#CC79A7"
_LOOKS = {
    "gemm": ("GEMM", _BLUE),
    "reduce": ("Reduce", _GREEN),
    "quantise": ("Quantise", _PURPLE),
    "put": ("Put", _ORANGE),
    "copy": ("Copy", _SKY),
    "await": ("Await, Wait", "#D9D9D9"),
    "notify": ("Notify, Record", "#333333"),
}
_LIKE = {"wait": "await", "record": "notify"}

_WIDTH = 9.0  # inches: text of 7 points can be read where a README shows the picture 900 pixels wide
_DPI = 200
_LANE, _HEAD, _GAP = 0.22, 0.30, 0.10  # inches: a lane, the line above a rank's lanes, the space below them
_TOP, _BOTTOM, _LEFT, _RIGHT = 0.54, 0.45, 0.82, 0.18
_LETTER = 0.054  # inches a letter of a label in a bar takes
_LABEL, _TEXT = 6.0, 8.0  # points
_LINE, _LETTERS = 0.17, 105  # of the title and of messages: inches a line, letters in it
_FAULTS, _FRAME = 5, 0.03  # faults shown; inches around an op of one


class _Scale(NamedTuple):
    """From seconds to what the axis shows."""

    unit: str
    per_second: float
    inches: float  # a second


def draw(
    timeline: Timeline, path: str | Path, ranks: Sequence[int] | None = None, faults: Sequence[Fault] = ()
) -> None:
    """Writes a picture of `timeline`: which op ran when on which stream.

    Time in which no compute stream of a rank multiplies or sums, exposed communication, is shaded. Thin arrows go from
    a Notify to the Await of another rank that it ends. The time axis is in microseconds or milliseconds.

    Args:
        timeline: one call.
        path: a ``.png`` or ``.svg`` file.
        ranks: those to show, from top to bottom; default the first 4.
        faults: of the timeline's plans, as `plans.check` finds them: their ops are framed and numbered, and their
            messages are below.

    Raises:
        ValueError: `path` has another suffix, `ranks` is empty, or has a rank twice or one that there is not.
        ImportError: matplotlib is not installed.
    """
    figure_class = require(path)
    world = len(timeline.plans)
    shown = list(range(min(world, _SHOWN))) if ranks is None else list(ranks)
    if not shown or len(set(shown)) < len(shown) or not all(0 <= rank < world for rank in shown):
        raise ValueError(f"ranks is {shown}; expected some of 0 to {world - 1}, each once")
    _Picture(timeline, shown, list(faults), figure_class).save(Path(path))


def require(path: str | Path):
    """Matplotlib's Figure, if a picture can be written to `path`; raises as `draw` does."""
    if Path(path).suffix not in PICTURES:
        raise ValueError(f"path is {str(path)!r}; expected a file that ends in {' or '.join(PICTURES)}")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib; install it: pip install matplotlib") from error
    return Figure


class _Picture:
    def __init__(self, timeline: Timeline, ranks: list[int], faults: list[Fault], figure_class) -> None:
        self.timeline = timeline
        self.faults = faults[:_FAULTS]
        self.messages = [
            "\n".join(wrap(f"{number}  {_told(fault)}", _LETTERS)) for number, fault in enumerate(self.faults, start=1)
        ]
        if len(faults) > _FAULTS:
            self.messages.append(f"and {len(faults) - _FAULTS} more faults")
        below = _LINE * sum(text.count("\n") + 1 for text in self.messages)
        self.lanes = {rank: _streams(timeline, rank) for rank in ranks}
        title = timeline.title
        if len(ranks) < len(timeline.plans):
            title += f" (rank {', '.join(map(str, ranks))} of {len(timeline.plans)})"
        self.title = wrap(title, _LETTERS)
        self.top = _TOP + _LINE * (max(len(self.title), 1) - 1)
        bottom = _BOTTOM + below
        height = self.top + bottom + sum(_HEAD + _LANE * len(lanes) + _GAP for lanes in self.lanes.values())
        self.figure = figure_class(figsize=(_WIDTH, height))
        width = _WIDTH - _LEFT - _RIGHT
        inner = height - self.top - bottom
        # Downwards in inches, so that a lane is as high in every picture.
        self.axes = self.figure.add_axes((_LEFT / _WIDTH, bottom / height, width / _WIDTH, inner / height))
        self.axes.set_ylim(inner, 0)
        spans = [span for rank in ranks for span in timeline.times[rank]]
        self.start = min((start for start, _ in spans), default=0.0)
        length = max((end for _, end in spans), default=0.0) - self.start or 1e-6
        unit, per_second = ("ms", 1e3) if length >= 1e-3 else ("us", 1e6)
        self.scale = _Scale(unit, per_second, width / length)
        self.axes.set_xlim(0, length * per_second)

    def save(self, path: Path) -> None:
        top, middles = 0.0, {}
        for rank, lanes in self.lanes.items():
            top += _HEAD
            self._rank(rank, top)
            for number, stream in enumerate(lanes):
                middles[rank, stream] = top + _LANE * (number + 0.5)
            top += _LANE * len(lanes) + _GAP
        for (rank, stream), middle in middles.items():
            self._lane(rank, stream, middle)
        self._arrows(middles)
        self._frames(middles)
        self._axis(middles)
        self._titles()
        self.figure.savefig(path, dpi=_DPI)

    def _at(self, seconds: float) -> float:
        return (seconds - self.start) * self.scale.per_second

    def _rank(self, rank: int, top: float) -> None:
        bottom = top + _LANE * len(self.lanes[rank])
        timeline = self.timeline
        seconds = timeline.seconds(rank) * self.scale.per_second
        self.axes.text(
            0,
            top - 0.07,
            f"rank {rank}:  {seconds:.3g} {self.scale.unit}, "
            f"{100 * timeline.exposed_fraction(rank):.0f} % exposed communication",
            fontsize=_TEXT,
            fontweight="bold",
            zorder=6,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
        for start, end in timeline.exposed(rank):
            width = (end - start) * self.scale.per_second
            self._box(self._at(start), top, width, bottom - top, facecolor=_VERMILION, alpha=0.22, zorder=0)
        self._box(0, top, self.axes.get_xlim()[1], bottom - top, fill=False, edgecolor="#BBBBBB", linewidth=0.5)

    def _lane(self, rank: int, stream: str, middle: float) -> None:
        from matplotlib.patheffects import withStroke

        for op, (start, end) in zip(self.timeline.plans[rank].ops, self.timeline.times[rank], strict=True):
            if op.stream != stream:
                continue
            kind = _LIKE.get(op.kind, op.kind)
            thin = kind in ("await", "notify")
            half = _LANE * (0.22 if thin else 0.38)
            colour = _LOOKS[kind][1]
            left, width = self._at(start), (end - start) * self.scale.per_second
            style = {"linewidth": 0.4, "edgecolor": "white" if not thin else "none"}
            if kind == "notify":  # mostly too short to be seen
                style = {"linewidth": 0.6, "edgecolor": colour}
            self._box(left, middle - half, width, 2 * half, facecolor=colour, zorder=3 if thin else 2, **style)
            text = _label(op)
            if text and (end - start) * self.scale.inches > _LETTER * (len(text) + 1):
                ink = "white" if kind in ("gemm", "reduce") else "black"
                # Its bar's colour around it, against the arrows that it lies on.
                around = [withStroke(linewidth=2, foreground=colour)]
                place = {"ha": "center", "va": "center_baseline", "zorder": 6, "clip_on": True}
                self.axes.text(left + width / 2, middle, text, color=ink, fontsize=_LABEL, path_effects=around, **place)

    def _box(self, left: float, top: float, width: float, height: float, **style) -> None:
        from matplotlib.patches import Rectangle

        self.axes.add_patch(Rectangle((left, top), width, height, **style))

    def _arrows(self, middles: dict) -> None:
        plans, times = self.timeline.plans, self.timeline.times
        for source, op, target, to in self.timeline.arrows():
            if source == target or source not in self.lanes or target not in self.lanes:
                continue
            tail = self._at(times[source][op][0]), middles[source, plans[source].ops[op].stream]
            head = self._at(times[target][to][1]), middles[target, plans[target].ops[to].stream]
            style = {"arrowstyle": "-|>,head_width=0.12,head_length=0.3", "shrinkA": 0, "shrinkB": 0}
            self.axes.annotate(
                "", head, tail, arrowprops={**style, "linewidth": 0.5, "color": "#222222"}, zorder=5
            )  # fmt: skip

    def _frames(self, middles: dict) -> None:
        """Around the ops of faults, with the number of the message; an op may have several."""
        numbers = defaultdict(list)
        for number, fault in enumerate(self.faults, start=1):
            for _, rank, op in fault.ops:
                if rank in self.lanes and number not in numbers[rank, op]:
                    numbers[rank, op].append(number)
        for (rank, op), told in numbers.items():
            start, end = self.timeline.times[rank][op]
            middle = middles[rank, self.timeline.plans[rank].ops[op].stream]
            margin = _FRAME / self.scale.inches  # else that of a short op would be a line
            left, right = self._at(start - margin), self._at(end + margin)
            frame = {"fill": False, "edgecolor": _VERMILION, "linewidth": 1.4, "zorder": 7, "clip_on": False}
            self._box(left, middle - _LANE / 2, right - left, _LANE, **frame)
            text = {"ha": "left", "va": "top", "fontsize": _LABEL, "fontweight": "bold", "color": _VERMILION}
            self.axes.text(right, middle, " " + ",".join(map(str, told)), zorder=8, **text)

    def _axis(self, middles: dict) -> None:
        axes = self.axes
        axes.set_yticks(list(middles.values()), [stream for _, stream in middles], fontsize=_TEXT - 1)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=_TEXT - 1)
        axes.set_xlabel(f"time in {self.scale.unit}; numbers in bars: shard.chunk", fontsize=_TEXT, labelpad=2)
        for side in ("left", "right", "top"):
            axes.spines[side].set_visible(False)

    def _titles(self) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        height = self.figure.get_figheight()
        self.figure.text(0.1 / _WIDTH, 1 - 0.10 / height, "\n".join(self.title), fontsize=_TEXT + 1, va="top")
        messages = {"fontsize": _TEXT - 1, "va": "bottom", "color": _VERMILION}
        self.figure.text(0.1 / _WIDTH, 0.06 / height, "\n".join(self.messages), **messages)
        kinds = {_LIKE.get(op.kind, op.kind) for rank in self.lanes for op in self.timeline.plans[rank].ops}
        handles = [Patch(color=colour, label=text) for kind, (text, colour) in _LOOKS.items() if kind in kinds]
        handles.append(Patch(color=_VERMILION, alpha=0.22, linewidth=0, label="exposed communication"))
        if len(self.lanes) > 1:
            handles.append(Line2D([], [], color="#222222", linewidth=0.6, marker=">", markersize=3, label="flag"))
        self.figure.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(0.0, 1 - (self.top - 0.25) / height),
            ncols=len(handles),
            fontsize=_TEXT - 1,
            frameon=False,
            handlelength=1.2,
            columnspacing=1.2,
        )


def _streams(timeline: Timeline, rank: int) -> list[str]:
    used = {op.stream for op in timeline.plans[rank].ops}
    return [stream for stream in STREAMS if stream in used]


def _told(fault: Fault) -> str:
    message = " ".join(fault.message.split())
    return message if message.startswith(fault.kind) else f"{fault.kind}: {message}"


def _label(op) -> str:
    """What a bar says if there is room: whose rows, or where they go."""
    if op.kind not in ("gemm", "quantise", "reduce", "put", "copy"):
        return ""
    region = op.writes[0]
    chunk = f"{region.shard}.{region.chunk}"
    return f"{chunk} to {region.rank}" if op.kind == "put" else chunk
