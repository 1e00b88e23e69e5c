"""Arrays on the GPU: PyTorch's where it is installed, since its backends are to read them too, else
the driver's. On the CPU: NumPy's."""
from __future__ import annotations

import ctypes
import pathlib
import sys
from typing import Any, Dict, Optional, Tuple

import ml_dtypes
import numpy as np

from flashattn import Device

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from numerics.driver import Driver  # noqa: E402

try:
    import torch
except ImportError:
    torch = None
if torch is not None and not torch.cuda.is_available():
    torch = None

NUMPY = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16),
         "bf16": np.dtype(ml_dtypes.bfloat16), "i32": np.dtype(np.int32), "u8": np.dtype(np.uint8),
         "f8": np.dtype(ml_dtypes.float8_e4m3fn), "i8": np.dtype(np.int8)}
_RECORD = 656  # bytes of a token in DeepSeek's quantised cache
_LINE = 64  # bytes of a cache line
_PATTERN = 1 << 22  # random numbers that the driver's arrays repeat


def torch_dtype(name: str) -> Any:
    return {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32,
            "u8": torch.uint8, "f8": torch.float8_e4m3fn}[name]


class Host:
    """The CPU's memory, by the methods of Driver that arrays use."""

    def __init__(self) -> None:
        self.rooms: Dict[int, np.ndarray] = {}

    def allocate(self, size: int) -> int:
        room = np.empty(size + _LINE, np.uint8)
        # Every array starts a cache line: two builds of the library find the same alignment.
        address = -(-room.ctypes.data // _LINE) * _LINE
        self.rooms[address] = room
        return address

    def free(self, address: int) -> None:
        del self.rooms[address]

    fill = staticmethod(ctypes.memset)
    copy = staticmethod(ctypes.memmove)

    def write(self, address: int, data: np.ndarray) -> None:
        self.copy(address, data.ctypes.data, data.nbytes)


class Array:
    """A packed array in a device's memory. tensor: PyTorch's, or None."""

    def __init__(self, memory: "Memory", shape: Tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype, self.driver = tuple(shape), dtype, memory.driver
        self.bytes = max(int(np.prod(shape)) * NUMPY[dtype].itemsize, 1)
        self.tensor: Any = None
        if torch is not None and memory.device == Device.CUDA:
            self.tensor = torch.empty(self.shape, dtype=torch_dtype(dtype), device="cuda")
            self.address = self.tensor.data_ptr()
        else:
            self.address = self.driver.allocate(self.bytes)

    def __del__(self) -> None:
        if self.tensor is None and hasattr(self, "address"):
            self.driver.free(self.address)

    def strides(self) -> Tuple[int, int, int]:
        """Of batch, head and sequence, in elements."""
        _, seq, heads, dim = self.shape
        return seq * heads * dim, dim, heads * dim


class View(Array):
    """The first `dim` elements of each row of another array."""

    def __init__(self, whole: Array, dim: int) -> None:
        # pylint: disable=super-init-not-called
        self.whole, self.shape, self.dtype = whole, (*whole.shape[:-1], dim), whole.dtype
        self.address, self.driver = whole.address, whole.driver
        self.bytes = 0  # of its own
        self.tensor = None if whole.tensor is None else whole.tensor[..., :dim]

    def __del__(self) -> None:
        """The memory is the whole array's."""

    def strides(self) -> Tuple[int, int, int]:
        return self.whole.strides()


class Part(Array):
    """Some bytes of each row of an array of bytes, as elements of another type."""

    def __init__(self, whole: Array, first: int, dim: int, dtype: str) -> None:
        # pylint: disable=super-init-not-called
        self.whole, self.shape, self.dtype = whole, (*whole.shape[:-1], dim), dtype
        self.address, self.driver = whole.address + first, whole.driver
        self.bytes, self.tensor = 0, None

    def __del__(self) -> None:
        """The memory is the whole array's."""

    def strides(self) -> Tuple[int, int, int]:
        batch, head, seq = self.whole.strides()
        size = NUMPY[self.dtype].itemsize
        return batch // size, head // size, seq // size


class Memory:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.driver: Any = Driver() if device == Device.CUDA else Host()
        self.rng = np.random.default_rng(0)

    def empty(self, shape: Tuple[int, ...], dtype: str, byte: Optional[int] = None) -> Array:
        array = Array(self, shape, dtype)
        if byte is not None:
            self.driver.fill(array.address, byte, array.bytes)
        return array

    def normal(self, shape: Tuple[int, ...], dtype: str) -> Array:
        """Random normal numbers."""
        array = Array(self, shape, dtype)
        if array.tensor is not None:
            if dtype == "f8":  # PyTorch draws none of 8 bits
                array.tensor.copy_(torch.randn(shape, device="cuda"))
            else:
                array.tensor.normal_()
            return array
        self.repeat(array, self.pattern(shape).astype(NUMPY[dtype]))
        return array

    def records(self, rows: Tuple[int, ...], dtype: str) -> Dict[str, Array]:
        """DeepSeek's records (batch, seq, heads), as the arrays of LATENT_KV in them."""
        whole = Array(self, (*rows, _RECORD), "u8")
        some = np.zeros((min(whole.bytes // _RECORD, 4096), _RECORD), np.uint8)
        some[:, :512].view(NUMPY["f8"])[:] = self.numbers((len(some), 512))
        some[:, 512:528].view(np.float32)[:] = 0.5 + np.abs(self.numbers((len(some), 4)))
        some[:, 528:].view(NUMPY[dtype])[:] = self.numbers((len(some), 64))
        self.repeat(whole, some)
        return {"v": Part(whole, 0, 512, "f8"), "descale_latent": Part(whole, 512, 4, "f32"),
                "k": Part(whole, 528, 64, dtype)}

    def repeat(self, array: Array, some: np.ndarray) -> None:
        """Fills an array with some numbers, again and again."""
        self.driver.write(array.address, some)
        done = some.nbytes
        while done < array.bytes:
            size = min(done, array.bytes - done)
            self.driver.copy(array.address + done, array.address, size)
            done += size

    def pattern(self, shape: Tuple[int, ...]) -> np.ndarray:
        """The random normal numbers that an array of this shape repeats."""
        return self.rng.standard_normal(min(int(np.prod(shape)), _PATTERN), np.float32)

    def numbers(self, shape: Tuple[int, ...]) -> np.ndarray:
        """Random normal numbers on the host, to be changed there."""
        return np.resize(self.pattern(shape), shape)

    def of(self, values: np.ndarray, dtype: str) -> Array:
        array = Array(self, values.shape, dtype)
        self.driver.write(array.address, np.ascontiguousarray(values, NUMPY[dtype]))
        return array
