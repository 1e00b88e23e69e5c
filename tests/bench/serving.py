"""./run bench --device cuda --preset serving: what an inference engine asks for, beside
FlashAttention-3 (the wheel fa3-fwd), cuDNN, or another way to the same result.

A row is a call with the tensors of 20 layers, one after the other in one CUDA graph, so that no
layer finds its keys in the L2 cache unless all fit; microseconds a call, launch gaps included.
Runners take turns. "copy" is the time in which a copy on the device moves as many bytes as the call
must. With --device cpu the rows are tried, with small tensors and without graphs.
"""
from __future__ import annotations

import argparse
import csv
import functools
import pathlib
import statistics
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

import flashattn
from paired import Ratio, ratio

ROOT = pathlib.Path(__file__).resolve().parents[2]
WIDTH = 46
_LAYERS, _BYTES = 20, 24 << 30  # fewer layers where their caches would take more
_PAUSE = 5e-3
Work = Callable[[int], Any]  # of a layer


class Row(NamedTuple):
    name: str
    works: Dict[str, Work]  # the first is this library's
    layers: int
    result: torch.Tensor  # of the first layer, which each runner writes or returns
    bytes: int = 0  # that the call must move; 0: they do not count
    flops: float = 0.0


def optional(name: str) -> Any:
    """A function of fa3_fwd_interface, or None."""
    try:
        import fa3_fwd_interface
        return getattr(fa3_fwd_interface, name)
    except Exception:  # it fails to load on other machines in many ways
        return None


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    attention = torch.nn.attention
    with attention.sdpa_kernel([attention.SDPBackend.CUDNN_ATTENTION]):
        return torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True)


class Rows:
    """Makes rows of random numbers. small: divides lengths, to try them."""

    def __init__(self, device: str, small: int = 1) -> None:
        self.device, self.small = device, small
        self.dtype = torch.bfloat16

    def layers(self, cache_bytes: int) -> int:
        return 2 if self.small > 1 else max(2, min(_LAYERS, _BYTES // max(cache_bytes, 1)))

    def normal(self, layers: int, *shape: int) -> List[torch.Tensor]:
        return [torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(layers)]

    def ints(self, numbers: Any) -> torch.Tensor:
        return torch.as_tensor(numbers, dtype=torch.int32, device=self.device)

    def attend(self, batch: int, keys: int, heads: int, kv_heads: int, dim: int, queries: int = 1,
               tree: bool = False, suffix: str = "") -> Row:
        """Queries at the end of caches, causal."""
        keys = max(keys // self.small, queries)
        size = 2 * batch * keys * kv_heads * dim * 2
        n = self.layers(size)
        q = self.normal(n, batch, queries, heads, dim)
        k, v = (self.normal(n, batch, keys, kv_heads, dim) for _ in range(2))
        o = [torch.empty_like(x) for x in q]
        run, fa3 = flashattn.attention, optional("flash_attn_func")
        works: Dict[str, Work] = {
            "ours": lambda i: run(q[i], k[i], v[i], causal=True, o=o[i])}
        if tree:
            words = (queries + 31) // 32
            bits = torch.randint(-2**31, 2**31 - 1, (batch, queries, words), dtype=torch.int32,
                                 device=self.device)
            works = {"ours": lambda i: run(q[i], k[i], v[i], tree_bits=bits, tree=queries, o=o[i]),
                     "causal": works["ours"]}
        elif fa3 is not None:
            works["fa3"] = lambda i: fa3(q[i], k[i], v[i], causal=True, num_splits=0)
        if queries == 1 and self.device == "cuda":
            works["cudnn"] = lambda i: cudnn(q[i], k[i], v[i])
        pairs = queries * keys - queries * (queries - 1) / 2
        name = f"B{batch} H{heads}/{kv_heads} D{dim}, {queries} x {keys}{suffix}"
        return Row(name, works, n, o[0], size, 4.0 * batch * heads * dim * pairs)

    def dense(self, rows: int, heads: int, kv_heads: int, dim: int) -> Row:
        """A forward call with as many queries as keys, whose speed chunks are to reach."""
        rows_here = max(rows // self.small, 1)
        return self.attend(1, rows, heads, kv_heads, dim, rows_here, suffix=", all")

    def uneven(self, longest: int, others: int, count: int) -> Row:
        """Packed caches of one long and many short sequences."""
        lengths = [longest // self.small] + [others // self.small] * count
        starts = self.ints([0, *torch.tensor(lengths).cumsum(0).tolist()])
        each = self.ints(range(len(lengths) + 1))
        size = 2 * sum(lengths) * 8 * 128 * 2
        n = self.layers(size)
        q = self.normal(n, len(lengths), 32, 128)
        k, v = (self.normal(n, sum(lengths), 8, 128) for _ in range(2))
        o = [torch.empty_like(x) for x in q]
        fa3 = optional("flash_attn_varlen_func")
        works: Dict[str, Work] = {"ours": lambda i: flashattn.attention_varlen(
            q[i], k[i], v[i], each, starts, 1, lengths[0], causal=True, o=o[i])}
        if fa3 is not None:
            works["fa3"] = lambda i: fa3(q[i], k[i], v[i], each, starts, 1, lengths[0], causal=True,
                                         num_splits=0)
        name = f"H32/8 D128, packed: {lengths[0]}, {count} of {lengths[1]}"
        return Row(name, works, n, o[0], size)

    def paged(self, batch: int, keys: int, page: int, queries: int = 1) -> Row:
        """Pages in random order, beside the same cache without pages."""
        keys //= self.small
        size = 2 * batch * keys * 8 * 128 * 2
        n, pages = self.layers(size), batch * keys // page
        q = self.normal(n, batch, queries, 32, 128)
        k, v = (self.normal(n, pages, page, 8, 128) for _ in range(2))
        o = [torch.empty_like(x) for x in q]
        table = self.ints(torch.randperm(pages)).view(batch, -1)
        lens = self.ints([keys] * batch)
        fa3 = optional("flash_attn_with_kvcache")
        works: Dict[str, Work] = {
            "ours": lambda i: flashattn.attention_paged(q[i], k[i], v[i], table, lens, causal=True,
                                                        max_seqlen_kv=keys, o=o[i]),
            "unpaged": lambda i: flashattn.attention(
                q[i], k[i].view(batch, keys, 8, 128), v[i].view(batch, keys, 8, 128), causal=True,
                o=o[i])}
        if fa3 is not None:
            works["fa3"] = lambda i: fa3(q[i], k[i], v[i], cache_seqlens=lens, page_table=table,
                                         causal=True)
        return Row(f"B{batch} H32/8 D128, {queries} x {keys}, pages of {page}", works, n, o[0],
                   size)

    def mixed(self, chunks: int, chunk: int, decodes: int, keys: int, page: int = 64) -> Row:
        """Chunks of prompts and single queries in one call, beside a call for each kind."""
        keys, chunk = keys // self.small, max(chunk // self.small, 2)
        rows = [chunk] * chunks + [1] * decodes
        starts = self.ints([0, *torch.tensor(rows).cumsum(0).tolist()])
        count = chunks + decodes
        size = 2 * count * keys * 8 * 128 * 2
        n, pages = self.layers(size), count * keys // page
        q = self.normal(n, sum(rows), 32, 128)
        k, v = (self.normal(n, pages, page, 8, 128) for _ in range(2))
        o = [torch.empty_like(x) for x in q]
        table = self.ints(torch.randperm(pages)).view(count, -1)
        lens = self.ints([keys] * count)
        run, first = flashattn.attention_paged, chunks * chunk

        def one(i: int) -> None:
            run(q[i], k[i], v[i], table, lens, cu_seqlens_q=starts, max_seqlen_q=chunk,
                max_seqlen_kv=keys, causal=True, o=o[i])

        def two(i: int) -> None:
            a, b = (x.split((first, decodes)) for x in (q[i], o[i]))
            run(a[0].view(chunks, chunk, 32, 128), k[i], v[i], table[:chunks], lens[:chunks],
                max_seqlen_kv=keys, causal=True, o=b[0].view(chunks, chunk, 32, 128))
            run(a[1].view(decodes, 1, 32, 128), k[i], v[i], table[chunks:], lens[chunks:],
                max_seqlen_kv=keys, causal=True, o=b[1].view(decodes, 1, 32, 128))

        return Row(f"H32/8 D128, {chunks} of {chunk}, {decodes} of 1, x {keys}",
                   {"ours": one, "two calls": two}, n, o[0])

    def append(self, batch: int, tokens: int, kind: str, dim: int = 128) -> Row:
        """Keys and values into a cache, rotated, and q; kind: of the cache, and of its descales."""
        tokens, eight = max(tokens // self.small, 1), kind != "bf16"
        makes = kind.endswith("made")
        capacity = 2 * tokens + 64
        n = 2 if self.small > 1 else _LAYERS
        q, k, v = (self.normal(n, batch, tokens, heads, dim) for heads in (32, 8, 8))
        caches = [self.normal(n, batch, capacity, 8, dim) for _ in range(2)]
        extra: Dict[str, Any] = {}
        if eight:
            caches = [[x.to(torch.float8_e4m3fn) for x in cache] for cache in caches]
            blocks = -(-capacity // 16) if makes else 1
            descales = [torch.ones(batch, 8, blocks, device=self.device) for _ in range(2)]
            extra = dict(descale_k=descales[0], descale_v=descales[1], update_descales=makes,
                         descale_block=16 if makes else 0)
        lens, after = self.ints([17] * batch), self.ints([0] * batch)
        works: Dict[str, Work] = {"ours": lambda i: flashattn.append_kv(
            caches[0][i], caches[1][i], lens, k[i], v[i], q[i], rotary_base=10000.0, q_out=q[i],
            lens_out=after, **extra)}
        rows = batch * tokens * dim
        moved = rows * (2 * 32 * 2 + 2 * 8 * (2 + (1 if eight else 2)))
        return Row(f"append {batch} x {tokens}, D{dim}, {kind}", works, n, q[0], moved)

    def prefix(self, batch: int, shared: int, own: int) -> Row:
        """A prefix that all sequences share: its attention once, merged with that of their own."""
        shared, own = shared // self.small, max(own // self.small, 1)
        n = 2 if self.small > 1 else 4
        q = self.normal(n, batch, 1, 32, 128)
        k, v = (self.normal(n, 1, shared, 8, 128) for _ in range(2))
        own_k, own_v = (self.normal(n, batch, own, 8, 128) for _ in range(2))
        full = [[torch.cat([a[i].expand(batch, -1, -1, -1), b[i]], 1) for i in range(n)]
                for a, b in ((k, own_k), (v, own_v))]
        o = [torch.empty_like(x) for x in q]
        run = flashattn.attention

        def cascade(i: int) -> None:
            parts = [run(q[i].view(1, batch, 32, 128), k[i], v[i], return_lse=True),
                     run(q[i], own_k[i], own_v[i], return_lse=True)]
            flashattn.merge([parts[0][0].view(q[i].shape), parts[1][0]],
                            [parts[0][1].view(32, batch).t().contiguous().unsqueeze(-1),
                             parts[1][1]], o=o[i])

        return Row(f"{batch} share {shared}, own {own}",
                   {"ours": cascade, "each its own": lambda i: run(q[i], full[0][i], full[1][i],
                                                                   o=o[i])}, n, o[0])

    def all(self) -> Iterator[Tuple[str, Callable[[], Row]]]:
        """Sections, and what makes their rows."""
        attend = functools.partial  # a row is made when it is measured
        for shape in ((1, 1024, 32, 8, 128), (1, 8192, 32, 8, 128), (1, 8192, 8, 1, 128),
                      (1, 8192, 16, 16, 64), (16, 8192, 32, 8, 128), (64, 4096, 32, 8, 128),
                      (16, 4096, 16, 8, 256)):
            yield "decode", attend(self.attend, *shape)
        yield "decode", lambda: self.uneven(32768, 2048, 15)
        for page in (256, 64, 16, 1):
            yield "decode", attend(self.paged, 16, 8192, page)
        for queries in (2, 4, 8, 16, 32, 64):
            yield "spec", attend(self.attend, 16, 8192, 32, 8, 128, queries)
        yield "spec", lambda: self.attend(16, 8192, 64, 8, 128, 4)
        yield "spec", lambda: self.attend(16, 8192, 32, 8, 128, 64, True, ", tree")
        yield "spec", lambda: self.dense(8192, 32, 8, 128)
        for keys in (8192, 65536):
            for queries in (64, 128, 256, 512):
                yield "spec", attend(self.attend, 1, keys, 32, 8, 128, queries)
        yield "spec", lambda: self.mixed(4, 512, 60, 8192)
        # GPUs take descales of blocks for heads up to 64.
        for kind, dim in (("bf16", 128), ("f8", 128), ("f8, descales made", 64)):
            for batch, tokens in ((32, 1), (4, 4096)):
                yield "append", attend(self.append, batch, tokens, kind, dim)
        yield "prefix", lambda: self.prefix(64, 32768, 256)


class Timer:
    """Seconds a call of a layer."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    def ready(self, work: Work, layers: int) -> Callable[[], float]:
        def turn() -> None:
            for i in range(layers):
                work(i)

        turn()
        if not self.on_gpu:
            return lambda: self.by_host(turn) / layers
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            turn()
        graph.replay()
        return lambda: self.by_device(graph) / layers

    @staticmethod
    def by_host(turn: Callable[[], Any]) -> float:
        start = time.perf_counter()
        turn()
        return time.perf_counter() - start

    @staticmethod
    def by_device(graph: Any) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / 2

    def copy(self) -> float:
        """Bytes a second that a copy reads and writes."""
        size = 1 << (31 if self.on_gpu else 24)
        source = torch.zeros(size, dtype=torch.uint8, device="cuda" if self.on_gpu else "cpu")
        to = torch.empty_like(source)
        if not self.on_gpu:
            turn = self.ready(lambda i: to.copy_(source), 5)
            return 2 * size / statistics.median(turn() for _ in range(5))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):  # not in a graph, whose copies go by a slower engine
            start.record()
            for _ in range(5):
                to.copy_(source)
            end.record()
            torch.cuda.synchronize()
        return 2 * size * 5 / (float(start.elapsed_time(end)) * 1e-3)


def measure(row: Row, timer: Timer, rounds: int) -> Tuple[Dict[str, List[float]], List[str]]:
    """Seconds of each runner by round, and why others did not run."""
    turns, notes = {}, []
    for name, work in row.works.items():
        try:
            turns[name] = timer.ready(work, row.layers)
        except Exception as error:  # peers have many ways to refuse
            if name == "ours":
                raise
            notes.append(f"{name}: {str(error).split(chr(10), maxsplit=1)[0][:90]}")
    times: Dict[str, List[float]] = {name: [] for name in turns}
    order = list(turns)
    for _ in range(rounds):
        for name in order:
            times[name].append(turns[name]())
            time.sleep(_PAUSE)
        order.append(order.pop(0))
    return times, notes


def shown(row: Row, times: Dict[str, List[float]], copy: float) -> Tuple[str, Dict[str, Any]]:
    median = {name: statistics.median(t) for name, t in times.items()}
    line: Dict[str, Any] = {"name": row.name, "bytes": row.bytes, "flops": row.flops,
                            **{f"{name}_seconds": t for name, t in median.items()}}
    text = f"{row.name:{WIDTH}}{median['ours'] * 1e6:9.1f}"
    if row.bytes:
        line["copy_seconds"] = least = row.bytes / copy
        text += f"{least * 1e6:9.1f}{least / median['ours']:7.2f}"
    else:
        text += f"{'':16}"
    text += f"{row.flops / median['ours'] * 1e-12:7.0f}" if row.flops else f"{'':7}"
    for name in list(times)[1:]:
        found: Ratio = ratio(times["ours"], times[name])
        text += f"   {name} {median[name] * 1e6:.1f}, {found}"
        line[f"{name}_ratio"] = found.median
    return text, line


def main(options: argparse.Namespace, small: int = 1) -> int:
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise SystemExit("bench: --preset serving needs a GPU, and PyTorch finds none; "
                         "--device cpu tries it")
    small = small if on_gpu else max(small, 32)
    torch.manual_seed(0)
    rows, timer = Rows(options.device, small), Timer(options.device)
    with torch.no_grad():
        copy = timer.copy()
        name = torch.cuda.get_device_name() if on_gpu else "CPU, small tensors"
        print(f"{name}, PyTorch {torch.__version__}; a copy: {copy * 1e-12:.2f} TB/s read and "
              f"written\n{'us a call':{WIDTH}}{'ours':>9}{'copy':>9}{'part':>7}{'TFLOP/s':>7}"
              "   others, how many times as fast ours is")
        lines, section = [], ""
        for title, make in rows.all():
            if title != section:
                print(section := title, flush=True)
            row = make()
            times, notes = measure(row, timer, options.rounds)
            text, line = shown(row, times, copy)
            print("\n".join([text, *(f"{'':4}{note}" for note in notes)]), flush=True)
            lines.append({"section": title, **line})
            del row
            if on_gpu:
                torch.cuda.empty_cache()
    table: Optional[pathlib.Path] = options.csv or ROOT / "build" / "bench" / "serving.csv"
    table.parent.mkdir(parents=True, exist_ok=True)
    with table.open("w", newline="", encoding="utf-8") as file:
        fields = list(dict.fromkeys(key for line in lines for key in line))
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    print(f"table: {table}")
    return 0
