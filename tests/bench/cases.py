"""What the bench measures: a single case. presets.py has many."""
from __future__ import annotations

import dataclasses
import itertools
import json
from typing import List, Tuple

Shape = Tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem. As JSON it is the one-line repro of a row."""

    op: str = "forward"  # or "backward", "merge"
    dtype: str = "f32"  # f32, f16, bf16; f8: E4M3, o is bf16
    batch: int = 1
    heads: int = 16
    heads_kv: int = 0  # 0: as heads
    seqlen_q: int = 1024
    seqlen_kv: int = 0  # 0: as seqlen_q
    dim: int = 64
    dim_v: int = 0  # 0: as dim
    latent: bool = False  # V is a view of the first dim_v elements of K's rows; f8: LATENT_KV
    causal: bool = False
    window: int = -1  # keys to the left; -1: none
    block_density: float = 1.0  # of a block mask; 1: none
    block_size: int = 128  # queries and keys of its blocks
    block_lists: bool = False  # of the numbers of its blocks, not a number for each
    softcap: float = 0.0
    alibi: bool = False
    bias: str = ""  # dtype of a dense bias that all sequences share
    dbias: bool = False  # with its gradient
    dropout: float = 0.0
    repeatable: bool = False  # determinism = RUN_TO_RUN
    page_size: int = 0  # tokens a page of a paged cache; 0: not paged
    tokens: int = 0  # of one cache, of which each sequence reads seqlen_kv by index; 0: none
    # Packed sequences of uneven lengths, seqlen_q on average, up to twice that. Decoding: one has
    # seqlen_kv keys, the others a sixteenth of them
    uneven: bool = False
    parts: int = 0  # that are merged, fp32 each. On a GPU only
    # Nats by which every query that sees it scores the first key above the mean of the others, as
    # in trained models; 0: all keys are alike
    first_token: float = 0.0
    dtype_kv: str = ""  # f8, i8: a cache of 8 bits; "": as dtype
    descale_block: int = 0  # tokens that share a descale, with dtype f8; 0: of a head

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # a number by position may meet another field
            kinds = (int, float) if isinstance(field.default, float) else type(field.default)
            if not isinstance(getattr(self, field.name), kinds):
                raise ValueError(f"{field.name} = {getattr(self, field.name)!r} has another type "
                                 f"than {field.default!r}")
        if (self.op == "merge") != (self.parts > 0):
            raise ValueError("parts are what is merged")
        if self.first_token and (self.parts or self.page_size or self.kv_dtype in ("f8", "i8")):
            raise ValueError("first_token: not with parts, pages or 8 bits")
        if self.latent and (self.op != "forward" or self.first_token or self.dim < self.dim_v):
            raise ValueError("latent: forward, dim_v at most dim, without first_token")
        if self.descale_block and self.dtype != "f8":
            raise ValueError("descale_block: with dtype f8")
        if self.block_lists and self.block_density == 1:
            raise ValueError("block_lists: of a block mask")
        if self.tokens and (self.page_size != 1 or self.uneven or self.op != "forward"):
            raise ValueError("tokens: forward, pages of 1, without uneven lengths")
        if self.bias and (self.parts or self.page_size or self.uneven):
            raise ValueError("bias: not with parts, pages or uneven lengths")
        if self.dbias and (not self.bias or self.op != "backward"):
            raise ValueError("dbias: backward, with a bias")
        if not self.uneven:
            return
        if self.block_density < 1:
            raise ValueError("uneven lengths: not with blocks")
        if self.decodes:
            if self.op != "forward" or self.keys % max(16 * self.page_size, 16):
                raise ValueError("uneven caches: forward, a sixteenth of whole pages")
        elif self.seqlen_kv or self.page_size:
            raise ValueError("uneven lengths: not with seqlen_kv or pages")
        elif self.batch % 7 == 0:
            raise ValueError("uneven lengths: of a batch that is no multiple of 7")

    @property
    def dtype_o(self) -> str:
        return "bf16" if self.dtype == "f8" else self.dtype

    @property
    def kv_dtype(self) -> str:
        return self.dtype_kv or self.dtype

    @property
    def keys(self) -> int:
        return self.seqlen_kv or self.seqlen_q

    @property
    def kv_heads(self) -> int:
        return self.heads_kv or self.heads

    @property
    def value_dim(self) -> int:
        return self.dim_v or self.dim

    @property
    def plain(self) -> bool:
        """Whether PyTorch's scaled_dot_product_attention computes the same; a dropout by numbers
        of its own."""
        return (self.op != "merge" and self.window < 0 and self.block_density == 1.0
                and not self.softcap and not self.alibi and not self.page_size
                and not self.descale_block
                and not self.uneven and (not self.causal or self.keys == self.seqlen_q))

    def lengths(self) -> List[int]:
        """Queries of each sequence."""
        if not self.uneven or self.decodes:
            return [self.seqlen_q] * self.batch
        ranks = [b * 7 % self.batch + 1 for b in range(self.batch)]
        total = self.batch * self.seqlen_q
        found = [total * rank // sum(ranks) for rank in ranks]
        found[-1] += total - sum(found)
        return found

    def key_lengths(self) -> List[int]:
        """Of uneven sequences, but for caches, as many as queries."""
        if not self.uneven:
            return [self.keys] * self.batch
        if not self.decodes:
            return self.lengths()
        return [self.keys] + [self.keys // 16] * (self.batch - 1)

    def starts(self) -> Tuple[List[int], List[int]]:
        """Where queries, and keys, of the sequences of a packed batch start, and where the last
        ends."""
        queries, keys = ([0, *itertools.accumulate(lengths)]
                         for lengths in (self.lengths(), self.key_lengths()))
        return queries, keys

    def flops(self) -> float:
        """2 * (dim + dim_v) for each visible pair forward (causal: half of those below the first
        key of all queries), 2.5 times that backward: the convention of the attention papers."""
        pairs = sum(map(self.pairs, self.lengths(), self.key_lengths()))
        each = 2.0 * self.heads * (self.dim + self.value_dim)
        return each * pairs * (2.5 if self.op == "backward" else 1.0)

    def pairs(self, queries: int, keys: int) -> float:
        """Visible ones, of a head of a sequence."""
        pairs = float(queries) * keys
        if self.window >= 0:
            pairs = float(sum(min(i + 1, self.window + 1) for i in range(queries)))
        elif self.causal:
            pairs -= queries ** 2 / 2
        return pairs * self.block_density

    def amount(self) -> float:
        """What a rate counts: operations, or bytes."""
        return self.least_bytes() if self.moves else self.flops()

    def least_bytes(self) -> float:
        """Of K and V, read once; of a merge, all that it reads and writes."""
        size = {"f32": 4, "f8": 1, "i8": 1}.get(self.kv_dtype, 2)
        if self.op == "merge":
            rows = self.batch * self.heads * self.seqlen_q
            return rows * float(self.parts * 4 * (self.value_dim + 1) + size * self.value_dim + 4)
        dims = self.dim + (0 if self.latent else self.value_dim)
        dims = 656 if self.latent and self.dtype_kv else dims  # bytes of a record
        return dims * sum(self.key_lengths()) * self.kv_heads * float(size)

    @property
    def decodes(self) -> bool:
        """Whether keys and values are read about once."""
        return self.seqlen_q <= 16 and self.op != "merge"

    @property
    def moves(self) -> bool:
        """Whether bytes are what counts."""
        return self.decodes or self.op == "merge"

    def shapes(self) -> Dict[str, Shape]:
        """Of q, k, v and dout: (batch, seq, head, dim); of a bias: (1, head, query, key); of a
        merge of its parts."""
        if self.op == "merge":
            return {f"o{n}": (self.batch, self.seqlen_q, self.heads, self.value_dim)
                    for n in range(self.parts)}
        # Packed: one after the other.
        batch, rows, keys = ((1, sum(self.lengths()), sum(self.key_lengths())) if self.uneven
                             else (self.batch, self.seqlen_q, self.keys))
        q = (batch, rows, self.heads, self.dim)
        k = (*((1, self.tokens) if self.tokens else (batch, keys)), self.kv_heads, self.dim)
        v, dout = (*k[:3], self.value_dim), (*q[:3], self.value_dim)
        found = {"q": q, "k": k, "v": v, **({"dout": dout} if self.op == "backward" else {})}
        if self.bias:
            found["bias"] = (1, self.heads, self.seqlen_q, self.keys)
        return found

    def group(self) -> str:
        """What rows that differ in their lengths have in common."""
        same = dataclasses.replace(self, batch=1, heads=1, heads_kv=0, seqlen_q=1, seqlen_kv=0,
                                   uneven=False)
        words = [word for word in same.name().split() if word not in ("B1", "H1", "S1")]
        words += ["uneven"] if self.uneven else []
        if self.moves:
            return " ".join(["decode" if self.decodes else self.op, *words[1:]])
        return " ".join(words + ([] if self.causal else ["full"]))

    def name(self) -> str:
        words = [self.op, self.dtype, f"B{self.batch}",
                 f"H{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads != self.heads else "")]
        words.append(f"S{self.seqlen_q}" + (f"x{self.keys}" if self.keys != self.seqlen_q else ""))
        words.append(f"D{self.dim}" + (f"/{self.dim_v}" if self.value_dim != self.dim else ""))
        pages = f"by index of {self.tokens}" if self.tokens else f"pages of {self.page_size}"
        words += [text for given, text in (
            (self.latent, "latent"), (self.uneven, "uneven"), (self.causal, "causal"),
            (self.alibi, "alibi"), (self.dtype_kv, f"{self.dtype_kv}-cache"),
            (self.bias, f"bias {self.bias}"), (self.dbias, "dbias"),
            (self.window >= 0, f"window {self.window}"),
            (self.block_density < 1, f"blocks {self.block_density:g}"),
            (self.block_density < 1 and self.block_size != 128, f"of {self.block_size}"),
            (self.block_lists, "lists"), (self.softcap, "softcap"),
            (self.dropout, "dropout"), (self.repeatable, "repeatable"), (self.page_size, pages),
            (self.parts, f"{self.parts} parts"),
            (self.descale_block, f"descales of {self.descale_block}"),
            (self.first_token, f"first token {self.first_token:g}")) if given]
        return " ".join(words)

    def to_json(self) -> str:
        default = Case()
        return json.dumps({f.name: getattr(self, f.name) for f in dataclasses.fields(self)
                           if getattr(self, f.name) != getattr(default, f.name)})

    @staticmethod
    def from_json(line: str) -> "Case":
        return Case(**json.loads(line))
