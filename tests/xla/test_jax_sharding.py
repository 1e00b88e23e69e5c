"""flashattn.jax over two devices: batch and heads are split, and nothing is gathered."""
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import flashattn.jax as fa
from test_jax_gradients import randoms

pytestmark = pytest.mark.usefixtures("on_cpu")
BATCH, HEADS = P("x"), P(None, None, "x")
SHAPES = dict(bias=(1, 1, 16, 24), whole_bias=(2, 4, 16, 24), sink=(4,), alibi_slopes=(4,),
              lens_kv=(2,))


def mesh(kind=AxisType.Auto):
    devices = jax.devices("cpu")
    assert len(devices) == 2, "XLA_FLAGS of conftest.py came too late"
    return jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=devices)


def inputs(heads_kv, names=()):
    arrays = dict(zip(("q", "k", "v", *names), randoms(
        (2, 16, 4, 8), (2, 24, heads_kv, 8), (2, 24, heads_kv, 8),
        *[SHAPES[name] for name in names])))
    if "lens_kv" in arrays:
        arrays["lens_kv"] = jnp.array([24, 7])
    return arrays


def attention(arrays):
    arrays = dict(arrays)
    if "whole_bias" in arrays:
        arrays["bias"] = arrays.pop("whole_bias")
    return fa.attention(*[arrays.pop(name) for name in "qkv"], causal=True, **arrays)


def gradients(arrays):
    fixed = {name: x for name, x in arrays.items() if name in ("lens_kv", "alibi_slopes")}
    rest = {name: x for name, x in arrays.items() if name not in fixed}
    return jax.value_and_grad(lambda rest: (attention({**rest, **fixed}) ** 2).sum())(rest)


def same(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, expected)


def placed(arrays, specs, where):
    return {name: jax.device_put(x, NamedSharding(where, specs.get(name, P())))
            for name, x in arrays.items()}


@pytest.mark.parametrize("spec, kind, heads_kv, names", [
    (BATCH, AxisType.Auto, 2, ["bias", "sink", "lens_kv"]),
    (BATCH, AxisType.Explicit, 4, ["whole_bias", "alibi_slopes"]),
    (HEADS, AxisType.Explicit, 2, ["whole_bias", "sink", "alibi_slopes"]),
    (HEADS, AxisType.Auto, 4, ["bias", "sink"]),
    (HEADS, AxisType.Auto, 1, ["sink", "lens_kv"])])
def test_jit(spec, kind, heads_kv, names):
    """Each device computes its part. Only sums are exchanged: of gradients that the parts share,
    and of the loss. Types of arrays say the sharding where a mesh's axes are Explicit."""
    arrays = inputs(heads_kv, names)
    specs = dict(q=spec, k=spec, v=spec)
    if spec == HEADS and heads_kv == 1:
        specs = dict(q=spec)
    given = placed(arrays, specs, mesh(kind))
    compiled = jax.jit(gradients).lower(given).compile()
    text = compiled.as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    parts = re.findall(r"= \(f32\[(\d+),16,(\d+),8\].* custom-call\(.*\"flashattn\"", text)
    assert len(parts) == 2 and set(parts) == {("1", "4") if spec == BATCH else ("2", "2")}
    same(compiled(given), gradients(arrays))
    assert compiled(given)[1]["q"].sharding.is_equivalent_to(NamedSharding(mesh(), spec), 4)


def test_jit_of_what_is_never_split():
    """A sequence, or a head: gathered, and computed whole."""
    q, k, v = randoms(*[(2, 16, 3, 8)] * 3)
    for spec in (P(None, "x"), P(None, None, None, "x")):
        given = [jax.device_put(x, NamedSharding(mesh(), spec)) for x in (q, k, v)]
        same(jax.jit(fa.attention)(*given), fa.attention(q, k, v))


def test_jit_of_packed_sequences():
    q, k, v = randoms((16, 4, 8), (24, 2, 8), (24, 2, 8))

    def function(q, k, v):
        return fa.attention_varlen(q, k, v, [0, 7, 16], [0, 3, 24], causal=True)
    given = [jax.device_put(x, NamedSharding(mesh(), P(None, "x"))) for x in (q, k, v)]
    compiled = jax.jit(function).lower(*given).compile()
    assert "all-gather" not in compiled.as_text()
    same(compiled(*given), function(q, k, v))


def test_jit_with_dropout():
    """Sequences and heads keep their numbers: the same weights are dropped as on one device."""
    arrays = inputs(2)

    def function(arrays, key):
        return fa.attention(*[arrays[name] for name in "qkv"], dropout=0.5, rng=key)
    given = placed(arrays, dict(q=BATCH, k=BATCH, v=BATCH), mesh())
    key = jax.random.key(5)
    np.testing.assert_array_equal(jax.jit(function)(given, key), function(arrays, key))


@pytest.mark.parametrize("spec", [BATCH, HEADS])
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(spec, check_vma):
    """A sink that is the same on all devices has one gradient, the sum of theirs."""
    arrays = inputs(2, ["sink"])
    specs = dict(q=spec, k=spec, v=spec, sink=P() if spec == BATCH else P("x"))

    def loss(arrays):
        mapped = jax.shard_map(attention, mesh=mesh(), in_specs=(specs,), out_specs=spec,
                               check_vma=check_vma)
        return (mapped(arrays) ** 2).sum()
    got = jax.jit(jax.grad(loss))(arrays)
    same(got, gradients(arrays)[1])
