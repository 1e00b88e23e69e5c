"""The descriptor of a plan: flashattn_desc with Python's defaults and values."""
from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, List, Optional, Tuple, TypeVar

from . import _options as options
from ._arrays import U8, DTypeLike
from ._constants import Bias, Descriptor, Feature, Layout, Mask, Op, Reason
from ._errors import invalid
from ._names import unexpected
from ._options import Determinisms, Window

# Keywords of describe() that set a bit whose name is another one: what comes with the bit, or what
# comes back.
_KEYWORDS = {"window": "window", "blocks": "block_q", "paged_kv": "page_size",
             "pages": "hidden_pages",
             "dense": "dtype_bias", "lse": "return_lse", "dbias": "return_dbias",
             "dsink": "return_dsink"}
# (keyword, member of the descriptor, bit). Plain numbers: IntFlag arithmetic costs a microsecond a
# step.
_BITS: List[Tuple[str, str, int]] = [
    (_KEYWORDS.get(str(bit.name).lower(), str(bit.name).lower()), member, int(bit))
    for member, bits in (("ops", Op), ("layout", Layout), ("mask", Mask), ("bias", Bias),
                         ("features", Feature)) for bit in bits]


def describe(*, dtype: DTypeLike, heads_q: int, dim_qk: int, heads_kv: int = 0, dim_v: int = 0,
             dtype_kv: Optional[DTypeLike] = None, dtype_o: Optional[DTypeLike] = None,
             causal: bool = False, window: Window = None, chunk: Optional[int] = None,
             top_left: bool = False, block_q: int = 0, block_kv: int = 0, tree: int = 0,
             dtype_bias: Optional[DTypeLike] = None, alibi: bool = False, sink: bool = False,
             softcap: Optional[float] = 0.0, scale: Optional[float] = None, dropout: float = 0.0,
             return_lse: bool = False, forward: bool = True, backward: bool = False,
             dlse: bool = False, return_dbias: bool = False, return_dsink: bool = False,
             varlen_q: bool = False, varlen_kv: bool = False, page_size: int = 0,
             hidden_pages: bool = False, latent_kv: bool = False, block_lists: bool = False,
             block_lens: bool = False, descale_block: int = 0,
             descale_dim: int = 0, splits: int = 0,
             determinism: Determinisms = False, threads: int = 0, device: str = "cpu",
             max_batch: int = 0, max_seqlen_q: int = 0, max_seqlen_kv: int = 0,
             max_total_q: int = 0, max_total_kv: int = 0, multiprocessors: int = 0,
             workspace_limit: int = 0, dtype_grad: Optional[DTypeLike] = None) -> Descriptor:
    """Describes a family of calls, for Plan, check and supported. The names are those of
    flashattn_desc, and of its bits.

    dtype          of q, and of k and v unless dtype_kv is given: "float32", "float16", "bfloat16",
                   "float8_e4m3fn", or such a type; dtype_kv also "int8"
    heads_q, dim_qk  query heads, elements of a query and a key
    heads_kv       key and value heads (0: heads_q); heads_q must be a multiple
    dim_v          elements of a value (0: dim_qk)
    dtype_o        of the output (None: dtype)
    dtype_grad     of dq, dk and dv (None: dtype, or dtype_o where that is "float8_e4m3fn")
    block_q, block_kv  queries and keys a block; given when there is a block mask
    dtype_bias     dtype of the dense bias, "bool" for a mask; None: no bias
    alibi, sink    whether there are ALiBi slopes, a sink
    forward, backward          the operations
    dlse                       whether a gradient arrives at the LSE
    varlen_q, varlen_kv        packed sequences, found by cu_seqlens
    page_size                  tokens a page of a paged KV cache; 0: not paged
    hidden_pages               whether negative page numbers hide keys
    max_*                      maxima, 0: none; with them Plan.workspace_size() and Plan.info() need
                               no sizes
    block_lists, block_lens    whether block_index is given in the place of block_mask, block_lens
    latent_kv                  whether descale_latent is given; with descale_dim
    tree, descale_block, descale_dim, multiprocessors, workspace_limit  see flashattn_desc
    The rest is explained at attention().
    """
    given = locals()
    values = {name: convert(given[name], name) for name, (convert, _) in options.OPTIONS.items()}
    if not values["forward"] and not values["backward"]:
        raise invalid("forward and backward are both False, so that nothing is left to do; set one",
                      Reason.OP, "ops")
    members = {name: values[name] or 0 for name in Descriptor._fields if name in values}
    members["device"], members["device_index"] = values["device"]
    members["window_left"], members["window_right"] = values["window"] or (0, 0)
    _check_gradients(values)
    for keyword, member, bit in _BITS:
        if values[keyword]:
            members[member] = members.get(member, 0) | bit
    return Descriptor(**members)


def described(description: Dict[str, Any]) -> Descriptor:
    """describe(**description), which says of a keyword that it has not what it is called here."""
    for name in description:
        if name not in options.OPTIONS:
            raise unexpected("keyword", name, inspect.signature(describe).parameters)
    for name in ("dtype", "heads_q", "dim_qk"):
        if name not in description:
            raise TypeError(f"{name} is not given; give dtype, heads_q and dim_qk, the others "
                            "have defaults")
    return describe(**description)


def _check_gradients(values: Dict[str, Any]) -> None:
    """Refuses by the names of Python what comes back, or in, beside the gradients of q, k and v."""
    of = {"return_dbias": ("dtype_bias", "bias", Reason.BIAS),
          "return_dsink": ("sink", "sink", Reason.SINK)}
    for name in (*of, "dlse"):
        if not values[name]:
            continue
        if not values["backward"]:
            raise invalid(f"{name} is True, but backward is False, with which it goes; set that, "
                          f"too, or leave {name} out", Reason.OP, "features")
        keyword, array, reason = of.get(name, ("backward", "", Reason.NONE))
        if not values[keyword]:
            raise invalid(f"{name} is True, but there is no {array} whose gradient it could be; "
                          f"give {array}= (a plan: {keyword}=), or leave {name} out", reason,
                          "features")
    if values["return_dbias"] and values["dtype_bias"] == U8:
        raise invalid("return_dbias is True, but a mask of bool has no gradient; leave it out, or "
                      "give a bias of float32, float16 or bfloat16", Reason.BIAS, "features")


_F = TypeVar("_F", bound=Callable[..., Any])


def takes_description(function: _F) -> _F:
    """Lets help() and editors show the keywords of describe() in place of **description."""
    keywords = list(inspect.signature(describe).parameters.values())
    signature = inspect.signature(function)
    first = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=first + keywords)
    return function
