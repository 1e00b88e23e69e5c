"""CUDA graphs of calls: a replay computes with what its tensors hold then, and drops anew."""
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashattn
import flashattn.torch as fa

if not torch.cuda.is_available():
    pytest.skip("PyTorch has no GPU here", allow_module_level=True)
if all(found.kind != "cuda" for found in flashattn.devices()):
    pytest.skip("the library is built without CUDA", allow_module_level=True)


def captured(step):
    """A graph of step(), which ran before on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def leaves():
    return [torch.randn(2, 128, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)]


@pytest.mark.parametrize("by", ["function", "sdpa"])
def test_forward_and_backward(by):
    inputs, dout = leaves(), torch.randn(2, 128, 4, 64, device="cuda", dtype=torch.bfloat16)

    def step(*given):
        given = given or inputs
        if by == "function":
            o = fa.attention(*given, causal=True)
        else:
            o = F.scaled_dot_product_attention(*[x.transpose(1, 2) for x in given],
                                               is_causal=True).transpose(1, 2)
        return [o.detach(), *torch.autograd.grad(o, given, dout)]

    fa.activate()
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            graph, results = captured(step)
            for _ in range(2):
                new = leaves()
                with torch.no_grad():
                    for old, value in zip(inputs, new):
                        old.copy_(value)
                graph.replay()
                for got, want in zip(results, step(*new)):
                    torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)
    finally:
        fa.restore()


def test_each_replay_drops_anew_and_its_gradients_drop_the_same():
    """v is an identity: the output is the weights, whose zeros are what was dropped."""
    q, k, _ = leaves()
    v = torch.eye(128, device="cuda", dtype=torch.bfloat16)[None, :, None].expand(
        2, 128, 4, 128).clone().requires_grad_()
    dout = torch.randn(2, 128, 4, 128, device="cuda", dtype=torch.bfloat16)

    def step():
        o = fa.attention(q, k, v, dropout=0.5)
        return o.detach(), torch.autograd.grad(o, v, dout)[0]

    graph, (weights, dv) = captured(step)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(weights.clone())
        want = torch.einsum("bqhk,bqhd->bkhd", weights.float(), dout.float())
        torch.testing.assert_close(dv.float(), want, atol=5e-2, rtol=2e-2)
    assert not torch.equal(seen[0] != 0, seen[1] != 0)
    assert not torch.equal(seen[1] != 0, seen[2] != 0)


def test_reduced_overhead():
    """torch.compile's own graphs."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: fa.attention(q * 2, k, v).relu(),
                             mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        inputs = [x.detach() for x in leaves()]
        want = fa.attention(inputs[0] * 2, *inputs[1:]).relu()
        torch.testing.assert_close(compiled(*inputs).clone(), want, atol=1e-2, rtol=1e-2)
