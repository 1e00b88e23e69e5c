//! Scratch memory.

use std::mem::MaybeUninit;

use crate::error::{Error, Result};
use crate::{Reason, Status};

/// Scratch memory of the host for one call at a time. It grows when a call needs more, and is worth
/// keeping from call to call. A CPU plan run from several threads needs one for each.
#[derive(Debug, Default)]
pub struct Workspace {
    bytes: Vec<MaybeUninit<u8>>,
}

impl Workspace {
    /// An empty one. Allocates nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes that are there already.
    pub fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    /// At least `bytes` of memory, uninitialised.
    pub(crate) fn pointer(&mut self, bytes: i64) -> Result<*mut u8> {
        let failed = || {
            Error {
            status: Status::ERROR_OUT_OF_MEMORY,
            reason: Reason::NONE,
            field: "workspace".to_string(),
            message: format!(
                "a workspace of {bytes} bytes could not be allocated; split the batch, or free memory"
            ),
        }
        };
        let size = usize::try_from(bytes).map_err(|_| failed())?;
        if self.bytes.capacity() < size {
            self.bytes = Vec::new(); // free the old one first
            self.bytes.try_reserve_exact(size).map_err(|_| failed())?;
        }
        Ok(self.bytes.as_mut_ptr().cast())
    }
}
