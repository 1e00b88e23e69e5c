"""Latent attention on Hopper, whose kernel reads V where K lies: head counts that share its tiles
of 64 rows, or fill them; splits, pages, masks, and scores that outgrow the first ones."""
import os

import numpy as np
import pytest

from . import capi
from .case import Case
from .data import make_data
from .dtypes import round_to
from .harness import Call, run
from .repro import verify
from .tolerance import check

BASE = Case(batch=2, seqlen_q=1, seqlen_kv=200, heads_q=16, heads_kv=1, dim_qk=576, dim_v=512,
            dtype="bf16", v_in_k=True)
LENGTHS = dict(batch=4, seqlen_kv=520, lens_kv=[520, 65, 0, 128])
CHANGES = [
    dict(lens_kv=[64, 1]), dict(lens_kv=[63, 129]), dict(seqlen_kv=700, splits=3), LENGTHS,
    dict(LENGTHS, splits=4), dict(LENGTHS, splits=2, sink=True), dict(LENGTHS, dtype_o="f32"),
    dict(LENGTHS, determinism=2, seqlen_kv=2100, lens_kv=[2100, 1024, 1025, 3], seqlen_q=2),
    dict(seqlen_q=5, causal=True, heads_q=20), dict(seqlen_q=5, window=(30, 2), heads_q=20),
    dict(seqlen_q=16, seqlen_kv=9, causal=True, heads_q=5), dict(seqlen_q=3, chunk=50),
    dict(seqlen_q=4, window=(70, 0), splits=3, dtype="f16", sink=True),
    dict(seqlen_q=2, top_left=True, causal=True, sink=True, dtype_o="f32"),
    dict(starts_kv=[0, 77]), dict(starts_kv=[199, 3], seqlen_q=2, causal=True),
    dict(cu_q=[3, 0, 5, 1], cu_kv=[90, 7, 257, 64], batch=4, causal=True),
    dict(lens_q=[2, 4], seqlen_q=4, heads_q=40, lens_kv=[200, 101]), dict(dtype="f16"),
    dict(heads_q=6, heads_kv=3, seqlen_q=30), dict(strides="padded"), dict(strides="bhsd"),
    dict(strides="padded", seqlen_q=3, heads_q=70), dict(seqlen_q=40, heads_q=4, causal=True),
    dict(dim_qk=512), dict(dim_qk=320, dim_v=264), dict(dim_qk=264, dim_v=8, dtype_o="f32"),
    dict(dim_qk=512, dim_v=504, dtype="f16", page_size=16), dict(scale=1.0, dtype_o="f32")]
HEADS_AND_QUERIES = [(1, 1), (1, 16), (8, 1), (8, 16), (16, 1), (16, 7), (20, 2), (20, 7), (32, 1),
                     (32, 2), (64, 1), (64, 3), (128, 1), (128, 2), (128, 3)]
TREES = [
    dict(tree=9, seqlen_q=9), dict(tree=70, seqlen_q=5, lens_kv=[200, 8], sink=True),
    dict(tree=40, seqlen_q=33, causal=True, heads_q=5), dict(tree=64, seqlen_q=2, splits=2),
    dict(tree=20, seqlen_q=4, window=(80, 0), page_size=64, seqlen_kv=520, splits=3),
    dict(tree=3, seqlen_q=3, density=0.0, lens_kv=[3, 1], dtype_o="f32"),
    dict(tree=16, seqlen_q=16, determinism=2, heads_q=20, seqlen_kv=1200, dtype="f16")]
PAGES = [1, 2, 8, 24, 48, 64, 128]
# Tokens by index, and pages that hide several; rows whose first tiles, or all keys, are hidden.
HIDDEN = [dict(LENGTHS, **change) for change in (
    dict(page_size=1, hidden=0.0), dict(page_size=1, hidden=0.4, splits=3, heads_q=70),
    dict(page_size=1, hidden=1.0, sink=True), dict(page_size=1, hidden=0.97, dtype="f16"),
    dict(page_size=64, hidden=0.6, dtype_o="f32"), dict(page_size=3, hidden=0.5, determinism=2),
    dict(page_size=100, hidden=0.5, seqlen_q=3, causal=True),
    dict(page_size=16, hidden=0.3, seqlen_q=3, tree=20), dict(page_size=1, hidden=0.4, chunk=64))]


@pytest.fixture(autouse=True)
def _only_hopper(device):
    if device.name == "cpu" or \
            capi.device_properties(device.kind).compute_capability // 10 != 9 or \
            not "sm90".startswith(os.environ.get("FLASHATTN_BACKEND", "sm90")):
        pytest.skip("the kernel is Hopper's")


def kernel_of(case, device):
    plan = capi.Plan(capi.descriptor(case, device))
    return capi.ffi.string(plan.info(capi.FORWARD, capi.sizes_of(case)).kernel).decode()


def judge(case, device):
    assert kernel_of(case, device) == "sm90_mla_%s_576_512_q64_kv64" % case.dtype
    return verify(case, device)


@pytest.mark.parametrize("case", [
    BASE.replace(heads_q=heads, seqlen_q=queries, causal=queries > 2, lens_kv=[200, 131],
                 dtype="f16" if queries == 2 else "bf16")
    for heads, queries in HEADS_AND_QUERIES])
def test_heads_and_queries(device, case):
    judge(case, device)


@pytest.mark.parametrize("case", [BASE.replace(**change) for change in CHANGES + TREES + HIDDEN])
def test_features(device, case):
    judge(case, device)


@pytest.mark.parametrize("page_size", PAGES)
def test_pages(device, page_size):
    judge(BASE.replace(page_size=page_size, seqlen_q=3, causal=True, splits=page_size % 3,
                       **LENGTHS), device)


def test_another_v_runs_on_another_kernel(device):
    """The same numbers elsewhere, and other ones."""
    case = BASE.replace(dtype_o="f32")
    data = make_data(case)
    beside = case.replace(v_in_k=False)
    assert kernel_of(beside, device) == kernel_of(case, device)
    inside, copied = run(case, device, data), run(beside, device, data)
    check(case, data, inside)
    check(case, data, copied)
    assert inside.bits() != copied.bits()
    verify(beside, device)


@pytest.mark.parametrize("change", [
    dict(softcap=5.0), dict(alibi="h"), dict(bias="f32"), dict(dropout=0.2),
    dict(blocks=(16, 64)), dict(scale=-0.05), dict(dim_qk=512, backward=True)])
def test_what_is_left_to_the_portable_kernels(device, change):
    if "FLASHATTN_BACKEND" in os.environ:
        pytest.skip("the environment forbids the portable backend")
    assert kernel_of(BASE.replace(**change), device).startswith("sm80")


@pytest.mark.parametrize("grow", ["first key", "last keys", "one key", "every other key"])
@pytest.mark.parametrize("case", [BASE.replace(seqlen_kv=450, **change) for change in (
    dict(), dict(dtype="f16"), dict(splits=3, seqlen_q=3, causal=True), dict(sink=True),
    dict(dtype_o="f32", heads_q=70), dict(window=(150, 0), seqlen_q=9))])
def test_outgrown(device, case, grow):
    """Scores above the first ones by more than the fixed base holds; the same bits every time."""
    data = make_data(case)
    for k in data.k:
        rows = {"first key": slice(0, 1), "last keys": slice(len(k) // 2, None),
                "one key": slice(300, 301), "every other key": slice(0, None, 2)}[grow]
        k[rows, :, :64] *= 12.0 if case.dtype == "f16" else 60.0
    data.k = [round_to(k, case.dtype) for k in data.k]
    data.v = [k[..., :case.dim_v] for k in data.k]
    outcome = run(case, device, data)
    check(case, data, outcome)
    assert run(case, device, data).bits() == outcome.bits()


def test_one_cta_of_a_cluster_is_outgrown(device):
    """Queries of heads from 64 on, which the second CTA has, or of those before it."""
    for first, end in ((0, 64), (64, 128)):
        case = BASE.replace(seqlen_kv=450, heads_q=128, splits=2)
        data = make_data(case)
        for q, k in zip(data.q, data.k):
            q[:, first:end, :64] = 0
            k[225:, :, :64] *= 60.0
        data.k = [round_to(k, case.dtype) for k in data.k]
        data.v = [k[..., :case.dim_v] for k in data.k]
        check(case, data, run(case, device, data))


@pytest.mark.parametrize("size", [1e4, 1e17])
def test_scores_of_any_size(device, size):
    """The largest score takes all, and O is its V to the last digit, in whichever tile it lies."""
    for where in (0, 70, 199):
        case = BASE.replace(dtype_o="f32", heads_q=3)
        data = make_data(case)
        for q, k in zip(data.q, data.k):
            q[:], k[..., 0] = 0, round_to(np.float32(-size), case.dtype)
            q[..., 0] = round_to(np.float32(size), case.dtype)
            k[where, :, 0] = round_to(np.float32(size / 2), case.dtype)
        data.v = [k[..., :case.dim_v] for k in data.k]
        result = run(case, device, data)
        for o, v in zip(result.o, data.v):
            assert np.array_equal(o, np.broadcast_to(v[where].astype(np.float32), o.shape))


def test_one_key_is_its_value(device):
    for splits in (1, 2):
        case = BASE.replace(dtype_o="f32", lens_kv=[1, 1], heads_q=70, splits=splits)
        data = make_data(case)
        for o, v in zip(run(case, device, data).o, data.v):
            assert np.array_equal(o, np.broadcast_to(v[0].astype(np.float32), o.shape))


def test_bits_do_not_depend_on_the_batch(device):
    case = BASE.replace(determinism=2, batch=3, seqlen_kv=2100, lens_kv=[2100, 90, 1500])
    data = make_data(case)
    together = run(case, device, data)
    for b in range(case.batch):
        alone = make_data(case)
        for name in ("q", "k", "v"):
            setattr(alone, name, [getattr(data, name)[b]])
        one = case.replace(batch=1, lens_kv=[case.lens_kv[b]])
        result = run(one, device, alone)
        assert result.o[0].tobytes() == together.o[b].tobytes()
        assert result.lse[0].tobytes() == together.lse[b].tobytes()


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
