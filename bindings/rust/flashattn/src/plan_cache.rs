//! The plans that calls share.

use std::mem::size_of;
use std::sync::{Arc, Mutex, PoisonError};

use flashattn_sys::flashattn_desc;

use crate::error::Result;
use crate::Plan;

type Bytes = [u8; size_of::<flashattn_desc>()];

/// A model has a few; a scale that is learned makes one for each of its values.
const LIMIT: usize = 64;

/// The one used last stands last.
static PLANS: Mutex<Vec<(Bytes, Arc<Plan>)>> = Mutex::new(Vec::new());

fn bytes(desc: &flashattn_desc) -> Bytes {
    // SAFETY: a structure of scalars without padding, as a test of flashattn-sys relies on, too.
    unsafe { *std::ptr::from_ref(desc).cast::<Bytes>() }
}

/// The plan for a descriptor, made at its first use. Where there are too many, the one that was unused
/// for the longest goes. Refusals are not kept.
pub(crate) fn plan(desc: &flashattn_desc) -> Result<Arc<Plan>> {
    let key = bytes(desc);
    let mut plans = PLANS.lock().unwrap_or_else(PoisonError::into_inner);
    let plan = match plans.iter().position(|(known, _)| *known == key) {
        Some(at) => plans.remove(at).1,
        None => Arc::new(Plan::new(desc)?),
    };
    if plans.len() == LIMIT {
        plans.remove(0);
    }
    plans.push((key, plan.clone()));
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::LIMIT;
    use crate::{DescBuilder, Dtype, Reason};
    use std::sync::Arc;

    #[test]
    fn plans_are_made_once_and_the_oldest_go() {
        let builder = || DescBuilder::new(Dtype::F32, 2, 8).softcap(7.5);
        let first = builder().build_cached().unwrap();
        assert!(Arc::ptr_eq(&first, &builder().build_cached().unwrap()));
        let causal = builder().causal().build_cached().unwrap();
        assert!(!Arc::ptr_eq(&first, &causal));
        // A plan in use is kept, whatever is made beside it; the causal one was used before all these.
        for n in 1..=LIMIT {
            builder().scale(n as f32).build_cached().unwrap();
            assert!(Arc::ptr_eq(&first, &builder().build_cached().unwrap()));
        }
        assert!(!Arc::ptr_eq(&causal, &builder().causal().build_cached().unwrap()));
        for _ in 0..2 {
            let error = builder().heads_kv(3).build_cached().unwrap_err();
            assert_eq!(error.reason, Reason::HEAD_RATIO);
        }
    }
}
