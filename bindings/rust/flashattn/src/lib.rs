//! Exact tiled attention, forward and backward, in memory linear in the sequence length, on the CPU
//! and on NVIDIA GPUs: the safe layer of [libflashattn](flashattn_sys).
//!
//! ```
//! use flashattn::{DescBuilder, Dtype, Inputs, View, ViewMut, Workspace};
//!
//! let dims = [2, 77, 8, 64]; // (batch, seq, heads, dim), the last index fastest
//! let q = vec![0.1f32; 2 * 77 * 8 * 64];
//! let (k, v, mut o) = (q.clone(), q.clone(), vec![0f32; q.len()]);
//!
//! let plan = DescBuilder::new(Dtype::F32, 8, 64).causal().build()?;
//! let inputs = Inputs::new(View::new(&q, dims)?, View::new(&k, dims)?, View::new(&v, dims)?);
//! plan.forward(&inputs, ViewMut::new(&mut o, dims)?, &mut Workspace::new())?;
//! # Ok::<(), flashattn::Error>(())
//! ```
//!
//! # How it goes
//!
//! 1. A [`DescBuilder`] says what is computed: type, heads, dimensions, masks, features. Lengths come
//!    later, with each call.
//! 2. [`DescBuilder::build`] makes a [`Plan`], or refuses with an [`Error`] whose message names field,
//!    value, limit and remedy. A plan is immutable: any number of threads may run it at once.
//! 3. [`Plan::forward`] and [`Plan::backward`] run it on [`View`]s of slices. The lengths of all slices
//!    are checked before the call, and what is written is borrowed mutably: no `unsafe` is needed.
//!
//! A plan for a GPU is run with [`Plan::forward_on`] and its relatives, on views made of device
//! pointers. They are `unsafe`, as the work outlives the call.
//!
//! # Empty rows
//!
//! A query that sees no key yields o = 0 and lse = -inf (with a sink: lse = sink). Rows past a
//! sequence's length are never read into a result and never written.
#![warn(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]

mod append;
mod append_arguments;
mod arguments;
mod array;
mod arrays;
mod desc;
mod element;
mod error;
mod inputs;
mod library;
mod parallel;
mod plan;
mod plan_cache;
mod properties;
mod quantize;
mod run;
mod view;
mod workspace;

// The README's examples are compiled and run with those of the documentation.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

pub use append_arguments::{AppendInputs, AppendOutput};
pub use arguments::{Gradients, Output, Part, Upstream};
pub use array::{Array, ArrayMut};
pub use desc::DescBuilder;
pub use element::{Element, Scalar, F8E4M3};
pub use error::{Error, Result};
pub use inputs::Inputs;
pub use library::{build_info, device_count, device_info, set_log, version, DeviceInfo};
pub use parallel::Parallel;
#[cfg(feature = "rayon")]
pub use parallel::Rayon;
pub use plan::{Plan, Sizes};
pub use properties::PlanInfo;
pub use quantize::{QuantizeInputs, QuantizeOutput};
pub use run::Queue;
pub use view::{Dims, Strides, View, ViewMut};
pub use workspace::Workspace;

pub use flashattn_sys as sys;
pub use flashattn_sys::{
    flashattn_determinism as Determinism, flashattn_device as Device, flashattn_dtype as Dtype,
    flashattn_log_level as LogLevel, flashattn_op as Op, flashattn_reason as Reason,
    flashattn_status as Status,
};
pub use half;
