"""What the bench measures: single cases, and presets of them."""
from __future__ import annotations

import dataclasses
import json
from typing import Dict, Iterator, List, Tuple


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem. As JSON it is the one-line repro of a row."""

    op: str = "forward"  # or "backward"
    dtype: str = "f32"  # f32, f16, bf16
    batch: int = 1
    heads: int = 16
    heads_kv: int = 0  # 0: as heads
    seqlen_q: int = 1024
    seqlen_kv: int = 0  # 0: as seqlen_q
    dim: int = 64
    causal: bool = False
    window: int = -1  # keys to the left; -1: none
    block_density: float = 1.0  # of a block mask with blocks of 128 x 128; 1: none
    softcap: float = 0.0
    alibi: bool = False
    dropout: float = 0.0

    @property
    def keys(self) -> int:
        return self.seqlen_kv or self.seqlen_q

    @property
    def kv_heads(self) -> int:
        return self.heads_kv or self.heads

    @property
    def plain(self) -> bool:
        """Whether PyTorch's scaled_dot_product_attention computes the same."""
        return (self.window < 0 and self.block_density == 1.0 and not self.softcap
                and not self.alibi and not self.dropout
                and (not self.causal or self.keys == self.seqlen_q))

    def flops(self) -> float:
        """4 * dim for each visible pair forward (half of all when causal), 2.5 times that
        backward: the convention of the attention papers."""
        pairs = float(self.seqlen_q) * self.keys
        if self.window >= 0:
            pairs = float(sum(min(i + 1, self.window + 1) for i in range(self.seqlen_q)))
        elif self.causal:
            pairs /= 2
        pairs *= self.block_density
        each = 4.0 * self.batch * self.heads * self.dim
        return each * pairs * (2.5 if self.op == "backward" else 1.0)

    def kv_bytes(self) -> float:
        size = 4 if self.dtype == "f32" else 2
        return 2.0 * self.batch * self.kv_heads * self.keys * self.dim * size

    def name(self) -> str:
        words = [self.op, self.dtype, f"B{self.batch}", f"H{self.heads}"]
        if self.kv_heads != self.heads:
            words[-1] += f"/{self.kv_heads}"
        words.append(f"S{self.seqlen_q}" + (f"x{self.keys}" if self.keys != self.seqlen_q else ""))
        words.append(f"D{self.dim}")
        for field, text in (("causal", "causal"), ("alibi", "alibi")):
            if getattr(self, field):
                words.append(text)
        if self.window >= 0:
            words.append(f"window {self.window}")
        if self.block_density < 1:
            words.append(f"blocks {self.block_density:g}")
        if self.softcap:
            words.append("softcap")
        if self.dropout:
            words.append("dropout")
        return " ".join(words)

    def to_json(self) -> str:
        default = Case()
        return json.dumps({f.name: getattr(self, f.name) for f in dataclasses.fields(self)
                           if getattr(self, f.name) != getattr(default, f.name)})

    @staticmethod
    def from_json(line: str) -> "Case":
        return Case(**json.loads(line))


def _tables(dtypes: Tuple[str, ...], ops: Tuple[str, ...]) -> Iterator[Case]:
    for dtype in dtypes:
        for op in ops:
            for causal in (False, True):
                for dim in (64, 128):
                    for seqlen in (1024, 4096):
                        heads = 1024 // dim if seqlen == 1024 else 256 // dim
                        yield Case(op, dtype, heads=heads, seqlen_q=seqlen, dim=dim, causal=causal)


def _masks() -> Iterator[Case]:
    base = Case(heads=4, seqlen_q=4096, causal=True)
    yield dataclasses.replace(base, causal=False)
    yield base
    for seqlen in (2048, 4096, 8192):  # time must grow with seqlen, not with its square
        yield dataclasses.replace(base, seqlen_q=seqlen, window=512)
    for density in (0.5, 0.25, 0.125):
        yield dataclasses.replace(base, causal=False, block_density=density)


def _features() -> Iterator[Case]:
    base = Case(heads=4, seqlen_q=2048, causal=True)
    yield base
    yield dataclasses.replace(base, heads_kv=1)
    yield dataclasses.replace(base, softcap=50.0)
    yield dataclasses.replace(base, alibi=True)
    yield dataclasses.replace(base, dropout=0.1)


def _decode() -> Iterator[Case]:
    for dtype in ("f32", "bf16"):
        for keys in (8192, 32768):
            yield Case("forward", dtype, heads=32, heads_kv=8, seqlen_q=1, seqlen_kv=keys, dim=128)


def _h200(op: str) -> Iterator[Case]:
    """The tables of the attention papers: 16k tokens, heads * dim = 2048."""
    for dim in (64, 128, 256):
        for causal in (False, True):
            for seqlen in (1024, 2048, 4096, 8192, 16384):
                yield Case(op, "bf16", 16384 // seqlen, 2048 // dim, seqlen_q=seqlen,
                           dim=dim, causal=causal)


def _h200_decode() -> Iterator[Case]:
    for batch, keys in ((1, 8192), (1, 131072), (16, 8192), (64, 4096)):
        yield Case("forward", "bf16", batch, 32, 8, seqlen_q=1, seqlen_kv=keys, dim=128)


PRESETS: Dict[str, List[Case]] = {
    "quick": [Case(op, dtype, heads=4, seqlen_q=2048, dim=64, causal=causal)
              for dtype in ("f32", "bf16") for op in ("forward", "backward")
              for causal in (False, True)],
    "tables": list(_tables(("f32", "bf16", "f16"), ("forward", "backward"))),
    "masks": list(_masks()),
    "features": list(_features()),
    "decode": list(_decode()),
    # For --device cuda.
    "gpu": list(_h200("forward")),
    "gpu-backward": list(_h200("backward")),
    "gpu-decode": list(_h200_decode()),
}
