//! Arrays beside q, k, v and o: lengths, page tables, biases, lse.

use std::ffi::c_void;
use std::marker::PhantomData;

use flashattn_sys::table::{self, Sizes};

use crate::error::{int64, invalid, Result};
use crate::plan::Resolved;
use crate::{Dtype, Reason, Scalar, Strides};

/// Whose memory a pointer is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    Host,
    Device,
}

impl Memory {
    /// Refuses memory that the plan's device cannot address.
    pub(crate) fn expect(self, wanted: Memory, field: &str) -> Result<()> {
        if self == wanted {
            return Ok(());
        }
        let message = match wanted {
            Memory::Host => format!(
                "{field} is device memory, but the plan is for the CPU; give a slice, or make a \
                 plan for the GPU"
            ),
            Memory::Device => format!(
                "{field} is a slice of host memory, but the plan is for a GPU; copy it to the \
                 device and give its address with from_device_ptr"
            ),
        };
        Err(invalid(Reason::NO_DEVICE, field, message))
    }
}

/// How the elements of an array lie.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// In the shape that the call asks for.
    Packed,
    /// In this shape, of so many indices; a size of 1 repeats.
    Dims([usize; 4], usize),
    Strides(Strides),
}

/// An array without its type and lifetime.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Raw {
    address: u64,
    len: usize,
    memory: Memory,
    order: Order,
    dtype: Option<Dtype>,
}

/// Elements to read. Made by `into()` from `&[T]`, `&[T; N]`, `&Vec<T>`; packed in the shape that its
/// use asks for, unless [`Array::dims`] or [`Array::strides`] say otherwise.
#[derive(Clone, Copy, Debug)]
pub struct Array<'a, T> {
    raw: Raw,
    _lifetime: PhantomData<&'a [T]>,
}

/// Elements to write. Made by `into()` from `&mut [T]`, `&mut [T; N]`, `&mut Vec<T>`; packed, unless
/// [`ArrayMut::dims`] or [`ArrayMut::strides`] say otherwise.
#[derive(Debug)]
pub struct ArrayMut<'a, T> {
    raw: Raw,
    _lifetime: PhantomData<&'a mut [T]>,
}

macro_rules! order {
    () => {
        /// The shape in memory, without gaps. A size of 1 stands for all indices there: it is
        /// repeated when it is read, and summed over when it is written. The last index is never
        /// repeated.
        pub fn dims<const N: usize>(mut self, dims: [usize; N]) -> Self {
            let mut sizes = [1; 4];
            for (size, given) in sizes.iter_mut().zip(dims) {
                *size = given;
            }
            self.raw.order = Order::Dims(sizes, N);
            self
        }

        /// Elements from one batch, head, row to the next, where the array has such an index. 0 is
        /// repeated when it is read, and summed over when it is written. The last index is
        /// contiguous.
        pub fn strides(mut self, strides: Strides) -> Self {
            self.raw.order = Order::Strides(strides);
            self
        }

        /// How many elements.
        pub fn len(&self) -> usize {
            self.raw.len
        }

        /// Whether there is none.
        pub fn is_empty(&self) -> bool {
            self.raw.len == 0
        }
    };
}

impl<'a, T> Array<'a, T> {
    /// Elements in a GPU's memory.
    ///
    /// # Safety
    ///
    /// `address` is that of `len` initialised elements on the device of every plan that gets this,
    /// valid until the work enqueued with it is done.
    pub unsafe fn from_device_ptr(address: u64, len: usize) -> Self {
        Self { raw: Raw::new(address, len, Memory::Device), _lifetime: PhantomData }
    }

    order!();

    pub(crate) fn raw(self) -> Raw {
        self.raw
    }
}

impl<T: Scalar> Array<'_, T> {
    /// With the type, for fields whose type is the descriptor's to say.
    pub(crate) fn typed(self) -> Raw {
        Raw { dtype: Some(T::DTYPE), ..self.raw }
    }
}

impl<'a> Array<'a, u8> {
    /// A boolean mask: true = visible.
    pub fn from_bools(mask: &'a [bool]) -> Self {
        // A bool is a byte, 0 or 1.
        Self {
            raw: Raw::new(mask.as_ptr() as u64, mask.len(), Memory::Host),
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
        Self { raw: Raw::new(address, len, Memory::Device), _lifetime: PhantomData }
    }

    order!();

    pub(crate) fn raw(self) -> Raw {
        self.raw
    }
}

impl<'a, T> From<&'a [T]> for Array<'a, T> {
    fn from(slice: &'a [T]) -> Self {
        Self {
            raw: Raw::new(slice.as_ptr() as u64, slice.len(), Memory::Host),
            _lifetime: PhantomData,
        }
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
            raw: Raw::new(slice.as_mut_ptr() as u64, slice.len(), Memory::Host),
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

impl Raw {
    fn new(address: u64, len: usize, memory: Memory) -> Self {
        Self { address, len, memory, order: Order::Packed, dtype: None }
    }

    /// How many elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The elements, where the host can read them.
    ///
    /// # Safety
    ///
    /// The array was made from a slice of this type, which is still borrowed.
    pub(crate) unsafe fn host<T>(&self) -> Option<&[T]> {
        // SAFETY: the caller's promise.
        (self.memory == Memory::Host)
            .then(|| unsafe { std::slice::from_raw_parts(self.address as *const T, self.len) })
    }

    /// Length and stride of the rows of an array whose rows may be longer than a call needs them: a
    /// page table.
    pub(crate) fn rows(&self, rows: usize, field: &str) -> Result<(usize, usize)> {
        let columns = match self.order {
            Order::Strides(Strides { batch: 0, .. }) => return Ok((self.len, 0)),
            Order::Strides(strides) => return Ok((strides.batch, strides.batch)),
            Order::Dims([1, columns, ..], 2) if self.len == columns => return Ok((columns, 0)),
            Order::Dims([_, columns, ..], _) => columns,
            Order::Packed => self.len / rows.max(1),
        };
        if columns.checked_mul(rows) == Some(self.len) || rows == 0 {
            return Ok((columns, columns));
        }
        let message = format!(
            "{field} holds {} elements, which are no packed rows for {rows} sequences; give as many \
             for each, or the stride",
            self.len
        );
        Err(invalid(Reason::SIZE, field, message))
    }

    /// How many rows of `columns` elements an array holds.
    pub(crate) fn rows_of(&self, columns: usize, field: &str) -> Result<usize> {
        let step = match self.order {
            Order::Strides(strides) => strides.seq,
            Order::Dims(sizes, 2) if sizes[1] == columns && product(&sizes) == Some(self.len) => {
                columns
            }
            Order::Packed => columns,
            Order::Dims(..) => 0,
        };
        let packed = matches!(self.order, Order::Strides(_)) || self.len % step.max(1) == 0;
        if step < columns || step == 0 || self.len < columns || !packed {
            let message = format!(
                "{field} holds {} elements, which are no rows of {columns}; give a row of that many for \
                 each position",
                self.len
            );
            return Err(invalid(Reason::SIZE, field, message));
        }
        Ok((self.len - columns) / step + 1)
    }

    /// How many entries each row of an array has that says this itself: `rows` are its indices
    /// before the last.
    pub(crate) fn entries(&self, rows: [usize; 3], field: &str) -> Result<usize> {
        let all = product(&rows);
        let entries = match self.order {
            Order::Dims(sizes, rank) => Some(sizes[rank.clamp(1, 4) - 1]),
            _ if all == Some(0) => Some(0),
            Order::Packed => all.filter(|all| self.len % all == 0).map(|all| self.len / all),
            // As many as there are from the start of the last row on.
            Order::Strides(Strides { batch, head, seq }) => {
                reach(&rows, &[batch, head, seq]).and_then(|last| (self.len + 1).checked_sub(last))
            }
        };
        entries.ok_or_else(|| {
            let message = format!(
                "{field} holds {} elements, which are no rows for {}; give as many for each, or its \
                 shape or strides",
                self.len,
                list(&rows)
            );
            invalid(Reason::SIZE, field, message)
        })
    }

    /// The same array with a stride of its own for the rows.
    pub(crate) fn with_row_stride(self, batch: usize) -> Self {
        Self { order: Order::Strides(Strides { batch, head: 0, seq: 0 }), ..self }
    }

    /// The pointer, for an array that must be as long as a packed shape.
    pub(crate) fn packed(
        &self,
        memory: Memory,
        dims: &[usize],
        field: &str,
    ) -> Result<*mut c_void> {
        self.memory.expect(memory, field)?;
        self.expect_len(product(dims), "exactly", |needed| needed == self.len, field)?;
        Ok(self.address as *mut c_void)
    }

    /// Pointer and strides of a field of the arguments, checked to lie within the array.
    pub(crate) fn lower<A>(
        &self,
        field: &table::Array<A>,
        plan: &Resolved,
        sizes: &Sizes,
    ) -> Result<(*mut c_void, [i64; 3])> {
        let other = field.layouts.iter().find(|(bit, ..)| plan.desc.layout & bit != 0);
        let (shape, order) =
            other.map_or((field.dims, field.strides), |&(_, shape, order)| (shape, order));
        let mut dims = [1; 4];
        for (size, of) in dims.iter_mut().zip(shape) {
            *size = of(sizes);
        }
        let dims = &dims[..shape.len()];
        if let (Some(given), Some(wanted)) = (self.dtype, field.dtype) {
            plan.expect_dtype(given, Dtype(wanted(&plan.desc)), field.name)?;
        }
        let strides = match self.order {
            Order::Packed => {
                self.packed(plan.memory, dims, field.name)?;
                return Ok((self.address as *mut c_void, [-1; 3]));
            }
            Order::Dims(given, rank) => self.repeats(&given[..rank.min(4)], dims, order, field)?,
            Order::Strides(_) if !field.tensor => {
                let message =
                    format!("{} has no strides; give it packed, as {}", field.name, list(dims));
                return Err(invalid(Reason::STRIDE, field.name, message));
            }
            Order::Strides(strides) => [strides.batch, strides.head, strides.seq],
        };
        self.memory.expect(plan.memory, field.name)?;
        // Indices that the array has not got, and the last one, are packed.
        let (mut steps, mut lowered) = ([1; 4], [-1; 3]);
        for (step, &index) in steps.iter_mut().zip(order) {
            *step = strides[index];
            lowered[index] = int64(strides[index], field.name)?;
        }
        let needed = reach(dims, &steps);
        self.expect_len(needed, "at least", |needed| needed <= self.len, field.name)?;
        Ok((self.address as *mut c_void, lowered))
    }

    /// The strides of a shape whose sizes of 1 are repeated.
    fn repeats<A>(
        &self,
        given: &[usize],
        dims: &[usize],
        order: &[usize],
        field: &table::Array<A>,
    ) -> Result<[usize; 3]> {
        let last = dims.len() - 1;
        let fits = given.len() == dims.len()
            && (0..=last).all(|d| given[d] == dims[d] || field.tensor && d < last && given[d] == 1);
        if !fits {
            let more = if field.tensor { ", where 1 repeats any but the last" } else { "" };
            let message = format!(
                "{} is {}, but this plan and these sizes need {}{more}; give it so",
                field.name,
                list(given),
                list(dims)
            );
            return Err(invalid(Reason::SIZE, field.name, message));
        }
        self.expect_len(product(given), "exactly", |needed| needed == self.len, field.name)?;
        let (mut strides, mut step) = ([0; 3], given[last]);
        for d in (0..last).rev() {
            strides[order[d]] = if given[d] == 1 { 0 } else { step };
            step = step.saturating_mul(given[d]);
        }
        Ok(strides)
    }

    fn expect_len(
        &self,
        needed: Option<usize>,
        words: &str,
        fits: impl Fn(usize) -> bool,
        field: &str,
    ) -> Result<()> {
        if needed.is_some_and(fits) {
            return Ok(());
        }
        let needed = needed.map_or("more than 2^64".to_string(), |n| n.to_string());
        let message = format!(
            "{field} holds {} elements, but this plan and these sizes need {words} {needed}; give \
             that many, or correct the sizes or strides",
            self.len
        );
        Err(invalid(Reason::SIZE, field, message))
    }
}

/// "(2, 4, 5)".
fn list(dims: &[usize]) -> String {
    let dims: Vec<String> = dims.iter().map(usize::to_string).collect();
    format!("({})", dims.join(", "))
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
