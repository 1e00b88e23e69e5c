"""E4M3 on a GPU, where P is rounded to E4M3, too: the kernel's own error, against float64 of the
quantised inputs, under data that hide nothing."""
import dataclasses
import os

import numpy as np
import pytest

from . import capi, reference
from .case import Case
from .data import make_data
from .dtypes import round_to
from .harness import Call, run

# Relative Frobenius norm of the error of o: P's rounding to E4M3 on data of mean 0.
NORMAL = 0.036
BASE = Case(batch=2, seqlen_q=203, seqlen_kv=203, heads_q=4, heads_kv=2, dim_qk=64, dtype="f8",
            dtype_o="bf16", descales="bh")
FEATURES = [
    dict(causal=True), dict(window=(70, 3)), dict(window=(100, 0), causal=True), dict(chunk=50),
    dict(sink=True), dict(top_left=True, causal=True, seqlen_q=77),
    dict(cu_q=[70, 1, 333], cu_kv=[90, 257, 333], batch=3, causal=True),
    dict(lens_q=[3, 203], lens_kv=[203, 0]), dict(starts_kv=[0, 77]), dict(descales=None),
    dict(page_size=16, causal=True, lens_kv=[203, 130]), dict(page_size=64, lens_kv=[203, 130]),
    dict(seqlen_q=1), dict(seqlen_q=3, seqlen_kv=900, causal=True), dict(dtype_o="f32"),
    dict(dtype_o="f16")]
# By the kernels whose score modifications are chosen at run time.
MODIFIED = [
    dict(blocks=(16, 64)), dict(softcap=5.0), dict(alibi="bh"), dict(bias="f32"),
    dict(bias="u8", bias_empty=0.2), dict(dropout=0.3), dict(scale=-0.2),
    dict(descales="bht", descale_block=1), dict(descales="bht", descale_block=64, causal=True),
    dict(descales="bt", descale_block=128, softcap=20.0)]


@pytest.fixture(autouse=True)
def _only_hopper(device):
    if device.name != "cuda":
        pytest.skip("the CPU keeps P in fp32: test_eightbit.py")
    if capi.device_properties(device.kind).compute_capability // 10 != 9 or \
            not "sm90".startswith(os.environ.get("FLASHATTN_BACKEND", "sm90")):
        pytest.skip("kernels for E4M3 are Hopper's")


def relative_error(case, device, data=None):
    data = data or make_data(case)
    result = run(case, device, data)
    exact = [reference.forward(case, data, b) for b in range(case.batch)]
    for lse, f in zip(result.lse, exact):
        none = np.isneginf(f.lse)
        assert (np.isneginf(lse) == none).all()
        error = np.abs(np.where(none, 0, lse) - np.where(none, 0, f.lse))
        # Q K^T is summed in some 14 bits, too.
        assert (error <= 1e-4 + 2.0 ** -9 * np.max(f.score_size)).all(), np.max(error)
    out = np.concatenate([np.asarray(x, np.float64).ravel() for x in result.o])
    true = np.concatenate([f.o.swapaxes(0, 1).ravel() for f in exact])
    assert np.isfinite(out).all()
    return np.sqrt(((out - true) ** 2).sum() / max((true ** 2).sum(), 1e-30))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("change", range(len(FEATURES)))
def test_features(device, dim, change):
    assert relative_error(BASE.replace(dim_qk=dim, **FEATURES[change]), device) < NORMAL


# Besides D64 each modification with heads of other dims. A V wider than 128 is computed in parts.
OTHER_DIMS = [(128, 128), (256, 256), (192, 128), (96, 224)]


@pytest.mark.parametrize("change,dims", [
    (n, dims) for n in range(len(MODIFIED)) for dims in ((64, 64), OTHER_DIMS[n % 4])])
def test_modified(device, change, dims):
    case = BASE.replace(dim_qk=dims[0], dim_v=dims[1], **MODIFIED[change])
    assert relative_error(case, device) < NORMAL


# By kernels of their own.
COMPILED = [dict(descales="bht", descale_block=64), dict(descales="bht", descale_block=128),
            dict(descales="bt", descale_block=192), dict(softcap=30.0), dict(softcap=2.0),
            dict(alibi="bh")]
MASKS = [*FEATURES, dict(seqlen_q=700, seqlen_kv=700, batch=1),
         dict(seqlen_q=300, seqlen_kv=1100, batch=1, causal=True, heads_q=3, heads_kv=3)]


@pytest.mark.parametrize("compiled", range(len(COMPILED)))
@pytest.mark.parametrize("change", range(len(MASKS)))
def test_compiled(device, compiled, change):
    dim = (64, 128, 256, 96, 192)[(change + compiled) % 5]
    case = BASE.replace(dim_qk=dim, dim_v=dim, **{**MASKS[change], **COMPILED[compiled]})
    plan = capi.Plan(capi.descriptor(case, device))
    why = capi.ffi.string(plan.info(capi.FORWARD, capi.sizes_of(case)).kernel)
    assert b"runtime" not in why, why
    assert relative_error(case, device) < NORMAL


def check_blocks(case, device, descales):
    """With these descales of k and v, by blocks."""
    data = make_data(case)
    for name, values in descales.items():
        data.descales[name][...] = np.asarray(values, np.float32)
    assert relative_error(case, device, data) < NORMAL


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_descales_of_blocks_differ(device, dim, causal):
    """Scores that grow from tile to tile, by much; values of which some weigh nothing, or all."""
    case = BASE.replace(batch=1, seqlen_q=500, seqlen_kv=500, dim_qk=dim, dim_v=dim, causal=causal,
                        descales="t", descale_block=64)
    check_blocks(case, device, {"k": [64, 32, 16, 8, 4, 1, 0, 1], "v": np.ones(8)})
    check_blocks(case, device, {"v": [1, 1e-3, 0, 1, 1e-9, 1e9, 1, 0]})
    check_blocks(case, device, {"k": np.zeros(8), "v": [2, 0, 0, 1, 0, 3, 0, 1e-4]})
    zero = make_data(case)
    zero.descales["v"][...] = 0
    assert all((np.asarray(o) == 0).all() for o in run(case, device, zero).o)


@pytest.mark.parametrize("change", [*COMPILED[:1], *COMPILED[3:]])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_large_scores(device, change, dim):
    """Tiles that are computed again."""
    case = BASE.replace(batch=1, seqlen_q=300, seqlen_kv=300, dim_qk=dim, dim_v=dim,
                        amplitude=50.0, **{"descales": None, **change})
    assert relative_error(case, device) < NORMAL


@pytest.mark.parametrize("slope", [0, 2.0 ** -8, 0.5, 2.5, 20.0, -0.5])
@pytest.mark.parametrize("mask", [dict(), dict(causal=True), dict(window=(40, 300)),
                                  dict(window=(300, 0)), dict(seqlen_q=900)])
def test_slopes(device, slope, mask):
    """Keys on both sides of the queries, or far from them."""
    case = BASE.replace(**{**dict(batch=1, seqlen_q=400, seqlen_kv=700, dim_qk=128, dim_v=128,
                                  alibi="h"), **mask})
    data = make_data(case)
    data.slopes[...] = slope
    assert relative_error(case, device, data) < NORMAL


@pytest.mark.parametrize("block", [64, 128])
def test_wide_outputs_of_parts(device, block):
    """Columns of both parts have the bits that each has alone, and count in amax_o."""
    case = BASE.replace(dim_qk=256, dim_v=240, descales="bht", descale_block=block, amax_o="bh",
                        strides="bhsd", lens_kv=[203, 130], dtype_o="f32")
    data = make_data(case)
    whole = run(case, device, data)
    sizes = np.array([np.abs(o).max((0, 2), initial=0) for o in whole.o])
    np.testing.assert_array_equal(whole.amax_o, sizes)
    assert relative_error(case, device, data) < NORMAL
    for columns in (slice(0, 128), slice(128, 240)):
        part = dataclasses.replace(data, v=[v[..., columns] for v in data.v])
        alone = run(case.replace(dim_v=columns.stop - columns.start), device, part)
        for o, one in zip(whole.o, alone.o):
            np.testing.assert_array_equal(o[..., columns], one)


@pytest.mark.parametrize("dim,change", [(64, dict(dtype_o="f16")), (128, dict(sink=True)),
                                        (256, dict(dtype_o="f32"))])
def test_split_tiles(device, dim, change):
    """Of a short last wave, by stream-K: as test_gpu_stream_k has them in 16 bits."""
    heads = capi.device_properties(device.kind).multiprocessors + 1
    case = BASE.replace(batch=1, seqlen_q=100, seqlen_kv=3300, dim_qk=dim, dim_v=dim,
                        heads_q=heads, heads_kv=heads, **change)
    plan = capi.Plan(capi.descriptor(case, device))
    why = capi.ffi.string(plan.info(capi.FORWARD, capi.sizes_of(case)).why)
    assert b"are split along their keys" in why
    assert relative_error(case, device) <= NORMAL
    assert run(case, device).bits() == run(case, device).bits()


@pytest.mark.parametrize("change", [dict(causal=True), dict(lens_kv=[131], page_size=16)])
@pytest.mark.parametrize("dim,heads", [(64, 25), (128, 25), (256, 17)])
def test_two_ways_to_transpose_v(device, dim, heads, change):
    """Before the kernel, where many tiles of queries read each of V, or in it, where the workspace
    has no room for V^T: the same bits."""
    case = BASE.replace(batch=1, seqlen_q=50, seqlen_kv=300, heads_q=heads, heads_kv=1, dim_qk=dim,
                        dim_v=dim, **change)
    fields = dict(capi.descriptor(case, device), max_batch=1, max_seqlen_q=50, max_seqlen_kv=300)
    before = capi.Plan(fields)
    sizes = capi.sizes_of(case)
    limit = before.workspace_size(capi.FORWARD, sizes) - 1
    within = capi.Plan(dict(fields, workspace_limit=limit))
    for plan, transposes in (before, False), (within, True):
        why = capi.ffi.string(plan.info(capi.FORWARD, sizes).why)
        assert (b"that transpose V" in why) == transposes, why
    assert within.workspace_size(capi.FORWARD, sizes) <= limit
    data = make_data(case)
    assert run(case, device, data, before).bits() == run(case, device, data, within).bits()
    assert relative_error(case, device, data) < NORMAL


def test_descale_of_0(device):
    """Every visible key weighs the same; hidden ones nothing."""
    case = BASE.replace(causal=True)
    data = make_data(case)
    data.descales["k"][...] = 0
    assert relative_error(case, device, data) < NORMAL


@pytest.mark.parametrize("dims", [(16, 16), (32, 64), (96, 96), (192, 128), (80, 208)])
def test_dims(device, dims):
    case = BASE.replace(dim_qk=dims[0], dim_v=dims[1], causal=True, seqlen_q=300, seqlen_kv=300)
    assert relative_error(case, device) < NORMAL


OUTPUTS = [dict(causal=True, amax_o="bh", batch=1), dict(dim_v=96, seqlen_q=70, amax_o="h"),
           dict(cu_q=[70, 1, 33], cu_kv=[90, 257, 33], batch=3, amax_o="b"),
           dict(lens_q=[3, 70], lens_kv=[203, 0], seqlen_q=70, amax_o="bh"),
           dict(strides="bhsd", seqlen_q=5, amax_o="")]


@pytest.mark.parametrize("change", range(len(OUTPUTS)))
def test_outputs_of_8_bits(device, change):
    """The largest |o| is that of the fp32 o, to the last bit, and o is scaled and rounded."""
    case = BASE.replace(dim_qk=(64, 128, 256)[change % 3], **OUTPUTS[change])
    assert relative_error(case.replace(dtype_o="f8", scale_o=True), device) < 0.045
    wide = run(case.replace(dtype_o="f32"), device)
    sizes = np.array([np.abs(o).max((0, 2), initial=0) for o in wide.o])
    over = tuple(n for n in (0, 1) if "bh"[n] not in case.amax_o)
    np.testing.assert_array_equal(wide.amax_o, sizes.max(over, keepdims=True))
    eight = run(case.replace(dtype_o="f8"), device)
    for o, exact in zip(eight.o, wide.o):
        np.testing.assert_array_equal(o, round_to(exact, "f8"))
    np.testing.assert_array_equal(eight.amax_o, wide.amax_o)


@pytest.mark.parametrize("amax_o", ["bh", "b", "h", ""])
def test_largest_outputs_of_no_queries(device, amax_o):
    for strides in ("packed", "bhsd"):
        case = BASE.replace(seqlen_q=0, amax_o=amax_o, dtype_o="f32", strides=strides)
        result = run(case, device)
        assert result.amax_o.size and (result.amax_o == 0).all()


def test_largest_outputs_of_redone_tiles(device):
    """Scores so large that tiles are computed again: what they held before does not count."""
    case = BASE.replace(batch=1, seqlen_q=300, seqlen_kv=300, descales=None, amplitude=200.0,
                        dtype_o="f32", amax_o="h")
    result = run(case, device)
    np.testing.assert_array_equal(result.amax_o[0], np.abs(result.o[0]).max((0, 2)))


GRADIENTS = [
    dict(causal=True), dict(window=(70, 0), causal=True, batch=1),
    dict(cu_q=[70, 1, 33], cu_kv=[90, 157, 33], batch=3, causal=True),
    dict(lens_q=[3, 70], lens_kv=[203, 0], seqlen_q=70), dict(starts_kv=[0, 77], seqlen_q=70),
    dict(dtype_grad="f32", batch=1),
    dict(dtype_o="f32"), dict(dtype_o="f32", dtype_grad="f16"),
    dict(dtype_o="f16", dtype_grad="bf16", batch=1, strides="bhsd"),
    dict(dtype_o="f16", sink=True, dsink=True, dlse=True)]


def check_gradients(case, device):
    """They are those of 16-bit kernels that are given the numbers meant, bit by bit, and near the
    exact ones."""
    case = case.replace(backward=True, determinism=1, heads_q=2, heads_kv=1)
    data = make_data(case)
    call = Call(case, device, data)
    result = call.backward(call.forward())
    inner = next((name for name in (case.dtype_o, case.dtype_grad) if name != "f32"), "bf16")
    meant = {name: [round_to(data.meant(case, name, b).astype(np.float32), inner)
                    for b in range(case.batch)] for name in "qkv"}
    copied = dataclasses.replace(data, descales={}, **meant)
    twin = Call(case.replace(dtype=inner, dtype_kv=inner, dtype_grad=inner, descales=None,
                             descale_block=0), device, copied)
    twin.give(result.o, result.lse)
    wanted = twin.backward(dataclasses.replace(result))
    exact = [reference.forward(case, data, b) for b in range(case.batch)]
    true = [reference.backward(case, data, b, fwd) for b, fwd in enumerate(exact)]
    for name in ("dq", "dk", "dv"):
        for got, same in zip(getattr(result, name), getattr(wanted, name)):
            np.testing.assert_array_equal(got, round_to(same, case.dtype_grad), name)
        got, want = (np.concatenate([np.asarray(x, float).ravel() for x in part])
                     for part in (getattr(result, name), [getattr(t, name) for t in true]))
        error = np.sqrt(((got - want) ** 2).sum() / max((want ** 2).sum(), 1e-30))
        assert error < NORMAL, (name, error)
    if case.dsink:
        np.testing.assert_array_equal(result.dsink, wanted.dsink)
    if case.dbias:
        np.testing.assert_array_equal(result.dbias, wanted.dbias)


@pytest.mark.parametrize("change", range(len(GRADIENTS)))
def test_gradients(device, change):
    check_gradients(BASE.replace(dim_qk=(64, 128, 256)[change % 3], **GRADIENTS[change]), device)


@pytest.mark.parametrize("change", [1, 2, 5, 8])
def test_gradients_of_modified_scores(device, change):
    check_gradients(BASE.replace(**MODIFIED[change]), device)


def test_gradients_of_a_bias(device):
    check_gradients(BASE.replace(bias="f32", bias_dims="hr", dbias="hr"), device)


LONG = Case(batch=1, seqlen_q=64, seqlen_kv=16384, heads_q=2, dtype="f8", dtype_o="f32")


def test_sums_are_promoted(device):
    """V with a mean of 1: in 14 bits a sum of 16k keys would lose a fifth."""
    for dim in (64, 128, 256):
        data = make_data(LONG.replace(dim_qk=dim))
        for b in range(1):
            data.v[b][...] = round_to(np.asarray(data.v[b], np.float32) + 1, "f8")
        assert relative_error(LONG.replace(dim_qk=dim), device, data) < 0.006


@pytest.mark.parametrize("nats", [5, 10, 20, 40])
def test_first_token(device, nats):
    """A token that all rows look at, in the tile that is visited last."""
    case = BASE.replace(batch=1, seqlen_q=700, seqlen_kv=700, causal=True, descales=None)
    data = make_data(case)
    q, k = (np.asarray(x[0], np.float32) for x in (data.q, data.k))
    q[..., 0] = 8
    k[..., 0] = 0
    k[0, :, 0] = min(nats, 448)
    data.q[0][...], data.k[0][...] = round_to(q, "f8"), round_to(k, "f8")
    assert relative_error(case, device, data) < NORMAL


@pytest.mark.parametrize("key", [4095, 2000])
def test_a_lone_token_leaves_the_others_their_weight(device, key):
    """One key has a score 10 nats above the rest, in the tile that is visited first, or later. V
    has a mean of 1, so that weights lost show. Sums of four tiles, of 14 bits, lose some of their
    other keys': 0.008 in all. With P of at most 2^4 it would be 0.017."""
    case = BASE.replace(batch=1, seqlen_q=64, seqlen_kv=4096, heads_q=2, descales=None)
    data = make_data(case)
    q, k, v = (np.asarray(x[0], np.float32) for x in (data.q, data.k, data.v))
    q[..., 0] = 8
    k[..., 0] = 0
    k[key, :, 0] = 10
    for name, x in (("q", q), ("k", k), ("v", v + 1)):
        getattr(data, name)[0][...] = round_to(x, "f8")
    assert relative_error(case, device, data) < 0.012


@pytest.mark.parametrize("dim", [64, 128])
def test_growing_scores(device, dim):
    """Each tile's scores are larger than those visited before it, by more and more."""
    case = BASE.replace(batch=1, seqlen_q=512, seqlen_kv=512, dim_qk=dim, descales=None)
    data = make_data(case)
    k = np.asarray(data.k[0], np.float32)
    k *= np.repeat([64, 16, 4, 1], 128)[:, None, None]
    data.k[0][...] = round_to(k, "f8")
    assert relative_error(case, device, data) < NORMAL


def test_outliers(device):
    """N(0, 1) + N(0, 100) Bernoulli(0.001)."""
    case = BASE.replace(batch=1, seqlen_q=1024, seqlen_kv=1024, dim_qk=128, descales=None)
    data, rng = make_data(case), np.random.default_rng(0)
    for name in "qkv":
        x = getattr(data, name)[0]
        numbers = rng.standard_normal(x.shape) + rng.standard_normal(x.shape) * 10 * (
            rng.random(x.shape) < 0.001)
        x[...] = round_to(numbers.astype(np.float32), "f8")
    assert relative_error(case, device, data) < NORMAL
