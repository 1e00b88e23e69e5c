"""flashattn.torch against float64: at most twice the error of the naive formula."""
import pytest
import torch

import flashattn
import flashattn.torch as fa
import reference

NAMES = ("o", "lse", "dq", "dk", "dv", "dbias", "dsink")
CASES = {
    "plain": {},
    "causal": dict(causal=True),
    "top-left": dict(causal=True, top_left=True),
    "window": dict(window=(7, 3)),
    "softcap": dict(softcap=3.0),
    "scale": dict(scale=0.3, causal=True),
}


def tensors(device, dtype, sq=33, sk=45, heads=4, heads_kv=2, dim=16, dim_v=16):
    return [torch.randn(2, n, h, d, device=device).to(dtype) for n, h, d in
            ((sq, heads, dim), (sk, heads_kv, dim), (sk, heads_kv, dim_v))]


def compare(inputs, ours, naive, dtype, with_lse=True):
    """ours and naive take copies of inputs and give (o, lse)."""
    o, lse = ours(*inputs)
    dout = torch.randn_like(o)
    dlse = torch.randn_like(lse) if with_lse else None
    got = reference.gradients(ours, inputs, dtype, dout, dlse)
    truth = reference.gradients(naive, inputs, torch.float64, dout, dlse)
    other = reference.gradients(naive, inputs, dtype, dout, dlse)
    reference.check(got, truth, other, NAMES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_masks(device, dtype, case):
    inputs, options = tensors(device, dtype), CASES[case]
    if case == "softcap":
        inputs[0] = inputs[0] * 3
    compare(inputs, lambda q, k, v: fa.attention(q, k, v, return_lse=True, **options),
            lambda q, k, v: reference.attention(q, k, v, **options), dtype)


@pytest.mark.parametrize("heads, heads_kv", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("dim, dim_v", [(8, 24), (64, 64), (57, 33)])
def test_heads_and_dims(device, heads, heads_kv, dim, dim_v):
    dtype = torch.float16
    compare(tensors(device, dtype, heads=heads, heads_kv=heads_kv, dim=dim, dim_v=dim_v),
            lambda q, k, v: fa.attention(q, k, v, causal=True, return_lse=True),
            lambda q, k, v: reference.attention(q, k, v, causal=True), dtype)


@pytest.mark.parametrize("shape", [(2, 4, 33, 45), (1, 4, 33, 45), (4, 1, 45), (33, 45), (45,)])
def test_bias_and_sink(device, shape):
    dtype = torch.float32
    inputs = [*tensors(device, dtype), torch.randn(shape, device=device),
              torch.randn(4, device=device)]
    compare(inputs, lambda q, k, v, bias, sink: fa.attention(
        q, k, v, bias=bias, sink=sink, return_lse=True), lambda q, k, v, bias, sink:
        reference.attention(q, k, v, bias=bias, sink=sink), dtype)


def test_small_tensors_of_other_types(device):
    """A bias of 16 bits, a sink of 16 bits, slopes, lengths of 64 bits, a boolean mask."""
    dtype = torch.bfloat16
    inputs = [*tensors(device, dtype), torch.randn(2, 1, 33, 45, device=device).to(dtype),
              torch.randn(4, device=device).to(dtype)]
    lens = torch.tensor([45, 20], device=device)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0], device=device)
    # The position that slopes count from is that of the length in use.
    compare(inputs, lambda q, k, v, bias, sink: fa.attention(
        q, k, v, bias=bias, sink=sink, alibi_slopes=slopes, return_lse=True),
        lambda q, k, v, bias, sink: reference.attention(q, k, v, bias=bias, sink=sink,
                                                        alibi_slopes=slopes), dtype)
    q, k, v = tensors(device, torch.float32)
    mask = torch.rand(2, 1, 33, 45, device=device) > 0.3
    compare([q, k, v], lambda q, k, v: fa.attention(q, k, v, bias=mask, lens_kv=lens,
                                                    return_lse=True),
            lambda q, k, v: reference.attention(q, k, v, bias=mask, lens_kv=lens), torch.float32)
    blocks = torch.rand(2, 4, 5, 6, device=device) > 0.4
    wide = blocks.repeat_interleave(8, 2).repeat_interleave(8, 3)[:, :, :33, :45]
    compare([q, k, v], lambda q, k, v: fa.attention(
        q, k, v, block_mask=blocks, block_q=8, block_kv=8, return_lse=True),
        lambda q, k, v: reference.attention(q, k, v, bias=wide), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_varlen(device, dtype):
    lengths_q, lengths_kv = [5, 0, 33, 1], [9, 4, 33, 20]
    cu_q, cu_kv = (torch.tensor([0, *lengths], device=device).cumsum(0)
                   for lengths in (lengths_q, lengths_kv))
    inputs = [torch.randn(n, h, 16, device=device).to(dtype) for n, h in
              ((39, 4), (66, 2), (66, 2))]

    def ours(q, k, v):
        return fa.attention_varlen(q, k, v, cu_q, cu_kv, 33, 33, causal=True, return_lse=True)

    def naive(q, k, v):
        parts = [reference.attention(q[None, a:b], k[None, c:d], v[None, c:d], causal=True)
                 for a, b, c, d in zip(cu_q, cu_q[1:], cu_kv, cu_kv[1:])]
        return (torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1))

    compare(inputs, ours, naive, dtype)
    if device == "cpu":  # where the longest are found
        assert torch.equal(fa.attention_varlen(*inputs, cu_q, cu_kv, causal=True),
                           ours(*inputs)[0])


def test_strides(device):
    """Views of packed QKV, transposed views, a gradient that is expanded, one that is transposed, a
    last dimension with gaps."""
    packed = torch.randn(2, 40, 3, 4, 16, device=device, requires_grad=True)
    o = fa.attention(*packed.unbind(2), causal=True)
    o.sum().backward()
    got, packed.grad = packed.grad, None
    reference.attention(*packed.unbind(2), causal=True)[0].sum().backward()
    torch.testing.assert_close(got, packed.grad, atol=1e-5, rtol=1e-4)
    q, k, v = (torch.randn(2, 4, 40, 16, device=device, requires_grad=True) for _ in range(3))
    o = fa.attention(q, k, v, layout="bhsd")
    assert o.shape == q.shape and o.transpose(1, 2).is_contiguous()
    dout = torch.randn(16, 40, 4, 2, device=device).permute(3, 2, 1, 0)
    want = reference.attention(*(x.transpose(1, 2) for x in (q, k, v)))[0].transpose(1, 2)
    for g, w in zip(torch.autograd.grad(o, (q, k, v), dout),
                    torch.autograd.grad(want, (q, k, v), dout)):
        torch.testing.assert_close(g, w, atol=1e-5, rtol=1e-4)
    gaps = torch.randn(2, 40, 4, 32, device=device)[..., ::2]
    assert torch.equal(fa.attention(gaps, gaps, gaps), fa.attention(*[gaps.contiguous()] * 3))


def test_only_the_lse_has_a_gradient(device):
    q, k, v = (x.requires_grad_() for x in tensors(device, torch.float32))
    _, lse = fa.attention(q, k, v, return_lse=True)
    _, want = reference.attention(q, k, v)
    got = torch.autograd.grad(lse.square().sum(), (q, k))
    for g, w in zip(got, torch.autograd.grad(want.square().sum(), (q, k))):
        torch.testing.assert_close(g, w, atol=1e-5, rtol=1e-4)


def test_merge_and_its_gradient(device):
    dtype = torch.float32

    def ours(q, k, v):
        parts = [fa.attention(q, k[:, s], v[:, s], lens_kv=lens, return_lse=True)
                 for s, lens in ((slice(0, 25), None), (slice(25, 45), None), (slice(0, 5), none))]
        return fa.merge(*zip(*parts))

    none = torch.zeros(2, dtype=torch.int32, device=device)  # a part without a key
    compare(tensors(device, dtype), ours, reference.attention, dtype)


def test_paged(device):
    pages = torch.randn(9, 16, 2, 16, device=device)
    table = torch.tensor([[3, 1, 0], [5, 2, 8]], device=device)
    lens = torch.tensor([33, 48], device=device)
    q = torch.randn(2, 3, 4, 16, device=device)
    out = fa.attention_paged(q, pages, pages, table, lens, causal=True)
    for b, length in enumerate((33, 48)):
        keys = pages[table[b]].reshape(1, 48, 2, 16)[:, :length]
        want = reference.attention(q[b:b + 1], keys, keys, causal=True)[0]
        torch.testing.assert_close(out[b:b + 1], want, atol=1e-5, rtol=1e-4)
    with pytest.raises(NotImplementedError, match="paged"):
        fa.attention_paged(q.requires_grad_(), pages, pages, table, lens)


def test_what_has_no_gradient_says_so(device):
    q, k, v = tensors(device, torch.float32)
    slopes = torch.ones(4, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match="alibi_slopes requires a gradient"):
        fa.attention(q, k, v, alibi_slopes=slopes)
    q.requires_grad_()
    (first,) = torch.autograd.grad(fa.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="gradient of an attention's gradient"):
        first.sum().backward()


@pytest.mark.parametrize("call, what", [
    (lambda q: fa.attention(q, q[..., :8], q), "head dimension"),
    (lambda q: fa.attention(q, q.half(), q), "dtypes"),
    (lambda q: fa.attention(q.double(), q.double(), q.double()), "float64"),
    (lambda q: fa.attention(q, q, q, scale=torch.ones(())), "scale is a tensor"),
    (lambda q: fa.attention(q, q, q, rng=torch.zeros(2, dtype=torch.int64)), "without dropout"),
    (lambda q: fa.attention(q, q, q, dropout=0.5, rng=torch.zeros(2)), "rng_device"),
    (lambda q: fa.attention(q, q, q, lens_kv=torch.zeros(3).long()), r"lens_kv has shape \(3,\)"),
    (lambda q: fa.attention(q, q, q, lens_kv=torch.zeros(2)), "lens_kv"),
    (lambda q: fa.attention(q, q, q, window=(1, 2, 3)), "window"),
    (lambda q: fa.attention(q, q, q, layout="bhs"), "layout"),
    (lambda q: fa.attention(q[0], q, q), "dimensions"),
])
def test_refusals(call, what):
    with pytest.raises(flashattn.FlashAttentionError, match=what):
        call(torch.randn(2, 9, 2, 16))
