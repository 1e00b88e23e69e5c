"""The names of flash-attn and of SDPA, and this library under F.scaled_dot_product_attention."""
import ast
import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import flashattn.torch as fa
import reference
from flashattn.torch import sdpa

README = pathlib.Path(__file__).resolve().parents[2] / "bindings" / "python" / "README.md"
NAMES = ("o", "dq", "dk", "dv")


def grads(o, inputs, dout):
    return [o.detach(), *torch.autograd.grad(o, inputs, dout)]


def compare(inputs, ours, naive, dtype, factor=2.0):
    dout = torch.randn_like(ours(*inputs))
    results = []
    for function, kind in ((ours, dtype), (naive, torch.float64), (naive, dtype)):
        copies = [x.detach().to(kind).requires_grad_() for x in inputs]
        results.append(grads(function(*copies), copies, dout.to(kind)))
    reference.check(*results, NAMES, factor)


def test_packed_forms_are_the_same_function(device):
    qkv = torch.randn(2, 33, 3, 4, 16, device=device)
    q, k, v = qkv.unbind(2)
    want, lse, weights = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert weights is None and lse.shape == (2, 4, 33)
    assert torch.equal(fa.flash_attn_qkvpacked_func(qkv, causal=True), want)
    assert torch.equal(fa.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), want)
    cu = torch.tensor([0, 33, 66], device=device, dtype=torch.int32)
    flat = qkv.flatten(0, 1)
    got, lse, _ = fa.flash_attn_varlen_func(*flat.unbind(1), cu, cu, 33, 33, causal=True,
                                            return_attn_probs=True)
    assert lse.shape == (4, 66)
    torch.testing.assert_close(got, want.flatten(0, 1))
    assert torch.equal(fa.flash_attn_varlen_qkvpacked_func(flat, cu, 33, causal=True), got)
    assert torch.equal(fa.flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], cu, cu, 33, 33,
                                                          causal=True), got)


def test_kvcache(device):
    q, cache = torch.randn(2, 3, 4, 16, device=device), torch.randn(2, 48, 2, 16, device=device)
    lens = torch.tensor([33, 48], device=device, dtype=torch.int32)
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], device=device, dtype=torch.int32)
    pages = cache.reshape(6, 16, 2, 16)
    out, lse = fa.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lens, causal=True,
                                          return_softmax_lse=True)
    assert lse.shape == (2, 4, 3)
    paged = fa.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lens, causal=True,
                                       block_table=table)
    cu_q = torch.tensor([0, 3, 6], device=device, dtype=torch.int32)
    cu_k = torch.tensor([0, 33, 81], device=device, dtype=torch.int32)
    varlen = fa.flash_attn_varlen_func(q.flatten(0, 1), pages, pages, cu_q, cu_k, 3, 48,
                                       causal=True, block_table=table)
    pad = torch.tensor([2, 7], device=device, dtype=torch.int32)
    left = fa.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=48, cache_leftpad=pad,
                                      causal=True)
    for b, (n, first) in enumerate(((33, 2), (48, 7))):
        want = reference.attention(q[b:b + 1], *[cache[b:b + 1, :n]] * 2, causal=True)[0][0]
        for got in (out[b], paged[b], varlen[3 * b:3 * b + 3]):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
        want = reference.attention(q[b:b + 1], *[cache[b:b + 1, first:]] * 2, causal=True)[0][0]
        torch.testing.assert_close(left[b], want, atol=1e-5, rtol=1e-4)


def test_a_cache_batch_index_is_refused_by_name():
    q = torch.randn(1, 1, 2, 16)
    with pytest.raises(NotImplementedError, match=r"\bcache_batch_idx is given"):
        fa.flash_attn_with_kvcache(q, q, q, cache_batch_idx=q)


def test_refusals():
    q = torch.randn(1, 9, 2, 16)
    with pytest.raises(NotImplementedError, match="return_attn_probs"):
        fa.flash_attn_func(q, q, q, dropout_p=0.5, return_attn_probs=True)
    with pytest.raises(ValueError, match="is_causal and attn_mask"):
        fa.scaled_dot_product_attention(q, q, q, torch.zeros(2, 2), is_causal=True)
    with pytest.raises(ValueError, match="enable_gqa"):
        fa.scaled_dot_product_attention(q, q[:, :3], q[:, :3])


@pytest.mark.parametrize("gradient", [False, True])
def test_tensors_without_heads_or_elements(gradient):
    """To the library 0 is a default; nothing is read or written past them."""
    q = torch.randn(1, 9, 4, 16, requires_grad=gradient)
    words = {"v has shape .*, heads of 0 elements; give at least 1": (q, q, q[..., :0]),
             "k has shape .*, 0 heads in the order .*; give at least 1": (q, q[:, :, :0],
                                                                          q[:, :, :0]),
             "q has shape .*, heads of 0 elements": (q[..., :0], q[..., :0], q)}
    for message, tensors in words.items():
        for call in (lambda q, k, v: fa.attention(q, k, v), fa.flash_attn_func,
                     lambda q, k, v: fa.attention_varlen(
                         q[0], k[0], v[0], *[torch.tensor([0, 9], dtype=torch.int32)] * 2, 9, 9)):
            with pytest.raises(ValueError, match=message):
                call(*tensors)


def test_sdpa_has_the_defaults_of_torch():
    parameters = inspect.signature(fa.scaled_dot_product_attention).parameters
    assert [(p.name, p.default) for p in parameters.values()][3:] == [
        ("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False), ("scale", None),
        ("enable_gqa", False)]


# The options behind the tensors in flash-attn 2's functions, except flash_attn_with_kvcache.
OPTIONS = dict(dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
               alibi_slopes=None, deterministic=False, return_attn_probs=False)
LENGTHS = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), "given")
QKV = dict.fromkeys("qkv", "given")
FLASH_ATTN = {
    "flash_attn_func": dict(QKV, **OPTIONS),
    "flash_attn_varlen_func": dict(QKV, **LENGTHS, **OPTIONS, block_table=None),
    "flash_attn_with_kvcache": dict(
        q="given", k_cache="given", v_cache="given", k=None, v=None, rotary_cos=None,
        rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None,
        block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False),
}


@pytest.mark.parametrize("name", FLASH_ATTN)
def test_flash_attns_arguments_and_defaults(name):
    parameters = inspect.signature(getattr(fa, name)).parameters.values()
    assert [(p.name, "given" if p.default is p.empty else p.default)
            for p in parameters] == list(FLASH_ATTN[name].items())


def test_the_packed_forms_take_flash_attns_arguments():
    """By position, by name, and left out, after what is packed."""
    qkv = torch.randn(2, 33, 3, 4, 16)
    flat, cu = qkv.flatten(0, 1), torch.tensor([0, 33, 66], dtype=torch.int32)
    given = dict(OPTIONS, softmax_scale=0.3, causal=True, window_size=(9, 0), softcap=20.0,
                 alibi_slopes=torch.rand(4), deterministic=True, return_attn_probs=True)
    assert list(given) == list(OPTIONS)
    lengths = dict(zip(LENGTHS, (cu, cu, 33, 33)))
    want = fa.flash_attn_func(*qkv.unbind(2), **given)
    for function, packed, more in (
            (fa.flash_attn_qkvpacked_func, {"qkv": qkv}, {}),
            (fa.flash_attn_kvpacked_func, {"q": qkv[:, :, 0], "kv": qkv[:, :, 1:]}, {}),
            (fa.flash_attn_varlen_qkvpacked_func, {"qkv": flat},
             {"cu_seqlens": cu, "max_seqlen": 33}),
            (fa.flash_attn_varlen_kvpacked_func, {"q": flat[:, 0], "kv": flat[:, 1:]}, lengths)):
        tensors = {**packed, **more}
        results = [function(*tensors.values(), *given.values()), function(**tensors, **given)]
        for o, lse, none in results:
            assert none is None
            torch.testing.assert_close(o.reshape(want[0].shape), want[0])
            assert lse.shape == ((4, 66) if more else (2, 4, 33))
        assert torch.equal(function(**tensors), function(*tensors.values(), *OPTIONS.values()))


def test_an_import_activates_nothing():
    """F.scaled_dot_product_attention stays torch's until activate() is called."""
    program = """if True:
        import torch, flashattn.torch as fa
        torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 2, 4, 33, 16))
        print(fa.report())"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                         check=False, env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)))
    assert run.returncode == 0, run.stderr
    assert ast.literal_eval(run.stdout) == {"active": False, "devices": [], "forward": 0,
                                            "backward": 0, "refused": {}}


MASKS = {
    "none": {}, "causal": dict(is_causal=True), "scale": dict(scale=0.5),
    "float": dict(attn_mask=torch.randn(2, 1, 33, 45)),
    "bool": dict(attn_mask=torch.rand(33, 45) > 0.4),
}


@pytest.fixture(name="activated")
def _activated():
    fa.activate()
    yield fa.report()
    fa.restore()


@pytest.mark.parametrize("mask", MASKS)
def test_sdpa(mask, device):
    inputs = [torch.randn(2, 4, n, 16, device=device) for n in (33, 45, 45)]
    options = {name: value.to(device) if name == "attn_mask" else value
               for name, value in MASKS[mask].items()}

    def theirs(q, k, v):
        more = {name: value.to(q.dtype) if name == "attn_mask" and value.is_floating_point()
                else value for name, value in options.items()}
        return F.scaled_dot_product_attention(q, k, v, **more)

    compare(inputs, lambda q, k, v: fa.scaled_dot_product_attention(q, k, v, **options), theirs,
            torch.float32)


SHAPES = {  # of query, key, value and attn_mask without their last two dimensions
    "one head": ((), (), (), ()), "three": ((6,), (6,), (6,), None),
    "three, a mask each": ((6,), (6,), (6,), (6,)), "three of one": ((6,), (1,), (6,), (1,)),
    "five": ((2, 3, 4), (2, 3, 4), (2, 3, 4), None),
    "five, masks": ((2, 3, 4), (2, 3, 4), (2, 3, 4), (3, 1)),
    "five, a mask each": ((2, 3, 4), (2, 3, 4), (2, 3, 4), (2, 1, 1)),
    "keys of one": ((3, 4), (1, 4), (3, 4), (3, 1)), "query of one": ((1, 4), (3, 4), (3, 4), None),
    "keys of fewer dimensions": ((2, 3, 4), (3, 4), (4,), None),
}


@pytest.mark.parametrize("shapes", SHAPES)
def test_sdpa_of_any_leading_dimensions(device, shapes):
    """As torch folds and broadcasts them; gradients of what is broadcast are summed."""
    *tensors, mask = SHAPES[shapes]
    q, k, v = (torch.randn(*shape, n, 16, device=device, requires_grad=True)
               for shape, n in zip(tensors, (9, 11, 11)))
    mask = None if mask is None else torch.randn(*mask, 9, 11, device=device)
    got = fa.scaled_dot_product_attention(q, k, v, mask)
    want = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    dout = torch.randn_like(want)
    for g, w in zip(*(torch.autograd.grad(o, (q, k, v), dout) for o in (got, want))):
        torch.testing.assert_close(g, w, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shapes, why", [
    ([(16,), (11, 16), (11, 16)], r"\(16,\), \(11, 16\), .*give 2 dimensions or more"),
    ([(2, 4, 9, 16), (3, 4, 9, 16), (3, 4, 9, 16)], "do not broadcast to one shape"),
    ([(9, 16), (9, 16), (9, 16), (2, 9, 9)], r"\(2, 9, 9\), whose .* do not broadcast")])
def test_sdpa_refuses_by_name(device, shapes, why):
    with pytest.raises(ValueError, match=why):
        fa.scaled_dot_product_attention(*[torch.randn(shape, device=device) for shape in shapes])


def test_sdpa_of_five_dimensions_compiles(device):
    q = torch.randn(2, 3, 4, 9, 16, device=device)
    torch._dynamo.reset()
    call = torch.compile(fa.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(call(q, q, q), fa.scaled_dot_product_attention(q, q, q))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activate(mask, dtype, activated):
    inputs = [torch.randn(2, 4, n, 16).to(dtype) for n in (33, 45, 45)]

    def call(q, k, v):
        more = {name: value.to(q.dtype) if name == "attn_mask" and value.is_floating_point()
                else value for name, value in MASKS[mask].items()}
        return F.scaled_dot_product_attention(q, k, v, **more)

    def naive(q, k, v):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return call(q, k, v)

    compare(inputs, call, naive, dtype)
    now = fa.report()
    calls = [now[name] - activated[name] for name in ("forward", "backward")]
    assert calls == [2, 1]
    assert now["refused"] == activated["refused"] and now["active"]


def test_what_is_refused_goes_to_torch_and_is_counted(activated):
    q = torch.randn(2, 4, 33, 16, dtype=torch.float64, requires_grad=True)
    o = F.scaled_dot_product_attention(q, q, q)
    o.sum().backward()
    now = fa.report()
    assert now["forward"] == activated["forward"]
    (message,) = [m for m, n in now["refused"].items() if n > activated["refused"].get(m, 0)]
    assert "float64" in message
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        torch.testing.assert_close(o, F.scaled_dot_product_attention(q, q, q))


def test_activate_says_what_torch_lacks(monkeypatch):
    fa.restore()
    monkeypatch.delattr(torch.library, "get_kernel", raising=False)
    with pytest.raises(RuntimeError, match=r"torch\.library\.get_kernel.* install a newer one"):
        sdpa.activate()
    assert not fa.report()["active"]


def test_restore():
    q = torch.randn(2, 4, 33, 16)
    fa.activate()
    fa.activate()  # once more changes nothing
    fa.restore()
    before = fa.report()
    F.scaled_dot_product_attention(q, q, q)
    assert fa.report() == before and not before["active"]
    fa.activate()
    F.scaled_dot_product_attention(q, q, q)
    fa.restore()
    assert fa.report()["forward"] == before["forward"] + 1


def test_multihead_attention_compiles(activated):
    layer, x = torch.nn.MultiheadAttention(64, 4, batch_first=True), torch.randn(2, 10, 64)
    want = layer(x, x, x, need_weights=False)[0]
    torch._dynamo.reset()
    got = torch.compile(lambda x: layer(x, x, x, need_weights=False)[0], fullgraph=True)(x)
    torch.testing.assert_close(got, want)
    got.sum().backward()
    now = fa.report()
    assert now["forward"] >= activated["forward"] + 2 and now["backward"] > activated["backward"]


def programs():
    section = README.read_text(encoding="utf-8").partition("## PyTorch")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.S)


@pytest.mark.parametrize("number, program", enumerate(programs()))
def test_the_readme(number, program, capsys, tmp_path, request):
    """Each program of its section on PyTorch, and what one of them says that it prints."""
    if "transformers" in program:
        pytest.importorskip("transformers", reason="no Transformers installed")
    if "distributed" in program:
        request.getfixturevalue("needs_activate")
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"),
                            ("MASTER_PORT", "0")):
            program = f"import os; os.environ[{name!r}] = {value!r}\n{program}"
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                             check=False, cwd=tmp_path, env=dict(os.environ, PYTHONPATH=os.pathsep
                                                                 .join(sys.path)))
        assert run.returncode == 0, run.stderr
        return
    before = fa.report()
    try:
        exec(compile(program, f"{README}, program {number}", "exec"), {})
    finally:
        fa.restore()
    now = fa.report()
    assert now["forward"] > before["forward"]
    promised = re.search(r"# ({.*})", program)
    if promised:
        wanted, printed = (ast.literal_eval(text) for text in (
            promised.group(1), capsys.readouterr().out.strip().splitlines()[-1]))
        assert printed.pop("devices")[0] == wanted.pop("devices")[0]
        for name in ("forward", "backward"):
            assert printed.pop(name) - before[name] == wanted.pop(name)
        assert printed.pop("refused") == before["refused"] and wanted.pop("refused") == {}
        assert printed == wanted
