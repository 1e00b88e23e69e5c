"""A training step with flashattn.jax has the loss and the weights of one with jax.nn."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashattn.jax as fa
from test_jax_gradients import randoms

ATTENTIONS = (fa.dot_product_attention, jax.nn.dot_product_attention)


def same(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)


def test_plain():
    x, target, *weights = randoms((2, 16, 32), (2, 16, 32), *[(32, 32)] * 4)
    weights = [w / 6 for w in weights]

    def train(attention):
        def loss(weights):
            q, k, v = [(x @ w).reshape(2, 16, 4, 8) for w in weights[:3]]
            o = attention(q, k, v, is_causal=True).reshape(2, 16, 32) @ weights[3]
            return ((o - target) ** 2).mean()

        @jax.jit
        def step(weights, _):
            value, gradients = jax.value_and_grad(loss)(weights)
            return jax.tree.map(lambda w, g: w - g, weights, gradients), value
        return jax.lax.scan(step, weights, length=5)
    (ours, losses), (theirs, their_losses) = map(train, ATTENTIONS)
    assert losses[-1] < losses[0]
    same((ours, losses), (theirs, their_losses))


def test_flax():
    nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed")
    x, target = randoms((2, 16, 32), (2, 16, 32))

    def train(attention):
        def of_flax(query, key, value, mask=None, is_causal=False, **_):
            return attention(query, key, value, mask=mask, is_causal=is_causal)
        layer = nnx.MultiHeadAttention(num_heads=4, in_features=32, decode=False,
                                       attention_fn=of_flax, rngs=nnx.Rngs(0))
        mask = nnx.make_causal_mask(jnp.ones((2, 16)), dtype=bool)

        @nnx.jit
        def step(layer):
            def loss(layer):
                return ((layer(x, mask=mask) - target) ** 2).mean()
            value, gradients = nnx.value_and_grad(loss)(layer)
            nnx.update(layer, jax.tree.map(lambda w, g: w - 0.5 * g,
                                           nnx.state(layer, nnx.Param), gradients))
            return value
        losses = jnp.stack([step(layer) for _ in range(3)])
        return losses, nnx.state(layer, nnx.Param)
    (losses, ours), (their_losses, theirs) = map(train, ATTENTIONS)
    assert losses[-1] < losses[0]
    same((losses, jax.tree.leaves(ours)), (their_losses, jax.tree.leaves(theirs)))
