"""The reference for arrays (batch, seq, heads, dim), as programs hold them: what the results of the
bindings are held against. Sequences, masks and formulas are those of reference.py."""
import numpy as np

from . import reference
from .case import Case
from .data import Data
from .reference import EXACT


def broadcast_dims(array):
    """array as (batch|1, heads|1, rows|1, keys), and the letters of what it does not broadcast
    over, as in Case.bias_dims."""
    array = np.asarray(array)
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    return array, "".join(c for c, n in zip("bhr", array.shape) if n > 1)


class Attention:
    """softmax(scale q k^T + bias) v of dense arrays, in an arithmetic of reference.py; o
    (batch, seq, heads, dim_v), lse (batch, heads, seq).

    bias            broadcast to (batch, heads, seqlen_q, seqlen_kv); boolean: what is visible
    sink            (heads,)
    alibi_slopes    (heads,) or (batch, heads)
    fields          further fields of Case: causal, window, softcap, lens_kv, dropout, rng, ...;
                    of lengths only those of keys
    """

    def __init__(self, q, k, v, *, arithmetic=EXACT, bias=None, sink=None, alibi_slopes=None,
                 **fields):
        q, k, v = (np.asarray(x) for x in (q, k, v))
        slopes = None if alibi_slopes is None else np.atleast_2d(alibi_slopes)
        self.bias_shape = None if bias is None else np.shape(bias)
        if bias is not None:
            bias, fields["bias_dims"] = broadcast_dims(bias)
            fields["bias"] = "u8" if bias.dtype == bool else "f32"
            if bias.dtype != bool:
                fields["dbias"] = fields["bias_dims"]
        self.case = case = Case(
            batch=len(q), seqlen_q=q.shape[1], seqlen_kv=k.shape[1], heads_q=q.shape[2],
            heads_kv=k.shape[2], dim_qk=q.shape[3], dim_v=v.shape[3], backward=True,
            sink=sink is not None, dsink=sink is not None,
            alibi="" if slopes is None else "h" if len(slopes) == 1 else "bh", **fields)
        self.arithmetic = arithmetic
        self.keys = [slice(case.start_kv(b), case.start_kv(b) + case.length_kv(b))
                     for b in range(case.batch)]
        self.data = Data(q=list(q), k=self.in_use(k), v=self.in_use(v), dout=[], dlse=[], bias=bias,
                         slopes=slopes, sink=sink)
        self.parts = [reference.forward(case, self.data, b, arithmetic) for b in range(case.batch)]
        self.o = np.stack([part.o.swapaxes(0, 1) for part in self.parts])
        self.lse = np.stack([part.lse for part in self.parts])

    def in_use(self, array):
        return [array[b, keys] for b, keys in enumerate(self.keys)]

    def padded(self, arrays):
        """(batch, seqlen_kv, ...): zero at keys that are not in use."""
        whole = np.zeros((len(arrays), self.case.seqlen_kv, *arrays[0].shape[1:]), arrays[0].dtype)
        for b, keys in enumerate(self.keys):
            whole[b, keys] = arrays[b]
        return whole

    def backward(self, dout, dlse=None):
        """dq, dk, dv, then dbias in the bias' shape and dsink where there are such inputs."""
        case, data = self.case, self.data
        case.dlse = dlse is not None
        data.dout, data.dlse = np.asarray(dout), dlse
        parts = [reference.backward(case, data, b, self.parts[b], self.arithmetic)
                 for b in range(case.batch)]
        dq, dk, dv = ([getattr(part, name) for part in parts] for name in ("dq", "dk", "dv"))
        gradients = [np.stack(dq), self.padded(dk), self.padded(dv)]
        if case.dbias is not None:
            gradients.append(reference.reduce_bias(case, [part.dbias for part in parts])
                             .reshape(self.bias_shape))
        if case.dsink:
            gradients.append(sum(part.dsink for part in parts))
        return gradients


def attention(q, k, v, **options):
    """o and lse, see Attention."""
    result = Attention(q, k, v, **options)
    return result.o, result.lse


def backward(dout, q, k, v, dlse=None, **options):
    """The gradients, see Attention.backward."""
    return Attention(q, k, v, **options).backward(dout, dlse)


def random(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32).astype(dtype)


def close(got, expected, tolerance=2e-5):
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(expected, np.float64),
                               rtol=tolerance, atol=tolerance)
