"""Every operation, captured in a CUDA graph and replayed with what changes from step to step of a
program: contents, lengths, page tables, random numbers. The driver refuses to capture a call that
synchronises, allocates or reads device memory."""
import numpy as np
import pytest

from . import capi, harness, philox
from .case import Case
from .harness import Call
from .merging import merge_parts
from .tolerance import check

BASE = Case(batch=3, seqlen_q=113, seqlen_kv=203, heads_q=4, heads_kv=2, dim_qk=64, dtype="bf16",
            causal=True, determinism=1)
DECODE = BASE.replace(batch=4, seqlen_q=1, seqlen_kv=1023, causal=False, dtype="f16")

# What is captured, and what differs when it is replayed.
STEPS = {
    "contents": (BASE, {}),
    "large": (BASE.replace(batch=8, seqlen_q=1024, seqlen_kv=1024, heads_q=8), {}),
    "lengths": (BASE.replace(lens_q=[113, 100, 113], lens_kv=[203, 203, 150]),
                dict(lens_q=[1, 113, 0], lens_kv=[65, 0, 203])),
    "starts": (BASE.replace(starts_kv=[3, 0, 130], lens_kv=[203, 203, 150]),
               dict(starts_kv=[100, 1, 0], lens_kv=[103, 140, 203])),
    "varlen": (BASE.replace(cu_q=[70, 1, 33], cu_kv=[90, 257, 33]),
               dict(cu_q=[33, 70, 1], cu_kv=[257, 33, 90])),
    "varlen and lengths": (
        BASE.replace(cu_q=[70, 1, 33], cu_kv=[90, 257, 33], lens_q=[70, 1, 33],
                     lens_kv=[90, 257, 33], window=(40, 0)),
        dict(cu_q=[33, 70, 1], cu_kv=[257, 33, 90], lens_q=[20, 70, 1], lens_kv=[1, 33, 0])),
    "random numbers": (BASE.replace(dropout=0.3, rng_device=True),
                       dict(rng=(0x1334567890ABCDEF, 0x0FFDCBA987654321))),
    "scores": (BASE.replace(bias="f32", alibi="bh", sink=True, softcap=10.0), {}),
    "block mask": (BASE.replace(blocks=(16, 64)), {}),
    "pages": (DECODE.replace(lens_kv=[1023, 900, 700, 5], page_size=16),
              dict(lens_kv=[5, 640, 1023, 0])),
    "pages, split": (DECODE.replace(lens_kv=[1023, 900, 700, 5], page_size=16, splits=17),
                     dict(lens_kv=[5, 640, 1023, 0])),
    "pages, varlen": (
        BASE.replace(cu_q=[3, 20, 1], seqlen_kv=300, lens_kv=[300, 257, 290], page_size=64,
                     window=(50, 0)), dict(cu_q=[20, 3, 1], lens_kv=[257, 3, 300])),
    "split": (DECODE.replace(lens_kv=[1023, 900, 700, 5], dim_qk=128, causal=True),
              dict(lens_kv=[0, 1, 1023, 400])),
    "batch invariant": (DECODE.replace(lens_kv=[1023, 900, 700, 5], page_size=3, determinism=2),
                        dict(lens_kv=[5, 640, 1023, 0]))}


def next_call(first, case):
    """A call of the next step: what is on the host stays as captured, the rest is new."""
    call = Call(case, first.device, plan=first.plan)
    call.sizes = first.sizes
    if case.rng_device:
        held = {name: first.inputs[name] for name in ("rng_seed", "rng_offset")}
        call.inputs.update(held)
        call.buffers["rng"].host[:] = [(now - then) % 2 ** 64
                                       for now, then in zip(case.rng, held.values())]
    return call


@pytest.mark.parametrize("step", sorted(STEPS))
def test_forward(device, step):
    case, changes = STEPS[step]
    later = case.replace(seed=case.seed + 1, **changes)
    first = Call(case, device)
    direct = next_call(first, later)
    expected = direct.forward()
    check(later, direct.data, expected)

    staged = next_call(first, later)
    staged.forward_fields()
    first.device = device.captured(lambda: first.adopt(staged))
    assert first.forward().bits() == expected.bits()


@pytest.mark.parametrize("step", [s for s in sorted(STEPS) if not STEPS[s][0].page_size])
def test_backward(device, step):
    case, changes = STEPS[step]
    features = dict(dlse=True) if step == "contents" else {}
    if step == "scores":
        features = dict(dbias="hr", dsink=True)
    case = case.replace(backward=True, **features)
    later = case.replace(seed=case.seed + 1, **changes)
    first = Call(case, device)
    direct = next_call(first, later)
    expected = direct.backward(direct.forward())
    check(later, direct.data, expected)

    staged = next_call(first, later)
    result = staged.forward()
    staged.backward_fields()
    first.forward()
    first.device = device.captured(lambda: first.adopt(staged))
    got = first.backward(result)
    assert got.bits() == expected.bits()


@pytest.mark.parametrize("count", [1, 5])
def test_merge(device, count):
    case = BASE.replace(dtype_o="f32")
    parts = [Call(case.replace(seed=n), device).forward() for n in range(count)]
    direct = merge_parts(case, device, parts, "f32")
    assert merge_parts(case, device.captured(), parts, "f32").bits() == direct.bits()


def test_dropout_mask(device):
    """New numbers by way of rng_device."""
    case = Case(batch=2, seqlen_q=37, seqlen_kv=53, heads_q=3, dim_qk=8, dtype="f16", dropout=0.4,
                rng_device=True)
    direct = harness.dropout_mask(case, device)
    assert np.array_equal(harness.dropout_mask(case, device.captured()), direct)

    call = Call(case, device)
    keep = call.add("keep", "u8", direct.size)
    keep.push()
    inputs = call.rng_fields()
    graph = device.driver.capture(lambda stream: call.plan.dropout_mask(
        dict(call.sizes, **inputs), keep.address, stream))
    keep.owned[:] = True
    for seed, offset in ((5, 6), (2 ** 63, 2 ** 40 + 1)):
        call.buffers["rng"].host[:] = seed, offset
        call.buffers["rng"].push()
        device.driver.synchronize()
        graph.launch()
        device.driver.synchronize()
        got = keep.pull("keep").reshape(direct.shape)
        both = [(inputs["rng_seed"] + seed) % 2 ** 64, (inputs["rng_offset"] + offset) % 2 ** 64]
        for b in range(2):
            for h in range(3):
                want = philox.keep_mask(case.dropout, *both, b * 3 + h, 37, 53)
                assert np.array_equal(got[b, h], want), (seed, offset, b, h)


def test_a_graph_runs_on_any_stream_any_number_of_times(device):
    """The same graph on several streams in turn; the last contents count."""
    case = BASE.replace(splits=3, seqlen_q=3, seqlen_kv=799)
    call = Call(case, device)
    fields = call.forward_fields()
    names = list(fields)
    graph = device.driver.capture(call.stage(capi.FORWARD, fields))
    assert graph.nodes >= 1
    device.driver.synchronize()
    outcomes = set()
    with device.own_stream() as one, device.own_stream() as two:
        for n in range(20):
            stream = (0, one.stream, two.stream)[n % 3]
            graph.launch(stream)
            device.driver.wait_stream(stream)
            outcomes.add(b"".join(x.tobytes() for x in call.collect(names).values()))
    assert len(outcomes) == 1
