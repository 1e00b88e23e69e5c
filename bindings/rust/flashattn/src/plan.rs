//! Plans.

use std::ptr::NonNull;

use flashattn_sys as sys;

use crate::array::Place;
use crate::error::{check, int32, int64, invalid, Result};
use crate::properties::PlanInfo;
use crate::{Device, Dims, Dtype, Op, Reason};

/// The sizes of a call, for questions about it. Where lengths lie on the device, upper bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Sequences.
    pub batch: usize,
    /// Queries of the longest sequence.
    pub seqlen_q: usize,
    /// Keys of the longest sequence.
    pub seqlen_kv: usize,
    /// VARLEN_Q: the queries of all sequences together.
    pub total_q: usize,
    /// VARLEN_KV: the keys of all sequences together.
    pub total_kv: usize,
}

impl Shape {
    pub(crate) fn lower(&self) -> Result<sys::flashattn_shape> {
        Ok(sys::flashattn_shape {
            batch: int32(self.batch, "shape.batch")?,
            seqlen_q: int32(self.seqlen_q, "shape.seqlen_q")?,
            seqlen_kv: int32(self.seqlen_kv, "shape.seqlen_kv")?,
            reserved: 0,
            total_q: int64(self.total_q, "shape.total_q")?,
            total_kv: int64(self.total_kv, "shape.total_kv")?,
        })
    }
}

/// What a descriptor says of the arrays of a call, defaults filled in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub place: Place,
    pub dtype: Dtype,
    pub dtype_o: Dtype,
    pub bias_dtype: Dtype,
    pub heads_q: usize,
    pub heads_kv: usize,
    pub dim_qk: usize,
    pub dim_v: usize,
    pub varlen_q: bool,
    pub varlen_kv: bool,
    pub page_size: usize,
    pub block_q: usize,
    pub block_kv: usize,
    pub dropout: f32,
}

impl Facts {
    fn new(desc: &sys::flashattn_desc) -> Self {
        let size = |n: i32| usize::try_from(n).unwrap_or(0);
        let or = |n: i32, default: i32| if n == 0 { default } else { n };
        let layout = sys::flashattn_layout(desc.layout);
        let device = Device(desc.device);
        Self {
            place: if device == Device::CPU { Place::Host } else { Place::Device },
            dtype: Dtype(desc.dtype),
            dtype_o: Dtype(or(desc.dtype_o, desc.dtype)),
            bias_dtype: Dtype(or(desc.bias_dtype, desc.dtype)),
            heads_q: size(desc.heads_q),
            heads_kv: size(or(desc.heads_kv, desc.heads_q)),
            dim_qk: size(desc.dim_qk),
            dim_v: size(or(desc.dim_v, desc.dim_qk)),
            varlen_q: layout.contains(sys::flashattn_layout::VARLEN_Q),
            varlen_kv: layout.contains(sys::flashattn_layout::VARLEN_KV),
            page_size: size(desc.page_size),
            block_q: size(desc.block_q),
            block_kv: size(desc.block_kv),
            dropout: desc.dropout,
        }
    }

    pub(crate) fn expect_dtype(&self, given: Dtype, wanted: Dtype, field: &str) -> Result<()> {
        if given == wanted {
            return Ok(());
        }
        let sentence = format!(
            "{field} holds {given:?}, but the plan is made for {wanted:?}; convert it, or make a plan for \
             {given:?}"
        );
        Err(invalid(Reason::DTYPE, field, sentence))
    }

    pub(crate) fn expect_dims(
        &self,
        given: Dims,
        varlen: bool,
        heads: usize,
        dim: usize,
        field: &str,
    ) -> Result<()> {
        if (given.varlen, given.heads, given.dim) == (varlen, heads, dim) {
            return Ok(());
        }
        let layout = if varlen { "(tokens, heads, dim)" } else { "(batch, seq, heads, dim)" };
        let remedy = if (given.varlen, given.seq, given.dim) == (varlen, heads, dim) {
            "heads come after seq: for the other order in memory, name the sizes in this one and give \
             View::strided with Strides::bhsd of them"
        } else {
            "give it so, or make another plan"
        };
        let sentence = format!(
            "{field} is {given}, but the plan is made for {layout} with heads = {heads} and dim = {dim}; \
             {remedy}"
        );
        Err(invalid(Reason::SIZE, field, sentence))
    }
}

/// A descriptor checked, with a kernel chosen. Immutable: any number of threads may run it at once,
/// each with a workspace of its own. Made by [`DescBuilder::build`](crate::DescBuilder::build).
#[derive(Debug)]
pub struct Plan {
    handle: NonNull<sys::flashattn_plan>,
    pub(crate) facts: Facts,
}

// SAFETY: the library promises that any thread may use a plan at any time, several at once; only
// destroy must not overlap a use, which Drop's exclusive borrow rules out.
unsafe impl Send for Plan {}
unsafe impl Sync for Plan {}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made by plan_create, destroyed once.
        unsafe { sys::flashattn_plan_destroy(self.handle.as_ptr()) }
    }
}

impl Plan {
    pub(crate) fn new(desc: sys::flashattn_desc) -> Result<Self> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: struct_size is that of the structure; an out-parameter.
        check(unsafe { sys::flashattn_plan_create(&desc, &mut handle) })?;
        let handle = NonNull::new(handle)
            .ok_or_else(|| invalid(Reason::NONE, "plan", "the library made no plan"))?;
        Ok(Self { handle, facts: Facts::new(&desc) })
    }

    pub(crate) fn as_ptr(&self) -> *const sys::flashattn_plan {
        self.handle.as_ptr()
    }

    /// The handle, for calls of [`crate::sys`]. It belongs to this plan.
    pub fn as_raw(&self) -> *const sys::flashattn_plan {
        self.handle.as_ptr()
    }

    /// Bytes of workspace that an operation needs; `None`: enough for every call within the promised
    /// maxima. Linear in the sequence length.
    ///
    /// # Errors
    ///
    /// INVALID_ARGUMENT: also for `None` when a maximum that matters was not promised.
    pub fn workspace_size(&self, op: Op, shape: Option<&Shape>) -> Result<usize> {
        let shape = shape.map(Shape::lower).transpose()?;
        let bytes = self.bytes(op, shape.as_ref())?;
        Ok(usize::try_from(bytes).unwrap_or(0))
    }

    pub(crate) fn bytes(&self, op: Op, shape: Option<&sys::flashattn_shape>) -> Result<i64> {
        let shape = shape.map_or(std::ptr::null(), std::ptr::from_ref);
        let mut bytes = 0;
        // SAFETY: a live plan; shape may be NULL; an out-parameter.
        check(unsafe { sys::flashattn_workspace_size(self.as_ptr(), op.0, shape, &mut bytes) })?;
        Ok(bytes)
    }

    /// Which kernel an operation uses and what it costs; `None`: for the promised maxima.
    ///
    /// # Errors
    ///
    /// INVALID_ARGUMENT: the plan was not made for this operation.
    pub fn info(&self, op: Op, shape: Option<&Shape>) -> Result<PlanInfo> {
        let shape = shape.map(Shape::lower).transpose()?;
        let shape = shape.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let mut c = sys::flashattn_plan_properties::default();
        // SAFETY: a live plan; shape may be NULL; struct_size is set; the texts live as long as it.
        unsafe {
            check(sys::flashattn_plan_info(self.as_ptr(), op.0, shape, &mut c))?;
            Ok(PlanInfo::new(&c))
        }
    }
}
