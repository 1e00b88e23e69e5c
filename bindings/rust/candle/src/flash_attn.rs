//! The operation that candle-flash-attn has by this name.

#[cfg(feature = "cuda")]
use candle_core::{backend::BackendStorage, CudaStorage};
use candle_core::{CpuStorage, CustomOp3, Device, Layout, Result, Shape, Tensor};

use crate::functions::options;
use crate::op::FlashAttention;
use crate::tensors::Beside;

/// Attention as an operation of candle's graph, for [`Tensor::apply_op3`] of (q, k, v) as
/// [`flash_attn`](crate::flash_attn) takes them, the elements of a head contiguous.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use flashattn_candle::FlashAttn;
///
/// let x = Tensor::randn(0f32, 1f32, (1, 40, 8, 64), &Device::Cpu)?;
/// let op = FlashAttn {
///     softmax_scale: 0.125,
///     alibi_slopes: None,
///     window_size_left: None,
///     window_size_right: Some(0),
///     softcap: None,
/// };
/// assert_eq!(x.apply_op3(&x, &x, op)?.dims(), x.dims());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// Its gradient computes the forward pass again, for the LSE, which these fields have no place for;
/// [`Attention`](crate::Attention) keeps it. Errors are those of
/// [`Attention::forward`](crate::Attention::forward).
#[derive(Clone, Debug)]
pub struct FlashAttn {
    /// Factor of the scores, 1 / sqrt(dim) as a rule, not 0.
    pub softmax_scale: f32,
    /// (heads), see [`Attention::alibi`](crate::Attention::alibi).
    pub alibi_slopes: Option<Tensor>,
    /// How many keys before it a query sees; `None`: all.
    pub window_size_left: Option<usize>,
    /// How many keys after it a query sees, 0 for a causal mask; `None`: all.
    pub window_size_right: Option<usize>,
    /// See [`Attention::softcap`](crate::Attention::softcap); `None`: scores stay.
    pub softcap: Option<f32>,
}

impl FlashAttn {
    fn op(&self, device: &Device, backward: bool) -> Result<FlashAttention> {
        let window = (self.window_size_left, self.window_size_right);
        let (slopes, softcap) = (self.alibi_slopes.as_ref(), self.softcap.unwrap_or(0.0));
        options(self.softmax_scale, window, slopes, softcap).op(device, backward, Beside::NONE)
    }
}

impl CustomOp3 for FlashAttn {
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
        let op = self.op(&Device::Cpu, false)?;
        op.cpu_fwd(q, q_layout, k, k_layout, v, v_layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let op = self.op(&Device::Cuda(q.device().clone()), false)?;
        op.cuda_fwd(q, q_layout, k, k_layout, v, v_layout)
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        o: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let op = self.op(q.device(), true)?;
        q.apply_op3_no_bwd(k, v, &op)?;
        op.bwd(q, k, v, o, dout)
    }
}
