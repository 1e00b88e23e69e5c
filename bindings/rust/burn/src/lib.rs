//! Attention of libflashattn for [burn](https://docs.rs/burn) tensors, as a backend extension with a
//! fused gradient: backward recomputes the scores from lse and keeps no matrix of them.
//!
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use flashattn_burn::{attention, Attention};
//!
//! let device = Device::flex().autodiff();
//! let random = |shape: [usize; 4]| Tensor::<4>::random(shape, Distribution::Default, &device);
//! let q = random([2, 8, 77, 64]).require_grad(); // (batch, heads, seq, dim)
//! let kv = random([2, 2, 77, 64]);
//! let o = attention(q.clone(), kv.clone(), kv, &Attention::new().causal())?;
//! let gradients = o.sum().backward();
//! assert_eq!(q.grad(&gradients).unwrap().dims(), [2, 8, 77, 64]);
//! # Ok::<(), flashattn::Error>(())
//! ```
//!
//! Tensors are on burn's CPU backend, Flex, of f32, f16 or bf16. Heads of k and v may be fewer than those
//! of q, and a head has any number of elements up to 512. Strides are taken as they are, as long as the
//! elements of a head are contiguous; any other tensor is copied first. Other backends join by
//! [`AttentionKernels`].
//!
//! The C library is found as the crate `flashattn` finds it.
#![warn(missing_docs)]

mod autodiff;
mod extension;
mod flex;
mod options;

pub use extension::{Arrays, AttentionBackend, AttentionKernels, Call, Given, Gradients};
pub use options::{attention, Attention, Options};
