"""attention and its relatives on PyTorch's tensors, with gradients."""
from __future__ import annotations

from functools import lru_cache
from typing import Any, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .. import _options
from .._append import Appended
from .._constants import Reason
from .._errors import invalid, wrong_type
from .._inputs import axes
from .._options import Determinisms, Window
from . import _append, _autograd, _launch, _transforms  # noqa: F401  # _append defines its operator
from ._launch import NOTHING, Options, Orders, inverse, permuted
from ._ops import cast_for_autocast


_NO_BLOCKS = (None,) * len([name for name in _launch.BESIDE if name.startswith("block_")])
_INTEGERS = (torch.int64, torch.int16, torch.int8, torch.uint8)
_DISTRIBUTED = "torch.distributed.tensor"
_is_compiling = torch.compiler.is_compiling
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def _options_of(causal: Any, window: Any, chunk: Any, top_left: Any, softcap: Any, scale: Any,
                dropout: Any, block_q: Any, block_kv: Any, splits: Any,
                determinism: Any) -> Options:
    for name, value in (("scale", scale), ("softcap", softcap), ("dropout", dropout)):
        if isinstance(value, Tensor):
            raise wrong_type(f"{name} is a tensor; give a number of Python's, {name}.item()", name)
    left, right = _options.window(window) or (-1, -1)
    return Options(
        _options.flag(causal, "causal"), left, right, _options.chunk(chunk, "chunk") or 0,
        _options.flag(top_left, "top_left"), _options.softcap(softcap, "softcap"),
        _options.scale(scale, "scale"), _options.real(dropout, "dropout"),
        _options.integer(block_q, "block_q"), _options.integer(block_kv, "block_kv"),
        _options.integer(splits, "splits"), _options.determinism(determinism, "determinism"))


_kept_options = lru_cache(maxsize=1024, typed=True)(_options_of)


def _chosen(*values: Any) -> Options:
    if _is_compiling():  # which traces what is not cached
        return _options_of(*values)
    try:
        return _kept_options(*values)
    except TypeError:  # a list, or what is refused
        return _options_of(*values)


def _rng(q: Tensor, dropout: float, rng: Optional[Tensor]) -> Optional[Tensor]:
    """{seed, offset} of torch's generator, so that manual_seed, checkpointing and graphs repeat
    it."""
    if not dropout:
        if rng is not None:
            raise invalid("rng is given without dropout, and would be ignored; leave it out",
                          Reason.DROPOUT, "rng_device")
        return None
    if rng is not None:
        return rng
    return torch.randint(-2**63, 2**63 - 1, (2,), dtype=torch.int64, device=q.device)


def _int32(tensor: Optional[Tensor]) -> Optional[Tensor]:
    """Of integers; what is none is left for the library to refuse."""
    if tensor is None or tensor.dtype not in _INTEGERS:
        return tensor
    return tensor.to(torch.int32)


def _block_mask(block_mask: Optional[Tensor]) -> Optional[Tensor]:
    if block_mask is None or isinstance(block_mask, Tensor):
        return block_mask
    raise wrong_type(f"block_mask is a {type(block_mask).__name__}; give a tensor of bool, or for "
                     "a BlockMask of FlexAttention **flashattn.torch.block_lists(block_mask), and "
                     "what its mask_mod hides by causal=, window= and others", "block_mask")


def _float32(tensor: Optional[Tensor]) -> Optional[Tensor]:
    if tensor is None or tensor.dtype == torch.float32 or not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.float32)


def _longest(cu_seqlens: Optional[Tensor], given: Optional[int], name: str) -> int:
    if given is not None:  # a tensor would be kept
        return int(given) if isinstance(given, Tensor) and not _is_compiling() else given
    if cu_seqlens is None:
        return -1
    if cu_seqlens.is_cuda or _is_compiling():
        raise invalid(f"{name} is not given, and is not read from a GPU or while compiling; give "
                      "a bound of the lengths", Reason.LENGTHS, name)
    return max(int(cu_seqlens.diff().max()), 0) if cu_seqlens.numel() > 1 else 0


@lru_cache(maxsize=1024, typed=True)
def _site(layout: Any, page_layout: Any, ndim: int, return_lse: bool, max_q: int, max_kv: int,
          given: Any, *options: Any) -> _autograd.Site:
    """given: which tensors there are beside q, k and v."""
    return _autograd.Site(_options_of(*options), _orders(layout, page_layout, ndim), return_lse)


def _attend(q: Tensor, k: Tensor, v: Tensor, beside: Sequence[Optional[Tensor]], layouts: Any,
            max_q: int, max_kv: int, return_lse: bool, *options: Any) -> Any:
    """layouts: of q, of pages or None, and the number of q's dimensions."""
    site = None
    if not _is_compiling():
        mask, given = _launch.given(beside)
        try:
            site = _site(*layouts, return_lse, max_q, max_kv, mask, *options)
        except TypeError:  # a list, or what is refused
            pass
        else:
            result = site.repeat(q, k, v, beside, given)
            if result is not None:
                return result
    return _call(q, k, v, site.orders if site else _orders(*layouts), beside, max_q, max_kv,
                 site.options if site else _chosen(*options), return_lse, site)


def _call(q: Tensor, k: Tensor, v: Tensor, orders: Orders, beside: Sequence[Optional[Tensor]],
          max_q: int, max_kv: int, options: Options, return_lse: bool,
          site: Optional[_autograd.Site] = None) -> Any:
    eager = _autograd.is_eager(q, k, v, beside)
    if not eager or _any_autocast():
        cast = cast_for_autocast(q, k, v)
        if cast[0] is not q or cast[1] is not k or cast[2] is not v:
            (q, k, v), site = cast, None
    if options.dropout or beside[-1] is not None:
        site = None  # the seed is another tensor every time
        beside = (*beside[:-1], _rng(q, options.dropout, beside[-1]))
    call = _autograd.call if eager else _by_operator
    if q.is_cuda and (q.shape[-1] % GPU_STEP or v.shape[-1] % GPU_STEP):
        padded_q, padded_k, padded_v, options = _padded(q, k, v, options)
        o, lse = call(padded_q, padded_k, padded_v, beside, max_q, max_kv, options, return_lse,
                      orders)
        result = o[..., :v.shape[-1]], lse
    elif eager:
        result = _autograd.call(q, k, v, beside, max_q, max_kv, options, return_lse, orders,
                                site)
    else:
        result = _by_operator(q, k, v, beside, max_q, max_kv, options, return_lse, orders)
    return result if return_lse else result[0]


GPU_STEP = 8  # the head dimensions of GPU kernels are multiples of it


def _padded(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tuple[Tensor, Tensor, Tensor,
                                                                        Options]:
    """With zeros up to dimensions that GPU kernels take; the scale stays that of the given ones."""
    if options.scale is None:
        options = options._replace(scale=q.shape[-1] ** -0.5)
    return padded_head(q), padded_head(k), padded_head(v), options


def padded_head(x: Tensor) -> Tensor:
    """With zeros up to a head dimension that GPU kernels take."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % GPU_STEP))


def _know_dtensors(tensors: Sequence[Tensor]) -> None:
    """Registers the operators' rules of sharding when the first DTensor comes."""
    if not _is_compiling() and any(
            [type(x).__module__.startswith(_DISTRIBUTED) for x in tensors]):
        from . import _dtensor
        _dtensor.register()


def _by_operator(q: Tensor, k: Tensor, v: Tensor, beside: Sequence[Optional[Tensor]], max_q: int,
                 max_kv: int, options: Options, return_lse: bool, orders: Orders) -> Any:
    records = torch.is_grad_enabled() and any(
        [t is not None and t.requires_grad for t in (q, k, v, *beside)])
    records = records or _transforms.active()  # inside a vmap no tensor says so
    _know_dtensors((q,))
    order, order_kv = orders or (None, None)
    o, lse = _transforms.forward(
        permuted(q, order), permuted(k, order_kv), permuted(v, order_kv), *beside, max_q, max_kv,
        *options, return_lse or records)
    return (o if order is None else o.permute(inverse(order))), lse


_PACKED = {"bshd": None, "bhsd": (0, 2, 1, 3), "thd": None}


def _orders(layout: Any, page_layout: Any, ndim: int) -> Orders:
    order = _order(layout, ndim)
    order_kv = order if page_layout is None else _order(page_layout, 4)
    return None if order is order_kv is None else (order, order_kv)


def _order(layout: Any, ndim: int) -> Any:
    """The permutation that makes (batch, seq, heads, dim) of a layout; None: it is that."""
    if layout in _PACKED and (ndim == 3) == (layout == "thd"):
        return _PACKED[layout]
    b, h, s = axes(layout, ndim)
    order = (s, h, 2) if ndim == 3 else (b, s, h, 3)
    return None if order == tuple(range(ndim)) else order


def attention(q: Tensor, k: Tensor, v: Tensor, *, layout: str = "bshd", causal: bool = False,
              window: Window = None, chunk: Optional[int] = None, top_left: bool = False,
              bias: Optional[Tensor] = None, alibi_slopes: Optional[Tensor] = None,
              block_mask: Optional[Tensor] = None, block_index: Optional[Tensor] = None,
              block_begin: Optional[Tensor] = None, block_end: Optional[Tensor] = None,
              block_lens: Optional[Tensor] = None, block_q: int = 0, block_kv: int = 0,
              softcap: Optional[float] = 0.0, scale: Optional[float] = None,
              sink: Optional[Tensor] = None, dropout: float = 0.0, rng: Optional[Tensor] = None,
              lens_q: Optional[Tensor] = None, lens_kv: Optional[Tensor] = None,
              starts_kv: Optional[Tensor] = None, splits: int = 0,
              determinism: Determinisms = False, return_lse: bool = False) -> Any:
    """flashattn.attention() with gradients of q, k, v, bias, sink, and through lse.

    q           (batch, seqlen_q, heads_q, dim_qk), in the order that layout says
    k, v        (batch, seqlen_kv, heads_kv, dim_qk), (batch, seqlen_kv, heads_kv, dim_v)
    rng         int64 (2,) on q's device: seed and offset of the dropout. None: drawn from torch's
                generator of that device
    The other options and the errors are those of flashattn.attention(). Lengths and numbers of
    blocks may be of any integer type, alibi_slopes and sink of any floating one; block_lists()
    makes block_index of a BlockMask. On the CPU as many threads work as
    torch.get_num_threads() says; on a GPU the call runs on the current stream and waits for
    nothing.

    Returns o, stored in the order (batch, seqlen_q, heads_q, dim_v), or (o, lse): float32 (batch,
    heads_q, seqlen_q). Works under torch.compile, torch.func's grad, vjp and vmap, autocast and
    checkpointing.
    (Dao et al. 2022)
    """
    beside = NOTHING
    if not (bias is sink is alibi_slopes is block_mask is block_index is block_begin is block_end
            is block_lens is lens_q is lens_kv is starts_kv is rng is None):
        beside = (bias, _float32(sink), _float32(alibi_slopes), _block_mask(block_mask),
                  _int32(block_index), _int32(block_begin), _int32(block_end), _int32(block_lens),
                  None, None, _int32(lens_q), _int32(lens_kv), _int32(starts_kv), None, rng)
    elif not _is_compiling():  # as _attend() does, but sooner
        try:
            site = _site(layout, None, 4, return_lse, -1, -1, None, causal, window, chunk, top_left,
                         softcap, scale, dropout, block_q, block_kv, splits, determinism)
        except TypeError:
            pass
        else:
            result = site.repeat(q, k, v)
            if result is not None:
                return result
    return _attend(q, k, v, beside, (layout, None, 4), -1, -1, return_lse, causal, window, chunk,
                   top_left, softcap, scale, dropout, block_q, block_kv, splits, determinism)


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor,
                     max_seqlen_q: Optional[int] = None, max_seqlen_kv: Optional[int] = None, *,
                     layout: str = "thd", causal: bool = False, window: Window = None,
                     chunk: Optional[int] = None, top_left: bool = False,
                     bias: Optional[Tensor] = None, alibi_slopes: Optional[Tensor] = None,
                     softcap: Optional[float] = 0.0, scale: Optional[float] = None,
                     sink: Optional[Tensor] = None, dropout: float = 0.0,
                     rng: Optional[Tensor] = None, lens_q: Optional[Tensor] = None,
                     lens_kv: Optional[Tensor] = None, splits: int = 0,
                     determinism: Determinisms = False, return_lse: bool = False) -> Any:
    """flashattn.attention_varlen() with gradients: sequences packed without padding.

    q           (total_q, heads_q, dim_qk): sequence b holds rows cu_seqlens_q[b] to
                cu_seqlens_q[b + 1]
    k, v        (total_kv, heads_kv, dim_qk), (total_kv, heads_kv, dim_v)
    cu_seqlens_q, cu_seqlens_kv  (batch + 1,) integers
    max_seqlen_q, max_seqlen_kv  tokens of the longest sequences; None: found, but not on a GPU and
                not while compiling

    The rest is as in attention(). Returns o, or (o, lse) with lse (heads_q, total_q).
    """
    return _attend(
        q, k, v, (bias, _float32(sink), _float32(alibi_slopes), *_NO_BLOCKS, _int32(cu_seqlens_q),
                  _int32(cu_seqlens_kv), _int32(lens_q), _int32(lens_kv), None, None, rng),
        (layout, None, 3), _longest(cu_seqlens_q, max_seqlen_q, "max_seqlen_q"),
        _longest(cu_seqlens_kv, max_seqlen_kv, "max_seqlen_kv"), return_lse, causal, window, chunk,
        top_left, softcap, scale, dropout, 0, 0, splits, determinism)


def attention_paged(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, lens_kv: Tensor, *,
                    cu_seqlens_q: Optional[Tensor] = None, max_seqlen_q: Optional[int] = None,
                    max_seqlen_kv: Optional[int] = None, layout: Optional[str] = None,
                    page_layout: str = "pshd", causal: bool = False, window: Window = None,
                    chunk: Optional[int] = None, alibi_slopes: Optional[Tensor] = None,
                    softcap: Optional[float] = 0.0, scale: Optional[float] = None,
                    sink: Optional[Tensor] = None, splits: int = 0,
                    determinism: Determinisms = False, return_lse: bool = False) -> Any:
    """flashattn.attention_paged() as an operator: a paged KV cache; no gradient.

    q           (batch, seqlen_q, heads_q, dim_qk), or with cu_seqlens_q (total_q, heads_q, dim_qk)
    k, v        (pages, page_size, heads_kv, dim), in the order that page_layout says
    page_table  (batch, pages of a sequence) integers
    lens_kv     (batch,) integers: keys in use of each sequence

    The rest is as in attention(). NotImplementedError where a tensor requires a gradient.
    """
    varlen = cu_seqlens_q is not None
    max_kv = (page_table.shape[1] * k.shape[axes(page_layout, 4)[2]] if max_seqlen_kv is None
              else max_seqlen_kv)
    return _attend(
        q, k, v, (None, _float32(sink), _float32(alibi_slopes), *_NO_BLOCKS, _int32(cu_seqlens_q),
                  None, None, _int32(lens_kv), None, _int32(page_table), None),
        (layout or ("thd" if varlen else "bshd"), page_layout, 3 if varlen else 4),
        _longest(cu_seqlens_q, max_seqlen_q, "max_seqlen_q"), max_kv, return_lse, causal, window,
        chunk, False, softcap, scale, 0.0, 0, 0, splits, determinism)


def append_kv(k_cache: Tensor, v_cache: Optional[Tensor], lens_kv: Tensor,
              k: Optional[Tensor] = None, v: Optional[Tensor] = None, q: Optional[Tensor] = None,
              *, rotary_cos: Optional[Tensor] = None, rotary_sin: Optional[Tensor] = None,
              rotary_base: Optional[float] = None, rotary_dim: Optional[int] = None,
              rotary_interleaved: bool = False, positions: Optional[Tensor] = None,
              starts_kv: Optional[Tensor] = None, cu_seqlens_q: Optional[Tensor] = None,
              lens_q: Optional[Tensor] = None, page_table: Optional[Tensor] = None,
              max_seqlen_q: Optional[int] = None, max_seqlen_kv: Optional[int] = None,
              descale_k: Optional[Tensor] = None, descale_v: Optional[Tensor] = None,
              descale_block: int = 0, update_descales: bool = False) -> Appended:
    """flashattn.append_kv() as an operator, which torch.compile knows to write into the cache; no
    gradient.

    k_cache, v_cache  (batch, capacity, heads_kv, dim), or with page_table (pages, page_size,
                heads_kv, dim)
    lens_kv     (batch,) integers: tokens in the cache
    q, k, v     (batch, seqlen_q, heads, dim), or with cu_seqlens_q (total_q, heads, dim)

    The rest is as in flashattn.append_kv(). Returns (q rotated or None, tokens now in the cache).
    """
    rotated, lens = torch.ops.flashattn.append_kv(
        k_cache, v_cache, _int32(lens_kv), k, v, q, rotary_cos, rotary_sin, rotary_base, rotary_dim,
        rotary_interleaved, _int32(positions), _int32(starts_kv), _int32(cu_seqlens_q),
        _int32(lens_q), _int32(page_table), max_seqlen_q, max_seqlen_kv, descale_k, descale_v,
        descale_block, update_descales)
    return Appended(None if q is None else rotated, None if k is None and v is None else lens)


def merge(part_o: Sequence[Tensor], part_lse: Sequence[Tensor]) -> Tuple[Tensor, Tensor]:
    """flashattn.merge() with gradients: attention over disjoint sets of keys, put together.

    part_o      each (batch, seqlen_q, heads_q, dim_v) or (total_q, heads_q, dim_v)
    part_lse    each float32 (batch, heads_q, seqlen_q) or (heads_q, total_q)
    """
    part_o, part_lse = list(part_o), list(part_lse)
    _know_dtensors(part_o)
    return _transforms.merge(part_o, part_lse)
