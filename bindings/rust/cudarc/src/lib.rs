//! Attention of libflashattn on the device memory of [cudarc](https://docs.rs/cudarc), without
//! `unsafe`: slices and views go in, work is enqueued on a stream, nobody waits.
//!
//! ```no_run
//! use cudarc::driver::CudaContext;
//! use flashattn::{half::f16, DescBuilder, Dtype, Inputs, Output};
//! use flashattn_cudarc::Attention;
//!
//! let stream = CudaContext::new(0)?.default_stream();
//! let dims = [2, 77, 8, 64]; // (batch, seq, heads, dim)
//! let q = stream.clone_htod(&vec![f16::ONE; 2 * 77 * 8 * 64])?;
//! let mut o = stream.alloc_zeros::<f16>(q.len())?;
//!
//! let attention = Attention::new(&stream, DescBuilder::new(Dtype::F16, 8, 64).causal())?;
//! attention.forward(&stream, |on| {
//!     let q = on.view(&q, dims)?;
//!     Ok((Inputs::new(q, q, q), Output::new(on.view_mut(&mut o, dims)?)))
//! })?;
//! let host = stream.clone_dtoh(&o)?;
//! # assert_eq!(host.len(), 2 * 77 * 8 * 64);
//! # Ok::<(), flashattn_cudarc::Error>(())
//! ```
//!
//! A call is a closure that makes the arguments of the crate [`flashattn`] from slices of the device:
//! whatever its [`Inputs`], [`Output`], [`Upstream`], [`Gradients`], [`AppendInputs`],
//! [`AppendOutput`], [`QuantizeInputs`] and [`QuantizeOutput`] take is taken here.
//!
//! cudarc's events order the call behind what wrote its inputs and before what reads its outputs, on
//! whatever streams; where a program has switched them off, the order is the program's.

use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DriverError, SyncOnDrop,
};
use flashattn::{
    AppendInputs, AppendOutput, Array, ArrayMut, DescBuilder, Device, Dims, Element, Gradients,
    Inputs, Op, Output, Part, Plan, QuantizeInputs, QuantizeOutput, Queue, Sizes, Strides,
    Upstream, View, ViewMut, F8E4M3,
};

/// What can go wrong.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// libflashattn refused: status, reason, field and its message.
    Library(flashattn::Error),
    /// CUDA's driver failed.
    Driver(DriverError),
    /// A stream of another device, a slice that is too short, and what to do about it.
    Argument(String),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Library(error) => error.fmt(f),
            Self::Driver(error) => error.fmt(f),
            Self::Argument(message) => f.write_str(message),
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

/// A plan on a GPU. Any number of threads and streams of its device run it at once.
pub struct Attention {
    plan: Arc<Plan>,
    context: Arc<CudaContext>,
}

impl Attention {
    /// Plans for the device of a stream, whatever device `desc` names. The plan of an equal descriptor
    /// is taken where there is one: see [`DescBuilder::build_cached`].
    ///
    /// # Errors
    ///
    /// What libflashattn refuses there.
    pub fn new(stream: &Arc<CudaStream>, desc: DescBuilder) -> Result<Self> {
        let context = stream.context().clone();
        context.bind_to_thread()?;
        let plan = desc.device(Device::CUDA, context.ordinal()).build_cached()?;
        Ok(Self { plan, context })
    }

    /// The plan, for its properties.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Enqueues a forward call; scratch memory comes from the stream's pool and goes back to it.
    ///
    /// Lengths and page numbers on the device are not read here: those out of range count as the
    /// nearest in range, and results are undefined then.
    ///
    /// # Errors
    ///
    /// What libflashattn refuses, a slice that is too short, what the driver reports.
    pub fn forward<'env, T: Element, K: Element, O: Element>(
        &self,
        stream: &'env Arc<CudaStream>,
        call: impl for<'call> FnOnce(
            &mut Slices<'call, 'env>,
        ) -> Result<(Inputs<'call, T, K>, Output<'call, O>)>,
    ) -> Result<()> {
        let mut slices = Slices::new(&self.context, stream)?;
        let (inputs, output) = call(&mut slices)?;
        let sizes = inputs.sizes(&self.plan)?;
        let (queue, _scratch) = slices.queue(&self.plan, Op::FORWARD, &sizes)?;
        // SAFETY: cudarc's events, recorded when `slices` is dropped, keep all memory until the work
        // is done; the scratch memory goes back in the order of the stream.
        unsafe { self.plan.forward_on(&inputs, output, &queue) }?;
        Ok(())
    }

    /// Enqueues a backward call, with the inputs of the forward call.
    ///
    /// # Errors
    ///
    /// As of [`Attention::forward`].
    pub fn backward<'env, T: Element, K: Element, O: Element, G: Element>(
        &self,
        stream: &'env Arc<CudaStream>,
        call: impl for<'call> FnOnce(
            &mut Slices<'call, 'env>,
        ) -> Result<(
            Inputs<'call, T, K>,
            Upstream<'call, O>,
            Gradients<'call, G>,
        )>,
    ) -> Result<()> {
        let mut slices = Slices::new(&self.context, stream)?;
        let (inputs, upstream, gradients) = call(&mut slices)?;
        let sizes = inputs.sizes(&self.plan)?;
        let (queue, _scratch) = slices.queue(&self.plan, Op::BACKWARD, &sizes)?;
        // SAFETY: as in forward.
        unsafe { self.plan.backward_on(&inputs, &upstream, gradients, &queue) }?;
        Ok(())
    }

    /// Enqueues new keys and values into a cache; see [`Plan::append_kv`]. Tokens that have no room are
    /// left out.
    ///
    /// # Errors
    ///
    /// As of [`Attention::forward`].
    pub fn append_kv<'env, T: Element, K: Element>(
        &self,
        stream: &'env Arc<CudaStream>,
        call: impl for<'call> FnOnce(
            &mut Slices<'call, 'env>,
        )
            -> Result<(AppendInputs<'call, T>, AppendOutput<'call, T, K>)>,
    ) -> Result<()> {
        let mut slices = Slices::new(&self.context, stream)?;
        let (inputs, output) = call(&mut slices)?;
        // SAFETY: as in forward; the call needs no scratch memory.
        unsafe { self.plan.append_kv_on(&inputs, output, stream.cu_stream().cast()) }?;
        Ok(())
    }

    /// Enqueues arrays of 8 bits made of wider ones; see [`Plan::quantize`].
    ///
    /// # Errors
    ///
    /// As of [`Attention::forward`].
    pub fn quantize<'env, T: Element, Q: Element, K: Element>(
        &self,
        stream: &'env Arc<CudaStream>,
        call: impl for<'call> FnOnce(
            &mut Slices<'call, 'env>,
        )
            -> Result<(QuantizeInputs<'call, T>, QuantizeOutput<'call, Q, K>)>,
    ) -> Result<()> {
        let mut slices = Slices::new(&self.context, stream)?;
        let (inputs, output) = call(&mut slices)?;
        // SAFETY: as in append_kv.
        unsafe { self.plan.quantize_on(&inputs, output, stream.cu_stream().cast()) }?;
        Ok(())
    }

    /// Enqueues a merge of partial results; see [`Plan::merge`].
    ///
    /// # Errors
    ///
    /// As of [`Attention::forward`].
    pub fn merge<'env, P: Element, O: Element>(
        &self,
        stream: &'env Arc<CudaStream>,
        call: impl for<'call> FnOnce(
            &mut Slices<'call, 'env>,
        ) -> Result<(Vec<Part<'call, P>>, Output<'call, O>)>,
    ) -> Result<()> {
        let mut slices = Slices::new(&self.context, stream)?;
        let (parts, output) = call(&mut slices)?;
        // SAFETY: as in forward; the host arrays are read before the call returns.
        unsafe { self.plan.merge_on(&parts, output, stream.cu_stream().cast()) }?;
        Ok(())
    }
}

/// Makes the arguments of one call from slices of the device (`CudaSlice`, `CudaView` and their
/// mutable kin), which are in use on its stream from then on. What it makes cannot leave the call:
///
/// ```compile_fail,E0521
/// # use cudarc::driver::CudaContext;
/// # use flashattn::{half::f16, DescBuilder, Dtype, Inputs, Output};
/// # use flashattn_cudarc::Attention;
/// # let stream = CudaContext::new(0)?.default_stream();
/// # let dims = [1, 1, 1, 64];
/// # let q = stream.alloc_zeros::<f16>(64)?;
/// # let mut o = stream.alloc_zeros::<f16>(64)?;
/// # let attention = Attention::new(&stream, DescBuilder::new(Dtype::F16, 1, 64))?;
/// let mut kept = None;
/// attention.forward(&stream, |on| {
///     let q = on.view(&q, dims)?;
///     kept = Some(q); // outlives cudarc's guard
///     Ok((Inputs::new(q, q, q), Output::new(on.view_mut(&mut o, dims)?)))
/// })?;
/// # Ok::<(), flashattn_cudarc::Error>(())
/// ```
pub struct Slices<'call, 'env: 'call> {
    stream: &'env Arc<CudaStream>,
    // cudarc's guards, which record when the memory was used.
    guards: Vec<SyncOnDrop<'env>>,
    // Neither longer nor shorter than the call.
    _call: PhantomData<&'call mut &'call ()>,
}

impl<'call, 'env: 'call> Slices<'call, 'env> {
    fn new(context: &Arc<CudaContext>, stream: &'env Arc<CudaStream>) -> Result<Self> {
        if stream.context().ordinal() != context.ordinal() {
            return Err(Error::Argument(format!(
                "the stream is one of CUDA device {}, the plan is for device {}; give a stream of it",
                stream.context().ordinal(),
                context.ordinal()
            )));
        }
        context.bind_to_thread()?;
        Ok(Self { stream, guards: Vec::new(), _call: PhantomData })
    }

    /// q, k, v, o or dout: (batch, seq, heads, dim) or (tokens, heads, dim) without gaps, or pages.
    ///
    /// # Errors
    ///
    /// A slice that is too short.
    pub fn view<T>(
        &mut self,
        data: &'env dyn DevicePtr<T>,
        dims: impl Into<Dims>,
    ) -> Result<View<'call, T>> {
        let dims = dims.into();
        self.strided(data, dims, Strides::packed(dims))
    }

    /// [`Slices::view`] with strides of elements.
    ///
    /// # Errors
    ///
    /// A slice that is too short.
    pub fn strided<T>(
        &mut self,
        data: &'env dyn DevicePtr<T>,
        dims: impl Into<Dims>,
        strides: Strides,
    ) -> Result<View<'call, T>> {
        self.read(data, dims.into(), strides)
    }

    /// [`Slices::view`] of a cache of 8 bits, whose bytes are those of [`F8E4M3`].
    ///
    /// # Errors
    ///
    /// A slice that is too short.
    pub fn view_e4m3(
        &mut self,
        data: &'env dyn DevicePtr<u8>,
        dims: impl Into<Dims>,
    ) -> Result<View<'call, F8E4M3>> {
        let dims = dims.into();
        self.read(data, dims, Strides::packed(dims))
    }

    // E is T, or F8E4M3 of bytes.
    fn read<T, E>(
        &mut self,
        data: &'env dyn DevicePtr<T>,
        dims: Dims,
        strides: Strides,
    ) -> Result<View<'call, E>> {
        check_reach(data.len(), &dims, &strides)?;
        let (address, guard) = data.device_ptr(self.stream);
        self.guards.push(guard);
        // SAFETY: a slice of this device, and its sizes do not reach past it.
        Ok(unsafe { View::from_device_ptr(address, dims, strides)? })
    }

    /// o, dq, dk or dv, to be written, without gaps.
    ///
    /// # Errors
    ///
    /// A slice that is too short.
    pub fn view_mut<T>(
        &mut self,
        data: &'env mut dyn DevicePtrMut<T>,
        dims: impl Into<Dims>,
    ) -> Result<ViewMut<'call, T>> {
        let dims = dims.into();
        self.strided_mut(data, dims, Strides::packed(dims))
    }

    /// [`Slices::view_mut`] with strides of elements.
    ///
    /// # Errors
    ///
    /// A slice that is too short, strides with which elements would share memory.
    pub fn strided_mut<T>(
        &mut self,
        data: &'env mut dyn DevicePtrMut<T>,
        dims: impl Into<Dims>,
        strides: Strides,
    ) -> Result<ViewMut<'call, T>> {
        self.write(data, dims.into(), strides)
    }

    /// [`Slices::view_mut`] of a cache of 8 bits, whose bytes are those of [`F8E4M3`].
    ///
    /// # Errors
    ///
    /// A slice that is too short.
    pub fn view_e4m3_mut(
        &mut self,
        data: &'env mut dyn DevicePtrMut<u8>,
        dims: impl Into<Dims>,
    ) -> Result<ViewMut<'call, F8E4M3>> {
        let dims = dims.into();
        self.write(data, dims, Strides::packed(dims))
    }

    // As read.
    fn write<T, E>(
        &mut self,
        data: &'env mut dyn DevicePtrMut<T>,
        dims: Dims,
        strides: Strides,
    ) -> Result<ViewMut<'call, E>> {
        check_reach(data.len(), &dims, &strides)?;
        let (address, guard) = data.device_ptr_mut(self.stream);
        self.guards.push(guard);
        // SAFETY: as in read, and borrowed by nobody else.
        Ok(unsafe { ViewMut::from_device_ptr(address, dims, strides)? })
    }

    /// Any other array to read: lengths, a page table, a bias, lse.
    pub fn array<T>(&mut self, data: &'env dyn DevicePtr<T>) -> Array<'call, T> {
        let (address, guard) = data.device_ptr(self.stream);
        self.guards.push(guard);
        // SAFETY: a slice of this device and its length.
        unsafe { Array::from_device_ptr(address, data.len()) }
    }

    /// Any other array to write: lse, dbias, dsink.
    pub fn array_mut<T>(&mut self, data: &'env mut dyn DevicePtrMut<T>) -> ArrayMut<'call, T> {
        let length = data.len();
        let (address, guard) = data.device_ptr_mut(self.stream);
        self.guards.push(guard);
        // SAFETY: as in array, and borrowed by nobody else.
        unsafe { ArrayMut::from_device_ptr(address, length) }
    }

    fn queue(&self, plan: &Plan, op: Op, sizes: &Sizes) -> Result<(Queue, Option<CudaSlice<u8>>)> {
        let bytes = plan.workspace_size(op, Some(sizes))?;
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
fn check_reach(len: usize, dims: &Dims, strides: &Strides) -> Result<()> {
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
    Err(Error::Argument(format!(
        "the slice holds {len} elements, but {dims} with strides {strides} reach past them; give a \
         longer one, or correct the sizes"
    )))
}
