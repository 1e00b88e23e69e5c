//! Attention of libflashattn for [candle](https://docs.rs/candle-core) tensors, with gradients: the
//! functions of the crate `candle-flash-attn`, by name and argument, and [`Attention`], whose options
//! combine.
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//!
//! let q = Var::randn(0f32, 1f32, (2, 77, 8, 64), &Device::Cpu)?; // (batch, seq, heads, dim)
//! let kv = Tensor::randn(0f32, 1f32, (2, 77, 2, 64), &Device::Cpu)?;
//! let o = flashattn_candle::flash_attn(&q, &kv, &kv, 0.125, true)?;
//! let gradients = o.sum_all()?.backward()?;
//! assert_eq!(gradients.get(&q).unwrap().dims(), q.dims());
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! Tensors are f32, f16 or bf16, where candle-flash-attn takes the latter two; a head has any number of
//! elements up to 512, and one of v may have another. Strides are taken as they are, as long as the
//! elements of a head are contiguous. What has no kernel is refused with libflashattn's message, as
//! [`Error::Wrapped`](candle_core::Error::Wrapped) of a [`flashattn::Error`].
//!
//! Plans are kept for the process and scratch memory for the thread, so that a call in a loop makes
//! neither. What backward needs is written only where a tensor is tracked.
//!
//! With the feature `cuda` tensors may lie on a GPU, those of lengths and page numbers, too. Work goes to
//! the stream of candle's device, which gives the memory of results and scratch; nothing waits for the
//! GPU. Lengths are not read there: those out of range count as the nearest in range, and results are
//! undefined then.
//!
//! The C library is found as the crate `flashattn` finds it.
#![warn(missing_docs)]

mod attention;
#[cfg(feature = "cuda")]
mod cuda;
mod flash_attn;
mod functions;
mod op;
mod sink;
mod tensors;

pub use attention::{Attention, Varlen};
pub use flash_attn::FlashAttn;
pub use functions::*;
