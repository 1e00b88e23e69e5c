//! The gradient of a sink. candle's operations have three arguments at the most, and attention with a
//! sink has four: the sink enters beside q, by an operation that hands q on.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::thread::{self, ThreadId};

#[cfg(feature = "cuda")]
use candle_core::{backend::BackendStorage, CudaStorage, DType};
use candle_core::{bail, CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};

use crate::tensors::{range, with_native, Native, Slice};

/// What the attention's backward leaves for that of the tap, which comes later on the same thread.
#[derive(Default)]
pub(crate) struct SinkGradients(Mutex<HashMap<ThreadId, Tensor>>);

impl SinkGradients {
    pub(crate) fn put(&self, dsink: Tensor) {
        self.map(|all| all.insert(thread::current().id(), dsink));
    }

    fn take(&self) -> Option<Tensor> {
        self.map(|all| all.remove(&thread::current().id()))
    }

    fn map<R>(&self, f: impl FnOnce(&mut HashMap<ThreadId, Tensor>) -> R) -> R {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// (q, sink) to q, which is contiguous.
pub(crate) struct SinkTap {
    pub gradients: std::sync::Arc<SinkGradients>,
}

fn copy<T: Native>((storage, layout): Slice<'_>) -> Result<CpuStorage> {
    Ok(T::to_cpu_storage_owned(storage.as_slice::<T>()?[range(layout)?].to_vec()))
}

impl CustomOp2 for SinkTap {
    fn name(&self) -> &'static str {
        "flash-attn-sink"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        layout: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Ok((with_native!(CpuStorage, q, copy, (q, layout))?, layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        layout: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        use crate::cuda::copy;
        let copied = with_native!(DType, q.dtype(), copy, (q, layout))?;
        Ok((copied, layout.shape().clone()))
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        dq: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let Some(dsink) = self.gradients.take() else {
            bail!("flash-attn: backward of a sink before that of its attention")
        };
        Ok((Some(dq.clone()), Some(dsink)))
    }
}
