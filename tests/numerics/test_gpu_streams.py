"""One plan on several streams and threads at once; repeats; what a call must not do to its caller:
wait, allocate, run on another device."""
import threading

import numpy as np
import pytest

from . import capi, harness, philox
from .buffers import Buffer
from .case import Case
from .device import open_device
from .harness import Call, run
from .repro import command

BASE = Case(batch=4, seqlen_q=1023, seqlen_kv=1023, heads_q=8, heads_kv=2, dim_qk=128, dtype="bf16",
            causal=True, determinism=1)
CASES = {
    "causal": BASE,
    "wide": BASE.replace(dim_qk=256, batch=2, dtype="f16"),
    "features": BASE.replace(dim_qk=64, window=(200, 3), softcap=5.0, sink=True, causal=False),
    "dropout": BASE.replace(dim_qk=64, dropout=0.2, seqlen_q=257, heads_q=2),
    "varlen": BASE.replace(cu_q=[700, 1, 0, 333], cu_kv=[90, 1257, 33, 333], dim_qk=80),
    "decode": BASE.replace(batch=16, seqlen_q=1, seqlen_kv=4001, heads_q=16,
                           lens_kv=[4001 - 250 * n for n in range(16)], page_size=16),
    "split": BASE.replace(batch=1, seqlen_q=3, seqlen_kv=8000, splits=9)}
BACKWARD = [name for name in CASES if name not in ("decode", "split")]


def jobs(case, device, plan, backward, workspace=None):
    """What enqueues a call, and what reads the bytes of its results."""
    call = Call(case, device, plan=plan)
    if backward:
        call.forward()
        fields, names = call.backward_fields()
        enqueue = call.stage(capi.BACKWARD, fields, workspace)
    else:
        fields = call.forward_fields()
        names = list(fields)
        enqueue = call.stage(capi.FORWARD, fields, workspace)
    return enqueue, lambda: b"".join(call.collect(names)[name].tobytes() for name in names)


def listed(backward):
    return [(name, True) for name in BACKWARD] if backward else [(name, False) for name in CASES]


def check_repeats(device, case, enqueue, result, first, rounds):
    """Each round gives the first's bits, beside another stream's copies, which shift the order of
    everything."""
    driver, size = device.driver, 64 << 20
    noise = driver.allocate(2 * size)
    try:
        with device.own_stream() as other:
            for n in range(rounds):
                for _ in range(n % 4):
                    driver.copy(noise + size, noise, size, other.stream)
                enqueue(0)
                driver.wait_stream(0)
                assert result() == first, "repeat %d: %s" % (n, command(case, device))
    finally:
        driver.free(noise)


@pytest.mark.parametrize("name, backward", listed(False) + listed(True))
def test_a_hundred_repeats_give_the_same_bits(device, name, backward):
    case = CASES[name].replace(backward=backward)
    plan = capi.Plan(capi.descriptor(case, device))
    enqueue, result = jobs(case, device, plan, backward)
    enqueue(0)
    device.driver.wait_stream(0)
    check_repeats(device, case, enqueue, result, result(), 100)


@pytest.mark.parametrize("name, backward", listed(False) + listed(True))
def test_jobs_that_share_a_workspace(device, name, backward):
    """One behind the other without a wait. Who reads before it is written there finds what the
    other job left, not what the same call wrote before."""
    case = CASES[name].replace(backward=backward)
    plan = capi.Plan(capi.descriptor(case, device))
    size = plan.workspace_size(capi.BACKWARD if backward else capi.FORWARD, capi.sizes_of(case))
    workspace = Buffer(device, "u8", size)
    several = [jobs(case.replace(seed=n), device, plan, backward, workspace) for n in range(2)]
    expected = []
    for enqueue, result in several:
        enqueue(0)
        device.driver.wait_stream(0)
        expected.append(result())

    def enqueue_all(stream):
        for enqueue, _ in several:
            enqueue(stream)

    check_repeats(device, case, enqueue_all, lambda: [result() for _, result in several], expected,
                  50)


@pytest.mark.parametrize("name, backward", listed(False) + listed(True))
def test_threads_on_streams_share_a_plan(device, name, backward):
    case = CASES[name].replace(backward=backward)
    plan = capi.Plan(capi.descriptor(case, device))
    several = [jobs(case.replace(seed=n), device, plan, backward) for n in range(4)]
    expected = []
    for enqueue, result in several:
        enqueue(0)
        device.driver.synchronize()
        expected.append(result())
    problems = []

    def work(n):
        try:
            with device.own_stream() as own:
                for _ in range(50):
                    several[n][0](own.stream)
                device.driver.wait_stream(own.stream)
        except Exception as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    for n, (_, result) in enumerate(several):
        assert result() == expected[n], "thread %d: %s" % (n, command(case, device))


@pytest.mark.parametrize("stream", ["own", 1, 2])
def test_other_streams(device, stream):
    """A stream that does not wait for the default one; the handles of the legacy and the thread's
    default stream."""
    case = BASE.replace(seqlen_q=70, backward=False)
    expected = run(case, device).bits()
    if stream == "own":
        with device.own_stream() as own:
            assert run(case, own).bits() == expected
    else:
        assert run(case, device.on_stream(stream)).bits() == expected


def busy(driver, address, size, stream):
    """Work of some 20 ms."""
    for _ in range(40):
        driver.fill(address, 0, size, stream)


@pytest.mark.parametrize("name, backward", listed(False) + listed(True))
def test_a_call_does_not_wait(device, name, backward):
    """It returns while what stands before it on the stream is still at work."""
    case = CASES[name].replace(backward=backward)
    driver, size = device.driver, 2 << 30
    enqueue, _ = jobs(case, device, capi.Plan(capi.descriptor(case, device)), backward)
    memory, event = driver.allocate(size), driver.new_event()
    enqueue(0)
    driver.synchronize()
    free = driver.memory
    busy(driver, memory, size, 0)
    driver.record(event)
    enqueue(0)
    assert not driver.reached(event), "the call returned after the work before it was done"
    driver.synchronize()
    assert driver.memory == free, "the call left memory allocated"
    driver.free(memory)


def test_a_plan_of_another_device_is_refused(device):
    driver, fields = device.driver, capi.descriptor(BASE, device)
    with pytest.raises(capi.Refused, match="device") as caught:
        capi.Plan(dict(fields, device_index=driver.count))
    assert caught.value.field == "device_index"
    if driver.count < 2:
        pytest.skip("a plan that meets another current device needs two GPUs; one is here")
    plan = capi.Plan(dict(fields, device_index=1))
    driver.enter()
    with pytest.raises(capi.Refused, match="cudaSetDevice") as caught:
        Call(BASE, device, plan=plan).forward()
    assert caught.value.field == "device_index"


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 37, 53), (1, 2, 1000, 777)])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_mask_is_the_cpus(device, shape, p):
    """The same bytes from the GPU, from the library's CPU backend, and from the header's text."""
    batch, heads, rows, keys = shape
    case = Case(batch=batch, seqlen_q=rows, seqlen_kv=keys, heads_q=heads, dim_qk=8, dtype="f16",
                dropout=p)
    got = harness.dropout_mask(case, device)
    assert np.array_equal(got, harness.dropout_mask(case, open_device("cpu")))
    last = philox.keep_mask(p, *case.rng, batch * heads - 1, rows, keys)
    assert np.array_equal(got[-1, -1], last)
