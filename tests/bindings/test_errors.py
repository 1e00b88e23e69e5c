"""Refusals: the right exception, with the library's message, status, reason and field."""
import pathlib
import re

import numpy as np
import pytest

import flashattn
from flashattn import Reason, Status
from flashattn._constants import LAYOUT, ArrayOptions
from numerics.arrays import random

X = random(2, 9, 4, 16)


def test_classes_are_also_the_built_in_ones():
    assert issubclass(flashattn.InvalidArgumentError, ValueError)
    assert issubclass(flashattn.UnsupportedError, NotImplementedError)
    assert issubclass(flashattn.OutOfMemoryError, MemoryError)
    assert issubclass(flashattn.ArrayTypeError, TypeError)
    for name in ("InvalidArgumentError", "UnsupportedError", "OutOfMemoryError", "ArrayTypeError"):
        assert issubclass(getattr(flashattn, name), flashattn.FlashAttentionError)


def test_the_librarys_message_arrives():
    with pytest.raises(ValueError) as caught:
        flashattn.check(dtype="float32", heads_q=7, heads_kv=2, dim_qk=16)
    error = caught.value
    assert error.status is Status.ERROR_INVALID_ARGUMENT
    assert error.reason is Reason.HEAD_RATIO
    assert error.field == "heads_kv"
    assert "heads_q = 7 is no multiple of heads_kv = 2" in str(error)


def test_unsupported_is_not_implemented():
    assert not flashattn.supported(dtype="float32", heads_q=1, dim_qk=64, device="cuda:99")
    with pytest.raises(NotImplementedError) as caught:
        flashattn.check(dtype="float32", heads_q=1, dim_qk=64, device="cuda:99")
    assert caught.value.status is Status.ERROR_UNSUPPORTED
    assert caught.value.reason in (Reason.NO_CUDA_BUILD, Reason.NO_DEVICE)
    assert str(caught.value)
    assert flashattn.supported(dtype="float32", heads_q=1, dim_qk=64)


def test_help_shows_every_keyword():
    import inspect
    assert "workspace_limit" in inspect.signature(flashattn.Plan).parameters
    assert "heads_kv" in inspect.signature(flashattn.check).parameters
    for name in ("attention", "attention_varlen", "attention_paged", "attention_backward"):
        # Every array of the header that goes with any layout is an option, without a line here.
        assert {"causal", *ArrayOptions.__annotations__} <= set(inspect.signature(
            getattr(flashattn, name)).parameters)


def test_a_status_of_a_newer_library_stays_a_number():
    error = flashattn.FlashAttentionError("message", 99, 98, "field")
    assert (error.status, error.reason, error.field) == (99, 98, "field")


@pytest.mark.parametrize("options, error, words", [
    (dict(dropout=1.5), ValueError, "dropout"),
    (dict(softcap=-1.0), ValueError, "softcap"),
    (dict(softcap="a"), TypeError, "softcap = 'a' is of type str; give a number"),
    (dict(scale="a"), TypeError, "scale = 'a' is of type str; give a number"),
    (dict(window=(1, 0.5)), TypeError, "window_right = 0.5 is of type float; give an integer"),
    (dict(threads="2"), TypeError, "threads = '2' is of type str; give an integer"),
    (dict(scale=float("inf")), ValueError, "scale"),
    (dict(scale=0), ValueError, "for 1/sqrt.dim_qk. give None"),
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
    (dict(determinism="yes"), ValueError, "determinism = 'yes' is none of"),
    (dict(rng_seed=-1, dropout=0.1), ValueError, "rng_seed"),
    (dict(dtype_o="int16"), TypeError, "dtype_o"),
    (dict(dtype_o="int8"), ValueError, "dtype_o = 'int8' is for k and v alone.* give float32, "),
    (dict(bias=np.zeros((3, 9, 9), np.float32)), ValueError, "does not broadcast"),
    (dict(bias=np.zeros((9, 1), np.float32)), ValueError,
     "last dimension, seqlen_kv, must be there, all 9"),
    (dict(bias=np.zeros((9, 9), np.float64)), TypeError, "bias has dtype float64; convert a mask"),
    (dict(bias=np.ones((9, 9), int)), TypeError, "int64; convert a mask to bool .True: visible."),
    (dict(bias=np.ones((2, 9), bool)), ValueError, r"keys\) becomes .* mask\[:, None, None, :"),
    (dict(alibi_slopes=np.zeros(3)), ValueError, "alibi_slopes has shape"),
    (dict(sink=np.zeros(3)), ValueError, "sink has shape"),
    (dict(block_mask=np.ones((3, 3), bool)), ValueError, "block_q = 0, but block_mask is given"),
    (dict(block_mask=np.ones((2, 3), bool), block_q=4, block_kv=4), ValueError, "block_mask"),
    (dict(block_mask=np.ones((2, 3), bool), block_q=4), ValueError, "block_kv = 0, but block_mask"),
    (dict(block_mask=np.ones((2, 3), bool), block_q=4, block_kv="a"), TypeError, "block_kv = 'a'"),
    (dict(block_mask=np.ones((3, 3), int), block_q=3, block_kv=3), TypeError, "convert it to bool"),
    (dict(causal="yes"), TypeError, "causal = 'yes' is of type str; give True or False"),
    (dict(top_left=2), TypeError, "top_left = 2 .* give True or False"),
    (dict(return_lse="no"), TypeError, "return_lse = 'no' .* give True or False"),
    (dict(causal=None), TypeError, "causal = None .* give True or False"),
    (dict(scale=np.array([0.5, 0.5])), TypeError, "scale = array.* give a number"),
    (dict(dropout="0.1"), TypeError, "dropout = '0.1' .* give a number"),
    (dict(threads=True), TypeError, "threads = True .* give an integer"),
    (dict(rng_seed="1", dropout=0.1), TypeError, "rng_seed = '1' is of type str; give an integer"),
    (dict(rng_offset=2**64, rng_seed=1, dropout=0.1), ValueError, "rng_offset = 184467440737"),
    (dict(dtype_o=True), TypeError, "dtype_o = True is none of float32"),
    (dict(layout=5), TypeError, "layout = 5 is of type int"),
    (dict(layout=["b"]), TypeError, "layout = ..b.. is of type list"),
    (dict(scale=float("nan")), ValueError, "or 0 for 1 / sqrt.dim_qk."),
    (dict(block_q=4, block_kv=4), ValueError, "block_mask"),
    (dict(lens_kv=[9]), ValueError, "lens_kv has shape"),
    (dict(lens_kv=[9, 10]), ValueError, "^lens_kv.1. = 10 is not within 0 and 9"),
    (dict(lens_q=[-1, 9]), ValueError, "^lens_q.0. = -1 is not within 0 and 9"),
    (dict(lens_kv=[9.0, 9.0]), TypeError, "lens_kv"),
    (dict(starts_kv=[1]), ValueError, "starts_kv has shape .1,.; expected .batch. = .2,."),
    (dict(starts_kv=[0, 10]), ValueError, "^starts_kv.1. = 10 is not within 0 and 9"),
    (dict(starts_kv=[-1, 0]), ValueError, "^starts_kv.0. = -1 is not within 0 and 9"),
    (dict(starts_kv=[0, 5], lens_kv=[9, 4]), ValueError, "^starts_kv.1. = 5 is not within 0 and 4"),
    (dict(tree=3), ValueError, "tree_bits"),
    (dict(tree=65, tree_bits=np.ones((2, 9, 2), np.uint32)), ValueError, "tree_bits has shape"),
    (dict(descale_k=np.ones((2, 4, 1), np.float32)), ValueError, "descale_k"),
    (dict(softmax_scale=1.0), TypeError, "unexpected option 'softmax_scale'; here it is scale; "),
    (dict(kv_lens=np.array([9])), TypeError, "unexpected option 'kv_lens'; here it is lens_kv; "),
    (dict(no_option=1), TypeError, "unexpected option 'no_option'; the options are "),
    (dict(causl=True), TypeError, "unexpected option 'causl', perhaps causal; the options are "),
    (dict(out=X), TypeError, "unexpected option 'out'; here it is o; "),
    (dict(enable_gqa=True), TypeError, "here it is not needed: k and v may have fewer heads; "),
    (dict(dropout=0.1), ValueError, "dropout = 0.1 is given without a seed"),
    (dict(o=np.zeros((2, 9, 4, 8), np.float32)), ValueError, "o has shape"),
    (dict(o=X), ValueError, "overlap"),
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
    with pytest.raises(TypeError, match="q and k have dtypes float32, float16.* convert"):
        flashattn.attention(X, X.astype(np.float16), X.astype(np.float16))


def test_keys_of_8_bits_beside_values_of_16():
    f8, bf16 = (getattr(pytest.importorskip("ml_dtypes"), n) for n in ("float8_e4m3fn", "bfloat16"))
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
    (dict(max_seqlen_kv="long"), ValueError, "without cu_seqlens_kv or page_table.* leave it out"),
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
        flashattn.attention(many, many, many, o=out)
    assert caught.value.field == "batch" and caught.value.reason is Reason.SIZE
    with pytest.raises(ValueError, match="^seqlen_kv = 2147483648 is past the range"):
        flashattn.dropout_mask(1, 1, 1, 2**31, dropout=0.5, rng_seed=0)


def test_the_field_that_is_past_its_range_is_named():
    wide = dict(dtype="float32", heads_q=1, dim_qk=8, varlen_q=True, max_batch=1, max_seqlen_q=1,
                max_seqlen_kv=1, max_total_q=2**32, workspace_limit=2**50)
    flashattn.check(**wide)
    for name, value in (("max_batch", 2**31), ("heads_q", -2**31 - 1), ("max_seqlen_kv", 2**31),
                        ("max_total_q", 2**63)):
        with pytest.raises(ValueError, match=f"^{name} = {value} is past") as caught:
            flashattn.check(**{**wide, name: value})
        assert caught.value.field == name


@pytest.mark.parametrize("description, words, field", [
    (dict(forward=False), "forward and backward are both False", "ops"),
    (dict(return_dbias=True, dtype_bias="float32"),
     "return_dbias is True, but backward is False.* set that", "features"),
    (dict(return_dbias=True, backward=True), "return_dbias is True, but there is no bias.* give "
     "bias= .a plan: dtype_bias=., or leave return_dbias out", "features"),
    (dict(return_dbias=True, backward=True, dtype_bias="bool"),
     "return_dbias is True, but a mask of bool has no gradient", "features"),
    (dict(return_dsink=True, backward=True), "return_dsink is True, but there is no sink",
     "features"),
    (dict(dlse=True), "dlse is True, but backward is False.* leave dlse out", "features"),
    (dict(page_size=16, backward=True), "PAGED_KV", "layout"),
    (dict(page_size=16, varlen_kv=True), "PAGED_KV", "layout"),
    (dict(block_kv=16), "BLOCKS", "block_kv"),
    (dict(tree=3, backward=True), "TREE, which is for forward only", "mask"),
    (dict(hidden_pages=True), "PAGES, by which page_table hides keys", "mask"),
    (dict(tree=257), "tree = 257 is above 256", "tree"),
    (dict(descale_block=4), "F8E4M3", "descale_block"),
    (dict(dtype="bool"), "dtype = 'bool' is none of float32, float16, bfloat16, float8", "dtype"),
    (dict(dtype_bias="int8"), "dtype_bias = 'int8' is none of float32, float16, bfloat16, bool",
     "dtype_bias"),
    (dict(alibi="yes"), "alibi = 'yes' .* give True or False", "alibi"),
    (dict(dtype="int8"), "dtype = 'int8' is for k and v alone, dtype_kv", "dtype"),
    (dict(window_left=3), "unexpected keyword 'window_left'; here it is window, .left, right.; "
     "the keywords are dtype, heads_q, dim_qk, heads_kv, ", None),
    (dict(softmax_scale=1), "unexpected keyword 'softmax_scale'; here it is scale; ", None),
    (dict(max_bach=1), "unexpected keyword 'max_bach', perhaps max_batch; the keywords", None),
])
def test_descriptions_that_cannot_be(description, words, field):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=words) as caught:
        flashattn.check(**{**dict(dtype="float32", heads_q=2, dim_qk=8), **description})
    assert field is None or caught.value.field == field
    for function in (flashattn.Plan, flashattn.supported):
        with pytest.raises(type(caught.value), match=words):
            function(**{**dict(dtype="float32", heads_q=2, dim_qk=8), **description})


def test_options_that_a_function_has_not():
    lse, made = np.zeros((2, 4, 9), np.float32), flashattn.Plan(dtype="float32", heads_q=4,
                                                                dim_qk=16)
    for words, call in [
            ("option 'out'; here it is o; the options are part_o, ",
             lambda: flashattn.merge([X], [lse], out=X)),
            ("option 'seed'; here it is rng_seed; ",
             lambda: flashattn.dropout_mask(1, 1, 2, 2, dropout=0.5, seed=1)),
            ("option 'softmax_scale'; here it is scale; ",
             lambda: flashattn.quantize(X, softmax_scale=1)),
            ("option 'softmax_scale'; the options are k_cache, ",
             lambda: flashattn.append_kv(X, X, [0, 0], X, X, softmax_scale=1)),
            ("array 'out'; here it is o; the arrays are o, ",
             lambda: made.forward(X, X, X, out=X)),
            ("array 'causal'; it is for the plan to say; ",
             lambda: made.forward(X, X, X, causal=True))]:
        with pytest.raises(TypeError, match=f"^unexpected {words}"):
            call()
    with pytest.raises(TypeError, match="^heads_q is not given; give dtype, heads_q and dim_qk"):
        flashattn.Plan(dtype="float32")


def test_gradients_of_what_is_not_there():
    lse = np.zeros((2, 4, 9), np.float32)
    for name, array in (("return_dbias", "bias"), ("return_dsink", "sink")):
        with pytest.raises(ValueError, match=f"^{name} is True, but there is no {array} .* give "
                                             f"{array}=") as caught:
            flashattn.attention_backward(X, X, X, X, X, lse, **{name: True})
        assert caught.value.field == "features"


def test_int8_is_for_caches():
    x = np.zeros(X.shape, np.int8)
    with pytest.raises(TypeError, match="^q has dtype int8, .* alone; convert it to float32") as e:
        flashattn.attention(x, x, x)
    assert e.value.field == "q"
    flashattn.attention(X, x, x)


def test_append_needs_the_lengths():
    with pytest.raises(ValueError, match="^lens_kv is None, .* numpy.zeros") as caught:
        flashattn.append_kv(X.copy(), X.copy(), None, X, X)
    assert caught.value.field == "lens_kv" and caught.value.reason is Reason.NULL_POINTER


def test_one_is_no_plural():
    page = X[:1, :1]
    with pytest.raises(ValueError, match="page_table has 1 page of 1 token for a sequence, 1 in"):
        flashattn.attention_paged(page, page, page, [[0]], [1], max_seqlen_kv=2)
    with pytest.raises(ValueError, match="the cache holds 1 sequence, new tokens are of 2"):
        flashattn.append_kv(X[:1].copy(), None, [0, 0], X)


def test_names_are_those_of_the_header():
    """Whichever layer refuses: the field is a member of the header's structures, and the message
    names what a keyword is called here."""
    q, pool = X[0], random(4, 8, 4, 16)
    members = {name for _, fields in LAYOUT.values() for name, _, _ in fields}
    calls = {
        "cu_seqlens_q": lambda: flashattn.attention_varlen(q, q, q, [0, 9], [0, 9],
                                                           max_seqlen_q=3),
        "cu_seqlens_kv": lambda: flashattn.attention_varlen(q, q, q, [0, 9], [0, 10]),
        "lens_kv": lambda: flashattn.attention(X, X, X, lens_kv=[3, 10]),
        "starts_kv": lambda: flashattn.attention(X, X, X, starts_kv=[3, 10]),
        "o": lambda: flashattn.attention(X, X, X, o=X),
        "bias": lambda: flashattn.attention(X, X, X, bias=np.zeros((2, 9), np.float32)),
        "page_table": lambda: flashattn.attention_paged(X, pool, pool, [[0, 4], [1, 2]], [16, 16]),
        "heads_kv": lambda: flashattn.check(dtype="float32", heads_q=1, heads_kv=2, dim_qk=8),
        "dim_v": lambda: flashattn.check(dtype="float32", heads_q=1, dim_qk=8, dim_v=1100),
        "dtype_o": lambda: flashattn.check(dtype="float16", dtype_o="bfloat16", heads_q=1,
                                           dim_qk=8),
        "max_total_kv": lambda: flashattn.check(dtype="float32", heads_q=1, dim_qk=8,
                                                max_total_kv=4),
        "max_seqlen_kv": lambda: flashattn.check(dtype="float32", heads_q=1, dim_qk=8,
                                                 max_seqlen_kv=-4),
        "window_left": lambda: flashattn.check(dtype="float32", heads_q=1, dim_qk=8,
                                               window=(-2, 0)),
        "window_right": lambda: flashattn.check(dtype="float32", heads_q=1, dim_qk=8,
                                                window=(0, "a")),
        "part_lse": lambda: flashattn.merge([X], []),
        "dtype_bias": lambda: flashattn.check(dtype="float32", heads_q=1, dim_qk=8,
                                              dtype_bias="int8"),
    }
    for name, call in calls.items():
        with pytest.raises(flashattn.FlashAttentionError, match=rf"\b{name}\b") as caught:
            call()
        field = caught.value.field.partition(".")[0]
        assert name in members, name
        assert field == name


@pytest.mark.parametrize("sources, call", [
    ("julia/src/*.jl", r"refuse\(:\w+,\s*"), ("rust/*/src/*.rs", r"invalid\(\s*Reason::\w+,\s*"),
])
def test_other_languages_name_members(sources, call):
    """Names that their sources spell out are members of the header's structures, or parameters of
    its functions."""
    known = {name for _, fields in LAYOUT.values() for name, _, _ in fields} | {"op", "plan"}
    bindings = pathlib.Path(__file__).resolve().parents[2] / "bindings"
    found = {name for path in bindings.glob(sources)
             for name in re.findall(call + r'[":](\w+)["\s,]', path.read_text(encoding="utf-8"))}
    assert found and found <= known, found - known


def test_dropout_mask_has_no_stream_on_the_host():
    with pytest.raises(ValueError, match="stream is given without keep") as caught:
        flashattn.dropout_mask(1, 1, 2, 2, dropout=0.5, stream=3)
    assert caught.value.reason is Reason.STREAM


@pytest.mark.parametrize("max_seqlen_kv", [17, 2**40])
def test_page_table_is_not_read_past_its_columns(max_seqlen_kv):
    pool = random(4, 8, 4, 16)
    flashattn.attention_paged(X, pool, pool, [[0, 3], [1, 2]], None, max_seqlen_kv=16)
    with pytest.raises(ValueError, match=f"max_seqlen_kv = {max_seqlen_kv}, but page_table has 2 "
                                         "pages of 8 tokens .* 16 in all; give at most that"):
        flashattn.attention_paged(X, pool, pool, [[0, 3], [1, 2]], None,
                                  max_seqlen_kv=max_seqlen_kv)


def test_packed_or_paged():
    plan = flashattn.Plan(dtype="float32", heads_q=4, dim_qk=16, varlen_kv=True)
    with pytest.raises(ValueError, match="cu_seqlens_kv and page_table are both given"):
        plan.forward(X[:1], X[0], X[0], cu_seqlens_kv=[0, 9], page_table=[[0]])


def test_page_table_past_the_pool():
    pool = random(4, 8, 4, 16)
    with pytest.raises(ValueError, match="page"):
        flashattn.attention_paged(X, pool, pool, [[0, 4], [1, 2]], [16, 16])
