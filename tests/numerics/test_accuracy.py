"""The ratchet of accuracy.py: it holds what tests/data/accuracy.txt says."""
import numpy as np
import pytest

from . import accuracy, conftest, tolerance

pytestmark = pytest.mark.smoke


@pytest.fixture
def limits(monkeypatch):
    """Of a backend that is known to take half of a limit."""
    monkeypatch.setattr(accuracy, "worst", {})
    monkeypatch.setattr(accuracy, "allowed", {"f32 o": 0.5})


def judge(part):
    """An error that takes so much of its limit."""
    exact = np.ones(1000)
    naive, noise = exact + 1e-3, np.ones(1000)
    limit = tolerance.absolute_limit(exact, naive, noise, "f32", 2)
    tolerance.judge("o", [exact + part * limit], [exact], [naive], [noise], "f32", 2)


def test_an_error_within_the_limit_but_above_the_backends_own_fails(limits):
    del limits
    judge(0.45)
    with pytest.raises(AssertionError, match=r"\* 0.5 "):
        judge(0.55)
    assert 0.5 < accuracy.worst["f32 o"] < 0.6


def test_cases_that_no_other_run_has_are_held_by_the_limit_alone(limits, monkeypatch):
    del limits
    monkeypatch.setattr(accuracy, "allowed", None)
    judge(0.9)
    assert not accuracy.worst
    with pytest.raises(AssertionError):
        judge(1.1)


def test_logs_are_added_up(monkeypatch, tmp_path):
    monkeypatch.setattr(accuracy, "LOGS", tmp_path)
    accuracy.log("cpu some", {"f32 o": 0.5, "f32 dq": 0.1})
    path = accuracy.log("cpu some", {"f32 o": 0.4, "f32 dk": 0.2})
    assert accuracy.json.loads(path.read_text()) == {
        "backend": "cpu some", "worst": {"f32 o": 0.5, "f32 dq": 0.1, "f32 dk": 0.2}}


def test_what_is_committed():
    found = accuracy.committed()
    results = {"%s %s" % (dtype, name) for dtype in ("f32", "f16", "bf16")
               for name in ("o", "dq", "dk", "dv", "dbias")}
    for name in ("cpu baseline", "cpu avx2"):
        assert results | {"f32 dsink", "f32 lse"} <= set(found[name])
    assert all(0 < part <= 1 for parts in found.values() for part in parts.values())
    assert conftest.ACCURACY == found
