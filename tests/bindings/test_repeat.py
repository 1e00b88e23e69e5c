"""Calls of attention() that repeat an earlier one take a shorter way: the same bits, and no check
is lost."""
import threading

import ml_dtypes
import numpy as np
import pytest

import flashattn
from flashattn import _plan
from numerics.arrays import random


@pytest.fixture(autouse=True)
def _nothing_kept():
    flashattn.clear_cache()


def kept():
    return sum(call is not None for call in _plan.repeated.values())


def views(seed, dtype=np.float32, lay=lambda x: x):
    return [lay(random(2, 9, 8, 32, seed=seed + n).astype(dtype)) for n in range(3)]


WAYS = {
    "packed": lambda x: x,
    "transposed": lambda x: np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
    "gaps": lambda x: x[:, :, ::2, :16],
    "backwards of one": lambda x: x[:, :, :1][:, :, ::-1],
    "repeated": lambda x: np.broadcast_to(x[:1], x.shape),
    "fewer rows": lambda x: x[:, 3:],
    "none": lambda x: x[:, :0],
    "dim of 1": lambda x: x[:, :, :, 3:4],
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("options", [{}, dict(causal=True, return_lse=True), dict(
    window=(3, 1), scale=0.5, softcap=2.0, threads=1, dtype_o="float32"), dict(
        return_lse=np.True_, chunk=np.int64(4), scale=np.float64(0.3), determinism="run_to_run")])
def test_the_same_bits(way, dtype, options):
    first = [views(seed, dtype, WAYS[way]) for seed in range(4)]
    expected = []
    for arrays in first:
        flashattn.clear_cache()
        expected.append(flashattn.attention(*arrays, **options))
    flashattn.clear_cache()
    got = [flashattn.attention(*arrays, **options) for arrays in first]
    assert kept() == 1 and flashattn.cache_info() == {"plans": 1, "hits": 3, "misses": 1}
    for mine, theirs in zip(got, expected):
        for x, y in zip(*(r if type(r) is tuple else (r,) for r in (mine, theirs))):
            assert x.dtype == y.dtype and x.shape == y.shape and x.flags.writeable
            assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("good, bad", [
    (dict(causal=True), dict(causal=1.0)), (dict(window=(2, 1)), dict(window=(2.0, 1))),
    (dict(window=(1, 1)), dict(window=(True, 1))), (dict(return_lse=True), dict(return_lse=1.0)),
    (dict(dtype_o=1), dict(dtype_o=True)), (dict(threads=1), dict(threads=True)),
    (dict(layout="bshd"), dict(layout=b"bshd")), (dict(splits=2), dict(splits=2.0)),
    (dict(scale=1.0), dict(scale=True)),
    (dict(scale=np.float32(1)), dict(scale=np.True_)),
    (dict(causal=np.True_), dict(causal=np.float64(1))),
    (dict(chunk=4), dict(chunk=4, parallel=3.5)),
    (dict(), dict(dropout=0.5)), (dict(), dict(lens_kv=(9, 10))), (dict(), dict(unknown=None))])
def test_what_is_refused_stays_refused(good, bad):
    arrays = views(0)
    for _ in range(3):
        flashattn.attention(*arrays, **good)
    assert kept() == 1
    with pytest.raises((flashattn.FlashAttentionError, TypeError)):
        flashattn.attention(*arrays, **bad)


@pytest.mark.parametrize("change", [
    lambda x: x.astype(x.dtype.newbyteorder("S")), lambda x: x.astype(np.float64),
    np.ma.MaskedArray, lambda x: x[..., ::-1], lambda x: x[:, :, :, None], lambda x: x[:, :, ::-1],
    lambda x: [1.0]])
@pytest.mark.parametrize("which", range(3))
def test_arrays_of_another_kind_are_refused(change, which):
    arrays = views(0)
    for _ in range(3):
        flashattn.attention(*arrays)
    arrays[which] = change(arrays[which])
    with pytest.raises(flashattn.FlashAttentionError):
        flashattn.attention(*arrays)
    assert kept() == 1


def test_arrays_beside_them_are_no_repetition():
    arrays = views(0)
    bias = random(9, 9, seed=5)
    plain = [flashattn.attention(*arrays) for _ in range(3)]
    assert (flashattn.attention(*arrays, bias=bias) != plain[0]).any()
    assert (flashattn.attention(*arrays, lens_kv=[3, 4]) != plain[0]).any()
    o = np.empty_like(arrays[0])
    assert flashattn.attention(*arrays, o=o) is o and (o == plain[0]).all()


def test_what_grows_is_not_kept_and_not_without_end():
    q, k, v = (random(1, 400, 1, 8, seed=n) for n in range(3))
    for n in range(1, 400):
        flashattn.attention(q[:, :1], k[:, :n], v[:, :n])
    assert kept() == 0 and len(_plan.repeated) <= 256
    assert flashattn.cache_info() == {"plans": 1, "hits": 398, "misses": 1}


def test_threads_repeat_one_call():
    cases = [views(seed) for seed in range(8)]
    expected = [flashattn.attention(*arrays, threads=1) for arrays in cases]
    wrong = []

    def work(start):
        for step in range(100):
            n = (start + step) % len(cases)
            if flashattn.attention(*cases[n], threads=1).tobytes() != expected[n].tobytes():
                wrong.append(n)
            if step % 40 == 39:
                flashattn.clear_cache()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
