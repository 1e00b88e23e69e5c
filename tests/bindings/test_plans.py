"""Plans, their cache, threads, and what a call costs beside the C call."""
import gc
import json
import threading
import time

import numpy as np
import pytest

import flashattn
from flashattn._inputs import Inputs
from flashattn._library import ffi, lib
from flashattn._plan import new_args
from numerics.arrays import random


def test_plan_runs_and_tells():
    q = random(2, 9, 4, 16)
    plan = flashattn.Plan(dtype="float32", heads_q=4, dim_qk=16, causal=True, return_lse=True,
                          backward=True)
    out, lse = plan.forward(q, q, q)
    expected, expected_lse = flashattn.attention(q, q, q, causal=True, return_lse=True)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)
    for mine, theirs in zip(plan.backward(q, q, q, q, out, lse),
                            flashattn.attention_backward(q, q, q, q, out, lse, causal=True)):
        np.testing.assert_array_equal(mine, theirs)
    info = plan.info("forward", batch=2, seqlen_q=9, seqlen_kv=9)
    assert info.backend == "cpu" and info.kernel and info.why and info.threads >= 1
    assert info.flops == 2 * 2 * 16 * 2 * 4 * 45  # 45 visible pairs of 81
    assert info.workspace == plan.workspace_size("forward", batch=2, seqlen_q=9, seqlen_kv=9)
    # Every default is resolved: the library says it, no table here.
    d = plan.descriptor
    assert (d.heads_kv, d.dim_v, d.dtype_kv, d.dtype_o, d.scale) == (4, 16, 1, 1, 0.25)
    assert "4 heads" in repr(plan)


def test_maxima_need_no_sizes():
    plan = flashattn.Plan(dtype="float32", heads_q=4, dim_qk=16, max_batch=4, max_seqlen_q=64,
                          max_seqlen_kv=64)
    assert plan.workspace_size() >= plan.workspace_size(batch=2, seqlen_q=32, seqlen_kv=64)
    with pytest.raises(ValueError):
        flashattn.Plan(dtype="float32", heads_q=4, dim_qk=16).workspace_size()
    for question in (plan.info, plan.workspace_size):
        with pytest.raises(ValueError, match="sizes are given without batch.*; give batch"):
            question(seqlen_q=32, seqlen_kv=64)
        with pytest.raises(ValueError, match="^seqlen_kv = 2147483648 is past the range"):
            question(batch=1, seqlen_q=1, seqlen_kv=2**31)


def test_plan_refuses_other_arrays():
    plan = flashattn.Plan(dtype="float32", heads_q=4, dim_qk=16)
    with pytest.raises(ValueError, match="^heads_q = 2 by the arrays given, but .* made for 4"):
        plan.forward(*[random(2, 9, 2, 16)] * 3)
    with pytest.raises(ValueError, match="^dtype = float16 by .* made for float32"):
        plan.forward(*[random(2, 9, 4, 16, dtype=np.float16)] * 3)
    with pytest.raises(ValueError, match="^bias = dense by .* made for none"):
        plan.forward(*[random(2, 9, 4, 16)] * 3, bias=np.zeros((9, 9), np.float32))
    with pytest.raises(ValueError, match="BACKWARD|backward|op"):
        plan.info("backward", batch=1, seqlen_q=1, seqlen_kv=1)


def test_log_lines_arrive_and_exceptions_stay_inside(monkeypatch):
    lines, lost = [], []
    monkeypatch.setattr("sys.unraisablehook", lambda said: lost.append(said.exc_value))

    def note(level, line):
        lines.append((level, line))
        raise KeyError("the library must not see this")

    flashattn.set_log(flashattn.LogLevel.INFO, note)
    del note
    gc.collect()  # the library's pointer outlives the caller's
    try:
        with pytest.raises(ValueError, match="heads_q = 0"):
            flashattn.check(dtype="float32", heads_q=0, dim_qk=8)
        flashattn.Plan(dtype="float32", heads_q=1, dim_qk=8)
        with pytest.raises(ValueError, match="level = 9"):
            flashattn.set_log(9, print)
        for level, callback in ((flashattn.LogLevel.OFF, print), (flashattn.LogLevel.INFO, None)):
            with pytest.raises(ValueError, match="give a callback to every level but"):
                flashattn.set_log(level, callback)
    finally:
        flashattn.set_log(flashattn.LogLevel.OFF)
    flashattn.Plan(dtype="float32", heads_q=1, dim_qk=8)
    levels, said = zip(*lines)
    assert levels == (flashattn.LogLevel.ERROR, flashattn.LogLevel.INFO, flashattn.LogLevel.ERROR)
    assert "heads_q = 0 is below 1" in said[0] and "backend cpu" in said[1]
    assert [type(error) for error in lost] == [KeyError] * 3


def test_plans_are_found_again():
    flashattn.clear_cache()
    q = random(2, 9, 4, 16)
    for seqlen in (9, 7, 5):  # lengths belong to the call, not to the plan
        part = q[:, :seqlen]
        flashattn.attention(part, part, part, causal=True)
    assert flashattn.cache_info() == {"plans": 1, "hits": 2, "misses": 1}
    flashattn.attention(q, q, q)
    assert flashattn.cache_info()["plans"] == 2
    with pytest.raises(ValueError):
        flashattn.attention(q, q, q, dropout=2.0)
    assert flashattn.cache_info()["plans"] == 2
    for i in range(300):
        flashattn.attention(q, q, q, scale=1.0 + i)
    assert flashattn.cache_info()["plans"] == 256
    flashattn.clear_cache()
    gc.collect()
    assert flashattn.cache_info()["plans"] == 0


def test_equal_calls_find_one_plan_however_they_are_spelled():
    q = random(2, 9, 4, 16)
    bias = np.zeros((9, 9), np.float32)
    spellings = [
        [{}, dict(causal=False), dict(causal=np.False_, window=None), dict(window=(-1, None)),
         dict(window=[-1, -1]), dict(softcap=0), dict(softcap=None), dict(softcap=-0.0),
         dict(scale=None), dict(threads=0, splits=np.int64(0)), dict(determinism=False),
         dict(device=None), dict(device="cpu"), dict(dtype_o=None), dict(dtype_o="float32"),
         dict(dtype_o=np.float32), dict(dtype_o=flashattn.Dtype.F32), dict(dropout=0),
         dict(o=np.zeros_like(q)), dict(return_lse=0), dict(chunk=None, top_left=False)],
        [dict(causal=True, threads=1, scale=0.5), dict(scale=0.5, threads=1, causal=True),
         dict(threads=1, causal=1, scale=np.array(0.5)), dict(threads=np.int32(1), causal=np.True_,
                                                              scale=np.float32(0.5)),
         dict(causal=True, threads=np.array(1), scale=0.5, softcap=None)],
        [dict(window=2), dict(window=(2, 2)), dict(window=[2, np.int64(2)]),
         dict(window=np.array([2, 2]))],
        [dict(determinism=True), dict(determinism=1), dict(determinism=np.True_),
         dict(determinism="run_to_run"), dict(determinism=flashattn.Determinism.RUN_TO_RUN)],
        [dict(bias=bias, chunk=4), dict(chunk=np.int16(4), bias=bias)],
        [dict(block_mask=np.ones((3, 3), bool), block_q=size, block_kv=3)
         for size in (3, np.int64(3), np.array(3))],
    ]
    for same in spellings:
        flashattn.clear_cache()
        first = flashattn.attention(q, q, q, **same[0])
        for options in same:
            again = flashattn.attention(q, q, q, **options)
            np.testing.assert_array_equal(again[0] if type(again) is tuple else again, first)
        assert flashattn.cache_info()["plans"] == 1, same
    out, lse = flashattn.attention(q, q, q, return_lse=True)
    flashattn.clear_cache()
    flashattn.attention_backward(q, q, q, q, out, lse, causal=True, softcap=3)
    flashattn.attention_backward(q, q, q, q, out, lse, softcap=3.0, causal=True, window=None)
    assert flashattn.cache_info() == {"plans": 1, "hits": 1, "misses": 1}


def test_what_is_refused_is_refused_whatever_was_kept():
    """True equals 1.0 and hashes like it; a plan found by it would be one nobody asked for."""
    q = random(2, 9, 4, 16)
    flashattn.attention(q, q, q, causal=True, threads=2)
    for options in (dict(causal=1.0, threads=2), dict(causal=True, threads=2.0)):
        with pytest.raises(TypeError, match="is of type float; give"):
            flashattn.attention(q, q, q, **options)


def test_threads_share_a_plan():
    plan = flashattn.Plan(dtype="float32", heads_q=4, dim_qk=16, causal=True, threads=1)
    cases = [random(2, 5 + i, 4, 16, seed=i) for i in range(8)]
    expected = [plan.forward(q, q, q) for q in cases]
    wrong = []

    def work(start):
        for step in range(60):
            i = (start + step) % len(cases)
            if not (plan.forward(*[cases[i]] * 3) == expected[i]).all():
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_errors_belong_to_their_thread():
    messages = {}

    def fail(dim):
        for _ in range(50):
            try:
                flashattn.check(dtype="float32", heads_q=1, dim_qk=dim)
            except flashattn.FlashAttentionError as error:
                messages.setdefault(dim, set()).add(str(error))

    threads = [threading.Thread(target=fail, args=(dim,)) for dim in (5000, 6000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(said) == 1 and str(dim) in next(iter(said)) for dim, said in messages.items())
    assert len(messages) == 2


def _microseconds(calls, rounds=60, repeats=30):
    """The least time of each call, measured in turn: other work on the machine only ever adds."""
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            best[i] = min(best[i], (time.perf_counter() - start) / repeats * 1e6)
    return best


def test_a_call_costs_little_beside_the_c_call():
    q, k, v = (random(1, 1, 1, 8, seed=i) for i in range(3))
    plan = flashattn.Plan(dtype="float32", heads_q=1, dim_qk=8, threads=1)
    inputs, out = Inputs(q, k, v), np.empty_like(q)
    args = new_args(inputs.sizes)
    inputs.fill(args)
    args.o.data = ffi.cast("void *", out.ctypes.data)
    size = plan.workspace_size(batch=1, seqlen_q=1, seqlen_kv=1)
    workspace = ffi.new("char[]", max(size, 1))
    assert lib.flashattn_forward(plan._plan, args, workspace, size, ffi.NULL) == 0
    # The measure, as machines differ: half of what Python itself takes to write forty lines, 25 us
    # where a call that repeats another takes 8.
    table = {str(n): n for n in range(40)}
    raw, whole, python = _microseconds([
        lambda: lib.flashattn_forward(plan._plan, args, workspace, size, ffi.NULL),
        lambda: flashattn.attention(q, k, v, threads=1),
        lambda: json.dumps(table, indent=1)])
    assert whole - raw < python / 2, (
        f"{whole:.1f} us for a call, {raw:.1f} us of it in C; {python:.1f} us for a table")
