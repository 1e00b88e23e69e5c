//! What a plan computes.

use flashattn_sys as sys;

use crate::error::{check, int32, int64, Error, Result};
use crate::{Determinism, Device, Dtype, Op, Plan};

/// Says what is computed, field by field; lengths come later, with each call. Every default is zero:
/// the CPU, forward only, no mask.
///
/// ```
/// # use flashattn::{DescBuilder, Dtype};
/// let plan = DescBuilder::new(Dtype::BF16, 32, 128) // query heads, elements of a head
///     .heads_kv(8)
///     .causal()
///     .window(1023, 0)
///     .backward()
///     .build()?;
/// let error = DescBuilder::new(Dtype::F32, 8, 64).heads_kv(3).check().unwrap_err();
/// assert_eq!(error.reason, flashattn::Reason::HEAD_RATIO);
/// # Ok::<(), flashattn::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct DescBuilder {
    desc: sys::flashattn_desc,
    error: Option<Error>, // of the first size that fits no field
}

impl DescBuilder {
    /// The fields that have no default: the type of q, k, v; query heads; elements of a head.
    pub fn new(dtype: Dtype, heads: usize, dim: usize) -> Self {
        let desc = sys::flashattn_desc { dtype: dtype.0, ..Default::default() };
        let mut builder = Self { desc, error: None };
        builder.desc.heads_q = builder.int(heads, "heads_q");
        builder.desc.dim_qk = builder.int(dim, "dim_qk");
        builder
    }

    fn int(&mut self, value: usize, field: &str) -> i32 {
        int32(value, field).unwrap_or_else(|error| {
            self.error.get_or_insert(error);
            0
        })
    }

    fn long(&mut self, value: usize, field: &str) -> i64 {
        int64(value, field).unwrap_or_else(|error| {
            self.error.get_or_insert(error);
            0
        })
    }

    /// Key and value heads; query head h reads KV head h / (heads / heads_kv).
    pub fn heads_kv(mut self, heads: usize) -> Self {
        self.desc.heads_kv = self.int(heads, "heads_kv");
        self
    }

    /// Elements of a value, where they differ from those of a query and a key.
    pub fn dim_v(mut self, dim: usize) -> Self {
        self.desc.dim_v = self.int(dim, "dim_v");
        self
    }

    /// The type of o and dout: that of q, or F32 beside 16-bit inputs.
    pub fn dtype_o(mut self, dtype: Dtype) -> Self {
        self.desc.dtype_o = dtype.0;
        self
    }

    /// The device, and which of its kind.
    pub fn device(mut self, device: Device, index: usize) -> Self {
        self.desc.device = device.0;
        self.desc.device_index = self.int(index, "device_index");
        self
    }

    /// Also makes [`Plan::backward`] possible, and lets forward write the lse that it reads.
    pub fn backward(mut self) -> Self {
        self.desc.ops |= (Op::FORWARD | Op::BACKWARD).0;
        self.lse()
    }

    /// Forward writes lse, the logarithm of each row's sum.
    pub fn lse(mut self) -> Self {
        self.desc.features |= sys::flashattn_feature::LSE.0;
        self
    }

    /// Backward adds the gradient that arrives at lse.
    pub fn dlse(mut self) -> Self {
        self.desc.features |= sys::flashattn_feature::DLSE.0;
        self
    }

    /// Sequences of queries and keys stand in one row of tokens each: (tokens, heads, dim).
    pub fn varlen(self) -> Self {
        self.varlen_q().varlen_kv()
    }

    /// Sequences of queries stand in one row of tokens.
    pub fn varlen_q(mut self) -> Self {
        self.desc.layout |= sys::flashattn_layout::VARLEN_Q.0;
        self
    }

    /// Sequences of keys stand in one row of tokens.
    pub fn varlen_kv(mut self) -> Self {
        self.desc.layout |= sys::flashattn_layout::VARLEN_KV.0;
        self
    }

    /// K and V are pools of pages: (page, page_size, heads, dim). Forward only.
    pub fn paged(mut self, page_size: usize) -> Self {
        self.desc.layout |= sys::flashattn_layout::PAGED_KV.0;
        self.desc.page_size = self.int(page_size, "page_size");
        self
    }

    /// Hides keys after the query. With Sq, Sk the lengths of a sequence, query i sees key j when
    /// j <= i + Sk - Sq; see [`DescBuilder::top_left`].
    pub fn causal(mut self) -> Self {
        self.desc.mask |= sys::flashattn_mask::CAUSAL.0;
        self
    }

    /// Hides keys further from the diagonal than `left` and `right`; -1: that side is open.
    pub fn window(mut self, left: i32, right: i32) -> Self {
        self.desc.mask |= sys::flashattn_mask::WINDOW.0;
        self.desc.window_left = left;
        self.desc.window_right = right;
        self
    }

    /// Hides keys of another chunk of `tokens`.
    pub fn chunk(mut self, tokens: usize) -> Self {
        self.desc.mask |= sys::flashattn_mask::CHUNK.0;
        self.desc.chunk = self.int(tokens, "chunk");
        self
    }

    /// Aligns queries and keys at the start of a sequence, not at its end.
    pub fn top_left(mut self) -> Self {
        self.desc.mask |= sys::flashattn_mask::TOP_LEFT.0;
        self
    }

    /// A block mask: see [`Inputs::block_mask`](crate::Inputs::block_mask).
    pub fn blocks(mut self, queries: usize, keys: usize) -> Self {
        self.desc.mask |= sys::flashattn_mask::BLOCKS.0;
        self.desc.block_q = self.int(queries, "block_q");
        self.desc.block_kv = self.int(keys, "block_kv");
        self
    }

    /// Subtracts slope * distance from the scores (Press et al. 2022).
    pub fn alibi(mut self) -> Self {
        self.desc.bias |= sys::flashattn_bias::ALIBI.0;
        self
    }

    /// Adds a bias of this type to the scores; U8: a boolean mask.
    pub fn bias(mut self, dtype: Dtype) -> Self {
        self.desc.bias |= sys::flashattn_bias::DENSE.0;
        self.desc.bias_dtype = dtype.0;
        self
    }

    /// Backward writes the gradient of the bias.
    pub fn dbias(mut self) -> Self {
        self.desc.features |= sys::flashattn_feature::DBIAS.0;
        self
    }

    /// A learned logit per query head that takes part in the softmax and has no value.
    pub fn sink(mut self) -> Self {
        self.desc.features |= sys::flashattn_feature::SINK.0;
        self
    }

    /// Backward writes the gradient of the sink.
    pub fn dsink(mut self) -> Self {
        self.desc.features |= sys::flashattn_feature::DSINK.0;
        self
    }

    /// Which results must repeat bit for bit.
    pub fn determinism(mut self, level: Determinism) -> Self {
        self.desc.determinism = level.0;
        self
    }

    /// The factor of the scores; 0: 1 / sqrt(dim).
    pub fn scale(mut self, scale: f32) -> Self {
        self.desc.scale = scale;
        self
    }

    /// Scores become cap * tanh(score / cap).
    pub fn softcap(mut self, cap: f32) -> Self {
        self.desc.softcap = cap;
        self
    }

    /// The probability with which a weight is dropped, [0, 1), in steps of 1/65536.
    pub fn dropout(mut self, probability: f32) -> Self {
        self.desc.dropout = probability;
        self
    }

    /// Promises that no call passes these, so that [`Plan::workspace_size`] can answer for all calls
    /// at once. 0: not promised.
    pub fn max_shape(mut self, batch: usize, seqlen_q: usize, seqlen_kv: usize) -> Self {
        self.desc.max_batch = self.int(batch, "max_batch");
        self.desc.max_seqlen_q = self.int(seqlen_q, "max_seqlen_q");
        self.desc.max_seqlen_kv = self.int(seqlen_kv, "max_seqlen_kv");
        self
    }

    /// The same for the tokens of all sequences together, in VARLEN layouts.
    pub fn max_total(mut self, queries: usize, keys: usize) -> Self {
        self.desc.max_total_q = self.long(queries, "max_total_q");
        self.desc.max_total_kv = self.long(keys, "max_total_kv");
        self
    }

    /// CPU: threads to use at the most. 1: the caller's only; 0: all.
    pub fn threads(mut self, threads: usize) -> Self {
        self.desc.threads = self.int(threads, "threads");
        self
    }

    /// Sets fields that have no method here, by their names in the C header.
    pub fn raw(mut self, set: impl FnOnce(&mut sys::flashattn_desc)) -> Self {
        set(&mut self.desc);
        // The library reads as many bytes as this says.
        self.desc.struct_size = sys::flashattn_desc::default().struct_size;
        self
    }

    /// Whether [`DescBuilder::build`] would succeed.
    ///
    /// # Errors
    ///
    /// What the library refuses: status INVALID_ARGUMENT, UNSUPPORTED or DEVICE, with the reason.
    pub fn check(&self) -> Result<()> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        // SAFETY: struct_size is that of the structure.
        check(unsafe { sys::flashattn_check(&self.desc) })
    }

    /// Makes the plan: chooses the kernels and does everything that is slow.
    ///
    /// # Errors
    ///
    /// Those of [`DescBuilder::check`]; OUT_OF_MEMORY.
    pub fn build(self) -> Result<Plan> {
        match self.error {
            Some(error) => Err(error),
            None => Plan::new(self.desc),
        }
    }
}
