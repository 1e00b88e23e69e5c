"""The numbers of a case, as logical arrays: no padding, no strides, no pages."""
import dataclasses
from typing import List, Optional

import numpy as np

from .dtypes import round_to


@dataclasses.dataclass
class Data:
    """Per sequence: q, k, v, dout (rows, heads, dim) and dlse (heads, rows). For all: bias
    (batch|1, heads|1, rows|1, keys), slopes (batch|1, heads), sink (heads), block_mask
    (batch|1, heads|1, row blocks, key blocks). float32, exact in the dtype of the case."""
    q: List[np.ndarray]
    k: List[np.ndarray]
    v: List[np.ndarray]
    dout: List[np.ndarray]
    dlse: List[np.ndarray]
    bias: Optional[np.ndarray] = None
    slopes: Optional[np.ndarray] = None
    sink: Optional[np.ndarray] = None
    block_mask: Optional[np.ndarray] = None


def kept(dims, case, letters="bhr"):
    """Sizes (batch|1, heads|1[, rows|1]): 1 where dims lacks the letter."""
    sizes = {"b": case.batch, "h": case.heads_q, "r": case.seqlen_q}
    return tuple(sizes[c] if c in dims else 1 for c in letters)


def make_bias(case, rng):
    shape = kept(case.bias_dims, case) + (case.seqlen_kv,)
    hidden = rng.random(shape[:3] + (1,)) < case.bias_empty
    if case.bias == "u8":
        return ((rng.random(shape) < case.density) & ~hidden).astype(np.float32)
    values = round_to(rng.standard_normal(shape), case.bias)
    return np.where(hidden, np.float32(-np.inf), values)


def make_data(case):
    rng = np.random.default_rng(case.seed)

    def normal(rows, heads, dim, dtype, factor=1.0):
        return round_to(rng.standard_normal((rows, heads, dim)) * factor, dtype)

    sequences = range(case.batch)
    # A softcap works on scores of its own size only.
    amplitude = case.amplitude * (max(1.0, case.softcap / 4) if case.softcap else 1.0)
    data = Data(
        q=[normal(case.length_q(b), case.heads_q, case.dim_qk, case.dtype, amplitude)
           for b in sequences],
        k=[normal(case.length_kv(b), case.heads_kv, case.dim_qk, case.dtype, case.amplitude)
           for b in sequences],
        v=[normal(case.length_kv(b), case.heads_kv, case.dim_v, case.dtype) for b in sequences],
        dout=[normal(case.length_q(b), case.heads_q, case.dim_v, case.dtype_o)
              for b in sequences],
        dlse=[rng.standard_normal((case.heads_q, case.length_q(b))).astype(np.float32)
              for b in sequences])
    if case.strides == "broadcast":
        # Keys, values and dout are the same for all heads, queries for all sequences.
        for name in ("k", "v", "dout"):
            setattr(data, name, [np.repeat(x[:, :1], x.shape[1], 1) for x in getattr(data, name)])
        if case.cu_q is None and data.q:
            longest = max(data.q, key=len)
            data.q = [longest[:len(x)] for x in data.q]
    if case.bias:
        data.bias = make_bias(case, rng)
    if case.alibi:
        shape = (case.batch if "b" in case.alibi else 1, case.heads_q)
        data.slopes = rng.uniform(0.02 * case.steepest, case.steepest, shape).astype(np.float32)
    if case.sink:
        data.sink = rng.standard_normal(case.heads_q).astype(np.float32)
    if case.blocks:
        rows, keys = (-(-n // size) for n, size in
                      zip((case.seqlen_q, case.seqlen_kv), case.blocks))
        shape = kept(case.block_dims, case, "bh") + (rows, keys)
        data.block_mask = rng.random(shape) < case.density
    return data
