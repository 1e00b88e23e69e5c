//! Arrays without strides: lengths, page tables, lse, slopes.

use std::marker::PhantomData;

use crate::error::{invalid, Result};
use crate::Reason;

/// Whose memory a pointer is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Host,
    Device,
}

impl Place {
    /// Refuses memory that the plan's device cannot address.
    pub(crate) fn expect(self, wanted: Place, field: &str) -> Result<()> {
        if self == wanted {
            return Ok(());
        }
        let sentence = match wanted {
            Place::Host => format!(
                "{field} is device memory, but the plan is for the CPU; give a slice, or make a \
                 plan for the GPU"
            ),
            Place::Device => format!(
                "{field} is a slice of host memory, but the plan is for a GPU; copy it to the \
                 device and give its address with from_device_ptr"
            ),
        };
        Err(invalid(Reason::NO_DEVICE, field, sentence))
    }
}

/// Elements to read, one after the other. Made by `into()` from `&[T]`, `&[T; N]`, `&Vec<T>`.
#[derive(Clone, Copy, Debug)]
pub struct Array<'a, T> {
    data: *const T,
    len: usize,
    place: Place,
    _lifetime: PhantomData<&'a [T]>,
}

/// Elements to write, one after the other. Made by `into()` from `&mut [T]`, `&mut [T; N]`,
/// `&mut Vec<T>`.
#[derive(Debug)]
pub struct ArrayMut<'a, T> {
    data: *mut T,
    len: usize,
    place: Place,
    _lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: shared and exclusive borrows of a slice, under other names.
unsafe impl<T: Sync> Send for Array<'_, T> {}
unsafe impl<T: Sync> Sync for Array<'_, T> {}
unsafe impl<T: Send> Send for ArrayMut<'_, T> {}
unsafe impl<T: Sync> Sync for ArrayMut<'_, T> {}

impl<'a, T> Array<'a, T> {
    /// Elements in a GPU's memory.
    ///
    /// # Safety
    ///
    /// `address` is that of `len` initialised elements on the device of every plan that gets this,
    /// valid until the work enqueued with it is done.
    pub unsafe fn from_device_ptr(address: u64, len: usize) -> Self {
        Self { data: address as *const T, len, place: Place::Device, _lifetime: PhantomData }
    }

    /// How many elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The same number of bytes at the same place, for the pointer only.
    pub(crate) fn erase(self) -> Array<'a, u8> {
        Array { data: self.data.cast(), len: self.len, place: self.place, _lifetime: PhantomData }
    }

    /// The elements, where the host can read them.
    pub(crate) fn host(&self) -> Option<&'a [T]> {
        // SAFETY: made from a slice that lives for 'a.
        (self.place == Place::Host)
            .then(|| unsafe { std::slice::from_raw_parts(self.data, self.len) })
    }

    /// The pointer, for an array that must have exactly, or at least, as many elements.
    pub(crate) fn pointer(&self, place: Place, need: Need, field: &str) -> Result<*const T> {
        self.place.expect(place, field)?;
        need.check(self.len, field)?;
        Ok(self.data)
    }
}

impl<'a> Array<'a, u8> {
    /// A boolean mask: true = visible.
    pub fn from_bools(mask: &'a [bool]) -> Self {
        Self {
            data: mask.as_ptr().cast(), // a bool is a byte, 0 or 1
            len: mask.len(),
            place: Place::Host,
            _lifetime: PhantomData,
        }
    }
}

impl<T> ArrayMut<'_, T> {
    /// Elements in a GPU's memory.
    ///
    /// # Safety
    ///
    /// `address` is that of `len` elements on the device of every plan that gets this, used by
    /// nothing else until the work enqueued with it is done.
    pub unsafe fn from_device_ptr(address: u64, len: usize) -> Self {
        Self { data: address as *mut T, len, place: Place::Device, _lifetime: PhantomData }
    }

    /// How many elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn pointer(&mut self, place: Place, need: Need, field: &str) -> Result<*mut T> {
        self.place.expect(place, field)?;
        need.check(self.len, field)?;
        Ok(self.data)
    }
}

impl<'a, T> From<&'a [T]> for Array<'a, T> {
    fn from(slice: &'a [T]) -> Self {
        Self { data: slice.as_ptr(), len: slice.len(), place: Place::Host, _lifetime: PhantomData }
    }
}

impl<'a, T, const N: usize> From<&'a [T; N]> for Array<'a, T> {
    fn from(array: &'a [T; N]) -> Self {
        array.as_slice().into()
    }
}

impl<'a, T> From<&'a Vec<T>> for Array<'a, T> {
    fn from(vec: &'a Vec<T>) -> Self {
        vec.as_slice().into()
    }
}

impl<'a, T> From<&'a mut [T]> for ArrayMut<'a, T> {
    fn from(slice: &'a mut [T]) -> Self {
        Self {
            data: slice.as_mut_ptr(),
            len: slice.len(),
            place: Place::Host,
            _lifetime: PhantomData,
        }
    }
}

impl<'a, T, const N: usize> From<&'a mut [T; N]> for ArrayMut<'a, T> {
    fn from(array: &'a mut [T; N]) -> Self {
        array.as_mut_slice().into()
    }
}

impl<'a, T> From<&'a mut Vec<T>> for ArrayMut<'a, T> {
    fn from(vec: &'a mut Vec<T>) -> Self {
        vec.as_mut_slice().into()
    }
}

/// How many elements a call will touch. `None`: more than there is memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Need {
    Exactly(Option<usize>),
    AtLeast(Option<usize>),
}

impl Need {
    /// The product of sizes that stand without gaps.
    pub(crate) fn product(sizes: &[usize]) -> Self {
        Need::Exactly(product(sizes))
    }

    /// From the first element to the last that is reached with strides.
    pub(crate) fn reach(sizes: &[usize], strides: &[usize]) -> Self {
        Need::AtLeast(reach(sizes, strides))
    }

    fn check(self, len: usize, field: &str) -> Result<()> {
        let (fits, words, needed) = match self {
            Need::Exactly(needed) => (needed == Some(len), "exactly", needed),
            Need::AtLeast(needed) => (needed.is_some_and(|n| n <= len), "at least", needed),
        };
        if fits {
            return Ok(());
        }
        let needed = needed.map_or("more than 2^64".to_string(), |n| n.to_string());
        let sentence = format!(
            "{field} holds {len} elements, but this plan and these sizes need {words} {needed}; give \
             that many, or correct the sizes or strides"
        );
        Err(invalid(Reason::SIZE, field, sentence))
    }
}

/// How many elements there are; `None`: more than there is memory.
pub(crate) fn product(sizes: &[usize]) -> Option<usize> {
    if sizes.contains(&0) {
        return Some(0);
    }
    sizes.iter().try_fold(1usize, |all, &n| all.checked_mul(n))
}

/// Elements from the first to the last that is reached with strides.
pub(crate) fn reach(sizes: &[usize], strides: &[usize]) -> Option<usize> {
    if sizes.contains(&0) {
        return Some(0);
    }
    let steps = sizes.iter().zip(strides);
    steps
        .map(|(&n, &stride)| (n - 1).checked_mul(stride))
        .try_fold(1usize, |last, step| last.checked_add(step?))
}
