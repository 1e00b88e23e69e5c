"""Reads a DLPack capsule: where an array of another library lies, without copying it.

NumPy's own reader refuses bfloat16, so the structure is read here (dmlc/dlpack, dlpack.h, versions
0.x and 1.x). The capsule is not renamed: it stays the owner, and gives the memory back when it is
collected.
"""
from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, Optional, Tuple

_KIND = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool", 10: "float8_e4m3fn"}
_CPU = (1, 3, 11, 13)  # kDLCPU; memory that the CPU can read too: CUDA host, ROCm host, managed
_READ_ONLY = 1
# Libraries all of whose arrays may be written. Before DLPack 1.0 capsules do not say whether theirs
# may; JAX's, which never change, are such.
_WRITABLE = ("torch", "cupy")


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32),
                ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


class _Versioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32),
                ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
                ("flags", ctypes.c_uint64), ("tensor", _Tensor)]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)


class Export(NamedTuple):
    pointer: int
    dtype: str  # "float32", "bfloat16", "bool", ...
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]  # elements
    on_cpu: bool
    writable: bool
    owner: Any
    itemsize: int


def read(array: Any, stream: Optional[int] = None) -> Export:
    """The contents of array.__dlpack__(). Raises what the exporter raises (BufferError).

    stream: the consumer's, of an array on a GPU: 1 is the default stream.
    """
    options = {} if stream is None else {"stream": stream}
    try:
        capsule = array.__dlpack__(max_version=(1, 1), **options)
    except TypeError:  # an exporter older than DLPack 1.0
        capsule = array.__dlpack__(**options)
    if _is_valid(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        if managed.major != 1:
            raise BufferError(f"DLPack {managed.major}.{managed.minor} is not known; 1.x is")
        tensor, writable = managed.tensor, not managed.flags & _READ_ONLY
    else:
        tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
        writable = any(base.__module__.partition(".")[0] in _WRITABLE
                       for base in type(array).__mro__)
    shape = tuple(tensor.shape[:tensor.ndim])
    if tensor.strides:
        strides = tuple(tensor.strides[:tensor.ndim])
    else:
        packed, step = [], 1
        for size in reversed(shape):
            packed.append(step)
            step *= size
        strides = tuple(reversed(packed))
    kind = _KIND.get(tensor.code, f"DLPack type {tensor.code}, ")
    # "float" + 16, but "bool" and "float8_e4m3fn" say their size themselves.
    name = kind if tensor.code in (6, 10) else f"{kind}{tensor.bits}"
    if tensor.lanes != 1:
        name += f"x{tensor.lanes}"
    return Export((tensor.data or 0) + tensor.byte_offset, name, shape, strides,
                  tensor.device_type in _CPU, writable, capsule, tensor.bits // 8)
