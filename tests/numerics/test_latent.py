"""The quantised cache of latent attention: a descale for some elements of each token."""
import numpy as np
import pytest

from . import capi, latent
from .data import make_data
from .harness import Call, run
from .repro import verify


@pytest.mark.parametrize("case", [
    pytest.param(case, id=str(n), marks=[pytest.mark.smoke] if n % 6 == 0 else [])
    for n, case in enumerate(latent.listed())])
def test_listed(device, case):
    if device.name != "cpu":
        pytest.skip("a GPU computes DeepSeek's heads alone: test_gpu_latent_cache.py")
    verify(case, device)


@pytest.mark.smoke
def test_values_that_are_not_finite(device):
    """A descale of infinity, and E4M3's NaN, reach the queries that see their key, no others."""
    if device.name != "cpu":
        pytest.skip("the bytes are the CPU's")
    case = latent.SMALL.replace(seqlen_q=150, causal=True, top_left=True, heads_kv=1)
    data = make_data(case)
    data.v[0][100, 0, 3] = np.nan
    data.descale_latent[1][70, 0, 1] = np.inf
    plain = run(case, device)
    result = run(case, device, data)
    for b, first in enumerate((100, 70)):
        assert np.array_equal(result.o[b][:first], plain.o[b][:first])
        assert not np.isfinite(result.o[b][first:]).all(axis=(1, 2)).any()


@pytest.mark.smoke
def test_records_and_arrays_give_the_same_bits(device):
    if device.name != "cpu":
        pytest.skip("see test_gpu_latent_cache.py")
    case = latent.SMALL.replace(seqlen_q=5, page_size=16, lens_kv=[203, 40])
    assert run(case, device).bits() == run(case.replace(strides="padded"), device).bits()


REFUSED = [
    (dict(descale_dim=0), "LAYOUT", "descale_dim", "descale_dim = 0"),
    (dict(descale_dim=-1), "SIZE", "descale_dim", "descale_dim = -1 is below 0"),
    (dict(descale_block=64), "LAYOUT", "descale_block", "leave descale_block at 0"),
    (dict(dim_v=576), "HEAD_DIM_PAIR", "dim_v", "dim_v = 576 is not below dim_qk = 576"),
    (dict(dtype_kv=3), "DTYPE_MIX", "dtype_kv", "a quantised cache"),
    (dict(dtype=4), "DTYPE_MIX", "dtype_kv", "a quantised cache"),
    (dict(ops=3), "LAYOUT", "layout", "for forward only"),
    (dict(layout=0), "LAYOUT", "descale_dim", "LATENT_KV"),
]


@pytest.mark.smoke
@pytest.mark.parametrize("change, reason, field, words", REFUSED)
def test_refused_descriptors(device, change, reason, field, words):
    fields = dict(capi.descriptor(latent.BASE, device), **change)
    with pytest.raises(capi.Refused) as info:
        capi.Plan(fields)
    assert info.value.status == 1 and capi.Reason(info.value.reason).name == reason
    assert info.value.field == field and words in str(info.value)


@pytest.mark.smoke
def test_refused_arguments(device):
    if device.name != "cpu":
        pytest.skip("checked before a backend is asked")
    case = latent.SMALL
    call = Call(case, device)
    for name, change, field in (
            ("descale_latent", capi.ffi.NULL, "descale_latent.data"),
            ("descale_v", call.inputs["descale_latent"]["data"], "descale_v.data"),
            ("k", capi.ffi.NULL, "k.data")):
        inputs = dict(call.inputs, **{name: dict(capi.PACKED, data=change)})
        other = Call(case, device)
        other.inputs = inputs
        with pytest.raises(capi.Refused) as info:
            other.forward()
        assert info.value.field == field


@pytest.mark.smoke
def test_what_makes_a_cache_refuses_it(device):
    if device.name != "cpu":
        pytest.skip("checked before a backend is asked")
    plan = capi.Plan(capi.descriptor(latent.SMALL, device))
    for run_it in (lambda: plan.quantize(dict(dtype=1)), lambda: plan.append_kv(dict(batch=1))):
        with pytest.raises(capi.Refused) as info:
            run_it()
        assert info.value.status == capi.UNSUPPORTED and info.value.field == "layout"
        assert "LATENT_KV" in str(info.value)
