"""The operators under torch.func's transforms, of which those of torch.library know vmap alone."""
from __future__ import annotations

from typing import Any, Tuple

import torch

from . import _autograd, _ops


def active() -> bool:
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Any) -> Any:
        return backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _ops.no_second(ctx, *grads)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _ops.vmap_rule(backward, 7)(info, in_dims, *inputs)


class _Forward(torch.autograd.Function):
    """Each transform takes one level off and comes here again."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return forward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _autograd.save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _autograd.gradients(ctx, *grads, backward)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _ops.vmap_rule(forward, 3)(info, in_dims, *inputs)


def forward(*inputs: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    """The operator forward."""
    if active():
        return _Forward.apply(*inputs)
    return torch.ops.flashattn.forward(*inputs)


def backward(*inputs: Any) -> Tuple[torch.Tensor, ...]:
    """The operator backward."""
    if active():
        return _Backward.apply(*inputs)
    return torch.ops.flashattn.backward(*inputs)
