//! New keys and values into a cache.

use std::ffi::c_void;

use flashattn_sys as sys;

use crate::error::{check_with, int64, invalid, Result};
use crate::parallel::with_pool;
use crate::{AppendInputs, AppendOutput, Element, Plan, Reason, ViewMut};

impl Plan {
    /// Writes new keys and values behind those of a cache, dense or paged, rotated and quantised on
    /// the way, and rotates q: token i of sequence b becomes row lens_kv\[b\] + i.
    ///
    /// ```
    /// # use flashattn::{AppendInputs, AppendOutput, DescBuilder, Dtype, Inputs, View, ViewMut, Workspace};
    /// let plan = DescBuilder::new(Dtype::F32, 8, 64).heads_kv(2).causal().build()?;
    /// let (mut k_cache, mut v_cache) = (vec![0f32; 100 * 2 * 64], vec![0f32; 100 * 2 * 64]);
    /// let mut lens = [0i32]; // tokens in the cache
    /// let mut workspace = Workspace::new();
    /// for tokens in [5, 1, 1] {
    ///     let (mut q, kv) = (vec![0.5f32; tokens * 8 * 64], vec![0.5f32; tokens * 2 * 64]);
    ///     let new = View::new(&kv, [1, tokens, 2, 64])?;
    ///     let cache = [1, 100, 2, 64];
    ///     plan.append_kv(
    ///         &AppendInputs::new(new, new).rotary(10000.0, 64),
    ///         AppendOutput::new(ViewMut::new(&mut k_cache, cache)?, ViewMut::new(&mut v_cache, cache)?)
    ///             .q_in_place(ViewMut::new(&mut q, [1, tokens, 8, 64])?)
    ///             .lens_in_place(&mut lens),
    ///     )?;
    ///     let mut o = vec![0f32; q.len()];
    ///     let q = View::new(&q, [1, tokens, 8, 64])?;
    ///     let inputs = Inputs::new(q, View::new(&k_cache, cache)?, View::new(&v_cache, cache)?);
    ///     plan.forward(
    ///         &inputs.lens_kv(&lens),
    ///         ViewMut::new(&mut o, [1, tokens, 8, 64])?,
    ///         &mut workspace,
    ///     )?;
    ///     assert!(o.iter().all(|x| (x - 0.5).abs() < 1e-6));
    /// }
    /// assert_eq!(lens, [7]);
    /// # Ok::<(), flashattn::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// INVALID_ARGUMENT: the arrays do not fit the plan or each other; tokens that have no room or no
    /// page; nothing was written then. UNSUPPORTED: the plan is for a GPU, see [`Plan::append_kv_on`].
    pub fn append_kv<T: Element, K: Element>(
        &self,
        inputs: &AppendInputs<'_, T>,
        output: AppendOutput<'_, T, K>,
    ) -> Result<()> {
        self.expect_cpu("append_kv_on")?;
        // SAFETY: on the CPU the call is over when it returns, and all arrays were checked to be
        // borrowed memory with as many elements as the library touches.
        unsafe { self.append_kv_on(inputs, output, std::ptr::null_mut()) }
    }

    /// [`Plan::append_kv`], enqueued on a stream. A GPU leaves out tokens that have no room.
    ///
    /// # Errors
    ///
    /// Those of append_kv; DEVICE.
    ///
    /// # Safety
    ///
    /// As of [`Plan::forward_on`].
    pub unsafe fn append_kv_on<T: Element, K: Element>(
        &self,
        inputs: &AppendInputs<'_, T>,
        mut output: AppendOutput<'_, T, K>,
        stream: *mut c_void,
    ) -> Result<()> {
        let plan = &self.resolved;
        let (mut arrays, mut written) = (inputs.arrays, output.arrays);
        let twice = |field: &'static str| {
            let message = format!("{field} is given twice, once of them in place; give it once");
            Err(invalid(Reason::OVERLAP, field, message))
        };
        if output.q_in_place && inputs.q.is_some() {
            return twice("q");
        }
        let updates = output.descales.iter().any(Option::is_some);
        let [descale_k, descale_v] = output.descales;
        for (field, array, updated) in [
            ("lens_kv", output.lens_in_place, false),
            ("descale_k", descale_k, updates),
            ("descale_v", descale_v, updates),
        ] {
            if array.is_some() && arrays.get(field).is_some() {
                return twice(field);
            }
            if array.is_some() || updated {
                arrays.put(field, array);
            }
        }
        if output.lens_in_place.is_some() {
            if written.get("lens_out").is_some() {
                return twice("lens_out");
            }
            written.put("lens_out", output.lens_in_place);
        }
        let q_out = output.q.as_ref().map(ViewMut::dims);
        let q = if output.q_in_place { q_out } else { inputs.q.map(|q| q.dims()) };
        let (sizes, pages) = inputs.sizes(plan, q, output.cache(plan)?)?;
        let sizes_c = sizes.lower()?;
        let mut args = sys::flashattn_append_kv_args {
            batch: sizes_c.batch,
            seqlen_q: sizes_c.seqlen_q,
            seqlen_kv: sizes_c.seqlen_kv,
            total_q: sizes_c.total_q,
            total_kv: sizes_c.total_kv,
            dtype: T::DTYPE.0,
            pages: int64(pages, "pages")?,
            update_descales: updates.into(),
            ..Default::default()
        };
        inputs.add_rotary(&mut args)?;
        arrays.stride_pages(sizes.batch)?;
        arrays.lower(plan, &mut args)?;
        written.lower(plan, &mut args)?;
        let memory = plan.memory;
        for (view, field, name) in [
            (&inputs.q, &mut args.q, "q"),
            (&inputs.k, &mut args.k, "k"),
            (&inputs.v, &mut args.v, "v"),
        ] {
            if let Some(view) = view {
                *field = view.tensor(memory, name)?;
            }
        }
        for (view, field, name) in [
            (&mut output.k_cache, &mut args.k_cache, "k_cache"),
            (&mut output.v_cache, &mut args.v_cache, "v_cache"),
        ] {
            if let Some(view) = view {
                *field = view.tensor(memory, name)?;
            }
        }
        if let Some(q_out) = &mut output.q {
            self.expect_same(q_out.dims(), q.unwrap_or(q_out.dims()), "q_out")?;
            args.q_out = q_out.tensor(memory, "q_out")?;
            if output.q_in_place {
                args.q = args.q_out;
            }
        }
        with_pool(output.pool.0, |parallel, user| {
            (args.parallel, args.parallel_user) = (parallel, user);
            check_with(|error| {
                args.error = error;
                // SAFETY: a live plan; the caller's promise.
                unsafe { sys::flashattn_append_kv(self.as_raw(), &args, stream) }
            })
        })
    }
}
