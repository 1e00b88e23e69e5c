//! What the tests share.
#![allow(dead_code)]

pub mod file;
pub mod naive;

use flashattn::half::{bf16, f16};
use flashattn::{Result, View, ViewMut};

/// A type that stands in cases.bin, little-endian.
pub trait Bytes: Copy {
    const NAME: &'static str;
    fn read(bytes: &[u8]) -> Self;
    fn to_f64(self) -> f64;
}

macro_rules! bytes {
    ($type:ty, $name:literal, $to:expr) => {
        impl Bytes for $type {
            const NAME: &'static str = $name;
            fn read(bytes: &[u8]) -> Self {
                <$type>::from_le_bytes(bytes.try_into().unwrap())
            }
            fn to_f64(self) -> f64 {
                ($to)(self)
            }
        }
    };
}

bytes!(f64, "f64", |x| x);
bytes!(f32, "f32", f64::from);
bytes!(f16, "f16", |x: f16| f64::from(x.to_f32()));
bytes!(bf16, "bf16", |x: bf16| f64::from(x.to_f32()));
bytes!(i32, "i32", f64::from);
bytes!(u8, "u8", f64::from);

/// A packed view with three or four sizes.
pub fn view<'a, T>(data: &'a [T], dims: &[usize]) -> Result<View<'a, T>> {
    match *dims {
        [t, h, d] => View::new(data, [t, h, d]),
        [b, s, h, d] => View::new(data, [b, s, h, d]),
        _ => panic!("{dims:?}"),
    }
}

/// The same to write.
pub fn view_mut<'a, T>(data: &'a mut [T], dims: &[usize]) -> Result<ViewMut<'a, T>> {
    match *dims {
        [t, h, d] => ViewMut::new(data, [t, h, d]),
        [b, s, h, d] => ViewMut::new(data, [b, s, h, d]),
        _ => panic!("{dims:?}"),
    }
}

/// Numbers in [-1, 1), the same on every run.
pub fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Asserts that two arrays agree.
pub fn assert_near(given: &[f32], wanted: &[f32], tolerance: f32) {
    assert_eq!(given.len(), wanted.len());
    for (i, (a, b)) in given.iter().zip(wanted).enumerate() {
        assert!((a - b).abs() <= tolerance || a == b, "[{i}]: {a}, expected {b}");
    }
}
