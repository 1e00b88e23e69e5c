//! New keys and values into a cache.

use std::ffi::c_void;

use flashattn_sys as sys;

use crate::array::{self, index};
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
        for (field, twice) in [
            ("q", output.q_in_place && inputs.q.is_some()),
            ("lens_kv", output.lens_in_place && inputs.array("lens_kv").is_some()),
            ("descale_k", output.descales[0].is_some() && inputs.array("descale_k").is_some()),
            ("descale_v", output.descales[1].is_some() && inputs.array("descale_v").is_some()),
        ] {
            if twice {
                let message = format!("{field} is given as an input and in place; give it once");
                return Err(invalid(Reason::OVERLAP, field, message));
            }
        }
        let q_out = output.q.as_ref().map(ViewMut::dims);
        let q = if output.q_in_place { q_out } else { inputs.q.map(|q| q.dims()) };
        let (sizes, pages) = inputs.sizes(plan, q, output.cache(plan)?)?;
        // Lengths, the page table and descales are those of forward's arguments.
        let mut beside = sizes.lower()?;
        let mut arrays = inputs.arrays;
        if output.lens_in_place {
            arrays[index("lens_kv")] = output.lens;
        }
        let updates = output.descales.iter().any(Option::is_some);
        for (name, descale) in ["descale_k", "descale_v"].into_iter().zip(output.descales) {
            if updates {
                arrays[index(name)] = descale;
            }
        }
        if let Some(table) = &mut arrays[index("page_table")] {
            let (_, stride) = table.rows(sizes.batch, "page_table")?;
            *table = table.with_row_stride(stride);
        }
        array::lower(&arrays, plan, &mut beside)?;
        let mut args = sys::flashattn_append_kv_args {
            batch: beside.batch,
            seqlen_q: beside.seqlen_q,
            seqlen_kv: beside.seqlen_kv,
            total_q: beside.total_q,
            total_kv: beside.total_kv,
            dtype: T::DTYPE.0,
            cu_seqlens_q: beside.cu_seqlens_q,
            cu_seqlens_kv: beside.cu_seqlens_kv,
            lens_q: beside.lens_q,
            lens_kv: beside.lens_kv,
            starts_kv: beside.starts_kv,
            page_table: beside.page_table,
            pages: int64(pages, "pages")?,
            descale_k: beside.descale_k,
            descale_v: beside.descale_v,
            update_descales: updates.into(),
            ..Default::default()
        };
        let (memory, batch) = (plan.memory, [sizes.batch]);
        if let Some(positions) = &inputs.positions {
            args.positions = positions.packed(memory, &batch, "positions")?.cast();
        }
        if let Some(lens) = &output.lens {
            args.lens_out = lens.packed(memory, &batch, "lens_out")?.cast();
        }
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
        inputs.add_rotary(plan, &mut args)?;
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
