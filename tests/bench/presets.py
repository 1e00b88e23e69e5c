"""Presets of the bench: what each measures, by device."""
from __future__ import annotations

import dataclasses
import itertools
from typing import Dict, Iterator, List, Optional, Tuple

from cases import Case


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


def _block_masks() -> Iterator[Case]:
    """Beside the dense row. What a work tile costs beside its blocks weighs less with length."""
    for op in ("forward", "backward"):
        for dim, heads, lengths in ((64, 16, (4096, 16384, 65536)), (128, 16, (4096, 16384, 65536)),
                                    (256, 8, (4096, 16384))):
            for seqlen in lengths:
                batch = max(16384 // seqlen, 1)
                base = Case(op, "bf16", batch, heads if seqlen < 65536 else heads // 2,
                            seqlen_q=seqlen, dim=dim)
                yield base
                for size, density in itertools.product((128, 64), (0.5, 0.25, 0.1, 0.03)):
                    yield dataclasses.replace(base, block_density=density, block_size=size)
                yield dataclasses.replace(base, block_density=0.1, block_lists=True)


def _fp8_features() -> Iterator[Case]:
    for dim in (64, 128, 256):
        base = Case("forward", "f8", 4, 2048 // dim, seqlen_q=4096, dim=dim, causal=True)
        yield base
        for changed in (dict(heads_kv=512 // dim), dict(descale_block=64), dict(softcap=50.0),
                        dict(alibi=True), dict(window=1023)):
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
    "fp8-features": list(_fp8_features()),
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
    "block-masks": list(_block_masks()),
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
