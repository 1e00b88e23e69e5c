//! What a backend computes, and what burn hands on to it.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::tensor::FloatTensor;
#[allow(unused_imports)] // by the macro
use burn::backend::{backend_extension, Autodiff, Backend, ExtensionType, Flex};
use flashattn::{Error, Result};

use crate::Options;

/// A tensor that a call may go without.
#[derive(ExtensionType)]
pub enum Given<B: Backend> {
    /// None.
    Nothing,
    /// The tensor.
    Tensor(FloatTensor<B>),
}

/// The tensors of a call: q (batch, heads, seqlen_q, dim), k and v, and those that may be missing.
#[derive(Clone, Debug)]
pub struct Arrays<T> {
    /// (batch, heads, seqlen_q, dim)
    pub query: T,
    /// (batch, heads_kv, seqlen_kv, dim)
    pub key: T,
    /// (batch, heads_kv, seqlen_kv, dim_v)
    pub value: T,
    /// (batch or 1, heads or 1, seqlen_q or 1, seqlen_kv)
    pub bias: Option<T>,
    /// (heads), f32
    pub sink: Option<T>,
}

/// The gradients of the tensors of the same names.
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Gradients<T> {
    pub query: T,
    pub key: T,
    pub value: T,
    pub bias: Option<T>,
    pub sink: Option<T>,
}

/// A backend whose tensors libflashattn reads and writes.
pub trait AttentionKernels: Backend {
    /// Returns o, (batch, heads, seqlen_q, dim_v), and with `lse` (batch, heads, seqlen_q) of f32.
    ///
    /// # Errors
    ///
    /// What libflashattn refuses.
    fn attention_forward(
        arrays: &Arrays<FloatTensor<Self>>,
        options: &Options,
        lse: bool,
    ) -> Result<(FloatTensor<Self>, Option<FloatTensor<Self>>)>;

    /// The gradients of what forward was given, with its o and lse; those of bias and sink where they
    /// are wanted.
    ///
    /// # Errors
    ///
    /// What libflashattn refuses.
    fn attention_backward(
        arrays: &Arrays<FloatTensor<Self>>,
        options: &Options,
        output: [&FloatTensor<Self>; 2],
        gradient: FloatTensor<Self>,
        wanted: [bool; 2],
    ) -> Result<Gradients<FloatTensor<Self>>>;
}

/// The options of a call, and where its refusal goes: an operation of a backend returns tensors only.
#[derive(Clone, Debug)]
pub struct Call {
    pub(crate) options: Options,
    refusal: Arc<Mutex<Option<Error>>>,
}

impl Call {
    pub(crate) fn new(options: Options) -> Self {
        Self { options, refusal: Arc::default() }
    }

    /// The result, or in its place a tensor that `finish` drops.
    pub(crate) fn result<T>(&self, result: Result<T>, instead: impl FnOnce() -> T) -> T {
        result.unwrap_or_else(|error| {
            *self.refusal.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            instead()
        })
    }

    pub(crate) fn finish<T>(&self, output: T) -> Result<T> {
        match self.refusal.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(error) => Err(error),
            None => Ok(output),
        }
    }
}

/// The operation behind [`attention`](crate::attention): of a backend with kernels, and of Autodiff
/// over one, whose gradient is fused, too.
#[backend_extension(Flex, Autodiff)]
pub trait AttentionBackend: Backend {
    /// Returns o. A refusal is left in `call`.
    fn flash_attention(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        #[extension_type] bias: Given<Self>,
        #[extension_type] sink: Given<Self>,
        call: Call,
    ) -> FloatTensor<Self>;
}

impl<B: Backend> Given<B> {
    pub(crate) fn option(self) -> Option<FloatTensor<B>> {
        match self {
            Self::Nothing => None,
            Self::Tensor(tensor) => Some(tensor),
        }
    }
}

impl AttentionBackend for Flex {
    fn flash_attention(
        query: FloatTensor<Self>,
        key: FloatTensor<Self>,
        value: FloatTensor<Self>,
        bias: Given<Self>,
        sink: Given<Self>,
        call: Call,
    ) -> FloatTensor<Self> {
        let arrays = Arrays { query, key, value, bias: bias.option(), sink: sink.option() };
        let result = Self::attention_forward(&arrays, &call.options, false);
        call.result(result.map(|(o, _)| o), || arrays.query.clone())
    }
}
