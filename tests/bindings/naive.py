"""Attention in float64 with every score stored: what the bindings' results are held against."""
from __future__ import annotations

import numpy as np


def probabilities(q, k, *, causal=False, bias=None, keep=None):
    """Weights (batch, heads, queries, keys) and lse of (batch, seq, heads, dim) arrays."""
    q, k = (np.asarray(x, np.float64) for x in (q, k))
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(q.shape[3])
    if bias is not None:
        bias = np.asarray(bias)
        scores = np.where(bias, scores, -np.inf) if bias.dtype == bool else scores + bias
    if causal:
        i, j = np.indices(scores.shape[-2:])
        scores = np.where(j <= i + scores.shape[3] - scores.shape[2], scores, -np.inf)
    top = np.maximum(scores.max(-1, keepdims=True), -1e300)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(scores - top).sum(-1)) + top[..., 0]
    weights = np.exp(scores - np.where(np.isfinite(lse), lse, 0)[..., None])
    return (weights if keep is None else weights * keep), lse


def attention(q, k, v, **options):
    weights, lse = probabilities(q, k, **options)
    v = np.repeat(np.asarray(v, np.float64), q.shape[2] // v.shape[2], axis=2)
    return np.einsum("bhij,bjhd->bihd", weights, v), lse


def backward(dout, q, k, v, **options):
    weights, _ = probabilities(q, k, **options)
    group = q.shape[2] // k.shape[2]
    dout, q, k, v = (np.asarray(x, np.float64) for x in (dout, q, k, v))
    wide_k, wide_v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    dp = np.einsum("bihd,bjhd->bhij", dout, wide_v)
    ds = weights * (dp - (weights * dp).sum(-1, keepdims=True))
    scale = 1 / np.sqrt(q.shape[3])
    dq = np.einsum("bhij,bjhd->bihd", ds, wide_k) * scale
    dk = np.einsum("bhij,bihd->bjhd", ds, q) * scale
    dv = np.einsum("bhij,bihd->bjhd", weights, dout)

    def narrow(x):
        return x.reshape(*x.shape[:2], x.shape[2] // group, group, x.shape[3]).sum(3)

    return dq, narrow(dk), narrow(dv), ds


def random(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32).astype(dtype)


def close(got, expected, tolerance=2e-5):
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(expected, np.float64),
                               rtol=tolerance, atol=tolerance)
