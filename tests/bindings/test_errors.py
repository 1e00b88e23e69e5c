"""Refusals: the right exception, with the library's sentence, status, reason and field."""
import re

import numpy as np
import pytest

import flashattn
from flashattn import Reason, Status
from flashattn._errors import named
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
    assert error.field == "kv_heads"
    assert "heads = 7 is no multiple of kv_heads = 2" in str(error)


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
    (dict(window=(1, 0.5)), TypeError, "window.1. = 0.5 is of type float; give an integer"),
    (dict(threads="2"), TypeError, "threads = '2' is of type str; give an integer"),
    (dict(scale=float("inf")), ValueError, "scale"),
    (dict(scale=0), ValueError, "for 1/sqrt.dim. give None"),
    (dict(scale=1e-50), ValueError, "scale = 1e-50 is 0 in float32.* give None"),
    (dict(softcap=1e-50), ValueError, "softcap = 1e-50 is 0 in float32.* give 0 or None"),
    (dict(scale=10**400), ValueError, "scale = 1000.* at most 3.4"),
    (dict(window=(1, 2, 3)), ValueError, "window"),
    (dict(window=(-2, 0)), ValueError, "window"),
    (dict(window=2**40), ValueError, "window.0. = .*past the range .* at most 2147483647"),
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
    (dict(bias=np.zeros((9, 9), np.float64)), TypeError, "bias has dtype float64; convert a mask"),
    (dict(bias=np.ones((9, 9), int)), TypeError, "int64; convert a mask to bool .True: visible."),
    (dict(bias=np.ones((2, 9), bool)), ValueError, r"keys\) becomes .* mask\[:, None, None, :"),
    (dict(alibi_slopes=np.zeros(3)), ValueError, "alibi_slopes has shape"),
    (dict(sink=np.zeros(3)), ValueError, "sink has shape"),
    (dict(block_mask=np.ones((3, 3), bool)), ValueError, "block_size"),
    (dict(block_mask=np.ones((2, 3), bool), block_size=(4, 4)), ValueError, "block_mask"),
    (dict(block_mask=np.ones((2, 3), bool), block_size=4), ValueError, "block_size = 4; expected"),
    (dict(block_mask=np.ones((2, 3), bool), block_size=(4, "a")), TypeError, "block_size.1. = 'a'"),
    (dict(block_mask=np.ones((3, 3), int), block_size=(3, 3)), TypeError, "convert it to bool"),
    (dict(causal="yes"), TypeError, "causal = 'yes' is of type str; give True or False"),
    (dict(top_left=2), TypeError, "top_left = 2 .* give True or False"),
    (dict(return_lse="no"), TypeError, "return_lse = 'no' .* give True or False"),
    (dict(causal=None), TypeError, "causal = None .* give True or False"),
    (dict(scale=np.array([0.5, 0.5])), TypeError, "scale = array.* give a number"),
    (dict(dropout="0.1"), TypeError, "dropout = '0.1' .* give a number"),
    (dict(threads=True), TypeError, "threads = True .* give an integer"),
    (dict(seed="1", dropout=0.1), TypeError, "seed = '1' is of type str; give an integer"),
    (dict(offset=2**64, seed=1, dropout=0.1), ValueError, "offset = 18446744073709551616; it"),
    (dict(out_dtype=True), TypeError, "out_dtype = True is none of float32"),
    (dict(layout=5), TypeError, "layout = 5 is of type int"),
    (dict(layout=["b"]), TypeError, "layout = ..b.. is of type list"),
    (dict(scale=float("nan")), ValueError, "or None for 1 / sqrt.dim."),
    (dict(block_size=(4, 4)), ValueError, "without block_mask.* leave it out"),
    (dict(kv_lens=[9]), ValueError, "kv_lens has shape"),
    (dict(kv_lens=[9, 10]), ValueError, "^kv_lens.1. = 10 is not within 0 and 9"),
    (dict(q_lens=[-1, 9]), ValueError, "^q_lens.0. = -1 is not within 0 and 9"),
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
    (X[:1], X[:1], r"k holds 1 sequence, q holds 2; .*broadcast_to\(k, \(2, 9, 4, 16\)\)"),
    (np.repeat(X, 2, 0), np.repeat(X, 2, 0), "k holds 4 sequences, q holds 2; give as many"),
    (X[:, :, :3], X[:, :, :3], "q has 4 heads by layout=\"bshd\", no multiple of the 3 .* repeat"),
])
def test_arrays_that_do_not_go_together(k, v, words):
    with pytest.raises(ValueError, match=words):
        flashattn.attention(X, k, v)


def test_mixed_dtypes():
    with pytest.raises(TypeError, match="q, k, v have dtypes float32, float16, float16.* convert"):
        flashattn.attention(X, X.astype(np.float16), X.astype(np.float16))


def test_a_cache_of_8_bits():
    f8, bf16 = (getattr(pytest.importorskip("ml_dtypes"), n) for n in ("float8_e4m3fn", "bfloat16"))
    with pytest.raises(NotImplementedError, match="float8_e4m3fn beside q of bfloat16.* convert k"):
        flashattn.attention(X.astype(bf16), X.astype(f8), X.astype(f8))
    with pytest.raises(TypeError, match="must be the same"):
        flashattn.attention(X.astype(bf16), X.astype(f8), X.astype(bf16))


def test_heads_where_tokens_are_looked_for():
    q, k = random(2, 4, 5, 16), random(2, 2, 13, 16)
    with pytest.raises(ValueError, match="PyTorch's order.*say layout=\"bhsd\"") as caught:
        flashattn.attention(q, k, k)
    assert caught.value.reason is Reason.HEAD_RATIO
    with pytest.raises(ValueError, match="say layout=\"htd\""):
        flashattn.attention_varlen(q[0], k[0], k[0], [0, 4], [0, 2])
    with pytest.raises(ValueError, match="say layout=\"bshd\""):
        flashattn.attention(q.transpose(0, 2, 1, 3), *[k.transpose(0, 2, 1, 3)] * 2, layout="bhsd")
    for page_layout, other in (("pshd", "phsd"), ("phsd", "pshd")):
        pool = random(*((3, 2, 16, 16) if page_layout == "pshd" else (3, 16, 2, 16)))
        with pytest.raises(ValueError, match=f"say page_layout=\"{other}\""):
            flashattn.attention_paged(random(2, 1, 4, 16), pool, pool, [[0], [1]], [5, 5],
                                      page_layout=page_layout)
    same = random(2, 4, 8, 16)  # lengths that divide: only what stands beside can tell
    for beside in (dict(bias=np.ones((8, 8), bool)), dict(sink=np.zeros(4)),
                   dict(alibi_slopes=np.zeros((2, 4)))):
        with pytest.raises(ValueError, match="say layout=\"bhsd\""):
            flashattn.attention(same, same, same, **beside)
        flashattn.attention(same, same, same, layout="bhsd", **beside)


@pytest.mark.parametrize("cu", [[0, 5, 3, 9], [0, 5, 10], [-1, 9], [], [0, 2**31]])
def test_offsets_that_cannot_be(cu):
    with pytest.raises(ValueError):
        flashattn.attention_varlen(X[0], X[0], X[0], cu, cu)


@pytest.mark.parametrize("lengths, error, words", [
    (dict(max_seqlen_q=1), ValueError, "max_seqlen_q = 1 is given without cu_seqlens_q"),
    (dict(max_seqlen_k="long"), ValueError, "without cu_seqlens_k or page_table.* leave it out"),
    (dict(cu_seqlens_q=[0, 9], max_seqlen_q="long"), TypeError, "max_seqlen_q is a str"),
    (dict(cu_seqlens_q=[0, 9], max_seqlen_q=2**31), ValueError,
     "seqlen_q = 2147483648 is past the range of its field; give at most 2147483647"),
])
def test_longest_sequences_that_cannot_be(lengths, error, words):
    q = X[0] if lengths.get("cu_seqlens_q") else X[:1]
    with pytest.raises(error, match=words) as caught:
        flashattn.attention_varlen(q, X[:1], X[:1], **lengths)
    assert isinstance(caught.value, flashattn.FlashAttentionError)


def test_arrays_past_the_fields():
    many = np.broadcast_to(np.zeros((1, 1, 1, 8), np.float32), (2**31, 1, 1, 8))
    out = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), many.shape, (4, 32, 32, 4))
    with pytest.raises(ValueError, match="^batch = 2147483648 is past") as caught:
        flashattn.attention(many, many, many, out=out)
    assert caught.value.field == "batch" and caught.value.reason is Reason.SIZE
    with pytest.raises(ValueError, match="^seqlen_k = 2147483648 is past the range"):
        flashattn.dropout_mask(1, 1, 1, 2**31, dropout=0.5, seed=0)


def test_the_field_that_is_past_its_range_is_named():
    wide = dict(dtype="float32", heads=1, dim=8, varlen_q=True, max_batch=1, max_seqlen_q=1,
                max_seqlen_k=1, max_total_q=2**32, workspace_limit=2**50)
    flashattn.check(**wide)
    for name, value in (("max_batch", 2**31), ("heads", -2**31 - 1), ("max_seqlen_k", 2**31),
                        ("max_total_q", 2**63)):
        with pytest.raises(ValueError, match=f"^{name} = {value} is past") as caught:
            flashattn.check(**{**wide, name: value})
        assert caught.value.field == name


@pytest.mark.parametrize("description, words, field", [
    (dict(forward=False), "forward and backward are both False", "forward"),
    (dict(return_dbias=True, bias="float32"), "return_dbias needs backward", "return_dbias"),
    (dict(return_dbias=True, backward=True), "return_dbias needs bias", "return_dbias"),
    (dict(return_dbias=True, backward=True, bias="bool"), "which has no gradient", "return_dbias"),
    (dict(return_dsink=True, backward=True), "return_dsink needs sink", "return_dsink"),
    (dict(dlse=True), "dlse needs backward; give backward, or leave dlse out", "dlse"),
    (dict(page_size=16, backward=True), "is for forward only", "page_size"),
    (dict(page_size=16, varlen_k=True), "is not packed, too", "page_size"),
    (dict(dtype="bool"), "dtype = 'bool' is none of float32, float16, bfloat16, float8", "dtype"),
    (dict(bias="int8"), "bias = 'int8' is none of float32, float16, bfloat16, bool, uint8", "bias"),
    (dict(alibi="yes"), "alibi = 'yes' .* give True or False", "alibi"),
    (dict(window_left=3), "unexpected keyword", None),
])
def test_descriptions_that_cannot_be(description, words, field):
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        flashattn.check(**{**dict(dtype="float32", heads=2, dim=8), **description})
    assert field is None or caught.value.field == field


def test_names_of_the_header_do_not_arrive():
    """Every sentence that the library has for a call from here speaks of what was given here."""
    q, pool = X[0], random(4, 8, 4, 16)
    calls = [
        lambda: flashattn.attention_varlen(q, q, q, [0, 9], [0, 9], max_seqlen_k=3),
        lambda: flashattn.attention_varlen(q, q, q, [0, 9], [0, 9], max_seqlen_q=3),
        lambda: flashattn.attention_varlen(q, q, q, [0, 9], [0, 10]),
        lambda: flashattn.attention(X, X, X, kv_lens=[3, 10]),
        lambda: flashattn.attention(X, X, X, out=X),
        lambda: flashattn.attention_paged(X, pool, pool, [[0, 4], [1, 2]], [16, 16]),
        lambda: flashattn.check(dtype="float32", heads=1, kv_heads=2, dim=8),
        lambda: flashattn.check(dtype="float32", heads=1, dim=8, dim_v=600),
        lambda: flashattn.check(dtype="float16", out_dtype="bfloat16", heads=1, dim=8),
        lambda: flashattn.check(dtype="float32", heads=1, dim=8, max_total_k=4),
        lambda: flashattn.check(dtype="float32", heads=1, dim=8, max_seqlen_k=-4),
        lambda: flashattn.check(dtype="float32", heads=1, dim=8, window=(-2, 0)),
    ]
    said = []
    for call in calls:
        with pytest.raises(flashattn.FlashAttentionError) as caught:
            call()
        said.append(f"{caught.value.field}: {caught.value}")
    wrong = [s for s in said if re.search(r"_kv\b|heads_q|\blens_q|inputs\.|shape\.|\.data|dim_qk|"
                                          r"window_|dtype_o\b|FLASHATTN_", s)]
    assert not wrong
    for words in ("above max_seqlen_k = 3;", "above max_seqlen_q = 3;", "cu_seqlens_k: ",
                  "kv_lens: ", "out: ", "page_table: ", "kv_heads: ", "the layout bit varlen_k",
                  "out_dtype = bfloat16 does not go with dtype = float16; use float16 or float32"):
        assert any(words in s for s in said), (words, said)
    assert named("heads_q, xheads_q, inputs.k.data, o.data, o.stride_seq") == (
        "heads, xheads_q, k, out, out.stride_seq")


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
