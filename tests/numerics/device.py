"""Memory of the device under test. The library receives addresses from here and from nowhere else,
so that the same tests run on a GPU."""
import contextlib
import copy
import ctypes

import numpy as np

from . import capi
from .driver import Driver


class CpuDevice:
    name, kind = "cpu", 0
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

    def launch(self, enqueue):
        """Runs enqueue(stream) and waits for what it enqueued."""
        enqueue(0)


class CudaDevice:
    """Through the driver, in the primary context, which the library's runtime uses too."""
    name, kind = "cuda", 1
    alignment, padding = 16, 8

    def __init__(self):
        self.driver = Driver()
        self.stream = 0
        self.before_replay = None  # a function: calls are captured, and this runs before the replay
        self.write, self.read = self.driver.write, self.driver.read

    def allocate(self, size):
        address = self.driver.allocate(size)
        return address, address

    def free(self, handle):
        self.driver.free(handle)

    def launch(self, enqueue):
        graph = None
        if self.before_replay is not None:
            graph = self.driver.capture(enqueue)
            self.before_replay()
        self.driver.synchronize()  # what was written has arrived, for streams of any kind
        graph.launch(self.stream) if graph else enqueue(self.stream)
        self.driver.wait_stream(self.stream)

    def on_stream(self, stream):
        """The same device, its calls on another stream."""
        other = copy.copy(self)
        other.stream = stream
        return other

    @contextlib.contextmanager
    def own_stream(self):
        """The same device, its calls on a stream of their own."""
        self.driver.enter()
        stream = self.driver.new_stream()
        try:
            yield self.on_stream(stream)
        finally:
            self.driver.free_stream(stream)

    def captured(self, before_replay=lambda: None):
        """The same device, where each call is captured in a graph, then replayed."""
        other = copy.copy(self)
        other.before_replay = before_replay
        return other


def open_device(name):
    if name == "cpu":
        return CpuDevice()
    capi.need_gpu()
    return CudaDevice()
