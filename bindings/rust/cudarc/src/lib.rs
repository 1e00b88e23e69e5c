//! Attention of libflashattn on the device memory of [cudarc](https://docs.rs/cudarc), without
//! `unsafe`: slices and views go in, work is enqueued on a stream, nobody waits.
//!
//! ```no_run
//! use cudarc::driver::CudaContext;
//! use flashattn::{half::f16, DescBuilder, Dtype};
//! use flashattn_cudarc::{Attention, Forward, Tensor, TensorMut};
//!
//! let stream = CudaContext::new(0)?.default_stream();
//! let dims = [2, 77, 8, 64]; // (batch, seq, heads, dim)
//! let q = stream.clone_htod(&vec![f16::ONE; 2 * 77 * 8 * 64])?;
//! let mut o = stream.alloc_zeros::<f16>(q.len())?;
//!
//! let attention = Attention::new(&stream, DescBuilder::new(Dtype::F16, 8, 64).causal())?;
//! let [q, k, v] = [Tensor::packed(&q, dims), Tensor::packed(&q, dims), Tensor::packed(&q, dims)];
//! attention.forward(&stream, Forward::new(q, k, v, TensorMut::packed(&mut o, dims)))?;
//! let host = stream.clone_dtoh(&o)?;
//! # assert_eq!(host.len(), 2 * 77 * 8 * 64);
//! # Ok::<(), flashattn_cudarc::Error>(())
//! ```
//!
//! cudarc's events order the call behind what wrote its inputs and before what reads its outputs, on
//! whatever streams; where a program has switched them off, the order is the program's.

use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DriverError, SyncOnDrop,
};
use flashattn::{
    Array, ArrayMut, DescBuilder, Device, Dims, Element, Gradients, Inputs, Op, Output, Plan,
    Queue, Shape, Strides, Upstream, View, ViewMut,
};

/// What can go wrong.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// libflashattn refused: status, reason, field and its sentence.
    Library(flashattn::Error),
    /// CUDA's driver failed.
    Driver(DriverError),
    /// A stream of another device, a slice that is too short: the argument, and a sentence.
    Argument(&'static str, String),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Library(error) => error.fmt(f),
            Self::Driver(error) => error.fmt(f),
            Self::Argument(_, sentence) => f.write_str(sentence),
        }
    }
}

impl std::error::Error for Error {}

impl From<flashattn::Error> for Error {
    fn from(error: flashattn::Error) -> Self {
        Self::Library(error)
    }
}

impl From<DriverError> for Error {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

/// Of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An array to read: a `CudaSlice` or a `CudaView` with its sizes.
#[derive(Clone, Copy)]
pub struct Tensor<'a, T> {
    data: &'a dyn DevicePtr<T>,
    dims: Dims,
    strides: Strides,
}

/// An array to write: a `CudaSlice` or a `CudaViewMut` with its sizes.
pub struct TensorMut<'a, T> {
    data: &'a mut dyn DevicePtrMut<T>,
    dims: Dims,
    strides: Strides,
}

impl<'a, T> Tensor<'a, T> {
    /// (batch, seq, heads, dim), or (tokens, heads, dim), without gaps.
    pub fn packed(data: &'a dyn DevicePtr<T>, dims: impl Into<Dims>) -> Self {
        let dims = dims.into();
        Self::strided(data, dims, Strides::packed(dims))
    }

    /// With strides of elements.
    pub fn strided(data: &'a dyn DevicePtr<T>, dims: impl Into<Dims>, strides: Strides) -> Self {
        Self { data, dims: dims.into(), strides }
    }
}

impl<'a, T> TensorMut<'a, T> {
    /// As [`Tensor::packed`].
    pub fn packed(data: &'a mut dyn DevicePtrMut<T>, dims: impl Into<Dims>) -> Self {
        let dims = dims.into();
        Self::strided(data, dims, Strides::packed(dims))
    }

    /// As [`Tensor::strided`].
    pub fn strided(
        data: &'a mut dyn DevicePtrMut<T>,
        dims: impl Into<Dims>,
        strides: Strides,
    ) -> Self {
        Self { data, dims: dims.into(), strides }
    }
}

/// What goes beside q, k and v, as the plan asks for it; see [`flashattn::Inputs`].
#[derive(Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct Beside<'a> {
    pub cu_seqlens_q: Option<&'a dyn DevicePtr<i32>>,
    pub cu_seqlens_kv: Option<&'a dyn DevicePtr<i32>>,
    /// Bounds, in tokens, of the lengths that cu_seqlens has: device memory is not read. Only with
    /// cu_seqlens or, for keys, a page table.
    pub max_seqlen_q: Option<usize>,
    pub max_seqlen_kv: Option<usize>,
    pub lens_q: Option<&'a dyn DevicePtr<i32>>,
    pub lens_kv: Option<&'a dyn DevicePtr<i32>>,
    /// With the elements from row to row; 0: packed, see [`Inputs::page_table`].
    pub page_table: Option<(&'a dyn DevicePtr<i32>, usize)>,
    pub sink: Option<&'a dyn DevicePtr<f32>>,
    /// With the elements from sequence to sequence; 0: the same for all.
    pub alibi_slopes: Option<(&'a dyn DevicePtr<f32>, usize)>,
    /// Seed and offset of the dropout, which needs them or rng_device; see [`Inputs::seed`].
    pub seed: Option<(u64, u64)>,
    /// The same in device memory, to be added.
    pub rng_device: Option<&'a dyn DevicePtr<u64>>,
}

/// The arrays of a forward call.
pub struct Forward<'a, T, O> {
    inputs: [Tensor<'a, T>; 3],
    o: TensorMut<'a, O>,
    /// (batch, heads, queries), or (heads, tokens): with [`DescBuilder::lse`].
    pub lse: Option<&'a mut dyn DevicePtrMut<f32>>,
}

impl<'a, T, O> Forward<'a, T, O> {
    /// q, k, v and o; lse by its field.
    pub fn new(q: Tensor<'a, T>, k: Tensor<'a, T>, v: Tensor<'a, T>, o: TensorMut<'a, O>) -> Self {
        Self { inputs: [q, k, v], o, lse: None }
    }
}

/// The arrays of a backward call.
#[allow(missing_docs)]
pub struct Backward<'a, T, O> {
    pub q: Tensor<'a, T>,
    pub k: Tensor<'a, T>,
    pub v: Tensor<'a, T>,
    /// What forward wrote.
    pub o: Tensor<'a, O>,
    pub lse: &'a dyn DevicePtr<f32>,
    /// The gradient that arrives at o.
    pub dout: Tensor<'a, O>,
    pub dq: TensorMut<'a, T>,
    pub dk: TensorMut<'a, T>,
    pub dv: TensorMut<'a, T>,
}

/// A plan on a GPU. Any number of threads and streams of its device run it at once.
pub struct Attention {
    plan: Plan,
    context: Arc<CudaContext>,
}

impl Attention {
    /// Plans for the device of a stream, whatever device `desc` names.
    ///
    /// # Errors
    ///
    /// What libflashattn refuses there.
    pub fn new(stream: &Arc<CudaStream>, desc: DescBuilder) -> Result<Self> {
        let context = stream.context().clone();
        context.bind_to_thread()?;
        let plan = desc.device(Device::CUDA, context.ordinal()).build()?;
        Ok(Self { plan, context })
    }

    /// The plan, for its properties.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Enqueues a forward call on dense arrays; scratch memory comes from the stream's pool and goes
    /// back to it.
    ///
    /// # Errors
    ///
    /// What libflashattn refuses, a slice that is too short, what the driver reports.
    pub fn forward<'a, T: Element, O: Element>(
        &self,
        stream: &'a Arc<CudaStream>,
        call: Forward<'a, T, O>,
    ) -> Result<()> {
        // SAFETY: there are no lengths and no page numbers.
        unsafe { self.forward_with(stream, call, &Beside::default()) }
    }

    /// [`Attention::forward`] with lengths, pages, or what else stands beside the arrays.
    ///
    /// # Errors
    ///
    /// As of forward.
    ///
    /// # Safety
    ///
    /// Lengths and page numbers are possible ones: nobody reads them before the kernels do.
    pub unsafe fn forward_with<'a, T: Element, O: Element>(
        &self,
        stream: &'a Arc<CudaStream>,
        call: Forward<'a, T, O>,
        beside: &Beside<'a>,
    ) -> Result<()> {
        let mut enqueue = Enqueue::new(&self.context, stream)?;
        let inputs = enqueue.inputs(call.inputs, beside)?;
        let shape = inputs.shape(&self.plan)?;
        let mut output = Output::new(enqueue.output(call.o, "o")?);
        if let Some(lse) = call.lse {
            output = output.lse(enqueue.array_mut(lse));
        }
        let (queue, _scratch) = enqueue.queue(&self.plan, Op::FORWARD, &shape)?;
        // SAFETY: cudarc's events, recorded when `enqueue` is dropped, keep all memory until the work
        // is done; the scratch memory goes back in the order of the stream.
        unsafe { self.plan.forward_on(&inputs, output, &queue) }?;
        Ok(())
    }

    /// Enqueues a backward call on dense arrays.
    ///
    /// # Errors
    ///
    /// As of [`Attention::forward`].
    pub fn backward<'a, T: Element, O: Element>(
        &self,
        stream: &'a Arc<CudaStream>,
        call: Backward<'a, T, O>,
    ) -> Result<()> {
        // SAFETY: there are no lengths.
        unsafe { self.backward_with(stream, call, &Beside::default()) }
    }

    /// [`Attention::backward`] with what stood beside the arrays of the forward call.
    ///
    /// # Errors
    ///
    /// As of forward.
    ///
    /// # Safety
    ///
    /// As of [`Attention::forward_with`].
    pub unsafe fn backward_with<'a, T: Element, O: Element>(
        &self,
        stream: &'a Arc<CudaStream>,
        call: Backward<'a, T, O>,
        beside: &Beside<'a>,
    ) -> Result<()> {
        let mut enqueue = Enqueue::new(&self.context, stream)?;
        let inputs = enqueue.inputs([call.q, call.k, call.v], beside)?;
        let shape = inputs.shape(&self.plan)?;
        let lse = enqueue.array(call.lse);
        let upstream =
            Upstream::new(enqueue.input(call.o, "o")?, lse, enqueue.input(call.dout, "dout")?);
        let gradients = Gradients::new(
            enqueue.output(call.dq, "dq")?,
            enqueue.output(call.dk, "dk")?,
            enqueue.output(call.dv, "dv")?,
        );
        let (queue, _scratch) = enqueue.queue(&self.plan, Op::BACKWARD, &shape)?;
        // SAFETY: as in forward_with.
        unsafe { self.plan.backward_on(&inputs, &upstream, gradients, &queue) }?;
        Ok(())
    }
}

/// The pointers of one call on a stream, and cudarc's guards, which record when they were used.
struct Enqueue<'a> {
    stream: &'a Arc<CudaStream>,
    guards: Vec<SyncOnDrop<'a>>,
}

impl<'a> Enqueue<'a> {
    fn new(context: &Arc<CudaContext>, stream: &'a Arc<CudaStream>) -> Result<Self> {
        if stream.context().ordinal() != context.ordinal() {
            let sentence = format!(
                "the stream is one of CUDA device {}, the plan is for device {}; give a stream of it",
                stream.context().ordinal(),
                context.ordinal()
            );
            return Err(Error::Argument("stream", sentence));
        }
        context.bind_to_thread()?;
        Ok(Self { stream, guards: Vec::new() })
    }

    fn input<T>(&mut self, tensor: Tensor<'a, T>, field: &'static str) -> Result<View<'a, T>> {
        check_reach(tensor.data.len(), &tensor.dims, &tensor.strides, field)?;
        let (address, guard) = tensor.data.device_ptr(self.stream);
        self.guards.push(guard);
        // SAFETY: a slice of this device, and its sizes do not reach past it.
        Ok(unsafe { View::from_device_ptr(address, tensor.dims, tensor.strides)? })
    }

    fn output<T>(
        &mut self,
        tensor: TensorMut<'a, T>,
        field: &'static str,
    ) -> Result<ViewMut<'a, T>> {
        check_reach(tensor.data.len(), &tensor.dims, &tensor.strides, field)?;
        let (address, guard) = tensor.data.device_ptr_mut(self.stream);
        self.guards.push(guard);
        // SAFETY: as in input, and borrowed by nobody else.
        Ok(unsafe { ViewMut::from_device_ptr(address, tensor.dims, tensor.strides)? })
    }

    fn array<T>(&mut self, data: &'a dyn DevicePtr<T>) -> Array<'a, T> {
        let (address, guard) = data.device_ptr(self.stream);
        self.guards.push(guard);
        // SAFETY: a slice of this device and its length.
        unsafe { Array::from_device_ptr(address, data.len()) }
    }

    fn array_mut<T>(&mut self, data: &'a mut dyn DevicePtrMut<T>) -> ArrayMut<'a, T> {
        let length = data.len();
        let (address, guard) = data.device_ptr_mut(self.stream);
        self.guards.push(guard);
        // SAFETY: as in array, and borrowed by nobody else.
        unsafe { ArrayMut::from_device_ptr(address, length) }
    }

    fn inputs<T: Element>(
        &mut self,
        [q, k, v]: [Tensor<'a, T>; 3],
        beside: &Beside<'a>,
    ) -> Result<Inputs<'a, T>> {
        let arrays = (self.input(q, "q")?, self.input(k, "k")?, self.input(v, "v")?);
        let mut inputs = Inputs::new(arrays.0, arrays.1, arrays.2);
        if let Some(cu) = beside.cu_seqlens_q {
            inputs = inputs.cu_seqlens_q(self.array(cu));
        }
        if let Some(cu) = beside.cu_seqlens_kv {
            inputs = inputs.cu_seqlens_kv(self.array(cu));
        }
        if let Some(tokens) = beside.max_seqlen_q {
            inputs = inputs.max_seqlen_q(tokens);
        }
        if let Some(tokens) = beside.max_seqlen_kv {
            inputs = inputs.max_seqlen_kv(tokens);
        }
        if let Some(lens) = beside.lens_q {
            inputs = inputs.lens_q(self.array(lens));
        }
        if let Some(lens) = beside.lens_kv {
            inputs = inputs.lens_kv(self.array(lens));
        }
        if let Some((table, stride)) = beside.page_table {
            inputs = inputs.page_table(self.array(table), stride);
        }
        if let Some(sink) = beside.sink {
            inputs = inputs.sink(self.array(sink));
        }
        if let Some((slopes, stride)) = beside.alibi_slopes {
            inputs = inputs.alibi_slopes(self.array(slopes), stride);
        }
        if let Some(numbers) = beside.rng_device {
            inputs = inputs.rng_device(self.array(numbers));
        }
        if let Some((seed, offset)) = beside.seed {
            inputs = inputs.seed(seed, offset);
        }
        Ok(inputs)
    }

    fn queue(&self, plan: &Plan, op: Op, shape: &Shape) -> Result<(Queue, Option<CudaSlice<u8>>)> {
        let bytes = plan.workspace_size(op, Some(shape))?;
        let stream = self.stream.cu_stream().cast();
        if bytes == 0 {
            return Ok((Queue { stream, workspace: 0, workspace_bytes: 0 }, None));
        }
        // SAFETY: the library writes before it reads.
        let scratch = unsafe { self.stream.alloc::<u8>(bytes)? };
        let workspace = scratch.device_ptr(self.stream).0;
        Ok((Queue { stream, workspace, workspace_bytes: bytes }, Some(scratch)))
    }
}

/// Refuses sizes and strides that reach past the end of a slice.
fn check_reach(len: usize, dims: &Dims, strides: &Strides, field: &'static str) -> Result<()> {
    let last = |n: usize, stride: usize| n.checked_sub(1)?.checked_mul(stride);
    let reach = || {
        last(dims.batch, strides.batch)?
            .checked_add(last(dims.seq, strides.seq)?)?
            .checked_add(last(dims.heads, strides.head)?)?
            .checked_add(dims.dim)
    };
    let empty = [dims.batch, dims.seq, dims.heads, dims.dim].contains(&0);
    if empty || reach().is_some_and(|needed| needed <= len) {
        return Ok(());
    }
    let sentence = format!(
        "{field} holds {len} elements, but {dims} with strides {strides} reach past them; give a longer \
         slice, or correct sizes"
    );
    Err(Error::Argument(field, sentence))
}
