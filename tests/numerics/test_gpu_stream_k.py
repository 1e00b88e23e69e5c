"""Stream-K of Hopper's forward kernels: the tiles of a short last wave are split along their keys,
and a second kernel combines their partial results."""
import os

import pytest

from . import capi, harness
from .case import Case
from .data import make_data
from .dtypes import round_to
from .repro import verify, verify_replays
from .tolerance import check

# made() has one head more than there are multiprocessors: a tile is left for the last wave.
BASE = Case(seqlen_q=150, seqlen_kv=2750, dim_qk=128, dtype="bf16")
CHANGES = {
    "bf16": dict(), "f16": dict(dtype="f16"), "f32 o": dict(dtype_o="f32"),
    "a tail of one key": dict(seqlen_kv=2753, dtype="f16"),
    "two tiles a head": dict(seqlen_q=200, seqlen_kv=4100),
    "one head of keys": dict(heads_kv=1, seqlen_q=192),
    "sink": dict(sink=True), "no lse": dict(lse=False, sink=True, dtype="f16"),
    "padded": dict(strides="padded"), "heads first": dict(strides="bhsd"),
    "heads of 96, f16": dict(dim_qk=96, seqlen_kv=3201, dtype="f16"),
    "heads of 96": dict(dim_qk=96, seqlen_kv=3000),
    "heads of 64 and 128": dict(dim_qk=64, dim_v=128, seqlen_q=190),
    "heads of 72 and 40": dict(dim_qk=72, dim_v=40, seqlen_kv=3000),
    "heads of 192 and 128": dict(dim_qk=192, dim_v=128, seqlen_q=100, dtype="f16"),
    "heads of 256": dict(dim_qk=256, seqlen_q=100),
}


@pytest.fixture(autouse=True)
def _only_hopper_kernels(device):
    if device.name == "cpu" or capi.device_properties(device.kind).compute_capability // 10 != 9 \
            or os.environ.get("FLASHATTN_BACKEND", "sm90") != "sm90":
        pytest.skip("the kernels are Hopper's")


def made(name, device):
    heads = capi.device_properties(device.kind).multiprocessors + 1
    return BASE.replace(**{"heads_q": heads, "heads_kv": heads, **CHANGES[name]})


def reason(plan, case):
    return capi.ffi.string(plan.info(capi.FORWARD, capi.sizes_of(case)).why).decode()


def why(case, device):
    return reason(capi.Plan(capi.descriptor(case, device)), case)


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_features(device, name):
    case = made(name, device)
    assert "are split along their keys" in why(case, device)
    verify(case, device)


@pytest.mark.parametrize("grow", ["first keys", "last keys", "one key", "every other key"])
@pytest.mark.parametrize("name", ["f16", "sink"])
def test_outgrown(device, name, grow):
    """Scores that outgrow the softmax base of a part: it is computed again, and no other."""
    case = made(name, device)
    data = make_data(case)
    for k in data.k:
        rows = {"first keys": slice(0, len(k) // 2), "last keys": slice(len(k) // 2, None),
                "one key": slice(len(k) // 3, len(k) // 3 + 1),
                "every other key": slice(0, None, 2)}[grow]
        k[rows] *= 12.0 if case.dtype == "f16" else 60.0
    data.k = [round_to(k, case.dtype) for k in data.k]
    outcome = harness.run(case, device, data)
    check(case, data, outcome)
    assert harness.run(case, device, data).bits() == outcome.bits()


@pytest.mark.parametrize("name", ["bf16", "two tiles a head", "heads of 96"])
def test_replays(device, name):
    verify_replays(made(name, device), device, nodes=2)


@pytest.mark.parametrize("change", [
    dict(lens_kv=[2203]), dict(lens_q=[77]), dict(starts_kv=[300]), dict(splits=1),
    dict(determinism=2), dict(seqlen_kv=500)])
def test_tiles_that_are_not_split(device, change):
    """Of other lengths than the host knows, where the caller forbids it, or few keys."""
    case = made("bf16", device).replace(**change)
    if not {"lens_kv", "lens_q", "starts_kv"} & set(change):
        assert "are split along their keys" not in why(case, device)
    verify(case, device)


def test_a_limit_of_the_workspace(device):
    """Without room for partial results the same kernel splits nothing, and says so."""
    case = made("bf16", device)
    fields = dict(capi.descriptor(case, device), max_batch=1, max_seqlen_q=150, max_seqlen_kv=2750)
    plan = capi.Plan(fields)
    while "are split along their keys" in reason(plan, case):  # others may need more than they do
        limit = plan.workspace_size(capi.FORWARD, capi.sizes_of(case)) - 1
        plan = capi.Plan(dict(fields, workspace_limit=limit))
    assert "for want of workspace_limit" in reason(plan, case)
    assert plan.workspace_size(capi.FORWARD, capi.sizes_of(case)) <= limit
    data = make_data(case)
    check(case, data, harness.run(case, device, data, plan))
