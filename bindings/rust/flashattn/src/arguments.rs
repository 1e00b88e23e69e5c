//! What a call writes, and what backward and merge read beside the inputs.

use crate::{Array, ArrayMut, RowStrides, View, ViewMut};

/// What forward and merge write. Made by `into()` from a [`ViewMut`].
#[derive(Debug)]
#[must_use]
pub struct Output<'a, O> {
    pub(crate) o: ViewMut<'a, O>,
    pub(crate) lse: Option<ArrayMut<'a, f32>>,
}

impl<'a, O> Output<'a, O> {
    /// o: (batch, seqlen_q, heads, dim_v) or (total_q, heads, dim_v).
    pub fn new(o: ViewMut<'a, O>) -> Self {
        Self { o, lse: None }
    }

    /// lse: (batch, heads, seqlen_q), or for VARLEN_Q (heads, total_q); natural logarithm. A plan
    /// with [`DescBuilder::lse`](crate::DescBuilder::lse) needs it, others refuse it.
    pub fn lse(mut self, lse: impl Into<ArrayMut<'a, f32>>) -> Self {
        self.lse = Some(lse.into());
        self
    }
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
    pub(crate) lse: Array<'a, f32>,
    pub(crate) dlse: Option<Array<'a, f32>>,
}

impl<'a, O> Upstream<'a, O> {
    /// o and lse as forward wrote them; dout, the gradient that arrives at o, with the shape of o.
    pub fn new(o: View<'a, O>, lse: impl Into<Array<'a, f32>>, dout: View<'a, O>) -> Self {
        Self { o, dout, lse: lse.into(), dlse: None }
    }

    /// The gradient that arrives at lse, laid out like it.
    pub fn dlse(mut self, dlse: impl Into<Array<'a, f32>>) -> Self {
        self.dlse = Some(dlse.into());
        self
    }
}

/// What backward writes. Written, not added to.
#[derive(Debug)]
#[must_use]
pub struct Gradients<'a, T> {
    pub(crate) dq: ViewMut<'a, T>,
    pub(crate) dk: ViewMut<'a, T>,
    pub(crate) dv: ViewMut<'a, T>,
    pub(crate) dbias: Option<(ArrayMut<'a, f32>, RowStrides)>,
    pub(crate) dsink: Option<ArrayMut<'a, f32>>,
}

impl<'a, T> Gradients<'a, T> {
    /// With the shapes of q, k and v.
    pub fn new(dq: ViewMut<'a, T>, dk: ViewMut<'a, T>, dv: ViewMut<'a, T>) -> Self {
        Self { dq, dk, dv, dbias: None, dsink: None }
    }

    /// The gradient of the dense bias; a stride of 0 sums over that index.
    pub fn dbias(mut self, dbias: impl Into<ArrayMut<'a, f32>>, strides: RowStrides) -> Self {
        self.dbias = Some((dbias.into(), strides));
        self
    }

    /// (heads): the gradient of the sink.
    pub fn dsink(mut self, dsink: impl Into<ArrayMut<'a, f32>>) -> Self {
        self.dsink = Some(dsink.into());
        self
    }
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
