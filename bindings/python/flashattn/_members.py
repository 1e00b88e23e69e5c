"""Arrays of the header's tables as the library gets them: pointers, and tensors of strides."""
from __future__ import annotations

from typing import Any, Callable, Dict, Tuple

import numpy as np

from . import _gpu
from ._arrays import (KINDS, Place, View, beside, check_packed, check_writable, pointer, view)
from ._constants import ARRAYS, Array, Dim, Reason
from ._errors import invalid
from ._library import ffi

# Numbers of the descriptor that shapes depend on.
NUMBERS = ("block_q", "block_kv", "tree", "descale_block", "descale_dim")
_STRIDES = ("stride_batch", "stride_head", "stride_seq")
# The types of the members of each structure.
TYPES = {struct: {name: field.type for name, field in ffi.typeof(struct).fields}
         for struct in ARRAYS}
# Numbers that must be there with an array, as its shape depends on them.
_NEEDED = {(struct, name): tuple(dict.fromkeys(
    [n for dim in array.dims for n in (dim.size, dim.by) if n in NUMBERS and n != "descale_block"]))
           for struct, arrays in ARRAYS.items() for name, array in arrays.items()}
_Remedy = Callable[[str, Tuple[int, ...], Tuple[int, ...]], str]


def extents(array: Array, sizes: Dict[str, int], varlen_q: bool = False) -> Tuple[int, ...]:
    """The shape in full; varlen_q: queries are packed."""
    dims = array.layouts.get("VARLEN_Q", array.dims) if varlen_q else array.dims
    return tuple([_extent(dim, sizes) for dim in dims])


def _extent(dim: Dim, sizes: Dict[str, int]) -> int:
    size = int(dim.size) if dim.size.isdigit() else sizes[dim.size]
    if dim.by:
        by = int(dim.by) if dim.by.isdigit() else sizes[dim.by]
        return -(-size // by) if by else min(size, 1)
    return size + dim.more


def _said(dim: Dim) -> str:
    return f"ceil({dim.size} / {dim.by})" if dim.by else \
        f"{dim.size} + {dim.more}" if dim.more else dim.size


def written(array: Any, name: str, kind: str, place: Place) -> View:
    """An array of the caller's that a call writes, of a type of the header's."""
    seen = view(array, name, place, KINDS[kind])
    _gpu.check_order(array, name, place)
    check_writable(seen, name)
    return seen


def member(struct: str, name: str, seen: View, sizes: Dict[str, int], place: Place = None,
           varlen_q: bool = False, remedy: _Remedy = lambda *_: "") -> Tuple[Any, View]:
    """What a structure gets: a pointer, or a flashattn_tensor that repeats, or sums, where the
    array is broadcast; and the view of what it points to. remedy: the end of the message about a
    wrong shape, by name, shape and the expected one."""
    array = ARRAYS[struct][name]
    for number in _NEEDED[struct, name]:
        if sizes[number] < 1:
            raise invalid(f"{number} = {sizes[number]}, but {name} is given, whose shape depends "
                          "on it; give at least 1", Reason.SIZE, number)
    expected = extents(array, sizes, varlen_q)
    if not array.tensor:
        if seen.shape != expected:
            raise _misfit(name, array, seen.shape, expected, False, remedy)
        check_packed(seen, name)
        return ffi.cast(TYPES[struct][name], seen.pointer), seen
    missing = len(expected) - len(seen.shape)
    shape, steps = (1,) * missing + seen.shape, (0,) * missing + seen.steps
    if array.dims[-1].by == "page_size" and missing == 0:
        # Columns past the last page are not read.
        expected = (expected[0], max(shape[1], expected[1]))
    if len(shape) != len(expected) or any(
            n not in (1, size) for n, size in zip(shape, expected)):
        raise _misfit(name, array, seen.shape, expected, True, remedy)
    if not array.dims[-1].stride and expected[-1] > 1 and 0 not in shape and \
            (shape[-1] != expected[-1] or steps[-1] != seen.size):
        if place is not None or array.role != "input" or array.type.startswith("dtype_"):
            raise invalid(f"{name} has shape {seen.shape} and strides {seen.strides}; its last "
                          f"dimension, {_said(array.dims[-1])}, must be there, all "
                          f"{expected[-1]}, and contiguous: broadcast it and {seen.remedy}",
                          Reason.STRIDE, name)
        # A small array in host memory is copied.
        values = np.broadcast_to(np.asarray(seen.owner).reshape(shape), shape[:-1] + expected[-1:])
        seen = beside(np.ascontiguousarray(values), name, array.type, None)
        shape, steps = seen.shape, seen.steps
    strides = tuple([0 if n == 1 else step // seen.size for n, step in zip(shape, steps)])
    if min(strides) < 0:
        strides = upwards(strides, shape, seen, name)
    by_name = {dim.stride: stride for dim, stride in zip(array.dims, strides)}
    return (seen.pointer, *[by_name.get(stride, 0) for stride in _STRIDES]), seen


def packed_member(struct: str, name: str, array: Any, place: Place) -> Any:
    """The same of an array of float32 without gaps that new() made in the shape in full. It must
    outlive the call."""
    address = pointer(array) if place is None else \
        view(array, name, place, made=True).pointer
    return (address, -1, -1, -1) if ARRAYS[struct][name].tensor else \
        ffi.cast(TYPES[struct][name], address)


def upwards(strides: Tuple[int, ...], sizes: Tuple[int, ...], array: View,
            name: str) -> Tuple[int, ...]:
    """Strides without negative ones that nobody steps by; -1 means packed to the library."""
    strides = tuple([0 if n <= 1 else stride for stride, n in zip(strides, sizes)])
    if min(strides) < 0 and 0 not in sizes:
        raise invalid(f"{name} has a negative stride; {array.remedy}", Reason.STRIDE, name)
    return tuple([max(stride, 0) for stride in strides])


def _misfit(name: str, array: Array, shape: Tuple[int, ...], expected: Tuple[int, ...],
            may_repeat: bool, remedy: _Remedy) -> Exception:
    wanted = ", which does not broadcast to" if may_repeat else "; expected"
    indices = ", ".join([_said(dim) for dim in array.dims])
    return invalid(f"{name} has shape {shape}{wanted} ({indices}) = {expected}"
                   + remedy(name, shape, expected),
                   Reason.BIAS if array.type == "dtype_bias" else Reason.SIZE, name)
