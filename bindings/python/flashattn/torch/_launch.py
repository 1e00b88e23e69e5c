"""From tensors to calls of the library: the kernels of the operators.

A call is prepared once for the shapes, strides and types of its tensors and its options: checked,
planned, and kept as flashattn_args without pointers. Repeating it costs a look-up and the pointers.
Gradients, modes and transforms of PyTorch are others' work: _ops.py, _autograd.py.
"""
from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .. import _gpu, _plan
from .._arrays import FLOAT32, packed, view
from .._constants import Feature, Op, Reason
from .._errors import fail, invalid
from .._inputs import Inputs
from .._library import ffi, lib
from .._options import uniform

# The tensors that may come beside q, k and v, in the order of the operators.
BESIDE = ("bias", "sink", "alibi_slopes", "block_mask", "cu_seqlens_q", "cu_seqlens_kv", "lens_q",
          "lens_kv", "starts_kv", "page_table", "rng_device")
_LIMIT = 2048  # prepared calls
_ARGS = ffi.typeof("flashattn_args *")
_WORDS = ffi.typeof("uint64_t *")
_EMPTY = (ffi.NULL, -1, -1, -1)


class Options(NamedTuple):
    """The numbers of a call, in the order of the operators; named as in flashattn_desc."""

    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    chunk: int = 0
    top_left: bool = False
    softcap: float = 0.0
    scale: Optional[float] = None
    dropout: float = 0.0
    block_q: int = 0
    block_kv: int = 0
    splits: int = 0
    determinism: int = 0


def _word(member: str) -> int:
    """Where a pointer stands in flashattn_args, in words of 8 bytes."""
    return ffi.offsetof("flashattn_args", member) // 8


_BESIDE_WORDS = tuple(_word(name) for name in BESIDE)
_Q, _K, _V, _O, _LSE, _DOUT, _DLSE, _DQ, _DK, _DV, _DBIAS, _DSINK = (
    _word(name) for name in ("q", "k", "v", "o", "lse", "dout", "dlse", "dq", "dk", "dv", "dbias",
                             "dsink"))


class _Call(NamedTuple):
    plan: Any  # keeps the library's plan alive
    args: Any  # flashattn_args without pointers
    bytes: int  # of workspace
    lse_shape: Tuple[int, ...]
    ragged: bool  # some rows belong to no sequence, and are not written


def _geometry(tensors: Sequence[Optional[Tensor]]) -> Tuple[Any, ...]:
    return tuple([None if t is None else (t.shape, t.stride(), t.dtype, t.get_device())
                  for t in tensors])


def _described(options: Options, inputs: Inputs, threads: int, **more: Any) -> Any:
    """The key of the plan, as attention() makes it."""
    given = options._asdict()
    left, right = given.pop("window_left"), given.pop("window_right")
    del given["block_q"], given["block_kv"]  # follow from the arrays
    given.update(more, window=(left, right), chunk=given["chunk"] or None)
    given.update({"device": inputs.place.device} if inputs.place else {"threads": threads})
    return uniform(given)


def _inputs(tensors: Sequence[Tensor], beside: Sequence[Optional[Tensor]], max_q: int, max_kv: int,
            options: Options) -> Inputs:
    """Everything checked, as for attention()."""
    q, k, v = tensors
    given: Any = {name: tensor for name, tensor in zip(BESIDE, beside) if tensor is not None}
    if options.block_q or options.block_kv:
        given.update(block_q=options.block_q, block_kv=options.block_kv)
    inputs = Inputs(q, k, v, max_seqlen_q=None if max_q < 0 else max_q,
                    max_seqlen_kv=None if max_kv < 0 else max_kv, **given)
    inputs.check_seed(options.dropout)
    for name, tensor in zip(BESIDE, beside):
        if tensor is not None and int(ffi.cast("uintptr_t", inputs.seen[name].pointer)) != \
                tensor.data_ptr():
            raise invalid(f"{name} is a {tensor.dtype} tensor of shape {tuple(tensor.shape)} and "
                          f"strides {tensor.stride()}, which would have to be copied; give int32 "
                          "or float32, with a contiguous last dimension of full size",
                          Reason.STRIDE, name)
    return inputs


def _prepared(key: Any, plan: Any, op: int, args: Any, inputs: Inputs) -> _Call:
    needed = ffi.new("int64_t *")
    status = lib.flashattn_workspace_size(plan._plan, op, args, needed)
    if status:
        fail(status)
    words = ffi.cast(_WORDS, args)
    for word in (_Q, _K, _V, _O, _DOUT, _LSE, _DLSE, *_BESIDE_WORDS):
        words[word] = 0
    call = _Call(plan, args, needed[0], inputs.lse_shape(), inputs.ragged)
    if len(_plan.prepared) >= _LIMIT:
        _plan.prepared.clear()
    _plan.prepared[key] = call
    return call


def _run(function: Any, call: _Call, args: Any, q: Tensor) -> None:
    index = q.get_device()
    if index < 0:
        status = function(call.plan._plan, args, _plan._workspace(call.bytes), call.bytes, ffi.NULL)
    else:
        library = _gpu.library_of(q)
        place = _gpu.Place(index, library.stream(index), library, True, [])
        with library.scope(place):
            # The allocator reuses its memory in the order of the stream.
            scratch = torch.empty(call.bytes, dtype=torch.uint8, device=q.device)
            status = function(call.plan._plan, args, ffi.cast("void *", scratch.data_ptr()),
                              call.bytes, _gpu.native_stream(place))
    if status:
        fail(status)


def _arguments(call: _Call, q: Tensor, k: Tensor, v: Tensor,
               beside: Sequence[Optional[Tensor]]) -> Tuple[Any, Any]:
    args = ffi.new(_ARGS, call.args[0])
    words = ffi.cast(_WORDS, args)
    words[_Q], words[_K], words[_V] = q.data_ptr(), k.data_ptr(), v.data_ptr()
    for word, tensor in zip(_BESIDE_WORDS, beside):
        if tensor is not None:
            words[word] = tensor.data_ptr()
    return args, words


def dense_heads(tensor: Tensor) -> Tensor:
    """The elements of a head must be contiguous; of most tensors they are."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


def forward(q: Tensor, k: Tensor, v: Tensor, beside: Sequence[Optional[Tensor]], max_q: int,
            max_kv: int, options: Options, return_lse: bool) -> Tuple[Tensor, Tensor]:
    """o, lse of (batch, seq, heads, dim) or (total, heads, dim) tensors. lse is empty without
    return_lse."""
    q, k, v = dense_heads(q), dense_heads(k), dense_heads(v)
    threads = torch.get_num_threads()
    key = (_geometry((q, k, v)), _geometry(beside), max_q, max_kv, options, return_lse, threads)
    call = _plan.prepared.get(key)
    if call is None:
        with torch.no_grad():
            inputs = _inputs((q, k, v), beside, max_q, max_kv, options)
            plan = _plan.cached_plan(inputs.facts(), _described(options, inputs, threads,
                                                                return_lse=return_lse))
            args = _plan.new_args(inputs.sizes)
            inputs.fill(args)
            args.o = _EMPTY
            call = _prepared(key, plan, int(Op.FORWARD), args, inputs)
    args, words = _arguments(call, q, k, v, beside)
    make = torch.zeros if call.ragged else torch.empty
    o = make((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    lse = make(call.lse_shape if return_lse else 0, dtype=torch.float32, device=q.device)
    words[_O] = o.data_ptr()
    if return_lse:
        words[_LSE] = lse.data_ptr()
    _run(lib.flashattn_forward, call, args, q)
    return o, lse


def backward(dout: Tensor, dlse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, o: Tensor,
             lse: Tensor, beside: Sequence[Optional[Tensor]], max_q: int, max_kv: int,
             options: Options, return_dbias: bool, return_dsink: bool) -> Tuple[Tensor, ...]:
    """dq, dk, dv, dbias, dsink; the last two float32, and empty where they are not asked for."""
    dout, q, k, v, o = (dense_heads(x) for x in (dout, q, k, v, o))
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    threads = torch.get_num_threads()
    key = (_geometry((dout, dlse, q, k, v, o, lse)), _geometry(beside), max_q, max_kv, options,
           return_dbias, return_dsink, threads)
    call = _plan.prepared.get(key)
    if call is None:
        with torch.no_grad():
            inputs = _inputs((q, k, v), beside, max_q, max_kv, options)
            call = _prepare_backward(key, inputs, _described(
                options, inputs, threads, forward=False, backward=True, dlse=dlse is not None,
                return_dbias=return_dbias, return_dsink=return_dsink), dout, dlse, o, lse)
    args, words = _arguments(call, q, k, v, beside)
    words[_DOUT], words[_O], words[_LSE] = dout.data_ptr(), o.data_ptr(), lse.data_ptr()
    if dlse is not None:
        words[_DLSE] = dlse.data_ptr()
    make = torch.zeros if call.ragged else torch.empty
    results: List[Tensor] = []
    for word, like in ((_DQ, q), (_DK, k), (_DV, v)):
        results.append(make(like.shape, dtype=like.dtype, device=like.device))
        words[word] = results[-1].data_ptr()
    for word, asked, like in ((_DBIAS, return_dbias, beside[0]), (_DSINK, return_dsink, beside[1])):
        shape = like.shape if asked and like is not None else (0,)
        results.append(torch.zeros(shape, dtype=torch.float32, device=q.device))
        if asked:
            words[word] = results[-1].data_ptr()
    _run(lib.flashattn_backward, call, args, q)
    return tuple(results)


def _prepare_backward(key: Any, inputs: Inputs, described: Any, dout: Tensor,
                      dlse: Optional[Tensor], o: Tensor, lse: Tensor) -> _Call:
    plan, place = _plan.cached_plan(inputs.facts(), described), inputs.place
    args = _plan.new_args(inputs.sizes)
    inputs.fill(args)
    code = plan.descriptor.dtype_o
    for name, tensor in (("o", o), ("dout", dout)):
        setattr(args, name, _plan._like_output(view(tensor, name, place), name, inputs.q,
                                               inputs.v.dim, code, inputs).c())
    for name, small in (("lse", lse), ("dlse", dlse)):
        if small is not None:
            packed(small, name, FLOAT32, inputs.lse_shape(), place)
    args.dq = args.dk = args.dv = _EMPTY
    if plan.descriptor.features & Feature.DBIAS:
        args.dbias = (ffi.NULL, *_plan.dbias_strides(inputs.seen["bias"].shape))
    return _prepared(key, plan, int(Op.BACKWARD), args, inputs)
