"""Arrays of other libraries: DLPack old and new, the array interface, and what is refused."""
import ctypes
import sys

import numpy as np
import pytest

import flashattn
from flashattn import _arrays, _dlpack
from numerics.arrays import random


class Exporter:
    """An array that offers DLPack only, in a capsule as before DLPack 1.0."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        if options:
            raise TypeError("an old exporter takes no max_version")
        return self.array.__dlpack__()


class Versioned(Exporter):
    """By DLPack 1.0, whose capsules say whether the array may be written."""

    def __init__(self, array, read_only=False):
        super().__init__(array)
        self.read_only = read_only

    def __dlpack__(self, *, max_version=None):
        assert max_version >= (1, 0)
        old = self.array.__dlpack__()
        tensor = _dlpack._Tensor.from_address(_dlpack._pointer(old, b"dltensor"))
        self.kept = old, _dlpack._Versioned(1, 0, None, None, int(self.read_only), tensor)
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p,
                                                         ctypes.c_void_p)
        return make(ctypes.addressof(self.kept[1]), b"dltensor_versioned", None)


class Bfloat16:
    """bfloat16 by DLPack, which NumPy cannot write: its uint16 capsule with the type changed."""

    def __init__(self, array):
        self.bits = array.view(np.uint16)

    def __dlpack__(self):
        capsule = self.bits.__dlpack__()
        tensor = _dlpack._Tensor.from_address(_dlpack._pointer(capsule, b"dltensor"))
        tensor.code = 4
        return capsule


class Interface:
    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__
        self.keep = array


@pytest.mark.parametrize("wrap", [Versioned, Exporter, Interface])
def test_foreign_arrays_are_read(wrap):
    q = random(2, 4, 9, 16).transpose(0, 2, 1, 3)
    expected = flashattn.attention(q, q, q)
    np.testing.assert_array_equal(flashattn.attention(wrap(q), wrap(q), wrap(q)), expected)


@pytest.mark.parametrize("wrap", [Versioned, Interface])
def test_foreign_arrays_are_written_in_place(wrap):
    q = random(2, 9, 4, 16)
    expected = flashattn.attention(q, q, q)
    out = np.zeros((2, 9, 4, 16), np.float32)
    foreign = wrap(out)
    assert flashattn.attention(q, q, q, o=foreign) is foreign
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("wrap", [lambda x: Versioned(x, read_only=True), Exporter])
def test_what_may_not_be_written_is_left_alone(wrap):
    """Capsules before DLPack 1.0 do not say: only those of libraries known to allow it are."""
    q = random(2, 9, 4, 16)
    out, grads = np.zeros((2, 9, 4, 16), np.float32), [np.zeros_like(q) for _ in range(3)]
    done, lse = flashattn.attention(q, q, q, return_lse=True)
    mask = np.zeros((2, 4, 9, 9), bool)
    calls = [lambda: flashattn.attention(q, q, q, o=wrap(out)),
             lambda: flashattn.merge([done], [lse], o=wrap(out)),
             lambda: flashattn.dropout_mask(2, 4, 9, 9, dropout=0.5, rng_seed=1, keep=wrap(mask))]
    calls += [lambda given={name: wrap(grads[i])}: flashattn.attention_backward(
        q, q, q, q, done, lse, **given) for i, name in enumerate(("dq", "dk", "dv"))]
    for call in calls:
        with pytest.raises(ValueError, match="is read-only by .*; give an array that may be wri"):
            call()
    assert not any(x.any() for x in (out, mask, *grads))


def test_old_capsules_of_libraries_that_allow_writing():
    q = random(2, 9, 4, 16)
    out = np.zeros((2, 9, 4, 16), np.float32)
    of_torch = type("Tensor", (Exporter,), {"__module__": "torch"})
    tensor = type("Parameter", (of_torch,), {"__module__": "users_own"})(out)
    assert flashattn.attention(q, q, q, o=tensor) is tensor
    np.testing.assert_array_equal(out, flashattn.attention(q, q, q))


def test_arrays_of_jax_never_change():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    q = random(2, 9, 4, 16)
    given = jax.numpy.asarray(q)
    np.testing.assert_array_equal(flashattn.attention(given, given, given),
                                  flashattn.attention(q, q, q))
    out = jax.numpy.zeros((2, 9, 4, 16), jax.numpy.float32)
    with pytest.raises(ValueError, match="o is read-only.* JAX's arrays never cha") as caught:
        flashattn.attention(q, q, q, o=out)
    assert caught.value.field == "o" and not np.asarray(out).any()


def test_nothing_is_copied():
    x = random(2, 9, 4, 16)
    for array in (x, Versioned(x), Exporter(x), Interface(x)):
        seen = _arrays.view(array, "x")
        assert int(_arrays.ffi.cast("intptr_t", seen.pointer)) == x.ctypes.data
        assert seen.strides == (576, 64, 16, 1)


def test_dlpack_bfloat16():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    q = random(2, 9, 4, 16).astype(bfloat16)
    expected = flashattn.attention(q, q, q)
    out = flashattn.attention(*[Bfloat16(q)] * 3)
    assert out.dtype == bfloat16
    np.testing.assert_array_equal(out, expected)


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    q = torch.randn(2, 4, 9, 16).to(torch.bfloat16)
    out = torch.empty_like(q)
    assert flashattn.attention(q, q, q, layout="bhsd", o=out) is out
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert torch.allclose(out.float(), expected.float(), atol=2e-2)


def test_small_arrays_come_from_anywhere():
    q = random(2, 9, 4, 16)
    lens, sink = np.array([9, 4]), np.array([0.5, 1, 2, 3], np.float32)
    expected = flashattn.attention(q, q, q, lens_kv=lens, sink=sink)
    for wrap in (Exporter, Interface, np.ndarray.tolist):
        got = flashattn.attention(q, q, q, lens_kv=wrap(lens), sink=wrap(sink))
        np.testing.assert_array_equal(got, expected)


def test_capsules_give_their_memory_back():
    collected = []

    class Watched(Exporter):
        def __dlpack__(self, **options):
            capsule = super().__dlpack__(**options)
            collected.append(capsule)
            return capsule

    x = random(1, 3, 2, 8)
    flashattn.attention(*[Watched(x)] * 3)
    # Only this list and the call's argument hold them; nothing of the package does.
    assert all(sys.getrefcount(c) <= 3 for c in collected)


def test_a_device_array_is_refused():
    class OnGpu(Exporter):
        def __dlpack__(self, **options):
            capsule = self.array.__dlpack__()
            tensor = _dlpack._Tensor.from_address(_dlpack._pointer(capsule, b"dltensor"))
            tensor.device_type = 2
            self.tensor = tensor
            return capsule

    x = OnGpu(random(1, 3, 2, 8))
    with pytest.raises(NotImplementedError, match="q lies on a device"):
        flashattn.attention(x, x, x)
    x.tensor.device_type = 1  # before NumPy gets it back


@pytest.mark.parametrize("make, error, words", [
    (lambda x: x.astype(np.float64), TypeError, "float64; convert it to float32, float16 or bfl"),
    (lambda x: x > 0, TypeError, "dtype bool; convert it to float32, float16 or bfloat16$"),
    (lambda x: x.astype(">f4"), TypeError, "foreign byte order"),
    (lambda x: x.tolist(), TypeError, "is a list"),
    (lambda x: np.ma.masked_array(x), TypeError, "masked array"),
    (lambda x: x[..., ::2], ValueError, "contiguous"),
    (lambda x: x[:, ::-1], ValueError, "negative stride"),
    (lambda x: x[0], ValueError, "expected 4 dimensions.*call attention_varlen"),
])
def test_refused_arrays(make, error, words):
    x = random(2, 9, 4, 16)
    with pytest.raises(error, match=words) as caught:
        flashattn.attention(make(x), x, x)
    assert isinstance(caught.value, flashattn.FlashAttentionError)
    assert caught.value.field == "q"


@pytest.mark.parametrize("array", [np.zeros((0, 3, 2, 8)), np.zeros((2, 0, 2, 8))])
def test_empty_arrays(array):
    array = array.astype(np.float32)
    assert flashattn.attention(array, array, array).shape == array.shape
