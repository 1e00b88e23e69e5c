"""append_kv() in Python: caches, pages, rotation, 8 bits, in place, and what it refuses."""
import concurrent.futures

import numpy as np
import pytest

import flashattn
from flashattn import Reason

RNG = np.random.default_rng(0)
LENS = [3, 0, 15]


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def caches(batch=3, rows=20, heads=2, dim=16):
    return normal(batch, rows, heads, dim), normal(batch, rows, heads, dim)


def rotated(x, first, base=10000.0, interleaved=False, dim=None):
    """x (batch, tokens, heads, dim) at positions first[b] + i, in float64."""
    x = x.astype(np.float64)
    dim = dim or x.shape[-1]
    rows = np.asarray(first)[:, None] + np.arange(x.shape[1])
    angles = rows[..., None, None] * base ** (-np.arange(dim // 2) / (dim // 2))
    a, b = (x[..., 0:dim:2], x[..., 1:dim:2]) if interleaved else \
        (x[..., :dim // 2], x[..., dim // 2:dim])
    out = x.copy()
    turned = a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)
    if interleaved:
        out[..., 0:dim:2], out[..., 1:dim:2] = turned
    else:
        out[..., :dim // 2], out[..., dim // 2:dim] = turned
    return out


@pytest.mark.parametrize("interleaved", [False, True])
def test_decode_is_attention_over_the_concatenation(interleaved):
    k_cache, v_cache = caches()
    before = k_cache.copy()
    q, k, v = normal(3, 2, 4, 16), normal(3, 2, 2, 16), normal(3, 2, 2, 16)
    made = flashattn.append_kv(k_cache, v_cache, LENS, k, v, q, rotary_base=10000.0, rotary_dim=8,
                               rotary_interleaved=interleaved)
    assert made.lens_kv.tolist() == [5, 2, 17] and made.lens_kv.dtype == np.int32
    turn = dict(interleaved=interleaved, dim=8)
    np.testing.assert_allclose(made.q, rotated(q, LENS, **turn), atol=1e-6)
    o = flashattn.attention(made.q, k_cache, v_cache, lens_kv=made.lens_kv, causal=True)
    for b, n in enumerate(LENS):
        np.testing.assert_allclose(k_cache[b, n:n + 2], rotated(k, LENS, **turn)[b], atol=1e-6)
        np.testing.assert_array_equal(v_cache[b, n:n + 2], v[b])
        np.testing.assert_array_equal(k_cache[b, :n], before[b, :n])
        np.testing.assert_array_equal(k_cache[b, n + 2:], before[b, n + 2:])
        whole = [np.concatenate([cache[b:b + 1, :n], cache[b:b + 1, n:n + 2]], 1)
                 for cache in (k_cache, v_cache)]
        np.testing.assert_array_equal(o[b], flashattn.attention(made.q[b:b + 1], *whole,
                                                                causal=True)[0])


def test_tables_positions_and_starts():
    angles = np.arange(40)[:, None] * 10000.0 ** (-np.arange(8) / 8)
    tables = dict(rotary_cos=np.cos(angles).astype(np.float32),
                  rotary_sin=np.sin(angles).astype(np.float32))
    k = normal(3, 1, 2, 16)
    for more, first in ((dict(), LENS), (dict(positions=[7, 1, 30]), [7, 1, 30]),
                        (dict(starts_kv=[2, 0, 5]), [1, 0, 10])):
        k_cache, _ = caches()
        flashattn.append_kv(k_cache, None, LENS, k, **tables, **more)
        for b, n in enumerate(LENS):
            np.testing.assert_allclose(k_cache[b, n], rotated(k, first)[b, 0], atol=1e-6)
    q = normal(3, 1, 4, 16)
    made = flashattn.append_kv(k_cache, None, LENS, q=q, **tables)
    assert made.lens_kv is None
    np.testing.assert_allclose(made.q, rotated(q, LENS), atol=1e-6)


def test_packed_tokens_into_pages_in_place():
    pool = np.zeros((9, 4, 2, 16), np.float32)
    k, v, q = normal(7, 2, 16), normal(7, 2, 16), normal(7, 4, 16)
    lens = np.array([3, 8, 0], np.int32)
    table = [[5, 1, 0], [2, 3, 7], [8, 6, 4]]
    given = q.copy()
    made = flashattn.append_kv(pool, pool.copy(), lens, k, v, q, cu_seqlens_q=[0, 2, 3, 7],
                               page_table=table, q_out=q, lens_out=lens, rotary_base=100.0)
    assert made.lens_kv is lens and lens.tolist() == [5, 9, 4] and made.q is q
    at = 0
    for b, (n, count) in enumerate(zip([3, 8, 0], [2, 1, 4])):
        for i in range(count):
            row = pool[table[b][(n + i) // 4], (n + i) % 4]
            np.testing.assert_allclose(row, rotated(k[None, None, at], [n + i], 100.0)[0, 0],
                                       atol=1e-6)
            np.testing.assert_allclose(q[at], rotated(given[None, None, at], [n + i], 100.0)[0, 0],
                                       atol=1e-6)
            at += 1
    assert np.count_nonzero(np.abs(pool).sum((2, 3))) == 7


@pytest.mark.parametrize("name, most", [("float8_e4m3fn", 448), ("int8", 127)])
def test_a_cache_of_8_bits(name, most):
    f8 = np.dtype(getattr(pytest.importorskip("ml_dtypes"), name, np.int8))
    narrow = (lambda x: np.rint(x).astype(f8)) if name == "int8" else (lambda x: x.astype(f8))
    k_cache, v_cache = (np.zeros((3, 20, 2, 16), f8) for _ in range(2))
    k, v = normal(3, 2, 2, 16), normal(3, 2, 2, 16)
    descales = RNG.uniform(0.01, 0.02, (3, 2, 3)).astype(np.float32)
    flashattn.append_kv(k_cache, v_cache, LENS, k, v, descale_k=descales, descale_block=8)
    for b, n in enumerate(LENS):
        for i in range(2):
            scale = descales[b, :, (n + i) // 8, None]
            exact = np.clip(k[b, i] * (np.float32(1) / scale), -most, most)
            np.testing.assert_array_equal(k_cache[b, n + i], narrow(exact))
        np.testing.assert_array_equal(v_cache[b, n:n + 2], narrow(v[b]))


@pytest.mark.parametrize("name, largest", [("float8_e4m3fn", 448), ("int8", 127)])
def test_descales_are_made_in_place(name, largest):
    """Blocks of 8 tokens: the first of sequence 0 and the second of 2 held some."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = getattr(ml_dtypes, name, name)
    k_cache, v_cache = (np.zeros((3, 20, 2, 16), dtype) for _ in range(2))
    k, v = normal(3, 8, 2, 16), normal(3, 8, 2, 16)
    descales = [np.full((3, 2, 3), 1e-3, np.float32) for _ in range(2)]
    lens = flashattn.append_kv(k_cache, v_cache, [3, 0, 11], k, v, descale_k=descales[0],
                               descale_v=descales[1], descale_block=8,
                               update_descales=True).lens_kv
    assert lens.tolist() == [11, 8, 19]
    for cache, new, descale in ((k_cache, k, descales[0]), (v_cache, v, descales[1])):
        untouched = descale[1, :, 1:]
        assert (untouched == np.float32(1e-3)).all()
        assert (np.frexp(descale[0, :, :2])[0] == 0.5).all()  # powers of two
        for b, n in enumerate([3, 0, 11]):
            of_rows = descale[b][:, (n + np.arange(8)) // 8].T[..., None]
            rows = cache[b, n:n + 8].astype(np.float32)
            assert np.abs(rows).max() > largest / 4
            assert (np.abs(rows * of_rows - new[b]) <= of_rows * largest / 16).all()


def test_layouts_and_threads_of_the_caller():
    k_cache, v_cache = caches()
    k, v = normal(3, 2, 2, 16), normal(3, 2, 2, 16)
    wanted = k_cache.copy()
    flashattn.append_kv(wanted, v_cache.copy(), LENS, k, v, rotary_base=10000.0)
    heads_first = np.ascontiguousarray(k_cache.swapaxes(1, 2))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        flashattn.append_kv(heads_first, v_cache.swapaxes(1, 2), LENS, k.swapaxes(1, 2),
                            v.swapaxes(1, 2), layout="bhsd", cache_layout="bhsd",
                            rotary_base=10000.0, parallel=pool)
    np.testing.assert_array_equal(heads_first.swapaxes(1, 2), wanted)


def _read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("change, reason, words", [
    (dict(lens_kv=[3, 0, 19]), Reason.LENGTHS, "more than the 20 rows of sequence 2"),
    (dict(lens_kv=[3, 0]), Reason.SIZE, "lens_kv has shape"),
    (dict(k=normal(3, 2, 3, 16)), Reason.SIZE, "k has shape"),
    (dict(k=normal(3, 2, 2, 16).astype(np.float16)), Reason.DTYPE, "have dtypes"),
    (dict(k_cache=None), Reason.NULL_POINTER, "without k_cache"),
    (dict(k=None, v=None), Reason.NULL_POINTER, "give one"),
    (dict(rotary_cos=normal(9, 8)), Reason.NULL_POINTER, "go together"),
    (dict(rotary_base=0.5), Reason.VALUE, "rotary_base = 0.5 is not a finite number"),
    (dict(rotary_base=1e4, rotary_dim=18), Reason.SIZE, "rotary_dim = 18"),
    (dict(q=normal(3, 2, 4, 16)), Reason.NULL_POINTER, "without which q stays"),
    (dict(q_out=normal(3, 2, 4, 16)), Reason.NULL_POINTER, "without q"),
    (dict(max_seqlen_q=3), Reason.SIZE, "only with cu_seqlens_q"),
    (dict(page_table=[[30], [1], [2]]), Reason.LENGTHS, "page_table\\[0\\]\\[0\\] = 30"),
    (dict(k_cache=_read_only(normal(3, 20, 2, 16))), Reason.VALUE, "read-only"),
    (dict(update_descales=True), Reason.DTYPE, "only with a cache of F8E4M3 or I8"),
    (dict(update_descales=True, descale_k=np.ones((1, 2, 1), np.float32)), Reason.SIZE,
     "descale_k has shape"),
    (dict(update_descales=True, descale_k=_read_only(np.ones((3, 2, 1), np.float32))), Reason.VALUE,
     "read-only"),
])
def test_refusals(change, reason, words):
    k_cache, v_cache = caches()
    given = dict(k_cache=k_cache, v_cache=v_cache, lens_kv=LENS, k=normal(3, 2, 2, 16),
                 v=normal(3, 2, 2, 16), **{})
    given.update(change)
    with pytest.raises(flashattn.FlashAttentionError, match=words) as caught:
        flashattn.append_kv(**given)
    assert caught.value.reason == reason


def test_packed_caches():
    """VARLEN_KV: sequence b holds rows cu_seqlens_kv[b] and later."""
    k, v = normal(5, 2, 16), normal(5, 2, 16)
    k_cache, v_cache = normal(30, 2, 16), normal(30, 2, 16)
    before = k_cache.copy()
    offsets = dict(cu_seqlens_q=[0, 3, 5], cu_seqlens_kv=[0, 10, 30])
    lens = flashattn.append_kv(k_cache, v_cache, [4, 0], k, v, **offsets).lens_kv
    assert lens.tolist() == [7, 2]
    np.testing.assert_array_equal(k_cache[4:7], k[:3])
    np.testing.assert_array_equal(v_cache[10:12], v[3:])
    k_cache[4:7], k_cache[10:12] = before[4:7], before[10:12]
    np.testing.assert_array_equal(k_cache, before)
    with pytest.raises(ValueError, match="cu_seqlens_kv holds 1 sequence, new tokens are of 2"):
        flashattn.append_kv(k_cache, v_cache, [4, 0], k, v, cu_seqlens_q=[0, 3, 5],
                            cu_seqlens_kv=[0, 30])
