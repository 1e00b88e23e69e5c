"""The Hopper backward pass that begins before all heads are prepared: heads enough, of queries
enough, for which only a GPU has the time."""
import pytest

from . import capi, support
from .case import Case
from .repro import verify
from .test_gpu_streams import check_repeats, jobs

CAUSAL = Case(batch=3, seqlen_q=1023, seqlen_kv=1023, heads_q=18, dim_qk=128, dtype="bf16",
              causal=True, backward=True)
CASES = {
    "causal": CAUSAL,
    "in turns": CAUSAL.replace(batch=6, determinism=1, sink=True, dsink=True, dlse=True),
    "lengths": CAUSAL.replace(batch=4, lens_q=[1023, 129, 0, 257], dim_qk=64, determinism=1),
    "dealt out to the end": CAUSAL.replace(batch=13, heads_q=16, dim_qk=64, causal=False),
    "groups": CAUSAL.replace(batch=6, heads_q=30, heads_kv=10, dim_qk=96, dim_v=40, dtype="f16",
                             softcap=20.0, strides="padded", determinism=1),
    "window": CAUSAL.replace(batch=6, window=(100, 30), causal=False, dtype="f16"),
    "clusters": CAUSAL.replace(dim_qk=256, determinism=1),
    "three panels": CAUSAL.replace(batch=6, dim_qk=192, dtype="f16", sink=True, dsink=True),
    "blocks": CAUSAL.replace(batch=6, dim_qk=64, blocks=(64, 128), density=0.4, determinism=1),
    "dims apart": CAUSAL.replace(batch=6, dim_qk=192, dim_v=128),
}


def plan_of(case, device):
    if not support.has_hopper(device):
        pytest.skip("the other kernels prepare all heads first")
    plan = capi.Plan(capi.descriptor(case, device))
    info = plan.info(capi.BACKWARD, capi.sizes_of(case))
    kernel, why = (capi.ffi.string(text).decode() for text in (info.kernel, info.why))
    assert kernel.startswith("sm90")
    assert "started early" in why
    return plan


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients(device, name, captured):
    plan_of(CASES[name], device)
    verify(CASES[name], device.captured() if captured else device)


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].determinism])
def test_a_hundred_calls_in_a_row_give_the_same_bits(device, name):
    """Two at a time, the second behind the first without a wait, on what that left in the
    workspace; beside another stream's copies. The first of all finds NaN there."""
    case = CASES[name]
    enqueue, result = jobs(case, device, plan_of(case, device), True)
    enqueue(0)
    device.driver.wait_stream(0)

    def enqueue_two(stream):
        enqueue(stream)
        enqueue(stream)

    check_repeats(device, case, enqueue_two, result, result(), 50)
