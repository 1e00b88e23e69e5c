"""The descriptor of a plan: flashattn_desc with Python's defaults and names."""
from __future__ import annotations

import inspect
from typing import Any, Callable, NamedTuple, Optional, Sequence, Tuple, TypeVar, Union

from ._arrays import DTypeLike, dtype_code
from ._constants import LAYOUT, Bias, Determinism, Feature, Layout, Mask, Op, Reason
from ._errors import invalid, wrong_type
from ._gpu import device_of
from ._library import ffi

# Plain numbers: IntFlag arithmetic costs a microsecond a step.
_FORWARD, _BACKWARD = int(Op.FORWARD), int(Op.BACKWARD)
_CAUSAL, _WINDOW, _CHUNK = int(Mask.CAUSAL), int(Mask.WINDOW), int(Mask.CHUNK)
_TOP_LEFT, _BLOCKS = int(Mask.TOP_LEFT), int(Mask.BLOCKS)
_ALIBI, _DENSE = int(Bias.ALIBI), int(Bias.DENSE)
_LSE, _SINK, _DLSE = int(Feature.LSE), int(Feature.SINK), int(Feature.DLSE)
_DBIAS, _DSINK = int(Feature.DBIAS), int(Feature.DSINK)
_VARLEN_Q, _VARLEN_KV = int(Layout.VARLEN_Q), int(Layout.VARLEN_KV)
_PAGED_KV = int(Layout.PAGED_KV)
_DETERMINISM = {False: int(Determinism.DEFAULT), True: int(Determinism.RUN_TO_RUN),
                "batch_invariant": int(Determinism.BATCH_INVARIANT)}

_FLOAT = ffi.typeof("float *")

Window = Union[None, int, Sequence[Optional[int]]]


class Descriptor(NamedTuple):
    """flashattn_desc, field by field; documented in flashattn.h. Hashable."""

    device: int
    device_index: int
    ops: int
    dtype: int
    dtype_o: int
    heads_q: int
    heads_kv: int
    dim_qk: int
    dim_v: int
    layout: int
    page_size: int
    mask: int
    window_left: int
    window_right: int
    chunk: int
    block_q: int
    block_kv: int
    bias: int
    bias_dtype: int
    features: int
    determinism: int
    scale: float
    softcap: float
    dropout: float
    splits: int
    max_batch: int
    max_seqlen_q: int
    max_seqlen_kv: int
    sm_limit: int
    threads: int
    reserved0: int
    max_total_q: int
    max_total_kv: int
    workspace_limit: int


_FIELDS = tuple(field for field, _, _ in LAYOUT["flashattn_desc"][1])
if _FIELDS != ("struct_size", *Descriptor._fields, "reserved"):
    raise ImportError("flashattn_desc has fields that flashattn.Descriptor does not know")


def describe(*, dtype: DTypeLike, heads: int, dim: int, kv_heads: Optional[int] = None,
             dim_v: Optional[int] = None, out_dtype: Optional[DTypeLike] = None,
             causal: bool = False, window: Window = None, chunk: Optional[int] = None,
             top_left: bool = False, block_size: Optional[Tuple[int, int]] = None,
             bias: Optional[DTypeLike] = None, alibi: bool = False, sink: bool = False,
             softcap: Optional[float] = 0.0, scale: Optional[float] = None, dropout: float = 0.0,
             return_lse: bool = False, forward: bool = True, backward: bool = False,
             dlse: bool = False, return_dbias: bool = False, return_dsink: bool = False,
             varlen_q: bool = False, varlen_k: bool = False, page_size: int = 0,
             splits: int = 0, deterministic: Union[bool, str] = False, threads: int = 0,
             device: str = "cpu", max_batch: int = 0, max_seqlen_q: int = 0,
             max_seqlen_k: int = 0, max_total_q: int = 0, max_total_k: int = 0,
             sm_limit: int = 0, workspace_limit: int = 0) -> Descriptor:
    """Describes a family of calls, for Plan, check and supported.

    dtype          of q, k, v: "float32", "float16", "bfloat16", "float8_e4m3fn", or such a type
    heads, dim     query heads, elements of a query and a key
    kv_heads       key and value heads (None: heads); heads must be a multiple
    dim_v          elements of a value (None: dim)
    out_dtype      of the output (None: dtype)
    block_size     (queries, keys) a block; given when there is a block mask
    bias           dtype of the dense bias, "bool" for a mask; None: no bias
    alibi, sink    whether there are ALiBi slopes, a sink
    forward, backward          the operations
    dlse                       whether a gradient arrives at the LSE
    varlen_q, varlen_k         packed sequences, found by cu_seqlens
    page_size                  tokens a page of a paged KV cache; 0: not paged
    max_*                      promised maxima, 0: none; with them Plan.workspace_size() and
                               Plan.info() need no shape
    sm_limit, workspace_limit  see flashattn_desc
    The rest is explained at attention().
    """
    mask = (_CAUSAL if causal else 0) | (_TOP_LEFT if top_left else 0)
    left = right = 0
    if window is not None:
        left, right = _window(window)
        mask |= _WINDOW
    if chunk is not None:
        mask |= _CHUNK
    block_q = block_kv = 0
    if block_size is not None:
        mask |= _BLOCKS
        block_q, block_kv = block_size
    code = dtype_code(dtype)
    if scale is None:
        scale = 0.0
    elif _is_zero(scale):
        raise invalid(f"scale = {scale} is 0 in float32, which would make every weight equal; for "
                      "1/sqrt(dim) give None", Reason.VALUE, "scale")
    if softcap and _is_zero(softcap):
        raise invalid(f"softcap = {softcap} is 0 in float32, which would turn it off; for that "
                      "give 0 or None", Reason.SOFTCAP, "softcap")
    try:
        determinism = _DETERMINISM[deterministic]
    except (KeyError, TypeError):
        raise invalid(f"deterministic = {deterministic!r} is none of False, True, "
                      "\"batch_invariant\"", Reason.VALUE, "deterministic") from None
    kind, index = (0, 0) if device == "cpu" else device_of(device)
    return Descriptor(
        int(kind), index or 0, (_FORWARD if forward else 0) | (_BACKWARD if backward else 0),
        code, code if out_dtype is None else dtype_code(out_dtype, "out_dtype"),
        heads, heads if kv_heads is None else kv_heads, dim, dim if dim_v is None else dim_v,
        (_VARLEN_Q if varlen_q else 0) | (_VARLEN_KV if varlen_k else 0)
        | (_PAGED_KV if page_size else 0), page_size,
        mask, left, right, chunk or 0, block_q, block_kv,
        (_ALIBI if alibi else 0) | (_DENSE if bias is not None else 0),
        0 if bias is None else dtype_code(bias, "bias"),
        (_LSE if return_lse else 0) | (_SINK if sink else 0) | (_DLSE if dlse else 0)
        | (_DBIAS if return_dbias else 0) | (_DSINK if return_dsink else 0),
        determinism, scale, softcap or 0.0, dropout, splits, max_batch, max_seqlen_q, max_seqlen_k,
        sm_limit, threads, 0, max_total_q, max_total_k, workspace_limit)


_F = TypeVar("_F", bound=Callable[..., Any])


def takes_description(function: _F) -> _F:
    """Lets help() and editors show the keywords of describe() in place of **description."""
    keywords = list(inspect.signature(describe).parameters.values())
    signature = inspect.signature(function)
    first = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=first + keywords)
    return function


def _window(window: Any) -> Tuple[int, int]:
    """n: n keys to either side. (left, right): -1 or None is open."""
    if isinstance(window, bool):
        raise wrong_type("window is a bool; expected a number of keys or (left, right)", "window")
    if not isinstance(window, (tuple, list)):
        return window, window
    if len(window) != 2:
        raise invalid(f"window = {window!r}; expected a number of keys or (left, right)",
                      Reason.VALUE, "window")
    left, right = window
    return -1 if left is None else left, -1 if right is None else right


def _is_zero(value: Any) -> bool:
    """Whether the library would see 0."""
    try:
        return ffi.new(_FLOAT, value)[0] == 0
    except (OverflowError, TypeError):  # a large integer, no number: see misfit()
        return False
