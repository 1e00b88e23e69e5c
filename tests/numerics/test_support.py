"""tests/data/support.txt: it is what this backend says, and decides which refusals are skips."""
import pytest

from . import capi, support
from .case import Case

pytestmark = pytest.mark.smoke
ALL = support.sections()
GPUS = sorted(name for name in ALL if name != "cpu")


def descriptor(device="cpu", **fields):
    class Kind:
        name, kind = device, int(device != "cpu")

    return capi.descriptor(Case(**fields), Kind)


def test_the_file_is_what_this_backend_says(device):
    name = support.backend(device.kind)
    assert ALL.get(name, "") == support.table(device.kind), support.COMMAND % device.name


@pytest.mark.parametrize("name", GPUS)
def test_a_lost_kernel_is_no_skip(name):
    """For what the section says is computed no reason will do."""
    dtype = "f32" if name.startswith("sm80") else "bf16"
    for fields in (dict(dim_qk=64), dict(dim_qk=128, backward=True), dict(dim_qk=64, softcap=9.0),
                   dict(dim_qk=32, bias="f32", dbias="bhr", backward=True)):
        asked = descriptor("cuda", dtype=dtype, **fields)
        for reason in ("NOT_IN_THIS_BUILD, dtype", "NOT_IN_THIS_BUILD, device",
                       "HEAD_DIM_MAX, dim_qk", "SHARED_MEMORY, dim_qk"):
            assert not support.is_listed(ALL[name], asked, reason)


@pytest.mark.parametrize("name", GPUS)
def test_what_is_listed_is_a_skip_for_its_own_reason(name):
    reason = "NOT_IN_THIS_BUILD, device" if name.startswith("sm90") else "HEAD_DIM_MULTIPLE, dim_qk"
    asked = descriptor("cuda", dtype="f16", dim_qk=57)
    assert support.is_listed(ALL[name], asked, reason)
    assert not support.is_listed(ALL[name], asked, "SHARED_MEMORY, dim_qk")
    assert not support.is_listed(ALL["cpu"], asked, reason)


def test_refusals_that_are_no_skips(device):
    """Of calls, and of what the file does not list."""
    del device
    with pytest.raises(capi.Refused) as refused:
        capi.Plan(descriptor(dim_qk=1032))
    assert refused.value.asked and not support.may_be_skipped(refused.value)
    plan = capi.Plan(descriptor())
    with pytest.raises(capi.Refused) as refused:
        plan.workspace_size(capi.FORWARD, None)
    assert not support.may_be_skipped(refused.value)


def test_a_gpu_asked_of_a_build_for_cpus():
    """The message names the command."""
    said = capi.ffi.string(capi.library().flashattn_build_info()).decode()
    if "without CUDA" not in said:
        pytest.skip("this build has kernels for GPUs")
    with pytest.raises(RuntimeError, match="built without CUDA.* ./run build --cuda makes one"):
        capi.need_gpu()
