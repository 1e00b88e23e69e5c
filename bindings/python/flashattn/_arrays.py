"""Arrays of any library as pointers, shapes and strides. Nothing is copied."""
from __future__ import annotations

from typing import Any, Dict, Optional, Sequence, Tuple, Union

import numpy as np

from . import _dlpack, _gpu
from ._constants import Dtype, Reason, Status
from ._errors import UnsupportedError, invalid, wrong_type
from ._library import ffi

Place = Optional[_gpu.Place]
F32, F16, BF16, F8, U8, I8 = (int(d) for d in (Dtype.F32, Dtype.F16, Dtype.BF16, Dtype.F8E4M3,
                                               Dtype.U8, Dtype.I8))
CACHE_8BIT = (F8, I8)
_BY_NAME: Dict[str, int] = {"float32": F32, "float16": F16, "bfloat16": BF16, "float8_e4m3fn": F8,
                            "uint8": U8, "bool": U8, "int8": I8}
NAMES = {F32: "float32", F16: "float16", BF16: "bfloat16", F8: "float8_e4m3fn", U8: "bool",
         I8: "int8"}
_SIZES = {F32: 4, F16: 2, BF16: 2, F8: 1, U8: 1, I8: 1}
_RESULTS = {code: np.dtype(NAMES[code]) for code in (F32, F16, U8, I8)}
# What the buffer protocol can carry in place of types that only ml_dtypes knows.
_RAW: Dict[int, Any] = {BF16: np.dtype(np.uint16), F8: np.dtype(np.uint8)}


class Kind:
    """The types that an argument may have, and what to do about any other."""

    __slots__ = ("names", "remedy", "seen")

    def __init__(self, names: Dict[str, int], remedy: str) -> None:
        self.names, self.remedy = names, remedy
        # Grows by the types of ml_dtypes when they are seen, so that it stays optional.
        self.seen: Dict[np.dtype, int] = {np.dtype(n): code for n, code in names.items()
                                          if n not in ("bfloat16", "float8_e4m3fn")}

    def refusal(self, name: str, dtype: str) -> Exception:
        return wrong_type(f"{name} has dtype {dtype}; {self.remedy}", name)


def _kind(remedy: str, *names: str) -> Kind:
    return Kind({name: _BY_NAME[name] for name in names}, remedy)


# The library itself says which 8-bit types it computes.
TENSOR = _kind("convert it to float32, float16 or bfloat16", "float32", "float16", "bfloat16",
               "float8_e4m3fn", "int8")
BIAS = _kind("convert a mask to bool (True: visible), a bias to float32, float16 or bfloat16",
             "float32", "float16", "bfloat16", "bool", "uint8")
MASK = _kind("convert it to bool", "bool", "uint8")
FLOAT32 = _kind("convert it to float32", "float32")
INT32 = Kind({"int32": 0}, "convert it to int32")
# By the type that the header gives an array.
KINDS = {"dtype_bias": BIAS, "u8": MASK, "f32": FLOAT32, "i32": INT32,
         "u32": Kind({"uint32": 0, "int32": 0}, "convert it to uint32"),
         "u64": Kind({"uint64": 0, "int64": 0}, "convert it to uint64"), "dtype_rotary": TENSOR}
# Arrays with an entry a sequence, head or block are converted to these types, from those.
_SMALL: Dict[str, Tuple[Any, str]] = {
    "u8": (np.dtype(np.uint8), "bu"), "f32": (np.dtype(np.float32), "fiuV"),
    "i32": (np.dtype(np.int32), "iu"), "u32": (np.dtype(np.uint32), "iu"),
    "u64": (np.dtype(np.uint64), "iu")}  # bfloat16 is of kind V
_TYPES = {"dtype_bias": BIAS}  # of dtype_code(); others are TENSOR
_VOID = ffi.typeof("void *")
DTypeLike = Union[str, type, np.dtype, Dtype]


def dtype_code(dtype: Any, field: str = "dtype") -> int:
    """enum flashattn_dtype of a name, a NumPy or ml_dtypes type, or anything named like one."""
    if isinstance(dtype, int) and not isinstance(dtype, bool):
        return int(dtype)
    known = _TYPES.get(field, TENSOR).names
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None)
    if name not in known:
        try:
            name = np.dtype(dtype).name if dtype is not None else None
        except TypeError:
            name = str(dtype).rpartition(".")[2]  # "torch.bfloat16"
    if name not in known:
        raise wrong_type(f"{field} = {dtype!r} is none of {', '.join(known)}", field)
    return known[name]


def numpy_dtype(code: int) -> np.dtype:
    """The NumPy type in which a result is returned."""
    if code in _RESULTS:
        return _RESULTS[code]
    try:
        import ml_dtypes
    except ImportError:
        raise wrong_type(f"a result of type {NAMES[code]} needs the package ml_dtypes; install "
                         "it, or give o= or dtype_o=\"float32\"", "o") from None
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


def packed_address(array: Any, code: int) -> Any:
    """A pointer to an array without gaps that new() made. Reading the buffer costs a tenth of what
    reading __array_interface__ does, but needs a type that buffers know."""
    if type(array) is not np.ndarray:
        return ffi.cast(_VOID, array.data_ptr())
    return ffi.from_buffer(array.view(_RAW[code]) if code in _RAW else array)


def _numpy_view(array: np.ndarray, name: str, kind: Kind) -> View:
    dtype = array.dtype
    code = kind.seen.get(dtype)
    if code is None:
        code = _unseen_dtype(dtype, name, kind)
    steps, size, flags = array.strides, dtype.itemsize, array.flags
    if flags.c_contiguous:
        address = packed_address(array, code)
    else:
        if any([step % size for step in steps]):
            raise invalid(f"{name} has strides of {steps} bytes, no multiples of its {size}-byte "
                          "elements; copy it with numpy.ascontiguousarray", Reason.STRIDE, name)
        address = ffi.cast(_VOID, array.__array_interface__["data"][0])
    return View(address, code, array.shape, steps, size, flags.writeable, array)


def _unseen_dtype(dtype: np.dtype, name: str, kind: Kind) -> int:
    if dtype.name not in kind.names:
        raise kind.refusal(name, dtype.name)
    if not dtype.isnative:
        raise wrong_type(f"{name} has dtype {dtype.name} in foreign byte order; convert it with "
                         ".astype(x.dtype.newbyteorder(\"=\"))", name)
    code = kind.seen[dtype] = kind.names[dtype.name]
    return code


def view(array: Any, name: str, place: Place = None, kind: Kind = TENSOR,
         made: bool = False) -> View:
    """A NumPy array, or anything with __dlpack__ or __array_interface__, as a View; on a GPU: with
    __dlpack__ or __cuda_array_interface__. made: by new(), for this call."""
    if type(array) is View:
        return array
    if place is not None:
        return _device_view(array, name, place, kind, made)
    if type(array) is np.ndarray:
        return _numpy_view(array, name, kind)
    tensors = _gpu.on_host(array)
    if tensors is not None:
        address, dtype, shape, steps, size = tensors.read(array, name)
        if dtype not in kind.names:
            raise kind.refusal(name, dtype)
        return View(ffi.cast(_VOID, address), kind.names[dtype], shape, steps, size, True, array,
                    tensors.copy)
    if isinstance(array, np.ma.MaskedArray):
        raise wrong_type(f"{name} is a masked array, whose mask would be ignored; give the mask as "
                         "bias=", name)
    if isinstance(array, np.ndarray):
        return _numpy_view(np.asarray(array), name, kind)
    if hasattr(array, "__dlpack__"):
        export = _dlpack.read(array)
        if not export.on_cpu:
            raise UnsupportedError(f"{name} lies on a device that is neither the CPU nor a GPU of "
                                   "NVIDIA, or q lies in host memory and it does not; move it",
                                   Status.ERROR_UNSUPPORTED, Reason.NO_DEVICE, name)
        if export.dtype not in kind.names:
            raise kind.refusal(name, export.dtype)
        code = kind.names[export.dtype]
        return View(ffi.cast(_VOID, export.pointer), code, export.shape,
                    tuple([stride * _SIZES[code] for stride in export.strides]), _SIZES[code],
                    export.writable, export.owner)
    if hasattr(array, "__array_interface__"):
        return _numpy_view(np.asarray(array), name, kind)
    raise wrong_type(f"{name} is a {type(array).__name__}; expected a NumPy array or an object "
                     "with __dlpack__ or __array_interface__", name)


def check_writable(array: View, name: str) -> None:
    if array.writable:
        return
    why = ("" if isinstance(array.owner, np.ndarray) else
           " by what its library says: JAX's arrays never change, and DLPack before 1.0 cannot say "
           "which may")
    raise invalid(f"{name} is read-only{why}; give an array that may be written, such as NumPy's "
                  "or PyTorch's, or none and take what is returned", Reason.VALUE, name)


def _device_view(array: Any, name: str, place: _gpu.Place, kind: Kind, made: bool = False) -> View:
    if not _gpu.is_array(array):
        raise wrong_type(f"{name} is a {type(array).__name__}; q lies on {place.device}: expected "
                         "an array there, with __dlpack__ or __cuda_array_interface__", name)
    facts, owner = _gpu.facts(array, name, place, made)
    if facts.dtype not in kind.names:
        raise kind.refusal(name, facts.dtype)
    library = _gpu.library_of(array)
    return View(ffi.cast(_VOID, facts.address), kind.names[facts.dtype], facts.shape, facts.steps,
                facts.size, facts.writable, owner,
                library.copy if library else "copy it to an array without gaps")


def pointer(array: Any, ctype: Any = _VOID) -> Any:
    """Of an array of a plain type or a tensor, made by new(), or of a View of one."""
    if type(array) is View:
        return ffi.cast(ctype, array.pointer)
    if type(array) is not np.ndarray:
        return ffi.cast(ctype, array.data_ptr())
    if array.flags.c_contiguous:
        return ffi.cast(ctype, ffi.from_buffer(array))
    return ffi.cast(ctype, array.__array_interface__["data"][0])


def small(array: Any, name: str) -> np.ndarray:
    """As NumPy sees it; a list will do for what has an entry a sequence or a head."""
    if type(array) is not np.ndarray and _gpu.is_array(array) and _gpu.index_of(array) is not None:
        raise invalid(f"{name} lies on a GPU, but q in host memory; move it there", Reason.VALUE,
                      name)
    tensors = _gpu.on_host(array)
    if tensors is not None:
        return tensors.as_numpy(array, name)
    if hasattr(array, "__dlpack__") and not hasattr(array, "__array__"):
        return np.from_dlpack(array)
    return np.asarray(array)


def beside(array: Any, name: str, kind: str, place: Place) -> View:
    """An array that comes beside q, k and v, of a type of the header's. In host memory what has an
    entry a sequence, head or block is converted; a bias, and what lies on a GPU, is not."""
    if place is not None or kind not in _SMALL or type(array) is View:
        return view(array, name, place, KINDS[kind])
    wanted, kinds = _SMALL[kind]
    given = array if type(array) is np.ndarray else small(array, name)
    if given.dtype is not wanted:
        if given.size and (given.dtype.kind not in kinds or
                           (kind == "u8" and given.dtype.itemsize > 1)):
            raise KINDS[kind].refusal(name, str(given.dtype))
        if kind == "i32" and given.dtype != wanted and given.size:
            if int(given.max()) > 0x7FFFFFFF or int(given.min()) < -0x80000000:
                raise invalid(f"{name} holds values from {given.min()} to {given.max()}, past the "
                              "range of int32; give at most 2147483647", Reason.LENGTHS, name)
        same = given.dtype.itemsize == wanted.itemsize and wanted.kind in "iu"
        given = given.view(wanted) if same and given.dtype.isnative else given.astype(wanted)
    return View(_address(given), 0, given.shape, given.strides, wanted.itemsize, True, given)


def _address(array: np.ndarray) -> Any:
    if array.flags.c_contiguous:
        return ffi.from_buffer(array)
    return ffi.cast(_VOID, array.__array_interface__["data"][0])


def new(shape: Sequence[int], code: int, zero: bool, place: Place, name: str,
        tensors: Any = None) -> Any:
    """An array for a result: of the library that q comes from on a GPU; in host memory a tensor of
    tensors, which on_host(q) gave, else NumPy's."""
    if place is not None:
        return _gpu.new(shape, NAMES[code], zero, place, name)
    if tensors is not None:
        return tensors.new_on_host(shape, NAMES[code], zero)
    return (np.zeros if zero else np.empty)(shape, numpy_dtype(code))


def packed(array: Any, name: str, kind: Kind, shape: Sequence[int], place: Place = None) -> View:
    """An array that must be without gaps, of one shape: lse and its gradient, a dropout mask."""
    result = view(array, name, place, kind)
    check_shape(result.shape, shape, name)
    if type(result.owner) is np.ndarray and result.owner.flags.c_contiguous:
        return result
    check_packed(result, name)
    return result


def check_packed(array: View, name: str) -> None:
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
