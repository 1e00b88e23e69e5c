"""Refusals: the right exception, with the library's sentence, status, reason and field."""
import numpy as np
import pytest

import flashattn
from flashattn import Reason, Status
from naive import random

X = random(2, 9, 4, 16)


def test_classes_are_also_the_built_in_ones():
    assert issubclass(flashattn.InvalidArgumentError, ValueError)
    assert issubclass(flashattn.UnsupportedError, NotImplementedError)
    assert issubclass(flashattn.OutOfMemoryError, MemoryError)
    assert issubclass(flashattn.ArrayTypeError, TypeError)
    for name in ("InvalidArgumentError", "UnsupportedError", "OutOfMemoryError", "ArrayTypeError"):
        assert issubclass(getattr(flashattn, name), flashattn.FlashAttentionError)


def test_the_librarys_sentence_arrives():
    with pytest.raises(ValueError) as caught:
        flashattn.check(dtype="float32", heads=7, kv_heads=2, dim=16)
    error = caught.value
    assert error.status is Status.ERROR_INVALID_ARGUMENT
    assert error.reason is Reason.HEAD_RATIO
    assert error.field.startswith("heads")
    assert "heads" in str(error)


def test_unsupported_is_not_implemented():
    assert not flashattn.supported(dtype="float32", heads=1, dim=64, device="cuda:99")
    with pytest.raises(NotImplementedError) as caught:
        flashattn.check(dtype="float32", heads=1, dim=64, device="cuda:99")
    assert caught.value.status is Status.ERROR_UNSUPPORTED
    assert caught.value.reason in (Reason.NO_CUDA_BUILD, Reason.NO_DEVICE)
    assert str(caught.value)
    assert flashattn.supported(dtype="float32", heads=1, dim=64)


def test_help_shows_every_keyword():
    import inspect
    assert "workspace_limit" in inspect.signature(flashattn.Plan).parameters
    assert "kv_heads" in inspect.signature(flashattn.check).parameters
    for name in ("attention", "attention_varlen", "attention_paged", "attention_backward"):
        assert {"causal", "alibi_slopes"} <= set(inspect.signature(
            getattr(flashattn, name)).parameters)


def test_a_status_of_a_newer_library_stays_a_number():
    error = flashattn.FlashAttentionError("sentence", 99, 98, "field")
    assert (error.status, error.reason, error.field) == (99, 98, "field")


@pytest.mark.parametrize("options, error, words", [
    (dict(dropout=1.5), ValueError, "dropout"),
    (dict(softcap=-1.0), ValueError, "softcap"),
    (dict(scale=float("inf")), ValueError, "scale"),
    (dict(scale=0), ValueError, "for 1/sqrt.dim. give None"),
    (dict(window=(1, 2, 3)), ValueError, "window"),
    (dict(window=(-2, 0)), ValueError, "window"),
    (dict(window=2**40), ValueError, "window_left = .*past the range"),
    (dict(window=True), TypeError, "window"),
    (dict(chunk=-1), ValueError, "chunk"),
    (dict(layout="bsdh"), ValueError, "layout"),
    (dict(device="tpu"), ValueError, "device"),
    (dict(deterministic="yes"), ValueError, "deterministic"),
    (dict(seed=-1, dropout=0.1), ValueError, "seed"),
    (dict(out_dtype="int8"), TypeError, "out_dtype"),
    (dict(bias=np.zeros((3, 9, 9), np.float32)), ValueError, "does not broadcast"),
    (dict(bias=np.zeros((9, 1), np.float32)), ValueError, "keys must be there"),
    (dict(bias=np.zeros((9, 9), np.float64)), TypeError, "bias has dtype float64"),
    (dict(alibi_slopes=np.zeros(3)), ValueError, "alibi_slopes has shape"),
    (dict(sink=np.zeros(3)), ValueError, "sink has shape"),
    (dict(block_mask=np.ones((3, 3), bool)), ValueError, "block_size"),
    (dict(block_mask=np.ones((2, 3), bool), block_size=(4, 4)), ValueError, "block_mask"),
    (dict(kv_lens=[9]), ValueError, "kv_lens has shape"),
    (dict(kv_lens=[9, 10]), ValueError, "lens_kv|kv_lens"),
    (dict(kv_lens=[9.0, 9.0]), TypeError, "kv_lens"),
    (dict(softmax_scale=1.0), TypeError, "unexpected option 'softmax_scale'"),
    (dict(out=np.zeros((2, 9, 4, 8), np.float32)), ValueError, "out has shape"),
    (dict(out=X), ValueError, "overlap|out"),
])
def test_bad_arguments(options, error, words):
    with pytest.raises(error, match=words):
        flashattn.attention(X, X, X, **options)


@pytest.mark.parametrize("k, v, words", [
    (X[..., :8], X, "head dimension"),
    (X, X[:, :5], "only their last"),
    (X[:1], X[:1], "holds 1 sequences"),
    (X[:, :, :3], X[:, :, :3], "heads"),
])
def test_arrays_that_do_not_go_together(k, v, words):
    with pytest.raises(ValueError, match=words):
        flashattn.attention(X, k, v)


def test_mixed_dtypes():
    with pytest.raises(TypeError, match="q, k, v have dtypes float32, float16, float16"):
        flashattn.attention(X, X.astype(np.float16), X.astype(np.float16))


@pytest.mark.parametrize("cu", [[0, 5, 3, 9], [0, 5, 10], [-1, 9], [], [0, 2**31]])
def test_offsets_that_cannot_be(cu):
    with pytest.raises(ValueError):
        flashattn.attention_varlen(X[0], X[0], X[0], cu, cu)


def test_page_table_past_the_pool():
    pool = random(4, 8, 4, 16)
    with pytest.raises(ValueError, match="page"):
        flashattn.attention_paged(X, pool, pool, [[0, 4], [1, 2]], [16, 16])
