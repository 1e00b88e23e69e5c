"""flashattn.jax against float64: at most twice the error of the naive formula."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashattn.jax as fa
import reference
from flashattn.jax import _call

CASES = {
    "plain": {},
    "causal": dict(causal=True),
    "top-left": dict(causal=True, top_left=True),
    "window": dict(window=(7, 3)),
    "chunk": dict(chunk=16),
    "softcap": dict(softcap=3.0),
    "scale": dict(scale=0.3, causal=True),
}
IN_ALL = [(dtype, case) for dtype in ("float32", "float16", "bfloat16") for case in CASES
          if dtype == "float32" or case in ("causal", "softcap")]


def randoms(*shapes, dtype="float32", seed=0):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes)]


def tensors(dtype="float32", sq=33, sk=45, heads=4, heads_kv=2, dim=16, dim_v=16, seed=0):
    return randoms((2, sq, heads, dim), (2, sk, heads_kv, dim), (2, sk, heads_kv, dim_v),
                   dtype=dtype, seed=seed)


def compare(inputs, *, beside=None, with_lse=True, jit=True, naive=None, **options):
    """beside: arrays with a gradient that go by name; naive: what the reference is told besides."""
    beside = beside or {}

    def function(inputs, beside):
        return fa.attention(*inputs, **beside, return_lse=True, **options)
    o, lse = jax.eval_shape(function, inputs, beside)
    dout, = randoms(o.shape, dtype=o.dtype, seed=7)
    dlse = randoms(lse.shape, seed=8)[0] if with_lse else None

    def loss(inputs, beside):
        o, lse = function(inputs, beside)
        total = (o.astype(jnp.float32) * dout.astype(jnp.float32)).sum()
        return total + (lse * dlse).sum() if with_lse else total
    gradient = jax.grad(loss, argnums=(0, 1))
    run, gradient = (jax.jit(function), jax.jit(gradient)) if jit else (function, gradient)
    (o, lse), (inner, outer) = run(inputs, beside), gradient(inputs, beside)
    got = dict(o=o, lse=lse, dq=inner[0], dk=inner[1], dv=inner[2])
    got.update({"d" + name: outer[name] for name in ("bias", "sink") if name in outer})
    for name, value in got.items():
        assert value.dtype == (jnp.float32 if name == "lse" else inputs[0].dtype if len(name) < 3
                               else beside[name[1:]].dtype)
    reference.check(got, inputs, dout, dlse, **beside, **options, **(naive or {}))


@pytest.mark.parametrize("dtype, case", IN_ALL)
def test_masks(dtype, case):
    inputs = tensors(dtype)
    if case == "softcap":
        inputs[0] = inputs[0] * 3
    compare(inputs, **CASES[case])


@pytest.mark.parametrize("heads, heads_kv", [(6, 2), (5, 1)])
@pytest.mark.parametrize("dim, dim_v", [(64, 64), (57, 33)])
def test_heads_and_dims(heads, heads_kv, dim, dim_v):
    inputs = tensors("float16", heads=heads, heads_kv=heads_kv, dim=dim, dim_v=dim_v)
    if dim % 8 == 0 or jax.default_backend() == "cpu":
        compare(inputs, causal=True)
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"dim_qk = {dim} is no multiple of 8"):
            compare(inputs, causal=True)


@pytest.mark.parametrize("shape", [(2, 4, 33, 45), (1, 4, 33, 45), (4, 1, 45), (33, 45), (45,)])
def test_bias_and_sink(shape):
    bias, sink = randoms(shape, (4,), seed=3)
    compare(tensors(), beside=dict(bias=bias, sink=sink), with_lse=len(shape) != 2)


def test_bias_of_the_same_dtype():
    bias, = randoms((1, 1, 33, 45), seed=3, dtype="bfloat16")
    compare(tensors("bfloat16"), beside=dict(bias=bias), causal=True)


def test_bias_that_repeats_over_the_keys():
    """It is made whole for the library, and its gradient summed again."""
    bias, = randoms((2, 4, 33, 1), seed=3)
    inputs = tensors()

    def loss(bias):
        return (fa.attention(*inputs, bias=bias, window=(9, 9))[..., 0] ** 2).sum()
    assert jax.grad(loss)(bias).shape == bias.shape
    whole = jax.grad(loss)(jnp.broadcast_to(bias, (2, 4, 33, 45))).sum(-1, keepdims=True)
    np.testing.assert_allclose(jax.grad(loss)(bias), whole, atol=1e-5)


def test_boolean_mask_alibi_and_empty_rows():
    mask = jax.random.bernoulli(jax.random.key(1), 0.6, (2, 1, 33, 45)).at[:, :, 5].set(False)
    slopes = jnp.array([0.5, 0.25, 0.125, 1.0])
    inputs = tensors()
    o, lse = fa.attention(*inputs, bias=mask, return_lse=True)
    assert not o[:, 5].any() and jnp.isneginf(lse[:, :, 5]).all()
    dout, = randoms(inputs[0].shape, seed=7)
    got = jax.grad(lambda *x: (fa.attention(*x, bias=mask, alibi_slopes=slopes) * dout).sum(),
                   argnums=(0, 1, 2))(*inputs)
    o, lse = fa.attention(*inputs, bias=mask, alibi_slopes=slopes, return_lse=True)
    reference.check(dict(o=o, lse=lse, dq=got[0], dk=got[1], dv=got[2]), inputs, dout, bias=mask,
                    alibi_slopes=np.asarray(slopes, np.float64))


def test_lens_and_starts():
    """What no sequence has is zero, in results and gradients."""
    inputs, dout = tensors(), randoms((2, 33, 4, 16), seed=7)[0]
    lens = dict(lens_kv=[45, 30], starts_kv=[3, 0])
    o, lse = fa.attention(*inputs, **lens, return_lse=True)
    got = jax.jit(jax.grad(lambda *x: (fa.attention(*x, **lens) * dout).sum(),
                           argnums=(0, 1, 2)))(*inputs)
    assert not got[1][1, 30:].any() and not got[2][0, :3].any()
    reference.check(dict(o=o, lse=lse, dq=got[0], dk=got[1], dv=got[2]), inputs, dout, **lens)
    o = fa.attention(*inputs, lens_q=[33, 0])
    assert not o[1].any() and o[0].any()


def test_dropout():
    """Its weights are those that the library's numbers say; the key decides, in both passes."""
    inputs, dout = tensors(), randoms((2, 33, 4, 16), seed=7)[0]
    key = jax.random.key(3)
    words = np.asarray(jax.random.bits(key, (4,), jnp.uint32)).view(np.uint64)
    options = dict(dropout=0.3, causal=True)
    o, lse = fa.attention(*inputs, **options, rng=key, return_lse=True)
    got = jax.jit(jax.grad(lambda *x: (fa.attention(*x, **options, rng=key) * dout).sum(),
                           argnums=(0, 1, 2)))(*inputs)
    reference.check(dict(o=o, lse=lse, dq=got[0], dk=got[1], dv=got[2]), inputs, dout,
                    rng=tuple(map(int, words)), **options)
    other = fa.attention(*inputs, **options, rng=jax.random.key(4))
    assert jnp.abs(other - o).max() > 0.1


def test_varlen():
    """Each sequence as if alone; rows of none are zero."""
    cu_q, cu_kv = [0, 5, 5, 30], [0, 9, 20, 41]
    q, k, v, dout = randoms((33, 4, 16), (45, 2, 16), (45, 2, 24), (33, 4, 24))
    sink, = randoms((4,), seed=5)

    def function(q, k, v, sink):
        return fa.attention_varlen(q, k, v, cu_q, cu_kv, causal=True, sink=sink, return_lse=True)

    def loss(*x):
        return (function(*x)[0] * dout).sum()
    (o, lse), got = jax.jit(function)(q, k, v, sink), jax.jit(jax.grad(loss, (0, 1, 2, 3)))(
        q, k, v, sink)
    assert lse.shape == (4, 33) and not o[30:].any() and not got[1][41:].any()
    dsink = 0
    for b in (0, 2):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_kv[b], cu_kv[b + 1])
        inputs = q[None, rows], k[None, keys], v[None, keys]
        one = jax.grad(lambda sink: (fa.attention(*inputs, causal=True, sink=sink)
                                     * dout[rows]).sum())(sink)
        dsink += one
        reference.check(dict(o=o[None, rows], lse=lse[None, :, rows], dq=got[0][None, rows],
                             dk=got[1][None, keys], dv=got[2][None, keys], dsink=one), inputs,
                        dout[None, rows], causal=True, sink=sink)
    np.testing.assert_allclose(got[3], dsink, atol=1e-5)


def test_gradient_of_lse_alone():
    inputs = tensors()
    dlse, = randoms((2, 4, 33), seed=8)
    o, lse = fa.attention(*inputs, return_lse=True)
    got = jax.grad(lambda *x: (fa.attention(*x, return_lse=True)[1] * dlse).sum(),
                   argnums=(0, 1, 2))(*inputs)
    reference.check(dict(o=o, lse=lse, dq=got[0], dk=got[1], dv=got[2]), inputs, jnp.zeros_like(o),
                    dlse)


def test_workspace_that_xla_plans_for(monkeypatch):
    """As where a thread does not keep so much."""
    monkeypatch.setattr(_call, "_KEPT", 0)
    inputs = tensors(sq=21, sk=29)  # sizes of no other test: what is known of a call is kept
    site = _call._site(_call.Spec(("q", "k", "v"), ()), tuple(map(_call.aval, inputs)), "cpu")
    assert site.attributes["workspace"] == 0 and site.results[-1][0][0] > 0
    compare(inputs)
