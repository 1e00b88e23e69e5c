"""flashattn.jax under vmap, scan, checkpoint and jvp."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashattn.jax as fa
from flashattn.jax import _transforms
from test_jax_gradients import randoms

SIZE = 3  # of the mapped axis
SHAPES = dict(q=(2, 9, 4, 8), k=(2, 12, 2, 8), v=(2, 12, 2, 8), bias=(2, 1, 9, 12),
              one_bias=(1, 4, 9, 12), sink=(4,), alibi_slopes=(4,))


def attention(arrays):
    arrays = dict(arrays)
    if "one_bias" in arrays:
        arrays["bias"] = arrays.pop("one_bias")
    return fa.attention(*[arrays.pop(name) for name in "qkv"], causal=True, **arrays)


def both(function, arrays, mapped):
    """The results of vmap, and of one call after another."""
    axes = {name: 0 if name in mapped else None for name in arrays}
    together = jax.jit(jax.vmap(function, in_axes=(axes,)))(arrays)
    alone = [function({name: x[i] if name in mapped else x for name, x in arrays.items()})
             for i in range(SIZE)]
    return together, jax.tree.map(lambda *x: jnp.stack(x), *alone)


@pytest.mark.parametrize("mapped", ["qkv", "kv", "q bias", "k one_bias", "q sink",
                                    "v alibi_slopes", "q beside:bias", "q beside:one_bias",
                                    "q beside:sink alibi_slopes"])
def test_vmap(mapped, monkeypatch):
    """Forward and gradients: folded, but for sinks."""
    first, _, beside = mapped.partition("beside:")
    first = [name for word in first.split() for name in (word if set(word) <= set("qkv") else
                                                         [word])]
    names = [*"qkv", *[name for name in first if len(name) > 1], *beside.split()]
    loops = []
    looped = _transforms._looped
    monkeypatch.setattr(_transforms, "_looped", lambda *x: loops.append(1) or looped(*x))
    arrays = {name: x for name, x in zip(names, randoms(*[
        (SIZE, *SHAPES[name]) if name in first else SHAPES[name] for name in names]))}
    for function in (attention, jax.grad(lambda x: (attention(x) ** 2).sum())):
        together, alone = both(function, arrays, first)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), together, alone)
    assert bool(loops) == ("sink" in names)


def test_vmap_of_what_is_looped():
    """Dropout numbers its sequences, and packed ones are many already: each element of the mapped
    axis gives what it gives alone."""
    q, k, v = randoms((SIZE, 2, 9, 4, 8), (2, 12, 2, 8), (2, 12, 2, 8))
    key = jax.random.key(1)

    def dropped(q, key):
        return fa.attention(q, k, v, dropout=0.4, rng=key)
    keys = jax.random.split(key, SIZE)
    for axes, more in (((0, None), [key] * SIZE), ((0, 0), keys)):
        together = jax.vmap(dropped, in_axes=axes)(q, key if axes[1] is None else keys)
        for i in range(SIZE):
            np.testing.assert_array_equal(together[i], dropped(q[i], more[i]))

    def packed(q):
        return fa.attention_varlen(q, k[0], v[0], [0, 4, 9], [0, 12, 12])
    together = jax.vmap(packed)(q[:, 0])
    for i in range(SIZE):
        np.testing.assert_array_equal(together[i], packed(q[i, 0]))


def test_vmap_twice_and_an_axis_in_the_middle():
    x, = randoms((2, 2, SIZE, 9, 4, 8))
    one = jax.vmap(lambda x: fa.attention(x, x, x, causal=True), in_axes=1, out_axes=1)
    got = jax.vmap(one)(x)
    for i in range(2):
        for j in range(SIZE):
            part = x[i][:, j]
            np.testing.assert_allclose(got[i][:, j], fa.attention(part, part, part, causal=True),
                                       atol=1e-6)


def test_scan_and_checkpoint():
    x, = randoms((1, 9, 4, 8))

    def layer(x, _):
        return x + fa.attention(x, x, x, causal=True), None

    def loss(x, layer):
        return (jax.lax.scan(layer, x, length=3)[0] ** 2).sum()
    plain = jax.jit(jax.grad(lambda x: loss(x, layer)))(x)
    again = jax.jit(jax.grad(lambda x: loss(x, jax.checkpoint(layer))))(x)
    np.testing.assert_array_equal(plain, again)
    by_hand = x
    for _ in range(3):
        by_hand = layer(by_hand, None)[0]
    np.testing.assert_allclose(loss(x, layer), (by_hand ** 2).sum(), rtol=1e-5)


def test_what_jax_refuses():
    """There is no forward mode, and no gradient of a gradient."""
    x, = randoms((1, 9, 4, 8))

    def loss(x):
        return (fa.attention(x, x, x) ** 2).sum()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (x,), (x,))
    with pytest.raises(NotImplementedError, match="Differentiation rule"):
        jax.grad(lambda x: jax.grad(loss)(x).sum())(x)


def test_gradients_that_nobody_asked_for(monkeypatch):
    """A bias without a gradient costs no array of its size, and an unused lse no dlse."""
    specs = []
    call = _transforms.call
    monkeypatch.setattr(_transforms, "call", lambda *x: specs.append(x[0]) or call(*x))
    q, bias, sink = randoms((1, 9, 4, 8), (1, 4, 9, 9), (4,))

    def loss(q, bias, sink):
        return fa.attention(q, q, q, bias=bias, sink=sink, softcap=77.0, return_lse=True)[0].sum()
    for which in range(3):
        specs.clear()
        jax.eval_shape(jax.grad(loss, argnums=which), q, bias, sink)
        backward, = [spec for spec in specs if spec.backward]
        assert (backward.dbias, backward.dsink) == (which == 1, which == 2)
        assert "dlse" not in backward.names
