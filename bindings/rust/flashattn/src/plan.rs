//! Plans.

use std::ptr::NonNull;

use flashattn_sys as sys;

use crate::array::Memory;
use crate::error::{check, check_with, int32, int64, invalid, Result};
use crate::library::check_version;
use crate::properties::PlanInfo;
use crate::{Device, Dims, Dtype, Op, Reason};

/// The sizes of a call, for questions about it. Where lengths lie on the device, upper bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
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

impl Sizes {
    /// The arguments of a call with these sizes and nothing else.
    pub(crate) fn lower(&self) -> Result<sys::flashattn_args> {
        Ok(sys::flashattn_args {
            batch: int32(self.batch, "batch")?,
            seqlen_q: int32(self.seqlen_q, "seqlen_q")?,
            seqlen_kv: int32(self.seqlen_kv, "seqlen_kv")?,
            total_q: int64(self.total_q, "total_q")?,
            total_kv: int64(self.total_kv, "total_kv")?,
            ..Default::default()
        })
    }
}

/// A plan's descriptor with every default filled in, as the library does it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resolved {
    pub desc: sys::flashattn_desc,
    pub memory: Memory,
    pub heads_q: usize,
    pub heads_kv: usize,
    pub dim_qk: usize,
    pub dim_v: usize,
    pub page_size: usize,
}

impl Resolved {
    fn new(desc: sys::flashattn_desc) -> Self {
        let size = |n: i32| usize::try_from(n).unwrap_or(0);
        let host = Device(desc.device) == Device::CPU;
        Self {
            memory: if host { Memory::Host } else { Memory::Device },
            heads_q: size(desc.heads_q),
            heads_kv: size(desc.heads_kv),
            dim_qk: size(desc.dim_qk),
            dim_v: size(desc.dim_v),
            page_size: size(desc.page_size),
            desc,
        }
    }

    pub(crate) fn varlen_q(&self) -> bool {
        sys::flashattn_layout(self.desc.layout).contains(sys::flashattn_layout::VARLEN_Q)
    }

    pub(crate) fn varlen_kv(&self) -> bool {
        sys::flashattn_layout(self.desc.layout).contains(sys::flashattn_layout::VARLEN_KV)
    }

    pub(crate) fn latent_kv(&self) -> bool {
        sys::flashattn_layout(self.desc.layout).contains(sys::flashattn_layout::LATENT_KV)
    }

    pub(crate) fn expect_dtype(&self, given: Dtype, wanted: Dtype, field: &str) -> Result<()> {
        if given == wanted {
            return Ok(());
        }
        let message = format!(
            "{field} holds {given:?}, but the plan is made for {wanted:?}; convert it, or make a plan for \
             {given:?}"
        );
        Err(invalid(Reason::DTYPE, field, message))
    }

    /// Refuses a pool of pages of another size than the plan's.
    pub(crate) fn expect_page(&self, given: Dims, field: &str) -> Result<()> {
        if given.seq == self.page_size {
            return Ok(());
        }
        let message = format!(
            "{field} has {} tokens a page, but the plan's page_size is {}; give pages of that size, or \
             make a plan with paged({})",
            given.seq, self.page_size, given.seq
        );
        Err(invalid(Reason::PAGE_SIZE, field, message))
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
        if given.heads == 0 || given.dim == 0 {
            let none = if given.heads == 0 { "0 heads" } else { "heads of 0 elements" };
            let message = format!("{field} is {given}, {none}; give at least 1");
            return Err(invalid(Reason::SIZE, field, message));
        }
        let layout = if varlen { "(tokens, heads, dim)" } else { "(batch, seq, heads, dim)" };
        let remedy = if (given.varlen, given.seq, given.dim) == (varlen, heads, dim) {
            "heads come after seq: for the other order in memory, name the sizes in this one and give \
             View::strided with Strides::bhsd of them"
        } else {
            "give it so, or make another plan"
        };
        let message = format!(
            "{field} is {given}, but the plan is made for {layout} with heads = {heads} and dim = {dim}; \
             {remedy}"
        );
        Err(invalid(Reason::SIZE, field, message))
    }
}

/// A descriptor checked, with a kernel chosen. Immutable: any number of threads may run it at once,
/// each with a workspace of its own. Made by [`DescBuilder::build`](crate::DescBuilder::build).
#[derive(Debug)]
pub struct Plan {
    handle: NonNull<sys::flashattn_plan>,
    pub(crate) resolved: Resolved,
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
    pub(crate) fn new(desc: &sys::flashattn_desc) -> Result<Self> {
        check_version()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: struct_size is that of the structure; out-parameters.
        check_with(|error| unsafe { sys::flashattn_plan_create(desc, &mut handle, error) })?;
        let handle = NonNull::new(handle)
            .ok_or_else(|| invalid(Reason::NONE, "plan", "the library made no plan"))?;
        // From here on Drop frees it.
        let mut plan = Self { handle, resolved: Resolved::new(*desc) };
        let mut desc = sys::flashattn_desc::default();
        // SAFETY: a live plan; struct_size is set.
        check(unsafe { sys::flashattn_plan_desc(plan.as_raw(), &mut desc) })?;
        plan.resolved = Resolved::new(desc);
        Ok(plan)
    }

    /// The handle, for calls of [`crate::sys`]. It belongs to this plan.
    pub fn as_raw(&self) -> *const sys::flashattn_plan {
        self.handle.as_ptr()
    }

    /// The descriptor with every default resolved: heads_kv, dim_v, types, scale.
    pub fn desc(&self) -> &sys::flashattn_desc {
        &self.resolved.desc
    }

    /// Bytes of workspace that an operation needs; `None`: enough for every call within the plan's
    /// maxima. Linear in the sequence length.
    ///
    /// # Errors
    ///
    /// INVALID_ARGUMENT: also for `None` when a maximum that matters is not set.
    pub fn workspace_size(&self, op: Op, sizes: Option<&Sizes>) -> Result<usize> {
        let args = sizes.map(Sizes::lower).transpose()?;
        let bytes = self.bytes(op, args.as_ref())?;
        Ok(usize::try_from(bytes).unwrap_or(0))
    }

    pub(crate) fn bytes(&self, op: Op, args: Option<&sys::flashattn_args>) -> Result<i64> {
        let args = args.map_or(std::ptr::null(), std::ptr::from_ref);
        let mut bytes = 0;
        // SAFETY: a live plan; args may be NULL; an out-parameter.
        check(unsafe { sys::flashattn_workspace_size(self.as_raw(), op.0, args, &mut bytes) })?;
        Ok(bytes)
    }

    /// Which kernel an operation uses and what it costs; `None`: for the plan's maxima.
    ///
    /// # Errors
    ///
    /// INVALID_ARGUMENT: the plan was not made for this operation.
    pub fn info(&self, op: Op, sizes: Option<&Sizes>) -> Result<PlanInfo> {
        let args = sizes.map(Sizes::lower).transpose()?;
        let args = args.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let mut c = sys::flashattn_plan_properties::default();
        // SAFETY: a live plan; args may be NULL; struct_size is set; the texts live as long as it.
        unsafe {
            check(sys::flashattn_plan_info(self.as_raw(), op.0, args, &mut c))?;
            Ok(PlanInfo::new(&c))
        }
    }
}
