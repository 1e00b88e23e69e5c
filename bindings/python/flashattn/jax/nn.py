"""The name and signature of JAX's own attention."""
from __future__ import annotations

from typing import Any, Optional, Tuple, Union

import jax
import jax.numpy as jnp

from .._constants import Reason, Status
from .._errors import UnsupportedError, invalid, wrong_type
from .functional import attention


def dot_product_attention(
        query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *,
        scale: Optional[float] = None, is_causal: bool = False, query_seq_lengths: Any = None,
        key_value_seq_lengths: Any = None,
        local_window_size: Union[None, int, Tuple[int, int]] = None,
        implementation: Optional[str] = None, return_residual: bool = False,
        softcap: Optional[float] = 0.0, sink: Any = None, alibi_slopes: Any = None,
        dropout: float = 0.0, rng: Any = None) -> Any:
    """jax.nn.dot_product_attention, and what it has not.

    query       (batch, queries, heads, dim) or (queries, heads, dim), float32, float16 or bfloat16
    key, value  (batch, keys, KV heads, dim) or (keys, KV heads, dim); value's dim may differ
    bias        added to the scores; broadcasts to (batch, heads, queries, keys)
    mask        bool, True = visible; broadcasts likewise. Beside a bias the two become one array
    is_causal, local_window_size  aligned at the start of the sequences: query i stands at key i
    query_seq_lengths, key_value_seq_lengths  (batch,) integers: the rest is padding, and 0
    implementation  None: this library. Another name is refused
    return_residual  return (o, lse) with lse (batch, queries, heads) in key's dtype, without a
                gradient, as JAX does; attention(return_lse=True) gives it in float32 with one
    softcap, sink, alibi_slopes, dropout, rng  as in attention()

    A query that sees no key gives 0, where JAX gives the mean of all values. The rest, and the
    errors, are as in attention().
    """
    if implementation is not None:
        raise UnsupportedError(
            f"implementation = {implementation!r} names other kernels than this library's; leave "
            f"it out, or call jax.nn.dot_product_attention(implementation={implementation!r})",
            Status.ERROR_UNSUPPORTED, Reason.VALUE, "implementation")
    query, key, value = [jnp.asarray(x) for x in (query, key, value)]
    alone = query.ndim == 3
    if alone:
        query, key, value = [x[None] if x.ndim == 3 else x for x in (query, key, value)]
    result = attention(
        query, key, value, bias=_scores(bias, mask), causal=is_causal, window=local_window_size,
        top_left=True, softcap=softcap, scale=scale, sink=sink, alibi_slopes=alibi_slopes,
        dropout=dropout, rng=rng, lens_q=query_seq_lengths, lens_kv=key_value_seq_lengths,
        return_lse=return_residual)
    if not return_residual:
        return result[0] if alone else result
    o, lse = result
    lse = jax.lax.stop_gradient(lse.transpose(0, 2, 1).astype(key.dtype))
    return (o[0], lse[0]) if alone else (o, lse)


def _scores(bias: Any, mask: Any) -> Any:
    """The one array that the library adds or masks by."""
    if mask is None:
        return bias
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise wrong_type(f"mask has dtype {mask.dtype}; convert it to bool, True = visible, or "
                         "give it as bias", "mask")
    if bias is None:
        return mask
    bias = jnp.asarray(bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise invalid(f"bias has dtype {bias.dtype} beside a mask; give one bool array as mask, or "
                      "a bias of floats", Reason.BIAS, "bias")
    return jnp.where(mask, bias, -jnp.inf)
