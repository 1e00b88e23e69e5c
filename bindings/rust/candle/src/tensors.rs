//! Tensors as the arrays of the crate flashattn.

use candle_core::{bail, CpuStorage, DType, Error, Layout, Result, Tensor, WithDType};
use flashattn::{Element, Reason, Strides, View};

pub(crate) type Slice<'a> = (&'a CpuStorage, &'a Layout);

/// A type that both libraries know.
pub(crate) trait Native: Element + WithDType {}

impl<T: Element + WithDType> Native for T {}

/// Calls a function with the type that a dtype or a storage is of.
macro_rules! with_native {
    ($kind:path, $value:expr, $call:ident, $($argument:expr),*) => {{
        use $kind as Kind;
        match $value {
            Kind::F32 { .. } => $call::<f32>($($argument),*),
            Kind::F16 { .. } => $call::<flashattn::half::f16>($($argument),*),
            Kind::BF16 { .. } => $call::<flashattn::half::bf16>($($argument),*),
            _ => candle_core::bail!("flash-attn: the tensors must be f32, f16 or bf16"),
        }
    }};
}
pub(crate) use with_native;

/// A refusal of the library, with the remedy that a user of tensors has.
pub(crate) fn refused(mut error: flashattn::Error) -> Error {
    if error.reason == Reason::HEAD_RATIO {
        error.message +=
            "; heads come before dim: give transpose(1, 2) of tensors that are (batch, \
                           heads, seq, dim)";
    }
    Error::wrap(error)
}

/// The tensor, or a copy where the elements of a head are not contiguous.
pub(crate) fn readable(tensor: &Tensor) -> Result<Tensor> {
    match tensor.stride().last() {
        Some(1) => Ok(tensor.clone()),
        _ => tensor.force_contiguous(),
    }
}

/// (batch, seq, heads, dim), pages, or (tokens, heads, dim).
pub(crate) fn view<'a, T: Native>((storage, layout): Slice<'a>) -> Result<View<'a, T>> {
    let data = &storage.as_slice::<T>()?[layout.start_offset()..];
    match (layout.dims(), layout.stride()) {
        (&[batch, seq, heads, dim], &[batch_stride, seq_stride, head, 1]) => {
            let strides = Strides { batch: batch_stride, head, seq: seq_stride };
            View::strided(data, [batch, seq, heads, dim], strides)
        }
        (&[tokens, heads, dim], &[seq, head, 1]) => {
            View::strided(data, [tokens, heads, dim], Strides { batch: 0, head, seq })
        }
        _ => bail!("flash-attn: the elements of a head must be contiguous: {layout:?}"),
    }
    .map_err(refused)
}

/// A number for each head, and for each sequence where `rank` is 2.
pub(crate) fn floats(name: &str, tensor: &Tensor, rank: usize) -> Result<Vec<f32>> {
    let fits = (1..=rank).contains(&tensor.rank()) && tensor.elem_count() > 0;
    if !fits || !tensor.dtype().is_float() {
        bail!(
            "flash-attn: {name} holds {:?} of shape {:?}; give floats of shape (heads){}",
            tensor.dtype(),
            tensor.dims(),
            if rank == 2 { " or (batch, heads)" } else { "" }
        )
    }
    tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

/// Lengths or page numbers.
pub(crate) fn integers(name: &str, tensor: &Tensor, shape: &[&str]) -> Result<Vec<i32>> {
    if tensor.rank() != shape.len() || !tensor.dtype().is_int() {
        bail!(
            "flash-attn: {name} holds {:?} of shape {:?}; give integers of shape ({})",
            tensor.dtype(),
            tensor.dims(),
            shape.join(", ")
        )
    }
    let numbers = tensor.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
    let narrow = |n: i64| match i32::try_from(n) {
        Ok(n) => Ok(n),
        Err(_) => bail!("flash-attn: {name} holds {n}, which is no number of 32 bits; correct it"),
    };
    numbers.into_iter().map(narrow).collect()
}
