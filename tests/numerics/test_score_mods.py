"""Softcap and ALiBi where kernels choose among ways to compute them."""
import numpy as np
import pytest

from .case import Case
from .data import make_data
from .dtypes import round_to
from .harness import run
from .tolerance import check


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("fraction", [0.02, 0.06, 0.09, 0.1, 0.13, 0.15, 0.2, 0.24, 0.26, 0.5])
def test_equal_scores_next_to_a_softcap(device, fraction, dim):
    """Errors of one sign do not cancel in a sum: of two terms of a softcap's polynomial, say."""
    case = Case(dtype="bf16", softcap=50.0, seqlen_q=200, seqlen_kv=930, dim_qk=dim, backward=True)
    data = make_data(case)
    size = np.float32(fraction * case.softcap / dim ** 0.5) ** 0.5  # scores are dim^0.5 size^2
    data.q = [round_to(np.full_like(q, size), "bf16") for q in data.q]
    data.k = [round_to(np.full_like(k, -size), "bf16") for k in data.k]
    check(case, data, run(case, device, data))


@pytest.mark.parametrize("dim", [64, 128])
def test_gradients_of_a_softcap_beside_alibi(device, dim):
    """Small products, where a softcap alone is a polynomial."""
    case = Case(dtype="bf16", softcap=50.0, alibi="h", steepest=1.0, seqlen_q=300, seqlen_kv=430,
                heads_q=4, dim_qk=dim, causal=True, backward=True, amplitude=0.5)
    data = make_data(case)
    check(case, data, run(case, device, data))


@pytest.mark.parametrize("sign", [-1.0, 0.0, np.nan])
def test_slopes_of_any_sign(device, sign):
    """Of a slope below 0 the largest score is far from a query. NaN: so is the head's result."""
    case = Case(dtype="bf16", alibi="h", seqlen_q=300, seqlen_kv=500, heads_q=2, dim_qk=64)
    data = make_data(case)
    data.slopes[0, 1] *= np.float32(sign)
    result = run(case, device, data)
    if np.isnan(sign):
        assert np.isnan(result.o[0][:, 1].astype(np.float32)).all()
    else:
        check(case, data, result)
