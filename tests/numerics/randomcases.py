"""Configurations drawn from everything that goes together, by Hypothesis: what it finds it makes
smaller, and tries first in the next run (build/hypothesis). The numbers come from a case's seed."""
import pathlib

import pytest
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.database import DirectoryBasedExampleDatabase

from . import capi, support
from .case import Case
from .repro import verify

ROOT = pathlib.Path(__file__).parents[2]
SHARES = 4  # of the examples, so that several processes have some
# The number of the first half of the shares: they are the same in every run, so that a change is
# judged by what it did. A run's own number decides the others, which no run has had before.
SAME = 234182091
FOLDER = ROOT / "build" / "hypothesis"
SETTINGS = settings(
    database=DirectoryBasedExampleDatabase(FOLDER / "examples"), deadline=None, derandomize=False,
    print_blob=False, suppress_health_check=list(HealthCheck))
set_hypothesis_home_dir(FOLDER)  # where it keeps what else it writes

# The first is what Hypothesis makes of the others, where that still shows a fault.
LENGTHS = (5, 0, 1, 2, 3, 8, 13, 16, 17, 31, 33, 63, 64, 65, 97, 113, 127, 129, 203)
DIMS = (8, 1, 3, 16, 20, 32, 40, 59, 64, 72, 96, 128, 160)
# Many tiles, and what tensor cores compute.
LARGE_LENGTHS = (64, 0, 1, 5, 127, 129, 255, 257, 511, 513, 700, 1023, 1025, 1500, 2049)
LARGE_DIMS = (8, 32, 64, 64, 80, 96, 128, 128, 192, 256, 256)

# Faults that this library had, and others (known by their issues), as far as a case can express
# them: every run tries them.
_SHORT = dict(batch=2, seqlen_q=37, seqlen_kv=70, heads_q=2, dim_qk=16, backward=True)
FOUND = (
    # A second tile of keys, where the 16 keys of a dropout's word began anew.
    Case(seqlen_q=30, seqlen_kv=620, heads_q=2, dim_qk=104, dropout=0.3),
    # dbias past all lengths, and of no query: not written.
    Case(bias="f32", dbias="hr", lens_q=[30, 0], lens_kv=[50, 64], **_SHORT),
    Case(bias="f32", dbias="h", **dict(_SHORT, seqlen_q=0)),
    # Tiles of keys that no query sees, behind a tile of queries that is not full.
    Case(seqlen_q=70, seqlen_kv=420, heads_q=2, dim_qk=64, dtype="bf16", causal=True,
         top_left=True, determinism=1, backward=True),
    # D summed from an fp32 dout beside dP of one that was rounded to 16 bits: one key, peaked rows.
    Case(dtype="f16", dtype_o="f32", dropout=0.5, **dict(_SHORT, seqlen_kv=1)),
    Case(dtype="bf16", dtype_o="f32", **dict(_SHORT, seqlen_kv=1)),
    # NaN of rows without a key: Dao-AILab/flash-attention#1778, and beside a sink #1973.
    Case(causal=True, **dict(_SHORT, seqlen_q=70, seqlen_kv=37)),
    Case(sink=True, dsink=True, dlse=True, lens_kv=[0, 70], dtype="bf16", **_SHORT),
    # Padding of NaN between packed sequences: Dao-AILab/flash-attention#1990.
    Case(cu_q=[7, 11, 0, 13], lens_q=[5, 11, 0, 7], cu_kv=[12, 18, 11, 9], lens_kv=[9, 0, 11, 8],
         heads_q=4, heads_kv=2, dim_qk=64, dtype="bf16", causal=True, backward=True),
    # NaN and wrong sums of a bias' gradient in fp32 beside bf16: jax-ml/jax#32242, #30593.
    Case(bias="f32", bias_empty=0.3, dbias="r", dtype="bf16", softcap=4.0,
         **dict(_SHORT, batch=3, seqlen_kv=77)),
    # Sequences without queries, without keys, none at all: Dao-AILab/flash-attention#1254, #2562.
    Case(cu_q=[0, 5, 3], cu_kv=[4, 0, 9], heads_q=2, dim_qk=16, dtype="f16", backward=True),
    Case(batch=0, backward=True),
    # Split keys of a paged cache whose table goes on: Dao-AILab/flash-attention#1217.
    Case(batch=2, seqlen_q=2, seqlen_kv=203, lens_kv=[203, 1], page_size=16, heads_q=4, heads_kv=2,
         dim_qk=64, dtype="bf16", splits=3, causal=True))


def one_in(n, *values, otherwise):
    """One of the values in one of n cases. Hypothesis makes it the other, where that serves."""
    return st.sampled_from((otherwise,) * (len(values) * (n - 1)) + values)


def subsets():
    return st.sampled_from(("", "b", "h", "r", "bh", "br", "hr", "bhr", "bhr"))


@st.composite
def layouts(draw, lengths):
    """Fields of lengths, and of where sequences lie."""
    kind = draw(st.sampled_from(
        ("dense", "dense", "lens", "varlen_q", "varlen_kv", "varlen", "paged")))
    batch = draw(st.integers(1, 4))
    several = st.lists(st.sampled_from(lengths), min_size=batch, max_size=batch)
    rows = draw(several)
    keys = draw(st.one_of(several, several, st.just(rows)))
    fields = dict(batch=batch, seqlen_q=max(rows), seqlen_kv=max(keys))
    if kind in ("varlen", "varlen_q"):
        fields["cu_q"] = rows
    if kind in ("varlen", "varlen_kv"):
        fields["cu_kv"] = keys
    if kind == "paged":
        fields["page_size"] = draw(st.sampled_from((16, 1, 2, 3, 64, 100)))
        fields["hidden"] = draw(one_in(3, 0.3, 0.9, 1.0, otherwise=None))
        fields["seqlen_q"] = min(max(rows), draw(st.sampled_from((1, 2, 8, 300))))
        rows = [min(n, fields["seqlen_q"]) for n in rows]
    for name, most, used in (("q", rows, ("lens",)), ("kv", keys, ("lens", "paged"))):
        if kind in used or draw(one_in(7, True, otherwise=False)):
            # As long as the sequence most often, since that is what shows most.
            fields["lens_" + name] = [
                draw(st.sampled_from((0, n // 3, n))) if "cu_" + name in fields else n
                for n in most]
    if kind != "paged" and draw(one_in(7, True, otherwise=False)):
        case = Case(**fields)
        fields["starts_kv"] = [draw(st.integers(0, case.length_kv(b))) for b in range(batch)]
    return fields


@st.composite
def masks(draw):
    side = st.sampled_from((-1, 0, 1, 7, 31, 64, 100))
    size = st.sampled_from((1, 5, 16, 64, 100))
    fields = dict(causal=draw(st.booleans()), top_left=draw(one_in(5, True, otherwise=False)),
                  chunk=draw(one_in(7, 1, 3, 16, 33, 64, 100, otherwise=0)))
    if draw(one_in(3, True, otherwise=False)):
        fields["window"] = draw(side), draw(side)
    if draw(one_in(5, True, otherwise=False)):
        fields["blocks"] = draw(size), draw(size)
        fields["block_dims"] = draw(st.sampled_from(("", "b", "h", "bh")))
        fields["block_lists"] = draw(st.sampled_from(("", "padded", "ends", "rows")))
        fields["block_lens"] = draw(one_in(3, "", "b", "h", "bh", otherwise=None))
    if draw(one_in(5, True, otherwise=False)):
        fields["tree"] = draw(st.sampled_from((1, 5, 31, 32, 33, 64, 100, 255, 256)))
        fields["tree_dims"] = draw(st.sampled_from(("br", "br", "r", "b", "")))
        fields["density"] = draw(st.sampled_from((0.5, 0.02, 1.0)))
    return fields


@st.composite
def scores(draw, backward):
    bits = st.integers(0, 2 ** 64 - 1)
    fields = dict(softcap=draw(one_in(5, 0.7, 5.0, 30.0, otherwise=0.0)),
                  scale=draw(one_in(5, 0.05, 0.3, -0.2, otherwise=0.0)),
                  alibi=draw(one_in(4, "h", "bh", otherwise="")),
                  bias=draw(one_in(3, "f32", "f16", "bf16", "u8", "u8", otherwise="")),
                  sink=draw(one_in(4, True, otherwise=False)),
                  dropout=draw(one_in(4, 0.1, 0.5, 0.9, otherwise=0.0)),
                  dlse=backward and draw(one_in(3, True, otherwise=False)))
    fields["dsink"] = backward and fields["sink"]
    if fields["bias"]:
        fields["bias_dims"] = draw(subsets())
        fields["bias_empty"] = draw(one_in(3, 0.2, otherwise=0.0))
        if backward and fields["bias"] != "u8":
            fields["dbias"] = draw(st.one_of(st.none(), st.just(fields["bias_dims"]), subsets()))
    if fields["dropout"]:
        fields["rng"] = draw(bits), draw(bits)
        fields["rng_device"] = draw(one_in(3, True, otherwise=False))
    return fields


@st.composite
def cases(draw, large=False):
    dims = LARGE_DIMS if large else DIMS
    fields = dict(dtype=draw(st.sampled_from(("f32", "f16", "bf16"))),
                  seed=draw(st.integers(0, 7)),
                  heads_kv=draw(st.sampled_from((1, 1, 2, 3))), dim_qk=draw(st.sampled_from(dims)))
    fields["dtype_o"] = draw(one_in(3, "f32", otherwise=fields["dtype"]))
    fields["heads_q"] = fields["heads_kv"] * draw(st.sampled_from((1, 1, 2, 3, 5)))
    fields["dim_v"] = draw(st.one_of(*[st.just(fields["dim_qk"])] * 2, st.sampled_from(dims)))
    fields.update(draw(layouts(LARGE_LENGTHS if large else LENGTHS)))
    fields.update(draw(masks()))
    backward = not {"page_size", "tree"} & set(fields) and draw(
        st.sampled_from((False, True, True)))
    fields.update(draw(scores(backward)), backward=backward)
    fields["strides"] = draw(st.sampled_from(
        ("packed", "packed", "bshd", "bhsd", "sbhd", "qkv", "padded", "broadcast")))
    fields["threads"] = draw(st.sampled_from((0, 0, 1, 2, 3)))
    fields["splits"] = draw(one_in(2, 1, 3, 17, otherwise=0))
    fields["determinism"] = draw(st.sampled_from((0, 1, 2)))
    case = Case(**fields)
    if large and case.batch * case.heads_q * case.seqlen_q * case.seqlen_kv > 1 << 21:
        case.dropout = 0.0  # NumPy's Philox would take longer than everything else
    return case


def for_tensor_cores(case):
    """The case with head dimensions that GPU kernels take: nothing is refused."""
    def dim(n):
        return (160, 192, 224, 256)[case.seed % 4] if n == 160 else -(-n // 8) * 8

    return case.replace(dim_qk=dim(case.dim_qk), dim_v=dim(case.dim_v))


def try_share(share, strategy, count, number, device, found=()):
    """A share of count draws, which SAME or the number of the run decides; the first share, the
    cases found, too. Skipped where the backend refuses them all."""
    passed, refused = set(), []

    def judge(case):
        name = case.to_json()
        if name in passed:  # a third of the draws
            return
        try:
            verify(case, device)
            passed.add(name)
        except capi.Refused as refusal:
            if not support.may_be_skipped(refusal):
                raise
            refused.append(str(refusal))

    judge = given(strategy)(judge)
    for case in found if share == 0 else ():
        judge = example(case)(judge)
    # In this order: seed() takes the database away.
    judge = seed((SAME if share < SHARES // 2 else number) * SHARES + share)(judge)
    settings(SETTINGS, max_examples=-(-count // SHARES))(judge)()
    if refused and not passed:
        pytest.skip(refused[0])
