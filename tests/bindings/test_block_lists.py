"""Blocks of a mask by lists and by lengths in Python, against the same mask as a bias of bool."""
import numpy as np
import pytest

import flashattn
from flashattn import Reason
from numerics import arrays
from numerics.arrays import close, random

Q, KV = 4, 5  # queries and keys a block
SIZES = dict(block_q=Q, block_kv=KV)
I, J = np.indices((9, 13))  # 3 blocks by 3


def qkv():
    return random(2, 9, 4, 16), random(2, 13, 2, 16, seed=1), random(2, 13, 2, 16, seed=2)


def blocks(*shape):
    """Which are on, at random; of the first row none is, if there are others."""
    on = np.random.default_rng(list(shape)).random((*shape, 3, 3)) < 0.6
    on[..., 0, :] = False
    return on


def lists(on, padding=-1, more=2):
    """Each row's blocks in reversed order, in front of padding; and how many there are."""
    index = np.full((*on.shape[:-1], on.shape[-1] + more), padding, np.int32)
    for row in np.ndindex(on.shape[:-1]):
        numbers = np.flatnonzero(on[row])[::-1]
        index[row][:len(numbers)] = numbers
    return index, on.sum(-1, dtype=np.int32)


def keys_of(on, lens=None):
    """The mask in full: what a query sees."""
    visible = on[..., I // Q, J // KV]
    return visible if lens is None else visible & ((J % KV) < lens[..., J // KV])


def lens_of(*shape):
    return np.random.default_rng(7).integers(0, KV + 1, (*shape, 3), dtype=np.int32)


@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (2, 1), (4,), ()])
@pytest.mark.parametrize("causal", [False, True])
def test_lists_are_a_block_mask(shape, causal):
    (q, k, v), on = qkv(), blocks(*shape)
    index, count = lists(on)
    options = dict(SIZES, causal=causal, return_lse=True)
    expected = flashattn.attention(q, k, v, block_mask=on, **options)
    for given in [dict(block_index=index), dict(block_index=index.astype(np.int64)),
                  dict(block_index=lists(on, 0)[0], block_end=count),
                  dict(block_index=lists(on, 3)[0]),  # there are blocks 0, 1 and 2
                  dict(block_index=np.roll(index, 2, -1), block_begin=np.full(3, 2),
                       block_end=count + 2)]:
        for got, want in zip(flashattn.attention(q, k, v, **given, **options), expected):
            np.testing.assert_array_equal(got, want)
    close(expected[0], arrays.attention(q, k, v, bias=keys_of(on), causal=causal)[0])


@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (2, 1), ()])
@pytest.mark.parametrize("by_lists", [False, True])
def test_lengths_of_blocks(shape, by_lists):
    (q, k, v), on, lens = qkv(), blocks(2, 4), lens_of(*shape)
    given = dict(SIZES, block_lens=lens, **(
        dict(block_index=lists(on)[0]) if by_lists else dict(block_mask=on)))
    visible = keys_of(on, lens)
    o, lse = flashattn.attention(q, k, v, return_lse=True, **given)
    want_o, want_lse = arrays.attention(q, k, v, bias=visible)
    close(o, want_o)
    close(lse, want_lse)
    dout = random(2, 9, 4, 16, seed=3)
    for got, want in zip(flashattn.attention_backward(dout, q, k, v, o, lse, **given),
                         arrays.backward(dout, q, k, v, bias=visible)):
        close(got, want)


def test_block_sparse_rows():
    """Compressed rows, whose columns lie in one list for all."""
    (q, k, v), on = qkv(), blocks()
    indices = np.nonzero(on)[1]
    indptr = np.concatenate([[0], np.cumsum(on.sum(-1))])
    o = flashattn.attention(q, k, v, block_index=indices[None], block_begin=indptr[:-1],
                            block_end=indptr[1:], **SIZES)
    np.testing.assert_array_equal(o, flashattn.attention(q, k, v, block_mask=on, **SIZES))


@pytest.mark.parametrize("given", [
    dict(block_index=np.zeros((3, 0), np.int32)), dict(block_index=np.zeros(0, np.int32)),
    dict(block_index=np.full((3, 2), -1)), dict(block_index=np.full((3, 2), 3)),
    dict(block_index=[-2**31, 2**31 - 1]), dict(block_index=[0, 1, 2], block_end=0),
    dict(block_index=[0, 1, 2], block_begin=[1, 3, 9], block_end=[1, 2, 9]),
    dict(block_index=[0, 1, 2], block_end=-5), dict(block_index=[0, 1, 2], block_begin=3),
    dict(block_index=[0, 1, 2], block_lens=0), dict(block_index=[0, 1, 2], block_lens=-1)])
def test_no_block_is_on(given):
    """What counts for nothing is not read as a block, and no query sees a key."""
    o, lse = flashattn.attention(*qkv(), return_lse=True, **given, **SIZES)
    assert not o.any() and (lse == -np.inf).all()


def test_what_lies_past_the_ends_is_cut_off():
    q, k, v = qkv()
    expected = flashattn.attention(q, k, v)
    for given in [dict(block_index=[0, 1, 2]), dict(block_index=[2, 2, 0, -1, 1, 1, 99]),
                  dict(block_index=[0, 1, 2], block_begin=-2**31, block_end=2**31 - 1),
                  dict(block_index=[0, 1, 2], block_lens=[5, 5, 3]),
                  dict(block_index=[0, 1, 2], block_lens=2**31 - 1)]:
        np.testing.assert_array_equal(flashattn.attention(q, k, v, **given, **SIZES), expected)


def test_packed_sequences():
    """Blocks count from the start of each sequence."""
    q, k, v = qkv()
    on, lens = blocks(2, 4), lens_of(2, 4)
    given = dict(SIZES, block_index=lists(on)[0], block_lens=lens)
    dense = flashattn.attention(q, k, v, **given)
    cu_q, cu_kv = [0, 9, 18], [0, 13, 26]
    packed = flashattn.attention_varlen(*[x.reshape(-1, *x.shape[2:]) for x in (q, k, v)], cu_q,
                                        cu_kv, **given)
    np.testing.assert_array_equal(packed.reshape(dense.shape), dense)


def test_plans():
    (q, k, v), on, lens = qkv(), blocks(), lens_of()
    plan = flashattn.Plan(dtype="float32", heads_q=4, heads_kv=2, dim_qk=16, block_lists=True,
                          block_lens=True, max_batch=2, max_seqlen_q=9, max_seqlen_kv=13, **SIZES)
    mask = flashattn.Mask(plan.descriptor.mask)
    assert mask == flashattn.Mask.BLOCKS | flashattn.Mask.BLOCK_LISTS | flashattn.Mask.BLOCK_LENS
    index, count = lists(on)
    for given in (dict(block_index=index), dict(block_index=index[:, :3], block_end=count)):
        np.testing.assert_array_equal(
            plan.forward(q, k, v, block_lens=lens, **given),
            flashattn.attention(q, k, v, block_lens=lens, **given, **SIZES))
    plain = flashattn.Plan(dtype="float32", heads_q=4, heads_kv=2, dim_qk=16, max_batch=2,
                           max_seqlen_q=9, max_seqlen_kv=13, **SIZES)
    assert plan.workspace_size() > plain.workspace_size()
    for given in (dict(block_mask=on), {}):
        with pytest.raises(ValueError, match="^block_index is not given, .* block_lists; give it"):
            plan.forward(q, k, v, block_lens=lens, **given)
    with pytest.raises(ValueError, match="^block_index.data is set, .* no mask bit BLOCK_LISTS"):
        plain.forward(q, k, v, block_index=index)
    with pytest.raises(ValueError, match="^block_lens.data is NULL"):
        plan.forward(q, k, v, block_index=index)


INDEX, MASK = np.zeros((3, 2), np.int32), np.ones((3, 3), bool)


@pytest.mark.parametrize("given, reason, field, words", [
    (dict(block_index=INDEX), Reason.SIZE, "block_q", "block_q = 0, but block_index is given.* 1$"),
    (dict(block_index=INDEX, block_q=Q), Reason.MASK_COMBINATION, "block_kv", "block_kv = 0"),
    (dict(block_index=INDEX, block_mask=MASK, **SIZES), Reason.MASK_COMBINATION, "block_mask",
     "block_mask and block_index are both given.* leave one out"),
    (dict(block_index=INDEX[:2], **SIZES), Reason.SIZE, "block_index",
     r"\(2, 2\), which does not broadcast to .*block_entries\) = \(2, 4, 3, 2\)"),
    (dict(block_index=INDEX * 1.0, **SIZES), Reason.DTYPE, "block_index", "convert it to int32"),
    (dict(block_index=[2**31], **SIZES), Reason.LENGTHS, "block_index", "2147483648"),
    (dict(block_index=INDEX, block_end=[[1], [1], [1]], **SIZES), Reason.SIZE, "block_end",
     r"\(3, 1\), which does not broadcast"),
    (dict(block_index=INDEX, block_begin=[0, 1], **SIZES), Reason.SIZE, "block_begin", "broadcast"),
    (dict(block_index=INDEX, block_lens=[1, 2], **SIZES), Reason.SIZE, "block_lens", "broadcast"),
    (dict(block_mask=MASK, block_begin=[0, 1, 1], **SIZES), Reason.VALUE, "block_begin",
     "given without block_index.* leave it out"),
    (dict(block_mask=MASK, block_end=[0, 1, 1], **SIZES), Reason.VALUE, "block_end",
     "given without block_index.* leave it out"),
    (dict(block_lens=[1, 2, 3], **SIZES), Reason.NULL_POINTER, "block_mask.data", "is NULL"),
    (dict(block_lens=[1, 2, 3], block_kv=KV), Reason.MASK_COMBINATION, "block_kv", "BLOCKS"),
    (dict(block_lens=[1, 2, 3]), Reason.SIZE, "block_kv", "block_kv = 0, but block_lens")])
def test_refused(given, reason, field, words):
    with pytest.raises(flashattn.FlashAttentionError, match=words) as caught:
        flashattn.attention(*qkv(), **given)
    assert (caught.value.reason, caught.value.field) == (reason, field)


@pytest.mark.parametrize("description", [dict(block_lists=True), dict(block_lens=True)])
def test_descriptions_without_blocks(description):
    with pytest.raises(ValueError, match="BLOCK_LISTS or BLOCK_LENS.* not BLOCKS; add") as caught:
        flashattn.check(dtype="float32", heads_q=2, dim_qk=8, **description)
    assert caught.value.field == "mask" and caught.value.reason is Reason.MASK_COMBINATION


def test_the_workspace_holds_the_mask():
    """It is made there: a limit that leaves no room for it is refused, one that does is kept."""
    maxima = dict(max_batch=2, max_seqlen_q=400, max_seqlen_kv=700)
    plain = dict(dtype="float32", heads_q=4, dim_qk=16, block_q=1, block_kv=1, **maxima)
    without, needed = (flashattn.Plan(**plain, block_lists=lists).workspace_size()
                       for lists in (False, True))
    mask = 2 * 4 * 400 * 704  # rows of whole vectors
    assert mask <= needed - without <= mask + 1024
    plan = flashattn.Plan(**plain, block_lists=True, workspace_limit=needed)
    assert plan.workspace_size() <= needed
    assert plan.workspace_size("forward", batch=1, seqlen_q=9, seqlen_kv=9) < needed
    with pytest.raises(flashattn.UnsupportedError, match="workspace_limit") as refused:
        flashattn.Plan(**plain, block_lists=True, workspace_limit=mask)
    assert refused.value.reason == Reason.WORKSPACE_LIMIT


def test_more_blocks_than_a_mask_may_have():
    options = dict(dtype="float32", heads_q=64, dim_qk=1, block_q=1, block_kv=1)
    sizes = dict(max_batch=1, max_seqlen_q=1 << 20, max_seqlen_kv=1 << 21)
    flashattn.Plan(**options, **sizes)
    with pytest.raises(ValueError, match="2\\^46 blocks") as refused:
        flashattn.Plan(**options, **sizes, block_lens=True)
    assert refused.value.field == "max_seqlen_kv"
