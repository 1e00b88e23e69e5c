"""The support matrix: flashattn_check asked about every dtype and feature. Nothing is written down
here about what a device can do, so the table cannot be wrong about this build."""
from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Tuple

from ._errors import FlashAttentionError
from ._tools import check

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")

# Row: what is asked besides dtype, 8 heads and dim 64.
ROWS: Tuple[Tuple[str, Dict[str, Any]], ...] = (
    ("forward", {}),
    ("backward", {"backward": True}),
    ("dim 8", {"dim_qk": 8}),
    ("dim 80", {"dim_qk": 80}),
    ("dim 128", {"dim_qk": 128}),
    ("dim 256", {"dim_qk": 256}),
    ("dim 512", {"dim_qk": 512}),
    ("dim 1024", {"dim_qk": 1024}),
    ("dim 576, dim_v 512", {"dim_qk": 576, "dim_v": 512}),
    ("dim 192, dim_v 128", {"dim_qk": 192, "dim_v": 128}),
    ("odd dims (57, dim_v 33)", {"dim_qk": 57, "dim_v": 33}),
    ("grouped KV heads (8 on 2)", {"heads_kv": 2}),
    ("one KV head (8 on 1)", {"heads_kv": 1}),
    ("causal", {"causal": True}),
    ("causal, aligned top left", {"causal": True, "top_left": True}),
    ("window", {"window": (128, 0)}),
    ("chunk", {"chunk": 256, "causal": True}),
    ("block mask", {"block_q": 64, "block_kv": 64}),
    ("block lists", {"block_q": 64, "block_kv": 64, "block_lists": True}),
    ("lengths of blocks", {"block_q": 64, "block_kv": 64, "block_lens": True}),
    ("tree of drafted tokens", {"tree": 64}),
    ("varlen", {"varlen_q": True, "varlen_kv": True}),
    ("varlen backward", {"varlen_q": True, "varlen_kv": True, "backward": True}),
    ("paged KV", {"page_size": 16}),
    ("hidden pages", {"page_size": 1, "hidden_pages": True}),
    ("paged KV, varlen queries", {"page_size": 16, "varlen_q": True}),
    ("softcap", {"softcap": 30.0, "backward": True}),
    ("ALiBi", {"alibi": True, "backward": True}),
    ("bias, float32", {"dtype_bias": "float32", "backward": True}),
    ("bias, same dtype", {"dtype_bias": "same", "backward": True}),
    ("boolean mask", {"dtype_bias": "bool", "backward": True}),
    ("gradient of the bias", {"dtype_bias": "float32", "backward": True, "return_dbias": True}),
    ("sink and its gradient", {"sink": True, "backward": True, "return_dsink": True}),
    ("dropout", {"dropout": 0.1, "backward": True}),
    ("lse, gradient at lse", {"return_lse": True, "dlse": True, "backward": True}),
    ("float32 output", {"dtype_o": "float32", "backward": True}),
    ("float8 output", {"dtype_o": "float8_e4m3fn"}),
    ("float8 keys and values", {"dtype_kv": "float8_e4m3fn"}),
    ("float8 keys and values, backward", {"dtype_kv": "float8_e4m3fn", "backward": True}),
    ("int8 keys and values", {"dtype_kv": "int8"}),
    ("int8 keys and values, backward", {"dtype_kv": "int8", "backward": True}),
    ("batch invariant", {"determinism": "batch_invariant", "backward": True}),
)


class Matrix(NamedTuple):
    columns: Tuple[str, ...]
    rows: List[Tuple[str, List[str]]]  # "yes", or the reason's name
    messages: Dict[str, List[str]]  # reason: what the library said, each once


def matrix(device: str = "cpu") -> Matrix:
    """Asks about every cell."""
    rows = []
    messages: Dict[str, List[str]] = {}
    for name, asked in ROWS:
        cells = []
        for dtype in DTYPES:
            description = {"dtype": dtype, "heads_q": 8, "dim_qk": 64, "device": device, **asked}
            if dtype == "float8_e4m3fn":  # the default, 8 bits, is for forward alone
                description.setdefault("dtype_o", "bfloat16")
            if description.get("dtype_bias") == "same":
                description["dtype_bias"] = dtype
            try:
                check(**description)
                cells.append("yes")
            except FlashAttentionError as error:
                reason = getattr(error.reason, "name", str(error.reason))
                cells.append(reason)
                said = messages.setdefault(reason, [])
                if str(error) not in said:
                    said.append(str(error))
        rows.append((name, cells))
    return Matrix(DTYPES, rows, messages)


def as_text(table: Matrix) -> str:
    width = max(len(name) for name, _ in table.rows) + 2
    # A column has room for its longest cell.
    widths = [max(len(column), *(len(cells[i]) for _, cells in table.rows)) + 2
              for i, column in enumerate(table.columns)]
    lines = [" " * width + "".join(c.ljust(w) for c, w in zip(table.columns, widths)).rstrip()]
    for name, cells in table.rows:
        lines.append(name.ljust(width) + "".join(c.ljust(w)
                                                 for c, w in zip(cells, widths)).rstrip())
    for reason, said in table.messages.items():
        lines += ["", f"{reason}: {said[0]}"]
    return "\n".join(lines)


def as_markdown(table: Matrix) -> str:
    lines = ["| | " + " | ".join(table.columns) + " |", "|---" * (len(table.columns) + 1) + "|"]
    for name, cells in table.rows:
        shown = [cell if cell == "yes" else f"no: `{cell}`" for cell in cells]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)
