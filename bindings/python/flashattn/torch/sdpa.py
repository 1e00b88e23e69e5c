"""scaled_dot_product_attention by torch's own signature, and this library under torch's own
function."""
from __future__ import annotations

import collections
import threading
from typing import Any, Dict, Optional

import torch
from torch import Tensor

from .._constants import Reason
from .._errors import FlashAttentionError, invalid
from . import _launch, functional
from ._launch import BESIDE, Options

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


def _beside(bias: Optional[Tensor]) -> Any:
    return (bias, *[None] * (len(BESIDE) - 1))


def _mask(attn_mask: Optional[Tensor], keys: int) -> Optional[Tensor]:
    """Keys contiguous, as the library wants them."""
    if attn_mask is None:
        return None
    if attn_mask.shape[-1] != keys:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-1], keys)
    return _launch.dense_heads(attn_mask)


def _options(dropout_p: float, is_causal: bool, scale: Optional[float]) -> Options:
    return Options(causal=is_causal, top_left=is_causal, scale=scale, dropout=dropout_p)


def _theirs_for(name: str, error: FlashAttentionError, arguments: Any, options: Any) -> Any:
    """What the library refuses goes to torch's own kernel."""
    _refused[str(error)] += 1
    return _theirs[name].call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU),
                                    *arguments, **options)


def _forward(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
             is_causal: bool = False, *, attn_mask: Optional[Tensor] = None,
             scale: Optional[float] = None) -> Any:
    try:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        o, lse = _launch.forward(q, k, v, _beside(_mask(attn_mask, k.shape[1])), -1, -1,
                                 _options(dropout_p, is_causal, scale), True)
    except FlashAttentionError as error:
        return _theirs_for(_FORWARD, error, (query, key, value, dropout_p, is_causal),
                           dict(attn_mask=attn_mask, scale=scale))
    _counts["forward"] += 1
    o = o.transpose(1, 2)
    # Compiled programs rely on the strides that torch's fake kernel promises.
    promised = torch.empty_like(query, device="meta")
    if o.stride() != promised.stride():
        o = torch.empty_like(query).copy_(o)
    return o, lse.transpose(1, 2).contiguous().transpose(1, 2)


def _backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
              logsumexp: Tensor, dropout_p: float, is_causal: bool, *,
              attn_mask: Optional[Tensor] = None, scale: Optional[float] = None) -> Any:
    try:
        dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        grads = _launch.backward(dout, None, q, k, v, o, logsumexp,
                                 _beside(_mask(attn_mask, k.shape[1])), -1, -1,
                                 _options(dropout_p, is_causal, scale), False, False)
    except FlashAttentionError as error:
        return _theirs_for(_BACKWARD, error, (grad_out, query, key, value, out, logsumexp,
                                              dropout_p, is_causal),
                           dict(attn_mask=attn_mask, scale=scale))
    _counts["backward"] += 1
    return tuple(x.transpose(1, 2) for x in grads[:3])


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
