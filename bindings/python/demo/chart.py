"""The growth table, as text bars and as a picture."""
from __future__ import annotations

import math
import pathlib
from typing import List, Optional

from .growth import Cost, Row

WIDTH = 30


def size(bytes_: float) -> str:
    if math.isnan(bytes_):
        return "?"
    return f"{bytes_ / 1e6:.1f} MB" if bytes_ < 1e9 else f"{bytes_ / 1e9:.2f} GB"


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def table(rows: List[Row]) -> str:
    """Lengths, times, memory; both methods."""
    lines = [f"{'':>7}  {'time':^21}   {'peak memory':^21}   {'largest':>9}",
             f"{'tokens':>7}  {'flash':>9} {'materialised':>12}   {'flash':>8} {'materialised':>12}"
             f"   {'deviation':>9}"]
    for row in rows:
        slow = row.materialised
        lines.append(
            f"{row.length:>7}  {duration(row.flash.seconds):>9}"
            f" {duration(slow.seconds) if slow else 'stopped':>12}   {size(row.flash.peak):>8}"
            f" {size(slow.peak) if slow else 'stopped':>12}"
            f"   {'' if row.deviation is None else format(row.deviation, '.1e'):>9}")
    return "\n".join(line.rstrip() for line in lines)


def bars(rows: List[Row]) -> str:
    """Peak memory, one bar a method and length, on a logarithmic scale."""
    known = [cost.peak for row in rows for cost in (row.flash, row.materialised)
             if cost and cost.peak > 0]
    if not known:
        return ""
    low, high = math.log(min(known) / 2), math.log(max(known))

    def bar(cost: Optional[Cost], mark: str) -> str:
        if cost is None:
            return "stopped: would pass 4 GB, or the memory of this machine"
        if not cost.peak > 0:
            return f"{size(cost.peak)}"
        length = round(WIDTH * (math.log(cost.peak) - low) / (high - low))
        return f"{mark * length} {size(cost.peak)}"

    lines = ["peak memory, logarithmic"]
    for row in rows:
        lines.append(f"{row.length:>7}  flash         {bar(row.flash, '#')}")
        lines.append(f"{'':>7}  materialised  {bar(row.materialised, '.')}")
    return "\n".join(lines)


def picture(rows: List[Row], path: pathlib.Path, maker: str) -> bool:
    """Writes a PNG; maker: of the materialised scores. False: matplotlib is not there."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for axis, label, value in ((axes[0], "time of one layer's attention (s)", lambda c: c.seconds),
                               (axes[1], "peak memory (MB)", lambda c: c.peak / 1e6)):
        slow = [row for row in rows if row.materialised]
        axis.loglog([r.length for r in slow], [value(r.materialised) for r in slow], "o--",
                    color="#b3541e", label=f"materialised scores ({maker})")
        axis.loglog([r.length for r in rows], [value(r.flash) for r in rows], "o-",
                    color="#1f4e79", label="libflashattn")
        ticks = [r.length for r in rows]
        axis.set_xticks(ticks, [str(t) for t in ticks], minor=False)
        axis.minorticks_off()
        axis.set_xlabel("tokens")
        axis.set_title(label, fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
