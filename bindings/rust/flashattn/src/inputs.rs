//! The arrays that forward and backward share.

use flashattn_sys as sys;

use crate::array::{Array, Raw};
use crate::arrays::{methods, Arrays};
use crate::error::{int64, invalid, Result};
use crate::plan::Resolved;
use crate::{Dtype, Element, Plan, Reason, Sizes, View};

/// q, k, v and everything beside them: the same for forward and backward.
///
/// What the plan needs and what is given must agree: a missing array, and one that the plan has no
/// use for, are refused by the call. The comment of each array is the header's: its shape, packed
/// unless [`Array::dims`] or [`Array::strides`] say otherwise; its type; when it is needed. `K`: the
/// type of k and v, [`F8E4M3`](crate::F8E4M3) or `i8` of a quantised cache beside wider queries.
#[derive(Clone, Debug)]
#[must_use]
pub struct Inputs<'a, T, K = T> {
    pub(crate) q: View<'a, T>,
    pub(crate) k: View<'a, K>,
    pub(crate) v: View<'a, K>,
    arrays: Arrays<sys::flashattn_args>,
    max_seqlens: [Option<usize>; 2], // of queries, of keys
    rng_seed: Option<u64>,
    rng_offset: u64,
    latent: bool, // k has the type of q
}

macro_rules! inputs {
    ($($entry:tt)*) => {
        impl<'a, T: Element, K: Element> Inputs<'a, T, K> {
            methods!(Array, $($entry)*);
        }
    };
}

sys::arrays!(flashattn_args, input => inputs);

impl<'a, T: Element, K: Element> Inputs<'a, T, K> {
    /// q is (batch, seq, heads, dim) or (tokens, heads, dim); k and v likewise, or pools of pages.
    pub fn new(q: View<'a, T>, k: View<'a, K>, v: View<'a, K>) -> Self {
        Self {
            q,
            k,
            v,
            arrays: Default::default(),
            max_seqlens: [None; 2],
            rng_seed: None,
            rng_offset: 0,
            latent: false,
        }
    }

    /// The quantised cache of latent attention, for plans of
    /// [`DescBuilder::latent_kv`](crate::DescBuilder::latent_kv): a key is its value, of 8 bits and with
    /// [`Inputs::descale_latent`], and behind it dim_qk - dim_v elements of k, of the type of q.
    pub fn latent(q: View<'a, T>, k: View<'a, T>, v: View<'a, K>) -> Self {
        Self { latent: true, ..Self::new(q, k.cast(), v) }
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

    /// The random numbers of the dropout, which must be given: the same ones drop the same weights, so
    /// each layer and step has a seed or an offset of its own. Backward needs those of forward.
    /// [`Inputs::rng_device`] takes their place, or is added to them.
    pub fn rng_seed(mut self, seed: u64) -> Self {
        self.rng_seed = Some(seed);
        self
    }

    /// The second half of them; 0 unless it is given.
    pub fn rng_offset(mut self, offset: u64) -> Self {
        self.rng_offset = offset;
        self
    }

    /// The sizes of a call, for [`Plan::workspace_size`] and [`Plan::info`].
    ///
    /// # Errors
    ///
    /// INVALID_ARGUMENT: arrays that fit neither the plan nor each other; a max_seqlen that is missing
    /// where lengths lie on a device, or that the plan has no use for.
    pub fn sizes(&self, plan: &Plan) -> Result<Sizes> {
        self.sizes_for(&plan.resolved)
    }

    fn array(&self, name: &str) -> Option<&Raw> {
        self.arrays.get(name)
    }

    /// Checks all arrays against the plan and writes what the library reads.
    pub(crate) fn lower(&self, plan: &Resolved) -> Result<sys::flashattn_args> {
        plan.expect_dtype(T::DTYPE, Dtype(plan.desc.dtype), "q")?;
        plan.expect_dtype(
            K::DTYPE,
            Dtype(plan.desc.dtype_kv),
            if self.latent { "v" } else { "k" },
        )?;
        self.expect_seed(plan)?;
        let sizes = self.sizes_for(plan)?;
        let mut args = sys::flashattn_args {
            q: self.q.tensor(plan.memory, "q")?,
            k: self.k.tensor(plan.memory, "k")?,
            v: self.v.tensor(plan.memory, "v")?,
            rng_seed: self.rng_seed.unwrap_or(0),
            rng_offset: self.rng_offset,
            ..sizes.lower()?
        };
        let mut arrays = self.arrays;
        arrays.stride_pages(sizes.batch)?;
        if arrays.get("page_table").is_some() {
            args.pages = int64(self.k.dims().batch, "pages")?;
        }
        args.block_entries = block_entries(arrays.get("block_index"), &sizes, plan)?;
        arrays.lower(plan, &mut args)?;
        Ok(args)
    }

    fn sizes_for(&self, plan: &Resolved) -> Result<Sizes> {
        let (q, k, v) = (self.q.dims(), self.k.dims(), self.v.dims());
        plan.expect_dims(q, plan.varlen_q(), plan.heads_q, plan.dim_qk, "q")?;
        if self.latent != plan.latent_kv() {
            let message =
                "Inputs::latent and the plan's LATENT_KV go together; give both or neither";
            return Err(invalid(Reason::LAYOUT, "layout", message));
        }
        let dim_k = plan.dim_qk - if self.latent { plan.dim_v.min(plan.dim_qk) } else { 0 };
        plan.expect_dims(k, plan.varlen_kv(), plan.heads_kv, dim_k, "k")?;
        plan.expect_dims(v, plan.varlen_kv(), plan.heads_kv, plan.dim_v, "v")?;
        if (k.batch, k.seq) != (v.batch, v.seq) {
            let message =
                format!("v is {v}, but k is {k}; a value is needed for each key, and no more");
            return Err(invalid(Reason::SIZE, "v", message));
        }
        let (mut batch, mut seqlen_q) = (q.batch, q.seq);
        if plan.varlen_q() {
            (batch, seqlen_q) = sequences(self.array("cu_seqlens_q"), self.max_seqlens[0], "q")?;
        } else {
            expect_no_bound(self.max_seqlens[0], "max_seqlen_q", "VARLEN_Q")?;
        }
        let (mut batch_kv, mut seqlen_kv) = (k.batch, k.seq);
        if plan.varlen_kv() {
            let cu = self.array("cu_seqlens_kv");
            (batch_kv, seqlen_kv) = sequences(cu, self.max_seqlens[1], "kv")?;
        } else if plan.page_size > 0 {
            plan.expect_page(k, "k")?;
            batch_kv = batch;
            let table = self.array("page_table");
            seqlen_kv = page_rows(table, self.max_seqlens[1], batch, plan.page_size)?;
        } else {
            expect_no_bound(self.max_seqlens[1], "max_seqlen_kv", "VARLEN_KV or PAGED_KV")?;
        }
        if batch != batch_kv {
            let message = format!(
                "k holds {batch_kv} sequences, but q holds {batch}; give as many keys and values as \
                 there are queries: View::strided with a batch stride of 0 repeats one"
            );
            return Err(invalid(Reason::SIZE, "k", message));
        }
        let total_q = if plan.varlen_q() { q.seq } else { 0 };
        let total_kv = if plan.varlen_kv() { k.seq } else { 0 };
        Ok(Sizes { batch, seqlen_q, seqlen_kv, total_q, total_kv })
    }

    fn expect_seed(&self, plan: &Resolved) -> Result<()> {
        let dropout = plan.desc.dropout;
        if dropout == 0.0 || self.rng_seed.is_some() || self.array("rng_device").is_some() {
            return Ok(());
        }
        let message = format!(
            "the plan's dropout is {dropout}, but there is no seed, and every call would drop the same \
             weights; give Inputs::rng_seed, with another seed or offset in each call, and in backward that \
             of its forward call"
        );
        Err(invalid(Reason::DROPOUT, "rng_seed", message))
    }
}

/// Refuses a longest sequence of an array that has none.
pub(crate) fn expect_no_bound(bound: Option<usize>, field: &str, layout: &str) -> Result<()> {
    let Some(tokens) = bound else { return Ok(()) };
    let message = format!(
        "{field} = {tokens} has a meaning only with {layout}; ask for that, or leave it out"
    );
    Err(invalid(Reason::VALUE, field, message))
}

/// The tokens that a sequence has room for in its pages, unless a bound is given.
pub(crate) fn page_rows(
    table: Option<&Raw>,
    bound: Option<usize>,
    batch: usize,
    page_size: usize,
) -> Result<usize> {
    match (bound, table) {
        (Some(longest), _) => Ok(longest),
        (None, Some(table)) => Ok(table.rows(batch, "page_table")?.0.saturating_mul(page_size)),
        (None, None) => Ok(0), // the library's to refuse
    }
}

/// The entries of a row of block_index.
fn block_entries(index: Option<&Raw>, sizes: &Sizes, plan: &Resolved) -> Result<i64> {
    let lists = plan.desc.mask & sys::flashattn_mask::BLOCK_LISTS.0 != 0;
    match index {
        Some(index) if lists => {
            let block_q = usize::try_from(plan.desc.block_q).unwrap_or(0).max(1);
            let rows = [sizes.batch, plan.heads_q, sizes.seqlen_q.div_ceil(block_q)];
            int64(index.entries(rows, "block_index")?, "block_entries")
        }
        None if !lists => Ok(0),
        _ => {
            let message =
                "Inputs::block_index and DescBuilder::block_lists go together; give both \
                           or neither";
            Err(invalid(Reason::NULL_POINTER, "block_index", message))
        }
    }
}

/// How many sequences a VARLEN array (`side`: "q" or "kv") holds, and the length of the longest,
/// unless a bound is given. `cu_seqlens` was made from i32.
pub(crate) fn sequences(
    cu_seqlens: Option<&Raw>,
    bound: Option<usize>,
    side: &str,
) -> Result<(usize, usize)> {
    let field = format!("cu_seqlens_{side}");
    let Some(cu) = cu_seqlens.filter(|cu| cu.len() > 0) else {
        let message = format!(
            "{field} is missing or empty, and the plan is made for varlen sequences; give batch + 1 \
             numbers, the row where each begins and the last ends"
        );
        return Err(invalid(Reason::NULL_POINTER, &field, message));
    };
    // SAFETY: the methods of both fields take arrays of i32 only, borrowed for the call and longer.
    let longest = match (bound, unsafe { cu.host::<i32>() }) {
        (Some(longest), _) => longest,
        // The library refuses sums that decrease.
        (None, Some(cu)) => {
            let lengths = cu.windows(2).map(|w| i64::from(w[1]) - i64::from(w[0]));
            usize::try_from(lengths.max().unwrap_or(0)).unwrap_or(0)
        }
        (None, None) => {
            let message = format!(
                "{field} is device memory, which is not read here; give the length of the longest \
                 sequence, or a bound of it, with max_seqlen_{side}"
            );
            return Err(invalid(Reason::SIZE, &field, message));
        }
    };
    Ok((cu.len() - 1, longest))
}
