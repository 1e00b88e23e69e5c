"""Attention by brute force, forward and backward: the truth, and how far the same formula strays
when it is evaluated naively in a narrower format. Independent of the library's code: every mask is
a full matrix, every array a list of sequences."""
import dataclasses

import numpy as np

from . import philox
from .engines import NUMPY


class Arithmetic:
    """A compute type, what happens to every intermediate result that is stored, and who computes:
    an engine."""

    def __init__(self, dtype=None, engine=NUMPY):
        self.exact = dtype is None
        self.dtype = dtype
        self.engine = engine
        self.type = engine.wide if self.exact else engine.narrow

    def load(self, x):
        return self.engine.load(x, self.type)

    def store(self, x, dtype=None):
        return x if self.exact else self.engine.round_to(x, dtype or self.dtype)


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
    """(heads|1, rows, keys): position, tree, hidden pages, block mask and boolean mask together."""
    see = visible(case, rows, keys)[None]
    if case.tree:
        drafted = min(case.tree, keys)
        bits = pick(data.tree_bits, b)[:rows, case.tree - drafted:]
        see[0, :, keys - drafted:] = np.broadcast_to(bits, (rows, drafted))
    if case.hidden is not None:
        see = see & ~data.hidden_pages[b][np.arange(keys) // case.page_size]
    if case.blocks:
        i, j = np.arange(rows) // case.blocks[0], np.arange(keys) // case.blocks[1]
        see = see & pick(data.block_mask, b)[:, i][:, :, j]
        if case.block_lens is not None:
            left = pick(data.block_lens, b)[:, j] > np.arange(keys) % case.blocks[1]
            see = see & left[:, None]
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
    largest_score: the same with bias and ALiBi, of all rows; pairs: weights that are not 0. The
    rest is the engine's, for the backward pass."""
    o: np.ndarray
    lse: np.ndarray
    p: object
    keep: object
    cap_slope: object
    pairs: int
    noise: object = None
    score_size: object = None
    largest_score: float = 0.0


def heads_first(case, x, arithmetic):
    """(rows, heads, dim) to (heads_q, rows, dim): KV heads are repeated."""
    x = arithmetic.load(x).swapaxes(0, 1)
    return arithmetic.engine.repeat(x, case.heads_q // len(x))


def forward(case, data, b, arithmetic=EXACT):
    """The attention of sequence b."""
    store, xp = arithmetic.store, arithmetic.engine
    q, k, v = (heads_first(case, data.meant(case, x, b), arithmetic) for x in "qkv")
    rows, keys = q.shape[1], k.shape[1]
    # Scores are rounded once, as by a product that scales them; so are their gradients.
    s = store((q @ k.swapaxes(1, 2)) * arithmetic.load(case.scale_used))
    cap_slope = None
    if case.softcap:
        t = store(xp.tanh(store(s / arithmetic.load(case.softcap))))
        s = store(t * arithmetic.load(case.softcap))
        cap_slope = store(1 - t * t)
    if case.alibi:
        i = np.arange(rows)[:, None] + (0 if case.top_left else keys - rows)
        distance = np.abs(i - np.arange(keys)[None, :])
        slopes = arithmetic.load(pick(data.slopes, b))[:, None, None]
        s = store(s - slopes * arithmetic.load(distance))
    if case.bias and case.bias != "u8":
        s = store(s + arithmetic.load(pick(data.bias, b)[:, :rows, :keys]))
    see = xp.broadcast_to(xp.load(all_visible(case, data, b, rows, keys)), s.shape)
    s = xp.where(see, s, -np.inf)

    sink = arithmetic.load(data.sink if case.sink else np.full(case.heads_q, -np.inf))[:, None]
    m = xp.maximum(xp.highest(s, -np.inf), sink)
    m = arithmetic.load(xp.where(xp.isfinite(m), m, 0))
    with xp.errstate(divide="ignore"):
        lse = m + xp.log(xp.exp(s - m[..., None]).sum(-1) + xp.exp(sink - m))
    empty = xp.isneginf(lse)
    p = store(xp.exp(s - xp.where(empty, 0, lse)[..., None]))

    keep = arithmetic.load(keep_factors(case, b, rows, keys)) if case.dropout else None
    weights = p if keep is None else store(p * keep)
    scale = arithmetic.load(1 if data.scale_o is None else pick(data.scale_o, b)[:, None, None])
    result = Forward(xp.host(store(weights @ v * scale, case.dtype_o) / scale), xp.host(lse), p,
                     keep, cap_slope, xp.count(p))
    if arithmetic.exact:
        result.noise = xp.host(xp.sqrt(weights ** 2 @ v ** 2))
        size = xp.abs(q) @ xp.abs(k).swapaxes(1, 2) * abs(case.scale_used)
        result.score_size = xp.host(xp.highest(xp.where(see, size, 0), 0))
        size = size + xp.where(xp.isfinite(s), xp.abs(s), 0)
        result.largest_score = float(np.max(xp.host(xp.highest(xp.where(see, size, 0), 0)),
                                            initial=0))
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
    store, xp = arithmetic.store, arithmetic.engine
    q, k, v = (heads_first(case, data.meant(case, x, b), arithmetic) for x in "qkv")
    dout = heads_first(case, data.dout[b], arithmetic)
    o, lse = (arithmetic.load(x) for x in ((fwd.o, fwd.lse) if use is None else use))
    p = fwd.p
    if use is not None:
        # p exp(lse_part - lse_whole): rows without a key have p = 0 anyway.
        part = arithmetic.load(fwd.lse)
        some = ~(xp.isneginf(part) | xp.isneginf(lse))
        p = p * xp.exp(xp.where(some, part, 0) - xp.where(some, lse, 0))[..., None]
    d = (dout * o).sum(-1)
    if case.dlse:
        d = d - arithmetic.load(data.dlse[b])
    dout_stored = store(dout)
    dp = store(dout_stored @ v.swapaxes(1, 2))
    weights = p
    if fwd.keep is not None:
        dp, weights = store(dp * fwd.keep), store(p * fwd.keep)
    ds = p * (dp - d[..., None])
    slope = arithmetic.load(1 if fwd.cap_slope is None else fwd.cap_slope)
    scale = arithmetic.load(case.scale_used)
    draw = store(ds * slope * scale)

    dsink = None
    if case.sink:
        sink = arithmetic.load(data.sink)[:, None]
        share = xp.where(xp.isneginf(sink), 0, xp.exp(sink - xp.where(xp.isneginf(lse), 0, lse)))
        dsink = -(share * d).sum(-1)
    # As large as the scores: it is fetched only where somebody looks at it.
    on_host = xp.host if case.dbias is not None else lambda x: None
    result = Gradients(
        dq=xp.host(store((draw @ k).swapaxes(0, 1))),
        dk=xp.host(store(fold_heads(case, draw.swapaxes(1, 2) @ q))),
        dv=xp.host(store(fold_heads(case, weights.swapaxes(1, 2) @ dout_stored))),
        dbias=on_host(store(ds)), dsink=xp.host(dsink))
    if arithmetic.exact:
        noise_dp = xp.sqrt(dout ** 2 @ (v ** 2).swapaxes(1, 2))
        if fwd.keep is not None:
            noise_dp = noise_dp * fwd.keep
        noise_d = xp.abs(d) + xp.sqrt((dout ** 2 * o ** 2).sum(-1))
        size = p * (xp.abs(dp) + noise_dp + noise_d[..., None])
        raw = (size * slope * scale) ** 2
        result.noise = {name: xp.host(x) for name, x in {
            "dq": xp.sqrt((raw @ k ** 2).swapaxes(0, 1)),
            "dk": xp.sqrt(fold_heads(case, raw.swapaxes(1, 2) @ q ** 2)),
            "dv": xp.sqrt(fold_heads(case, weights.swapaxes(1, 2) ** 2 @ dout ** 2)),
            "dbias": on_host(size),
            "dsink": xp.sqrt(((share * noise_d) ** 2).sum(-1)) if case.sink else None}.items()}
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
