"""bindings/python/flashattn/_native.py (cffi, ABI mode) and _constants.py (enums, structures as
tuples, the table of arrays, layout, docs)."""
from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import textwrap
from typing import List

from .arrays import Array, Dim, arguments
from .model import Enum, Field, Function, Model, Struct

CFFI = "2.0.0"  # the recompiler's bytes are those of this release

HEAD = '''\
# Written by bindings/generate.py from include/flashattn.h. Do not edit.
"""Names and numbers of the C header: enumerations, structures, arrays, documentation of
functions."""
from enum import IntEnum, IntFlag
from typing import Any, Dict, NamedTuple, Tuple, TypedDict

'''
# Structures that Python shows as tuples: the name, and what stands before the members.
TUPLES = {
    "flashattn_desc": ("Descriptor", ""),
    "flashattn_plan_properties": ("PlanInfo", ""),
    "flashattn_device_properties": ("DeviceInfo", """\
    #: "cpu", "cuda"
    kind: str
    device_index: int
"""),
}
ARRAY = '''

class Dim(NamedTuple):
    """The extent of an index: size + more, or ceil(size / by); size may be a number."""

    size: str
    #: The member of flashattn_tensor that steps over the index; "": it is contiguous.
    stride: str
    more: int = 0
    by: str = ""


class Array(NamedTuple):
    """An array of a structure of arguments, as its comment in the header describes it."""

    #: "input", "output", and of flashattn_args "upstream" (gradients that backward reads) and
    #: "gradient".
    role: str
    #: It has strides; else it is packed.
    tensor: bool
    #: "i32", "f32", ..., or the member of flashattn_desc or of the structure that says it.
    type: str
    #: "required with VARLEN_Q"
    condition: str
    dims: Tuple[Dim, ...]
    #: Layouts with other dims.
    layouts: Dict[str, Tuple[Dim, ...]] = {}
    #: A host array of such arrays.
    parts: bool = False


# By structure and name.
'''
# Arrays that are options of functions: of which structure, by role; and the conditions of those
# that are arguments instead.
OPTIONS = {
    "ArrayOptions": ("flashattn_args", ("input",), (
        "required", "required with VARLEN_Q", "required with VARLEN_KV",
        "required with PAGED_KV")),
    "OutputOptions": ("flashattn_args", ("output",), ("required",)),
    "QuantizeOptions": ("flashattn_quantize_args", ("input",), ()),
    "AppendKvOptions": ("flashattn_append_kv_args", ("input", "output"), ("required",)),
}


def emit_native(model: Model) -> str:
    """The cffi module. It needs no compiler, here or where the package is installed."""
    import cffi

    if cffi.__version__ != CFFI:
        raise SystemExit(f"cffi {cffi.__version__} is installed; the generated files are those of "
                         f"{CFFI}: pip install cffi=={CFFI}")
    ffi = cffi.FFI()
    ffi.cdef(model.cdef)
    ffi.set_source("flashattn._native", None)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "_native.py")
        with contextlib.redirect_stdout(io.StringIO()):  # it says where it writes
            ffi.emit_python_code(path)
        with open(path, encoding="utf-8", newline="") as stream:
            return stream.read()


def emit_constants(model: Model) -> str:
    major, minor, patch = model.version
    out = [HEAD, f"HEADER_VERSION = {10000 * major + 100 * minor + patch}\n"]
    for enum in model.enums:
        out.append(_enum(enum))
    out += [_tuple(struct) for struct in model.structs if struct.name in TUPLES]
    out.append(_arrays(model))
    out.append("\n\n# Structure: (bytes, ((field, offset, bytes), ...)).\n"
               "LAYOUT: Dict[str, Tuple[int, Tuple[Tuple[str, int, int], ...]]] = {\n")
    for struct in model.structs:
        out.append(f"    {_text(struct.name)}: ({struct.size}, (\n")
        out += [f"        ({_text(f.name)}, {f.offset}, {f.size}),\n" for f in struct.fields]
        out.append("    )),\n")
    out.append("}\n\n# Function: its prototype and what the header says of it.\n"
               "FUNCTIONS: Dict[str, str] = {\n")
    for function in model.functions:
        # Broken between parameters only.
        whole = _prototype(function).replace(" ", "\0").replace(",\0", ", ")
        prototype = textwrap.fill(whole, 98, subsequent_indent="    ").replace("\0", " ")
        doc = f"{prototype}\n\n{function.doc}".replace("\\", "\\\\").replace('"""', '\\"""')
        # The closing quotes stand alone: a text may end in a quote.
        out.append(f'    {_text(function.name)}: """\\\n{doc}\n""",\n')
    return "".join(out) + "}\n"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _enum(enum: Enum) -> str:
    words = enum.name[len("flashattn_"):].split("_")
    lines: List[str] = ["", "", f"class {''.join(w.capitalize() for w in words)}"
                        f"({'IntFlag' if enum.is_flags else 'IntEnum'}):"]
    doc = f"{enum.doc or enum.name}".split("\n")
    if len(doc) == 1:
        lines += [f'    """{doc[0]}"""', ""]
    else:
        lines += [f'    """{doc[0]}', *[f"    {line}" for line in doc[1:]], '    """', ""]
    for member in enum.members:
        lines += [f"    #: {line}" for line in member.doc.split("\n") if line]
        lines.append(f"    {member.short} = {member.value}")
    return "\n".join(lines) + "\n"


def _tuple(struct: Struct) -> str:
    name, first = TUPLES[struct.name]
    lines = [f'\n\nclass {name}(NamedTuple):\n    """{struct.name}."""\n\n{first}']
    default = struct.name == "flashattn_desc"
    for field in struct.fields:
        if field.name in ("struct_size", "reserved"):
            continue
        lines += [f"    #: {line}\n" for line in field.doc.split("\n") if line]
        kind = _python_type(field)
        zero = {"int": "0", "float": "0.0"}.get(kind)
        lines.append(f"    {field.name}: {kind}{f' = {zero}' if default else ''}\n")
    return "".join(lines)


def _python_type(field: Field) -> str:
    return "str" if field.type.is_pointer else "float" if field.type.base == "float" else "int"


def _arrays(model: Model) -> str:
    found = {args.struct.name: args.arrays for args in arguments(model)}
    out = [ARRAY, "ARRAYS: Dict[str, Dict[str, Array]] = {\n"]
    for struct, arrays in found.items():
        out += [f"    {_text(struct)}: {{\n", *map(_array, arrays), "    },\n"]
    out.append("}\n")
    for name, (struct, roles, arguments_) in OPTIONS.items():
        out.append(f'\n\nclass {name}(TypedDict, total=False):\n    """Arrays of {struct}."""\n\n')
        for array in found[struct]:
            # Functions make results that are required themselves.
            if array.role in roles and not array.is_rows and array.condition not in arguments_ and \
                    (array.role == "input" or array.condition.startswith("optional")):
                out += [f"    #: {line}\n" for line in array.doc.split("\n")]
                out.append(f"    {array.name}: Any\n")
    return "".join(out)


def _array(array: Array) -> str:
    head = (f"        {_text(array.name)}: Array({_text(array.role)}, {array.tensor}, "
            f"{_text(array.type)}, {_text(array.condition)}, (\n")
    if len(head) > 101:
        head = head.replace(f"{_text(array.condition)}, (\n",
                            f"\n            {_text(array.condition)}, (\n").replace(", \n", ",\n")
    out = [head, *map(_dim, array.dims)]
    if array.layouts:
        out.append("        ), {\n")
        for name, dims in array.layouts:
            out += [f"            {_text(name)}: (\n", *["    " + _dim(dim) for dim in dims],
                    "            ),\n"]
    end = ", parts=True),\n" if array.parts else "),\n"
    return "".join([*out, "        }" if array.layouts else "        )", end])


def _dim(dim: Dim) -> str:
    stride = f"stride_{dim.stride}" if dim.stride else ""
    more = f", {dim.more}" if dim.more else f", by={_text(dim.by)}" if dim.by else ""
    return f"            Dim({_text(dim.size)}, {_text(stride)}{more}),\n"


def _prototype(function: Function) -> str:
    def spell(ctype, name=""):
        consts = ctype.pointee_const
        text = ("const " if consts and consts[0] else "") + ctype.base + (" " if consts else "")
        # Every further pointee is a pointer; its const stands behind its own star.
        stars = "".join("*const " if const else "*" for const in consts[1:]) + ("*" * bool(consts))
        return text + stars + (name if consts else f" {name}" if name else "")

    inside = ", ".join(spell(p.type, p.name) for p in function.parameters) or "void"
    return f"{spell(function.result)}{'' if function.result.is_pointer else ' '}" \
           f"{function.name}({inside})"
