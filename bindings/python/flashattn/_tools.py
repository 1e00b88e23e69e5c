"""What goes beside attention: merging, dropout masks, questions to the library."""
from __future__ import annotations

import atexit
import threading
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from . import _arrays, _gpu
from ._arrays import (F16, F32, FLOAT32, MASK, NAMES, DTypeLike, View, check_writable, dtype_code,
                      packed, view)
from ._constants import Device, LogLevel, Reason
from ._describe import describe, takes_description
from ._errors import UnsupportedError, fail, invalid
from ._inputs import Tensor, check_seed, set_seed
from ._library import ffi, lib, text
from ._options import integer, uniform
from ._plan import Plan, c_descriptor, cached_plan, set_shape

_FLOAT, _BYTE = ffi.typeof("float *"), ffi.typeof("uint8_t *")
_log_lock = threading.Lock()
_log: Any = ffi.NULL  # what the library calls: alive until it has another


class DeviceInfo(NamedTuple):
    """flashattn_device_properties."""

    kind: str  # "cpu", "cuda"
    device_index: int
    name: str
    isa: str  # the best kernels this build has for it
    units: int  # threads; streaming multiprocessors
    compute_capability: int
    local_memory: int  # bytes: L2 cache of a core; shared memory of a block
    memory: int  # bytes


def merge(outs: Sequence[Any], lses: Sequence[Any], *, layout: Optional[str] = None,
          out: Any = None, out_dtype: Optional[DTypeLike] = None,
          stream: Any = None) -> Tuple[Any, Any]:
    """Merges attention over disjoint sets of keys: ring or cascade attention, split caches.

    outs        the parts, each as attention() returned it: (batch, queries, heads, dim_v) in the
                order of layout, or (total_q, heads, dim_v)
    lses        their lse: float32 (batch, heads, queries), or (heads, total_q)
    out, out_dtype, stream  as in attention(); out_dtype=None: the dtype of the parts

    Returns (out, lse): lse = ln(sum exp(lse_p)), out = sum exp(lse_p - lse) out_p. Parts with
    lse = -inf count nothing. A sink must be in one part only. ValueError, TypeError,
    NotImplementedError as in attention().
    """
    if len(outs) != len(lses) or not len(outs):
        raise invalid(f"{len(outs)} outs and {len(lses)} lses; expected as many, and at least one",
                      Reason.SIZE, "outs")
    place = _gpu.place_of(outs[0], stream, None, out, "outs")
    views = [view(part, "outs", place) for part in outs]
    varlen = len(views[0].shape) == 3
    order = layout or "bshd"
    parts = [Tensor(part, order, 3 if varlen else 4, "outs") for part in views]
    first = parts[0]
    for part in parts:
        if part.view.shape != first.view.shape or part.view.dtype != first.view.dtype:
            raise invalid(f"outs are {_said(first.view)} and {_said(part.view)}; give parts of one "
                          "shape and dtype", Reason.SIZE, "outs")
    lse_shape = ((first.heads, first.rows) if varlen else (first.batch, first.heads, first.rows))
    part_lses = [packed(lse, "lses", FLOAT32, lse_shape, place) for lse in lses]
    made = out is None
    if made:
        code = first.view.dtype if out_dtype is None else dtype_code(out_dtype, "out_dtype")
        out = _arrays.new(first.view.shape, code, False, place, "out")
    else:
        _gpu.check_order(out, "out", place)
    seen = view(out, "out", place, made=made)
    check_writable(seen, "out")
    _arrays.check_shape(seen.shape, first.view.shape, "out")
    target = Tensor(seen, order, len(first.view.shape), "out")
    lse = _arrays.new(lse_shape, F32, False, place, "out")
    plan = _plan_of(place, target.view.dtype, first.heads, first.dim, varlen_q=varlen)
    args = ffi.new("flashattn_merge_args *")
    args.struct_size, args.parts = ffi.sizeof("flashattn_merge_args"), len(parts)
    set_shape(ffi.addressof(args, "shape"), (1 if varlen else first.batch, first.rows, 0, 0,
                                             first.rows if varlen else 0, 0))
    arrays = ffi.new("flashattn_tensor[]", [part.c() for part in parts])
    pointers = ffi.new("float *[]", [ffi.cast(_FLOAT, part.pointer) for part in part_lses])
    args.part_o, args.part_lse, args.part_dtype = arrays, pointers, first.view.dtype
    args.o = target.c()
    args.lse = _arrays.pointer(lse if place is None else view(lse, "lse", place, made=True),
                               _FLOAT)
    with _gpu.launch(place):
        status = lib.flashattn_merge(plan._plan, args, _gpu.native_stream(place))
    if status:
        fail(status)
    return out, lse


def _said(array: View) -> str:
    return f"{NAMES[array.dtype]} {array.shape}"


def _plan_of(place: _arrays.Place, dtype: int, heads: int, dim: int,
             **chosen: Any) -> Plan:
    """A plan whose results are of a type; on a GPU also where no kernel computes in it."""
    if place is not None:
        chosen["device"] = place.device
        if dtype == F32:
            dtype, chosen["out_dtype"] = F16, F32
    return cached_plan((dtype, heads, dim), uniform(chosen))


def dropout_mask(batch: int, heads: int, seqlen_q: int, seqlen_k: int, *, dropout: float,
                 seed: Optional[int] = None, offset: int = 0, out: Any = None,
                 stream: Any = None) -> Any:
    """Which weights dropout keeps: bool (batch, heads, queries, keys), True = kept.

    The same numbers as attention(dropout=, seed=, offset=) uses on every device: a function of
    (seed, offset, batch index, head, i, j) only; i and j count from a sequence's start, in varlen
    calls too. Philox4x32-10 (Salmon et al. 2011).

    out         bool or uint8, without gaps, written and returned; on a GPU the numbers are made
                there, on stream

    ValueError for a dropout without a seed, sizes past 2**31 - 1, other shapes of out, seeds, and a
    stream without out.
    """
    if out is None and stream is not None:
        raise invalid("stream is given without out, but the mask is then made in host memory; give "
                      "out= on the GPU, or leave stream out", Reason.STREAM, "stream")
    place = None if out is None else _gpu.place_of(out, stream, None, name="out")
    plan = _plan_of(place, F32, integer(heads, "heads"), 64, dropout=dropout)
    check_seed(seed, plan.descriptor.dropout)
    args = ffi.new("flashattn_forward_args *")
    args.struct_size = ffi.sizeof("flashattn_forward_args")
    set_shape(ffi.addressof(args, "shape"), (batch, seqlen_q, seqlen_k, 0, 0, 0))
    set_seed(args.inputs, seed, offset)
    shape = (batch, heads, seqlen_q, seqlen_k)
    keep = np.empty(shape, np.bool_) if out is None else out
    seen = packed(keep, "out", MASK, shape, place)
    if out is not None:
        _gpu.check_order(out, "out", place)
        check_writable(seen, "out")
    with _gpu.launch(place):
        status = lib.flashattn_dropout_mask(plan._plan, args, _arrays.pointer(seen, _BYTE),
                                            _gpu.native_stream(place))
    if status:
        fail(status)
    return keep


@takes_description
def check(**description: Any) -> None:
    """Raises what Plan(**description) would raise; the keywords are those of describe()."""
    status = lib.flashattn_check(c_descriptor(describe(**description)))
    if status:
        fail(status)


@takes_description
def supported(**description: Any) -> bool:
    """Whether Plan(**description) would succeed. Arguments that nothing supports still raise."""
    try:
        check(**description)
    except UnsupportedError:
        return False
    return True


def set_log(level: int, callback: Optional[Callable[[LogLevel, str], Any]] = None) -> None:
    """Sends the library's log lines to a function, for the whole process.

    level       LogLevel.OFF: to none; ERROR: the sentence of every call that fails; INFO: also the
                kernel that each plan chose, and why; DEBUG: also who refused
    callback    called as callback(level, line), on the thread whose call logs, while others wait
                to log: it must not call the library. What it raises goes to sys.unraisablehook

    ValueError: another level, OFF with a callback, any other level without one.
    """
    global _log
    if (callback is None) != (level == LogLevel.OFF):
        raise invalid(f"level = {level!r} with callback = {callback!r}; give a callback to every "
                      "level but LogLevel.OFF", Reason.VALUE, "callback")
    function = callback
    held = ffi.NULL if function is None else ffi.callback(
        "flashattn_log_fn", lambda _, number, line: function(LogLevel(number), text(line)))
    with _log_lock:
        before, _log = _log, (_log, held)  # both, while the library changes over
        status = lib.flashattn_set_log(level, held, ffi.NULL)
        # It calls under a lock of its own: now it is done with one of them.
        _log = before if status else held
        if status:
            fail(status)
        # A callback must not outlive the interpreter. A log that is another's is left alone.
        atexit.unregister(_end_log)
        if function is not None:
            atexit.register(_end_log)


def _end_log() -> None:
    set_log(LogLevel.OFF)


def build_info() -> str:
    """One line: version, compiler, kernel families and instruction sets in this build."""
    return text(lib.flashattn_build_info())


def devices() -> List[DeviceInfo]:
    """The devices of this machine that this build can use."""
    found = []
    count = ffi.new("int32_t *")
    for kind in Device:
        if lib.flashattn_device_count(kind, count):
            continue
        for index in range(count[0]):
            p = ffi.new("flashattn_device_properties *",
                        (ffi.sizeof("flashattn_device_properties"),))
            status = lib.flashattn_device_info(kind, index, p)
            if status:
                fail(status)
            found.append(DeviceInfo(kind.name.lower(), index, text(p.name), text(p.isa), p.units,
                                    p.compute_capability, p.local_memory, p.memory))
    return found
