"""attention and its relatives: the functions most programs need."""
from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Tuple, TypeVar, Union

from ._arrays import DTypeLike, dtype_code, view
from ._inputs import Inputs, first_given
from ._options import Window, uniform
from ._plan import cached_plan

if TYPE_CHECKING:
    from typing import TypedDict

    from typing_extensions import Unpack

    class Options(TypedDict, total=False):
        """What every function below takes; explained at attention()."""

        causal: bool
        window: Window
        chunk: Optional[int]
        top_left: bool
        softcap: Optional[float]
        scale: Optional[float]
        bias: Any
        alibi_slopes: Any
        sink: Any
        dropout: float
        seed: Optional[int]
        offset: int
        block_mask: Any
        block_size: Optional[Tuple[int, int]]
        splits: int
        deterministic: Union[bool, str]
        threads: int
        device: Optional[str]
        stream: Any

_DEFAULTS: Dict[str, Any] = dict(
    causal=False, window=None, chunk=None, top_left=False, softcap=0.0, scale=None, bias=None,
    alibi_slopes=None, sink=None, dropout=0.0, seed=None, offset=0, block_mask=None,
    block_size=None, splits=0, deterministic=False, threads=0, device=None, stream=None)
# Those that go with the arrays; the others go into the descriptor.
_BESIDE = ("bias", "alibi_slopes", "sink", "block_mask", "block_size", "seed", "offset", "device",
           "stream")
_F = TypeVar("_F", bound=Callable[..., Any])


def _spelled(function: _F) -> _F:
    """Lets help() and editors show the options one by one in place of **options."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
                   for name, default in _DEFAULTS.items()]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def _inputs(options: Any, q: Any, k: Any, v: Any, **arrays: Any) -> Inputs:
    """Takes the options that are arrays out of options."""
    for name in options:
        if name not in _DEFAULTS:
            raise TypeError(f"unexpected option {name!r}; the options are {', '.join(_DEFAULTS)}")
    for name in _BESIDE:
        if name in options:
            arrays[name] = options.pop(name)
    inputs = Inputs(q, k, v, **arrays)
    if inputs.place is not None:
        options["device"] = inputs.place.device
    return inputs


def _forward(inputs: Inputs, out: Any, out_dtype: Any, return_lse: bool,
             options: Any) -> Any:
    seen = None if out is None else view(out, "out", inputs.place)
    if out_dtype is not None:
        options["out_dtype"] = _other_type(dtype_code(out_dtype, "out_dtype"), inputs)
    elif seen is not None:
        options["out_dtype"] = _other_type(seen.dtype, inputs)
    options["return_lse"] = return_lse
    plan = cached_plan(inputs.facts(), uniform(options))
    return plan.run_forward(inputs, out, seen)


def _other_type(code: int, inputs: Inputs) -> Optional[int]:
    """Of the output, where it is not that of q."""
    return None if code == inputs.q.view.dtype else code


@_spelled
def attention(q: Any, k: Any, v: Any, *, layout: str = "bshd", q_lens: Any = None,
              kv_lens: Any = None, out: Any = None, out_dtype: Optional[DTypeLike] = None,
              return_lse: bool = False, **options: Unpack[Options]) -> Any:
    """softmax(scale * q k^T + bias) v, exactly, without storing the scores (Dao et al. 2022).

    Arrays are NumPy arrays (bfloat16 through ml_dtypes), or objects with __dlpack__ or
    __array_interface__ in host memory, or all on one GPU: PyTorch's, CuPy's, or objects with
    __dlpack__ or __cuda_array_interface__. They are not copied. float32, float16 or bfloat16.

    q           (batch, queries, heads, dim), in the order that layout says
    k, v        (batch, keys, kv_heads, dim), (batch, keys, kv_heads, dim_v). kv_heads divides
                heads (grouped-query attention). Any strides, but dim is contiguous: slices of a
                packed QKV array and transposed views do
    layout      order of the dimensions of q, k, v and out: "bshd", "bhsd" (PyTorch's), "sbhd", ...
    q_lens, kv_lens  (batch,) integers: how many leading tokens of each sequence are in use
    out         written and returned: (batch, queries, heads, dim_v). Else a NumPy array is made,
                whatever library q comes from; on a GPU a tensor of PyTorch or an array of CuPy, as
                q is, and where q is neither, out must be one
    out_dtype   of the result: that of q or "float32"
    return_lse  return (out, lse): float32 natural logarithms (batch, heads, queries) of the sums

    Which keys a query sees; all that are given must agree. Query i stands at key position
    i + (keys - queries) of its sequence, with top_left at i.
    causal      keys up to the query's own position
    window      (left, right) keys to each side of it, None or -1: open; n: (n, n)
    chunk       keys of the same chunk of so many tokens
    block_mask  bool or uint8, broadcast to (batch, heads, query blocks, key blocks); block_size is
                (queries, keys) a block
    bias        added to the scores, float; or bool, True = visible. Broadcast to (batch, heads,
                queries, keys); keys must be contiguous
    alibi_slopes  (heads,) or (batch, heads): the score loses slope * |distance| (Press et al. 2022)

    softcap     scores become softcap * tanh(score / softcap); 0 or None: off
    scale       factor of the scores; None: 1 / sqrt(dim)
    sink        (heads,) logits that take part in the softmax and have no value
    dropout     probability, [0, 1), with which a weight is dropped, in steps of 1/65536
    seed, offset  integers in [0, 2**64) that choose what is dropped, see dropout_mask(). dropout
                needs a seed: equal numbers drop the same weights, so give each layer and step a
                seed or offset of its own, and the backward call those of its forward call
    splits      parts into which the keys of a short query are split; 0: the library chooses
    deterministic  True: the same call gives the same bits; "batch_invariant": also whatever else
                is in the batch. On the CPU this always holds
    threads     at the most; 0: all, 1: only this one
    device      None: where the arrays lie; "cpu", "cuda" or "cuda:1": they must lie there
    stream      on a GPU: the stream, a cudaStream_t as a number or PyTorch's or CuPy's object, on
                which all arrays are ready. None: the current one of the library that q comes from,
                else of out's, else the default stream; arrays of other libraries are waited for

    On a GPU the call enqueues its work and returns; what it reads is kept until that is done. It
    reads nothing there itself: integers must be int32 (slopes and sinks float32) and lie there too,
    and varlen calls need max_seqlen_q and max_seqlen_k. A graph that captures a call reads the
    arrays whenever it is replayed, and keeping them is up to its owner. No gradient is recorded:
    tensors that require one are refused.

    Raises ValueError for shapes, strides and values, TypeError for types of arrays,
    NotImplementedError for what no kernel does, MemoryError: each a FlashAttentionError with the
    sentence, status, reason and field. A query that sees no key gives 0, and lse = -inf.
    """
    inputs = _inputs(options, q, k, v, layout=layout, q_lens=q_lens, kv_lens=kv_lens,
                     out=out)
    return _forward(inputs, out, out_dtype, return_lse, options)


@_spelled
def attention_varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
                     max_seqlen_q: Optional[int] = None, max_seqlen_k: Optional[int] = None, *,
                     layout: Optional[str] = None, q_lens: Any = None, kv_lens: Any = None,
                     out: Any = None, out_dtype: Optional[DTypeLike] = None,
                     return_lse: bool = False, **options: Unpack[Options]) -> Any:
    """attention() for sequences of different lengths, packed without padding.

    q           (total_q, heads, dim): sequence b holds rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]
    k, v        (total_k, kv_heads, dim), likewise with cu_seqlens_k
    cu_seqlens_q, cu_seqlens_k  (batch + 1,) integers. None: that side is dense, with a batch
    max_seqlen_q, max_seqlen_k  tokens of the longest sequences; None: found from the offsets. Not
                for a dense side
    layout      "thd" or "htd"
    return_lse  return (out, lse) with lse (heads, total_q)

    Dimensions (batch, ..., queries, keys) of bias and block_mask are those of the longest
    sequences; i and j count from a sequence's start. Rows of no sequence are 0 in a result that is
    made here, and are left alone in out. The rest is as in attention().
    """
    inputs = _inputs(options, q, k, v, layout=layout, cu_seqlens_q=cu_seqlens_q,
                     cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
                     max_seqlen_k=max_seqlen_k, q_lens=q_lens, kv_lens=kv_lens,
                     out=out)
    return _forward(inputs, out, out_dtype, return_lse, options)


@_spelled
def attention_paged(q: Any, k_pages: Any, v_pages: Any, page_table: Any, kv_lens: Any, *,
                    cu_seqlens_q: Any = None, max_seqlen_q: Optional[int] = None,
                    max_seqlen_k: Optional[int] = None, layout: Optional[str] = None,
                    page_layout: str = "pshd", q_lens: Any = None, out: Any = None,
                    out_dtype: Optional[DTypeLike] = None, return_lse: bool = False,
                    **options: Unpack[Options]) -> Any:
    """attention() on a paged KV cache (Kwon et al. 2023).

    q           (batch, queries, heads, dim), or with cu_seqlens_q (total_q, heads, dim)
    k_pages     (pages, page_size, kv_heads, dim), in the order that page_layout says ("pshd",
                "phsd"); v_pages likewise
    page_table  (batch, pages of a sequence) integers: token j of sequence b lies in page
                page_table[b, j // page_size]; entries past kv_lens are not read
    kv_lens     (batch,) integers: keys in use of each sequence
    max_seqlen_k  a bound of kv_lens, at most (pages of a sequence) * page_size tokens; None: that

    The rest is as in attention() and attention_varlen().
    """
    inputs = _inputs(options, q, k_pages, v_pages, layout=layout, cu_seqlens_q=cu_seqlens_q,
                     max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, q_lens=q_lens,
                     kv_lens=kv_lens, page_table=page_table, page_layout=page_layout, out=out)
    return _forward(inputs, out, out_dtype, return_lse, options)


@_spelled
def attention_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dlse: Any = None,
                       return_dbias: bool = False, return_dsink: bool = False,
                       cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
                       max_seqlen_q: Optional[int] = None, max_seqlen_k: Optional[int] = None,
                       layout: Optional[str] = None, q_lens: Any = None, kv_lens: Any = None,
                       dq: Any = None, dk: Any = None, dv: Any = None,
                       **options: Unpack[Options]) -> Tuple[Any, ...]:
    """Gradients of attention() or, with cu_seqlens, of attention_varlen() (Dao et al. 2022).

    dout        gradient that arrives at out: same shape and dtype as out
    q, k, v, and every option: as in the forward call
    out, lse    what the forward call returned
    dlse        gradient that arrives at lse, float32, shaped like it
    dq, dk, dv  written and returned; else made: shaped like q, k, v

    Returns (dq, dk, dv), then dbias (float32, shape of bias: summed where bias is broadcast) with
    return_dbias, then dsink (float32, (heads,)) with return_dsink. Errors as in attention().
    """
    inputs = _inputs(options, q, k, v, layout=layout, cu_seqlens_q=cu_seqlens_q,
                     cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
                     max_seqlen_k=max_seqlen_k, q_lens=q_lens, kv_lens=kv_lens,
                     out=first_given(dq, dk, dv))
    out = view(out, "out", inputs.place)
    plan = cached_plan(inputs.facts(), uniform(dict(
        options, out_dtype=_other_type(out.dtype, inputs), forward=False, backward=True,
        dlse=dlse is not None, return_dbias=return_dbias, return_dsink=return_dsink)))
    return plan.run_backward(inputs, dout, out, lse, dlse, dq, dk, dv)
