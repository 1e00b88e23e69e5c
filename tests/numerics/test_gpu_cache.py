"""A cache of E4M3 beside queries of 16 bits on a GPU: the error is that of the same formula in the
queries' type. On Hopper kernels, which FLASHATTN_BACKEND = sm90 asks for: of copies of K and V."""
import os

import numpy as np
import pytest

from . import capi
from .case import Case
from .data import make_data
from .dtypes import NUMPY
from .harness import Call, run
from .repro import verify
from .test_gpu_calls import in_a_process
from .test_hostile import HostileCall
from .tolerance import check

BASE = Case(batch=2, seqlen_q=1, seqlen_kv=900, heads_q=4, heads_kv=1, dim_qk=128, dtype="bf16",
            dtype_kv="f8", descales="bh", lens_kv=[900, 517])
BLOCKS = dict(descales="bht", descale_block=64)
FEW = [
    dict(), dict(dtype="f16", descales=None, splits=1), dict(splits=7, **BLOCKS),
    dict(descales="bht", descale_block=1, dtype="f16", splits=3),
    dict(descales="t", descale_block=7, page_size=16), dict(descales="t", descale_block=1000),
    dict(page_size=1, hidden=0.4), dict(page_size=64, splits=4, **BLOCKS),
    dict(page_size=256, dtype="f16"),
    dict(seqlen_q=4, causal=True, splits=2), dict(batch=4, lens_kv=[900, 0, 1, 64], splits=3),
    dict(seqlen_q=3, tree=9, heads_q=5, splits=3), dict(seqlen_q=2, tree=2, window=(50, 0)),
    dict(lens_kv=None, heads_q=16, dtype_o="f16"), dict(lens_kv=None, dtype_o="f32", sink=True),
    dict(starts_kv=[30, 500], splits=4, **BLOCKS), dict(lse=False, lens_kv=None, strides="bhsd"),
    dict(heads_q=16, heads_kv=2, descales="b", splits=2, strides="sbhd")]
MANY = [
    dict(seqlen_q=5, causal=True, heads_q=6), dict(seqlen_q=9, causal=True, heads_q=6, **BLOCKS),
    dict(seqlen_q=8, tree=40, window=(400, 0), heads_q=8, page_size=16),
    dict(seqlen_q=103, causal=True, lens_kv=[600, 103], heads_q=2, dtype="f16", **BLOCKS),
    dict(cu_q=[70, 1, 33], batch=3, lens_kv=[300, 70, 133], causal=True, page_size=64),
    dict(seqlen_q=70, window=(70, 3), lens_kv=None, heads_q=1, dtype_o="f32"),
    dict(seqlen_q=20, chunk=64, splits=3), dict(cu_q=[9, 2], cu_kv=[900, 257], lens_kv=None)]
MODIFIED = [
    dict(softcap=5.0), dict(softcap=20.0, seqlen_q=77, causal=True, **BLOCKS), dict(alibi="bh"),
    dict(alibi="h", seqlen_q=40, causal=True, page_size=16), dict(bias="f32", seqlen_q=3),
    dict(bias="u8", bias_empty=0.2, seqlen_q=20, lens_kv=None), dict(scale=-0.2, splits=3),
    dict(bias="bf16", softcap=9.0, sink=True, splits=2), dict(softcap=5.0, tree=4, seqlen_q=4)]
CASES = [BASE.replace(dim_qk=(64, 128, 256)[n % 3], **change)
         for n, change in enumerate(FEW + MODIFIED)]
CASES += [BASE.replace(dim_qk=(128, 64, 256)[n % 3], **change) for n, change in enumerate(MANY)]
CASES += [BASE.replace(dim_qk=a, dim_v=b, splits=2) for a, b in
          ((16, 16), (32, 64), (48, 80), (96, 96), (192, 128), (80, 208))]
# 17 to 64 rows, whose warps lie side by side or share the columns; pages of several sizes.
CASES += [BASE.replace(dim_qk=dim, **change) for dim, change in (
    (64, dict(seqlen_q=8, page_size=24)), (64, dict(seqlen_q=16, splits=2, **BLOCKS)),
    (64, dict(seqlen_q=13, causal=True, page_size=8, hidden=0.4)),
    (128, dict(seqlen_q=8, causal=True, page_size=16, **BLOCKS)),
    (128, dict(seqlen_q=5, page_size=5)),
    (128, dict(seqlen_q=16, page_size=32, splits=3)), (128, dict(seqlen_q=14, window=(300, 0))),
    (256, dict(seqlen_q=8, page_size=16, splits=3)),
    (256, dict(seqlen_q=16, causal=True, **BLOCKS)),
    (256, dict(seqlen_q=6, tree=30, page_size=3)), (192, dict(seqlen_q=7, dtype="f16", dim_v=160)))]
CASES += [BASE.replace(batch=1, seqlen_kv=4200, lens_kv=None),  # the deep pipeline
          BASE.replace(seqlen_kv=4100, lens_kv=[4100, 300], dtype="f16", splits=2, **BLOCKS)]


# The copies leave out keys that no query sees, here and in MANY.
HIDDEN = [
    dict(seqlen_q=130, causal=True, top_left=True), dict(cu_q=[70, 9], window=(300, 0), **BLOCKS),
    dict(cu_q=[70, 9], cu_kv=[900, 300], lens_kv=[890, 299], window=(60, 0), dtype="f16"),
    dict(seqlen_q=40, chunk=100, page_size=48, lens_kv=[870, 40]),
    dict(seqlen_q=70, starts_kv=[300, 40], lens_kv=None, window=(90, 0), descales="bht",
         descale_block=1)]
COPIED = [BASE.replace(dim_qk=(64, 128, 256)[n % 3], **change) for n, change in enumerate(HIDDEN)]
COPIES_ALONE = os.environ.get("FLASHATTN_BACKEND") == "sm90"
if COPIES_ALONE:
    CASES = CASES[::2] + CASES[1:len(FEW):4] + COPIED
portable = pytest.mark.skipif(COPIES_ALONE, reason="copies have the range of the type of q")


@pytest.fixture(autouse=True)
def _only_gpus(device):
    if device.name == "cpu":
        pytest.skip("the CPU's: test_eightbit.py")


def description(case, device, **fields):
    """The name of a case's kernel, and why it is that one."""
    plan = capi.Plan(dict(capi.descriptor(case, device), **fields))
    info = plan.info(capi.FORWARD, capi.sizes_of(case))
    return tuple(capi.ffi.string(text).decode() for text in (info.kernel, info.why))


@pytest.mark.parametrize("case", CASES)
def test_features(device, case):
    name, why = description(case, device)
    if f"copies of K and V in {case.dtype}" in why:
        assert f"_{case.dtype}_" in name
    else:
        assert "_f8_" in name and "_decode" in name and "E4M3 converted to fp16" in why
        assert name.endswith("_q16_kv256_decode") or case.seqlen_kv < 4096 or case.dim_qk != 128
        assert not COPIES_ALONE or case.dtype_o not in (case.dtype, "f32")
    verify(case, device)


CHOICES = """
from tests.numerics.device import CudaDevice
from tests.numerics.test_gpu_cache import choices
print(choices(CudaDevice))
"""


def choices(device):
    """Whether 1, 8 and 2048 queries run on copies, without a limit of the workspace and with
    limits that leave room for one sequence, and for none."""
    found, keys = [], 1 << 16
    copies = BASE.batch * keys * BASE.dim_qk * 2 * 2  # bytes
    maxima = dict(max_batch=BASE.batch, max_seqlen_q=2048, max_seqlen_kv=keys,
                  workspace_limit=copies)
    for queries in (1, 8, 2048):
        case = BASE.replace(seqlen_q=queries, seqlen_kv=keys, causal=True)
        for fields in ({}, maxima, dict(maxima, workspace_limit=copies // 3)):
            plan = capi.Plan(dict(capi.descriptor(case, device), **fields))
            info = plan.info(capi.FORWARD, capi.sizes_of(case))
            why = capi.ffi.string(info.why).decode()
            said = ("on copies of K and V in", "more than 4 GiB or workspace_limit", "few queries")
            assert (info.workspace > copies // 2) == (said[0] in why)
            assert ("of 1 sequences at a time" in why) == (said[0] in why and fields is maxima)
            found += [text for text in said if text in why]
    workspaces = []
    for batch, keys in ((63, 1 << 17), (65, 1 << 17), (1, 65 << 17)):  # 1 << 17: of 64 MiB
        case = BASE.replace(batch=batch, lens_kv=None, seqlen_q=2048, seqlen_kv=keys)
        plan = capi.Plan(capi.descriptor(case, device))
        info = plan.info(capi.FORWARD, capi.sizes_of(case))
        why = capi.ffi.string(info.why).decode()
        found += [text for text in ("on copies of K and V in", "of 63 sequences at a time",
                                    "more than 4 GiB") if text in why]
        workspaces.append(info.workspace)
    assert 63 << 26 <= workspaces[0] <= workspaces[1] < 5 << 30
    return " | ".join(found)


def test_copies_are_for_many_queries(device):
    if capi.device_properties(device.kind).compute_capability != 90:
        pytest.skip("copies are for Hopper kernels")
    said = in_a_process(CHOICES, FLASHATTN_BACKEND=None)
    few, copies = "few queries", "on copies of K and V in"
    assert said.strip().split(" | ") == [
        *6 * [few], copies, copies, "more than 4 GiB or workspace_limit", copies, copies,
        "of 63 sequences at a time", "more than 4 GiB"]


TURNS = [
    dict(causal=True, **BLOCKS), dict(page_size=16, alibi="bh"),
    dict(cu_q=[70, 9, 1, 30, 64], page_size=48), dict(bias="f32", dtype="f16", lse=True),
    dict(starts_kv=[9, 0, 300, 40, 80], lens_kv=None, window=(90, 0), descales="bh"),
    dict(dtype_o="f32", strides="bhsd", sink=True), dict(lens_q=[70, 3, 0, 9, 70])]


@pytest.mark.skipif(not COPIES_ALONE, reason="others need no copies")
@pytest.mark.parametrize("change", TURNS)
def test_sequences_take_turns(device, change):
    """With room for the copies of two sequences of five the results are the same bits, in a graph,
    too."""
    case = BASE.replace(**{**dict(batch=5, seqlen_q=70, seqlen_kv=600, splits=1,
                                  lens_kv=[600, 17, 300, 599, 70]), **change})
    sizes, data = capi.sizes_of(case), make_data(case)
    whole = capi.Plan(capi.descriptor(case, device))
    one = case.seqlen_kv * case.heads_kv * (case.dim_qk + case.dim_v) * 2
    limit = whole.workspace_size(capi.FORWARD, sizes) - 5 * one // 2
    maxima = dict(max_batch=case.batch, max_seqlen_q=case.seqlen_q, max_seqlen_kv=case.seqlen_kv,
                  max_total_q=sizes["total_q"], workspace_limit=limit)
    plan = capi.Plan(dict(capi.descriptor(case, device), **maxima))
    info = plan.info(capi.FORWARD, sizes)
    assert info.workspace <= limit
    assert "of 2 sequences at a time" in capi.ffi.string(info.why).decode()
    results = [run(case, on, data, of) for on, of in ((device, whole), (device.captured(), plan))]
    assert results[0].bits() == results[1].bits()
    check(case, data, results[1])


@pytest.mark.skipif(not COPIES_ALONE, reason="others have kernels of their own")
@pytest.mark.parametrize("change", [dict(), dict(dtype="f16", page_size=16), dict(window=(99, 0))])
def test_bits_are_those_of_16_bits(device, change):
    """Without descales K and V are the same numbers, whatever their type."""
    case = BASE.replace(seqlen_q=140, causal=True, descales=None, **change)
    data = make_data(case)
    wide = run(case.replace(dtype_kv=case.dtype), device, data)
    assert run(case, device, data).bits() == wide.bits()


@pytest.mark.skipif(not COPIES_ALONE, reason="others have the range of fp32")
def test_numbers_beyond_the_range(device):
    """Copies hold the largest number of their type where one is beyond."""
    case = BASE.replace(batch=1, seqlen_q=1, seqlen_kv=1, lens_kv=None, heads_q=1, dtype="f16",
                        dtype_o="f32")
    data = make_data(case)
    data.descales["v"][...] = 1e6
    data.v[0][0, 0, :4] = 448, -448, 0.0625, np.nan
    np.testing.assert_array_equal(run(case, device, data).o[0][0, 0, :4],
                                  [65504, -65504, 62496, np.nan])


@portable
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_each_code(device, dim, dtype):
    """All 256 bytes as keys' values: a row's only key is its result, NaN included. And as keys."""
    case = Case(batch=256 // dim, seqlen_q=1, seqlen_kv=1, heads_q=1, dim_qk=dim, dtype=dtype,
                dtype_kv="f8", dtype_o="f32", descales="b")
    data = make_data(case)
    codes = np.arange(256, dtype=np.uint8).view(NUMPY["f8"]).astype(np.float32).reshape(-1, dim)
    for b, values in enumerate(codes):
        data.v[b][0, 0] = values
        data.k[b][0, 0] = np.nan_to_num(values)
        data.q[b][...] = 0
        data.q[b][0, 0, b::17] = 2.0
    result = run(case, device, data)
    descales = data.descales["v"].reshape(-1, 1)
    np.testing.assert_array_equal(np.array(result.o).reshape(codes.shape), codes * descales)
    for b, values in enumerate(codes):
        score = np.nan_to_num(values[b::17]).sum() * 2 * data.descales["k"][b, 0, 0] / dim ** 0.5
        assert result.lse[b] == pytest.approx(score, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("f16", marks=portable)])
@pytest.mark.parametrize("block", [16, 3])
def test_descales_far_apart(device, dtype, block):
    """Descales of values grow and fall by powers of two; those of keys make them 0 or large; a
    block that no query sees has NaN."""
    case = BASE.replace(descales="t", descale_block=block, causal=True, seqlen_q=2, dtype=dtype,
                        window=(600, 0), lens_kv=None, dtype_o="f32", lse=True)
    data = make_data(case)
    rng = np.random.default_rng(block)
    for name, least, most in (("v", -60, 40), ("k", -9, 1)):
        exponents = rng.integers(least, most, data.descales[name].shape)
        data.descales[name][...] = np.ldexp(data.descales[name], exponents)
        data.descales[name][..., :200 // block] = np.nan
    for b in range(case.batch):  # what is hidden is not asked
        data.k[b][:299], data.v[b][:299] = 0, 0
    hidden = {name: x.copy() for name, x in data.descales.items()}
    result = run(case, device, data)
    for name, x in hidden.items():
        data.descales[name] = np.nan_to_num(x)
    check(case, data, result)


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1e4, 1e30])
def test_queries_of_any_size(device, size):
    """bf16 has more exponents than the products' fp16."""
    case = BASE.replace(seqlen_q=3, dtype_o="f32", splits=2)
    data = make_data(case)
    for b in range(case.batch):
        data.q[b][...] = data.q[b] * np.float32(2.0 ** round(np.log2(size)))
    data.descales["k"][...] = np.float32(2.0 ** -round(np.log2(size)))
    check(case, data, run(case, device, data))


def test_hostile(device):
    case = BASE.replace(batch=3, seqlen_q=2, seqlen_kv=700, lens_kv=[700, 9, 400], page_size=16,
                        splits=0 if COPIES_ALONE else 3, **BLOCKS)
    rng = np.random.default_rng(7)
    plan = capi.Plan(capi.descriptor(case, device))
    plain = run(case, device, plan=plan)
    for _ in range(4):
        call = HostileCall(case, device, rng, plan)
        fields = call.forward_fields()
        call.attempt(capi.FORWARD, fields, list(fields))
    assert run(case, device, plan=plan).bits() == plain.bits()


@pytest.mark.skipif(COPIES_ALONE, reason="the portable kernels say what is refused")
@pytest.mark.parametrize("changes, field", [
    (dict(dtype_kv="i8"), "dtype_kv"), (dict(dtype="f8", dtype_kv="i8"), "dtype_kv"),
    (dict(dtype="f32"), "dtype_kv"), (dict(backward=True), "dtype_kv"),
    (dict(blocks=(64, 64)), "dtype_kv"), (dict(dropout=0.5), "dtype_kv"),
    (dict(dtype_o="f8"), "dtype_kv"), (dict(dim_qk=40), "dim_qk"), (dict(dim_v=72), "dim_v"),
    (dict(dim_qk=320, dim_v=64), "dim_qk")])
def test_refusals(device, changes, field):
    with pytest.raises(capi.Refused, match="F8E4M3") as refusal:
        capi.Plan(capi.descriptor(BASE.replace(**changes), device))
    assert refusal.value.field == field


def test_largest_results_are_refused(device):
    call = Call(BASE.replace(amax_o="bh"), device)
    with pytest.raises(capi.Refused, match="amax_o is given"):
        call.forward()
