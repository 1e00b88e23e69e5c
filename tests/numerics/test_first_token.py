"""Trained models score the first key of a sequence 10 to 40 nats above the others. Kernels whose
softmax has a fixed base see it early; the result is what the formula gives."""
import numpy as np
import pytest

from . import reference
from .case import Case
from .data import make_data
from .dtypes import EPSILON, round_to
from .engines import engine_for
from .harness import run
from .tolerance import check

BASE = Case(seqlen_q=450, seqlen_kv=450, heads_q=2, heads_kv=1, dim_qk=64, causal=True)
CASES = {
    "causal": BASE,
    "few tiles": BASE.replace(seqlen_q=190, seqlen_kv=190),
    "cached keys": BASE.replace(seqlen_q=130),
    "every key": BASE.replace(causal=False, seqlen_q=200),
    "more queries than keys": BASE.replace(causal=False, window=(-1, 10), seqlen_kv=390),
    "top left": BASE.replace(top_left=True, seqlen_kv=333),
    # Windows hide it from some rows of a tile, from some warpgroups, from all but the first tile.
    "wide window": BASE.replace(window=(300, 0)),
    "window": BASE.replace(window=(127, 0)),
    "window on both sides": BASE.replace(causal=False, window=(200, 70)),
    "narrow window": BASE.replace(window=(30, 0)),
    "chunk": BASE.replace(chunk=200),
    "lengths": BASE.replace(batch=2, lens_q=[450, 65], lens_kv=[129, 450]),
    "varlen": BASE.replace(batch=3, cu_q=[129, 400, 1], cu_kv=[450, 400, 200]),
    "pages": BASE.replace(batch=2, seqlen_q=300, lens_kv=[450, 77], page_size=16),
    "left padding": BASE.replace(batch=2, seqlen_q=300, starts_kv=[0, 77]),
    "capped": BASE.replace(softcap=60.0),
    "alibi": BASE.replace(alibi="h", steepest=0.02),
    "dropout": BASE.replace(dropout=0.2),
    "sink": BASE.replace(sink=True),
    "gradients": BASE.replace(backward=True),
}


def with_first_token(case, nats):
    """Each query scores the first key so many nats, the others around 0."""
    data = make_data(case)
    for q, k in zip(data.q, data.k):
        q[..., 0], k[..., 0] = 1, 0
        k[:1] = 0
        k[:1, :, 0] = round_to(np.float32(nats * case.dim_qk ** 0.5), case.dtype)
    return data


@pytest.mark.smoke
@pytest.mark.parametrize("nats", [12, 100])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_first_token(device, name, dtype, nats):
    case = CASES[name].replace(dtype=dtype)
    data = with_first_token(case, nats)
    check(case, data, run(case, device, data))


@pytest.mark.smoke
@pytest.mark.parametrize("nats", [10, 20, 40])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_of_each_head_size(device, dtype, dim, nats):
    case = BASE.replace(dtype=dtype, dim_qk=dim)
    data = with_first_token(case, nats)
    check(case, data, run(case, device, data))


@pytest.mark.smoke
@pytest.mark.parametrize("nats", [8, 12, 16, 20])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_the_other_keys_keep_their_part(device, dtype, dim, nats):
    """Thousands of keys far below the first: 5 % of a row at 12 nats. Their values are alike, so
    that no error cancels."""
    case = BASE.replace(dtype=dtype, dim_qk=dim, seqlen_q=70, seqlen_kv=8192, heads_q=1)
    data = with_first_token(case, nats)
    data.v = [np.ones_like(v) for v in data.v]
    data.v[0][0] = 0
    result = run(case, device, data)
    want = reference.forward(case, data, 0, reference.Arithmetic(None, engine_for(case)))
    others = want.o.swapaxes(0, 1)
    assert (others > 0).all()
    assert np.abs(result.o[0] - others).max() <= EPSILON[dtype] / 2
    assert np.abs(result.lse[0] - want.lse).max() <= 1e-5 * (1 + nats)
    if nats <= 12:  # far more than what fp16 holds below 1
        assert np.abs(result.o[0] / others - 1).max() <= 2 * EPSILON[dtype]


@pytest.mark.smoke
@pytest.mark.parametrize("features", [dict(), dict(seqlen_q=150, window=(-1, 10)), dict(dim_qk=256),
                                      dict(softcap=60.0), dict(dropout=0.2), dict(bias="f32")])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_weights_below_the_range_of_fp16_count_in_dv(device, dtype, features):
    """Of keys 14 nats below the first: some 2^-20, where fp16 has steps of 2^-24. dout is so large
    that dv has its digits, and constant, so that no error cancels."""
    fields = dict(causal=False, seqlen_q=3, seqlen_kv=200, backward=True)
    case = BASE.replace(dtype=dtype, **{**fields, **features})
    data = with_first_token(case, 14)
    data.dout = [np.full_like(dout, 128) for dout in data.dout]
    result = run(case, device, data)
    exact = reference.Arithmetic(None, engine_for(case))
    forward = reference.forward(case, data, 0, exact)
    want = np.asarray(reference.backward(case, data, 0, forward, exact).dv)
    got = result.dv[0].swapaxes(0, 1) if result.dv[0].shape != want.shape else result.dv[0]
    error = np.abs(got / want - 1)[want > 2.0 ** -13]
    assert error.max() <= max(EPSILON[dtype], 2.0 ** -15)
