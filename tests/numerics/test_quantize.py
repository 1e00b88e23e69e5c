"""flashattn_quantize against float64: transforms, descales, rounding, and what results lose."""
import copy
import dataclasses

import numpy as np
import pytest

from . import capi, eightbit, philox, reference, support
from .case import Case
from .data import make_data
from .device import open_device
from .dtypes import EIGHT_BITS, round_to
from .harness import Call, run
from .test_hostile import NAMES, REASON_LENGTHS, spoil

SEED = 0x0123456789ABCDEF
LENGTHS = ("batch", "seqlen_q", "seqlen_kv", "total_q", "total_kv", "cu_seqlens_q",
           "cu_seqlens_kv", "lens_q", "lens_kv", "starts_kv")
BASE = Case(batch=2, seqlen_q=70, seqlen_kv=150, heads_q=4, heads_kv=2, dim_qk=64, dim_v=48,
            dtype="bf16")


@pytest.fixture(autouse=True)
def _where_plans_are(device):
    if device.name != "cpu" and not support.has_hopper(device):
        pytest.skip("plans of E4M3 are Hopper's")


def has_gpu_plan(case):
    """Whether README's limits let a GPU have one: larger heads have descales by head only."""
    dims = case.dim_qk, case.dim_v
    return case.dtype != "f8" and max(dims) <= (64 if case.descale_block else 256) and \
        not any(dim % 16 for dim in dims)


def rotation(dim, seed):
    """(dim, dim): what ROTATE multiplies rows by, from the header's text."""
    size = dim & -dim
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    whole = np.kron(np.eye(dim // size), matrix) / np.sqrt(size)
    c = np.arange(dim)
    words = np.stack(philox.philox4x32((c // 128, 0 * c, 0 * c, 0 * c),
                                       (seed & philox.LOW, seed >> 32)))
    word = np.take_along_axis(words, (c // 32 % 4)[None], 0)[0]
    negated = (word >> (c % 32).astype(np.uint64)) & np.uint64(1)
    return (1 - 2.0 * negated.astype(float))[:, None] * whole


class Quantized:
    """What the library makes of a case's wider q, k and v, per sequence."""

    def __init__(self, case, device, data, plan_case, transform=0, seed=0, only="qkv"):
        self.case, self.device, self.transform = case, device, transform
        self.plan_case = plan_case
        call, fields, names = self.stage(device, data, seed, only)
        for buffer in set(call.buffers.values()):
            buffer.push()
        device.launch(lambda stream: call.plan.quantize(fields, stream))
        out = call.collect(names)
        self.x = {name: call.take(name + "_out", out[name + "_out"]) for name in only}
        self.descales = {name[-1]: out[name][getattr(self, name)][..., 0] for name in names
                         if name.startswith("descale")}
        self.k_mean = out["k_mean"][self.mean_at][:, :, 0] if "k_mean" in names else None
        self.lse_shift = [out["lse_shift"][index] for index in call.lse_index()] \
            if "lse_shift" in names else None

    def stage(self, device, data, seed, only):
        """The arrays in host memory, what the library is told, and the names of the results."""
        case, plan_case, transform = self.case, self.plan_case, self.transform
        call = Call(case, device, data, plan=capi.Plan(capi.descriptor(plan_case, device)))
        fields = {name: value for name, value in {**call.sizes, **call.inputs}.items()
                  if name in LENGTHS or name in only}
        fields.update(dtype=capi.DTYPES[case.dtype], transform=transform, rotation_seed=seed)
        names = []
        for name in only:
            dtype = plan_case.dtype if name == "q" else plan_case.dtype_kv
            fields[name + "_out"] = call.tensor(name + "_out", dtype, like=name)
            names.append(name + "_out")
            if dtype in EIGHT_BITS:
                self.add_descales(call, fields, name)
                names.append("descale_" + name)
        if transform & capi.SMOOTH_K and "k" in only:
            shape = (case.batch, case.heads_kv, 1, case.dim_qk)
            fields["k_mean"], buffer, self.mean_at = call.strided("k_mean", "f32", shape,
                                                                  [True] * 3)
            buffer.owned[self.mean_at] = True
            names.append("k_mean")
            if "q" in only:
                fields["lse_shift"] = call.lse_like("lse_shift")
                names.append("lse_shift")
        return call, fields, names

    def add_descales(self, call, fields, name):
        case, block = self.case, self.plan_case.descale_block
        rows = case.seqlen_q if name == "q" else case.seqlen_kv
        blocks = -(-rows // block) if block else min(rows, 1)
        shape = (case.batch, case.heads_kv, blocks, 1)
        fields["descale_" + name], buffer, index = call.strided("descale_" + name, "f32", shape,
                                                                [True] * 3)
        setattr(self, "descale_" + name, index)
        for b in range(case.batch):
            used = case.length_q(b) if name == "q" else case.length_kv(b)
            buffer.owned[index[b, :, :-(-used // block) if block else min(used, 1)]] = True

    def data(self, data):
        """The case and numbers of an attention call on the results."""
        made = dataclasses.replace(data, **self.x)
        made.descales = self.descales
        return made


def transformed(case, data, transform, seed):
    """q, k, v in float64, and the means."""
    means = [x.astype(np.float64).mean(0) if len(x) else np.zeros(x.shape[1:]) for x in data.k]
    q, k, v = ([x.astype(np.float64) for x in part] for part in (data.q, data.k, data.v))
    if transform & capi.SMOOTH_K:
        k = [x - mean for x, mean in zip(k, means)]
    if transform & capi.ROTATE:
        matrix = rotation(case.dim_qk, seed)
        q, k = [x @ matrix for x in q], [x @ matrix for x in k]
    return dict(q=q, k=k, v=v), means


def check_numbers(case, got, exact, name):
    """Descales, and elements that are the nearest, but for fp32's rounding of what is rounded."""
    block = got.plan_case.descale_block
    dtype = got.plan_case.dtype if name == "q" else got.plan_case.dtype_kv
    most = EIGHT_BITS[dtype]
    group = case.group if name == "q" else 1
    for b, x in enumerate(exact[name]):
        rows, heads, dim = x.shape
        for first in range(0, rows, block or max(rows, 1)):
            part = x[first:first + block] if block else x
            amax = np.abs(part).reshape(len(part), heads // group, -1).max((0, 2))
            descales = got.descales[name][b, :, first // block if block else 0]
            np.testing.assert_allclose(descales, np.where(amax == 0, 1, amax / most),
                                       rtol=2e-6)
            scaled = part / np.repeat(descales.astype(np.float64), group)[:, None]
            out = got.x[name][b][first:first + len(part)]
            nearest = np.abs(round_to(scaled, dtype) - scaled)
            # Numbers that a transform cancels leave the rounding of the large ones.
            slack = 1e-5 * np.abs(scaled) + (1e-6 if got.transform else 1e-8) * most
            assert (np.abs(out - scaled) <= nearest + slack).all(), (name, b, first)


def cases():
    for n, transform in enumerate((0, capi.SMOOTH_K, capi.ROTATE, capi.SMOOTH_K | capi.ROTATE)):
        for m, block in enumerate((0, 64, 128, 7)):
            dims = ((64, 48), (96, 96), (192, 128), (256, 3), (8, 16), (2, 1), (1024, 576))
            small = ((64, 40), (16, 64), (32, 16))[(n + m) % 3]
            for dim, dim_v in (dims[(3 * n + m) % 7], small):
                yield BASE.replace(dim_qk=dim, dim_v=dim_v, descale_block=block,
                                   dtype=("f32", "f16", "bf16")[(n + m) % 3],
                                   strides=("packed", "padded", "bhsd")[m % 3]), transform
    # One head, of many parts; a group of query heads is no power of two.
    for n, dtype in enumerate(("f32", "f16", "bf16")):
        yield Case(batch=1, seqlen_q=300, seqlen_kv=700, heads_q=3, heads_kv=1,
                   dim_qk=(64, 128, 256)[n], dtype=dtype), capi.SMOOTH_K | capi.ROTATE
    # Heads of one, three and six tiles of 32 columns, and of a part of one.
    for n, dim in enumerate((32, 96, 192)):
        yield BASE.replace(dim_qk=dim, dim_v=64, dtype=("bf16", "f16")[n % 2]), \
            capi.SMOOTH_K | capi.ROTATE
    yield BASE.replace(dim_qk=80, dim_v=64), capi.SMOOTH_K
    yield BASE.replace(cu_q=[70, 0, 33], cu_kv=[90, 257, 0], descale_block=64), capi.SMOOTH_K
    yield BASE.replace(lens_q=[3, 70], lens_kv=[150, 0], descale_block=64), capi.SMOOTH_K
    yield BASE.replace(starts_kv=[0, 77], descale_block=64), capi.SMOOTH_K | capi.ROTATE


def eight(case):
    return case.replace(dtype="f8", dtype_kv="f8", dtype_o="f32", descales="bht")


# The reference rotates by a matrix, of 1,024 rows for minutes where a processor is emulated.
@pytest.mark.parametrize("case, transform", [
    pytest.param(*each, marks=pytest.mark.smoke if each[0].dim_qk <= 512 else ())
    for each in cases()])
def test_numbers(device, case, transform):
    if device.name != "cpu" and not has_gpu_plan(case):
        pytest.skip("plans of E4M3 for GPUs have other heads")
    data = make_data(case)
    data.k = [x + np.float32(1.5) for x in data.k] if case.dtype == "f32" else data.k
    seed = SEED if transform & capi.ROTATE else 0
    got = Quantized(case, device, data, eight(case), transform, seed)
    exact, means = transformed(case, data, transform, seed)
    for name in "qkv":
        check_numbers(case, got, exact, name)
    if transform & capi.SMOOTH_K:
        np.testing.assert_allclose(got.k_mean, means, rtol=1e-6, atol=1e-6)
        for b, shift in enumerate(got.lse_shift):
            mean = np.repeat(means[b], case.group, 0)
            wanted = case.scale_used * np.einsum("ihc,hc->hi", data.q[b].astype(float), mean)
            np.testing.assert_allclose(shift, wanted, rtol=1e-5, atol=1e-5)
    if device.name != "cpu":
        same_as_on_the_cpu(got, Quantized(case, open_device("cpu"), data, eight(case), transform,
                                          seed))


def same_as_on_the_cpu(got, wanted):
    """Every bit, as sums of doubles hardly ever round to another mean; but where a GPU has
    clusters, tensor cores transform rows of 16 bits, and round to another last bit of fp32 at
    times: elements that differ are neighbours, one in 10^4 at most."""
    transformed_16 = (
        got.transform and got.case.dtype != "f32" and got.case.dim_qk >= 32
        and got.device.padding > 1  # vectors can be loaded
        and capi.device_properties(got.device.kind).compute_capability >= 90)
    for name in got.x:
        for a, b in zip(got.x[name], wanted.x[name]):
            if transformed_16 and name != "v":
                differ = a != b
                assert differ.sum() <= 1 + 1e-4 * differ.size, name
                np.testing.assert_allclose(a[differ], b[differ], rtol=0.126, atol=2.0 ** -9)
            else:
                np.testing.assert_array_equal(a, b, name)
        np.testing.assert_allclose(got.descales[name], wanted.descales[name],
                                   rtol=1e-6 if transformed_16 and name != "v" else 0)
    if got.k_mean is not None:
        np.testing.assert_array_equal(got.k_mean, wanted.k_mean)
    if got.lse_shift is not None:
        slack = 2e-6 if transformed_16 else 0
        for a, b in zip(got.lse_shift, wanted.lse_shift):
            np.testing.assert_allclose(a, b, rtol=slack, atol=slack)


def test_rows_at_odd_places(device):
    """Which no vector can load or store."""
    odd = copy.copy(device)
    odd.alignment = odd.padding = 1
    case = BASE.replace(descale_block=64, strides="padded")
    data = make_data(case)
    transform = capi.SMOOTH_K | capi.ROTATE
    same_as_on_the_cpu(Quantized(case, odd, data, eight(case), transform, SEED),
                       Quantized(case, open_device("cpu"), data, eight(case), transform, SEED))


def test_a_block_beyond_shared_memory(device):
    """More than 16 CTAs of a GPU can keep."""
    case = Case(batch=1, seqlen_q=1, seqlen_kv=4000, heads_q=1, dim_qk=256, dtype="f32")
    data = make_data(case)
    data.k[0][-1, 0, -1] = 7
    transform = capi.SMOOTH_K | capi.ROTATE
    got, wanted = (Quantized(case, on, data, eight(case), transform, SEED, only="k")
                   for on in (device, open_device("cpu")))
    same_as_on_the_cpu(got, wanted)


LONG = Case(batch=1, seqlen_q=1, seqlen_kv=9000, heads_q=2, heads_kv=2, dim_qk=256, dtype="bf16")
GROUPED = Case(batch=3, seqlen_q=700, seqlen_kv=600, heads_q=16, heads_kv=2, dim_qk=64,
               dtype="bf16")
PACKED = dict(cu_q=[0, 1, 300, 40, 0, 2], cu_kv=[3, 1111, 0, 17, 64, 5])


@pytest.mark.parametrize("case, transform, only", [
    (LONG, 0, "kv"),
    (LONG.replace(dtype="f16"), capi.SMOOTH_K | capi.ROTATE, "kv"),
    (LONG.replace(dim_qk=64, dim_v=64, seqlen_kv=15000), capi.SMOOTH_K | capi.ROTATE, "kv"),
    (GROUPED, 0, "qkv"),
    (GROUPED.replace(heads_q=10), 0, "qkv"),
    (GROUPED.replace(heads_q=10), capi.SMOOTH_K | capi.ROTATE, "qkv"),
    (GROUPED.replace(heads_q=6, descale_block=128), capi.ROTATE, "qkv"),
    (GROUPED.replace(dtype="f32", descale_block=64), 0, "qkv"),
    (GROUPED.replace(batch=6, descale_block=5, **PACKED), 0, "qkv"),
    (GROUPED.replace(batch=6, **PACKED), capi.SMOOTH_K | capi.ROTATE, "qkv"),
])
def test_many_blocks(device, case, transform, only):
    """Blocks follow each other in the same shared memory of a GPU, or do not fit in it."""
    data = make_data(case)
    data.v[0][-1, 0, 7] = np.inf
    seed = SEED if transform & capi.ROTATE else 0
    got, wanted = (Quantized(case, on, data, eight(case), transform, seed, only=only)
                   for on in (device, open_device("cpu")))
    same_as_on_the_cpu(got, wanted)


@pytest.mark.smoke
@pytest.mark.parametrize("kv, block", [("f8", 64), ("i8", 64), ("i8", 1), ("i8", 0)])
def test_a_cache_beside_wide_queries(device, kv, block):
    """q is rotated and stays wide; without a rotation it is only read."""
    if kv == "i8" and device.name != "cpu":
        pytest.skip("GPUs have no caches of I8")
    case = BASE.replace(descale_block=block)
    plan_case = case.replace(dtype_kv=kv, dtype_o="f32", descales="bht")
    data = make_data(case)
    got = Quantized(case, device, data, plan_case, capi.ROTATE, SEED)
    exact, _ = transformed(case, data, capi.ROTATE, SEED)
    for b, x in enumerate(exact["q"]):
        assert np.abs(got.x["q"][b] - x).max() <= 2.0 ** -8 * np.abs(x).max()
    check_numbers(case, got, exact, "k")
    check_numbers(case, got, exact, "v")
    with pytest.raises(capi.Refused, match="q stays as it is"):
        Quantized(case, device, data, plan_case)


def test_numbers_that_do_not_count(device):
    """Zeros, infinities, NaN, the smallest and the largest."""
    case = BASE.replace(dtype="f32", batch=5, heads_q=1, heads_kv=1, seqlen_q=1, seqlen_kv=2)
    data = make_data(case)
    rows = [[0, 0], [np.inf, -2], [np.nan, 448], [1e-45, 3e-45], [3.4e38, -1e38]]
    for b, values in enumerate(rows):
        data.v[b][:] = 0
        data.v[b][0, 0, :2] = values
    got = Quantized(case, device, data, eight(case), only="v")
    x = [v[0, 0, :2].tolist() for v in got.x["v"]]
    assert x[0] == [0, 0] and got.descales["v"][0, 0, 0] == 1
    assert x[1] == [448, -448] and abs(got.descales["v"][1, 0, 0] - 2 / 448) < 1e-9
    assert np.isnan(x[2][0]) and x[2][1] == 448 and got.descales["v"][2, 0, 0] == 1
    assert x[3] == [0, 0] and np.isfinite(1 / got.descales["v"][3, 0, 0])
    assert x[4] == [448, -128] and np.isfinite(got.descales["v"][4, 0, 0])


def test_integers(device):
    """Halves go to even; infinities saturate, NaN becomes 0."""
    if device.name != "cpu":
        pytest.skip("GPUs have no caches of I8")
    case = BASE.replace(dtype="f32", batch=1, heads_q=1, heads_kv=1, seqlen_q=1, seqlen_kv=1)
    data = make_data(case)
    data.v[0][:] = 0
    data.v[0][0, 0, :9] = [127, 0.5, 1.5, -2.5, -126.5, np.inf, -np.inf, np.nan, 3]
    got = Quantized(case, device, data, case.replace(dtype_kv="i8", descales="bht"), only="v")
    assert got.descales["v"][0, 0, 0] == 1
    assert got.x["v"][0][0, 0, :9].tolist() == [127, 0, 2, -2, -126, 127, -127, 0, 3]


class Hostile(Quantized):
    """A call whose lengths are spoilt once everything else is in place."""

    def __init__(self, case, device, data, rng):
        self.case, self.device, self.plan_case = case, device, eight(case)
        self.transform = capi.SMOOTH_K | capi.ROTATE
        self.refused = False
        call, fields, names = self.stage(device, data, SEED, "qkv")
        for name in NAMES:
            if name in call.buffers and (rng.integers(4) or name == "cu_q"):
                host = call.buffers[name].host
                host[:] = spoil(rng, host, max(int(host.max()), 1))
        for buffer in set(call.buffers.values()):
            buffer.push()
        try:
            device.launch(lambda stream: call.plan.quantize(fields, stream))
        except capi.Refused as refused:
            assert device.name == "cpu" and refused.reason == REASON_LENGTHS, str(refused)
            self.refused = True
        for name in names:  # any of its elements: whose they are nobody knows
            call.buffers[name].owned[:] = not self.refused
        call.collect(names)


@pytest.mark.parametrize("changes", [
    dict(cu_q=[70, 0, 33], cu_kv=[90, 257, 0], descale_block=64),
    dict(cu_q=[70, 0, 33], cu_kv=[90, 257, 0], lens_q=[7, 0, 33], lens_kv=[9, 200, 0]),
    dict(lens_q=[3, 70], lens_kv=[150, 40], starts_kv=[0, 9], descale_block=16)])
def test_hostile_values_touch_nothing_else(device, changes):
    case = BASE.replace(dim_v=64, **changes)
    data, rng = make_data(case), np.random.default_rng(3)
    plain = Quantized(case, device, data, eight(case), capi.SMOOTH_K | capi.ROTATE, SEED)
    refusals = sum(Hostile(case, device, data, rng).refused for _ in range(12))
    assert refusals > 0 or device.name != "cpu"
    same_as_on_the_cpu(
        Quantized(case, device, data, eight(case), capi.SMOOTH_K | capi.ROTATE, SEED), plain)


def exact_attention(case, data):
    return [reference.forward(case, data, b) for b in range(case.batch)]


@pytest.mark.parametrize("transform",
                         [0, capi.SMOOTH_K, capi.ROTATE, capi.SMOOTH_K | capi.ROTATE])
def test_results_are_those_of_the_wider_numbers(device, transform):
    """o to within the rounding of E4M3, and lse with its shift. Keys with a mean of 3 lose bits to
    it unless it is taken away."""
    case = BASE.replace(causal=True, descale_block=64)
    data = make_data(case)
    data.k = [round_to(x + 3, "bf16") for x in data.k]
    seed = SEED if transform & capi.ROTATE else 0
    got = Quantized(case, device, data, eight(case), transform, seed)
    result = run(eight(case), device, got.data(data))
    for b, exact in enumerate(exact_attention(case, data)):
        o = exact.o.swapaxes(0, 1)
        smooth = transform & capi.SMOOTH_K
        error = np.sqrt(((result.o[b] - o) ** 2).mean() / (o ** 2).mean())
        assert error < (0.06 if smooth else 0.1)
        lse = result.lse[b] + (got.lse_shift[b] if got.lse_shift else 0)
        assert np.abs(lse - exact.lse).max() < (0.12 if smooth else 0.3)


@pytest.mark.parametrize("changes, transform, words", [
    (dict(softcap=5.0), capi.SMOOTH_K, "softcap = 5"),
    (dict(sink=True), capi.SMOOTH_K, "SINK"),
    (dict(dim_qk=40), capi.ROTATE, "dim_qk = 40 is neither a power of two"),
    (dict(page_size=16), 0, "knows no pages"),
    (dict(), 4, "unknown bits 0x4"),
])
def test_refusals(device, changes, transform, words):
    case = BASE.replace(**changes)
    if device.name != "cpu" and not has_gpu_plan(case):
        pytest.skip("plans of E4M3 for GPUs have other heads")
    data = make_data(case)
    with pytest.raises(capi.Refused, match=words):
        Quantized(case, device, data, eight(case), transform)


def test_plans_without_eight_bits_are_refused(device):
    data = make_data(BASE)
    with pytest.raises(capi.Refused, match="nothing is to be quantised"):
        Quantized(BASE, device, data, BASE)
    with pytest.raises(capi.Refused, match="rotation_seed = 1 has a meaning only with"):
        Quantized(BASE, device, data, eightbit.BASE.replace(batch=2), seed=1)
