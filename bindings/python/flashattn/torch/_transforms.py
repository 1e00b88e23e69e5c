"""The operators under torch.func's transforms, of which those of torch.library know vmap alone."""
from __future__ import annotations

from typing import Any, Sequence, Tuple

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


class _Merge(torch.autograd.Function):
    """inputs: as many part_o as part_lse, in a row; torch.func looks into no list."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return merge(*_halves(inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _autograd.merge_save(ctx, _halves(inputs), output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        d_o, d_lse = _autograd.merge_gradients(ctx, *grads)
        return (*d_o, *d_lse)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return _ops.merge_vmap_rule(merge)(info, _halves(in_dims), *_halves(inputs))


def _halves(row: Sequence[Any]) -> Tuple[Sequence[Any], Sequence[Any]]:
    return row[:len(row) // 2], row[len(row) // 2:]


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


def merge(part_o: Sequence[torch.Tensor],
          part_lse: Sequence[torch.Tensor]) -> Tuple[torch.Tensor, torch.Tensor]:
    """The operator merge."""
    if active() and len(part_o) == len(part_lse):
        return _Merge.apply(*part_o, *part_lse)
    return torch.ops.flashattn.merge(list(part_o), list(part_lse))
