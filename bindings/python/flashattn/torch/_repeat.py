"""Eager calls that repeat an earlier one, told by one question to PyTorch instead of many.

torch.compile asks the same question, whether a program fits the tensors of a call: their classes,
dispatch keys, types, devices, sizes and strides, and whether a gradient is recorded. Modes,
transforms, tracing, autocast and wrappers of tensors all show in the dispatch keys.
"""
from __future__ import annotations

from typing import Any

import torch

from .._plan import prepared

_MOST = 16  # kinds of tensors for the same options; an older one is let go
_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_TensorGuards: Any = getattr(_guards, "TensorGuards", None)
_threads = torch.get_num_threads


class Calls:
    """Calls with the same options, the latest kinds of tensors first."""

    __slots__ = ("__weakref__",)

    def find(self, *tensors: Any) -> Any:
        """What keep() was given with such tensors; None: nothing. Not while compiling."""
        for check, threads, found in prepared.get(self, ()):
            if check(*tensors) and threads == _threads():
                return found
        return None

    def keep(self, found: Any, *tensors: Any) -> None:
        """find() looks in the same context: grad mode and others count."""
        if _TensorGuards is not None:
            guards = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            if guards.check(*tensors):  # it never is for a tensor that comes twice
                known = prepared.get(self, ())[:_MOST - 1]
                prepared[self] = ((guards.check, _threads(), found), *known)
