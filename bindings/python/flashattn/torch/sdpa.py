"""scaled_dot_product_attention by torch's own signature, and this library under torch's own
function."""
from __future__ import annotations

import sys
import threading
from typing import Any, Dict, Optional, Sequence

import torch
import torch.nn.attention
from torch import Tensor

from .._constants import Reason
from .._errors import invalid
from .._tools import devices
from . import _aten, _launch, functional


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor,
                                 attn_mask: Optional[Tensor] = None, dropout_p: float = 0.0,
                                 is_causal: bool = False, scale: Optional[float] = None,
                                 enable_gqa: bool = False) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention by this library, with gradients.

    query       (..., heads, seqlen_q, dim), any number of dimensions from 2 on; fastest with 4,
                since others are copied where their strides do not fold
    key, value  likewise, seqlen_kv tokens; fewer heads with enable_gqa. Their other leading
                dimensions are broadcast
    attn_mask   bool (True: visible) or float, broadcast; its last dimension may not be
    is_causal   aligned at the top left, as in torch; not together with attn_mask

    ValueError, TypeError, NotImplementedError as in attention(). Never falls back to torch.
    """
    if is_causal and attn_mask is not None:
        raise invalid("is_causal and attn_mask are both given; put the causal mask into attn_mask",
                      Reason.MASK_COMBINATION, "mask")
    if not query.dim() == key.dim() == value.dim() == 4 or not (
            query.shape[0] == key.shape[0] == value.shape[0]):
        return _folded((query, key, value), attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise invalid(f"query has {query.shape[1]} heads, key has {key.shape[1]}; set enable_gqa, "
                      "or give as many", Reason.HEAD_RATIO, "heads_kv")
    return functional.attention(query, key, value, layout="bhsd", bias=attn_mask, causal=is_causal,
                                top_left=is_causal, dropout=dropout_p, scale=scale)


def _folded(tensors: Sequence[Tensor], mask: Optional[Tensor], *more: Any) -> Tensor:
    """The dimensions before the heads as one batch; of 2 and 3 dimensions there is one head."""
    shapes = ", ".join([str(tuple(x.shape)) for x in (
        tensors if mask is None else (*tensors, mask))])
    least, most = min([x.dim() for x in tensors]), max([x.dim() for x in tensors])
    if least < 2:
        raise invalid(f"query, key and value are of shapes {shapes}; give 2 dimensions or more",
                      Reason.SIZE, "q")
    one_head = most < 4
    tensors = [x.unsqueeze(-3) if one_head or x.dim() == 2 else x for x in tensors]
    if mask is not None and mask.dim() > 2 and one_head:
        mask = mask.unsqueeze(-3)
    try:
        batch = torch.broadcast_shapes(*[x.shape[:-3] for x in tensors])
        if mask is not None and mask.dim() > 3:
            mask = mask.expand(*batch, *mask.shape[-3:]).flatten(0, -4)
    except RuntimeError:
        raise invalid(f"query, key, value and attn_mask are of shapes {shapes}, whose dimensions "
                      "before the heads do not broadcast to one shape", Reason.SIZE, "k") from None
    q, k, v = [x.expand(*batch, *x.shape[-3:]).reshape(batch.numel(), *x.shape[-3:])
               for x in tensors]
    o = scaled_dot_product_attention(q, k, v, mask, *more)
    return o.reshape(*batch, *(o.shape[-2:] if one_head else o.shape[-3:]))


_IMPLEMENTATION = "flashattn"  # in torch's registry of flash implementations
_lock = threading.Lock()
_active: Dict[str, Any] = {}  # by device, what undoes it
_found: Dict[str, bool] = {}  # switches of torch's, as activate() found them
_registry: Any = torch.nn.attention  # of flash implementations; of an older torch without one
_HAS_REGISTRY = all(hasattr(_registry, f"{verb}_flash_attention_impl") for verb in (
    "register", "activate", "current", "restore"))


def _register() -> _aten.Override:
    return _aten.Override("CUDA")


# torch.nn.attention.activate_flash_attention_impl("flashattn") does for GPUs what activate() does.
if _HAS_REGISTRY:
    _registry.register_flash_attention_impl(_IMPLEMENTATION, register_fn=_register)


class _Registered:
    """This library in torch's registry; of a torch without one, the override itself."""

    def __init__(self) -> None:
        self._override: Any = None if _HAS_REGISTRY else _register()
        if _HAS_REGISTRY:
            _registry.activate_flash_attention_impl(_IMPLEMENTATION)

    def remove(self) -> None:
        if self._override is not None:
            self._override.remove()
        elif _registry.current_flash_attention_impl() == _IMPLEMENTATION:
            _registry.restore_flash_attention_impl()


def _switch(fast_path: bool, cudnn: bool) -> Dict[str, bool]:
    """torch's own fast path of nn.MultiheadAttention, and cuDNN's kernels, which on new GPUs come
    before those of flash attention. Returns what they were."""
    found = dict(fast_path=torch.backends.mha.get_fastpath_enabled(),
                 cudnn=torch.backends.cuda.cudnn_sdp_enabled())
    torch.backends.mha.set_fastpath_enabled(fast_path)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    return found


def _has_gpu() -> bool:
    return torch.cuda.is_available() and any(found.kind == "cuda" for found in devices())


def activate() -> None:
    """From now on what torch computes by flash attention runs on this library in this process:
    F.scaled_dot_product_attention and all that is built on it, such as nn.MultiheadAttention, whose
    fast path without it is switched off; torch.nn.attention.varlen; context_parallel, where
    torch.distributed is initialised before. On a CPU, and on GPUs by torch's registry of flash
    implementations, with cuDNN's attention switched off, which would come first. Calls that the
    library refuses go to torch's own kernel; report() counts both. What torch gives to other
    kernels stays there: on a CPU dropout and values of another head dimension,
    nn.MultiheadAttention with need_weights; on a GPU float masks.

    RuntimeError for a torch that cannot give its own kernel away (torch.library.get_kernel).
    """
    with _lock:
        if _active:
            return
        if not hasattr(torch.library, "get_kernel"):
            raise RuntimeError(f"activate() needs torch.library.get_kernel, which torch "
                               f"{torch.__version__} has not; install a newer one")
        _active["cpu"] = _aten.Override("CPU")
        if _has_gpu():
            _active["cuda"] = _Registered()
        _found.update(_switch(fast_path=False, cudnn=False))
        if "torch.distributed.tensor" in sys.modules or (
                torch.distributed.is_available() and torch.distributed.is_initialized()):
            from . import _dtensor
            _dtensor.register()


def restore() -> None:
    """Gives everything back to torch's own kernels. report() keeps its counts."""
    with _lock:
        if _active:
            for override in _active.values():
                override.remove()
            _active.clear()
            _switch(**_found)


def report() -> Dict[str, Any]:
    """What ran on this library in this process, by any function of flashattn.torch and by PyTorch's
    own while it was active: {"active": whether it is, "devices": where, "forward": calls,
    "backward": calls, "refused": {message: calls that activate() gave to torch's kernels}}."""
    return {"active": bool(_active), "devices": list(_active), "forward": _launch.runs["forward"],
            "backward": _launch.runs["backward"], "refused": dict(_aten.refused)}
