"""flashattn_append_kv against float64, and against fp32 with every product and sum rounded by
itself, whose bits it must have."""
import dataclasses

import numpy as np
import pytest

from . import capi
from .appending import Append, Rotary
from .case import Case
from .device import CpuDevice
from .dtypes import EIGHT_BITS, EPSILON, round_to
from .tolerance import check

BASE = Case(batch=3, seqlen_q=5, seqlen_kv=77, lens_kv=[5, 40, 77], heads_q=6, heads_kv=2,
            dim_qk=64, dim_v=40, dtype="bf16", causal=True)
DECODE = BASE.replace(batch=7, seqlen_q=1, lens_kv=[1, 2, 77, 16, 17, 33, 60], heads_q=8,
                      dim_qk=128, dim_v=128)
CASES = {
    "plain": (BASE, None),
    "halves": (BASE, Rotary(64)),
    "interleaved": (BASE.replace(dtype="f16"), Rotary(64, True)),
    "f32": (BASE.replace(dtype="f32"), Rotary(64)),
    "f32 interleaved": (BASE.replace(dtype="f32"), Rotary(64, True, table="bf16")),
    "part": (BASE, Rotary(32)),
    "odd part": (BASE.replace(dtype="f16"), Rotary(30)),
    "odd part interleaved": (BASE, Rotary(6, True, gap=3)),
    "two elements": (BASE, Rotary(2, True)),
    "odd head": (BASE.replace(dim_qk=63, dim_v=3, dtype="f32"), Rotary(20)),
    "table f16": (BASE.replace(dtype="f16"), Rotary(64, table="f16", gap=8)),
    "table gap": (BASE, Rotary(64, True, table="bf16", gap=5)),
    "base": (BASE.replace(dtype="f32"), Rotary(64, base=10000.0)),
    "base interleaved": (BASE.replace(dtype="f32"), Rotary(64, True, base=500000.0)),
    "base far": (BASE.replace(dtype="f32"),
                 Rotary(64, base=10000.0, positions=[1 << 20, 1 << 24, 0])),
    "positions": (BASE, Rotary(64, positions=[100, 0, 7])),
    "decode": (DECODE, Rotary(128)),
    "decode pages": (DECODE.replace(page_size=16), Rotary(128, True)),
    "pages": (BASE.replace(page_size=3, seqlen_q=40, lens_kv=[40, 41, 77]), Rotary(64)),
    "page of 1": (BASE.replace(page_size=1, dtype="f16"), Rotary(16)),
    "prefill": (BASE.replace(seqlen_q=203, seqlen_kv=257, lens_kv=[203, 204, 257]), Rotary(64)),
    "bhsd": (BASE.replace(strides="bhsd"), Rotary(64)),
    "sbhd": (BASE.replace(strides="sbhd"), Rotary(64, True)),
    "padded": (BASE.replace(strides="padded", dtype="f16"), Rotary(64)),
    "padded pages": (DECODE.replace(strides="padded", page_size=64), Rotary(128)),
    "lens_q": (BASE.replace(lens_q=[0, 5, 3]), Rotary(64)),
    "starts": (BASE.replace(starts_kv=[0, 30, 3]), Rotary(64)),
    "packed": (BASE.replace(cu_q=[5, 0, 33], lens_kv=[5, 40, 77]), Rotary(64)),
    "packed pages": (BASE.replace(cu_q=[3, 40, 1], page_size=16, lens_kv=[77, 40, 60]), Rotary(64)),
    "packed, lens_q": (BASE.replace(cu_q=[3, 40, 1], lens_q=[2, 0, 1], page_size=16), Rotary(64)),
    "both packed": (BASE.replace(cu_q=[5, 0, 33], cu_kv=[10, 40, 77], lens_kv=[5, 40, 77]),
                    Rotary(64)),
    "latent": (BASE.replace(dim_qk=576, dim_v=512, heads_q=4, heads_kv=1), Rotary(64)),
    "no sequence": (BASE.replace(batch=0, lens_kv=[]), Rotary(64)),
    "no token": (BASE.replace(lens_q=[0, 0, 0]), Rotary(64)),
}
TINY = {"f32": 0, "bf16": 0, "f16": 2.0 ** -25, "f8": 2.0 ** -10, "i8": 0.5}  # half the least step
F8 = BASE.replace(dtype="f8", dtype_kv="f8", dtype_o="bf16", descales="bht", dim_v=64)
F8_CASES = {
    "head": (F8, Rotary(64), "bf16"),
    "blocks": (F8.replace(descale_block=7, descales="ht"), Rotary(64, True), "f16"),
    "plain": (F8.replace(descale_block=16, dtype_o="f32", dim_v=48), None, "f32"),
    "large": (F8.replace(dim_qk=1024, dim_v=520, dtype_o="f32"), None, "f32"),
    "no descales": (F8.replace(descales=None), Rotary(30), "bf16"),
    "starts": (F8.replace(starts_kv=[0, 30, 3], descale_block=5), Rotary(64), "bf16"),
    "integers": (BASE.replace(dtype_kv="i8", descales="bht", descale_block=1), Rotary(64), None),
    "integers, head": (BASE.replace(dtype="f32", dtype_kv="i8", descales="bh"), Rotary(30), None),
    "integers, f16": (BASE.replace(dtype="f16", dtype_kv="i8", descales=None), None, None),
    "beside wide queries": (BASE.replace(dtype_kv="f8", descales="bht", descale_block=16),
                            Rotary(64), None),
}


def check_rows(call, made, dtype_kv):
    case = call.case
    for name in call.new:
        dtype = call.wide if name == "q" else dtype_kv
        for b, got in enumerate(made["q_out" if name == "q" else name]):
            factor = np.float32(1) if name == "q" else call.factors(name, b)
            exact = call.turned(name, b) * factor
            if dtype in EIGHT_BITS:
                exact = np.clip(exact, -EIGHT_BITS[dtype], EIGHT_BITS[dtype])
            # One rounding of dtype, subnormals too; before it fp32's of two products, their sum
            # and the factor.
            size = np.abs(call.tokens[name][b]).max(-1, keepdims=True, initial=0) * factor
            allowed = EPSILON.get(dtype, 0) / 2 * np.abs(exact) + TINY[dtype] + 2.0 ** -22 * size
            assert (np.abs(got - exact) <= allowed).all(), (name, b)
            if not call.rotary or not call.rotary.base:
                alike = round_to(call.turned(name, b, np.float32) * factor, dtype)
                np.testing.assert_array_equal(got, alike, err_msg=f"{name} {b}")
    if "lens_out" in made:
        assert made["lens_out"] == [case.length_kv(b) + case.start_kv(b)
                                    for b in range(case.batch)]


@pytest.mark.smoke
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_rows(device, name, in_place):
    case, rotary = CASES[name]
    call = Append(case, device, rotary, "qkv" if rotary else "kv", in_place=in_place)
    check_rows(call, call.append(), case.dtype)


@pytest.mark.parametrize("new", ["q", "k", "v", "qk", "qv"])
@pytest.mark.parametrize("name", ["halves", "decode pages", "both packed"])
def test_some_of_the_arrays(device, name, new):
    case, rotary = CASES[name]
    if new == "v":
        rotary = None
    call = Append(case, device, rotary, new)
    check_rows(call, call.append(), case.dtype)


def supported(case, device, *arguments, **options):
    """An Append, or a skip where a GPU has no plan of such types."""
    try:
        return Append(case, device, *arguments, **options)
    except capi.Refused as refused:
        assert device.name != "cpu" and refused.status == capi.UNSUPPORTED
        pytest.skip(str(refused))


@pytest.mark.parametrize("name", F8_CASES)
def test_a_cache_of_eight_bits(device, name):
    case, rotary, wide = F8_CASES[name]
    call = supported(case, device, rotary, "qkv" if rotary else "kv", wide=wide)
    check_rows(call, call.append(), case.dtype_kv)


def power_of_two_above(x):
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.float32(1), exponent - (mantissa == 0.5)).astype(np.float32)


def expected_descales(call, name, b, n, elements):
    """Of the heads of block n, before and after: largest magnitudes over 448 or 127; of a block of
    several tokens the next power of two; what the block had where that suffices."""
    largest, block = np.float32(EIGHT_BITS[call.case.dtype_kv]), call.case.descale_block
    most = np.abs(np.where(np.isfinite(elements), elements, 0)).max((0, 2)).astype(np.float32)
    least = np.where(most == 0, np.float32(1), np.maximum(most / largest, np.float32(2.0 ** -126)))
    if block > 1:
        least = np.where(most == 0, np.float32(2.0 ** -126), power_of_two_above(least))
    if n * block >= call.old[b]:
        return None, least
    before = call.data.descales[name][b, :, n]
    return before, np.where(most <= before * largest, before, least)


F8_CACHE = BASE.replace(dtype_kv="f8", descales="bht", descale_block=16, dim_v=48)
UPDATES = {
    "blocks": (F8_CACHE, Rotary(64), 1.0),
    "growing": (F8_CACHE, Rotary(64), 1e4),
    "growing, f16": (F8_CACHE.replace(dtype="f16"), Rotary(64, True), 3e3),
    "small": (F8_CACHE.replace(dim_v=64), None, 1e-30),
    "zeros": (F8_CACHE, None, 0.0),
    "a descale a token": (F8_CACHE.replace(descale_block=1), Rotary(64), 5.0),
    "pages": (F8_CACHE.replace(page_size=8, seqlen_q=40, lens_kv=[40, 47, 77]), Rotary(64), 1e4),
    "pages of no whole block": (F8_CACHE.replace(page_size=10, descale_block=7), None, 1e4),
    "decode": (DECODE.replace(page_size=16, dtype_kv="f8", descales="bht", descale_block=16),
               Rotary(128), 1e3),
    "packed": (F8_CACHE.replace(cu_q=[5, 0, 33]), Rotary(64), 1e3),
    "starts": (F8_CACHE.replace(starts_kv=[0, 30, 3], descale_block=5), Rotary(64), 1e3),
    "many heads": (F8_CACHE.replace(heads_q=15, heads_kv=5, cu_q=[5, 0, 70]), Rotary(64), 1e3),
    "padded": (F8_CACHE.replace(strides="padded", dtype="f16"), Rotary(30), 1e3),
    "odd head": (F8_CACHE.replace(dim_qk=63, dim_v=3), Rotary(20), 1e3),
    "f8 queries": (F8.replace(descale_block=32), Rotary(64), 1e3),
    "integers": (F8_CACHE.replace(dtype_kv="i8"), Rotary(64), 1.0),
    "integers, growing": (F8_CACHE.replace(dtype_kv="i8", descale_block=24), Rotary(64), 1e4),
    "integers, a descale a token": (F8_CACHE.replace(dtype_kv="i8", descale_block=1), None, 5.0),
}


@pytest.mark.smoke
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", UPDATES)
def test_descales_are_made(device, name, in_place):
    """To the bit; and what a block held is rescaled where its descale grows."""
    case, rotary, size = UPDATES[name]  # of new tokens
    call = supported(case, device, rotary, "qkv" if rotary else "kv", in_place=in_place,
                     wide="bf16" if case.dtype == "f8" else None, updates=True)
    for side in set("kv") & set(call.new):
        for b, index in enumerate(call.new_places[side].index):
            call.tokens[side][b] = round_to(call.tokens[side][b] * np.float32(size), call.wide)
            call.buffers["new_" + side].host[index] = call.tokens[side][b]
    if size == 5.0:  # neither counts; an infinity becomes the largest number
        call.tokens["v"][2][0, 0, :2] = np.inf, -np.inf
        call.buffers["new_v"].host[call.new_places["v"].index[2][0, 0, :2]] = np.inf, -np.inf
    held = {side: [x[:n].copy() for x, n in zip(getattr(call.data, side), call.old)]
            for side in "kv"}
    made, block = call.append(), case.descale_block
    for side in "kv":
        for b, old in enumerate(call.old):
            elements = call.turned(side, b, np.float32)
            end = -(-(old + len(elements)) // block) if len(elements) else 0
            for n in range(old // block, end):
                rows = slice(max(n * block - old, 0), (n + 1) * block - old)
                before, after = expected_descales(call, side, b, n, elements[rows])
                np.testing.assert_array_equal(made["descale_" + side][b, :, n], after)
                np.testing.assert_array_equal(
                    made[side][b][rows],
                    round_to(elements[rows] * (1 / after)[:, None], case.dtype_kv))
                if before is None:
                    continue
                was = held[side][b][n * block:]
                np.testing.assert_array_equal(
                    made["held_" + side][b][n * block:],
                    np.where((before == after)[:, None], was,
                             round_to(was * (before / after)[:, None], case.dtype_kv)))
    if rotary:
        for b, got in enumerate(made["q_out"]):
            np.testing.assert_array_equal(
                got, round_to(call.turned("q", b, np.float32), call.wide))


@pytest.mark.parametrize("in_place", [False, True])
def test_q_is_rotated_where_the_cache_is_full(device, in_place):
    if device.name == "cpu":
        pytest.skip("a CPU refuses such lengths")
    case, _, _ = UPDATES["blocks"]
    call = supported(case, device, Rotary(64, positions=[3, 50, 9]), in_place=in_place,
                     updates=True)
    call.buffers["lens_before"].host[:] = 75, 77, 76  # of 77, with 5 new tokens
    for what in call.outputs:
        call.buffers[what].owned[:] = True
    for b, got in enumerate(call.append()["q_out"]):
        np.testing.assert_array_equal(got, round_to(call.turned("q", b, np.float32), call.wide))


def test_special_numbers_are_copied(device):
    """What is not rotated keeps its bits: infinities, NaN with what they carry, zeros' signs."""
    case = BASE.replace(dim_v=64)
    call = Append(case, device, None, "v")
    bits = np.arange(65536, dtype=np.uint16)
    buffer = call.buffers["new_v"]
    patterns = np.resize(bits[::33], buffer.host.size)
    buffer.host.view(np.uint16)[:] = patterns
    call.device.launch(call.stage_append())
    out = call.collect(["v"])["v"].view(np.uint16)
    given = buffer.host.view(np.uint16).reshape(3, 5, 2, 64)
    for b, index in enumerate(call.places["v"].index):
        np.testing.assert_array_equal(out[index[call.old[b]:]], given[b])


CACHE = dict(dtype_kv="f8", descales="bht", descale_block=16)
APPENDED = {name: CASES[name] for name in ("plain", "halves", "decode pages", "packed pages", "f32",
                                           "starts")}
APPENDED.update({
    "f8": (BASE.replace(dim_v=64, **CACHE), Rotary(64)),
    "i8 decode pages": (DECODE.replace(page_size=16, dtype_kv="i8", descales="bht",
                                       descale_block=1), Rotary(128)),
    "f8 decode pages": (DECODE.replace(page_size=16, dtype="f16", **CACHE), Rotary(128, True))})


@pytest.mark.parametrize("name", APPENDED)
def test_forward_sees_what_was_appended(device, name):
    """Appending, then forward with lens_out, is attention over the concatenation."""
    case, rotary = APPENDED[name]
    call = supported(case, device, rotary, in_place=False, new="qkv" if rotary else "kv")
    made = call.append()
    for x, old in (("k", call.old), ("v", call.old)):
        for b, rows in enumerate(made[x]):
            getattr(call.data, x)[b][old[b]:] = rows
    if rotary:
        call.inputs["q"] = call.fields["q_out"]
        call.data.q = made["q_out"]
    call.inputs["lens_kv"] = call.fields["lens_out"]
    check(case, call.data, call.forward())


def test_a_graph_appends_step_by_step(device):
    """One captured call, replayed: each replay appends one token more and rotates it further."""
    if device.name == "cpu":
        pytest.skip("CPUs have no graphs")
    case = DECODE.replace(page_size=16, lens_kv=[1, 2, 74, 16, 17, 33, 60])
    rotary = Rotary(128, base=10000.0)
    call = Append(case, device, rotary, in_place=True)
    enqueue = call.stage_append()
    graph = device.driver.capture(enqueue)
    for step in range(3):
        graph.launch(device.stream)
        device.driver.wait_stream(device.stream)
        lens = device.read(call.lens_buffer.address, 4 * case.batch).view(np.int32)
        assert lens.tolist() == [n + step for n in case.lens_kv]


@pytest.mark.parametrize("name", ["base", "base interleaved", "base far", "decode"])
def test_a_gpu_writes_the_bits_of_the_cpu(device, name):
    if device.name == "cpu":
        pytest.skip("this is the CPU")
    case, rotary = CASES[name]
    rotary = dataclasses.replace(rotary, base=rotary.base or 10000.0)
    here, there = (Append(case, where, rotary).append() for where in (CpuDevice(), device))
    for what in "kv":
        for x, y in zip(here[what] + here["q_out"], there[what] + there["q_out"]):
            np.testing.assert_array_equal(x, y)


NAMES = ("lens_before", "cu_q", "cu_kv", "lens_q", "starts_kv", "page_table", "positions")


@pytest.mark.parametrize("name", ["halves", "decode pages", "packed pages", "both packed", "starts",
                                  "positions", "lens_q", "pages", "base"])
def test_hostile_values_touch_nothing_else(device, name):
    """A CPU refuses them by name and writes nothing; a GPU writes rows of the cache only."""
    from .test_hostile import REASON_LENGTHS, spoil
    case, rotary = CASES[name]
    rng = np.random.default_rng(len(name))
    plan, refusals = capi.Plan(capi.descriptor(case, device)), 0
    for _ in range(12):
        call = Append(case, device, rotary, plan=plan, in_place=bool(rng.integers(2)))
        for what in NAMES:
            if what in call.buffers and rng.integers(4):
                host = call.buffers[what].host
                host[:] = spoil(rng, host, max(int(host.max()), 1))
        try:
            call.device.launch(call.stage_append())
        except capi.Refused as refused:
            assert device.name == "cpu" and refused.reason == REASON_LENGTHS, str(refused)
            refusals += 1
            for buffer in set(call.buffers.values()):
                buffer.owned[:] = False
        else:
            for what in call.outputs:
                call.buffers[what].owned[:] = True
        call.collect([])
    assert refusals > 0 or device.name != "cpu"


@pytest.mark.parametrize("changes, reason, words", [
    (dict(rotary_dim=66), 27, "rotary_dim = 66 is not an even number within 0 and dim_qk = 64"),
    (dict(rotary_dim=63), 27, "rotary_dim = 63"),
    (dict(rotary=2), 29, "rotary = 2 is not known"),
    (dict(dtype=1), 6, "not the plan's dtype = FLASHATTN_DTYPE_BF16"),
    (dict(dtype=4), 5, "not a type of new tokens"),
    (dict(dtype_rotary=4), 5, "not a type of cosines"),
    (dict(rotary_base=10000.0), 29, "leave it at 0"),
    (dict(rotary_positions=0), 27, "rotary_positions = 0 is below 1"),
    (dict(rotary_positions=76), 32, "new tokens up to position 76"),
    (dict(rotary_dim=0), 24, "rotary_cos.data is set"),
    (dict(seqlen_kv=76), 32, "lens_kv"),
    (dict(update_descales=2), 29, "update_descales = 2 is neither 0 nor 1"),
    (dict(update_descales=1), 5, "only with a cache of F8E4M3 or I8"),
    (dict(reserved=3), 30, "reserved = 3 of flashattn_append_kv_args"),
])
def test_refusals(device, changes, reason, words):
    if device.name != "cpu" and reason == 32:
        pytest.skip("a GPU does not look at lengths")
    call = Append(BASE, device, Rotary(64))
    call.fields.update(changes)
    with pytest.raises(capi.Refused, match=words) as caught:
        call.append()
    assert caught.value.reason == reason


def test_more_rows_than_blocks_are_counted_of(device):
    case, rotary, _ = UPDATES["starts"]
    call = supported(case, device, rotary, updates=True)
    call.fields.update(seqlen_q=2 ** 30, seqlen_kv=2 ** 30)
    with pytest.raises(capi.Refused, match="are 2147483648 in all") as caught:
        call.append()
    assert caught.value.reason == 27


def test_the_cache_may_not_be_the_input(device):
    call = Append(BASE, device, Rotary(64))
    call.fields["k"] = call.fields["k_cache"]
    with pytest.raises(capi.Refused, match="overlaps"):
        call.append()


@pytest.mark.parametrize("cu_q", [None, [0, 0, 0]])
def test_no_token_at_all(device, cu_q):
    """Arrays without an element may have no address; lens_out is written all the same."""
    case = BASE.replace(seqlen_q=0, cu_q=cu_q)
    call = Append(case, device, Rotary(64, base=100.0), "qkv")
    for name in "qkv":
        call.fields[name] = dict(capi.PACKED, data=capi.ffi.NULL)
    check_rows(call, call.append(), case.dtype)
