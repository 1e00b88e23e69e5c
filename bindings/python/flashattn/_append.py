"""New keys and values into a cache: flashattn_append_kv."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, NamedTuple, Optional, Tuple

import numpy as np

from . import _arrays, _gpu
from ._arrays import CACHE_8BIT, F8, F32, NAMES, beside, check_writable, view
from ._calls import Call
from ._constants import AppendKvOptions, Reason, Rotary
from ._errors import counted, invalid, wrong_type
from ._inputs import Tensor, check_pages, first_given, sequences
from ._library import lib
from ._members import extents, written
from ._names import takes
from ._options import flag, integer, real, uniform
from ._plan import cached_plan

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Appended(NamedTuple):
    """What append_kv() made: q rotated, None without q; and the tokens that the cache now holds,
    which attention() takes as lens_kv. None without k and v."""

    q: Any = None
    lens_kv: Any = None


@takes(AppendKvOptions)
def append_kv(k_cache: Any, v_cache: Any, lens_kv: Any, k: Any = None, v: Any = None,
              q: Any = None, *, rotary_base: Optional[float] = None,
              rotary_dim: Optional[int] = None, rotary_interleaved: bool = False,
              max_seqlen_q: Optional[int] = None, max_seqlen_kv: Optional[int] = None,
              layout: Optional[str] = None, cache_layout: Optional[str] = None,
              descale_block: int = 0, update_descales: bool = False, q_out: Any = None,
              threads: int = 0, stream: Any = None, parallel: Any = None,
              **arrays: Unpack[AppendKvOptions]) -> Appended:
    """Writes new keys and values behind those in a cache, and rotates them and q.

        q, lens = flashattn.append_kv(k_cache, v_cache, lens, k, v, q, rotary_base=10000.0)
        o = flashattn.attention(q, k_cache, v_cache, lens_kv=lens, causal=True)

    k_cache, v_cache  (batch, capacity, heads_kv, dim), written from row lens_kv[b] on; with
                page_table (pages, page_size, heads_kv, dim), with cu_seqlens_kv (total_kv,
                heads_kv, dim). The type of k, float8_e4m3fn or, on a CPU, int8
    lens_kv     (batch,) integers: tokens in the cache
    q, k, v     (batch, seqlen_q, heads, dim), or with cu_seqlens_q (total_q, heads, dim); each may
                be left out. float32, float16 or bfloat16
    rotary_cos, rotary_sin  (positions, rotary_dim / 2): rotate the first rotary_dim elements of q
                and k (Su et al. 2021). Or rotary_base, usually 10000, for angles
                position * rotary_base ** (-2 c / rotary_dim); rotary_dim None: all of a head
    rotary_interleaved  pairs are neighbours; else the halves of the rotated part
    positions   (batch,) integers: of each sequence's first new token. None: lens_kv - starts_kv
    cu_seqlens_q, cu_seqlens_kv, lens_q, starts_kv, page_table, max_seqlen_q, max_seqlen_kv,
                threads, parallel, stream  as in attention(), attention_varlen() and
                attention_paged()
    layout, cache_layout  order of dimensions of q, k, v ("bshd", "bhsd"; packed "thd"), and of the
                cache ("bshd"; packed "thd", pages "pshd")
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
    call = _Call(dict(q=q, k=k, v=v), dict(k=k_cache, v=v_cache), layout, cache_layout, stream,
                 dict(arrays, lens_kv=lens_kv), flag(update_descales, "update_descales"),
                 dict(q=max_seqlen_q, kv=max_seqlen_kv))
    block = call.sizes["descale_block"] = integer(descale_block, "descale_block")
    call.add_rotary(rotary_base, rotary_dim, rotary_interleaved)
    call.put_all()
    made = Appended(call.add_q_out(q_out), call.add_lens_out(lens_kv))
    place = call.place
    options: Dict[str, Any] = dict(varlen_q=call.varlen_q, varlen_kv="cu_seqlens_kv" in call.kept)
    options.update({"device": place.device} if place else {"threads": threads})
    if call.dtype_kv in CACHE_8BIT:
        options.update(dtype_o=F32, descale_block=block)
    # GPU kernels have no plan of wide queries beside an 8-bit cache; this call needs none.
    dtype = F8 if call.dtype_kv == F8 else call.dtype
    plan = cached_plan((dtype, call.dtype_kv, *call.heads(), call.page_size), uniform(options))
    call.run(lib.flashattn_append_kv, plan, parallel)
    return made


class _Call(Call):
    def __init__(self, given: Dict[str, Any], caches: Dict[str, Any], layout: Optional[str],
                 cache_layout: Optional[str], stream: Any, arrays: Dict[str, Any], updates: bool,
                 most: Dict[str, Optional[int]]) -> None:
        first, cache = first_given(*given.values()), first_given(*caches.values())
        if first is None or cache is None:
            name = "k_cache" if cache is None else "k"
            raise invalid(f"{name} and the arrays like it are all None; give one",
                          Reason.NULL_POINTER, name)
        if arrays["lens_kv"] is None:
            raise invalid("lens_kv is None, but new tokens are written behind those in the cache; "
                          "give how many it holds of each sequence, numpy.zeros(batch, "
                          "numpy.int32) at first", Reason.NULL_POINTER, "lens_kv")
        place = _gpu.place_of(cache, stream, None, None, "k_cache")
        super().__init__("flashattn_append_kv_args", place, first, {})
        for name, array in arrays.items():
            # A copy of what is written would do no good.
            kind = self.table[name].type
            if array is not None:
                self.kept[name] = written(array, name, kind, place) if self.table[
                    name].role == "output" or (updates and name.startswith("descale_")) else \
                    beside(array, name, kind, place)
        self.given, self.updates, self.varlen_q = arrays, updates, "cu_seqlens_q" in self.kept
        self.args.update_descales = updates
        self.ragged = self.varlen_q or "lens_q" in self.kept
        self.layout = layout or ("thd" if self.varlen_q else "bshd")
        self.tensors = {name: Tensor(view(array, name, place), self.layout,
                                     3 if self.varlen_q else 4, name)
                        for name, array in given.items() if array is not None}
        paged, packed = "page_table" in self.kept, "cu_seqlens_kv" in self.kept
        order = cache_layout or ("pshd" if paged else "thd" if packed else "bshd")
        self.caches = {name: Tensor(view(array, name + "_cache", place), order, 3 if packed else 4,
                                    name + "_cache")
                       for name, array in caches.items() if array is not None}
        if paged:
            for name, pages in self.caches.items():
                check_pages(pages, order, name + "_cache")
        self._check_types()
        self.args.dtype = self.dtype
        self.page_size = next(iter(self.caches.values())).rows if paged else 0
        self._find_sizes(most)
        for name, tensor in self.tensors.items():
            setattr(self.args, name, tensor.c())
            if name != "q":
                cached = self.caches[name]
                check_writable(cached.view, name + "_cache")
                setattr(self.args, name + "_cache", cached.c())

    def put_all(self) -> None:
        for name in ("descale_k", "descale_v"):
            if self.updates and name in self.kept:  # none is repeated
                _arrays.check_shape(self.kept[name].shape, extents(self.table[name], self.sizes),
                                    name)
        super().put_all()

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

    def _find_sizes(self, most: Dict[str, Optional[int]]) -> None:
        tokens, cache = next(iter(self.tensors.values())), next(iter(self.caches.values()))
        heads_q, heads_kv, dim_qk, dim_v = self.heads()
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
        sizes = self.sizes
        sizes.update(batch=tokens.batch, seqlen_q=tokens.rows, seqlen_kv=cache.rows, total_q=0,
                     total_kv=0, heads_q=heads_q, heads_kv=heads_kv, page_size=self.page_size)
        self.packed_size("q", most["q"], tokens.rows)
        bound = most["kv"]
        if "page_table" in self.kept:
            table = self.kept["page_table"].shape
            if len(table) != 2:
                _arrays.check_shape(table, (sizes["batch"], None), "page_table")
            sizes.update(seqlen_kv=table[1] * cache.rows, pages=cache.batch)
        elif "cu_seqlens_kv" in self.kept:
            name = "cu_seqlens_kv"
            self.check_batch(name, sequences(self.kept[name], name), "new tokens are of")
            self.packed_size("kv", bound, cache.rows)
        else:
            self.check_batch("the cache", cache.batch, "new tokens are of")
        if bound is not None:
            if not 0 <= integer(bound, "max_seqlen_kv") <= sizes["seqlen_kv"]:
                raise invalid(f"max_seqlen_kv = {bound} is not within 0 and the "
                              f"{sizes['seqlen_kv']} tokens that a sequence has room for",
                              Reason.SIZE, "seqlen_kv")
            sizes["seqlen_kv"] = bound

    def add_rotary(self, base: Optional[float], dim: Optional[int], interleaved: bool) -> None:
        args, cos, sin = self.args, self.kept.get("rotary_cos"), self.kept.get("rotary_sin")
        turns = cos is not None or base is not None or bool(dim)
        if flag(interleaved, "rotary_interleaved") and turns:
            args.rotary = Rotary.INTERLEAVED
        if (cos is None) != (sin is None) or (cos is not None and base is not None):
            raise invalid("rotary_cos and rotary_sin go together, and not with rotary_base; give "
                          "both tables or a base", Reason.NULL_POINTER, "rotary_cos")
        if cos is None or sin is None:
            if base is not None:
                args.rotary_base = real(base, "rotary_base")
                args.rotary_dim = self.heads()[2] if dim is None else integer(dim, "rotary_dim")
            elif dim:
                args.rotary_dim = integer(dim, "rotary_dim")
            return
        pairs = None if dim is None else integer(dim, "rotary_dim") // 2
        _arrays.check_shape(cos.shape, (None, pairs), "rotary_cos")
        if sin.shape != cos.shape or sin.dtype != cos.dtype:
            raise invalid("rotary_cos and rotary_sin differ in shape or dtype; give two alike",
                          Reason.SIZE, "rotary_sin")
        self.sizes.update(rotary_positions=cos.shape[0], rotary_dim=2 * cos.shape[1])
        args.dtype_rotary, args.rotary_positions = cos.dtype, cos.shape[0]
        args.rotary_dim = 2 * cos.shape[1]

    def add_q_out(self, given: Any) -> Any:
        q = self.tensors.get("q")
        if q is None:
            if given is not None:
                raise invalid("q_out is given without q; give both", Reason.NULL_POINTER, "q_out")
            return None
        array = given if given is not None else self.make(q.view.shape, self.dtype, "q_out")
        seen = self.kept["q_out"] = view(array, "q_out", self.place, made=given is None)
        if given is not None:
            _gpu.check_order(array, "q_out", self.place)
            check_writable(seen, "q_out")
        if seen.shape != q.view.shape or seen.dtype != self.dtype:
            raise invalid(f"q_out has shape {seen.shape} and dtype {NAMES[seen.dtype]}; expected "
                          f"{q.view.shape} and {NAMES[self.dtype]} as q has", Reason.SIZE, "q_out")
        self.args.q_out = Tensor(seen, self.layout, len(seen.shape), "q_out").c()
        return array

    def add_lens_out(self, lens_kv: Any) -> Any:
        given = self.given.get("lens_out")
        if "k" not in self.tensors and "v" not in self.tensors:
            if given is not None:
                raise invalid("lens_out is given without k and v; leave it out",
                              Reason.NULL_POINTER, "lens_out")
            return None
        if given is not None:
            return given
        shape, tensors = (self.sizes["batch"],), _gpu.on_host(lens_kv)
        if self.place is not None:
            array = _gpu.new(shape, "int32", False, self.place, "lens_out")
        elif tensors is not None:
            array = tensors.new_on_host(shape, "int32", False)
        else:
            array = np.empty(shape, np.int32)
        self.put("lens_out", view(array, "lens_out", self.place, _arrays.INT32, made=True))
        return array
