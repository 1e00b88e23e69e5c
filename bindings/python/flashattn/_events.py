"""Keeps arrays until a GPU is done with them: their own library may give the memory to others as
soon as nobody holds them, which a call that only enqueues work would not notice.

By the driver, which is there wherever a GPU is, so that no array library is needed for it. Nothing
here waits: what is done is let go of at the next call that keeps something.
"""
from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Driver:
    """The few functions of libcuda that this takes, in a device's primary context, as the library's
    own calls are."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.contexts: Dict[int, ctypes.c_void_p] = {}

    def _context(self, index: int) -> ctypes.c_void_p:
        if index not in self.contexts:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self.cuda.cuDeviceGet(ctypes.byref(device), index)
            # Never released: the last to release it would end everybody's work.
            self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
            self.contexts[index] = context
        return self.contexts[index]

    @contextlib.contextmanager
    def _entered(self, index: int) -> Iterator[None]:
        """The device's context is current, and a capture elsewhere is not disturbed."""
        self.cuda.cuCtxPushCurrent_v2(self._context(index))
        mode = ctypes.c_int(_RELAXED)
        self.cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            yield
        finally:
            self.cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            self.cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def record(self, index: int, stream: int) -> Optional[ctypes.c_void_p]:
        """An event behind all that the stream has been given. None: there is nothing to wait for.
        Arrays that a stream's capture reads are the owner's of the graph to keep."""
        handle, event, captured = ctypes.c_void_p(stream), ctypes.c_void_p(), ctypes.c_int()
        with self._entered(index):
            self.cuda.cuStreamIsCapturing(handle, ctypes.byref(captured))
            if captured.value:
                return None
            if self.cuda.cuEventCreate(ctypes.byref(event), _NO_TIMING) == 0:
                if self.cuda.cuEventRecord(event, handle) == 0:
                    return event
                self.cuda.cuEventDestroy_v2(event)
            self.cuda.cuStreamSynchronize(handle)  # without an event there is no other way to know
            return None

    def is_done(self, index: int, event: ctypes.c_void_p) -> bool:
        """Whether the work before the event is, which is then destroyed."""
        with self._entered(index):
            if self.cuda.cuEventQuery(event) == _NOT_READY:
                return False
            self.cuda.cuEventDestroy_v2(event)
            return True


class _Held(NamedTuple):
    device: int
    event: Any
    owners: List[Any]


driver: Any = None
_lock = threading.Lock()
_held: List[_Held] = []


def hold(owners: List[Any], index: int, stream: int) -> None:
    """Keeps owners until what the stream has been given so far is done."""
    global driver
    release()
    if driver is None:
        driver = Driver()
    event = driver.record(index, stream)
    if event is not None:
        with _lock:
            _held.append(_Held(index, event, owners))


def release() -> None:
    """Lets go of what is done."""
    if not _held:
        return
    with _lock:
        looked_at, _held[:] = list(_held), []
    # Not under the lock: owners that go may run code of their own.
    waiting = [held for held in looked_at if not driver.is_done(held.device, held.event)]
    with _lock:
        _held.extend(waiting)
