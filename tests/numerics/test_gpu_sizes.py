"""Sizes that only a GPU's memory holds: offsets past 2**31 elements, and sequences of 128k tokens,
judged by the rows of a sample."""
import contextlib

import numpy as np
import pytest

from . import capi, philox
from .case import Case
from .data import make_data
from .dtypes import EPSILON, NUMPY
from .harness import Call, run
from .repro import command

BIG = 2 ** 31 + 64
BASE = Case(batch=2, seqlen_q=70, seqlen_kv=131, heads_q=2, dim_qk=64, dtype="bf16", causal=True,
            determinism=1)


class Sparse:
    """An array in memory far larger than what is used of it, the rest NaN."""

    def __init__(self, driver, dtype, shape, strides, values=None):
        batch, heads, rows, dim = shape
        self.driver, self.dtype, self.strides = driver, NUMPY[dtype], strides
        b, h, s = strides
        self.starts = [(i, j, r, i * b + j * h + r * s) for i in range(batch)
                       for j in range(heads) for r in range(rows)]
        self.dim = dim
        self.bytes = (max(start for *_, start in self.starts) + dim) * self.dtype.itemsize
        self.address = driver.allocate(self.bytes)
        driver.fill(self.address, 0xFF, self.bytes)
        if values is not None:
            for i, j, r, start in self.starts:
                row = np.ascontiguousarray(values[i][r, j].astype(self.dtype))
                driver.write(self.address + start * self.dtype.itemsize, row)

    def field(self):
        batch, head, seq = self.strides
        return dict(data=capi.pointer(self.address), stride_batch=batch, stride_head=head,
                    stride_seq=seq)

    def read(self):
        """Per sequence (rows, heads, dim)."""
        batch, heads, rows = (1 + max(x[axis] for x in self.starts) for axis in range(3))
        out = np.empty((batch, rows, heads, self.dim), np.float32)
        for i, j, r, start in self.starts:
            raw = self.driver.read(self.address + start * self.dtype.itemsize,
                                   self.dim * self.dtype.itemsize)
            out[i, r, j] = raw.view(self.dtype)
        return list(out)

    def free(self):
        self.driver.free(self.address)


@contextlib.contextmanager
def arrays():
    """A list whose arrays are freed in the end."""
    made = []
    try:
        yield made
    finally:
        for array in made:
            array.free()


def need(device, size):
    if device.driver.memory < size:
        pytest.skip("needs %d GB of free device memory" % (size >> 30))


def strides_of(kind, rows, dim):
    """(batch, head, seq), one of which puts its last element past 2**31."""
    far = {"batch": (BIG, dim, 2 * dim), "head": (dim, BIG, 2 * dim),
           "row": (dim, 2 * dim, (BIG // (rows - 1) + 64) // 64 * 64)}
    return far[kind]


@pytest.mark.parametrize("kind", ["batch", "head", "row"])
@pytest.mark.parametrize("backward", [False, True])
def test_strides_past_two_to_the_31(device, kind, backward):
    """The same bits as from packed arrays."""
    need(device, 48 << 30)
    case = BASE.replace(backward=backward)
    data = make_data(case)
    expected = run(case, device, data)
    call = Call(case, device, data)  # for its lse
    driver = device.driver
    with arrays() as made:
        def sparse(rows, values=None):
            shape = (case.batch, case.heads_q, rows, case.dim_qk)
            made.append(Sparse(driver, case.dtype, shape,
                               strides_of(kind, rows, case.dim_qk), values))
            return made[-1]

        for name, rows in (("q", 70), ("k", 131), ("v", 131)):
            call.inputs[name] = sparse(rows, getattr(data, name)).field()
        o, lse = sparse(70), call.lse_like("lse")
        device.launch(call.stage(capi.FORWARD, dict(o=o.field(), lse=lse)))
        assert all(np.array_equal(*pair) for pair in zip(o.read(), expected.o))
        if backward:
            outputs = {"d" + name: sparse(rows) for name, rows in
                       (("q", 70), ("k", 131), ("v", 131))}
            # stage() would fill what forward wrote.
            call.buffers["lse"].accept(call.collect(["lse"])["lse"])
            fields = dict(o=o.field(), lse=lse, dout=sparse(70, data.dout).field(),
                          **{name: array.field() for name, array in outputs.items()})
            device.launch(call.stage(capi.BACKWARD, fields))
            for name, array in outputs.items():
                assert all(np.array_equal(*pair)
                           for pair in zip(array.read(), getattr(expected, name))), name


def test_pages_past_two_to_the_31(device):
    """A pool whose last pages begin past 2**31 elements."""
    need(device, 24 << 30)
    case = BASE.replace(seqlen_q=3, heads_q=2, page_size=16, lens_kv=[131, 97])
    data = make_data(case)
    expected = run(case, device, data)
    call = Call(case, device, data)
    count, driver = call.page_count, device.driver
    tokens = {name: [np.full((16, 2, 64), np.nan, np.float32) for _ in range(count)]
              for name in "kv"}
    for name in "kv":
        for b, numbers in enumerate(call.page_lists):
            values = getattr(data, name)[b]
            for n, page in enumerate(numbers):
                part = values[16 * n:16 * n + 16]
                tokens[name][page][:len(part)] = part
    stride = (BIG // (count - 3) + 64) // 64 * 64
    with arrays() as made:
        for name in "kv":
            made.append(Sparse(driver, case.dtype, (count, 2, 16, 64), (stride, 64, 128),
                               tokens[name]))
            call.inputs[name] = made[-1].field()
        fields = call.forward_fields()
        device.launch(call.stage(capi.FORWARD, fields))
        got = call.take("o", call.collect(["o", "lse"])["o"])
        assert all(np.array_equal(*pair) for pair in zip(got, expected.o))


def test_more_than_two_to_the_31_rows(device):
    """o and lse of 2**31 + 128 queries, which are all the same one: q repeats by strides of 0."""
    rows, dim = 2 ** 30 + 64, 8
    need(device, 52 << 30)
    case = Case(batch=2, seqlen_q=64, seqlen_kv=67, heads_q=1, dim_qk=dim, dtype="f16")
    data = make_data(case)
    data.q = [np.repeat(data.q[0][:1], 64, 0)] * 2
    data.k, data.v = [data.k[0]] * 2, [data.v[0]] * 2
    expected = run(case, device, data)
    call, driver = Call(case, device, data), device.driver
    call.sizes = dict(call.sizes, seqlen_q=rows)
    call.inputs["q"].update(stride_batch=0, stride_head=dim, stride_seq=0)
    o, lse = driver.allocate(2 * rows * dim * 2), driver.allocate(2 * rows * 4)
    try:
        driver.fill(o, 0xFF, 2 * rows * dim * 2)
        driver.fill(lse, 0xFF, 2 * rows * 4)
        fields = dict(o=dict(data=capi.pointer(o)), lse=capi.pointer(lse, "float *"))
        device.launch(call.stage(capi.FORWARD, fields))
        rng = np.random.default_rng(0)
        count = 1000
        # Another kernel may serve so many.
        row = driver.read(o, dim * 2).view(np.float16)
        log = driver.read(lse, 4).view(np.float32)
        np.testing.assert_allclose(row, expected.o[0][0, 0], rtol=2e-3)
        np.testing.assert_allclose(log, expected.lse[0][0, 0], rtol=1e-5)
        for first in [0, 2 ** 28 - 500, 2 ** 30 - 500, rows - 500, 2 ** 31 - 900, 2 * rows - count,
                      *rng.integers(0, 2 * rows - count, 20).tolist()]:
            first = min(first, 2 * rows - count)
            part = driver.read(o + first * dim * 2, count * dim * 2).view(np.float16)
            assert (part.reshape(count, dim) == row).all(), first
            part = driver.read(lse + first * 4, count * 4).view(np.float32)
            assert (part == log).all(), first
    finally:
        driver.free(o)
        driver.free(lse)


def test_dropout_mask_past_two_to_the_31(device):
    need(device, 4 << 30)
    rows, keys = 46400, 46408
    case = Case(seqlen_q=8, seqlen_kv=8, heads_q=1, dim_qk=8, dtype="f16", dropout=0.3)
    call, driver = Call(case, device), device.driver
    keep = driver.allocate(rows * keys)
    fields = dict(batch=1, seqlen_q=rows, seqlen_kv=keys, **call.rng_fields())
    try:
        device.launch(lambda stream: call.plan.dropout_mask(fields, keep, stream))
        for row in (0, 2 ** 31 // keys, rows - 3):
            got = driver.read(keep + row * keys, 3 * keys).reshape(3, keys)
            want = philox.keep_mask(0.3, *case.rng, 0, 3, keys, first=row)
            assert np.array_equal(got, want), row
    finally:
        driver.free(keep)


# ---- long sequences

LONG = 131072
LONGEST = {
    "D64": Case(seqlen_q=LONG, seqlen_kv=LONG, heads_q=2, heads_kv=1, dim_qk=64, causal=True),
    "D128": Case(seqlen_q=LONG, seqlen_kv=LONG, heads_q=1, dim_qk=128, causal=True),
    "D256 full": Case(seqlen_q=4099, seqlen_kv=LONG, heads_q=1, dim_qk=256),
    "window": Case(seqlen_q=LONG, seqlen_kv=LONG, heads_q=1, dim_qk=64, window=(4095, 0)),
    "decode": Case(batch=2, seqlen_q=1, seqlen_kv=LONG, lens_kv=[LONG, 100003], heads_q=8,
                   heads_kv=2, dim_qk=128)}


def sample(length):
    edges = [0, 1, 63, 64, 127, 128, length // 2, length - 65, length - 64, length - 1]
    drawn = np.random.default_rng(0).integers(0, length, 12).tolist()
    return sorted({n for n in edges + drawn if 0 <= n < length})


def scores(case, data, b, h, rows, keys=None):
    """float64, -inf where hidden: of some rows with all keys, or of all rows with some keys."""
    q, k = data.q[b][:, h].astype(np.float64), data.k[b][:, h // case.group].astype(np.float64)
    i = np.arange(len(q))[rows] if rows is not None else np.arange(len(q))
    j = np.arange(len(k))[keys] if keys is not None else np.arange(len(k))
    s = q[i] @ k[j].T * case.scale_used
    at = i[:, None] + len(k) - len(q)
    hidden = np.zeros(s.shape, bool)
    if case.causal:
        hidden |= j > at
    if case.window:
        hidden |= (j < at - case.window[0]) | (j > at + case.window[1])
    return np.where(hidden, -np.inf, s)


def agree(name, got, exact, noise, dtype, case, device):
    """Element by element: some roundings of the result and of what it is a sum of."""
    limit = 2 * EPSILON[dtype] * (np.abs(exact) + noise) + 1e-6
    bad = ~(np.abs(got - exact) <= limit)
    assert not bad.any(), "%s: %d of %d wrong, by up to %.3g times the limit: %s" % (
        name, bad.sum(), bad.size, np.max(np.abs(got - exact) / limit), command(case, device))


@pytest.mark.parametrize("name, dtype", [(name, "bf16") for name in sorted(LONGEST)]
                         + [("D128", "f16"), ("decode", "f16")])
def test_128k_tokens(device, name, dtype):
    case = LONGEST[name].replace(dtype=dtype)
    data = make_data(case)
    result = run(case, device, data)
    for b in range(case.batch):
        rows = sample(len(data.q[b]))
        for h in range(case.heads_q):
            s = scores(case, data, b, h, rows)
            top = s.max(1, keepdims=True)
            lse = (top + np.log(np.exp(s - top).sum(1, keepdims=True)))[:, 0]
            np.testing.assert_allclose(result.lse[b][h, rows], lse, rtol=1e-5, atol=1e-5)
            p = np.exp(s - lse[:, None])
            v = data.v[b][:, h // case.group].astype(np.float64)
            agree("o", result.o[b][rows, h], p @ v, np.sqrt(p ** 2 @ v ** 2), dtype, case, device)


@pytest.mark.parametrize("name", ["D64", "D128", "window"])
def test_128k_tokens_backward(device, name):
    """Gradients of a sample of queries and keys, from the o and lse that were judged above."""
    case = LONGEST[name].replace(dtype="bf16", backward=True)
    data = make_data(case)
    result = run(case, device, data)
    at = sample(LONG)
    keys_dk = np.zeros((len(at), case.heads_kv, case.dim_qk))
    keys_dv, noise_dk, noise_dv = (np.zeros_like(keys_dk) for _ in range(3))
    for h in range(case.heads_q):
        g = h // case.group
        q, k, v = (getattr(data, n)[0][:, x].astype(np.float64)
                   for n, x in (("q", h), ("k", g), ("v", g)))
        dout = data.dout[0][:, h].astype(np.float64)
        lse = result.lse[0][h].astype(np.float64)
        d = (dout * result.o[0][:, h]).sum(1)
        p = np.exp(scores(case, data, 0, h, at) - lse[at, None])
        ds = p * (dout[at] @ v.T - d[at, None]) * case.scale_used
        agree("dq", result.dq[0][at, h], ds @ k, np.sqrt(ds ** 2 @ k ** 2), "bf16", case, device)
        p = np.exp(scores(case, data, 0, h, None, at) - lse[:, None])
        ds = p * (dout @ v[at].T - d[:, None]) * case.scale_used
        keys_dk[:, g] += ds.T @ q
        keys_dv[:, g] += p.T @ dout
        noise_dk[:, g] += ds.T ** 2 @ q ** 2
        noise_dv[:, g] += p.T ** 2 @ dout ** 2
    agree("dk", result.dk[0][at], keys_dk, np.sqrt(noise_dk), "bf16", case, device)
    agree("dv", result.dv[0][at], keys_dv, np.sqrt(noise_dv), "bf16", case, device)
