"""The arrays that forward and backward share, checked against each other: the inputs in
flashattn_args. What comes beside q, k and v follows the table that is made of the header."""
from __future__ import annotations

import operator
from functools import lru_cache
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from . import _arrays, _gpu, _parallel
from ._arrays import F32, View, beside, view
from ._constants import ARRAYS, Reason
from ._errors import counted, invalid, misfit, wrong_type
from ._library import ffi
from ._members import NUMBERS, TYPES, extents, member, packed_member, upwards
from ._names import unexpected
from ._options import OPTIONS, integer

# The keywords of describe() that follow from the arrays, in the order of Inputs.facts().
FACTS = ("dtype", "dtype_kv", "heads_q", "heads_kv", "dim_qk", "dim_v", "page_size", "block_q",
         "block_kv", "tree", "descale_block", "descale_dim", "dtype_bias", "varlen_q", "varlen_kv",
         "latent_kv", "alibi", "sink", "block_lists", "block_lens")
# The arrays that come beside q, k and v, and of those that a flag of describe() speaks of, by it.
ARGS = "flashattn_args"
BESIDE = {name: array for name, array in ARRAYS[ARGS].items()
          if array.role == "input" and name not in ("q", "k", "v")}
_FLAGS = {array.condition.rpartition(" ")[2].lower(): name for name, array in BESIDE.items()
          if array.condition.startswith("required")}
_PRESENT = tuple(_FLAGS[fact] for fact in FACTS if fact in _FLAGS and fact != "tree")
_NO_NUMBERS = dict.fromkeys(NUMBERS, 0)
_OF_LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "lens_q", "lens_kv", "starts_kv")
_SIZES = ("batch", "seqlen_q", "seqlen_kv", "total_q", "total_kv", "pages", "block_entries")


def axes(layout: Any, ndim: int) -> Tuple[int, int, int]:
    """Where batch, head and sequence stand in an array of a layout; -1: there is no batch."""
    if not isinstance(layout, str):
        raise wrong_type(f"layout = {layout!r} is of type {type(layout).__name__}; give an order "
                         "of dimensions such as \"bshd\"", "layout")
    return _axes(layout, ndim)


@lru_cache(maxsize=None)
def _axes(layout: str, ndim: int) -> Tuple[int, int, int]:
    """layout is an order of the letters b (batch, or p: page), h (head), s (sequence, or t: token)
    before d (dim). With 3 dimensions b is left out, with 4 it comes first when it is not named.
    """
    order = layout.replace("t", "s").replace("p", "b")
    if sorted(order.replace("b", "")) != ["d", "h", "s"] or order.count("b") > 1 \
            or order[-1] != "d":
        raise invalid(f"layout = {layout!r}; expected an order of b, s, h before d, such as "
                      "\"bshd\", \"bhsd\" or \"thd\"", Reason.LAYOUT, "layout")
    order = order.replace("b", "") if ndim == 3 else order if "b" in order else "b" + order
    return order.find("b"), order.index("h"), order.index("s")


class Tensor:
    """A view with its axes named, and the strides that the library gets: flashattn_tensor."""

    __slots__ = ("view", "axes", "batch", "heads", "rows", "dim", "strides")

    def __init__(self, array: View, layout: str, ndim: int, name: str) -> None:
        shape, steps, size = array.shape, array.steps, array.size
        if len(shape) != ndim:
            raise invalid(f"{name} has shape {shape}; expected {ndim} dimensions, " + (
                "(batch, tokens, heads, dim) or as layout= says: add those of size 1, or for "
                "packed sequences call attention_varlen" if ndim == 4 else
                "(tokens, heads, dim) or as layout= says: with cu_seqlens all sequences are "
                "packed, without a batch"), Reason.SIZE, name)
        if steps[-1] != size and shape[-1] > 1 and 0 not in shape:
            raise invalid(f"{name} has stride {steps[-1] // size} in its last dimension; "
                          f"the elements of a head must be contiguous: {array.remedy}",
                          Reason.STRIDE, name)
        b, h, s = self.axes = axes(layout, ndim)
        self.view = array
        self.batch, self.heads, self.rows = shape[b] if b >= 0 else 1, shape[h], shape[s]
        self.dim = shape[-1]
        # To the library 0 is a default, which would be read and written past the array.
        if not self.heads:
            raise invalid(f"{name} has shape {shape}, 0 heads in the order \"{layout}\"; give at "
                          "least 1", Reason.SIZE, name)
        if not self.dim:
            raise invalid(f"{name} has shape {shape}, heads of 0 elements; give at least 1",
                          Reason.SIZE, name)
        self.strides: Tuple[int, ...] = (steps[b] // size if b >= 0 else 0, steps[h] // size,
                                         steps[s] // size)
        if min(self.strides) < 0:
            self.strides = upwards(self.strides, (self.batch, self.heads, self.rows), array, name)

    def c(self) -> Tuple[Any, int, int, int]:
        return (self.view.pointer, *self.strides)

    def like(self, dim: int) -> Tuple[int, ...]:
        """The shape of an array of the same layout with another dim."""
        return (*self.view.shape[:-1], dim)


class Inputs:
    """q, k, v and everything beside them. It keeps what it points to alive."""

    __slots__ = ("q", "k", "v", "layout", "sizes", "members", "seen", "ragged", "numbers", "place",
                 "has_seed", "pool", "tensors", "kept")

    def __init__(self, q: Any, k: Any, v: Any, *, layout: Optional[str] = None,
                 page_layout: str = "pshd", max_seqlen_q: Optional[int] = None,
                 max_seqlen_kv: Optional[int] = None, rng_seed: Optional[int] = None,
                 rng_offset: int = 0, stream: Any = None, device: Optional[str] = None,
                 o: Any = None, parallel: Any = None, **given: Any) -> None:
        # Where the call runs: None for the CPU. NumPy's arrays need not be asked.
        on_host = type(q) is np.ndarray and stream is None and device is None
        self.place = place = None if on_host else _gpu.place_of(q, stream, device, o)
        self.pool = None if parallel is None else _parallel.pool_of(parallel)
        self.tensors = None if on_host or place is not None else _gpu.on_host(q)
        if given:
            given = {name: value for name, value in given.items() if value is not None}
        varlen_q, varlen_kv = "cu_seqlens_q" in given, "cu_seqlens_kv" in given
        self.layout = layout or ("thd" if varlen_q else "bshd")
        kv_layout = page_layout if "page_table" in given else self.layout
        self.q = Tensor(view(q, "q", place), self.layout, 3 if varlen_q else 4, "q")
        kv_dims = 3 if varlen_kv else 4
        self.k = Tensor(view(k, "k", place), kv_layout, kv_dims, "k")
        self.v = Tensor(view(v, "v", place), kv_layout, kv_dims, "v")
        self.numbers = _NO_NUMBERS
        if given:
            self.numbers = {name: integer(given.pop(name, 0), name) for name in NUMBERS}
        if "page_table" in given:
            check_pages(self.k, kv_layout, "k")
        self._check_heads("page_table" in given, "descale_latent" in given)
        # Members of flashattn_args by name, and the views that own their memory.
        self.members: Dict[str, Any] = {"q": self.q.c(), "k": self.k.c(), "v": self.v.c()}
        self.seen: Dict[str, View] = {}
        self.kept: List[View] = []  # of results and what arrives at them
        self.has_seed = rng_seed is not None
        if rng_seed is not None or rng_offset:
            self.members.update(rng_words(rng_seed, rng_offset))
        for name in given:
            if name not in BESIDE:
                raise unexpected("array", name, ("o", *BESIDE),
                                 "; it is for the plan to say" if name in OPTIONS else "")
            self.seen[name] = beside(given[name], name, BESIDE[name].type, place)
        self._find_sizes(max_seqlen_q, max_seqlen_kv)
        # Some rows may be padding: they are not written.
        self.ragged = False
        for name, array in list(self.seen.items()):
            if name == "descale_latent":
                self.members[name] = self._descale_latent(Tensor(array, kv_layout, kv_dims, name))
                continue
            self.members[name], self.seen[name] = self._member(name, array)
            self.ragged |= name in _OF_LENGTHS

    def _check_heads(self, paged: bool, latent: bool) -> None:
        q, k, v = self.q, self.k, self.v
        if q.view.dtype == _arrays.I8:
            raise wrong_type("q has dtype int8, which is for k and v alone; convert it to float32, "
                             "float16 or bfloat16", "q")
        if latent:
            self._check_latent()
        elif k.view.dtype != v.view.dtype:
            names = [_arrays.NAMES[t.view.dtype] for t in (k, v)]
            raise wrong_type(f"k and v have dtypes {', '.join(names)}; they must be the same: "
                             f"convert v to {names[0]}", "v")
        elif q.view.dtype != k.view.dtype and k.view.dtype not in _arrays.CACHE_8BIT:
            names = [_arrays.NAMES[t.view.dtype] for t in (q, k)]
            raise wrong_type(f"q and k have dtypes {', '.join(names)}; they must be the same: "
                             f"convert k and v to {names[0]}", "k")
        elif k.dim != q.dim:
            raise invalid(f"k has head dimension {k.dim}, q has {q.dim}; they must be the same",
                          Reason.HEAD_DIM_PAIR, "k")
        if (k.batch, k.heads, k.rows) != (v.batch, v.heads, v.rows):
            raise invalid(f"k has shape {k.view.shape}, v has {v.view.shape}; only their last "
                          "dimension may differ", Reason.SIZE, "v")
        if q.heads % k.heads:
            raise invalid(f"q has {counted(q.heads, 'head')} by layout=\"{self.layout}\", no "
                          f"multiple of the {k.heads} of k and v; each KV head serves as many "
                          "query heads: give other heads or repeat them"
                          + self._other_order(q.rows, k.rows, paged),
                          Reason.HEAD_RATIO, "heads_kv")

    def _check_latent(self) -> None:
        """A key is a row of v, of 8 bits, and behind it one of k, of the type of q."""
        q, k, v = self.q, self.k, self.v
        if k.view.dtype != q.view.dtype or v.view.dtype not in _arrays.CACHE_8BIT:
            names = [_arrays.NAMES[t.view.dtype] for t in (q, k, v)]
            raise wrong_type(f"q, k and v have dtypes {', '.join(names)}; with descale_latent k "
                             "must be of the type of q, and v float8_e4m3fn or int8: convert them",
                             "k")
        if k.dim + v.dim != q.dim:
            raise invalid(f"k has head dimension {k.dim}, v has {v.dim}, q has {q.dim}; with "
                          "descale_latent those of k and v must add up to that of q: k holds only "
                          "what keys have behind their values", Reason.HEAD_DIM_PAIR, "k")

    def _descale_latent(self, array: Tensor) -> Tuple[Any, int, int, int]:
        """It lies as v does."""
        step = self.numbers["descale_dim"]
        if step < 1:
            raise invalid(f"descale_dim = {step}, but descale_latent is given, whose shape depends "
                          "on it; give at least 1", Reason.SIZE, "descale_dim")
        expected = self.v.like(-(-self.v.dim // step))
        if array.view.shape != expected:
            raise invalid(f"descale_latent has shape {array.view.shape}; expected {expected}, a "
                          f"factor for each {step} elements of v", Reason.SIZE, "descale_latent")
        return array.c()

    def _other_order(self, heads: int, heads_kv: int, paged: bool = False) -> str:
        """What to say where heads and tokens would fit if they stood the other way around."""
        if paged:
            other = "phsd" if self.k.axes[1] > self.k.axes[2] else "pshd"
            return ("" if self.q.heads % heads_kv else "; if heads stand where a page's tokens are "
                    f"looked for, say page_layout=\"{other}\"")
        if not heads_kv or heads % heads_kv:
            return ""
        token = "s" if "s" in self.layout else "t"
        other = self.layout.translate(str.maketrans("h" + token, token + "h"))
        return ("; if heads stand where tokens are looked for (PyTorch's order), say "
                f"layout=\"{other}\"")

    def _find_sizes(self, max_q: Optional[int], max_kv: Optional[int]) -> None:
        q, k, seen = self.q, self.k, self.seen
        self.sizes = sizes = dict(
            self.numbers, batch=q.batch, seqlen_q=q.rows, seqlen_kv=k.rows, total_q=0, total_kv=0,
            pages=0, page_size=0, block_entries=0, heads_q=q.heads, heads_kv=k.heads)
        self._find_block_entries()
        if "cu_seqlens_q" in seen:
            sizes["batch"] = sequences(seen["cu_seqlens_q"], "cu_seqlens_q")
            sizes["total_q"] = q.rows
            sizes["seqlen_q"] = longest(seen, "q") if max_q is None else _tokens(max_q, "q")
        elif max_q is not None:
            raise _unused("max_seqlen_q", max_q, "cu_seqlens_q")
        if "page_table" in seen:
            table = seen["page_table"].shape
            if len(table) != 2:
                _arrays.check_shape(table, (sizes["batch"], None), "page_table")
            if "cu_seqlens_kv" in seen:
                raise invalid("cu_seqlens_kv and page_table are both given, but k is packed or "
                              "paged, not both; leave one out", Reason.LAYOUT, "page_table")
            most = table[1] * k.rows
            tokens = most if max_kv is None else _tokens(max_kv, "kv")
            if tokens > most:
                raise invalid(f"max_seqlen_kv = {tokens}, but page_table has "
                              f"{counted(table[1], 'page')} of {counted(k.rows, 'token')} for a "
                              f"sequence, {most} in all; give at most that, or a page_table with "
                              "more columns", Reason.SIZE, "seqlen_kv")
            sizes.update(page_size=k.rows, pages=k.batch, seqlen_kv=tokens)
        elif "cu_seqlens_kv" in seen:
            self._same_batch(sequences(seen["cu_seqlens_kv"], "cu_seqlens_kv"), "cu_seqlens_kv")
            sizes["total_kv"] = k.rows
            sizes["seqlen_kv"] = longest(seen, "kv") if max_kv is None else _tokens(max_kv, "kv")
        elif max_kv is not None:
            raise _unused("max_seqlen_kv", max_kv, "cu_seqlens_kv or page_table")
        else:
            self._same_batch(k.batch, "k")

    def _find_block_entries(self) -> None:
        seen = self.seen
        if "block_index" not in seen:
            for name in ("block_begin", "block_end"):
                if name in seen:
                    raise invalid(f"{name} is given without block_index, whose entries it counts; "
                                  "give that, too, or leave it out", Reason.VALUE, name)
            return
        if "block_mask" in seen:
            raise invalid("block_mask and block_index are both given, but each says alone which "
                          "blocks are on; leave one out", Reason.MASK_COMBINATION, "block_mask")
        shape = seen["block_index"].shape
        self.sizes["block_entries"] = shape[-1] if shape else 1

    def _same_batch(self, batch: int, name: str) -> None:
        expected = self.sizes["batch"]
        if batch == expected:
            return
        remedy = "give as many"
        if name == "k" and batch == 1:
            b = self.k.axes[0]
            wide = self.k.view.shape[:b] + (expected,) + self.k.view.shape[b + 1:]
            remedy = ("to use k and v for every sequence of q, repeat them with "
                      f"broadcast_to(k, {wide}), which copies nothing")
        raise invalid(f"{name} holds {counted(batch, 'sequence')}, q holds {expected}; "
                      f"{remedy}", Reason.SIZE, name)

    def _member(self, name: str, seen: View) -> Tuple[Any, View]:
        return member(ARGS, name, seen, self.sizes, self.place, "cu_seqlens_q" in self.seen,
                      self._broadcast_remedy)

    def _broadcast_remedy(self, name: str, shape: Tuple[int, ...],
                          expected: Tuple[int, ...]) -> str:
        if name == "bias" and shape == (expected[0], expected[3]):
            return ("; a mask of (batch, keys) becomes one of (batch, heads, queries, keys) with "
                    "mask[:, None, None, :]")
        swapped = shape[-2:] == (self.q.heads, self.k.heads) if name == "bias" else \
            expected[-1:] == (self.q.heads,) and shape[-1:] == (self.q.rows,)
        return self._other_order(self.q.rows, self.k.rows) if swapped else ""

    def facts(self) -> Tuple[Any, ...]:
        """What a descriptor says of the arrays; see FACTS."""
        q, k, seen = self.q, self.k, self.seen
        return (q.view.dtype, self.v.view.dtype, q.heads, k.heads, q.dim, self.v.dim,
                self.sizes["page_size"], *self.numbers.values(),
                seen["bias"].dtype if "bias" in seen else 0, *[name in seen for name in _PRESENT])

    def lse_shape(self) -> Tuple[int, ...]:
        return extents(ARRAYS[ARGS]["lse"], self.sizes, "cu_seqlens_q" in self.seen)

    def put(self, args: Any, name: str, seen: View) -> None:
        """Writes what is no input of forward into flashattn_args."""
        value, seen = self._member(name, seen)
        setattr(args, name, value)
        self.kept.append(seen)

    def result(self, args: Any, name: str) -> Any:
        """Makes a result, float32, and writes it into flashattn_args. A gradient has the shape of
        what it is of: it is summed where that is broadcast."""
        table = ARRAYS[ARGS][name]
        like = self.seen.get(name[1:]) if table.role == "gradient" else None
        shape = like.shape if like else extents(table, self.sizes, "cu_seqlens_q" in self.seen)
        # Rows that belong to no sequence are not written: they must not hold what was there.
        array = _arrays.new(shape, F32, self.ragged or like is not None, self.place, name,
                            self.tensors)
        if like is None:
            setattr(args, name, packed_member(ARGS, name, array, self.place))
        else:
            self.put(args, name, view(array, name, self.place, made=True))
        return array

    def check_seed(self, dropout: float) -> None:
        check_seed(self.has_seed or "rng_device" in self.seen, dropout)

    def fill(self, args: Any) -> None:
        """Writes the inputs into flashattn_args."""
        for name, value in self.members.items():
            setattr(args, name, value)


def set_sizes(args: Any, sizes: Dict[str, int]) -> None:
    """Writes those that flashattn_args has; it does not hold every size that Python does."""
    try:
        for name in _SIZES:
            value = sizes.get(name)
            if value:
                setattr(args, name, value)
    except (OverflowError, TypeError):
        raise misfit([(name, TYPES[ARGS][name], value)]) from None


def check_pages(pages: Tensor, layout: str, name: str) -> None:
    if not pages.rows:  # to the library: no pages
        raise invalid(f"{name} has shape {pages.view.shape}, pages of 0 tokens in the order "
                      f"\"{layout}\"; give at least 1", Reason.PAGE_SIZE, name)


def sequences(cu_seqlens: View, name: str) -> int:
    """How many sequences the offsets bound."""
    if len(cu_seqlens.shape) != 1:
        _arrays.check_shape(cu_seqlens.shape, (None,), name)
    if not cu_seqlens.shape[0]:
        raise invalid(f"{name} is empty; it holds one number more than there are sequences",
                      Reason.LENGTHS, name)
    return cu_seqlens.shape[0] - 1


def longest(seen: Dict[str, View], side: str) -> int:
    cu = seen["cu_seqlens_" + side].owner
    if not isinstance(cu, np.ndarray):
        raise invalid(f"max_seqlen_{side} is not given, and cu_seqlens_{side} lies on a GPU, where "
                      f"it is not read; give max_seqlen_{side}, a bound of the lengths",
                      Reason.LENGTHS, f"seqlen_{side}")
    # 64 bits: what decreases is the library's to refuse, not to overflow here.
    return max(int(np.diff(cu.astype(np.int64)).max()), 0) if len(cu) > 1 else 0


def _tokens(value: Any, side: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise wrong_type(f"max_seqlen_{side} is a {type(value).__name__}; expected a number of "
                         "tokens", f"seqlen_{side}") from None


def _unused(name: str, value: Any, needed: str) -> Exception:
    return invalid(f"{name} = {value!r} is given without {needed}, and would be ignored; leave it "
                   f"out, or give {needed}", Reason.VALUE, name)


def rng_words(rng_seed: Optional[int], rng_offset: int) -> Dict[str, int]:
    words = {name: integer(value, name) for name, value in (("rng_seed", rng_seed or 0),
                                                            ("rng_offset", rng_offset))}
    for name, word in words.items():
        if not 0 <= word < 2**64:
            raise invalid(f"{name} = {word}; it must be in [0, 2**64)", Reason.VALUE, name)
    return words


def check_seed(is_given: bool, dropout: float) -> None:
    """Without one every call would drop the same weights."""
    if dropout and not is_given:
        # As it is in single precision, and yet no longer than it was given.
        raise invalid(f"dropout = {str(np.float32(dropout))} is given without a seed; give "
                      "rng_seed=, an integer of which each layer and step has its own (or its own "
                      "rng_offset=), the same one in the backward call", Reason.DROPOUT, "rng_seed")


def first_given(*arrays: Any) -> Any:
    return next((array for array in arrays if array is not None), None)
