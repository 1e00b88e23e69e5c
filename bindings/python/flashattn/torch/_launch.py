"""From tensors to calls of the library: the kernels of the operators.

A call is prepared once for the shapes, strides and types of its tensors and its options: checked,
planned, and kept as flashattn_args, which repeating it fills with pointers.
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
from ._repeat import Calls

# The tensors that may come beside q, k and v, in the order of the operators.
BESIDE = ("bias", "sink", "alibi_slopes", "block_mask", "cu_seqlens_q", "cu_seqlens_kv", "lens_q",
          "lens_kv", "starts_kv", "page_table", "rng_device")
NOTHING: Sequence[Optional[Tensor]] = (None,) * len(BESIDE)  # of them is given
runs = {"forward": 0, "backward": 0}  # of report(); threads may lose one
_LIMIT = 2048  # prepared calls
_ARGS = ffi.typeof("flashattn_args *")
_WORDS = ffi.typeof("uint64_t *")
_EMPTY = (ffi.NULL, -1, -1, -1)
_POINTER = ffi.typeof("void *")
_forward, _backward = lib.flashattn_forward, lib.flashattn_backward
_FLOAT, _BYTE = torch.float32, torch.uint8
# These ask for the current GPU and its stream. The public functions of torch take microseconds to
# see to the initialisation of CUDA, which a tensor on a GPU has done.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current_stream: Any = _gpu.Torch(torch).stream


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
    ragged: bool  # some rows belong to no sequence, and are not written
    copied: Tuple[int, ...]  # the tensors whose heads are not contiguous
    results: Tuple[Any, ...]  # shape and strides of each; None: those of the tensor it is like
    lse: Any  # its shape, and one without memory that says its type and device
    scratch: Any  # likewise without memory
    spare: List[Any]  # flashattn_args of calls that are over


Orders = Optional[Tuple[Optional[Tuple[int, ...]], Optional[Tuple[int, ...]]]]
"""Permutations of q, and of k and v, to (batch, seq, heads, dim); None: they are that."""


def permuted(tensor: Tensor, order: Optional[Tuple[int, ...]]) -> Tensor:
    return tensor if order is None else tensor.permute(order)


def inverse(order: Tuple[int, ...]) -> Tuple[int, ...]:
    return tuple([order.index(i) for i in range(len(order))])


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


def _result(like: Tensor, shape: Sequence[int], order: Optional[Tuple[int, ...]],
            given: Optional[Tensor]) -> Any:
    """The entry in _Call.results of a tensor that is stored as given is; None: as (batch, seq,
    heads, dim)."""
    step, found = 1, [0] * len(shape)
    for axis in reversed(order or tuple(range(len(shape)))):
        found[axis] = step
        step *= max(shape[axis], 1)
    strides = tuple(found) if given is None else given.stride()
    model = like.new_empty_strided(like.shape, like.stride(), device="meta")
    same = tuple(shape) == tuple(like.shape) and torch.empty_like(model).stride() == strides
    return None if same else (tuple(shape), strides)


def _make(call: _Call, i: int, like: Tensor) -> Tensor:
    known = call.results[i]
    made = torch.empty_like(like) if known is None else like.new_empty_strided(*known)
    return made.zero_() if call.ragged else made


def _model(dtype: Any, device: Any) -> Tensor:
    """Its new_empty() takes less time than torch.empty with a type and a device. It has no memory,
    which would otherwise stay allocated in the pool of a graph that is captured meanwhile."""
    return torch.empty(0, dtype=dtype, device=device)


def _prepared(key: Any, plan: Any, op: int, args: Any, inputs: Inputs, copied: Tuple[int, ...],
              results: Tuple[Any, ...], device: Any) -> _Call:
    needed = ffi.new("int64_t *")
    status = lib.flashattn_workspace_size(plan._plan, op, args, needed)
    if status:
        fail(status)
    words = ffi.cast(_WORDS, args)
    for word in (_Q, _K, _V, _O, _DOUT, _LSE, _DLSE, *_BESIDE_WORDS):
        words[word] = 0
    call = _Call(plan, args, needed[0], inputs.ragged, copied, results,
                 (inputs.lse_shape(), _model(_FLOAT, device)), _model(_BYTE, device), [])
    if len(_plan.prepared) >= _LIMIT:
        _plan.prepared.clear()
    _plan.prepared[key] = call
    return call


def _run(function: Any, call: _Call, args: Any, q: Tensor) -> None:
    size = call.bytes
    if q.is_cpu:
        status = function(call.plan._plan, args, _plan._workspace(size), size, ffi.NULL)
    else:
        status = _enqueue(function, call, args, q.get_device())
    if status:
        fail(status)


def _enqueue(function: Any, call: _Call, args: Any, index: int) -> int:
    """On the current stream of a GPU."""
    if _current_device() != index:
        with torch.cuda.device(index):
            return _enqueue(function, call, args, index)
    scratch = ffi.NULL
    if call.bytes:  # the allocator reuses its memory in the order of the stream
        memory = call.scratch.new_empty(call.bytes)
        scratch = ffi.cast(_POINTER, memory.data_ptr())
    return int(function(call.plan._plan, args, scratch, call.bytes,
                        ffi.cast(_POINTER, _current_stream(index))))


def _arguments(call: _Call, beside: Sequence[Optional[Tensor]]) -> Tuple[Any, Any]:
    """flashattn_args that no other thread has, and its words. Those of an earlier call differ in no
    more than the pointers, all of which are written."""
    try:
        filled = call.spare.pop()
    except IndexError:
        args = ffi.new(_ARGS, call.args[0])
        filled = args, ffi.cast(_WORDS, args)
    if beside is not NOTHING:
        words = filled[1]
        for word, tensor in zip(_BESIDE_WORDS, beside):
            if tensor is not None:
                words[word] = tensor.data_ptr()
    return filled


def dense_heads(tensor: Tensor) -> Tensor:
    """The elements of a head must be contiguous; of most tensors they are."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


def _copied(tensors: Sequence[Tensor]) -> Tuple[int, ...]:
    return tuple([i for i, tensor in enumerate(tensors) if dense_heads(tensor) is not tensor])


def _dense(copied: Tuple[int, ...], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return tensors if not copied else [
        t.contiguous() if i in copied else t for i, t in enumerate(tensors)]


def forward(q: Tensor, k: Tensor, v: Tensor, beside: Sequence[Optional[Tensor]], max_q: int,
            max_kv: int, options: Options, return_lse: bool, orders: Orders = None,
            o: Optional[Tensor] = None) -> Tuple[Tensor, Optional[Tensor]]:
    """o, lse of (batch, seq, heads, dim) or (total, heads, dim) tensors, or of such that orders
    make so; lse is None without return_lse. o is written and returned; None: one is made, stored as
    (batch, seq, heads, dim)."""
    return run_forward(prepare_forward(q, k, v, beside, max_q, max_kv, options, return_lse, orders,
                                       o), q, k, v, beside, return_lse, o)


def prepare_forward(q: Tensor, k: Tensor, v: Tensor, beside: Sequence[Optional[Tensor]], max_q: int,
                    max_kv: int, options: Options, return_lse: bool, orders: Orders = None,
                    o: Optional[Tensor] = None) -> _Call:
    """What forward() runs, for tensors like these."""
    key = (q.shape, q.stride(), q.dtype, q.get_device(), k.shape, k.stride(), k.dtype,
           k.get_device(), v.shape, v.stride(), v.dtype, v.get_device(),
           None if beside is NOTHING else _geometry(beside), max_q, max_kv, options, return_lse,
           orders, None if o is None else (o.shape, o.stride(), o.dtype, o.get_device()),
           torch.get_num_threads())
    return _plan.prepared.get(key) or _prepare_forward(
        key, (q, k, v), beside, max_q, max_kv, options, return_lse, orders, o)


def run_forward(call: _Call, q: Tensor, k: Tensor, v: Tensor, beside: Sequence[Optional[Tensor]],
                return_lse: bool, o: Optional[Tensor] = None) -> Tuple[Tensor, Optional[Tensor]]:
    """forward() for a call that fits. o: None: one is made, stored as it was when the call was
    prepared."""
    if call.copied:
        q, k, v = _dense(call.copied, (q, k, v))
    filled = args, words = _arguments(call, beside)
    words[_Q], words[_K], words[_V] = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if o is None:
        o = _make(call, 0, q)
    words[_O] = o.data_ptr()
    lse = None
    if return_lse:
        shape, model = call.lse
        lse = model.new_empty(shape)
        if call.ragged:
            lse.zero_()
        words[_LSE] = lse.data_ptr()
    _run(_forward, call, args, q)
    call.spare.append(filled)
    runs["forward"] += 1
    return o, lse


def _prepare_forward(key: Any, tensors: Sequence[Tensor], beside: Sequence[Optional[Tensor]],
                     max_q: int, max_kv: int, options: Options, return_lse: bool, orders: Orders,
                     o: Optional[Tensor]) -> _Call:
    with torch.no_grad():
        copied = _copied(tensors)
        q, _, v = tensors = _dense(copied, tensors)
        order, order_kv = orders or (None, None)
        inputs = _inputs([permuted(x, by) for x, by in zip(tensors, (order, order_kv, order_kv))],
                         beside, max_q, max_kv, options)
        plan = _plan.cached_plan(inputs.facts(), _described(
            options, inputs, torch.get_num_threads(), return_lse=return_lse))
        args = _plan.new_args(inputs.sizes)
        inputs.fill(args)
        result = _result(q, (*q.shape[:-1], v.shape[-1]), order, o)
        args.o = _EMPTY if o is None else _given(
            o, "o", order, inputs.q, inputs.v.dim, plan.descriptor.dtype_o, inputs)
        return _prepared(key, plan, int(Op.FORWARD), args, inputs, copied, (result,),
                         q.device)


def _given(tensor: Tensor, name: str, order: Optional[Tuple[int, ...]], model: Any, dim: int,
           code: int, inputs: Inputs) -> Any:
    """flashattn_tensor of one that is to be read or written, shaped like the input model."""
    seen = view(permuted(tensor, order), name, inputs.place)
    return _plan._like_output(seen, name, model, dim, code, inputs).c()


def backward(dout: Tensor, dlse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, o: Tensor,
             lse: Tensor, beside: Sequence[Optional[Tensor]], max_q: int, max_kv: int,
             options: Options, return_dbias: bool, return_dsink: bool, orders: Orders = None,
             grads: Optional[Sequence[Tensor]] = None,
             calls: Optional[Calls] = None) -> Tuple[Optional[Tensor], ...]:
    """dq, dk, dv, dbias, dsink; the last two float32, and None where they are not asked for. grads:
    dq, dk and dv, which are written; None: they are made, stored as (batch, seq, heads, dim).
    calls keep the call, for run_backward(), if its tensors are all that it has."""
    if dlse is not None:
        dlse = dlse.contiguous()
    key = (dout.shape, dout.stride(), dout.dtype, dout.get_device(), q.shape, q.stride(), q.dtype,
           q.get_device(), k.shape, k.stride(), k.dtype, k.get_device(), v.shape, v.stride(),
           v.dtype, v.get_device(), o.shape, o.stride(), o.dtype, o.get_device(), lse.shape,
           lse.dtype, lse.get_device(), None if dlse is None else _geometry((dlse,)),
           None if beside is NOTHING else _geometry(beside), max_q, max_kv, options, return_dbias,
           return_dsink, orders, None if grads is None else _geometry(grads),
           torch.get_num_threads())
    call = _plan.prepared.get(key) or _prepare_backward(
        key, (dout, q, k, v, o), dlse, lse.contiguous(), beside, max_q, max_kv, options,
        return_dbias, return_dsink, orders, grads)
    if calls is not None and dlse is None and beside is NOTHING:
        calls.keep(call, dout, q, k, v, o, lse)
    return run_backward(call, dout, dlse, q, k, v, o, lse, beside, return_dbias, return_dsink,
                        grads)


def run_backward(call: _Call, dout: Tensor, dlse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor,
                 o: Tensor, lse: Tensor, beside: Sequence[Optional[Tensor]] = NOTHING,
                 return_dbias: bool = False, return_dsink: bool = False,
                 grads: Optional[Sequence[Tensor]] = None) -> Tuple[Optional[Tensor], ...]:
    """backward() for a call that fits. grads: None: they are made, stored as they were when the
    call was prepared."""
    if call.copied:
        dout, q, k, v, o = _dense(call.copied, (dout, q, k, v, o))
    if not lse.is_contiguous():
        lse = lse.contiguous()
    filled = args, words = _arguments(call, beside)
    words[_Q], words[_K], words[_V] = q.data_ptr(), k.data_ptr(), v.data_ptr()
    words[_DOUT], words[_O], words[_LSE] = dout.data_ptr(), o.data_ptr(), lse.data_ptr()
    if dlse is not None:
        words[_DLSE] = dlse.data_ptr()
    dq, dk, dv = grads or (_make(call, 0, q), _make(call, 1, k), _make(call, 2, v))
    words[_DQ], words[_DK], words[_DV] = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
    dbias = dsink = None
    if return_dbias:
        dbias = torch.zeros_like(beside[0], dtype=torch.float32,  # type: ignore[arg-type]
                                 memory_format=torch.contiguous_format)
        words[_DBIAS] = dbias.data_ptr()
    if return_dsink:
        dsink = torch.zeros_like(beside[1], dtype=torch.float32)  # type: ignore[arg-type]
        words[_DSINK] = dsink.data_ptr()
    _run(_backward, call, args, q)
    call.spare.append(filled)
    runs["backward"] += 1
    return dq, dk, dv, dbias, dsink


def _prepare_backward(key: Any, tensors: Sequence[Tensor], dlse: Optional[Tensor], lse: Tensor,
                      beside: Sequence[Optional[Tensor]], max_q: int, max_kv: int,
                      options: Options, return_dbias: bool, return_dsink: bool,
                      orders: Orders, grads: Optional[Sequence[Tensor]]) -> _Call:
    with torch.no_grad():
        copied = _copied(tensors)
        tensors = _dense(copied, tensors)
        order, order_kv = orders or (None, None)
        every = (order, order, order_kv, order_kv, order)
        dout, q, k, v, o = [permuted(x, by) for x, by in zip(tensors, every)]
        inputs = _inputs((q, k, v), beside, max_q, max_kv, options)
        described = _described(options, inputs, torch.get_num_threads(), forward=False,
                               backward=True, dlse=dlse is not None, return_dbias=return_dbias,
                               return_dsink=return_dsink)
        plan = _plan.cached_plan(inputs.facts(), described)
        args = _plan.new_args(inputs.sizes)
        inputs.fill(args)
        code = plan.descriptor.dtype_o
        for name, tensor in (("o", o), ("dout", dout)):
            setattr(args, name, _given(tensor, name, None, inputs.q, inputs.v.dim, code, inputs))
        for name, small in (("lse", lse), ("dlse", dlse)):
            if small is not None:
                packed(small, name, FLOAT32, inputs.lse_shape(), inputs.place)
        args.dq = args.dk = args.dv = _EMPTY
        for name, tensor, like, by in zip(("dq", "dk", "dv"), grads or (),
                                          (inputs.q, inputs.k, inputs.v), every[1:4]):
            setattr(args, name, _given(tensor, name, by, like, like.dim, like.view.dtype, inputs))
        if plan.descriptor.features & Feature.DBIAS:
            args.dbias = (ffi.NULL, *_plan.dbias_strides(inputs.seen["bias"].shape))
        results = tuple([_result(x, x.shape, by, given) for x, by, given in zip(
            tensors[1:4], every[1:4], grads or (None,) * 3)])
        return _prepared(key, plan, int(Op.BACKWARD), args, inputs, copied, results,
                         q.device)
