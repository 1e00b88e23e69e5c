"""Sharding of the operators over batch and heads (DTensor), and context_parallel on CPUs. Imports
torch.distributed.tensor: register() is called when a program has done so."""
from __future__ import annotations

from functools import lru_cache
from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .._constants import ARRAYS
from ._launch import BESIDE, Options

_N = len(BESIDE)
_DROPOUT = 2 + Options._fields.index("dropout")  # behind the tensors
# By array: the dimensions of the batch and of the heads, from the end.
_DIMS = {name: [next((i - len(dims) for i, dim in enumerate(dims)
                      if dim.size == over and not dim.more), None) for over in ("batch", "heads_q")]
         for name, dims in [(name, ARRAYS["flashattn_args"][name].dims) for name in BESIDE]}


def _of(name: str, tensor: Any, over: int) -> Any:
    """Of a tensor beside, sharded over batch (0) or heads (1)."""
    dim = _DIMS[name][over]
    if tensor is None:
        return None
    if dim is None or len(tensor.shape) < -dim or tensor.shape[dim] == 1:
        return Replicate()
    return Shard(len(tensor.shape) + dim)


def _ways(q: Any, k: Any, beside: Sequence[Any], dropout: float) -> List[int]:
    """Over what may be sharded: batch (0), heads (1)."""
    given = {name for name, tensor in zip(BESIDE, beside) if tensor is not None}
    packed = given & {"cu_seqlens_q", "cu_seqlens_kv", "page_table"}
    ways: List[int] = []
    if dropout:  # weights are dropped by batch and head
        return ways
    if not packed:
        ways.append(0)
    heads, heads_kv = q.shape[-2], k.shape[-2]
    sizes = [q.mesh.size(i) for i in range(q.mesh.ndim)]
    # Shards of the queries' heads are to find their KV heads in shards of the same place.
    even = heads_kv % q.mesh.size() == 0 or (
        heads_kv < q.mesh.size() and all(heads_kv % size == 0 for size in sizes))
    if heads == heads_kv or even:
        ways.append(1)
    return ways


def _tokens(tensor: Any, over: int) -> Any:
    """Of q, k, v, o."""
    return Shard(0) if over == 0 else Shard(len(tensor.shape) - 2)


def _lse(q: Any, over: int) -> Any:
    return Shard(len(q.shape) - 3) if over == 1 else Shard(0)


def _forward(q: Any, k: Any, v: Any, *rest: Any) -> Any:
    beside, numbers = rest[:_N], rest[_N:]
    none = [None] * len(numbers)
    everywhere = [None if tensor is None else Replicate() for tensor in beside]
    accepted: List[Tuple[List[Any], List[Any]]] = [
        ([Replicate()] * 2, [Replicate()] * 3 + everywhere + none)]
    for over in _ways(q, k, beside, numbers[_DROPOUT]):
        lse = _lse(q, over) if numbers[-1] else Replicate()
        accepted.append(([_tokens(q, over), lse], [
            *[_tokens(x, over) for x in (q, k, v)],
            *[_of(name, tensor, over) for name, tensor in zip(BESIDE, beside)], *none]))
    return accepted


def _sum(name: str, tensor: Any, over: int, asked: bool) -> Any:
    """Of the gradient of a tensor beside."""
    if not asked:
        return Replicate()
    placement = _of(name, tensor, over)
    return placement if isinstance(placement, Shard) else Partial()


def _backward(dout: Any, dlse: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *rest: Any) -> Any:
    beside, numbers = rest[:_N], rest[_N:]
    none = [None] * len(numbers)
    everywhere = [None if tensor is None else Replicate() for tensor in (dout, dlse, q, k, v, o,
                                                                         lse, *beside)]
    accepted: List[Tuple[List[Any], List[Any]]] = [([Replicate()] * 5, everywhere + none)]
    for over in _ways(q, k, beside, numbers[_DROPOUT]):
        grads = [_tokens(x, over) for x in (q, k, v)]
        more = [_sum(name, beside[i], over, numbers[i - 2])
                for i, name in enumerate(("bias", "sink"))]
        accepted.append(([*grads, *more], [
            _tokens(q, over), None if dlse is None else _lse(q, over), *grads, _tokens(q, over),
            _lse(q, over), *[_of(name, tensor, over) for name, tensor in zip(BESIDE, beside)],
            *none]))
    return accepted


def _merge(part_o: Any, part_lse: Any) -> Any:
    parts, parts_lse = len(part_o), len(part_lse)
    accepted: List[Tuple[List[Any], List[Any]]] = [
        ([Replicate()] * 2, [Replicate()] * (parts + parts_lse))]
    for over in (0, 1) if len(part_o[0].shape) == 4 else (1,):
        o, lse = _tokens(part_o[0], over), _lse(part_o[0], over)
        accepted.append(([o, lse], [o] * parts + [lse] * parts_lse))
    return accepted


_FLASH = "_scaled_dot_product_flash_attention"
_FOR_CPU = _FLASH + "_for_cpu"


def _as_on_a_gpu(q: Any, k: Any, dropout_p: float, is_causal: bool,
                 attn_mask: Optional[Any]) -> bool:
    active = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_FLASH}", "CPU")
    return (active and attn_mask is None and not dropout_p
            and not (is_causal and q.shape[2] != k.shape[2]))  # causal at the top left


def _sdpa(cls: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """SDPA of DTensors on a CPU by the operator of GPUs, the one that torch knows how to shard and
    that context_parallel replaces."""
    q, k, v, dropout_p, is_causal = (*args, *(0.0, False)[len(args) - 3:])
    if not _as_on_a_gpu(q, k, dropout_p, is_causal, kwargs.get("attn_mask")):
        return cls.__torch_dispatch__(func, types, args, kwargs)
    return torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, is_causal, scale=kwargs.get("scale"))[:2]


def _sdpa_backward(cls: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    dout, q, k, v, o, lse, dropout_p, is_causal = args
    if not _as_on_a_gpu(q, k, dropout_p, is_causal, kwargs.get("attn_mask")):
        return cls.__torch_dispatch__(func, types, args, kwargs)
    mesh = q.device_mesh
    rng = DTensor.from_local(torch.empty(2, dtype=torch.uint64), mesh, [Replicate()] * mesh.ndim)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, rng,
        torch.empty((), dtype=torch.uint64), scale=kwargs.get("scale"))


@lru_cache(maxsize=None)
def register() -> None:
    """Once for a process."""
    register_sharding(torch.ops.flashattn.forward.default)(_forward)
    register_sharding(torch.ops.flashattn.backward.default)(_backward)
    register_sharding(torch.ops.flashattn.merge.default)(_merge)
    for name, rule in ((_FOR_CPU, _sdpa), (_FOR_CPU + "_backward", _sdpa_backward)):
        torch.library.register_torch_dispatch(f"aten::{name}", DTensor, rule)
