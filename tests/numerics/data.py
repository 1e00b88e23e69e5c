"""The numbers of a case, as logical arrays: no padding, no strides, no pages."""
import dataclasses
from typing import Dict, List, Optional

import numpy as np

from .dtypes import EIGHT_BITS, round_finite, round_to


@dataclasses.dataclass
class Data:
    """Per sequence: q, k, v, dout (rows, heads, dim) and dlse (heads, rows). For all: bias
    (batch|1, heads|1, rows|1, keys), slopes (batch|1, heads), sink (heads), block_mask
    (batch|1, heads|1, row blocks, key blocks), block_lens (batch|1, heads|1, key blocks), tree_bits
    (batch|1, rows|1, tree), hidden_pages (batch, pages), descales of q, k, v (batch|1, heads_kv|1,
    blocks|1), scale_o (batch|1, heads|1).
    LATENT_KV: k without the elements of v, and descale_latent per sequence (rows, heads, blocks).
    float32, exact in the dtype of the case; block_mask, tree_bits and hidden_pages are bool."""
    q: List[np.ndarray]
    k: List[np.ndarray]
    v: List[np.ndarray]
    dout: List[np.ndarray]
    dlse: List[np.ndarray]
    bias: Optional[np.ndarray] = None
    slopes: Optional[np.ndarray] = None
    sink: Optional[np.ndarray] = None
    block_mask: Optional[np.ndarray] = None
    block_lens: Optional[np.ndarray] = None
    tree_bits: Optional[np.ndarray] = None
    hidden_pages: Optional[np.ndarray] = None
    descales: Dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    scale_o: Optional[np.ndarray] = None
    descale_latent: Optional[List[np.ndarray]] = None

    def meant(self, case, name, b):
        """The numbers of q, k or v of a sequence (rows, heads, dim): elements times descales."""
        if case.descale_dim and name != "q":
            factors = np.repeat(self.descale_latent[b], case.descale_dim, -1)[..., :case.dim_v]
            v = self.v[b].astype(np.float64) * factors
            return v if name == "v" else np.concatenate([v, self.k[b]], -1)
        x = getattr(self, name)[b]
        if name not in self.descales or not x.size:
            return x
        descales = self.descales[name]
        of_rows = descales[b if len(descales) > 1 else 0].T  # (blocks|1, heads_kv|1)
        if len(of_rows) > 1:
            of_rows = of_rows[np.arange(len(x)) // (case.descale_block or len(x))]
        if name == "q" and of_rows.shape[1] > 1:
            of_rows = np.repeat(of_rows, case.group, 1)
        return x.astype(np.float64) * of_rows[:, :, None]


def with_copies(case, data):
    """A case with a cache of E4M3, and its numbers, as kernels see them that compute with copies of
    K and V in the type of q."""
    wide = {name: [round_finite(data.meant(case, name, b).astype(np.float32), case.dtype)
                   for b in range(case.batch)] for name in "kv"}
    return (case.replace(dtype_kv=case.dtype, descales=None, descale_block=0, descale_dim=0),
            dataclasses.replace(data, descales={}, descale_latent=None, **wide))


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


# The numbers of a cache of integers are multiplied by this before they are rounded, given descales.
INTEGERS = 40


def make_descales(case, data, rng):
    """And scale_o, with which no o saturates."""
    for name, rows, dtype in (("q", case.seqlen_q, case.dtype),
                              ("k", case.seqlen_kv, case.dtype_kv),
                              ("v", case.seqlen_kv, case.dtype_kv)):
        if dtype in EIGHT_BITS and case.descales is not None:
            blocks = -(-rows // case.descale_block) if case.descale_block else min(rows, 1)
            shape = [n if letter in case.descales else 1 for letter, n in
                     zip("bht", (case.batch, case.heads_kv, blocks))]
            unit = INTEGERS if dtype == "i8" else 1
            data.descales[name] = (rng.uniform(0.2, 1.5, shape) / unit).astype(np.float32)
    if case.scale_o:
        largest = max([np.max(np.abs(data.meant(case, "v", b)), initial=0.1)
                       for b in range(case.batch)], default=1.0)
        factors = rng.uniform(0.5, 1, kept("bh", case, "bh"))
        data.scale_o = (200 * (1 - case.dropout) / largest * factors).astype(np.float32)


def make_data(case):
    rng = np.random.default_rng(case.seed)

    def normal(rows, heads, dim, dtype, factor=1.0):
        if dtype == "i8" and (case.descales is not None or case.descale_dim):
            factor *= INTEGERS
        return round_to(rng.standard_normal((rows, heads, dim)) * factor, dtype)

    sequences = range(case.batch)
    # A softcap works on scores of its own size only.
    amplitude = case.amplitude * (max(1.0, case.softcap / 4) if case.softcap else 1.0)
    data = Data(
        q=[normal(case.length_q(b), case.heads_q, case.dim_qk, case.dtype, amplitude)
           for b in sequences],
        k=[normal(case.length_kv(b), case.heads_kv, case.columns_k,
                  case.dtype if case.descale_dim else case.dtype_kv, case.amplitude)
           for b in sequences],
        v=[normal(case.length_kv(b), case.heads_kv, case.dim_v, case.dtype_kv)
           for b in sequences],
        dout=[normal(case.length_q(b), case.heads_q, case.dim_v, case.dtype_o)
              for b in sequences],
        dlse=[rng.standard_normal((case.heads_q, case.length_q(b))).astype(np.float32)
              for b in sequences])
    if case.descale_dim:
        unit = INTEGERS if case.dtype_kv == "i8" else 1
        data.descale_latent = [
            (rng.uniform(0.2, 1.5, (*x.shape[:2], case.latent_descales)) / unit).astype(np.float32)
            for x in data.v]
    if case.v_in_k:
        data.v = [x[..., :case.dim_v] for x in data.k]
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
        if case.block_lens is not None:
            shape = kept(case.block_lens, case, "bh") + (keys,)
            lens = rng.integers(0, case.blocks[1] + 1, shape, dtype=np.int32)
            data.block_lens = np.where(rng.random(shape) < 0.5, lens, np.int32(case.blocks[1]))
    if case.tree:
        shape = kept(case.tree_dims, case, "br") + (case.tree,)
        data.tree_bits = rng.random(shape) < case.density
    if case.hidden is not None:
        pages = -(-case.seqlen_kv // case.page_size)
        data.hidden_pages = rng.random((case.batch, pages)) < case.hidden
    make_descales(case, data, rng)
    return data
