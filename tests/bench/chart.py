"""The plot of a table that the bench wrote:  python tests/bench/chart.py TABLE.csv [PNG]

A panel for each group of rows, a line for each runner; dashed, what the table of tests/data says of
peers that did not run.
"""
from __future__ import annotations

import csv
import pathlib
import sys
from typing import Any, Dict, List, Tuple

from cases import Case

_COLOURS = {"flashattn": "#d62728", "cudnn": "#2ca02c", "fa4": "#1f77b4", "fa3": "#9467bd",
            "flash": "#ff7f0e", "torch": "#ff7f0e", "efficient": "#8c564b", "math": "#7f7f7f"}
Line = Dict[str, List[Tuple[int, float]]]


def lines(rows: List[Dict[str, str]]) -> Tuple[Line, Line]:
    """Points (length, rate) by runner: measured, and of the table."""
    found: Tuple[Line, Line] = ({}, {})
    for row in rows:
        case = Case.from_json(row["case"])
        amount = case.amount()
        for column, value in row.items():
            name, _, kind = column.rpartition("_")
            if value and kind in ("seconds", "table"):
                point = (case.keys, amount / float(value) * 1e-12)
                found[kind == "table"].setdefault(name, []).append(point)
    return found


def draw(table: pathlib.Path, target: pathlib.Path) -> str:
    """Writes the picture; a sentence about it."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return ("no plot: matplotlib is not installed here; where it is, python "
                f"tests/bench/chart.py {table.name} draws the table")
    groups: Dict[str, List[Dict[str, str]]] = {}
    with table.open(newline="") as file:
        for row in csv.DictReader(file):
            groups.setdefault(row["group"], []).append(row)
    groups = {name: rows for name, rows in groups.items() if len(rows) > 1}
    if not groups:
        return "no plot: no two rows differ in their length alone"
    across = min(len(groups), 3)
    down = -(-len(groups) // across)
    figure, panels = pyplot.subplots(down, across, squeeze=False, constrained_layout=True,
                                     figsize=(4.2 * across, 3.1 * down))
    for panel, (name, rows) in zip(panels.flat, groups.items()):
        panel_of(panel, name, rows)
    for panel in list(panels.flat)[len(groups):]:
        panel.axis("off")
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
    return f"plot: {target}"


def panel_of(panel: Any, name: str, rows: List[Dict[str, str]]) -> None:
    measured, table = lines(rows)
    lengths = [Case.from_json(row["case"]).keys for row in rows]
    joined = len(set(lengths)) == len(lengths)  # else rows differ in something else, too
    for runner, points in measured.items():
        # A baseline, whose name is its user's choice, is black.
        panel.plot(*zip(*sorted(points)), marker="o", markersize=3, label=runner,
                   color=_COLOURS.get(runner, "black"), linewidth=2 if runner == "flashattn" else 1,
                   linestyle=("-" if runner in _COLOURS else ":") if joined else "")
    for runner, points in table.items():
        if runner not in measured:
            panel.plot(*zip(*sorted(points)), linestyle="--", linewidth=1, marker=".",
                       label=f"{runner} (table)", color=_COLOURS.get(runner))
    panel.set_title(name, fontsize=9)
    panel.set_xscale("log", base=2)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("keys", fontsize=8)
    panel.set_ylabel("TB/s of K and V" if name.startswith("decode") else "TFLOP/s", fontsize=8)
    panel.tick_params(labelsize=7)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=6)


if __name__ == "__main__":
    source = pathlib.Path(sys.argv[1])
    print(draw(source, pathlib.Path(sys.argv[2]) if len(sys.argv) > 2
               else source.with_suffix(".png")))
