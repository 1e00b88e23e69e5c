//! The arrays that forward and backward share.

use flashattn_sys as sys;

use crate::array::{Array, Need};
use crate::error::{int64, invalid, Result};
use crate::plan::Facts;
use crate::{Dtype, Element, Plan, Reason, Scalar, Shape, View};

/// Elements from one batch, head, row to the next of an array whose last index is the key. 0: the
/// same for all; of a gradient: summed over that index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct RowStrides {
    pub batch: usize,
    pub head: usize,
    pub row: usize,
}

impl RowStrides {
    /// Of (batch, heads, rows, columns) without gaps; a batch or head size of 1 gets a stride of 0.
    pub fn packed([batch, heads, rows, columns]: [usize; 4]) -> Self {
        let head = rows.saturating_mul(columns);
        Self {
            batch: if batch == 1 { 0 } else { head.saturating_mul(heads) },
            head: if heads == 1 { 0 } else { head },
            row: columns,
        }
    }

    /// The strides of the four indices (batch, head, row, key).
    pub(crate) fn list(&self) -> [usize; 4] {
        [self.batch, self.head, self.row, 1]
    }
}

/// A dense bias without its type.
#[derive(Clone, Copy, Debug)]
struct Bias<'a> {
    bytes: Array<'a, u8>, // as many as the bias has elements, whatever their size
    dtype: Dtype,
    strides: RowStrides,
}

/// q, k, v and everything beside them: the same for forward and backward.
///
/// What the plan needs and what is given must agree: a missing array, and one that the plan has no
/// use for, are refused by the call.
#[derive(Clone, Debug)]
#[must_use]
pub struct Inputs<'a, T> {
    pub(crate) q: View<'a, T>,
    pub(crate) k: View<'a, T>,
    pub(crate) v: View<'a, T>,
    cu_seqlens: [Option<Array<'a, i32>>; 2], // of queries, of keys
    lens: [Option<Array<'a, i32>>; 2],
    max_seqlens: [Option<usize>; 2],
    page_table: Option<(Array<'a, i32>, usize)>,
    bias: Option<Bias<'a>>,
    alibi: Option<(Array<'a, f32>, usize)>,
    sink: Option<Array<'a, f32>>,
    block_mask: Option<(Array<'a, u8>, RowStrides)>,
    seed: Option<(u64, u64)>,
    rng_device: Option<Array<'a, u64>>,
}

impl<'a, T: Element> Inputs<'a, T> {
    /// q is (batch, seq, heads, dim) or (tokens, heads, dim); k and v likewise, or pools of pages.
    pub fn new(q: View<'a, T>, k: View<'a, T>, v: View<'a, T>) -> Self {
        Self {
            q,
            k,
            v,
            cu_seqlens: [None; 2],
            lens: [None; 2],
            max_seqlens: [None; 2],
            page_table: None,
            bias: None,
            alibi: None,
            sink: None,
            block_mask: None,
            seed: None,
            rng_device: None,
        }
    }

    /// (batch + 1): sequence b holds the rows [cu\[b\], cu\[b + 1\]) of q, for VARLEN_Q.
    pub fn cu_seqlens_q(mut self, cu_seqlens: impl Into<Array<'a, i32>>) -> Self {
        self.cu_seqlens[0] = Some(cu_seqlens.into());
        self
    }

    /// The same for k and v, for VARLEN_KV.
    pub fn cu_seqlens_kv(mut self, cu_seqlens: impl Into<Array<'a, i32>>) -> Self {
        self.cu_seqlens[1] = Some(cu_seqlens.into());
        self
    }

    /// (batch): queries in use of each sequence, at most its capacity. With any layout.
    pub fn lens_q(mut self, lens: impl Into<Array<'a, i32>>) -> Self {
        self.lens[0] = Some(lens.into());
        self
    }

    /// (batch): keys in use of each sequence.
    pub fn lens_kv(mut self, lens: impl Into<Array<'a, i32>>) -> Self {
        self.lens[1] = Some(lens.into());
        self
    }

    /// The longest sequence of queries, for VARLEN_Q. Left out, it is read from cu_seqlens_q where
    /// the host can.
    pub fn max_seqlen_q(mut self, tokens: usize) -> Self {
        self.max_seqlens[0] = Some(tokens);
        self
    }

    /// The longest sequence of keys, for VARLEN_KV and PAGED_KV. Left out, it is read from
    /// cu_seqlens_kv, or is what a row of the page table can hold.
    pub fn max_seqlen_kv(mut self, tokens: usize) -> Self {
        self.max_seqlens[1] = Some(tokens);
        self
    }

    /// (batch, pages of a sequence): page numbers, for PAGED_KV. `stride` elements from row to row;
    /// 0: packed rows, of `table.len() / batch` each.
    pub fn page_table(mut self, table: impl Into<Array<'a, i32>>, stride: usize) -> Self {
        self.page_table = Some((table.into(), stride));
        self
    }

    /// (batch, heads, queries, keys), keys contiguous; u8: a boolean mask, 0 = hidden.
    pub fn bias<B: Scalar>(mut self, bias: impl Into<Array<'a, B>>, strides: RowStrides) -> Self {
        let bytes = bias.into().erase();
        let dtype = B::DTYPE;
        self.bias = Some(Bias { bytes, dtype, strides });
        self
    }

    /// (heads), or (batch, heads) with the stride from sequence to sequence; 0: the same for all.
    pub fn alibi_slopes(mut self, slopes: impl Into<Array<'a, f32>>, stride: usize) -> Self {
        self.alibi = Some((slopes.into(), stride));
        self
    }

    /// (heads), natural logits.
    pub fn sink(mut self, sink: impl Into<Array<'a, f32>>) -> Self {
        self.sink = Some(sink.into());
        self
    }

    /// (batch, heads, blocks of queries, blocks of keys) bytes, keys contiguous: 0 = hidden. A row
    /// stride of 0 means packed.
    pub fn block_mask(mut self, mask: impl Into<Array<'a, u8>>, strides: RowStrides) -> Self {
        self.block_mask = Some((mask.into(), strides));
        self
    }

    /// The random numbers of the dropout, which must be given: the same ones drop the same weights, so
    /// each layer and step has a seed or an offset of its own. Backward needs those of forward.
    pub fn seed(mut self, seed: u64, offset: u64) -> Self {
        self.seed = Some((seed, offset));
        self
    }

    /// {seed, offset} in the device's memory, in place of [`Inputs::seed`] or to be added to it.
    pub fn rng_device(mut self, numbers: impl Into<Array<'a, u64>>) -> Self {
        self.rng_device = Some(numbers.into());
        self
    }

    /// The sizes of a call, for [`Plan::workspace_size`] and [`Plan::info`].
    ///
    /// # Errors
    ///
    /// INVALID_ARGUMENT: arrays that fit neither the plan nor each other; a max_seqlen that is missing
    /// where lengths lie on a device, or that the plan has no use for.
    pub fn shape(&self, plan: &Plan) -> Result<Shape> {
        self.sizes(&plan.facts)
    }

    /// Checks all arrays against the plan and writes what the library reads.
    pub(crate) fn lower(
        &self,
        facts: &Facts,
    ) -> Result<(sys::flashattn_shape, sys::flashattn_inputs)> {
        facts.expect_dtype(T::DTYPE, facts.dtype, "inputs.q")?;
        self.expect_seed(facts)?;
        let sizes = self.sizes(facts)?;
        let place = facts.place;
        let (seed, offset) = self.seed.unwrap_or_default();
        let mut c = sys::flashattn_inputs {
            q: self.q.tensor(place, "inputs.q")?,
            k: self.k.tensor(place, "inputs.k")?,
            v: self.v.tensor(place, "inputs.v")?,
            rng_seed: seed,
            rng_offset: offset,
            ..Default::default()
        };
        self.lower_lengths(facts, &sizes, &mut c)?;
        self.lower_biases(facts, &sizes, &mut c)?;
        if let Some(array) = &self.rng_device {
            c.rng_device = array.pointer(place, Need::product(&[2]), "inputs.rng_device")?;
        }
        Ok((sizes.lower()?, c))
    }

    fn sizes(&self, facts: &Facts) -> Result<Shape> {
        let (q, k, v) = (self.q.dims(), self.k.dims(), self.v.dims());
        facts.expect_dims(q, facts.varlen_q, facts.heads_q, facts.dim_qk, "inputs.q")?;
        facts.expect_dims(k, facts.varlen_kv, facts.heads_kv, facts.dim_qk, "inputs.k")?;
        facts.expect_dims(v, facts.varlen_kv, facts.heads_kv, facts.dim_v, "inputs.v")?;
        if (k.batch, k.seq) != (v.batch, v.seq) {
            let sentence = format!(
                "inputs.v is {v}, but inputs.k is {k}; a value is needed for each key, and no more"
            );
            return Err(invalid(Reason::SIZE, "inputs.v", sentence));
        }
        let (mut batch, mut seqlen_q) = (q.batch, q.seq);
        if facts.varlen_q {
            (batch, seqlen_q) = self.sequences(0, "inputs.cu_seqlens_q")?;
        } else {
            self.expect_no_bound(0, "max_seqlen_q", "VARLEN_Q")?;
        }
        let (mut batch_kv, mut seqlen_kv) = (k.batch, k.seq);
        if facts.varlen_kv {
            (batch_kv, seqlen_kv) = self.sequences(1, "inputs.cu_seqlens_kv")?;
        } else if facts.page_size > 0 {
            if k.seq != facts.page_size {
                let sentence = format!(
                    "inputs.k has {} tokens a page, but the plan's page_size is {}; give pages of \
                     that size, or make a plan with paged({})",
                    k.seq, facts.page_size, k.seq
                );
                return Err(invalid(Reason::PAGE_SIZE, "inputs.k", sentence));
            }
            batch_kv = batch;
            seqlen_kv = match self.max_seqlens[1] {
                Some(longest) => longest,
                None => self.pages_of_a_sequence(batch)?.saturating_mul(facts.page_size),
            };
        } else {
            self.expect_no_bound(1, "max_seqlen_kv", "VARLEN_KV or PAGED_KV")?;
        }
        if batch != batch_kv {
            let sentence = format!(
                "inputs.k holds {batch_kv} sequences, but inputs.q holds {batch}; give as many keys and \
                 values as there are queries: View::strided with a batch stride of 0 repeats one"
            );
            return Err(invalid(Reason::SIZE, "inputs.k", sentence));
        }
        let total_q = if facts.varlen_q { q.seq } else { 0 };
        let total_kv = if facts.varlen_kv { k.seq } else { 0 };
        Ok(Shape { batch, seqlen_q, seqlen_kv, total_q, total_kv })
    }

    fn expect_seed(&self, facts: &Facts) -> Result<()> {
        if facts.dropout == 0.0 || self.seed.is_some() || self.rng_device.is_some() {
            return Ok(());
        }
        let sentence = format!(
            "the plan's dropout is {}, but there is no seed, and every call would drop the same weights; \
             give Inputs::seed, with another seed or offset in each call, and in backward that of its \
             forward call",
            facts.dropout
        );
        Err(invalid(Reason::DROPOUT, "inputs.rng_seed", sentence))
    }

    fn expect_no_bound(&self, side: usize, field: &str, layout: &str) -> Result<()> {
        let Some(tokens) = self.max_seqlens[side] else { return Ok(()) };
        let sentence = format!(
            "{field} = {tokens} has a meaning only with {layout}; ask for that, or leave it out"
        );
        Err(invalid(Reason::VALUE, field, sentence))
    }

    /// From row to row of the page table, and what a row can hold.
    fn pages_of_a_sequence(&self, batch: usize) -> Result<usize> {
        let field = "inputs.page_table";
        match self.page_table {
            None => Ok(0), // the library's to refuse
            Some((table, 0)) if batch > 0 && table.len() % batch != 0 => {
                let sentence = format!(
                    "{field} holds {} elements, which are no packed rows for {batch} sequences; \
                     give as many for each, or the stride",
                    table.len()
                );
                Err(invalid(Reason::SIZE, field, sentence))
            }
            Some((table, 0)) => Ok(table.len() / batch.max(1)),
            Some((_, stride)) => Ok(stride),
        }
    }

    /// How many sequences a VARLEN array holds, and the length of the longest.
    fn sequences(&self, side: usize, field: &str) -> Result<(usize, usize)> {
        let Some(cu) = self.cu_seqlens[side].filter(|cu| !cu.is_empty()) else {
            let sentence = format!(
                "{field} is missing or empty, and the plan is made for varlen sequences; give batch + 1 \
                 numbers, the row where each begins and the last ends"
            );
            return Err(invalid(Reason::NULL_POINTER, field, sentence));
        };
        let longest = match (self.max_seqlens[side], cu.host()) {
            (Some(longest), _) => longest,
            // What decreases is the library's to refuse.
            (None, Some(cu)) => {
                let lengths = cu.windows(2).map(|w| i64::from(w[1]) - i64::from(w[0]));
                usize::try_from(lengths.max().unwrap_or(0)).unwrap_or(0)
            }
            (None, None) => {
                let sentence = format!(
                    "{field} is device memory, which is not read here; give the length of the longest \
                     sequence, or a bound of it, with max_seqlen_{}",
                    ["q", "kv"][side]
                );
                return Err(invalid(Reason::SIZE, field, sentence));
            }
        };
        Ok((cu.len() - 1, longest))
    }

    fn lower_lengths(
        &self,
        facts: &Facts,
        sizes: &Shape,
        c: &mut sys::flashattn_inputs,
    ) -> Result<()> {
        let place = facts.place;
        let (one, more) =
            (Need::product(&[sizes.batch]), Need::Exactly(sizes.batch.checked_add(1)));
        for (array, need, pointer, field) in [
            (&self.cu_seqlens[0], more, &mut c.cu_seqlens_q, "inputs.cu_seqlens_q"),
            (&self.cu_seqlens[1], more, &mut c.cu_seqlens_kv, "inputs.cu_seqlens_kv"),
            (&self.lens[0], one, &mut c.lens_q, "inputs.lens_q"),
            (&self.lens[1], one, &mut c.lens_kv, "inputs.lens_kv"),
        ] {
            if let Some(array) = array {
                *pointer = array.pointer(place, need, field)?;
            }
        }
        if let Some((table, _)) = &self.page_table {
            let row = sizes.seqlen_kv.div_ceil(facts.page_size.max(1));
            let step = self.pages_of_a_sequence(sizes.batch)?;
            let need = Need::reach(&[sizes.batch, row], &[step, 1]);
            c.page_table = table.pointer(place, need, "inputs.page_table")?;
            c.page_table_stride = int64(step, "inputs.page_table_stride")?;
            c.pages = int64(self.k.dims().batch, "inputs.pages")?;
        }
        Ok(())
    }

    fn lower_biases(
        &self,
        facts: &Facts,
        sizes: &Shape,
        c: &mut sys::flashattn_inputs,
    ) -> Result<()> {
        let place = facts.place;
        let pairs = [sizes.batch, facts.heads_q, sizes.seqlen_q, sizes.seqlen_kv];
        if let Some(bias) = &self.bias {
            facts.expect_dtype(bias.dtype, facts.bias_dtype, "inputs.bias")?;
            let need = Need::reach(&pairs, &bias.strides.list());
            c.bias = bias.bytes.pointer(place, need, "inputs.bias")?.cast();
            c.bias_stride_batch = int64(bias.strides.batch, "inputs.bias_stride_batch")?;
            c.bias_stride_head = int64(bias.strides.head, "inputs.bias_stride_head")?;
            c.bias_stride_row = int64(bias.strides.row, "inputs.bias_stride_row")?;
        }
        if let Some((slopes, stride)) = &self.alibi {
            let need = Need::reach(&[sizes.batch, facts.heads_q], &[*stride, 1]);
            c.alibi_slopes = slopes.pointer(place, need, "inputs.alibi_slopes")?;
            c.alibi_stride_batch = int64(*stride, "inputs.alibi_stride_batch")?;
        }
        if let Some(sink) = &self.sink {
            c.sink = sink.pointer(place, Need::product(&[facts.heads_q]), "inputs.sink")?;
        }
        if let Some((mask, strides)) = &self.block_mask {
            let rows = sizes.seqlen_q.div_ceil(facts.block_q.max(1));
            let columns = sizes.seqlen_kv.div_ceil(facts.block_kv.max(1));
            let mut list = strides.list();
            if list[2] == 0 {
                list[2] = columns;
            }
            let need = Need::reach(&[sizes.batch, facts.heads_q, rows, columns], &list);
            c.block_mask = mask.pointer(place, need, "inputs.block_mask")?;
            c.block_mask_stride_batch = int64(strides.batch, "inputs.block_mask_stride_batch")?;
            c.block_mask_stride_head = int64(strides.head, "inputs.block_mask_stride_head")?;
            c.block_mask_stride_row = int64(strides.row, "inputs.block_mask_stride_row")?;
        }
        Ok(())
    }
}
