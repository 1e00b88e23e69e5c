"""From tensors to calls of the library: the kernels of the operators.

A call is prepared once for the shapes, strides and types of its tensors and its options: checked,
planned, and kept as flashattn_args, which repeating it fills with pointers.
Gradients, modes and transforms of PyTorch are others' work: _ops.py, _autograd.py.
"""
from __future__ import annotations

from functools import partial
from itertools import compress
from operator import is_not
from typing import Any, Callable, NamedTuple, Optional, Sequence, Tuple

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
BESIDE = ("bias", "sink", "alibi_slopes", "block_mask", "block_index", "block_begin", "block_end",
          "block_lens", "cu_seqlens_q", "cu_seqlens_kv", "lens_q", "lens_kv", "starts_kv",
          "page_table", "rng_device")
_CU_Q, _CU_KV = BESIDE.index("cu_seqlens_q"), BESIDE.index("cu_seqlens_kv")
NOTHING: Sequence[Optional[Tensor]] = (None,) * len(BESIDE)  # of them is given
runs = {"forward": 0, "backward": 0}  # of report(); threads may lose one
_LIMIT = 2048  # prepared calls
_ARGS = ffi.typeof("flashattn_args *")
_WORDS = ffi.typeof("uint64_t *")
_EMPTY = (ffi.NULL, -1, -1, -1)
_NULL = ffi.NULL
# The functions of both passes: on the CPU they take workspace and stream as pointers, on a GPU as
# numbers, as PyTorch has them: cffi passes a number sooner than it makes a pointer of it.
_NUMBERS = ffi.typeof("int32_t(*)(const flashattn_plan *, const flashattn_args *, uintptr_t, "
                      "int64_t, uintptr_t)")
_functions = {op: (function, ffi.cast(_NUMBERS, function)) for op, function in (
    (Op.FORWARD, lib.flashattn_forward), (Op.BACKWARD, lib.flashattn_backward))}
# These ask for the current GPU and its stream. The public functions of torch take microseconds to
# see to the initialisation of CUDA, which a tensor on a GPU has done.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current_stream: Any = _gpu.Torch(torch).stream
# Compiled programs call these in the place of torch.empty_strided, which takes microseconds more.
# By the type of the device; on a GPU they allocate on the current one.
_empty = {kind: getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None),
                        f"_empty_strided_{kind}", None) for kind in ("cpu", "cuda")}


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


Run = Callable[..., Tuple[Any, ...]]
"""A prepared call. Of the forward pass: run(q, k, v, beside=NOTHING, o=None), o and lse. Of the
backward pass: run(dout, dlse, q, k, v, o, lse, beside=NOTHING, grads=None), the five gradients."""


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
        if tensor is not None and tensor.numel() and tensor.data_ptr() != \
                int(ffi.cast("uintptr_t", inputs.seen[name].pointer)):
            raise invalid(f"{name} is a {tensor.dtype} tensor of shape {tuple(tensor.shape)} and "
                          f"strides {tensor.stride()}, which would have to be copied; give int32 "
                          "or float32, with a contiguous last dimension of full size",
                          Reason.STRIDE, name)
    return inputs


def _strides(shape: Sequence[int], order: Optional[Tuple[int, ...]]) -> Tuple[int, ...]:
    """Of a tensor that is stored as (batch, seq, heads, dim)."""
    step, found = 1, [0] * len(shape)
    for axis in reversed(order or tuple(range(len(shape)))):
        found[axis] = step
        step *= max(shape[axis], 1)
    return tuple(found)


def maker(shape: Sequence[int], strides: Sequence[int], dtype: Any, device: Any,
          zero: bool = False) -> Callable[[], Tensor]:
    """Makes a tensor, on a GPU while that is the current one. It keeps none, whose memory would
    stay allocated in the pool of a graph that is captured meanwhile."""
    empty = _empty.get(device.type)
    made: Callable[[], Tensor] = (
        partial(empty, tuple(shape), tuple(strides), dtype) if empty is not None else
        partial(torch.empty_strided, tuple(shape), tuple(strides), dtype=dtype, device=device))
    return (lambda: made().zero_()) if zero else made


def is_current(tensor: Tensor) -> bool:
    """Whether it lies where maker()'s functions make tensors."""
    return tensor.is_cpu or tensor.get_device() == _current_device()


def _gpu_index(device: Any) -> Optional[int]:
    return device.index if device.type == "cuda" else None


class _Submission(NamedTuple):
    """What the calls of both passes share. All else of a call are variables of its function: it is
    called often, and they are what Python finds fastest."""

    gpu: Optional[int]  # which; None: the CPU
    take: Callable[[Sequence[Optional[Tensor]]], Tuple[Any, Any]]
    submit: Callable[[Tuple[Any, Any]], None]


def _submission(plan: Any, op: Op, args: Any, device: Any) -> _Submission:
    needed = ffi.new("int64_t *")
    status = lib.flashattn_workspace_size(plan._plan, int(op), args, needed)
    if status:
        fail(status)
    words = ffi.cast(_WORDS, args)
    for word in (_Q, _K, _V, _O, _DOUT, _LSE, _DLSE, *_BESIDE_WORDS):
        words[word] = 0
    kind, size, spare = op.name.lower(), needed[0], []  # type: ignore[var-annotated]
    handle = plan._plan  # which keeps it alive
    gpu = _gpu_index(device)
    function = _functions[op][gpu is not None]
    scratch = maker((size,), (1,), torch.uint8, device)

    def take(beside: Sequence[Optional[Tensor]]) -> Tuple[Any, Any]:
        """flashattn_args that no other thread has, and their words. Those of an earlier call differ
        in no more than the pointers, all of which are written."""
        try:
            filled = spare.pop()
        except IndexError:
            copy = ffi.new(_ARGS, args[0])
            filled = copy, memoryview(ffi.buffer(copy)).cast("B").cast("Q")
        if beside is not NOTHING:
            words = filled[1]
            for word, tensor in zip(_BESIDE_WORDS, beside):
                if tensor is not None:
                    words[word] = tensor.data_ptr()
        return filled

    def submit(filled: Tuple[Any, Any]) -> None:
        """Runs what take() gave, and takes it back. A GPU is the current one, and the call goes to
        its current stream, in whose order the allocator reuses the workspace."""
        if gpu is None:
            status = function(handle, filled[0], _plan._workspace(size), size, _NULL)
        elif size:
            memory = scratch()
            status = function(handle, filled[0], memory.data_ptr(), size, _current_stream(gpu))
        else:
            status = function(handle, filled[0], 0, 0, _current_stream(gpu))
        if status:
            fail(status)
        spare.append(filled)
        runs[kind] += 1

    return _Submission(gpu, take, submit)


def keep(key: Any, run: Any) -> Any:
    if len(_plan.prepared) >= _LIMIT:
        _plan.prepared.clear()
    _plan.prepared[key] = run
    return run


def given(beside: Sequence[Optional[Tensor]]) -> Tuple[Any, Sequence[Any]]:
    """Which of them there are, and each once: often the offsets of queries and keys are one
    tensor."""
    if beside is NOTHING:
        return None, ()
    mask = tuple(map(is_not, beside, NOTHING))
    if mask[_CU_Q] and beside[_CU_Q] is beside[_CU_KV]:
        return (mask,), [*compress(beside[:_CU_KV], mask),
                         *compress(beside[_CU_KV + 1:], mask[_CU_KV + 1:])]
    return mask, tuple(compress(beside, mask))


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
    run = prepare_forward(q, k, v, beside, max_q, max_kv, options, return_lse, orders, o)
    return run(q, k, v, beside, o)  # type: ignore[return-value]


def prepare_forward(q: Tensor, k: Tensor, v: Tensor, beside: Sequence[Optional[Tensor]], max_q: int,
                    max_kv: int, options: Options, return_lse: bool, orders: Orders = None,
                    o: Optional[Tensor] = None) -> Run:
    """What forward() runs, for tensors like these. Without o the call makes one that is stored as
    this."""
    key = (q.shape, q.stride(), q.dtype, q.get_device(), k.shape, k.stride(), k.dtype,
           k.get_device(), v.shape, v.stride(), v.dtype, v.get_device(),
           None if beside is NOTHING else _geometry(beside), max_q, max_kv, options, return_lse,
           orders, None if o is None else (o.shape, o.stride(), o.dtype, o.get_device()),
           torch.get_num_threads())
    return _plan.prepared.get(key) or keep(key, _prepare_forward(
        (q, k, v), beside, max_q, max_kv, options, return_lse, orders, o))


def _prepare_forward(tensors: Sequence[Tensor], beside: Sequence[Optional[Tensor]], max_q: int,
                     max_kv: int, options: Options, return_lse: bool, orders: Orders,
                     o: Optional[Tensor]) -> Run:
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
        shape = (*q.shape[:-1], v.shape[-1])
        args.o = _EMPTY if o is None else _given(
            o, "o", order, inputs.q, inputs.v.dim, plan.descriptor.dtype_o, inputs)
        make_o = maker(shape, _strides(shape, order) if o is None else o.stride(), q.dtype,
                       q.device, inputs.ragged)
        shape = inputs.lse_shape()
        make_lse = maker(shape, _strides(shape, None), torch.float32, q.device, inputs.ragged)
        gpu, take, submit = _submission(plan, Op.FORWARD, args, q.device)

    def run(q: Tensor, k: Tensor, v: Tensor, beside: Sequence[Optional[Tensor]] = NOTHING,
            o: Optional[Tensor] = None) -> Tuple[Tensor, Optional[Tensor]]:
        if gpu is not None and gpu != _current_device():
            with torch.cuda.device(gpu):
                return run(q, k, v, beside, o)
        if copied:
            q, k, v = _dense(copied, (q, k, v))
        filled = take(beside)
        words, lse = filled[1], None
        words[_Q], words[_K], words[_V] = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if o is None:
            o = make_o()
        words[_O] = o.data_ptr()
        if return_lse:
            lse = make_lse()
            words[_LSE] = lse.data_ptr()
        submit(filled)
        return o, lse
    return run


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
    calls keep what runs, without dlse."""
    if dlse is not None:
        dlse = dlse.contiguous()
    key = (dout.shape, dout.stride(), dout.dtype, dout.get_device(), q.shape, q.stride(), q.dtype,
           q.get_device(), k.shape, k.stride(), k.dtype, k.get_device(), v.shape, v.stride(),
           v.dtype, v.get_device(), o.shape, o.stride(), o.dtype, o.get_device(), lse.shape,
           lse.stride(), lse.dtype, lse.get_device(), None if dlse is None else _geometry((dlse,)),
           None if beside is NOTHING else _geometry(beside), max_q, max_kv, options, return_dbias,
           return_dsink, orders, None if grads is None else _geometry(grads),
           torch.get_num_threads())
    run = _plan.prepared.get(key) or keep(key, _prepare_backward(
        (dout, q, k, v, o), dlse, lse, beside, max_q, max_kv, options, return_dbias, return_dsink,
        orders, grads))
    if calls is not None and dlse is None:
        calls.keep(run, dout, q, k, v, o, lse, *given(beside)[1])
    return run(dout, dlse, q, k, v, o, lse, beside, grads)


def _prepare_backward(tensors: Sequence[Tensor], dlse: Optional[Tensor], lse: Tensor,
                      beside: Sequence[Optional[Tensor]], max_q: int, max_kv: int,
                      options: Options, return_dbias: bool, return_dsink: bool,
                      orders: Orders, grads: Optional[Sequence[Tensor]]) -> Run:
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
        packs_lse = not lse.is_contiguous()
        for name, small in (("lse", lse.contiguous()), ("dlse", dlse)):
            if small is not None:
                packed(small, name, FLOAT32, inputs.lse_shape(), inputs.place)
        args.dq = args.dk = args.dv = _EMPTY
        for name, tensor, like, by in zip(("dq", "dk", "dv"), grads or (),
                                          (inputs.q, inputs.k, inputs.v), every[1:4]):
            setattr(args, name, _given(tensor, name, by, like, like.dim, like.view.dtype, inputs))
        if plan.descriptor.features & Feature.DBIAS:
            args.dbias = (ffi.NULL, *_plan.dbias_strides(inputs.seen["bias"].shape))
        make_dq, make_dk, make_dv = [
            maker(x.shape, _strides(x.shape, by) if given is None else given.stride(), x.dtype,
                  x.device, inputs.ragged)
            for x, by, given in zip(tensors[1:4], every[1:4], grads or (None,) * 3)]
        gpu, take, submit = _submission(plan, Op.BACKWARD, args, q.device)

    def run(dout: Tensor, dlse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, o: Tensor,
            lse: Tensor, beside: Sequence[Optional[Tensor]] = NOTHING,
            grads: Optional[Sequence[Tensor]] = None) -> Tuple[Optional[Tensor], ...]:
        if gpu is not None and gpu != _current_device():
            with torch.cuda.device(gpu):
                return run(dout, dlse, q, k, v, o, lse, beside, grads)
        if copied:
            dout, q, k, v, o = _dense(copied, (dout, q, k, v, o))
        if packs_lse:
            lse = lse.contiguous()
        filled = take(beside)
        words = filled[1]
        words[_Q], words[_K], words[_V] = q.data_ptr(), k.data_ptr(), v.data_ptr()
        words[_DOUT], words[_O], words[_LSE] = dout.data_ptr(), o.data_ptr(), lse.data_ptr()
        if dlse is not None:
            words[_DLSE] = dlse.data_ptr()
        dq, dk, dv = grads or (make_dq(), make_dk(), make_dv())
        words[_DQ], words[_DK], words[_DV] = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
        dbias = dsink = None
        if return_dbias:
            dbias = torch.zeros_like(beside[0], dtype=torch.float32,  # type: ignore[arg-type]
                                     memory_format=torch.contiguous_format)
            words[_DBIAS] = dbias.data_ptr()
        if return_dsink:
            dsink = torch.zeros_like(beside[1], dtype=torch.float32)  # type: ignore[arg-type]
            words[_DSINK] = dsink.data_ptr()
        submit(filled)
        return dq, dk, dv, dbias, dsink
    return run
