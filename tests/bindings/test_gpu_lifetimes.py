"""On which stream a call on a GPU runs, and how long what it reads is kept. The arrays are those of
gpu_fakes.py, and PyTorch is one that only takes notes."""
import contextlib
import gc
import sys
import types
import weakref

import numpy as np
import pytest

import flashattn
import gpu_fakes
from flashattn import _events, _gpu
from gpu_fakes import Array, Exporter, Interface, Library
from numerics.arrays import random


@pytest.fixture
def driver(monkeypatch):
    yield gpu_fakes.install(monkeypatch)
    _gpu._made.pop("fakegpu", None)


class Tensor:
    """PyTorch's, as far as it is looked at."""

    is_cuda, requires_grad = True, False
    device = types.SimpleNamespace(index=0)

    def __init__(self, host):
        self.host, self.shape, self.streams = host, host.shape, []
        self.dtype = f"torch.{host.dtype.name}"
        self.data_ptr, self.element_size = lambda: host.ctypes.data, lambda: host.itemsize

    def stride(self):
        return [step // self.host.itemsize for step in self.host.strides]

    def record_stream(self, stream):
        self.streams.append(stream)


Tensor.__module__ = "torch"


class TorchCuda:
    def __init__(self):
        self.current = 0

    def current_stream(self, index):
        return types.SimpleNamespace(cuda_stream=self.current)

    def current_device(self):
        return 0

    def default_stream(self, index):
        return "default"

    def ExternalStream(self, stream, index):
        return stream

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def torch(monkeypatch, driver):
    module = types.SimpleNamespace(_C=None, cuda=TorchCuda(), float32="float32", uint8="uint8",
                                   is_grad_enabled=lambda: True, made=[], Tensor=Tensor,
                                   strided="strided", device=lambda name: name,
                                   nn=types.SimpleNamespace(Parameter=Tensor))

    def empty(shape, dtype, device):
        made = Tensor(np.zeros(shape, dtype))
        module.made.append((made, module.cuda.current))
        return made

    module.empty = module.zeros = empty
    monkeypatch.setitem(sys.modules, "torch", module)
    for known in ("_made", "_by_type"):
        monkeypatch.setattr(_gpu, known, {})
    yield module


def test_tensors_of_pytorch_are_recorded_on_a_stream_that_is_given(torch, driver):
    x = random(2, 9, 4, 16)
    q, k, v, out, bias = (Tensor(a) for a in (x, x, x, np.zeros_like(x), random(9, 9)))
    given = (q, k, v, out, bias)
    flashattn.attention(q, k, v, o=out, bias=bias)
    assert all(tensor.streams == [] for tensor in given)
    _, lse = flashattn.attention(q, k, v, o=out, bias=bias, stream=7, return_lse=True)
    assert all(tensor.streams == [7] for tensor in given)
    # What is made belongs to that stream from the start.
    assert torch.made and all(made.streams == [] and current == 7
                              for made, current in torch.made[-2:])
    torch.cuda.current = 7
    flashattn.attention(q, k, v, o=out, bias=bias, stream=7)
    assert all(tensor.streams == [7] for tensor in given)
    flashattn.attention(q, k, v, o=out, bias=bias, stream=0)
    assert all(tensor.streams == [7, "default"] for tensor in given)
    # The allocator keeps what it is told of: no event is needed.
    assert driver.recorded == [] and type(lse) is Tensor


def test_gradients_and_merging_record_too(torch):
    x = random(2, 9, 4, 16)
    out, lse = flashattn.attention(x, x, x, return_lse=True)
    given = [Tensor(a) for a in (x, x, x, x, out, lse)]
    flashattn.attention_backward(*given, stream=7)
    assert all(tensor.streams == [7] for tensor in given)
    parts = [[Tensor(out), Tensor(out)], [Tensor(lse), Tensor(lse)]]
    flashattn.merge(*parts, stream=7)
    assert all(tensor.streams == [7] for tensor in sum(parts, []))
    keep = Tensor(np.zeros((1, 1, 9, 9), bool))
    flashattn.dropout_mask(1, 1, 9, 9, dropout=0.5, rng_seed=1, keep=keep, stream=7)
    assert keep.streams == [7]


@pytest.mark.parametrize("wrap", [Exporter, Interface])
def test_what_is_read_is_kept_until_the_work_is_done(driver, wrap):
    out = Array(np.zeros((2, 9, 4, 16), np.float32))
    host = random(2, 9, 4, 16).copy()
    given, alive = wrap(host), weakref.ref(host)
    driver.done = False
    flashattn.attention(given, given, given, o=out)
    assert driver.recorded == [(0, 0)]
    del given, host
    flashattn.clear_cache()
    gc.collect()
    assert alive() is not None, "the memory went back with the work still queued"
    driver.done = True
    flashattn.clear_cache()
    gc.collect()
    assert alive() is None and not _events._held


def test_the_next_call_lets_go_of_what_is_done(driver):
    x, out = random(2, 9, 4, 16), Array(np.zeros((2, 9, 4, 16), np.float32))
    for _ in range(5):
        flashattn.attention(Exporter(x), Exporter(x), Exporter(x), o=out)
        assert len(_events._held) == 1
    driver.done = False
    flashattn.attention(Exporter(x), Exporter(x), Exporter(x), o=out)
    flashattn.attention(Exporter(x), Exporter(x), Exporter(x), o=out)
    assert len(_events._held) == 3


def test_a_captured_call_keeps_nothing(driver):
    driver.capturing = True
    x = Exporter(random(2, 9, 4, 16))
    flashattn.attention(x, x, x, o=Array(np.zeros((2, 9, 4, 16), np.float32)))
    assert not _events._held


def test_a_refused_call_keeps_nothing(driver):
    x = Exporter(random(2, 9, 4, 16))
    with pytest.raises(ValueError, match="o has shape"):
        flashattn.attention(x, x, x, o=Array(np.zeros((2, 9, 4, 8), np.float32)))
    assert not driver.recorded


def test_the_stream_is_that_of_out_where_q_has_none(driver, monkeypatch):
    x, result = random(2, 9, 4, 16), np.zeros((2, 9, 4, 16), np.float32)
    monkeypatch.setattr(Library, "current", 7)
    q = Exporter(x)
    flashattn.attention(q, q, q, o=Array(result))
    assert driver.recorded == [(0, 7)] and q.streams == [7, 7, 7]
    np.testing.assert_array_equal(result, flashattn.attention(x, x, x))
    flashattn.attention(q, q, q, o=Array(result), stream=9)
    assert driver.recorded[-1] == (0, 9) and q.streams[3:] == [9, 9, 9]
    # Of gradients any will do.
    out, lse = flashattn.attention(x, x, x, return_lse=True)
    grads = [Array(np.zeros_like(x)) for _ in range(3)]
    flashattn.attention_backward(*[Exporter(a) for a in (x, x, x, x, out, lse)], dk=grads[1],
                                 dv=grads[2])
    assert driver.recorded[-1] == (0, 7)
    # An array that is ready on another stream says so.
    q = Interface(x, stream=5)
    with pytest.raises(ValueError, match="ready on stream 5 .* runs on stream 7; let one wait"):
        flashattn.attention(q, q, q, o=Array(result))


class Others(Array):
    """An array of a second library, with a stream of its own."""

    def __init__(self, host):
        super().__init__(host)
        self.asked = []

    def __dlpack__(self, *, stream):
        self.asked.append(stream)
        return self.host.__dlpack__()


class OtherLibrary(Library):
    name, current = "the other", 5


@pytest.fixture
def other(driver, monkeypatch):
    Others.__module__ = "othergpu.arrays"
    monkeypatch.setitem(sys.modules, "othergpu", OtherLibrary)
    monkeypatch.setitem(_gpu.LIBRARIES, "othergpu", OtherLibrary)
    monkeypatch.setattr(OtherLibrary, "current", 5)
    yield OtherLibrary
    _gpu._made.pop("othergpu", None)


def test_arrays_of_another_librarys_stream_are_waited_for(other, driver, monkeypatch):
    x = random(2, 9, 4, 16)
    q, k = Array(x), Others(x)
    flashattn.attention(q, k, k)
    assert k.asked == [1, 1] and driver.recorded == [(0, 0)]
    monkeypatch.setattr(other, "current", 0)  # the same stream is in order as it is
    flashattn.attention(q, k, k)
    assert k.asked == [1, 1] and len(driver.recorded) == 1
    # With stream= the caller has seen to the order, and the arrays are kept.
    flashattn.attention(q, k, k, stream=3)
    assert k.asked == [1, 1] and driver.recorded[1:] == [(0, 3)]


def test_results_are_not_left_to_another_librarys_stream(other, monkeypatch):
    x = random(2, 9, 4, 16)
    out, lse = flashattn.attention(x, x, x, return_lse=True)
    done = Array(out)
    calls = [lambda: flashattn.attention(*[Array(x)] * 3, o=Others(np.zeros_like(x))),
             lambda: flashattn.merge([done], [Array(lse)], o=Others(np.zeros_like(x))),
             lambda: flashattn.attention_backward(*[Array(x)] * 4, done, Array(lse),
                                                  dv=Others(np.zeros_like(x)))]
    for call in calls:
        with pytest.raises(ValueError, match="the other's, whose current stream 5 is not the "
                                             "call's, 0: .* give stream=") as caught:
            call()
        assert caught.value.reason is flashattn.Reason.STREAM
    monkeypatch.setattr(other, "current", 0)
    for call in calls:
        call()


class Cuda:
    """libcuda, as far as events go."""

    def __init__(self):
        self.context, self.mode, self.events, self.synchronized = [], 0, {}, 0
        self.capturing, self.failing, self.ready = False, False, False

    def cuDeviceGet(self, device, index):
        device._obj.value = 10 + index
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 100 + device.value
        return 0

    def cuCtxPushCurrent_v2(self, context):
        self.context.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context):
        context._obj.value = self.context.pop()
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode):
        mode._obj.value, self.mode = self.mode, mode._obj.value
        return 0

    def cuStreamIsCapturing(self, stream, captured):
        captured._obj.value = int(self.capturing)
        return 0

    def cuEventCreate(self, event, flags):
        assert self.context and self.mode == 2 and flags == 2
        event._obj.value = 1000 + len(self.events)
        self.events[event._obj.value] = None
        return 0

    def cuEventRecord(self, event, stream):
        self.events[event.value] = (self.context[-1], stream.value)
        return 400 if self.failing else 0

    def cuEventQuery(self, event):
        assert self.context[-1] == self.events[event.value][0] and self.mode == 2
        return 0 if self.ready else 600

    def cuEventDestroy_v2(self, event):
        del self.events[event.value]
        return 0

    def cuStreamSynchronize(self, stream):
        self.synchronized += 1
        return 0


def test_the_drivers_events(monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr(_events.ctypes, "CDLL", lambda name: cuda)
    driver = _events.Driver()
    event = driver.record(1, 0x5000)
    assert cuda.events == {event.value: (111, 0x5000)}
    assert not driver.is_done(1, event) and cuda.events
    cuda.ready = True
    assert driver.is_done(1, event) and not cuda.events
    cuda.capturing = True
    assert driver.record(0, 7) is None and not cuda.events and not cuda.synchronized
    cuda.capturing, cuda.failing = False, True
    assert driver.record(0, 7) is None and not cuda.events and cuda.synchronized == 1
    # The caller's context and mode of capture are as before.
    assert cuda.context == [] and cuda.mode == 0


def test_a_number_on_a_gpu_is_not_waited_for(driver):
    for name in ("scale", "threads", "rng_seed"):
        with pytest.raises(ValueError, match=f"{name} lies on a GPU, where a call reads nothing"):
            flashattn.attention(*[random(1, 3, 2, 8)] * 3, **{name: Array(np.array(1.0))})


def test_columns_of_a_wider_page_table(driver):
    q, pages = random(2, 1, 4, 16), random(6, 4, 2, 16)
    table = np.array([[3, 1, 0, 9, 9], [5, 2, 4, 9, 9]], np.int32)
    lens = np.array([9, 12], np.int32)
    want = flashattn.attention_paged(q, pages, pages, table[:, :3].copy(), lens)
    np.testing.assert_array_equal(flashattn.attention_paged(q, pages, pages, table[:, :3], lens),
                                  want)
    got = flashattn.attention_paged(*map(Array, (q, pages, pages, table[:, :3], lens)))
    np.testing.assert_array_equal(got.host, want)
    with pytest.raises(ValueError, match="page_table has .* contiguous"):
        flashattn.attention_paged(*map(Array, (q, pages, pages, table[:, ::2], lens)))
    for view in (table[:, ::2], table[:, 2::-1]):  # in host memory: copied
        copied = view.copy()
        copied[copied == 9] = 0
        table[table == 9] = 0
        np.testing.assert_array_equal(flashattn.attention_paged(q, pages, pages, view, lens),
                                      flashattn.attention_paged(q, pages, pages, copied, lens))
