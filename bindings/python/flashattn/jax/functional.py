"""attention and its relatives on JAX's arrays, with gradients."""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Callable, Dict, Optional

import jax
import jax.numpy as jnp
import numpy as np

from .. import _inputs
from .._constants import Reason
from .._errors import invalid, wrong_type
from .._options import Determinisms, Window, uniform
from . import _call
from ._call import Spec
from ._transforms import operation

_LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "lens_q", "lens_kv", "starts_kv")


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """Gradients that take memory or time of their own."""

    dbias: bool
    dsink: bool


@lru_cache(maxsize=1024)
def _differentiable(spec: Spec) -> Callable[..., Any]:
    """The operation of a forward Spec by the names of its arrays, with gradients: results are
    spec.results."""
    @jax.custom_vjp
    def function(arrays: Dict[str, Any]) -> Any:
        return operation(spec)(*[arrays[name] for name in spec.names])

    def forward(arrays: Any) -> Any:
        given = {name: x.value for name, x in arrays.items()}
        wanted = _Wanted(*[name in arrays and arrays[name].perturbed
                           and jnp.issubdtype(given[name].dtype, jnp.floating)
                           for name in ("bias", "sink")])
        o, lse = operation(spec._replace(lse=True))(*[given[name] for name in spec.names])
        return (o, lse)[:len(spec.results)], (given, o, lse, wanted)

    def backward(kept: Any, arriving: Any) -> Any:
        given, o, lse, wanted = kept
        dout, *dlse = [None if _is_zero(x) else x for x in arriving]
        more = dict(o=o, lse=lse, dout=jnp.zeros_like(o) if dout is None else dout)
        if dlse and dlse[0] is not None:
            more["dlse"] = dlse[0]
        names = (*spec.names, *more)
        made = spec._replace(names=names, backward=True, lse=False, dbias=wanted.dbias,
                             dsink=wanted.dsink)
        results = dict(zip(made.results, operation(made)(
            *[given[name] for name in spec.names], *more.values())))
        return ({name: results["d" + name].astype(x.dtype) if "d" + name in results else None
                 for name, x in given.items()},)

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function


def _is_zero(arriving: Any) -> bool:
    return isinstance(arriving, jax.custom_derivatives.SymbolicZero)


@lru_cache(maxsize=1024)
def _compiled(spec: Spec) -> Callable[..., Any]:
    """For calls outside of a jit."""
    return jax.jit(_differentiable(spec))


def _array(value: Any, name: str) -> Any:
    try:
        return value if isinstance(value, jax.Array) else jnp.asarray(value)
    except TypeError:
        raise wrong_type(f"{name} is a {type(value).__name__}; expected an array of JAX or NumPy",
                         name) from None


def _integers(value: Any, name: str) -> Any:
    """int32."""
    array = _array(value, name)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise wrong_type(f"{name} has dtype {array.dtype}; convert it to int32", name)
    return array.astype(jnp.int32)


def _floats(value: Any, name: str) -> Any:
    """float32."""
    array = _array(value, name)
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        raise wrong_type(f"{name} has dtype {array.dtype}; convert it to float32", name)
    return array.astype(jnp.float32)


def _whole_bias(bias: Any, seqlen_kv: int) -> Any:
    """With four dimensions, the last at its full size, which the library reads without a stride."""
    bias = _array(bias, "bias")
    if bias.ndim > 4:
        return bias  # which is refused
    bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    return jnp.broadcast_to(bias, (*bias.shape[:3], seqlen_kv)) if bias.shape[3] == 1 else bias


def _words_of(rng: Any) -> Any:
    """Seed and offset, drawn from a key: two numbers of 64 bits as four of 32."""
    try:
        return jax.random.bits(rng, (4,), jnp.uint32)
    except (TypeError, ValueError) as error:
        raise wrong_type(f"rng is no key of jax.random ({error}); give jax.random.key(seed)",
                         "rng_device") from None


def _run(arrays: Dict[str, Any], dropout: Any, rng: Any, return_lse: bool,
         options: Dict[str, Any], **maxima: int) -> Any:
    arrays = {name: x for name, x in arrays.items() if x is not None}
    for name in ("q", "k", "v"):
        arrays[name] = _array(arrays[name], name)
    chosen = uniform(dict(options, dropout=dropout))
    if dict(chosen).get("dropout"):
        if rng is None:
            raise invalid(f"dropout = {dropout} is given without rng; give rng=, a key of "
                          "jax.random of which each layer and step has its own", Reason.DROPOUT,
                          "rng_device")
        arrays["rng_device"] = _words_of(rng)
    elif rng is not None:
        raise invalid("rng is given without dropout, and would be ignored; leave it out",
                      Reason.DROPOUT, "rng_device")
    if "bias" in arrays:
        keys = maxima.get("max_seqlen_kv", arrays["k"].shape[1] if arrays["k"].ndim > 1 else 0)
        arrays["bias"] = _whole_bias(arrays["bias"], keys)
    if "sink" in arrays:
        arrays["sink"] = _floats(arrays["sink"], "sink")
    if "alibi_slopes" in arrays:
        slopes = _floats(arrays["alibi_slopes"], "alibi_slopes")
        arrays["alibi_slopes"] = slopes[None] if slopes.ndim == 1 else slopes
    for name in _LENGTHS:
        if name in arrays:
            arrays[name] = _integers(arrays[name], name)
    names = ("q", "k", "v", *sorted(set(arrays) - {"q", "k", "v"}))
    spec = Spec(names, chosen, lse=return_lse, **maxima)
    _call.check(spec, tuple([_call.aval(arrays[name]) for name in names]))
    axes = frozenset().union(*[_call.varying(x) for x in arrays.values()])
    arrays = {name: _same_axes(x, axes) for name, x in arrays.items()}
    results = _compiled(spec)(arrays)
    return results if return_lse else results[0]


def _same_axes(array: Any, axes: Any) -> Any:
    """Inside a shard_map what is the same on all devices has a gradient that sums over them."""
    missing = tuple(sorted(axes - _call.varying(array)))
    if not missing:
        return array
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, missing, to="varying")
    return jax.lax.pvary(array, missing)


def attention(q: Any, k: Any, v: Any, *, causal: bool = False, window: Window = None,
              chunk: Optional[int] = None, top_left: bool = False, bias: Any = None,
              alibi_slopes: Any = None, softcap: Optional[float] = 0.0,
              scale: Optional[float] = None, sink: Any = None, dropout: float = 0.0,
              rng: Any = None, lens_q: Any = None, lens_kv: Any = None, starts_kv: Any = None,
              splits: int = 0, determinism: Determinisms = False, threads: int = 0,
              return_lse: bool = False) -> Any:
    """flashattn.attention() on JAX's arrays, with gradients of q, k, v, bias and sink, and through
    lse.

    q           (batch, seqlen_q, heads_q, dim_qk), float32, float16 or bfloat16
    k, v        (batch, seqlen_kv, heads_kv, dim_qk), (batch, seqlen_kv, heads_kv, dim_v)
    rng         with dropout: a key of jax.random, a new one for each layer and step
    The other options and the errors are those of flashattn.attention(): numbers of Python's, fixed
    when a program is traced, and arrays, in it. Lengths may be of any integer type, alibi_slopes
    and sink of any floating one.

    Returns o (batch, seqlen_q, heads_q, dim_v), or (o, lse): float32 (batch, heads_q, seqlen_q).

    Runs on the CPU and on NVIDIA's GPUs. Under vmap the mapped axis becomes part of the batch;
    packed sequences, dropout, and a sink that is mapped or has a gradient are looped over instead.
    Over the devices of a mesh batch and heads are split; with dropout each computes all, but in a
    shard_map. Forward mode and a gradient of a gradient are refused by JAX.

    What shapes and types say is refused when the program is traced, by FlashAttentionError; lengths
    that only its run knows, on the CPU by JAX's JaxRuntimeError with the library's message.
    (Dao et al. 2022)
    """
    options = dict(causal=causal, window=window, chunk=chunk, top_left=top_left, softcap=softcap,
                   scale=scale, splits=splits, determinism=determinism, threads=threads)
    return _run(dict(q=q, k=k, v=v, bias=bias, sink=sink, alibi_slopes=alibi_slopes, lens_q=lens_q,
                     lens_kv=lens_kv, starts_kv=starts_kv), dropout, rng, return_lse, options)


def _longest(cu_seqlens: Any, given: Optional[int], name: str) -> int:
    if given is not None:
        return _inputs._tokens(given, name.rpartition("_")[2])
    if isinstance(cu_seqlens, jax.core.Tracer):
        raise invalid(f"{name} is not given, and is not read while a program is traced; give a "
                      "bound of the lengths", Reason.LENGTHS, name)
    lengths = np.diff(np.asarray(cu_seqlens).astype(np.int64))
    return max(int(lengths.max()), 0) if lengths.size else 0


def attention_varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any,
                     max_seqlen_q: Optional[int] = None, max_seqlen_kv: Optional[int] = None, *,
                     causal: bool = False, window: Window = None, chunk: Optional[int] = None,
                     top_left: bool = False, bias: Any = None, alibi_slopes: Any = None,
                     softcap: Optional[float] = 0.0, scale: Optional[float] = None,
                     sink: Any = None, dropout: float = 0.0, rng: Any = None, lens_q: Any = None,
                     lens_kv: Any = None, splits: int = 0, determinism: Determinisms = False,
                     threads: int = 0, return_lse: bool = False) -> Any:
    """attention() for sequences of different lengths, packed without padding.

    q           (total_q, heads_q, dim_qk): sequence b holds rows cu_seqlens_q[b] to
                cu_seqlens_q[b + 1]
    k, v        (total_kv, heads_kv, dim_qk), (total_kv, heads_kv, dim_v)
    cu_seqlens_q, cu_seqlens_kv  (batch + 1,) integers
    max_seqlen_q, max_seqlen_kv  tokens of the longest sequences; None: found, where cu_seqlens are
                known when the program is traced

    The rest is as in attention(). Returns o, or (o, lse) with lse (heads_q, total_q); rows of no
    sequence are 0. Over the devices of a mesh heads are split.
    """
    options = dict(causal=causal, window=window, chunk=chunk, top_left=top_left, softcap=softcap,
                   scale=scale, splits=splits, determinism=determinism, threads=threads)
    return _run(dict(q=q, k=k, v=v, bias=bias, sink=sink, alibi_slopes=alibi_slopes, lens_q=lens_q,
                     lens_kv=lens_kv, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv),
                dropout, rng, return_lse, options,
                max_seqlen_q=_longest(cu_seqlens_q, max_seqlen_q, "max_seqlen_q"),
                max_seqlen_kv=_longest(cu_seqlens_kv, max_seqlen_kv, "max_seqlen_kv"))
