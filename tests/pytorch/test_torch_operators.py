"""The operators under what PyTorch does with them: compile, vmap, autocast, checkpoint, FLOPs."""
import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flashattn.torch as fa
import reference
from flashattn.torch import _launch
from flashattn.torch.functional import _options_of

BESIDE = dict.fromkeys(_launch.BESIDE)


def operands(q, k, v, *, beside=None, max_q=-1, max_kv=-1, return_lse=True, causal=False,
             dropout=0.0):
    """The arguments of torch.ops.flashattn.forward."""
    options = _options_of(causal, None, None, False, 0.0, None, dropout, 0, 0, 0, False)
    return (q, k, v, *{**BESIDE, **(beside or {})}.values(), max_q, max_kv, *options, return_lse)


def leaf(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, device=device).to(dtype).requires_grad_()


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def arrays_of(kind, heads_kv, dtype, device):
    """q, k, v of 4 heads, and the arguments of operands() that make them a call of that kind."""
    def make(*shape):
        return leaf(*shape, dtype=dtype, device=device)

    def integers(*values):
        return torch.tensor(values, device=device, dtype=torch.int32)

    q, k, v = make(2, 9, 4, 16), make(2, 11, heads_kv, 16), make(2, 11, heads_kv, 8)
    options = dict(causal=True)
    if kind == "strided":
        q, k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_().transpose(1, 2)
                   for x in (q, k, v))
    elif kind == "bias":
        options["beside"] = dict(bias=make(1, 4, 9, 11), sink=leaf(4, device=device),
                                 lens_kv=integers(11, 4))
    elif kind == "varlen":
        q, k, v = make(9, 4, 16), make(9, heads_kv, 16), make(9, heads_kv, 16)
        options.update(max_q=6, max_kv=6, beside=dict.fromkeys(
            ("cu_seqlens_q", "cu_seqlens_kv"), integers(0, 3, 9)))
    elif kind == "paged":
        q, (k, v) = q.detach(), torch.randn(2, 4, 16, heads_kv, 16, device=device).to(dtype)
        options.update(max_kv=32, return_lse=False, beside=dict(
            page_table=integers(3, 1, 0, 2).view(2, 2), lens_kv=integers(20, 32)))
    elif kind == "dropout":
        options.update(dropout=0.3, beside=dict(rng_device=torch.tensor([3, 5], device=device)))
    elif kind == "inference":
        q, k, v = q.detach(), k.detach(), v.detach()
        options["return_lse"] = False
    return (q, k, v), options


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("kind", ["dense", "strided", "bias", "varlen", "paged", "dropout",
                                  "inference"])
def test_opcheck(device, dtype, heads_kv, kind):
    tensors, options = arrays_of(kind, heads_kv, dtype, device)
    torch.library.opcheck(torch.ops.flashattn.forward.default, operands(*tensors, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads_kv", [4, 1])
@pytest.mark.parametrize("kind", ["dense", "strided", "bias", "varlen", "dropout"])
def test_opcheck_of_backward(device, dtype, heads_kv, kind):
    tensors, options = arrays_of(kind, heads_kv, dtype, device)
    tensors = [x.detach() for x in tensors]
    options["beside"] = {name: x.detach() for name, x in options.get("beside", {}).items()}
    arguments = operands(*tensors, **options)
    o, lse = torch.ops.flashattn.forward(*arguments)
    asked = kind == "bias"
    torch.library.opcheck(torch.ops.flashattn.backward.default, (
        torch.randn_like(o), torch.randn_like(lse) if asked else None, *tensors, o, lse,
        *arguments[3:-1], asked, asked))


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_of_merge(device, dtype):
    torch.library.opcheck(torch.ops.flashattn.merge.default, (
        [leaf(2, 9, 4, 16, dtype=dtype, device=device) for _ in range(2)],
        [leaf(2, 4, 9, device=device) for _ in range(2)]))


def test_eager_calls_and_the_dispatcher_agree(device):
    """The same bits, with and without a gradient."""
    q, k, v = (leaf(2, 9, 4, 16, device=device) for _ in range(3))
    eager = fa.attention(q, k, v, causal=True, return_lse=True)
    by_operator = torch.ops.flashattn.forward(*operands(q, k, v, causal=True))
    for got, want in zip(eager, by_operator):
        assert torch.equal(got, want) and got.grad_fn is not None and want.grad_fn is not None
    dout = torch.randn_like(eager[0])
    for got, want in zip(torch.autograd.grad(eager[0], (q, k, v), dout),
                         torch.autograd.grad(by_operator[0], (q, k, v), dout)):
        assert torch.equal(got, want)
    with torch.no_grad():
        assert torch.equal(fa.attention(q, k, v, causal=True), eager[0])
    with torch.inference_mode():
        assert torch.equal(fa.attention(q, k, v, causal=True), eager[0])


def compiled(function, backend="aot_eager", **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend, **options)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(device, backend):
    bias, sink = leaf(4, 1, 12, device=device), leaf(4, device=device)

    def layer(x, bias, sink):
        q, k, v = (x * 2).unflatten(-1, (3, 4, 16)).unbind(2)
        o, lse = fa.attention(q, k, v, causal=True, bias=bias, sink=sink, return_lse=True)
        return (o.relu() + lse.transpose(1, 2)[..., None]).sum()

    x = leaf(2, 12, 192, device=device)
    total = layer(x, bias, sink)
    want = torch.autograd.grad(total, (x, bias, sink))
    got_total = compiled(layer, backend)(x, bias, sink)
    torch.testing.assert_close(got_total, total)
    for g, w in zip(torch.autograd.grad(got_total, (x, bias, sink)), want):
        torch.testing.assert_close(g, w, atol=1e-5, rtol=1e-4)


def test_new_lengths_do_not_recompile(device):
    counter, counts = torch._dynamo.testing.CompileCounterWithBackend("aot_eager"), []
    dense = compiled(lambda q, k: fa.attention(q, k, k, causal=True, window=(5, 0)), counter,
                     dynamic=True)
    for sq, sk in ((9, 12), (14, 20), (33, 40), (7, 90), (12, 12)):
        q, k = leaf(2, sq, 4, 16, device=device), leaf(2, sk, 4, 16, device=device)
        o = dense(q, k)
        assert torch.equal(o, fa.attention(q, k, k, causal=True, window=(5, 0)))
        o.sum().backward()
        counts.append(counter.frame_count)
    assert counts == counts[:1] * 5  # the first call compiles forward and backward
    counter.frame_count = 0
    counts.clear()
    packed = compiled(lambda q, cu, longest: fa.attention_varlen(q, q, q, cu, cu, longest, longest),
                      counter, dynamic=True)
    for lengths in ((3, 5), (9, 2), (30, 31)):
        cu = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        q = leaf(sum(lengths), 4, 16, device=device)
        packed(q, cu, max(lengths)).sum().backward()
        want = fa.attention_varlen(q.detach(), q.detach(), q.detach(), cu, cu, max(lengths),
                                   max(lengths))
        assert torch.equal(packed(q, cu, max(lengths)), want)
        counts.append(counter.frame_count)
    assert counts == counts[:1] * 3


def test_the_second_length_makes_dimensions_dynamic(device):
    """By torch's default: one more compilation, the last."""
    counter, counts = torch._dynamo.testing.CompileCounterWithBackend("aot_eager"), []
    dense = compiled(lambda q: fa.attention(q, q, q, causal=True), counter)
    for tokens in (9, 14, 33, 7, 40):
        q = torch.randn(2, tokens, 4, 16, device=device)
        assert torch.equal(dense(q), fa.attention(q, q, q, causal=True))
        counts.append(counter.frame_count)
    assert counts == [1, 2, 2, 2, 2]


def test_compile_of_packed_sequences_and_pages(device):
    """Full graphs by flash-attn's names; gradients of packed sequences; a cache is written."""
    cu = torch.tensor([0, 7, 20], device=device, dtype=torch.int32)
    lens = torch.tensor([13, 20], device=device, dtype=torch.int32)
    table = torch.tensor([[0, 2], [3, 1]], device=device, dtype=torch.int32)
    q, packed = torch.randn(2, 3, 4, 16, device=device), leaf(20, 4, 16, device=device)
    pages, new = torch.randn(4, 16, 2, 16, device=device), torch.randn(2, 3, 2, 16, device=device)

    def varlen(x):
        return fa.flash_attn_varlen_func(x * 2, x, x, cu, cu, 13, 13, causal=True)

    want = varlen(packed)
    got = compiled(varlen)(packed)
    assert torch.equal(got, want)
    for g, w in zip(*(torch.autograd.grad(o.sum(), packed) for o in (got, want))):
        torch.testing.assert_close(g, w)

    def paged(x):
        return fa.attention_paged(x * 2, pages, pages, table, lens, causal=True)

    def cached(x, k_cache, v_cache, block_table):
        return fa.flash_attn_with_kvcache(x * 2, k_cache, v_cache, new, new, cache_seqlens=lens - 3,
                                          causal=True, block_table=block_table)

    def cached_once(x, k_cache, v_cache):
        return cached(x, k_cache, v_cache, None)

    assert torch.equal(compiled(paged)(q), paged(q))
    dense = torch.cat([pages[:2], pages[2:]], 1)
    for function, cache, more in ((cached, pages, (table,)), (cached_once, dense, ())):
        caches = [[cache.clone(), cache.clone()] for _ in range(2)]
        want = function(q, *caches[0], *more)
        assert torch.equal(compiled(function)(q, *caches[1], *more), want)
        for wrote, same in zip(*caches):
            assert torch.equal(wrote, same) and not torch.equal(wrote, cache)


def test_export(device):
    class Layer(torch.nn.Module):
        def forward(self, q):
            return fa.attention(q, q, q, causal=True)

    q = torch.randn(2, 9, 4, 16, device=device)
    program = torch.export.export(Layer(), (q,))
    assert torch.equal(program.module()(q), fa.attention(q, q, q, causal=True))


@pytest.mark.parametrize("shared_kv", [False, True])
def test_vmap(device, shared_kv):
    q, k = torch.randn(3, 2, 9, 4, 16, device=device), torch.randn(3, 2, 11, 4, 16, device=device)
    bias, lens = torch.randn(4, 9, 11, device=device), torch.tensor([[11, 4]] * 3, device=device)
    kv, dim = (k[0], None) if shared_kv else (k, 0)
    before = fa.report()["forward"]
    got = torch.vmap(lambda q, k, n: fa.attention(q, k, k, bias=bias, lens_kv=n, return_lse=True),
                     in_dims=(0, dim, 0))(q, kv, lens)
    assert fa.report()["forward"] == before + 1  # all samples in one call
    parts = [fa.attention(q[i], *[k[0 if shared_kv else i]] * 2, bias=bias, lens_kv=lens[i],
                          return_lse=True) for i in range(3)]
    for g, w in zip(got, zip(*parts)):
        assert torch.equal(g, torch.stack(w))


def test_vmap_of_what_has_no_batch(device):
    """A bias and a sink of each sample, packed sequences."""
    q, sink = torch.randn(3, 2, 9, 4, 16, device=device), torch.randn(3, 4, device=device)
    bias = torch.randn(3, 9, 9, device=device)
    got = torch.vmap(lambda q, b, s: fa.attention(q, q, q, bias=b, sink=s))(q, bias, sink)
    want = [fa.attention(x, x, x, bias=b, sink=s) for x, b, s in zip(q, bias, sink)]
    assert torch.equal(got, torch.stack(want))
    cu = torch.tensor([0, 4, 18], device=device)
    packed = q.flatten(1, 2)
    got = torch.vmap(lambda q: fa.attention_varlen(q, q, q, cu, cu, 14, 14))(packed)
    want = [fa.attention_varlen(x, x, x, cu, cu, 14, 14) for x in packed]
    assert torch.equal(got, torch.stack(want))


@pytest.mark.parametrize("sums", [False, True])
def test_vmap_of_backward(device, sums):
    """Folded; where gradients sum over a sample's batch, one by one."""
    q, dout = (torch.randn(3, 2, 9, 4, 16, device=device) for _ in range(2))
    bias = torch.randn(4, 9, 9, device=device)
    rest = operands(q, q, q, beside=dict(bias=bias))[3:-1]
    o, lse = torch.vmap(lambda x: fa.attention(x, x, x, bias=bias, return_lse=True))(q)

    def backward(dout, q, o, lse):
        return torch.ops.flashattn.backward(dout, None, q, q, q, o, lse, *rest, sums, False)

    before = fa.report()["backward"]
    got = torch.vmap(backward)(dout, q, o, lse)
    assert fa.report()["backward"] == before + (3 if sums else 1)
    for i in range(3):
        for g, w in zip(got, backward(dout[i], q[i], o[i], lse[i])):
            assert torch.equal(g[i], w)


@pytest.mark.parametrize("by_operator", [False, True])
def test_autocast(device, by_operator):
    q, sink = leaf(2, 9, 4, 16, device=device), leaf(4, device=device)
    with torch.autocast(device, torch.bfloat16):
        if by_operator:
            o = torch.ops.flashattn.forward(*operands(q, q, q, beside=dict(sink=sink)))[0]
        else:
            o = fa.attention(q, q, q, sink=sink)
    assert o.dtype == torch.bfloat16
    half = q.detach().to(torch.bfloat16)
    assert torch.equal(o, fa.attention(half, half, half, sink=sink.detach()))
    o.sum().backward()
    assert q.grad.dtype == torch.float32 and sink.grad.dtype == torch.float32
    assert q.grad.abs().sum() > 0


def test_dropout(device):
    """From torch's generator: repeatable by manual_seed, two calls differ, the gradient drops the
    same weights."""
    q, k, v = (torch.randn(2, 33, 4, 16, device=device) for _ in range(3))
    torch.manual_seed(3)
    first, second = (fa.attention(q, k, v, dropout=0.3) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(fa.attention(q, k, v, dropout=0.3), first)
    assert not torch.equal(first, second)
    rng = torch.tensor([5, -9], device=device)

    def ours(q, k, v):
        return fa.attention(q, k, v, dropout=0.3, rng=rng, return_lse=True)

    def naive(q, k, v):
        return reference.attention(q, k, v, dropout=0.3, rng=(5, 2**64 - 9))

    dout = torch.randn_like(q)
    results = [reference.gradients(f, (q, k, v), dtype, dout) for f, dtype in (
        (ours, torch.float32), (naive, torch.float64), (naive, torch.float32))]
    reference.check(*results, ("o", "lse", "dq", "dk", "dv"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_repeats_the_dropout(device, reentrant):
    def layer(x):
        return fa.attention(x * 1, x, x, dropout=0.4, causal=True).square()

    x = leaf(2, 33, 4, 16, device=device)
    torch.manual_seed(11)
    (want,) = torch.autograd.grad(layer(x).sum(), x)
    torch.manual_seed(11)
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad, want)


def test_compiled_dropout_repeats_and_differs(device):
    function = compiled(lambda q: fa.attention(q, q, q, dropout=0.4))
    q = leaf(2, 33, 4, 16, device=device)
    torch.manual_seed(7)
    first, second = function(q), function(q)
    torch.manual_seed(7)
    assert torch.equal(function(q), first) and not torch.equal(first, second)


def test_saved_tensors_are_used_twice(device):
    q = leaf(2, 9, 4, 16, device=device)
    o = fa.attention(q, q, q)
    (first,) = torch.autograd.grad(o.sum(), q, retain_graph=True)
    (second,) = torch.autograd.grad(o.sum(), q, retain_graph=True)
    assert torch.equal(first, second)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t.clone(),
                                                  lambda t: t):
        other = fa.attention(q, q, q)
    assert len(seen) >= 5 and torch.equal(torch.autograd.grad(other.sum(), q)[0], first)
    o = fa.attention(q, q, q)
    with torch.no_grad():
        q.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_flops(device):
    """Those that PyTorch counts for its own kernels."""
    q, k = leaf(2, 4, 33, 16, device=device), leaf(2, 4, 45, 16, device=device)
    backends = torch.nn.attention.SDPBackend
    of_floats = backends.EFFICIENT_ATTENTION if device == "cuda" else backends.FLASH_ATTENTION
    with FlopCounterMode(display=False) as theirs:
        with torch.nn.attention.sdpa_kernel(of_floats):
            torch.nn.functional.scaled_dot_product_attention(q, k, k)
    with FlopCounterMode(display=False) as ours:
        o = fa.attention(q, k, k, layout="bhsd")
    forward = ours.get_total_flops()
    assert forward == 4 * 2 * 4 * 33 * 45 * 16
    assert theirs.get_total_flops() in (0, forward)  # of the CPU's kernel it counts none
    with FlopCounterMode(display=False) as ours:
        o.sum().backward()
    assert ours.get_total_flops() == forward * 5 // 2
    cu = torch.tensor([0, 5, 33], device=device, dtype=torch.int32)
    packed = torch.randn(33, 4, 16, device=device)
    with FlopCounterMode(display=False) as ours:
        fa.attention_varlen(packed, packed, packed, cu, cu, 28, 28)
    assert ours.get_total_flops() == 4 * 4 * 16 * (5 * 5 + 28 * 28)
