"""Arrays in a GPU's memory: where they lie, on which stream, and which library makes new ones.

Nothing is copied, and nobody waits: the work is enqueued on a stream, and the results are there
when the stream gets to them. Until then the arrays are kept, by their library where it orders
memory by streams, else by an event. PyTorch's and CuPy's arrays are read by their attributes, which
takes a tenth of the time, all others by DLPack or the CUDA array interface.
"""
from __future__ import annotations

import contextlib
import sys
from typing import (Any, ContextManager, Dict, Iterator, List, NamedTuple, Optional, Sequence,
                    Tuple)

from . import _events
from ._constants import Device, Reason
from ._errors import invalid, wrong_type
from ._library import ffi

_CUDA = 2  # kDLCUDA
_TYPESTRS = {"<f4": "float32", "<f2": "float16", "|b1": "bool", "|u1": "uint8", "<i4": "int32",
             "<u4": "uint32", "<u8": "uint64", "<i8": "int64"}


class Place(NamedTuple):
    """Where a call runs. maker: the library that allocates results and scratch memory, or None."""

    index: int
    stream: int  # cudaStream_t; 0: the default stream
    maker: Any
    given: bool  # whether the caller named the stream, and saw to its order
    owners: List[Any]  # to be kept until the call's work is done

    @property
    def device(self) -> str:
        return f"cuda:{self.index}"


class Facts(NamedTuple):
    """An array's, as its library says: address, "float16", shape, strides in bytes, and whether it
    may be written."""

    address: int
    dtype: str
    shape: Tuple[int, ...]
    steps: Tuple[int, ...]
    size: int
    writable: bool


class Torch:
    name, copy = "PyTorch", "call .contiguous()"

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self._plain, self._strided = (torch.Tensor, torch.nn.Parameter), torch.strided
        self._host = torch.device("cpu")
        # By type: its name and the size of an element. Filled as types are seen.
        self._types: Dict[Any, Tuple[str, int]] = {}
        # The public way takes two microseconds.
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self.stream = raw or (lambda index: torch.cuda.current_stream(index).cuda_stream)

    def index(self, array: Any) -> Optional[int]:
        return array.device.index if array.is_cuda else None

    def is_plain(self, array: Any) -> bool:
        """A tensor in host memory whose attributes say all: no subclass, nothing sparse or lazy."""
        return (type(array) in self._plain and array.is_cpu and array.layout is self._strided
                and not array.is_neg())

    def facts(self, array: Any, name: str) -> Facts:
        return Facts(*self.read(array, name), True)

    def read(self, array: Any, name: str) -> Tuple[int, str, Tuple[int, ...], Tuple[int, ...], int]:
        """Address, type, shape, strides in bytes, bytes of an element."""
        if array.requires_grad and self.torch.is_grad_enabled():
            raise invalid(f"{name} requires a gradient, which this function does not record; call "
                          "the function of the same name in flashattn.torch, which does, or this "
                          f"one under torch.no_grad() or with {name}.detach()", Reason.VALUE, name)
        dtype = array.dtype
        known = self._types.get(dtype)
        if known is None:
            known = str(dtype).rpartition(".")[2], array.element_size()
            self._types[dtype] = known
        called, size = known
        return (array.data_ptr(), called, tuple(array.shape),
                tuple([step * size for step in array.stride()]), size)

    def as_numpy(self, array: Any, name: str) -> Any:
        """The same memory, but for bfloat16, which NumPy does not know."""
        self.facts(array, name)
        values = array.detach()
        return (values.float() if values.dtype is self.torch.bfloat16 else values).numpy()

    def new_on_host(self, shape: Sequence[int], dtype: str, zero: bool) -> Any:
        make = self.torch.zeros if zero else self.torch.empty
        return make(shape, dtype=getattr(self.torch, dtype), device=self._host)

    def _on(self, place: Place) -> Any:
        cuda = self.torch.cuda
        return (cuda.ExternalStream(place.stream, place.index) if place.stream
                else cuda.default_stream(place.index))

    def keep(self, array: Any, place: Place) -> None:
        """The allocator gives the array's memory to nobody before the stream has come past here."""
        array.record_stream(self._on(place))

    def new(self, shape: Sequence[int], dtype: str, zero: bool, place: Place) -> Any:
        make = self.torch.zeros if zero else self.torch.empty
        # The allocator reuses freed memory in the order of the stream it was made on.
        context: ContextManager[Any] = contextlib.nullcontext()
        if place.stream != self.stream(place.index):
            context = self.torch.cuda.stream(self._on(place))
        with context:
            return make(tuple(shape), dtype=getattr(self.torch, dtype), device=place.device)

    def scope(self, place: Place) -> ContextManager[Any]:
        """The device is the current one inside."""
        if self.torch.cuda.current_device() == place.index:
            return contextlib.nullcontext()
        return self.torch.cuda.device(place.index)


class Cupy:
    name, copy = "CuPy", "use cupy.ascontiguousarray"

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy

    def index(self, array: Any) -> Optional[int]:
        return array.device.id

    def stream(self, index: int) -> int:
        with self.cupy.cuda.Device(index):
            return self.cupy.cuda.get_current_stream().ptr

    def facts(self, array: Any, name: str) -> Facts:
        return Facts(array.data.ptr, array.dtype.name, array.shape, array.strides, array.itemsize,
                     True)

    def keep(self, array: Any, place: Place) -> None:
        place.owners.append(array)

    def new(self, shape: Sequence[int], dtype: str, zero: bool, place: Place) -> Any:
        cuda, make = self.cupy.cuda, self.cupy.zeros if zero else self.cupy.empty
        if dtype == "bfloat16":
            import ml_dtypes
            dtype = ml_dtypes.bfloat16
        with cuda.Device(place.index):
            if place.stream == cuda.get_current_stream().ptr:
                return make(shape, dtype)
            with cuda.ExternalStream(place.stream) if place.stream else cuda.Stream.null:
                return make(shape, dtype)

    def scope(self, place: Place) -> ContextManager[Any]:
        return self.cupy.cuda.Device(place.index)


LIBRARIES: Dict[str, Any] = {"torch": Torch, "cupy": Cupy}
_made: Dict[str, Any] = {}
_by_type: Dict[type, Any] = {}  # of the arrays that were seen


def library_of(array: Any) -> Any:
    """Torch, Cupy or None."""
    kind = type(array)
    library = _by_type.get(kind)
    if library is None:
        root = kind.__module__.partition(".")[0]
        if root not in LIBRARIES:
            return None
        if root not in _made:
            _made[root] = LIBRARIES[root](sys.modules[root])
        library = _by_type[kind] = _made[root]
    return library


def on_host(array: Any) -> Optional[Torch]:
    """PyTorch, if array is a plain tensor of it in host memory: results are then tensors, too."""
    library = library_of(array)
    return library if type(library) is Torch and library.is_plain(array) else None


def index_of(array: Any) -> Optional[int]:
    """The GPU on which an array lies; None: in host memory."""
    library = library_of(array)
    if library is not None:
        return library.index(array)
    if hasattr(array, "__dlpack_device__"):
        kind, index = array.__dlpack_device__()
        return int(index) if int(kind) == _CUDA else None
    # This protocol does not say which: the first.
    return 0 if hasattr(array, "__cuda_array_interface__") else None


def is_array(array: Any) -> bool:
    return (hasattr(array, "__dlpack__") or hasattr(array, "__cuda_array_interface__")
            or library_of(array) is not None)


def handle(stream: Any) -> int:
    """cudaStream_t of a number, or of a stream of PyTorch, CuPy, cuda.core or Numba."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for attribute in ("cuda_stream", "ptr", "handle"):
        value = getattr(stream, attribute, None)
        if value is not None:
            return int(getattr(value, "value", value) or 0)
    raise wrong_type(f"stream is a {type(stream).__name__}; expected a cudaStream_t as a number, "
                     "or a stream of PyTorch or CuPy", "stream")


def device_of(device: Any) -> Tuple[Device, Optional[int]]:
    """Of "cpu", "cuda" or "cuda:1". None: the index is not named."""
    kind, colon, index = str(device).partition(":")
    if kind.upper() not in Device.__members__ or bool(colon) != (index.isascii()
                                                                 and index.isdigit()):
        raise invalid(f"device = {device!r}; expected \"cpu\", \"cuda\" or \"cuda:1\"",
                      Reason.VALUE, "device")
    return Device[kind.upper()], int(index) if colon else None


def place_of(array: Any, stream: Any, device: Optional[str], o: Any = None,
             name: str = "q") -> Optional[Place]:
    """Where the first array lies, and so where the call runs. None: on the CPU."""
    index = index_of(array)
    if device is not None:
        kind, number = device_of(device)
        if (kind is Device.CPU) != (index is None) or number not in (None, index or 0):
            where = "in host memory" if index is None else f"on cuda:{index}"
            raise invalid(f"{name} lies {where}, but device = {device!r}; move it there, or leave "
                          "device out", Reason.VALUE, "device")
    if index is None:
        if stream is not None:
            raise invalid(f"stream is given, but {name} lies in host memory, where calls have no "
                          "stream; leave it out", Reason.STREAM, "stream")
        return None
    maker = library_of(array)
    if maker is None:
        maker = library_of(o)
        if maker is not None and maker.index(o) != index:
            maker = None  # o is refused where it is looked at
    if stream is not None:
        number = handle(stream)
    elif maker is not None:
        number = maker.stream(index)
    else:
        number = _interface_stream(array) or 0
    return Place(index, number, maker, stream is not None, [])


def _interface_stream(array: Any) -> Optional[int]:
    if hasattr(array, "__dlpack__"):
        return None
    return array.__cuda_array_interface__.get("stream")


def facts(array: Any, name: str, place: Place, made: bool = False) -> Tuple[Facts, Any]:
    """What an array says of itself, and what keeps its memory. made: by new(), for this call."""
    index = index_of(array)
    if index is None:
        raise invalid(f"{name} lies in host memory, but q on {place.device}; move it there",
                      Reason.VALUE, name)
    if index != place.index:
        raise invalid(f"{name} lies on cuda:{index}, but q on {place.device}; move it there",
                      Reason.VALUE, name)
    # A producer orders its own work before this stream's; 0 is not a number of the protocol.
    consumer = place.stream or 1
    library = library_of(array)
    if library is not None:
        said = library.facts(array, name)
        if not made and library.stream(index) != place.stream:
            if place.given:
                library.keep(array, place)
            else:
                place.owners.append(array.__dlpack__(stream=consumer))
        return said, array
    if hasattr(array, "__dlpack__"):
        from . import _dlpack
        export = _dlpack.read(array, consumer)
        size = export.itemsize
        place.owners.append(export.owner)
        return Facts(export.pointer, export.dtype, export.shape,
                     tuple([step * size for step in export.strides]), size,
                     export.writable), export.owner
    place.owners.append(array)
    return _by_interface(array, name, place), array


def check_order(array: Any, name: str, place: Optional[Place]) -> None:
    """Of an array to be written, whose readers are to come after the call."""
    library = library_of(array)
    if place is None or place.given or library is None:
        return
    current = library.stream(place.index)
    if current != place.stream:
        raise invalid(f"{name} is {library.name}'s, whose current stream {current} is not the "
                      f"call's, {place.stream}: it could be read too soon; give stream=, or make "
                      "the same stream current in both libraries", Reason.STREAM, name)


def _by_interface(array: Any, name: str, place: Place) -> Facts:
    said = array.__cuda_array_interface__
    dtype = _TYPESTRS.get(said["typestr"])
    if dtype is None:
        raise wrong_type(f"{name} has type {said['typestr']!r} by __cuda_array_interface__, which "
                         "has no name for bfloat16; give an object with __dlpack__", name)
    if said.get("mask") is not None:
        raise wrong_type(f"{name} is a masked array, whose mask would be ignored", name)
    stream = said.get("stream")
    if stream is not None and {stream, place.stream} not in ({stream}, {0, 1}):
        raise invalid(f"{name} is ready on stream {stream} by __cuda_array_interface__, but the "
                      f"call runs on stream {place.stream}; let one wait for the other, and give "
                      "an array without a stream, or give stream=", Reason.STREAM, name)
    size = int(said["typestr"][2:])
    shape, steps = tuple(said["shape"]), said.get("strides")
    if steps is None:
        packed, step = [], size
        for count in reversed(shape):
            packed.append(step)
            step *= count
        steps = tuple(reversed(packed))
    address, read_only = said["data"]
    return Facts(address or 0, dtype, shape, tuple(steps), size, not read_only)


def new(shape: Sequence[int], dtype: str, zero: bool, place: Place, name: str) -> Any:
    """An array of the library that q comes from."""
    if place.maker is None:
        raise invalid(f"{name} must be made on {place.device}, and the library of q is none of "
                      f"{', '.join(x.name for x in (Torch, Cupy))}, which could make it; give o= "
                      "of one of them" + ("" if name == "workspace" else f", or {name}="),
                      Reason.VALUE, name)
    return place.maker.new(shape, dtype, zero, place)


@contextlib.contextmanager
def launch(place: Optional[Place]) -> Iterator[None]:
    """The call's device is the current one inside, where a library can see to it. Behind, arrays
    are kept until what was enqueued is done."""
    if place is None:
        yield
        return
    with contextlib.nullcontext() if place.maker is None else place.maker.scope(place):
        yield
        if place.owners:
            _events.hold(place.owners, place.index, place.stream)


def native_stream(place: Optional[Place]) -> Any:
    """cudaStream_t, as cffi wants it."""
    return ffi.NULL if place is None else ffi.cast("void *", place.stream)
