"""float8_e4m3fn in Python: arrays of ml_dtypes and PyTorch, descales, results, quantize()."""
import numpy as np
import pytest

import flashattn
from flashattn import Reason

ml_dtypes = pytest.importorskip("ml_dtypes")
F8 = np.dtype(ml_dtypes.float8_e4m3fn)
RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((2, n, heads, 16)).astype(np.float32)
           for n, heads in ((9, 4), (70, 2), (70, 2)))


def eight(x):
    return x.astype(F8)


def wide(x):
    return np.asarray(x).astype(np.float32)


def test_the_numbers_meant():
    descales = RNG.uniform(0.5, 2, (2, 2, 2)).astype(np.float32)
    of_rows = np.repeat(descales, 64, 2)[:, :, :70].swapaxes(1, 2)[..., None]
    o, lse = flashattn.attention(eight(Q), eight(K), eight(V), causal=True, dtype_o="float32",
                                 return_lse=True, descale_block=64, descale_k=descales,
                                 descale_v=descales, descale_q=np.full((1, 2, 1), 0.5, np.float32))
    q, k, v = wide(eight(Q)) / 2, wide(eight(K)) * of_rows, wide(eight(V)) * of_rows
    same, same_lse = flashattn.attention(q, k, v, causal=True, return_lse=True)
    np.testing.assert_allclose(o, same, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, same_lse, rtol=1e-5)


def test_a_cache_of_8_bits():
    k, v = eight(K), eight(V)
    o = flashattn.attention(Q, k, v)
    np.testing.assert_allclose(o, flashattn.attention(Q, wide(k), wide(v)), rtol=1e-4, atol=1e-5)
    pages = [[0], [1]]
    paged = flashattn.attention_paged(Q, k, v, pages, [70, 33])
    alone = flashattn.attention(Q, wide(k), wide(v), lens_kv=[70, 33])
    np.testing.assert_allclose(paged, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [0, 1, 64])
def test_a_cache_of_integers(block):
    made = flashattn.quantize(k=K, v=V, dtype_kv="int8", descale_block=block)
    assert made.k.dtype == made.v.dtype == np.int8
    descales = dict(descale_k=made.descale_k, descale_v=made.descale_v, descale_block=block)
    o = flashattn.attention(Q, made.k, made.v, **descales)
    exact = flashattn.attention(Q, K, V)
    assert 0 < np.sqrt(((o - exact) ** 2).mean() / (exact ** 2).mean()) < 0.02
    meant = [wide(x) * np.repeat(d, block or 70, 2)[:, :, :70].swapaxes(1, 2)[..., None]
             for x, d in ((made.k, made.descale_k), (made.v, made.descale_v))]
    np.testing.assert_allclose(o, flashattn.attention(Q, *meant), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="dtype = 'int8' is for k and v alone, dtype_kv"):
        flashattn.check(dtype="int8", heads_q=1, dim_qk=8)
    with pytest.raises(TypeError, match="dtype_kv = 'float16' has more than 8 bits"):
        flashattn.quantize(k=K, dtype_kv="float16")


def test_results_of_8_bits():
    exact = flashattn.attention(Q, wide(eight(K)), wide(eight(V)))
    amax = np.zeros((1, 4), np.float32)
    scale = np.full((2, 4), 100, np.float32)
    o = flashattn.attention(Q, eight(K), eight(V), dtype_o=F8, scale_o=scale, amax_o=amax)
    assert o.dtype == F8
    assert np.abs(wide(o) / 100 - exact).max() < 0.07 * np.abs(exact).max()
    np.testing.assert_allclose(amax[0], np.abs(exact).max((0, 1, 3)), rtol=1e-5)
    with pytest.raises(ValueError, match="amax_o has shape"):
        flashattn.attention(Q, eight(K), eight(V), amax_o=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="amax_o"):
        flashattn.attention(Q, K, V, amax_o=amax)


@pytest.mark.parametrize("shape", [(2, 4), (2, 1), (1, 4), (1, 1)])
def test_amax_of_no_queries_is_0(shape):
    amax = np.full((*shape, 2), np.nan, np.float32)  # every second element
    k, v = eight(K), eight(V)
    assert flashattn.attention(eight(Q[:, :0]), k, v, amax_o=amax[..., 0]).size == 0
    assert (amax[..., 0] == 0).all() and np.isnan(amax[..., 1]).all()
    amax[..., 0] = np.nan
    flashattn.attention(eight(Q), k, v, lens_q=[0, 0], amax_o=amax[..., 0])
    assert (amax[..., 0] == 0).all() and np.isnan(amax[..., 1]).all()
    amax[..., 0] = np.nan
    flashattn.attention_varlen(eight(Q[0, :0]), k, v, [0, 0, 0], amax_o=amax[..., 0])
    assert (amax[..., 0] == 0).all() and np.isnan(amax[..., 1]).all()


def test_gradients():
    q, k, v = eight(Q), eight(K), eight(V)
    o, lse = flashattn.attention(q, k, v, dtype_o="float32", return_lse=True)
    dout = RNG.standard_normal(o.shape).astype(np.float32)
    got = flashattn.attention_backward(dout, q, k, v, o, lse)
    same = flashattn.attention_backward(dout, wide(q), wide(k), wide(v), o, lse)
    half = flashattn.attention_backward(dout, q, k, v, o, lse, dtype_grad="bfloat16")
    for a, b, c in zip(got, same, half):
        assert a.dtype == np.float32 and c.dtype == ml_dtypes.bfloat16
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(wide(c), b, rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match="dtype_o is F8E4M3, but ops has BACKWARD"):
        flashattn.check(dtype="float8_e4m3fn", heads_q=1, dim_qk=8, backward=True)


@pytest.mark.parametrize("options", [
    dict(), dict(descale_block=64), dict(smooth_k=True), dict(rotation_seed=5),
    dict(smooth_k=True, rotation_seed=5, descale_block=16)])
def test_quantize(options):
    made = flashattn.quantize(Q, K + 1, V, **options)
    assert made.q.dtype == made.k.dtype == made.v.dtype == F8
    descales = {name: getattr(made, name) for name in ("descale_q", "descale_k", "descale_v")}
    o, lse = flashattn.attention(made.q, made.k, made.v, dtype_o="float32", return_lse=True,
                                 descale_block=options.get("descale_block", 0), **descales)
    exact, exact_lse = flashattn.attention(Q, K + 1, V, return_lse=True)
    assert np.sqrt(((o - exact) ** 2).mean() / (exact ** 2).mean()) < 0.07
    shift = made.lse_shift if options.get("smooth_k") else 0
    assert np.abs(lse + shift - exact_lse).max() < 0.15
    if options.get("smooth_k"):
        np.testing.assert_allclose(made.k_mean, (K + 1).mean(1), rtol=1e-5, atol=1e-6)


def test_quantize_a_cache_and_packed_sequences():
    made = flashattn.quantize(Q, K, V, cache=True, rotation_seed=7)
    assert made.q.dtype == np.float32 and made.descale_q is None
    o = flashattn.attention(made.q, made.k, made.v, descale_k=made.descale_k,
                            descale_v=made.descale_v)
    exact = flashattn.attention(Q, K, V)
    assert np.sqrt(((o - exact) ** 2).mean() / (exact ** 2).mean()) < 0.07
    packed = flashattn.quantize(k=K[0], v=V[0], cu_seqlens_kv=[0, 30, 70], descale_block=32)
    for b, rows in enumerate((slice(0, 30), slice(30, 70))):
        alone = flashattn.quantize(k=K[:1, rows], v=V[:1, rows], descale_block=32)
        assert wide(packed.k[rows]).tolist() == wide(alone.k[0]).tolist()
        blocks = alone.descale_k.shape[2]
        assert packed.descale_k[b, :, :blocks].tolist() == alone.descale_k[0].tolist()


@pytest.mark.parametrize("arrays, options, words", [
    ((None, None, None), dict(), "all None"),
    ((Q, K.astype(np.float16), V), dict(), "have dtypes float32, float16"),
    ((eight(Q), None, None), dict(), "float8_e4m3fn; give all of one"),
    ((Q[..., :12], K[..., :12], None), dict(rotation_seed=1), "dim_qk = 12 is neither a power"),
    ((None, K, V[:, :5]), dict(), "only their last"),
    ((Q, None, None), dict(cache=True), None)])
def test_what_quantize_refuses(arrays, options, words):
    if words is None:  # nothing is left to do: q is returned
        assert flashattn.quantize(*arrays, **options).q is Q
        return
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        flashattn.quantize(*arrays, **options)
    assert isinstance(caught.value, flashattn.FlashAttentionError)


def test_tensors():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).to(torch.float8_e4m3fn) for x in (Q, K, V))
    o = flashattn.attention(q, k, v, dtype_o="bfloat16")
    assert o.dtype is torch.bfloat16
    same = flashattn.attention(*(x.to(torch.float32) for x in (q, k, v)))
    torch.testing.assert_close(o.float(), same, rtol=1e-2, atol=1e-2)
    assert flashattn.attention(q, k, v).dtype is torch.float8_e4m3fn
    made = flashattn.quantize(*(torch.from_numpy(x) for x in (Q, K, V)))
    assert made.k.dtype is torch.float8_e4m3fn and made.descale_k.dtype is torch.float32
    made = flashattn.quantize(k=torch.from_numpy(K), v=torch.from_numpy(V), dtype_kv="int8")
    assert made.k.dtype is torch.int8
    o = flashattn.attention(torch.from_numpy(Q), made.k, made.v, descale_k=made.descale_k,
                            descale_v=made.descale_v)
    torch.testing.assert_close(o, torch.from_numpy(flashattn.attention(Q, K, V)), rtol=0.1,
                               atol=0.02)


def test_a_gpu_refuses_by_name():
    with pytest.raises(NotImplementedError) as caught:
        flashattn.check(dtype="float16", dtype_kv="float8_e4m3fn", heads_q=1, dim_qk=8,
                        device="cuda")
    assert caught.value.reason in (Reason.DTYPE_MIX, Reason.NO_DEVICE, Reason.NO_CUDA_BUILD)


def test_offsets_of_what_is_left_out():
    """They may be given as in every other call of the same sequences."""
    offsets = dict(cu_seqlens_q=[0, 4, 9], cu_seqlens_kv=[0, 30, 70])
    made = flashattn.quantize(k=K[0], **offsets)
    np.testing.assert_array_equal(
        wide(made.k), wide(flashattn.quantize(Q[0], K[0], V[0], **offsets).k))
