"""The reference itself: random numbers against published answers, masks against the definitions
pair by pair, gradients against finite differences."""
import numpy as np
import pytest

from . import philox, reference
from .case import Case
from .data import make_data
from .dtypes import round_to
from .tolerance import Truth, judge

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_scores_are_rounded_once(dtype):
    """In the formula evaluated naively, by whose errors others are judged: to round twice would
    only loosen the limits, which nothing else notices. The lse of one key is its score."""
    case = Case(seqlen_q=200, seqlen_kv=1, heads_q=1, dim_qk=1, dtype=dtype, scale=0.3)
    data = make_data(case)
    lse = reference.forward(case, data, 0, reference.Arithmetic(dtype)).lse[0]
    products = data.q[0][:, 0, 0].astype(np.float32) * data.k[0][0, 0, 0].astype(np.float32)
    once = round_to(products * np.float32(case.scale), dtype)
    np.testing.assert_array_equal(lse, once)
    twice = round_to(round_to(products, dtype) * np.float32(case.scale), dtype)
    assert (twice != once).any()


PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)


@pytest.mark.parametrize("rounds, counter, key, answer", [
    # kat_vectors of Random123, the authors' own.
    (7, (0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, *PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, *PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1))])
def test_philox_known_answers(rounds, counter, key, answer):
    assert tuple(int(x) for x in philox.philox4x32(counter, key, rounds)) == answer


@pytest.mark.parametrize("rows, keys", [(1, 1), (7, 7), (5, 11), (11, 5)])
@pytest.mark.parametrize("masks", [
    dict(causal=True), dict(causal=True, top_left=True), dict(window=(2, 1)),
    dict(window=(-1, 0), top_left=True), dict(window=(0, -1)), dict(chunk=3),
    dict(chunk=2, causal=True, window=(1, 1))])
def test_visible_pair_by_pair(rows, keys, masks):
    case = Case(**masks)
    see = reference.visible(case, rows, keys)
    for i in range(rows):
        for j in range(keys):
            at = i + (0 if case.top_left else keys - rows)
            expected = not case.causal or j <= at
            if case.window:
                left, right = case.window
                expected &= (left < 0 or at - left <= j) and (right < 0 or j <= at + right)
            if case.chunk:
                expected &= at // case.chunk == j // case.chunk
            assert see[i, j] == expected


GRADIENT_CASES = [
    Case(seqlen_q=4, seqlen_kv=6, heads_q=2, heads_kv=1, dim_qk=3, dim_v=2, causal=True),
    Case(seqlen_q=6, seqlen_kv=4, heads_q=2, dim_qk=3, causal=True, sink=True, dlse=True),
    Case(seqlen_q=5, seqlen_kv=5, heads_q=3, heads_kv=1, dim_qk=2, softcap=1.5, bias="f32",
         dbias="bhr", sink=True, dropout=0.4, dlse=True, alibi="h", window=(2, 1)),
    Case(seqlen_q=3, seqlen_kv=7, heads_q=2, dim_qk=4, chunk=3, bias="u8", density=0.7, scale=-0.4),
    Case(seqlen_q=5, seqlen_kv=5, heads_q=1, dim_qk=2, blocks=(2, 2), bias="f32", dbias="bhr",
         bias_dims="h", top_left=True, causal=True)]


@pytest.mark.parametrize("case", GRADIENT_CASES)
def test_gradients_by_finite_differences(case):
    case.backward = case.dsink = True
    data = make_data(case)
    for name in ("q", "k", "v"):
        setattr(data, name, [x.astype(np.float64) for x in getattr(data, name)])
    if case.sink:
        data.sink = data.sink.astype(np.float64)
    if case.dbias is not None:
        full = (1, case.heads_q, case.seqlen_q, case.seqlen_kv)
        data.bias = np.broadcast_to(data.bias, full).astype(np.float64)

    def loss():
        fwd = reference.forward(case, data, 0)
        value = (fwd.o.swapaxes(0, 1) * data.dout[0]).sum()
        if case.dlse:
            some = np.isfinite(fwd.lse)
            value += (fwd.lse[some] * data.dlse[0][some]).sum()
        return value

    got = reference.backward(case, data, 0, reference.forward(case, data, 0))
    checks = [(data.q[0], got.dq), (data.k[0], got.dk), (data.v[0], got.dv)]
    if case.sink:
        checks.append((data.sink, got.dsink))
    if case.dbias is not None:
        checks.append((data.bias, got.dbias[None]))
    for array, gradient in checks:
        step = 1e-6
        for at in np.ndindex(*array.shape):
            before = array[at]
            array[at] = before + step
            above = loss()
            array[at] = before - step
            below = loss()
            array[at] = before
            assert abs((above - below) / (2 * step) - gradient[at]) < 1e-7 * (1 + abs(gradient[at]))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_rule_notices_a_missing_key(dtype):
    case = Case(seqlen_q=70, seqlen_kv=150, heads_q=2, dim_qk=32, dtype=dtype)
    data = make_data(case)
    truth = Truth(case, data)
    o = truth.exact[0].o.swapaxes(0, 1)
    noise = truth.exact[0].noise.swapaxes(0, 1)
    naive = truth.naive[0].o.swapaxes(0, 1)
    judge("o", [o.astype(np.float32)], [o], [naive], [noise], dtype, 2)
    weights = truth.exact[0].p[1, 69]
    key = int(weights.argmax())
    wrong = o.copy()
    wrong[69, 1] -= weights[key] * data.v[0][key, 1]
    with pytest.raises(AssertionError, match=r"o: .* > "):
        judge("o", [wrong], [o], [naive], [noise], dtype, 2)
    wrong[3, 0, 7] = np.nan
    with pytest.raises(AssertionError, match="not finite"):
        judge("o", [wrong], [o], [naive], [noise], dtype, 2)
