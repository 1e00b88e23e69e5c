"""Hopper kernels with packed heads: query heads of a KV head in one tile, keys in splits."""
import os

import pytest

from . import capi
from .case import Case
from .repro import verify, verify_replays

BASE = Case(batch=2, seqlen_q=9, seqlen_kv=1300, heads_q=8, heads_kv=2, dim_qk=128, dtype="bf16",
            causal=True, lens_kv=[1300, 517])
# Changes, and the rows of a tile. Groups of 1, 3, 5 and 7 heads leave rows empty or none.
CHANGES = [
    (dict(), 64), (dict(dtype="f16"), 64), (dict(dim_qk=64), 64), (dict(dim_qk=256), 64),
    (dict(dim_qk=40, dim_v=72), 64), (dict(dim_qk=192, dim_v=128, dtype="f16"), 64),
    (dict(heads_q=6), 64), (dict(heads_q=5, heads_kv=1), 128), (dict(heads_q=7, heads_kv=1), 128),
    (dict(seqlen_q=33), 128), (dict(seqlen_q=33, dim_qk=64, dtype="f16"), 128),
    (dict(seqlen_q=33, dim_qk=256), 128), (dict(seqlen_q=64, causal=False, lens_kv=None), 128),
    (dict(lens_kv=[1300, 0], sink=True), 64), (dict(lens_kv=[1, 1300], dtype_o="f32"), 64),
    (dict(seqlen_q=40, sink=True, dtype_o="f32", lens_kv=None), 128), (dict(page_size=16), 64),
    (dict(page_size=128, seqlen_q=50, dim_qk=64), 128), (dict(window=(700, 0)), 64),
    (dict(window=(90, 3), causal=False, seqlen_q=60), 128), (dict(chunk=256, causal=False), 64),
    (dict(starts_kv=[30, 500]), 64), (dict(batch=3, cu_q=[40, 1, 9], lens_kv=[1300, 5, 900]), 128),
    (dict(batch=3, cu_q=[13, 0, 9], cu_kv=[1200, 64, 1024], lens_kv=None), 64),
    (dict(strides="padded"), 64), (dict(strides="bhsd", seqlen_q=20), 128),
    (dict(lse=False, lens_kv=None), 64), (dict(heads_q=64, heads_kv=1, seqlen_q=2), 128),
    # One head, its keys in splits.
    (dict(batch=1, seqlen_q=130, heads_q=1, heads_kv=1, seqlen_kv=2300, lens_kv=None), 128),
    (dict(batch=1, seqlen_q=200, heads_q=1, heads_kv=1, seqlen_kv=2300, lens_kv=[2049]), 128),
]


@pytest.fixture(autouse=True)
def _only_hopper_kernels(device):
    if device.name == "cpu" or capi.device_properties(device.kind).compute_capability // 10 != 9 \
            or os.environ.get("FLASHATTN_BACKEND", "sm90") != "sm90":
        pytest.skip("the kernels are Hopper's")


def choice(case, device):
    """The kernel of a case, and its splits."""
    plan = capi.Plan(capi.descriptor(case, device))
    info = plan.info(capi.FORWARD, capi.sizes_of(case))
    return capi.ffi.string(info.kernel).decode(), info.splits


@pytest.mark.parametrize("change,rows", CHANGES)
def test_features(device, change, rows):
    case = BASE.replace(**change)
    name, _ = choice(case, device)
    assert name.endswith("_packed_heads") and f"_q{rows}_" in name
    verify(case, device)


@pytest.mark.parametrize("case", [
    BASE, BASE.replace(seqlen_q=40, dim_qk=64, lens_kv=None),
    BASE.replace(seqlen_q=100, batch=1, heads_q=2, seqlen_kv=4096, lens_kv=None)])
def test_replays(device, case):
    verify_replays(case, device, nodes=2 if choice(case, device)[1] > 1 else 1)


def test_splits_are_chosen(device):
    """Enough to fill the device, and none where the caller wants none, or tiles fill it."""
    few = BASE.replace(batch=1, lens_kv=None, heads_kv=1, seqlen_q=16, seqlen_kv=65536)
    assert choice(few, device)[1] > 1
    assert choice(few.replace(splits=1), device)[1] == 1
    assert choice(few.replace(batch=64, heads_kv=8, seqlen_q=40), device)[1] == 1


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 8)])
def test_the_workspace_holds_all_splits(device, dims):
    """Few columns of V make partial results cheap, and so many splits worth their while."""
    for keys in (1024, 1300, 2111, 8192, 65536):
        for queries, heads_kv in ((9, 1), (9, 2), (33, 1), (64, 2)):
            case = BASE.replace(seqlen_q=queries, seqlen_kv=keys, heads_kv=heads_kv, lens_kv=None,
                                dim_qk=dims[0], dim_v=dims[1])
            name, splits = choice(case, device)
            assert name.endswith("_packed_heads")
            plan = capi.Plan(capi.descriptor(case, device))
            size = plan.workspace_size(capi.FORWARD, capi.sizes_of(case))
            rows = case.batch * case.heads_q * queries
            assert splits == 1 or size >= 4 * splits * rows * (dims[1] + 2), (keys, queries, splits)
