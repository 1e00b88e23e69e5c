"""This library as an attention implementation of Hugging Face's Transformers (Wolf et al. 2020).

Masks stay small where Transformers' own would hold a number for each pair of tokens: causal masks
and sliding windows go to the kernel as such, padding as one row of keys for each sequence.
"""
from __future__ import annotations

import importlib
from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from .._constants import Reason, Status
from .._errors import UnsupportedError, invalid
from . import functional
from ._launch import dense_heads

# A small mask has a fifth dimension, so that whoever else is handed it fails: (batch, 1, 1, keys,
# kind), where kind says what it does not hold. batch and keys are 1 where nothing is padded.
_CAUSAL, _WINDOW = 1, 2
_masking: Any = None  # transformers.masking_utils


def _window_of(mask_function: Any, masking: Any) -> Optional[int]:
    """Of Transformers' mask functions: 0 for causal, a number of tokens for a sliding window, None
    for any other."""
    if mask_function is masking.causal_mask_function:
        return 0
    model = masking.sliding_window_causal_mask_function(1)
    parts = _closure(mask_function, model).get("mask_functions", ())
    if len(parts) == 2 and parts[1] is masking.causal_mask_function:
        return _closure(parts[0], masking.sliding_window_overlay(1)).get("sliding_window")
    return None


def _closure(function: Any, model: Any) -> Any:
    """The variables that a function made like model keeps."""
    code = getattr(function, "__code__", None)
    if code is not model.__code__:
        return {}
    return dict(zip(code.co_freevars, [cell.cell_contents for cell in function.__closure__]))


def _padding(attention_mask: Optional[Tensor], kv_length: int, kv_offset: int) -> Optional[Tensor]:
    """(batch, keys), True: a token; None: nothing is padded."""
    if attention_mask is None:
        return None
    missing = kv_offset + kv_length - attention_mask.shape[-1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    seen = attention_mask[:, kv_offset:kv_offset + kv_length].bool()
    return None if seen.all() else seen


def mask(**given: Any) -> Optional[Tensor]:
    """What AttentionMaskInterface calls: a small mask where that says all, else the boolean mask of
    Transformers' SDPA, (batch, 1, queries, keys); None: nothing is hidden, or it is causal."""
    masking = _masking
    known = given.get("attention_mask")
    if known is not None and known.dim() == 5:  # generate() made it before
        return known
    positions = given.get("cache_position")  # of 4.x
    compiling = torch.compiler.is_compiling()
    if positions is None:
        queries, first = given["q_length"], given.get("q_offset", 0)
    else:
        queries, first = positions.shape[0], None if compiling else int(positions[0])
    keys, kv_offset = given["kv_length"], given.get("kv_offset", 0)
    # The kernel aligns the last query with the last key.
    aligned = isinstance(first, int) and first + queries == kv_offset + keys
    may_skip = given.get("allow_is_causal_skip", True)
    if queries > 1 and aligned and may_skip and not compiling:
        window = _window_of(given.get("mask_function", masking.causal_mask_function), masking)
        if window is not None:
            kind = _WINDOW if 0 < window < keys else _CAUSAL
            seen = _padding(known, keys, kv_offset)
            if seen is None and kind == _CAUSAL:
                return None
            if seen is None:
                seen = torch.ones((1, 1), dtype=torch.bool, device=given.get("device"))
            return seen[:, None, None, :, None].expand(-1, -1, -1, -1, kind)
    given["allow_is_causal_skip"] = may_skip and (queries == 1 or aligned)
    return masking.sdpa_mask(**given)


def _refuse(name: str, remedy: str) -> UnsupportedError:
    return UnsupportedError(f"{name} is given, which this attention does not do; {remedy}",
                            Status.ERROR_UNSUPPORTED, Reason.OP, name)


def _bias(position_bias: Optional[Tensor], seen: Optional[Tensor]) -> Optional[Tensor]:
    """What is added to the scores, of a learned bias and a mask; keys contiguous."""
    if position_bias is None:
        bias = seen
    elif seen is None:
        bias = position_bias
    elif seen.dtype == torch.bool:
        bias = torch.where(seen, position_bias, -torch.inf)
    else:
        bias = position_bias + seen
    return None if bias is None else dense_heads(bias)


def attention(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
              attention_mask: Optional[Tensor], scaling: Optional[float] = None,
              dropout: float = 0.0, is_causal: Optional[bool] = None,
              sliding_window: Optional[int] = None, softcap: Optional[float] = None,
              s_aux: Optional[Tensor] = None, position_bias: Optional[Tensor] = None,
              **more: Any) -> Tuple[Tensor, None]:
    """What AttentionInterface calls: (batch, heads, tokens, dim) tensors; returns (batch, tokens,
    heads, dim), and no weights.

    attention_mask  of mask(), or one that holds all: bool or float (batch, 1 or heads, queries,
                keys); None: is_causal, else the module's, decides
    s_aux       (heads,) logits of sinks
    position_bias  (1 or batch, heads, queries, keys), with a gradient
    cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k  of packed sequences, as Transformers'
                flattening collator makes them: they replace the mask

    NotImplementedError by name for what is not computed: head_mask, the cache of continuous
    batching. ValueError where a layer with a sliding window does not say which.
    """
    if more.get("head_mask") is not None:
        raise _refuse("head_mask", "use attn_implementation=\"eager\"")
    if more.get("cache") is not None:
        raise _refuse("cache (continuous batching)", "use generate()")
    queries, keys = query.shape[2], key.shape[2]
    window = None if sliding_window is None else (sliding_window - 1, 0)
    options: Any = dict(scale=scaling, dropout=dropout, softcap=softcap, sink=s_aux)
    if more.get("cu_seq_lens_q") is not None and position_bias is None and query.shape[0] == 1:
        packed = [x.transpose(1, 2).squeeze(0) for x in (query, key, value)]
        o = functional.attention_varlen(
            *packed, more["cu_seq_lens_q"], more["cu_seq_lens_k"], int(more["max_length_q"]),
            int(more["max_length_k"]), causal=True, window=window, **options)
        return o.unsqueeze(0), None
    causal, seen = True, None
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal, window = queries > 1 and bool(causal), None
    elif attention_mask.dim() == 5:
        if attention_mask.shape[4] != _WINDOW:
            window = None
        elif window is None:
            raise invalid(f"{type(module).__name__} has a mask with a sliding window, but gives no "
                          "sliding_window; use attn_implementation=\"sdpa\"", Reason.VALUE,
                          "window_left")
        if attention_mask.shape[3] == keys:
            seen = attention_mask[..., 0]
    else:
        causal, window, seen = False, None, attention_mask[..., :keys]
    o = functional.attention(query, key, value, layout="bhsd", causal=causal, window=window,
                             bias=_bias(position_bias, seen), **options)
    return o.transpose(1, 2), None


def register_transformers(name: str = "libfa") -> str:
    """Makes this library known to Transformers, 4.53 or newer:

        model.set_attn_implementation(flashattn.torch.register_transformers())

    name        of the implementation; without the letters "flash", by which Transformers looks for
                packages of that name. Returns it. Once more changes nothing.

    ValueError for another name. Models need no more than Transformers' attention interface. BERT of
    4.x has none: it runs under activate() with attn_implementation="sdpa". T5 of 4.x takes
    any name and computes eager attention, as report() shows; T5 of 5.x runs here. Where
    set_attn_implementation() does not reach all parts of a model (T5 of 5.17), give the name to
    from_pretrained(..., attn_implementation=name).
    """
    global _masking
    if "flash" in name:
        raise invalid(f"name = {name!r} has \"flash\" in it, which Transformers takes for a "
                      "package's; leave it out", Reason.VALUE, "name")
    transformers = importlib.import_module("transformers")
    _masking = importlib.import_module("transformers.masking_utils")
    transformers.AttentionInterface.register(name, attention)
    _masking.AttentionMaskInterface.register(name, mask)
    return name
