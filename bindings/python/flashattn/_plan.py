"""Plans: kept for reuse, and run with a workspace that each thread keeps."""
from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any, Dict, List, Optional, Tuple, Union

import numpy as np

from . import _arrays, _events, _gpu, _parallel
from ._arrays import FLOAT32, MASK, NAMES, View, check_writable, view
from ._constants import (ARRAYS, Bias, Descriptor, Device, Dtype, Feature, Layout, Mask, Op,
                         PlanInfo, Reason)
from ._describe import describe, described, takes_description
from ._errors import fail, invalid, misfit, wrong_type
from ._inputs import ARGS, FACTS, Inputs, Tensor, axes, first_given, set_sizes
from ._library import ffi, lib, text
from ._members import NUMBERS, written

_FORWARD, _BACKWARD = int(Op.FORWARD), int(Op.BACKWARD)
_LSE = int(Feature.LSE)
# Results beside o, dq, dk and dv: those that a feature asks for, by the role of the array, and
# those that a caller may give.
_RESULTS: Dict[str, List[Tuple[str, int]]] = {
    role: [(name, int(bit)) for name, array in ARRAYS[ARGS].items() if array.role == role
           for bit in Feature if f"with {bit.name} " in array.condition + " "]
    for role in ("output", "gradient")}
OUTPUTS = tuple([name for name, array in ARRAYS[ARGS].items()
                 if array.role == "output" and array.condition.startswith("optional")])
_DESC, _ARGS = ffi.typeof("flashattn_desc *"), ffi.typeof("flashattn_args *")
_PROPERTIES = ffi.typeof("flashattn_plan_properties *")
_INT64, _FLOAT = ffi.typeof("int64_t *"), ffi.typeof("float *")
_DESC_SIZE, _ARGS_SIZE = ffi.sizeof("flashattn_desc"), ffi.sizeof("flashattn_args")
# Arrays decide these members of the descriptor.
_OF_ARRAYS = ("device", "device_index", "layout", "bias",
              *[fact for fact in FACTS if fact in Descriptor._fields])
# Axes of "bshd" and "thd": the order of packed arrays.
_PACKED = (axes("bshd", 4), axes("thd", 3))
_SIZES = ("batch", "seqlen_q", "seqlen_kv", "total_q", "total_kv")
_thread = threading.local()
# Calls that flashattn.torch prepared, by what they depend on: they hold plans.
prepared: Dict[Any, Any] = {}
# Likewise calls of attention(), see _repeat.py; and how often one was repeated.
repeated: Dict[Any, Any] = {}
repeats = [0]


def c_descriptor(descriptor: Descriptor) -> Any:
    values = (_DESC_SIZE, *descriptor)
    try:
        return ffi.new(_DESC, values)
    except (OverflowError, TypeError):
        raise misfit([(name, field.type, value) for (name, field), value in
                      zip(_DESC.item.fields, values)]) from None


def new_args(sizes: Dict[str, int]) -> Any:
    """flashattn_args of sizes. Zero: whoever adds a tensor gives its strides."""
    args = ffi.new(_ARGS)
    args.struct_size = _ARGS_SIZE
    set_sizes(args, sizes)
    return args


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

        plan = flashattn.Plan(dtype="float32", heads_q=8, dim_qk=64, causal=True, return_lse=True)
        o, lse = plan.forward(q, k, v)

    descriptor is flashattn_desc with every default resolved. Raises ValueError,
    NotImplementedError, MemoryError with the library's message.
    """

    __slots__ = ("_plan", "_last_size", "descriptor", "__weakref__")

    @takes_description
    def __init__(self, **description: Any) -> None:
        descriptor = described(description)
        plan = ffi.new("flashattn_plan **")
        status = lib.flashattn_plan_create(c_descriptor(descriptor), plan, ffi.NULL)
        if status:
            fail(status)
        self._plan = ffi.gc(plan[0], lib.flashattn_plan_destroy)
        resolved = ffi.new(_DESC, (_DESC_SIZE,))
        status = lib.flashattn_plan_desc(self._plan, resolved)
        if status:
            fail(status)
        self.descriptor = Descriptor(*[getattr(resolved, name) for name in Descriptor._fields])
        # Programs repeat their sizes: (operation, sizes, bytes) of the last call.
        self._last_size: Tuple[int, Dict[str, int], int] = (0, {}, 0)

    def __repr__(self) -> str:
        d = self.descriptor
        return (f"<flashattn.Plan {Dtype(d.dtype).name.lower()}, {d.heads_q} heads on "
                f"{d.heads_kv}, dim {d.dim_qk}/{d.dim_v}>")

    def workspace_size(self, op: Union[str, int] = "forward", **sizes: int) -> int:
        """Bytes of scratch memory that an operation needs. Without sizes: for the plan's maxima.

        sizes: batch, seqlen_q, seqlen_kv, and of packed sequences total_q, total_kv, as in
        flashattn_args. ValueError: sizes without batch or past 2**31 - 1 (totals: 2**63 - 1), no
        maximum where one is needed.
        """
        size = ffi.new(_INT64)
        status = lib.flashattn_workspace_size(self._plan, op_code(op), _sizes_only(sizes), size)
        if status:
            fail(status)
        return size[0]

    def info(self, op: Union[str, int] = "forward", **sizes: int) -> PlanInfo:
        """The kernel and its cost for sizes; these and errors as in workspace_size()."""
        properties = ffi.new(_PROPERTIES, (ffi.sizeof(_PROPERTIES.item),))
        status = lib.flashattn_plan_info(self._plan, op_code(op), _sizes_only(sizes), properties)
        if status:
            fail(status)
        values: Any = [getattr(properties, name) for name in PlanInfo._fields]
        return PlanInfo._make(v if isinstance(v, int) else text(v) for v in values)

    def forward(self, q: Any, k: Any, v: Any, *, o: Any = None, **arrays: Any) -> Any:
        """Runs the plan. arrays: those of attention(), attention_varlen(), attention_paged().

        Returns o, or (o, lse) for a plan with return_lse.
        """
        given = outputs(arrays)
        inputs = Inputs(q, k, v, o=o, **self._numbers(arrays))
        self._fits(inputs)
        return self.run_forward(inputs, o, given=given)

    def backward(self, dout: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, dlse: Any = None,
                 dq: Any = None, dk: Any = None, dv: Any = None, **arrays: Any) -> Tuple[Any, ...]:
        """Gradients of a plan made with backward=True; see attention_backward()."""
        inputs = Inputs(q, k, v, o=first_given(dq, dk, dv), **self._numbers(arrays))
        self._fits(inputs)
        return self.run_backward(inputs, dout, o, lse, dlse, dq, dk, dv)

    def _numbers(self, arrays: Dict[str, Any]) -> Dict[str, Any]:
        """The arrays, and what the plan knows of their shapes."""
        return dict({name: getattr(self.descriptor, name) for name in NUMBERS}, **arrays)

    def _fits(self, inputs: Inputs) -> None:
        place = inputs.place
        mine, theirs = self.descriptor, describe(
            **dict(zip(FACTS, inputs.facts())), device=place.device if place else "cpu")
        for name in _OF_ARRAYS:
            plans, arrays = getattr(mine, name), getattr(theirs, name)
            if plans != arrays:
                raise invalid(f"{name} = {_shown(name, arrays)} by the arrays given, but the plan "
                              f"is made for {_shown(name, plans)}; make one for them",
                              Reason.VALUE, name)
        # To the library lists without entries, which need no array.
        if mine.mask & Mask.BLOCK_LISTS and "block_index" not in inputs.seen:
            raise invalid("block_index is not given, but the plan is made with block_lists; give "
                          "it, or make a plan without", Reason.NULL_POINTER, "block_index")

    def run_forward(self, inputs: Inputs, o: Any, seen: Optional[View] = None,
                    given: Optional[Dict[str, Any]] = None) -> Any:
        """forward() for inputs that are known to fit. given: those of OUTPUTS that are."""
        inputs.check_seed(self.descriptor.dropout)
        args = new_args(inputs.sizes)
        inputs.fill(args)
        o, args.o = _output(o, "o", inputs.q, inputs.v.dim, self.descriptor.dtype_o, inputs, seen)
        made = self._results(inputs, args, "output")
        if given:
            for name, array in given.items():
                inputs.put(args, name, written(array, name, ARRAYS[ARGS][name].type, inputs.place))
        self._run(lib.flashattn_forward, _FORWARD, args, inputs)
        return (o, *made) if made else o

    def _results(self, inputs: Inputs, args: Any, role: str) -> List[Any]:
        features = self.descriptor.features
        return [inputs.result(args, name) for name, bit in _RESULTS[role] if features & bit]

    def run_backward(self, inputs: Inputs, dout: Any, o: Any, lse: Any, dlse: Any, dq: Any,
                     dk: Any, dv: Any) -> Tuple[Any, ...]:
        """backward() for inputs that are known to fit."""
        inputs.check_seed(self.descriptor.dropout)
        args = new_args(inputs.sizes)
        inputs.fill(args)
        q, k, v, place = inputs.q, inputs.k, inputs.v, inputs.place
        dtype_o, dtype_grad = self.descriptor.dtype_o, self.descriptor.dtype_grad
        # The views live to the end of this function, and so does what they point to.
        seen = {name: view(array, name, place) for name, array in (("o", o), ("dout", dout))}
        for name, array in seen.items():
            setattr(args, name, _like_output(array, name, q, v.dim, dtype_o, inputs).c())
        for name, array in (("lse", lse), ("dlse", dlse)):
            if array is not None:
                inputs.put(args, name, view(array, name, place, FLOAT32))
        results = []
        for name, array, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
            code = dtype_grad or like.view.dtype  # without BACKWARD the library refuses
            array, tensor = _output(array, name, like, like.dim, code, inputs)
            setattr(args, name, tensor)
            results.append(array)
        results += self._results(inputs, args, "gradient")
        self._run(lib.flashattn_backward, _BACKWARD, args, inputs)
        return tuple(results)

    def _run(self, function: Any, op: int, args: Any, inputs: Inputs) -> None:
        last_op, last_sizes, size = self._last_size
        if op != last_op or inputs.sizes != last_sizes:
            needed = ffi.new(_INT64)
            status = lib.flashattn_workspace_size(self._plan, op, args, needed)
            if status:
                fail(status)
            size = needed[0]
            self._last_size = (op, inputs.sizes, size)
        place, pool = inputs.place, inputs.pool
        if pool is not None:
            _parallel.put(args, pool)
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
        if pool is not None and pool.error is not None:
            raise pool.error
        if status:
            fail(status)


def outputs(options: Dict[str, Any]) -> Dict[str, Any]:
    """Takes the results that are given out of options."""
    given = {}
    for name in OUTPUTS:
        array = options.pop(name, None)
        if array is not None:
            given[name] = array
    return given


def _shown(field: str, value: Any) -> Any:
    """A number of the descriptor as its enumerators call it."""
    if field.startswith("dtype"):
        return NAMES.get(value, "none")
    if field == "device":
        return Device(value).name.lower()
    if field in ("layout", "bias"):
        bits: Any = Layout if field == "layout" else Bias
        return " and ".join(bit.name.lower() for bit in bits if bit & value) or "none"
    return value


def _sizes_only(sizes: Dict[str, int]) -> Any:
    """flashattn_args of sizes; NULL without any."""
    for name in sizes:
        if name not in _SIZES:
            raise TypeError(f"unexpected size {name!r}; there are {', '.join(_SIZES)}")
    if not sizes:
        return ffi.NULL
    if sizes.get("batch") is None:
        raise invalid("sizes are given without batch, and would be ignored; give batch, too, or no "
                      "size for the plan's maxima", Reason.SIZE, "batch")
    return new_args(sizes)


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
        array = _arrays.new(shape, code, inputs.ragged, place, name, inputs.tensors)
        if place is None and model.axes in _PACKED:
            return array, (_arrays.packed_address(array, code), -1, -1, -1)
        made = view(array, name, place, made=True)
        return array, Tensor(made, inputs.layout, len(shape), name).c()
    if seen is None:
        seen = view(array, name, inputs.place)
    _gpu.check_order(array, name, inputs.place)
    check_writable(seen, name)
    return array, _like_output(seen, name, model, dim, code, inputs).c()


def dbias_strides(shape: Tuple[int, ...]) -> Tuple[int, int, int]:
    """Of a dbias without gaps, shaped like the bias. A stride of zero sums over the index: where
    the bias is broadcast."""
    batch, heads, rows, keys = (1,) * (4 - len(shape)) + shape
    return (0 if batch == 1 else heads * rows * keys, 0 if heads == 1 else rows * keys,
            0 if rows == 1 else keys)


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
    return {"plans": info.currsize, "hits": info.hits + repeats[0], "misses": info.misses}


def clear_cache() -> None:
    """Lets go of all kept plans, of the calling thread's workspace, and of arrays that GPUs have
    done with."""
    cached_plan.cache_clear()
    prepared.clear()
    repeated.clear()
    repeats[0] = 0
    _thread.workspace = None
    _events.release()
