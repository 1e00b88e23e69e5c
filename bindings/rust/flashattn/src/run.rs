//! Running a plan.

use std::ffi::c_void;

use flashattn_sys as sys;

use crate::array::{Need, Place};
use crate::error::{check, int32, int64, invalid, Error, Result};
use crate::inputs::Inputs;
use crate::{
    ArrayMut, Dims, Element, Gradients, Op, Output, Part, Plan, Reason, Shape, Status, Upstream,
    Workspace,
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
    pub fn forward<'a, T: Element, O: Element>(
        &self,
        inputs: &Inputs<'_, T>,
        output: impl Into<Output<'a, O>>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        self.expect_cpu("forward_on")?;
        let args = self.forward_args(inputs, output.into())?;
        let scratch = self.scratch(Op::FORWARD, &args.shape, workspace)?;
        // SAFETY: on the CPU the call is over when it returns, and all arrays were checked to be
        // borrowed memory with as many elements as the library touches.
        unsafe { self.run_forward(&args, &scratch) }
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
    /// and what it writes is used by nothing else. Lengths and page numbers on the device are possible
    /// ones.
    pub unsafe fn forward_on<'a, T: Element, O: Element>(
        &self,
        inputs: &Inputs<'_, T>,
        output: impl Into<Output<'a, O>>,
        queue: &Queue,
    ) -> Result<()> {
        let args = self.forward_args(inputs, output.into())?;
        // SAFETY: the caller's promise.
        unsafe { self.run_forward(&args, &queue.scratch()?) }
    }

    /// The gradients (Dao et al. 2022, algorithm 4), for a plan made with
    /// [`DescBuilder::backward`](crate::DescBuilder::backward). `inputs` are those of forward.
    ///
    /// # Errors
    ///
    /// As of [`Plan::forward`].
    pub fn backward<T: Element, O: Element>(
        &self,
        inputs: &Inputs<'_, T>,
        upstream: &Upstream<'_, O>,
        gradients: Gradients<'_, T>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        self.expect_cpu("backward_on")?;
        let args = self.backward_args(inputs, upstream, gradients)?;
        let scratch = self.scratch(Op::BACKWARD, &args.shape, workspace)?;
        // SAFETY: as in forward.
        unsafe { self.run_backward(&args, &scratch) }
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
    pub unsafe fn backward_on<T: Element, O: Element>(
        &self,
        inputs: &Inputs<'_, T>,
        upstream: &Upstream<'_, O>,
        gradients: Gradients<'_, T>,
        queue: &Queue,
    ) -> Result<()> {
        let args = self.backward_args(inputs, upstream, gradients)?;
        // SAFETY: the caller's promise.
        unsafe { self.run_backward(&args, &queue.scratch()?) }
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
        let (place, dims) = (self.facts.place, output.o.dims());
        self.expect_o::<O>(dims, dims, "o")?;
        let mut args = sys::flashattn_merge_args {
            parts: int32(parts.len(), "parts")?,
            part_dtype: P::DTYPE.0,
            o: output.o.tensor(place, "o")?,
            ..Default::default()
        };
        if self.facts.varlen_q {
            args.shape.total_q = int64(dims.seq, "shape.total_q")?;
        } else {
            args.shape.batch = int32(dims.batch, "shape.batch")?;
            args.shape.seqlen_q = int32(dims.seq, "shape.seqlen_q")?;
        }
        let need = self.lse_need(dims);
        if let Some(lse) = &mut output.lse {
            args.lse = lse.pointer(place, need, "lse")?;
        }
        let mut tensors = Vec::with_capacity(parts.len());
        let mut pointers = Vec::with_capacity(parts.len());
        for part in parts {
            self.expect_same(part.o.dims(), dims, "part_o")?;
            tensors.push(part.o.tensor(place, "part_o")?);
            pointers.push(part.lse.pointer(place, need, "part_lse")?);
        }
        args.part_o = tensors.as_ptr();
        args.part_lse = pointers.as_ptr();
        // SAFETY: a live plan; host arrays of `parts` entries; all memory was checked above.
        check(unsafe { sys::flashattn_merge(self.as_ptr(), &args, stream) })
    }

    /// Which weights the plan's dropout keeps, (batch, heads, seqlen_q, seqlen_kv): 1 = kept. Of
    /// `shape`, batch, seqlen_q and seqlen_kv count.
    ///
    /// # Errors
    ///
    /// INVALID_ARGUMENT: `keep` has another length.
    pub fn dropout_mask<'a>(
        &self,
        shape: &Shape,
        seed: u64,
        offset: u64,
        keep: impl Into<ArrayMut<'a, u8>>,
    ) -> Result<()> {
        self.expect_cpu("sys::flashattn_dropout_mask")?;
        let mut args = sys::flashattn_forward_args { shape: shape.lower()?, ..Default::default() };
        args.inputs.rng_seed = seed;
        args.inputs.rng_offset = offset;
        let sizes = [shape.batch, self.facts.heads_q, shape.seqlen_q, shape.seqlen_kv];
        let keep = keep.into().pointer(Place::Host, Need::product(&sizes), "keep")?;
        let stream = std::ptr::null_mut();
        // SAFETY: keep holds as many bytes as are written.
        check(unsafe { sys::flashattn_dropout_mask(self.as_ptr(), &args, keep, stream) })
    }

    fn forward_args<T: Element, O: Element>(
        &self,
        inputs: &Inputs<'_, T>,
        mut output: Output<'_, O>,
    ) -> Result<sys::flashattn_forward_args> {
        let (shape, c) = inputs.lower(&self.facts)?;
        let place = self.facts.place;
        self.expect_o::<O>(output.o.dims(), inputs.q.dims(), "o")?;
        let mut args = sys::flashattn_forward_args {
            shape,
            inputs: c,
            o: output.o.tensor(place, "o")?,
            ..Default::default()
        };
        if let Some(lse) = &mut output.lse {
            args.lse = lse.pointer(place, self.lse_need(inputs.q.dims()), "lse")?;
        }
        Ok(args)
    }

    fn backward_args<T: Element, O: Element>(
        &self,
        inputs: &Inputs<'_, T>,
        upstream: &Upstream<'_, O>,
        mut gradients: Gradients<'_, T>,
    ) -> Result<sys::flashattn_backward_args> {
        let (shape, c) = inputs.lower(&self.facts)?;
        let place = self.facts.place;
        let q = inputs.q.dims();
        self.expect_o::<O>(upstream.o.dims(), q, "o")?;
        self.expect_o::<O>(upstream.dout.dims(), q, "dout")?;
        self.expect_same(gradients.dq.dims(), q, "dq")?;
        self.expect_same(gradients.dk.dims(), inputs.k.dims(), "dk")?;
        self.expect_same(gradients.dv.dims(), inputs.v.dims(), "dv")?;
        let need = self.lse_need(q);
        let mut args = sys::flashattn_backward_args {
            shape,
            inputs: c,
            o: upstream.o.tensor(place, "o")?,
            dout: upstream.dout.tensor(place, "dout")?,
            lse: upstream.lse.pointer(place, need, "lse")?,
            dq: gradients.dq.tensor(place, "dq")?,
            dk: gradients.dk.tensor(place, "dk")?,
            dv: gradients.dv.tensor(place, "dv")?,
            ..Default::default()
        };
        if let Some(dlse) = &upstream.dlse {
            args.dlse = dlse.pointer(place, need, "dlse")?;
        }
        if let Some((dbias, strides)) = &mut gradients.dbias {
            let size = |n: i32| usize::try_from(n).unwrap_or(0);
            let sizes = [
                size(shape.batch),
                self.facts.heads_q,
                size(shape.seqlen_q),
                size(shape.seqlen_kv),
            ];
            args.dbias = dbias.pointer(place, Need::reach(&sizes, &strides.list()), "dbias")?;
            args.dbias_stride_batch = int64(strides.batch, "dbias_stride_batch")?;
            args.dbias_stride_head = int64(strides.head, "dbias_stride_head")?;
            args.dbias_stride_row = int64(strides.row, "dbias_stride_row")?;
        }
        if let Some(dsink) = &mut gradients.dsink {
            args.dsink = dsink.pointer(place, Need::product(&[self.facts.heads_q]), "dsink")?;
        }
        Ok(args)
    }

    /// # Safety
    ///
    /// All memory of `args` and `scratch` is there until the work is done.
    unsafe fn run_forward(
        &self,
        args: &sys::flashattn_forward_args,
        scratch: &Scratch,
    ) -> Result<()> {
        let (workspace, bytes, stream) = (scratch.workspace, scratch.bytes, scratch.stream);
        // SAFETY: a live plan; the caller's promise.
        check(unsafe { sys::flashattn_forward(self.as_ptr(), args, workspace, bytes, stream) })
    }

    /// # Safety
    ///
    /// As of `run_forward`.
    unsafe fn run_backward(
        &self,
        args: &sys::flashattn_backward_args,
        scratch: &Scratch,
    ) -> Result<()> {
        let (workspace, bytes, stream) = (scratch.workspace, scratch.bytes, scratch.stream);
        // SAFETY: a live plan; the caller's promise.
        check(unsafe { sys::flashattn_backward(self.as_ptr(), args, workspace, bytes, stream) })
    }

    fn scratch(
        &self,
        op: Op,
        shape: &sys::flashattn_shape,
        workspace: &mut Workspace,
    ) -> Result<Scratch> {
        let bytes = self.bytes(op, Some(shape))?;
        Ok(Scratch {
            workspace: workspace.pointer(bytes)?.cast(),
            bytes,
            stream: std::ptr::null_mut(),
        })
    }

    fn expect_cpu(&self, instead: &str) -> Result<()> {
        if self.facts.place == Place::Host {
            return Ok(());
        }
        Err(Error {
            status: Status::ERROR_UNSUPPORTED,
            reason: Reason::STREAM,
            field: "device".to_string(),
            sentence: format!("the plan is for a GPU, whose work outlives the call: use {instead}"),
        })
    }

    fn expect_o<O: Element>(&self, given: Dims, q: Dims, field: &str) -> Result<()> {
        let facts = &self.facts;
        facts.expect_dtype(O::DTYPE, facts.dtype_o, field)?;
        facts.expect_dims(given, facts.varlen_q, facts.heads_q, facts.dim_v, field)?;
        let dim = facts.dim_v;
        self.expect_same(given, Dims { dim, ..q }, field)
    }

    fn expect_same(&self, given: Dims, wanted: Dims, field: &str) -> Result<()> {
        if given == wanted {
            return Ok(());
        }
        let sentence =
            format!("{field} is {given}, but must be {wanted}; give an array of that size");
        Err(invalid(Reason::SIZE, field, sentence))
    }

    /// (batch, heads, seq) or (heads, tokens).
    fn lse_need(&self, q: Dims) -> Need {
        Need::product(&[q.batch, self.facts.heads_q, q.seq])
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
