//! Tensors in a GPU's memory. Work goes to the stream of candle's device, which gives the memory of
//! results and scratch memory, too; nothing waits for the GPU, and no length is read by the host.

use std::cell::RefCell;

use candle_core::backend::BackendStorage;
use candle_core::cuda::cudarc::driver::{CudaSlice, CudaView, DeviceRepr};
use candle_core::cuda::{CudaDType, CudaDevice};
use candle_core::op::BackpropOp;
use candle_core::{bail, CudaStorage, DType, Error, Layout, Result, Shape, Storage, Tensor};
use flashattn::{Array, Dims, Gradients, Output, Strides, Upstream, View};
use flashattn_cudarc::{Attention, Slices};

use crate::op::{shape_of, FlashAttention};
use crate::tensors::{order, range, refused, Beside, Native};

/// What candle asks of a type whose tensors lie on a GPU.
pub(crate) trait OnGpu: CudaDType + DeviceRepr {}

impl<T: CudaDType + DeviceRepr> OnGpu for T {}

/// q, k, v, o or the gradient of o.
struct Placed<'a, T> {
    memory: CudaView<'a, T>,
    dims: Dims,
    strides: Strides,
}

impl<'a, T: Native> Placed<'a, T> {
    fn new((storage, layout): (&'a CudaStorage, &Layout)) -> Result<Self> {
        let (dims, strides) = order(layout)?;
        let memory = storage.as_cuda_slice::<T>()?.slice(layout.start_offset()..);
        Ok(Self { memory, dims, strides })
    }

    fn view<'call, 'env: 'call>(
        &'env self,
        on: &mut Slices<'call, 'env>,
    ) -> flashattn_cudarc::Result<View<'call, T>> {
        on.strided(&self.memory, self.dims, self.strides)
    }
}

fn failed(error: flashattn_cudarc::Error) -> Error {
    match error {
        flashattn_cudarc::Error::Library(error) => refused(error),
        error => Error::wrap(error),
    }
}

fn on_gpu(storage: &Storage) -> Result<&CudaStorage> {
    match storage {
        Storage::Cuda(storage) => Ok(storage),
        _ => bail!("flash-attn: all tensors must be on one device"),
    }
}

fn floats<'a>(storage: &'a Storage, layout: &Layout) -> Result<CudaView<'a, f32>> {
    Ok(on_gpu(storage)?.as_cuda_slice::<f32>()?.slice(range(layout)?))
}

/// Numbers below 2^31 are the same in both types of 32 bits.
fn integers<'a>(storage: &'a Storage, layout: &Layout) -> Result<CudaView<'a, i32>> {
    let (storage, range) = (on_gpu(storage)?, range(layout)?);
    if storage.dtype() == DType::I32 {
        return Ok(storage.as_cuda_slice::<i32>()?.slice(range));
    }
    let (view, count) = (storage.as_cuda_slice::<u32>()?.slice(range.clone()), range.len());
    // SAFETY: types of one size, of which every bit pattern is a number.
    Ok(unsafe { view.transmute(count) }.expect("as many bytes"))
}

/// The same bits as U32, where they are I32 of a GPU.
pub(crate) fn unsigned(tensor: &Tensor) -> Result<Tensor> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { return Ok(tensor.clone()) };
    if storage.dtype() != DType::I32 {
        return Ok(tensor.clone());
    }
    let range = range(layout)?;
    let (view, count) = (storage.as_cuda_slice::<i32>()?.slice(range.clone()), range.len());
    // SAFETY: as in integers.
    let view: CudaView<'_, u32> = unsafe { view.transmute(count) }.expect("as many bytes");
    let device = storage.device();
    let copy = device.cuda_stream().clone_dtod(&view).map_err(Error::wrap)?;
    Ok(tensor_of(copy, tensor.shape().clone(), device))
}

/// Memory of `count` elements, to be written. None would be refused by the driver.
fn allocate<T: Native>(device: &CudaDevice, count: usize) -> Result<CudaSlice<T>> {
    // SAFETY: the library writes all elements before anything reads them.
    unsafe { device.alloc::<T>(count.max(1)) }
}

fn elements(dims: Dims) -> usize {
    dims.batch * dims.seq * dims.heads * dims.dim
}

fn tensor_of<T: CudaDType>(memory: CudaSlice<T>, shape: Shape, device: &CudaDevice) -> Tensor {
    let storage = CudaStorage::wrap_cuda_slice(memory, device.clone());
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}

/// The tensor's elements in the order of its indices, in memory of their own.
pub(crate) fn copy<T: Native>((storage, layout): (&CudaStorage, &Layout)) -> Result<CudaStorage> {
    let device = storage.device();
    let view = storage.as_cuda_slice::<T>()?.slice(range(layout)?);
    let copy = device.cuda_stream().clone_dtod(&view).map_err(Error::wrap)?;
    Ok(CudaStorage::wrap_cuda_slice(copy, device.clone()))
}

/// The arrays of a call.
fn arrays<'call, 'env: 'call>(
    on: &mut Slices<'call, 'env>,
    beside: &'env Beside<CudaView<'_, f32>, CudaView<'_, i32>>,
) -> Beside<Array<'call, f32>, Array<'call, i32>> {
    let on = RefCell::new(on);
    let arrays = beside.map(
        |memory| Ok(on.borrow_mut().array(memory)),
        |memory| Ok(on.borrow_mut().array(memory)),
    );
    arrays.expect("no part of it fails")
}

/// `tensors`: q, k and v.
pub(crate) fn forward<T: Native>(
    op: &FlashAttention,
    tensors: [(&CudaStorage, &Layout); 3],
) -> Result<(CudaStorage, Shape)> {
    let device = tensors[0].0.device();
    let stream = device.cuda_stream();
    let [q, k, v] =
        [Placed::<T>::new(tensors[0])?, Placed::new(tensors[1])?, Placed::new(tensors[2])?];
    let held = op.beside.map(|t| Ok(t.storage_and_layout()), |t| Ok(t.storage_and_layout()))?;
    let beside = held.map(|(s, layout)| floats(s, layout), |(s, layout)| integers(s, layout))?;
    let dims = Dims { dim: v.dims.dim, ..q.dims };
    let rows = op.rows(q.dims);
    let mut o = allocate::<T>(device, elements(dims))?;
    let mut lse = if op.options.backward { Some(allocate::<f32>(device, rows)?) } else { None };
    Attention::new(&stream, op.desc::<T>([q.dims, k.dims, v.dims]))
        .and_then(|attention| {
            attention.forward(&stream, |on| {
                let views = [q.view(on)?, k.view(on)?, v.view(on)?];
                let inputs = op.inputs(views, arrays(on, &beside));
                let mut output = Output::new(on.view_mut(&mut o, dims)?);
                if let Some(lse) = &mut lse {
                    output = output.lse(on.array_mut(lse));
                }
                Ok((inputs, output))
            })
        })
        .map_err(failed)?;
    if let Some(lse) = lse {
        op.lse.get_or_init(|| tensor_of(lse, Shape::from(rows), device));
    }
    Ok((CudaStorage::wrap_cuda_slice(o, device.clone()), shape_of(dims)))
}

/// `tensors`: q, k, v, o and the gradient of o.
pub(crate) fn backward<T: Native>(
    op: &FlashAttention,
    tensors: [&Tensor; 5],
) -> Result<[Tensor; 3]> {
    let guards = tensors.map(Tensor::storage_and_layout);
    let mut placed = Vec::with_capacity(5);
    for (storage, layout) in &guards {
        placed.push(Placed::<T>::new((on_gpu(storage)?, *layout))?);
    }
    let [q, k, v, o, dout] = &placed[..] else { unreachable!("five tensors") };
    let device = on_gpu(&guards[0].0)?.device();
    let stream = device.cuda_stream();
    let held = op.beside.map(|t| Ok(t.storage_and_layout()), |t| Ok(t.storage_and_layout()))?;
    let beside = held.map(|(s, layout)| floats(s, layout), |(s, layout)| integers(s, layout))?;
    let (lse, lse_layout) = op.lse()?.storage_and_layout();
    let lse = floats(&lse, lse_layout)?;
    let (mut dq, mut dk, mut dv) = (
        allocate::<T>(device, elements(q.dims))?,
        allocate::<T>(device, elements(k.dims))?,
        allocate::<T>(device, elements(v.dims))?,
    );
    let heads = q.dims.heads;
    let mut dsink = if op.options.dsink { Some(allocate::<f32>(device, heads)?) } else { None };
    Attention::new(&stream, op.desc::<T>([q.dims, k.dims, v.dims]))
        .and_then(|attention| {
            attention.backward(&stream, |on| {
                let views = [q.view(on)?, k.view(on)?, v.view(on)?];
                let inputs = op.inputs(views, arrays(on, &beside));
                let upstream = Upstream::new(o.view(on)?, on.array(&lse), dout.view(on)?);
                let mut gradients = Gradients::new(
                    on.view_mut(&mut dq, q.dims)?,
                    on.view_mut(&mut dk, k.dims)?,
                    on.view_mut(&mut dv, v.dims)?,
                );
                if let Some(dsink) = &mut dsink {
                    gradients = gradients.dsink(on.array_mut(dsink));
                }
                Ok((inputs, upstream, gradients))
            })
        })
        .map_err(failed)?;
    if let Some(dsink) = dsink {
        op.dsink.put(tensor_of(dsink, Shape::from(heads), device));
    }
    let tensor = |memory, like: &Tensor| tensor_of(memory, like.shape().clone(), device);
    Ok([tensor(dq, tensors[0]), tensor(dk, tensors[1]), tensor(dv, tensors[2])])
}
