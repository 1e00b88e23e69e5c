//! Tensors as the arrays of the crate flashattn.

use candle_core::{bail, CpuStorage, DType, Device, Error, Layout, Result, Tensor, WithDType};
use flashattn::{Array, Dims, Element, Reason, Strides, View};

pub(crate) type Slice<'a> = (&'a CpuStorage, &'a Layout);

/// What candle asks of a type whose tensors lie on a GPU.
#[cfg(feature = "cuda")]
pub(crate) use crate::cuda::OnGpu;
#[cfg(not(feature = "cuda"))]
pub(crate) trait OnGpu {}
#[cfg(not(feature = "cuda"))]
impl<T> OnGpu for T {}

/// A type that both libraries know.
pub(crate) trait Native: Element + WithDType + OnGpu {}

impl<T: Element + WithDType + OnGpu> Native for T {}

/// The arrays beside q, k and v, those of floats as F and those of integers as I: tensors, their
/// memory, or the library's arrays.
pub(crate) struct Beside<F, I = F> {
    pub alibi_slopes: Option<F>, // (batch or 1, heads)
    pub sink: Option<F>,         // (heads)
    pub cu_seqlens_q: Option<I>,
    pub cu_seqlens_kv: Option<I>,
    pub lens_kv: Option<I>,
    pub page_table: Option<I>, // (batch, pages of a sequence)
}

impl<F, I> Beside<F, I> {
    pub(crate) const NONE: Self = Self {
        alibi_slopes: None,
        sink: None,
        cu_seqlens_q: None,
        cu_seqlens_kv: None,
        lens_kv: None,
        page_table: None,
    };

    pub(crate) fn map<'a, G, J>(
        &'a self,
        float: impl Fn(&'a F) -> Result<G>,
        integer: impl Fn(&'a I) -> Result<J>,
    ) -> Result<Beside<G, J>> {
        Ok(Beside {
            alibi_slopes: self.alibi_slopes.as_ref().map(&float).transpose()?,
            sink: self.sink.as_ref().map(&float).transpose()?,
            cu_seqlens_q: self.cu_seqlens_q.as_ref().map(&integer).transpose()?,
            cu_seqlens_kv: self.cu_seqlens_kv.as_ref().map(&integer).transpose()?,
            lens_kv: self.lens_kv.as_ref().map(&integer).transpose()?,
            page_table: self.page_table.as_ref().map(&integer).transpose()?,
        })
    }
}

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

/// Sizes and strides of (batch, seq, heads, dim), pages, or (tokens, heads, dim).
pub(crate) fn order(layout: &Layout) -> Result<(Dims, Strides)> {
    match (layout.dims(), layout.stride()) {
        (&[batch, seq, heads, dim], &[batch_stride, seq_stride, head, 1]) => {
            let strides = Strides { batch: batch_stride, head, seq: seq_stride };
            Ok(([batch, seq, heads, dim].into(), strides))
        }
        (&[tokens, heads, dim], &[seq, head, 1]) => {
            Ok(([tokens, heads, dim].into(), Strides { batch: 0, head, seq }))
        }
        _ => bail!("flash-attn: the elements of a head must be contiguous: {layout:?}"),
    }
}

/// q, k, v, o or the gradient of o, in host memory.
pub(crate) fn view<'a, T: Native>((storage, layout): Slice<'a>) -> Result<View<'a, T>> {
    let (dims, strides) = order(layout)?;
    let data = &storage.as_slice::<T>()?[layout.start_offset()..];
    View::strided(data, dims, strides).map_err(refused)
}

/// The elements of a contiguous layout.
pub(crate) fn range(layout: &Layout) -> Result<std::ops::Range<usize>> {
    match layout.contiguous_offsets() {
        Some((begin, end)) => Ok(begin..end),
        None => bail!("flash-attn: the array must be contiguous: {layout:?}"),
    }
}

/// Any other array in host memory.
pub(crate) fn array<'a, T: WithDType>((storage, layout): Slice<'a>) -> Result<Array<'a, T>> {
    Ok(Array::from(&storage.as_slice::<T>()?[range(layout)?]))
}

/// Refuses a tensor that lies elsewhere than q.
fn expect_beside(name: &str, tensor: &Tensor, device: &Device) -> Result<()> {
    if tensor.device().same_device(device) {
        return Ok(());
    }
    bail!(
        "flash-attn: {name} is on {:?} and q on {:?}; move one of them with to_device",
        tensor.device().location(),
        device.location()
    )
}

/// A number for each head, and for each sequence where `rank` is 2.
pub(crate) fn floats(name: &str, tensor: &Tensor, device: &Device, rank: usize) -> Result<Tensor> {
    let fits = (1..=rank).contains(&tensor.rank()) && tensor.elem_count() > 0;
    if !fits || !tensor.dtype().is_float() {
        bail!(
            "flash-attn: {name} holds {:?} of shape {:?}; give floats of shape (heads){}",
            tensor.dtype(),
            tensor.dims(),
            if rank == 2 { " or (batch, heads)" } else { "" }
        )
    }
    expect_beside(name, tensor, device)?;
    tensor.to_dtype(DType::F32)?.contiguous()
}

/// Lengths or page numbers, of 32 bits. On a GPU they are not read, so that numbers past 32 bits are cut
/// off.
pub(crate) fn integers(
    name: &str,
    tensor: &Tensor,
    device: &Device,
    shape: &[&str],
) -> Result<Tensor> {
    if tensor.rank() != shape.len() || !tensor.dtype().is_int() {
        bail!(
            "flash-attn: {name} holds {:?} of shape {:?}; give integers of shape ({})",
            tensor.dtype(),
            tensor.dims(),
            shape.join(", ")
        )
    }
    expect_beside(name, tensor, device)?;
    if !tensor.device().is_cpu() {
        return match tensor.dtype() {
            DType::I32 | DType::U32 => tensor.contiguous(),
            _ => tensor.to_dtype(DType::U32)?.contiguous(),
        };
    }
    let numbers = tensor.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>()?;
    let narrow = |n: i64| match i32::try_from(n) {
        Ok(n) => Ok(n),
        Err(_) => bail!("flash-attn: {name} holds {n}, which is no number of 32 bits; correct it"),
    };
    let numbers: Vec<i32> = numbers.into_iter().map(narrow).collect::<Result<_>>()?;
    Tensor::from_vec(numbers, tensor.shape(), tensor.device())
}

/// The lengths of sequences, from the sums of them.
pub(crate) fn lengths(sums: &Tensor) -> Result<Tensor> {
    let count = sums.dim(0)?.saturating_sub(1);
    #[cfg(feature = "cuda")]
    let sums = &crate::cuda::unsigned(sums)?; // candle subtracts no I32 there
    if sums.device().is_cpu() {
        let sums = sums.to_vec1::<i32>()?;
        let lengths: Vec<i32> = sums.windows(2).map(|w| w[1].saturating_sub(w[0])).collect();
        return Tensor::from_vec(lengths, count, &Device::Cpu);
    }
    sums.narrow(0, 1, count)? - sums.narrow(0, 0, count)?
}
