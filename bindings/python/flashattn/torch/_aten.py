"""aten's operators for flash attention, computed by this library: what activate() puts in the place
of torch's kernels."""
from __future__ import annotations

import collections
import threading
from functools import lru_cache
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .. import _tools
from .._constants import Reason, Status
from .._errors import FlashAttentionError, UnsupportedError
from . import _launch
from ._launch import BESIDE, NOTHING, Options
from ._repeat import Calls

refused: Dict[str, int] = collections.Counter()
_FOR_CPU = "_scaled_dot_product_flash_attention_for_cpu"
_SDPA = "_scaled_dot_product_flash_attention"
_FLASH = "_flash_attention"
_HEADS_FIRST = ((0, 2, 1, 3), (0, 2, 1, 3))
_deterministic: Any = getattr(torch._C, "_get_deterministic_algorithms",
                              torch.are_deterministic_algorithms_enabled)
_ON_TOP = Options(causal=True, top_left=True)


class Unrepeatable(UnsupportedError):
    """A refusal after which torch's kernel would drop other weights than this library did."""


def _unrepeatable(what: str) -> Unrepeatable:
    return Unrepeatable(f"{what} with dropout_p; call flashattn.torch.restore() before",
                        Status.ERROR_UNSUPPORTED, Reason.DROPOUT, "dropout")


@lru_cache(maxsize=4096)
def _promised(name: str, *geometry: Any) -> Tuple[Tuple[int, ...], ...]:
    """The strides of an operator's results by torch's own kernel for meta tensors, on which
    compiled programs rely. geometry: of q, k, v."""
    q, k, v = (torch.empty_strided(*given, device="meta") for given in geometry)
    arguments = [q, k, v]
    if name.startswith(_FLASH):
        cu = torch.empty(2, device="meta") if q.dim() == 3 else None
        arguments += [cu, cu, 1, 1, 0.0, False, False]
    if name.endswith("backward"):
        rest = {_FOR_CPU + "_backward": [0.0, False]}.get(name, [q, q, 1, 1, 0.0, False, q, q])
        arguments = [q, q, k, v, q, q, *rest]
    results = [x for x in getattr(torch.ops.aten, name)(*arguments)[:3] if x is not None]
    if not name.endswith("backward") and results[0].shape[-1] != v.shape[-1]:
        # torch up to 2.11 promises results of query's head dimension: strides of another tensor.
        results[0] = results[0].new_empty((*q.shape[:-1], v.shape[-1]))
    return tuple([result.stride() for result in results])


def _geometry(tensor: Tensor) -> Any:
    return tensor.shape, tensor.stride()


def _empty(like: Tensor, shape: Any, strides: Tuple[int, ...]) -> Tensor:
    """With strides, if the library can write them: the last is 1."""
    if strides[-1] != 1:
        return like.new_empty(shape)
    return like.new_empty_strided(shape, strides)


def _as_promised(tensor: Tensor, strides: Tuple[int, ...]) -> Tensor:
    if tensor.stride() == strides:
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


class _Same(NamedTuple):
    """Calls with the same options."""

    options: Options
    forward: Calls
    backward: Calls


@lru_cache(maxsize=1024)
def _same(dropout_p: float, is_causal: bool, scale: Optional[float], top_left: bool,
          deterministic: bool, left: int, right: int, splits: int) -> _Same:
    return _Same(Options(causal=is_causal, top_left=top_left and is_causal, scale=scale,
                         dropout=dropout_p, window_left=left, window_right=right, splits=splits,
                         determinism=int(deterministic)), Calls(), Calls())


def _beside(**tensors: Optional[Tensor]) -> Any:
    return tuple([tensors.get(name) for name in BESIDE])


def _mask(attn_mask: Optional[Tensor], keys: int) -> Any:
    """Keys contiguous, as the library wants them."""
    if attn_mask is None:
        return NOTHING
    if attn_mask.shape[-1] != keys:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-1], keys)
    return (_launch.dense_heads(attn_mask), *NOTHING[1:])


def _for_cpu(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
             is_causal: bool = False, *, attn_mask: Optional[Tensor] = None,
             scale: Optional[float] = None) -> Any:
    if value.shape[-1] != query.shape[-1]:
        raise UnsupportedError(f"value has head dimension {value.shape[-1]}, query "
                               f"{query.shape[-1]}, which torch's fake kernel does not expect; "
                               "call flashattn.torch.scaled_dot_product_attention",
                               Status.ERROR_UNSUPPORTED, Reason.HEAD_DIM_PAIR, "v")
    same = _same(dropout_p, is_causal, scale, True, False, -1, -1, 0)
    found = same.forward.find(query, key, value) if attn_mask is None else None
    if found is not None:
        run, promised = found
        o, lse = run(query, key, value)
    else:
        like = _geometry(query)  # whose sizes and strides alone they follow
        strides, promised = _promised(_FOR_CPU, like, like, like)[:2]
        o = _empty(query, (*query.shape[:-1], value.shape[-1]), strides)
        beside = _mask(attn_mask, key.shape[2])
        run = _launch.prepare_forward(query, key, value, beside, -1, -1, same.options, True,
                                      _HEADS_FIRST, o)
        if attn_mask is None and o.stride() == strides:
            same.forward.keep((run, promised), query, key, value)
        o, lse = run(query, key, value, beside, o)
        o = _as_promised(o, strides)
    assert lse is not None
    return o, _as_promised(lse, promised)


def _for_cpu_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
                      logsumexp: Tensor, dropout_p: float, is_causal: bool, *,
                      attn_mask: Optional[Tensor] = None, scale: Optional[float] = None) -> Any:
    same = _same(dropout_p, is_causal, scale, True, False, -1, -1, 0)
    if attn_mask is None:
        run = same.backward.find(grad_out, query, key, value, out, logsumexp)
        if run is not None:
            return run(grad_out, None, query, key, value, out, logsumexp)[:3]
    # torch's gradients are stored as the library's.
    return _launch.backward(grad_out, None, query, key, value, out, logsumexp,
                            _mask(attn_mask, key.shape[2]), -1, -1, same.options, False, False,
                            _HEADS_FIRST, calls=same.backward if attn_mask is None else None)[:3]


@lru_cache(maxsize=1024)
def _trains(dtype: Any, heads_q: int, heads_kv: int, dim_qk: int, dim_v: int, device: str) -> None:
    """Refuses a forward call with dropout whose gradients torch's kernel would have to compute."""
    _tools.check(dtype=dtype, heads_q=heads_q, heads_kv=heads_kv, dim_qk=dim_qk, dim_v=dim_v,
                 dropout=0.5, backward=True, device=device)


def _rng(q: Tensor, dropout_p: float, heads_q: int, heads_kv: int, dim_v: int) -> Tensor:
    """Seed and offset, as torch keeps them for the backward call; without dropout nobody reads
    them."""
    if not dropout_p:
        return torch.empty(2, dtype=torch.uint64, device=q.device)
    _trains(str(q.dtype).rpartition(".")[2], heads_q, heads_kv, q.shape[-1], dim_v, str(q.device))
    return torch.randint(-2**63, 2**63 - 1, (2,), dtype=torch.int64,
                         device=q.device).view(torch.uint64)


def _no_weights(return_debug_mask: bool, dropout_p: float) -> None:
    if return_debug_mask and dropout_p:
        raise _unrepeatable("return_debug_mask is given, which the library does not compute,")
    if return_debug_mask:
        raise UnsupportedError("return_debug_mask is given, but no weights are stored; leave it "
                               "out", Status.ERROR_UNSUPPORTED, Reason.OP, "return_debug_mask")


def _flash(query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Optional[Tensor],
           cum_seq_k: Optional[Tensor], max_q: int, max_k: int, dropout_p: float, is_causal: bool,
           return_debug_mask: bool, *, scale: Optional[float] = None,
           window_size_left: Optional[int] = None, window_size_right: Optional[int] = None,
           seqused_k: Optional[Tensor] = None, alibi_slopes: Optional[Tensor] = None,
           block_table: Optional[Tensor] = None, num_splits: Optional[int] = None,
           out: Optional[Tensor] = None, orders: Any = None) -> Any:
    """(batch, seq, heads, dim), or packed; orders: of others. Masks are aligned at the bottom
    right."""
    if return_debug_mask:
        _no_weights(return_debug_mask, dropout_p)
    heads = -2 if orders is None else 1
    rng = _rng(query, dropout_p, query.shape[heads], key.shape[heads], value.shape[-1])
    beside, most = NOTHING, -1
    if dropout_p or not (
            cum_seq_q is cum_seq_k is seqused_k is alibi_slopes is block_table is None):
        lens_kv, most = seqused_k, max_k if cum_seq_k is not None else -1
        if block_table is not None:
            if lens_kv is None and cum_seq_k is not None:
                lens_kv = cum_seq_k.diff()
            cum_seq_k, most = None, min(max_k, block_table.shape[1] * key.shape[1])
        beside = _beside(alibi_slopes=alibi_slopes, cu_seqlens_q=cum_seq_q,
                         cu_seqlens_kv=cum_seq_k, lens_kv=lens_kv, page_table=block_table,
                         rng_device=rng.view(torch.int64) if dropout_p else None)
    same = _same(
        dropout_p, is_causal, scale, False, _deterministic(),
        -1 if window_size_left is None else window_size_left,
        -1 if window_size_right is None else window_size_right, num_splits or 0)
    if out is None:
        name = _SDPA if orders else _FLASH + "_forward"
        strides = _promised(name, *map(_geometry, (query, key, value)))[0]
        made = _empty(query, (*query.shape[:-1], value.shape[-1]), strides)
    else:
        made, strides = out, out.stride()
    # Packed rows of no sequence are not written.
    if out is None and cum_seq_q is not None:
        made.zero_()
    run = _launch.prepare_forward(
        query, key, value, beside, max_q if cum_seq_q is not None else -1, most, same.options, True,
        orders, made)
    rest = (rng, torch.empty((), dtype=torch.uint64, device=query.device), query.new_empty(0))
    if orders is not None and beside is NOTHING and made.stride() == strides:
        makers = [_launch.maker(x.shape, x.stride(), x.dtype, x.device) for x in rest[:2]]
        same.forward.keep((run, max_q, max_k, *makers, rest[2]), query, key, value)
    o, lse = run(query, key, value, beside, made)
    assert lse is not None
    return _as_promised(o, strides), lse, *rest


def _flash_in_place(out: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return _flash(*arguments, **options, out=out)[1]


def _flash_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
                    logsumexp: Tensor, cum_seq_q: Optional[Tensor], cum_seq_k: Optional[Tensor],
                    max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor,
                    unused: Tensor, *, scale: Optional[float] = None,
                    window_size_left: Optional[int] = None,
                    window_size_right: Optional[int] = None, orders: Any = None) -> Any:
    beside = NOTHING
    if dropout_p or cum_seq_q is not None or cum_seq_k is not None:
        beside = _beside(cu_seqlens_q=cum_seq_q, cu_seqlens_kv=cum_seq_k,
                         rng_device=rng_state.view(torch.int64) if dropout_p else None)
    same = _same(
        dropout_p, is_causal, scale, False, _deterministic(),
        -1 if window_size_left is None else window_size_left,
        -1 if window_size_right is None else window_size_right, 0)
    name = (_SDPA if orders else _FLASH) + "_backward"
    inputs = (query, key, value)
    strides = _promised(name, *map(_geometry, inputs))
    made = [_empty(x, x.shape, by) for x, by in zip(inputs, strides)]
    if cum_seq_q is not None or cum_seq_k is not None:
        for gradient in made:
            gradient.zero_()
    try:
        grads = _launch.backward(
            grad_out, None, query, key, value, out, logsumexp, beside,
            max_q if cum_seq_q is not None else -1, max_k if cum_seq_k is not None else -1,
            same.options, False, False, orders, made, same.backward if orders is not None and
            beside is NOTHING and all(x.stride() == by for x, by in zip(made, strides)) else None)
    except FlashAttentionError as error:
        if dropout_p:
            raise _unrepeatable(f"{error}: a gradient of a call") from error
        raise
    return tuple([_as_promised(x, by) for x, by in zip(grads, strides) if x is not None])


def _sdpa(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
          is_causal: bool = False, return_debug_mask: bool = False, *,
          scale: Optional[float] = None) -> Any:
    if not return_debug_mask:
        found = _same(dropout_p, is_causal, scale, False, _deterministic(), -1, -1,
                      0).forward.find(query, key, value)
        if found is not None and _launch.is_current(query):
            run, max_q, max_k, rng, unused, weights = found
            o, lse = run(query, key, value)
            return o, lse, None, None, max_q, max_k, rng(), unused(), weights
    max_q, max_k = query.shape[2], key.shape[2]
    o, lse, rng, unused, weights = _flash(query, key, value, None, None, max_q, max_k, dropout_p,
                                          is_causal, return_debug_mask, scale=scale,
                                          orders=_HEADS_FIRST)
    return o, lse, None, None, max_q, max_k, rng, unused, weights


def _sdpa_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
                   logsumexp: Tensor, cum_seq_q: Optional[Tensor], cum_seq_k: Optional[Tensor],
                   max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor,
                   unused: Tensor, *, scale: Optional[float] = None) -> Any:
    if not dropout_p and cum_seq_q is cum_seq_k is None:
        run = _same(dropout_p, is_causal, scale, False, _deterministic(), -1, -1, 0).backward.find(
            grad_out, query, key, value, out, logsumexp)
        if run is not None:
            return run(grad_out, None, query, key, value, out, logsumexp)[:3]
    return _flash_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q,
                           max_k, dropout_p, is_causal, rng_state, unused, scale=scale,
                           orders=_HEADS_FIRST)


_FIVE = {_FLASH + "_forward": _flash, _FLASH + "_forward_no_dropout_inplace": _flash_in_place,
         _FLASH + "_backward": _flash_backward, _SDPA: _sdpa, _SDPA + "_backward": _sdpa_backward}
OPERATORS: Dict[str, Dict[str, Callable[..., Any]]] = {
    "CUDA": _FIVE,
    # torch has no kernels of the five for a CPU: varlen_attn and context_parallel have none there.
    "CPU": {**_FIVE, _FOR_CPU: _for_cpu, _FOR_CPU + "_backward": _for_cpu_backward}}


class _Handing(threading.local):
    """Whether this thread is within a kernel of torch's that a refused call was handed to."""

    within = False


_handing = _Handing()


def _serving(kernel: Callable[..., Any], theirs: Any, keys: Any) -> Any:
    def serve(*arguments: Any, **options: Any) -> Any:
        try:
            return kernel(*arguments, **options)
        except FlashAttentionError as error:
            # torch's kernels call further operators of these, which are no calls of their own.
            first, _handing.within = not _handing.within, True
            try:
                if first:
                    refused[str(error)] += 1
                if theirs is None or isinstance(error, Unrepeatable):
                    raise
                return theirs.call_boxed(keys, *arguments, **options)
            finally:
                _handing.within = not first
    return serve


class Override:
    """This library's kernels of a device ("CPU", "CUDA") in the place of torch's, from now on."""

    def __init__(self, key: str) -> None:
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        self._library = torch.library.Library("aten", "IMPL")
        for name, kernel in OPERATORS[key].items():
            if not hasattr(torch.ops.aten, name):
                continue  # of a newer torch
            known = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
            theirs = torch.library.get_kernel(f"aten::{name}", key) if known else None
            self._library.impl(name, _serving(kernel, theirs, keys), key,
                               allow_override=True)

    def remove(self) -> None:
        """Gives the operators back. Once more does nothing."""
        self._library._destroy()
