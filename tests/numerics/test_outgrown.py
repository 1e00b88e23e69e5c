"""Scores that outgrow those seen first, by more than a kernel that keeps its first reference can
hold: the result is the same function, in every order, and the same bits every time."""
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
    "alibi, capped": BASE.replace(alibi="h", heads_q=2, top_left=True, softcap=30.0, dim_qk=128),
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
