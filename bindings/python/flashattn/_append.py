"""New keys and values into a cache: flashattn_append_kv."""
from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Tuple

import numpy as np

from . import _arrays, _gpu, _parallel
from ._arrays import CACHE_8BIT, F8, F32, FLOAT32, NAMES, View, beside, check_writable, view
from ._constants import Reason, Rotary
from ._errors import counted, fail, invalid, wrong_type
from ._inputs import Tensor, check_pages, first_given, longest, sequences, set_sizes
from ._library import ffi, lib
from ._names import says_options
from ._options import flag, integer, real, uniform
from ._plan import cached_plan

_MEMBERS = dict(ffi.typeof("flashattn_append_kv_args").fields)
_INT32 = ffi.typeof("int32_t *")


class Appended(NamedTuple):
    """What append_kv() made: q rotated, None without q; and the tokens that the cache now holds,
    which attention() takes as lens_kv. None without k and v."""

    q: Any = None
    lens_kv: Any = None


@says_options
def append_kv(k_cache: Any, v_cache: Any, lens_kv: Any, k: Any = None, v: Any = None,
              q: Any = None, *, rotary_cos: Any = None, rotary_sin: Any = None,
              rotary_base: Optional[float] = None, rotary_dim: Optional[int] = None,
              rotary_interleaved: bool = False, positions: Any = None, starts_kv: Any = None,
              cu_seqlens_q: Any = None, lens_q: Any = None, page_table: Any = None,
              max_seqlen_q: Optional[int] = None, max_seqlen_kv: Optional[int] = None,
              layout: Optional[str] = None, cache_layout: Optional[str] = None,
              descale_k: Any = None, descale_v: Any = None, descale_block: int = 0,
              update_descales: bool = False, q_out: Any = None, lens_out: Any = None,
              threads: int = 0, stream: Any = None, parallel: Any = None) -> Appended:
    """Writes new keys and values behind those in a cache, and rotates them and q.

        q, lens = flashattn.append_kv(k_cache, v_cache, lens, k, v, q, rotary_base=10000.0)
        o = flashattn.attention(q, k_cache, v_cache, lens_kv=lens, causal=True)

    k_cache, v_cache  (batch, capacity, heads_kv, dim), written from row lens_kv[b] on; with
                page_table (pages, page_size, heads_kv, dim). The type of k, float8_e4m3fn or,
                on a CPU, int8
    lens_kv     (batch,) integers: tokens in the cache
    q, k, v     (batch, seqlen_q, heads, dim), or with cu_seqlens_q (total_q, heads, dim); each may
                be left out. float32, float16 or bfloat16
    rotary_cos, rotary_sin  (positions, rotary_dim / 2): rotate the first rotary_dim elements of q
                and k (Su et al. 2021). Or rotary_base, usually 10000, for angles
                position * rotary_base ** (-2 c / rotary_dim); rotary_dim None: all of a head
    rotary_interleaved  pairs are neighbours; else the halves of the rotated part
    positions   (batch,) integers: of each sequence's first new token. None: lens_kv - starts_kv
    cu_seqlens_q, lens_q, starts_kv, page_table, max_seqlen_q, max_seqlen_kv, threads, parallel,
                stream  as in attention(), attention_varlen() and attention_paged()
    layout, cache_layout  order of dimensions of q, k, v ("bshd", "bhsd"; packed "thd"), and of the
                cache ("bshd"; pages "pshd")
    descale_k, descale_v  float32, broadcast to (batch, heads_kv, blocks) of descale_block tokens
                (0: all), of an 8-bit cache: k times 1 / descale_k is rounded
    update_descales  True: descale_k and descale_v, which must have that shape in full, are made
                for the new tokens, and written: a block's largest magnitude over 448 (int8: 127),
                with descale_block > 1 the next power of two. Where a block grows beyond its
                descale, what it held is rounded again: its pages must be of this sequence alone
    q_out       written and returned as q; q itself will do. None: one is made
    lens_out    (batch,) int32, written and returned: lens_kv itself is incremented in place. None:
                one is made

    On a GPU the call enqueues its work and returns, as attention() does; a graph may capture it.
    Raises as attention() does; on a CPU ValueError for tokens that have no room or no page.
    """
    lengths = dict(cu_seqlens_q=cu_seqlens_q, lens_q=lens_q, lens_kv=lens_kv, starts_kv=starts_kv,
                   positions=positions)
    call = _Call(dict(q=q, k=k, v=v), dict(k=k_cache, v=v_cache), layout, cache_layout, stream,
                 lengths, page_table, max_seqlen_q, max_seqlen_kv)
    call.add_rotary(rotary_cos, rotary_sin, rotary_base, rotary_dim, rotary_interleaved)
    block = integer(descale_block, "descale_block")
    call.add_descales(dict(k=descale_k, v=descale_v), block,
                      flag(update_descales, "update_descales"))
    made = Appended(call.add_q_out(q_out), call.add_lens_out(lens_kv, lens_out))
    place, args = call.place, call.args
    options: Dict[str, Any] = dict(varlen_q=cu_seqlens_q is not None)
    options.update({"device": place.device} if place else {"threads": threads})
    if call.dtype_kv in CACHE_8BIT:
        options.update(dtype_o=F32, descale_block=block)
    # GPU kernels have no plan of wide queries beside an 8-bit cache; this call needs none.
    dtype = F8 if call.dtype_kv == F8 else call.dtype
    plan = cached_plan((dtype, call.dtype_kv, *call.heads(), call.page_size), uniform(options))
    pool = None if parallel is None else _parallel.pool_of(parallel)
    if pool is not None:
        _parallel.put(args, pool)
    with _gpu.launch(place):
        status = lib.flashattn_append_kv(plan._plan, args, _gpu.native_stream(place))
    if pool is not None and pool.error is not None:
        raise pool.error
    if status:
        fail(status)
    return made


class _Call:
    """flashattn_append_kv_args of arrays, which it keeps alive."""

    def __init__(self, given: Dict[str, Any], caches: Dict[str, Any], layout: Optional[str],
                 cache_layout: Optional[str], stream: Any, lengths: Dict[str, Any],
                 page_table: Any, max_q: Optional[int], max_kv: Optional[int]) -> None:
        first, cache = first_given(*given.values()), first_given(*caches.values())
        if first is None or cache is None:
            name = "k_cache" if cache is None else "k"
            raise invalid(f"{name} and the arrays like it are all None; give one",
                          Reason.NULL_POINTER, name)
        if lengths["lens_kv"] is None:
            raise invalid("lens_kv is None, but new tokens are written behind those in the cache; "
                          "give how many it holds of each sequence, numpy.zeros(batch, "
                          "numpy.int32) at first", Reason.NULL_POINTER, "lens_kv")
        self.place = place = _gpu.place_of(cache, stream, None, None, "k_cache")
        self.makers = None if place else _gpu.on_host(first)
        self.kept: Dict[str, View] = {
            name: beside(array, name, "i32", place) for name, array in lengths.items()
            if array is not None}
        packed = "cu_seqlens_q" in self.kept
        self.layout = layout or ("thd" if packed else "bshd")
        self.tensors = {name: Tensor(view(array, name, place), self.layout, 3 if packed else 4,
                                     name) for name, array in given.items() if array is not None}
        paged = page_table is not None
        order = cache_layout or ("pshd" if paged else "bshd")
        self.caches = {name: Tensor(view(array, name + "_cache", place), order, 4, name + "_cache")
                       for name, array in caches.items() if array is not None}
        if paged:
            for name, pages in self.caches.items():
                check_pages(pages, order, name + "_cache")
        self._check_types()
        self.args = args = ffi.new("flashattn_append_kv_args *")
        args.struct_size, args.dtype = ffi.sizeof("flashattn_append_kv_args"), self.dtype
        self.page_size = next(iter(self.caches.values())).rows if paged else 0
        self.sizes = self._sizes(page_table, max_q, max_kv)
        set_sizes(args, self.sizes)
        for name, array in self.kept.items():
            if name == "page_table":
                continue
            _arrays.check_shape(array.shape, (self.sizes["batch"] + name.startswith("cu_"),), name)
            _arrays.check_packed(array, name)
            setattr(args, name, ffi.cast(_MEMBERS[name].type, array.pointer))
        for name, tensor in self.tensors.items():
            setattr(args, name, tensor.c())
            if name != "q":
                cached = self.caches[name]
                check_writable(cached.view, name + "_cache")
                setattr(args, name + "_cache", cached.c())

    def _check_types(self) -> None:
        for name in self.tensors:
            if name != "q" and name not in self.caches:
                raise invalid(f"{name} is given without {name}_cache, where it is to be written; "
                              "give both", Reason.NULL_POINTER, name + "_cache")
        names = [NAMES[tensor.view.dtype] for tensor in self.tensors.values()]
        if len(set(names)) > 1:
            raise wrong_type(f"{', '.join(self.tensors)} have dtypes {', '.join(names)}; give all "
                             "of one", "dtype")
        self.dtype = next(iter(self.tensors.values())).view.dtype
        kinds = {cache.view.dtype for cache in self.caches.values()}
        if len(kinds) > 1 or not kinds <= {self.dtype, *CACHE_8BIT}:
            raise wrong_type(f"the cache has dtypes {', '.join(NAMES[n] for n in sorted(kinds))}, "
                             f"new tokens {names[0]}; give a cache of {names[0]}, "
                             "float8_e4m3fn or int8", "k_cache")
        self.dtype_kv = kinds.pop()

    def heads(self) -> Tuple[int, int, int, int]:
        """heads_q, heads_kv, dim_qk, dim_v of the plan. An array that is left out counts as one of
        those that are given."""
        q, k, v = (self.tensors.get(name) for name in "qkv")
        cache_k, cache_v = (self.caches.get(name) for name in "kv")
        heads_kv = next(iter(self.caches.values())).heads
        dim_qk = first_given(cache_k, q, k, cache_v).dim
        return q.heads if q else heads_kv, heads_kv, dim_qk, cache_v.dim if cache_v else dim_qk

    def _sizes(self, page_table: Any, max_q: Optional[int], max_kv: Optional[int]
               ) -> Dict[str, int]:
        tokens, cache = next(iter(self.tensors.values())), next(iter(self.caches.values()))
        _, heads_kv, dim_qk, dim_v = self.heads()
        for name, tensor in self.tensors.items():
            same = (tokens.batch, tokens.rows, dim_v if name == "v" else dim_qk) + (
                () if name == "q" else (heads_kv,))
            if (tensor.batch, tensor.rows, tensor.dim, tensor.heads)[:len(same)] != same:
                raise invalid(f"{name} has shape {tensor.view.shape}; expected "
                              f"{counted(tokens.rows, 'token')} of "
                              f"{counted(tokens.batch, 'sequence')} in layout=\"{self.layout}\", "
                              f"with {counted(heads_kv, 'head')} (q: any multiple) of {same[2]} "
                              "elements as the cache and the other arrays have", Reason.SIZE, name)
        for name, other in self.caches.items():
            if (other.batch, other.heads, other.rows) != (cache.batch, cache.heads, cache.rows):
                raise invalid(f"{name}_cache has shape {other.view.shape}, the other "
                              f"{cache.view.shape}; only their last dimension may differ",
                              Reason.SIZE, name + "_cache")
        sizes = dict(batch=tokens.batch, seqlen_q=tokens.rows, seqlen_kv=cache.rows, total_q=0)
        if "cu_seqlens_q" in self.kept:
            sizes["batch"] = sequences(self.kept["cu_seqlens_q"], "cu_seqlens_q")
            sizes["total_q"] = tokens.rows
            sizes["seqlen_q"] = longest(self.kept, "q") if max_q is None else \
                integer(max_q, "max_seqlen_q")
        elif max_q is not None:
            raise invalid(f"max_seqlen_q = {max_q} has a meaning only with cu_seqlens_q; leave it "
                          "out", Reason.SIZE, "seqlen_q")
        if page_table is None:
            if cache.batch != sizes["batch"]:
                raise invalid(f"the cache holds {counted(cache.batch, 'sequence')}, new "
                              f"tokens are of {sizes['batch']}; give as many", Reason.SIZE, "batch")
        else:
            table = self.kept["page_table"] = beside(page_table, "page_table", "i32", self.place)
            _arrays.check_shape(table.shape, (sizes["batch"], None), "page_table")
            if table.shape[1] > 1 and table.strides[1] != 1:
                raise invalid(f"page_table has stride {table.strides[1]} in its last dimension; "
                              f"{table.remedy}", Reason.STRIDE, "page_table")
            self.args.page_table = (table.pointer, table.strides[0], 0, 0)
            sizes.update(seqlen_kv=table.shape[1] * cache.rows, pages=cache.batch)
        if max_kv is not None:
            if not 0 <= integer(max_kv, "max_seqlen_kv") <= sizes["seqlen_kv"]:
                raise invalid(f"max_seqlen_kv = {max_kv} is not within 0 and the "
                              f"{sizes['seqlen_kv']} tokens that a sequence has room for",
                              Reason.SIZE, "seqlen_kv")
            sizes["seqlen_kv"] = max_kv
        return sizes

    def add_rotary(self, cos: Any, sin: Any, base: Optional[float], dim: Optional[int],
                   interleaved: bool) -> None:
        args = self.args
        turns = cos is not None or base is not None or bool(dim)
        if flag(interleaved, "rotary_interleaved") and turns:
            args.rotary = Rotary.INTERLEAVED
        if (cos is None) != (sin is None) or (cos is not None and base is not None):
            raise invalid("rotary_cos and rotary_sin go together, and not with rotary_base; give "
                          "both tables or a base", Reason.NULL_POINTER, "rotary_cos")
        if cos is None:
            if base is not None:
                args.rotary_base = real(base, "rotary_base")
                args.rotary_dim = self.heads()[2] if dim is None else integer(dim, "rotary_dim")
            elif dim:
                args.rotary_dim = integer(dim, "rotary_dim")
            return
        for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
            seen = self.kept[name] = view(table, name, self.place)
            pairs = None if dim is None else integer(dim, "rotary_dim") // 2
            _arrays.check_shape(seen.shape, (None, pairs), name)
            if seen.shape != self.kept["rotary_cos"].shape or \
                    seen.dtype != self.kept["rotary_cos"].dtype:
                raise invalid("rotary_cos and rotary_sin differ in shape or dtype; give two alike",
                              Reason.SIZE, name)
            if seen.shape[1] > 1 and seen.strides[1] != 1 or seen.strides[0] < 0:
                raise invalid(f"{name} has strides {seen.strides}; {seen.remedy}", Reason.STRIDE,
                              name)
            setattr(args, name, (seen.pointer, 0, 0, seen.strides[0]))
        args.dtype_rotary, args.rotary_positions = seen.dtype, seen.shape[0]
        args.rotary_dim = 2 * seen.shape[1]

    def add_descales(self, given: Dict[str, Any], block: int, updates: bool) -> None:
        self.args.update_descales = updates
        tokens = self.sizes["seqlen_kv"]
        blocks = -(-tokens // block) if block > 0 else min(tokens, 1)
        expected = (self.sizes["batch"], self.heads()[1], blocks)
        for side, array in given.items():
            if array is None:
                continue
            name = "descale_" + side
            if self.place is None and not hasattr(array, "shape") and not updates:
                array = np.asarray(array, np.float32)
            seen = self.kept[name] = view(array, name, self.place, FLOAT32)
            if updates:
                _arrays.check_shape(seen.shape, expected, name)
                _gpu.check_order(array, name, self.place)
                check_writable(seen, name)
            missing = 3 - len(seen.shape)
            shape, steps = (1,) * missing + seen.shape, (0,) * missing + seen.strides
            if missing < 0 or any(n not in (1, e) for n, e in zip(shape, expected)):
                raise invalid(f"{name} has shape {seen.shape}, which does not broadcast to (batch, "
                              f"heads_kv, blocks) = {expected}", Reason.SIZE, name)
            setattr(self.args, name, (seen.pointer, *[0 if n == 1 else step for n, step in
                                                      zip(shape, steps)]))

    def add_q_out(self, given: Any) -> Any:
        q = self.tensors.get("q")
        if q is None:
            if given is not None:
                raise invalid("q_out is given without q; give both", Reason.NULL_POINTER, "q_out")
            return None
        ragged = "lens_q" in self.kept or "cu_seqlens_q" in self.kept
        array = given if given is not None else _arrays.new(
            q.view.shape, self.dtype, ragged, self.place, "q_out", self.makers)
        seen = self.kept["q_out"] = view(array, "q_out", self.place, made=given is None)
        if given is not None:
            _gpu.check_order(array, "q_out", self.place)
            check_writable(seen, "q_out")
        if seen.shape != q.view.shape or seen.dtype != self.dtype:
            raise invalid(f"q_out has shape {seen.shape} and dtype {NAMES[seen.dtype]}; expected "
                          f"{q.view.shape} and {NAMES[self.dtype]} as q has", Reason.SIZE, "q_out")
        self.args.q_out = Tensor(seen, self.layout, len(seen.shape), "q_out").c()
        return array

    def add_lens_out(self, lens_kv: Any, given: Any) -> Any:
        if "k" not in self.tensors and "v" not in self.tensors:
            if given is not None:
                raise invalid("lens_out is given without k and v; leave it out",
                              Reason.NULL_POINTER, "lens_out")
            return None
        shape = (self.sizes["batch"],)
        array = given
        if array is None:
            if self.place is not None:
                array = _gpu.new(shape, "int32", False, self.place, "lens_out")
            elif _gpu.on_host(lens_kv) is not None:
                array = _gpu.on_host(lens_kv).new_on_host(shape, "int32", False)  # type: ignore
            else:
                array = np.empty(shape, np.int32)
        seen = self.kept["lens_out"] = view(array, "lens_out", self.place, _arrays.INT32,
                                            made=given is None)
        _arrays.check_shape(seen.shape, shape, "lens_out")
        _arrays.check_packed(seen, "lens_out")
        if given is not None:
            _gpu.check_order(array, "lens_out", self.place)
            check_writable(seen, "lens_out")
        self.args.lens_out = ffi.cast(_INT32, seen.pointer)
        return array
