"""Calls that repeat an earlier one, but for the numbers. Most of a small call's cost is to check
its arrays and to find its plan, and both depend on types, shapes, strides and options alone."""
from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import numpy as np

from . import _arrays, _gpu
from ._inputs import Inputs
from ._library import ffi, lib
from ._errors import fail
from ._plan import (_ARGS, _FLOAT, _FORWARD, _LSE, Plan, _workspace, new_args, repeated, repeats)

_VOID = ffi.typeof("void *")
_MOST = 256  # calls that are kept; with the next one all are let go
# Equal values of one of these types are one value. Values of others may hash and yet change.
_PLAIN = frozenset((bool, int, float, str, type(None), np.bool_, np.int64, np.float32, np.float64))


def key_of(q: Any, k: Any, v: Any, fixed: Tuple[Any, ...], options: Dict[str, Any],
           described: Dict[str, Any]) -> Optional[Tuple[Any, ...]]:
    """What decides all that a call does but read and write memory; None: more than this knows of,
    or neither arrays of NumPy nor PyTorch's tensors in host memory. described: the options that say
    nothing of memory or threads."""
    # True, 1 and 1.0 are equal, but 1.0 is refused where True is not.
    if type(q) is type(k) is type(v) is np.ndarray:
        parts = [q.dtype, q.shape, q.strides, k.dtype, k.shape, k.strides, v.dtype, v.shape,
                 v.strides]
    elif type(q) is type(k) is type(v) and repeatable(q, k, v):
        parts = [q.dtype, q.shape, q.stride(), k.dtype, k.shape, k.stride(), v.dtype, v.shape,
                 v.stride()]
    else:
        return None
    for value in fixed:
        if type(value) not in _PLAIN:
            return None
        parts += (type(value), value)
    for name, value in options.items():
        kind = type(value)
        if kind is tuple and all([type(x) is int for x in value]):
            kind = int
        if kind not in _PLAIN or name not in described:
            return None
        parts += (name, kind, value)
    return tuple(parts)


def repeatable(*tensors: Any) -> bool:
    """Whether these are plain tensors, in no need of a gradient."""
    library = _gpu.on_host(tensors[0])
    if library is None or not all([library.is_plain(x) for x in tensors[1:]]):
        return False
    return not (any([x.requires_grad for x in tensors]) and library.torch.is_grad_enabled())


class Call:
    """A forward call of NumPy's arrays or of tensors, all but their addresses."""

    __slots__ = ("plan", "args", "workspace", "shape", "dtype", "lse_shape", "types", "code_o",
                 "tensors")

    def __init__(self, plan: Plan, inputs: Inputs) -> None:
        self.plan = plan._plan
        self.args = new_args(inputs.sizes)
        inputs.fill(self.args)
        self.args.o = (ffi.NULL, -1, -1, -1)
        self.workspace = plan._last_size[2] if plan._last_size[:2] == (_FORWARD, inputs.sizes) \
            else -1
        self.shape, self.code_o = inputs.q.like(inputs.v.dim), plan.descriptor.dtype_o
        self.tensors: Any = inputs.tensors and inputs.tensors.torch
        self.dtype = getattr(self.tensors, _arrays.NAMES[self.code_o]) if self.tensors \
            else _arrays.numpy_dtype(self.code_o)
        self.lse_shape = inputs.lse_shape() if plan.descriptor.features & _LSE else None
        self.types = () if self.tensors else tuple([
            (t.view.dtype, t.view.owner.flags.c_contiguous)
            for t in (inputs.q, inputs.k, inputs.v)])

    def run(self, q: Any, k: Any, v: Any) -> Any:
        args = ffi.new(_ARGS, self.args[0])
        if self.tensors:
            return self._run(args, *self._of_tensors(args, q, k, v))
        type_q, type_k, type_v = self.types
        args.q.data = _address(q, *type_q)
        args.k.data = _address(k, *type_k)
        args.v.data = _address(v, *type_v)
        o, lse = np.empty(self.shape, self.dtype), None
        args.o.data = _arrays.packed_address(o, self.code_o)
        if self.lse_shape is not None:
            lse = np.empty(self.lse_shape, np.float32)
            args.lse = ffi.from_buffer(_FLOAT, lse)
        return self._run(args, o, lse)

    def _of_tensors(self, args: Any, q: Any, k: Any, v: Any) -> Tuple[Any, Any]:
        torch, lse = self.tensors, None
        args.q.data = ffi.cast(_VOID, q.data_ptr())
        args.k.data = ffi.cast(_VOID, k.data_ptr())
        args.v.data = ffi.cast(_VOID, v.data_ptr())
        o = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        args.o.data = ffi.cast(_VOID, o.data_ptr())
        if self.lse_shape is not None:
            lse = torch.empty(self.lse_shape, dtype=torch.float32, device="cpu")
            args.lse = ffi.cast(_FLOAT, lse.data_ptr())
        return o, lse

    def _run(self, args: Any, o: Any, lse: Any) -> Any:
        size = self.workspace
        status = lib.flashattn_forward(self.plan, args, _workspace(size), size, ffi.NULL)
        if status:
            fail(status)
        return o if lse is None else (o, lse)


def _address(array: Any, code: int, is_packed: bool) -> Any:
    """A head's elements have no gaps in any array, and buffers are cheaper than what else says an
    address."""
    return _arrays.packed_address(array if is_packed else array[:1, :1, :1], code)


def find(key: Optional[Tuple[Any, ...]]) -> Optional[Call]:
    call = repeated.get(key)
    if call is not None:
        repeats[0] += 1
    return call


def keep(key: Tuple[Any, ...], plan: Plan, inputs: Inputs) -> None:
    """Keeps a call that has succeeded, once it comes for the second time: what grows with every
    call never does. On the CPU, in the layout whose results lie as they are made."""
    if len(repeated) >= _MOST:
        repeated.clear()
    if key not in repeated:
        repeated[key] = None
    elif inputs.place is None and inputs.layout == "bshd":
        call = Call(plan, inputs)
        if call.workspace >= 0:  # else another thread has run the plan since, on other sizes
            repeated[key] = call
