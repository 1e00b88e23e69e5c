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

/// OCP E4M3: a number of 8 bits with 4 bits of exponent, no infinity, up to 448. A storage format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct F8E4M3(pub u8);

/// A type of q, k, v and o: `f32`, [`half::f16`], [`half::bf16`], [`F8E4M3`]; of k and v in a cache
/// also `i8`.
pub trait Element: Scalar {
    /// The nearest value of this type, ties to even. [`F8E4M3`]: at most 448. `i8`: at most 127, 0 of
    /// a NaN.
    fn from_f32(value: f32) -> Self;

    /// The value, exactly.
    fn to_f32(self) -> f32;
}

impl sealed::Sealed for f32 {}
impl sealed::Sealed for f16 {}
impl sealed::Sealed for bf16 {}
impl sealed::Sealed for F8E4M3 {}
impl sealed::Sealed for u8 {}
impl sealed::Sealed for i8 {}

impl Scalar for f32 {
    const DTYPE: Dtype = Dtype::F32;
}

impl Scalar for f16 {
    const DTYPE: Dtype = Dtype::F16;
}

impl Scalar for bf16 {
    const DTYPE: Dtype = Dtype::BF16;
}

impl Scalar for F8E4M3 {
    const DTYPE: Dtype = Dtype::F8E4M3;
}

/// A boolean mask: 0 = hidden, anything else = visible.
impl Scalar for u8 {
    const DTYPE: Dtype = Dtype::U8;
}

/// An element of a quantised cache.
impl Scalar for i8 {
    const DTYPE: Dtype = Dtype::I8;
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

impl Element for F8E4M3 {
    fn from_f32(value: f32) -> Self {
        let (bits, magnitude) = (value.to_bits(), value.to_bits() & 0x7fff_ffff);
        let code = if value.is_nan() {
            0x7f
        } else if magnitude >= 448f32.to_bits() {
            0x7e
        } else if magnitude < (1.0 / 64.0f32).to_bits() {
            // Adding 2^14 leaves multiples of 2^-9, the unit of subnormals, in the low bits.
            (f32::from_bits(magnitude) + 16384.0).to_bits() - 16384f32.to_bits()
        } else {
            (magnitude + 0x7_ffff + (magnitude >> 20 & 1) - (120 << 23)) >> 20
        };
        Self((code | bits >> 24 & 0x80) as u8)
    }

    fn to_f32(self) -> f32 {
        let magnitude = u32::from(self.0 & 0x7f);
        let value = match magnitude {
            0x7f => f32::NAN,
            0..=7 => magnitude as f32 / 512.0,
            _ => f32::from_bits((magnitude << 20) + (120 << 23)),
        };
        if self.0 & 0x80 == 0 {
            value
        } else {
            -value
        }
    }
}

impl Element for i8 {
    fn from_f32(value: f32) -> Self {
        // Adding 1.5 * 2^23 rounds to an integer, ties to even. A cast takes NaN to 0.
        const MAGIC: f32 = 12_582_912.0;
        (value.clamp(-127.0, 127.0) + MAGIC - MAGIC) as i8
    }

    fn to_f32(self) -> f32 {
        f32::from(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_8_bits_survive_and_middles_go_to_even() {
        for code in 0..=255u8 {
            let value = F8E4M3(code).to_f32();
            assert_eq!(value.is_nan(), code & 0x7f == 0x7f);
            if !value.is_nan() {
                assert_eq!(F8E4M3::from_f32(value), F8E4M3(code));
            }
            if code < 0x7e {
                let next = F8E4M3(code + 1).to_f32();
                let even = code + (code & 1);
                assert_eq!(F8E4M3::from_f32((value + next) / 2.0), F8E4M3(even), "{code}");
            }
        }
        for (value, code) in [(1e30, 0x7e), (f32::NEG_INFINITY, 0xfe), (464.0, 0x7e), (-0.0, 0x80)]
        {
            assert_eq!(F8E4M3::from_f32(value), F8E4M3(code));
        }
        assert!(F8E4M3::from_f32(f32::NAN).to_f32().is_nan());
        let wide = [0.5, 1.5, -2.5, 126.6, -1e30, f32::INFINITY, f32::NAN];
        assert_eq!(wide.map(<i8 as Element>::from_f32), [0, 2, -2, 127, -127, 127, 0]);
    }
}
