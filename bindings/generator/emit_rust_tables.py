"""The tables of flashattn-sys that the safe layer is made of: arrays, and fields of the descriptor.

Two macros hand the header's names to a macro of the caller's, which writes a method for each; the
module `table` says how the arrays of a call are checked and where they go. A new array or field of
the header needs no line of Rust, unless it stands in COMPOSED.
"""
from __future__ import annotations

import json
from typing import List

from . import arrays
from .model import Field, Model

# Fields of the descriptor that methods of the safe layer set together with others.
COMPOSED = frozenset("""
    struct_size device device_index ops dtype heads_q dim_qk layout page_size mask window_left
    window_right chunk block_q block_kv tree bias dtype_bias features determinism
""".split())
NAMED_TYPES = ("i32", "u32", "u64", "f32", "u8")

HEAD = """\

/// The arrays of [`flashattn_args`] as tables, for layers above.
#[rustfmt::skip]
pub mod table {
    use super::{flashattn_args, flashattn_desc, flashattn_tensor};
    use core::ffi::c_void;

    /// The sizes that shapes are made of.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    #[allow(missing_docs)]
    pub struct Sizes {
%(fields)s
    }

    impl Sizes {
        /// Of a plan's resolved descriptor and a call. What is negative counts as 0.
        pub fn new(desc: &flashattn_desc, args: &flashattn_args) -> Self {
            let size = |n: i64| if n < 0 { 0 } else { n as usize };
            Self {
%(values)s
            }
        }
    }

    /// One size of a shape.
    pub type Dim = fn(&Sizes) -> usize;

    /// An array of a call that is not (batch, seq, head, dim).
    #[derive(Clone, Copy, Debug)]
    pub struct Array {
        /// The field's name.
        pub name: &'static str,
        /// Its element type, where the descriptor says it.
        pub dtype: Option<fn(&flashattn_desc) -> i32>,
        /// Its shape, the last index fastest.
        pub dims: &'static [Dim],
        /// Its shape with VARLEN_Q; empty: the same.
        pub varlen: &'static [Dim],
        /// Which of stride_batch, stride_head, stride_seq steps over each index but the last.
        pub strides: &'static [usize],
        /// Whether the field is a tensor. If not, the array is packed.
        pub tensor: bool,
        /// Writes the field; strides in the order of [`flashattn_tensor`].
        pub set: fn(&mut flashattn_args, *mut c_void, [i64; 3]),
    }

    fn ceil(size: usize, by: usize) -> usize {
        // A block size of 0 is one block.
        if by == 0 { usize::from(size > 0) } else { size.div_ceil(by) }
    }

    fn tensor(data: *mut c_void, strides: [i64; 3]) -> flashattn_tensor {
        let [stride_batch, stride_head, stride_seq] = strides;
        flashattn_tensor { data, stride_batch, stride_head, stride_seq }
    }

    /// The arrays, in the order of the header.
    pub const ARRAYS: &[Array] = &[
"""


def emit(model: Model) -> str:
    struct, known = arrays.arguments(model)
    others = [array for array in known if not array.is_rows]
    in_args = {field.name for field in struct.fields}
    wide = {field.name for field in struct.fields if field.type.base == "int64_t"}
    names = arrays.sizes(known)
    fields = [f"        pub {name}: usize," for name in names]
    values = [f"                {name}: size({'args' if name in in_args else 'desc'}.{name}"
              f"{'' if name in wide else ' as i64'})," for name in names]
    out = [HEAD % {"fields": "\n".join(fields), "values": "\n".join(values)}]
    out += [_array(array) for array in others]
    out.append("    ];\n}\n")
    out.append(_arrays_macro(others))
    out.append(_desc_macro(model))
    return "".join(out)


def _dim(dim: arrays.Dim) -> str:
    size = dim.size if dim.size.isdigit() else f"s.{dim.size}"
    if dim.by:
        return f"|s| ceil({size}, {dim.by if dim.by.isdigit() else f's.{dim.by}'})"
    text = f"{size}.saturating_add({dim.more})" if dim.more else size
    return f"|{'_' if size == text and dim.size.isdigit() else 's'}| {text}"


def _array(array: arrays.Array) -> str:
    order = [str(arrays.STRIDES.index(dim.stride)) for dim in array.dims[:-1]]
    dtype = "None" if array.type in NAMED_TYPES else f"Some(|d| d.{array.type})"
    value = "|a, p, s| a.%s = tensor(p, s)" if array.tensor else "|a, p, _| a.%s = p.cast()"
    lists = {"dims": map(_dim, array.dims), "varlen": map(_dim, array.varlen), "strides": order}
    text = [f"            {key}: &[{', '.join(items)}],\n" for key, items in lists.items()]
    return (f'        Array {{\n            name: "{array.name}",\n            dtype: {dtype},\n'
            f"{''.join(text)}            tensor: {str(array.tensor).lower()},\n"
            f"            set: {value % array.name},\n        }},\n")


def _text(doc: str) -> str:
    """A comment of the header as a string of Rust, in Markdown."""
    from .emit_rust import _markdown
    return json.dumps("\n".join(map(_markdown, doc.split("\n"))), ensure_ascii=False)


def _arrays_macro(known: List[arrays.Array]) -> str:
    lines = ["", "/// Hands the arrays of a role (input, output, upstream, gradient) to a macro, "
             "an entry each:", "/// `{ index in table::ARRAYS, name, element type, comment }`. The "
             "type is `any` where the descriptor", "/// says it.", "#[macro_export]",
             "#[rustfmt::skip]", "macro_rules! arrays {"]
    for role in dict.fromkeys(array.role for array in known):
        lines += [f"    ({role} => $then:ident) => {{", "        $then! {"]
        lines += [f"            {{ {i}, {a.name}, {a.type if a.type in NAMED_TYPES else 'any'}, "
                  f"{_text(a.doc)} }}"
                  for i, a in enumerate(known) if a.role == role]
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
