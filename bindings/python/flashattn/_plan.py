"""Plans: kept for reuse, and run with a workspace that each thread keeps."""
from __future__ import annotations

import threading
from functools import lru_cache
from operator import itemgetter
from typing import Any, Dict, NamedTuple, Optional, Tuple, Union

import numpy as np

from . import _arrays, _events, _gpu
from ._arrays import F32, FLOAT32, MASK, NAMES, View, check_writable, packed, view
from ._constants import Bias, Device, Dtype, Feature, Layout, Op, Reason
from ._describe import Descriptor, describe, takes_description
from ._errors import fail, invalid, misfit, named, wrong_type
from ._inputs import FACTS, Inputs, Tensor, axes, first_given
from ._library import ffi, lib, text

_FORWARD, _BACKWARD = int(Op.FORWARD), int(Op.BACKWARD)
_LSE, _DBIAS, _DSINK = int(Feature.LSE), int(Feature.DBIAS), int(Feature.DSINK)
_DESC, _SHAPE = ffi.typeof("flashattn_desc *"), ffi.typeof("flashattn_shape *")
_FORWARD_ARGS = ffi.typeof("flashattn_forward_args *")
_BACKWARD_ARGS = ffi.typeof("flashattn_backward_args *")
_PROPERTIES = ffi.typeof("flashattn_plan_properties *")
_INT64, _FLOAT = ffi.typeof("int64_t *"), ffi.typeof("float *")
_DESC_SIZE, _FORWARD_SIZE = ffi.sizeof("flashattn_desc"), ffi.sizeof("flashattn_forward_args")
_BACKWARD_SIZE = ffi.sizeof("flashattn_backward_args")
_ARRAY_FIELDS = ("device", "device_index", "dtype", "heads_q", "heads_kv", "dim_qk", "dim_v",
                 "layout", "page_size", "block_q", "block_kv", "bias", "bias_dtype")
_OF_ARRAYS = itemgetter(*[Descriptor._fields.index(name) for name in _ARRAY_FIELDS])
# Axes of "bshd" and "thd": the order that strides of zero stand for.
_PACKED = (axes("bshd", 4), axes("thd", 3))
_thread = threading.local()


class PlanInfo(NamedTuple):
    """What a plan does: flashattn_plan_properties."""

    family: str
    kernel: str
    isa: str
    why: str  # one sentence: why this kernel
    tile_q: int
    tile_kv: int
    stages: int
    threads: int
    registers: int
    local_memory: int  # bytes
    splits: int
    flops: int  # of the shape asked about
    bytes: int  # least to move
    workspace: int  # bytes


def c_descriptor(descriptor: Descriptor) -> Any:
    values = (_DESC_SIZE, *descriptor)
    try:
        return ffi.new(_DESC, values)
    except (OverflowError, TypeError):
        raise misfit(_DESC.item, values) from None


def set_shape(target: Any, sizes: Tuple[int, ...]) -> None:
    """Writes a flashattn_shape, which does not hold every size that Python does."""
    try:
        target[0] = sizes
    except (OverflowError, TypeError):
        raise misfit(_SHAPE.item, sizes) from None


def op_code(op: Union[str, int]) -> int:
    if isinstance(op, str):
        if op.upper() not in Op.__members__:
            raise invalid(f"op = {op!r}; expected \"forward\" or \"backward\"", Reason.OP, "op")
        return int(Op[op.upper()])
    return int(op)


def _workspace(size: int) -> Any:
    """Scratch memory of this thread; it grows and is reused by every plan."""
    held = getattr(_thread, "workspace", None)
    if held is None or held.nbytes < size:
        _thread.workspace = None  # free the old one first
        held = _thread.workspace = np.empty(size, np.uint8)
        _thread.address = _arrays.pointer(held)
    return _thread.address


class Plan:
    """A checked descriptor with a kernel chosen, for many calls.

    Takes the keywords of describe(). Immutable: any number of threads may run one plan at once.
    attention() and its relatives make and keep plans by themselves; a Plan of one's own shows what
    will run, and fails early.

        plan = flashattn.Plan(dtype="float32", heads=8, dim=64, causal=True, return_lse=True)
        out, lse = plan.forward(q, k, v)

    Raises ValueError, NotImplementedError, MemoryError with the library's sentence.
    """

    __slots__ = ("_plan", "_last_size", "descriptor", "__weakref__")

    @takes_description
    def __init__(self, **description: Any) -> None:
        descriptor = describe(**description)
        plan = ffi.new("flashattn_plan **")
        status = lib.flashattn_plan_create(c_descriptor(descriptor), plan)
        if status:
            fail(status)
        self._plan = ffi.gc(plan[0], lib.flashattn_plan_destroy)
        self.descriptor = descriptor
        # Programs repeat a shape: (operation, shape, bytes) of the last call.
        self._last_size: Tuple[int, Tuple[int, ...], int] = (0, (), 0)

    def __repr__(self) -> str:
        d = self.descriptor
        return (f"<flashattn.Plan {Dtype(d.dtype).name.lower()}, {d.heads_q} heads on "
                f"{d.heads_kv}, dim {d.dim_qk}/{d.dim_v}>")

    def workspace_size(self, op: Union[str, int] = "forward", *, batch: Optional[int] = None,
                       seqlen_q: int = 0, seqlen_k: int = 0, total_q: int = 0,
                       total_k: int = 0) -> int:
        """Bytes of scratch memory that an operation needs. Without sizes: for the promised maxima.

        batch and lengths in sequences and tokens, as in the call; total_q, total_k: all tokens of
        packed sequences. ValueError: sizes without batch or past 2**31 - 1 (totals: 2**63 - 1), no
        promise where one is needed.
        """
        size = ffi.new(_INT64)
        status = lib.flashattn_workspace_size(
            self._plan, op_code(op), _shape(batch, seqlen_q, seqlen_k, total_q, total_k), size)
        if status:
            fail(status)
        return size[0]

    def info(self, op: Union[str, int] = "forward", *, batch: Optional[int] = None,
             seqlen_q: int = 0, seqlen_k: int = 0, total_q: int = 0,
             total_k: int = 0) -> PlanInfo:
        """The kernel and its cost for a shape; sizes and errors as in workspace_size()."""
        properties = ffi.new(_PROPERTIES, (ffi.sizeof(_PROPERTIES.item),))
        status = lib.flashattn_plan_info(
            self._plan, op_code(op), _shape(batch, seqlen_q, seqlen_k, total_q, total_k),
            properties)
        if status:
            fail(status)
        values: Any = [getattr(properties, name) for name in PlanInfo._fields]
        return PlanInfo._make(v if isinstance(v, int) else text(v) for v in values)

    def forward(self, q: Any, k: Any, v: Any, *, out: Any = None, **arrays: Any) -> Any:
        """Runs the plan. arrays: those of attention(), attention_varlen(), attention_paged().

        Returns out, or (out, lse) for a plan with return_lse.
        """
        inputs = Inputs(q, k, v, out=out, **arrays)
        self._fits(inputs)
        return self.run_forward(inputs, out)

    def backward(self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dlse: Any = None,
                 dq: Any = None, dk: Any = None, dv: Any = None, **arrays: Any) -> Tuple[Any, ...]:
        """Gradients of a plan made with backward=True; see attention_backward()."""
        inputs = Inputs(q, k, v, out=first_given(dq, dk, dv), **arrays)
        self._fits(inputs)
        return self.run_backward(inputs, dout, out, lse, dlse, dq, dk, dv)

    def _fits(self, inputs: Inputs) -> None:
        place = inputs.place
        mine, theirs = self.descriptor, describe(
            **dict(zip(FACTS, inputs.facts())), device=place.device if place else "cpu")
        if _OF_ARRAYS(mine) == _OF_ARRAYS(theirs):
            return
        for name, plans, arrays in zip(Descriptor._fields, mine, theirs):
            if name in _ARRAY_FIELDS and plans != arrays:
                raise invalid(f"{named(name)} = {_shown(name, arrays)} by the arrays given, but "
                              f"the plan is made for {_shown(name, plans)}; make one for them",
                              Reason.VALUE, named(name))

    def run_forward(self, inputs: Inputs, out: Any, seen: Optional[View] = None) -> Any:
        """forward() for inputs that are known to fit."""
        inputs.check_seed(self.descriptor.dropout)
        args = ffi.new(_FORWARD_ARGS)
        args.struct_size = _FORWARD_SIZE
        inputs.fill(args)
        out, args.o = _output(out, "out", inputs.q, inputs.v.dim, self.descriptor.dtype_o, inputs,
                              seen)
        lse = None
        if self.descriptor.features & _LSE:
            lse, args.lse = _result(inputs.lse_shape(), inputs.ragged, inputs, "lse")
        self._run(lib.flashattn_forward, _FORWARD, args, inputs)
        return out if lse is None else (out, lse)

    def run_backward(self, inputs: Inputs, dout: Any, out: Any, lse: Any, dlse: Any, dq: Any,
                     dk: Any, dv: Any) -> Tuple[Any, ...]:
        """backward() for inputs that are known to fit."""
        inputs.check_seed(self.descriptor.dropout)
        args = ffi.new(_BACKWARD_ARGS)
        args.struct_size = _BACKWARD_SIZE
        inputs.fill(args)
        q, k, v = inputs.q, inputs.k, inputs.v
        dtype_o, lse_shape = self.descriptor.dtype_o, inputs.lse_shape()
        place = inputs.place
        seen_out, seen_dout = view(out, "out", place), view(dout, "dout", place)
        args.o = _like_output(seen_out, "out", q, v.dim, dtype_o, inputs).c()
        args.dout = _like_output(seen_dout, "dout", q, v.dim, dtype_o, inputs).c()
        # The views live to the end of this function, and so does what they point to.
        seen_lse = packed(lse, "lse", FLOAT32, lse_shape, place)
        args.lse = ffi.cast(_FLOAT, seen_lse.pointer)
        if dlse is not None:
            seen_dlse = packed(dlse, "dlse", FLOAT32, lse_shape, place)
            args.dlse = ffi.cast(_FLOAT, seen_dlse.pointer)
        dtype = q.view.dtype
        dq, args.dq = _output(dq, "dq", q, q.dim, dtype, inputs)
        dk, args.dk = _output(dk, "dk", k, k.dim, dtype, inputs)
        dv, args.dv = _output(dv, "dv", v, v.dim, dtype, inputs)
        results = [dq, dk, dv]
        if self.descriptor.features & _DBIAS:
            results.append(_dbias(args, inputs))
        if self.descriptor.features & _DSINK:
            dsink, args.dsink = _result((q.heads,), True, inputs, "dsink")
            results.append(dsink)
        self._run(lib.flashattn_backward, _BACKWARD, args, inputs)
        return tuple(results)

    def _run(self, function: Any, op: int, args: Any, inputs: Inputs) -> None:
        shape, c_shape = inputs.shape(), ffi.addressof(args, "shape")
        set_shape(c_shape, shape)
        last_op, last_shape, size = self._last_size
        if op != last_op or shape != last_shape:
            needed = ffi.new(_INT64)
            status = lib.flashattn_workspace_size(self._plan, op, c_shape, needed)
            if status:
                fail(status, inputs.names())
            size = needed[0]
            self._last_size = (op, shape, size)
        place = inputs.place
        if place is None:
            status = function(self._plan, args, _workspace(size), size, ffi.NULL)
        else:
            with _gpu.launch(place):
                # It goes back before the work is done, but to its stream.
                address = ffi.NULL
                if size:
                    memory = _gpu.new((size,), "uint8", False, place, "workspace")
                    address = view(memory, "workspace", place, MASK, made=True).pointer
                status = function(self._plan, args, address, size, _gpu.native_stream(place))
        if status:
            fail(status, inputs.names())


def _shown(field: str, value: Any) -> Any:
    """A number of the descriptor as its enumerators call it."""
    if field in ("dtype", "bias_dtype"):
        return NAMES.get(value, "none")
    if field == "device":
        return Device(value).name.lower()
    if field in ("layout", "bias"):
        bits: Any = Layout if field == "layout" else Bias
        return " and ".join(bit.name.lower() for bit in bits if bit & value) or "none"
    return value


def _shape(batch: Optional[int], *sizes: int) -> Any:
    if batch is None:
        if any(sizes):
            raise invalid("sizes are given without batch, and would be ignored; give batch, too, "
                          "or no size for the promised maxima", Reason.SIZE, "batch")
        return ffi.NULL
    seqlen_q, seqlen_k, total_q, total_k = sizes
    shape = ffi.new(_SHAPE)
    set_shape(shape, (batch, seqlen_q, seqlen_k, 0, total_q, total_k))
    return shape


def _like_output(array: View, name: str, model: Tensor, dim: int, code: int,
                 inputs: Inputs) -> Tensor:
    if array.dtype != code:
        raise wrong_type(f"{name} has dtype {NAMES[array.dtype]}; expected {NAMES[code]}", name)
    expected = model.like(dim)
    if array.shape != expected:
        raise invalid(f"{name} has shape {array.shape}; expected {expected}", Reason.SIZE, name)
    return Tensor(array, inputs.layout, len(expected), name)


def _output(array: Any, name: str, model: Tensor, dim: int, code: int,
            inputs: Inputs, seen: Optional[View] = None) -> Tuple[Any, Any]:
    """The array to write, made if none was given, and the flashattn_tensor for it. seen: its view
    where there is one already."""
    if array is None:
        # Rows that belong to no sequence are not written: they must not hold what was there.
        shape, place = model.like(dim), inputs.place
        array = _arrays.new(shape, code, inputs.ragged, place, name)
        if place is None and model.axes in _PACKED:
            return array, (_arrays.packed_address(array, code), 0, 0, 0)
        made = view(array, name, place, made=True)
        return array, Tensor(made, inputs.layout, len(shape), name).c()
    if seen is None:
        seen = view(array, name, inputs.place)
    _gpu.check_order(array, name, inputs.place)
    check_writable(seen, name)
    return array, _like_output(seen, name, model, dim, code, inputs).c()


def _result(shape: Tuple[int, ...], zero: bool, inputs: Inputs, name: str) -> Tuple[Any, Any]:
    """A float32 array for a result, and its address."""
    array = _arrays.new(shape, F32, zero, inputs.place, name)
    if inputs.place is None:
        return array, _arrays.pointer(array, _FLOAT)
    return array, _arrays.pointer(view(array, name, inputs.place, made=True), _FLOAT)


def _dbias(args: Any, inputs: Inputs) -> Any:
    bias = inputs.bias
    assert bias is not None  # see describe()
    dbias, args.dbias = _result(bias.shape, True, inputs, "dbias")
    shape = (1,) * (4 - len(bias.shape)) + bias.shape
    # A stride of zero sums over the index: where the bias is broadcast.
    (args.dbias_stride_batch, args.dbias_stride_head, args.dbias_stride_row) = (
        0 if shape[0] == 1 else shape[1] * shape[2] * shape[3],
        0 if shape[1] == 1 else shape[2] * shape[3], 0 if shape[2] == 1 else shape[3])
    return dbias


@lru_cache(maxsize=256)
def cached_plan(facts: Tuple[Any, ...], chosen: Tuple[Tuple[str, Any], ...]) -> Plan:
    """The plan for what is known of the arrays and what was chosen, as uniform() puts it, made at
    its first use.

    The key is not the descriptor: this one is made in a tenth of the time. Refusals are not kept.
    """
    return Plan(**dict(zip(FACTS, facts)), **dict(chosen))


def cache_info() -> Dict[str, int]:
    """Plans kept ("plans"), found again ("hits"), made ("misses")."""
    info = cached_plan.cache_info()
    return {"plans": info.currsize, "hits": info.hits, "misses": info.misses}


def clear_cache() -> None:
    """Lets go of all kept plans, of the calling thread's workspace, and of arrays that GPUs have
    done with."""
    cached_plan.cache_clear()
    _thread.workspace = None
    _events.release()
