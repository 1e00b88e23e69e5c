"""What a GPU's arrays, their library and the driver look like to the package, in host memory."""
import contextlib
import sys

import numpy as np

from flashattn import _dlpack, _events, _gpu


class Array:
    """What a GPU library's array is to this package."""

    def __init__(self, host, index=0):
        self.host, self.device_index = host, index


class Library:
    name, copy = "fake", "copy it"
    made = []
    current = 0  # its stream

    def __init__(self, module):
        self.module = module

    def index(self, array):
        return array.device_index

    def stream(self, index):
        return self.current

    def facts(self, array, name):
        x = array.host
        return _gpu.Facts(x.ctypes.data, x.dtype.name, x.shape, x.strides, x.itemsize,
                          x.flags.writeable)

    def new(self, shape, dtype, zero, place):
        self.made.append((shape, dtype))
        return Array(np.full(shape, 0 if zero else 99, dtype), place.index)

    def keep(self, array, place):
        place.owners.append(array)

    def scope(self, place):
        return contextlib.nullcontext()


class Exporter:
    """A GPU's array by DLPack alone."""

    def __init__(self, host, index=0):
        self.host, self.index, self.streams = host, index, []

    def __dlpack_device__(self):
        return (2, self.index)

    def __dlpack__(self, *, stream=None, max_version=None):
        self.streams.append(stream)
        capsule = self.host.__dlpack__()
        tensor = _dlpack._Tensor.from_address(_dlpack._pointer(capsule, b"dltensor"))
        tensor.device_type = 2
        return capsule


class Interface:
    """A GPU's array by __cuda_array_interface__ alone."""

    def __init__(self, host, **more):
        said = host.__array_interface__
        strides = None if host.flags.c_contiguous else host.strides
        self.host = host
        self.__cuda_array_interface__ = {
            "shape": host.shape, "typestr": said["typestr"], "data": said["data"], "version": 3,
            "strides": strides, **more}


class Driver:
    """Events that are done when a test says so."""

    def __init__(self):
        self.recorded, self.done, self.capturing = [], True, False

    def record(self, index, stream):
        if self.capturing:
            return None
        self.recorded.append((index, stream))
        return len(self.recorded)

    def is_done(self, index, event):
        return self.done


def install(monkeypatch):
    """The library is known by name, and plans are made for the CPU. Returns the driver."""
    Array.__module__ = "fakegpu.arrays"
    monkeypatch.setitem(sys.modules, "fakegpu", Library)
    monkeypatch.setitem(_gpu.LIBRARIES, "fakegpu", Library)
    monkeypatch.delitem(_gpu._made, "fakegpu", raising=False)
    monkeypatch.setattr(_gpu, "_by_type", {})
    monkeypatch.setattr(_gpu.Place, "device", property(lambda self: "cpu"))
    monkeypatch.setattr(_gpu, "native_stream", lambda place: _gpu.ffi.NULL)
    monkeypatch.setattr(_events, "_held", [])
    driver = Driver()
    monkeypatch.setattr(_events, "driver", driver)
    Library.made.clear()
    return driver
