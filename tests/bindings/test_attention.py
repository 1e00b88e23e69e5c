"""The forward functions against a plain softmax, in every way to hand arrays over."""
import numpy as np
import pytest

import flashattn
from numerics import arrays
from numerics.arrays import close, random


def qkv(batch=2, seqlen_q=9, seqlen_kv=13, heads_q=4, heads_kv=2, dim_qk=16, dim_v=24):
    return (random(batch, seqlen_q, heads_q, dim_qk),
            random(batch, seqlen_kv, heads_kv, dim_qk, seed=1),
            random(batch, seqlen_kv, heads_kv, dim_v, seed=2))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_kv", [1, 2, 4])
def test_against_softmax(causal, heads_kv):
    q, k, v = qkv(heads_kv=heads_kv)
    out, lse = flashattn.attention(q, k, v, causal=causal, return_lse=True)
    expected, expected_lse = arrays.attention(q, k, v, causal=causal)
    close(out, expected)
    close(lse, expected_lse)
    assert out.dtype == lse.dtype == np.float32 and lse.shape == (2, 4, 9)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "hbsd", "shbd"])
def test_layouts_are_only_strides(layout):
    q, k, v = qkv()
    order = ["bshd".index(letter) for letter in layout]
    moved = [np.ascontiguousarray(x.transpose(order)) for x in (q, k, v)]
    expected = flashattn.attention(q, k, v, causal=True)
    out = flashattn.attention(*moved, causal=True, layout=layout)
    np.testing.assert_array_equal(out, expected.transpose(order))
    assert out.flags.c_contiguous
    # The same memory through a transposed view.
    views = [x.transpose(np.argsort(order)) for x in moved]
    np.testing.assert_array_equal(flashattn.attention(*views, causal=True), expected)


def test_packed_qkv_and_strided_views():
    packed = random(2, 9, 3, 4, 16)
    q, k, v = packed[:, :, 0], packed[:, :, 1], packed[:, :, 2]
    expected = flashattn.attention(q.copy(), k.copy(), v.copy())
    np.testing.assert_array_equal(flashattn.attention(q, k, v), expected)
    wide = random(2, 18, 8, 32)
    part = wide[:, ::2, 1::2, 8:24]
    np.testing.assert_array_equal(flashattn.attention(part, part, part),
                                  flashattn.attention(*[part.copy()] * 3))


def test_repeated_and_single_dimensions():
    q, k, v = qkv(heads_kv=1, dim_v=16)
    shared = np.broadcast_to(k[:1], k.shape)  # batch stride 0
    np.testing.assert_array_equal(flashattn.attention(q, shared, v),
                                  flashattn.attention(q, shared.copy(), v))
    one = np.broadcast_to(random(16), (1, 1, 1, 16))  # strides 0, but only one row
    close(flashattn.attention(one, one, one), one)
    one = np.broadcast_to(random(16), (1, 3, 1, 16))
    close(flashattn.attention(one, one, one), one)
    one = np.broadcast_to(random(16), (2, 3, 4, 16))  # one row for all
    close(flashattn.attention(one, one, one), one)
    with pytest.raises(ValueError, match="the same place"):
        flashattn.attention(one, one, one, o=np.lib.stride_tricks.as_strided(
            np.zeros(16, np.float32), one.shape, one.strides))


def test_out_is_written_in_place():
    q, k, v = qkv()
    expected = flashattn.attention(q, k, v)
    out = np.full((2, 9, 8, 24), np.nan, np.float32)
    target = out[:, :, ::2]
    assert flashattn.attention(q, k, v, o=target) is target
    np.testing.assert_array_equal(target, expected)
    assert np.isnan(out[:, :, 1::2]).all()
    target.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        flashattn.attention(q, k, v, o=target)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits(dtype):
    kind = np.float16 if dtype == "float16" else pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = (x.astype(kind) for x in qkv())
    expected, _ = arrays.attention(q, k, v)
    out = flashattn.attention(q, k, v)
    assert out.dtype == kind
    close(out, expected, 3e-2)
    exact = flashattn.attention(q, k, v, dtype_o="float32")
    assert exact.dtype == np.float32
    close(exact, expected, 2e-2)
    # Views of such types have strides too.
    wide = np.zeros((2, 9, 8, 32), kind)
    wide[:, :, ::2, :16] = q
    np.testing.assert_array_equal(flashattn.attention(wide[:, :, ::2, :16], k, v), out)


@pytest.mark.parametrize("shape", [(2, 4, 9, 13), (1, 4, 9, 13), (4, 1, 13), (2, 1, 9, 13), (9, 13),
                                   (13,)])
@pytest.mark.parametrize("kind", [np.float32, np.float16, bool])
def test_bias_broadcasts(shape, kind):
    q, k, v = qkv()
    bias = random(*shape) > -1 if kind is bool else random(*shape).astype(kind)
    out, lse = flashattn.attention(q, k, v, bias=bias, return_lse=True)
    expected, expected_lse = arrays.attention(q, k, v, bias=bias)
    close(out, expected)
    close(lse, expected_lse)


def test_masks_agree_with_their_boolean_form():
    q, k, v = qkv(seqlen_q=13)
    i, j = np.indices((13, 13))
    for options, visible in [
            (dict(window=2), abs(i - j) <= 2), (dict(window=(3, -1)), j >= i - 3),
            (dict(window=[None, 1]), j <= i + 1), (dict(chunk=4), i // 4 == j // 4),
            (dict(causal=True, window=(3, 0)), (j <= i) & (j >= i - 3)),
            (dict(block_mask=np.eye(4, dtype=bool), block_q=4, block_kv=4), i // 4 == j // 4),
            (dict(tree=5, tree_bits=np.full((1, 1, 1), 0b01101, np.uint32), causal=True),
             np.where(j < 8, j <= i, 0b01101 >> np.clip(j - 8, 0, 4) & 1) != 0),
            # Each query its own, in a word and in two: keys 0 and 12 have bits 20 and 32 of 33.
            (dict(tree=5, tree_bits=np.arange(1, 27, 2).reshape(1, 13, 1)),
             (j < 8) | ((2 * i + 1) >> np.clip(j - 8, 0, 4) & 1 == 1)),
            (dict(tree=33, tree_bits=np.eye(13, 2, -11, np.uint32)[None] + [1 << 20, 0]),
             (j == 0) | ((i == 12) & (j == 12)))]:
        close(flashattn.attention(q, k, v, **options),
              arrays.attention(q, k, v, bias=visible)[0])
    q = q[:, :9]
    close(flashattn.attention(q, k, v, causal=True, top_left=True),
          arrays.attention(q, k, v, bias=(j <= i)[:9])[0])


def test_alibi_softcap_scale_sink():
    q, k, v = qkv()
    slopes = np.array([0.5, 0.25, 0.125, 0.0625])
    i, j = np.indices((9, 13))
    alibi = -slopes[:, None, None] * abs(i + 4 - j)
    expected, _ = arrays.attention(q, k, v, bias=alibi)
    close(flashattn.attention(q, k, v, alibi_slopes=slopes), expected)
    close(flashattn.attention(q, k, v, alibi_slopes=np.stack([slopes, slopes])), expected)
    close(flashattn.attention(q * 2, k, v, scale=0.125),
          arrays.attention(q, k, v)[0])
    close(flashattn.attention(q, k, v, softcap=1e4), arrays.attention(q, k, v)[0], 1e-3)
    out, lse = flashattn.attention(q, k, v, sink=np.zeros(4), return_lse=True)
    plain, plain_lse = arrays.attention(q, k, v)
    close(lse, np.logaddexp(plain_lse, 0))
    close(out, plain * np.exp(plain_lse - lse).transpose(0, 2, 1)[..., None])


def test_lengths_and_empty_rows():
    q, k, v = qkv()
    out, lse = flashattn.attention(q, k, v, lens_q=[9, 4], lens_kv=[5, 0], return_lse=True)
    close(out[0], arrays.attention(q[:1], k[:1, :5], v[:1, :5])[0][0])
    assert (out[1] == 0).all() and (lse[1, :, :4] == -np.inf).all()


@pytest.mark.parametrize("causal", [False, True])
def test_left_padding(causal):
    """Keys before a sequence's start do not exist: NaN there reaches no result, and no gradient is
    written there."""
    q, k, v = qkv()
    starts, lens = [4, 0], [13, 6]
    k[0, :4], v[0, :4], k[1, 6:], v[1, 6:] = [np.nan] * 4
    options = dict(causal=causal, starts_kv=starts, lens_kv=lens)
    o, lse = flashattn.attention(q, k, v, return_lse=True, **options)
    dq, dk, dv = (np.full_like(x, 7) for x in (q, k, v))
    flashattn.attention_backward(o, q, k, v, o, lse, dq=dq, dk=dk, dv=dv, **options)
    for b in range(2):
        keys = slice(starts[b], lens[b])
        alone = [q[b:b + 1], k[b:b + 1, keys], v[b:b + 1, keys]]
        expected, expected_lse = arrays.attention(*alone, causal=causal)
        close(o[b], expected[0])
        close(lse[b], expected_lse[0])
        for mine, theirs in zip((dq[b], dk[b, keys], dv[b, keys]),
                                arrays.backward(o[b:b + 1], *alone, causal=causal)):
            close(mine, theirs[0])
        for gradient in (dk[b], dv[b]):
            assert (gradient[:starts[b]] == 7).all() and (gradient[lens[b]:] == 7).all()
    # The same of packed sequences, whose starts count from where they lie.
    cu_q, cu_kv = [0, 9, 18], [0, 13, 26]
    packed = flashattn.attention_varlen(*[x.reshape(-1, *x.shape[2:]) for x in (q, k, v)], cu_q,
                                        cu_kv, **options)
    np.testing.assert_array_equal(packed.reshape(o.shape), o)


@pytest.mark.parametrize("layout", ["thd", "htd"])
def test_varlen(layout):
    lens_q, lens_k = [3, 0, 7, 1], [5, 2, 4, 1]
    cu_q, cu_k = np.cumsum([0, *lens_q]), np.cumsum([0, *lens_k])  # int64: converted
    q, k, v = random(11, 4, 16), random(12, 2, 16, seed=1), random(12, 2, 8, seed=2)
    given = [x if layout == "thd" else np.ascontiguousarray(x.transpose(1, 0, 2))
             for x in (q, k, v)]
    out, lse = flashattn.attention_varlen(*given, cu_q, cu_k, causal=True, layout=layout,
                                          return_lse=True)
    out = out if layout == "thd" else out.transpose(1, 0, 2)
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        expected, expected_lse = arrays.attention(q[None, rows], k[None, keys], v[None, keys],
                                                     causal=True)
        close(out[rows], expected[0])
        close(lse[:, rows], expected_lse[0])
    bounded = flashattn.attention_varlen(*given, cu_q, cu_k, 16, 16, causal=True, layout=layout)
    close(bounded if layout == "thd" else bounded.transpose(1, 0, 2), out)


@pytest.mark.parametrize("rows", [1, 40])
def test_latent(rows):
    """v as a slice of k's rows (latent attention), dense and in pages of 1 and 64, as if it were an
    array of its own."""
    q, cache = random(2, rows, 16, 576), random(2, 128, 1, 576)
    expected = flashattn.attention(q, cache, cache[..., :512].copy(), causal=True, scale=0.1)
    out = flashattn.attention(q, cache, cache[..., :512], causal=True, scale=0.1)
    np.testing.assert_array_equal(out, expected)
    for size in (1, 64):
        pages = cache.reshape(-1, size, 1, 576)
        table = np.arange(len(pages)).reshape(2, -1)
        out = flashattn.attention_paged(q, pages, pages[..., :512], table, [128, 128], causal=True,
                                        scale=0.1)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("page_layout", ["pshd", "phsd"])
def test_paged(page_layout):
    q, k, v = qkv(seqlen_q=2)
    table = np.array([[3, 1, 0, 6], [5, 2, 4, 7]])
    pages = [np.full((8, 4, 2, x.shape[3]), np.nan, np.float32) for x in (k, v)]
    for b in range(2):
        for j in range(13):
            for pool, x in zip(pages, (k, v)):
                pool[table[b, j // 4], j % 4] = x[b, j]
    if page_layout == "phsd":
        pages = [np.ascontiguousarray(pool.transpose(0, 2, 1, 3)) for pool in pages]
    lens = [13, 6]
    out = flashattn.attention_paged(q, *pages, table, lens, causal=True, page_layout=page_layout)
    for b in range(2):
        close(out[b], arrays.attention(q[b:b + 1], k[b:b + 1, :lens[b]], v[b:b + 1, :lens[b]],
                                          causal=True)[0][0])
    flat = flashattn.attention_paged(q.reshape(4, 4, 16), *pages, table, lens, causal=True,
                                     cu_seqlens_q=[0, 2, 4], page_layout=page_layout)
    close(flat.reshape(out.shape), out)


def test_token_indices():
    """Each query has a list of tokens of its own, filled with -1; one has none."""
    q, k, v = qkv(batch=1)
    table = np.random.default_rng(0).integers(-4, 13, (9, 6)).astype(np.int32)
    table[3] = -1
    pools = [x.reshape(13, 1, *x.shape[2:]) for x in (k, v)]
    out = flashattn.attention_paged(q.reshape(9, 1, 4, 16), *pools, table, [6] * 9,
                                    hidden_pages=True)
    for i, row in enumerate(table):
        seen = row[row >= 0]
        if not len(seen):
            assert not out[i].any()
            continue
        close(out[i], arrays.attention(q[:, i:i + 1], k[:, seen], v[:, seen])[0][0])
    with pytest.raises(flashattn.InvalidArgumentError, match="page_table"):
        flashattn.attention_paged(q.reshape(9, 1, 4, 16), *pools, table, [6] * 9)


def test_merge_restores_the_whole():
    q, k, v = qkv()
    whole, whole_lse = flashattn.attention(q, k, v, return_lse=True)
    parts = [flashattn.attention(q, k[:, s], v[:, s], return_lse=True)
             for s in (slice(0, 4), slice(4, 5), slice(5, 5), slice(5, 13))]
    out, lse = flashattn.merge(*zip(*parts))
    close(out, whole)
    close(lse, whole_lse)
    half, _ = flashattn.merge(*zip(*parts), dtype_o="float16")
    assert half.dtype == np.float16
    with pytest.raises(ValueError, match="expected as many"):
        flashattn.merge([whole], [])


def test_dropout_mask_is_that_of_attention():
    q, k, v = qkv(seqlen_q=33, seqlen_kv=40)
    keep = flashattn.dropout_mask(2, 4, 33, 40, dropout=0.25, rng_seed=7, rng_offset=3)
    assert keep.dtype == bool and abs(keep.mean() - 0.75) < 0.03
    out = flashattn.attention(q, k, v, dropout=0.25, rng_seed=7, rng_offset=3)
    expected = arrays.Attention(q, k, v, dropout=0.25, rng=(7, 3))
    close(out, expected.o)
    np.testing.assert_array_equal(keep, np.stack([part.keep != 0 for part in expected.parts]))
    other = flashattn.dropout_mask(2, 4, 33, 40, dropout=0.25, rng_seed=8, rng_offset=3)
    assert (other != keep).any()


def test_a_dropout_has_a_seed():
    """Without one each layer and step would drop the same weights."""
    q = random(2, 9, 4, 16)
    lse = np.zeros((2, 4, 9), np.float32)
    plan = flashattn.Plan(dtype="float32", heads_q=4, dim_qk=16, dropout=0.5, backward=True)
    calls = [lambda **more: flashattn.attention(q, q, q, dropout=0.5, **more),
             lambda **more: flashattn.attention_varlen(*[q[0]] * 3, [0, 9], [0, 9], dropout=0.5,
                                                       **more),
             lambda **more: flashattn.attention_paged(q, q, q, [[0], [1]], None, dropout=0.5,
                                                      **more),
             lambda **more: flashattn.attention_backward(q, q, q, q, q, lse, dropout=0.5,
                                                         **more)[0],
             lambda **more: flashattn.dropout_mask(2, 4, 9, 9, dropout=0.5, **more),
             lambda **more: plan.forward(q, q, q, **more),
             lambda **more: plan.backward(q, q, q, q, q, lse, **more)[0]]
    for call in calls:
        for more in ({}, dict(rng_offset=5), dict(rng_seed=None)):
            with pytest.raises(ValueError, match="dropout = 0.5 is given without a seed; give "
                                                 "rng_seed=, an integer of which ea") as caught:
                call(**more)
            assert caught.value.field == "rng_seed"
            assert caught.value.reason is flashattn.Reason.DROPOUT
        np.testing.assert_array_equal(call(rng_seed=0), call(rng_seed=np.int64(0), rng_offset=0))
        for other in (dict(rng_seed=1), dict(rng_seed=0, rng_offset=1)):
            assert (call(rng_seed=0) != call(**other)).any()
    np.testing.assert_array_equal(flashattn.attention(q, q, q),
                                  flashattn.attention(q, q, q, dropout=0.0))
