//! What a plan says of itself.

use flashattn_sys as sys;

use crate::error::text;

/// What a plan will do.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanInfo {
    /// "cpu", "sm90".
    pub backend: String,
    /// The kernel's name.
    pub kernel: String,
    /// Instructions it is made of: "avx512_bf16".
    pub isa: String,
    /// Message: why this kernel.
    pub why: String,
    /// Queries of a tile.
    pub tile_q: i32,
    /// Keys of a tile.
    pub tile_kv: i32,
    /// Tiles in flight; 1: none ahead.
    pub stages: i32,
    /// CPU: threads at the most. GPU: threads of a CTA.
    pub threads: i32,
    /// GPU: registers of a thread. CPU: 0.
    pub registers: i32,
    /// GPU: bytes of shared memory of a CTA. CPU: 0.
    pub shared_memory: i32,
    /// CPU: bytes of workspace that a thread keeps to itself. GPU: 0.
    pub scratch: i32,
    /// Splits of the longest sequence's keys.
    pub splits: i32,
    /// Arithmetic of the visible pairs, for the sizes asked about.
    pub flops: i64,
    /// Least bytes to move.
    pub bytes: i64,
    /// Bytes of workspace.
    pub workspace: i64,
}

impl PlanInfo {
    /// # Safety
    ///
    /// The texts are alive.
    pub(crate) unsafe fn new(c: &sys::flashattn_plan_properties) -> Self {
        // SAFETY: the caller's promise.
        let [backend, kernel, isa, why] =
            [c.backend, c.kernel, c.isa, c.why].map(|t| unsafe { text(t) });
        Self {
            backend,
            kernel,
            isa,
            why,
            tile_q: c.tile_q,
            tile_kv: c.tile_kv,
            stages: c.stages,
            threads: c.threads,
            registers: c.registers,
            shared_memory: c.shared_memory,
            scratch: c.scratch,
            splits: c.splits,
            flops: c.flops,
            bytes: c.bytes,
            workspace: c.workspace,
        }
    }
}
