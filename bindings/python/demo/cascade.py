"""Decodes a token for each of many sequences that share a prefix, with and without sharing it.

python -m demo.cascade, in bindings/python; the C program is bindings/c/examples/cascade.c.
"""
from __future__ import annotations

import time
from typing import Any, Callable, NamedTuple, Tuple

import numpy as np

import flashattn

HEADS, HEADS_KV, DIM, PAGE_SIZE = 8, 8, 128, 64
SUFFIX_PAGES = 3


class Cache(NamedTuple):
    """Sequences whose page tables begin with the same pages."""

    k: np.ndarray  # (pages, PAGE_SIZE, heads_kv, DIM)
    v: np.ndarray
    page_table: np.ndarray  # (sequences, prefix pages + SUFFIX_PAGES)
    suffix: np.ndarray  # (sequences,): tokens of each behind the prefix
    prefix: int  # tokens that all share, whole pages


def make(prefix: int, sequences: int, heads_kv: int = HEADS_KV) -> Tuple[np.ndarray, Cache]:
    """Random queries (sequences, HEADS, DIM), one a sequence, and caches."""
    generator = np.random.default_rng(1)
    shared = prefix // PAGE_SIZE
    pages = shared + sequences * SUFFIX_PAGES
    q = 2 * generator.standard_normal((sequences, HEADS, DIM), np.float32)
    k, v = generator.standard_normal((2, pages, PAGE_SIZE, heads_kv, DIM), np.float32)
    table = np.empty((sequences, shared + SUFFIX_PAGES), np.int32)
    table[:, :shared] = np.arange(shared)
    table[:, shared:] = shared + np.arange(sequences * SUFFIX_PAGES).reshape(sequences, -1)
    suffix = (1 + np.arange(sequences) * 53 % (SUFFIX_PAGES * PAGE_SIZE)).astype(np.int32)
    return q, Cache(k, v, table, suffix, shared * PAGE_SIZE)


def whole(q: np.ndarray, cache: Cache) -> Tuple[Any, Any]:
    """One call, in which each sequence reads the keys of the prefix for itself: o (sequences,
    HEADS, DIM) and lse (HEADS, sequences)."""
    starts = np.arange(len(q) + 1, dtype=np.int32)  # a packed query each
    return flashattn.attention_paged(q, cache.k, cache.v, cache.page_table,
                                     cache.prefix + cache.suffix, cu_seqlens_q=starts,
                                     max_seqlen_q=1, causal=True, return_lse=True)


def cascade(q: np.ndarray, cache: Cache) -> Tuple[Any, Any]:
    """The same: the prefix as one sequence that has all queries, without a mask, so that its keys
    are read once; each suffix by its own pages; and their merge, which is exact (Juravsky et al.
    2024, Ye et al. 2024)."""
    starts = np.arange(len(q) + 1, dtype=np.int32)
    shared = cache.prefix // PAGE_SIZE
    one = np.array([0, len(q)], np.int32)
    prefix = flashattn.attention_paged(q, cache.k, cache.v, cache.page_table[:1, :shared],
                                       np.array([cache.prefix], np.int32), cu_seqlens_q=one,
                                       max_seqlen_q=len(q), return_lse=True)
    suffix = flashattn.attention_paged(q, cache.k, cache.v, cache.page_table[:, shared:],
                                       cache.suffix, cu_seqlens_q=starts, max_seqlen_q=1,
                                       causal=True, return_lse=True)
    parts_o, parts_lse = zip(prefix, suffix)
    return flashattn.merge(parts_o, parts_lse)


def seconds(call: Callable[[], Any], rounds: int = 3) -> float:
    """Of the fastest of some rounds, after one that starts threads."""
    call()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def main(prefix: int = 32768, sequences: int = 64) -> int:
    q, cache = make(prefix, sequences)
    (o, lse), (o_whole, lse_whole) = cascade(q, cache), whole(q, cache)
    print(f"{sequences} sequences behind a prefix of {prefix} tokens, {HEADS} heads on {HEADS_KV} "
          f"of {DIM}, fp32; {flashattn.devices()[0].name}")
    print(f"o differs by at most {np.abs(o - o_whole).max():.1e}, "
          f"lse by {np.abs(lse - lse_whole).max():.1e}")
    each, once = seconds(lambda: whole(q, cache)), seconds(lambda: cascade(q, cache))
    print(f"whole {1e3 * each:.1f} ms, cascade {1e3 * once:.1f} ms: {each / once:.1f} times as "
          "fast")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
