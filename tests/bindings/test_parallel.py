"""The option parallel: a call's tasks on the caller's threads. Same bits, and the pool did run."""
import concurrent.futures
import ctypes
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import flashattn
from conftest import ROOT
from flashattn import Reason
from flashattn._library import ffi
from numerics.arrays import random

Q, K, V = (random(2, 200, 4, 32, seed=n) for n in range(3))


class Counting(concurrent.futures.ThreadPoolExecutor):
    """Keeps which threads ran something."""

    def __init__(self, workers):
        super().__init__(workers)
        self.asked, self.threads = 0, set()

    def submit(self, function, *arguments):
        def run():
            self.threads.add(threading.get_ident())
            function(*arguments)
        self.asked += 1
        return super().submit(run)


def results(**options):
    """All bits of a call forward, backward, of a merge and of a dropout's mask."""
    o, lse = flashattn.attention(Q, K, V, causal=True, return_lse=True, **options)
    gradients = flashattn.attention_backward(o, Q, K, V, o, lse, causal=True, **options)
    options.pop("threads", None)
    merged = flashattn.merge([o] * 2, [lse] * 2, **options)
    keep = mask(**options)
    return [x.tobytes() for x in (o, lse, *gradients, *merged, keep)]


def mask(**options):
    return flashattn.dropout_mask(2, 4, 200, 200, dropout=0.3, rng_seed=1, **options)


def test_executor():
    expected = results(threads=1)
    with Counting(3) as pool:
        for _ in range(20):
            assert results(parallel=pool, threads=4) == expected
            if pool.threads:
                break
        assert pool.asked >= 3 and pool.threads
        assert threading.get_ident() not in pool.threads
        plan = flashattn.Plan(dtype="float32", heads_q=4, dim_qk=32, causal=True, threads=4)
        before = pool.asked
        assert plan.forward(Q, K, V, parallel=pool).tobytes() == expected[0]
        assert pool.asked == before + 3
        before = pool.asked
        assert mask(parallel=pool).tobytes() == expected[-1]
        if flashattn.devices()[0].threads > 1:  # what the other functions take of threads=
            assert pool.asked > before


def test_small_calls_ask_nobody():
    with Counting(1) as pool:
        flashattn.attention(Q[:, :1], K[:, :1], V[:, :1], parallel=pool)
        assert not pool.asked


def test_call_on_a_thread_of_the_pool():
    """It cannot wait for itself: one thread that makes a call on its own pool, and busy threads."""
    expected = results(threads=1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(results, parallel=pool, threads=4).result(timeout=60) == expected
    gate = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(gate.wait) for _ in range(2)]
        assert results(parallel=pool, threads=4) == expected
        # What was left in its queue finds nothing to do.
        gate.set()
        assert all(future.result() for future in busy)


def test_many_callers():
    expected = results(threads=1)
    with concurrent.futures.ThreadPoolExecutor(3) as pool, \
            concurrent.futures.ThreadPoolExecutor(4) as callers:
        calls = [callers.submit(results, parallel=pool, threads=3) for _ in range(24)]
        assert all(call.result() == expected for call in calls)


def test_what_the_executor_raises():
    """The caller's thread does the work; then the error is raised. Kept bits are right."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.shutdown()
    o = np.full_like(Q, np.nan)
    with pytest.raises(RuntimeError, match="after shutdown"):
        flashattn.attention(Q, K, V, causal=True, o=o, parallel=pool, threads=4)
    assert o.tobytes() == results(threads=1)[0]


INTERRUPTED = """
import concurrent.futures, os, signal, threading, time
import numpy as np
import flashattn
# A shell lets what it starts in the background ignore the signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
x = np.ones((1, 3000, 4, 64), np.float32)
expected = flashattn.attention(x, x, x, threads=1)
caught = 0
def interrupt(after):
    for delay in (after, 0.0005):
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)
with concurrent.futures.ThreadPoolExecutor(3) as pool:
    for n in range(8):
        o = np.full_like(x, np.nan)
        # One thread for both: it has started when the first comes, whose start() that may end.
        sender = threading.Thread(target=interrupt, args=(0.002 + 0.004 * n,))
        try:
            sender.start()
            flashattn.attention(x, x, x, o=o, parallel=pool, threads=4)
            assert (o == expected).all()
            while sender.is_alive():
                time.sleep(0.001)
            time.sleep(0.1)
        except KeyboardInterrupt:
            caught += 1
        try:
            sender.join()
            time.sleep(0.01)
        except KeyboardInterrupt:
            sender.join()
            time.sleep(0.01)
    assert (flashattn.attention(x, x, x, parallel=pool, threads=4) == expected).all()
print(caught)
"""


def test_interrupts():
    """They wait until no thread is inside the call."""
    path = os.pathsep.join([str(ROOT / "bindings" / "python"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True,
                          timeout=120, check=False, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 0


FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p,
                            ctypes.c_void_p)
TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)


def test_pool_of_c():
    expected, seen = results(threads=1), []

    @FUNCTION
    def backwards(user, count, task, context):
        seen.append((user, count))
        for index in reversed(range(count)):
            TASK(task)(context, index)

    address = ctypes.cast(backwards, ctypes.c_void_p).value
    assert results(parallel=address, threads=4) == expected
    assert {user for user, _ in seen} == {None}
    seen.clear()
    pointer = ffi.cast("flashattn_parallel_fn", address)
    assert results(parallel=(pointer, 42), threads=4) == expected
    assert seen and {user for user, _ in seen} == {42}
    seen.clear()
    mask(parallel=(pointer, 43))
    assert {user for user, _ in seen} == ({43} if flashattn.devices()[0].threads > 1 else set())


@pytest.mark.parametrize("value, reason, text", [
    (3.5, Reason.DTYPE, "Executor"), (True, Reason.DTYPE, "Executor"),
    (-1, Reason.DTYPE, "address"), ((1, 2, 3), Reason.DTYPE, "user"),
    (0, Reason.NULL_POINTER, "NULL"), ((0, 7), Reason.NULL_POINTER, "NULL")])
def test_refusals(value, reason, text):
    for call in (lambda: flashattn.attention(Q, K, V, parallel=value),
                 lambda: flashattn.merge([Q], [np.zeros((2, 4, 200), np.float32)],
                                         parallel=value),
                 lambda: mask(parallel=value)):
        with pytest.raises(flashattn.FlashAttentionError, match=text) as caught:
            call()
        assert (caught.value.reason, caught.value.field) == (reason, "parallel")


def test_other_processes_are_refused():
    with concurrent.futures.ProcessPoolExecutor(1) as pool, \
            pytest.raises(flashattn.ArrayTypeError, match="ThreadPoolExecutor"):
        flashattn.attention(Q, K, V, parallel=pool)
