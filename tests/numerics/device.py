"""Memory of the device under test. The library receives addresses from here and from nowhere else,
so that the same tests run on a GPU."""
import ctypes

import numpy as np


class CpuDevice:
    name, kind, stream = "cpu", 0, 0
    alignment, padding = 1, 1  # bytes, elements: arrays lie as oddly as the element allows

    def allocate(self, size):
        """(address, handle) of size bytes, aligned to 64."""
        block = np.empty(size + 64, np.uint8)
        return -(-block.ctypes.data // 64) * 64, block

    def write(self, address, data):
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def read(self, address, size):
        data = np.empty(size, np.uint8)
        ctypes.memmove(data.ctypes.data, address, size)
        return data

    def free(self, handle):
        pass

    def synchronize(self):
        pass


class CudaDevice:
    """Through the driver, in the primary context, which the library's runtime uses too."""
    name, kind, stream = "cuda", 1, 0
    alignment, padding = 16, 8

    def __init__(self):
        self.driver = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *args):
        status = getattr(self.driver, name)(*args)
        if status:
            raise RuntimeError("%s returned CUresult %d" % (name, status))

    def allocate(self, size):
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(size, 1)))
        return pointer.value, pointer

    def write(self, address, data):
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_void_p(data.ctypes.data),
                  ctypes.c_size_t(data.nbytes))

    def read(self, address, size):
        data = np.empty(size, np.uint8)
        self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(data.ctypes.data), ctypes.c_uint64(address),
                  ctypes.c_size_t(size))
        return data

    def free(self, handle):
        self.call("cuMemFree_v2", handle)

    def synchronize(self):
        self.call("cuCtxSynchronize")


def open_device(name):
    return {"cpu": CpuDevice, "cuda": CudaDevice}[name]()
