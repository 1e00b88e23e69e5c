"""The arrays of flashattn_args, as the header's comments describe them.

Every comment of an array starts "(dims); type; condition." and may add "VARLEN_Q: (dims)". What is
read here becomes the tables that the friendly layers of Rust and Julia loop over, so that a new
array is a line of the header.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import List, Tuple

from .model import Field, HeaderError, Model, Struct

HEAD = re.compile(r"\((?P<dims>(?:[^()]|\([^()]*\))*)\); (?P<type>\w+); (?P<condition>[^.;]+)\.")
VARLEN = re.compile(r"VARLEN_(?:Q|KV): \(((?:[^()]|\([^()]*\))*)\)")
DIM = re.compile(r"(?P<size>\w+)(?: \+ (?P<more>\d+))?|ceil\((?P<over>\w+) / (?P<by>\w+)\)")
# Maps an index to the stride of flashattn_tensor that steps over it; the last is contiguous.
STRIDES = ("batch", "head", "seq")


@dataclass(frozen=True)
class Dim:
    """`size + more`, or `ceil(size / by)`; size may be a number."""

    size: str
    more: int = 0
    by: str = ""

    @property
    def stride(self) -> str:
        """The stride that steps over this index."""
        if self.size == "batch":
            return "batch"
        return "head" if self.size.startswith("heads_") else "seq"


@dataclass(frozen=True)
class Array:
    name: str
    role: str  # input, output, upstream, gradient
    tensor: bool  # has strides; else it is packed
    type: str  # i32, f32, ..., or the field of the descriptor that says it
    dims: Tuple[Dim, ...]
    varlen: Tuple[Dim, ...]  # of VARLEN, where they differ
    condition: str
    doc: str

    @property
    def is_rows(self) -> bool:
        """(batch, seq, head, dim): q, k, v, o and their gradients."""
        last = self.dims[-1]
        return len(self.dims) == 4 and last.size.startswith("dim_") and not last.by


def arguments(model: Model) -> Tuple[Struct, Tuple[Array, ...]]:
    """flashattn_args, and its arrays in the header's order."""
    struct = next(s for s in model.structs if s.name == "flashattn_args")
    arrays: List[Array] = []
    for field in struct.fields:
        if field.type.base == "flashattn_tensor" or \
                field.type.is_pointer and field.type.base not in ("void", "flashattn_error"):
            arrays.append(_array(field, arrays))
    return struct, tuple(arrays)


def _array(field: Field, before: List[Array]) -> Array:
    text = " ".join(field.doc.split())
    head = HEAD.match(text)
    if not head:
        raise HeaderError(f"{field.name}: its comment starts with no '(dims); type; condition.'")
    dims = _dims(head["dims"], field.name)
    other = VARLEN.search(text)
    # Arrays of the same shape are laid out alike.
    varlen = _dims(other[1], field.name) if other else next(
        (array.varlen for array in before if array.dims == dims), ())
    role = "output" if "Forward writes it" in text else "gradient" if "Written" in text else \
        "upstream" if "gradient that arrives" in text else "input"
    return Array(field.name, role, not field.type.is_pointer, head["type"], dims, varlen,
                 head["condition"], field.doc)


def _dims(text: str, name: str) -> Tuple[Dim, ...]:
    dims = []
    for part in re.split(r", (?![^(]*\))", text):
        match = DIM.fullmatch(part)
        if not match:
            raise HeaderError(f"{name}: '{part}' is no size")
        dims.append(Dim(match["size"] or match["over"], int(match["more"] or 0),
                        match["by"] or ""))
    return tuple(dims)


def sizes(arrays: Tuple[Array, ...]) -> Tuple[str, ...]:
    """The names that dims are made of, in the order in which they appear."""
    names = [name for array in arrays for dim in array.dims + array.varlen
             for name in (dim.size, dim.by) if name and not name.isdigit()]
    return tuple(dict.fromkeys(names))
