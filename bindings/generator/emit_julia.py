"""bindings/julia/src/LibFlashAttn.jl: constants, structures, functions, layout and documentation."""
from __future__ import annotations

from typing import List

from .model import CType, Enum, Field, Function, Model, Struct

HEAD = '''\
# Written by bindings/generate.py from include/flashattn.h. Do not edit.
"""
The C header, name by name: constants, structures, functions. Structures have keyword constructors
whose defaults are zero, and `struct_size` set. Functions return what C returns; where a pointer to
a structure or number is wanted, a `Ref` or an `Array` does, and `C_NULL` for NULL.
"""
module LibFlashAttn

# The name inside the file. FlashAttention opens the file first, from wherever it lies; this name
# then means the library that is open already.
const lib = "libflashattn.so.0"

'''

SCALARS = {"int32_t": "Int32", "uint32_t": "UInt32", "int64_t": "Int64", "uint64_t": "UInt64",
           "uint8_t": "UInt8", "float": "Cfloat", "double": "Cdouble", "void": "Cvoid",
           "char": "Cchar"}


def emit(model: Model) -> str:
    major, minor, patch = model.version
    out = [HEAD, f"const HEADER_VERSION = {10000 * major + 100 * minor + patch}\n"]
    out += [_enum(enum) for enum in model.enums]
    out.append(_names(model))
    for name in model.opaque:
        out.append(f"\nmutable struct {name} end\n")
    for callback in model.callbacks:
        doc = f"    {_signature(callback)}\n\nA `@cfunction` of this type. {callback.doc}"
        out.append(f"\n{_doc(doc)}const {callback.name} = Ptr{{Cvoid}}\n")
    structs = {struct.name: struct for struct in model.structs}
    out += [_struct(struct, structs) for struct in model.structs]
    out += [_function(function) for function in model.functions]
    out.append(_layout(model))
    return "".join(out) + "\nend\n"


def _doc(text: str, indent: str = "") -> str:
    """A docstring that shows the header's own layout: nothing in it is Markdown or interpolated."""
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    if "\n" not in text:
        return f'{indent}"{text}"\n'
    lines = "\n".join((indent + line).rstrip() for line in text.split("\n"))
    return f'{indent}"""\n{lines}\n{indent}"""\n'


def _verbatim(text: str) -> str:
    """Several lines of the header as a Markdown code block, one line as it is."""
    return f"```text\n{text}\n```" if "\n" in text else text


def _type(ctype: CType) -> str:
    text, depth = SCALARS.get(ctype.base, ctype.base), len(ctype.pointee_const)
    if ctype.base == "char":  # by pointer only
        text, depth = "Cstring", depth - 1
    for _ in range(depth):
        text = f"Ptr{{{text}}}"
    return f"NTuple{{{ctype.length},{text}}}" if ctype.length else text


def _enum(enum: Enum) -> str:
    kind = "UInt32" if enum.is_flags else "Int32"
    lines = ["", f"# enum {enum.name}"]
    lines += [f"# {line}".rstrip() for line in enum.doc.split("\n") if line]
    for member in enum.members:
        declaration = f"const {member.name} = {kind}({member.value})"
        lines.append((_doc(member.doc) if member.doc else "") + declaration)
    return "\n".join(lines) + "\n"


def _names(model: Model) -> str:
    lines = ["", "# The names of each enumeration, without its prefix."]
    for enum in model.enums:
        pairs = ", ".join(f"{m.short} = {m.name}" for m in enum.members)
        lines += _wrap(f"const {enum.name} = ({pairs},)")
    return "\n".join(lines) + "\n"


def _wrap(text: str) -> List[str]:
    lines, line = [], ""
    for word in text.split(" "):
        if line and len(line) + len(word) > 95:
            lines.append(line)
            line = "   "
        line = f"{line} {word}" if line else word
    return lines + [line]


def _zero(field: Field, struct: Struct, structs: "dict[str, Struct]") -> str:
    ctype = field.type
    if field.name == "struct_size":
        return str(struct.size)
    if ctype.length:
        return "(" + ", ".join(["0"] * ctype.length) + ",)"
    if ctype.is_pointer:
        return "Cstring(C_NULL)" if _type(ctype) == "Cstring" else "C_NULL"
    return f"{ctype.base}()" if ctype.base in structs else "0"


def _struct(struct: Struct, structs: "dict[str, Struct]") -> str:
    out = ["\n", _doc(f"    {struct.name}(; fields...)\n\n{_verbatim(struct.doc)}".rstrip()),
           f"Base.@kwdef struct {struct.name}\n"]
    for field in struct.fields:
        if field.doc:
            out.append(_doc(field.doc, "    "))
        out.append(f"    {field.name}::{_type(field.type)} = {_zero(field, struct, structs)}\n")
    return "".join(out) + "end\n"


def _signature(function: Function) -> str:
    inside = ", ".join(f"{p.name}::{_type(p.type)}" for p in function.parameters)
    return f"{function.name}({inside})::{_type(function.result)}"


def _function(function: Function) -> str:
    names = ", ".join(p.name for p in function.parameters)
    typed = [f"{p.name}::{_type(p.type)}" for p in function.parameters]
    call, line = [], f"    @ccall lib.{function.name}("
    for index, item in enumerate(typed):
        piece = item + (", " if index + 1 < len(typed) else "")
        if len(line) + len(piece) > 94:
            call.append(line.rstrip())
            line = "        "
        line += piece
    call.append(f"{line})::{_type(function.result)}")
    doc = f"    {_signature(function)}\n\n{_verbatim(function.doc)}"
    return "\n" + _doc(doc) + f"function {function.name}({names})\n" + "\n".join(call) + "\nend\n"


def _layout(model: Model) -> str:
    lines = ["", "# Structure, bytes, (field, offset, bytes)...", "const LAYOUT = ("]
    for struct in model.structs:
        lines.append(f"    ({struct.name}, {struct.size}, (")
        lines += [f"        (:{f.name}, {f.offset}, {f.size})," for f in struct.fields]
        lines.append("    )),")
    return "\n".join(lines) + "\n)\n"
