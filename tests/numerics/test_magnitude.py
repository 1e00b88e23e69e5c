"""Scores, biases and sinks of any finite size, in both passes: what the formula gives, and of a row
that one key makes up that key's value, exactly."""
import numpy as np
import pytest

from . import reference
from .case import Case
from .data import make_data
from .dtypes import EPSILON, round_to
from .engines import engine_for
from .harness import Call, run
from .tolerance import check

DTYPES = ["f32", "f16", "bf16"]
BASE = Case(seqlen_q=70, seqlen_kv=131, heads_q=2, heads_kv=1, dim_qk=64, backward=True)
# Largest numbers of q and k, whose products are finite in fp32.
SIZES = [(dtype, size) for dtype in DTYPES for size in (1e3, 2e4, 1e10, 1e18)
         if dtype != "f16" or size <= 2e4]
LOWEST = {"f32": np.finfo(np.float32).min, "bf16": -float.fromhex("0x1.fep127"), "f16": -65504.0}


def constant(arrays, value, dtype):
    return [np.full_like(x, round_to(np.float32(value), dtype)) for x in arrays]


def everything_finite(result, names=("o", "lse", "dq", "dk", "dv")):
    for name in names:
        assert all(np.isfinite(x).all() for x in getattr(result, name)), name


@pytest.mark.smoke
@pytest.mark.parametrize("features", [dict(), dict(causal=True), dict(alibi="h"),
                                      dict(window=(40, 10), sink=True)])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype,size", SIZES)
def test_scores_far_apart(device, dtype, size, sign, features):
    """The key with the highest score takes all, in whichever order they come."""
    case = BASE.replace(dtype=dtype, **features)
    data = make_data(case)
    order = np.random.default_rng(1).permutation(case.seqlen_kv)
    for q, k in zip(data.q, data.k):
        q[:], k[:] = 0, 0
        q[..., 0] = round_to(np.float32(sign * size), dtype)
        k[..., 0] = round_to(np.float32(size) * (1 + order[:, None]) / len(order), dtype)
    result = run(case, device, data)
    everything_finite(result)
    # Not beside the naive formula, whose scores are infinite in 16 bits.
    want = reference.forward(case, data, 0, reference.Arithmetic(None, engine_for(case)))
    limit = 2 * EPSILON[dtype] * np.abs(data.v[0]).max()
    assert np.abs(result.o[0].swapaxes(0, 1) - want.o).max() <= limit
    assert (np.abs(result.lse[0] - want.lse) <= 1e-5 * np.abs(want.lse)).all()


@pytest.mark.smoke
@pytest.mark.parametrize("features", [dict(), dict(causal=True), dict(splits=3), dict(alibi="h"),
                                      dict(seqlen_q=2, seqlen_kv=2500)])
@pytest.mark.parametrize("dtype,size", SIZES)
def test_equal_scores(device, dtype, size, features):
    """Equal shares of v, and of the gradient of o."""
    case = BASE.replace(dtype=dtype, **features)
    if case.alibi:  # slopes so small that they vanish beside the scores
        case = case.replace(steepest=1e-30)
    data = make_data(case)
    data.q, data.k = constant(data.q, size, dtype), constant(data.k, size, dtype)
    data.dout = constant(data.dout, 1, dtype)
    result = run(case, device, data)
    # Of dq and dk what is left is rounding times the largest numbers of the dtype.
    everything_finite(result, ("o", "lse", "dv"))
    visible = np.ones((case.seqlen_q, case.seqlen_kv), bool)
    if case.causal:
        ahead = case.seqlen_kv - case.seqlen_q
        visible = np.tri(case.seqlen_q, case.seqlen_kv, ahead, dtype=bool)
    shares = visible / visible.sum(1, keepdims=True)
    want = shares @ data.v[0][:, 0].astype(np.float64)
    assert np.abs(result.o[0] - want[:, None]).max() <= 4 * EPSILON[dtype]
    score = (data.q[0][0, 0].astype(np.float64) ** 2).sum() * case.scale_used
    assert np.abs(result.lse[0] / score - 1).max() <= 1e-5
    share = case.heads_q * shares.sum(0)
    for dv in result.dv:
        assert np.abs(dv / share[:, None, None] - 1).max() < 0.01 + 4 * EPSILON[dtype]


@pytest.mark.smoke
@pytest.mark.parametrize("score", [1.0, -30.0, 500.0, 904.0, -1020.0, 1030.0, 1e6, -1e12, 1e18])
def test_weights_from_lse(device, score):
    """What the header says of a weight that backward makes of an fp32 lse: its relative error is
    that of lse's rounding, beside that of the score's, and where |lse| is 1024 or more, where
    either would be much, of neither."""
    if device.name != "cpu":
        pytest.skip("the header's bound is of lse alone; GPUs multiply fp32 as sums of TF32")
    case = BASE.replace(dtype="f32")
    data = make_data(case)
    size = np.sqrt(abs(score) / (case.dim_qk * case.scale_used))
    data.q = constant(data.q, np.copysign(size, score), "f32")
    data.k = constant(data.k, size, "f32")
    data.dout = constant(data.dout, 1, "f32")
    result = run(case, device, data)
    lse = np.abs(result.lse[0]).max()
    share = case.heads_q * case.seqlen_q / case.seqlen_kv
    # The first is of sums of 140 equal numbers.
    limit = 2.0 ** -19 + (2 * lse * 2.0 ** -24 if lse < 1024 else 0)
    assert np.abs(result.dv[0] / share - 1).max() <= limit


@pytest.mark.smoke
@pytest.mark.parametrize("features", [
    dict(chunk=1), dict(seqlen_kv=1), dict(window=(0, 0)), dict(bias="f32"), dict(bias="u8"),
    dict(window=(0, 0), alibi="h"), dict(seqlen_q=2, seqlen_kv=1, backward=False),
    dict(seqlen_q=2, seqlen_kv=2500, splits=3, window=(0, 0), backward=False),
    dict(chunk=1, dropout=0.5), dict(window=(0, 0), softcap=9.0),
    dict(bias="f32", seqlen_q=160, seqlen_kv=160), dict(bias="u8", seqlen_q=160, seqlen_kv=160),
    dict(chunk=1, dim_qk=128), dict(window=(0, 0), dim_qk=256), dict(bias="f32", dim_qk=128),
    dict(chunk=1, dim_qk=192, dim_v=128), dict(seqlen_q=3, seqlen_kv=1, dim_qk=128, heads_q=4)])
@pytest.mark.parametrize("amplitude", [3.0, 130.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dtype_o", ["", "f32"])
def test_a_row_of_one_key(device, dtype, dtype_o, amplitude, features):
    """o is the value, dv the gradient of o, and nothing flows to the scores."""
    fields = dict(seqlen_q=161, seqlen_kv=161, heads_q=2, dim_qk=64, dtype=dtype,
                  dtype_o=dtype_o, backward=True,
                  amplitude=min(amplitude, 30.0) if dtype == "f16" else amplitude)
    case = Case(**{**fields, **features})
    data = make_data(case)
    rows, keys = case.seqlen_q, case.seqlen_kv
    own = np.arange(rows) + keys - rows
    if case.window is None and case.chunk == 0:
        own = np.zeros(rows, int) if keys == 1 else np.random.default_rng(2).permutation(rows)
    if case.bias:
        shown = np.arange(keys) == own[:, None]
        hidden = 0.0 if case.bias == "u8" else -np.inf
        data.bias = np.where(shown, np.float32(1), np.float32(hidden)) + np.zeros_like(data.bias)
    result = run(case, device, data)
    want = data.v[0][own]
    if not case.dropout:
        # Where a bias leaves one key, GPUs multiply fp32 as sums of TF32: to the last bit but one.
        room = 2.0 ** -23 if dtype == "f32" and case.bias and device.name != "cpu" else 0
        assert (np.abs(result.o[0] - round_to(want, case.dtype_o)) <= room * np.abs(want)).all()
    check(case, data, result)
    if case.backward and keys > 1 and not case.dropout:
        at = np.empty((keys, case.heads_q, case.dim_v), np.float32)
        at[own] = data.dout[0]
        limit = 2.0 ** -13 if dtype == "f32" else EPSILON[dtype] if case.dtype_o == "f32" else 0
        smallest = 2.0 ** -24 if dtype == "f16" and limit else 0  # below which fp16 has nothing
        assert (np.abs(result.dv[0] - at) <= limit * np.abs(at) + smallest).all()


@pytest.mark.smoke
@pytest.mark.parametrize("features", [dict(), dict(causal=True), dict(softcap=5.0),
                                      dict(sink=True), dict(seqlen_kv=144)])
@pytest.mark.parametrize("bias", ["f32", "bf16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_lowest_finite_bias(device, dtype, bias, features):
    """Hides as -infinity does, but in rows where it stands everywhere: there all are equal."""
    case = BASE.replace(dtype=dtype, bias=bias, bias_dims="r", **features)
    data = make_data(case)
    low = np.random.default_rng(3).random(data.bias.shape) < 0.5
    low[..., 0] = False
    low[..., 10:20, :] = True
    data.bias = np.where(low, np.float32(LOWEST[bias]), np.float32(0))
    result = run(case, device, data)
    everything_finite(result)
    visible = np.ones((case.seqlen_q, case.seqlen_kv), bool)
    if case.causal:
        visible = np.tri(case.seqlen_q, case.seqlen_kv, case.seqlen_kv - case.seqlen_q, dtype=bool)
    for i in range(10, 20):
        want = 0 if case.sink else data.v[0][visible[i]].astype(np.float64).mean(0)
        assert np.abs(result.o[0][i] - want).max() < 2 * EPSILON[dtype] + 1e-6
    # Elsewhere as if -infinity stood there.
    data.bias[low] = -np.inf
    hidden = run(case, device, data)
    others = np.r_[0:10, 20:case.seqlen_q]
    assert np.abs(result.o[0][others] - hidden.o[0][others]).max() <= 2 * EPSILON[dtype]
    assert np.abs(result.dq[0][others] - hidden.dq[0][others]).max() <= 8 * EPSILON[dtype]


@pytest.mark.parametrize("value", [2.3e38, 2.4e38, 3.3e38, -2.4e38, 1e30, -1e30])
@pytest.mark.parametrize("keys", [131, 144])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_huge_bias_everywhere(device, dtype, value, keys):
    case = BASE.replace(dtype=dtype, bias="f32", seqlen_kv=keys)
    data = make_data(case)
    data.bias = np.full_like(data.bias, np.float32(value))
    data.dout = constant(data.dout, 1, dtype)
    result = run(case, device, data)
    everything_finite(result)
    mean = data.v[0].astype(np.float64).mean(0)
    assert np.abs(result.o[0] - mean).max() < 2 * EPSILON[dtype] + 1e-6
    assert (np.abs(result.lse[0] / np.float32(value) - 1) < 1e-5).all()
    share = case.heads_q * case.seqlen_q / case.seqlen_kv
    assert np.abs(result.dv[0] / share - 1).max() < 0.01 + 4 * EPSILON[dtype]


@pytest.mark.smoke
@pytest.mark.parametrize("sink", [-3e38, -1e30, -200.0, -20.0, 9.0, 20.0, 60.0])
@pytest.mark.parametrize("features", [dict(), dict(seqlen_q=2, seqlen_kv=2500, splits=3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_takes_no_digits(device, dtype, features, sink):
    """The weights of the keys are what they are without it, times one factor."""
    case = BASE.replace(dtype=dtype, dtype_o="f32", sink=True, backward=False, **features)
    data = make_data(case)
    data.sink[:] = sink
    alone = run(case.replace(sink=False), device, data)
    result = run(case, device, data)
    before = alone.lse[0].astype(np.float64)
    lse = np.logaddexp(before, np.float64(np.float32(sink)))
    assert (np.abs(result.lse[0] - lse) <= 1e-6 + 1e-6 * np.abs(lse)).all()
    want = alone.o[0] * np.exp(before - lse).T[:, :, None]
    # Parts of the keys may cancel, and 60 has 4e-6 to its neighbours in fp32.
    limit = 2e-5 * np.abs(want) + 4e-6 * np.abs(want).max() + 1e-36
    assert (np.abs(result.o[0] - want) <= limit).all()


@pytest.mark.smoke
@pytest.mark.parametrize("sink", [2e3, 1e10, 3e38])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_takes_all(device, dtype, sink):
    case = BASE.replace(dtype=dtype, sink=True, dsink=True, dlse=True)
    data = make_data(case)
    data.sink[:] = sink
    result = run(case, device, data)
    everything_finite(result)
    assert (np.abs(result.lse[0] / np.float32(sink) - 1) < 1e-6).all()
    for name in ("o", "dq", "dk", "dv"):
        assert all((x == 0).all() for x in getattr(result, name)), name
    # P of the sink is 1, D is -dlse.
    want = data.dlse[0].astype(np.float64).sum(1)
    assert np.abs(result.dsink - want).max() < 1e-3


@pytest.mark.smoke
@pytest.mark.parametrize("value", [5.0, 40.0, 300.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_lse_of_more_keys(device, dtype, value):
    """As in a ring: lse and o are of twice the keys that the backward pass has."""
    case = BASE.replace(dtype=dtype, heads_q=1)
    data = make_data(case)
    data.q, data.k = constant(data.q, value, dtype), constant(data.k, value, dtype)
    data.dout = constant(data.dout, 1, dtype)
    call = Call(case, device, data)
    part = call.forward()
    call.give(part.o, [np.float32(x + np.log(2)) for x in part.lse])
    result = call.backward(part)
    want = case.seqlen_q / case.seqlen_kv / 2
    # An fp32 lse of 7e5 says no more.
    assert np.abs(result.dv[0] / want - 1).max() < 0.05
