//! The function that users call, and its options.

use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};
use flashattn::Result;

use crate::{AttentionBackend, Call, Given};

/// What scores go through.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// Factor of the scores. `None`: 1 / sqrt(dim).
    pub scale: Option<f32>,
    /// Keys that a query sees before and after it, both sequences aligned at their ends; `None`: all.
    pub window: [Option<usize>; 2],
    /// Scores s become cap * tanh(s / cap). 0: they stay.
    pub softcap: f32,
}

/// Options of [`attention`], and the tensors beside q, k and v.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use flashattn_burn::{attention, Attention};
///
/// let device = Device::flex().autodiff();
/// let x = Tensor::<4>::random([1, 4, 40, 32], Distribution::Default, &device);
/// let sink = Tensor::<1>::zeros([4], &device).require_grad(); // a logit per head
/// let options = Attention::new().window(Some(16), Some(0)).sink(sink.clone());
/// let o = attention(x.clone(), x.clone(), x, &options)?;
/// assert_eq!(sink.grad(&o.sum().backward()).unwrap().dims(), [4]);
/// # Ok::<(), flashattn::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct Attention {
    options: Options,
    bias: Option<Tensor<4>>,
    sink: Option<Tensor<1>>,
}

impl Attention {
    /// softmax(q k^T / sqrt(dim)) v.
    pub fn new() -> Self {
        Self::default()
    }

    /// Another factor of the scores than 1 / sqrt(dim), not 0.
    pub fn scale(mut self, scale: f32) -> Self {
        self.options.scale = Some(scale);
        self
    }

    /// Hides keys after the query, both sequences aligned at their ends: `window(None, Some(0))`.
    pub fn causal(self) -> Self {
        self.window(None, Some(0))
    }

    /// Hides keys more than `left` before and `right` after the query; `None`: that side is open.
    pub fn window(mut self, left: Option<usize>, right: Option<usize>) -> Self {
        self.options.window = [left, right];
        self
    }

    /// Scores s become cap * tanh(s / cap) (Gemma 2). 0: they stay.
    pub fn softcap(mut self, cap: f32) -> Self {
        self.options.softcap = cap;
        self
    }

    /// Is added to the scores: (batch or 1, heads or 1, seqlen_q or 1, seqlen_kv), with a gradient where
    /// it is tracked. Negative infinity hides a key.
    pub fn bias(mut self, bias: Tensor<4>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// A logit per head, (heads), that takes part in the softmax and has no value (gpt-oss); with a
    /// gradient where it is tracked.
    pub fn sink(mut self, sink: Tensor<1>) -> Self {
        self.sink = Some(sink);
        self
    }
}

/// Attention of burn tensors, with gradients of those that are tracked.
///
/// * `query`: (batch, heads, seqlen_q, dim); `key`: (batch, heads_kv, seqlen_kv, dim), where heads is a
///   multiple of heads_kv; `value`: (batch, heads_kv, seqlen_kv, dim_v).
///
/// Returns o: (batch, heads, seqlen_q, dim_v), contiguous.
///
/// # Errors
///
/// What libflashattn refuses; tensors of other types than f32, f16 and bf16, or of different ones.
///
/// # Panics
///
/// As burn's own operations: tensors of different devices, or of a backend that has no
/// [`AttentionKernels`](crate::AttentionKernels); memory that cannot be allocated in backward.
pub fn attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: &Attention,
) -> Result<Tensor<4>> {
    let call = Call::new(options.options.clone());
    let given = |tensor: Option<burn::backend::DispatchTensor>| match tensor {
        Some(tensor) => Given::Tensor(tensor),
        None => Given::Nothing,
    };
    let sink = options.sink.clone().map(|sink| sink.cast(DType::F32).into_dispatch());
    let o = Dispatch::flash_attention(
        query.into_dispatch(),
        key.into_dispatch(),
        value.into_dispatch(),
        given(options.bias.clone().map(Tensor::into_dispatch)),
        given(sink),
        call.clone(),
    );
    call.finish(Tensor::from_dispatch(o))
}
