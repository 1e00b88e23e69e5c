"""flashattn.jax as a program meets it: JAX's own signature, refusals, costs, the handlers."""
import inspect
import pathlib
import re
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flashattn
import flashattn.jax as fa
from flashattn.jax import _handler
from test_jax_gradients import randoms, tensors

README = pathlib.Path(__file__).resolve().parents[2] / "bindings" / "python" / "README.md"
OPTIONS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(5, 2)),
    "one number": dict(local_window_size=3, is_causal=True),
    "scale": dict(scale=0.7),
    "lengths": dict(query_seq_lengths=jnp.array([33, 20]),
                    key_value_seq_lengths=jnp.array([45, 9])),
    "bias": dict(bias=randoms((2, 4, 33, 45), seed=5)[0]),
    "mask": dict(mask=jnp.arange(45)[None, None, None] < jnp.array([45, 8])[:, None, None, None]),
    "both": dict(bias=randoms((1, 4, 33, 45), seed=5)[0],
                 mask=jnp.tri(33, 45, 3, bool)[None, None]),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_as_jax_computes_it(name):
    """Values, residual and gradients are those of jax.nn."""
    inputs, options = tensors(), OPTIONS[name]
    differentiable = {"bias": options["bias"]} if "bias" in options else {}
    fixed = {key: x for key, x in options.items() if key not in differentiable}

    def both(function):
        def loss(inputs, more):
            o, lse = function(*inputs, **more, **fixed, return_residual=True)
            return (o ** 2).sum(), (o, lse)
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
            inputs, differentiable)
    (ours, (o, lse)), gradients = both(fa.dot_product_attention)
    (theirs, (o_jax, lse_jax)), gradients_jax = both(jax.nn.dot_product_attention)
    assert lse.shape == lse_jax.shape == (2, 33, 4) and lse.dtype == lse_jax.dtype
    if name == "lengths":  # JAX has numbers there that mean nothing
        lse, lse_jax = lse[1, :20], lse_jax[1, :20]
    for a, b in zip(jax.tree.leaves((ours, o, lse, gradients)),
                    jax.tree.leaves((theirs, o_jax, lse_jax, gradients_jax))):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_one_sequence_without_a_batch():
    q, k, v = [x[0] for x in tensors()]
    got = fa.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(got, jax.nn.dot_product_attention(q, k, v, is_causal=True),
                               atol=1e-5)


def test_signature():
    """All that JAX's has, in its order, with its defaults."""
    ours, theirs = (list(inspect.signature(function).parameters.values()) for function in
                    (fa.dot_product_attention, jax.nn.dot_product_attention))
    assert [(p.name, p.kind, p.default) for p in ours[:len(theirs)]] == \
        [(p.name, p.kind, p.default) for p in theirs]


Q, K, V = tensors()
REFUSED = {
    "heads": (lambda: fa.attention(Q[:, :, :3], K, V), ValueError, "3 heads.*multiple of the 2"),
    "order": (lambda: fa.attention(jnp.ones((1, 2, 3, 8)), *[jnp.ones((1, 2, 2, 8))] * 2),
              ValueError, "swapaxes"),
    "dim": (lambda: fa.attention(Q[..., :8], K, V), ValueError, "head dimension 16, q has 8"),
    "batch": (lambda: fa.attention(Q[:1], K, V), ValueError, "k holds 2 sequences, q holds 1"),
    "ndim": (lambda: fa.attention(Q[0], K[0], V[0]), ValueError, "4 dimensions"),
    "dtypes": (lambda: fa.attention(Q, K.astype("float16"), V.astype("float16")), TypeError,
               "float32, float16"),
    "float8": (lambda: fa.attention(*[x.astype("float8_e4m3fn") for x in (Q, K, V)]), ValueError,
               "float8_e4m3fn.*convert"),
    "integers": (lambda: fa.attention(*[x.astype("int32") for x in (Q, K, V)]), TypeError,
                 "q has dtype int32; convert"),
    "bias": (lambda: fa.attention(Q, K, V, bias=jnp.ones((3, 45))), ValueError,
             r"bias has shape \(1, 1, 3, 45\)"),
    "mask": (lambda: fa.dot_product_attention(Q, K, V, mask=jnp.ones((33, 45))), TypeError,
             "mask has dtype float32; convert it to bool"),
    # To the library 0 is a default.
    "no elements": (lambda: fa.attention(Q, K, V[..., :0]), ValueError,
                    "v has shape .*, heads of 0 elements; give at least 1"),
    "no heads": (lambda: fa.attention(Q, K[:, :, :0], V[:, :, :0]), ValueError,
                 "k has shape .*, 0 heads in the order .*; give at least 1"),
    "no queries' heads": (lambda: fa.dot_product_attention(Q[:, :, :0], K, V), ValueError,
                          "q has shape .*, 0 heads in the order"),
    "sink": (lambda: fa.attention(Q, K, V, sink=jnp.ones(3)), ValueError, r"sink has shape \(3,\)"),
    "lens": (lambda: fa.attention(Q, K, V, lens_kv=jnp.ones(2)), TypeError, "lens_kv.*int32"),
    "window": (lambda: fa.attention(Q, K, V, window=(1, 2, 3)), ValueError, "window"),
    "scale": (lambda: fa.attention(Q, K, V, scale=0.0), ValueError, "scale"),
    "dropout": (lambda: fa.attention(Q, K, V, dropout=0.5), ValueError, "without rng"),
    "rng": (lambda: fa.attention(Q, K, V, rng=jax.random.key(0)), ValueError, "without dropout"),
    "no key": (lambda: fa.attention(Q, K, V, dropout=0.5, rng=jnp.ones(3)), TypeError, "rng"),
    "one": (lambda: fa.attention(Q, K, V, dropout=1.0, rng=jax.random.key(0)), ValueError,
            "dropout"),
    "list": (lambda: fa.attention(Q, K, [[1, "x"]]), TypeError, "v is a list"),
    "implementation": (lambda: fa.dot_product_attention(Q, K, V, implementation="cudnn"),
                       NotImplementedError, "implementation = 'cudnn'"),
    "max_seqlen": (lambda: jax.jit(lambda cu: fa.attention_varlen(Q[0], K[0], V[0], cu, cu))(
        jnp.array([0, 33])), ValueError, "max_seqlen_q is not given"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_when_traced(name):
    call, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message) as caught:
        call()
    assert isinstance(caught.value, flashattn.FlashAttentionError)


def test_float64_is_refused_by_name():
    with jax.enable_x64(True):
        with pytest.raises(TypeError, match="q has dtype float64; convert it to float32"):
            fa.attention(*[jnp.ones((1, 3, 2, 8), jnp.float64)] * 3)
        wide = fa.attention(Q, K, V, lens_kv=jnp.array([45, 9], jnp.int64))
    np.testing.assert_array_equal(wide, fa.attention(Q, K, V, lens_kv=[45, 9]))


@pytest.mark.usefixtures("on_cpu")
def test_refused_when_run():
    """Values of lengths are seen by the run only, on a CPU; the library's sentence arrives."""
    run = jax.jit(lambda lens: fa.attention(Q, K, V, lens_kv=lens))
    with pytest.raises(jax.errors.JaxRuntimeError,
                       match=r"INVALID_ARGUMENT: lens_kv\[1\] = 46 is not within 0 and 45"):
        run(jnp.array([3, 46])).block_until_ready()
    assert jnp.isfinite(run(jnp.array([3, 45]))).all()


@pytest.mark.usefixtures("on_cpu")
def test_overhead():
    """At most 10 us above an empty call, arithmetic of one small head included."""
    x, = randoms((1, 1, 1, 8))
    ours = jax.jit(lambda x: fa.attention(x, x, x))
    empty = jax.jit(lambda x: jax.ffi.ffi_call(
        _handler.EMPTY, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, x, x))
    best = dict.fromkeys((ours, empty), float("inf"))
    for _ in range(300):  # other programs disturb most rounds
        for function in best:
            start = time.perf_counter()
            for _ in range(20):
                function(x).block_until_ready()
            best[function] = min(best[function], (time.perf_counter() - start) / 20)
    print({"ours": best[ours] * 1e6, "empty": best[empty] * 1e6})
    assert best[ours] - best[empty] < 10e-6


def test_first_import_compiles_once(tmp_path, monkeypatch):
    include = pathlib.Path(jax.ffi.include_dir())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as other:
        other.setenv("CC", "/none")
        with pytest.raises(ImportError, match="/none.*install a C compiler"):
            _handler._compiled(include)
    with monkeypatch.context() as other:
        other.setenv("CC", "cc --no-such-option")
        with pytest.raises(ImportError, match="(?s)no-such-option.*install a C compiler"):
            _handler._compiled(include)
    assert not list(tmp_path.rglob("*.so"))
    first = _handler._compiled(include)._name
    made, = tmp_path.rglob("*.so")
    assert first == str(made)
    monkeypatch.setattr(_handler, "_compile", None)
    assert _handler._compiled(include)._name == first


def test_handlers_of_the_installation(tmp_path, monkeypatch):
    """Found beside the package, unless they are for another version of XLA's interface."""
    version = _handler._api_version(pathlib.Path(jax.ffi.include_dir()))
    assert version == _handler.handlers.flashattn_jax_api_version()
    monkeypatch.setattr(_handler, "_FOLDER", tmp_path)
    assert _handler._installed(version) is None
    shutil.copy(_handler.handlers._name, tmp_path / "handler.so")
    assert _handler._installed(version)._name == str(tmp_path / "handler.so")
    assert _handler._installed(version + 1) is None


def test_readme():
    section = README.read_text(encoding="utf-8").partition("## JAX")[2].partition("\n## ")[0]
    program, = re.findall(r"```python\n(.*?)```", section, re.S)
    names = {}
    exec(compile(program, str(README), "exec"), names)
    assert names["o"].shape == names["dq"].shape == (2, 1024, 8, 64)
