"""Decoding on a GPU: up to 64 rows of a KV head in a CTA, whose keys are split; trees of drafted
tokens."""
import os

import pytest

from . import capi
from .case import Case
from .harness import run
from .repro import verify, verify_replays

BASE = Case(batch=2, seqlen_q=1, seqlen_kv=900, heads_q=4, heads_kv=1, dim_qk=128, dtype="bf16",
            lens_kv=[900, 517])
SPEC = BASE.replace(seqlen_q=5, causal=True)  # 20 rows
LONG = SPEC.replace(seqlen_q=9, heads_q=6)  # 54 rows

ALONE = dict(batch=1, seqlen_kv=1000, lens_kv=None)

# By the rows of a CTA.
CHANGES = {
    16: [dict(), dict(splits=1), dict(splits=7), dict(dim_qk=64, splits=3), dict(dim_qk=256),
         dict(dim_qk=256, dim_v=200, splits=5, page_size=16),
         dict(dim_qk=40, dim_v=72, dtype="f16"),
         dict(seqlen_q=4, causal=True, splits=2), dict(batch=4, lens_kv=[900, 0, 1, 64], splits=3),
         dict(seqlen_q=3, tree=9, heads_q=5, splits=3), dict(seqlen_q=2, tree=2, window=(50, 0)),
         dict(lens_kv=None, heads_q=16), dict(lens_kv=None, dtype_o="f32", sink=True),
         dict(lens_kv=None, seqlen_q=2, dim_qk=64, strides="padded"),
         dict(starts_kv=[30, 500], splits=4), dict(lse=False, lens_kv=None),
         # Clusters of several sizes, of which some CTAs see no key.
         ALONE, dict(ALONE, seqlen_kv=300), dict(ALONE, seqlen_kv=600, sink=True),
         dict(ALONE, dim_qk=64, sink=True), dict(ALONE, dim_qk=256, dim_v=200, dtype="f16"),
         dict(ALONE, dim_qk=40, dim_v=24, dtype_o="f32"), dict(ALONE, window=(300, 0)),
         dict(ALONE, lens_kv=[1], dtype_o="f32"), dict(ALONE, lens_kv=[0], sink=True),
         dict(ALONE, lens_kv=[700], page_size=16, seqlen_q=3, tree=9, heads_q=5),
         dict(ALONE, heads_q=16, starts_kv=[600]), dict(ALONE, seqlen_q=7, heads_q=2, causal=True),
         dict(ALONE, heads_q=6, heads_kv=3, seqlen_kv=2049),
         dict(ALONE, seqlen_kv=2048, heads_q=3),
         dict(ALONE, batch=2, heads_kv=2, causal=True, lens_kv=[1000, 3]),
         dict(ALONE, heads_kv=2, causal=True)],
    32: [dict(), dict(splits=1), dict(splits=3), dict(splits=9, sink=True), dict(dim_qk=64),
         dict(dim_qk=64, splits=4, page_size=16, dtype="f16"), dict(lens_kv=None),
         dict(page_size=5, splits=2), dict(window=(300, 0), causal=False, splits=3),
         dict(seqlen_q=8, tree=8, splits=2), dict(seqlen_q=6, tree=40, window=(400, 0)),
         dict(seqlen_q=8, heads_q=3, dtype_o="f32"), dict(cu_q=[5, 1, 0], batch=3,
                                                         lens_kv=[900, 70, 3]),
         dict(seqlen_q=17, heads_q=1, chunk=64, causal=False), dict(strides="bhsd", splits=2)],
    64: [dict(), dict(splits=1), dict(splits=2), dict(splits=7), dict(dim_qk=64, splits=2),
         dict(dim_qk=64, page_size=16, dtype="f16", splits=6), dict(lens_kv=None, sink=True),
         dict(seqlen_q=16, tree=16, heads_q=4), dict(seqlen_q=16, tree=90, heads_q=4, splits=3),
         dict(seqlen_q=16, heads_q=8, lens_kv=[900, 3]), dict(page_size=16, splits=2),
         dict(seqlen_q=50, heads_q=1, dtype_o="f32", splits=3),
         dict(cu_q=[9, 2], lens_kv=[900, 1], window=(200, 5), causal=False)]}
CASES = [(rows, {16: BASE, 32: SPEC, 64: LONG}[rows].replace(**change))
         for rows in CHANGES for change in CHANGES[rows]]


@pytest.fixture(autouse=True)
def _only_portable_kernels(device):
    if device.name == "cpu" or os.environ.get("FLASHATTN_BACKEND", "sm80") != "sm80":
        pytest.skip("decode kernels are portable ones")
    if capi.device_properties(device.kind).shared_memory < 163 << 10:  # bytes
        pytest.skip("64 rows need an A100's shared memory")


def kernel_of(case, device):
    plan = capi.Plan(capi.descriptor(case, device))
    return capi.ffi.string(plan.info(capi.FORWARD, capi.sizes_of(case)).kernel).decode()


@pytest.mark.parametrize("rows,case", CASES)
def test_features(device, rows, case):
    name = kernel_of(case, device)
    assert "_q%d_" % rows in name and name.endswith("_decode")
    verify(case, device)


@pytest.mark.parametrize("case", [
    BASE.replace(splits=7), BASE.replace(batch=1, lens_kv=None, splits=3, dim_qk=64, heads_kv=2),
    BASE.replace(splits=3, dim_qk=256), SPEC.replace(splits=3), LONG.replace(splits=2, dim_qk=64),
    SPEC.replace(tree=4, splits=2)])
def test_replays(device, case):
    verify_replays(case, device, nodes=2)


@pytest.mark.parametrize("change", [dict(), dict(dim_qk=64, dim_v=72), dict(dim_qk=256, sink=True),
                                    dict(seqlen_q=3, heads_q=5, dtype="f16", lens_kv=[800])])
def test_a_cluster_merges_in_one_launch(device, change):
    if capi.device_properties(device.kind).compute_capability < 90:
        pytest.skip("clusters need a GPU of 9.0 or later")
    case = BASE.replace(**dict(ALONE, **change))
    plan = capi.Plan(capi.descriptor(case, device))
    info = plan.info(capi.FORWARD, capi.sizes_of(case))
    assert "a cluster of" in capi.ffi.string(info.why).decode() and info.splits > 1
    verify_replays(case, device, nodes=1)


def test_the_number_of_splits_changes_no_more_than_rounding(device):
    case = BASE.replace(dtype_o="f32", lens_kv=[900, 1], determinism=1)
    for splits in (1, 2, 5, 14):
        outcome = run(case.replace(splits=splits), device)
        assert run(case.replace(splits=splits), device).bits() == outcome.bits()
