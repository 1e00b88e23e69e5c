//! The operation of candle's graph.

use std::cell::RefCell;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

#[cfg(feature = "cuda")]
use candle_core::{backend::BackendStorage, CudaStorage};
use candle_core::{
    bail, CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Storage, Tensor,
};
use flashattn::{
    Array, DescBuilder, Dims, Gradients, Inputs, Output, Scalar, Upstream, View, ViewMut, Workspace,
};

use crate::sink::SinkGradients;
use crate::tensors::{array, readable, refused, view, with_native, Beside, Native, Slice};

thread_local! {
    /// Grows to what the thread's largest call needs, and is kept.
    static WORKSPACE: RefCell<Workspace> = RefCell::new(Workspace::new());
}

/// What plans are made from, beside types and sizes of q, k and v.
pub(crate) struct Options {
    pub scale: f32,
    /// -1: that side is open.
    pub window: [i32; 2],
    pub softcap: f32,
    /// Whether forward writes lse, and backward follows.
    pub backward: bool,
    pub dsink: bool,
    /// At least the longest sequences of packed queries and keys. `None`: q is not packed.
    pub max_seqlens: Option<[usize; 2]>,
    /// 0: k and v are no pages.
    pub page_size: usize,
}

/// One application: backward needs the lse that its own forward wrote.
pub(crate) struct FlashAttention {
    pub options: Options,
    pub beside: Beside<Tensor>,
    pub lse: OnceLock<Tensor>,
    pub dsink: Arc<SinkGradients>,
}

impl FlashAttention {
    pub(crate) fn desc<T: Scalar>(&self, [q, k, v]: [Dims; 3]) -> DescBuilder {
        let (options, beside) = (&self.options, &self.beside);
        let mut desc = DescBuilder::new(T::DTYPE, q.heads, q.dim)
            .heads_kv(k.heads)
            .dim_v(v.dim)
            .scale(options.scale)
            .softcap(options.softcap);
        desc = match options.window {
            [-1, -1] => desc,
            [-1, 0] => desc.causal(),
            [left, right] => desc.window(left, right),
        };
        type Set = fn(DescBuilder) -> DescBuilder;
        let flags: [(bool, Set); 6] = [
            (beside.alibi_slopes.is_some(), DescBuilder::alibi),
            (beside.sink.is_some(), DescBuilder::sink),
            (options.dsink, DescBuilder::dsink),
            (options.backward, DescBuilder::backward),
            (beside.cu_seqlens_q.is_some(), DescBuilder::varlen_q),
            (beside.cu_seqlens_kv.is_some(), DescBuilder::varlen_kv),
        ];
        for (wanted, set) in flags {
            if wanted {
                desc = set(desc);
            }
        }
        match options.page_size {
            0 => desc,
            size => desc.paged(size),
        }
    }

    pub(crate) fn inputs<'a, T: Native>(
        &self,
        [q, k, v]: [View<'a, T>; 3],
        beside: Beside<Array<'a, f32>, Array<'a, i32>>,
    ) -> Inputs<'a, T> {
        let matrix = |tensor: &Option<Tensor>| match tensor.as_ref().map(Tensor::dims) {
            Some(&[rows, columns]) => [rows, columns],
            _ => [1, tensor.as_ref().map_or(0, Tensor::elem_count)],
        };
        let mut inputs = Inputs::new(q, k, v);
        if let Some(slopes) = beside.alibi_slopes {
            inputs = inputs.alibi_slopes(slopes.dims(matrix(&self.beside.alibi_slopes)));
        }
        if let Some(sink) = beside.sink {
            inputs = inputs.sink(sink);
        }
        if let Some([max_q, max_kv]) = self.options.max_seqlens {
            inputs = inputs.max_seqlen_q(max_q).max_seqlen_kv(max_kv);
        }
        if let Some(sums) = beside.cu_seqlens_q {
            inputs = inputs.cu_seqlens_q(sums);
        }
        if let Some(sums) = beside.cu_seqlens_kv {
            inputs = inputs.cu_seqlens_kv(sums);
        }
        if let Some(lens) = beside.lens_kv {
            inputs = inputs.lens_kv(lens);
        }
        if let Some(table) = beside.page_table {
            inputs = inputs.page_table(table.dims(matrix(&self.beside.page_table)));
        }
        inputs
    }

    /// How many numbers lse holds, where backward needs it.
    pub(crate) fn rows(&self, q: Dims) -> usize {
        if self.options.backward {
            q.batch * q.heads * q.seq
        } else {
            0
        }
    }

    pub(crate) fn lse(&self) -> Result<&Tensor> {
        let Some(lse) = self.lse.get() else { bail!("flash-attn: backward before forward") };
        Ok(lse)
    }
}

pub(crate) fn shape_of(dims: Dims) -> Shape {
    match dims.varlen {
        true => Shape::from((dims.seq, dims.heads, dims.dim)),
        false => Shape::from((dims.batch, dims.seq, dims.heads, dims.dim)),
    }
}

fn packed<T: Native>(dims: Dims) -> Vec<T> {
    vec![T::from_f32(0.0); dims.batch * dims.seq * dims.heads * dims.dim]
}

fn on_cpu(storage: &Storage) -> Result<&CpuStorage> {
    match storage {
        Storage::Cpu(storage) => Ok(storage),
        _ => bail!("flash-attn: all tensors must be on one device"),
    }
}

/// The arrays of tensors on the CPU. G: a lock of a tensor's memory.
fn arrays<'a, G: Deref<Target = Storage>>(
    held: &'a Beside<(G, &'a Layout)>,
) -> Result<Beside<Array<'a, f32>, Array<'a, i32>>> {
    held.map(|(s, layout)| array((on_cpu(s)?, *layout)), |(s, layout)| array((on_cpu(s)?, *layout)))
}

fn forward<T: Native>(op: &FlashAttention, tensors: [Slice<'_>; 3]) -> Result<(CpuStorage, Shape)> {
    let views = [view::<T>(tensors[0])?, view(tensors[1])?, view(tensors[2])?];
    let [q, _, v] = views.map(|x| x.dims());
    let dims = Dims { dim: v.dim, ..q };
    let mut o = packed::<T>(dims);
    let mut lse = vec![0f32; op.rows(q)];
    let mut output = Output::new(ViewMut::new(&mut o, dims).map_err(refused)?);
    if op.options.backward {
        output = output.lse(&mut lse);
    }
    let held = op.beside.map(|t| Ok(t.storage_and_layout()), |t| Ok(t.storage_and_layout()))?;
    let inputs = op.inputs(views, arrays(&held)?);
    let plan = op.desc::<T>(views.map(|x| x.dims())).build_cached().map_err(refused)?;
    WORKSPACE.with_borrow_mut(|scratch| plan.forward(&inputs, output, scratch)).map_err(refused)?;
    if op.options.backward {
        let rows = lse.len();
        op.lse.get_or_init(|| Tensor::from_vec(lse, rows, &Device::Cpu).expect("as many as rows"));
    }
    Ok((T::to_cpu_storage_owned(o), shape_of(dims)))
}

/// `tensors`: q, k, v, o and the gradient of o.
fn backward<T: Native>(op: &FlashAttention, tensors: [&Tensor; 5]) -> Result<[Tensor; 3]> {
    let guards = tensors.map(Tensor::storage_and_layout);
    let mut views = Vec::with_capacity(5);
    for (storage, layout) in &guards {
        views.push(view::<T>((on_cpu(storage)?, layout))?);
    }
    let [q, k, v, o, dout] = [views[0], views[1], views[2], views[3], views[4]];
    let (mut dq, mut dk, mut dv) = (packed(q.dims()), packed(k.dims()), packed(v.dims()));
    let heads = if op.options.dsink { q.dims().heads } else { 0 };
    let mut dsink = vec![0f32; heads];
    let mut gradients = Gradients::new(
        ViewMut::<T>::new(&mut dq, q.dims()).map_err(refused)?,
        ViewMut::new(&mut dk, k.dims()).map_err(refused)?,
        ViewMut::new(&mut dv, v.dims()).map_err(refused)?,
    );
    if op.options.dsink {
        gradients = gradients.dsink(&mut dsink);
    }
    let held = op.beside.map(|t| Ok(t.storage_and_layout()), |t| Ok(t.storage_and_layout()))?;
    let inputs = op.inputs([q, k, v], arrays(&held)?);
    let plan = op.desc::<T>([q, k, v].map(|x| x.dims())).build_cached().map_err(refused)?;
    let (lse, lse_layout) = op.lse()?.storage_and_layout();
    let upstream = Upstream::new(o, array::<f32>((on_cpu(&lse)?, lse_layout))?, dout);
    WORKSPACE
        .with_borrow_mut(|scratch| plan.backward(&inputs, &upstream, gradients, scratch))
        .map_err(refused)?;
    if op.options.dsink {
        op.dsink.put(Tensor::from_vec(dsink, heads, &Device::Cpu)?);
    }
    let tensor = |data, like: &Tensor| Tensor::from_vec(data, like.shape(), &Device::Cpu);
    Ok([tensor(dq, tensors[0])?, tensor(dk, tensors[1])?, tensor(dv, tensors[2])?])
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
        let tensors = [(q, q_layout), (k, k_layout), (v, v_layout)];
        with_native!(CpuStorage, q, forward, self, tensors)
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
        use crate::cuda::forward;
        let tensors = [(q, q_layout), (k, k_layout), (v, v_layout)];
        with_native!(DType, q.dtype(), forward, self, tensors)
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
        #[cfg(feature = "cuda")]
        if q.device().is_cuda() {
            use crate::cuda::backward;
            let [dq, dk, dv] = with_native!(DType, q.dtype(), backward, self, tensors)?;
            return Ok((Some(dq), Some(dk), Some(dv)));
        }
        let [dq, dk, dv] = with_native!(DType, q.dtype(), backward, self, tensors)?;
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}
