"""Calls beside attention: structures of arguments filled by the header's tables, and run."""
from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Sequence

from . import _arrays, _gpu, _parallel
from ._arrays import F32, View, beside
from ._constants import ARRAYS, Reason
from ._errors import counted, fail, invalid
from ._inputs import Tensor, longest, sequences, set_sizes
from ._library import ffi
from ._members import TYPES, extents, member, packed_member
from ._options import integer


class Call:
    """A structure of arguments, and the arrays that it points to."""

    def __init__(self, struct: str, place: _arrays.Place, first: Any,
                 arrays: Dict[str, Any]) -> None:
        """first: the array by whose library results are made."""
        self.struct, self.table, self.place = struct, ARRAYS[struct], place
        self.makers = None if place else _gpu.on_host(first)
        self.args = ffi.new(struct + " *")
        self.args.struct_size = ffi.sizeof(struct)
        self.sizes: Dict[str, int] = {}
        self.kept: Dict[str, View] = {
            name: beside(array, name, self.table[name].type, place)
            for name, array in arrays.items() if array is not None}
        # Rows that belong to no sequence are not written: they must not hold what was there.
        self.ragged = any(self.table[name].type == "i32" for name in self.kept)
        self.varlen_q = "cu_seqlens_q" in self.kept

    def packed_size(self, side: str, bound: Optional[int], rows: Optional[int]) -> None:
        """The sizes of a side whose sequences are packed; rows: of its arrays, None without any."""
        cu = "cu_seqlens_" + side
        if cu in self.kept:
            batch = sequences(self.kept[cu], cu)
            most = longest(self.kept, side) if bound is None else \
                integer(bound, "max_seqlen_" + side)
            if rows is None:
                rows = batch * most  # at the most, as the offsets may lie on a GPU
            self.sizes.update({"batch": batch, "total_" + side: rows, "seqlen_" + side: most})
        elif bound is not None:
            raise invalid(f"max_seqlen_{side} = {bound} has a meaning only with {cu}; leave it out",
                          Reason.SIZE, "seqlen_" + side)

    def check_batch(self, what: str, batch: int, others: str) -> None:
        """others: the words before the batch of other arrays."""
        if batch != self.sizes["batch"]:
            raise invalid(f"{what} holds {counted(batch, 'sequence')}, {others} "
                          f"{self.sizes['batch']}; give as many", Reason.SIZE, "batch")

    def put(self, name: str, seen: View) -> None:
        """Writes the array of that name into the structure."""
        value, self.kept[name] = member(self.struct, name, seen, self.sizes, self.place,
                                        self.varlen_q)
        setattr(self.args, name, value)

    def put_all(self) -> None:
        """Writes the sizes, and the arrays that were given."""
        set_sizes(self.args, {name: size for name, size in self.sizes.items()
                              if name in TYPES[self.struct]})
        for name, seen in list(self.kept.items()):
            self.put(name, seen)

    def result(self, name: str) -> Any:
        """Makes an array of float32 and writes it into the structure."""
        array = self.make(extents(self.table[name], self.sizes, self.varlen_q), F32, name)
        setattr(self.args, name, packed_member(self.struct, name, array, self.place))
        return array

    def make(self, shape: Sequence[int], code: int, name: str) -> Any:
        return _arrays.new(shape, code, self.ragged, self.place, name, self.makers)

    def run(self, function: Callable[..., int], plan: Any, parallel: Any) -> None:
        run(lambda stream: function(plan._plan, self.args, stream), self.args, self.place, parallel)


def run(function: Callable[[Any], int], args: Any, place: _arrays.Place, parallel: Any) -> None:
    """A call of the library with args, on a stream; raises what it or the caller's pool says."""
    pool = None if parallel is None else _parallel.pool_of(parallel)
    if pool is not None:
        _parallel.put(args, pool)
    with _gpu.launch(place):
        status = function(_gpu.native_stream(place))
    if pool is not None and pool.error is not None:
        raise pool.error
    if status:
        fail(status)
