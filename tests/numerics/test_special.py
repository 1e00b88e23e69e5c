"""Special values: large and tiny scores, infinities and NaN, which may reach only those results
that depend on them."""
import numpy as np
import pytest

from . import capi, reference
from .case import Case
from .data import make_data
from .dtypes import EPSILON
from .harness import Call, run
from .repro import command, verify
from .tolerance import check

BASE = Case(batch=2, seqlen_q=70, seqlen_kv=131, heads_q=2, heads_kv=1, dim_qk=16, backward=True)
MASKS = {
    "causal": dict(causal=True), "top_left": dict(causal=True, top_left=True),
    "window": dict(window=(20, 3)), "chunk": dict(chunk=33), "u8": dict(bias="u8", bias_dims="hr"),
    "blocks": dict(blocks=(16, 16), block_dims="h"), "tree": dict(tree=90, backward=False),
    "decode": dict(
        causal=True, window=(40, 0), seqlen_q=2, seqlen_kv=400, splits=3, backward=False)}
SPECIAL = [np.nan, np.inf]


def assert_same_where(result, clean, name, untouched, case, device):
    """untouched: per sequence, a mask that broadcasts over the named result. Rounding may differ:
    a kernel may take another way around numbers that are not finite."""
    epsilon = EPSILON[case.dtype]
    for b, keep in enumerate(untouched):
        got, want = getattr(result, name)[b], getattr(clean, name)[b]
        keep = np.broadcast_to(keep, got.shape)
        with np.errstate(invalid="ignore"):
            close = np.abs(got - want) <= 2 * epsilon * np.maximum(np.abs(want), 1)
        different = keep & ~(close | (got == want))
        assert not different.any(), "%s, sequence %d: %d numbers changed that do not depend on " \
            "it, the first at %s: %s" % (name, b, different.sum(),
                                         np.argwhere(different)[0].tolist(), command(case, device))


def seen(case, data):
    """Per sequence (heads, rows, keys)."""
    return [np.broadcast_to(
        reference.all_visible(case, data, b, case.length_q(b), case.length_kv(b)),
        (case.heads_q, case.length_q(b), case.length_kv(b))) for b in range(case.batch)]


def test_a_softcap_of_minus_zero_is_none(device):
    case = BASE.replace(dtype="bf16", dim_qk=64, alibi="h", seqlen_q=200, determinism=1)
    assert run(case.replace(softcap=-0.0), device).bits() == run(case, device).bits()


@pytest.mark.smoke
@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_bad_query_spoils_its_own_row_only(device, value, dtype):
    case = BASE.replace(dtype=dtype, causal=True, backward=False)
    data = make_data(case)
    clean = run(case, device, data)
    data.q[1][37, 1, 5] = value
    result = run(case, device, data)
    own = np.ones((70, 2, 1), bool)
    own[37, 1] = False
    assert_same_where(result, clean, "o", [True, own], case, device)
    assert_same_where(result, clean, "lse", [True, own[..., 0].T], case, device)
    assert np.isnan(result.o[1][37, 1]).all(), command(case, device)


@pytest.mark.smoke
@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("mask", sorted(MASKS))
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("array", ["k", "v"])
def test_a_bad_key_reaches_only_rows_that_see_it(device, value, mask, dtype, array):
    """0 * NaN must not happen in tiles where the key is masked out for some rows."""
    if array == "v" and device.name != "cpu":
        pytest.skip("tensor cores multiply whole tiles, hidden weights of 0 included")
    case = BASE.replace(dtype=dtype, **{**MASKS[mask], "backward": False})
    data = make_data(case)
    clean = run(case, device, data)
    at = case.seqlen_kv - 5
    getattr(data, array)[0][at, 0, 3] = value
    result = run(case, device, data)
    blind = ~seen(case, data)[0][:, :, at]
    assert_same_where(result, clean, "o", [blind.T[:, :, None], True], case, device)
    assert_same_where(result, clean, "lse", [blind, True], case, device)
    if np.isnan(value):
        element = slice(None) if array == "k" else 3
        assert np.isnan(result.o[0].swapaxes(0, 1)[~blind][:, element]).all(), \
            command(case, device)


@pytest.mark.parametrize("array", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_bad_value_spoils_only_gradients_of_its_head(device, array, dtype):
    """Within a sequence and a KV head, 0 * NaN is at home in the products of the backward pass."""
    case = BASE.replace(dtype=dtype, causal=True, heads_q=4, heads_kv=2)
    data = make_data(case)
    clean = run(case, device, data)
    getattr(data, array)[0][40, 0, 3] = np.nan
    result = run(case, device, data)
    other_head = np.arange(4) >= 2
    assert_same_where(result, clean, "dq", [other_head[None, :, None], True], case, device)
    for name in ("dk", "dv"):
        other = np.array([False, True])[None, :, None]
        assert_same_where(result, clean, name, [other, True], case, device)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
def test_large_logits(device, dtype, causal):
    """Scores of thousands: one key takes all, nothing overflows."""
    case = BASE.replace(dtype=dtype, amplitude=20.0, causal=causal)
    data = make_data(case)
    result = run(case, device, data)
    for name in ("o", "lse", "dq", "dk", "dv"):
        assert all(np.isfinite(x[~np.isneginf(x)] if name == "lse" else x).all()
                   for x in getattr(result, name)), name
    verify(case.replace(backward=False), device)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_equal_scores_of_any_size(device, dtype):
    """The same number everywhere: the mean of v, however large the scores."""
    # Larger, and the naive float16 product overflows.
    for size in (1e-30, 1.0, 60.0) + ((1e4,) if dtype != "f16" else ()):
        case = BASE.replace(dtype=dtype, backward=False, lse=False)
        data = make_data(case)
        data.q, data.k = ([np.full_like(x, np.float32(size)) for x in part]
                          for part in (data.q, data.k))
        check(case, data, run(case, device, data))


def of_size(data, size):
    for part in (data.q, data.k, data.v):
        for x in part:
            x *= np.float32(size)


def later_larger(data, size):
    for part in (data.k, data.v):
        for x in part:
            x[70:] *= np.float32(size)


def first_zero(data, size):
    of_size(data, size)
    for part in (data.k, data.v):
        for x in part:
            x[:70] = 0


def columns_apart(data, size):
    for x in data.v:
        x *= np.geomspace(size, 1, x.shape[-1]).astype(np.float32)


# What is done to the numbers, with which size, and how much larger the scores are.
RANGES = {"tiny": (of_size, 1e-6, 1e-12), "large": (of_size, 1e4, 1e8),
          "huge": (of_size, 1e6, 1e12), "least": (of_size, 1e-13, 1e-26),
          "later_larger": (later_larger, 1e6, 1e6), "first_zero": (first_zero, 1e-6, 1e-12),
          "columns_apart": (columns_apart, 1e-5, 1.0)}


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", sorted(RANGES))
def test_fp32_keeps_its_range(device, name, dim):
    """GPUs split numbers of fp32 into two of fp16, whose range is small."""
    change, size, scores = RANGES[name]
    case = BASE.replace(dim_qk=dim, dim_v=dim, seqlen_q=150, seqlen_kv=203, backward=False,
                        scale=dim ** -0.5 / scores)
    data = make_data(case)
    change(data, size)
    check(case, data, run(case, device, data))


@pytest.mark.smoke
@pytest.mark.parametrize("features", [dict(chunk=1), dict(seqlen_kv=1), dict(window=(0, 0))])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_row_of_one_key_is_its_value(device, dtype, features):
    """To the accuracy of fp32: its weight, whatever the score, is 1."""
    fields = dict(batch=2, seqlen_q=97, seqlen_kv=161, heads_q=4, heads_kv=2, dim_qk=64,
                  dtype=dtype, dtype_o="f32", amplitude=4.0)
    verify(Case(**{**fields, **features}), device)


@pytest.mark.smoke
@pytest.mark.parametrize("softcap", [0.0, 9.0])
def test_parts_of_keys_begin_within_a_tile(device, softcap):
    """Of tiles that the blocks of queries of another sequence make worth sharing."""
    verify(Case(cu_q=[530, 10], cu_kv=[20, 1100], heads_q=2, dim_qk=64, dtype="bf16",
                softcap=softcap, backward=True), device)


@pytest.mark.smoke
@pytest.mark.parametrize("bias", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("sink", [False, True])
def test_rows_of_minus_infinity(device, bias, sink):
    """o = 0, lse = -inf or the sink, no NaN in any gradient; also with huge finite negatives."""
    case = BASE.replace(bias=bias, bias_empty=0.4, dbias="bhr", sink=sink, dsink=sink, dlse=sink)
    verify(case, device)
    data = make_data(case)
    lowest = {"f32": -3e38, "f16": -65504.0, "bf16": -3e38}[bias]
    hidden = np.isneginf(data.bias).all(-1, keepdims=True)
    data.bias = np.where(hidden, np.float32(lowest), data.bias)
    result = run(case, device, data)
    for name in ("o", "dq", "dk", "dv"):
        assert all(np.isfinite(x).all() for x in getattr(result, name)), name


@pytest.mark.smoke
def test_infinite_sink(device):
    """A sink of -inf is no sink."""
    case = BASE.replace(causal=True, sink=True, dsink=True, seqlen_q=131, seqlen_kv=70)
    data = make_data(case)
    data.sink[:] = -np.inf
    result = run(case, device, data)
    check(case, data, result)
    assert (result.dsink == 0).all()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_an_empty_call_needs_no_sink(device, dtype):
    """Nothing of its arrays is read; the gradient of a sink is 0."""
    case = Case(batch=2, seqlen_q=0, seqlen_kv=0, heads_q=2, dim_qk=16, sink=True, dsink=True,
                backward=True, dtype=dtype)
    call = Call(case, device)
    call.inputs["sink"] = capi.ffi.NULL
    result = call.backward(call.forward())
    assert result.dsink.shape == (2,) and not result.dsink.any()
