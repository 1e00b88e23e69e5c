"""The functions of the package flash-attn 2, under its names and with its defaults (Dao 2023)."""
from __future__ import annotations

from typing import Any, Optional, Tuple, Union

import torch
from torch import Tensor

from .._constants import Reason, Status
from .._errors import UnsupportedError, invalid
from . import functional

_Window = Tuple[int, int]


def _refuse(name: str, remedy: str) -> UnsupportedError:
    return UnsupportedError(f"{name} is given, which libflashattn does not do yet; {remedy}",
                            Status.ERROR_UNSUPPORTED, Reason.OP, name)


def _result(result: Any, return_attn_probs: bool, dropout_p: float) -> Any:
    """o, or (o, softmax_lse, None): no weights are stored."""
    if not return_attn_probs:
        return result
    if dropout_p:
        raise _refuse("return_attn_probs with dropout_p", "see flashattn.dropout_mask()")
    return (*result, None)


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0,
                    softmax_scale: Optional[float] = None, causal: bool = False,
                    window_size: _Window = (-1, -1), softcap: float = 0.0,
                    alibi_slopes: Optional[Tensor] = None, deterministic: bool = False,
                    return_attn_probs: bool = False) -> Any:
    """flash_attn.flash_attn_func: attention() by flash-attn's names.

    q           (batch, seqlen_q, heads_q, dim); k, v (batch, seqlen_kv, heads_kv, dim)

    Returns o, or (o, softmax_lse, None) with return_attn_probs; flash-attn's third result, weights
    for debugging, is not made: with dropout_p it is refused. Errors as in attention().
    """
    result = functional.attention(
        q, k, v, dropout=dropout_p, scale=softmax_scale, causal=causal, window=window_size,
        softcap=softcap, alibi_slopes=alibi_slopes, determinism=deterministic,
        return_lse=return_attn_probs)
    return _result(result, return_attn_probs, dropout_p)


def flash_attn_qkvpacked_func(qkv: Tensor, *arguments: Any, **options: Any) -> Any:
    """flash_attn_func() of qkv (batch, seqlen, 3, heads, dim)."""
    return flash_attn_func(*qkv.unbind(2), *arguments, **options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **options: Any) -> Any:
    """flash_attn_func() of kv (batch, seqlen_kv, 2, heads_kv, dim)."""
    return flash_attn_func(q, *kv.unbind(2), *arguments, **options)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor,
                           cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
                           dropout_p: float = 0.0, softmax_scale: Optional[float] = None,
                           causal: bool = False, window_size: _Window = (-1, -1),
                           softcap: float = 0.0, alibi_slopes: Optional[Tensor] = None,
                           deterministic: bool = False, return_attn_probs: bool = False,
                           block_table: Optional[Tensor] = None) -> Any:
    """flash_attn.flash_attn_varlen_func: attention_varlen() by flash-attn's names.

    q           (total_q, heads_q, dim); k, v (total_kv, heads_kv, dim), with block_table pages
                (pages, page_size, heads_kv, dim), whose lengths are the steps of cu_seqlens_k

    Results as in flash_attn_func(), softmax_lse (heads_q, total_q).
    """
    more: Any = dict(scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
                     alibi_slopes=alibi_slopes, determinism=deterministic,
                     return_lse=return_attn_probs)
    if block_table is None:
        result = functional.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                             max_seqlen_k, dropout=dropout_p, **more)
    elif dropout_p:
        raise _refuse("dropout_p with block_table", "leave one out")
    else:
        result = functional.attention_paged(q, k, v, block_table, cu_seqlens_k.diff(),
                                            cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
                                            max_seqlen_kv=max_seqlen_k, **more)
    return _result(result, return_attn_probs, dropout_p)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int,
                                     *arguments: Any, **options: Any) -> Any:
    """flash_attn_varlen_func() of qkv (total, 3, heads, dim)."""
    return flash_attn_varlen_func(*qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
                                  *arguments, **options)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *arguments: Any, **options: Any) -> Any:
    """flash_attn_varlen_func() of kv (total_kv, 2, heads_kv, dim)."""
    return flash_attn_varlen_func(q, *kv.unbind(1), *arguments, **options)


def _append(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Optional[Tensor], v: Optional[Tensor],
            rotary: Tuple[Optional[Tensor], Optional[Tensor], bool], lens: Optional[Tensor],
            block_table: Optional[Tensor], moving: bool) -> Tuple[Tensor, Tensor]:
    """q rotated, and the tokens in the cache with the new ones."""
    if k is None or v is None or lens is None:
        name = "k" if k is None else "v" if v is None else "cache_seqlens"
        raise invalid(f"{name} is not given; new keys and values, and rotary_cos and rotary_sin, "
                      "need k, v and cache_seqlens", Reason.NULL_POINTER, name)
    cos, sin, interleaved = rotary
    turn: Any = dict(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved,
                     page_table=block_table)
    rotates = cos is not None
    if rotates and moving and q.shape[1] == k.shape[1]:
        return functional.append_kv(k_cache, v_cache, lens, k, v, q, **turn)
    if rotates:
        # Queries that all stand at one position are heads of one query.
        turned = q if moving else q.flatten(1, 2).unsqueeze(1)
        q = functional.append_kv(k_cache, v_cache, lens, q=turned, **turn).q.view(q.shape)
    return q, functional.append_kv(k_cache, v_cache, lens, k, v, **turn).lens_kv


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor,
                            k: Optional[Tensor] = None, v: Optional[Tensor] = None,
                            rotary_cos: Optional[Tensor] = None,
                            rotary_sin: Optional[Tensor] = None,
                            cache_seqlens: Union[None, int, Tensor] = None,
                            cache_batch_idx: Optional[Tensor] = None,
                            cache_leftpad: Optional[Tensor] = None,
                            block_table: Optional[Tensor] = None,
                            softmax_scale: Optional[float] = None, causal: bool = False,
                            window_size: _Window = (-1, -1), softcap: float = 0.0,
                            rotary_interleaved: bool = True,
                            alibi_slopes: Optional[Tensor] = None, num_splits: int = 0,
                            return_softmax_lse: bool = False) -> Any:
    """flash_attn.flash_attn_with_kvcache: attention on a KV cache, dense or paged; no gradient.

    q           (batch, seqlen_q, heads_q, dim)
    k_cache, v_cache  (batch, capacity, heads_kv, dim); with block_table (pages, page_size,
                heads_kv, dim), of any page size
    cache_seqlens  tokens in use: an integer for all sequences, or (batch,) integers
    cache_leftpad  (batch,) integers, keys before which do not exist; not with block_table

    k, v        (batch, seqlen_new, heads_kv, dim): written behind cache_seqlens first
    rotary_cos, rotary_sin  (positions, rotary_dim / 2): k is rotated by its row in the cache, and q
                from row cache_seqlens on; all of it at that row unless causal or window is given

    On a GPU head dimensions that are no multiple of 8 copy both caches in each call.

    Returns o, or (o, softmax_lse). NotImplementedError by name for cache_batch_idx.
    """
    if cache_batch_idx is not None:
        raise _refuse("cache_batch_idx", "give k_cache[cache_batch_idx]")
    if block_table is not None and cache_leftpad is not None:
        raise _refuse("cache_leftpad with block_table", "leave one out")
    dim = q.shape[-1]
    if q.is_cuda and dim % functional.GPU_STEP:  # a copy of the caches, as in flash_attn
        padded = [x if x is None else functional.padded_head(x) for x in (
            q, k_cache, v_cache, k, v)]
        scale = dim ** -0.5 if softmax_scale is None else softmax_scale
        o, lse = flash_attn_with_kvcache(
            *padded, rotary_cos, rotary_sin, cache_seqlens, None, cache_leftpad, block_table, scale,
            causal, window_size, softcap, rotary_interleaved, alibi_slopes, num_splits, True)
        if k is not None:
            for cache, copy in zip((k_cache, v_cache), padded[1:3]):
                cache.copy_(copy[..., :dim])
        return (o[..., :dim], lse) if return_softmax_lse else o[..., :dim]
    lens = cache_seqlens
    if isinstance(lens, int):
        lens = torch.full((q.shape[0],), lens, dtype=torch.int32, device=q.device)
    if k is not None or v is not None or rotary_cos is not None or rotary_sin is not None:
        moving = causal or tuple(window_size) != (-1, -1)
        q, lens = _append(q, k_cache, v_cache, k, v, (rotary_cos, rotary_sin, rotary_interleaved),
                          lens, block_table, moving)
    more: Any = dict(scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
                     alibi_slopes=alibi_slopes, splits=num_splits, return_lse=return_softmax_lse)
    if block_table is None:
        return functional.attention(q, k_cache, v_cache, lens_kv=lens, starts_kv=cache_leftpad,
                                    **more)
    if lens is None:
        lens = torch.full((q.shape[0],), block_table.shape[1] * k_cache.shape[1],
                          dtype=torch.int32, device=q.device)
    return functional.attention_paged(q, k_cache, v_cache, block_table, lens, **more)
