"""Arrays of 8 bits from wider ones: flashattn_quantize."""
from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Dict, NamedTuple, Optional

from . import _gpu
from ._arrays import CACHE_8BIT, F8, F32, I8, NAMES, view
from ._calls import Call
from ._constants import ARRAYS, QuantizeOptions, Reason, Transform
from ._errors import invalid, wrong_type
from ._inputs import Tensor, first_given
from ._library import ffi, lib
from ._names import takes
from ._options import dtype, flag, integer, uniform
from ._plan import cached_plan

if TYPE_CHECKING:
    from typing_extensions import Unpack


# The words of each output's condition, all of which must hold: inputs, a transform, a type.
_ASKED = {name: frozenset(re.findall(r"\b(?:[qkv]|SMOOTH_K|F8E4M3)\b", array.condition))
          for name, array in ARRAYS["flashattn_quantize_args"].items() if array.role == "output"}


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


@takes(QuantizeOptions)
def quantize(q: Any = None, k: Any = None, v: Any = None, *, descale_block: int = 0,
             cache: bool = False, smooth_k: bool = False, rotation_seed: Optional[int] = None,
             scale: Optional[float] = None, layout: Optional[str] = None,
             max_seqlen_q: Optional[int] = None, max_seqlen_kv: Optional[int] = None,
             threads: int = 0, stream: Any = None, parallel: Any = None,
             dtype_kv: Any = "float8_e4m3fn", **arrays: Unpack[QuantizeOptions]) -> Quantized:
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
    call = _Call(dict(q=q, k=k, v=v), layout, dict(arrays), stream,
                 dict(q=max_seqlen_q, kv=max_seqlen_kv))
    args, sizes, place = call.args, call.sizes, call.place
    block = sizes["descale_block"] = integer(descale_block, "descale_block")
    rotates, smooths = rotation_seed is not None, flag(smooth_k, "smooth_k")
    args.transform = (Transform.ROTATE if rotates else 0) | (Transform.SMOOTH_K if smooths else 0)
    args.rotation_seed = integer(rotation_seed or 0, "rotation_seed")
    wide = flag(cache, "cache") and "q" in call.tensors
    narrow = dtype(dtype_kv, "dtype_kv")
    if narrow not in CACHE_8BIT:
        raise wrong_type(f"dtype_kv = {dtype_kv!r} has more than 8 bits; give \"float8_e4m3fn\" or "
                         "\"int8\"", "dtype_kv")
    options: Dict[str, Any] = dict(
        dtype_o=F32, varlen_q=call.varlen_q, scale=scale, varlen_kv="cu_seqlens_kv" in call.kept,
        descale_block=block)
    options.update({"device": place.device} if place else {"threads": threads})
    types = {"dtype": call.dtype if wide else F8, "dtype_kv": narrow}  # the plan's
    plan = cached_plan((*types.values(), sizes["heads_q"], sizes["heads_kv"], sizes["dim_qk"],
                        sizes["dim_v"]), uniform(options))
    call.put_all()
    # The words in the conditions of outputs that hold for this call.
    there = {*call.tensors, *(["SMOOTH_K"] if smooths and "k" in call.tensors else []),
             *([] if wide else ["F8E4M3"])}
    made: Dict[str, Any] = {}
    if wide and not rotates:
        made["q"] = q  # it stays; for lse_shift it is read
        if not {"k", "SMOOTH_K"} <= there:
            args.q = (ffi.NULL, 0, 0, 0)
    for name, asked in _ASKED.items():
        given = name.partition("_out")[0]
        if asked <= there and given not in made:
            made[given] = call.like(name, call.tensors[given], types[call.table[name].type]) \
                if given in call.tensors else call.result(name)
    call.run(lib.flashattn_quantize, plan, parallel)
    return Quantized(**made)


class _Call(Call):
    def __init__(self, given: Dict[str, Any], layout: Optional[str], lengths: Dict[str, Any],
                 stream: Any, most: Dict[str, Optional[int]]) -> None:
        first = first_given(*given.values())
        if first is None:
            raise invalid("q, k and v are all None, so that nothing is left to do; give one",
                          Reason.NULL_POINTER, "q.data")
        name = next(name for name, array in given.items() if array is first)
        place = _gpu.place_of(first, stream, None, None, name)
        super().__init__("flashattn_quantize_args", place, first, lengths)
        self.layout = layout or ("thd" if any(
            name.startswith("cu_") for name in self.kept) else "bshd")
        self.tensors: Dict[str, Tensor] = {}
        for name, array in given.items():
            if array is None:
                continue
            side = "cu_seqlens_" + ("q" if name == "q" else "kv")
            self.tensors[name] = Tensor(view(array, name, place), self.layout,
                                        3 if side in self.kept else 4, name)
        self.args.dtype = self.dtype = self._same_dtype()
        self._find_sizes(most)
        for name, tensor in self.tensors.items():
            setattr(self.args, name, tensor.c())

    def _same_dtype(self) -> int:
        names = [NAMES[tensor.view.dtype] for tensor in self.tensors.values()]
        if len(set(names)) > 1 or names[0] in (NAMES[F8], NAMES[I8]):
            raise wrong_type(f"{', '.join(self.tensors)} have dtypes {', '.join(names)}; give all "
                             "of one: float32, float16 or bfloat16", "dtype")
        return next(iter(self.tensors.values())).view.dtype

    def _find_sizes(self, most: Dict[str, Optional[int]]) -> None:
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
        self.sizes.update(
            batch=any_of.batch, heads_kv=heads_kv, heads_q=q.heads if q else heads_kv,
            dim_qk=(q or k or any_of).dim, dim_v=(v or k or any_of).dim,
            seqlen_q=q.rows if q else 0, seqlen_kv=kv.rows if kv else 0, total_q=0, total_kv=0)
        for side, tensor in (("q", q), ("kv", kv)):
            self.packed_size(side, most[side], tensor.rows if tensor else None)
            if "cu_seqlens_" + side not in self.kept and tensor is not None:
                self.check_batch(side, tensor.batch, "others")

    def like(self, name: str, tensor: Tensor, code: int) -> Any:
        """Makes a result shaped like an input, and writes it into the structure."""
        array = self.make(tensor.view.shape, code, name)
        self.kept[name] = made = view(array, name, self.place, made=True)
        setattr(self.args, name, Tensor(made, self.layout, len(made.shape), name).c())
        return array
