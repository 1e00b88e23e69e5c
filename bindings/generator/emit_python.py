"""bindings/python/flashattn/_native.py (cffi, ABI mode) and _constants.py (enums, layout, docs)."""
from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
import textwrap
from typing import List

from .model import Enum, Function, Model

CFFI = "2.0.0"  # the recompiler's bytes are those of this release

HEAD = '''\
# Written by bindings/generate.py from include/flashattn.h. Do not edit.
"""Names and numbers of the C header: enumerations, structure layout, documentation of functions."""
from enum import IntEnum, IntFlag
from typing import Dict, Tuple

'''


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
