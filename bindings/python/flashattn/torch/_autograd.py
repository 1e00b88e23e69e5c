"""Gradients: the same two functions for the operators, and for eager calls, which go around the
dispatcher."""
from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from .._constants import Reason, Status
from .._errors import UnsupportedError, invalid
from . import _launch
from ._launch import BESIDE, Options

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


def is_eager(*tensors: Optional[Tensor]) -> bool:
    """Whether nobody but the kernel has to see a call: no compiler, mode, transform or subclass.

    The dispatcher with an autograd formula of torch.library costs 20 us without a gradient and 110
    with one; going around it costs 3 and 10.
    """
    if torch.compiler.is_compiling():
        return False
    if (not _CAN_ASK or _modes() or _function_modes()  # type: ignore[misc]
            or _transforms() is not None or _tracing() is not None):  # type: ignore[misc]
        return False
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or tensor.is_neg()
                                   or not (tensor.is_cpu or tensor.is_cuda)
                                   or tensor.layout is not torch.strided):
            return False
    return True


def save(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, Tensor]) -> None:
    """inputs are those of the operator forward."""
    q, k, v, *rest = inputs
    beside, options = rest[:_N], rest[_N:]
    if not options[-1]:
        raise invalid("return_lse = False, but a tensor requires a gradient, which needs the lse; "
                      "set it", Reason.OP, "lse")
    needs = ctx.needs_input_grad[3:3 + _N]
    for name in _NO_GRADIENT:
        if needs[BESIDE.index(name)]:
            raise UnsupportedError(f"{name} requires a gradient, which the library does not "
                                   f"compute; give {name}.detach()", Status.ERROR_UNSUPPORTED,
                                   Reason.OP, name)
    if beside[_PAGE_TABLE] is not None:
        raise UnsupportedError("a tensor requires a gradient, which paged attention has not; call "
                               "it under torch.no_grad()", Status.ERROR_UNSUPPORTED, Reason.OP,
                               "page_table")
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *beside)
    ctx.options = options[:-1]
    ctx.needs = (needs[0] and beside[0] is not None, needs[1] and beside[1] is not None)


def gradients(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor]) -> Tuple[Any, ...]:
    """One for each input of the operator forward."""
    saved = ctx.saved_tensors  # once: checkpointing recomputes at each look
    q, k, v, o, lse, *beside = saved
    if dout is None and dlse is None:
        return (None,) * (4 + _N + len(ctx.options))
    if dout is None:
        dout = torch.zeros_like(o)
    # With grad mode on the caller wants a gradient of the gradient: the operator refuses that.
    if not torch.is_grad_enabled() and is_eager(dout, dlse, *saved):
        max_q, max_kv, *options = ctx.options
        dq, dk, dv, dbias, dsink = _launch.backward(
            dout, dlse, q, k, v, o, lse, beside, max_q, max_kv, Options(*options), *ctx.needs)
    else:
        dq, dk, dv, dbias, dsink = torch.ops.flashattn.backward(
            dout, dlse, q, k, v, o, lse, *beside, *ctx.options, *ctx.needs)
    more = [None] * _N
    for i, (wanted, gradient) in enumerate(zip(ctx.needs, (dbias, dsink))):
        if wanted:
            more[i] = gradient.to(beside[i].dtype)
    return (dq, dk, dv, *more, *[None] * (len(ctx.options) + 1))


class Attention(torch.autograd.Function):
    """The operator forward for eager calls."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        q, k, v, *rest = inputs
        max_q, max_kv, *options, return_lse = rest[_N:]
        output = _launch.forward(q, k, v, rest[:_N], max_q, max_kv, Options(*options), return_lse)
        save(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return gradients(ctx, *grads)


def call(inputs: Tuple[Any, ...]) -> Tuple[Tensor, Tensor]:
    """The operator forward, by the shortest way. Without return_lse it is set where a gradient
    needs it."""
    tensors = inputs[:3 + _N]
    records = torch.is_grad_enabled() and any(
        [tensor is not None and tensor.requires_grad for tensor in tensors])
    if records and not inputs[-1]:
        inputs = (*inputs[:-1], True)
    if not is_eager(*tensors):
        return torch.ops.flashattn.forward(*inputs)
    if records:
        return Attention.apply(*inputs)
    max_q, max_kv, *options, return_lse = inputs[3 + _N:]
    return _launch.forward(*inputs[:3], tensors[3:], max_q, max_kv, Options(*options), return_lse)


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
