"""workspace_limit is a budget: what needs more is left out, and the plan says so."""
import os

import pytest

from . import capi
from .case import Case
from .harness import Call

CASE = Case(batch=2, seqlen_q=200, seqlen_kv=300, heads_q=2, heads_kv=1, dim_qk=64, dtype="bf16",
            causal=True)


def limited(device, limit):
    """The bytes that a plan needs within its maxima, its reason, its instruction set, and a call's
    bits."""
    plan = capi.Plan(dict(capi.descriptor(CASE, device), max_batch=2, max_seqlen_q=200,
                          max_seqlen_kv=300, workspace_limit=limit))
    info = plan.info(capi.FORWARD, None)
    why, isa = (capi.ffi.string(text).decode() for text in (info.why, info.isa))
    return info.workspace, why, isa, Call(CASE, device, plan=plan).forward().bits()


def can_do_with_less(isa):
    """Kernels for AMX, also emulated ones, share packed tiles, or each thread packs for itself."""
    return "amx" in isa or "_amx_on_" in os.environ.get("FLASHATTN_LIBRARY", "")


@pytest.mark.smoke
def test_a_limit_changes_no_bit(device):
    """With room for everything nothing changes. With a byte less a plan takes less, says so and
    writes the same bits, where it can do with less; otherwise it is refused by name."""
    size, why, isa, bits = limited(device, 0)
    for limit in (1 << 40, max(size, 1)):
        assert limited(device, limit) == (size, why, isa, bits)
    if size < 2:
        assert not can_do_with_less(isa)
        return
    try:
        less, reason, _, same = limited(device, size - 1)
    except capi.Refused as refused:
        assert refused.field == "workspace_limit" and not can_do_with_less(isa)
        return
    assert less < size
    if device.name == "cpu":  # a GPU has other kernels, with other sums
        assert "workspace_limit" in reason and same == bits
