"""Gradients: the same two functions for the operators, and for eager calls, which go around the
dispatcher."""
from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._constants import Reason, Status
from .._errors import UnsupportedError, invalid
from . import _launch
from ._launch import BESIDE, NOTHING, Options, Orders, inverse, permuted
from ._repeat import Calls, prepared

_N = len(BESIDE)
_PAGE_TABLE = BESIDE.index("page_table")
_NO_GRADIENT = ("alibi_slopes",)
_PLAIN = (Tensor, torch.nn.Parameter)
_C: Any = torch._C
_modes = getattr(_C, "_len_torch_dispatch_stack", None)
_function_modes = getattr(_C, "_len_torch_function_stack", None)
_transforms = getattr(getattr(_C, "_functorch", None), "peek_interpreter_stack", None)
_tracing = getattr(_C, "_get_tracing_state", None)
_CAN_ASK = None not in (_modes, _function_modes, _transforms, _tracing)
_is_compiling, _threads = torch.compiler.is_compiling, torch.get_num_threads


def is_eager(q: Tensor, k: Tensor, v: Tensor, beside: Sequence[Optional[Tensor]]) -> bool:
    """Whether nobody but the kernel has to see a call: no compiler, mode, transform or subclass.

    The dispatcher with an autograd formula of torch.library costs 20 us without a gradient and 110
    with one; going around it costs 3 and 10.
    """
    if _is_compiling():
        return False
    if (not _CAN_ASK or _modes() or _function_modes()  # type: ignore[misc]
            or _transforms() is not None or _tracing() is not None):  # type: ignore[misc]
        return False
    for tensor in (q, k, v) if beside is NOTHING else (q, k, v, *beside):
        if tensor is not None and (type(tensor) not in _PLAIN or tensor.is_neg()
                                   or not (tensor.is_cpu or tensor.is_cuda)
                                   or tensor.layout is not torch.strided):
            return False
    return True


def _refuse(beside: Sequence[Optional[Tensor]], needs: Sequence[bool]) -> None:
    """What has no gradient, where one is to be recorded. needs: of which beside."""
    for name in _NO_GRADIENT:
        if needs[BESIDE.index(name)]:
            raise UnsupportedError(f"{name} requires a gradient, which the library does not "
                                   f"compute; give {name}.detach()", Status.ERROR_UNSUPPORTED,
                                   Reason.OP, name)
    if beside[_PAGE_TABLE] is not None:
        raise UnsupportedError("a tensor requires a gradient, which paged attention has not; call "
                               "it under torch.no_grad()", Status.ERROR_UNSUPPORTED, Reason.OP,
                               "page_table")


def save(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, Tensor]) -> None:
    """inputs are those of the operator forward."""
    q, k, v, *rest = inputs
    beside, (max_q, max_kv, *options, return_lse) = rest[:_N], rest[_N:]
    if not return_lse:
        raise invalid("return_lse = False, but a tensor requires a gradient, which needs the lse; "
                      "set it", Reason.OP, "lse")
    needs = ctx.needs_input_grad[3:3 + _N]
    _refuse(beside, needs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *beside)
    ctx.call = (max_q, max_kv, Options(*options), needs[0] and beside[0] is not None,
                needs[1] and beside[1] is not None, None)


def gradients(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor],
              operator: Any = None) -> Tuple[Any, ...]:
    """One for each input of the operator forward. operator: backward, else torch.ops'."""
    # Once: checkpointing recomputes at each look.
    results = _gradients(ctx.saved_tensors, ctx.call, dout, dlse, operator)
    return (*results, *[None] * (_N + len(Options._fields) + 1))


def _gradients(saved: Sequence[Tensor], call: Tuple[Any, ...], dout: Optional[Tensor],
               dlse: Optional[Tensor], operator: Any = None,
               calls: Optional[Calls] = None) -> Sequence[Any]:
    """Of q, k, v, bias, sink. call: all arguments of the operator that are no tensors, and orders.
    calls: of earlier backward passes."""
    q, k, v, o, lse, *more = saved
    if dout is None:
        if dlse is None:
            return [None] * 5
        dout = torch.zeros_like(o)
    beside, run = more or NOTHING, None
    if calls is not None and dlse is None and not _is_compiling():
        run = calls.find(dout, q, k, v, o, lse, *_launch.given(beside)[1])
    *described, orders = call
    if run is not None:
        results: Any = run(dout, None, q, k, v, o, lse, beside)
    # With grad mode on the caller wants a gradient of the gradient: the operator refuses that.
    elif not torch.is_grad_enabled() and is_eager(q, k, v, (dout, o, lse, dlse, *more)):
        results = _launch.backward(dout, dlse, q, k, v, o, lse, beside, *described, orders,
                                   calls=calls)
    else:
        max_q, max_kv, options, *_ = described
        order, order_kv = orders or (None, None)
        every = (order, order, order_kv, order_kv, order)
        dout, q, k, v, o = [permuted(x, by) for x, by in zip((dout, q, k, v, o), every)]
        operator = operator or torch.ops.flashattn.backward
        results = operator(dout, dlse, q, k, v, o, lse, *beside, max_q, max_kv, *options,
                           *described[3:5])
        results = [x if by is None else x.permute(inverse(by))
                   for x, by in zip(results, (*every[1:4], None, None))]
    if beside is NOTHING:
        return results  # type: ignore[no-any-return]
    return (*results[:3], *[gradient.to(like.dtype) if wanted else None
                            for gradient, like, wanted in zip(results[3:], beside, described[3:5])])


def _record(function: Any) -> Any:
    """Its apply(). Function.apply does more, but only for transforms, which is_eager() excludes."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def _recorder(run: _launch.Run, call: Tuple[Any, ...], calls: Optional[Calls],
              return_lse: bool, alone: bool) -> Any:
    """What runs a prepared call and records o, or (o, lse): of (q, k, v) alone, or else of
    (q, k, v, bias, sink, beside). call, calls: see _gradients().

    A class for each kind of call: whatever PyTorch is handed besides tensors costs time.
    """
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Any:
            if alone:
                o, lse = run(q, k, v)
                ctx.save_for_backward(q, k, v, o, lse)
            else:
                o, lse = run(q, k, v, more[2])
                ctx.save_for_backward(q, k, v, o, lse, *more[2])
            if not return_lse:
                return o
            ctx.set_materialize_grads(False)
            return o, lse

        @staticmethod
        def backward(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor] = None) -> Any:
            return first(ctx.saved_tensors, dout, dlse)

    def first(saved: Sequence[Tensor], dout: Optional[Tensor], dlse: Optional[Tensor]) -> Any:
        grads = _gradients(saved, call, dout, dlse, None, calls)
        return tuple(grads[:3]) if alone else (*grads, None)

    def repeat(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor] = None) -> Any:
        """backward(), shorter for a call like one before."""
        saved = ctx.saved_tensors
        if alone and dlse is None:
            for check, threads, again in prepared.get(calls, ()):
                if check(dout, *saved) and threads == _threads():
                    return again(dout, None, *saved)[:3]
        return first(saved, dout, dlse)

    # The engine calls apply(). PyTorch's own looks for backward() at every call.
    if hasattr(Attention, "_backward_cls"):
        Attention._backward_cls.apply = repeat
    return _record(Attention)


def _kept_recorder(*described: Any) -> Any:
    key = (_recorder, *described)
    return prepared.get(key) or _launch.keep(key, _recorder(*described))


class Site:
    """Calls with the same options and the same kinds of tensors: their repetitions are short."""

    __slots__ = ("options", "orders", "return_lse", "calls", "backward")

    def __init__(self, options: Options, orders: Orders, return_lse: bool) -> None:
        self.options, self.orders, self.return_lse = options, orders, return_lse
        self.calls, self.backward = Calls(), Calls()

    def repeat(self, q: Tensor, k: Tensor, v: Tensor,
               beside: Sequence[Optional[Tensor]] = NOTHING, given: Sequence[Any] = ()) -> Any:
        """What attention() returns, of a call like one before; of one it did not see: None."""
        for check, threads, found in prepared.get(self.calls, ()):  # as find() does, but sooner
            if (check(q, k, v, *given) if given else check(q, k, v)) and threads == _threads():
                break
        else:
            return None
        if _function_modes():  # type: ignore[misc]
            return None
        run, autocast, record = found
        if autocast is not None and torch.get_autocast_dtype(autocast) is not q.dtype:
            return None
        if record is None:
            return run(q, k, v, beside) if self.return_lse else run(q, k, v, beside)[0]
        return record(q, k, v) if beside is NOTHING else record(q, k, v, *beside[:2], beside)


def call(q: Tensor, k: Tensor, v: Tensor, beside: Sequence[Optional[Tensor]], max_q: int,
         max_kv: int, options: Options, return_lse: bool, orders: Orders,
         site: Optional[Site] = None) -> Any:
    """(o, lse) where is_eager(); lse may be None without return_lse. site: keeps the call."""
    records, needs = False, (False, False)
    if torch.is_grad_enabled():
        needs = tuple([t is not None and t.requires_grad for t in beside])
        records = q.requires_grad or k.requires_grad or v.requires_grad or any(needs)
        if records:
            _refuse(beside, needs)
    run = _launch.prepare_forward(q, k, v, beside, max_q, max_kv, options, return_lse or records,
                                  orders)
    record = None
    if records:
        record = _kept_recorder(run, (max_q, max_kv, options, *needs[:2], orders),
                                site and site.backward, return_lse, beside is NOTHING)
    if site is not None and _CAN_ASK:
        kind = q.device.type
        site.calls.keep((run, kind if torch.is_autocast_enabled(kind) else None, record), q, k, v,
                        *_launch.given(beside)[1])
    if record is None:
        return run(q, k, v, beside)
    result = record(q, k, v) if beside is NOTHING else record(q, k, v, *beside[:2], beside)
    return result if return_lse else (result, None)


def merge_save(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    part_o, part_lse = inputs
    ctx.parts = len(part_o)
    ctx.save_for_backward(*part_o, *part_lse, *output)


def merge_gradients(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor]) -> Tuple[Any, Any]:
    """do_p = w_p do, dlse_p = w_p (do . (o_p - o) + dlse), with w_p = exp(lse_p - lse)."""
    n = ctx.parts
    saved = ctx.saved_tensors
    part_o, part_lse, o, lse = saved[:n], saved[n:2 * n], saved[-2].float(), saved[-1]
    grads_o, grads_lse = [], []
    for o_p, lse_p in zip(part_o, part_lse):
        weight = torch.where(lse_p == -torch.inf, 0.0, torch.exp(lse_p - lse))
        d_lse = torch.zeros_like(lse) if dlse is None else dlse
        d_o = torch.zeros_like(o_p)
        if dout is not None:
            d_o = (weight.transpose(-1, -2).unsqueeze(-1) * dout).to(o_p.dtype)
            d_lse = d_lse + ((o_p.float() - o) * dout).sum(-1).transpose(-1, -2)
        grads_o.append(d_o)
        grads_lse.append(weight * d_lse)
    return grads_o, grads_lse
