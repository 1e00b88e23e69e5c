"""The descriptor of a plan: flashattn_desc with Python's defaults and names."""
from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple, TypeVar, Union

from . import _options as options
from ._arrays import U8, DTypeLike, dtype_code
from ._constants import LAYOUT, Bias, Feature, Layout, Mask, Op, Reason
from ._errors import invalid
from ._gpu import device_of
from ._options import Window, flag, integer

# Plain numbers: IntFlag arithmetic costs a microsecond a step.
_FORWARD, _BACKWARD = int(Op.FORWARD), int(Op.BACKWARD)
_CAUSAL, _WINDOW, _CHUNK = int(Mask.CAUSAL), int(Mask.WINDOW), int(Mask.CHUNK)
_TOP_LEFT, _BLOCKS = int(Mask.TOP_LEFT), int(Mask.BLOCKS)
_ALIBI, _DENSE = int(Bias.ALIBI), int(Bias.DENSE)
_LSE, _SINK, _DLSE = int(Feature.LSE), int(Feature.SINK), int(Feature.DLSE)
_DBIAS, _DSINK = int(Feature.DBIAS), int(Feature.DSINK)
_VARLEN_Q, _VARLEN_KV = int(Layout.VARLEN_Q), int(Layout.VARLEN_KV)
_PAGED_KV = int(Layout.PAGED_KV)


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
    causal, top_left = flag(causal, "causal"), flag(top_left, "top_left")
    sides, tokens = options.window(window), options.chunk(chunk, "chunk")
    left, right = sides or (0, 0)
    block_q, block_kv = (0, 0) if block_size is None else options.block_size(block_size,
                                                                             "block_size")
    code = dtype_code(dtype)
    wanted = dict(forward=forward, backward=backward, return_lse=return_lse, dlse=dlse, alibi=alibi,
                  return_dbias=return_dbias, return_dsink=return_dsink, sink=sink,
                  varlen_q=varlen_q, varlen_k=varlen_k)
    wants = {name: flag(value, name) for name, value in wanted.items()}
    bias_code = None if bias is None else dtype_code(bias, "bias")
    _check_conflicts(wants, bias_code, page_size)
    level = options.deterministic(deterministic, "deterministic")
    kind, index = (0, 0) if device == "cpu" else device_of(device)
    numbers = {name: integer(value, name) for name, value in (
        ("heads", heads), ("kv_heads", heads if kv_heads is None else kv_heads), ("dim", dim),
        ("dim_v", dim if dim_v is None else dim_v), ("page_size", page_size), ("splits", splits),
        ("max_batch", max_batch), ("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k),
        ("sm_limit", sm_limit), ("threads", threads), ("max_total_q", max_total_q),
        ("max_total_k", max_total_k), ("workspace_limit", workspace_limit))}
    n = numbers.__getitem__
    return Descriptor(
        int(kind), index or 0, _bits(wants, forward=_FORWARD, backward=_BACKWARD),
        code, code if out_dtype is None else dtype_code(out_dtype, "out_dtype"),
        n("heads"), n("kv_heads"), n("dim"), n("dim_v"),
        _bits(wants, varlen_q=_VARLEN_Q, varlen_k=_VARLEN_KV) | (_PAGED_KV if page_size else 0),
        n("page_size"),
        (_CAUSAL if causal else 0) | (_TOP_LEFT if top_left else 0) | (_WINDOW if sides else 0)
        | (_CHUNK if tokens else 0) | (_BLOCKS if block_size is not None else 0),
        left, right, tokens or 0, block_q, block_kv,
        _bits(wants, alibi=_ALIBI) | (0 if bias_code is None else _DENSE), bias_code or 0,
        _bits(wants, return_lse=_LSE, sink=_SINK, dlse=_DLSE, return_dbias=_DBIAS,
              return_dsink=_DSINK),
        options.DETERMINISM[level], options.scale(scale, "scale") or 0.0,
        options.softcap(softcap, "softcap"), options.real(dropout, "dropout"), n("splits"),
        n("max_batch"), n("max_seqlen_q"), n("max_seqlen_k"), n("sm_limit"), n("threads"), 0,
        n("max_total_q"), n("max_total_k"), n("workspace_limit"))


def _bits(wants: Dict[str, bool], **bits: int) -> int:
    return sum(bit for name, bit in bits.items() if wants[name])


def _check_conflicts(wants: Dict[str, bool], bias: Optional[int], page_size: int) -> None:
    """What the library would refuse in words of its own bits."""
    if not wants["forward"] and not wants["backward"]:
        raise invalid("forward and backward are both False, so that nothing is left to do; set one",
                      Reason.OP, "forward")
    there = {**wants, "bias": bias is not None}
    for name, needed, reason in (
            ("dlse", "backward", Reason.OP), ("return_dbias", "backward", Reason.OP),
            ("return_dsink", "backward", Reason.OP), ("return_dbias", "bias", Reason.BIAS),
            ("return_dsink", "sink", Reason.SINK)):
        if wants[name] and not there[needed]:
            raise invalid(f"{name} needs {needed}; give {needed}, or leave {name} out", reason,
                          name)
    if wants["return_dbias"] and bias == U8:
        raise invalid("return_dbias needs a bias of floats, and this one is a mask of bool, which "
                      "has no gradient; leave return_dbias out", Reason.BIAS, "return_dbias")
    for name in ("backward", "varlen_k"):
        if page_size and wants[name]:
            raise invalid(f"page_size = {page_size} and {name}, but a paged KV cache is "
                          + ("for forward only" if name == "backward" else "not packed, too")
                          + "; leave one out", Reason.LAYOUT, "page_size")


_F = TypeVar("_F", bound=Callable[..., Any])


def takes_description(function: _F) -> _F:
    """Lets help() and editors show the keywords of describe() in place of **description."""
    keywords = list(inspect.signature(describe).parameters.values())
    signature = inspect.signature(function)
    first = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=first + keywords)
    return function
