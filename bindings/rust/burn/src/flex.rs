//! Tensors of Flex, burn's CPU backend.

use std::cell::RefCell;

use burn::backend::flex::FlexTensor;
use burn::backend::Flex;
use burn::tensor::{DType, Element as BurnElement, FloatDType, TensorData};
use flashattn::half::{bf16, f16};
use flashattn::{
    Array, ArrayMut, DescBuilder, Dims, Dtype, Element, Error, Gradients as Written, Inputs,
    Output, Reason, Result, Strides, Upstream, View, ViewMut, Workspace,
};

use crate::{Arrays, AttentionKernels, Gradients, Options};

thread_local! {
    /// Grows to what the thread's largest call needs, and is kept.
    static WORKSPACE: RefCell<Workspace> = RefCell::new(Workspace::new());
}

/// A type that both libraries know.
trait Native: Element + BurnElement + bytemuck::Pod {}

impl<T: Element + BurnElement + bytemuck::Pod> Native for T {}

/// The tensor, or a copy where the elements of a head are not contiguous or an index runs backwards.
fn readable(tensor: &FlexTensor) -> FlexTensor {
    let strides = tensor.layout().strides();
    match strides.last() {
        Some(1) if strides.iter().all(|&stride| stride >= 0) => tensor.clone(),
        _ => tensor.to_contiguous(),
    }
}

fn dims(tensor: &FlexTensor) -> Dims {
    let [batch, heads, seq, dim] = tensor.layout().shape().dims();
    [batch, seq, heads, dim].into()
}

/// What a readable tensor of (batch, heads, seq, dim) holds.
fn view<T: Native>(tensor: &FlexTensor) -> Result<View<'_, T>> {
    let stride = |index: usize| tensor.layout().strides()[index].unsigned_abs();
    let strides = Strides { batch: stride(0), head: stride(1), seq: stride(2) };
    View::strided(&tensor.storage::<T>()[tensor.layout().start_offset()..], dims(tensor), strides)
}

/// Memory for a result of (batch, heads, seq, dim).
struct Made<T> {
    memory: Vec<T>,
    shape: [usize; 4],
}

impl<T: Native> Made<T> {
    fn new(shape: [usize; 4]) -> Self {
        Self { memory: vec![T::zeroed(); shape.iter().product()], shape }
    }

    fn view(&mut self) -> Result<ViewMut<'_, T>> {
        let [batch, heads, seq, dim] = self.shape;
        let strides = Strides { batch: heads * seq * dim, head: seq * dim, seq: dim };
        ViewMut::strided(&mut self.memory, [batch, seq, heads, dim], strides)
    }

    fn tensor(self) -> FlexTensor {
        tensor(self.memory, &self.shape)
    }
}

fn tensor<T: BurnElement>(memory: Vec<T>, shape: &[usize]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(memory, shape.to_vec()))
}

/// A bias of which indices that repeat have a size of 1.
struct Bias {
    tensor: FlexTensor,
    sizes: [usize; 4],
    dtype: Dtype,
}

impl Bias {
    fn new(tensor: &FlexTensor) -> Result<Self> {
        let dtype = match tensor.dtype() {
            DType::F32 => Dtype::F32,
            DType::F16 => Dtype::F16,
            DType::BF16 => Dtype::BF16,
            other => return Err(wrong_type("bias", other)),
        };
        let (mut narrow, layout) = (tensor.clone(), tensor.layout());
        for index in 0..3 {
            if layout.strides()[index] == 0 && layout.shape()[index] > 1 {
                narrow = narrow.narrow(index, 0, 1);
            }
        }
        let sizes = narrow.layout().shape().dims();
        let tensor = if narrow.is_contiguous() { narrow } else { narrow.to_contiguous() };
        Ok(Self { tensor, sizes, dtype })
    }

    fn give<'a, T: Native>(&'a self, inputs: Inputs<'a, T>) -> Inputs<'a, T> {
        fn array<B: Native>(bias: &Bias) -> Array<'_, B> {
            let (start, count) = (bias.tensor.layout().start_offset(), bias.sizes.iter().product());
            Array::from(&bias.tensor.storage::<B>()[start..][..count]).dims(bias.sizes)
        }
        match self.dtype {
            Dtype::F16 => inputs.bias(array::<f16>(self)),
            Dtype::BF16 => inputs.bias(array::<bf16>(self)),
            _ => inputs.bias(array::<f32>(self)),
        }
    }
}

fn wrong_type(field: &str, dtype: DType) -> Error {
    let message =
        format!("{field} holds {dtype:?}; convert it to F32, F16 or BF16, those of q, k, v alike");
    Error::invalid(Reason::DTYPE, field, message)
}

/// The tensors of a call as the library takes them.
struct Call<'a> {
    arrays: Arrays<FlexTensor>,
    bias: Option<Bias>,
    options: &'a Options,
}

impl<'a> Call<'a> {
    fn new(arrays: &Arrays<FlexTensor>, options: &'a Options) -> Result<Self> {
        if options.scale == Some(0.0) {
            // To the library, 0 is the default.
            let message = "scale = 0 would make every weight equal; give 1 / sqrt(dim), as a rule";
            return Err(Error::invalid(Reason::VALUE, "scale", message));
        }
        let dtype = arrays.query.dtype();
        for (name, tensor) in [("q", &arrays.query), ("k", &arrays.key), ("v", &arrays.value)] {
            if tensor.dtype() != dtype || !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
                return Err(wrong_type(name, tensor.dtype()));
            }
        }
        let bias = arrays.bias.as_ref().map(Bias::new).transpose()?;
        let [query, key, value] = [&arrays.query, &arrays.key, &arrays.value].map(readable);
        let sink = arrays.sink.as_ref().map(FlexTensor::to_contiguous);
        Ok(Self { arrays: Arrays { query, key, value, bias: None, sink }, bias, options })
    }

    fn desc<T: Native>(&self) -> DescBuilder {
        let [q, k, v] = [&self.arrays.query, &self.arrays.key, &self.arrays.value].map(dims);
        let mut desc = DescBuilder::new(<T as flashattn::Scalar>::DTYPE, q.heads, q.dim)
            .heads_kv(k.heads)
            .dim_v(v.dim)
            .softcap(self.options.softcap);
        if let Some(scale) = self.options.scale {
            desc = desc.scale(scale);
        }
        if let Some(bias) = &self.bias {
            desc = desc.bias(bias.dtype);
        }
        if self.arrays.sink.is_some() {
            desc = desc.sink();
        }
        let side = |n: Option<usize>| n.map_or(-1, |n| i32::try_from(n).unwrap_or(-1));
        match self.options.window.map(side) {
            [-1, -1] => desc,
            [-1, 0] => desc.causal(),
            [left, right] => desc.window(left, right),
        }
    }

    fn inputs<T: Native>(&self) -> Result<Inputs<'_, T>> {
        let arrays = &self.arrays;
        let mut inputs =
            Inputs::new(view(&arrays.query)?, view(&arrays.key)?, view(&arrays.value)?);
        if let Some(bias) = &self.bias {
            inputs = bias.give(inputs);
        }
        if let Some(sink) = &arrays.sink {
            let start = sink.layout().start_offset();
            let heads = sink.layout().num_elements();
            inputs = inputs.sink(&sink.storage::<f32>()[start..][..heads]);
        }
        Ok(inputs)
    }

    fn forward<T: Native>(&self, lse: bool) -> Result<(FlexTensor, Option<FlexTensor>)> {
        let desc = if lse { self.desc::<T>().lse() } else { self.desc::<T>() };
        let (plan, inputs) = (desc.build_cached()?, self.inputs::<T>()?);
        let [batch, heads, seq, _] = self.arrays.query.layout().shape().dims();
        let mut o = Made::<T>::new([batch, heads, seq, dims(&self.arrays.value).dim]);
        let mut sums = vec![0f32; if lse { batch * heads * seq } else { 0 }];
        let mut output = Output::new(o.view()?);
        if lse {
            output = output.lse(&mut sums);
        }
        WORKSPACE.with_borrow_mut(|scratch| plan.forward(&inputs, output, scratch))?;
        Ok((o.tensor(), lse.then(|| tensor(sums, &[batch, heads, seq]))))
    }

    fn backward<T: Native>(
        &self,
        [o, lse]: [&FlexTensor; 2],
        gradient: &FlexTensor,
        [dbias, dsink]: [bool; 2],
        bias_sizes: [usize; 4],
    ) -> Result<Gradients<FlexTensor>> {
        let mut desc = self.desc::<T>().backward();
        if dbias {
            desc = desc.dbias();
        }
        if dsink {
            desc = desc.dsink();
        }
        let (plan, inputs) = (desc.build_cached()?, self.inputs::<T>()?);
        let arrays = &self.arrays;
        let made = |like: &FlexTensor| Made::<T>::new(like.layout().shape().dims());
        let (mut dq, mut dk, mut dv) =
            (made(&arrays.query), made(&arrays.key), made(&arrays.value));
        let heads = dims(&arrays.query).heads;
        let mut bias = vec![0f32; if dbias { bias_sizes.iter().product() } else { 0 }];
        let mut sink = vec![0f32; if dsink { heads } else { 0 }];
        let mut written = Written::new(dq.view()?, dk.view()?, dv.view()?);
        if dbias {
            written = written.dbias(ArrayMut::from(&mut bias).dims(bias_sizes));
        }
        if dsink {
            written = written.dsink(&mut sink);
        }
        let (o, gradient) = (readable(o), readable(gradient));
        let upstream = Upstream::new(view::<T>(&o)?, lse.storage::<f32>(), view(&gradient)?);
        WORKSPACE.with_borrow_mut(|scratch| plan.backward(&inputs, &upstream, written, scratch))?;
        Ok(Gradients {
            query: dq.tensor(),
            key: dk.tensor(),
            value: dv.tensor(),
            bias: dbias.then(|| tensor(bias, &bias_sizes)),
            sink: dsink.then(|| tensor(sink, &[heads])),
        })
    }
}

impl AttentionKernels for Flex {
    fn attention_forward(
        arrays: &Arrays<FlexTensor>,
        options: &Options,
        lse: bool,
    ) -> Result<(FlexTensor, Option<FlexTensor>)> {
        let call = Call::new(arrays, options)?;
        match arrays.query.dtype() {
            DType::F16 => call.forward::<f16>(lse),
            DType::BF16 => call.forward::<bf16>(lse),
            _ => call.forward::<f32>(lse),
        }
    }

    fn attention_backward(
        arrays: &Arrays<FlexTensor>,
        options: &Options,
        output: [&FlexTensor; 2],
        gradient: FlexTensor,
        wanted: [bool; 2],
    ) -> Result<Gradients<FlexTensor>> {
        let call = Call::new(arrays, options)?;
        // As large as the tensor that is tracked, however its indices repeat.
        let sizes = arrays.bias.as_ref().map_or([0; 4], |bias| bias.layout().shape().dims());
        let mut gradients = match arrays.query.dtype() {
            DType::F16 => call.backward::<f16>(output, &gradient, wanted, sizes),
            DType::BF16 => call.backward::<bf16>(output, &gradient, wanted, sizes),
            _ => call.backward::<f32>(output, &gradient, wanted, sizes),
        }?;
        if let (Some(dbias), Some(bias)) = (gradients.bias.take(), &arrays.bias) {
            let dtype = FloatDType::from(bias.dtype());
            gradients.bias =
                Some(<Flex as burn::backend::ops::FloatTensorOps<Flex>>::float_cast(dbias, dtype));
        }
        Ok(gradients)
    }
}
