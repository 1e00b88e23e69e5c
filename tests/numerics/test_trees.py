"""Trees of drafted tokens: what their bits mean beside the other masks, and on which kernels."""
import dataclasses

import numpy as np
import pytest

from . import capi, support
from .case import Case
from .data import make_data
from .harness import run
from .repro import command
from .test_properties import alone

pytestmark = pytest.mark.smoke
BASE = Case(batch=2, seqlen_q=40, seqlen_kv=300, heads_q=4, heads_kv=2, dim_qk=64, tree=40,
            dtype="bf16", dtype_o="f32")


def chain(case):
    """Bits by which every token follows the one before: (1, rows, tree)."""
    first = case.seqlen_q - case.tree  # the query of the tree's first token
    return (np.arange(case.tree)[None] <= np.arange(case.seqlen_q)[:, None] - first)[None]


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("changes", [
    dict(), dict(seqlen_q=1, tree=1), dict(seqlen_q=3, tree=3, splits=3), dict(heads_kv=4),
    dict(seqlen_q=256, tree=256), dict(seqlen_q=90, tree=33), dict(seqlen_q=40, seqlen_kv=40),
    dict(page_size=16), dict(sink=True, softcap=9.0)])
def test_a_chain_is_a_causal_mask(device, changes, dtype):
    case = BASE.replace(causal=True, tree_dims="r", **{**changes, "dtype": dtype})
    data = make_data(case)
    data.tree_bits = chain(case)
    tree, causal = run(case, device, data), run(case.replace(tree=0), device, data)
    for b in range(case.batch):
        # Another kernel may round P otherwise.
        limit = dict(f32=1e-5, f16=2e-3, bf16=2e-2)[dtype]
        np.testing.assert_allclose(tree.o[b], causal.o[b], rtol=limit, atol=limit)
        np.testing.assert_allclose(tree.lse[b], causal.lse[b], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("changes", [
    dict(window=(9, 0)), dict(causal=True), dict(chunk=16), dict(blocks=(8, 16))])
def test_bits_alone_decide_of_the_tree(device, changes):
    """Without keys before it the other masks change nothing, but a block mask does."""
    case = BASE.replace(lens_kv=[40, 40], **changes)
    data, plain = make_data(case), make_data(BASE)
    data.tree_bits = plain.tree_bits = plain.tree_bits | np.eye(40, dtype=bool)
    plain.q, plain.k, plain.v = data.q, data.k, data.v
    masked, alike = run(case, device, data), run(BASE.replace(lens_kv=[40, 40]), device, plain)
    assert (masked.bits("o", "lse") == alike.bits("o", "lse")) == (case.blocks is None)


@pytest.mark.parametrize("case", [
    BASE.replace(batch=4, lens_kv=[300, 30, 0, 64], causal=True),
    BASE.replace(seqlen_q=3, tree=7, seqlen_kv=1100, lens_kv=[1100, 5], dtype="f32"),
    BASE.replace(cu_q=[40, 1, 200], cu_kv=[300, 70, 200], window=(90, 0))])
def test_a_sequence_does_not_depend_on_its_batch(device, case):
    case = case.replace(determinism=2)
    data = make_data(case)
    whole = run(case, device, data)
    for b in range(case.batch):
        one, part = alone(case, data, b)
        part = dataclasses.replace(part, tree_bits=data.tree_bits[b:b + 1])
        single = run(one, device, part)
        for name in ("o", "lse"):
            assert getattr(whole, name)[b].tobytes() == getattr(single, name)[0].tobytes(), \
                "%s of sequence %d: %s" % (name, b, command(case, device))


def test_threads_change_no_bit(device):
    for case in (BASE.replace(seqlen_q=3, seqlen_kv=2100), BASE.replace(seqlen_q=256, tree=256)):
        bits = {run(case.replace(threads=n, determinism=1), device).bits() for n in (1, 2, 3)}
        assert len(bits) == 1, command(case, device)


def test_the_portable_kernels_say_why(device):
    if support.backend(device.kind) != "all on 9.0":
        pytest.skip("a test of the Hopper backend, which may choose")
    plan = capi.Plan(capi.descriptor(BASE, device))  # which owns the text
    info = plan.info(capi.FORWARD, capi.sizes_of(BASE))
    assert capi.ffi.string(info.backend) == b"sm80"
    assert b"sm90 refuses: mask has TREE" in capi.ffi.string(info.why)


def test_hopper_kernels_pack_the_heads_of_a_tree(device):
    if support.backend(device.kind) != "all on 9.0":
        pytest.skip("a test of the Hopper backend, which may choose")
    case = BASE.replace(dtype_o=None, seqlen_kv=3000)
    plan = capi.Plan(capi.descriptor(case, device))
    assert capi.ffi.string(plan.info(capi.FORWARD, capi.sizes_of(case)).kernel).endswith(
        b"_packed_heads")
    run(case, device)
