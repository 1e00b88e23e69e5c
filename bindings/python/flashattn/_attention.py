"""attention and its relatives: the functions most programs need."""
from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Tuple, TypeVar

from ._arrays import DTypeLike, dtype_code, view
from ._constants import ArrayOptions, OutputOptions
from ._inputs import BESIDE, Inputs, first_given
from ._members import NUMBERS
from ._names import unexpected
from ._options import Determinisms, Window, uniform
from ._plan import OUTPUTS, cached_plan, outputs
from ._repeat import find, keep, key_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class Options(ArrayOptions, total=False):
        """What every function below takes; explained at attention()."""

        causal: bool
        window: Window
        chunk: Optional[int]
        top_left: bool
        hidden_pages: bool
        softcap: Optional[float]
        scale: Optional[float]
        dropout: float
        rng_seed: Optional[int]
        rng_offset: int
        block_q: int
        block_kv: int
        tree: int
        descale_block: int
        descale_dim: int
        splits: int
        determinism: Determinisms
        threads: int
        multiprocessors: int
        device: Optional[str]
        stream: Any
        parallel: Any

    class ForwardOptions(Options, OutputOptions, total=False):
        """The same of a forward call."""

# Options of the descriptor, and options that go with the arrays.
_DESCRIBED: Dict[str, Any] = dict(
    causal=False, window=None, chunk=None, top_left=False, hidden_pages=False, softcap=0.0,
    scale=None, dropout=0.0, splits=0, determinism=False, threads=0, multiprocessors=0)
_WITH_ARRAYS: Dict[str, Any] = dict(
    {name: None for name in BESIDE if not name.startswith("cu_seqlens") and name != "page_table"},
    rng_seed=None, rng_offset=0, **dict.fromkeys(NUMBERS, 0), device=None, stream=None,
    parallel=None)
_F = TypeVar("_F", bound=Callable[..., Any])


def _spelled(function: _F) -> _F:
    """Lets help() and editors show the options one by one in place of **options."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
                   for name, default in {**_DESCRIBED, **_WITH_ARRAYS,
                                         **dict.fromkeys(OUTPUTS)}.items()
                   if name not in signature.parameters and
                   (name not in OUTPUTS or "dtype_o" in signature.parameters)]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def _inputs(options: Any, q: Any, k: Any, v: Any, **arrays: Any) -> Inputs:
    """Takes what goes with the arrays out of options."""
    for name in list(options):
        if name in _WITH_ARRAYS:
            arrays[name] = options.pop(name)
        elif name not in _DESCRIBED:
            raise unexpected("option", name, [*_DESCRIBED, *_WITH_ARRAYS],
                             beside=("o", "dtype_o", "cu_seqlens_kv", "max_seqlen_kv"))
    inputs = Inputs(q, k, v, **arrays)
    if inputs.place is not None:
        options["device"] = inputs.place.device
    return inputs


def _forward(options: Any, q: Any, k: Any, v: Any, dtype_o: Any, return_lse: bool,
             key: Any = None, o: Any = None, **arrays: Any) -> Any:
    """key: by which a call like this one is found again."""
    given = outputs(options)
    inputs = _inputs(options, q, k, v, o=o, **arrays)
    seen = None if o is None else view(o, "o", inputs.place)
    if dtype_o is not None:
        options["dtype_o"] = _other_type(dtype_code(dtype_o, "dtype_o"), inputs)
    elif seen is not None:
        options["dtype_o"] = _other_type(seen.dtype, inputs)
    options["return_lse"] = return_lse
    plan = cached_plan(inputs.facts(), uniform(options))
    result = plan.run_forward(inputs, o, seen, given)
    if key is not None:
        keep(key, plan, inputs)
    return result


def _other_type(code: int, inputs: Inputs) -> Optional[int]:
    """Of the output, where it is not that of q."""
    return None if code == inputs.q.view.dtype else code


@_spelled
def attention(q: Any, k: Any, v: Any, *, layout: str = "bshd", o: Any = None,
              dtype_o: Optional[DTypeLike] = None, return_lse: bool = False,
              **options: Unpack[ForwardOptions]) -> Any:
    """softmax(scale * q k^T + bias) v, exactly, without storing the scores (Dao et al. 2022).

    Arrays are NumPy arrays (bfloat16 through ml_dtypes), or objects with __dlpack__ or
    __array_interface__ in host memory, or all on one GPU: PyTorch's, CuPy's, or objects with
    __dlpack__ or __cuda_array_interface__. They are not copied. float32, float16 or bfloat16; on a
    CPU also float8_e4m3fn (ml_dtypes, PyTorch), for q, k and v or for k and v alone, and int8 for
    k and v.
    Names are those of the C header, flashattn.h.

    q           (batch, seqlen_q, heads_q, dim_qk), in the order that layout says
    k, v        (batch, seqlen_kv, heads_kv, dim_qk), (batch, seqlen_kv, heads_kv, dim_v). heads_kv
                divides heads_q (grouped-query attention). Any strides, 0 repeats, but the last
                dimension is contiguous: slices of a packed QKV array and transposed views do
    layout      order of the dimensions of q, k, v and o: "bshd", "bhsd" (PyTorch's), "sbhd", ...
    lens_q, lens_kv  (batch,) integers: how many leading tokens of each sequence are in use
    starts_kv   (batch,) integers, left padding: keys before it do not exist. Key positions, of
                masks, ALiBi, bias and dropout, count from there
    o           written and returned: (batch, seqlen_q, heads_q, dim_v). Else one is made: a tensor
                where q is PyTorch's, CuPy's array where q is CuPy's; where q is another's, NumPy's
                in host memory, while on a GPU o must be given
    dtype_o     of the result: that of q or "float32"; any beside float8_e4m3fn
    return_lse  return (o, lse): float32 natural logarithms (batch, heads_q, seqlen_q) of the sums

    Which keys a query sees; all that are given must agree. Query i stands at key position
    i + (keys - queries) of its sequence, with top_left at i.
    causal      keys up to the query's own position
    window      (left, right) keys to each side of it, None or -1: open; n: (n, n)
    chunk       keys of the same chunk of so many tokens
    block_mask  bool or uint8, broadcast to (batch, heads_q, query blocks, key blocks); block_q and
                block_kv say how many tokens a block has
    block_index  in its place, int32 (batch, heads_q, query blocks, entries): the numbers of the key
                blocks that each query block sees, in any order; -1 is none. block_begin and
                block_end, int32 (batch, heads_q, query blocks), say which entries of a row count:
                FlexAttention's kv_indices with block_end=kv_num_blocks, block-sparse rows with
                indices[None], indptr[:-1], indptr[1:]. All are broadcast
    block_lens  int32, broadcast to (batch, heads_q, key blocks): keys of a block that count, from
                its first on
    tree_bits, tree  see flashattn_mask
    hidden_pages  negative page numbers hide keys: see attention_paged()
    bias        added to the scores, float; or bool, True = visible. Broadcast to (batch, heads_q,
                seqlen_q, seqlen_kv); keys must be contiguous
    alibi_slopes  (heads_q,) or (batch, heads_q): the score loses slope * |distance| (Press et al.
                2022)

    softcap     scores become softcap * tanh(score / softcap); 0 or None: off
    scale       factor of the scores; None: 1 / sqrt(dim_qk)
    sink        (heads_q,) logits that take part in the softmax and have no value
    descale_q, descale_k, descale_v  factors of 8-bit arrays, float32, broadcast to (batch,
                heads_kv, blocks) of descale_block tokens (0: all); quantize() makes them
    descale_latent, descale_dim  of the quantised cache of latent attention, see LATENT_KV of the
                header: float32 factors of v, an 8-bit array, shaped like it, one for each
                descale_dim elements; k holds only what keys have behind their values, in the type
                of q
    scale_o     factor of an 8-bit o, which saturates, broadcast to (batch, heads_q)
    amax_o      float32, written: the largest |o| before scale_o of (batch, heads_q), or over an
                index of size 1
    dropout     probability, [0, 1), with which a weight is dropped, in steps of 1/65536
    rng_seed, rng_offset  integers in [0, 2**64) that choose what is dropped, see dropout_mask().
                dropout needs a seed: equal numbers drop the same weights, so give each layer and
                step a seed or offset of its own, and the backward call those of its forward call
    rng_device  (2,) 64-bit integers in the device's memory that are added to the two
    splits      parts into which the keys of a short query are split; 0: the library chooses
    determinism  True: the same call gives the same bits; "batch_invariant": also whatever else is
                in the batch. On the CPU this always holds
    threads     of a CPU, at the most; 0: all, 1: only this one. multiprocessors: of a GPU
    device      None: where the arrays lie; "cpu", "cuda" or "cuda:1": they must lie there
    parallel    runs a CPU call's tasks in place of the library's own threads, with the same bits: a
                concurrent.futures.Executor of threads, which the calling thread helps; or a thread
                pool of C's, the address of a flashattn_parallel_fn or (address, user), numbers or
                cffi's pointers, see flashattn.h. What the executor raises is raised when the
                library has returned, and so is an interrupt. Calls of little work ask neither
    stream      on a GPU: the stream, a cudaStream_t as a number or PyTorch's or CuPy's object, on
                which all arrays are ready. None: the current one of the library that q comes from,
                else of o's, else the default stream; arrays of other libraries are waited for

    On a GPU the call enqueues its work and returns; what it reads is kept until that is done. It
    reads nothing there itself: integers must be int32 (slopes and sinks float32) and lie there too,
    and varlen calls need max_seqlen_q and max_seqlen_kv. A graph that captures a call reads the
    arrays whenever it is replayed, and keeping them is up to its owner. No gradient is recorded:
    tensors that require one are refused; the functions of flashattn.torch record it.

    Raises ValueError for shapes, strides and values, TypeError for types of arrays,
    NotImplementedError for what no kernel does, MemoryError: each a FlashAttentionError with the
    message, status, reason and field. A query that sees no key gives 0, and lse = -inf.
    """
    key = None if o is not None else key_of(q, k, v, (layout, dtype_o, return_lse), options,
                                            _DESCRIBED)
    call = find(key)
    if call is not None:
        return call.run(q, k, v)
    return _forward(options, q, k, v, dtype_o, return_lse, key, o, layout=layout)


@_spelled
def attention_varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None,
                     max_seqlen_q: Optional[int] = None, max_seqlen_kv: Optional[int] = None, *,
                     layout: Optional[str] = None, o: Any = None,
                     dtype_o: Optional[DTypeLike] = None, return_lse: bool = False,
                     **options: Unpack[ForwardOptions]) -> Any:
    """attention() for sequences of different lengths, packed without padding.

    q           (total_q, heads_q, dim_qk): sequence b holds rows cu_seqlens_q[b] to
                cu_seqlens_q[b + 1]
    k, v        (total_kv, heads_kv, dim_qk), likewise with cu_seqlens_kv
    cu_seqlens_q, cu_seqlens_kv  (batch + 1,) integers. None: that side is dense, with a batch
    max_seqlen_q, max_seqlen_kv  tokens of the longest sequences, seqlen_q and seqlen_kv of the
                header; None: found from the offsets. Not for a dense side
    layout      "thd" or "htd"
    return_lse  return (o, lse) with lse (heads_q, total_q)

    Dimensions (batch, ..., seqlen_q, seqlen_kv) of bias and block_mask are those of the longest
    sequences; i and j count from a sequence's start. Rows of no sequence are 0 in a result that is
    made here, and are left alone in o. The rest is as in attention().
    """
    return _forward(options, q, k, v, dtype_o, return_lse, o=o, layout=layout,
                    cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
                    max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv)


@_spelled
def attention_paged(  # type: ignore[misc]  # lens_kv, elsewhere an option, stands first here
        q: Any, k: Any, v: Any, page_table: Any, lens_kv: Any, *, cu_seqlens_q: Any = None,
        max_seqlen_q: Optional[int] = None, max_seqlen_kv: Optional[int] = None,
        layout: Optional[str] = None, page_layout: str = "pshd", o: Any = None,
        dtype_o: Optional[DTypeLike] = None, return_lse: bool = False,
        **options: Unpack[ForwardOptions]) -> Any:
    """attention() on a paged KV cache (Kwon et al. 2023).

    q           (batch, seqlen_q, heads_q, dim_qk), or with cu_seqlens_q (total_q, heads_q, dim_qk)
    k, v        (pages, page_size, heads_kv, dim), in the order that page_layout says ("pshd",
                "phsd")
    page_table  (batch, pages of a sequence) integers: token j of sequence b lies in page
                page_table[b, j // page_size]; entries past lens_kv are not read. With
                hidden_pages=True a negative number hides the keys of its page. Sparse attention by
                token indices: pages of 1 token, each query a sequence of its own, -1 for none
    lens_kv     (batch,) integers: keys in use of each sequence
    max_seqlen_kv  a bound of lens_kv, at most (pages of a sequence) * page_size tokens; None: that

    The rest is as in attention() and attention_varlen().
    """
    return _forward(options, q, k, v, dtype_o, return_lse, o=o, layout=layout,
                    cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
                    max_seqlen_kv=max_seqlen_kv, lens_kv=lens_kv, page_table=page_table,
                    page_layout=page_layout)


@_spelled
def attention_backward(dout: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, dlse: Any = None,
                       return_dbias: bool = False, return_dsink: bool = False,
                       cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None,
                       max_seqlen_q: Optional[int] = None, max_seqlen_kv: Optional[int] = None,
                       layout: Optional[str] = None, dq: Any = None, dk: Any = None,
                       dv: Any = None, dtype_grad: Optional[DTypeLike] = None,
                       **options: Unpack[Options]) -> Tuple[Any, ...]:
    """Gradients of attention() or, with cu_seqlens, of attention_varlen() (Dao et al. 2022).

    dout        gradient that arrives at o: same shape and dtype as o
    q, k, v, and every option: as in the forward call
    o, lse      what the forward call returned
    dlse        gradient that arrives at lse, float32, shaped like it
    dq, dk, dv  written and returned; else made: shaped like q, k, v
    dtype_grad  of dq, dk, dv beside 8-bit arrays; None: that of q, or of o where q has 8 bits

    Returns (dq, dk, dv), then dbias (float32, shape of bias: summed where bias is broadcast) with
    return_dbias, then dsink (float32, (heads_q,)) with return_dsink. Errors as in attention().
    """
    inputs = _inputs(options, q, k, v, layout=layout, cu_seqlens_q=cu_seqlens_q,
                     cu_seqlens_kv=cu_seqlens_kv, max_seqlen_q=max_seqlen_q,
                     max_seqlen_kv=max_seqlen_kv, o=first_given(dq, dk, dv))
    o = view(o, "o", inputs.place)
    plan = cached_plan(inputs.facts(), uniform(dict(
        options, dtype_o=_other_type(o.dtype, inputs), dtype_grad=dtype_grad, forward=False,
        backward=True,
        dlse=dlse is not None, return_dbias=return_dbias, return_dsink=return_dsink)))
    return plan.run_backward(inputs, dout, o, lse, dlse, dq, dk, dv)
