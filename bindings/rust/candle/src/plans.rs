//! The plans that calls share.

use std::sync::{Arc, Mutex, PoisonError};

use flashattn::{DescBuilder, Dtype, Plan, Result};

/// Everything that plans of this crate differ in, lengths apart: those come with each call.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Key {
    pub dtype: Dtype,
    pub heads: usize,
    pub heads_kv: usize,
    pub dim: usize,
    pub dim_v: usize,
    pub scale: f32,
    pub causal: bool,
    /// Whether forward writes lse, and backward follows.
    pub backward: bool,
}

impl Key {
    fn build(self) -> Result<Arc<Plan>> {
        let mut builder = DescBuilder::new(self.dtype, self.heads, self.dim)
            .heads_kv(self.heads_kv)
            .dim_v(self.dim_v)
            .scale(self.scale);
        if self.causal {
            builder = builder.causal();
        }
        if self.backward {
            builder = builder.backward();
        }
        builder.build().map(Arc::new)
    }
}

/// A model has a few; a scale that is learned makes one for each of its values.
const LIMIT: usize = 64;

/// The one used last stands last.
static PLANS: Mutex<Vec<(Key, Arc<Plan>)>> = Mutex::new(Vec::new());

/// The plan for a key, made at its first use. Where there are too many, the one that was unused for
/// the longest goes. Refusals are not kept.
pub(crate) fn plan(key: Key) -> Result<Arc<Plan>> {
    let mut plans = PLANS.lock().unwrap_or_else(PoisonError::into_inner);
    let plan = match plans.iter().position(|(known, _)| *known == key) {
        Some(at) => plans.remove(at).1,
        None => key.build()?,
    };
    if plans.len() == LIMIT {
        plans.remove(0);
    }
    plans.push((key, plan.clone()));
    Ok(plan)
}
