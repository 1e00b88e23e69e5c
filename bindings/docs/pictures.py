"""The pictures of the site, drawn as SVG, and the cycle budgets beside them.

Budgets count clocks of one multiprocessor of an H200 for one KV tile (forward) or one Q tile
(backward), from what its units do in a clock; the tiles are those of the kernels in src/.
"""
from __future__ import annotations

import pathlib
import re
from typing import Dict, List, NamedTuple, Tuple
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parents[2]
SM90 = ROOT / "src" / "cuda" / "kernels" / "sm90"
# A multiprocessor does in a clock: 16-bit FLOPs of the tensor cores, 2^x, bytes of shared memory.
TENSOR_FLOPS, EXP2, SHARED_BYTES = 4096, 16, 128
INK, PAPER = "#1d2733", "#ffffff"
COLOURS = {"full": "#8fb8de", "partial": "#f2c57c", "empty": "#eceff2", "qk": "#8fb8de",
           "pv": "#5b8db8", "softmax": "#f2c57c", "load": "#b9d8b0", "memory": "#d9c8e8"}


class Svg:
    """Shapes on a canvas, in its pixels."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self.size = (width, height)
        self.title = title
        self.parts: List[str] = []

    def box(self, x: float, y: float, width: float, height: float, colour: str, text: str = "",
            size: int = 13) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
                          f'fill="{colour}" stroke="{INK}" stroke-width="0.8"/>')
        lines = text.split("\n") if text else []
        for number, line in enumerate(lines):
            down = (number - (len(lines) - 1) / 2) * size * 1.25 + size * 0.35
            self.text(x + width / 2, y + height / 2 + down, line, size, "middle")

    def text(self, x: float, y: float, text: str, size: int = 13, anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
                          f'fill="{INK}">{escape(text)}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" '
                          f'stroke="{INK}" stroke-width="1.3" marker-end="url(#head)"/>')

    def __str__(self) -> str:
        width, height = self.size
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                f'width="{width}" height="{height}" font-family="sans-serif" role="img">\n'
                f'<title>{escape(self.title)}</title>\n'
                '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="3.5" '
                f'orient="auto"><path d="M0,0 L7,3.5 L0,7 z" fill="{INK}"/></marker></defs>\n'
                f'<rect width="{width}" height="{height}" fill="{PAPER}"/>\n')
        return head + "\n".join(self.parts) + "\n</svg>\n"


def draw() -> Dict[str, str]:
    """By the name of its file."""
    return {"tiles.svg": str(_tiles()), "forward.svg": str(_forward()),
            "backward.svg": str(_backward())}


def kind_of_tile(tile_q: int, tile_kv: int, queries: int, keys: int, size: int) -> str:
    """Of a causal mask aligned at the ends of the sequences: full, partial or empty."""
    off = keys - queries
    rows = range(tile_q * size, min((tile_q + 1) * size, queries))
    columns = range(tile_kv * size, min((tile_kv + 1) * size, keys))
    seen = [j <= i + off for i in (rows[0], rows[-1]) for j in (columns[0], columns[-1])]
    return "full" if all(seen) else "partial" if any(seen) else "empty"


def _tiles(queries: int = 640, keys: int = 896, size: int = 128) -> Svg:
    side, left, top = 62, 150, 60
    rows, columns = queries // size, keys // size
    svg = Svg("Tiles of a causal mask", left + columns * side + 240, top + rows * side + 30)
    svg.text(left, 24, f"{keys} keys, in tiles of {size}")
    svg.text(left, 44, "visited from the right: the diagonal first", 12)
    for i in range(rows):
        svg.text(left - 10, top + i * side + side / 2 + 4, f"queries {i * size}…", 12, "end")
        for j in range(columns):
            kind = kind_of_tile(i, j, queries, keys, size)
            svg.box(left + j * side, top + i * side, side, side, COLOURS[kind])
    for row, (kind, said) in enumerate({
            "full": "full: no mask is evaluated", "partial": "partial: masked score by score",
            "empty": "empty: neither loaded nor computed"}.items()):
        y = top + 20 + 34 * row
        svg.box(left + columns * side + 20, y, 18, 18, COLOURS[kind])
        svg.text(left + columns * side + 46, y + 14, said, 12)
    return svg


class Forward(NamedTuple):
    """A row of the table of Hopper kernels, for scores that are only scaled."""

    dim_qk: int
    dim_v: int
    warpgroups: int
    tile_kv: int
    ctas_per_sm: int

    @property
    def tile_q(self) -> int:
        return 64 * self.warpgroups

    def clocks(self) -> Tuple[int, int, int]:
        """Of a KV tile: tensor cores, 2^x, shared memory (both operands of Q K^T and V of P V,
        which each warpgroup reads for itself, and the copies of K and V that arrive)."""
        pairs, dims = self.tile_q * self.tile_kv, self.dim_qk + self.dim_v
        kv_bytes = 2 * self.tile_kv * dims
        moved = self.warpgroups * (2 * 64 * self.dim_qk + kv_bytes) + kv_bytes
        return 2 * pairs * dims // TENSOR_FLOPS, pairs // EXP2, moved // SHARED_BYTES


def forward_rows() -> List[Forward]:
    table = (SM90 / "table.txt").read_text(encoding="utf-8")
    rows = re.findall(r"^fwd 16 (\d+) (\d+) (\d+) (\d+) plain(?: (\d+))?$", table, re.M)
    return [Forward(*[int(number or 1) for number in row]) for row in rows]


def forward_budget() -> str:
    lines = ["| head | Q x KV tile | CTAs an SM | tensor cores | 2^x | shared memory |",
             "|---|---|---|---|---|---|"]
    for row in forward_rows():
        head = f"{row.dim_qk}" if row.dim_qk == row.dim_v else f"{row.dim_qk}, V {row.dim_v}"
        clocks = " | ".join(f"{count:,}" for count in row.clocks())
        lines.append(f"| {head} | {row.tile_q} x {row.tile_kv} | {row.ctas_per_sm} | {clocks} |")
    return "\n".join(lines)


def backward_budget() -> str:
    """The table in the comment of bwd.cuh, whose first two figures are computed here, too."""
    source = (SM90 / "bwd.cuh").read_text(encoding="utf-8")
    rows = re.findall(r"^// +(\d+), (\d+) x (\d+)(, two CTAs)? +([\d,]+) +([\d,]+) +(\d+) KB = "
                      r"([\d,]+) +(\d+) KB$", source, re.M)
    if len(rows) < 4:
        raise ValueError("the budget in the comment of bwd.cuh has another form")
    lines = ["| head | Q x KV tile | tensor cores | 2^x | shared memory | dQ to memory |",
             "|---|---|---|---|---|---|"]
    for dim, queries, keys, two, tensor, exp2, shared, clocks, dq in rows:
        pairs = int(queries) * int(keys)
        # Five products: S, dP, dV, dK, dQ.
        computed = (5 * 2 * pairs * int(dim) // TENSOR_FLOPS, pairs // EXP2,
                    int(shared) * 1024 // SHARED_BYTES)
        written = tuple(int(number.replace(",", "")) for number in (tensor, exp2, clocks))
        if computed != written:
            raise ValueError(f"bwd.cuh, D = {dim}: {written} are written, {computed} come out")
        lines.append(f"| {dim} | {queries} x {keys}{two} | {computed[0]:,} | {computed[1]:,} | "
                     f"{shared} KB = {clocks} | {dq} KB |")
    return "\n".join(lines)


def _forward() -> Svg:
    """Two consumer warpgroups of the kernel for D = 256, from the budget: the tensor cores serve
    one after the other, and each warpgroup's softmax runs beside the other's products."""
    row = next(r for r in forward_rows() if r.dim_qk == r.dim_v == 256 and r.warpgroups == 2)
    tensor, exp2, _ = (clocks // row.warpgroups for clocks in row.clocks())
    product = tensor // 2  # Q K^T, and as much for P V
    scale, left, top, lane = 0.155, 150, 50, 46
    end, pair = 7 * tensor, row.warpgroups * tensor
    svg = Svg("Hopper forward pass: who works when", int(left + scale * end + 30), top + 6 * lane)
    svg.text(left, 26, f"clocks of an SM: D = 256, {row.tile_q} queries, KV tiles of {row.tile_kv} "
             "keys, numbered in the order of visits", 12)
    names = ["loads of K", "loads of V", "warpgroup 1: WGMMA", "warpgroup 1: softmax",
             "warpgroup 2: WGMMA", "warpgroup 2: softmax"]
    for number, name in enumerate(names):
        svg.text(left - 10, top + number * lane + 22, name, 12, "end")

    def bar(number: int, start: int, clocks: int, kind: str, text: str) -> None:
        shown = min(clocks, end - start)
        if shown > 0:
            svg.box(left + scale * start, top + number * lane, scale * shown, lane - 12,
                    COLOURS[kind], text if shown == clocks else "", 12)

    for tile in range(1, 5):
        for warpgroup in range(row.warpgroups):
            start, place = (tile - 1) * pair + warpgroup * tensor, 2 + 2 * warpgroup
            bar(place, start, product, "qk", f"Q K{tile}ᵀ")
            if tile > 1:
                bar(place, start + product, product, "pv", f"P V{tile - 1}")
            bar(place + 1, start + product, exp2, "softmax", f"P{tile}")
        # A stage, of two, is free when the last warpgroup has read it.
        bar(0, tile * pair - product, pair - 20, "load", f"K{tile + 2}")
        bar(1, (tile + 1) * pair, pair - 20, "load", f"V{tile + 2}")
    return svg


def _backward() -> Svg:
    svg = Svg("Hopper backward pass: a Q tile", 880, 330)
    svg.text(20, 24, "One Q tile of the backward pass. K and V stay; dK and dV are accumulated in "
             "registers over the Q tiles.", 12)
    svg.box(20, 120, 110, 60, COLOURS["load"], "producer\nQ, dO, lse, D")
    for number, y in enumerate((50, 180)):
        svg.box(200, y, 150, 34, COLOURS["qk"], "Sᵀ = K Qᵀ")
        svg.box(200, y + 44, 150, 34, COLOURS["qk"], "dPᵀ = V dOᵀ")
        svg.box(390, y, 150, 34, COLOURS["softmax"], "Pᵀ = exp(Sᵀ - lse)")
        svg.box(390, y + 44, 150, 34, COLOURS["softmax"], "dSᵀ = Pᵀ (dPᵀ - D)")
        svg.box(580, y, 130, 34, COLOURS["pv"], "dV += Pᵀ dO")
        svg.box(580, y + 44, 130, 34, COLOURS["pv"], "dK += dSᵀ Q")
        svg.text(200, y + 94, f"consumer warpgroup {number + 1}: 64 keys; operands in registers",
                 12)
        for row in (17, 61):
            svg.arrow(350, y + row, 388, y + row)
            svg.arrow(540, y + row, 578, y + row)
        svg.arrow(465, y + 34, 465, y + 43)
        svg.arrow(130, 140 + 20 * number, 198, y + 40)
    svg.box(390, 284, 184, 34, COLOURS["memory"], "dS, in shared memory")
    svg.box(580, 284, 130, 34, COLOURS["pv"], "dQ = dS K")
    svg.box(750, 284, 110, 34, COLOURS["memory"], "reduce-add")
    svg.text(580, 278, "dQ warpgroup", 12)
    svg.arrow(574, 301, 579, 301)
    svg.arrow(710, 301, 748, 301)
    svg.arrow(560, 111, 560, 283)
    return svg
