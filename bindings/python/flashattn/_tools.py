"""What goes beside attention: merging, dropout masks, questions to the library."""
from __future__ import annotations

import atexit
import threading
from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np

from . import _arrays, _gpu
from ._arrays import (F16, F32, FLOAT32, MASK, NAMES, DTypeLike, View, check_writable, dtype_code,
                      packed, view)
from ._calls import Call, run
from ._constants import Device, DeviceInfo, LogLevel, Reason
from ._describe import described, takes_description
from ._errors import UnsupportedError, fail, invalid
from ._inputs import Tensor, check_seed, rng_words
from ._library import ffi, lib, text
from ._members import extents
from ._names import says_options
from ._options import integer, uniform
from ._plan import Plan, c_descriptor, cached_plan, new_args

_FLOAT, _BYTE = ffi.typeof("float *"), ffi.typeof("uint8_t *")
_log_lock = threading.Lock()
_log: Any = ffi.NULL  # what the library calls: alive until it has another


@says_options
def merge(part_o: Sequence[Any], part_lse: Sequence[Any], *, layout: Optional[str] = None,
          o: Any = None, dtype_o: Optional[DTypeLike] = None,
          stream: Any = None, parallel: Any = None) -> Tuple[Any, Any]:
    """Merges attention over disjoint sets of keys: ring or cascade attention, split caches.

    part_o      the parts, each as attention() returned it: (batch, seqlen_q, heads_q, dim_v) in the
                order of layout, or (total_q, heads_q, dim_v)
    part_lse    their lse: float32 (batch, heads_q, seqlen_q), or (heads_q, total_q)
    o, dtype_o, stream, parallel  as in attention(); dtype_o=None: the dtype of the parts

    Returns (o, lse): lse = ln(sum exp(lse_p)), o = sum exp(lse_p - lse) o_p. Parts with
    lse = -inf count nothing. A sink must be in one part only. ValueError, TypeError,
    NotImplementedError as in attention().
    """
    if len(part_o) != len(part_lse) or not len(part_o):
        raise invalid(f"{len(part_o)} part_o and {len(part_lse)} part_lse; expected as many, and "
                      "at least one", Reason.SIZE, "part_lse")
    place = _gpu.place_of(part_o[0], stream, None, o, "part_o")
    views = [view(part, "part_o", place) for part in part_o]
    varlen = len(views[0].shape) == 3
    order = layout or "bshd"
    parts = [Tensor(part, order, 3 if varlen else 4, "part_o") for part in views]
    first = parts[0]
    for part in parts:
        if part.view.shape != first.view.shape or part.view.dtype != first.view.dtype:
            raise invalid(f"part_o are {_said(first.view)} and {_said(part.view)}; give parts of "
                          "one shape and dtype", Reason.SIZE, "part_o")
    call = Call("flashattn_merge_args", place, part_o[0], {})
    call.varlen_q = varlen
    call.sizes.update(batch=1 if varlen else first.batch, seqlen_q=first.rows,
                      total_q=first.rows if varlen else 0, heads_q=first.heads)
    call.put_all()
    lse_shape = extents(call.table["part_lse"], call.sizes, varlen)
    part_lses = [packed(lse, "part_lse", FLOAT32, lse_shape, place) for lse in part_lse]
    made = o is None
    if made:
        code = first.view.dtype if dtype_o is None else dtype_code(dtype_o, "dtype_o")
        o = call.make(first.view.shape, code, "o")
    else:
        _gpu.check_order(o, "o", place)
    seen = view(o, "o", place, made=made)
    check_writable(seen, "o")
    _arrays.check_shape(seen.shape, first.view.shape, "o")
    target = Tensor(seen, order, len(first.view.shape), "o")
    plan = _plan_of(place, target.view.dtype, heads_q=first.heads, dim_qk=first.dim,
                    varlen_q=varlen)
    lse, args = call.result("lse"), call.args
    tensors = ffi.new("flashattn_tensor[]", [part.c() for part in parts])
    pointers = ffi.new("float *[]", [ffi.cast(_FLOAT, part.pointer) for part in part_lses])
    args.part_o, args.part_lse, args.dtype_part = tensors, pointers, first.view.dtype
    args.parts, args.o = len(parts), target.c()
    call.run(lib.flashattn_merge, plan, parallel)
    return o, lse


def _said(array: View) -> str:
    return f"{NAMES[array.dtype]} {array.shape}"


def _plan_of(place: _arrays.Place, dtype: int, **chosen: Any) -> Plan:
    """A plan whose results are of a type; on a GPU also where no kernel computes in it."""
    if place is not None:
        chosen["device"] = place.device
        if dtype == F32:
            dtype, chosen["dtype_o"] = F16, F32
    return cached_plan((dtype,), uniform(chosen))


@says_options
def dropout_mask(batch: int, heads_q: int, seqlen_q: int, seqlen_kv: int, *, dropout: float,
                 rng_seed: Optional[int] = None, rng_offset: int = 0, keep: Any = None,
                 stream: Any = None, parallel: Any = None) -> Any:
    """Which weights dropout keeps: bool (batch, heads_q, seqlen_q, seqlen_kv), True = kept.

    The same numbers as attention(dropout=, rng_seed=, rng_offset=) uses on every device: a function
    of (seed, offset, batch index, head, i, j) only; i and j count from a sequence's start, in
    varlen calls too. Philox4x32-7 (Salmon et al. 2011).

    keep        bool or uint8, without gaps, written and returned; on a GPU the numbers are made
                there, on stream
    parallel    as in attention()

    ValueError for a dropout without a seed, sizes past 2**31 - 1, other shapes of keep, seeds, and
    a stream without keep.
    """
    if keep is None and stream is not None:
        raise invalid("stream is given without keep, but the mask is then made in host memory; "
                      "give keep= on the GPU, or leave stream out", Reason.STREAM, "stream")
    place = None if keep is None else _gpu.place_of(keep, stream, None, name="keep")
    plan = _plan_of(place, F32, heads_q=integer(heads_q, "heads_q"), dim_qk=64, dropout=dropout)
    check_seed(rng_seed is not None, plan.descriptor.dropout)
    args = new_args(dict(batch=batch, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv))
    for name, word in rng_words(rng_seed, rng_offset).items():
        setattr(args, name, word)
    shape = (batch, heads_q, seqlen_q, seqlen_kv)
    made = keep is None
    if made:
        keep = np.empty(shape, np.bool_)
    seen = packed(keep, "keep", MASK, shape, place)
    if not made:
        _gpu.check_order(keep, "keep", place)
        check_writable(seen, "keep")
    run(lambda stream: lib.flashattn_dropout_mask(plan._plan, args, _arrays.pointer(seen, _BYTE),
                                                  stream), args, place, parallel)
    return keep


@takes_description
def check(**description: Any) -> None:
    """Raises what Plan(**description) would raise; the keywords are those of describe()."""
    status = lib.flashattn_check(c_descriptor(described(description)), ffi.NULL)
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

    level       LogLevel.OFF: to none; ERROR: the message of every call that fails; INFO: also the
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
    """One line: version, compiler, instruction sets and GPU architectures in this build."""
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
            values: List[Any] = [getattr(p, name) for name in DeviceInfo._fields[2:]]
            found.append(DeviceInfo._make([kind.name.lower(), index, *[
                value if isinstance(value, int) else text(value) for value in values]]))
    return found
