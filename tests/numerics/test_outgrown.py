"""Scores that outgrow those seen first, by more than a kernel that keeps its first reference can
hold: the result is the same function, in every order, and the same bits every time."""
import dataclasses

import numpy as np
import pytest

from . import harness
from .case import Case
from .data import make_data
from .dtypes import round_to
from .tolerance import check

BASE = Case(seqlen_q=200, seqlen_kv=500, dim_qk=64, dtype="bf16")
CASES = {
    "bf16": BASE,
    "f16": BASE.replace(dtype="f16"),
    "f32": BASE.replace(dtype="f32"),
    "large heads": BASE.replace(dim_qk=128, heads_q=2, heads_kv=1),
    "largest heads": BASE.replace(dim_qk=256),
    "causal": BASE.replace(causal=True),
    "window": BASE.replace(window=(250, 30), dim_qk=128),
    "lengths": BASE.replace(batch=2, lens_q=[200, 65], lens_kv=[129, 500]),
    "varlen": BASE.replace(batch=2, cu_q=[129, 200], cu_kv=[500, 1], dtype="f16"),
    "sink": BASE.replace(sink=True, causal=True),
    "one row a head": BASE.replace(seqlen_q=1, heads_q=4, heads_kv=1),
    "alibi": BASE.replace(alibi="h", heads_q=2),
    "alibi, causal": BASE.replace(alibi="h", heads_q=2, causal=True, seqlen_kv=900),
    "alibi, keys behind": BASE.replace(alibi="h", heads_q=2, top_left=True, dtype="f16"),
    "capped": BASE.replace(softcap=30.0, heads_q=2, causal=True, seqlen_kv=900),
    "alibi, capped": BASE.replace(alibi="h", heads_q=2, top_left=True, softcap=30.0, dim_qk=128),
    "packed heads": BASE.replace(seqlen_q=40, seqlen_kv=1500, heads_q=4, heads_kv=1, dim_qk=128),
    "many": BASE.replace(batch=2, heads_q=4, seqlen_kv=300),
}


@pytest.mark.smoke
@pytest.mark.parametrize("grow", ["first keys", "last keys", "one key", "every other key"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_outgrown(device, name, grow):
    case = CASES[name]
    data = make_data(case)
    factor = 12.0 if case.dtype == "f16" else 60.0
    for k in data.k:
        rows = {"first keys": slice(0, len(k) // 2), "last keys": slice(len(k) // 2, None),
                "one key": slice(len(k) // 3, len(k) // 3 + 1),
                "every other key": slice(0, None, 2)}[grow]
        k[rows] *= factor
    data.k = [round_to(k, case.dtype) for k in data.k]
    outcome = harness.run(case, device, data)
    check(case, data, outcome)
    assert harness.run(case, device, data).bits() == outcome.bits()


@pytest.mark.smoke
@pytest.mark.parametrize("name", sorted(CASES))
def test_all_scores_far_below_zero(device, name):
    """And, of the last keys, less far."""
    case = CASES[name]
    data = make_data(case)
    data.q = [np.abs(q) for q in data.q]
    data.k = [-np.abs(k) * (2.0 if case.dtype == "f16" else 40.0) for k in data.k]
    for k in data.k:
        k[-len(k) // 3:] /= 8
    data.k = [round_to(k, case.dtype) for k in data.k]
    check(case, data, harness.run(case, device, data))


@pytest.mark.smoke
@pytest.mark.parametrize("size", [2e35, 1e-30])
@pytest.mark.parametrize("changes", [
    dict(), dict(causal=True, seqlen_q=33), dict(seqlen_q=1), dict(dim_qk=40), dict(sink=True),
    dict(heads_q=3, heads_kv=1, seqlen_q=45, window=(300, 30)), dict(seqlen_q=3, splits=3),
    dict(batch=2, cu_q=[129, 70], cu_kv=[500, 201]), dict(dropout=0.3),
    dict(sink=True, dropout=0.3), dict(sink=True, softcap=5.0), dict(sink=True, alibi="h"),
    dict(batch=2, seqlen_q=9, lens_kv=[500, 77], page_size=16)])
def test_values_of_any_size(device, changes, size):
    """Weights that are not near 1 times values near the largest and the smallest numbers."""
    case = BASE.replace(**changes)
    data = make_data(case)
    sign = 1 if size > 1 else -2
    data.q = [np.abs(q) for q in data.q]
    data.k = [round_to(np.abs(k) * sign, case.dtype) for k in data.k]
    data.v = [round_to(np.abs(v) * np.float32(size), case.dtype) for v in data.v]
    check(case, data, harness.run(case, device, data))


@pytest.mark.smoke
@pytest.mark.parametrize("slopes", [[0.0, 0.5], [0.5, 0.0]])
@pytest.mark.parametrize("changes", [
    dict(), dict(seqlen_q=24), dict(seqlen_q=1, seqlen_kv=2304), dict(dtype="f32"),
    dict(dtype="f32", amplitude=12.0), dict(amplitude=6.0)])
def test_one_slope_is_zero(device, slopes, changes):
    """Of two heads that share a tile."""
    case = Case(seqlen_q=1, seqlen_kv=384, heads_q=2, heads_kv=1, dim_qk=64, dtype="bf16",
                alibi="h").replace(**changes)
    data = make_data(case)
    data.slopes = np.broadcast_to(np.float32(slopes), data.slopes.shape).copy()
    check(case, data, harness.run(case, device, data))


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_equal_weights_of_many_keys(device, dtype):
    """Their sum is rounded the same way every time."""
    case = Case(seqlen_q=64, seqlen_kv=100000, dim_qk=64, dtype=dtype)
    data = make_data(case)
    data.k = [np.broadcast_to(k[:1] * np.float32(0.25), k.shape).copy() for k in data.k]
    data.k = [round_to(k, dtype) for k in data.k]
    check(case, data, harness.run(case, device, data))


@pytest.mark.smoke
@pytest.mark.parametrize("changes", [
    dict(dtype_o="f32"), dict(dim_qk=96, dtype_o="f32"),
    dict(dim_qk=128, causal=True, top_left=True, dtype_o="f32"),
    dict(heads_q=3, heads_kv=1, sink=True, dtype_o="f32"),
    dict(window=(300, 70), top_left=True, dtype_o="f32"), dict(dim_qk=40, dtype_o="f32"),
    dict(softcap=30.0, dtype_o="f32"), dict(dtype="f16"), dict(dtype="f32")])
def test_a_query_does_not_depend_on_its_neighbours(device, changes):
    """Whether these outgrow what was seen first, or how many they are, on a CPU."""
    if device.name != "cpu":
        pytest.skip("that bits do not depend on the neighbours is the CPU backend's")
    case = Case(seqlen_q=150, seqlen_kv=700, dim_qk=64, dtype="bf16").replace(**changes)
    data = make_data(case)
    whole = harness.run(case, device, data)

    def same(result, queries):
        np.testing.assert_array_equal(result.o[0][queries], whole.o[0][queries])
        np.testing.assert_array_equal(result.lse[0][:, queries], whole.lse[0][:, queries])

    far = dataclasses.replace(data, q=[data.q[0].copy()])
    far.q[0][70] = round_to(far.q[0][70] * 16, case.dtype)
    same(harness.run(case, device, far), np.arange(150) != 70)
    fewer = dataclasses.replace(data, q=[data.q[0][:45]], dout=[data.dout[0][:45]],
                                dlse=[data.dlse[0][:, :45]])
    same(harness.run(case.replace(seqlen_q=45), device, fewer), np.arange(45))


@pytest.mark.smoke
@pytest.mark.parametrize("changes", [
    dict(), dict(dim_qk=40), dict(heads_q=6, heads_kv=2, seqlen_q=50, window=(150, 0)),
    dict(dtype="f32", dtype_o=None)])
def test_heads_that_share_a_tile(device, changes):
    """Which do, depends on the threads; on a CPU the bits do not."""
    if device.name != "cpu":
        pytest.skip("the number of threads is the CPU backend's")
    case = Case(seqlen_q=45, seqlen_kv=500, heads_q=8, heads_kv=1, dim_qk=64, dtype="bf16",
                dtype_o="f32", window=(101, 30)).replace(**changes)
    data = make_data(case)
    one = harness.run(case.replace(threads=1), device, data)
    check(case, data, one)
    assert harness.run(case.replace(threads=3), device, data).bits() == one.bits()
