"""The functions under torch.func: grad, vjp and vmap in any order, as autograd and a loop do it."""
import pytest
import torch
from torch.func import functional_call, grad, grad_and_value, hessian, vjp, vmap

import flashattn.torch as fa
from flashattn import _tools


def tensors(device, *batch):
    return [torch.randn(*batch, 2, n, h, 16, device=device) for n, h in ((9, 4), (11, 2), (11, 2))]


def loss(q, k, v, **options):
    return fa.attention(q, k, v, causal=True, **options).square().sum()


def by_autograd(function, *inputs):
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_grad(device, layout):
    inputs = tensors(device)
    if layout == "bhsd":
        inputs = [x.transpose(1, 2) for x in inputs]

    def function(q, k, v):
        return loss(q, k, v, layout=layout)

    got, value = grad_and_value(function, argnums=(0, 1, 2))(*inputs)
    assert torch.equal(value, function(*inputs))
    for g, w in zip(got, by_autograd(function, *inputs)):
        assert torch.equal(g, w)


def test_grad_of_bias_and_sink(device):
    q, k, v = tensors(device)
    bias, sink = torch.randn(4, 9, 11, device=device), torch.randn(4, device=device)

    def function(bias, sink):
        o, lse = fa.attention(q, k, v, bias=bias, sink=sink, return_lse=True)
        return o.square().sum() + lse.sum()

    for g, w in zip(grad(function, argnums=(0, 1))(bias, sink), by_autograd(function, bias, sink)):
        torch.testing.assert_close(g, w)


def test_vjp_of_packed_sequences(device):
    q = torch.randn(20, 4, 16, device=device)
    cu = torch.tensor([0, 7, 20], dtype=torch.int32, device=device)

    def function(q):
        return fa.attention_varlen(q, q, q, cu, cu, 13, 13)

    out, pullback = vjp(function, q)
    assert torch.equal(out, function(q))
    dout = torch.randn_like(out)
    (want,) = by_autograd(lambda q: (function(q) * dout).sum(), q)
    torch.testing.assert_close(pullback(dout)[0], want)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0)])
def test_gradients_of_each_sample(device, in_dims):
    inputs = [many if dim == 0 else one for many, one, dim in
              zip(tensors(device, 3), tensors(device), in_dims)]
    got = vmap(grad(loss, argnums=(0, 1, 2)), in_dims)(*inputs)
    for i in range(3):
        sample = [x if dim is None else x[i] for x, dim in zip(inputs, in_dims)]
        for g, w in zip(got, by_autograd(loss, *sample)):
            torch.testing.assert_close(g[i], w, atol=1e-5, rtol=1e-4)


def test_grad_of_a_vmap(device):
    inputs = tensors(device, 3)

    def function(q, k, v):
        return vmap(loss)(q, k, v).sum()

    for g, w in zip(grad(function, argnums=(0, 1, 2))(*inputs),
                    by_autograd(lambda *x: sum(loss(*s) for s in zip(*x)), *inputs)):
        torch.testing.assert_close(g, w, atol=1e-5, rtol=1e-4)


def test_a_module_of_parameters(device):
    layer = torch.nn.Linear(16, 48, device=device)
    x = torch.randn(2, 5, 16, device=device)

    def function(parameters):
        q, k, v = functional_call(layer, parameters, x).unflatten(-1, (3, 2, 8)).unbind(2)
        return loss(q, k, v)

    parameters = dict(layer.named_parameters())
    got = grad(function)(parameters)
    function(parameters).backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(got[name], parameter.grad)


def parts(device, *batch, packed):
    """part_o and part_lse of two sets of keys."""
    shapes = ((9, 4, 16), (4, 9)) if packed else ((2, 9, 4, 16), (2, 4, 9))
    return [[torch.randn(*batch, *shape, device=device) for _ in range(2)] for shape in shapes]


def merged(part_o, part_lse):
    o, lse = fa.merge(part_o, part_lse)
    return o.square().sum() + lse.sin().sum()


@pytest.mark.parametrize("packed", [False, True])
def test_merge(device, packed, monkeypatch):
    """The gradient, a map over samples in one call, and both in either order."""
    calls, run = [], _tools.merge
    monkeypatch.setattr(_tools, "merge", lambda *x: calls.append(1) or run(*x))
    many = parts(device, 3, packed=packed)
    samples = [[[x[i] for x in column] for column in many] for i in range(3)]
    wants = [torch.stack(column) for column in zip(*[fa.merge(*s) for s in samples])]
    for function in (fa.merge, torch.ops.flashattn.merge):
        calls.clear()
        assert all(torch.equal(got, want) for got, want in zip(vmap(function)(*many), wants))
        assert len(calls) == 1
    one_o, one_lse = samples[0]
    part = [many[0][0], one_o[1]], [one_lse[0], many[1][1]]  # what is not mapped is repeated
    got = vmap(fa.merge, (([0, None]), ([None, 0])))(*part)
    for i in range(3):
        want = fa.merge([many[0][0][i], one_o[1]], [one_lse[0], many[1][1][i]])
        assert all(torch.equal(g[i], w) for g, w in zip(got, want))
    each = vmap(grad(merged, argnums=(0, 1)))(*many)
    whole = grad(lambda *x: vmap(merged)(*x).sum(), argnums=(0, 1))(*many)
    for i, sample in enumerate(samples):
        wants = by_autograd(lambda *x: merged(x[:2], x[2:]), *sample[0], *sample[1])
        alone = grad(merged, argnums=(0, 1))(*sample)
        for j, want in enumerate(wants):
            for got in (each[j // 2][j % 2][i], whole[j // 2][j % 2][i], alone[j // 2][j % 2]):
                torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_a_second_gradient_is_refused(device):
    q = torch.randn(1, 3, 1, 8, device=device)
    with pytest.raises(NotImplementedError, match="gradient of an attention's gradient"):
        grad(lambda q: grad(lambda q: loss(q, q, q))(q).sum())(q)
    with pytest.raises((NotImplementedError, RuntimeError)):
        hessian(lambda q: loss(q, q, q))(q)
