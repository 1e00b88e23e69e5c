//! What append_kv reads and writes.

use flashattn_sys as sys;

use crate::arguments::{parallel, Pool};
use crate::array::{Array, ArrayMut, Raw};
use crate::arrays::{methods, Arrays};
use crate::error::{int32, invalid, Result};
use crate::inputs::{expect_no_bound, page_rows, sequences};
use crate::plan::Resolved;
use crate::{Dims, Dtype, Element, Reason, Scalar, Sizes, View, ViewMut};

/// The angles by which pairs of elements turn.
#[derive(Clone, Copy, Debug)]
enum Angles {
    Base(f32),
    Tables(Dtype),
}

/// What [`Plan::append_kv`](crate::Plan::append_kv) reads: new tokens, where they go, and how they are
/// rotated.
///
/// Of q, k and v each may be left out, and then so is what is written of it. q and k are the same
/// tokens. `T`: their type, and that of v; the plan's, or beside an F8E4M3 one `f32`, `f16`, `bf16`.
/// What is written in place, [`AppendOutput`] takes instead. The comment of each array is the header's.
#[derive(Clone, Debug)]
#[must_use]
pub struct AppendInputs<'a, T> {
    pub(crate) q: Option<View<'a, T>>,
    pub(crate) k: Option<View<'a, T>>,
    pub(crate) v: Option<View<'a, T>>,
    pub(crate) arrays: Arrays<sys::flashattn_append_kv_args>,
    max_seqlens: [Option<usize>; 2], // of new tokens, of the cache
    angles: Option<(Angles, usize)>,
    interleaved: bool,
}

impl<T> Default for AppendInputs<'_, T> {
    fn default() -> Self {
        Self {
            q: None,
            k: None,
            v: None,
            arrays: Arrays::default(),
            max_seqlens: [None; 2],
            angles: None,
            interleaved: false,
        }
    }
}

macro_rules! inputs {
    ($($entry:tt)*) => {
        impl<'a, T> AppendInputs<'a, T> {
            methods!(Array, $($entry)*);
        }
    };
}

sys::arrays!(flashattn_append_kv_args, input => inputs);

impl<'a, T: Element> AppendInputs<'a, T> {
    /// Keys and values: (batch, seqlen_q, heads_kv, dim), or (total_q, heads_kv, dim) with VARLEN_Q.
    pub fn new(k: View<'a, T>, v: View<'a, T>) -> Self {
        Self { k: Some(k), v: Some(v), ..Self::default() }
    }

    /// Queries alone, which are rotated and not kept: (batch, seqlen_q, heads_q, dim_qk).
    pub fn only_q(q: View<'a, T>) -> Self {
        Self::default().q(q)
    }

    /// Keys alone, where k and v share a cache (latent attention).
    pub fn only_k(k: View<'a, T>) -> Self {
        Self { k: Some(k), ..Self::default() }
    }

    /// The queries of the same tokens, to be rotated: (batch, seqlen_q, heads_q, dim_qk), or (total_q,
    /// heads_q, dim_qk) with VARLEN_Q.
    pub fn q(mut self, q: View<'a, T>) -> Self {
        self.q = Some(q);
        self
    }

    /// The longest sequence of new tokens, for VARLEN_Q. Left out, it is read from cu_seqlens_q where
    /// the host can.
    pub fn max_seqlen_q(mut self, tokens: usize) -> Self {
        self.max_seqlens[0] = Some(tokens);
        self
    }

    /// The rows that the longest sequence has in the cache, for VARLEN_KV, PAGED_KV and calls without
    /// a cache. Left out, they are read from cu_seqlens_kv or lens_kv, or are what a row of the page
    /// table can hold.
    pub fn max_seqlen_kv(mut self, tokens: usize) -> Self {
        self.max_seqlens[1] = Some(tokens);
        self
    }

    /// Turns the first `dim` elements of each head of q and k: pair c of position p by the angle
    /// p * base^(-2 c / dim), base usually 10000 (Su et al. 2021). Pairs are c and c + dim / 2, unless
    /// [`AppendInputs::interleaved`] says otherwise.
    pub fn rotary(mut self, base: f32, dim: usize) -> Self {
        self.arrays.put("rotary_cos", None);
        self.arrays.put("rotary_sin", None);
        self.angles = Some((Angles::Base(base), dim));
        self
    }

    /// [`AppendInputs::rotary`] by cosines and sines, (positions, dim / 2) each.
    pub fn rotary_tables<R: Scalar>(
        mut self,
        cos: impl Into<Array<'a, R>>,
        sin: impl Into<Array<'a, R>>,
        dim: usize,
    ) -> Self {
        self.arrays.put("rotary_cos", Some(cos.into().raw()));
        self.arrays.put("rotary_sin", Some(sin.into().raw()));
        self.angles = Some((Angles::Tables(R::DTYPE), dim));
        self
    }

    /// Pairs are elements 2 c and 2 c + 1.
    pub fn interleaved(mut self) -> Self {
        self.interleaved = true;
        self
    }

    pub(crate) fn array(&self, name: &str) -> Option<&Raw> {
        self.arrays.get(name)
    }

    /// Sizes of the call, and the number of pages.
    pub(crate) fn sizes(
        &self,
        plan: &Resolved,
        q: Option<Dims>,
        cache: Option<Dims>,
    ) -> Result<(Sizes, usize)> {
        let mut tokens: Option<Dims> = None;
        for (given, heads, dim, name) in [
            (self.k.map(|k| k.dims()), plan.heads_kv, plan.dim_qk, "k"),
            (self.v.map(|v| v.dims()), plan.heads_kv, plan.dim_v, "v"),
            (q, plan.heads_q, plan.dim_qk, "q"),
        ] {
            let Some(given) = given else { continue };
            plan.expect_dims(given, plan.varlen_q(), heads, dim, name)?;
            let first = *tokens.get_or_insert(given);
            if (first.batch, first.seq) != (given.batch, given.seq) {
                let message = format!(
                    "{name} is {given}, but another array of new tokens is {first}; q, k and v are the \
                     same tokens: give as many"
                );
                return Err(invalid(Reason::SIZE, name, message));
            }
        }
        let tokens = tokens.unwrap_or([0, 0, 0, 0].into());
        let (mut batch, mut seqlen_q) = (tokens.batch, tokens.seq);
        if plan.varlen_q() {
            let cu = self.array("cu_seqlens_q");
            (batch, seqlen_q) = sequences(cu, self.max_seqlens[0], "q")?;
        } else {
            expect_no_bound(self.max_seqlens[0], "max_seqlen_q", "VARLEN_Q")?;
        }
        let given = cache.unwrap_or([batch, 0, 0, 0].into());
        let (mut batch_kv, mut seqlen_kv, mut pages) = (given.batch, given.seq, 0);
        if plan.varlen_kv() {
            let cu = self.array("cu_seqlens_kv");
            (batch_kv, seqlen_kv) = sequences(cu, self.max_seqlens[1], "kv")?;
        } else if plan.page_size > 0 {
            if cache.is_some() {
                plan.expect_page(given, "k_cache")?;
            }
            (batch_kv, pages) = (batch, given.batch);
            let table = self.array("page_table");
            seqlen_kv = page_rows(table, self.max_seqlens[1], batch, plan.page_size)?;
        } else if cache.is_some() {
            expect_no_bound(self.max_seqlens[1], "max_seqlen_kv", "VARLEN_KV or PAGED_KV")?;
        } else {
            seqlen_kv = match self.max_seqlens[1] {
                Some(rows) => rows,
                None => self.tokens_kept()?.saturating_add(seqlen_q),
            };
        }
        if batch_kv != batch {
            let message = format!(
                "the cache holds {batch_kv} sequences, but the new tokens are of {batch}; give as many"
            );
            return Err(invalid(Reason::SIZE, "k_cache", message));
        }
        let total_q = if plan.varlen_q() { tokens.seq } else { 0 };
        let total_kv = if plan.varlen_kv() { given.seq } else { 0 };
        Ok((Sizes { batch, seqlen_q, seqlen_kv, total_q, total_kv }, pages))
    }

    /// The tokens of the longest sequence of a cache that is not given.
    fn tokens_kept(&self) -> Result<usize> {
        // Without lengths the library refuses the call.
        let Some(lens) = self.array("lens_kv") else { return Ok(0) };
        // SAFETY: made from i32, borrowed for the call and longer.
        let Some(lens) = (unsafe { lens.host::<i32>() }) else {
            let message =
                "lens_kv is device memory, which is not read here, and no cache is given; \
                           give the rows that a sequence has there with max_seqlen_kv";
            return Err(invalid(Reason::SIZE, "lens_kv", message));
        };
        Ok(lens.iter().map(|&n| usize::try_from(n).unwrap_or(0)).max().unwrap_or(0))
    }

    pub(crate) fn add_rotary(&self, args: &mut sys::flashattn_append_kv_args) -> Result<()> {
        if self.interleaved {
            args.rotary = sys::flashattn_rotary::INTERLEAVED.0;
        }
        let Some((angles, dim)) = &self.angles else { return Ok(()) };
        args.rotary_dim = int32(*dim, "rotary_dim")?;
        match angles {
            Angles::Base(base) => args.rotary_base = *base,
            Angles::Tables(dtype) => args.dtype_rotary = dtype.0,
        }
        let (Some(cos), Some(sin)) = (self.array("rotary_cos"), self.array("rotary_sin")) else {
            return Ok(());
        };
        let rows = cos.rows_of(dim / 2, "rotary_cos")?;
        let others = sin.rows_of(dim / 2, "rotary_sin")?;
        if rows != others {
            let message = format!(
                "rotary_sin has {others} rows, but rotary_cos has {rows}; give a row of both for each \
                 position"
            );
            return Err(invalid(Reason::SIZE, "rotary_sin", message));
        }
        args.rotary_positions = int32(rows, "rotary_positions")?;
        Ok(())
    }
}

/// What [`Plan::append_kv`](crate::Plan::append_kv) writes. `K`: the type of the cache, the plan's
/// dtype_kv.
#[derive(Debug)]
#[must_use]
pub struct AppendOutput<'a, T, K = T> {
    pub(crate) k_cache: Option<ViewMut<'a, K>>,
    pub(crate) v_cache: Option<ViewMut<'a, K>>,
    pub(crate) q: Option<ViewMut<'a, T>>,
    pub(crate) q_in_place: bool,
    pub(crate) lens_in_place: Option<Raw>,
    pub(crate) arrays: Arrays<sys::flashattn_append_kv_args>,
    pub(crate) descales: [Option<Raw>; 2],
    pub(crate) pool: Pool<'a>,
}

impl<T, K> Default for AppendOutput<'_, T, K> {
    fn default() -> Self {
        Self {
            k_cache: None,
            v_cache: None,
            q: None,
            q_in_place: false,
            lens_in_place: None,
            arrays: Arrays::default(),
            descales: [None, None],
            pool: Pool::default(),
        }
    }
}

macro_rules! outputs {
    ($($entry:tt)*) => {
        impl<'a, T, K> AppendOutput<'a, T, K> {
            methods!(ArrayMut, $($entry)*);
        }
    };
}

sys::arrays!(flashattn_append_kv_args, output => outputs);

impl<'a, T: Element, K: Element> AppendOutput<'a, T, K> {
    /// The caches, whose rows lens_kv\[b\] and later are written: (batch, capacity, heads_kv, dim);
    /// with VARLEN_KV (total_kv, heads_kv, dim); with PAGED_KV (pages, page_size, heads_kv, dim).
    pub fn new(k_cache: ViewMut<'a, K>, v_cache: ViewMut<'a, K>) -> Self {
        Self { k_cache: Some(k_cache), v_cache: Some(v_cache), ..Self::default() }
    }

    /// q rotated, for [`AppendInputs::only_q`]: with the shape of q.
    pub fn only_q(q_out: ViewMut<'a, T>) -> Self {
        Self::default().q_out(q_out)
    }

    /// The cache of keys, for [`AppendInputs::only_k`].
    pub fn only_k(k_cache: ViewMut<'a, K>) -> Self {
        Self { k_cache: Some(k_cache), ..Self::default() }
    }

    /// q rotated, with the shape of q. Required with q.
    pub fn q_out(mut self, q_out: ViewMut<'a, T>) -> Self {
        (self.q, self.q_in_place) = (Some(q_out), false);
        self
    }

    /// Rotates these queries where they lie, in place of [`AppendInputs::q`].
    pub fn q_in_place(mut self, q: ViewMut<'a, T>) -> Self {
        (self.q, self.q_in_place) = (Some(q), true);
        self
    }

    /// lens_kv, in place of [`AppendInputs::lens_kv`] and [`AppendOutput::lens_out`]: the new tokens
    /// are added to it.
    pub fn lens_in_place(mut self, lens_kv: impl Into<ArrayMut<'a, i32>>) -> Self {
        self.lens_in_place = Some(lens_kv.into().raw());
        self
    }

    /// (batch, heads_kv, ceil(seqlen_kv / descale_block)), in place of [`AppendInputs::descale_k`]:
    /// descales are made for the new tokens of a cache of 8 bits. A block's largest magnitude over
    /// 448 (i8: 127), with more than one token a block the next power of two. Where a block grows
    /// beyond its descale, what it held is rounded again: its pages must be of this sequence alone.
    pub fn descale_k(mut self, descale_k: impl Into<ArrayMut<'a, f32>>) -> Self {
        self.descales[0] = Some(descale_k.into().raw());
        self
    }

    /// Likewise, in place of [`AppendInputs::descale_v`]: required with v where k's are made.
    pub fn descale_v(mut self, descale_v: impl Into<ArrayMut<'a, f32>>) -> Self {
        self.descales[1] = Some(descale_v.into().raw());
        self
    }

    parallel!();

    pub(crate) fn cache(&self, plan: &Resolved) -> Result<Option<Dims>> {
        let mut first: Option<Dims> = None;
        for (cache, dim, name) in
            [(&self.k_cache, plan.dim_qk, "k_cache"), (&self.v_cache, plan.dim_v, "v_cache")]
        {
            let Some(dims) = cache.as_ref().map(ViewMut::dims) else { continue };
            plan.expect_dtype(K::DTYPE, Dtype(plan.desc.dtype_kv), name)?;
            plan.expect_dims(dims, plan.varlen_kv(), plan.heads_kv, dim, name)?;
            let other = *first.get_or_insert(dims);
            if (other.batch, other.seq) != (dims.batch, dims.seq) {
                let message = format!(
                    "v_cache is {dims}, but k_cache is {other}; only their dim may differ: give as much \
                     room in both"
                );
                return Err(invalid(Reason::SIZE, name, message));
            }
        }
        Ok(first)
    }
}
