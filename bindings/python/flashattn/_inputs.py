"""The arrays that forward and backward share, checked against each other: flashattn_inputs."""
from __future__ import annotations

import operator
from functools import lru_cache
from typing import Any, Dict, Optional, Sequence, Tuple

import numpy as np

from . import _arrays, _gpu, _options
from ._arrays import BIAS, View, float32, int32, int32_rows, view
from ._constants import Reason, Status
from ._errors import UnsupportedError, invalid, wrong_type
from ._library import ffi

_INT32, _FLOAT = ffi.typeof("int32_t *"), ffi.typeof("float *")
_BYTE = ffi.typeof("uint8_t *")
# The keywords of describe() that follow from the arrays, in the order of Inputs.facts().
FACTS = ("dtype", "heads", "dim", "kv_heads", "dim_v", "varlen_q", "varlen_k", "page_size", "bias",
         "alibi", "sink", "block_size")


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
        self.strides: Tuple[int, ...]
        batch, head, row = steps[b] // size if b >= 0 else 0, steps[h] // size, steps[s] // size
        if head > 0 and row > 0 and (batch > 0 or b < 0):
            self.strides = (batch, head, row)
        else:
            self.strides = self._plain((batch, head, row), b >= 0, name)

    def _plain(self, steps: Tuple[int, ...], has_batch: bool, name: str) -> Tuple[int, ...]:
        """Strides without the values that mean something else to the library.

        A step that is never taken may be anything in NumPy, and three zeros mean packed in C.
        """
        sizes = (self.batch, self.heads, self.rows)
        if 0 in sizes:  # nothing to step over; NumPy says 0
            return 0, 0, 0
        used = (has_batch, True, True)
        steps = tuple([max(self.dim, 1) if u and n <= 1 else step
                       for u, n, step in zip(used, sizes, steps)])
        if min(steps) < 0:
            raise invalid(f"{name} has a negative stride; {self.view.remedy}", Reason.STRIDE, name)
        if not any(steps):
            raise invalid(f"{name} repeats one row in all its dimensions; {self.view.remedy}",
                          Reason.STRIDE, name)
        return steps

    def c(self) -> Tuple[Any, int, int, int]:
        return (self.view.pointer, *self.strides)

    def sizes(self) -> Tuple[int, int, int, int]:
        return self.batch, self.heads, self.rows, self.dim

    def like(self, dim: int) -> Tuple[int, ...]:
        """The shape of an array of the same layout with another dim."""
        return (*self.view.shape[:-1], dim)


class Inputs:
    """q, k, v and everything beside them. It keeps what it points to alive."""

    __slots__ = ("q", "k", "v", "layout", "varlen_q", "varlen_k", "page_size", "batch", "seqlen_q",
                 "seqlen_k", "ragged", "bias", "bias_strides", "alibi", "sink", "block_mask",
                 "block_size", "seed", "offset", "cu_q", "cu_k", "lens_q", "lens_k", "page_table",
                 "page_stride", "place")

    def __init__(self, q: Any, k: Any, v: Any, *, layout: Optional[str] = None,
                 cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
                 max_seqlen_q: Optional[int] = None, max_seqlen_k: Optional[int] = None,
                 q_lens: Any = None, kv_lens: Any = None, page_table: Any = None,
                 page_layout: str = "pshd", bias: Any = None, alibi_slopes: Any = None,
                 sink: Any = None, block_mask: Any = None,
                 block_size: Optional[Tuple[int, int]] = None, seed: Optional[int] = None,
                 offset: int = 0, stream: Any = None, device: Optional[str] = None,
                 out: Any = None) -> None:
        # Where the call runs: None for the CPU. NumPy's arrays need not be asked.
        on_host = type(q) is np.ndarray and stream is None and device is None
        self.place = place = None if on_host else _gpu.place_of(q, stream, device, out)
        self.varlen_q, self.varlen_k = cu_seqlens_q is not None, cu_seqlens_k is not None
        self.layout = layout or ("thd" if self.varlen_q else "bshd")
        kv_layout = page_layout if page_table is not None else self.layout
        self.q = Tensor(view(q, "q", place), self.layout, 3 if self.varlen_q else 4, "q")
        kv_dims = 3 if self.varlen_k else 4
        self.k = Tensor(view(k, "k", place), kv_layout, kv_dims, "k")
        self.v = Tensor(view(v, "v", place), kv_layout, kv_dims, "v")
        self.seed, self.offset = seed, offset
        self.cu_q = self.cu_k = self.lens_q = self.lens_k = self.page_table = None
        self.page_size = 0 if page_table is None else self.k.rows
        self.page_stride = 0
        self._check_heads()
        self._sizes(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, page_table)
        if q_lens is not None:
            self.lens_q = int32(q_lens, "q_lens", (self.batch,), place)
        if kv_lens is not None:
            self.lens_k = int32(kv_lens, "kv_lens", (self.batch,), place)
        # Some rows may be nobody's: they are not written.
        self.ragged = self.varlen_q or self.varlen_k or q_lens is not None or kv_lens is not None
        self.bias: Optional[View] = None
        self.bias_strides: Tuple[int, ...] = (0, 0, 0)
        self.alibi: Any = None
        self.sink: Any = None
        self.block_mask: Any = None
        self.block_size: Optional[Tuple[int, int]] = None
        if bias is not None:
            self._bias(view(bias, "bias", place, BIAS))
        if alibi_slopes is not None:
            self.alibi = float32(alibi_slopes, "alibi_slopes", place)
            self._per_head(self.alibi, "alibi_slopes", len(self.alibi.shape) == 2)
        if sink is not None:
            self.sink = float32(sink, "sink", place)
            self._per_head(self.sink, "sink", False)
        if block_mask is not None:
            self._blocks(block_mask, block_size)
        elif block_size is not None:
            raise _unused("block_size", block_size, "block_mask")

    def _check_heads(self) -> None:
        q, k, v = self.q, self.k, self.v
        if not q.view.dtype == k.view.dtype == v.view.dtype:
            raise self._mixed_types()
        if k.dim != q.dim:
            raise invalid(f"k has head dimension {k.dim}, q has {q.dim}; they must be the same",
                          Reason.HEAD_DIM_PAIR, "k")
        if (k.batch, k.heads, k.rows) != (v.batch, v.heads, v.rows):
            raise invalid(f"k has shape {k.view.shape}, v has {v.view.shape}; only their last "
                          "dimension may differ", Reason.SIZE, "v")
        if k.heads and q.heads % k.heads:
            raise invalid(f"q has {q.heads} heads by layout=\"{self.layout}\", no multiple of the "
                          f"{k.heads} of k and v; each KV head serves as many query heads: give "
                          f"other heads or repeat them{self._other_order(q.rows, k.rows)}",
                          Reason.HEAD_RATIO, "k")

    def _mixed_types(self) -> Exception:
        names = [_arrays.NAMES[t.view.dtype] for t in (self.q, self.k, self.v)]
        if names[1] == names[2] == "float8_e4m3fn":
            return UnsupportedError(
                f"k and v are {names[1]} beside q of {names[0]}, for which there is no kernel; "
                f"convert k and v to {names[0]}", Status.ERROR_UNSUPPORTED, Reason.DTYPE_MIX, "k")
        return wrong_type(f"q, k, v have dtypes {', '.join(names)}; they must be the same: convert "
                          f"them to {names[0]}, or all to another", "q")

    def _other_order(self, heads: int, kv_heads: int) -> str:
        """What to say where heads and tokens would fit if they stood the other way around."""
        if self.page_size:
            other = "phsd" if self.k.axes[1] > self.k.axes[2] else "pshd"
            return ("" if self.q.heads % kv_heads else "; if heads stand where a page's tokens are "
                    f"looked for, say page_layout=\"{other}\"")
        if not kv_heads or heads % kv_heads:
            return ""
        token = "s" if "s" in self.layout else "t"
        other = self.layout.translate(str.maketrans("h" + token, token + "h"))
        return ("; if heads stand where tokens are looked for (PyTorch's order), say "
                f"layout=\"{other}\"")

    def _per_head(self, numbers: Any, name: str, each: bool) -> None:
        """Slopes and sinks: a number for each head, or for each head of each sequence."""
        shape, heads = numbers.shape, self.q.heads
        expected = (self.batch, heads) if each else (heads,)
        if shape != expected:
            fits = shape[-1:] == (self.q.rows,)
            raise invalid(f"{name} has shape {tuple(shape)}; expected {expected}, one for each head"
                          + (self._other_order(self.q.rows, self.k.rows) if fits else ""),
                          Reason.SIZE, name)

    def _sizes(self, cu_q: Any, cu_k: Any, max_q: Optional[int], max_k: Optional[int],
               page_table: Any) -> None:
        q, k = self.q, self.k
        self.batch, self.seqlen_q, self.seqlen_k = q.batch, q.rows, k.rows
        if cu_q is not None:
            self.cu_q, self.batch = _sequences(cu_q, "cu_seqlens_q", self.place)
            self.seqlen_q = _longest(self.cu_q, "q") if max_q is None else _tokens(max_q, "q")
        elif max_q is not None:
            raise _unused("max_seqlen_q", max_q, "cu_seqlens_q")
        if cu_k is not None:
            if page_table is not None:
                raise invalid("cu_seqlens_k and page_table are both given, but k is packed or "
                              "paged, not both; leave one out", Reason.LAYOUT, "page_table")
            self.cu_k, batch = _sequences(cu_k, "cu_seqlens_k", self.place)
            self._same_batch(batch, "cu_seqlens_k")
            self.seqlen_k = _longest(self.cu_k, "k") if max_k is None else _tokens(max_k, "k")
        elif page_table is not None:
            self.page_table, self.page_stride = int32_rows(page_table, "page_table", self.batch,
                                                           self.place)
            pages = self.page_table.shape[1]
            self.seqlen_k = pages * k.rows if max_k is None else _tokens(max_k, "k")
            if self.seqlen_k > pages * k.rows:
                raise invalid(f"max_seqlen_k = {max_k}, but page_table has {pages} pages of "
                              f"{k.rows} tokens for a sequence, {pages * k.rows} in all; give at "
                              "most that, or a page_table with more columns", Reason.SIZE,
                              "max_seqlen_k")
        elif max_k is not None:
            raise _unused("max_seqlen_k", max_k, "cu_seqlens_k or page_table")
        else:
            self._same_batch(k.batch, "k")

    def _same_batch(self, batch: int, name: str) -> None:
        if batch == self.batch:
            return
        remedy = "give as many"
        if name == "k" and batch == 1:
            b = self.k.axes[0]
            wide = self.k.view.shape[:b] + (self.batch,) + self.k.view.shape[b + 1:]
            remedy = ("to use k and v for every sequence of q, repeat them with "
                      f"broadcast_to(k, {wide}), which copies nothing")
        raise invalid(f"{name} holds {batch} {'sequence' if batch == 1 else 'sequences'}, q holds "
                      f"{self.batch}; {remedy}", Reason.SIZE, name)

    def _bias(self, bias: View) -> None:
        expected = (self.batch, self.q.heads, self.seqlen_q, self.seqlen_k)
        missing = 4 - len(bias.shape)
        shape = (1,) * missing + bias.shape
        if missing < 0 or any(n not in (1, e) for n, e in zip(shape, expected)):
            raise invalid(f"bias has shape {bias.shape}, which does not broadcast to (batch, "
                          f"heads, queries, keys) = {expected}{self._bias_remedy(shape, expected)}",
                          Reason.BIAS, "bias")
        strides = (0,) * missing + bias.strides
        has_keys = shape[3] == self.seqlen_k and strides[3] == 1
        if self.seqlen_k > 1 and 0 not in shape and not has_keys:
            raise invalid(f"bias has shape {bias.shape} and strides {bias.strides}; its keys must "
                          f"be there, all {self.seqlen_k}, and contiguous: broadcast them and "
                          f"{bias.remedy}", Reason.STRIDE, "bias")
        self.bias = bias
        self.bias_strides = tuple([0 if n == 1 else s for n, s in zip(shape[:3], strides)])
        if min(self.bias_strides) < 0:
            raise invalid(f"bias has a negative stride; {bias.remedy}", Reason.STRIDE, "bias")

    def _bias_remedy(self, shape: Tuple[int, ...], expected: Tuple[int, ...]) -> str:
        batch, _, queries, keys = expected
        if shape == (1, 1, batch, keys):
            return "; a mask of (batch, keys) becomes one with mask[:, None, None, :]"
        if shape[2:] == (self.q.heads, self.k.heads) != (queries, keys):
            return self._other_order(self.q.rows, self.k.rows)
        return ""

    def _blocks(self, mask: Any, block_size: Optional[Sequence[int]]) -> None:
        if block_size is None:
            raise invalid("block_mask is given without block_size; give block_size = (queries, "
                          "keys) a block", Reason.SIZE, "block_size")
        self.block_size = block_size = _options.block_size(block_size, "block_size")
        given: Any
        if self.place is not None:
            given = _arrays.mask_bytes(mask, "block_mask", self.place)
        else:
            given = _arrays.small(mask, "block_mask")
            if given.dtype not in (np.bool_, np.uint8):
                raise _arrays.MASK.refusal("block_mask", str(given.dtype))
        rows, columns = (-(-n // size) for n, size in zip((self.seqlen_q, self.seqlen_k),
                                                          block_size))
        expected = (self.batch, self.q.heads, rows, columns)
        if len(given.shape) > 4 or any(n not in (1, e)
                                 for n, e in zip(given.shape[::-1], expected[::-1])):
            raise invalid(f"block_mask has shape {given.shape}, which does not broadcast to "
                          f"(batch, heads, query blocks, key blocks) = {expected}", Reason.SIZE,
                          "block_mask")
        if self.place is not None:
            given.shape = (1,) * (4 - len(given.shape)) + given.shape
            if given.shape[2:] != (rows, columns):
                raise invalid(f"block_mask has shape {given.shape}; on a GPU its blocks must be "
                              f"there, all ({rows}, {columns})", Reason.SIZE, "block_mask")
            self.block_mask = given
            return
        # One byte a block: the last two dimensions are packed here, batch and head may repeat.
        given = given.reshape((1,) * (4 - given.ndim) + given.shape)
        self.block_mask = np.ascontiguousarray(
            np.broadcast_to(given, (*given.shape[:2], rows, columns)))

    def facts(self) -> Tuple[Any, ...]:
        """What a descriptor says of the arrays; see FACTS."""
        bias = self.bias
        return (self.q.view.dtype, self.q.heads, self.q.dim, self.k.heads, self.v.dim,
                self.varlen_q, self.varlen_k, self.page_size,
                None if bias is None else bias.dtype, self.alibi is not None,
                self.sink is not None, self.block_size)

    def shape(self) -> Tuple[int, ...]:
        """flashattn_shape."""
        return (self.batch, self.seqlen_q, self.seqlen_k, 0, self.q.rows if self.varlen_q else 0,
                self.k.rows if self.varlen_k else 0)

    def lse_shape(self) -> Tuple[int, ...]:
        heads = self.q.heads
        return (heads, self.q.rows) if self.varlen_q else (self.batch, heads, self.seqlen_q)

    def check_seed(self, dropout: float) -> None:
        check_seed(self.seed, dropout)

    def names(self) -> Optional[Dict[str, str]]:
        """What arguments here are called otherwise than the library's sentences say."""
        names = {}
        if self.varlen_q:
            names["seqlen_q"] = "max_seqlen_q"
        if self.varlen_k or self.page_table is not None:
            names["seqlen_kv"] = "max_seqlen_k"
        return names

    def fill(self, args: Any) -> None:
        """Writes the inputs of a zeroed forward or backward argument structure."""
        c = args.inputs
        c.q, c.k, c.v = self.q.c(), self.k.c(), self.v.c()
        if self.seed is not None:
            set_seed(c, self.seed, self.offset)
        if self.ragged:
            if self.cu_q is not None:
                c.cu_seqlens_q = _arrays.pointer(self.cu_q, _INT32)
            if self.cu_k is not None:
                c.cu_seqlens_kv = _arrays.pointer(self.cu_k, _INT32)
            if self.lens_q is not None:
                c.lens_q = _arrays.pointer(self.lens_q, _INT32)
            if self.lens_k is not None:
                c.lens_kv = _arrays.pointer(self.lens_k, _INT32)
        if self.page_table is not None:
            c.page_table = _arrays.pointer(self.page_table, _INT32)
            c.page_table_stride = self.page_stride
            c.pages = self.k.batch
        if self.bias is not None:
            c.bias = self.bias.pointer
            c.bias_stride_batch, c.bias_stride_head, c.bias_stride_row = self.bias_strides
        if self.alibi is not None:
            c.alibi_slopes = _arrays.pointer(self.alibi, _FLOAT)
            c.alibi_stride_batch = self.q.heads if len(self.alibi.shape) == 2 else 0
        if self.sink is not None:
            c.sink = _arrays.pointer(self.sink, _FLOAT)
        if self.block_mask is not None:
            batch, heads, rows, columns = self.block_mask.shape
            c.block_mask = _arrays.pointer(self.block_mask, _BYTE)
            c.block_mask_stride_batch = heads * rows * columns if batch > 1 else 0
            c.block_mask_stride_head = rows * columns if heads > 1 else 0
            c.block_mask_stride_row = columns


def _sequences(cu_seqlens: Any, name: str, place: _arrays.Place) -> Tuple[Any, int]:
    """The offsets, and how many sequences they bound."""
    cu = int32(cu_seqlens, name, (None,), place)
    if not cu.shape[0]:
        raise invalid(f"{name} is empty; it holds one number more than there are sequences",
                      Reason.LENGTHS, name)
    return cu, cu.shape[0] - 1


def _longest(cu: Any, side: str) -> int:
    if type(cu) is View:
        raise invalid(f"max_seqlen_{side} is not given, and cu_seqlens_{side} lies on a GPU, where "
                      f"it is not read; give max_seqlen_{side}, a bound of the lengths",
                      Reason.LENGTHS, f"max_seqlen_{side}")
    # 64 bits: what decreases is the library's to refuse, not to overflow here.
    return max(int(np.diff(cu.astype(np.int64)).max()), 0) if len(cu) > 1 else 0


def _tokens(value: Any, side: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise wrong_type(f"max_seqlen_{side} is a {type(value).__name__}; expected a number of "
                         "tokens", f"max_seqlen_{side}") from None


def _unused(name: str, value: Any, needed: str) -> Exception:
    return invalid(f"{name} = {value!r} is given without {needed}, and would be ignored; leave it "
                   f"out, or give {needed}", Reason.VALUE, name)


def set_seed(inputs: Any, seed: Optional[int], offset: int) -> None:
    words = [_options.integer(value, name) for value, name in ((seed or 0, "seed"),
                                                               (offset, "offset"))]
    for word, name in zip(words, ("seed", "offset")):
        if not 0 <= word < 2**64:
            raise invalid(f"{name} = {word}; it must be in [0, 2**64)", Reason.VALUE, name)
    inputs.rng_seed, inputs.rng_offset = words


def check_seed(seed: Optional[int], dropout: float) -> None:
    """Without one every call would drop the same weights."""
    if dropout and seed is None:
        raise invalid(f"dropout = {dropout} is given without a seed; give seed=, an integer of "
                      "which each layer and step has its own (or its own offset=), the same one in "
                      "the backward call", Reason.DROPOUT, "seed")


def first_given(*arrays: Any) -> Any:
    return next((array for array in arrays if array is not None), None)
