"""NVIDIA's driver through ctypes: memory, streams, events and graphs of one device, in its primary
context, which the library's runtime and PyTorch use too."""
import contextlib
import ctypes
import gc

import numpy as np


class Driver:
    def __init__(self, index=0):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.index = index
        self.context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), index)
        self.enter()

    def call(self, name, *args):
        status = getattr(self.library, name)(*args)
        if status:
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(status, ctypes.byref(text))
            raise RuntimeError("%s returned %s" % (name, (text.value or b"%d" % status).decode()))

    def made(self, name, *args, kind=ctypes.c_void_p):
        """What a function writes to its first argument."""
        result = kind()
        self.call(name, ctypes.byref(result), *args)
        return result

    def enter(self):
        """Makes the device the calling thread's current one."""
        self.call("cuCtxSetCurrent", self.context)

    def synchronize(self):
        self.call("cuCtxSynchronize")

    @property
    def count(self):
        return self.made("cuDeviceGetCount", kind=ctypes.c_int).value

    @property
    def name(self):
        text = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", text, len(text), self.index)
        return text.value.decode()

    @property
    def memory(self):
        """Bytes that are free."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    # ---- memory: addresses are integers

    def allocate(self, size):
        return self.made("cuMemAlloc_v2", ctypes.c_size_t(max(size, 1)), kind=ctypes.c_uint64).value

    def free(self, address):
        self.call("cuMemFree_v2", ctypes.c_uint64(address))

    def fill(self, address, byte, size, stream=None):
        if size:
            name = "cuMemsetD8_v2" if stream is None else "cuMemsetD8Async"
            extra = () if stream is None else (ctypes.c_void_p(stream),)
            self.call(name, ctypes.c_uint64(address), ctypes.c_ubyte(byte), ctypes.c_size_t(size),
                      *extra)

    def write(self, address, data):
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_void_p(data.ctypes.data),
                  ctypes.c_size_t(data.nbytes))

    def read(self, address, size):
        data = np.empty(size, np.uint8)
        self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(data.ctypes.data), ctypes.c_uint64(address),
                  ctypes.c_size_t(size))
        return data

    def copy(self, to, source, size, stream=0):
        self.call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(to), ctypes.c_uint64(source),
                  ctypes.c_size_t(size), ctypes.c_void_p(stream))

    # ---- streams and events: integers, too

    def new_stream(self):
        """One that does not wait for the default stream."""
        return self.made("cuStreamCreate", 1).value

    def wait_stream(self, stream):
        self.call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def free_stream(self, stream):
        self.call("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def new_event(self):
        return self.made("cuEventCreate", 0).value

    def record(self, event, stream=0):
        self.call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def reached(self, event):
        """Whether what was enqueued before an event is over."""
        return self.library.cuEventQuery(ctypes.c_void_p(event)) == 0

    def elapsed(self, start, end):
        """Seconds, once both are over."""
        self.call("cuEventSynchronize", ctypes.c_void_p(end))
        return self.made("cuEventElapsedTime", ctypes.c_void_p(start), ctypes.c_void_p(end),
                         kind=ctypes.c_float).value * 1e-3

    # ---- graphs

    def capture(self, enqueue):
        """A graph of what enqueue(stream) puts on a stream. While it is recorded, the driver
        refuses whatever synchronises, allocates or reads device memory."""
        stream = self.new_stream()
        gc.disable()  # it would free the arrays of some test before
        self.call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), 0)
        graph = ctypes.c_void_p()
        try:
            enqueue(stream)
        finally:
            status = self.library.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
            gc.enable()
            self.free_stream(stream)
        if status:
            raise RuntimeError("cuStreamEndCapture returned CUresult %d: something in the call "
                               "cannot be captured" % status)
        try:
            return Graph(self, graph)
        finally:
            self.call("cuGraphDestroy", graph)


class Graph:
    """An executable graph."""

    def __init__(self, driver, graph):
        self.driver = driver
        self.nodes = self._count(graph)
        self.handle = driver.made("cuGraphInstantiateWithFlags", graph, ctypes.c_uint64(0))

    def _count(self, graph):
        number = ctypes.c_size_t()
        self.driver.call("cuGraphGetNodes", graph, None, ctypes.byref(number))
        return number.value

    def launch(self, stream=0):
        self.driver.call("cuGraphLaunch", self.handle, ctypes.c_void_p(stream))

    def __del__(self):
        with contextlib.suppress(Exception):
            self.driver.call("cuGraphExecDestroy", self.handle)
