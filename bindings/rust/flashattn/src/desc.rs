//! What a plan computes.

use std::sync::Arc;

use flashattn_sys as sys;

use crate::error::{check_with, int32, int64, Error, Result};
use crate::library::check_version;
use crate::{plan_cache, Determinism, Device, Dtype, Op, Plan};

/// A method for each field of the header's descriptor that stands for itself.
macro_rules! setters {
    ($({ $name:ident, $kind:tt, $doc:literal })*) => {
        impl DescBuilder {
            $(setters!(@ $kind $name $doc);)*
        }
    };
    (@ dtype $name:ident $doc:literal) => {
        #[doc = $doc]
        pub fn $name(mut self, dtype: Dtype) -> Self {
            self.desc.$name = dtype.0;
            self
        }
    };
    (@ float $name:ident $doc:literal) => {
        #[doc = $doc]
        pub fn $name(mut self, $name: f32) -> Self {
            self.desc.$name = $name;
            self
        }
    };
    (@ int $name:ident $doc:literal) => {
        #[doc = $doc]
        pub fn $name(mut self, $name: usize) -> Self {
            self.desc.$name = self.int($name, stringify!($name));
            self
        }
    };
    (@ long $name:ident $doc:literal) => {
        #[doc = $doc]
        pub fn $name(mut self, $name: usize) -> Self {
            self.desc.$name = self.long($name, stringify!($name));
            self
        }
    };
}

sys::desc_fields!(setters);

/// Says what is computed, field by field; lengths come later, with each call. Every default is zero:
/// the CPU, forward only, no mask.
///
/// ```
/// # use flashattn::{DescBuilder, Dtype};
/// let plan = DescBuilder::new(Dtype::BF16, 32, 128) // query heads, elements of a head
///     .heads_kv(8)
///     .causal()
///     .window(1023, 0)
///     .backward()
///     .build()?;
/// let error = DescBuilder::new(Dtype::F32, 8, 64).heads_kv(3).check().unwrap_err();
/// assert_eq!(error.reason, flashattn::Reason::HEAD_RATIO);
/// # Ok::<(), flashattn::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct DescBuilder {
    desc: sys::flashattn_desc,
    error: Option<Error>, // of the first size that fits no field
}

impl DescBuilder {
    /// The fields that have no default: the type of q, k, v; query heads; elements of a head.
    pub fn new(dtype: Dtype, heads_q: usize, dim_qk: usize) -> Self {
        let desc = sys::flashattn_desc { dtype: dtype.0, ..Default::default() };
        let mut builder = Self { desc, error: None };
        builder.desc.heads_q = builder.int(heads_q, "heads_q");
        builder.desc.dim_qk = builder.int(dim_qk, "dim_qk");
        builder
    }

    fn int(&mut self, value: usize, field: &str) -> i32 {
        int32(value, field).unwrap_or_else(|error| {
            self.error.get_or_insert(error);
            0
        })
    }

    fn long(&mut self, value: usize, field: &str) -> i64 {
        int64(value, field).unwrap_or_else(|error| {
            self.error.get_or_insert(error);
            0
        })
    }

    /// The device, and which of its kind.
    pub fn device(mut self, device: Device, index: usize) -> Self {
        self.desc.device = device.0;
        self.desc.device_index = self.int(index, "device_index");
        self
    }

    /// Also makes [`Plan::backward`] possible, and lets forward write the lse that it reads.
    pub fn backward(mut self) -> Self {
        self.desc.ops |= (Op::FORWARD | Op::BACKWARD).0;
        self.lse()
    }

    /// Forward writes lse, the logarithm of each row's sum.
    pub fn lse(mut self) -> Self {
        self.desc.features |= sys::flashattn_feature::LSE.0;
        self
    }

    /// Backward adds the gradient that arrives at lse.
    pub fn dlse(mut self) -> Self {
        self.desc.features |= sys::flashattn_feature::DLSE.0;
        self
    }

    /// Sequences of queries and keys stand in one row of tokens each: (tokens, heads, dim).
    pub fn varlen(self) -> Self {
        self.varlen_q().varlen_kv()
    }

    /// Sequences of queries stand in one row of tokens.
    pub fn varlen_q(mut self) -> Self {
        self.desc.layout |= sys::flashattn_layout::VARLEN_Q.0;
        self
    }

    /// Sequences of keys stand in one row of tokens.
    pub fn varlen_kv(mut self) -> Self {
        self.desc.layout |= sys::flashattn_layout::VARLEN_KV.0;
        self
    }

    /// K and V are pools of pages: (page, page_size, heads, dim). Forward only.
    pub fn paged(mut self, page_size: usize) -> Self {
        self.desc.layout |= sys::flashattn_layout::PAGED_KV.0;
        self.desc.page_size = self.int(page_size, "page_size");
        self
    }

    /// K and V are the quantised cache of latent attention: see
    /// [`Inputs::latent`](crate::Inputs::latent). Forward only.
    pub fn latent_kv(mut self) -> Self {
        self.desc.layout |= sys::flashattn_layout::LATENT_KV.0;
        self
    }

    /// Negative page numbers hide the keys of their pages: see
    /// [`Inputs::page_table`](crate::Inputs::page_table).
    pub fn hidden_pages(mut self) -> Self {
        self.desc.mask |= sys::flashattn_mask::PAGES.0;
        self
    }

    /// Hides keys after the query. With Sq, Sk the lengths of a sequence, query i sees key j when
    /// j <= i + Sk - Sq; see [`DescBuilder::top_left`].
    pub fn causal(mut self) -> Self {
        self.desc.mask |= sys::flashattn_mask::CAUSAL.0;
        self
    }

    /// Hides keys further from the diagonal than `left` and `right`; -1: that side is open.
    pub fn window(mut self, left: i32, right: i32) -> Self {
        self.desc.mask |= sys::flashattn_mask::WINDOW.0;
        self.desc.window_left = left;
        self.desc.window_right = right;
        self
    }

    /// Hides keys of another chunk of `tokens`.
    pub fn chunk(mut self, tokens: usize) -> Self {
        self.desc.mask |= sys::flashattn_mask::CHUNK.0;
        self.desc.chunk = self.int(tokens, "chunk");
        self
    }

    /// Aligns queries and keys at the start of a sequence, not at its end.
    pub fn top_left(mut self) -> Self {
        self.desc.mask |= sys::flashattn_mask::TOP_LEFT.0;
        self
    }

    /// A block mask: see [`Inputs::block_mask`](crate::Inputs::block_mask).
    pub fn blocks(mut self, queries: usize, keys: usize) -> Self {
        self.desc.mask |= sys::flashattn_mask::BLOCKS.0;
        self.desc.block_q = self.int(queries, "block_q");
        self.desc.block_kv = self.int(keys, "block_kv");
        self
    }

    /// With [`DescBuilder::blocks`]: lists say which blocks are on, in place of the mask; see
    /// [`Inputs::block_index`](crate::Inputs::block_index).
    pub fn block_lists(mut self) -> Self {
        self.desc.mask |= sys::flashattn_mask::BLOCK_LISTS.0;
        self
    }

    /// With [`DescBuilder::blocks`]: a block may have fewer keys that count; see
    /// [`Inputs::block_lens`](crate::Inputs::block_lens).
    pub fn block_lens(mut self) -> Self {
        self.desc.mask |= sys::flashattn_mask::BLOCK_LENS.0;
        self
    }

    /// The last tokens of each sequence are a tree of drafts: see
    /// [`Inputs::tree_bits`](crate::Inputs::tree_bits).
    pub fn tree(mut self, tokens: usize) -> Self {
        self.desc.mask |= sys::flashattn_mask::TREE.0;
        self.desc.tree = self.int(tokens, "tree");
        self
    }

    /// Subtracts slope * distance from the scores (Press et al. 2022).
    pub fn alibi(mut self) -> Self {
        self.desc.bias |= sys::flashattn_bias::ALIBI.0;
        self
    }

    /// Adds a bias of this type to the scores; U8: a boolean mask.
    pub fn bias(mut self, dtype: Dtype) -> Self {
        self.desc.bias |= sys::flashattn_bias::DENSE.0;
        self.desc.dtype_bias = dtype.0;
        self
    }

    /// Backward writes the gradient of the bias.
    pub fn dbias(mut self) -> Self {
        self.desc.features |= sys::flashattn_feature::DBIAS.0;
        self
    }

    /// A learned logit per query head that takes part in the softmax and has no value.
    pub fn sink(mut self) -> Self {
        self.desc.features |= sys::flashattn_feature::SINK.0;
        self
    }

    /// Backward writes the gradient of the sink.
    pub fn dsink(mut self) -> Self {
        self.desc.features |= sys::flashattn_feature::DSINK.0;
        self
    }

    /// Which results must repeat bit for bit.
    pub fn determinism(mut self, level: Determinism) -> Self {
        self.desc.determinism = level.0;
        self
    }

    /// Sets any field, by its name in the C header.
    pub fn raw(mut self, set: impl FnOnce(&mut sys::flashattn_desc)) -> Self {
        set(&mut self.desc);
        // The library reads as many bytes as this says.
        self.desc.struct_size = sys::flashattn_desc::default().struct_size;
        self
    }

    /// Whether [`DescBuilder::build`] would succeed.
    ///
    /// # Errors
    ///
    /// What the library refuses: status INVALID_ARGUMENT, UNSUPPORTED or DEVICE, with the reason.
    /// VERSION: a library of another version.
    pub fn check(&self) -> Result<()> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        check_version()?;
        // SAFETY: struct_size is that of the structure; an out-parameter.
        check_with(|error| unsafe { sys::flashattn_check(&self.desc, error) })
    }

    /// Makes the plan: chooses the kernels and does everything that is slow.
    ///
    /// # Errors
    ///
    /// Those of [`DescBuilder::check`]; OUT_OF_MEMORY.
    pub fn build(self) -> Result<Plan> {
        match self.error {
            Some(error) => Err(error),
            None => Plan::new(&self.desc),
        }
    }
    /// [`DescBuilder::build`], once for equal descriptors: the process keeps the 64 plans used last.
    ///
    /// # Errors
    ///
    /// As of build.
    pub fn build_cached(self) -> Result<Arc<Plan>> {
        match self.error {
            Some(error) => Err(error),
            None => plan_cache::plan(&self.desc),
        }
    }
}
