"""Tensors on a GPU: PyTorch's, CuPy's, and JAX's by DLPack, in the functions that take NumPy's."""
import numpy as np
import pytest

import flashattn
from flashattn import _events
from numerics import arrays

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
if not torch.cuda.is_available():
    pytest.skip("PyTorch has no GPU here", allow_module_level=True)
if all(device.kind != "cuda" for device in flashattn.devices()):
    pytest.skip("the library is built without CUDA", allow_module_level=True)


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


def tensor(*shape, dtype=torch.float16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def expected(q, k, v, **options):
    """The reference's o, on the tensors' device."""
    return torch.from_numpy(arrays.attention(*map(on_host, (q, k, v)), **options)[0]).to(q.device)


def on_host(x):
    return x.double().cpu().numpy()


def close(got, want, tolerance=2e-2):
    assert torch.allclose(got.double(), want.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_forward(dtype):
    q, k, v = (tensor(2, 113, heads, 64, dtype=dtype) for heads in (8, 2, 2))
    out, lse = flashattn.attention(q, k, v, causal=True, return_lse=True)
    assert out.dtype == dtype and out.device == q.device and out.shape == q.shape
    assert lse.dtype == torch.float32 and lse.shape == (2, 8, 113)
    close(out, expected(q, k, v, causal=True))


def test_nothing_is_copied():
    packed = tensor(2, 40, 3, 4, 64)
    q, k, v = packed.unbind(2)
    out = torch.full((2, 4, 40, 64), float("nan"), device="cuda", dtype=torch.float16)
    target = out.transpose(1, 2)
    assert flashattn.attention(q, k, v, o=target) is target
    close(target, expected(q, k, v))
    before = torch.cuda.memory_allocated()
    flashattn.attention(q, k, v, o=target)
    assert torch.cuda.memory_allocated() == before


def test_the_current_stream_is_taken():
    """Work stands before and behind the call on a stream of its own."""
    q = tensor(2, 512, 8, 64)
    want = flashattn.attention(q, q, q)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.zeros_like(q)
        torch.cuda._sleep(20_000_000)
        late.copy_(q)
        got = flashattn.attention(late, late, late) * 1
    stream.synchronize()
    assert torch.equal(got, want)
    given = flashattn.attention(q, q, q, stream=stream)
    by_number = flashattn.attention(q, q, q, stream=stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(given, want) and torch.equal(by_number, want)


class ByDlpack:
    """A tensor that says nothing of PyTorch."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)


@pytest.mark.parametrize("wrap", [lambda tensor: tensor, ByDlpack])
def test_memory_is_not_given_away_before_it_is_read(wrap):
    """The call's stream is behind the current one, on which the memory would be used again."""
    x = tensor(2, 512, 8, 64)
    want, out = flashattn.attention(x, x, x), torch.empty_like(x)
    side = torch.cuda.Stream()
    given = [x.clone() for _ in range(3)]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
    addresses = {g.data_ptr() for g in given}
    flashattn.attention(*map(wrap, given), o=out, stream=side)
    del given
    others = [torch.full_like(x, float("nan")) for _ in range(8)]
    assert not addresses & {other.data_ptr() for other in others}
    torch.cuda.synchronize()
    assert torch.equal(out, want)
    flashattn.clear_cache()
    assert not _events._held


def test_the_stream_of_out_is_taken_where_q_has_none():
    q = tensor(2, 512, 8, 64)
    want = flashattn.attention(q, q, q)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late, out = torch.zeros_like(q), torch.zeros_like(q)
        torch.cuda._sleep(20_000_000)
        late.copy_(q)
        flashattn.attention(*[ByDlpack(late)] * 3, o=out)
        got = out * 1
    stream.synchronize()
    assert torch.equal(got, want)


def test_a_capture_is_not_disturbed_by_what_is_kept():
    q, out = tensor(2, 64, 4, 64), tensor(2, 64, 4, 64)
    flashattn.attention(*[ByDlpack(q)] * 3, o=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashattn.attention(*[ByDlpack(q)] * 3, o=out)
    q.normal_()
    graph.replay()
    assert torch.equal(out, flashattn.attention(q, q, q))


def test_columns_of_a_wider_page_table():
    pages, q = tensor(9, 16, 2, 64), tensor(2, 1, 4, 64)
    wide = torch.tensor([[3, 1, 0, -7], [5, 2, 8, -7]], device="cuda", dtype=torch.int32)
    lens = torch.tensor([33, 48], device="cuda", dtype=torch.int32)
    assert torch.equal(flashattn.attention_paged(q, pages, pages, wide[:, :3], lens),
                       flashattn.attention_paged(q, pages, pages, wide[:, :3].contiguous(), lens))


def test_a_call_does_not_wait():
    q = tensor(2, 512, 8, 64)
    flashattn.attention(q, q, q)
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    event = torch.cuda.Event()
    event.record()
    flashattn.attention(q, q, q)
    assert not event.query()


def test_in_a_graph_of_pytorch():
    q = tensor(2, 64, 4, 64)
    lens = torch.tensor([64, 10], device="cuda", dtype=torch.int32)
    flashattn.attention(q, q, q, lens_kv=lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashattn.attention(q, q, q, lens_kv=lens)
    q.normal_()
    lens.copy_(torch.tensor([7, 64]))
    graph.replay()
    assert torch.equal(out, flashattn.attention(q, q, q, lens_kv=lens))


def test_varlen_and_pages():
    cu = torch.tensor([0, 5, 5, 50], device="cuda", dtype=torch.int32)
    q, k = tensor(50, 4, 64), tensor(50, 2, 64)
    out = flashattn.attention_varlen(q, k, k, cu, cu, 45, 45, causal=True)
    for a, b in ((0, 5), (5, 50)):
        close(out[a:b], expected(*(x[None, a:b] for x in (q, k, k)), causal=True)[0])
    pages = tensor(9, 16, 2, 64)
    table = torch.tensor([[3, 1, 0], [5, 2, 8]], device="cuda", dtype=torch.int32)
    lens = torch.tensor([33, 48], device="cuda", dtype=torch.int32)
    q = tensor(2, 1, 4, 64)
    out = flashattn.attention_paged(q, pages, pages, table, lens)
    for b, length in enumerate((33, 48)):
        keys = pages[table[b].long()].reshape(1, 48, 2, 64)[:, :length]
        close(out[b], expected(q[b:b + 1], keys, keys)[0])


def test_backward():
    q, k, v = (tensor(2, 70, heads, 64) for heads in (4, 2, 2))
    out, lse = flashattn.attention(q, k, v, causal=True, return_lse=True)
    dout = tensor(2, 70, 4, 64)
    grads = flashattn.attention_backward(dout, q, k, v, out, lse, causal=True)
    wants = arrays.backward(*map(on_host, (dout, q, k, v)), causal=True)
    for got, want in zip(grads, wants):
        assert got.dtype == torch.float16
        close(got, torch.from_numpy(want).to(got.device), 5e-2)


def test_a_gradient_is_not_lost_in_silence():
    q = tensor(1, 8, 2, 64).requires_grad_()
    with pytest.raises(ValueError, match="requires a gradient") as caught:
        flashattn.attention(q, q, q)
    assert caught.value.field == "q"
    with torch.no_grad():
        flashattn.attention(q, q, q)


def test_merge_and_dropout_mask():
    q, k = tensor(2, 9, 4, 64), tensor(2, 120, 4, 64)
    parts = [flashattn.attention(q, k[:, s], k[:, s], return_lse=True, dtype_o="float32")
             for s in (slice(0, 50), slice(50, 120))]
    outs, lses = zip(*parts)
    out, lse = flashattn.merge(outs, lses)
    want, want_lse = flashattn.attention(q, k, k, return_lse=True)
    close(out, want, 1e-2)
    close(lse, want_lse, 1e-5)
    keep = torch.empty(2, 4, 37, 53, device="cuda", dtype=torch.bool)
    flashattn.dropout_mask(2, 4, 37, 53, dropout=0.3, rng_seed=5, rng_offset=9, keep=keep)
    assert np.array_equal(keep.cpu().numpy(), flashattn.dropout_mask(2, 4, 37, 53, dropout=0.3,
                                                                     rng_seed=5, rng_offset=9))


def test_host_and_device_do_not_mix():
    q = tensor(1, 8, 2, 64)
    with pytest.raises(ValueError, match="k lies in host memory"):
        flashattn.attention(q, q.cpu(), q)
    with pytest.raises(flashattn.UnsupportedError, match="q lies in host memory and it does not"):
        flashattn.attention(q.cpu(), q, q)


def test_a_plan_of_ones_own():
    q = tensor(1, 80, 2, 64)
    plan = flashattn.Plan(dtype="float16", heads_q=2, dim_qk=64, device="cuda:0")
    close(plan.forward(q, q, q), expected(q, q, q))
    with pytest.raises(ValueError, match="device = cpu by the arrays"):
        plan.forward(*[q.cpu()] * 3)


def test_cupy():
    cupy = pytest.importorskip("cupy")
    q = cupy.random.default_rng(0).standard_normal((2, 70, 4, 64), dtype=cupy.float32)
    q = q.astype(cupy.float16)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out, lse = flashattn.attention(q, q, q, return_lse=True)
        assert isinstance(out, cupy.ndarray) and isinstance(lse, cupy.ndarray)
        stream.synchronize()
    q = torch.from_dlpack(q)
    close(torch.from_dlpack(out), expected(q, q, q))


def test_jax():
    """Its arrays cannot be written: the result goes to PyTorch's."""
    jax = pytest.importorskip("jax")
    q = jax.numpy.asarray(np.random.default_rng(0).standard_normal((1, 40, 2, 64)),
                          dtype=jax.numpy.bfloat16)
    if q.device.platform != "gpu":
        pytest.skip("JAX has no GPU here")
    out = torch.empty(1, 40, 2, 64, device="cuda", dtype=torch.bfloat16)
    flashattn.attention(q, q, q, o=out)
    kept = jax.numpy.zeros_like(q)
    with pytest.raises(ValueError, match="out is read-only"):
        flashattn.attention(q, q, q, o=kept)
    assert not kept.any()
    q = torch.from_dlpack(q)
    close(out, expected(q, q, q))
