"""The quantised cache of latent attention in Python: records, pages, and what is refused."""
import numpy as np
import pytest

import flashattn
from flashattn import Reason

ml_dtypes = pytest.importorskip("ml_dtypes")
F8, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)


def records(batch, tokens, seed=0):
    """DeepSeek's records of 656 bytes, as the arrays in them, and the keys that they mean."""
    rng = np.random.default_rng(seed)
    cache = np.zeros((batch, tokens, 1, 656), np.uint8)
    v, descales = cache[..., :512].view(F8), cache[..., 512:528].view(np.float32)
    k = cache[..., 528:].view(BF16)
    v[...] = rng.standard_normal(v.shape)
    descales[...] = rng.uniform(0.2, 1.5, descales.shape)
    k[...] = rng.standard_normal(k.shape)
    wide = v.astype(np.float32) * np.repeat(descales, 128, -1)
    return k, v, descales, np.concatenate([wide, k.astype(np.float32)], -1)


def queries(batch, rows, heads):
    return np.random.default_rng(1).standard_normal((batch, rows, heads, 576)).astype(BF16)


def close(o, expected):
    np.testing.assert_allclose(o.astype(np.float32), expected, atol=0.02)


@pytest.mark.parametrize("rows", [1, 5])
def test_records(rows):
    q, (k, v, descales, wide) = queries(2, rows, 4), records(2, 100)
    options = dict(lens_kv=[100, 33], causal=True)
    o = flashattn.attention(q, k, v, descale_latent=descales, descale_dim=128, **options)
    assert o.dtype == BF16
    close(o, flashattn.attention(q.astype(np.float32), wide, wide[..., :512], **options))


def test_pages():
    q, (k, v, descales, wide) = queries(2, 2, 8), records(12, 16)
    table, lens = np.array([[3, 1, 7, 0], [2, 11, 4, 5]], np.int32), np.array([60, 17], np.int32)
    o = flashattn.attention_paged(q, k, v, table, lens, descale_latent=descales, descale_dim=128)
    close(o, flashattn.attention_paged(q.astype(np.float32), wide, wide[..., :512], table, lens))


def test_packed_sequences():
    q, (k, v, descales, wide) = queries(1, 9, 4)[0], records(1, 50)
    cu_q, cu_kv = [0, 4, 9], [0, 30, 50]
    o = flashattn.attention_varlen(q, k[0], v[0], cu_q, cu_kv, descale_latent=descales[0],
                                   descale_dim=128)
    close(o, flashattn.attention_varlen(q.astype(np.float32), wide[0], wide[0][..., :512], cu_q,
                                        cu_kv))


def test_plans():
    plan = flashattn.Plan(dtype="bfloat16", dtype_kv="float8_e4m3fn", heads_q=4, heads_kv=1,
                          dim_qk=576, dim_v=512, latent_kv=True, descale_dim=128)
    assert plan.descriptor.descale_dim == 128
    q, (k, v, descales, _) = queries(2, 1, 4), records(2, 40)
    o = plan.forward(q, k, v, descale_latent=descales)
    expected = flashattn.attention(q, k, v, descale_latent=descales, descale_dim=128)
    assert o.tobytes() == expected.tobytes()


@pytest.mark.parametrize("change, reason, words", [
    (dict(descale_dim=0), Reason.SIZE, "descale_dim = 0"),
    (dict(descale_dim=64), Reason.SIZE, r"descale_latent has shape \(2, 40, 1, 4\); expected"),
    (dict(k="wide"), Reason.HEAD_DIM_PAIR, "must add up"),
    (dict(k="f32"), Reason.DTYPE, "of the type of q"),
    (dict(descale_latent=None), Reason.DTYPE, "k and v have dtypes")])
def test_refused(change, reason, words):
    q, (k, v, descales, wide) = queries(2, 1, 4), records(2, 40)
    other = {"wide": wide.astype(BF16), "f32": k.astype(np.float32)}.get(change.pop("k", None), k)
    options = dict(dict(descale_latent=descales, descale_dim=128), **change)
    with pytest.raises(flashattn.FlashAttentionError, match=words) as info:
        flashattn.attention(q, other, v, **options)
    assert info.value.reason == reason
