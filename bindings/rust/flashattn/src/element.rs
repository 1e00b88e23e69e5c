//! The element types of arrays.

use half::{bf16, f16};

use crate::Dtype;

mod sealed {
    pub trait Sealed {}
}

/// A type with a number in the C header. Sealed: its layout is what the library reads and writes.
pub trait Scalar: sealed::Sealed + Copy + Send + Sync + 'static {
    /// The header's number.
    const DTYPE: Dtype;
}

/// A type of q, k, v and o: `f32`, [`half::f16`], [`half::bf16`].
pub trait Element: Scalar {
    /// The nearest value of this type.
    fn from_f32(value: f32) -> Self;

    /// The value, exactly.
    fn to_f32(self) -> f32;
}

impl sealed::Sealed for f32 {}
impl sealed::Sealed for f16 {}
impl sealed::Sealed for bf16 {}
impl sealed::Sealed for u8 {}

impl Scalar for f32 {
    const DTYPE: Dtype = Dtype::F32;
}

impl Scalar for f16 {
    const DTYPE: Dtype = Dtype::F16;
}

impl Scalar for bf16 {
    const DTYPE: Dtype = Dtype::BF16;
}

/// A boolean mask: 0 = hidden, anything else = visible.
impl Scalar for u8 {
    const DTYPE: Dtype = Dtype::U8;
}

impl Element for f32 {
    fn from_f32(value: f32) -> Self {
        value
    }

    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for f16 {
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value)
    }

    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
}

impl Element for bf16 {
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }

    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
}
