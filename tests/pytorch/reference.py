"""The reference of tests/numerics as a function that PyTorch differentiates: exact for tensors of
float64, evaluated naively in their dtype for others. The rule of comparison."""
from __future__ import annotations

import torch
from numerics import arrays
from numerics.reference import EXACT, Arithmetic

ARITHMETIC = {torch.float64: EXACT, torch.float32: Arithmetic("f32"),
              torch.float16: Arithmetic("f16"), torch.bfloat16: Arithmetic("bf16")}
SLACK = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # a rounding of a result


def numpy(x):
    """On the host, without loss of bits: NumPy has no bfloat16."""
    x = x.detach().cpu()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fields, *tensors):
        q, k, v, bias, sink = (None if x is None else numpy(x) for x in tensors)
        ctx.computed = computed = arrays.Attention(
            q, k, v, bias=bias, sink=sink, arithmetic=ARITHMETIC[tensors[0].dtype], **fields)
        ctx.like = tensors
        lse_dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        return (torch.from_numpy(computed.o).to(tensors[0]),
                torch.from_numpy(computed.lse).to(tensors[0].device, lse_dtype))

    @staticmethod
    def backward(ctx, dout, dlse):
        computed = iter(ctx.computed.backward(numpy(dout), numpy(dlse)))
        return (None, *(None if x is None or x.dtype == torch.bool
                        else torch.from_numpy(next(computed)).to(x) for x in ctx.like))


def attention(q, k, v, *, bias=None, sink=None, alibi_slopes=None, lens_kv=None, scale=None,
              **fields):
    """o, lse of (batch, seq, heads, dim) tensors; fields: those of numerics.case.Case."""
    if alibi_slopes is not None:
        fields["alibi_slopes"] = numpy(alibi_slopes)
    if lens_kv is not None:
        fields["lens_kv"] = lens_kv.tolist()
    return _Attention.apply(dict(fields, scale=scale or 0.0), q, k, v, bias, sink)


def gradients(function, tensors, dtype, dout, dlse=None):
    """Results and gradients of function on copies of tensors in a dtype."""
    copies = [x.detach().to(dtype).requires_grad_() for x in tensors]
    o, lse = function(*copies)
    total = (o * dout.to(o.dtype)).sum()
    if dlse is not None:
        total = total + (lse * dlse.to(lse.dtype)).sum()
    return [o.detach(), lse.detach(), *torch.autograd.grad(total, copies)]


def check(got, truth, naive, names, factor=2.0):
    """Errors are at most factor times those of the naive formula, and a rounding of the result;
    by the largest error and by the norm."""
    for name, g, t, n in zip(names, got, truth, naive):
        slack = SLACK[g.dtype]
        t = t.double()
        g, n = g.double().to(t.device), n.double()
        assert torch.isfinite(g).all() or not torch.isfinite(t).all(), f"{name} is not finite"
        fine = torch.isfinite(t)
        assert torch.equal(g[~fine], t[~fine]), f"{name}: other infinities"
        g, n, t = g[fine], n[fine], t[fine]
        if not t.numel():
            continue
        limit = factor * (n - t).abs().max() + slack * t.abs().max()
        error = (g - t).abs().max()
        assert error <= limit, f"{name}: error {error:.3g} > {limit:.3g}"
        assert (g - t).norm() <= factor * (n - t).norm() + slack * t.norm(), f"{name}: norm"
