"""New keys and values into a cache: flash_attn_with_kvcache() with k, v and rotary tables, and the
operator append_kv under torch.compile."""
import pytest
import torch

import flashattn
import flashattn.torch as fa
import reference

LENS = [5, 0, 41]


def turned(x, first, cos, sin, interleaved, moving=True):
    """flash-attn's apply_rotary_emb: x (tokens, heads, dim) from position `first` on."""
    rows = first + torch.arange(len(x), device=x.device) * moving
    c, s = cos[rows].double()[:, None], sin[rows].double()[:, None]
    n = 2 * cos.shape[1]
    x = x.double()
    a, b = (x[..., 0:n:2], x[..., 1:n:2]) if interleaved else (x[..., :n // 2], x[..., n // 2:n])
    pair = a * c - b * s, a * s + b * c
    head = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([head, x[..., n:]], -1)


def tables(rows, pairs, device):
    angles = torch.arange(rows, device=device)[:, None] * 10000.0 ** (
        -torch.arange(pairs, device=device) / pairs)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("causal, window", [(True, (-1, -1)), (False, (-1, -1)), (False, (9, 0))])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("queries, new, pairs", [(1, 1, 8), (3, 3, 4), (2, 5, 8), (1, 1, 0)])
def test_kvcache(device, queries, new, pairs, paged, interleaved, causal, window):
    q = torch.randn(3, queries, 4, 16, device=device)
    k, v = (torch.randn(3, new, 2, 16, device=device) for _ in range(2))
    caches = [torch.randn(3, 48, 2, 16, device=device) for _ in range(2)]
    before = [x.clone() for x in caches]
    cos, sin = tables(48, pairs, device) if pairs else (None, None)
    lens = torch.tensor(LENS, device=device)
    table = torch.arange(12, device=device).reshape(3, 4) if paged else None
    given = [x.reshape(12, 12, 2, 16) if paged else x for x in caches]
    o = fa.flash_attn_with_kvcache(q, *given, k, v, cos, sin, lens, block_table=table,
                                   causal=causal, window_size=window,
                                   rotary_interleaved=interleaved)
    moving = causal or window != (-1, -1)
    for b, n in enumerate(LENS):
        new_q, new_k = q[b].double(), k[b].double()
        if pairs:
            new_q = turned(q[b], n, cos, sin, interleaved, moving)
            new_k = turned(k[b], n, cos, sin, interleaved)
        torch.testing.assert_close(caches[0][b, n:n + new], new_k.float(), atol=1e-6, rtol=1e-6)
        assert torch.equal(caches[1][b, n:n + new], v[b])
        for cache, was in zip(caches, before):
            assert torch.equal(cache[b, :n], was[b, :n])
            assert torch.equal(cache[b, n + new:], was[b, n + new:])
        want = reference.attention(
            new_q[None], torch.cat([before[0][b, :n].double(), new_k])[None],
            torch.cat([before[1][b, :n], v[b]]).double()[None], causal=causal, window=window)[0][0]
        torch.testing.assert_close(o[b], want.float(), atol=1e-5, rtol=1e-4)


def test_left_padding_beside_new_keys(device):
    q, k, v = (torch.randn(2, 1, 2, 16, device=device) for _ in range(3))
    cache = [torch.randn(2, 20, 2, 16, device=device) for _ in range(2)]
    cos, sin = tables(20, 8, device)
    o = fa.flash_attn_with_kvcache(q, *cache, k, v, cos, sin, 10, causal=True,
                                   cache_leftpad=torch.tensor([3, 0], device=device))
    for b, first in enumerate((3, 0)):
        new_q = turned(q[b], 10, cos, sin, True)  # the default of flash-attn
        want = reference.attention(new_q[None], *[x[b:b + 1, first:11].double() for x in cache],
                                   causal=True)[0][0]
        torch.testing.assert_close(o[b], want.float(), atol=1e-5, rtol=1e-4)


def test_what_flash_attn_refuses():
    q = torch.randn(1, 1, 2, 16)
    cache = torch.randn(1, 9, 2, 16)
    for given, name in ((dict(k=q), "v"), (dict(v=q), "k"), (dict(k=q, v=q), "cache_seqlens"),
                        (dict(rotary_cos=q[0, 0], rotary_sin=q[0, 0], cache_seqlens=1), "k")):
        with pytest.raises(flashattn.InvalidArgumentError, match=f"^{name} is not given"):
            fa.flash_attn_with_kvcache(q, cache, cache, **given)
    with pytest.raises(ValueError, match="requires a gradient"):
        fa.append_kv(cache, cache, torch.tensor([1]), q.requires_grad_(), q)


def test_append_kv_is_an_operator(device):
    def step(caches, lens, k, v, q):
        made = fa.append_kv(*caches, lens, k, v, q, rotary_base=10000.0)
        return fa.attention(made.q, *caches, lens_kv=made.lens_kv, causal=True), made.lens_kv

    q, k, v = (torch.randn(2, 1, n, 16, device=device) for n in (4, 2, 2))
    caches = [torch.randn(2, 20, 2, 16, device=device) for _ in range(2)]
    mine = [x.clone() for x in caches]
    lens = torch.tensor([3, 19], device=device, dtype=torch.int32)
    want, after = step(mine, lens, k, v, q)
    assert after.tolist() == [4, 20]
    assert not torch.equal(mine[0][1, 19], caches[0][1, 19])
    theirs = [x.clone() for x in caches]
    got, after = torch.compile(step, fullgraph=True, backend="aot_eager")(theirs, lens, k, v, q)
    assert after.tolist() == [4, 20] and torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs))
    torch.library.opcheck(
        torch.ops.flashattn.append_kv.default,
        (caches[0], caches[1], lens, k, v, q, None, None, 10000.0, 16, False, None, None, None,
         None, None, None, None, None, None, 0, False),
        test_utils=("test_schema", "test_faketensor"))


def test_append_kv_makes_descales(device):
    """Under torch.compile, too, which knows that they are written."""
    def step(caches, descales, lens, k, v):
        return fa.append_kv(*caches, lens, k, v, descale_k=descales[0], descale_v=descales[1],
                            descale_block=1, update_descales=True).lens_kv

    kind = torch.int8 if device == "cpu" else torch.float8_e4m3fn  # GPUs have no int8
    k, v = torch.randn(2, 2, 1, 2, 16, device=device)
    lens = torch.tensor([3, 18], device=device, dtype=torch.int32)
    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        caches = [torch.zeros(2, 20, 2, 16, device=device).to(kind) for _ in range(2)]
        descales = [torch.zeros(2, 2, 20, device=device) for _ in range(2)]
        assert run(caches, descales, lens, k, v).tolist() == [4, 19]
        for x, cache, descale in zip((k, v), caches, descales):
            for b, row in enumerate((3, 18)):
                meant = cache[b, row].float() * descale[b, :, row, None]
                assert (meant - x[b, 0]).abs().max() < 0.07 * x[b, 0].abs().max()
        results.append([x.float() for x in caches + descales])
    assert all(map(torch.equal, *results))
