//! Arrays of 8 bits from wider ones.

use std::ffi::c_void;

use flashattn_sys as sys;

use crate::arguments::{parallel, Pool};
use crate::array::{Array, ArrayMut};
use crate::arrays::{methods, Arrays};
use crate::error::{check_with, invalid, Result};
use crate::inputs::{expect_no_bound, sequences};
use crate::parallel::with_pool;
use crate::{Dims, Dtype, Element, Plan, Reason, Sizes, View, ViewMut};

/// What [`Plan::quantize`] reads: q, k and v, of which each may be left out, and lengths. The comment of
/// each array is the header's. `T`: `f32`, `f16` or `bf16`.
#[derive(Clone, Debug)]
#[must_use]
pub struct QuantizeInputs<'a, T> {
    q: Option<View<'a, T>>,
    k: Option<View<'a, T>>,
    v: Option<View<'a, T>>,
    arrays: Arrays<sys::flashattn_quantize_args>,
    max_seqlens: [Option<usize>; 2], // of queries, of keys
    transform: sys::flashattn_transform,
    rotation_seed: u64,
}

impl<T> Default for QuantizeInputs<'_, T> {
    fn default() -> Self {
        Self {
            q: None,
            k: None,
            v: None,
            arrays: Arrays::default(),
            max_seqlens: [None; 2],
            transform: sys::flashattn_transform(0),
            rotation_seed: 0,
        }
    }
}

macro_rules! inputs {
    ($($entry:tt)*) => {
        impl<'a, T> QuantizeInputs<'a, T> {
            methods!(Array, $($entry)*);
        }
    };
}

sys::arrays!(flashattn_quantize_args, input => inputs);

impl<'a, T: Element> QuantizeInputs<'a, T> {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Queries: (batch, seqlen_q, heads_q, dim_qk), or (total_q, heads_q, dim_qk) with VARLEN_Q.
    pub fn q(mut self, q: View<'a, T>) -> Self {
        self.q = Some(q);
        self
    }

    /// Keys: (batch, seqlen_kv, heads_kv, dim_qk), or (total_kv, heads_kv, dim_qk) with VARLEN_KV.
    pub fn k(mut self, k: View<'a, T>) -> Self {
        self.k = Some(k);
        self
    }

    /// Values: (batch, seqlen_kv, heads_kv, dim_v), or (total_kv, heads_kv, dim_v) with VARLEN_KV.
    pub fn v(mut self, v: View<'a, T>) -> Self {
        self.v = Some(v);
        self
    }

    /// The longest sequence of queries, for VARLEN_Q. Left out, it is read from cu_seqlens_q where
    /// the host can.
    pub fn max_seqlen_q(mut self, tokens: usize) -> Self {
        self.max_seqlens[0] = Some(tokens);
        self
    }

    /// The longest sequence of keys, for VARLEN_KV. Left out, it is read from cu_seqlens_kv where the
    /// host can.
    pub fn max_seqlen_kv(mut self, tokens: usize) -> Self {
        self.max_seqlens[1] = Some(tokens);
        self
    }

    /// Takes from k its mean over the tokens of a sequence, which is written to
    /// [`QuantizeOutput::k_mean`]: the softmax is the same, but not beside softcap or a sink (Zhang et
    /// al. 2024).
    pub fn smooth_k(mut self) -> Self {
        self.transform |= sys::flashattn_transform::SMOOTH_K;
        self
    }

    /// Rotates q and k by a Hadamard matrix with random signs, so that outliers spread: scores stay.
    /// Both need the same seed (Shah et al. 2024).
    pub fn rotate(mut self, rotation_seed: u64) -> Self {
        self.transform |= sys::flashattn_transform::ROTATE;
        self.rotation_seed = rotation_seed;
        self
    }

    fn sizes(&self, plan: &Plan) -> Result<Sizes> {
        let plan = &plan.resolved;
        for (given, varlen, heads, dim, name) in [
            (self.q, plan.varlen_q(), plan.heads_q, plan.dim_qk, "q"),
            (self.k, plan.varlen_kv(), plan.heads_kv, plan.dim_qk, "k"),
            (self.v, plan.varlen_kv(), plan.heads_kv, plan.dim_v, "v"),
        ] {
            if let Some(given) = given {
                plan.expect_dims(given.dims(), varlen, heads, dim, name)?;
            }
        }
        let (q, k, v) = (self.q.map(|q| q.dims()), self.k, self.v.map(|v| v.dims()));
        let kv = k.map(|k| k.dims()).or(v);
        if let (Some(kv), Some(v)) = (kv, v) {
            if (kv.batch, kv.seq) != (v.batch, v.seq) {
                let message =
                    format!("v is {v}, but k is {kv}; a value is needed for each key, and no more");
                return Err(invalid(Reason::SIZE, "v", message));
            }
        }
        let side = |given: Option<Dims>, varlen: bool, bound: Option<usize>, side: &str| {
            let rows = given.map_or(0, |given| given.seq);
            if varlen {
                let cu = self.arrays.get(&format!("cu_seqlens_{side}"));
                let (batch, longest) = sequences(cu, bound, side)?;
                // Without an array as many rows as there may be.
                let most = batch.saturating_mul(longest);
                return Ok((Some(batch), longest, given.map_or(most, |given| given.seq)));
            }
            let layout = format!("VARLEN_{}", side.to_uppercase());
            expect_no_bound(bound, &format!("max_seqlen_{side}"), &layout)?;
            Ok((given.map(|given| given.batch), rows, 0))
        };
        let (of_q, seqlen_q, total_q) = side(q, plan.varlen_q(), self.max_seqlens[0], "q")?;
        let (of_kv, seqlen_kv, total_kv) = side(kv, plan.varlen_kv(), self.max_seqlens[1], "kv")?;
        let batch = of_q.or(of_kv).unwrap_or(0);
        if of_kv.is_some_and(|keys| keys != batch) {
            let message = format!(
                "k and v hold {} sequences, but q holds {batch}; give as many",
                of_kv.unwrap_or(0)
            );
            return Err(invalid(Reason::SIZE, "batch", message));
        }
        Ok(Sizes { batch, seqlen_q, seqlen_kv, total_q, total_kv })
    }
}

/// What [`Plan::quantize`] writes, each for an input that is given. `Q`, `K`: the plan's dtype and
/// dtype_kv; a q that is no [`F8E4M3`](crate::F8E4M3), beside a cache, is only rotated. The comment of
/// each array is the header's.
#[derive(Debug)]
#[must_use]
pub struct QuantizeOutput<'a, Q, K = Q> {
    q: Option<ViewMut<'a, Q>>,
    k: Option<ViewMut<'a, K>>,
    v: Option<ViewMut<'a, K>>,
    arrays: Arrays<sys::flashattn_quantize_args>,
    pool: Pool<'a>,
}

impl<Q, K> Default for QuantizeOutput<'_, Q, K> {
    fn default() -> Self {
        Self { q: None, k: None, v: None, arrays: Arrays::default(), pool: Pool::default() }
    }
}

macro_rules! outputs {
    ($($entry:tt)*) => {
        impl<'a, Q, K> QuantizeOutput<'a, Q, K> {
            methods!(ArrayMut, $($entry)*);
        }
    };
}

sys::arrays!(flashattn_quantize_args, output => outputs);

impl<'a, Q: Element, K: Element> QuantizeOutput<'a, Q, K> {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// With the shape of q.
    pub fn q(mut self, q_out: ViewMut<'a, Q>) -> Self {
        self.q = Some(q_out);
        self
    }

    /// With the shape of k.
    pub fn k(mut self, k_out: ViewMut<'a, K>) -> Self {
        self.k = Some(k_out);
        self
    }

    /// With the shape of v.
    pub fn v(mut self, v_out: ViewMut<'a, K>) -> Self {
        self.v = Some(v_out);
        self
    }

    parallel!();
}

impl Plan {
    /// Makes 8-bit numbers of wider ones: element = round(x * (1 / descale)), with the largest
    /// magnitude of a head, or of descale_block tokens, at 448, in `i8` at 127. The plan's dtype or
    /// dtype_kv has 8 bits; the same plan computes attention with what is written.
    ///
    /// ```
    /// # use flashattn::{DescBuilder, Dtype, QuantizeInputs, QuantizeOutput, View, ViewMut, F8E4M3};
    /// let plan = DescBuilder::new(Dtype::F8E4M3, 2, 4).dtype_o(Dtype::F32).build()?;
    /// let (k, dims) = (vec![3.5f32; 5 * 2 * 4], [1, 5, 2, 4]); // (batch, seq, heads, dim)
    /// let (mut k8, mut descale) = (vec![F8E4M3(0); k.len()], [0f32; 2]); // one of a head
    /// plan.quantize(
    ///     &QuantizeInputs::new().k(View::new(&k, dims)?),
    ///     QuantizeOutput::<F8E4M3>::new().k(ViewMut::new(&mut k8, dims)?).descale_k(&mut descale),
    /// )?;
    /// assert_eq!(descale, [3.5 / 448.0; 2]);
    /// # Ok::<(), flashattn::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// INVALID_ARGUMENT: the arrays do not fit the plan or each other; nothing was written then.
    /// UNSUPPORTED: PAGED_KV, LATENT_KV; the plan is for a GPU, see [`Plan::quantize_on`].
    pub fn quantize<T: Element, Q: Element, K: Element>(
        &self,
        inputs: &QuantizeInputs<'_, T>,
        output: QuantizeOutput<'_, Q, K>,
    ) -> Result<()> {
        self.expect_cpu("quantize_on")?;
        // SAFETY: on the CPU the call is over when it returns, and all arrays were checked to be
        // borrowed memory with as many elements as the library touches.
        unsafe { self.quantize_on(inputs, output, std::ptr::null_mut()) }
    }

    /// [`Plan::quantize`], enqueued on a stream.
    ///
    /// # Errors
    ///
    /// Those of quantize; DEVICE.
    ///
    /// # Safety
    ///
    /// As of [`Plan::forward_on`].
    pub unsafe fn quantize_on<T: Element, Q: Element, K: Element>(
        &self,
        inputs: &QuantizeInputs<'_, T>,
        mut output: QuantizeOutput<'_, Q, K>,
        stream: *mut c_void,
    ) -> Result<()> {
        let plan = &self.resolved;
        let sizes = inputs.sizes(self)?.lower()?;
        let mut args = sys::flashattn_quantize_args {
            batch: sizes.batch,
            seqlen_q: sizes.seqlen_q,
            seqlen_kv: sizes.seqlen_kv,
            total_q: sizes.total_q,
            total_kv: sizes.total_kv,
            dtype: T::DTYPE.0,
            transform: inputs.transform.0,
            rotation_seed: inputs.rotation_seed,
            ..Default::default()
        };
        inputs.arrays.lower(plan, &mut args)?;
        output.arrays.lower(plan, &mut args)?;
        for (view, field, name) in [
            (&inputs.q, &mut args.q, "q"),
            (&inputs.k, &mut args.k, "k"),
            (&inputs.v, &mut args.v, "v"),
        ] {
            if let Some(view) = view {
                *field = view.tensor(plan.memory, name)?;
            }
        }
        args.q_out = self.result(&mut output.q, inputs.q, plan.desc.dtype, "q")?;
        args.k_out = self.result(&mut output.k, inputs.k, plan.desc.dtype_kv, "k")?;
        args.v_out = self.result(&mut output.v, inputs.v, plan.desc.dtype_kv, "v")?;
        with_pool(output.pool.0, |parallel, user| {
            (args.parallel, args.parallel_user) = (parallel, user);
            check_with(|error| {
                args.error = error;
                // SAFETY: a live plan; the caller's promise.
                unsafe { sys::flashattn_quantize(self.as_raw(), &args, stream) }
            })
        })
    }

    /// q_out, k_out or v_out, checked against its input.
    fn result<T: Element, O: Element>(
        &self,
        output: &mut Option<ViewMut<'_, O>>,
        input: Option<View<'_, T>>,
        dtype: i32,
        name: &str,
    ) -> Result<sys::flashattn_tensor> {
        let Some(output) = output else { return Ok(Default::default()) };
        let field = format!("{name}_out");
        let Some(input) = input else {
            let message = format!("{field} is given without {name}; give both");
            return Err(invalid(Reason::NULL_POINTER, &field, message));
        };
        self.resolved.expect_dtype(O::DTYPE, Dtype(dtype), &field)?;
        self.expect_same(output.dims(), input.dims(), &field)?;
        output.tensor(self.resolved.memory, &field)
    }
}
