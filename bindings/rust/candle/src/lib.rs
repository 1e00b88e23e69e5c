//! Attention of libflashattn for [candle](https://docs.rs/candle-core) tensors on the CPU, with
//! gradients.
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//!
//! let q = Var::randn(0f32, 1f32, (2, 77, 8, 64), &Device::Cpu)?; // (batch, seq, heads, dim)
//! let kv = Tensor::randn(0f32, 1f32, (2, 77, 2, 64), &Device::Cpu)?;
//! let o = flashattn_candle::flash_attn(&q, &kv, &kv, 0.125, true)?;
//! let gradients = o.sum_all()?.backward()?;
//! assert_eq!(gradients.get(&q).unwrap().dims(), q.dims());
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! Plans are kept for the process and scratch memory for the thread, so that a call in a loop makes
//! neither. What backward needs is written only where a tensor is tracked.
//!
//! The C library is found as the crate `flashattn` finds it.

mod plans;

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};

use candle_core::{
    bail, CpuStorage, CustomOp3, DType, Error, Layout, Result, Shape, Storage, Tensor, WithDType,
};
use flashattn::{
    Element, Gradients, Inputs, Output, Plan, Reason, Scalar, Strides, Upstream, View, ViewMut,
    Workspace,
};

use plans::Key;

thread_local! {
    /// Grows to what the thread's largest call needs, and is kept.
    static WORKSPACE: RefCell<Workspace> = RefCell::new(Workspace::new());
}

/// softmax(scale * q k^T) v in memory linear in the sequence length, with gradients.
///
/// * `q`: (batch, seqlen_q, heads, dim); `k`, `v`: (batch, seqlen_kv, heads_kv, dim), where heads is a
///   multiple of heads_kv. Any strides without a copy, as long as the elements of a head are
///   contiguous; f32, f16 or bf16, on the CPU.
/// * `scale`: factor of the scores, 1 / sqrt(dim) as a rule, not 0.
/// * `causal`: hides keys after the query, both sequences aligned at their ends.
///
/// Returns o: (batch, seqlen_q, heads, dim_v), contiguous.
///
/// # Errors
///
/// What libflashattn refuses, as [`Error::Wrapped`] of a [`flashattn::Error`]; a scale of 0; tensors of
/// different types, of another type or rank, or on a GPU.
pub fn flash_attn(q: &Tensor, k: &Tensor, v: &Tensor, scale: f32, causal: bool) -> Result<Tensor> {
    if scale == 0.0 {
        // To the library, 0 is the default.
        bail!("flash-attn: scale = 0 would make every weight equal; give 1 / sqrt(dim), as a rule")
    }
    for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
        check(name, tensor, q.dtype())?;
    }
    let backward = [q, k, v].into_iter().any(Tensor::track_op);
    let op = FlashAttention { scale, causal, backward, lse: OnceLock::new() };
    let (q, k, v) = (readable(q)?, readable(k)?, readable(v)?);
    if backward {
        q.apply_op3(&k, &v, op)
    } else {
        q.apply_op3_no_bwd(&k, &v, &op)
    }
}

/// Refuses what cannot be handed on, in the words of this function's arguments.
fn check(name: &str, tensor: &Tensor, dtype: DType) -> Result<()> {
    if !tensor.device().is_cpu() {
        bail!(
            "flash-attn: {name} is on a GPU, and this function computes on the CPU; move it with \
             to_device(&Device::Cpu), or use the crate flashattn-cudarc"
        )
    }
    if !matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16) {
        bail!(
            "flash-attn: {name} holds {:?}; convert it to F32, F16 or BF16 with to_dtype",
            tensor.dtype()
        )
    }
    if tensor.dtype() != dtype {
        bail!(
            "flash-attn: {name} holds {:?} and q holds {dtype:?}; convert one of them with to_dtype",
            tensor.dtype()
        )
    }
    if tensor.rank() != 4 {
        bail!(
            "flash-attn: {name} has shape {:?}; give four dimensions, (batch, seq, heads, dim)",
            tensor.dims()
        )
    }
    Ok(())
}

/// A refusal of the library, with the remedy that a user of tensors has.
fn refused(mut error: flashattn::Error) -> Error {
    if error.reason == Reason::HEAD_RATIO {
        error.message += "; the dimensions are (batch, seq, heads, dim): give transpose(1, 2) of \
                           tensors that are (batch, heads, seq, dim)";
    }
    Error::wrap(error)
}

/// The tensor, or a copy where the elements of a head are not contiguous.
fn readable(tensor: &Tensor) -> Result<Tensor> {
    match tensor.stride().last() {
        Some(1) => Ok(tensor.clone()),
        _ => tensor.force_contiguous(),
    }
}

/// One application: backward needs the lse that its own forward wrote.
struct FlashAttention {
    scale: f32,
    causal: bool,
    backward: bool,
    lse: OnceLock<Vec<f32>>,
}

type Slice<'a> = (&'a CpuStorage, &'a Layout);

/// A type that both libraries know.
trait Native: Element + WithDType {}

impl<T: Element + WithDType> Native for T {}

fn view<'a, T: Native>((storage, layout): Slice<'a>) -> Result<View<'a, T>> {
    let (batch, seq, heads, dim) = layout.shape().dims4()?;
    let &[batch_stride, seq_stride, head, 1] = layout.stride() else {
        bail!("flash-attn: the elements of a head must be contiguous: {layout:?}")
    };
    let strides = Strides { batch: batch_stride, head, seq: seq_stride };
    let data = &storage.as_slice::<T>()?[layout.start_offset()..];
    View::strided(data, [batch, seq, heads, dim], strides).map_err(refused)
}

impl FlashAttention {
    fn plan<T: Native>(&self, [q, k, v]: [View<'_, T>; 3]) -> Result<Arc<Plan>> {
        let key = Key {
            dtype: <T as Scalar>::DTYPE,
            heads: q.dims().heads,
            heads_kv: k.dims().heads,
            dim: q.dims().dim,
            dim_v: v.dims().dim,
            scale: self.scale,
            causal: self.causal,
            backward: self.backward,
        };
        plans::plan(key).map_err(refused)
    }

    fn forward<T: Native>(&self, arrays: [Slice<'_>; 3]) -> Result<(CpuStorage, Shape)> {
        let [q, k, v] = [view::<T>(arrays[0])?, view(arrays[1])?, view(arrays[2])?];
        let (dims, dim_v) = (q.dims(), v.dims().dim);
        let shape = [dims.batch, dims.seq, dims.heads, dim_v];
        let mut o = vec![T::from_f32(0.0); shape.iter().product()];
        let rows = if self.backward { dims.batch * dims.heads * dims.seq } else { 0 };
        let mut lse = vec![0f32; rows];
        let mut output = Output::new(ViewMut::new(&mut o, shape).map_err(refused)?);
        if self.backward {
            output = output.lse(&mut lse);
        }
        let plan = self.plan([q, k, v])?;
        WORKSPACE
            .with_borrow_mut(|scratch| plan.forward(&Inputs::new(q, k, v), output, scratch))
            .map_err(refused)?;
        self.lse.get_or_init(|| lse);
        Ok((T::to_cpu_storage_owned(o), Shape::from(shape.to_vec())))
    }

    /// `arrays`: q, k, v, o and the gradient of o.
    fn backward<T: Native>(&self, arrays: [Slice<'_>; 5]) -> Result<[Vec<T>; 3]> {
        let [q, k, v] = [view::<T>(arrays[0])?, view(arrays[1])?, view(arrays[2])?];
        let Some(lse) = self.lse.get() else { bail!("flash-attn: backward before forward") };
        let upstream = Upstream::new(view::<T>(arrays[3])?, lse, view(arrays[4])?);
        let packed = |view: View<'_, T>| {
            let dims = view.dims();
            vec![T::from_f32(0.0); dims.batch * dims.seq * dims.heads * dims.dim]
        };
        let mut all = [packed(q), packed(k), packed(v)];
        let [dq, dk, dv] = &mut all;
        let gradients = Gradients::new(
            ViewMut::new(dq, q.dims()).map_err(refused)?,
            ViewMut::new(dk, k.dims()).map_err(refused)?,
            ViewMut::new(dv, v.dims()).map_err(refused)?,
        );
        let inputs = Inputs::new(q, k, v);
        let plan = self.plan([q, k, v])?;
        WORKSPACE
            .with_borrow_mut(|scratch| plan.backward(&inputs, &upstream, gradients, scratch))
            .map_err(refused)?;
        Ok(all)
    }

    fn gradients<T: Native>(&self, tensors: [&Tensor; 5]) -> Result<[Option<Tensor>; 3]> {
        let guards = tensors.map(Tensor::storage_and_layout);
        let mut arrays = Vec::with_capacity(5);
        for (storage, layout) in &guards {
            let Storage::Cpu(storage) = &**storage else {
                bail!("flash-attn: tensors must be on the CPU")
            };
            arrays.push((storage, *layout));
        }
        let arrays = [arrays[0], arrays[1], arrays[2], arrays[3], arrays[4]];
        let [dq, dk, dv] = self.backward::<T>(arrays)?;
        let tensor = |data, like: &Tensor| Tensor::from_vec(data, like.shape(), like.device());
        Ok([
            Some(tensor(dq, tensors[0])?),
            Some(tensor(dk, tensors[1])?),
            Some(tensor(dv, tensors[2])?),
        ])
    }
}

impl CustomOp3 for FlashAttention {
    fn name(&self) -> &'static str {
        "flash-attn"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let arrays = [(q, q_layout), (k, k_layout), (v, v_layout)];
        match q {
            CpuStorage::F32(_) => self.forward::<f32>(arrays),
            CpuStorage::F16(_) => self.forward::<flashattn::half::f16>(arrays),
            CpuStorage::BF16(_) => self.forward::<flashattn::half::bf16>(arrays),
            _ => bail!("flash-attn: the tensors must be f32, f16 or bf16"),
        }
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        o: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        // Gradients arrive broadcast or transposed.
        let dout = readable(dout)?;
        let tensors = [q, k, v, o, &dout];
        let [dq, dk, dv] = match q.dtype() {
            DType::F32 => self.gradients::<f32>(tensors)?,
            DType::F16 => self.gradients::<flashattn::half::f16>(tensors)?,
            DType::BF16 => self.gradients::<flashattn::half::bf16>(tensors)?,
            _ => bail!("flash-attn: the tensors must be f32, f16 or bf16"),
        };
        Ok((dq, dk, dv))
    }
}
