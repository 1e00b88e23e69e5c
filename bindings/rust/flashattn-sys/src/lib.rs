// Written by bindings/generate.py from include/flashattn.h. Do not edit.
//! Raw declarations of libflashattn, exact attention behind a C ABI, as they stand in its header.
//!
//! Names are those of the header; its text is the documentation. The crate `flashattn` is the safe
//! layer above. Enumerations are transparent newtypes, so that a number from a newer library is no
//! undefined behaviour; fields and parameters that hold one are plain integers, as in C.
//!
//! ```no_run
//! let mut desc = flashattn_sys::flashattn_desc::default(); // all zero but struct_size
//! desc.dtype = flashattn_sys::flashattn_dtype::F32.0;
//! desc.heads_q = 8;
//! desc.dim_qk = 64;
//! let status = flashattn_sys::flashattn_status(unsafe { flashattn_sys::flashattn_check(&desc) });
//! assert_eq!(status, flashattn_sys::flashattn_status::OK);
//! ```
//!
//! # Conventions
//!
//! ```text
//!   Zero      A zeroed structure with struct_size set asks for nothing unusual. Fields that must be
//!             set are marked "required". Reserved fields must be zero; unknown bits are refused.
//!   Growth    Structures only grow at their end. A smaller struct_size means that the rest is zero;
//!             a larger one is accepted when the part this library does not know is all zero.
//!   Status    Functions that can fail return an enum flashattn_status. A call that failed changed
//!             nothing: arguments are checked before anything is computed, launched or written. The
//!             sentence of flashattn_last_error names field, value, limit, device and remedy.
//!             Besides what is listed at each function, all can return FLASHATTN_ERROR_INTERNAL.
//!             Nothing prints, aborts, throws or exits.
//!   Text      const char pointers are UTF-8, end in a zero byte and belong to the library. They are
//!             never NULL unless that is said, and live as long as the process unless that is said.
//!   Memory    The library keeps no pointer past a call, except that work enqueued on a GPU reads
//!             and writes what it was given. Host memory is allocated in check and plan_create
//!             only, device memory never. "Device memory" below means memory that the plan's
//!             device can address: host memory for the CPU.
//!   Threads   Every function may be called from any thread at any time. A plan is immutable: any
//!             number of threads and streams may run it at once, each with a workspace of its own.
//!             Only flashattn_plan_destroy must not overlap a use of the same plan.
//!   Order     Index letters: b sequence, h head, i query, j key, c element of a head. Arrays are
//!             written with the last index fastest. Offsets and strides count elements.
//!   Empty     A query with no visible key yields o = 0 and lse = -inf (with a sink: lse = sink).
//!             Rows past a sequence's length are never read into a result and never written.
//! ```
#![no_std]
#![allow(non_camel_case_types)]

use core::ffi::{c_char, c_void};
use core::fmt;
use core::marker::{PhantomData, PhantomPinned};

#[cfg(not(target_pointer_width = "64"))]
compile_error!("libflashattn supports 64-bit platforms only");

/// The version of the header that these declarations were written from: 10000 * major + 100 *
/// minor + patch.
pub const HEADER_VERSION: i32 = 100;

/// What a call says of itself. Stored and returned as int32_t.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct flashattn_status(pub i32);

impl flashattn_status {
    /// `FLASHATTN_OK`
    pub const OK: Self = Self(0);
    /// A field, pointer or size that no library of this version could honour on any device.
    pub const ERROR_INVALID_ARGUMENT: Self = Self(1);
    /// A meaningful request that no kernel family of this build honours on this device.
    pub const ERROR_UNSUPPORTED: Self = Self(2);
    /// The workspace is smaller than flashattn_workspace_size says.
    pub const ERROR_WORKSPACE: Self = Self(3);
    /// Host memory ran out.
    pub const ERROR_OUT_OF_MEMORY: Self = Self(4);
    /// The device or its driver reported an error, or the wrong device is current.
    pub const ERROR_DEVICE: Self = Self(5);
    /// struct_size is zero, or larger than known with a part that is not zero: a newer header.
    pub const ERROR_VERSION: Self = Self(6);
    /// A fault of the library itself. Please report it with the sentence.
    pub const ERROR_INTERNAL: Self = Self(7);

    /// The names of all values known here, each with its number.
    #[rustfmt::skip]
    pub const NAMES: &'static [(&'static str, i32)] = &[
        ("OK", 0),
        ("ERROR_INVALID_ARGUMENT", 1),
        ("ERROR_UNSUPPORTED", 2),
        ("ERROR_WORKSPACE", 3),
        ("ERROR_OUT_OF_MEMORY", 4),
        ("ERROR_DEVICE", 5),
        ("ERROR_VERSION", 6),
        ("ERROR_INTERNAL", 7),
    ];
}

impl fmt::Debug for flashattn_status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_name(f, self.0, Self::NAMES)
    }
}

/// Why a request was refused: the second half of flashattn_last_error. Stored as int32_t.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct flashattn_reason(pub i32);

impl flashattn_reason {
    /// `FLASHATTN_REASON_NONE`
    pub const NONE: Self = Self(0);
    /// The library was built without CUDA.
    pub const NO_CUDA_BUILD: Self = Self(1);
    /// No such device on this machine.
    pub const NO_DEVICE: Self = Self(2);
    /// `FLASHATTN_REASON_DRIVER_TOO_OLD`
    pub const DRIVER_TOO_OLD: Self = Self(3);
    /// The GPU is older than the kernels need.
    pub const ARCH: Self = Self(4);
    /// `FLASHATTN_REASON_DTYPE`
    pub const DTYPE: Self = Self(5);
    /// dtype and dtype_o, or dtype and bias_dtype, do not go together.
    pub const DTYPE_MIX: Self = Self(6);
    /// `FLASHATTN_REASON_HEAD_DIM_MULTIPLE`
    pub const HEAD_DIM_MULTIPLE: Self = Self(7);
    /// `FLASHATTN_REASON_HEAD_DIM_MAX`
    pub const HEAD_DIM_MAX: Self = Self(8);
    /// `FLASHATTN_REASON_HEAD_DIM_PAIR`
    pub const HEAD_DIM_PAIR: Self = Self(9);
    /// heads_q is no multiple of heads_kv.
    pub const HEAD_RATIO: Self = Self(10);
    /// `FLASHATTN_REASON_LAYOUT`
    pub const LAYOUT: Self = Self(11);
    /// `FLASHATTN_REASON_PAGE_SIZE`
    pub const PAGE_SIZE: Self = Self(12);
    /// `FLASHATTN_REASON_MASK_COMBINATION`
    pub const MASK_COMBINATION: Self = Self(13);
    /// `FLASHATTN_REASON_BIAS`
    pub const BIAS: Self = Self(14);
    /// `FLASHATTN_REASON_DROPOUT`
    pub const DROPOUT: Self = Self(15);
    /// `FLASHATTN_REASON_SINK`
    pub const SINK: Self = Self(16);
    /// `FLASHATTN_REASON_SOFTCAP`
    pub const SOFTCAP: Self = Self(17);
    /// `FLASHATTN_REASON_DETERMINISM`
    pub const DETERMINISM: Self = Self(18);
    /// `FLASHATTN_REASON_WORKSPACE_LIMIT`
    pub const WORKSPACE_LIMIT: Self = Self(19);
    /// `FLASHATTN_REASON_SHARED_MEMORY`
    pub const SHARED_MEMORY: Self = Self(20);
    /// `FLASHATTN_REASON_CPU_ISA`
    pub const CPU_ISA: Self = Self(21);
    /// The kernel family was switched off when the library was built.
    pub const NOT_IN_THIS_BUILD: Self = Self(22);
    /// The plan was not made for this operation: see flashattn_desc.ops.
    pub const OP: Self = Self(23);
    /// A required pointer is NULL, or one that the plan does not use is not.
    pub const NULL_POINTER: Self = Self(24);
    /// `FLASHATTN_REASON_MISALIGNED`
    pub const MISALIGNED: Self = Self(25);
    /// `FLASHATTN_REASON_OVERLAP`
    pub const OVERLAP: Self = Self(26);
    /// A size is zero, negative, past a promised maximum, or overflows.
    pub const SIZE: Self = Self(27);
    /// `FLASHATTN_REASON_STRIDE`
    pub const STRIDE: Self = Self(28);
    /// An enumerator or bit this library does not know, or a value outside its range.
    pub const VALUE: Self = Self(29);
    /// `FLASHATTN_REASON_RESERVED`
    pub const RESERVED: Self = Self(30);
    /// `FLASHATTN_REASON_STRUCT_SIZE`
    pub const STRUCT_SIZE: Self = Self(31);
    /// cu_seqlens, lens or a page table hold an impossible value (CPU only: read there).
    pub const LENGTHS: Self = Self(32);
    /// `FLASHATTN_REASON_STREAM`
    pub const STREAM: Self = Self(33);

    /// The names of all values known here, each with its number.
    #[rustfmt::skip]
    pub const NAMES: &'static [(&'static str, i32)] = &[
        ("NONE", 0),
        ("NO_CUDA_BUILD", 1),
        ("NO_DEVICE", 2),
        ("DRIVER_TOO_OLD", 3),
        ("ARCH", 4),
        ("DTYPE", 5),
        ("DTYPE_MIX", 6),
        ("HEAD_DIM_MULTIPLE", 7),
        ("HEAD_DIM_MAX", 8),
        ("HEAD_DIM_PAIR", 9),
        ("HEAD_RATIO", 10),
        ("LAYOUT", 11),
        ("PAGE_SIZE", 12),
        ("MASK_COMBINATION", 13),
        ("BIAS", 14),
        ("DROPOUT", 15),
        ("SINK", 16),
        ("SOFTCAP", 17),
        ("DETERMINISM", 18),
        ("WORKSPACE_LIMIT", 19),
        ("SHARED_MEMORY", 20),
        ("CPU_ISA", 21),
        ("NOT_IN_THIS_BUILD", 22),
        ("OP", 23),
        ("NULL_POINTER", 24),
        ("MISALIGNED", 25),
        ("OVERLAP", 26),
        ("SIZE", 27),
        ("STRIDE", 28),
        ("VALUE", 29),
        ("RESERVED", 30),
        ("STRUCT_SIZE", 31),
        ("LENGTHS", 32),
        ("STREAM", 33),
    ];
}

impl fmt::Debug for flashattn_reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_name(f, self.0, Self::NAMES)
    }
}

/// `enum flashattn_device` of the header.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct flashattn_device(pub i32);

impl flashattn_device {
    /// `FLASHATTN_DEVICE_CPU`
    pub const CPU: Self = Self(0);
    /// `FLASHATTN_DEVICE_CUDA`
    pub const CUDA: Self = Self(1);

    /// The names of all values known here, each with its number.
    #[rustfmt::skip]
    pub const NAMES: &'static [(&'static str, i32)] = &[
        ("CPU", 0),
        ("CUDA", 1),
    ];
}

impl fmt::Debug for flashattn_device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_name(f, self.0, Self::NAMES)
    }
}

/// Operations, as bits.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct flashattn_op(pub u32);

impl flashattn_op {
    /// `FLASHATTN_OP_FORWARD`
    pub const FORWARD: Self = Self(1);
    /// `FLASHATTN_OP_BACKWARD`
    pub const BACKWARD: Self = Self(2);

    /// The names of all values known here, each with its number.
    #[rustfmt::skip]
    pub const NAMES: &'static [(&'static str, u32)] = &[
        ("FORWARD", 1),
        ("BACKWARD", 2),
    ];

    /// Whether all bits of `other` are set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl fmt::Debug for flashattn_op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_flags(f, self.0, Self::NAMES)
    }
}

impl core::ops::BitOr for flashattn_op {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl core::ops::BitAnd for flashattn_op {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl core::ops::BitOrAssign for flashattn_op {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

/// `enum flashattn_dtype` of the header.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct flashattn_dtype(pub i32);

impl flashattn_dtype {
    /// Not set: the field's default.
    pub const DEFAULT: Self = Self(0);
    /// `FLASHATTN_DTYPE_F32`
    pub const F32: Self = Self(1);
    /// `FLASHATTN_DTYPE_F16`
    pub const F16: Self = Self(2);
    /// `FLASHATTN_DTYPE_BF16`
    pub const BF16: Self = Self(3);
    /// 8-bit float, 4 exponent bits, no infinity (OCP E4M3).
    pub const F8E4M3: Self = Self(4);
    /// A byte: a boolean mask, 0 = hidden, anything else = visible.
    pub const U8: Self = Self(5);

    /// The names of all values known here, each with its number.
    #[rustfmt::skip]
    pub const NAMES: &'static [(&'static str, i32)] = &[
        ("DEFAULT", 0),
        ("F32", 1),
        ("F16", 2),
        ("BF16", 3),
        ("F8E4M3", 4),
        ("U8", 5),
    ];
}

impl fmt::Debug for flashattn_dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_name(f, self.0, Self::NAMES)
    }
}

/// How sequences lie in memory, as bits. None: dense (batch, seq, head, dim).
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct flashattn_layout(pub u32);

impl flashattn_layout {
    /// Q, O and their gradients are (total_q, head, dim); cu_seqlens_q says where sequences start.
    pub const VARLEN_Q: Self = Self(1);
    /// K, V and their gradients are (total_kv, head, dim); cu_seqlens_kv says where they start.
    pub const VARLEN_KV: Self = Self(2);
    /// K and V are pools of pages (page, page_size, head, dim); page_table says which. Forward only,
    /// not together with VARLEN_KV.
    pub const PAGED_KV: Self = Self(4);

    /// The names of all values known here, each with its number.
    #[rustfmt::skip]
    pub const NAMES: &'static [(&'static str, u32)] = &[
        ("VARLEN_Q", 1),
        ("VARLEN_KV", 2),
        ("PAGED_KV", 4),
    ];

    /// Whether all bits of `other` are set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl fmt::Debug for flashattn_layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_flags(f, self.0, Self::NAMES)
    }
}

impl core::ops::BitOr for flashattn_layout {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl core::ops::BitAnd for flashattn_layout {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl core::ops::BitOrAssign for flashattn_layout {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

/// Which keys a query sees, as bits: all must agree. With Sq, Sk the lengths of the sequence and
/// off = Sk - Sq (TOP_LEFT: 0), query i sees key j when 0 <= j < Sk and
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct flashattn_mask(pub u32);

impl flashattn_mask {
    /// j <= i + off
    pub const CAUSAL: Self = Self(1);
    /// i + off - window_left <= j <= i + off + window_right; a side of -1 is open
    pub const WINDOW: Self = Self(2);
    /// floor((i + off) / chunk) == floor(j / chunk)
    pub const CHUNK: Self = Self(4);
    /// Aligns i and j at the start of the sequence instead of at its end, for the masks above and
    /// for ALiBi.
    pub const TOP_LEFT: Self = Self(8);
    /// block_mask\[b, h, i / block_q, j / block_kv\] != 0
    pub const BLOCKS: Self = Self(16);

    /// The names of all values known here, each with its number.
    #[rustfmt::skip]
    pub const NAMES: &'static [(&'static str, u32)] = &[
        ("CAUSAL", 1),
        ("WINDOW", 2),
        ("CHUNK", 4),
        ("TOP_LEFT", 8),
        ("BLOCKS", 16),
    ];

    /// Whether all bits of `other` are set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl fmt::Debug for flashattn_mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_flags(f, self.0, Self::NAMES)
    }
}

impl core::ops::BitOr for flashattn_mask {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl core::ops::BitAnd for flashattn_mask {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl core::ops::BitOrAssign for flashattn_mask {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

/// What is added to the scores, as bits.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct flashattn_bias(pub u32);

impl flashattn_bias {
    /// \- alibi_slopes\[h\] * |i + off - j|  (Press et al. 2022)
    pub const ALIBI: Self = Self(1);
    /// \+ bias\[b, h, i, j\]; with bias_dtype U8 a boolean mask.
    pub const DENSE: Self = Self(2);

    /// The names of all values known here, each with its number.
    #[rustfmt::skip]
    pub const NAMES: &'static [(&'static str, u32)] = &[
        ("ALIBI", 1),
        ("DENSE", 2),
    ];

    /// Whether all bits of `other` are set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl fmt::Debug for flashattn_bias {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_flags(f, self.0, Self::NAMES)
    }
}

impl core::ops::BitOr for flashattn_bias {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl core::ops::BitAnd for flashattn_bias {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl core::ops::BitOrAssign for flashattn_bias {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

/// Further inputs and outputs, as bits.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct flashattn_feature(pub u32);

impl flashattn_feature {
    /// Forward writes lse.
    pub const LSE: Self = Self(1);
    /// A learned logit per query head that takes part in the softmax and has no value vector.
    pub const SINK: Self = Self(2);
    /// Backward adds the gradient that arrives at lse.
    pub const DLSE: Self = Self(4);
    /// Backward writes the gradient of the dense bias.
    pub const DBIAS: Self = Self(8);
    /// Backward writes the gradient of the sink.
    pub const DSINK: Self = Self(16);

    /// The names of all values known here, each with its number.
    #[rustfmt::skip]
    pub const NAMES: &'static [(&'static str, u32)] = &[
        ("LSE", 1),
        ("SINK", 2),
        ("DLSE", 4),
        ("DBIAS", 8),
        ("DSINK", 16),
    ];

    /// Whether all bits of `other` are set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl fmt::Debug for flashattn_feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_flags(f, self.0, Self::NAMES)
    }
}

impl core::ops::BitOr for flashattn_feature {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl core::ops::BitAnd for flashattn_feature {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl core::ops::BitOrAssign for flashattn_feature {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

/// Which results must repeat bit for bit. Each level includes the one before.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct flashattn_determinism(pub i32);

impl flashattn_determinism {
    /// Whatever is fastest. On the CPU: always BATCH_INVARIANT.
    pub const DEFAULT: Self = Self(0);
    /// The same call on the same device gives the same bits.
    pub const RUN_TO_RUN: Self = Self(1);
    /// A sequence's bits do not depend on what else is in the batch.
    pub const BATCH_INVARIANT: Self = Self(2);

    /// The names of all values known here, each with its number.
    #[rustfmt::skip]
    pub const NAMES: &'static [(&'static str, i32)] = &[
        ("DEFAULT", 0),
        ("RUN_TO_RUN", 1),
        ("BATCH_INVARIANT", 2),
    ];
}

impl fmt::Debug for flashattn_determinism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_name(f, self.0, Self::NAMES)
    }
}

/// `enum flashattn_log_level` of the header.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct flashattn_log_level(pub i32);

impl flashattn_log_level {
    /// `FLASHATTN_LOG_OFF`
    pub const OFF: Self = Self(0);
    /// The sentence of every call that fails.
    pub const ERROR: Self = Self(1);
    /// Also: the kernel that each plan chose, and why.
    pub const INFO: Self = Self(2);
    /// Also: every kernel family that refused, with its reason.
    pub const DEBUG: Self = Self(3);

    /// The names of all values known here, each with its number.
    #[rustfmt::skip]
    pub const NAMES: &'static [(&'static str, i32)] = &[
        ("OFF", 0),
        ("ERROR", 1),
        ("INFO", 2),
        ("DEBUG", 3),
    ];
}

impl fmt::Debug for flashattn_log_level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_name(f, self.0, Self::NAMES)
    }
}

/// What is computed. Describes a whole family of calls: lengths come later, with each call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct flashattn_desc {
    /// Required: sizeof(flashattn_desc).
    pub struct_size: u32,
    /// enum flashattn_device. 0: the CPU.
    pub device: i32,
    /// Which of its kind, from 0. CUDA: the runtime's ordinal.
    pub device_index: i32,
    /// enum flashattn_op bits. 0: forward only.
    pub ops: u32,
    /// Required: enum flashattn_dtype of q, k, v and their gradients.
    pub dtype: i32,
    /// Of o and dout. 0: as dtype. F32 is possible beside 16-bit inputs.
    pub dtype_o: i32,
    /// Required: query heads, >= 1.
    pub heads_q: i32,
    /// Key and value heads; heads_q must be a multiple. 0: as heads_q. Query head h reads KV head
    /// h / (heads_q / heads_kv).
    pub heads_kv: i32,
    /// Required: elements of a query and a key, >= 1.
    pub dim_qk: i32,
    /// Elements of a value. 0: as dim_qk.
    pub dim_v: i32,
    /// enum flashattn_layout bits.
    pub layout: u32,
    /// Tokens a page, >= 1. Only with PAGED_KV, 0 otherwise.
    pub page_size: i32,
    /// enum flashattn_mask bits.
    pub mask: u32,
    /// Keys visible to the left and right of the diagonal; -1: open. Only with WINDOW.
    pub window_left: i32,
    /// `window_right`
    pub window_right: i32,
    /// Tokens a chunk, >= 1. Only with CHUNK.
    pub chunk: i32,
    /// Queries and keys a block of the block mask, >= 1. Only with BLOCKS.
    pub block_q: i32,
    /// `block_kv`
    pub block_kv: i32,
    /// enum flashattn_bias bits.
    pub bias: u32,
    /// Of the dense bias: F32, F16, BF16 or U8. 0: as dtype. Only with DENSE.
    pub bias_dtype: i32,
    /// enum flashattn_feature bits.
    pub features: u32,
    /// enum flashattn_determinism.
    pub determinism: i32,
    /// Factor of the scores. 0: 1 / sqrt(dim_qk). Finite.
    pub scale: f32,
    /// Scores become softcap * tanh(score / softcap). 0: off. Finite, > 0.
    pub softcap: f32,
    /// Probability with which a weight is dropped, \[0, 1), in steps of 1/65536. 0: off.
    pub dropout: f32,
    /// Parts into which the keys of a sequence are split, at most 4096. 0: the library chooses, short
    /// queries only. 1: never.
    pub splits: i32,
    /// Promises: no call will pass them. 0: not promised. They let flashattn_workspace_size answer
    /// for all calls at once, and help to choose a kernel.
    pub max_batch: i32,
    /// `max_seqlen_q`
    pub max_seqlen_q: i32,
    /// `max_seqlen_kv`
    pub max_seqlen_kv: i32,
    /// GPU: streaming multiprocessors to use at the most. 0: all.
    pub sm_limit: i32,
    /// CPU: threads to use at the most. 0: all that OpenMP offers. 1: the caller's only.
    pub threads: i32,
    /// `reserved0`
    pub reserved0: i32,
    /// Promises, as above, for VARLEN layouts: tokens of all sequences together.
    pub max_total_q: i64,
    /// `max_total_kv`
    pub max_total_kv: i64,
    /// Refuse the plan when the promised maxima need more bytes of workspace. 0: no limit.
    pub workspace_limit: i64,
    /// `reserved`
    pub reserved: [i64; 4],
}

impl Default for flashattn_desc {
    /// All zero, with `struct_size` set.
    fn default() -> Self {
        // SAFETY: integers, floats and pointers, for which zero bytes are a value.
        let mut zeroed: Self = unsafe { core::mem::zeroed() };
        zeroed.struct_size = core::mem::size_of::<Self>() as u32;
        zeroed
    }
}

/// The sizes of one call, known on the host. Where lengths lie on the device, upper bounds. No array
/// may have more than 2^48 elements.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct flashattn_shape {
    /// Sequences. 0: nothing to do.
    pub batch: i32,
    /// Queries of the longest sequence; dense: of every sequence, unless lens_q says less.
    pub seqlen_q: i32,
    /// Keys, likewise.
    pub seqlen_kv: i32,
    /// `reserved`
    pub reserved: i32,
    /// VARLEN_Q: the rows of q, all sequences together. 0 otherwise.
    pub total_q: i64,
    /// VARLEN_KV: the rows of k and v. 0 otherwise.
    pub total_kv: i64,
}

impl Default for flashattn_shape {
    /// All zero.
    fn default() -> Self {
        // SAFETY: integers, floats and pointers, for which zero bytes are a value.
        let zeroed: Self = unsafe { core::mem::zeroed() };
        zeroed
    }
}

/// Where an array with indices (b, i, h, c) lies. The elements of a head are contiguous.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct flashattn_tensor {
    /// Device memory, aligned to its element. May be NULL when the array has no element.
    pub data: *mut c_void,
    /// Elements from one sequence, head, token to the next. All three zero: packed, (batch, seq, head,
    /// dim) without gaps. Else they are taken as they stand: a zero repeats (inputs only), negative
    /// ones are refused. VARLEN: stride_batch must be 0. PAGED_KV: stride_batch goes from page to
    /// page, stride_seq from token to token inside a page.
    pub stride_batch: i64,
    /// `stride_head`
    pub stride_head: i64,
    /// `stride_seq`
    pub stride_seq: i64,
}

impl Default for flashattn_tensor {
    /// All zero.
    fn default() -> Self {
        // SAFETY: integers, floats and pointers, for which zero bytes are a value.
        let zeroed: Self = unsafe { core::mem::zeroed() };
        zeroed
    }
}

/// The inputs that forward and backward share. Pointers are to device memory and must be NULL where
/// the plan has no use for them, unless "optional" is said.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct flashattn_inputs {
    /// (batch, seqlen_q, heads_q, dim_qk), or VARLEN_Q.
    pub q: flashattn_tensor,
    /// (batch, seqlen_kv, heads_kv, dim_qk), or VARLEN_KV, or PAGED_KV.
    pub k: flashattn_tensor,
    /// (batch, seqlen_kv, heads_kv, dim_v), likewise.
    pub v: flashattn_tensor,
    /// (batch + 1): sequence b holds rows \[cu\[b\], cu\[b + 1\]). Required with VARLEN_Q / VARLEN_KV.
    pub cu_seqlens_q: *const i32,
    /// `cu_seqlens_kv`
    pub cu_seqlens_kv: *const i32,
    /// (batch), optional with any layout: tokens in use of each sequence, at most its capacity.
    pub lens_q: *const i32,
    /// `lens_kv`
    pub lens_kv: *const i32,
    /// (batch, pages of a sequence): page numbers. Required with PAGED_KV.
    pub page_table: *const i32,
    /// Elements from row to row of page_table. 0: ceil(seqlen_kv / page_size).
    pub page_table_stride: i64,
    /// Pages in the pool. Required with PAGED_KV.
    pub pages: i64,
    /// bias_dtype (batch, heads_q, seqlen_q, seqlen_kv), keys contiguous. Required with DENSE.
    pub bias: *const c_void,
    /// Elements from one to the next. 0: the same for all.
    pub bias_stride_batch: i64,
    /// `bias_stride_head`
    pub bias_stride_head: i64,
    /// `bias_stride_row`
    pub bias_stride_row: i64,
    /// (heads_q), or (batch, heads_q) with a stride. Required with ALIBI.
    pub alibi_slopes: *const f32,
    /// Elements from sequence to sequence. 0: the same for all.
    pub alibi_stride_batch: i64,
    /// (heads_q), natural logits. Required with SINK.
    pub sink: *const f32,
    /// (batch, heads_q, ceil(seqlen_q / block_q), ceil(seqlen_kv / block_kv)) bytes, keys contiguous.
    /// Required with BLOCKS.
    pub block_mask: *const u8,
    /// Bytes from one to the next. 0: the same for all; rows: 0 = packed.
    pub block_mask_stride_batch: i64,
    /// `block_mask_stride_head`
    pub block_mask_stride_head: i64,
    /// `block_mask_stride_row`
    pub block_mask_stride_row: i64,
    /// One float each, factors of q, k, v. F8E4M3 only, optional: 1.
    pub descale_q: *const f32,
    /// `descale_k`
    pub descale_k: *const f32,
    /// `descale_v`
    pub descale_v: *const f32,
    /// Random numbers of the dropout: see flashattn_dropout_mask.
    pub rng_seed: u64,
    /// `rng_offset`
    pub rng_offset: u64,
    /// Optional: {seed, offset} in device memory, to which the two above are added. For CUDA graphs,
    /// which can thus be replayed with new numbers.
    pub rng_device: *const u64,
    /// `reserved`
    pub reserved: [i64; 4],
}

impl Default for flashattn_inputs {
    /// All zero.
    fn default() -> Self {
        // SAFETY: integers, floats and pointers, for which zero bytes are a value.
        let zeroed: Self = unsafe { core::mem::zeroed() };
        zeroed
    }
}

/// `flashattn_forward_args` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct flashattn_forward_args {
    /// Required: sizeof(flashattn_forward_args).
    pub struct_size: u32,
    /// `reserved0`
    pub reserved0: u32,
    /// `shape`
    pub shape: flashattn_shape,
    /// `inputs`
    pub inputs: flashattn_inputs,
    /// Out: dtype_o (batch, seqlen_q, heads_q, dim_v), or VARLEN_Q.
    pub o: flashattn_tensor,
    /// Out: (batch, heads_q, seqlen_q), or VARLEN_Q: (heads_q, total_q). Natural logarithm.
    /// Required with LSE.
    pub lse: *mut f32,
    /// `reserved`
    pub reserved: [i64; 4],
}

impl Default for flashattn_forward_args {
    /// All zero, with `struct_size` set.
    fn default() -> Self {
        // SAFETY: integers, floats and pointers, for which zero bytes are a value.
        let mut zeroed: Self = unsafe { core::mem::zeroed() };
        zeroed.struct_size = core::mem::size_of::<Self>() as u32;
        zeroed
    }
}

/// `flashattn_backward_args` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct flashattn_backward_args {
    /// Required: sizeof(flashattn_backward_args).
    pub struct_size: u32,
    /// `reserved0`
    pub reserved0: u32,
    /// `shape`
    pub shape: flashattn_shape,
    /// The same as in the forward call.
    pub inputs: flashattn_inputs,
    /// What forward wrote.
    pub o: flashattn_tensor,
    /// The gradient that arrives at o: dtype_o, the shape of o.
    pub dout: flashattn_tensor,
    /// What forward wrote. Required.
    pub lse: *const f32,
    /// The gradient that arrives at lse, laid out like it. Required with DLSE.
    pub dlse: *const f32,
    /// Out: dtype, the shapes of q, k, v. Written, not added to.
    pub dq: flashattn_tensor,
    /// `dk`
    pub dk: flashattn_tensor,
    /// `dv`
    pub dv: flashattn_tensor,
    /// Out: the gradient of the dense bias. Required with DBIAS.
    pub dbias: *mut f32,
    /// Elements from one to the next. 0: summed over that index.
    pub dbias_stride_batch: i64,
    /// `dbias_stride_head`
    pub dbias_stride_head: i64,
    /// `dbias_stride_row`
    pub dbias_stride_row: i64,
    /// Out: (heads_q), the gradient of the sink. Required with DSINK.
    pub dsink: *mut f32,
    /// `reserved`
    pub reserved: [i64; 4],
}

impl Default for flashattn_backward_args {
    /// All zero, with `struct_size` set.
    fn default() -> Self {
        // SAFETY: integers, floats and pointers, for which zero bytes are a value.
        let mut zeroed: Self = unsafe { core::mem::zeroed() };
        zeroed.struct_size = core::mem::size_of::<Self>() as u32;
        zeroed
    }
}

/// `flashattn_merge_args` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct flashattn_merge_args {
    /// Required: sizeof(flashattn_merge_args).
    pub struct_size: u32,
    /// Required: how many partial results, >= 1.
    pub parts: i32,
    /// batch and seqlen_q, or with VARLEN_Q total_q, are read.
    pub shape: flashattn_shape,
    /// Host array (parts) of arrays shaped like o.
    pub part_o: *const flashattn_tensor,
    /// Host array (parts) of pointers to device memory, each laid out like lse.
    pub part_lse: *const *const f32,
    /// Of the partial o: dtype_o of the plan or F32. 0: dtype_o.
    pub part_dtype: i32,
    /// `reserved0`
    pub reserved0: i32,
    /// Out: dtype_o of the plan.
    pub o: flashattn_tensor,
    /// Out, optional.
    pub lse: *mut f32,
    /// `reserved`
    pub reserved: [i64; 4],
}

impl Default for flashattn_merge_args {
    /// All zero, with `struct_size` set.
    fn default() -> Self {
        // SAFETY: integers, floats and pointers, for which zero bytes are a value.
        let mut zeroed: Self = unsafe { core::mem::zeroed() };
        zeroed.struct_size = core::mem::size_of::<Self>() as u32;
        zeroed
    }
}

/// A device, as flashattn_device_info describes it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct flashattn_device_properties {
    /// Required: sizeof(flashattn_device_properties).
    pub struct_size: u32,
    /// CPU: threads that a plan with threads = 0 uses. GPU: streaming multiprocessors.
    pub units: i32,
    /// "AMD EPYC 9354", "NVIDIA H200".
    pub name: *const c_char,
    /// The best kernels this build has for it: "avx512_bf16", "sm90".
    pub isa: *const c_char,
    /// GPU: compute capability, 90 for 9.0. CPU: 0.
    pub compute_capability: i32,
    /// Bytes of fast memory next to a unit: shared memory a block may use; L2 cache of a core.
    pub local_memory: i32,
    /// Bytes of memory.
    pub memory: i64,
}

impl Default for flashattn_device_properties {
    /// All zero, with `struct_size` set.
    fn default() -> Self {
        // SAFETY: integers, floats and pointers, for which zero bytes are a value.
        let mut zeroed: Self = unsafe { core::mem::zeroed() };
        zeroed.struct_size = core::mem::size_of::<Self>() as u32;
        zeroed
    }
}

/// What a plan will do, as flashattn_plan_info describes it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct flashattn_plan_properties {
    /// Required: sizeof(flashattn_plan_properties).
    pub struct_size: u32,
    /// Queries and keys of a tile.
    pub tile_q: i32,
    /// `tile_kv`
    pub tile_kv: i32,
    /// Tiles in flight; 1: none ahead.
    pub stages: i32,
    /// CPU: threads at the most. GPU: threads a block.
    pub threads: i32,
    /// GPU: registers a thread. CPU: 0.
    pub registers: i32,
    /// Bytes of fast memory: shared memory a block; scratch of a CPU thread.
    pub local_memory: i32,
    /// Parts into which the longest sequence's keys are split for this shape.
    pub splits: i32,
    /// "cpu", "sm90".
    pub family: *const c_char,
    /// The kernel's name. Lives as long as the plan, as do the next two.
    pub kernel: *const c_char,
    /// Instructions it is made of: "avx512_bf16".
    pub isa: *const c_char,
    /// One sentence: why this kernel.
    pub why: *const c_char,
    /// For the shape asked about: arithmetic of the visible pairs, 2 for a multiply-add: 2 (dim_qk +
    /// dim_v) a pair forward, 2.5 times that backward. Block masks, lens and bias count as visible.
    pub flops: i64,
    /// Least bytes to move: every input read once, every output written once.
    pub bytes: i64,
    /// flashattn_workspace_size.
    pub workspace: i64,
}

impl Default for flashattn_plan_properties {
    /// All zero, with `struct_size` set.
    fn default() -> Self {
        // SAFETY: integers, floats and pointers, for which zero bytes are a value.
        let mut zeroed: Self = unsafe { core::mem::zeroed() };
        zeroed.struct_size = core::mem::size_of::<Self>() as u32;
        zeroed
    }
}

/// A handle, known by its address only.
#[repr(C)]
pub struct flashattn_plan {
    _data: [u8; 0],
    _marker: PhantomData<(*mut u8, PhantomPinned)>,
}

/// Receives a line of the log. Called from any thread that is inside a library call; must not call
/// the library. message lives for the call only.
pub type flashattn_log_fn =
    Option<unsafe extern "C" fn(user: *mut c_void, level: i32, message: *const c_char)>;

extern "C" {
    /// The version of the library that runs: 10000 * major + 100 * minor + patch.
    pub fn flashattn_version() -> i32;

    /// The same as text: "0.1.0".
    pub fn flashattn_version_string() -> *const c_char;

    /// One line: version, compiler, kernel families and instruction sets in this build.
    pub fn flashattn_build_info() -> *const c_char;

    /// The name of an enum flashattn_status, "FLASHATTN_OK"; "unknown status" for any other number.
    pub fn flashattn_status_name(status: i32) -> *const c_char;

    /// The sentence of the last call of this thread that failed; "" when none did. Successful calls
    /// leave it alone. It lives until the next call of this thread fails, and so does the field.
    ///
    /// ```text
    ///   reason   out, may be NULL: enum flashattn_reason.
    ///   field    out, may be NULL: the structure member it is about, "dim_qk", "inputs.q.stride_seq";
    ///            "" when there is none.
    /// ```
    ///
    /// # Safety
    ///
    /// Pointers must be what the text above and the conventions of this crate say.
    pub fn flashattn_last_error(reason: *mut i32, field: *mut *const c_char) -> *const c_char;

    /// Sends log lines to a callback, for the whole process.
    ///
    /// ```text
    ///   level      enum flashattn_log_level.
    ///   callback   may be NULL: off.
    ///   user       handed to the callback, may be NULL.
    /// ```
    ///
    /// INVALID_ARGUMENT: unknown level.
    ///
    /// # Safety
    ///
    /// Pointers must be what the text above and the conventions of this crate say.
    pub fn flashattn_set_log(level: i32, callback: flashattn_log_fn, user: *mut c_void) -> i32;

    /// How many devices of a kind there are. 0 where the build or the machine has none.
    ///
    /// ```text
    ///   device   enum flashattn_device.
    ///   count    out.
    /// ```
    ///
    /// INVALID_ARGUMENT: unknown kind, NULL.
    ///
    /// # Safety
    ///
    /// Pointers must be what the text above and the conventions of this crate say.
    pub fn flashattn_device_count(device: i32, count: *mut i32) -> i32;

    /// Describes a device.
    ///
    /// ```text
    ///   device       enum flashattn_device.
    ///   index        from 0.
    ///   properties   in: struct_size; out: the rest.
    /// ```
    ///
    /// INVALID_ARGUMENT, VERSION; UNSUPPORTED: NO_CUDA_BUILD, NO_DEVICE; DEVICE.
    ///
    /// # Safety
    ///
    /// Pointers must be what the text above and the conventions of this crate say.
    pub fn flashattn_device_info(
        device: i32,
        index: i32,
        properties: *mut flashattn_device_properties,
    ) -> i32;

    /// Zeroes a descriptor and sets its struct_size.
    ///
    /// ```text
    ///   desc          out.
    ///   struct_size   sizeof(flashattn_desc) as the caller knows it, >= 4.
    /// ```
    ///
    /// INVALID_ARGUMENT: NULL, too small.
    ///
    /// # Safety
    ///
    /// Pointers must be what the text above and the conventions of this crate say.
    pub fn flashattn_desc_init(desc: *mut flashattn_desc, struct_size: u32) -> i32;

    /// Whether flashattn_plan_create would succeed; if not, flashattn_last_error says why. Makes a plan
    /// and frees it.
    /// INVALID_ARGUMENT, VERSION, UNSUPPORTED, DEVICE, OUT_OF_MEMORY.
    ///
    /// # Safety
    ///
    /// Pointers must be what the text above and the conventions of this crate say.
    pub fn flashattn_check(desc: *const flashattn_desc) -> i32;

    /// Checks the descriptor, chooses the kernels and does everything that is slow. The choice depends
    /// on the descriptor, the device and the library's version only.
    ///
    /// ```text
    ///   desc   may be freed afterwards.
    ///   plan   out: to be freed by flashattn_plan_destroy. Untouched on failure.
    /// ```
    ///
    /// INVALID_ARGUMENT, VERSION, UNSUPPORTED, DEVICE, OUT_OF_MEMORY.
    ///
    /// # Safety
    ///
    /// Pointers must be what the text above and the conventions of this crate say.
    pub fn flashattn_plan_create(
        desc: *const flashattn_desc,
        plan: *mut *mut flashattn_plan,
    ) -> i32;

    /// Frees a plan; NULL is fine. Work already enqueued on a stream is not disturbed.
    ///
    /// # Safety
    ///
    /// Pointers must be what the text above and the conventions of this crate say.
    pub fn flashattn_plan_destroy(plan: *mut flashattn_plan);

    /// Says which kernel an operation uses and what it costs.
    ///
    /// ```text
    ///   op           one enum flashattn_op of the plan.
    ///   shape        may be NULL: the promised maxima; what depends on a maximum that was not promised
    ///                is then 0.
    ///   properties   in: struct_size; out: the rest.
    /// ```
    ///
    /// INVALID_ARGUMENT, VERSION.
    ///
    /// # Safety
    ///
    /// Pointers must be what the text above and the conventions of this crate say.
    pub fn flashattn_plan_info(
        plan: *const flashattn_plan,
        op: u32,
        shape: *const flashattn_shape,
        properties: *mut flashattn_plan_properties,
    ) -> i32;

    /// Bytes of workspace that an operation needs: linear in the sequence length, never smaller for a
    /// larger shape, known before any pointer exists. Need not be aligned or cleared.
    ///
    /// ```text
    ///   op      one enum flashattn_op of the plan.
    ///   shape   may be NULL: enough for every call within the promised maxima.
    ///   bytes   out; 0 is possible.
    /// ```
    ///
    /// INVALID_ARGUMENT: also when shape is NULL and a maximum that matters was not promised.
    ///
    /// # Safety
    ///
    /// Pointers must be what the text above and the conventions of this crate say.
    pub fn flashattn_workspace_size(
        plan: *const flashattn_plan,
        op: u32,
        shape: *const flashattn_shape,
        bytes: *mut i64,
    ) -> i32;

    /// For each sequence, head and query, with the masks and the sequence's off of enum flashattn_mask:
    ///
    /// ```text
    ///     s    = scale * q_i . k_j ;  softcap: s = softcap * tanh(s / softcap)
    ///     s   -= slope_h * |i + off - j| ;  s += bias[b, h, i, j]
    ///     lse  = ln(sum over visible j of exp(s) [+ exp(sink_h)])
    ///     o_i  = sum over visible j of keep(i, j) / (1 - dropout) * exp(s - lse) * v_j
    /// ```
    ///
    /// (Dao et al. 2022, Dao 2023). Scores, softmax and sums are fp32.
    ///
    /// ```text
    ///   workspace         device memory, exclusive to this call until it is done. May be NULL when 0
    ///                     bytes are needed.
    ///   workspace_bytes   at least flashattn_workspace_size for this shape.
    /// ```
    ///
    /// # Safety
    ///
    /// Pointers must be what the text above and the conventions of this crate say.
    pub fn flashattn_forward(
        plan: *const flashattn_plan,
        args: *const flashattn_forward_args,
        workspace: *mut c_void,
        workspace_bytes: i64,
        stream: *mut c_void,
    ) -> i32;

    /// The gradients, with the scores recomputed from lse (Dao et al. 2022, algorithm 4):
    ///
    /// ```text
    ///     D_i  = dout_i . o_i - dlse_i ;  P = exp(s - lse) ;  dP = keep / (1 - dropout) * dout v^T
    ///     dS   = P * (dP - D) ;  dbias = dS ;  dsink_h = - sum over b, i of exp(sink_h - lse_i) * D_i
    ///     dv_j = sum over i of keep / (1 - dropout) * P dout_i
    ///     dq, dk from dS through softcap and scale
    /// ```
    ///
    /// dk and dv of a KV head sum over its query heads. All rows within a sequence's length are written.
    /// For a part of a larger attention, give the o and lse that flashattn_merge wrote.
    ///
    /// # Safety
    ///
    /// Pointers must be what the text above and the conventions of this crate say.
    pub fn flashattn_backward(
        plan: *const flashattn_plan,
        args: *const flashattn_backward_args,
        workspace: *mut c_void,
        workspace_bytes: i64,
        stream: *mut c_void,
    ) -> i32;

    /// Merges partial results over disjoint sets of keys into the whole: lse = ln(sum of exp(lse_p)),
    /// o = sum of exp(lse_p - lse) o_p; parts with lse = -inf count nothing. For ring or cascade
    /// attention. A sink must be part of one partial result only. Needs no workspace; the plan gives
    /// device, heads_q, dim_v, dtype_o and whether queries are VARLEN. o and lse may be those of a part
    /// with the same strides and type. Rows are merged whatever lens says: give the parts defined
    /// contents.
    ///
    /// # Safety
    ///
    /// Pointers must be what the text above and the conventions of this crate say.
    pub fn flashattn_merge(
        plan: *const flashattn_plan,
        args: *const flashattn_merge_args,
        stream: *mut c_void,
    ) -> i32;

    /// Writes which weights the plan's dropout keeps: 1 = kept, 0 = dropped. The numbers depend on
    /// (seed, offset, b, h, i, j) only, not on device, tile or layout; i and j count from the start of a
    /// sequence. Philox4x32-10 (Salmon et al. 2011) with key (seed low, seed high ^ offset high) and
    /// counter ((j >> 4) << 5 | (i & 7) << 2 | (j & 7) >> 1, i >> 4, b * heads_q + h, offset low); its
    /// word ((j >> 3) & 1) * 2 + ((i >> 3) & 1), low half for even j, high half for odd j, is u; kept
    /// iff u >= round(65536 * dropout).
    ///
    /// ```text
    ///   args   only shape and the rng fields are read.
    ///   keep   out, device memory: (batch, heads_q, seqlen_q, seqlen_kv) bytes.
    /// ```
    ///
    /// # Safety
    ///
    /// Pointers must be what the text above and the conventions of this crate say.
    pub fn flashattn_dropout_mask(
        plan: *const flashattn_plan,
        args: *const flashattn_forward_args,
        keep: *mut u8,
        stream: *mut c_void,
    ) -> i32;
}

fn write_name(f: &mut fmt::Formatter<'_>, value: i32, names: &[(&str, i32)]) -> fmt::Result {
    match names.iter().find(|entry| entry.1 == value) {
        Some((name, _)) => f.write_str(name),
        None => write!(f, "{value}"),
    }
}

fn write_flags(f: &mut fmt::Formatter<'_>, value: u32, names: &[(&str, u32)]) -> fmt::Result {
    let mut rest = value;
    for (name, bit) in names.iter().filter(|entry| value & entry.1 != 0) {
        f.write_str(if rest == value { "" } else { " | " })?;
        f.write_str(name)?;
        rest &= !bit;
    }
    match (rest, rest == value) {
        (0, false) => Ok(()),
        (_, true) => write!(f, "{rest:#x}"),
        (_, false) => write!(f, " | {rest:#x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::{align_of, offset_of, size_of};

    #[test]
    fn layout_of_desc() {
        assert_eq!(size_of::<flashattn_desc>(), 184);
        assert_eq!(align_of::<flashattn_desc>(), 8);
        assert_eq!(offset_of!(flashattn_desc, struct_size), 0);
        assert_eq!(offset_of!(flashattn_desc, device), 4);
        assert_eq!(offset_of!(flashattn_desc, device_index), 8);
        assert_eq!(offset_of!(flashattn_desc, ops), 12);
        assert_eq!(offset_of!(flashattn_desc, dtype), 16);
        assert_eq!(offset_of!(flashattn_desc, dtype_o), 20);
        assert_eq!(offset_of!(flashattn_desc, heads_q), 24);
        assert_eq!(offset_of!(flashattn_desc, heads_kv), 28);
        assert_eq!(offset_of!(flashattn_desc, dim_qk), 32);
        assert_eq!(offset_of!(flashattn_desc, dim_v), 36);
        assert_eq!(offset_of!(flashattn_desc, layout), 40);
        assert_eq!(offset_of!(flashattn_desc, page_size), 44);
        assert_eq!(offset_of!(flashattn_desc, mask), 48);
        assert_eq!(offset_of!(flashattn_desc, window_left), 52);
        assert_eq!(offset_of!(flashattn_desc, window_right), 56);
        assert_eq!(offset_of!(flashattn_desc, chunk), 60);
        assert_eq!(offset_of!(flashattn_desc, block_q), 64);
        assert_eq!(offset_of!(flashattn_desc, block_kv), 68);
        assert_eq!(offset_of!(flashattn_desc, bias), 72);
        assert_eq!(offset_of!(flashattn_desc, bias_dtype), 76);
        assert_eq!(offset_of!(flashattn_desc, features), 80);
        assert_eq!(offset_of!(flashattn_desc, determinism), 84);
        assert_eq!(offset_of!(flashattn_desc, scale), 88);
        assert_eq!(offset_of!(flashattn_desc, softcap), 92);
        assert_eq!(offset_of!(flashattn_desc, dropout), 96);
        assert_eq!(offset_of!(flashattn_desc, splits), 100);
        assert_eq!(offset_of!(flashattn_desc, max_batch), 104);
        assert_eq!(offset_of!(flashattn_desc, max_seqlen_q), 108);
        assert_eq!(offset_of!(flashattn_desc, max_seqlen_kv), 112);
        assert_eq!(offset_of!(flashattn_desc, sm_limit), 116);
        assert_eq!(offset_of!(flashattn_desc, threads), 120);
        assert_eq!(offset_of!(flashattn_desc, reserved0), 124);
        assert_eq!(offset_of!(flashattn_desc, max_total_q), 128);
        assert_eq!(offset_of!(flashattn_desc, max_total_kv), 136);
        assert_eq!(offset_of!(flashattn_desc, workspace_limit), 144);
        assert_eq!(offset_of!(flashattn_desc, reserved), 152);
    }

    #[test]
    fn layout_of_shape() {
        assert_eq!(size_of::<flashattn_shape>(), 32);
        assert_eq!(align_of::<flashattn_shape>(), 8);
        assert_eq!(offset_of!(flashattn_shape, batch), 0);
        assert_eq!(offset_of!(flashattn_shape, seqlen_q), 4);
        assert_eq!(offset_of!(flashattn_shape, seqlen_kv), 8);
        assert_eq!(offset_of!(flashattn_shape, reserved), 12);
        assert_eq!(offset_of!(flashattn_shape, total_q), 16);
        assert_eq!(offset_of!(flashattn_shape, total_kv), 24);
    }

    #[test]
    fn layout_of_tensor() {
        assert_eq!(size_of::<flashattn_tensor>(), 32);
        assert_eq!(align_of::<flashattn_tensor>(), 8);
        assert_eq!(offset_of!(flashattn_tensor, data), 0);
        assert_eq!(offset_of!(flashattn_tensor, stride_batch), 8);
        assert_eq!(offset_of!(flashattn_tensor, stride_head), 16);
        assert_eq!(offset_of!(flashattn_tensor, stride_seq), 24);
    }

    #[test]
    fn layout_of_inputs() {
        assert_eq!(size_of::<flashattn_inputs>(), 320);
        assert_eq!(align_of::<flashattn_inputs>(), 8);
        assert_eq!(offset_of!(flashattn_inputs, q), 0);
        assert_eq!(offset_of!(flashattn_inputs, k), 32);
        assert_eq!(offset_of!(flashattn_inputs, v), 64);
        assert_eq!(offset_of!(flashattn_inputs, cu_seqlens_q), 96);
        assert_eq!(offset_of!(flashattn_inputs, cu_seqlens_kv), 104);
        assert_eq!(offset_of!(flashattn_inputs, lens_q), 112);
        assert_eq!(offset_of!(flashattn_inputs, lens_kv), 120);
        assert_eq!(offset_of!(flashattn_inputs, page_table), 128);
        assert_eq!(offset_of!(flashattn_inputs, page_table_stride), 136);
        assert_eq!(offset_of!(flashattn_inputs, pages), 144);
        assert_eq!(offset_of!(flashattn_inputs, bias), 152);
        assert_eq!(offset_of!(flashattn_inputs, bias_stride_batch), 160);
        assert_eq!(offset_of!(flashattn_inputs, bias_stride_head), 168);
        assert_eq!(offset_of!(flashattn_inputs, bias_stride_row), 176);
        assert_eq!(offset_of!(flashattn_inputs, alibi_slopes), 184);
        assert_eq!(offset_of!(flashattn_inputs, alibi_stride_batch), 192);
        assert_eq!(offset_of!(flashattn_inputs, sink), 200);
        assert_eq!(offset_of!(flashattn_inputs, block_mask), 208);
        assert_eq!(offset_of!(flashattn_inputs, block_mask_stride_batch), 216);
        assert_eq!(offset_of!(flashattn_inputs, block_mask_stride_head), 224);
        assert_eq!(offset_of!(flashattn_inputs, block_mask_stride_row), 232);
        assert_eq!(offset_of!(flashattn_inputs, descale_q), 240);
        assert_eq!(offset_of!(flashattn_inputs, descale_k), 248);
        assert_eq!(offset_of!(flashattn_inputs, descale_v), 256);
        assert_eq!(offset_of!(flashattn_inputs, rng_seed), 264);
        assert_eq!(offset_of!(flashattn_inputs, rng_offset), 272);
        assert_eq!(offset_of!(flashattn_inputs, rng_device), 280);
        assert_eq!(offset_of!(flashattn_inputs, reserved), 288);
    }

    #[test]
    fn layout_of_forward_args() {
        assert_eq!(size_of::<flashattn_forward_args>(), 432);
        assert_eq!(align_of::<flashattn_forward_args>(), 8);
        assert_eq!(offset_of!(flashattn_forward_args, struct_size), 0);
        assert_eq!(offset_of!(flashattn_forward_args, reserved0), 4);
        assert_eq!(offset_of!(flashattn_forward_args, shape), 8);
        assert_eq!(offset_of!(flashattn_forward_args, inputs), 40);
        assert_eq!(offset_of!(flashattn_forward_args, o), 360);
        assert_eq!(offset_of!(flashattn_forward_args, lse), 392);
        assert_eq!(offset_of!(flashattn_forward_args, reserved), 400);
    }

    #[test]
    fn layout_of_backward_args() {
        assert_eq!(size_of::<flashattn_backward_args>(), 608);
        assert_eq!(align_of::<flashattn_backward_args>(), 8);
        assert_eq!(offset_of!(flashattn_backward_args, struct_size), 0);
        assert_eq!(offset_of!(flashattn_backward_args, reserved0), 4);
        assert_eq!(offset_of!(flashattn_backward_args, shape), 8);
        assert_eq!(offset_of!(flashattn_backward_args, inputs), 40);
        assert_eq!(offset_of!(flashattn_backward_args, o), 360);
        assert_eq!(offset_of!(flashattn_backward_args, dout), 392);
        assert_eq!(offset_of!(flashattn_backward_args, lse), 424);
        assert_eq!(offset_of!(flashattn_backward_args, dlse), 432);
        assert_eq!(offset_of!(flashattn_backward_args, dq), 440);
        assert_eq!(offset_of!(flashattn_backward_args, dk), 472);
        assert_eq!(offset_of!(flashattn_backward_args, dv), 504);
        assert_eq!(offset_of!(flashattn_backward_args, dbias), 536);
        assert_eq!(offset_of!(flashattn_backward_args, dbias_stride_batch), 544);
        assert_eq!(offset_of!(flashattn_backward_args, dbias_stride_head), 552);
        assert_eq!(offset_of!(flashattn_backward_args, dbias_stride_row), 560);
        assert_eq!(offset_of!(flashattn_backward_args, dsink), 568);
        assert_eq!(offset_of!(flashattn_backward_args, reserved), 576);
    }

    #[test]
    fn layout_of_merge_args() {
        assert_eq!(size_of::<flashattn_merge_args>(), 136);
        assert_eq!(align_of::<flashattn_merge_args>(), 8);
        assert_eq!(offset_of!(flashattn_merge_args, struct_size), 0);
        assert_eq!(offset_of!(flashattn_merge_args, parts), 4);
        assert_eq!(offset_of!(flashattn_merge_args, shape), 8);
        assert_eq!(offset_of!(flashattn_merge_args, part_o), 40);
        assert_eq!(offset_of!(flashattn_merge_args, part_lse), 48);
        assert_eq!(offset_of!(flashattn_merge_args, part_dtype), 56);
        assert_eq!(offset_of!(flashattn_merge_args, reserved0), 60);
        assert_eq!(offset_of!(flashattn_merge_args, o), 64);
        assert_eq!(offset_of!(flashattn_merge_args, lse), 96);
        assert_eq!(offset_of!(flashattn_merge_args, reserved), 104);
    }

    #[test]
    fn layout_of_device_properties() {
        assert_eq!(size_of::<flashattn_device_properties>(), 40);
        assert_eq!(align_of::<flashattn_device_properties>(), 8);
        assert_eq!(offset_of!(flashattn_device_properties, struct_size), 0);
        assert_eq!(offset_of!(flashattn_device_properties, units), 4);
        assert_eq!(offset_of!(flashattn_device_properties, name), 8);
        assert_eq!(offset_of!(flashattn_device_properties, isa), 16);
        assert_eq!(offset_of!(flashattn_device_properties, compute_capability), 24);
        assert_eq!(offset_of!(flashattn_device_properties, local_memory), 28);
        assert_eq!(offset_of!(flashattn_device_properties, memory), 32);
    }

    #[test]
    fn layout_of_plan_properties() {
        assert_eq!(size_of::<flashattn_plan_properties>(), 88);
        assert_eq!(align_of::<flashattn_plan_properties>(), 8);
        assert_eq!(offset_of!(flashattn_plan_properties, struct_size), 0);
        assert_eq!(offset_of!(flashattn_plan_properties, tile_q), 4);
        assert_eq!(offset_of!(flashattn_plan_properties, tile_kv), 8);
        assert_eq!(offset_of!(flashattn_plan_properties, stages), 12);
        assert_eq!(offset_of!(flashattn_plan_properties, threads), 16);
        assert_eq!(offset_of!(flashattn_plan_properties, registers), 20);
        assert_eq!(offset_of!(flashattn_plan_properties, local_memory), 24);
        assert_eq!(offset_of!(flashattn_plan_properties, splits), 28);
        assert_eq!(offset_of!(flashattn_plan_properties, family), 32);
        assert_eq!(offset_of!(flashattn_plan_properties, kernel), 40);
        assert_eq!(offset_of!(flashattn_plan_properties, isa), 48);
        assert_eq!(offset_of!(flashattn_plan_properties, why), 56);
        assert_eq!(offset_of!(flashattn_plan_properties, flops), 64);
        assert_eq!(offset_of!(flashattn_plan_properties, bytes), 72);
        assert_eq!(offset_of!(flashattn_plan_properties, workspace), 80);
    }

    #[test]
    fn layout_of_status() {
        assert_eq!(size_of::<flashattn_status>(), size_of::<i32>());
        assert_eq!(flashattn_status::NAMES.len(), 8);
    }

    #[test]
    fn layout_of_reason() {
        assert_eq!(size_of::<flashattn_reason>(), size_of::<i32>());
        assert_eq!(flashattn_reason::NAMES.len(), 34);
    }

    #[test]
    fn layout_of_device() {
        assert_eq!(size_of::<flashattn_device>(), size_of::<i32>());
        assert_eq!(flashattn_device::NAMES.len(), 2);
    }

    #[test]
    fn layout_of_op() {
        assert_eq!(size_of::<flashattn_op>(), size_of::<u32>());
        assert_eq!(flashattn_op::NAMES.len(), 2);
    }

    #[test]
    fn layout_of_dtype() {
        assert_eq!(size_of::<flashattn_dtype>(), size_of::<i32>());
        assert_eq!(flashattn_dtype::NAMES.len(), 6);
    }

    #[test]
    fn layout_of_layout() {
        assert_eq!(size_of::<flashattn_layout>(), size_of::<u32>());
        assert_eq!(flashattn_layout::NAMES.len(), 3);
    }

    #[test]
    fn layout_of_mask() {
        assert_eq!(size_of::<flashattn_mask>(), size_of::<u32>());
        assert_eq!(flashattn_mask::NAMES.len(), 5);
    }

    #[test]
    fn layout_of_bias() {
        assert_eq!(size_of::<flashattn_bias>(), size_of::<u32>());
        assert_eq!(flashattn_bias::NAMES.len(), 2);
    }

    #[test]
    fn layout_of_feature() {
        assert_eq!(size_of::<flashattn_feature>(), size_of::<u32>());
        assert_eq!(flashattn_feature::NAMES.len(), 5);
    }

    #[test]
    fn layout_of_determinism() {
        assert_eq!(size_of::<flashattn_determinism>(), size_of::<i32>());
        assert_eq!(flashattn_determinism::NAMES.len(), 3);
    }

    #[test]
    fn layout_of_log_level() {
        assert_eq!(size_of::<flashattn_log_level>(), size_of::<i32>());
        assert_eq!(flashattn_log_level::NAMES.len(), 4);
    }

    #[test]
    fn library_has_the_version_of_the_header() {
        // SAFETY: takes nothing.
        let library = unsafe { flashattn_version() };
        assert_eq!(library / 10000, HEADER_VERSION / 10000);
        assert!(library >= HEADER_VERSION);
    }
}
