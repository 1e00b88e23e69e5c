//! Running a plan.

use std::ffi::c_void;

use flashattn_sys as sys;

use crate::array::Memory;
use crate::error::{check_with, int32, int64, invalid, Error, Result};
use crate::inputs::Inputs;
use crate::parallel::with_pool;
use crate::{
    ArrayMut, Dims, Dtype, Element, Gradients, Op, Output, Parallel, Part, Plan, Reason, Sizes,
    Status, Upstream, Workspace,
};

/// Where work for a GPU is enqueued, and its scratch memory.
#[derive(Clone, Copy, Debug)]
pub struct Queue {
    /// A `cudaStream_t` or `CUstream`; null: the default stream.
    pub stream: *mut c_void,
    /// The address of device memory, exclusive to a call until it is done.
    pub workspace: u64,
    /// Its bytes: at least [`Plan::workspace_size`].
    pub workspace_bytes: usize,
}

/// What the three operations hand to the library.
struct Scratch {
    workspace: *mut c_void,
    bytes: i64,
    stream: *mut c_void,
}

impl Plan {
    /// o = softmax(scale * q k^T + bias) v, for each sequence and head (Dao et al. 2022, Dao 2023).
    ///
    /// # Errors
    ///
    /// INVALID_ARGUMENT: the arrays do not fit the plan or each other, or lengths are impossible;
    /// nothing was written then. UNSUPPORTED: the plan is for a GPU, see [`Plan::forward_on`].
    pub fn forward<'a, T: Element, K: Element, O: Element>(
        &self,
        inputs: &Inputs<'_, T, K>,
        output: impl Into<Output<'a, O>>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        self.expect_cpu("forward_on")?;
        let mut output = output.into();
        let args = self.forward_args(inputs, &mut output)?;
        let scratch = self.scratch(Op::FORWARD, &args, workspace)?;
        // SAFETY: on the CPU the call is over when it returns, and all arrays were checked to be
        // borrowed memory with as many elements as the library touches.
        unsafe { self.run(Op::FORWARD, args, &scratch, output.pool.0) }
    }

    /// [`Plan::forward`], enqueued on a stream.
    ///
    /// # Errors
    ///
    /// Those of forward; WORKSPACE; DEVICE.
    ///
    /// # Safety
    ///
    /// Until the enqueued work is done, all memory given, the queue's workspace included, stays valid,
    /// and what it writes is used by nothing else.
    pub unsafe fn forward_on<'a, T: Element, K: Element, O: Element>(
        &self,
        inputs: &Inputs<'_, T, K>,
        output: impl Into<Output<'a, O>>,
        queue: &Queue,
    ) -> Result<()> {
        let mut output = output.into();
        let args = self.forward_args(inputs, &mut output)?;
        // SAFETY: the caller's promise.
        unsafe { self.run(Op::FORWARD, args, &queue.scratch()?, output.pool.0) }
    }

    /// The gradients (Dao et al. 2022, algorithm 4), for a plan made with
    /// [`DescBuilder::backward`](crate::DescBuilder::backward). `inputs` are those of forward.
    ///
    /// # Errors
    ///
    /// As of [`Plan::forward`].
    pub fn backward<T: Element, K: Element, O: Element, G: Element>(
        &self,
        inputs: &Inputs<'_, T, K>,
        upstream: &Upstream<'_, O>,
        mut gradients: Gradients<'_, G>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        self.expect_cpu("backward_on")?;
        let args = self.backward_args(inputs, upstream, &mut gradients)?;
        let scratch = self.scratch(Op::BACKWARD, &args, workspace)?;
        // SAFETY: as in forward.
        unsafe { self.run(Op::BACKWARD, args, &scratch, gradients.pool.0) }
    }

    /// [`Plan::backward`], enqueued on a stream.
    ///
    /// # Errors
    ///
    /// Those of backward; WORKSPACE; DEVICE.
    ///
    /// # Safety
    ///
    /// As of [`Plan::forward_on`].
    pub unsafe fn backward_on<T: Element, K: Element, O: Element, G: Element>(
        &self,
        inputs: &Inputs<'_, T, K>,
        upstream: &Upstream<'_, O>,
        mut gradients: Gradients<'_, G>,
        queue: &Queue,
    ) -> Result<()> {
        let args = self.backward_args(inputs, upstream, &mut gradients)?;
        // SAFETY: the caller's promise.
        unsafe { self.run(Op::BACKWARD, args, &queue.scratch()?, gradients.pool.0) }
    }

    /// Merges partial results over disjoint sets of keys into the whole. `P`: the plan's type of o,
    /// or f32. A sink must be part of one partial result only. lse of the output is optional.
    ///
    /// # Errors
    ///
    /// INVALID_ARGUMENT: no part, or one with another shape than the output.
    pub fn merge<'a, P: Element, O: Element>(
        &self,
        parts: &[Part<'_, P>],
        output: impl Into<Output<'a, O>>,
    ) -> Result<()> {
        self.expect_cpu("merge_on")?;
        // SAFETY: as in forward.
        unsafe { self.merge_on(parts, output, std::ptr::null_mut()) }
    }

    /// [`Plan::merge`], enqueued on a stream.
    ///
    /// # Errors
    ///
    /// Those of merge; DEVICE.
    ///
    /// # Safety
    ///
    /// As of [`Plan::forward_on`].
    pub unsafe fn merge_on<'a, P: Element, O: Element>(
        &self,
        parts: &[Part<'_, P>],
        output: impl Into<Output<'a, O>>,
        stream: *mut c_void,
    ) -> Result<()> {
        let mut output = output.into();
        let (memory, dims) = (self.resolved.memory, output.o.dims());
        self.expect_o::<O>(dims, dims, "o")?;
        let mut args = sys::flashattn_merge_args {
            parts: int32(parts.len(), "parts")?,
            dtype_part: P::DTYPE.0,
            o: output.o.tensor(memory, "o")?,
            ..Default::default()
        };
        if self.resolved.varlen_q() {
            args.total_q = int64(dims.seq, "total_q")?;
        } else {
            args.batch = int32(dims.batch, "batch")?;
            args.seqlen_q = int32(dims.seq, "seqlen_q")?;
        }
        output.arrays.of("merge")?.lower(&self.resolved, &mut args)?;
        // (batch, heads, seq) or (heads, tokens).
        let rows = [dims.batch, self.resolved.heads_q, dims.seq];
        let mut tensors = Vec::with_capacity(parts.len());
        let mut pointers = Vec::with_capacity(parts.len());
        for part in parts {
            self.expect_same(part.o.dims(), dims, "part_o")?;
            tensors.push(part.o.tensor(memory, "part_o")?);
            let lse = part.lse.raw().packed(memory, &rows, "part_lse")?;
            pointers.push(lse.cast::<f32>().cast_const());
        }
        args.part_o = tensors.as_ptr();
        args.part_lse = pointers.as_ptr();
        with_pool(output.pool.0, |parallel, user| {
            (args.parallel, args.parallel_user) = (parallel, user);
            check_with(|error| {
                args.error = error;
                // SAFETY: a live plan; host arrays of `parts` entries; all memory was checked above.
                unsafe { sys::flashattn_merge(self.as_raw(), &args, stream) }
            })
        })
    }

    /// Which weights the plan's dropout keeps, (batch, heads, seqlen_q, seqlen_kv): 1 = kept. Of
    /// `sizes`, batch, seqlen_q and seqlen_kv count.
    ///
    /// # Errors
    ///
    /// INVALID_ARGUMENT: `keep` has another length.
    pub fn dropout_mask<'a>(
        &self,
        sizes: &Sizes,
        rng_seed: u64,
        rng_offset: u64,
        keep: impl Into<ArrayMut<'a, u8>>,
    ) -> Result<()> {
        self.expect_cpu("sys::flashattn_dropout_mask")?;
        let mut args = sizes.lower()?;
        (args.rng_seed, args.rng_offset) = (rng_seed, rng_offset);
        let dims = [sizes.batch, self.resolved.heads_q, sizes.seqlen_q, sizes.seqlen_kv];
        let keep = keep.into().raw().packed(Memory::Host, &dims, "keep")?.cast();
        let stream = std::ptr::null_mut();
        check_with(|error| {
            args.error = error;
            // SAFETY: keep holds as many bytes as are written.
            unsafe { sys::flashattn_dropout_mask(self.as_raw(), &args, keep, stream) }
        })
    }

    fn forward_args<T: Element, K: Element, O: Element>(
        &self,
        inputs: &Inputs<'_, T, K>,
        output: &mut Output<'_, O>,
    ) -> Result<sys::flashattn_args> {
        let mut args = inputs.lower(&self.resolved)?;
        self.expect_o::<O>(output.o.dims(), inputs.q.dims(), "o")?;
        args.o = output.o.tensor(self.resolved.memory, "o")?;
        output.arrays.lower(&self.resolved, &mut args)?;
        Ok(args)
    }

    fn backward_args<T: Element, K: Element, O: Element, G: Element>(
        &self,
        inputs: &Inputs<'_, T, K>,
        upstream: &Upstream<'_, O>,
        gradients: &mut Gradients<'_, G>,
    ) -> Result<sys::flashattn_args> {
        let mut args = inputs.lower(&self.resolved)?;
        let memory = self.resolved.memory;
        let q = inputs.q.dims();
        self.expect_o::<O>(upstream.o.dims(), q, "o")?;
        self.expect_o::<O>(upstream.dout.dims(), q, "dout")?;
        // A plan without backward has none; the library refuses the call.
        let dtype_grad = Dtype(self.resolved.desc.dtype_grad);
        if dtype_grad != Dtype::DEFAULT {
            self.resolved.expect_dtype(G::DTYPE, dtype_grad, "dq")?;
        }
        self.expect_same(gradients.dq.dims(), q, "dq")?;
        self.expect_same(gradients.dk.dims(), inputs.k.dims(), "dk")?;
        self.expect_same(gradients.dv.dims(), inputs.v.dims(), "dv")?;
        args.o = upstream.o.tensor(memory, "o")?;
        args.dout = upstream.dout.tensor(memory, "dout")?;
        args.dq = gradients.dq.tensor(memory, "dq")?;
        args.dk = gradients.dk.tensor(memory, "dk")?;
        args.dv = gradients.dv.tensor(memory, "dv")?;
        upstream.arrays.lower(&self.resolved, &mut args)?;
        gradients.arrays.lower(&self.resolved, &mut args)?;
        Ok(args)
    }

    /// # Safety
    ///
    /// All memory of `args` and `scratch` is there until the work is done.
    unsafe fn run(
        &self,
        op: Op,
        mut args: sys::flashattn_args,
        scratch: &Scratch,
        pool: Option<&dyn Parallel>,
    ) -> Result<()> {
        let run = if op == Op::FORWARD { sys::flashattn_forward } else { sys::flashattn_backward };
        with_pool(pool, |parallel, user| {
            (args.parallel, args.parallel_user) = (parallel, user);
            check_with(|error| {
                args.error = error;
                // SAFETY: a live plan; the caller's promise.
                unsafe {
                    run(self.as_raw(), &args, scratch.workspace, scratch.bytes, scratch.stream)
                }
            })
        })
    }

    fn scratch(
        &self,
        op: Op,
        args: &sys::flashattn_args,
        workspace: &mut Workspace,
    ) -> Result<Scratch> {
        let bytes = self.bytes(op, Some(args))?;
        Ok(Scratch {
            workspace: workspace.pointer(bytes)?.cast(),
            bytes,
            stream: std::ptr::null_mut(),
        })
    }

    pub(crate) fn expect_cpu(&self, instead: &str) -> Result<()> {
        if self.resolved.memory == Memory::Host {
            return Ok(());
        }
        Err(Error {
            status: Status::ERROR_UNSUPPORTED,
            reason: Reason::STREAM,
            field: "device".to_string(),
            message: format!("the plan is for a GPU, whose work outlives the call: use {instead}"),
        })
    }

    fn expect_o<O: Element>(&self, given: Dims, q: Dims, field: &str) -> Result<()> {
        let plan = &self.resolved;
        plan.expect_dtype(O::DTYPE, Dtype(plan.desc.dtype_o), field)?;
        plan.expect_dims(given, plan.varlen_q(), plan.heads_q, plan.dim_v, field)?;
        let dim = plan.dim_v;
        self.expect_same(given, Dims { dim, ..q }, field)
    }

    pub(crate) fn expect_same(&self, given: Dims, wanted: Dims, field: &str) -> Result<()> {
        if given == wanted {
            return Ok(());
        }
        let message =
            format!("{field} is {given}, but must be {wanted}; give an array of that size");
        Err(invalid(Reason::SIZE, field, message))
    }
}

impl Queue {
    fn scratch(&self) -> Result<Scratch> {
        Ok(Scratch {
            workspace: self.workspace as *mut c_void,
            bytes: int64(self.workspace_bytes, "workspace_bytes")?,
            stream: self.stream,
        })
    }
}
