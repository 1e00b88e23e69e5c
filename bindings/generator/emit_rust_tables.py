"""The tables of flashattn-sys that the safe layer is made of: arrays, and fields of the descriptor.

Two macros hand the header's names to a macro of the caller's, which writes a method for each; the
module `table` says how the arrays of a structure of arguments are checked and where they go. A new
array or field of the header needs no line of Rust, unless it is (batch, seq, head, dim) or stands
in one of the lists here.
"""
from __future__ import annotations

import json
from typing import Dict, List, Tuple

from . import arrays
from .model import Field, Model

# Fields of the descriptor, and arrays, that methods of the safe layer set together with others.
COMPOSED = frozenset("""
    struct_size device device_index ops dtype heads_q dim_qk layout page_size mask window_left
    window_right chunk block_q block_kv tree bias dtype_bias features determinism
""".split())
COMPOSED_ARRAYS = frozenset(("rotary_cos", "rotary_sin"))
NAMED_TYPES = ("i32", "u32", "u64", "f32", "u8")

HEAD = """\

/// The arrays of the structures of arguments as tables, for layers above.
#[rustfmt::skip]
pub mod table {
    use super::*;
    use core::ffi::c_void;

    /// The sizes that shapes are made of.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    #[allow(missing_docs)]
    pub struct Sizes {
%(fields)s
    }

    /// One size of a shape.
    pub type Dim = fn(&Sizes) -> usize;

    /// A structure of arguments.
    pub trait Arguments: Sized + 'static {
        /// Its arrays that are not (batch, seq, head, dim), in the order of the header.
        const ARRAYS: &'static [Array<Self>];

        /// The sizes of a plan's resolved descriptor and a call. What is negative counts as 0, as
        /// do those that the structure has no use for.
        fn sizes(&self, desc: &flashattn_desc) -> Sizes;
    }

    /// The most arrays that a structure has.
    pub const MOST: usize = %(most)d;

    /// An array of a call that is not (batch, seq, head, dim).
    #[derive(Debug)]
    pub struct Array<A: 'static> {
        /// The field's name.
        pub name: &'static str,
        /// Its element type, where the descriptor says it.
        pub dtype: Option<fn(&flashattn_desc) -> i32>,
        /// Its shape, the last index fastest.
        pub dims: &'static [Dim],
        /// Which of stride_batch, stride_head, stride_seq steps over each index but the last.
        pub strides: &'static [usize],
        /// Its shape and strides in other layouts, by their bit of [`flashattn_layout`].
        pub layouts: &'static [(u32, &'static [Dim], &'static [usize])],
        /// Whether the field is a tensor. If not, the array is packed.
        pub tensor: bool,
        /// Writes the field; strides in the order of [`flashattn_tensor`].
        pub set: fn(&mut A, *mut c_void, [i64; 3]),
    }

    fn size(n: i64) -> usize {
        if n < 0 { 0 } else { n as usize }
    }

    fn ceil(size: usize, by: usize) -> usize {
        // A block size of 0 is one block.
        if by == 0 { usize::from(size > 0) } else { size.div_ceil(by) }
    }

    fn tensor(data: *mut c_void, strides: [i64; 3]) -> flashattn_tensor {
        let [stride_batch, stride_head, stride_seq] = strides;
        flashattn_tensor { data, stride_batch, stride_head, stride_seq }
    }
"""
STRUCT = """\

    impl Arguments for %(name)s {
        fn sizes(&self, desc: &flashattn_desc) -> Sizes {
            Sizes {
%(values)s
            }
        }

        const ARRAYS: &'static [Array<Self>] = &[
"""


def emit(model: Model) -> str:
    known = arrays.arguments(model)
    names = arrays.sizes(tuple(array for args in known for array in args.arrays))
    others = {args.struct.name: [array for array in args.arrays
                                 if not array.is_rows and not array.parts] for args in known}
    out = [HEAD % {"fields": "\n".join(f"        pub {name}: usize," for name in names),
                   "most": max(map(len, others.values()))}]
    desc = next(s for s in model.structs if s.name == "flashattn_desc")
    for args in known:
        values = []
        for name in names:
            owner, struct = ("self", args.struct) if any(
                field.name == name for field in args.struct.fields) else ("desc", desc)
            wide = [field.type.base == "int64_t" for field in struct.fields if field.name == name]
            values += [f"                {name}: size({owner}.{name}{'' if n else ' as i64'}),"
                       for n in wide]
        if len(values) < len(names):
            values.append("                ..Sizes::default()")
        out.append(STRUCT % {"name": args.struct.name, "values": "\n".join(values)})
        out += [_array(array) for array in others[args.struct.name]]
        out.append("        ];\n    }\n")
    out += ["}\n", _arrays_macro(others), _desc_macro(model)]
    return "".join(out)


def _dim(dim: arrays.Dim) -> str:
    size = dim.size if dim.size.isdigit() else f"s.{dim.size}"
    if dim.by:
        return f"|s| ceil({size}, {dim.by if dim.by.isdigit() else f's.{dim.by}'})"
    text = f"{size}.saturating_add({dim.more})" if dim.more else size
    return f"|{'_' if size == text and dim.size.isdigit() else 's'}| {text}"


def _dims(dims: Tuple[arrays.Dim, ...]) -> str:
    return f"&[{', '.join(map(_dim, dims))}]"


def _order(dims: Tuple[arrays.Dim, ...]) -> str:
    return f"&[{', '.join(str(arrays.STRIDES.index(dim.stride)) for dim in dims[:-1])}]"


def _array(array: arrays.Array) -> str:
    dtype = "None" if array.of_args or array.type in NAMED_TYPES else f"Some(|d| d.{array.type})"
    value = "|a, p, s| a.%s = tensor(p, s)" if array.tensor else "|a, p, _| a.%s = p.cast()"
    layouts = "".join(
        f"\n                    (flashattn_layout::{name}.0, {_dims(dims)}, {_order(dims)}),"
        for name, dims in array.layouts)
    return (f'            Array {{\n                name: "{array.name}",\n'
            f"                dtype: {dtype},\n"
            f"                dims: {_dims(array.dims)},\n"
            f"                strides: {_order(array.dims)},\n"
            f"                layouts: &[{layouts}{layouts and chr(10) + ' ' * 16}],\n"
            f"                tensor: {str(array.tensor).lower()},\n"
            f"                set: {value % array.name},\n            }},\n")


def _text(doc: str) -> str:
    """A comment of the header as a string of Rust, in Markdown."""
    from .emit_rust import _markdown
    return json.dumps("\n".join(map(_markdown, doc.split("\n"))), ensure_ascii=False)


def _arrays_macro(known: Dict[str, List[arrays.Array]]) -> str:
    lines = ["", "/// Hands the arrays of a structure and a role (input, output, upstream, "
             "gradient) to a macro, an",
             "/// entry each: `{ index in table::Arguments::ARRAYS, name, element type, comment }`."
             " The type is `any`", "/// where another field says it.",
             "#[macro_export]", "#[rustfmt::skip]", "macro_rules! arrays {"]
    for struct, found in known.items():
        for role in dict.fromkeys(array.role for array in found):
            lines += [f"    ({struct}, {role} => $then:ident) => {{", "        $then! {"]
            lines += [f"            {{ {i}, {a.name}, "
                      f"{a.type if a.type in NAMED_TYPES else 'any'}, {_text(a.doc)} }}"
                      for i, a in enumerate(found)
                      if a.role == role and a.name not in COMPOSED_ARRAYS]
            lines += ["        }", "    };"]
    return "\n".join([*lines, "}"]) + "\n"


def _kind(field: Field) -> str:
    if field.name.startswith("dtype"):
        return "dtype"
    return {"float": "float", "int32_t": "int", "int64_t": "long"}[field.type.base]


def _desc_macro(model: Model) -> str:
    desc = next(s for s in model.structs if s.name == "flashattn_desc")
    lines = ["", "/// Hands the fields of [`flashattn_desc`] that stand for themselves to a "
             "macro, an entry each:", "/// `{ name, kind, comment }`, where the kind is dtype, "
             "int, long or float.", "#[macro_export]", "#[rustfmt::skip]",
             "macro_rules! desc_fields {",
             "    ($then:ident) => {", "        $then! {"]
    doc = ""
    for field in desc.fields:
        doc = field.doc or doc  # one comment may stand for several fields
        if field.name not in COMPOSED:
            lines.append(f"            {{ {field.name}, {_kind(field)}, {_text(doc)} }}")
    return "\n".join([*lines, "        }", "    };", "}"]) + "\n"
