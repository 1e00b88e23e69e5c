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
    (dict(softcap="a"), TypeError, "softcap = 'a' is of type str; give a number"),
    (dict(scale="a"), TypeError, "scale = 'a' is of type str; give a number"),
    (dict(window=(1, 0.5)), TypeError, "window_right = 0.5 is of type float; give an integer"),
    (dict(threads="2"), TypeError, "threads = '2' is of type str; give an integer"),
    (dict(scale=float("inf")), ValueError, "scale"),
    (dict(scale=0), ValueError, "for 1/sqrt.dim. give None"),
    (dict(scale=1e-50), ValueError, "scale = 1e-50 is 0 in float32.* give None"),
    (dict(softcap=1e-50), ValueError, "softcap = 1e-50 is 0 in float32.* give 0 or None"),
    (dict(scale=10**400), ValueError, "scale = 1000.* at most 3.4"),
    (dict(window=(1, 2, 3)), ValueError, "window"),
    (dict(window=(-2, 0)), ValueError, "window"),
    (dict(window=2**40), ValueError, "window_left = .*past the range .* at most 2147483647"),
    (dict(window=True), TypeError, "window"),
    (dict(chunk=-1), ValueError, "chunk"),
    (dict(layout="bsdh"), ValueError, "layout"),
    (dict(device="tpu"), ValueError, "device"),
    (dict(device="cpufoo"), ValueError, "device = 'cpufoo'; expected"),
    (dict(device="cpu:"), ValueError, "device = 'cpu:'; expected"),
    (dict(device="cpu:\u00b2"), ValueError, "device = .*; expected"),
    (dict(device="cpu:7"), ValueError, "host memory, but device = 'cpu:7'"),
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
    (dict(block_size=(4, 4)), ValueError, "without block_mask.* leave it out"),
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


@pytest.mark.parametrize("lengths, error, words", [
    (dict(max_seqlen_q=1), ValueError, "max_seqlen_q = 1 is given without cu_seqlens_q"),
    (dict(max_seqlen_k="long"), ValueError, "without cu_seqlens_k or page_table.* leave it out"),
    (dict(cu_seqlens_q=[0, 9], max_seqlen_q="long"), TypeError, "max_seqlen_q is a str"),
    (dict(cu_seqlens_q=[0, 9], max_seqlen_q=2**31), ValueError,
     "shape.seqlen_q = 2147483648 is past the range of its field; give at most 2147483647"),
])
def test_longest_sequences_that_cannot_be(lengths, error, words):
    q = X[0] if lengths.get("cu_seqlens_q") else X[:1]
    with pytest.raises(error, match=words) as caught:
        flashattn.attention_varlen(q, X[:1], X[:1], **lengths)
    assert isinstance(caught.value, flashattn.FlashAttentionError)


def test_arrays_past_the_fields():
    many = np.broadcast_to(np.zeros((1, 1, 1, 8), np.float32), (2**31, 1, 1, 8))
    out = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), many.shape, (4, 32, 32, 4))
    with pytest.raises(ValueError, match="shape.batch = 2147483648 is past") as caught:
        flashattn.attention(many, many, many, out=out)
    assert caught.value.field == "shape.batch" and caught.value.reason is Reason.SIZE
    with pytest.raises(ValueError, match="shape.seqlen_k?v? = 2147483648 is past the range"):
        flashattn.dropout_mask(1, 1, 1, 2**31, dropout=0.5)


def test_the_field_that_is_past_its_range_is_named():
    wide = dict(dtype="float32", heads=1, dim=8, varlen_q=True, max_batch=1, max_seqlen_q=1,
                max_seqlen_k=1, max_total_q=2**32, workspace_limit=2**50)
    flashattn.check(**wide)
    for name, field, value in (("max_batch", "max_batch", 2**31), ("heads", "heads_q", -2**31 - 1),
                               ("max_total_q", "max_total_q", 2**63)):
        with pytest.raises(ValueError, match=f"^{field} = {value} is past") as caught:
            flashattn.check(**{**wide, name: value})
        assert caught.value.field == field


def test_dropout_mask_has_no_stream_on_the_host():
    with pytest.raises(ValueError, match="stream is given without out") as caught:
        flashattn.dropout_mask(1, 1, 2, 2, dropout=0.5, stream=3)
    assert caught.value.reason is Reason.STREAM


@pytest.mark.parametrize("max_seqlen_k", [17, 2**40])
def test_page_table_is_not_read_past_its_columns(max_seqlen_k):
    pool = random(4, 8, 4, 16)
    flashattn.attention_paged(X, pool, pool, [[0, 3], [1, 2]], None, max_seqlen_k=16)
    with pytest.raises(ValueError, match=f"max_seqlen_k = {max_seqlen_k}, but page_table has 2 "
                                         "pages of 8 tokens .* 16 in all; give at most that"):
        flashattn.attention_paged(X, pool, pool, [[0, 3], [1, 2]], None, max_seqlen_k=max_seqlen_k)


def test_packed_or_paged():
    plan = flashattn.Plan(dtype="float32", heads=4, dim=16, varlen_k=True)
    with pytest.raises(ValueError, match="cu_seqlens_k and page_table are both given"):
        plan.forward(X[:1], X[0], X[0], cu_seqlens_k=[0, 9], page_table=[[0]])


def test_page_table_past_the_pool():
    pool = random(4, 8, 4, 16)
    with pytest.raises(ValueError, match="page"):
        flashattn.attention_paged(X, pool, pool, [[0, 4], [1, 2]], [16, 16])
