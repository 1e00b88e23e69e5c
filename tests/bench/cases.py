"""What the bench measures: single cases, and presets of them."""
from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Dict, Iterator, List, Optional, Tuple

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
    block_density: float = 1.0  # of a block mask with blocks of 128 x 128; 1: none
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
            (self.block_density < 1, f"blocks {self.block_density:g}"), (self.softcap, "softcap"),
            (self.dropout, "dropout"), (self.repeatable, "repeatable"), (self.page_size, pages),
            (self.parts, f"{self.parts} parts"),
            (self.first_token, f"first token {self.first_token:g}")) if given]
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


def _latent(dtypes: Tuple[str, ...], heads: Tuple[int, ...], batches: Tuple[int, ...],
            queries: Tuple[int, ...], lengths: Tuple[int, ...],
            types: Tuple[str, ...] = ("",)) -> Iterator[Case]:
    """Decoding from caches of latent attention (DeepSeek-V2, 2024)."""
    for dtype, count, batch, rows, keys, kv in itertools.product(dtypes, heads, batches, queries,
                                                                 lengths, types):
        yield Case("forward", dtype, batch, count, 1, rows, keys, 576, 512, latent=True,
                   causal=rows > 1, dtype_kv=kv)


def _by_index(batches: Tuple[int, ...]) -> Iterator[Case]:
    """Latent attention to 2,048 of 64k tokens by index (DeepSeek-V3.2): decoding, a prompt."""
    for batch in batches:
        yield Case(op="forward", dtype="bf16", batch=batch, heads=128, heads_kv=1, seqlen_q=1,
                   seqlen_kv=2048, dim=576, dim_v=512, latent=True, page_size=1, tokens=65536)


def _expanded(dtype: str, heads: int, lengths: Tuple[int, ...]) -> Iterator[Case]:
    """Prompts and training of models with latent attention, whose keys and values are expanded."""
    for op in ("forward", "backward"):
        for seqlen in lengths:
            yield Case(op, dtype, heads=heads, seqlen_q=seqlen, dim=192, dim_v=128, causal=True)


def _features() -> Iterator[Case]:
    base = Case(heads=4, seqlen_q=2048, causal=True)
    yield base
    yield dataclasses.replace(base, heads_kv=1)
    yield dataclasses.replace(base, softcap=50.0)
    yield dataclasses.replace(base, alibi=True)
    yield dataclasses.replace(base, dropout=0.1)


def _decode() -> Iterator[Case]:
    for batch, dim, heads in itertools.product((1, 16), (64, 128, 256), (32, 8)):
        for dtype, kv in itertools.product(("f32", "bf16"), ("", "f8", "i8")):
            yield Case("forward", dtype, batch, heads, 8, 1, 8192, dim, dtype_kv=kv)


def _paper(op: str, dtype: str = "bf16",
           lengths: Tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384),
           dims: Tuple[int, ...] = (64, 128, 256), repeatable: bool = False) -> Iterator[Case]:
    """The tables of the attention papers: 16k tokens, heads * dim = 2048."""
    for dim in dims:
        for causal in (False, True):
            for seqlen in lengths:
                yield Case(op, dtype, 16384 // seqlen, 2048 // dim, seqlen_q=seqlen, dim=dim,
                           causal=causal, repeatable=repeatable)


def _gpu_decode() -> Iterator[Case]:
    base = Case("forward", "bf16", 1, 32, 8, seqlen_q=1, seqlen_kv=8192, dim=128)
    for batch, keys in ((1, 8192), (1, 131072), (16, 8192), (64, 4096), (128, 8192)):
        yield dataclasses.replace(base, batch=batch, seqlen_kv=keys)
    for heads, heads_kv, dim in ((32, 32, 64), (64, 8, 128), (16, 8, 256), (32, 32, 128)):
        yield dataclasses.replace(base, batch=32, heads=heads, heads_kv=heads_kv, dim=dim)
    yield dataclasses.replace(base, batch=32, seqlen_q=4, causal=True)  # speculative decoding
    for page_size in (16, 64, 256):
        yield dataclasses.replace(base, batch=32, page_size=page_size)
    for page_size in (0, 64):
        yield dataclasses.replace(base, batch=16, seqlen_kv=32768, page_size=page_size, uneven=True)
    for parts in (2, 8):
        yield Case("merge", "bf16", 1, 32, seqlen_q=4096, dim=128, parts=parts)


def _prefill() -> Iterator[Case]:
    """Prompts of common models, and chunks of a long prompt behind what is cached already."""
    base = Case("forward", "bf16", heads=32, heads_kv=8, dim=128, causal=True)
    for batch, seqlen in ((1, 2048), (8, 2048), (1, 8192), (1, 32768)):
        yield dataclasses.replace(base, batch=batch, seqlen_q=seqlen)
    for keys in (8192, 32768):
        yield dataclasses.replace(base, seqlen_q=2048, seqlen_kv=keys)
    yield dataclasses.replace(base, heads=64, seqlen_q=8192)
    yield dataclasses.replace(base, heads=16, heads_kv=0, dim=192, dim_v=128, seqlen_q=4096)
    yield dataclasses.replace(base, heads=16, dim=256, seqlen_q=8192)
    yield dataclasses.replace(base, heads=16, dim=256, seqlen_q=8192, window=1023)


def _training() -> Iterator[Case]:
    for op in ("forward", "backward"):
        base = Case(op, "bf16", heads=32, dim=128, causal=True)
        yield dataclasses.replace(base, batch=8, seqlen_q=2048, dim=64)
        yield dataclasses.replace(base, batch=4, seqlen_q=4096)
        yield dataclasses.replace(base, batch=4, seqlen_q=4096, heads_kv=8)
        yield dataclasses.replace(base, batch=2, seqlen_q=8192, heads_kv=8)
        yield dataclasses.replace(base, batch=2, heads=16, heads_kv=8, seqlen_q=4096, dim=256)
        yield dataclasses.replace(base, batch=8, seqlen_q=2048, dim=64, dropout=0.1)
        yield dataclasses.replace(base, batch=32, heads=12, seqlen_q=512, dim=64, causal=False)
        yield dataclasses.replace(base, batch=8, seqlen_q=2048, uneven=True)
        yield dataclasses.replace(base, batch=8, seqlen_q=2048, heads_kv=8, uneven=True)
        yield dataclasses.replace(base, batch=32, heads=12, seqlen_q=512, dim=64, causal=False,
                                  uneven=True)


def _long_context() -> Iterator[Case]:
    for op, lengths in (("forward", (32768, 65536, 131072)), ("backward", (32768, 65536))):
        for seqlen in lengths:
            base = Case(op, "bf16", heads=16, heads_kv=4, seqlen_q=seqlen, dim=128, causal=True)
            yield base
            yield dataclasses.replace(base, window=4095)


def _gpu_features() -> Iterator[Case]:
    """Beside the plain row: what each feature costs."""
    for op in ("forward", "backward"):
        for dim in (64, 128, 256):
            heads = 2048 // dim
            base = Case(op, "bf16", 4, heads, seqlen_q=4096, dim=dim, causal=True)
            yield base
            for changed in (dict(heads_kv=heads // 4), dict(softcap=50.0), dict(alibi=True),
                            dict(dropout=0.1), dict(window=1023),
                            dict(causal=False, block_density=0.25), dict(dtype="f16"),
                            dict(repeatable=True)):
                yield dataclasses.replace(base, **changed)  # type: ignore[arg-type]


def _sinks(base: Case, dims: Tuple[int, ...], lengths: Tuple[int, ...],
           nats: Dict[str, Tuple[float, ...]]) -> Iterator[Case]:
    """A first token that every query looks at, causal; at the last length also without a mask, and
    in a window, which shows it to the first rows."""
    for dtype, dim, seqlen in itertools.product(nats, dims, lengths):
        shape = dataclasses.replace(base, dtype=dtype, batch=base.batch * base.seqlen_q // seqlen,
                                    heads=base.heads * base.dim // dim, seqlen_q=seqlen, dim=dim)
        for each in nats[dtype]:
            yield dataclasses.replace(shape, first_token=each)
        if seqlen == lengths[-1]:
            for each in (nats[dtype][0], nats[dtype][-1]):
                yield dataclasses.replace(shape, first_token=each, causal=False)
                yield dataclasses.replace(shape, first_token=each, window=seqlen // 4 - 1)


def _bias() -> Iterator[Case]:
    """Pair bias, one for the whole batch: protein models, position bias."""
    shapes = ((256, 4, 256, 32), (512, 4, 512, 32), (768, 4, 768, 32), (384, 8, 384, 64),
              (8, 16, 1024, 64), (2, 16, 4096, 128), (2, 8, 4096, 256))
    for changed in (dict(), dict(op="backward"), dict(op="backward", dbias=True)):
        for dtype, (batch, heads, seqlen, dim) in itertools.product(("bf16", "f32"), shapes):
            yield Case(**{"op": "forward", "dtype": "bf16", "batch": batch, "heads": heads,
                          "seqlen_q": seqlen, "dim": dim, "bias": dtype, **changed})
    # Repeatable sums over the batch.
    yield Case("backward", "bf16", 384, 8, seqlen_q=384, bias="bf16", dbias=True, repeatable=True)


PRESETS: Dict[str, List[Case]] = {
    "quick": [Case(op, dtype, heads=4, seqlen_q=2048, dim=64, causal=causal)
              for dtype in ("f32", "bf16") for op in ("forward", "backward")
              for causal in (False, True)],
    "tables": list(_tables(("f32", "bf16", "f16"), ("forward", "backward"))),
    "masks": list(_masks()),
    "features": list(_features()),
    "decode": list(_decode()),
    "mla": [*_latent(("f32", "bf16"), (16, 128), (1,), (1, 4), (4096,)),
            *_expanded("f32", 4, (2048,)), *_expanded("bf16", 4, (2048,))],
    "sinks": list(_sinks(Case(heads=4, seqlen_q=2048, causal=True), (64, 128), (2048,),
                         {"f32": (0, 12, 40, 100), "f16": (0, 12, 40), "bf16": (0, 12, 40, 100)})),
}

GPU_PRESETS: Dict[str, List[Case]] = {
    "gpu": [*_paper("forward"), *_paper("backward")],
    "quick": [*_paper("forward", lengths=(1024, 4096, 16384)),
              *_paper("backward", lengths=(1024, 4096, 16384))],
    "repeatable": list(_paper("backward", repeatable=True)),  # peers: as they are
    "fp32": [*_paper("forward", "f32", (1024, 4096, 16384)),
             *_paper("backward", "f32", (1024, 4096), (64, 128))],
    "fp8": list(_paper("forward", "f8", (1024, 4096, 16384))),
    "decode": list(_gpu_decode()),
    "fp8-decode": [dataclasses.replace(case, dtype_kv=kv) for case in _gpu_decode()
                   for kv in ("", "f8") if not case.parts],
    "mla": [*_latent(("bf16",), (128,), (32, 64), (1, 2, 4), (4096, 32768), ("", "f8")),
            *_latent(("bf16",), (8, 16, 32, 64), (32,), (1,), (8192,), ("", "f8")),
            *_by_index((2, 64, 4096)), *_expanded("bf16", 128, (4096, 8192))],
    "prefill": list(_prefill()),
    "training": list(_training()),
    "long-context": list(_long_context()),
    "features": list(_gpu_features()),
    "bias": list(_bias()),
    "sinks": list(_sinks(Case(batch=4, heads=16, seqlen_q=4096, dim=128, causal=True),
                         (64, 128, 256), (1024, 4096),
                         {"f16": (0, 10, 12, 20, 40), "bf16": (0, 12, 40, 100)})),
}


# By device: its presets, and those that are measured where none is named.
TABLES = {"cpu": (PRESETS, ("quick",)), "cuda": (GPU_PRESETS, ("gpu", "decode"))}


def listed() -> str:
    """The presets, for people."""
    lines = []
    for device, (table, usual) in TABLES.items():
        lines.append(f"presets with --device {device}; without --preset: {', '.join(usual)}")
        lines += [f"  {name:14}{len(cases):4} rows, the first: {cases[0].name()}"
                  for name, cases in table.items()]
    return "\n".join(lines)


def chosen(device: str, presets: Optional[List[str]], only: str = "") -> List[Case]:
    """The cases of presets (None: the device's own), those whose name holds all words of only."""
    table, usual = TABLES[device]
    unknown = [name for name in presets or [] if name not in table]
    if unknown:
        raise SystemExit(f"bench: no preset {unknown[0]} for {device}; there are "
                         f"{', '.join(table)}")
    cases = [case for name in (presets or usual) for case in table[name]]
    words = only.split()
    return [case for case in cases
            if all(word in (case.name() + ("" if case.causal else " full")).split()
                   for word in words)]
