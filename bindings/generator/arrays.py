"""The arrays of every structure of arguments, as the header's comments describe them.

Every comment of an array starts "(dims); type; condition." and may add "VARLEN_Q: (dims)" and its
like; an array without one, or with "As in flashattn_args.", is that of its name there. What is read
here becomes the tables that the friendly layers loop over, so that a new array is a line of the
header.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Dict, List, Tuple

from .model import Field, HeaderError, Model, Struct

FIRST = "flashattn_args"
SHAPE = r"\(((?:[^()]|\([^()]*\))*)\)"
HEAD = re.compile(SHAPE + r"; ((?:the plan's )?)(\w+); ([^.;]+)\.")
LAYOUT = re.compile(r"\b(VARLEN_Q|VARLEN_KV|PAGED_KV): " + SHAPE)
THERE = re.compile(rf"As in {FIRST}\.\s*")
DIM = re.compile(r"(?P<size>\w+)(?: \+ (?P<more>\d+)| / (?P<part>\d+))?|"
                 r"ceil\((?P<over>\w+) / (?P<by>\w+)\)")
# Maps an index to the stride of flashattn_tensor that steps over it; the last is contiguous.
STRIDES = ("batch", "head", "seq")


@dataclass(frozen=True)
class Dim:
    """`size + more`, or `ceil(size / by)`; size may be a number."""

    size: str
    more: int = 0
    by: str = ""
    stride: str = ""  # of STRIDES, which steps over this index; "": it is contiguous


@dataclass(frozen=True)
class Array:
    name: str
    role: str  # input, output, upstream, gradient
    tensor: bool  # has strides; else it is packed
    parts: bool  # a host array of such arrays
    type: str  # i32, f32, ..., or the field that says it
    of_args: bool  # that field is the structure's own, else the descriptor's
    dims: Tuple[Dim, ...]
    layouts: Tuple[Tuple[str, Tuple[Dim, ...]], ...]  # dims of layouts, where they differ
    condition: str
    doc: str

    @property
    def is_rows(self) -> bool:
        """(batch, seq, head, dim): q, k, v, o and their gradients."""
        last = self.dims[-1]
        return len(self.dims) == 4 and last.size.startswith("dim_") and not last.by

    @property
    def varlen(self) -> Tuple[Dim, ...]:
        """The dims with VARLEN_Q, where they differ."""
        return dict(self.layouts).get("VARLEN_Q", ())


@dataclass(frozen=True)
class Arguments:
    """A structure of arguments, and its arrays in the header's order."""

    struct: Struct
    arrays: Tuple[Array, ...]


def arguments(model: Model) -> Tuple[Arguments, ...]:
    """All structures of arguments; flashattn_args is the first."""
    structs = [struct for struct in model.structs if struct.name.endswith("_args")]
    structs.sort(key=lambda struct: struct.name != FIRST)
    found: List[Arguments] = []
    for struct in structs:
        arrays: List[Array] = []
        for field in struct.fields:
            if field.type.base == "flashattn_tensor" or \
                    field.type.is_pointer and field.type.base not in ("void", "flashattn_error"):
                arrays.append(_array(struct, field, arrays, found[0].arrays if found else ()))
        found.append(Arguments(struct, tuple(arrays)))
    return tuple(found)


def _array(struct: Struct, field: Field, before: List[Array], first: Tuple[Array, ...]) -> Array:
    text = " ".join(field.doc.split())
    there = next((array for array in first if array.name == field.name), None)
    if there and (not text or THERE.match(text)):
        own = THERE.sub("", field.doc, count=1)
        return replace(there, doc=f"{there.doc}\n{own}" if own else there.doc)
    where = f"{struct.name}.{field.name}"
    head = HEAD.match(text)
    if not head:
        raise HeaderError(f"{where}: its comment starts with no '(dims); type; condition.'")
    dims = _dims(head[1], where)
    # Arrays of the same shape are laid out alike.
    alike = [array.layouts for array in (*before, *first) if array.dims == dims and array.layouts]
    layouts = tuple((name, _dims(shape, where)) for name, shape in LAYOUT.findall(text))
    tensor = field.type.base == "flashattn_tensor"
    return Array(field.name, _role(text, struct.name == FIRST), tensor,
                 len(field.type.pointee_const) == (1 if tensor else 2), head[3],
                 not head[2] and any(f.name == head[3] for f in struct.fields), dims,
                 layouts or (alike[0] if alike else ()), head[4], field.doc)


def _role(text: str, is_first: bool) -> str:
    if "Forward writes it" in text:
        return "output"
    if re.search(r"\bWritten\b", text):
        return "gradient" if is_first else "output"
    return "upstream" if "gradient that arrives" in text else "input"


def _dims(text: str, where: str) -> Tuple[Dim, ...]:
    dims: List[Dim] = []
    for part in re.split(r", (?![^(]*\))", text):
        match = DIM.fullmatch(part)
        if not match:
            raise HeaderError(f"{where}: '{part}' is no size")
        dim = Dim(match["size"] or match["over"], int(match["more"] or 0),
                  match["part"] or match["by"] or "")
        taken = {before.stride for before in dims}
        dims.append(replace(dim, stride=_stride(dim) if _stride(dim) not in taken else ""))
    return tuple(dims)


def _stride(dim: Dim) -> str:
    """See "Strides" at the top of the header: dims, keys, pages and words are contiguous."""
    if dim.size in ("batch", "pages"):
        return "batch"
    if dim.size.startswith("heads_"):
        return "head"
    return "" if dim.size.startswith("dim_") or dim.by == "page_size" else "seq"


def sizes(arrays: Tuple[Array, ...]) -> Tuple[str, ...]:
    """The names that dims are made of, in the order in which they appear."""
    names = [name for array in arrays
             for dims in (array.dims, *dict(array.layouts).values()) for dim in dims
             for name in (dim.size, dim.by) if name and not name.isdigit()]
    return tuple(dict.fromkeys(names))
