"""PyTorch's tensors in host memory in the functions that take NumPy's arrays."""
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import flashattn
from flashattn import _plan


def close(got, want, tolerance=2e-5):
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


def expected(q, k, v, **options):
    """float64, of (batch, seq, heads, dim)."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_give_tensors(dtype):
    q, k, v = (torch.randn(2, 33, heads, 16).to(dtype) for heads in (4, 2, 2))
    out, lse = flashattn.attention(q, k, v, return_lse=True)
    assert type(out) is type(lse) is torch.Tensor
    assert out.dtype == dtype and lse.dtype == torch.float32 and lse.shape == (2, 4, 33)
    close(out, expected(q, k, v), 2e-5 if dtype == torch.float32 else 2e-2)
    dout = torch.randn_like(out)
    grads = flashattn.attention_backward(dout, q, k, v, out, lse)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    wants = torch.autograd.grad(expected(*inputs), inputs, dout.double())
    for got, want in zip(grads, wants):
        assert type(got) is torch.Tensor and got.dtype == dtype
        close(got, want, 2e-5 if dtype == torch.float32 else 6e-2)


def test_the_same_bits_as_by_numpy():
    q, k, v = torch.randn(3, 2, 40, 4, 16)
    bias = torch.randn(2, 1, 40, 40)
    sink = torch.randn(4)
    arrays = [x.numpy() for x in (q, k, v)]
    got = flashattn.attention(q, k, v, bias=bias, sink=sink, causal=True)
    want = flashattn.attention(*arrays, bias=bias.numpy(), sink=sink.numpy(), causal=True)
    assert type(want) is np.ndarray and np.array_equal(got.numpy(), want)
    # A sink in bfloat16 is converted; tensors and arrays mix.
    half = sink.to(torch.bfloat16)
    assert torch.equal(flashattn.attention(q, arrays[1], v, sink=half),
                       flashattn.attention(q, k, v, sink=half.float()))


def test_strided_tensors_are_not_copied():
    packed = torch.randn(2, 40, 3, 4, 16)
    q, k, v = packed.unbind(2)
    out = torch.full((2, 4, 40, 16), float("nan"))
    assert flashattn.attention(q, k, v, o=out.transpose(1, 2)) is not None
    close(out.transpose(1, 2), expected(q, k, v))
    got = flashattn.attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="bhsd")
    assert torch.equal(got, out)


def test_varlen_pages_and_merge():
    q, k = torch.randn(50, 4, 16), torch.randn(50, 2, 16)
    cu = torch.tensor([0, 5, 5, 50])  # int64 is converted
    out = flashattn.attention_varlen(q, k, k, cu, cu, causal=True)
    assert type(out) is torch.Tensor
    for a, b in ((0, 5), (5, 50)):
        close(out[a:b], expected(*(x[None, a:b] for x in (q, k, k)), is_causal=True)[0])
    pages = torch.randn(9, 16, 2, 16)
    table, lens = torch.tensor([[3, 1, 0], [5, 2, 8]]), torch.tensor([33, 48])
    q = torch.randn(2, 1, 4, 16)
    out = flashattn.attention_paged(q, pages, pages, table, lens)
    for b, length in enumerate((33, 48)):
        keys = pages[table[b]].reshape(1, 48, 2, 16)[:, :length]
        close(out[b], expected(q[b:b + 1], keys, keys)[0])
    k = torch.randn(2, 60, 4, 16)
    parts = [flashattn.attention(q, k[:, s], k[:, s], return_lse=True)
             for s in (slice(0, 25), slice(25, 60))]
    merged, lse = flashattn.merge(*zip(*parts))
    assert type(merged) is type(lse) is torch.Tensor
    close(merged, expected(q, k, k))


def test_a_gradient_is_not_lost_in_silence():
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    with pytest.raises(ValueError, match="flashattn.torch") as caught:
        flashattn.attention(q, q, q)
    assert caught.value.field == "q"
    sink = torch.zeros(2, requires_grad=True)
    with pytest.raises(ValueError, match="sink requires a gradient"):
        flashattn.attention(*[q.detach()] * 3, sink=sink)
    with torch.no_grad():
        got = flashattn.attention(q, q, q, sink=sink)
    assert not got.requires_grad


@pytest.mark.parametrize("tensor, what", [
    (torch.zeros(1, 8, 2, 16, dtype=torch.float64), "float64"),
    (torch.zeros(1, 8, 2, 16, dtype=torch.complex64), "complex64"),
    (torch.zeros(1, 8, 16, 2).transpose(2, 3), r"call \.contiguous\(\)"),
])
def test_refusals_name_the_remedy(tensor, what):
    with pytest.raises(flashattn.FlashAttentionError, match=what):
        flashattn.attention(tensor, tensor, tensor)


def test_a_sparse_tensor_is_refused():
    # RuntimeError: by torch 2.6
    with pytest.raises((BufferError, RuntimeError, flashattn.FlashAttentionError)):
        flashattn.attention(*[torch.zeros(1, 8, 2, 16).to_sparse()] * 3)


def test_torch_is_not_imported_by_the_package():
    """By the package: an environment may import it when Python starts."""
    program = ("import sys; before = 'torch' in sys.modules; import flashattn; "
               "sys.exit(('torch' in sys.modules) != before)")
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, **path})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lay", [lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(
    1, 2), lambda x: x[:, ::2], lambda x: x[:, :0]])
def test_a_repeated_call_gives_the_same_bits(dtype, lay):
    """The shorter way of tests/bindings/test_repeat.py."""
    for options in ({}, dict(causal=True, return_lse=True, dtype_o="float32")):
        cases = [[lay(torch.randn(2, 10, 4, 16)).to(dtype) for _ in range(3)] for _ in range(3)]
        flashattn.clear_cache()
        wants = [flashattn.attention(*[x.float().numpy() for x in qkv], **options)
                 for qkv in cases] if dtype == torch.float32 else None
        once = [flashattn.attention(*[x.clone(memory_format=torch.preserve_format) for x in qkv],
                                    **options, threads=1) for qkv in cases[:1]]
        before = _plan.repeats[0]
        got = [flashattn.attention(*qkv, **options) for qkv in cases]
        assert _plan.repeats[0] == before + 1  # the second call is kept, the third repeats it
        for mine, want in zip(got, wants or once):
            for x, y in zip(*(r if type(r) is tuple else (r,) for r in (mine, want))):
                assert type(x) is torch.Tensor
                assert np.array_equal(x.float().numpy(), torch.as_tensor(y).float().numpy())


def test_what_is_refused_stays_refused():
    """Behind repeated calls of the same shapes."""
    q = torch.randn(1, 8, 2, 16)
    for _ in range(3):
        flashattn.attention(q, q, q)
    leaf = q.clone().requires_grad_()
    with torch.no_grad():
        want = flashattn.attention(leaf, leaf, leaf)
    assert torch.equal(want, flashattn.attention(q, q, q))
    with pytest.raises(ValueError, match="flashattn.torch"):
        flashattn.attention(q, leaf, q)
    with pytest.raises(flashattn.FlashAttentionError):
        flashattn.attention(q, q.double(), q)
    with pytest.raises((flashattn.FlashAttentionError, BufferError, RuntimeError)):
        flashattn.attention(q, q.to_sparse(), q)
    negative = torch.complex(q, q).conj().imag
    assert negative.is_neg()
    assert torch.equal(flashattn.attention(q, q, negative.contiguous()),
                       -flashattn.attention(q, q, q))
