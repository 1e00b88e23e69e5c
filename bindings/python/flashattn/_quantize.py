"""Arrays of 8 bits from wider ones: flashattn_quantize."""
from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Tuple

from . import _arrays, _gpu, _parallel
from ._arrays import CACHE_8BIT, F8, F32, I8, NAMES, View, beside, view
from ._constants import Reason, Transform
from ._errors import counted, fail, invalid, wrong_type
from ._inputs import Tensor, first_given, longest, sequences, set_sizes
from ._library import ffi, lib
from ._names import says_options
from ._options import dtype, flag, integer, uniform
from ._plan import cached_plan

_FLOAT = ffi.typeof("float *")
_MEMBERS = dict(ffi.typeof("flashattn_quantize_args").fields)


class Quantized(NamedTuple):
    """What quantize() made: arguments of attention() by name, None where nothing was given.
    lse_shift is to be added to the lse of attention(), but for attention_backward()."""

    q: Any = None
    k: Any = None
    v: Any = None
    descale_q: Any = None
    descale_k: Any = None
    descale_v: Any = None
    k_mean: Any = None
    lse_shift: Any = None


@says_options
def quantize(q: Any = None, k: Any = None, v: Any = None, *, descale_block: int = 0,
             cache: bool = False, smooth_k: bool = False, rotation_seed: Optional[int] = None,
             scale: Optional[float] = None, layout: Optional[str] = None,
             cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, lens_q: Any = None,
             lens_kv: Any = None, starts_kv: Any = None, max_seqlen_q: Optional[int] = None,
             max_seqlen_kv: Optional[int] = None, threads: int = 0, stream: Any = None,
             parallel: Any = None, dtype_kv: Any = "float8_e4m3fn") -> Quantized:
    """float8_e4m3fn with float32 descales from float32, float16 or bfloat16: element =
    round(x * (1 / descale)), with the largest magnitude of a head, or of descale_block tokens,
    at 448; int8: at 127.

        made = flashattn.quantize(q, k, v, descale_block=64)
        o = flashattn.attention(*made[:3], dtype_o="bfloat16", descale_block=64,
                                descale_q=made.descale_q, descale_k=made.descale_k,
                                descale_v=made.descale_v)

    q, k, v     as for attention(), or with cu_seqlens for attention_varlen(); any may be left out.
                q and k of a call are to be quantised with the same options
    cache       k and v alone get 8 bits; q is only rotated
    smooth_k    k less its mean over the tokens of each sequence, which is k_mean (batch, heads_kv,
                dim_qk). The softmax is the same, but not beside softcap or a sink. lse_shift,
                shaped like lse, is made where q is given (Zhang et al. 2024)
    rotation_seed  rotates q and k by a Hadamard matrix with random signs, so that outliers spread:
                scores stay. dim_qk must be a power of two or a multiple of 32 (Shah et al. 2024)
    scale       of attention(), for lse_shift
    dtype_kv    of what k and v become: "float8_e4m3fn" or, on a CPU, "int8"
    lens_q, lens_kv, starts_kv, threads, stream, parallel  as in attention()
    max_seqlen_q, max_seqlen_kv  as in attention_varlen()

    Descales are (batch, heads_kv, blocks); query heads share those of their KV head. On a GPU the
    call enqueues its work and returns; a graph may capture it. Raises as attention() does.
    """
    call = _Call(dict(q=q, k=k, v=v), layout, dict(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, lens_q=lens_q, lens_kv=lens_kv,
        starts_kv=starts_kv), stream, dict(q=max_seqlen_q, kv=max_seqlen_kv))
    args, sizes, block = call.args, call.sizes, integer(descale_block, "descale_block")
    rotates, smooths = rotation_seed is not None, flag(smooth_k, "smooth_k")
    args.transform = (Transform.ROTATE if rotates else 0) | (Transform.SMOOTH_K if smooths else 0)
    args.rotation_seed = integer(rotation_seed or 0, "rotation_seed")
    wide, place = flag(cache, "cache") and "q" in call.tensors, call.place
    narrow = dtype(dtype_kv, "dtype_kv")
    if narrow not in CACHE_8BIT:
        raise wrong_type(f"dtype_kv = {dtype_kv!r} has more than 8 bits; give \"float8_e4m3fn\" or "
                         "\"int8\"", "dtype_kv")
    options: Dict[str, Any] = dict(
        dtype_o=F32, varlen_q=cu_seqlens_q is not None, scale=scale,
        varlen_kv=cu_seqlens_kv is not None, descale_block=block)
    options.update({"device": place.device} if place else {"threads": threads})
    plan = cached_plan((call.dtype if wide else F8, narrow, sizes["heads_q"], sizes["heads_kv"],
                        sizes["dim_qk"], sizes["dim_v"]), uniform(options))
    made: Dict[str, Any] = {}
    for name, tensor in call.tensors.items():
        if name == "q" and wide and not rotates:
            made["q"] = q  # it stays; for lse_shift it is read
            if not (smooths and "k" in call.tensors):
                args.q = (ffi.NULL, 0, 0, 0)
            continue
        is_8bit = not (name == "q" and wide)
        made[name] = call.output(name, tensor, call.dtype if not is_8bit else
                                 F8 if name == "q" else narrow)
        if is_8bit:
            tokens = sizes["seqlen_q" if name == "q" else "seqlen_kv"]
            blocks = -(-tokens // block) if block > 0 else min(tokens, 1)
            made["descale_" + name] = call.packed(
                "descale_" + name, (sizes["batch"], sizes["heads_kv"], blocks))
    if smooths and "k" in call.tensors:
        made["k_mean"] = call.packed("k_mean",
                                     (sizes["batch"], sizes["heads_kv"], sizes["dim_qk"]))
        if "q" in call.tensors:
            made["lse_shift"] = call.lse_like(cu_seqlens_q is not None)
    pool = None if parallel is None else _parallel.pool_of(parallel)
    if pool is not None:
        _parallel.put(args, pool)
    with _gpu.launch(place):
        status = lib.flashattn_quantize(plan._plan, args, _gpu.native_stream(place))
    if pool is not None and pool.error is not None:
        raise pool.error
    if status:
        fail(status)
    return Quantized(**made)


class _Call:
    """flashattn_quantize_args of arrays, which it keeps alive."""

    def __init__(self, given: Dict[str, Any], layout: Optional[str],
                 lengths: Dict[str, Any], stream: Any, most: Dict[str, Optional[int]]) -> None:
        first = first_given(*given.values())
        if first is None:
            raise invalid("q, k and v are all None, so that nothing is left to do; give one",
                          Reason.NULL_POINTER, "q.data")
        name = next(name for name, array in given.items() if array is first)
        self.place = place = _gpu.place_of(first, stream, None, None, name)
        self.makers = None if place else _gpu.on_host(first)
        self.most = most
        self.seen: Dict[str, View] = {name: beside(array, name, "i32", place)
                                      for name, array in lengths.items() if array is not None}
        self.layout = layout or ("thd" if any(
            name.startswith("cu_") for name in self.seen) else "bshd")
        self.tensors: Dict[str, Tensor] = {}
        for name, array in given.items():
            if array is None:
                continue
            side = "cu_seqlens_" + ("q" if name == "q" else "kv")
            self.tensors[name] = Tensor(view(array, name, place), self.layout,
                                        3 if side in self.seen else 4, name)
        self.dtype = self._same_dtype()
        self.args = args = ffi.new("flashattn_quantize_args *")
        args.struct_size, args.dtype = ffi.sizeof("flashattn_quantize_args"), self.dtype
        self.sizes = sizes = self._sizes()
        set_sizes(args, {name: sizes[name] for name in
                         ("batch", "seqlen_q", "seqlen_kv", "total_q", "total_kv")})
        for name, tensor in self.tensors.items():
            setattr(args, name, tensor.c())
        for name, array in self.seen.items():
            count = sizes["batch"] + name.startswith("cu_")
            _arrays.check_shape(array.shape, (count,), name)
            _arrays.check_packed(array, name)
            setattr(args, name, ffi.cast(_MEMBERS[name].type, array.pointer))
        self.kept: Dict[str, View] = {}

    def _same_dtype(self) -> int:
        names = [NAMES[tensor.view.dtype] for tensor in self.tensors.values()]
        if len(set(names)) > 1 or names[0] in (NAMES[F8], NAMES[I8]):
            raise wrong_type(f"{', '.join(self.tensors)} have dtypes {', '.join(names)}; give all "
                             "of one: float32, float16 or bfloat16", "dtype")
        return next(iter(self.tensors.values())).view.dtype

    def _sizes(self) -> Dict[str, int]:
        """Those of an array that is left out are as those of another, or 1."""
        q, k, v = (self.tensors.get(name) for name in "qkv")
        kv, any_of = first_given(k, v), next(iter(self.tensors.values()))
        if k is not None and v is not None and (k.batch, k.heads, k.rows) != (v.batch, v.heads,
                                                                              v.rows):
            raise invalid(f"k has shape {k.view.shape}, v has {v.view.shape}; only their last "
                          "dimension may differ", Reason.SIZE, "v")
        if q is not None and k is not None and q.dim != k.dim:
            raise invalid(f"k has head dimension {k.dim}, q has {q.dim}; they must be the same",
                          Reason.HEAD_DIM_PAIR, "k")
        heads_kv = (kv or any_of).heads
        sizes = dict(batch=any_of.batch, heads_kv=heads_kv, heads_q=q.heads if q else heads_kv,
                     dim_qk=(q or k or any_of).dim, dim_v=(v or k or any_of).dim,
                     seqlen_q=q.rows if q else 0, seqlen_kv=kv.rows if kv else 0, total_q=0,
                     total_kv=0)
        for side, tensor in (("q", q), ("kv", kv)):
            cu = "cu_seqlens_" + side
            if cu in self.seen:
                sizes["batch"] = sequences(self.seen[cu], cu)
                sizes["total_" + side] = tensor.rows if tensor else 0
                bound = self.most[side]
                sizes["seqlen_" + side] = (0 if not tensor else longest(self.seen, side)
                                           if bound is None else
                                           integer(bound, "max_seqlen_" + side))
            elif self.most[side] is not None:
                raise invalid(f"max_seqlen_{side} = {self.most[side]} has a meaning only with "
                              f"{cu}; leave it out", Reason.SIZE, "seqlen_" + side)
            elif tensor is not None and tensor.batch != sizes["batch"]:
                raise invalid(f"{side} holds {counted(tensor.batch, 'sequence')}, others "
                              f"{sizes['batch']}; "
                              "give as many", Reason.SIZE, "batch")
        return sizes

    def output(self, name: str, tensor: Tensor, code: int) -> Any:
        """A result shaped like an input; zeros where rows may be nobody's."""
        array = _arrays.new(tensor.view.shape, code, bool(self.seen), self.place, name, self.makers)
        self.kept[name] = made = view(array, name, self.place, made=True)
        setattr(self.args, name + "_out",
                Tensor(made, self.layout, len(made.shape), name).c())
        return array

    def _floats(self, name: str, shape: Tuple[int, ...]) -> Tuple[Any, Any]:
        array = _arrays.new(shape, F32, bool(self.seen), self.place, name, self.makers)
        self.kept[name] = made = view(array, name, self.place, made=True)
        return array, made.pointer

    def packed(self, name: str, shape: Tuple[int, ...]) -> Any:
        """A float32 result (batch, heads, ...)."""
        array, pointer = self._floats(name, shape)
        setattr(self.args, name, (pointer, -1, -1, -1))
        return array

    def lse_like(self, varlen: bool) -> Any:
        q, sizes = self.tensors["q"], self.sizes
        shape = (q.heads, q.rows) if varlen else (sizes["batch"], q.heads, q.rows)
        array, pointer = self._floats("lse_shift", shape)
        self.args.lse_shift = ffi.cast(_FLOAT, pointer)
        return array
