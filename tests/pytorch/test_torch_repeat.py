"""Eager calls that repeat an earlier one are found by one question, and only where nobody else has
to see the call."""
import contextlib
import functools
import gc
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashattn
import flashattn.torch as fa
from flashattn import _plan
from flashattn.torch import _aten, _autograd, _launch, _repeat

aten = torch.ops.aten


def tensors(device="cpu", **options):
    return [torch.randn(1, n, h, 16, device=device, **options) for n, h in (
        (5, 4), (7, 2), (7, 2))]


@contextlib.contextmanager
def no_preparation(monkeypatch):
    """Only repeated calls run."""
    def refuse(*_, **__):
        raise AssertionError("not found")
    with monkeypatch.context() as patch:
        for module in (_launch, _autograd._launch):
            patch.setattr(module, "prepare_forward", refuse)
            patch.setattr(module, "backward", refuse)
        yield


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (3, 0)}, {"layout": "bhsd"},
                                     {"return_lse": True}])
@pytest.mark.parametrize("records", [False, True])
def test_found_again(device, monkeypatch, options, records):
    """The results of other numbers are those of a first call; gradients too."""
    given = [tensors(device, requires_grad=records) for _ in range(2)]
    if "layout" in options:
        given = [[x.transpose(1, 2) for x in qkv] for qkv in given]

    def run(qkv):
        o = fa.attention(*qkv, **options)
        o, lse = o if options.get("return_lse") else (o, None)
        grads = torch.autograd.grad(o, qkv, torch.linspace(
            0, 1, o.numel(), device=device).view(o.shape)) if records else ()
        return [o, *([] if lse is None else [lse]), *grads]

    flashattn.clear_cache()
    want = run(given[1])
    flashattn.clear_cache()
    run(given[0])
    before = fa.report()
    with no_preparation(monkeypatch):
        got = run(given[1])
    assert fa.report()["forward"] == before["forward"] + 1
    for g, w in zip(got, want):
        assert torch.equal(g, w) and g.stride() == w.stride()
        assert g.requires_grad == w.requires_grad


def lengths(device, *numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def scored(qkv, device, i):
    heads = qkv[0].shape[2]
    bias = torch.full((1, heads, 5, 7), 0.1 * i, device=device, requires_grad=i < 2)
    sink = torch.full((heads,), 0.2 * i, device=device, requires_grad=True)
    return lambda: fa.attention(*qkv, bias=bias, sink=sink, lens_kv=lengths(device, 7 - i),
                                return_lse=True), [bias, sink] if i < 2 else [sink]


def packed(qkv, device, i):
    q, k, v = (x[0] for x in qkv)
    cu_q, cu_kv = lengths(device, 0, 2 + i, 5), lengths(device, 0, 3 + i, 7)
    return lambda: fa.attention_varlen(q, k, v, cu_q, cu_kv, 5, 7, causal=True), []


def packed_alike(qkv, device, i):
    """One tensor twice."""
    q, k, v = qkv[0][0], qkv[1][0, :5], qkv[2][0, :5]
    cu = lengths(device, 0, 2 + i, 5)
    return lambda: fa.attention_varlen(q, k, v, cu, cu, 5, 5, causal=True), []


@pytest.mark.parametrize("kind", [scored, packed, packed_alike])
@pytest.mark.parametrize("records", [False, True])
def test_found_again_with_more_tensors(device, monkeypatch, kind, records):
    """Other numbers in each of them, the lengths, too."""
    given = [tensors(device, requires_grad=records) for _ in range(3)]

    def run(i):
        call, more = kind(given[i], device, i)
        with torch.set_grad_enabled(records):
            o = call()
        o, lse = o if isinstance(o, tuple) else (o, None)
        grads = torch.autograd.grad(o, [*given[i], *more], torch.linspace(
            0, 1, o.numel(), device=device).view(o.shape)) if records else ()
        return [o, *([] if lse is None else [lse]), *grads]

    flashattn.clear_cache()
    want = run(1)
    flashattn.clear_cache()
    run(0)
    with no_preparation(monkeypatch):
        got = run(1)
    for g, w in zip(got, want):
        assert torch.equal(g, w) and g.stride() == w.stride()
    run(2)  # the bias needs no gradient


def test_tensors_alike_for_other_uses_are_not_confused(device):
    q, k, v = tensors(device)
    lens, once, twice = lengths(device, 3), lengths(device, 0, 5), lengths(device, 0, 7)
    calls = [lambda: fa.attention(q, k, v, lens_q=lens),
             lambda: fa.attention(q, k, v, lens_kv=lens),
             lambda: fa.attention(q, k, v, starts_kv=lens),
             lambda: fa.attention(q, k, v, lens_q=lens, lens_kv=lens),
             lambda: fa.attention_varlen(q[0], k[0], v[0], once, twice, 7, 7),
             lambda: fa.attention_varlen(q[0], k[0, :5], v[0, :5], once, once, 7, 7)]
    want = []
    for call in calls:
        flashattn.clear_cache()
        want.append(call())
    for _ in range(2):
        for call, result in zip(calls, want):
            assert torch.equal(call(), result)


@pytest.mark.parametrize("name", ["_scaled_dot_product_flash_attention",
                                  "_scaled_dot_product_flash_attention_for_cpu"])
@pytest.mark.parametrize("memory", ["bhsd", "bshd"])
def test_found_again_while_active(device, monkeypatch, name, memory):
    if device == "cuda" and name.endswith("cpu"):
        pytest.skip("an operator for the CPU")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    given = torch.randn(2, 3, 2, 6, 4, 16, device=device, dtype=dtype)
    if memory == "bhsd":
        given = given.transpose(3, 4).contiguous()
    else:
        given = given.transpose(3, 4)

    def run(qkv):
        operator = getattr(aten, name)
        leaves = [x.detach().requires_grad_() for x in qkv]
        results = operator(*leaves, 0.0, True)
        return [*results[:2], *torch.autograd.grad(results[0], leaves, torch.ones_like(results[0])),
                *results[6:]]

    fa.activate()
    try:
        flashattn.clear_cache()
        want = run(given[1])
        flashattn.clear_cache()
        run(given[0])
        with no_preparation(monkeypatch):
            got = run(given[1])
    finally:
        fa.restore()
    for g, w in zip(got[:5], want[:5]):
        assert torch.equal(g, w) and g.stride() == w.stride()
    for g, w in zip(got[5:], want[5:]):  # what nobody reads without dropout
        assert (g.shape, g.dtype, g.device) == (w.shape, w.dtype, w.device)


class Recorder:
    """A mode that notes the names of what is called."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def record(self, function, types, args=(), kwargs=None):
        self.operators.append(str(function))
        return function(*args, **(kwargs or {}))


class Seen(Recorder, TorchDispatchMode):
    __torch_dispatch__ = Recorder.record


class SeenFunctions(Recorder, TorchFunctionMode):
    __torch_function__ = Recorder.record


@pytest.mark.parametrize("mode", [Seen, SeenFunctions])
def test_modes_see_a_repeated_call(device, mode):
    leaves = tensors(device, requires_grad=True)
    for _ in range(2):
        fa.attention(*leaves).sum().backward()
    with mode() as seen:
        fa.attention(*leaves).sum().backward()
    assert sum("flashattn.forward" in name for name in seen.operators) == 1
    # PyTorch shows no function of a backward pass to these modes.
    backward = sum("flashattn.backward" in name for name in seen.operators)
    assert backward == (mode is Seen)


def test_grad_mode_and_what_requires_a_gradient(device):
    q, k, v = tensors(device)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    for _ in range(2):
        assert not fa.attention(q, k, v).requires_grad
        assert fa.attention(*leaves).requires_grad
        assert fa.attention(q, leaves[1], v).requires_grad
        with torch.no_grad():
            assert not fa.attention(*leaves).requires_grad
        with torch.inference_mode():
            assert fa.attention(*leaves).is_inference()


def test_autocast(device):
    """It casts repeated calls, also after it chose another type."""
    plain = tensors(device)
    fa.attention(*plain)
    for _ in range(2):
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast(device, dtype):
                assert fa.attention(*plain).dtype == dtype
                cast = [x.to(torch.bfloat16) for x in plain]
                assert fa.attention(*cast).dtype == dtype
        assert fa.attention(*plain).dtype == torch.float32


def test_autocast_that_changes_nothing_is_repeated(device, monkeypatch):
    cast = tensors(device, dtype=torch.bfloat16)
    with torch.autocast(device, torch.bfloat16):
        want = fa.attention(*cast)
        with no_preparation(monkeypatch):
            assert torch.equal(fa.attention(*cast), want)


def test_transforms_see_a_repeated_call(device):
    q, k, v = tensors(device)
    want = fa.attention(q, k, v)
    many = torch.stack([q, 2 * q])
    got = torch.vmap(fa.attention, (0, None, None))(many, k, v)
    torch.testing.assert_close(got[0], want, atol=1e-5, rtol=1e-4)
    grads = torch.func.grad(lambda q: fa.attention(q, k, v).sum())(q)
    leaf = q.clone().requires_grad_()
    assert torch.equal(grads, *torch.autograd.grad(fa.attention(leaf, k, v).sum(), leaf))


@pytest.mark.filterwarnings("ignore")
def test_tracing_sees_a_repeated_call():
    q, k, v = tensors()
    fa.attention(q, k, v)
    traced = torch.jit.trace(lambda q: fa.attention(q, k, v), (q,), check_trace=False)
    assert "flashattn::forward" in str(traced.graph)


@pytest.mark.parametrize("heads_first", [False, True])
def test_saved_tensors_come_back_with_other_strides(device, heads_first):
    """Hooks may give copies: a backward call asks what its tensors are like, also when a call
    before was given others."""
    def unpack(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2) if heads_first and x.dim() == 4 else x

    leaves = tensors(device, requires_grad=True)
    dout = torch.linspace(0, 1, 5 * 4 * 16, device=device).view(1, 5, 4, 16)
    want = torch.autograd.grad(fa.attention(*leaves), leaves, dout)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
            o = fa.attention(*leaves)
        for g, w in zip(torch.autograd.grad(o, leaves, dout), want):
            assert torch.equal(g, w)


@pytest.mark.parametrize("more", [{}, {"return_lse": True}, {"sink": torch.ones(4)}])
def test_compiled_autograd_sees_a_repeated_call(more):
    """A backward pass of eager calls that PyTorch compiles."""
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    leaves, results = tensors(requires_grad=True), []
    for compiles in (False, True) * 2:
        o = fa.attention(*leaves, **more)
        for x in leaves:
            x.grad = None
        with (compiled_autograd._enable(torch.compile(backend="eager")) if compiles else
              contextlib.nullcontext()):
            (o[0] if isinstance(o, tuple) else o).square().sum().backward()
        results.append([x.grad for x in leaves])
    for other in results[1:]:
        for g, w in zip(other, results[0]):
            assert torch.equal(g, w)


def test_a_subclass_is_not_a_tensor(device):
    class Other(torch.Tensor):
        pass
    q, k, v = tensors(device)
    fa.attention(q, k, v)
    assert type(fa.attention(q.as_subclass(Other), k, v)) is Other


def test_the_number_of_threads_counts(monkeypatch):
    q, k, v = tensors()
    site = _autograd.Site(_launch.Options(), None, False)
    monkeypatch.setattr(_repeat, "_threads", lambda: 3)
    site.calls.keep("three", q, k, v)
    assert site.calls.find(q, k, v) == "three"
    monkeypatch.setattr(_repeat, "_threads", lambda: 1)
    assert site.calls.find(q, k, v) is None


def test_deterministic_algorithms_count_while_active(monkeypatch):
    q = tensors()[0].transpose(1, 2)
    fa.activate()
    try:
        for on in (False, True):
            torch.use_deterministic_algorithms(on)
            same = _aten._same(0.0, False, None, False, on, -1, -1, 0)
            assert same.options.determinism == on
            aten._scaled_dot_product_flash_attention(q, q + 1, q + 2)
            with no_preparation(monkeypatch):
                aten._scaled_dot_product_flash_attention(q, q + 1, q + 2)
    finally:
        torch.use_deterministic_algorithms(False)
        fa.restore()


def test_little_is_kept(device):
    """No tensors, no more than the latest kinds, nothing behind clear_cache(); nothing where it
    could not be found again."""
    calls, q = _repeat.Calls(), torch.randn(2, 3, device=device)
    gone = weakref.ref(q)
    calls.keep("found", q)
    assert calls.find(q) == "found" and calls.find(q[:1]) is None and calls.find(None) is None
    del q
    gc.collect()
    assert gone() is None
    for n in range(100):
        calls.keep(n, torch.empty(n, device=device))
    assert len(_plan.prepared[calls]) == _repeat._MOST
    assert calls.find(torch.empty(99, device=device)) == 99
    assert calls.find(torch.empty(1, device=device)) is None
    twice = _repeat.Calls()
    twice.keep("twice", q := torch.empty(9, device=device), q)
    assert twice.find(q, q) is None and twice not in _plan.prepared
    flashattn.clear_cache()
    assert calls.find(torch.empty(99, device=device)) is None


def test_without_the_question_of_pytorch(device, monkeypatch):
    flashattn.clear_cache()
    monkeypatch.setattr(_repeat, "_TensorGuards", None)
    leaves = tensors(device, requires_grad=True)
    for _ in range(2):
        o = fa.attention(*leaves)
        want = F.scaled_dot_product_attention(*[x.transpose(1, 2) for x in leaves], enable_gqa=True)
        torch.testing.assert_close(o, want.transpose(1, 2), atol=1e-4, rtol=1e-3)
        o.sum().backward()
    assert not any(isinstance(key, _repeat.Calls) for key in _plan.prepared)


def test_nothing_that_is_kept_has_memory(device):
    """Else a call that is first met while a graph is captured would leave memory in its pool."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    flashattn.clear_cache()
    leaves = tensors(device, dtype=dtype, requires_grad=True)
    q = torch.randn(1, 4, 6, 16, device=device, dtype=dtype)
    fa.activate()
    try:
        fa.attention(*leaves).sum().backward()
        aten._scaled_dot_product_flash_attention(q, q + 1, q + 2)
    finally:
        fa.restore()

    seen = {}

    def look(value):
        """Into tuples, and into the variables of functions."""
        if id(value) in seen:
            return
        seen[id(value)] = value
        parts = (value if isinstance(value, (tuple, list)) else
                 value.args if isinstance(value, functools.partial) else
                 [cell.cell_contents for cell in value.__closure__ or ()]
                 if isinstance(value, types.FunctionType) else ())
        for part in parts:
            look(part)
    look(tuple(_plan.prepared.values()))
    # Three forward calls make o, lse and workspace, a backward call dq, dk, dv and workspace.
    assert sum(isinstance(value, functools.partial) for value in seen.values()) >= 10
    assert not any(value.untyped_storage().nbytes() for value in seen.values()
                   if isinstance(value, torch.Tensor))
