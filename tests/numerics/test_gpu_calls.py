"""What a call does to its caller beside computing: contexts, errors, what plans say of themselves.
What another GPU or a failing driver is needed for, on the emulator."""
import concurrent.futures
import copy
import os
import pathlib
import subprocess
import sys

import pytest

from . import capi
from .case import Case
from .harness import Call, run

ROOT = pathlib.Path(__file__).resolve().parents[2]
ON_EMULATOR = "FLASHATTN_EMULATOR_DEVICE" in os.environ
BACKEND = os.environ.get("FLASHATTN_BACKEND")
CASE = Case(seqlen_q=70, seqlen_kv=130, heads_q=2, dim_qk=64, dtype="bf16", backward=True)
ERROR_DEVICE, REASON_ARCH, REASON_NO_BUILD, REASON_SIZE = 5, 4, 22, 27
emulated = pytest.mark.skipif(not ON_EMULATOR, reason="only the emulator fails when it is asked to")


def plan_of(case, device, **fields):
    return capi.Plan(dict(capi.descriptor(case, device), **fields))


def say(info, name):
    return capi.ffi.string(getattr(info, name)).decode()


def in_a_process(program, **env):
    """Runs a program with another environment; None takes a variable out."""
    env = {k: v for k, v in {**os.environ, **env}.items() if v is not None}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, check=False,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


CONTEXTS = """
import ctypes
from tests.numerics import capi
from tests.numerics.device import CudaDevice
from tests.numerics.test_gpu_calls import CASE, plan_of

cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0

def current():
    context = ctypes.c_void_p()
    assert cuda.cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value

def is_active(device):
    flags, active = ctypes.c_uint(), ctypes.c_int()
    assert cuda.cuDevicePrimaryCtxGetState(
        device, ctypes.byref(flags), ctypes.byref(active)) == 0
    return bool(active.value)

plan_of(CASE, CudaDevice, device_index=1)
assert current() is None and not is_active(0) and is_active(1)
own = ctypes.c_void_p()
assert cuda.cuCtxCreate_v2(ctypes.byref(own), 0, 1) == 0
for device in (1, 0):
    plan_of(CASE, CudaDevice, device_index=device)
    assert current() == own.value
"""


def test_contexts_are_left_as_they_were(device):
    if not ON_EMULATOR and device.driver.count < 2:
        pytest.skip("needs two devices")
    in_a_process(CONTEXTS, FLASHATTN_EMULATOR_DEVICES="2")


OTHER_CONTEXT = """
import ctypes
from tests.numerics import capi
from tests.numerics.device import open_device
from tests.numerics.harness import Call
from tests.numerics.test_gpu_calls import CASE, ERROR_DEVICE

def is_refused(call, result):
    for run in (call.forward, lambda: call.backward(result)):
        try:
            run()
        except capi.Refused as refused:
            assert refused.status == ERROR_DEVICE
            assert "context" in str(refused) and "cuCtxSetCurrent" in str(refused), refused
        else:
            raise AssertionError("a plan of another context has run")

device = open_device("cuda")
call = Call(CASE, device)
result = call.forward()
own = device.driver.made("cuCtxCreate_v2", 0, 0)
is_refused(call, result)
of_own = Call(CASE, device)
of_own.forward()
device.driver.enter()
is_refused(of_own, result)
call.backward(call.forward())
"""


def test_a_plan_of_another_context_is_refused(device):
    del device
    in_a_process(OTHER_CONTEXT)


def on_new_threads(device):
    """The same device, each call from a thread that has no context."""
    other, driver = copy.copy(device), device.driver

    def launch(enqueue):
        def call():
            assert driver.made("cuCtxGetCurrent").value is None
            enqueue(0)

        driver.synchronize()
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            threads.submit(call).result()
        driver.synchronize()

    other.launch = launch
    return other


def test_a_thread_needs_no_context(device):
    """PyTorch's thread for backward passes has none until the runtime needs one."""
    case = CASE.replace(determinism=1)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        plan = threads.submit(plan_of, case, device).result()
    expected = run(case, device, plan=plan).bits()
    assert run(case, on_new_threads(device), plan=plan).bits() == expected


@emulated
def test_a_failed_call_leaves_no_error(device, monkeypatch):
    call = Call(CASE, device)
    monkeypatch.setenv("FLASHATTN_EMULATOR_FAILS", "cudaLaunchKernel=719")
    with pytest.raises(capi.Refused) as refused:
        call.forward()
    assert refused.value.status == ERROR_DEVICE
    assert device.driver.library.cudaGetLastError() == 0


PLAN_WITHOUT_CODE = """
import os
from tests.numerics import capi
from tests.numerics.device import CudaDevice
from tests.numerics.test_gpu_calls import CASE, plan_of

for fails in ("cudaFuncGetAttributes=%s", ""):  # the answer is kept
    os.environ["FLASHATTN_EMULATOR_FAILS"] = fails
    try:
        plan_of(CASE, CudaDevice)
    except capi.Refused as refused:
        print(refused.status, refused.reason, CudaDevice().driver.library.cudaGetLastError())
    else:
        print("a plan")
"""


@emulated
@pytest.mark.parametrize("error", [98, 209, 222])
def test_a_build_without_code_for_the_device_is_refused(device, error):
    del device
    said = in_a_process(PLAN_WITHOUT_CODE % error).split("\n")
    reason = REASON_NO_BUILD if BACKEND == "sm90" else REASON_ARCH  # which needs the other one
    assert said[:2] == [f"{capi.UNSUPPORTED} {reason} 0"] * 2


@emulated
def test_other_errors_are_not_taken_for_missing_code(device):
    del device
    said = in_a_process(PLAN_WITHOUT_CODE % 2).split("\n")
    assert said[0].split()[0] == str(ERROR_DEVICE) and said[1] == "a plan"


@emulated
def test_code_is_asked_for_once(device, monkeypatch):
    plan_of(CASE, device)
    monkeypatch.setenv("FLASHATTN_EMULATOR_FAILS", "cudaFuncGetAttributes=98")
    with pytest.raises(capi.Refused) as refused:
        plan_of(CASE, device)
    assert refused.value.status == ERROR_DEVICE  # it was found before; now it is gone


def test_kernels_of_a_device_are_named(device):
    out = capi.device_properties(device.kind)
    assert say(out, "isa") == ("sm90" if out.compute_capability // 10 == 9 else "sm80")


def test_a_plan_of_no_shape_says_that_the_shape_decides(device):
    plan = plan_of(CASE, device)
    info = plan.info(capi.FORWARD, None)
    many = plan.info(capi.FORWARD, dict(batch=200, seqlen_q=4096, seqlen_kv=4096))
    assert say(info, "kernel") == say(many, "kernel")
    assert "the shape decides" in say(info, "why")
    assert info.splits == info.workspace == 0
    bounded = plan_of(CASE, device, max_seqlen_q=1).info(capi.FORWARD, None)
    assert bounded.tile_q < info.tile_q or BACKEND == "sm90"


def test_the_portable_backward_pass_says_why_it_serves(device):
    empty = dict(batch=1, seqlen_q=70, seqlen_kv=0)
    plan = plan_of(CASE, device)
    info = plan.info(capi.BACKWARD, empty)
    assert say(info, "kernel").startswith("sm80")
    assert BACKEND == "sm80" or "no keys" in say(info, "why")


BACKWARD_IN_FP32 = """
from tests.numerics import capi
from tests.numerics.device import CudaDevice
from tests.numerics.test_gpu_calls import CASE, plan_of, say
plan = plan_of(CASE.replace(dtype="f32"), CudaDevice)
print(say(plan.info(capi.BACKWARD, capi.sizes_of(CASE)), "why"))
"""


def test_a_refusal_of_the_better_backend_is_passed_on(device):
    del device
    said = in_a_process(BACKWARD_IN_FP32, FLASHATTN_BACKEND=None)
    assert "(backend sm90 refuses: " in said and "CTAs add to dq" in said


FEW_QUERIES = """
from tests.numerics import capi
from tests.numerics.device import CudaDevice
from tests.numerics.test_gpu_calls import CASE, plan_of, say
case = CASE.replace(heads_q=32, heads_kv=8, dim_qk=128, seqlen_kv=8192, backward=False)
plan = plan_of(case, CudaDevice)
for queries, keys in ((4, 8192), (16, 8192), (64, 8192), (64, 1024), (64, 512), (65, 1024)):
    sizes = dict(batch=64, seqlen_q=queries, seqlen_kv=keys)
    name = say(plan.info(capi.FORWARD, sizes), "kernel")
    print("packed" if name.endswith("_packed_heads") else name.split("_")[0])
"""


def test_hopper_kernels_take_few_queries_beside_many_keys(device):
    if capi.device_properties(device.kind).compute_capability != 90:
        pytest.skip("no Hopper GPU")
    said = in_a_process(FEW_QUERIES, FLASHATTN_BACKEND=None)
    assert said.split() == ["sm80", "packed", "packed", "packed", "sm80", "sm90"]


def test_splits_that_are_reported_are_those_there_are(device):
    case = Case(seqlen_kv=100, dim_qk=64, splits=17)
    assert plan_of(case, device).info(capi.FORWARD, capi.sizes_of(case)).splits == 2


@pytest.mark.parametrize("case, strides", [
    (Case(seqlen_q=1, seqlen_kv=300, heads_q=4, heads_kv=1, dim_qk=64, dtype="bf16",
          strides="bshd"),
     dict(q=dict(stride_batch=3, stride_seq=5), k=dict(stride_batch=1, stride_head=7),
          v=dict(stride_head=9))),
    (CASE.replace(heads_q=1, strides="bshd"), dict(q=dict(stride_head=1), k=dict(stride_batch=5),
                                                   v=dict(stride_head=3, stride_batch=33)))])
def test_strides_that_nobody_steps_by_need_not_fit(device, case, strides):
    plain = run(case.replace(determinism=1), device)
    call = Call(case.replace(determinism=1), device)
    for name, fields in strides.items():
        call.inputs[name].update(fields)
    try:
        result = call.forward()
        if case.backward:
            result = call.backward(result)
    except capi.Refused as refused:
        pytest.fail(str(refused))
    assert result.bits() == plain.bits()


@pytest.mark.skipif(BACKEND == "sm90", reason="the portable kernels have the largest heads")
@pytest.mark.parametrize("fields, says", [
    (dict(dim_qk=584), ["dim_qk = 584 is above 576", "at most 576 elements"]),
    (dict(dim_qk=576, dim_v=520), ["dim_v = 520 is above 512", "at most 512 elements"]),
    (dict(dim_qk=576, dim_v=512, backward=True),
     ["dim_qk = 576 is above 512", "backward pass in FLASHATTN_DTYPE_BF16", "ops = FORWARD"]),
    (dict(dim_qk=264, dtype="f32", backward=True),
     ["dim_qk = 264 is above 256", "backward pass in FLASHATTN_DTYPE_F32", "ops = FORWARD"])])
def test_heads_that_are_too_large_are_refused(device, fields, says):
    with pytest.raises(capi.Refused) as refused:
        plan_of(Case(**{"dtype": "bf16", **fields}), device)
    assert all(part in str(refused.value) for part in says), refused.value


def test_grids_that_are_too_large_are_refused(device):
    """2^32 rows of one query: in 32 bits none."""
    plan = plan_of(Case(heads_q=8), device)
    sizes = dict(batch=1 << 29, seqlen_q=1)
    at = [1 << 40, 1 << 41, 1 << 42, 1 << 43]
    with pytest.raises(capi.Refused) as refused:
        plan.merge(dict(sizes, o=dict(data=capi.pointer(at[0]))),
                   [dict(data=capi.pointer(at[1]))], [at[2]])
    assert (refused.value.status, refused.value.reason) == (capi.UNSUPPORTED, REASON_SIZE)
    with pytest.raises(capi.Refused) as refused:
        plan.dropout_mask(dict(sizes, seqlen_kv=1), at[3])
    assert (refused.value.status, refused.value.reason) == (capi.UNSUPPORTED, REASON_SIZE)
