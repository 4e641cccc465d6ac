"""The picture of overlap.py's results: time over that of the GEMM alone, a row for each shape."""

from __future__ import annotations

from pathlib import Path

from ratios import MODES, bound, described, mm_of, ratios_of

# Okabe and Ito's colours, which colour-blind people tell apart: https://jfly.uni-koeln.de/color/; and shapes, too.
_LOOKS = {
    "serial": ("#333333", "s"),
    "fused": ("#E69F00", "D"),
    "untuned": ("#56B4E9", "o"),
    "tuned": ("#0072B2", "*"),
    "wire": ("#CC79A7", "^"),
}
_TITLES = {"eager": "eager", "graph": "in a CUDA graph"}
_ROW, _TOP, _BOTTOM, _PANEL, _LABELS = 0.24, 0.75, 0.55, 4.2, 1.7  # inches
_TICKS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0)


def draw(document: dict, path: Path) -> None:
    """Writes a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    results = document["results"]
    modes = [mode for mode in MODES if any(mode in result["microseconds"] for result in results)]
    width, height = _LABELS + _PANEL * len(modes), _TOP + _BOTTOM + _ROW * len(results)
    figure = Figure(figsize=(width, height), dpi=150)
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    figure.subplots_adjust(
        left=_LABELS / width, right=1 - 0.15 / width, top=1 - _TOP / height, bottom=_BOTTOM / height, wspace=0.05
    )
    rows = range(len(results))
    for panel, mode in zip(panels, modes, strict=True):
        panel.axvline(1.0, color="#999999", linewidth=1)
        floors = [bound(result, mode) / result["microseconds"][mode]["mm"] for result in results]
        if document["environment"]["device_type"] == "cuda":
            panel.plot(floors, rows, "|", color="#D55E00", markersize=9, label="bound by link or GEMM")
        for name, (colour, marker) in _LOOKS.items():
            ratios = [ratios_of(result, mode, name).get("t/mm") for result in results]
            points = [(ratio, row) for row, ratio in enumerate(ratios) if ratio is not None]
            if points:
                size = 9 if marker == "*" else 5
                panel.plot(*zip(*points, strict=True), marker, color=colour, markersize=size, label=name)
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(FixedLocator(_TICKS))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.tick_params(axis="x", labelsize=7)
        panel.grid(axis="both", color="#EEEEEE")
        panel.set_axisbelow(True)
        panel.set_title(_TITLES[mode], fontsize=9)
        panel.set_xlabel(f"time over {mm_of(document)} of the whole problem alone", fontsize=8)
    panels[0].set_yticks(rows, [result["label"] for result in results], fontsize=7)
    panels[0].set_ylim(len(results) - 0.5, -0.5)
    figure.suptitle(f"{document['world']} x {document['device']}, {described(document)}", x=0.02, ha="left", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", ncols=len(labels), fontsize=7, frameon=False)
    figure.savefig(path)
