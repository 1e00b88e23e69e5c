"""The operator flashattn::append_kv, which writes into a KV cache."""
from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from .. import _append
from ._launch import dense_heads

_library = torch.library.Library("flashattn", "FRAGMENT")  # lives as long as the operator
_library.define(
    "append_kv(Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor lens_kv, Tensor? k, Tensor? v, "
    "Tensor? q, Tensor? rotary_cos, Tensor? rotary_sin, float? rotary_base, int? rotary_dim, "
    "bool rotary_interleaved, Tensor? positions, Tensor? starts_kv, Tensor? cu_seqlens_q, "
    "Tensor? lens_q, Tensor? page_table, SymInt? max_seqlen_q, SymInt? max_seqlen_kv, "
    "Tensor(c!)? descale_k, Tensor(d!)? descale_v, int descale_block, bool update_descales) -> "
    "(Tensor q, Tensor lens_kv)")
_NAMES = ("rotary_cos", "rotary_sin", "rotary_base", "rotary_dim", "rotary_interleaved",
          "positions", "starts_kv", "cu_seqlens_q", "lens_q", "page_table", "max_seqlen_q",
          "max_seqlen_kv", "descale_k", "descale_v", "descale_block", "update_descales")


def _run(k_cache: Tensor, v_cache: Optional[Tensor], lens_kv: Tensor, k: Optional[Tensor],
         v: Optional[Tensor], q: Optional[Tensor], *rest: Any) -> Tuple[Tensor, Tensor]:
    more = dict(zip(_NAMES, rest), threads=torch.get_num_threads() if k_cache.is_cpu else 0)
    k, v, q = (None if x is None else dense_heads(x) for x in (k, v, q))
    made = _append.append_kv(k_cache, v_cache, lens_kv, k, v, q, **more)
    return (k_cache.new_empty(0) if made.q is None else made.q,
            lens_kv.new_empty(0, dtype=torch.int32) if made.lens_kv is None else made.lens_kv)


for _key in ("CPU", "CUDA"):
    _library.impl("append_kv", _run, _key)


@torch.library.register_fake("flashattn::append_kv", lib=_library)
def _(k_cache: Tensor, v_cache: Any, lens_kv: Tensor, k: Any, v: Any, q: Any, *rest: Any) -> Any:
    stores = k is not None or v is not None
    return (k_cache.new_empty(0) if q is None else q.new_empty(q.shape),
            lens_kv.new_empty(lens_kv.shape if stores else 0, dtype=torch.int32))
