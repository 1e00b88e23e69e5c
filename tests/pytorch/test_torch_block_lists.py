"""Block masks by lists and lengths of blocks on PyTorch's tensors, and BlockMasks of
FlexAttention."""
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import flashattn
import flashattn.torch as fa
import reference
from flashattn.torch import _launch
from flashattn.torch.functional import _options_of
from test_torch_operators import compiled

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
Q, KV, ROWS, COLUMNS = 8, 16, 5, 3  # queries and keys a block; blocks of 33 queries, of 45 keys
SIZES = dict(block_q=Q, block_kv=KV)


def tensors(device, *batch, dtype=torch.float32):
    return [torch.randn(*batch, n, h, 16, device=device).to(dtype)
            for n, h in ((33, 4), (45, 2), (45, 2))]


def lists(on, dtype=torch.int32):
    """Each row's blocks, the last first, in front of -1; and how many there are."""
    numbers = torch.arange(on.shape[-1], device=on.device).expand(on.shape)
    index = torch.where(on, numbers, -1).sort(-1, descending=True).values
    return index.to(dtype), on.sum(-1, dtype=dtype)


def lens_of(*shape, device):
    return torch.randint(0, KV + 1, (*shape, COLUMNS), device=device, dtype=torch.int32)


def visible(on, lens=None):
    wide = on.repeat_interleave(Q, -2).repeat_interleave(KV, -1)[..., :33, :45]
    if lens is None:
        return wide
    keys = torch.arange(45, device=on.device)
    return wide & (keys % KV < lens[..., keys // KV]).unsqueeze(-2)


@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (2, 1), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_the_reference(device, shape, dtype):
    on = torch.rand(*shape, ROWS, COLUMNS, device=device) > 0.4
    (index, count), lens = lists(on, torch.int64), lens_of(*shape, device=device)
    q, k, v = inputs = tensors(device, 2, dtype=dtype)
    behind = torch.nn.functional.pad(index, (1, 0))  # a block 0 that does not count
    want = fa.attention(q, k, v, block_mask=on, **SIZES)
    for given in (dict(block_index=index), dict(block_index=index.clamp(min=0), block_end=count),
                  dict(block_index=behind, block_begin=torch.ones_like(count),
                       block_end=count + 1)):
        assert torch.equal(fa.attention(q, k, v, **given, **SIZES), want)

    def ours(q, k, v):
        return fa.attention(q, k, v, block_index=index, block_lens=lens, return_lse=True, **SIZES)

    def naive(q, k, v):
        return reference.attention(q, k, v, bias=visible(on, lens))

    o, lse = ours(*inputs)
    dout, dlse = torch.randn_like(o), torch.randn_like(lse)
    results = [reference.gradients(function, inputs, kind, dout, dlse) for function, kind in (
        (ours, dtype), (naive, torch.float64), (naive, dtype))]
    reference.check(*results, ("o", "lse", "dq", "dk", "dv"))


def operands(q, k, v, return_lse=True, **beside):
    """The arguments of torch.ops.flashattn.forward."""
    options = _options_of(False, None, None, False, 0.0, None, 0.0, Q, KV, 0, False)
    return (q, k, v, *{**dict.fromkeys(_launch.BESIDE), **beside}.values(), -1, -1, *options,
            return_lse)


def everything(device):
    on = torch.rand(2, 1, ROWS, COLUMNS, device=device) > 0.4
    index, count = lists(on)
    return dict(block_index=index, block_begin=torch.zeros_like(count), block_end=count,
                block_lens=lens_of(4, device=device))


def test_opcheck(device):
    q, k, v = tensors(device, 2)
    leaves, beside = [x.clone().requires_grad_() for x in (q, k, v)], everything(device)
    torch.library.opcheck(torch.ops.flashattn.forward.default, operands(*leaves, **beside))
    arguments = operands(q, k, v, **beside)
    o, lse = torch.ops.flashattn.forward(*arguments)
    assert torch.equal(o, fa.attention(q, k, v, **beside, **SIZES))
    torch.library.opcheck(torch.ops.flashattn.backward.default, (
        torch.randn_like(o), None, q, k, v, o, lse, *arguments[3:-1], False, False))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(device, backend):
    inputs, beside = [x.requires_grad_() for x in tensors(device, 2)], everything(device)

    def layer(q, k, v, beside):
        return fa.attention(q * 2, k, v, **beside, **SIZES).square().sum()

    want, got = layer(*inputs, beside), compiled(layer, backend)(*inputs, beside)
    torch.testing.assert_close(got, want)
    for g, w in zip(*(torch.autograd.grad(x, inputs) for x in (got, want))):
        torch.testing.assert_close(g, w, atol=1e-5, rtol=1e-4)


def test_vmap(device):
    """Lists that all samples share are folded; a sample's own are not."""
    q, k, v = tensors(device, 3, 2)
    beside, shared = everything(device), lists(torch.rand(4, ROWS, COLUMNS, device=device) > 0.4)[0]
    for given, calls in ((dict(beside, block_index=shared, block_begin=None, block_end=None), 1),
                         (beside, 3)):
        before = fa.report()["forward"]
        got = torch.vmap(lambda q, k, v: fa.attention(q, k, v, **given, **SIZES))(q, k, v)
        assert fa.report()["forward"] == before + calls
        for i in range(3):
            assert torch.equal(got[i], fa.attention(q[i], k[i], v[i], **given, **SIZES))
    index = torch.stack([beside["block_index"], beside["block_index"].flip(0)])
    got = torch.vmap(lambda q, index: fa.attention(q, k[0], v[0], block_index=index, **SIZES))(
        q[:2], index)
    for i in range(2):
        assert torch.equal(got[i], fa.attention(q[i], k[0], v[0], block_index=index[i], **SIZES))


def test_new_lists_in_the_same_memory(device):
    """A call that repeats an earlier one reads what the tensors hold now."""
    q, k, v = tensors(device, 2)
    index = torch.zeros(ROWS, 2, dtype=torch.int32, device=device)
    for numbers in ((0, -1), (1, 2), (-1, -1), (2, 0)):
        index.copy_(torch.tensor(numbers))
        o = fa.attention(q, k, v, block_index=index, **SIZES)
        on = torch.tensor([i in numbers for i in range(COLUMNS)], device=device)
        assert torch.equal(o, fa.attention(q, k, v, block_mask=on.expand(ROWS, -1).contiguous(),
                                           **SIZES))
    for columns in (1, 0):  # a list of another length, and none
        o = fa.attention(q, k, v, block_index=index[:, :columns].contiguous(), **SIZES)
        assert bool(o.any()) == bool(columns)


def causal(b, h, i, j):
    return i >= j


def sliding(b, h, i, j):
    return (i >= j) & (i - j <= 140)


@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("mask_mod, options", [
    (causal, dict(causal=True)), (sliding, dict(window=(140, 0)))])
def test_block_masks_of_flex_attention(device, mask_mod, options, heads):
    q, k, v = inputs = [torch.randn(2, 4, 300, 16, device=device) for _ in range(3)]
    block_mask = create_block_mask(mask_mod, None, heads, 300, 300, device, BLOCK_SIZE=(32, 64))
    assert block_mask.kv_num_blocks.any() and block_mask.full_kv_num_blocks.any()
    given = fa.block_lists(block_mask)
    assert given["block_q"] == 32 and given["block_kv"] == 64
    want = flex_attention(q, k, v, block_mask=block_mask)  # on the CPU it has no gradient
    q, k, v = [x.requires_grad_() for x in inputs]
    o = fa.attention(q, k, v, layout="bhsd", **options, **given)
    torch.testing.assert_close(o, want, atol=1e-5, rtol=1e-4)
    got = compiled(lambda q, k, v, block_mask: fa.attention(
        q, k, v, layout="bhsd", **options, **fa.block_lists(block_mask)))(q, k, v, block_mask)
    assert torch.equal(got, o)
    dout = torch.randn_like(o)
    plain = fa.attention(q, k, v, layout="bhsd", **options)
    for g, w in zip(*(torch.autograd.grad(x, inputs, dout) for x in (o, plain))):
        torch.testing.assert_close(g, w, atol=1e-5, rtol=1e-4)


def test_causal_block_masks_count_from_the_first_query(device):
    q, k = torch.randn(1, 2, 100, 16, device=device), torch.randn(1, 2, 260, 16, device=device)
    block_mask = create_block_mask(causal, None, None, 100, 260, device, BLOCK_SIZE=32)
    o = fa.attention(q, k, k, layout="bhsd", causal=True, top_left=True,
                     **fa.block_lists(block_mask))
    torch.testing.assert_close(o, flex_attention(q, k, k, block_mask=block_mask), atol=1e-5,
                               rtol=1e-4)


def test_block_masks_without_a_mask_mod(device):
    """Of one list, which is not copied; in a row of it anything may follow its blocks."""
    q, k, v = tensors(device, 2)
    on = torch.rand(2, 4, ROWS, COLUMNS, device=device) > 0.4
    index, count = lists(on)
    block_mask = BlockMask.from_kv_blocks(count, index.clamp(min=0), BLOCK_SIZE=(Q, KV),
                                          seq_lengths=(33, 45))
    given = fa.block_lists(block_mask)
    assert given["block_index"] is block_mask.kv_indices and given["block_end"] is count
    assert torch.equal(fa.attention(q, k, v, **given),
                       fa.attention(q, k, v, block_mask=on, **SIZES))


def test_refused(device):
    q, k, v = tensors(device, 2)
    index = lists(torch.ones(ROWS, COLUMNS, dtype=torch.bool, device=device))[0]
    block_mask = create_block_mask(causal, None, None, 33, 45, device, BLOCK_SIZE=16)
    for given, words in [
            (dict(block_mask=block_mask), r"block_mask is a BlockMask; .*block_lists\(block_mask"),
            (dict(block_mask=[True]), "block_mask is a list; give a tensor"),
            (dict(block_index=index), "block_q = 0, but block_index is given"),
            (dict(block_index=index.float(), **SIZES), "block_index has dtype float32"),
            (dict(block_index=index[:2], **SIZES), r"block_index has shape \(2, 3\), which does "),
            (dict(block_index=index.t().contiguous().t(), **SIZES), "would have to be copied"),
            (dict(block_end=index[:, 0], **SIZES), "block_end is given without block_index")]:
        with pytest.raises(flashattn.FlashAttentionError, match=words):
            fa.attention(q, k, v, **given)
    with pytest.raises(TypeError, match="block_mask is of type Tensor; give a BlockMask of torch"):
        fa.block_lists(index)
