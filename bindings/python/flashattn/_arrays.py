"""Arrays of any library as pointers, shapes and strides. Nothing is copied."""
from __future__ import annotations

from typing import Any, Dict, Optional, Sequence, Tuple, Union

import numpy as np

from . import _dlpack, _gpu
from ._constants import Dtype, Reason, Status
from ._errors import UnsupportedError, invalid, wrong_type
from ._library import ffi

Place = Optional[_gpu.Place]
F32, F16, BF16, F8, U8 = (int(d) for d in (Dtype.F32, Dtype.F16, Dtype.BF16, Dtype.F8E4M3,
                                           Dtype.U8))
_BY_NAME: Dict[str, int] = {"float32": F32, "float16": F16, "bfloat16": BF16, "float8_e4m3fn": F8,
                            "uint8": U8, "bool": U8}
NAMES = {F32: "float32", F16: "float16", BF16: "bfloat16", F8: "float8_e4m3fn", U8: "bool"}
_SIZES = {F32: 4, F16: 2, BF16: 2, F8: 1, U8: 1}
# Grows by the types of ml_dtypes when they are seen, so that it stays optional.
_BY_DTYPE: Dict[np.dtype, int] = {np.dtype(n): _BY_NAME[n]
                                  for n in ("float32", "float16", "uint8", "bool")}
_RESULTS = {code: np.dtype(NAMES[code]) for code in (F32, F16, U8)}
# What the buffer protocol can carry in place of types that only ml_dtypes knows.
_RAW: Dict[int, Any] = {BF16: np.dtype(np.uint16), F8: np.dtype(np.uint8)}
_INT32 = np.dtype(np.int32)
_VOID = ffi.typeof("void *")
DTypeLike = Union[str, type, np.dtype, Dtype]


def dtype_code(dtype: Any, field: str = "dtype") -> int:
    """enum flashattn_dtype of a name, a NumPy or ml_dtypes type, or anything named like one."""
    if isinstance(dtype, int):
        return int(dtype)
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None)
    if name not in _BY_NAME:
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = str(dtype).rpartition(".")[2]  # "torch.bfloat16"
    if name not in _BY_NAME:
        raise wrong_type(f"{field} = {dtype!r} is none of {', '.join(_BY_NAME)}", field)
    return _BY_NAME[name]


def numpy_dtype(code: int) -> np.dtype:
    """The NumPy type in which a result is returned."""
    if code in _RESULTS:
        return _RESULTS[code]
    try:
        import ml_dtypes
    except ImportError:
        raise wrong_type(f"a result of type {NAMES[code]} needs the package ml_dtypes; install "
                         "it, or give out= or out_dtype=\"float32\"", "out") from None
    return _RESULTS.setdefault(code, np.dtype(getattr(ml_dtypes, NAMES[code])))


class View:
    """An array as the C library sees it. pointer is a cffi one, steps are strides in bytes, size is
    that of an element, owner keeps the memory, remedy mends its strides."""

    __slots__ = ("pointer", "dtype", "shape", "steps", "size", "writable", "owner", "remedy")

    def __init__(self, pointer: Any, dtype: int, shape: Tuple[int, ...], steps: Tuple[int, ...],
                 size: int, writable: bool, owner: Any,
                 remedy: str = "copy it with numpy.ascontiguousarray") -> None:
        self.pointer = pointer
        self.dtype = dtype
        self.shape = shape
        self.steps = steps
        self.size = size
        self.writable = writable
        self.owner = owner
        self.remedy = remedy

    @property
    def strides(self) -> Tuple[int, ...]:
        """In elements."""
        return tuple([step // self.size for step in self.steps])


def packed_address(array: np.ndarray, code: int) -> Any:
    """A pointer to an array without gaps. Reading the buffer costs a tenth of what reading
    __array_interface__ does, but needs a type that buffers know."""
    return ffi.from_buffer(array.view(_RAW[code]) if code in _RAW else array)


def _numpy_view(array: np.ndarray, name: str) -> View:
    dtype = array.dtype
    code = _BY_DTYPE.get(dtype)
    if code is None:
        code = _unseen_dtype(dtype, name)
    steps, size, flags = array.strides, dtype.itemsize, array.flags
    if flags.c_contiguous:
        address = packed_address(array, code)
    else:
        if any([step % size for step in steps]):
            raise invalid(f"{name} has strides of {steps} bytes, no multiples of its {size}-byte "
                          "elements; copy it with numpy.ascontiguousarray", Reason.STRIDE, name)
        address = ffi.cast(_VOID, array.__array_interface__["data"][0])
    return View(address, code, array.shape, steps, size, flags.writeable, array)


def _unseen_dtype(dtype: np.dtype, name: str) -> int:
    if dtype.name not in _BY_NAME or not dtype.isnative:
        order = "" if dtype.isnative else " in foreign byte order"
        raise wrong_type(f"{name} has dtype {dtype.name}{order}; convert it to one of "
                         f"{', '.join(_BY_NAME)}", name)
    code = _BY_DTYPE[dtype] = _BY_NAME[dtype.name]
    return code


def view(array: Any, name: str, place: Place = None) -> View:
    """A NumPy array, or anything with __dlpack__ or __array_interface__, as a View; on a GPU: with
    __dlpack__ or __cuda_array_interface__."""
    if type(array) is View:
        return array
    if place is not None:
        return _device_view(array, name, place, _BY_NAME)
    if type(array) is np.ndarray:
        return _numpy_view(array, name)
    if isinstance(array, np.ma.MaskedArray):
        raise wrong_type(f"{name} is a masked array, whose mask would be ignored; give the mask as "
                         "bias=", name)
    if isinstance(array, np.ndarray):
        return _numpy_view(np.asarray(array), name)
    if hasattr(array, "__dlpack__"):
        export = _dlpack.read(array)
        if not export.on_cpu:
            raise UnsupportedError(f"{name} lies on a device that is neither the CPU nor a GPU of "
                                   "NVIDIA, or q lies in host memory and it does not",
                                   Status.ERROR_UNSUPPORTED, Reason.NO_DEVICE, name)
        if export.dtype not in _BY_NAME:
            raise wrong_type(f"{name} has dtype {export.dtype}; convert it to one of "
                             f"{', '.join(_BY_NAME)}", name)
        code = _BY_NAME[export.dtype]
        return View(ffi.cast(_VOID, export.pointer), code, export.shape,
                    tuple([stride * _SIZES[code] for stride in export.strides]), _SIZES[code],
                    export.writable, export.owner)
    if hasattr(array, "__array_interface__"):
        return _numpy_view(np.asarray(array), name)
    raise wrong_type(f"{name} is a {type(array).__name__}; expected a NumPy array or an object "
                     "with __dlpack__ or __array_interface__", name)


def _device_view(array: Any, name: str, place: _gpu.Place, codes: Dict[str, int]) -> View:
    if not _gpu.is_array(array):
        raise wrong_type(f"{name} is a {type(array).__name__}; q lies on {place.device}: expected "
                         "an array there, with __dlpack__ or __cuda_array_interface__", name)
    facts, owner = _gpu.facts(array, name, place)
    if facts.dtype not in codes:
        raise wrong_type(f"{name} has dtype {facts.dtype}; convert it to one of "
                         f"{', '.join(codes)}", name)
    library = _gpu.library_of(array)
    return View(ffi.cast(_VOID, facts.address), codes[facts.dtype], facts.shape, facts.steps,
                facts.size, facts.writable, owner,
                library.copy if library else "copy it to an array without gaps")


def _device_packed(array: Any, name: str, place: _gpu.Place, codes: Dict[str, int]) -> View:
    seen = _device_view(array, name, place, codes)
    _check_packed(seen, name)
    return seen


def pointer(array: Any, ctype: Any = _VOID) -> Any:
    """Of a packed array of a plain type, or of a View of one."""
    if type(array) is View:
        return ffi.cast(ctype, array.pointer)
    return ffi.cast(ctype, ffi.from_buffer(array))


def small(array: Any) -> np.ndarray:
    """As NumPy sees it; a list will do for what has an entry a sequence or a head."""
    if hasattr(array, "__dlpack__") and not hasattr(array, "__array__"):
        return np.from_dlpack(array)
    return np.asarray(array)


def int32(array: Any, name: str, shape: Tuple[Optional[int], ...], place: Place = None) -> Any:
    """Lengths, offsets and page numbers: a packed int32 array. Other integers are converted, but
    on a GPU."""
    if place is not None:
        seen = _device_packed(array, name, place, {"int32": 0})
        check_shape(seen.shape, shape, name)
        return seen
    if type(array) is np.ndarray and array.dtype is _INT32 and array.flags.c_contiguous:
        check_shape(array.shape, shape, name)
        return array
    given = small(array)
    if given.dtype.kind not in "iu" and given.size:
        raise wrong_type(f"{name} has dtype {given.dtype}; expected integers", name)
    check_shape(given.shape, shape, name)
    if given.dtype != np.int32 and given.size:
        if int(given.max()) > 0x7FFFFFFF or int(given.min()) < -0x80000000:
            raise invalid(f"{name} holds a value past the range of int32", Reason.LENGTHS, name)
    return np.ascontiguousarray(given, dtype=np.int32)


def float32(array: Any, name: str, place: Place = None) -> Any:
    """Per-head numbers (slopes, sinks): a packed float32 array. Other floats are converted, but on
    a GPU."""
    if place is not None:
        return _device_packed(array, name, place, {"float32": F32})
    given = small(array)
    if given.dtype.kind not in "fiuV":  # bfloat16 is of kind V
        raise wrong_type(f"{name} has dtype {given.dtype}; expected floats", name)
    return np.ascontiguousarray(given, dtype=np.float32)


def mask_bytes(array: Any, name: str, place: _gpu.Place) -> View:
    """A packed array of bytes on a GPU."""
    return _device_packed(array, name, place, {"bool": U8, "uint8": U8})


def new(shape: Sequence[int], code: int, zero: bool, place: Place, name: str) -> Any:
    """An array for a result: NumPy's, on a GPU of the library that q comes from."""
    if place is not None:
        return _gpu.new(shape, NAMES[code], zero, place, name)
    return (np.zeros if zero else np.empty)(shape, numpy_dtype(code))


def packed(array: Any, name: str, code: int, shape: Sequence[int], place: Place = None) -> View:
    """An array that must be without gaps, of one type and shape: lse and its gradient."""
    result = view(array, name, place)
    if result.dtype != code:
        raise wrong_type(f"{name} has dtype {NAMES[result.dtype]}; expected {NAMES[code]}", name)
    check_shape(result.shape, shape, name)
    if type(result.owner) is np.ndarray and result.owner.flags.c_contiguous:
        return result
    _check_packed(result, name)
    return result


def _check_packed(array: View, name: str) -> None:
    step = 1
    for size, stride in zip(reversed(array.shape), reversed(array.strides)):
        if size > 1 and stride != step:
            raise invalid(f"{name} has gaps: strides {array.strides} for shape {array.shape}; "
                          f"{array.remedy}", Reason.STRIDE, name)
        step *= size


def check_shape(shape: Sequence[int], expected: Sequence[Optional[int]], name: str) -> None:
    """None stands for any size."""
    if shape == expected:
        return
    if len(shape) != len(expected) or any(e not in (None, s) for s, e in zip(shape, expected)):
        wanted = ", ".join("any" if e is None else str(e) for e in expected)
        raise invalid(f"{name} has shape {tuple(shape)}; expected ({wanted})", Reason.SIZE, name)
