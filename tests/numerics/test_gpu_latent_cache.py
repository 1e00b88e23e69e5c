"""The quantised cache of latent attention on Hopper: DeepSeek's records of 656 bytes a token, dense
and in pages."""
import os

import numpy as np
import pytest

from . import capi, latent
from .data import make_data
from .dtypes import round_to
from .harness import Call, run
from .repro import verify
from .test_gpu_latent import _only_hopper, kernel_of  # noqa: F401, the fixture
from .tolerance import check

BASE = latent.BASE
LENGTHS = dict(batch=4, seqlen_kv=520, lens_kv=[520, 65, 0, 128])
CASES = [BASE.replace(**change) for change in (
    dict(heads_q=1), dict(heads_q=64, lens_kv=[200, 63]), dict(dtype="f16", dtype_o="f32"),
    dict(heads_q=128, seqlen_q=2, causal=True, seqlen_kv=330), dict(LENGTHS, splits=4, sink=True),
    dict(determinism=2, seqlen_kv=1100, lens_kv=[1100, 3], seqlen_q=2),
    dict(heads_q=6, heads_kv=3, seqlen_q=30), dict(starts_kv=[199, 3], seqlen_q=2, causal=True),
    dict(cu_q=[3, 0, 5, 1], cu_kv=[90, 7, 257, 64], batch=4, causal=True),
    dict(seqlen_q=4, window=(70, 0), splits=3, dtype="f16"), dict(tree=9, seqlen_q=9),
    dict(seqlen_kv=0), dict(strides="record gaps"), dict(strides="record gaps", page_size=64),
    dict(LENGTHS, page_size=1), dict(LENGTHS, page_size=64, hidden=0.5, heads_q=32),
    dict(cu_q=[2, 0, 1], cu_kv=[90, 7, 257], batch=3, determinism=2),
    dict(cu_q=[2, 0, 1], cu_kv=[90, 7, 257], batch=3, heads_q=9, causal=True),
    dict(tree=3, seqlen_q=3, heads_q=5), dict(seqlen_q=2, window=(70, 0), splits=3, sink=True),
    dict(LENGTHS, page_size=1, heads_q=70), dict(LENGTHS, page_size=64),
    dict(LENGTHS, page_size=24, seqlen_q=3, causal=True, dtype="f16"),
    dict(LENGTHS, page_size=1, hidden=0.4, splits=3), dict(LENGTHS, page_size=100, hidden=0.5),
    dict(LENGTHS, page_size=1, hidden=0.97, dtype="f16"))]


def tile_of(case):
    """Rows of a CTA: few have a kernel of their own."""
    rows = case.heads_q // case.heads_kv * max(case.capacity_q(b) for b in range(case.batch))
    any_rows = case.determinism == 2 and case.cu_q is not None
    return next((n for n in (16, 32) if n >= rows and not any_rows), 64)


def judge(case, device):
    tile = tile_of(case)
    assert kernel_of(case, device) == f"sm90_mla_{case.dtype}_f8_576_512_q{tile}_kv64"
    return verify(case, device)


@pytest.mark.parametrize("case", CASES)
def test_features(device, case):
    judge(case, device)


@pytest.mark.parametrize("heads", [16, 33])
@pytest.mark.parametrize("dtype,descale", [
    ("bf16", 0.7), ("f16", 0.7), ("f16", 300.0), ("bf16", 1e30), ("bf16", 1e-30)])
def test_each_code(device, dtype, descale, heads):
    """o of one key is its value: all bytes but NaN, times descales. Few rows: within 2^-10; else
    rounded once to the type of q, in which numbers beyond its range become its largest."""
    case = BASE.replace(batch=1, seqlen_kv=1, dtype=dtype, dtype_o="f32", heads_q=heads)
    data = make_data(case)
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[codes % 128 < 127].view(latent.NUMPY["f8"]).astype(np.float32)
    data.v[0][0, 0] = np.resize(codes, case.dim_v)
    data.descale_latent[0][:] = np.float32(descale) * np.arange(1, 5, dtype=np.float32)
    meant = data.v[0][0, 0] * np.repeat(data.descale_latent[0][0, 0], 128)
    o = run(case, device, data).o[0]
    if tile_of(case) < 64:
        assert (np.abs(o - meant) <= 2.0 ** -10 * np.abs(meant)).all()
        return
    if dtype == "f16":
        meant = np.clip(meant, -65504, 65504)
    assert np.array_equal(o, np.broadcast_to(round_to(meant, dtype), o.shape))


@pytest.mark.parametrize("heads", [20, 70])
@pytest.mark.parametrize("grow", ["first key", "last keys", "every other key"])
def test_outgrown(device, grow, heads):
    """Scores above the first ones by more than the fixed base holds, and larger descales; the same
    bits every time."""
    case = BASE.replace(seqlen_kv=450, splits=2, heads_q=heads)
    data = make_data(case)
    for k, descales in zip(data.k, data.descale_latent):
        rows = {"first key": slice(0, 1), "last keys": slice(225, None),
                "every other key": slice(0, None, 2)}[grow]
        k[rows] *= 60.0
        descales[rows] *= 20.0
    data.k = [round_to(k, case.dtype) for k in data.k]
    outcome = run(case, device, data)
    check(case, data, outcome)
    assert run(case, device, data).bits() == outcome.bits()


def test_bits_do_not_depend_on_pages(device):
    case = BASE.replace(lens_kv=[200, 131], heads_q=20, splits=2)
    dense = run(case, device).bits()
    for page_size in (1, 48, 64):
        assert run(case.replace(page_size=page_size), device).bits() == dense


def test_descales_of_any_size(device):
    """Descales that differ by 2^30 from key to key and by 2^10 within one."""
    case = BASE.replace(seqlen_kv=600, heads_q=9, scale=1e-9)
    data = make_data(case)
    rng = np.random.default_rng(1)
    for descales in data.descale_latent:
        descales *= 2.0 ** rng.integers(-20, 10, (*descales.shape[:-1], 1)) * 2.0 ** rng.integers(
            0, 10, descales.shape)
    check(case, data, run(case, device, data))


def test_a_graph_is_replayed_with_new_lengths(device):
    case = BASE.replace(lens_kv=[200, 3], page_size=16, seqlen_q=2, causal=True)
    later = case.replace(lens_kv=[1, 180], seed=1)
    first, direct = Call(case, device), Call(later, device)
    expected = direct.forward()
    check(later, direct.data, expected)
    staged = Call(later, device, plan=first.plan)
    staged.sizes = first.sizes
    staged.forward_fields()
    first.device = device.captured(lambda: first.adopt(staged))
    assert first.forward().bits() == expected.bits()


@pytest.mark.parametrize("change, field", [
    (dict(dim_qk=512, dim_v=448), "layout"), (dict(descale_dim=64), "layout"),
    (dict(dtype="f32"), "layout"), (dict(dtype_kv="i8"), "layout"), (dict(softcap=5.0), "layout"),
    (dict(dtype_o="f8"), "dtype_o")])
def test_what_is_left_to_the_cpu(device, change, field):
    if "FLASHATTN_BACKEND" in os.environ:
        pytest.skip("the portable backend explains")
    with pytest.raises(capi.Refused) as info:
        capi.Plan(capi.descriptor(BASE.replace(**change), device))
    assert info.value.status == capi.UNSUPPORTED and info.value.field == field
    assert "LATENT_KV" in str(info.value) and "CPU" in str(info.value)


def test_arrays_that_are_no_records(device):
    with pytest.raises(capi.Refused) as info:
        run(BASE.replace(strides="bshd"), device)
    assert info.value.field == "k.stride_seq" and "records" in str(info.value)
