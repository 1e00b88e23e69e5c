"""Figures measured before, of tests/data/peers-h200.json: beside a row whose peer cannot run here,
and as lines of the plot."""
from __future__ import annotations

import json
import pathlib
from typing import Any, Dict, List

from cases import Case

_FILE = pathlib.Path(__file__).resolve().parents[1] / "data" / "peers-h200.json"
_PEERS = ("cudnn", "fa4", "fa3", "flash", "efficient", "math")


class Figures:
    """Empty on any other device than the one they were measured on."""

    def __init__(self, device: str) -> None:
        data = json.loads(_FILE.read_text())
        self.source: str = data["source"]
        self.rows: List[Dict[str, Any]] = data["rows"] if device == data["device"] else []
        self.decode: List[Dict[str, Any]] = data["decode_rows"] if self.rows else []

    def of(self, case: Case) -> Dict[str, float]:
        """Seconds by peer."""
        if case.moves:
            if case != Case("forward", "bf16", case.batch, 32, 8, seqlen_q=1,
                            seqlen_kv=case.keys, dim=128):
                return {}
            return {"cudnn": row["cudnn"] * 1e-6 for row in self.decode
                    if (row["batch"], row["keys"]) == (case.batch, case.keys)}
        usual = Case(case.op, case.dtype, 16384 // case.seqlen_q, 2048 // case.dim,
                     seqlen_q=case.seqlen_q, dim=case.dim, causal=case.causal)
        if case != usual:
            return {}
        for row in self.rows:
            if all(row[field] == getattr(case, name) for field, name in (
                    ("op", "op"), ("dtype", "dtype"), ("dim", "dim"), ("causal", "causal"),
                    ("seqlen", "seqlen_q"))):
                return {peer: case.flops() / (row[peer] * 1e12) for peer in _PEERS if peer in row}
        return {}
