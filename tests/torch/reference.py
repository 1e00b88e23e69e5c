"""Attention with every score stored, in any dtype, differentiated by PyTorch: the truth in float64,
the rule of comparison in the dtype of the inputs."""
from __future__ import annotations

import torch

SLACK = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # a rounding of a result


def visible(sq, sk, causal=False, window=None, top_left=False, **_):
    """(queries, keys)."""
    i = torch.arange(sq)[:, None] + (0 if top_left else sk - sq)
    j = torch.arange(sk)[None, :]
    seen = torch.ones(sq, sk, dtype=torch.bool)
    if causal:
        seen &= j <= i
    left, right = window or (-1, -1)
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    return seen


def attention(q, k, v, *, bias=None, sink=None, alibi_slopes=None, softcap=0.0, scale=None,
              keep=None, dropout=0.0, lens_kv=None, **masks):
    """o, lse of (batch, seq, heads, dim) tensors. keep: what a dropout keeps."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2),
                                           v.repeat_interleave(group, 2)))
    sq, sk = q.shape[2], k.shape[2]
    s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        i, j = torch.arange(sq)[:, None] + sk - sq, torch.arange(sk)[None, :]
        slopes = alibi_slopes.view(-1, s.shape[1], 1, 1)
        s = s - (slopes * (i - j).abs().to(s.device)).to(s.dtype)
    hidden = ~visible(sq, sk, **masks).to(s.device)
    if lens_kv is not None:
        hidden = hidden | (torch.arange(sk, device=s.device) >= lens_kv.view(-1, 1, 1, 1))
    if bias is not None and bias.dtype == torch.bool:
        hidden = hidden | ~bias
    elif bias is not None:
        s = s + bias.to(s.dtype)
    s = s.masked_fill(hidden, -torch.inf)
    columns = s if sink is None else torch.cat(
        [s, sink.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    lse = torch.logsumexp(columns.to(torch.promote_types(s.dtype, torch.float32)), -1)
    p = torch.exp(s - torch.where(lse.isfinite(), lse, 0.0)[..., None]).to(s.dtype)
    if keep is not None:
        steps = round(dropout * 65536)
        p = p * keep.to(p.dtype) * (65536 / (65536 - steps))
    return (p @ v).transpose(1, 2), lse


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
