"""Gradients through the Python layer."""
import numpy as np
import pytest

import flashattn
from numerics import arrays
from numerics.arrays import close, random


def case(seqlen_q=9, seqlen_kv=13):
    q, k, v = (random(2, seqlen_q, 4, 16), random(2, seqlen_kv, 2, 16, seed=1),
               random(2, seqlen_kv, 2, 24, seed=2))
    return q, k, v, random(2, seqlen_q, 4, 24, seed=3)


def test_against_softmax():
    q, k, v, dout = case()
    out, lse = flashattn.attention(q, k, v, causal=True, return_lse=True)
    got = flashattn.attention_backward(dout, q, k, v, out, lse, causal=True)
    for mine, expected in zip(got, arrays.backward(dout, q, k, v, causal=True)[:3]):
        close(mine, expected)
    # dq, dk, dv given, and another layout
    turned = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (dout, q, k, v, out)]
    given = [np.empty_like(x) for x in turned[1:4]]
    again = flashattn.attention_backward(*turned, lse, causal=True, layout="bhsd", dq=given[0],
                                         dk=given[1], dv=given[2])
    for mine, target, first in zip(again, given, got):
        assert mine is target
        np.testing.assert_array_equal(mine.transpose(0, 2, 1, 3), first)


@pytest.mark.parametrize("shape", [(2, 4, 9, 13), (1, 4, 9, 13), (4, 1, 13), (9, 13)])
def test_dbias_has_the_shape_of_bias(shape):
    q, k, v, dout = case()
    bias = random(*shape, seed=4)
    out, lse = flashattn.attention(q, k, v, bias=bias, return_lse=True)
    *_, dbias = flashattn.attention_backward(dout, q, k, v, out, lse, bias=bias,
                                             return_dbias=True)
    close(dbias, arrays.backward(dout, q, k, v, bias=bias)[3])


def test_sink_and_lse_gradients():
    q, k, v, dout = case()
    sink = random(4, seed=5)
    out, lse = flashattn.attention(q, k, v, sink=sink, return_lse=True)
    dq, dk, dv, dsink = flashattn.attention_backward(dout, q, k, v, out, lse, sink=sink,
                                                     return_dsink=True)
    for mine, expected in zip((dq, dk, dv, dsink), arrays.backward(dout, q, k, v, sink=sink)):
        close(mine, expected)
    # A gradient at lse alone.
    out, lse = flashattn.attention(q, k, v, return_lse=True)
    ones = np.ones_like(lse)
    dq, _, dv = flashattn.attention_backward(np.zeros_like(dout), q, k, v, out, lse, dlse=ones)
    close(dq, arrays.backward(np.zeros_like(dout), q, k, v, dlse=ones)[0])
    assert (dv == 0).all()


def test_varlen_is_each_sequence_alone():
    q, k, v, dout = (random(10, h, d, seed=s) for s, (h, d) in
                     enumerate([(4, 16), (2, 16), (2, 8), (4, 8)]))
    cu = [0, 3, 3, 10]
    out, lse = flashattn.attention_varlen(q, k, v, cu, cu, causal=True, return_lse=True)
    got = flashattn.attention_backward(dout, q, k, v, out, lse, cu_seqlens_q=cu, cu_seqlens_kv=cu,
                                       causal=True)
    for rows in (slice(0, 3), slice(3, 10)):
        expected = arrays.backward(*[x[None, rows] for x in (dout, q, k, v)], causal=True)
        for mine, theirs in zip(got, expected):
            close(mine[rows], theirs[0])


def test_wrong_shapes_are_named():
    q, k, v, dout = case()
    out, lse = flashattn.attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match=r"dout has shape"):
        flashattn.attention_backward(dout[:, :-1], q, k, v, out, lse)
    with pytest.raises(ValueError, match=r"lse has shape"):
        flashattn.attention_backward(dout, q, k, v, out, lse[:, :, :-1])
    with pytest.raises(ValueError, match=r"lse has gaps"):
        flashattn.attention_backward(dout, q, k, v, out, np.repeat(lse, 2, 2)[:, :, ::2])
    with pytest.raises(ValueError, match="return_dbias needs bias|DBIAS|dbias|bias"):
        flashattn.attention_backward(dout, q, k, v, out, lse, return_dbias=True)
    with pytest.raises(ValueError, match="contiguous"):
        flashattn.attention_backward(np.broadcast_to(np.float32(1), dout.shape), q, k, v, out, lse)
