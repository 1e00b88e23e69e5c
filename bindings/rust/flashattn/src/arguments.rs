//! What a call writes, and what backward and merge read beside the inputs.

use std::fmt;

use flashattn_sys as sys;

use crate::array::{Array, ArrayMut};
use crate::arrays::{methods, Arrays};
use crate::{Parallel, View, ViewMut};

/// Who runs the tasks of a call; `None`: the library's own threads.
#[derive(Clone, Copy, Default)]
pub(crate) struct Pool<'a>(pub Option<&'a dyn Parallel>);

impl fmt::Debug for Pool<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "the caller's" } else { "the library's" })
    }
}

macro_rules! parallel {
    () => {
        /// The thread pool that computes, in place of the library's own threads. CPU only.
        pub fn parallel(mut self, pool: &'a dyn crate::Parallel) -> Self {
            self.pool = Pool(Some(pool));
            self
        }
    };
}
pub(crate) use parallel;

/// What forward and merge write. Made by `into()` from a [`ViewMut`].
///
/// A plan with [`DescBuilder::lse`](crate::DescBuilder::lse) needs lse, others refuse it; merge takes it
/// where it is given.
#[derive(Debug)]
#[must_use]
pub struct Output<'a, O> {
    pub(crate) o: ViewMut<'a, O>,
    pub(crate) arrays: Arrays<sys::flashattn_args>,
    pub(crate) pool: Pool<'a>,
}

macro_rules! outputs {
    ($($entry:tt)*) => {
        impl<'a, O> Output<'a, O> {
            methods!(ArrayMut, $($entry)*);
        }
    };
}

sys::arrays!(flashattn_args, output => outputs);

impl<'a, O> Output<'a, O> {
    /// o: (batch, seqlen_q, heads, dim_v) or (total_q, heads, dim_v).
    pub fn new(o: ViewMut<'a, O>) -> Self {
        Self { o, arrays: Default::default(), pool: Pool::default() }
    }

    parallel!();
}

impl<'a, O> From<ViewMut<'a, O>> for Output<'a, O> {
    fn from(o: ViewMut<'a, O>) -> Self {
        Self::new(o)
    }
}

/// What arrives at backward: the results of forward and their gradients.
#[derive(Clone, Debug)]
#[must_use]
pub struct Upstream<'a, O> {
    pub(crate) o: View<'a, O>,
    pub(crate) dout: View<'a, O>,
    pub(crate) arrays: Arrays<sys::flashattn_args>,
}

macro_rules! upstream {
    ($($entry:tt)*) => {
        impl<'a, O> Upstream<'a, O> {
            methods!(Array, $($entry)*);
        }
    };
}

sys::arrays!(flashattn_args, upstream => upstream);

impl<'a, O> Upstream<'a, O> {
    /// o and lse as forward wrote them; dout, the gradient that arrives at o, with the shape of o.
    pub fn new(o: View<'a, O>, lse: impl Into<Array<'a, f32>>, dout: View<'a, O>) -> Self {
        let mut arrays = Arrays::default();
        arrays.put("lse", Some(lse.into().raw()));
        Self { o, dout, arrays }
    }
}

/// What backward writes. Written, not added to.
#[derive(Debug)]
#[must_use]
pub struct Gradients<'a, T> {
    pub(crate) dq: ViewMut<'a, T>,
    pub(crate) dk: ViewMut<'a, T>,
    pub(crate) dv: ViewMut<'a, T>,
    pub(crate) arrays: Arrays<sys::flashattn_args>,
    pub(crate) pool: Pool<'a>,
}

macro_rules! gradients {
    ($($entry:tt)*) => {
        impl<'a, T> Gradients<'a, T> {
            methods!(ArrayMut, $($entry)*);
        }
    };
}

sys::arrays!(flashattn_args, gradient => gradients);

impl<'a, T> Gradients<'a, T> {
    /// With the shapes of q, k and v.
    pub fn new(dq: ViewMut<'a, T>, dk: ViewMut<'a, T>, dv: ViewMut<'a, T>) -> Self {
        Self { dq, dk, dv, arrays: Default::default(), pool: Pool::default() }
    }

    parallel!();
}

/// A partial result over some of the keys, for [`Plan::merge`](crate::Plan::merge).
#[derive(Clone, Copy, Debug)]
pub struct Part<'a, P> {
    pub(crate) o: View<'a, P>,
    pub(crate) lse: Array<'a, f32>,
}

impl<'a, P> Part<'a, P> {
    /// o and lse as forward wrote them.
    pub fn new(o: View<'a, P>, lse: impl Into<Array<'a, f32>>) -> Self {
        Self { o, lse: lse.into() }
    }
}
