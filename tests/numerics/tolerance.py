"""When a result passes: its error is at most twice that of the same formula evaluated naively in
the same dtype (three times with softcap), plus one rounding of the dtype; and takes no larger part
of that than accuracy.py knows of the backend."""
import dataclasses

import numpy as np

from . import accuracy, reference
from .data import with_copies
from .dtypes import EPSILON
from .engines import engine_for
from .recall import recall
from .reference import Arithmetic

FLOAT = EPSILON["f32"]
# Below it, a dtype holds numbers with fewer bits.
NORMAL = {"f32": 1e-30, "bf16": 1e-30, "f16": 2.0 ** -14, "f8": 2.0 ** -6}
# Below so many numbers, or scores, the naive evaluation may be accurate by luck.
FEW = 256
# Below so many numbers, as the gradient of the sinks of a few heads is, it often is.
VERY_FEW = 16


def frobenius(x):
    return float(np.sqrt((np.asarray(x, np.float64) ** 2).sum()))


def largest(x):
    return float(np.max(np.abs(x), initial=0.0))


def absolute_limit(exact, naive, noise, dtype, factor, score_size=0.0, pairs=FEW):
    """The largest error that passes; the first three are flat arrays."""
    both = np.maximum(np.abs(exact), noise)
    size = both if min(exact.size, pairs) < FEW else np.abs(exact)
    return (factor * largest(naive - exact) + EPSILON[dtype] * largest(size)
            + (4 + score_size / 4) * FLOAT * largest(both))


def lse_limit(fwd):
    """1e-5 relative, 1e-6 absolute, and the rounding of the dot products themselves."""
    size = np.abs(np.where(np.isneginf(fwd.lse), 0, fwd.lse))
    return 1e-5 * size + 1e-6 + 4 * FLOAT * fwd.score_size


def judge(name, out, exact, naive, noise, dtype, factor, score_size=0.0, pairs=FEW, stored=None):
    """Raises AssertionError unless out passes. The first four are lists of arrays, pooled. noise:
    the size of an independent rounding error, per unit of relative rounding. score_size: the
    largest sum of absolute terms of a score, whose rounding the exponential makes relative. pairs:
    visible scores that went into the result. stored: the dtype of out, if dtype, of whose
    rounding errors the limit is, is another."""
    for b, (x, y) in enumerate(zip(out, exact)):
        assert x.shape == y.shape, "%s: shape %s, not %s" % (name, x.shape, y.shape)
        bad = ~np.isfinite(x) & np.isfinite(y)
        assert not bad.any(), "%s: %d of %d numbers are not finite; sequence %d, first at %s" % (
            name, bad.sum(), bad.size, b, np.argwhere(bad)[0].tolist())
    out, exact, naive, noise = (np.concatenate([np.asarray(x, np.float64).ravel() for x in part])
                                if part else np.zeros(0) for part in (out, exact, naive, noise))
    error, allowed = out - exact, naive - exact
    epsilon = EPSILON[dtype]
    both = np.maximum(np.abs(exact), noise)
    size = both if min(exact.size, pairs) < FEW else np.abs(exact)
    # Relative to what each number is a sum of, so that small rows count as much as large ones;
    # numbers that the dtype holds with fewer bits are left out.
    unit = np.maximum(noise, NORMAL[stored or dtype])
    # Rounding inside fp32, in whatever order the kernel sums: felt by fp32 results, and where the
    # naive error happens to vanish.
    floor = (4 + score_size / 4) * FLOAT
    checks = (
        ("largest error", largest(error),
         absolute_limit(exact, naive, noise, dtype, factor, score_size, pairs)),
        ("Frobenius norm of the error", frobenius(error),
         factor * frobenius(allowed) + epsilon * frobenius(size) + floor * frobenius(both)),
        ("largest error relative to its terms", largest(error / unit),
         factor * largest(allowed / unit) + epsilon * largest(size / unit)
         + floor * largest(both / unit) + score_size * FLOAT))
    for what, value, limit in checks:
        part = accuracy.note("%s %s" % (dtype, name), value, limit)
        if not value <= limit * part:
            at = int(np.argmax(np.abs(error if "terms" not in what else error / unit)))
            raise AssertionError(
                "%s: %s %.3g > %.3g * %.3g (naive %.3g); flat index %d of %d: %.9g, exact %.9g"
                % (name, what, value, limit, part, largest(allowed), at, exact.size, out[at],
                   exact[at]))


def judge_lse(out, forwards):
    """Each row on its own: see lse_limit."""
    for b, (x, fwd) in enumerate(zip(out, forwards)):
        y = fwd.lse
        empty = np.isneginf(y)
        assert (np.isneginf(x) == empty).all(), "lse: sequence %d: -inf at the wrong rows" % b
        error = np.abs(np.where(empty, 0, x) - np.where(empty, 0, y))
        limit = lse_limit(fwd)
        limit = limit * accuracy.note("f32 lse", largest(error / limit), 1.0)
        if not (error <= limit).all():
            at = np.unravel_index(int(np.argmax(~(error <= limit))), error.shape)
            raise AssertionError("lse: sequence %d, head %d, query %d: %.9g, exact %.9g"
                                 % (b, at[0], at[1], x[at], y[at]))


class Truth:
    """The reference of a case, exact and naive."""

    def __init__(self, case, data):
        self.case, self.data = case, data
        self.factor = 3 if case.softcap else 2
        engine = engine_for(case)
        self.wide, self.arithmetic = Arithmetic(None, engine), Arithmetic(case.compute, engine)
        sequences = range(case.batch)
        self.exact = [reference.forward(case, data, b, self.wide) for b in sequences]
        self.naive = [reference.forward(case, data, b, self.arithmetic) for b in sequences]
        self.gradients = None

    def judge(self, name, out, exact, naive, noise, dtype, stored=None):
        """stored: the type of the weights, if it has fewer exponents than dtype."""
        score_size = max((f.largest_score for f in self.exact), default=0.0)
        pairs = sum(f.pairs for f in self.exact)
        stored = stored or dtype
        if pairs < FEW or sum(np.size(x) for x in exact) < VERY_FEW:
            # One rounding of the dtype of the weights, or of a 16-bit o, of which gradients are
            # made, however wide the result is.
            o = self.case.dtype_o if self.case.dtype_o in ("f16", "bf16") else dtype
            dtype = max(dtype, self.case.compute, o, key=EPSILON.get)
        judge(name, out, exact, naive, noise, dtype, self.factor, score_size, pairs, stored)

    def check_forward(self, result):
        rows = [[getattr(f, name).swapaxes(0, 1) for f in part] for part, name in
                ((self.exact, "o"), (self.naive, "o"), (self.exact, "noise"))]
        self.judge("o", result.o, *rows, dtype=self.case.dtype_o, stored=result.fp16 and "f16")
        if result.lse is not None:
            judge_lse(result.lse, self.exact)
        if result.amax_o is not None:
            self.check_amax(result.amax_o)

    def check_amax(self, out):
        """Of o before its rounding; (batch|1, heads|1)."""
        case = self.case
        rows = [np.max(np.abs(f.o), axis=(1, 2), initial=0) for f in self.exact]
        exact = np.array(rows).reshape(case.batch, case.heads_q)
        exact = exact.max(tuple(n for n in (0, 1) if "bh"[n] not in case.amax_o), initial=0,
                          keepdims=True)
        naive = max((largest(f.o - e.o) for f, e in zip(self.naive, self.exact)), default=0)
        wide = case.dtype_o == "f32" or case.compute == "f32"
        limit = 1e-5 * (1 + max(f.largest_score for f in self.exact)) if wide else \
            EPSILON[case.compute] + 2 * naive
        assert np.abs(out - exact).max(initial=0) <= limit * max(largest(exact), 1e-30), \
            "amax_o: %s, exact %s" % (out, exact)

    def differentiate(self, exact_use=None, naive_use=None):
        """Works out the gradients, name: (exact, naive, noise, dtype). *_use: (o, lse) of each
        sequence, see reference.backward."""
        case, data, none = self.case, self.data, [None] * self.case.batch
        exact = [reference.backward(case, data, b, self.exact[b], self.wide,
                                    (exact_use or none)[b]) for b in range(case.batch)]
        naive = [reference.backward(case, data, b, self.naive[b], self.arithmetic,
                                    (naive_use or none)[b]) for b in range(case.batch)]
        self.gradients = {name: ([getattr(g, name) for g in exact],
                                 [getattr(g, name) for g in naive],
                                 [g.noise[name] for g in exact]) for name in ("dq", "dk", "dv")}
        if case.dbias is not None:
            parts = [[g.dbias for g in exact], [g.dbias for g in naive],
                     [g.noise["dbias"] for g in exact]]
            self.gradients["dbias"] = [[reference.reduce_bias(case, part, quadratic=n == 2)]
                                       for n, part in enumerate(parts)]
        if case.dsink and case.batch:
            noise = np.sqrt(sum(g.noise["dsink"] ** 2 for g in exact))
            self.gradients["dsink"] = ([sum(g.dsink for g in exact)],
                                       [sum(g.dsink for g in naive)], [noise])

    def check_backward(self, result):
        for name, parts in self.gradients.items():
            out = getattr(result, name)
            self.judge(name, out if isinstance(out, list) else [out], *parts,
                       dtype=self.case.dtype_grad)

    def without_scores(self):
        """What the checks need."""
        for name in ("exact", "naive"):
            setattr(self, name, [dataclasses.replace(f, p=None, keep=None, cap_slope=None)
                                 for f in getattr(self, name)])
        self.data = self.wide = self.arithmetic = None
        return self


def work_out(case, data):
    truth = Truth(case, data)
    if case.backward:
        truth.differentiate()
    return truth.without_scores()


def check(case, data, result):
    if result.copied:
        # The lse is that of the copies; o must be close to the numbers meant, too.
        check(*with_copies(case, data), dataclasses.replace(result))
        result = dataclasses.replace(result, lse=None)
    truth = recall(case, data, lambda: work_out(case, data))
    truth.check_forward(result)
    if case.backward:
        truth.check_backward(result)
