//! The operation of candle's graph.

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};

use candle_core::{bail, CpuStorage, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor};
use flashattn::{
    Array, DescBuilder, Dims, Gradients, Inputs, Output, Plan, Scalar, Upstream, View, ViewMut,
    Workspace,
};

use crate::sink::SinkGradients;
use crate::tensors::{readable, refused, view, with_native, Native, Slice};

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
}

/// The arrays beside q, k and v; empty where they are not given.
#[derive(Default)]
pub(crate) struct Numbers {
    pub varlen: bool,
    pub alibi_slopes: Vec<f32>,
    pub slopes_each: [usize; 2], // (batch or 1, heads)
    pub sink: Vec<f32>,
    pub cu_seqlens_q: Vec<i32>,
    pub cu_seqlens_kv: Vec<i32>,
    pub lens_kv: Vec<i32>,
    pub page_table: Vec<i32>,
    pub pages_each: usize,
    pub page_size: usize, // 0: k and v are no pages
    pub max_seqlens: [usize; 2],
}

impl Numbers {
    fn inputs<'a, T: Native>(&'a self, [q, k, v]: [View<'a, T>; 3]) -> Inputs<'a, T> {
        let mut inputs = Inputs::new(q, k, v);
        if !self.alibi_slopes.is_empty() {
            inputs = inputs.alibi_slopes(Array::from(&self.alibi_slopes).dims(self.slopes_each));
        }
        if !self.sink.is_empty() {
            inputs = inputs.sink(&self.sink);
        }
        if self.varlen {
            let [max_q, max_kv] = self.max_seqlens;
            inputs = inputs.cu_seqlens_q(&self.cu_seqlens_q).max_seqlen_q(max_q);
            inputs = inputs.max_seqlen_kv(max_kv);
        }
        if self.page_size > 0 {
            let rows = self.page_table.len() / self.pages_each.max(1);
            let table = Array::from(&self.page_table).dims([rows, self.pages_each]);
            inputs = inputs.page_table(table).lens_kv(&self.lens_kv);
        } else if self.varlen {
            inputs = inputs.cu_seqlens_kv(&self.cu_seqlens_kv);
        }
        inputs
    }
}

/// One application: backward needs the lse that its own forward wrote.
pub(crate) struct FlashAttention {
    pub options: Options,
    pub numbers: Numbers,
    pub lse: OnceLock<Vec<f32>>,
    pub dsink: Arc<SinkGradients>,
}

fn shape_of(dims: Dims) -> Shape {
    match dims.varlen {
        true => Shape::from((dims.seq, dims.heads, dims.dim)),
        false => Shape::from((dims.batch, dims.seq, dims.heads, dims.dim)),
    }
}

fn packed<T: Native>(dims: Dims) -> Vec<T> {
    vec![T::from_f32(0.0); dims.batch * dims.seq * dims.heads * dims.dim]
}

fn forward<T: Native>(op: &FlashAttention, arrays: [Slice<'_>; 3]) -> Result<(CpuStorage, Shape)> {
    let [q, k, v] = [view::<T>(arrays[0])?, view(arrays[1])?, view(arrays[2])?];
    let dims = Dims { dim: v.dims().dim, ..q.dims() };
    let mut o = packed::<T>(dims);
    let rows = if op.options.backward { dims.batch * dims.heads * dims.seq } else { 0 };
    let mut lse = vec![0f32; rows];
    let mut output = Output::new(ViewMut::new(&mut o, dims).map_err(refused)?);
    if op.options.backward {
        output = output.lse(&mut lse);
    }
    let (plan, inputs) = (op.plan([q, k, v])?, op.numbers.inputs([q, k, v]));
    WORKSPACE.with_borrow_mut(|scratch| plan.forward(&inputs, output, scratch)).map_err(refused)?;
    op.lse.get_or_init(|| lse);
    Ok((T::to_cpu_storage_owned(o), shape_of(dims)))
}

/// `tensors`: q, k, v, o and the gradient of o.
fn backward<T: Native>(op: &FlashAttention, tensors: [&Tensor; 5]) -> Result<[Tensor; 3]> {
    let guards = tensors.map(Tensor::storage_and_layout);
    let mut views = Vec::with_capacity(5);
    for (storage, layout) in &guards {
        let Storage::Cpu(storage) = &**storage else {
            bail!("flash-attn: tensors must be on the CPU")
        };
        views.push(view::<T>((storage, layout))?);
    }
    let [q, k, v, o, dout] = [views[0], views[1], views[2], views[3], views[4]];
    let Some(lse) = op.lse.get() else { bail!("flash-attn: backward before forward") };
    let (mut dq, mut dk, mut dv) = (packed(q.dims()), packed(k.dims()), packed(v.dims()));
    let mut dsink = vec![0f32; if op.options.dsink { op.numbers.sink.len() } else { 0 }];
    let mut gradients = Gradients::new(
        ViewMut::<T>::new(&mut dq, q.dims()).map_err(refused)?,
        ViewMut::new(&mut dk, k.dims()).map_err(refused)?,
        ViewMut::new(&mut dv, v.dims()).map_err(refused)?,
    );
    if op.options.dsink {
        gradients = gradients.dsink(&mut dsink);
    }
    let (plan, inputs) = (op.plan([q, k, v])?, op.numbers.inputs([q, k, v]));
    let upstream = Upstream::new(o, lse, dout);
    WORKSPACE
        .with_borrow_mut(|scratch| plan.backward(&inputs, &upstream, gradients, scratch))
        .map_err(refused)?;
    if op.options.dsink {
        op.dsink.put(dsink);
    }
    let tensor = |data, like: &Tensor| Tensor::from_vec(data, like.shape(), like.device());
    Ok([tensor(dq, tensors[0])?, tensor(dk, tensors[1])?, tensor(dv, tensors[2])?])
}

impl FlashAttention {
    fn plan<T: Native>(&self, [q, k, v]: [View<'_, T>; 3]) -> Result<Arc<Plan>> {
        let (options, numbers) = (&self.options, &self.numbers);
        let mut desc = DescBuilder::new(<T as Scalar>::DTYPE, q.dims().heads, q.dims().dim)
            .heads_kv(k.dims().heads)
            .dim_v(v.dims().dim)
            .scale(options.scale)
            .softcap(options.softcap);
        desc = match options.window {
            [-1, -1] => desc,
            [-1, 0] => desc.causal(),
            [left, right] => desc.window(left, right),
        };
        type Set = fn(DescBuilder) -> DescBuilder;
        let flags: [(bool, Set); 6] = [
            (!numbers.alibi_slopes.is_empty(), DescBuilder::alibi),
            (!numbers.sink.is_empty(), DescBuilder::sink),
            (options.dsink, DescBuilder::dsink),
            (options.backward, DescBuilder::backward),
            (numbers.varlen, DescBuilder::varlen_q),
            (numbers.varlen && numbers.page_size == 0, DescBuilder::varlen_kv),
        ];
        for (wanted, set) in flags {
            if wanted {
                desc = set(desc);
            }
        }
        if numbers.page_size > 0 {
            desc = desc.paged(numbers.page_size);
        }
        desc.build_cached().map_err(refused)
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
        with_native!(CpuStorage, q, forward, self, arrays)
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
        let [dq, dk, dv] = with_native!(DType, q.dtype(), backward, self, tensors)?;
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}
