"""Arrays in a GPU's memory. Here the memory is the host's, and a library that says otherwise hands
it over; with PyTorch and a GPU the same calls run there."""
import numpy as np
import pytest

import flashattn
import gpu_fakes
from flashattn import _gpu
from gpu_fakes import Array, Exporter, Interface, Library
from numerics.arrays import random


@pytest.fixture
def fake(monkeypatch):
    yield gpu_fakes.install(monkeypatch)
    _gpu._made.pop("fakegpu", None)


def test_forward_and_backward(fake):
    q, k, v, dout = (random(2, 9, heads, 16) for heads in (4, 2, 2, 4))
    want, want_lse = flashattn.attention(q, k, v, causal=True, return_lse=True)
    out, lse = flashattn.attention(Array(q), Array(k), Array(v), causal=True, return_lse=True)
    assert type(out) is type(lse) is Array
    np.testing.assert_array_equal(out.host, want)
    np.testing.assert_array_equal(lse.host, want_lse)
    assert Library.made[:2] == [((2, 9, 4, 16), "float32"), ((2, 4, 9), "float32")]
    grads = flashattn.attention_backward(Array(dout), Array(q), Array(k), Array(v), out, lse,
                                         causal=True)
    expected = flashattn.attention_backward(dout, q, k, v, want, want_lse, causal=True)
    for got, want in zip(grads, expected):
        np.testing.assert_array_equal(got.host, want)


def test_quantize(fake):
    x = {name: random(2, 9, heads, 16) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    options = dict(smooth_k=True, rotation_seed=3, lens_kv=np.array([9, 4], np.int32))
    want = flashattn.quantize(**x, **options)
    options["lens_kv"] = Array(options["lens_kv"])
    made = flashattn.quantize(**{name: Array(array) for name, array in x.items()}, **options)
    for got, array in zip(made, want):
        np.testing.assert_array_equal(got.host[:1].astype(np.float32),
                                      np.asarray(array[:1]).astype(np.float32))
    cu = np.array([0, 4, 9], np.int32)
    with pytest.raises(ValueError, match="give max_seqlen_kv"):
        flashattn.quantize(k=Array(x["k"][0]), cu_seqlens_kv=Array(cu))
    packed = flashattn.quantize(k=Array(x["k"][0]), cu_seqlens_kv=Array(cu), max_seqlen_kv=7)
    wanted = flashattn.quantize(k=x["k"][0], cu_seqlens_kv=cu)
    np.testing.assert_array_equal(packed.descale_k.host, wanted.descale_k)


@pytest.mark.parametrize("wrap", [Array, Exporter, Interface])
def test_protocols_read_and_write_in_place(fake, wrap):
    q = random(2, 4, 9, 16).transpose(0, 2, 1, 3)
    want = flashattn.attention(q, q, q)
    out = np.zeros((2, 9, 4, 16), np.float32)
    target = Array(out)  # whose library makes the scratch memory
    assert flashattn.attention(wrap(q), wrap(q), wrap(q), o=target) is target
    np.testing.assert_array_equal(out, want)


def test_the_producer_is_told_the_stream(monkeypatch):
    x = Exporter(random(1, 3, 2, 8))
    for stream, said in ((None, 1), (0, 1), (1, 1), (2, 2), (0x5000, 0x5000)):
        place = _gpu.place_of(x, stream, None)
        assert _gpu.facts(x, "q", place)[0].shape == (1, 3, 2, 8)
        assert x.streams[-1] == said
        assert place.stream == (stream or 0) and place.device == "cuda:0"


@pytest.mark.parametrize("stream", [
    7, type("Stream", (), {"cuda_stream": 7}), type("Stream", (), {"ptr": 7}),
    type("Stream", (), {"__cuda_stream__": lambda: (0, 7)})])
def test_streams_of_other_libraries(stream):
    assert _gpu.handle(stream) == 7
    x = Interface(random(1, 3, 2, 8), stream=7)
    assert _gpu.place_of(x, None, None).stream == 7


def test_varlen_paged_and_scores(fake):
    rng = np.random.default_rng(0)
    q, k, v = (random(17, heads, 16) for heads in (4, 2, 2))
    cu = np.array([0, 5, 17], np.int32)
    options = dict(causal=True, max_seqlen_q=12, max_seqlen_kv=12)
    slopes, sink = np.linspace(0.1, 1, 4, dtype=np.float32), random(4)
    want = flashattn.attention_varlen(q, k, v, cu, cu, alibi_slopes=slopes, sink=sink, **options)
    got = flashattn.attention_varlen(*map(Array, (q, k, v, cu, cu)), alibi_slopes=Array(slopes),
                                     sink=Array(sink), **options)
    np.testing.assert_array_equal(got.host, want)

    q, pages = random(2, 1, 4, 16), random(6, 4, 2, 16)
    table, lens = np.array([[3, 1, 0], [5, 2, 4]], np.int32), np.array([9, 12], np.int32)
    want = flashattn.attention_paged(q, pages, pages, table, lens)
    got = flashattn.attention_paged(*map(Array, (q, pages, pages, table, lens)))
    np.testing.assert_array_equal(got.host, want)

    q, bias = random(2, 9, 4, 16), random(1, 4, 9, 9)
    blocks = rng.random((1, 4, 3, 3)) < 0.7
    chosen = dict(block_q=3, block_kv=4, softcap=3.0, determinism=True)
    want = flashattn.attention(q, q, q, bias=bias, block_mask=blocks, **chosen)
    got = flashattn.attention(*map(Array, (q, q, q)), bias=Array(bias), block_mask=Array(blocks),
                              **chosen)
    np.testing.assert_array_equal(got.host, want)

    lists = {name: rng.integers(0, 4, shape, np.int32) for name, shape in (
        ("block_index", (4, 3, 2)), ("block_end", (2, 1, 3)), ("block_lens", (3,)))}
    want = flashattn.attention(q, q, q, **lists, **chosen)
    got = flashattn.attention(*map(Array, (q, q, q)), **chosen,
                              **{name: Array(array) for name, array in lists.items()})
    np.testing.assert_array_equal(got.host, want)


def test_merge_and_dropout_mask(fake):
    q, k = random(2, 9, 4, 16), random(2, 12, 4, 16)
    parts = [flashattn.attention(q, k[:, s], k[:, s], return_lse=True)
             for s in (slice(0, 5), slice(5, 12))]
    outs, lses = zip(*parts)
    want = flashattn.merge(outs, lses)
    got = flashattn.merge([Array(x) for x in outs], [Array(x) for x in lses])
    for a, b in zip(got, want):
        np.testing.assert_array_equal(a.host, b)
    out = Array(np.zeros((2, 4, 9, 12), bool))
    assert flashattn.dropout_mask(2, 4, 9, 12, dropout=0.3, rng_seed=5, keep=out) is out
    np.testing.assert_array_equal(out.host, flashattn.dropout_mask(2, 4, 9, 12, dropout=0.3,
                                                                   rng_seed=5))


x = random(2, 9, 4, 16)
CU = np.array([0, 9], np.int32)


@pytest.mark.parametrize("call, words, field", [
    (lambda: flashattn.attention(Array(x), x, Array(x)), "k lies in host memory", "k"),
    (lambda: flashattn.attention(Array(x), Array(x), Array(x, 1)), "v lies on cuda:1", "v"),
    (lambda: flashattn.attention(x, Array(x), x), "k is a Array", "k"),
    (lambda: flashattn.attention(x, x, x, lens_kv=Array(np.array([9, 9]))), "but q in host memory",
     "lens_kv"),
    (lambda: flashattn.attention(x, x, x, sink=Array(np.zeros(4))), "but q in host memory", "sink"),
    (lambda: flashattn.attention(x, x, x, block_mask=Array(np.ones((3, 3), bool)),
                                 block_q=3, block_kv=3), "but q in host memory", "block_mask"),
    (lambda: flashattn.attention(*[Array(x)] * 3, block_index=np.zeros((3, 1), np.int32),
                                 block_q=3, block_kv=3), "block_index lies in host memory",
     "block_index"),
    (lambda: flashattn.attention(x, x, x, stream=3), "leave it out", "stream"),
    (lambda: flashattn.attention(x, x, x, device="cuda"), "q lies in host memory", "device"),
    (lambda: flashattn.attention(*[Array(x)] * 3, device="cuda:1"), "device = 'cuda:1'", "device"),
    (lambda: flashattn.attention(*[Array(x)] * 3, device="cuda:"), "expected", "device"),
    (lambda: flashattn.attention(*[Array(x)] * 3, device="cpu"), "q lies on cuda:0", "device"),
    (lambda: flashattn.attention(*[Array(x)] * 3, alibi_slopes=Array(np.ones(3, np.float32))),
     "alibi_slopes has shape ", "alibi_slopes"),
    (lambda: flashattn.attention(*[Array(x)] * 3, o=x), "o lies in host memory", "o"),
    (lambda: flashattn.attention(*[Array(x)] * 3, lens_kv=[9, 9]), "lens_kv is a list", "lens_kv"),
    (lambda: flashattn.attention(*[Array(x)] * 3, lens_kv=Array(np.array([9, 9]))), "int64",
     "lens_kv"),
    (lambda: flashattn.attention(*[Array(x)] * 3, sink=Array(np.ones(4))), "float64", "sink"),
    (lambda: flashattn.attention(*[Array(x[..., ::2])] * 3), "contiguous: copy it", "q"),
    (lambda: flashattn.attention(*[Exporter(x)] * 3), "none of PyTorch, CuPy", "o"),
    (lambda: flashattn.attention_varlen(*[Array(x[0])] * 3, Array(CU), Array(CU)),
     "give max_seqlen_q", "seqlen_q"),
    (lambda: flashattn.attention(*[Interface(x, stream=5), Interface(x, stream=6), Array(x)]),
     "ready on stream 6", "k"),
    (lambda: flashattn.attention(*[Interface(x, typestr="<V2")] * 3), "bfloat16", "q"),
    (lambda: flashattn.attention(*[Interface(x, mask=1)] * 3), "masked", "q"),
    (lambda: flashattn.attention(*[Array(x)] * 3, stream="fast"), "cudaStream_t", "stream"),
    (lambda: flashattn.Plan(dtype="float32", heads_q=4, dim_qk=16, device="cuda:99"), "CUDA",
     "device"),
])
def test_refusals_name_field_and_remedy(fake, call, words, field):
    with pytest.raises(flashattn.FlashAttentionError, match=words) as caught:
        call()
    assert caught.value.field.startswith(field)
