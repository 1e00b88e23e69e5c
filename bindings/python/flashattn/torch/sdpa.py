"""scaled_dot_product_attention by torch's own signature, and this library under torch's own
function."""
from __future__ import annotations

import collections
import threading
from functools import lru_cache
from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor

from .._constants import Reason
from .._errors import FlashAttentionError, invalid
from . import _launch, functional
from ._launch import NOTHING, Options

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD = _FORWARD + "_backward"
_lock = threading.Lock()
_active: Optional[torch.library.Library] = None  # undoes its overrides when it goes
_theirs: Dict[str, Any] = {}  # torch's own kernels
_counts: Dict[str, int] = collections.Counter()
_refused: Dict[str, int] = collections.Counter()


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor,
                                 attn_mask: Optional[Tensor] = None, dropout_p: float = 0.0,
                                 is_causal: bool = False, scale: Optional[float] = None,
                                 enable_gqa: bool = False) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention by this library, with gradients.

    query       (batch, heads, seqlen_q, dim) or (batch, seqlen_q, dim)
    key, value  likewise, seqlen_kv tokens; fewer heads with enable_gqa
    attn_mask   bool (True: visible) or float, broadcast; its last dimension may not be
    is_causal   aligned at the top left, as in torch; not together with attn_mask

    ValueError, TypeError, NotImplementedError as in attention(). Never falls back to torch.
    """
    if is_causal and attn_mask is not None:
        raise invalid("is_causal and attn_mask are both given; put the causal mask into attn_mask",
                      Reason.MASK_COMBINATION, "mask")
    if query.dim() == 3:
        mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.dim() == 3 \
            else attn_mask
        heads = (x.unsqueeze(1) for x in (query, key, value))
        return scaled_dot_product_attention(*heads, mask, dropout_p, is_causal, scale).squeeze(1)
    if query.dim() == key.dim() == 4 and query.shape[1] != key.shape[1] and not enable_gqa:
        raise invalid(f"query has {query.shape[1]} heads, key has {key.shape[1]}; set enable_gqa, "
                      "or give as many", Reason.HEAD_RATIO, "heads_kv")
    return functional.attention(query, key, value, layout="bhsd", bias=attn_mask, causal=is_causal,
                                top_left=is_causal, dropout=dropout_p, scale=scale)


_HEADS_FIRST = ((0, 2, 1, 3), (0, 2, 1, 3))


def _beside(attn_mask: Optional[Tensor], keys: int) -> Any:
    """A mask with its keys contiguous, as the library wants them."""
    if attn_mask is None:
        return NOTHING
    if attn_mask.shape[-1] != keys:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-1], keys)
    return (_launch.dense_heads(attn_mask), *NOTHING[1:])


@lru_cache(maxsize=1024)
def _options(dropout_p: float, is_causal: bool, scale: Optional[float]) -> Options:
    return Options(causal=is_causal, top_left=is_causal, scale=scale, dropout=dropout_p)


@lru_cache(maxsize=1024)
def _promised(shape: Any, strides: Any) -> Tuple[int, ...]:
    """The strides of the output by torch's fake kernel, on which compiled programs rely."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def _theirs_for(name: str, error: FlashAttentionError, arguments: Any, options: Any) -> Any:
    """What the library refuses goes to torch's own kernel."""
    _refused[str(error)] += 1
    return _theirs[name].call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU),
                                    *arguments, **options)


def _forward(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
             is_causal: bool = False, *, attn_mask: Optional[Tensor] = None,
             scale: Optional[float] = None) -> Any:
    promised = _promised(query.shape, query.stride())
    try:
        o, lse = _launch.forward(query, key, value, _beside(attn_mask, key.shape[2]), -1, -1,
                                 _options(dropout_p, is_causal, scale), True, _HEADS_FIRST,
                                 promised if promised[-1] == 1 else None)
    except FlashAttentionError as error:
        return _theirs_for(_FORWARD, error, (query, key, value, dropout_p, is_causal),
                           dict(attn_mask=attn_mask, scale=scale))
    _counts["forward"] += 1
    if o.stride() != promised:
        o = torch.empty_like(query).copy_(o)
    return o, _tokens_first(lse)


def _tokens_first(lse: Optional[Tensor]) -> Tensor:
    """(batch, heads, tokens), stored as (batch, tokens, heads), as torch's kernel stores it."""
    assert lse is not None
    b, h, s = lse.shape
    return lse.new_empty_strided((b, h, s), (h * s, 1, h)).copy_(lse)


def _backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
              logsumexp: Tensor, dropout_p: float, is_causal: bool, *,
              attn_mask: Optional[Tensor] = None, scale: Optional[float] = None) -> Any:
    try:
        grads = _launch.backward(grad_out, None, query, key, value, out, logsumexp,
                                 _beside(attn_mask, key.shape[2]), -1, -1,
                                 _options(dropout_p, is_causal, scale), False, False, _HEADS_FIRST)
    except FlashAttentionError as error:
        return _theirs_for(_BACKWARD, error, (grad_out, query, key, value, out, logsumexp,
                                              dropout_p, is_causal),
                           dict(attn_mask=attn_mask, scale=scale))
    _counts["backward"] += 1
    return grads[:3]


def activate() -> None:
    """From now on F.scaled_dot_product_attention, and all that is built on it, such as
    nn.MultiheadAttention, runs on this library in this process, on the CPU. Calls that it refuses
    go to torch's own kernel; report() counts both. On GPUs torch's kernels stay: call
    scaled_dot_product_attention() of this module there.

    RuntimeError for a torch that cannot give its own kernel away (torch.library.get_kernel).
    """
    global _active
    with _lock:
        if _active is not None:
            return
        if not hasattr(torch.library, "get_kernel"):
            raise RuntimeError(f"activate() needs torch.library.get_kernel, which torch "
                               f"{torch.__version__} has not; install a newer one")
        for name in (_FORWARD, _BACKWARD):
            _theirs[name] = torch.library.get_kernel(f"aten::{name}", "CPU")
        _active = torch.library.Library("aten", "IMPL", "CPU")
        for name, kernel in ((_FORWARD, _forward), (_BACKWARD, _backward)):
            _active.impl(name, kernel, "CPU", allow_override=True)


def restore() -> None:
    """Gives F.scaled_dot_product_attention back to torch's own kernels. report() keeps its
    counts."""
    global _active
    with _lock:
        if _active is not None:
            _active._destroy()
            _active = None
            _theirs.clear()


def report() -> Dict[str, Any]:
    """What ran on this library since it was first activated: {"active": bool, "forward": calls,
    "backward": calls, "refused": {message: calls}}."""
    return {"active": _active is not None, "forward": _counts["forward"],
            "backward": _counts["backward"], "refused": dict(_refused)}
