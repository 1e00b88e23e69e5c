"""flash-attn 2's own test grid, written anew from its published parameters, by its names. By
default any two values of two parameters meet in a case, of sequences up to some hundred tokens;
with --device=cuda each head size meets each pair of lengths and each mask, the rest is drawn."""
import itertools
import random

import pytest
import torch

import flashattn
import flashattn.torch as fa
import reference
from test_torch_append import tables, turned

HEADS, BATCH = 6, 2
KINDS = {"mha": HEADS, "mqa": 1, "gqa": 2}
LISTS = dict(
    dim=[32, 40, 59, 64, 96, 111, 128, 160, 192, 224, 256],
    sizes=[(1, 147), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256),
           (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048)],
    mask=["full", "causal", "local", "causal local"], dtype=[torch.float16, torch.bfloat16],
    kind=list(KINDS), form=["dense", "kvpacked", "varlen", "varlen_kvpacked"],
    deterministic=[False, True], alibi=[False, True], dropout=[0.0, 0.17], softcap=[0.0, 50.0])
PACKED = dict(LISTS, sizes=[(n, n) for n in (97, 128, 200, 384, 768, 1024, 1025, 2048)],
              kind=["mha"], form=["qkvpacked", "varlen_qkvpacked"])
CACHES = dict(
    dim=[59, 128], sizes=[(1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799),
                          (64, 2048), (16, 20000), (1, 131072), (16, 131072), (128, 128)],
    mask=LISTS["mask"], dtype=LISTS["dtype"], kind=LISTS["kind"], splits=[1, 0], page=[None, 256],
    rotary=[0.0, 0.5, 1.0], interleaved=[False, True], new=[0, 1, "as many"],
    leftpad=[False, True], alibi=[False, True])


def pairwise(lists):
    """Few cases in which any two values of two parameters meet."""
    draw, names = random.Random(0), list(lists)
    missing = {frozenset(((a, x), (b, y))): None for a, b in itertools.combinations(names, 2)
               for x in lists[a] for y in lists[b]}  # in an order of its own, unlike a set
    while missing:
        case = dict(next(iter(missing)))
        for name in draw.sample(names, len(names)):
            if name not in case:
                case[name] = max(draw.sample(lists[name], len(lists[name])), key=lambda value: sum(
                    frozenset(((name, value), other)) in missing for other in case.items()))
        for pair in itertools.combinations(case.items(), 2):
            missing.pop(frozenset(pair), None)
        yield {name: case[name] for name in names}


def drawn(lists):
    draw, product = random.Random(0), ("dim", "sizes", "mask")
    for values in itertools.product(*[lists[name] for name in product]):
        yield {name: draw.choice(values) for name, values in lists.items()} | dict(
            zip(product, values))


def short(lists, tokens):
    return dict(lists, sizes=[sizes for sizes in lists["sizes"] if max(sizes) <= tokens])


def name_of(case):
    return "-".join([str(value).replace("torch.", "") for value in case.values()])


GRIDS = {"test_attention": (LISTS, 256), "test_qkvpacked": (PACKED, 200),
         "test_kvcache": (CACHES, 1024)}  # by name of a test: lists, and the most tokens on a CPU


def pytest_generate_tests(metafunc):
    lists, tokens = GRIDS[metafunc.function.__name__]
    on_gpu = metafunc.config.getoption("--device") == "cuda"
    cases = drawn(lists) if on_gpu else pairwise(short(lists, tokens))
    metafunc.parametrize("case", [pytest.param(case, id=name_of(case)) for case in cases])


def naive(q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None,
          keep=None, dropout=0.0):
    """Attention of one sequence, (tokens, heads, dim), every score stored in the tensors' dtype.
    keep: where weights stay, (heads, queries, keys)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = (torch.arange(n, device=q.device) for n in scores.shape[1:])
    ahead = keys - rows[:, None] - (len(keys) - len(rows))
    if slopes is not None:
        scores = scores - slopes[:, None, None].to(scores.dtype) * ahead.abs()
    hidden = (ahead > 0) & causal
    for size, beyond in zip(window, (-ahead, ahead)):
        hidden = hidden | ((beyond > size) & (size >= 0))
    nothing = hidden.all(-1, keepdim=True)
    scores = scores.masked_fill(hidden & ~nothing, -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill(hidden, 0.0)
    if keep is not None:
        weights = weights * keep / (1 - dropout)
    return torch.einsum("hqk,khd->qhd", weights, v)


def mask_of(case, keys):
    """causal, window: as flash-attn's tests draw it."""
    local = "local" in case["mask"]
    window = tuple(torch.randint(0, keys, (2,)).tolist()) if local else (-1, -1)
    return "causal" in case["mask"], window


def results(function, inputs, dtype, dout):
    copies = [x.detach().to(dtype).requires_grad_() for x in inputs]
    o = function(*copies)
    return [o.detach(), *torch.autograd.grad(o, copies, dout.to(dtype))]


def call(case, tensors, packed, options):
    """The function that the form names; packed: cu_seqlens and the longest, of q and of k."""
    q, k, v = tensors
    (cu_q, longest_q), (cu_k, longest_k) = packed
    form = case["form"]
    function = getattr(fa, f"flash_attn_{form}_func".replace("dense_", ""))
    dim = 2 if q.dim() == 4 else 1
    if "qkv" in form:
        tensors, lengths = [torch.stack(tensors, dim)], (cu_q, longest_q)
    else:
        tensors = [q, torch.stack((k, v), dim)] if "kv" in form else tensors
        lengths = (cu_q, cu_k, longest_q, longest_k)
    return function(*tensors, *(lengths if "varlen" in form else ()), *options)


def check(case, device):
    """o and the gradients against float64."""
    (rows, keys), varlen = case["sizes"], "varlen" in case["form"]
    lengths = [[n - (int(torch.randint(0, min(20, n), ())) if varlen else 0)
                for _ in range(BATCH)] for n in (rows, keys)]
    if "qkv" in case["form"]:
        lengths[1] = lengths[0]
    heads = (HEADS, KINDS[case["kind"]], KINDS[case["kind"]])
    inputs = [torch.randn(sum(n), h, case["dim"], device=device).to(case["dtype"])
              for n, h in zip((lengths[0], lengths[1], lengths[1]), heads)]
    causal, window = mask_of(case, keys)
    slopes = torch.rand(BATCH, HEADS, device=device) * 0.3 if case["alibi"] else None
    dropout, keep = case["dropout"], None
    if dropout:  # as a call draws its seed
        torch.manual_seed(1)
        seed, offset = torch.randint(-2**63, 2**63 - 1, (2,), device=device).tolist()
        keep = torch.from_numpy(flashattn.dropout_mask(
            BATCH, HEADS, rows, keys, dropout=dropout, rng_seed=seed % 2**64,
            rng_offset=offset % 2**64)).to(device)
    cu = [torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device=device)
          for n in lengths]

    def ours(*tensors):
        torch.manual_seed(1)
        if not varlen:
            tensors = [x.unflatten(0, (BATCH, -1)) for x in tensors]
        return call(case, tensors, list(zip(cu, map(max, lengths))), (
            dropout, None, causal, window, case["softcap"], slopes,
            case["deterministic"])).reshape(-1, HEADS, case["dim"])

    def formula(q, k, v):
        parts = zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]))
        return torch.cat([naive(
            *part, causal=causal, window=window, softcap=case["softcap"], dropout=dropout,
            slopes=None if slopes is None else slopes[b],
            keep=None if keep is None else keep[b, :, :len(part[0]), :len(part[1])])
            for b, part in enumerate(parts)])

    dout = torch.randn(sum(lengths[0]), HEADS, case["dim"], device=device)
    every = [results(function, inputs, dtype, dout.to(case["dtype"])) for function, dtype in (
        (ours, case["dtype"]), (formula, torch.float64), (formula, case["dtype"]))]
    reference.check(*every, ("o", "dq", "dk", "dv"), 3.0 if case["softcap"] else 2.0)


def test_attention(case, device):
    check(case, device)


def test_qkvpacked(case, device):
    check(case, device)


def test_kvcache(case, device):
    """New keys are written, rotated; what is then in the cache, and q as rotated, are attended."""
    (rows, keys), dim, dtype = case["sizes"], case["dim"], case["dtype"]
    new, page, pairs = case["new"], case["page"], int(case["rotary"] * dim / 16) * 8
    new = rows if new == "as many" else new
    causal, window = mask_of(case, keys)
    moving = causal or window != (-1, -1)
    capacity = -(-keys // 256) * 256
    q = torch.randn(BATCH, rows, HEADS, dim, device=device).to(dtype)
    heads = KINDS[case["kind"]]
    caches = torch.randn(2, BATCH, capacity, heads, dim, device=device).to(dtype)
    before, table = caches.clone(), None
    k, v = torch.randn(2, BATCH, new, heads, dim, device=device).to(dtype) if new else (None, None)
    lens = torch.randint(0, keys - max(new, rows) + 1, (BATCH,), device=device)
    if not new:  # rotation needs new keys
        pairs, lens = 0, lens + rows
    cos, sin = tables(capacity, pairs, device) if pairs else (None, None)
    pad = (lens // 3).int() if case["leftpad"] and not page else None
    given = list(caches)
    if page:
        shuffled = torch.randperm(BATCH * capacity // page, device=device)
        table = torch.empty_like(shuffled)
        table[shuffled] = torch.arange(len(shuffled), device=device)
        table = table.view(BATCH, -1).int()
        given = [x.reshape(-1, page, heads, dim)[shuffled] for x in caches]
    slopes = torch.rand(BATCH, HEADS, device=device) * 0.3 if case["alibi"] else None
    got = fa.flash_attn_with_kvcache(
        q, *given, k, v, cos, sin, lens, None, pad, table, None, causal, window, 0.0,
        case["interleaved"], slopes, case["splits"])
    wrote = [x[table.flatten().long()].view(BATCH, capacity, heads, dim) if page else x
             for x in given]
    for b, n in enumerate(lens.tolist()):
        row, first = q[b].double(), 0 if pad is None else int(pad[b])
        end = n + new
        for cache, was in zip(wrote, before):
            assert torch.equal(cache[b, :n], was[b, :n])
            assert torch.equal(cache[b, end:], was[b, end:])
        if new:
            want = k[b].double()
            if pairs:
                row = turned(q[b], n, cos, sin, case["interleaved"], moving).to(dtype).double()
                want = turned(k[b], n, cos, sin, case["interleaved"])
            torch.testing.assert_close(wrote[0][b, n:end].double(), want, rtol=8e-3, atol=1e-3)
            assert torch.equal(wrote[1][b, n:end], v[b])
        options = dict(causal=causal, window=window, slopes=None if slopes is None else slopes[b])
        arrays = [row, *[x[b, first:end] for x in wrote]]
        truth, error = (naive(*[x.to(kind) for x in arrays], **options)
                        for kind in (torch.float64, dtype))
        reference.check([got[b]], [truth], [error], ["o"])
