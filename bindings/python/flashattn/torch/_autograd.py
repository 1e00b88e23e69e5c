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
from ._repeat import Calls

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


def is_eager(q: Tensor, k: Tensor, v: Tensor, beside: Sequence[Optional[Tensor]]) -> bool:
    """Whether nobody but the kernel has to see a call: no compiler, mode, transform or subclass.

    The dispatcher with an autograd formula of torch.library costs 20 us without a gradient and 110
    with one; going around it costs 3 and 10.
    """
    if torch.compiler.is_compiling():
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
                needs[1] and beside[1] is not None, None, None)


def gradients(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor],
              operator: Any = None) -> Tuple[Any, ...]:
    """One for each input of the operator forward. operator: backward, else torch.ops'."""
    dq, dk, dv, dbias, dsink = _gradients(ctx, dout, dlse, operator)
    return (dq, dk, dv, dbias, dsink, *[None] * (_N + len(Options._fields) + 1))


def _gradients(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor],
               operator: Any = None) -> Sequence[Any]:
    """Of q, k, v, bias, sink."""
    q, k, v, o, lse, *more = ctx.saved_tensors  # once: checkpointing recomputes at each look
    if dout is None:
        if dlse is None:
            return [None] * 5
        dout = torch.zeros_like(o)
    *described, orders, calls = ctx.call
    if calls is not None and dlse is None and not torch.compiler.is_compiling():
        known = calls.find(dout, q, k, v, o, lse)
        if known is not None:
            return _launch.run_backward(known, dout, None, q, k, v, o, lse)
    beside = more or NOTHING
    # With grad mode on the caller wants a gradient of the gradient: the operator refuses that.
    eager = not torch.is_grad_enabled() and is_eager(q, k, v, (dout, o, lse, dlse, *more))
    if eager:
        results: Any = _launch.backward(dout, dlse, q, k, v, o, lse, beside, *described, orders,
                                        calls=calls)
        if beside is NOTHING:
            return results
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
    return (*results[:3], *[gradient.to(like.dtype) if wanted else None
                            for gradient, like, wanted in zip(results[3:], beside, described[3:5])])


class Attention(torch.autograd.Function):
    """Eager calls: o, or (o, lse), of tensors in the caller's order of dimensions. more: bias and
    sink, where there is anything beside q, k and v, and what is no tensor; each argument costs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Any:
        call, beside, ctx.call, return_lse = more[-1]
        o, lse = _launch.run_forward(call, q, k, v, beside, True)
        if beside is NOTHING:
            ctx.save_for_backward(q, k, v, o, lse)
        else:
            ctx.save_for_backward(q, k, v, o, lse, *beside)
        if not return_lse:
            return o
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor] = None) -> Any:
        return (*_gradients(ctx, dout, dlse)[:len(ctx.needs_input_grad) - 1], None)


# Function.apply does more, but only for transforms, which is_eager() excludes.
_apply: Any = super(torch.autograd.Function, Attention).apply  # type: ignore[misc]


class Site:
    """Calls with the same options and nothing beside q, k and v: their repetitions are short."""

    __slots__ = ("options", "orders", "return_lse", "forward", "backward")

    def __init__(self, options: Options, orders: Orders, return_lse: bool) -> None:
        self.options, self.orders, self.return_lse = options, orders, return_lse
        self.forward, self.backward = Calls(), Calls()

    def repeat(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        """(o, lse) of a call like one before, or of one it did not see: None."""
        found = self.forward.find(q, k, v)
        if found is None or _function_modes():  # type: ignore[misc]
            return None
        call, autocast, rest = found
        if autocast is not None and torch.get_autocast_dtype(autocast) is not q.dtype:
            return None
        if rest is None:
            return _launch.run_forward(call, q, k, v, NOTHING, self.return_lse)
        result = _apply(q, k, v, rest)
        return result if self.return_lse else (result, None)


def call(q: Tensor, k: Tensor, v: Tensor, beside: Sequence[Optional[Tensor]], max_q: int,
         max_kv: int, options: Options, return_lse: bool, orders: Orders,
         site: Optional[Site] = None) -> Any:
    """(o, lse) where is_eager(); lse may be None without return_lse. site: keeps the call."""
    records, needs = False, (False, False)
    if torch.is_grad_enabled():
        records = q.requires_grad or k.requires_grad or v.requires_grad
        if beside is not NOTHING:
            needs = tuple([t is not None and t.requires_grad for t in beside])
            records = records or any(needs)
            if records:
                _refuse(beside, needs)
    prepared = _launch.prepare_forward(q, k, v, beside, max_q, max_kv, options,
                                       return_lse or records, orders)
    rest = (prepared, beside, (max_q, max_kv, options, *needs[:2], orders,
                               site and site.backward), return_lse) if records else None
    if site is not None and _CAN_ASK:
        kind = q.device.type
        site.forward.keep((prepared, kind if torch.is_autocast_enabled(kind) else None, rest),
                          q, k, v)
    if rest is None:
        return _launch.run_forward(prepared, q, k, v, beside, return_lse)
    scores = () if beside is NOTHING else beside[:2]
    result = _apply(q, k, v, *scores, rest)
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
