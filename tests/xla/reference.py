"""The reference of tests/numerics as a function with gradients: exact, or evaluated naively in a
dtype. The rule of comparison."""
import jax.numpy as jnp
import numpy as np
from numerics import arrays
from numerics.reference import EXACT, Arithmetic

SLACK = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}  # a rounding of a result
ARITHMETIC = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
WHOLE = np.float64


def results(q, k, v, dout, dlse=None, *, dtype=None, bias=None, sink=None, **options):
    """o, lse, dq, dk, dv, then dbias and dsink where there are such inputs; dtype: of the naive
    formula, None: exact. options: those of numerics.arrays.Attention."""
    def load(x):
        return None if x is None else np.asarray(x) if x.dtype == bool else np.asarray(x, WHOLE)

    computed = arrays.Attention(
        load(q), load(k), load(v), bias=load(bias), sink=load(sink),
        arithmetic=EXACT if dtype is None else Arithmetic(ARITHMETIC[dtype]), **options)
    return [computed.o, computed.lse, *computed.backward(load(dout), load(dlse))]


def check(got, inputs, dout, dlse=None, **options):
    """got, by name as results() orders it: errors are at most twice those of the naive formula, and
    a rounding of the result; by the largest error and by the norm."""
    q, k, v = inputs
    dtype = jnp.asarray(q).dtype.name
    truth = results(q, k, v, dout, dlse, **options)
    naive = results(q, k, v, dout, dlse, dtype=dtype, **options)
    assert len(truth) == len(got)
    for (name, g), t, n in zip(got.items(), truth, naive):
        slack = SLACK[jnp.asarray(g).dtype.name]
        g, t, n = (np.asarray(x, WHOLE) for x in (g, t, n))
        assert g.shape == t.shape, name
        fine = np.isfinite(t)
        assert (g[~fine] == t[~fine]).all(), f"{name}: other infinities"
        g, t, n = g[fine], t[fine], n[fine]
        if not t.size:
            continue
        limit = 2 * np.abs(n - t).max() + slack * np.abs(t).max()
        error = np.abs(g - t).max()
        assert error <= limit, f"{name}: error {error:.3g} > {limit:.3g}"
        assert np.linalg.norm(g - t) <= (2 * np.linalg.norm(n - t)
                                         + slack * np.linalg.norm(t)), f"{name}: norm"
