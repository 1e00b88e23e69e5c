//! The options of a call, and its checks.

use std::sync::{Arc, OnceLock};

use candle_core::{bail, DType, Device, Result, Tensor};

use crate::op::{FlashAttention, Options};
use crate::sink::{SinkGradients, SinkTap};
use crate::tensors::{floats, integers, lengths, readable, Beside};

/// Attention with its options. Made once, called any number of times.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use flashattn_candle::Attention;
///
/// let x = Tensor::randn(0f32, 1f32, (1, 40, 8, 64), &Device::Cpu)?;
/// let sink = Var::zeros(8, candle_core::DType::F32, &Device::Cpu)?; // a logit per head
/// let o = Attention::new(0.125).window(Some(16), Some(0)).sink(&sink).forward(&x, &x, &x)?;
/// assert_eq!(o.sum_all()?.backward()?.get(&sink).unwrap().dims(), [8]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Attention {
    scale: f32,
    window: [Option<usize>; 2],
    softcap: f32,
    alibi_slopes: Option<Tensor>,
    sink: Option<Tensor>,
}

/// Where the sequences of packed tokens begin and end.
#[derive(Clone, Copy, Debug)]
pub struct Varlen<'a> {
    /// (batch + 1) integers: the row of q where each sequence begins, and the last ends.
    pub seqlens_q: &'a Tensor,
    /// (batch + 1) integers: those of k and v. With pages, the sums of the sequences' lengths.
    pub seqlens_k: &'a Tensor,
    /// At least the queries of the longest sequence.
    pub max_seqlen_q: usize,
    /// At least the keys of the longest sequence.
    pub max_seqlen_k: usize,
    /// (batch, pages of a sequence) integers: the page of k and v that holds each page_size tokens.
    /// `None`: k and v are packed.
    pub block_table: Option<&'a Tensor>,
}

impl Attention {
    /// softmax(scale * q k^T) v. `scale`: 1 / sqrt(dim) as a rule, not 0.
    pub fn new(scale: f32) -> Self {
        Self { scale, window: [None; 2], softcap: 0.0, alibi_slopes: None, sink: None }
    }

    /// Hides keys after the query, both sequences aligned at their ends: `window(None, Some(0))`.
    pub fn causal(self) -> Self {
        self.window(None, Some(0))
    }

    /// Hides keys more than `left` before and `right` after the query; `None`: that side is open.
    pub fn window(mut self, left: Option<usize>, right: Option<usize>) -> Self {
        self.window = [left, right];
        self
    }

    /// Scores s become cap * tanh(s / cap) (Gemma 2). 0: they stay.
    pub fn softcap(mut self, cap: f32) -> Self {
        self.softcap = cap;
        self
    }

    /// Subtracts slope * distance from the scores (Press et al. 2022). `slopes`: (heads) or (batch,
    /// heads), without a gradient.
    pub fn alibi(mut self, slopes: &Tensor) -> Self {
        self.alibi_slopes = Some(slopes.clone());
        self
    }

    /// A logit per head, (heads), that takes part in the softmax and has no value (gpt-oss); with a
    /// gradient where it is tracked.
    pub fn sink(mut self, sink: &Tensor) -> Self {
        self.sink = Some(sink.clone());
        self
    }

    /// The attention of sequences of one length, with gradients.
    ///
    /// * `q`: (batch, seqlen_q, heads, dim); `k`: (batch, seqlen_kv, heads_kv, dim), where heads is a
    ///   multiple of heads_kv; `v`: (batch, seqlen_kv, heads_kv, dim_v).
    ///
    /// Returns o: (batch, seqlen_q, heads, dim_v), contiguous.
    ///
    /// # Errors
    ///
    /// What libflashattn refuses; a scale of 0; tensors of different types or devices, of another type
    /// or rank, or on a GPU without the feature `cuda`.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
            check(name, tensor, q.dtype(), "(batch, seq, heads, dim)")?;
        }
        self.apply([q, k, v], None, Beside::NONE)
    }

    /// The attention of packed sequences, with gradients where k and v are no pages.
    ///
    /// * `q`: (total_q, heads, dim); `k`: (total_kv, heads_kv, dim), or with
    ///   [`block_table`](Varlen::block_table) (pages, page_size, heads_kv, dim); `v` likewise with dim_v.
    ///
    /// Returns o: (total_q, heads, dim_v), contiguous.
    ///
    /// # Errors
    ///
    /// As of [`Attention::forward`]; lengths that are impossible.
    pub fn forward_varlen(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        varlen: &Varlen<'_>,
    ) -> Result<Tensor> {
        check("q", q, q.dtype(), "(tokens, heads, dim)")?;
        let shape = match varlen.block_table {
            Some(_) => "(pages, page_size, heads, dim)",
            None => "(tokens, heads, dim)",
        };
        for (name, tensor) in [("k", k), ("v", v)] {
            check(name, tensor, q.dtype(), shape)?;
        }
        let device = q.device();
        let cu_seqlens_q = integers("seqlens_q", varlen.seqlens_q, device, &["batch + 1"])?;
        let cu_seqlens_kv = integers("seqlens_k", varlen.seqlens_k, device, &["batch + 1"])?;
        if cu_seqlens_q.dims() != cu_seqlens_kv.dims() {
            bail!(
                "flash-attn: seqlens_k has {} elements and seqlens_q has {}; give batch + 1 of both",
                cu_seqlens_kv.elem_count(),
                cu_seqlens_q.elem_count()
            )
        }
        let mut beside = Beside { cu_seqlens_q: Some(cu_seqlens_q), ..Beside::NONE };
        match varlen.block_table {
            None => beside.cu_seqlens_kv = Some(cu_seqlens_kv),
            Some(table) => {
                beside.lens_kv = Some(lengths(&cu_seqlens_kv)?);
                beside.page_table =
                    Some(integers("block_table", table, device, &["batch", "pages"])?);
            }
        }
        let max_seqlens = Some([varlen.max_seqlen_q, varlen.max_seqlen_k]);
        self.apply([q, k, v], max_seqlens, beside)
    }

    fn apply(
        &self,
        [q, k, v]: [&Tensor; 3],
        max_seqlens: Option<[usize; 2]>,
        beside: Beside<Tensor>,
    ) -> Result<Tensor> {
        let page_size = if beside.page_table.is_some() { k.dim(1)? } else { 0 };
        let backward = [q, k, v].into_iter().any(Tensor::track_op);
        let mut op = self.op(q.device(), backward, beside)?;
        (op.options.max_seqlens, op.options.page_size) = (max_seqlens, page_size);
        let (mut q, k, v) = (readable(q)?, readable(k)?, readable(v)?);
        if !op.options.backward {
            return q.apply_op3_no_bwd(&k, &v, &op);
        }
        if let Some(sink) = op.beside.sink.as_ref().filter(|_| op.options.dsink) {
            let gradients = op.dsink.clone();
            q = q.contiguous()?.apply_op2(sink, SinkTap { gradients })?;
        }
        q.apply_op3(&k, &v, op)
    }

    /// The operation of candle's graph, of sequences of one length. `device`: that of q. `backward`:
    /// whether q, k or v is tracked.
    pub(crate) fn op(
        &self,
        device: &Device,
        backward: bool,
        mut beside: Beside<Tensor>,
    ) -> Result<FlashAttention> {
        if self.scale == 0.0 {
            // To the library, 0 is the default.
            bail!(
                "flash-attn: scale = 0 would make every weight equal; give 1 / sqrt(dim), as a rule"
            )
        }
        if let Some(slopes) = &self.alibi_slopes {
            if slopes.track_op() {
                bail!("flash-attn: alibi_slopes is tracked, and has no gradient; give its detach()")
            }
            beside.alibi_slopes = Some(floats("alibi_slopes", slopes, device, 2)?);
        }
        if let Some(sink) = &self.sink {
            beside.sink = Some(floats("sink", sink, device, 1)?);
        }
        let dsink = beside.sink.as_ref().is_some_and(Tensor::track_op);
        let sides = |n: Option<usize>| n.map_or(-1, |n| i32::try_from(n).unwrap_or(-1));
        let options = Options {
            scale: self.scale,
            window: self.window.map(sides),
            softcap: self.softcap,
            backward: backward || dsink,
            dsink,
            max_seqlens: None,
            page_size: 0,
        };
        let dsink = Arc::new(SinkGradients::default());
        Ok(FlashAttention { options, beside, lse: OnceLock::new(), dsink })
    }
}

/// Refuses what cannot be handed on, in the words of the functions' arguments.
fn check(name: &str, tensor: &Tensor, dtype: DType, shape: &str) -> Result<()> {
    if tensor.device().is_metal() {
        bail!(
            "flash-attn: {name} is on a GPU of Metal, for which libflashattn has no kernels; move it \
             with to_device(&Device::Cpu)"
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
    let rank = shape.split(", ").count();
    if tensor.rank() != rank {
        bail!("flash-attn: {name} has shape {:?}; give {rank} dimensions, {shape}", tensor.dims())
    }
    Ok(())
}
