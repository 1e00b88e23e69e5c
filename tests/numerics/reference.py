"""Attention by brute force, forward and backward: the truth, and how far the same formula strays
when it is evaluated naively in a narrower format. Independent of the library's code: every mask is
a full matrix, every array a list of sequences."""
import dataclasses

import numpy as np

from . import philox
from .dtypes import round_to


class Arithmetic:
    """A compute type, and what happens to every intermediate result that is stored."""

    def __init__(self, dtype=None):
        self.exact = dtype is None
        self.dtype = dtype
        self.type = np.float64 if self.exact else np.float32

    def load(self, x):
        return np.asarray(x, self.type)

    def store(self, x, dtype=None):
        return x if self.exact else round_to(x, dtype or self.dtype)


EXACT = Arithmetic()


def visible(case, rows, keys):
    """Which keys each query sees by position: (rows, keys), from the header's definitions."""
    i = np.arange(rows)[:, None] + (0 if case.top_left else keys - rows)
    j = np.arange(keys)[None, :]
    see = np.ones((rows, keys), bool)
    if case.causal:
        see &= j <= i
    if case.window is not None:
        left, right = case.window
        if left >= 0:
            see &= j >= i - left
        if right >= 0:
            see &= j <= i + right
    if case.chunk:
        see &= i // case.chunk == j // case.chunk
    return see


def pick(array, b):
    """The part of an array (batch|1, ...) that sequence b sees."""
    return array[b if len(array) > 1 else 0]


def all_visible(case, data, b, rows, keys):
    """(heads|1, rows, keys): position, block mask and boolean mask together."""
    see = visible(case, rows, keys)[None]
    if case.blocks:
        i, j = np.arange(rows) // case.blocks[0], np.arange(keys) // case.blocks[1]
        see = see & pick(data.block_mask, b)[:, i][:, :, j]
    if case.bias == "u8":
        see = see & (pick(data.bias, b)[:, :rows, :keys] != 0)
    return see


def keep_factors(case, b, rows, keys):
    """(heads, rows, keys): 0 or 1 / (1 - p) in the steps that the format of p has."""
    seed, offset = case.rng
    t = philox.threshold(case.dropout)
    masks = [philox.keep_mask(case.dropout, seed, offset, b * case.heads_q + h, rows, keys)
             for h in range(case.heads_q)]
    return np.stack(masks) * (65536.0 / (65536 - t))


@dataclasses.dataclass
class Forward:
    """Head-major: o, noise (heads, rows, dim_v), lse, score_size (heads, rows). noise is the root
    of the summed squares of what is added up: the size of independent rounding errors, per unit of
    relative rounding; score_size: the summed absolute products of q and k, largest of each row;
    largest_score: the same with bias and ALiBi, of all rows. The rest is for the backward pass."""
    o: np.ndarray
    lse: np.ndarray
    p: np.ndarray
    keep: object
    cap_slope: object
    noise: object = None
    score_size: object = None
    largest_score: float = 0.0


def heads_first(case, x, arithmetic):
    """(rows, heads, dim) to (heads_q, rows, dim): KV heads are repeated."""
    x = np.swapaxes(arithmetic.load(x), 0, 1)
    return np.repeat(x, case.heads_q // len(x), 0)


def forward(case, data, b, arithmetic=EXACT):
    """The attention of sequence b."""
    store = arithmetic.store
    q, k, v = (heads_first(case, x[b], arithmetic) for x in (data.q, data.k, data.v))
    rows, keys = q.shape[1], k.shape[1]
    s = store(store(q @ k.swapaxes(1, 2)) * arithmetic.load(case.scale_used))
    cap_slope = None
    if case.softcap:
        t = store(np.tanh(store(s / arithmetic.load(case.softcap))))
        s = store(t * arithmetic.load(case.softcap))
        cap_slope = store(1 - t * t)
    if case.alibi:
        i = np.arange(rows)[:, None] + (0 if case.top_left else keys - rows)
        distance = np.abs(i - np.arange(keys)[None, :])
        slopes = arithmetic.load(pick(data.slopes, b))[:, None, None]
        s = store(s - slopes * arithmetic.load(distance))
    if case.bias and case.bias != "u8":
        s = store(s + arithmetic.load(pick(data.bias, b)[:, :rows, :keys]))
    see = np.broadcast_to(all_visible(case, data, b, rows, keys), s.shape)
    s = np.where(see, s, -np.inf)

    sink = (arithmetic.load(data.sink)[:, None] if case.sink
            else np.full((case.heads_q, 1), -np.inf, arithmetic.type))
    m = np.maximum(s.max(-1, initial=-np.inf), sink)
    m = np.where(np.isfinite(m), m, 0).astype(arithmetic.type)
    with np.errstate(divide="ignore"):
        lse = m + np.log(np.exp(s - m[..., None]).sum(-1) + np.exp(sink - m))
    empty = np.isneginf(lse)
    p = store(np.exp(s - np.where(empty, 0, lse)[..., None]))

    keep = arithmetic.load(keep_factors(case, b, rows, keys)) if case.dropout else None
    weights = p if keep is None else store(p * keep)
    result = Forward(store(weights @ v, case.dtype_o), lse, p, keep, cap_slope)
    if arithmetic.exact:
        result.noise = np.sqrt(weights ** 2 @ v ** 2)
        size = np.abs(q) @ np.abs(k).swapaxes(1, 2) * abs(case.scale_used)
        result.score_size = np.where(see, size, 0).max(-1, initial=0)
        size = size + np.where(np.isfinite(s), np.abs(s), 0)
        result.largest_score = float(np.where(see, size, 0).max(initial=0))
    return result


@dataclasses.dataclass
class Gradients:
    """dq (rows, heads_q, dim_qk), dk, dv (keys, heads_kv, dim); dbias (heads, rows, keys), not yet
    summed, of one sequence; dsink (heads). noise: a dictionary of the same, see Forward."""
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray
    dsink: object
    noise: object = None


def fold_heads(case, x):
    """(heads_q, rows, dim) to (rows, heads_kv, dim): the query heads of a KV head are summed."""
    grouped = x.reshape(case.heads_kv, case.group, *x.shape[1:]).sum(1)
    return grouped.swapaxes(0, 1)


def backward(case, data, b, fwd, arithmetic=EXACT, use=None):
    """The gradients of sequence b. use = (o, lse) replaces the results of fwd, for a part of a
    larger attention."""
    store = arithmetic.store
    q, k, v, dout = (heads_first(case, x[b], arithmetic)
                     for x in (data.q, data.k, data.v, data.dout))
    o, lse, p = fwd.o, fwd.lse, fwd.p
    if use is not None:
        o, lse = use
        # p exp(lse_part - lse_whole): rows without a key have p = 0 anyway.
        some = ~(np.isneginf(fwd.lse) | np.isneginf(lse))
        shift = np.where(some, fwd.lse, 0) - np.where(some, lse, 0)
        p = p * np.exp(shift)[..., None]
    d = (dout * o).sum(-1)
    if case.dlse:
        d = d - arithmetic.load(data.dlse[b])
    dout_stored = store(dout)
    dp = store(dout_stored @ v.swapaxes(1, 2))
    weights = p
    if fwd.keep is not None:
        dp, weights = store(dp * fwd.keep), store(p * fwd.keep)
    ds = store(p * (dp - d[..., None]))
    slope = arithmetic.load(1 if fwd.cap_slope is None else fwd.cap_slope)
    scale = arithmetic.load(case.scale_used)
    draw = store(store(ds * slope) * scale)

    dsink = None
    if case.sink:
        sink = arithmetic.load(data.sink)[:, None]
        share = np.where(np.isneginf(sink), 0, np.exp(sink - np.where(np.isneginf(lse), 0, lse)))
        dsink = -(share * d).sum(-1)
    result = Gradients(
        dq=store((draw @ k).swapaxes(0, 1)),
        dk=store(fold_heads(case, draw.swapaxes(1, 2) @ q)),
        dv=store(fold_heads(case, weights.swapaxes(1, 2) @ dout_stored)),
        dbias=ds, dsink=dsink)
    if arithmetic.exact:
        noise_dp = np.sqrt(dout ** 2 @ (v ** 2).swapaxes(1, 2))
        if fwd.keep is not None:
            noise_dp = noise_dp * fwd.keep
        noise_d = np.abs(d) + np.sqrt((dout ** 2 * o ** 2).sum(-1))
        size = p * (np.abs(dp) + noise_dp + noise_d[..., None])
        raw = (size * slope * scale) ** 2
        result.noise = {
            "dq": np.sqrt((raw @ k ** 2).swapaxes(0, 1)),
            "dk": np.sqrt(fold_heads(case, raw.swapaxes(1, 2) @ q ** 2)),
            "dv": np.sqrt(fold_heads(case, weights.swapaxes(1, 2) ** 2 @ dout ** 2)),
            "dbias": size,
            "dsink": np.sqrt(((share * noise_d) ** 2).sum(-1)) if case.sink else None}
    return result


def reduce_bias(case, per_sequence, quadratic=False):
    """dbias of each sequence (heads, rows, keys) to (batch|1, heads|1, rows|1, keys), summed as
    case.dbias says; pairs past a sequence's lengths are 0. quadratic: root of summed squares."""
    whole = np.zeros((case.batch, case.heads_q, case.seqlen_q, case.seqlen_kv))
    for b, x in enumerate(per_sequence):
        whole[b, :, :x.shape[1], :x.shape[2]] = x
    over = tuple(axis for axis, letter in enumerate("bhr") if letter not in case.dbias)
    if quadratic:
        return np.sqrt((whole ** 2).sum(over, keepdims=True))
    return whole.sum(over, keepdims=True)
