"""What must hold between calls: splits, threads, repetition, batches, permuted keys, memory."""
import copy
import dataclasses

import numpy as np
import pytest

from . import capi, harness, philox, support
from .case import Case
from .cases import LISTED, caches
from .data import make_data
from .dtypes import round_to
from .harness import Call, run
from .merging import merge_parts
from .repro import command
from .tolerance import Truth, check

BASE = Case(batch=2, seqlen_q=37, seqlen_kv=203, heads_q=4, heads_kv=2, dim_qk=32)
RICH = [
    BASE.replace(backward=True, causal=True, dtype="bf16"),
    BASE.replace(backward=True, seqlen_q=257, window=(70, 0), softcap=5.0, dropout=0.2, dlse=True),
    BASE.replace(backward=True, bias="f32", dbias="r", sink=True, dsink=True, dtype="f16"),
    BASE.replace(cu_q=[70, 1, 33], cu_kv=[90, 257, 33], backward=True, bias="f32", bias_dims="",
                 dbias="", sink=True, dsink=True, causal=True),
    BASE.replace(batch=12, seqlen_kv=208, heads_q=1, heads_kv=1, dim_qk=64, backward=True,
                 dtype="bf16", bias="bf16", bias_dims="hr", dbias="hr"),
    BASE.replace(seqlen_q=1, lens_kv=[203, 65], page_size=16, dim_qk=64, dim_v=64),
    BASE.replace(seqlen_q=3, seqlen_kv=799, splits=5, heads_q=1, heads_kv=1)]


def part_of_keys(case, data, keys, **changes):
    """The case and data of a slice of the keys."""
    part = dataclasses.replace(data, k=[x[keys] for x in data.k], v=[x[keys] for x in data.v])
    if data.bias is not None:
        part.bias = data.bias[..., keys]
    return case.replace(seqlen_kv=keys.stop - keys.start, **changes), part


@pytest.mark.smoke
@pytest.mark.parametrize("cuts", [[0, 203], [0, 64, 203], [0, 1, 2, 70, 71, 150, 203]])
@pytest.mark.parametrize("features", [
    dict(), dict(bias="f32"), dict(bias="u8", bias_empty=0.5), dict(sink=True, dsink=True),
    dict(dtype="bf16", dtype_o="f32", softcap=8.0), dict(dtype="f16", cu_q=[37, 12])])
def test_split_and_merged_equals_whole(device, cuts, features):
    """Forward, and backward of the parts with the merged o and lse."""
    case = BASE.replace(backward=True, **features)
    data = make_data(case)
    results, parts = [], []
    for n, keys in enumerate(slice(*pair) for pair in zip(cuts, cuts[1:])):
        only_first = dict(sink=case.sink and n == 0, dsink=case.sink and n == 0, dtype_o="f32")
        parts.append(part_of_keys(case, data, keys, **only_first))
        results.append(run(parts[-1][0].replace(backward=False, dsink=False), device, parts[-1][1]))
    merged = merge_parts(case, device, results, "f32")
    truth = Truth(case, data)
    truth.check_forward(merged)

    # o goes back in the type of the parts, which then differs from the whole case's.
    whole = [(e.o, e.lse) for e in truth.exact]
    for part, part_data in parts:
        call = Call(part, device, part_data)
        call.give(merged.o, merged.lse)
        result = call.backward(harness.Result(merged.o, merged.lse))
        own = Truth(part, part_data)
        own.differentiate(whole, whole)
        own.check_backward(result)


@pytest.mark.smoke
@pytest.mark.parametrize("count", [1, 2, 17])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("dim, odd", [(8, False), (136, False), (136, True)])
def test_merge_of_empty_parts(device, count, dtype, dim, odd):
    """Parts with lse = -inf count nothing, whatever their o. odd: arrays lie as the element
    allows."""
    case = Case(batch=2, seqlen_q=5, heads_q=3, dim_qk=dim, dtype=dtype)
    if odd:
        case.strides, device = "padded", copy.copy(device)
        device.alignment = device.padding = 1
    rng = np.random.default_rng(0)
    parts = []
    for n in range(count):
        lse = [rng.standard_normal((3, 5)).astype(np.float32) for _ in range(2)]
        o = [round_to(rng.standard_normal((5, 3, dim)).astype(np.float32), dtype)
             for _ in range(2)]
        for x in lse:
            x[:, n % 5] = -np.inf
            x[:, 3] = -np.inf
        for x in o:
            x[3] = 0
        parts.append(harness.Result(o, lse))
    for part_dtype in {"f32", dtype}:
        check_merge(parts, merge_parts(case, device, parts, part_dtype), dtype)


def check_merge(parts, merged, dtype):
    for b in range(2):
        lse = np.stack([p.lse[b] for p in parts]).astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            total = np.log(np.exp(lse).sum(0))
            weights = np.where(np.isneginf(total), 0, np.exp(lse - total))
        o = sum(w.T[:, :, None] * p.o[b] for w, p in zip(weights, parts))
        np.testing.assert_allclose(merged.lse[b], total, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(merged.o[b], o, rtol=1e-5 if dtype == "f32" else 2 ** -7,
                                   atol=1e-6 if dtype == "f32" else 2 ** -9)


@pytest.mark.smoke
@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize("case", [*RICH, *caches(), Case(  # more threads: fewer heads a Q block
    batch=2, seqlen_q=150, seqlen_kv=1100, heads_q=4, heads_kv=1, dim_qk=16, causal=True,
    dropout=0.4, dtype="f16")])
def test_threads_and_repetition_change_no_bit(device, case, infinite):
    data = make_data(case)
    if infinite:
        data.v[0][3, -1] = np.inf
    first = run(case.replace(threads=1, determinism=1), device, data).bits()
    for threads in (1, 2, 3, 8) if device.name == "cpu" else (1,):  # a GPU's are its own
        again = run(case.replace(threads=threads, determinism=1), device, data).bits()
        assert again == first, "%d threads: %s" % (threads, command(case, device))


@pytest.mark.parametrize("case", RICH[:2])
def test_one_plan_many_calls(device, case):
    """Nothing is left behind in a plan."""
    case = case.replace(determinism=1)  # RUN_TO_RUN: else dq is added up as blocks come
    plan = capi.Plan(capi.descriptor(case, device))
    bits = {seed: run(case.replace(seed=seed), device, plan=plan).bits() for seed in (1, 2)}
    for seed in (2, 1, 2):
        assert run(case.replace(seed=seed), device, plan=plan).bits() == bits[seed]


def alone(case, data, b):
    """Sequence b as a batch of its own, same capacities where the batch is dense."""
    changes = dict(batch=1)
    for name in ("cu_q", "cu_kv", "lens_q", "lens_kv", "starts_kv"):
        if getattr(case, name) is not None:
            changes[name] = [getattr(case, name)[b]]
    part = dataclasses.replace(data)
    for name in ("q", "k", "v", "dout", "dlse"):
        setattr(part, name, [getattr(data, name)[b]])
    return case.replace(**changes), part


@pytest.mark.smoke
@pytest.mark.parametrize("case", [
    Case(batch=3, seqlen_q=33, seqlen_kv=70, heads_q=2, dim_qk=16, causal=True, backward=True),
    Case(cu_q=[65, 3, 130], cu_kv=[65, 300, 20], heads_q=4, heads_kv=2, dim_qk=32, dtype="bf16",
         backward=True),
    Case(batch=4, seqlen_q=1, seqlen_kv=1023, lens_kv=[1023, 5, 0, 300], heads_q=4, heads_kv=1,
         dim_qk=64, page_size=16, dtype="f16"),
    Case(cu_q=[1, 2, 1], cu_kv=[700, 3, 64], heads_q=2, dim_qk=64),
    Case(batch=3, seqlen_q=33, seqlen_kv=200, starts_kv=[0, 70, 199], heads_q=2, dim_qk=16,
         causal=True, backward=True),
    # Prompts beside decoding, whose KV heads are read together on a CPU.
    Case(cu_q=[70, 1, 1, 3], cu_kv=[90, 300, 1500, 2], heads_q=8, heads_kv=4, dim_qk=32,
         causal=True, dtype="bf16"),
    # Few parts, beside a sequence of many: what merges these must not change what merges those.
    Case(cu_q=[1, 1], cu_kv=[3500, 9000], heads_q=2, dim_qk=64, dtype="bf16", dtype_o="f32")])
def test_a_sequence_does_not_depend_on_its_batch(device, case):
    check_each_alone(device, case, make_data(case))


@pytest.mark.smoke
@pytest.mark.parametrize("factors, case", [
    # Near 0 a softcap is computed otherwise, for rows together.
    ((0.2, 4.0), Case(cu_q=[1, 16], cu_kv=[300, 300], heads_q=8, heads_kv=1, dim_qk=64,
                      dtype="bf16", dtype_o="f32", softcap=5.0)),
    # A block's largest number decides how many digits the others keep.
    ((1.0, 3e4), Case(cu_q=[1, 16], cu_kv=[300, 300], heads_q=8, heads_kv=1, dim_qk=64))])
def test_a_head_does_not_depend_on_its_batch(device, factors, case):
    """Where another head's row is much larger: beside longer sequences others share a tile."""
    data = make_data(case)
    for q in data.q:
        q[:, :4] = round_to(q[:, :4] * np.float32(factors[0]), case.dtype)
        q[:, 4:] = round_to(q[:, 4:] * np.float32(factors[1]), case.dtype)
    check_each_alone(device, case, data)


def check_each_alone(device, case, data):
    case = case.replace(determinism=2)
    whole = run(case, device, data)
    for b in range(case.batch):
        single = run(*[(c, device, d) for c, d in [alone(case, data, b)]][0])
        for name in ("o", "lse", "dq", "dk", "dv"):
            if getattr(whole, name) is not None:
                assert getattr(whole, name)[b].tobytes() == getattr(single, name)[0].tobytes(), \
                    "%s of sequence %d: %s" % (name, b, command(case, device))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_permuted_keys_change_rounding_only(device, dtype):
    case = BASE.replace(dtype=dtype, backward=True)
    data = make_data(case)
    order = np.random.default_rng(5).permutation(case.seqlen_kv)
    shuffled = dataclasses.replace(data, k=[x[order] for x in data.k],
                                   v=[x[order] for x in data.v])
    result = run(case, device, shuffled)
    for name in ("dk", "dv"):
        setattr(result, name, [x[np.argsort(order)] for x in getattr(result, name)])
    check(case, data, result)


@pytest.mark.smoke
@pytest.mark.parametrize("p", [1 / 65536, 0.1, 0.5, 0.999])
def test_dropout_mask_is_the_headers_philox(device, p):
    case = Case(batch=2, seqlen_q=37, seqlen_kv=53, heads_q=3, dim_qk=8, dropout=p)
    for on_device in (False, True):
        case.rng_device = on_device
        got = harness.dropout_mask(case, device)
        for b in range(2):
            for h in range(3):
                want = philox.keep_mask(p, *case.rng, b * 3 + h, 37, 53)
                assert np.array_equal(got[b, h], want), (b, h, command(case, device))


@pytest.mark.smoke
def test_forward_drops_what_the_mask_says(device):
    """q = 0 makes every weight 1 / keys, v = identity shows each of them."""
    case = Case(seqlen_q=40, seqlen_kv=64, heads_q=2, dim_qk=8, dim_v=64, dropout=0.25)
    data = make_data(case)
    data.q = [np.zeros_like(data.q[0])]
    data.v = [np.repeat(np.eye(64, dtype=np.float32)[:, None], 2, 1)]
    shown = run(case, device, data).o[0].swapaxes(0, 1) != 0
    assert np.array_equal(shown, harness.dropout_mask(case, device)[0] != 0)


@pytest.mark.smoke
@pytest.mark.parametrize("shift", [1, 6])
@pytest.mark.parametrize("case", [
    Case(seqlen_q=1, seqlen_kv=799, heads_q=4, dim_qk=64, splits=5),
    Case(seqlen_q=200, seqlen_kv=300, heads_q=2, dim_qk=64, dtype="bf16"),
    Case(seqlen_q=113, seqlen_kv=203, dim_qk=64, dtype="f16", backward=True, determinism=1)])
def test_workspace_may_lie_anywhere(device, case, shift):
    direct = run(case, device)
    call = Call(case, device)
    call.workspace_shift = shift
    moved = call.forward()
    if case.backward:
        moved = call.backward(moved)
    assert moved.bits() == direct.bits()


@pytest.mark.smoke
@pytest.mark.parametrize("case", [
    Case(backward=True, dim_qk=64, heads_q=4), Case(backward=True, dim_qk=64, splits=17),
    Case(backward=True, dim_qk=32, heads_q=4, heads_kv=2, bias="f32", dbias="", sink=True,
         dsink=True, determinism=2, dtype="bf16"),
    Case(backward=True, dim_qk=128, heads_q=64, heads_kv=1, dtype="bf16")])
@pytest.mark.parametrize("op", [capi.FORWARD, capi.BACKWARD])
def test_workspace_is_linear_and_bounded(device, case, op):
    sizes = [3072, 6144, 12288, 24576]  # of whole tiles
    fields = capi.descriptor(case, device)
    plan = capi.Plan(fields)

    def size(batch, rows, keys, plan=plan):
        return plan.workspace_size(op, dict(batch=batch, seqlen_q=rows, seqlen_kv=keys))

    got = [size(2, n, n) for n in sizes]
    steps = np.diff(got)
    assert (steps >= 0).all(), got
    # Doubling the length doubles what is added, up to whole tiles.
    assert (steps[1:] <= 2.1 * steps[:-1] + 65536).all(), got
    odd = [size(2, n, n + 3) for n in range(1, 400, 7)]
    assert odd == sorted(odd), "smaller for a larger shape"
    bounded = capi.Plan(dict(fields, max_batch=3, max_seqlen_q=1024, max_seqlen_kv=1500))
    bound = bounded.workspace_size(op, None)
    for batch, rows, keys in [(3, 1024, 1500), (1, 1, 1), (3, 1, 1500), (2, 7, 1100), (1, 1024, 3),
                              (3, 16, 1500), (3, 65, 1000), (1, 1, 1500)]:
        assert size(batch, rows, keys, bounded) <= bound, (batch, rows, keys)
    try:
        unbounded = plan.workspace_size(op, None)
    except capi.Refused:
        unbounded = None
    assert unbounded is None if any(got) else unbounded in (None, 0)


@pytest.mark.parametrize("changes, rows", [
    (dict(), 16), (dict(seqlen_q=4), 16), (dict(seqlen_q=5), 32), (dict(heads_q=34), 32),
    (dict(softcap=5.0), 64), (dict(determinism=2), 64)])
def test_few_rows_have_a_kernel_of_their_own(device, changes, rows):
    """What is listed for it is computed by it, and what it does not compute is not."""
    if device.name == "cpu" or support.backend(device.kind).startswith("sm90"):
        pytest.skip("a portable GPU kernel")
    for case in LISTED["few_rows"][:2]:
        case = case.replace(**{**changes, "sink": False})
        plan = capi.Plan(capi.descriptor(case, device))
        info = plan.info(capi.FORWARD, capi.sizes_of(case))
        assert info.tile_q == rows, capi.ffi.string(info.kernel)


@pytest.mark.parametrize("queries, keys, reason", [
    (3, 5000, b"too few queries"), (100, 100, b"short"), (100, 5000, b"too few Hopper tiles"),
    (3, 0, b"no keys")])
def test_what_is_not_hoppers_says_why(device, queries, keys, reason):
    if support.backend(device.kind) != "all on 9.0":
        pytest.skip("a test of the Hopper backend, which may choose")
    softcap = 30.0 if queries > 64 and keys > 1000 else 0.0  # without it heads are packed
    case = Case(dtype="bf16", seqlen_q=queries, seqlen_kv=keys, dim_qk=128, softcap=softcap)
    plan = capi.Plan(capi.descriptor(case, device))
    info = plan.info(capi.FORWARD, capi.sizes_of(case))
    assert capi.ffi.string(info.backend) == b"sm90"
    assert capi.ffi.string(info.kernel).startswith(b"sm80")
    assert reason in capi.ffi.string(info.why)


def backward_info(device, case):
    plan = capi.Plan(capi.descriptor(case, device))
    return plan.info(capi.BACKWARD, capi.sizes_of(case))


@pytest.mark.parametrize("case", LISTED["many_queries"])
def test_many_queries_have_a_kernel_of_their_own(device, case):
    """What is listed for it is computed by it, and a few heads of the same are not."""
    if not support.has_hopper(device):
        pytest.skip("a kernel of Hopper")
    assert capi.ffi.string(backward_info(device, case).backend) == b"sm90"
    few = case.replace(heads_q=2, heads_kv=1)
    assert (backward_info(device, case).tile_q, backward_info(device, few).tile_q) == (80, 64)


@pytest.mark.parametrize("case", LISTED["many_heads"])
def test_many_heads_start_early(device, case):
    if not support.has_hopper(device) or multiprocessors(device) > 4:  # GPUs: test_gpu_early
        pytest.skip("a kernel of Hopper, where few blocks run at once")
    plan = capi.Plan(capi.descriptor(case, device))  # which owns the string
    assert b"started early" in capi.ffi.string(plan.info(capi.BACKWARD, capi.sizes_of(case)).why)


def multiprocessors(device):
    found = capi.ffi.new("flashattn_device_properties *",
                         {"struct_size": capi.ffi.sizeof("flashattn_device_properties")})
    capi.check(capi.library().flashattn_device_info(device.kind, 0, found))
    return found.multiprocessors


@pytest.mark.parametrize("rows", [4160, 4100])
def test_full_tiles_of_keys_after_one_with_a_tail(device, rows):
    """Nothing of the tail's mask is left to a tile of keys that all queries see, of each head 4160
    in whole tiles of Hopper's kernel for many. RUN_TO_RUN begins with the tail; who has had that
    takes another tile."""
    case = Case(dtype="bf16", seqlen_q=rows, seqlen_kv=128 * multiprocessors(device) + 1,
                heads_q=2, heads_kv=1, dim_qk=128, backward=True, determinism=1)
    assert not support.has_hopper(device) or backward_info(device, case).tile_q == 80
    data = make_data(case)
    check(case, data, run(case, device, data))


@pytest.mark.parametrize("value", [30.0, 1e3, np.inf])
@pytest.mark.parametrize("features", [dict(), dict(alibi="h")])
def test_rows_past_the_last_query_change_no_bit(device, features, value):
    case = Case(dtype="bf16", seqlen_q=210, lens_q=[196], seqlen_kv=900, heads_q=2, dim_qk=64,
                causal=True, **features)
    expected = run(case, device).bits("o", "lse")
    call = Call(case, device)
    q = call.buffers["q"].host
    q[np.isnan(q.astype(np.float32))] = value
    assert call.forward().bits("o", "lse") == expected, command(case, device)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("queries, keys, features", [
    (1800, 300, dict(dim_qk=64)), (1000, 200, dict(dim_qk=128, sink=True)),
    (1100, 129, dict(dim_qk=96, softcap=5.0)), (1000, 257, dict(dim_qk=128, dropout=0.2)),
    (1000, 130, dict(dim_qk=192)),
    (1800, 300, dict(dim_qk=64, batch=3, heads_q=1, heads_kv=1, lens_q=[1800, 70, 0])),
    (8200, 129, dict(dim_qk=128, heads_q=1, heads_kv=1))])
def test_tiles_of_keys_are_shared(device, queries, keys, features, seed):
    """By several blocks of a Hopper kernel, where tiles are few and queries many: each a part of
    the queries. What they have is added up in a fixed order: bits of dK and dV repeat."""
    case = Case(dtype="bf16", seqlen_q=queries, seqlen_kv=keys, backward=True,
                **{"heads_q": 3, "heads_kv": 3, **features}, seed=seed)
    if queries > 8192 and support.has_hopper(device):
        assert backward_info(device, case).tile_q == 80
    data = make_data(case)
    first = run(case, device, data)
    check(case, data, first)
    again = run(case, device, data)
    assert first.bits("dk", "dv") == again.bits("dk", "dv")


@pytest.mark.parametrize("queries, keys, features", [
    (300, 700, {}), (129, 900, dict(heads_q=4, heads_kv=2)), (150, 300, dict(dropout=0.2)),
    (200, 400, dict(batch=3, lens_q=[200, 1, 70], lens_kv=[400, 130, 257]))])
def test_tiles_of_keys_begin_with_different_queries(device, queries, keys, features):
    """Heads of 256 on Hopper: tile n of the keys with tile n of the queries, round."""
    case = Case(dtype="bf16", seqlen_q=queries, seqlen_kv=keys, dim_qk=256, backward=True,
                **{"heads_q": 2, "heads_kv": 2, **features})
    data = make_data(case)
    first = run(case, device, data)
    check(case, data, first)
    again = run(case, device, data)
    assert first.bits("dk", "dv") == again.bits("dk", "dv")


@pytest.mark.smoke
def test_nothing_stays_in_the_workspace(device):
    """A call packs its own keys, though as many of another call lie there."""
    case = Case(seqlen_q=40, seqlen_kv=40, dim_qk=16, threads=1)
    data = make_data(case.replace(seed=1))
    call = Call(case, device)
    launch = call.stage(capi.FORWARD, call.forward_fields())
    device.launch(launch)
    for name in "qkv":
        call.buffers[name].host[call.places[name].index[0]] = getattr(data, name)[0]
        call.buffers[name].push()
    device.launch(launch)
    found = call.take("o", call.collect(["o", "lse"])["o"])
    assert found[0].tobytes() == run(case, device, data).o[0].tobytes()


@pytest.mark.parametrize("length, heads, features", [
    (256, 4, dict(dim_qk=64)), (512, 1, dict(dim_qk=128, causal=True)),
    (512, 1, dict(dim_qk=104, dropout=0.1)),
    (512, 1, dict(dim_qk=64, cu_q=[300, 1, 257], cu_kv=[511, 0, 300], determinism=1))])
def test_dq_is_converted_on_the_way(device, length, heads, features):
    """By Hopper's kernels for heads up to 128, where blocks have many tiles: the workspace says of
    which, all bits of a word set. The kernel after converts the others. heads: of keys, a
    multiprocessor; enough that some of dQ is complete well before the end."""
    if not support.has_hopper(device):
        pytest.skip("a kernel of Hopper")
    case = Case(dtype="bf16", seqlen_q=length, seqlen_kv=length, backward=True, **features)
    heads *= multiprocessors(device)
    case = case.replace(heads_q=2 * heads, heads_kv=heads)
    data = make_data(case)
    call = Call(case, device, data)
    assert capi.ffi.string(call.plan.info(capi.BACKWARD, call.sizes).backend) == b"sm90"
    result = call.forward()
    fields, names = call.backward_fields()
    launch, workspace = call.stage(capi.BACKWARD, fields), call.buffers["workspace"]
    workspace.host[:] = 0
    workspace.push()
    device.launch(launch)
    out = call.collect(names)
    for name in names:
        setattr(result, name, call.take(name, out[name]))
    check(case, data, result)
    assert workspace.pull("workspace").tobytes().count(b"\xff" * 4) > 0
