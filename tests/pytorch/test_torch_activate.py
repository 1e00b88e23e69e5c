"""This library under torch's own functions: SDPA, nn.MultiheadAttention, varlen_attn, and aten's
operators for flash attention, on a CPU and where there is one on a GPU."""
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashattn.torch as fa
import reference
from flashattn import UnsupportedError
from flashattn._constants import Reason, Status
from flashattn.torch import _launch

varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn")
aten = torch.ops.aten
NAMES = ("o", "lse", "dq", "dk", "dv")


@pytest.fixture(name="ran", autouse=True)
def _ran():
    """A function that says what ran since the test began."""
    fa.activate()
    before = fa.report()

    def since():
        now = fa.report()
        return {name: now[name] - before[name] for name in ("forward", "backward")} | {
            "refused": sum(now["refused"].values()) - sum(before["refused"].values())}
    yield since
    fa.restore()


def dtype_of(device):
    return torch.float32 if device == "cpu" else torch.bfloat16  # torch's flash kernels: 16 bits


def truth(q, k, v, dout, causal=False, **options):
    """o, lse and gradients of (batch, heads, seq, dim) tensors, in float64 and in their dtype."""
    def function(*inputs):
        o, lse = reference.attention(*[x.transpose(1, 2) for x in inputs], causal=causal, **options)
        return o.transpose(1, 2), lse

    return [reference.gradients(function, (q, k, v), kind, dout) for kind in
            (torch.float64, q.dtype)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("memory", ["bhsd", "bshd", "packed"])
def test_the_operators_of_sdpa(device, causal, memory, ran):
    """Results, and their strides as torch's fake kernels promise them to compiled programs."""
    shape = (2, 4, 33, 16)
    q, k, v = torch.randn(3, *shape, device=device, dtype=dtype_of(device))
    if memory == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif memory == "packed":
        q, k, v = torch.randn(2, 33, 3, 4, 16, device=device, dtype=dtype_of(device)).permute(
            2, 0, 3, 1, 4)
    def fake(x):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    results = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    o, lse = results[:2]
    dout = torch.randn_like(o)
    tensors, rest = (dout, q, k, v, o, lse), (*results[2:6], 0.0, causal, *results[6:8])
    backward = aten._scaled_dot_product_flash_attention_backward
    grads = backward(*tensors, *rest)
    promised = (*aten._scaled_dot_product_flash_attention(*map(fake, (q, k, v)), 0.0, causal)[:2],
                *backward(*map(fake, tensors), *rest))
    for got, want in zip((o, lse, *grads), promised):
        assert got.shape == want.shape and got.stride() == want.stride()
    exact, naive = truth(q, k, v, dout, causal)
    reference.check((o, lse, *grads), exact, naive, NAMES)
    assert ran() == {"forward": 1, "backward": 1, "refused": 0}


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (4, 7)])
def test_varlen(device, window, ran):
    """torch.nn.attention.varlen_attn, with its gradients."""
    lengths, takes = (5, 21, 14), inspect.signature(varlen.varlen_attn).parameters
    if "window_size" not in takes:
        pytest.skip("this torch's varlen_attn has no window_size")
    cu = torch.tensor([0, 5, 26, 40], dtype=torch.int32, device=device)
    inputs = [torch.randn(40, heads, 16, device=device, dtype=dtype_of(device), requires_grad=True)
              for heads in ((4, 2, 2) if "enable_gqa" in takes else (4, 4, 4))]
    options = dict(window_size=window, **{"enable_gqa": True} if "enable_gqa" in takes else {})
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        o, lse = varlen.varlen_attn(*inputs, cu, cu, 21, 21, **options,
                                    return_aux=varlen.AuxRequest(lse=True))
    dout = torch.randn_like(o)
    got = [o, lse, *torch.autograd.grad(o, inputs, dout)]

    def function(q, k, v):
        results = [reference.attention(*[x[None] for x in qkv], window=window) for qkv in
                   zip(*[x.split(lengths) for x in (q, k, v)])]
        return (torch.cat([o[0] for o, _ in results]),
                torch.cat([lse[0] for _, lse in results], dim=1))

    exact, naive = (reference.gradients(function, inputs, kind, dout)
                    for kind in (torch.float64, inputs[0].dtype))
    reference.check(got, exact, naive, NAMES)
    assert ran() == {"forward": 1, "backward": 1, "refused": 0}


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_varlen_of_a_cache(device, kind, ran):
    """seqused_k, block_table, and out=."""
    takes = inspect.signature(varlen.varlen_attn).parameters
    if not {"block_table", "seqused_k", "enable_gqa"} <= set(takes):
        pytest.skip("this torch's varlen_attn has no block_table")
    used = torch.tensor([19, 32], dtype=torch.int32, device=device)
    q = torch.randn(2, 4, 16, device=device, dtype=dtype_of(device))
    cache = torch.randn(2, 32, 2, 16, device=device, dtype=dtype_of(device))
    cu = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    options = dict(seqused_k=used, enable_gqa=True)
    if kind == "paged":
        table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32, device=device)
        pages = torch.empty(4, 16, 2, 16, device=device, dtype=q.dtype)
        pages[table.long()] = cache.unflatten(1, (2, 16))
        arguments = (q, pages, pages, cu, None, 1, 32)
        options["block_table"] = table
    else:
        packed = cache.flatten(0, 1)
        arguments = (q, packed, packed, cu, torch.tensor([0, 32, 64], dtype=torch.int32,
                                                         device=device), 1, 32)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        got = varlen.varlen_attn(*arguments, **options)
        out = torch.full_like(q, float("nan"))
        varlen.varlen_attn_out(out, *arguments, **options)
    assert torch.equal(got, out)
    for b, n in enumerate(used.tolist()):
        want = reference.attention(q[b][None, None], cache[b:b + 1, :n], cache[b:b + 1, :n])[0][0]
        torch.testing.assert_close(got[b:b + 1], want, atol=2e-2 if device == "cuda" else 1e-5,
                                   rtol=1e-2 if device == "cuda" else 1e-4)
    assert ran() == {"forward": 2, "backward": 0, "refused": 0}


def test_what_is_refused_goes_to_torchs_kernel(device, ran, monkeypatch):
    """Both passes, where this library refuses both."""
    def refuse(*_, **__):
        raise UnsupportedError("a test refuses", Status.ERROR_UNSUPPORTED, Reason.OP, "q")

    inputs = torch.randn(3, 2, 4, 31, 16, device=device, dtype=dtype_of(device)).unbind()
    inputs, dout = [x.requires_grad_() for x in inputs], torch.randn_like(inputs[0])

    def call():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            o = F.scaled_dot_product_attention(*inputs, is_causal=True)
            return [o, *torch.autograd.grad(o, inputs, dout)]

    for name in ("prepare_forward", "backward"):
        monkeypatch.setattr(_launch, name, refuse)
    results = call()
    assert ran() == {"forward": 0, "backward": 0, "refused": 2}
    assert fa.report()["refused"]["a test refuses"] >= 2
    fa.restore()
    for got, want in zip(results, call()):
        torch.testing.assert_close(got, want)


def test_dropout_is_repeated_in_the_backward_call(device, ran):
    """The weights that forward drops, found from an identity for v, are those of the gradient."""
    n = 64
    q, k = torch.randn(2, 1, 2, n, 16, device=device, dtype=dtype_of(device))
    v = torch.eye(n, device=device, dtype=q.dtype).expand(1, 2, n, n)

    def forward():
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.5, False)

    torch.manual_seed(3)
    results = forward()
    weights, lse = results[:2]
    again = forward()[0]
    torch.manual_seed(3)
    assert torch.equal(forward()[0], weights) and not torch.equal(again, weights)
    kept = (weights != 0).double().mean().item()
    assert 0.45 < kept < 0.55
    dout = torch.randn_like(weights)
    _, _, dv = aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, weights, lse, *results[2:6], 0.5, False, *results[6:8])
    want = weights.double().transpose(-1, -2) @ dout.double()
    torch.testing.assert_close(dv.double(), want, atol=5e-2 if device == "cuda" else 1e-5,
                               rtol=2e-2 if device == "cuda" else 1e-4)
    assert ran() == {"forward": 3, "backward": 1, "refused": 0}


def test_deterministic_algorithms(device, ran):
    q, k, v = torch.randn(3, 1, 4, 40, 16, device=device, dtype=dtype_of(device))
    torch.use_deterministic_algorithms(True)
    try:
        results = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
        many = [aten._scaled_dot_product_flash_attention_backward(
            v, q, k, v, *results[:6], 0.0, True, *results[6:8])[1] for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(many[0], many[1]) and torch.equal(many[0], many[2])
    assert ran()["backward"] == 3


def test_values_of_another_dimension_go_to_torch(ran):
    """Its operator for the CPU promises an output like the query. torch refuses them, too."""
    q, v = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 32)
    with pytest.raises(RuntimeError):
        aten._scaled_dot_product_flash_attention_for_cpu(q, q, v)
    assert ran() == {"forward": 0, "backward": 0, "refused": 1}
    want = F.scaled_dot_product_attention(q, q, v)  # by torch's math
    torch.testing.assert_close(fa.scaled_dot_product_attention(q, q, v), want)


def test_weights_for_debugging_are_refused(device, ran):
    q = torch.randn(1, 2, 8, 16, device=device, dtype=dtype_of(device))
    with pytest.raises(NotImplementedError, match="return_debug_mask.*restore"):
        aten._scaled_dot_product_flash_attention(q, q, q, 0.5, False, True)
    assert ran() == {"forward": 0, "backward": 0, "refused": 1}


@pytest.mark.parametrize("layer", ["attention", "encoder"])
@pytest.mark.parametrize("train", [False, True])
def test_multihead_attention(device, layer, train, ran):
    """Also where torch has a fast path, which knows no other kernel."""
    dtype = dtype_of(device)
    if layer == "attention":
        module = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    else:
        module = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    module = module.to(device, dtype).train(train)
    x = torch.randn(2, 10, 64, device=device, dtype=dtype)

    def call():
        return (module(x, x, x, need_weights=False)[0] if layer == "attention" else module(x))

    with torch.set_grad_enabled(train):
        got = call()
    assert ran()["forward"] == 1 and ran()["refused"] == 0
    fa.restore()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        want = call()
    tight = device == "cpu"
    torch.testing.assert_close(got, want, atol=1e-5 if tight else 2e-2,
                               rtol=1e-4 if tight else 2e-2)


def test_all_is_given_back():
    assert not torch.backends.mha.get_fastpath_enabled()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    fa.restore()
    assert torch.backends.mha.get_fastpath_enabled() and torch.backends.cuda.cudnn_sdp_enabled()
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises((NotImplementedError, RuntimeError)):  # nobody's on a CPU
        aten._scaled_dot_product_flash_attention(q, q, q)


def test_compiled_programs_run_here(device, ran):
    torch._dynamo.reset()
    inputs = [torch.randn(2, 4, 33, 16, device=device, dtype=dtype_of(device), requires_grad=True)
              for _ in range(3)]

    def function(q, k, v):
        return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True).relu()

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        got = torch.compile(function, fullgraph=True)(*inputs)
    grads = torch.autograd.grad(got, inputs, torch.ones_like(got))
    assert ran() == {"forward": 1, "backward": 1, "refused": 0}
    exact, naive = (reference.gradients(lambda q, k, v: (
        reference.attention(*[x.transpose(1, 2) for x in (q * 2, k, v)], causal=True)[0].transpose(
            1, 2).relu(), q.sum()), inputs, kind, torch.ones_like(got))
        for kind in (torch.float64, inputs[0].dtype))
    for name, *values in zip(("o", "", "dq", "dk", "dv"), (got, got, *grads), exact, naive):
        if name:
            reference.check(*[[value.detach()] for value in values], [name])


def test_by_torchs_registry_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no GPU here")
    attention = torch.nn.attention
    if not hasattr(attention, "current_flash_attention_impl"):
        pytest.skip("this torch has no registry of flash implementations")
    assert attention.current_flash_attention_impl() == "flashattn"
    fa.restore()
    assert attention.current_flash_attention_impl() is None
    attention.activate_flash_attention_impl("flashattn")
    try:
        before = fa.report()["forward"]
        q = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(q, q, q)
        assert fa.report()["forward"] == before + 1
    finally:
        attention.restore_flash_attention_impl()


def test_the_library_is_listed():
    if not hasattr(torch.nn.attention, "list_flash_attention_impls"):
        pytest.skip("this torch has no registry of flash implementations")
    assert "flashattn" in torch.nn.attention.list_flash_attention_impls()
