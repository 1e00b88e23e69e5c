"""bindings/rust/flashattn-sys/src/lib.rs: the C declarations in Rust, and tests of their layout."""
from __future__ import annotations

import re
from typing import List

from .model import CType, Enum, Function, Model, Struct

HEAD = """\
// Written by bindings/generate.py from include/flashattn.h. Do not edit.
//! Raw declarations of libflashattn, exact attention behind a C ABI, as they stand in its header.
//!
//! Names are those of the header; its text is the documentation. The crate `flashattn` is the safe
//! layer above. Enumerations are transparent newtypes, so that a number from a newer library is no
//! undefined behaviour; fields and parameters that hold one are plain integers, as in C.
//!
//! ```no_run
//! let mut desc = flashattn_sys::flashattn_desc::default(); // all zero but struct_size
//! desc.dtype = flashattn_sys::flashattn_dtype::F32.0;
//! desc.heads_q = 8;
//! desc.dim_qk = 64;
//! let status = flashattn_sys::flashattn_status(unsafe { flashattn_sys::flashattn_check(&desc) });
//! assert_eq!(status, flashattn_sys::flashattn_status::OK);
//! ```
//!
//! # Conventions
%s
#![no_std]
#![allow(non_camel_case_types)]

use core::ffi::{c_char, c_void};
use core::fmt;
use core::marker::{PhantomData, PhantomPinned};

#[cfg(not(target_pointer_width = "64"))]
compile_error!("libflashattn supports 64-bit platforms only");

"""

SCALARS = {"int32_t": "i32", "uint32_t": "u32", "int64_t": "i64", "uint64_t": "u64",
           "uint8_t": "u8", "float": "f32", "double": "f64", "void": "c_void", "char": "c_char"}


def emit(model: Model) -> str:
    major, minor, patch = model.version
    conventions = [line.replace("///", "//!", 1) for line in _doc(model.conventions)]
    out = [HEAD.replace("%s", "\n".join(conventions)), "/// The version of the header that these declarations were written from: 10000 * "
           "major + 100 *\n/// minor + patch.\n"
           f"pub const HEADER_VERSION: i32 = {10000 * major + 100 * minor + patch};\n"]
    out += [_enum(enum) for enum in model.enums]
    out += [_struct(struct) for struct in model.structs]
    out += [_opaque(name) for name in model.opaque]
    out += [_callback(callback) for callback in model.callbacks]
    out.append('\nextern "C" {\n' + "\n".join(_function(f) for f in model.functions) + "}\n")
    out.append(_tests(model))
    return "".join(out)


def _doc(text: str, indent: str = "") -> List[str]:
    """The header's comment as Markdown. What is laid out with spaces stays as it is."""
    lines: List[str] = []
    fenced = False
    for line in text.split("\n") if text else []:
        laid_out = line.startswith("  ")
        if laid_out != fenced and (laid_out or line):
            lines += ["", "```text"] if laid_out else ["```", ""]
            fenced = laid_out
        lines.append(line if fenced else _markdown(line))
    if fenced:
        lines.append("```")
    return [f"{indent}/// {line}".rstrip() for line in lines]


def _markdown(line: str) -> str:
    line = re.sub(r"[\[\]]|<(?=[A-Za-z/!])|(?<! )\*|\*(?! )", r"\\\g<0>", line)
    return re.sub(r"^(?=[-+#>])", r"\\", line)


def _type(ctype: CType) -> str:
    text = SCALARS.get(ctype.base, ctype.base)
    for const in ctype.pointee_const:
        text = f"*{'const' if const else 'mut'} {text}"
    return f"[{text}; {ctype.length}]" if ctype.length else text


def _enum(enum: Enum) -> str:
    integer = "u32" if enum.is_flags else "i32"
    doc = _doc(enum.doc or f"`enum {enum.name}` of the header.")
    lines = ["", *doc, "#[repr(transparent)]",
             "#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]",
             f"pub struct {enum.name}(pub {integer});", "", f"impl {enum.name} {{"]
    for member in enum.members:
        doc = _doc(member.doc, "    ") or [f"    /// `{member.name}`"]
        lines += [*doc, f"    pub const {member.short}: Self = Self({member.value});"]
    lines += ["", "    /// The names of all values known here, each with its number.",
              "    #[rustfmt::skip]",
              f"    pub const NAMES: &'static [(&'static str, {integer})] = &["]
    lines += [f'        ("{member.short}", {member.value}),' for member in enum.members]
    lines += ["    ];"]
    if enum.is_flags:
        lines += ["", "    /// Whether all bits of `other` are set.",
                  "    pub const fn contains(self, other: Self) -> bool {",
                  "        self.0 & other.0 == other.0", "    }"]
    lines += ["}", "", f"impl fmt::Debug for {enum.name} {{",
              "    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {",
              f"        {'write_flags' if enum.is_flags else 'write_name'}"
              "(f, self.0, Self::NAMES)", "    }", "}"]
    if enum.is_flags:
        for trait, method, operator in (("BitOr", "bitor", "|"), ("BitAnd", "bitand", "&")):
            lines += ["", f"impl core::ops::{trait} for {enum.name} {{", "    type Output = Self;",
                      f"    fn {method}(self, other: Self) -> Self {{",
                      f"        Self(self.0 {operator} other.0)", "    }", "}"]
        lines += ["", f"impl core::ops::BitOrAssign for {enum.name} {{",
                  "    fn bitor_assign(&mut self, other: Self) {", "        self.0 |= other.0;",
                  "    }", "}"]
    return "\n".join(lines) + "\n"


def _struct(struct: Struct) -> str:
    doc = _doc(struct.doc) or [f"/// `{struct.name}` of the header."]
    lines = ["", *doc, "#[repr(C)]", "#[derive(Clone, Copy, Debug)]",
             f"pub struct {struct.name} {{"]
    for field in struct.fields:
        lines += [*(_doc(field.doc, "    ") or [f"    /// `{field.name}`"]),
                  f"    pub {field.name}: {_type(field.type)},"]
    grows = struct.fields[0].name == "struct_size"
    lines += ["}", "", f"impl Default for {struct.name} {{",
              f"    /// All zero{', with `struct_size` set' if grows else ''}.",
              "    fn default() -> Self {",
              "        // SAFETY: integers, floats and pointers, for which zero bytes are a value.",
              f"        let {'mut ' if grows else ''}zeroed: Self = "
              "unsafe { core::mem::zeroed() };"]
    if grows:
        lines.append("        zeroed.struct_size = core::mem::size_of::<Self>() as u32;")
    return "\n".join([*lines, "        zeroed", "    }", "}"]) + "\n"


def _opaque(name: str) -> str:
    return ("\n/// A handle, known by its address only.\n#[repr(C)]\n"
            f"pub struct {name} {{\n    _data: [u8; 0],\n"
            "    _marker: PhantomData<(*mut u8, PhantomPinned)>,\n}\n")


def _parameters(function: Function, indent: str) -> str:
    return "".join(f"{indent}{p.name}: {_type(p.type)},\n" for p in function.parameters)


def _result(function: Function) -> str:
    return "" if function.result == CType("void") else f" -> {_type(function.result)}"


def _callback(callback: Function) -> str:
    parameters = ", ".join(f"{p.name}: {_type(p.type)}" for p in callback.parameters)
    text = (f"pub type {callback.name} =\n"
            f"    Option<unsafe extern \"C\" fn({parameters}){_result(callback)}>;")
    return "\n".join(["", *_doc(callback.doc), text]) + "\n"


def _function(function: Function) -> str:
    doc = [*_doc(function.doc, "    "), "    ///", "    /// # Safety", "    ///",
           "    /// Pointers must be what the text above and the conventions of this crate say."]
    if not any(p.type.is_pointer or p.type.base not in SCALARS for p in function.parameters):
        doc = _doc(function.doc, "    ")
    parameters = ", ".join(f"{p.name}: {_type(p.type)}" for p in function.parameters)
    text = f"    pub fn {function.name}({parameters}){_result(function)};"
    if len(text) > 100:
        text = (f"    pub fn {function.name}(\n{_parameters(function, ' ' * 8)}    )"
                f"{_result(function)};")
    return "\n".join([*doc, text]) + "\n"


def _tests(model: Model) -> str:
    lines = ["", "fn write_name(f: &mut fmt::Formatter<'_>, value: i32, "
             "names: &[(&str, i32)]) -> fmt::Result {",
             "    match names.iter().find(|entry| entry.1 == value) {",
             "        Some((name, _)) => f.write_str(name),",
             "        None => write!(f, \"{value}\"),", "    }", "}", "",
             "fn write_flags(f: &mut fmt::Formatter<'_>, value: u32, "
             "names: &[(&str, u32)]) -> fmt::Result {",
             "    let mut rest = value;",
             "    for (name, bit) in names.iter().filter(|entry| value & entry.1 != 0) {",
             "        f.write_str(if rest == value { \"\" } else { \" | \" })?;",
             "        f.write_str(name)?;", "        rest &= !bit;", "    }",
             "    match (rest, rest == value) {", "        (0, false) => Ok(()),",
             "        (_, true) => write!(f, \"{rest:#x}\"),",
             "        (_, false) => write!(f, \" | {rest:#x}\"),", "    }", "}", "",
             "#[cfg(test)]", "mod tests {", "    use super::*;",
             "    use core::mem::{align_of, offset_of, size_of};"]
    for struct in model.structs:
        short = struct.name[len("flashattn_"):]
        lines += ["", "    #[test]", f"    fn layout_of_{short}() {{",
                  f"        assert_eq!(size_of::<{struct.name}>(), {struct.size});",
                  f"        assert_eq!(align_of::<{struct.name}>(), {struct.alignment});"]
        for field in struct.fields:
            name = field.name
            one = f"        assert_eq!(offset_of!({struct.name}, {name}), {field.offset});"
            if len(one) > 100:
                one = (f"        assert_eq!(\n            offset_of!({struct.name}, {name}),\n"
                       f"            {field.offset}\n        );")
            lines.append(one)
        lines.append("    }")
    for enum in model.enums:
        integer = "u32" if enum.is_flags else "i32"
        lines += ["", "    #[test]", f"    fn layout_of_{enum.name[len('flashattn_'):]}() {{",
                  f"        assert_eq!(size_of::<{enum.name}>(), size_of::<{integer}>());",
                  f"        assert_eq!({enum.name}::NAMES.len(), {len(enum.members)});", "    }"]
    lines += ["", "    #[test]", "    fn library_has_the_version_of_the_header() {",
              "        // SAFETY: takes nothing.",
              "        let library = unsafe { flashattn_version() };",
              "        assert_eq!(library / 10000, HEADER_VERSION / 10000);",
              "        assert!(library >= HEADER_VERSION);", "    }", "}"]
    return "\n".join(lines) + "\n"
