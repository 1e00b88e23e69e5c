"""The operators flashattn::forward, backward and merge, for torch.compile, torch.export, vmap and
whatever else PyTorch does with a call besides running it."""
from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import _tools
from .._constants import ARRAYS, Reason, Status
from .._errors import UnsupportedError
from . import _autograd, _launch
from ._launch import BESIDE, Options

_N = len(BESIDE)
_LENGTHS = ("lens_q", "lens_kv", "starts_kv")
_QKV = "Tensor q, Tensor k, Tensor v"
_BESIDE = ", ".join([f"Tensor? {name}" for name in BESIDE])
_OPTIONS = ("SymInt max_seqlen_q, SymInt max_seqlen_kv, bool causal, int window_left, "
            "int window_right, int chunk, bool top_left, float softcap, float? scale, "
            "float dropout, int block_q, int block_kv, int splits, int determinism")
_library = torch.library.Library("flashattn", "DEF")  # lives as long as the operators
_library.define(f"forward({_QKV}, {_BESIDE}, {_OPTIONS}, bool return_lse) -> "
                "(Tensor o, Tensor lse)")
_library.define(
    f"backward(Tensor dout, Tensor? dlse, {_QKV}, Tensor o, Tensor lse, {_BESIDE}, "
    f"{_OPTIONS}, bool return_dbias, bool return_dsink) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)")
_library.define("merge(Tensor[] part_o, Tensor[] part_lse) -> (Tensor o, Tensor lse)")


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tuple[Tensor, Tensor]:
    max_q, max_kv, *options, return_lse = rest[_N:]
    o, lse = _launch.forward(q, k, v, rest[:_N], max_q, max_kv, Options(*options), return_lse)
    return o, _or_empty(lse, q)


def _or_empty(tensor: Optional[Tensor], q: Tensor) -> Tensor:
    """An operator's results are tensors."""
    return q.new_empty(0, dtype=torch.float32) if tensor is None else tensor


def _backward(dout: Tensor, dlse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, o: Tensor,
              lse: Tensor, *rest: Any) -> Tuple[Tensor, ...]:
    max_q, max_kv, *options, return_dbias, return_dsink = rest[_N:]
    results = _launch.backward(dout, dlse, q, k, v, o, lse, rest[:_N], max_q, max_kv,
                               Options(*options), return_dbias, return_dsink)
    return tuple([_or_empty(result, q) for result in results])


def _merge(part_o: List[Tensor], part_lse: List[Tensor]) -> Tuple[Tensor, Tensor]:
    with torch.no_grad():
        return _tools.merge([_launch.dense_heads(o) for o in part_o],
                            [lse.contiguous() for lse in part_lse])


for _key in ("CPU", "CUDA"):
    _library.impl("forward", _forward, _key)
    _library.impl("backward", _backward, _key)
    _library.impl("merge", _merge, _key)


@torch.library.register_fake("flashattn::forward", lib=_library)
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    shape: Any = (0,)
    if rest[-1]:
        shape = ((q.shape[1], q.shape[0]) if q.dim() == 3 else
                 (q.shape[0], q.shape[2], q.shape[1]))
    return o, q.new_empty(shape, dtype=torch.float32)


@torch.library.register_fake("flashattn::backward", lib=_library)
def _(dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
      *rest: Any) -> Any:
    return (*[x.new_empty(x.shape) for x in (q, k, v)], *[
        q.new_empty(like.shape if asked else (0,), dtype=torch.float32)
        for like, asked in zip(rest[:2], rest[-2:])])


@torch.library.register_fake("flashattn::merge", lib=_library)
def _(part_o: Sequence[Tensor], part_lse: Sequence[Tensor]) -> Any:
    return part_o[0].new_empty(part_o[0].shape), part_lse[0].new_empty(part_lse[0].shape)


torch.library.register_autograd("flashattn::forward", _autograd.gradients,
                                setup_context=_autograd.save, lib=_library)
torch.library.register_autograd("flashattn::merge", _autograd.merge_gradients,
                                setup_context=_autograd.merge_save, lib=_library)


def no_second(ctx: Any, *grads: Any) -> Any:
    raise UnsupportedError("the gradient of an attention's gradient is asked for, which the "
                           "library does not compute; use PyTorch's math attention for it",
                           Status.ERROR_UNSUPPORTED, Reason.OP, "ops")


torch.library.register_autograd("flashattn::backward", no_second, lib=_library)


def cast_for_autocast(q: Tensor, *more: Tensor) -> Tuple[Tensor, ...]:
    """q, k and v in the type of autocast, where it is on; what comes beside stays as it is."""
    kind = q.device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return (q, *more)
    dtype = torch.get_autocast_dtype(kind)
    return tuple([x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
                  for x in (q, *more)])


def _autocast(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    cast = cast_for_autocast(q, k, v)
    with torch.autocast(q.device.type, enabled=False):
        return torch.ops.flashattn.forward(*cast, *rest)


for _key in ("AutocastCPU", "AutocastCUDA"):
    _library.impl("forward", _autocast, _key)


def _sample(value: Any, dim: Optional[int], i: int) -> Any:
    return value if dim is None or value is None else value.select(dim, i)


def _one_by_one(op: Any, size: int, in_dims: Any, args: Any) -> Any:
    """vmap of what has no batch to fold into: packed sequences, pages, a sink of each sample."""
    results = [op(*[_sample(a, d, i) for a, d in zip(args, in_dims)]) for i in range(size)]
    stacked = tuple(torch.stack(column) for column in zip(*results))
    return stacked, (0,) * len(stacked)


def _outermost(value: Tensor, dim: Optional[int], size: int) -> Tensor:
    return value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)


def _folded(value: Tensor, dim: Optional[int], size: int) -> Tensor:
    """(size, batch, ...) as (size * batch, ...)."""
    return _outermost(value, dim, size).flatten(0, 1)


def _folds(beside: Sequence[Any], dims: Sequence[Any], info: Any, dropout: float) -> bool:
    for name, tensor, dim in zip(BESIDE, beside, dims):
        if tensor is None or name in _LENGTHS:
            continue
        if dim is not None or name in ("cu_seqlens_q", "cu_seqlens_kv", "page_table"):
            return False
        whole = ARRAYS["flashattn_args"][name].dims
        if whole[0].size == "batch" and tensor.dim() == len(whole) and tensor.shape[0] != 1:
            return False
    return not (dropout and info.randomness == "same")


def vmap_rule(op: Any, first: int) -> Any:
    """The rule of an operator whose first tensors have a batch, and are followed by those beside.
    first counts them."""
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        size, end = info.batch_size, first + _N
        dropout = args[end + 2 + Options._fields.index("dropout")]
        sums = first > 3 and (args[-1] or args[-2])  # dbias and dsink sum over the batch
        if sums or not _folds(args[first:end], in_dims[first:end], info, dropout):
            return _one_by_one(op, size, in_dims, args)
        called = [_folded(a, d, size) if isinstance(a, Tensor) and (
            i < first or BESIDE[i - first] in _LENGTHS) else a
            for i, (a, d) in enumerate(zip(args[:end], in_dims[:end]))]
        results = op(*called, *args[end:])
        out = tuple(r.unflatten(0, (size, -1)) if r.dim() > 1 else r.expand(size, *r.shape)
                    for r in results)
        return out, (0,) * len(out)
    return rule


def merge_vmap_rule(op: Any) -> Any:
    """The rule of merge: samples are folded into the batch; those of packed sequences become it."""
    def rule(info: Any, in_dims: Any, part_o: Sequence[Tensor], part_lse: Sequence[Tensor]) -> Any:
        size = info.batch_size
        columns = [[_outermost(x, d, size) for x, d in zip(*column)] for column in zip(
            (part_o, part_lse), in_dims)]
        if all(o.dim() == 4 for o in columns[0]):
            return op(*columns), (0, 0)
        o, lse = op(*[[x.flatten(0, 1) for x in column] for column in columns])
        return (o.unflatten(0, (size, -1)), lse.unflatten(0, (size, -1))), (0, 0)
    return rule


torch.library.register_vmap("flashattn::forward", vmap_rule(torch.ops.flashattn.forward, 3),
                            lib=_library)
torch.library.register_vmap("flashattn::backward", vmap_rule(torch.ops.flashattn.backward, 7),
                            lib=_library)
torch.library.register_vmap("flashattn::merge", merge_vmap_rule(torch.ops.flashattn.merge),
                            lib=_library)


def _pairs(q: Any, k: Any, beside: Sequence[Any], max_kv: int) -> int:
    """Query-key pairs of all heads. As PyTorch counts its own kernels: masks and lengths beside
    the sequences' bounds are not taken off."""
    cu_q, cu_kv, pages = (beside[BESIDE.index(name)] for name in (
        "cu_seqlens_q", "cu_seqlens_kv", "page_table"))
    heads = q.shape[-2]
    if cu_q is not None and cu_kv is not None:
        return heads * int((cu_q.diff().long() * cu_kv.diff().long()).sum())
    keys = max_kv if pages is not None or cu_kv is not None else k.shape[1]
    return heads * keys * q.shape[:-2].numel()


@register_flop_formula(torch.ops.flashattn.forward, get_raw=True)
def _flops(q: Tensor, k: Tensor, v: Tensor, *rest: Any, out_val: Any = None, **_: Any) -> int:
    return 2 * _pairs(q, k, rest[:_N], rest[_N + 1]) * (q.shape[-1] + v.shape[-1])


@register_flop_formula(torch.ops.flashattn.backward, get_raw=True)
def _flops_backward(dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, o: Tensor,
                    lse: Tensor, *rest: Any, out_val: Any = None, **_: Any) -> int:
    pairs = _pairs(q, k, rest[:_N], rest[_N + 1])
    return 2 * pairs * (3 * q.shape[-1] + 2 * v.shape[-1])
