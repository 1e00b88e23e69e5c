"""Randomised configurations of many tiles, whose float64 reference PyTorch evaluates on the GPU
where it can be imported."""
import numpy as np
import pytest

from . import engines, reference
from .case import Case
from .data import make_data
from .randomcases import SHARES, cases, try_share
from .reference import Arithmetic


@pytest.mark.parametrize("share", range(SHARES))
def test_random_large(share, randomised, device):
    try_share(share, cases(large=True), *randomised, device)


@pytest.mark.parametrize("case", [
    Case(seqlen_q=70, seqlen_kv=131, heads_q=4, heads_kv=2, dim_qk=32, causal=True, softcap=5.0,
         alibi="bh", bias="f32", dbias="bhr", sink=True, dsink=True, dlse=True, dropout=0.3,
         blocks=(16, 16), density=0.7, backward=True, dtype="bf16"),
    Case(seqlen_q=40, seqlen_kv=10, heads_q=2, dim_qk=8, causal=True, dlse=True, backward=True,
         dtype="f16"),
    Case(seqlen_q=5, seqlen_kv=0, heads_q=2, dim_qk=8, backward=True)])
@pytest.mark.parametrize("exact", [True, False])
def test_both_engines_evaluate_the_same(case, exact, monkeypatch):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no GPU here")
    monkeypatch.setattr(engines, "LARGE", 0)
    dtype = None if exact else case.dtype
    data = make_data(case)
    results = []
    for engine in (engines.NUMPY, engines.engine_for(case)):
        arithmetic = Arithmetic(dtype, engine)
        fwd = reference.forward(case, data, 0, arithmetic)
        results.append((fwd, reference.backward(case, data, 0, fwd, arithmetic)))
    assert isinstance(engine, engines.Torch)
    tolerance = 1e-12 if exact else 0.02
    for got, want in zip(*((f.o, f.lse, g.dq, g.dk, g.dv, *([g.dbias] if case.dbias else []))
                           for f, g in results)):
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    if exact:
        for a, b in zip(*((f.noise, f.score_size, *(g.noise[n] for n in ("dq", "dk", "dv")))
                          for f, g in results)):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
