//! Arrays with the indices (batch, seq, head, dim): q, k, v, o and their gradients.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use flashattn_sys::flashattn_tensor;

use crate::array::{product, reach, Memory};
use crate::error::{int64, invalid, Result};
use crate::Reason;

/// The sizes of a [`View`], in the order of packed memory.
///
/// Made by `into()` from `[batch, seq, heads, dim]`, from `[tokens, heads, dim]` for VARLEN layouts,
/// where all sequences stand in one row of tokens, and from `[pages, page_size, heads, dim]` for a
/// pool of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// Sequences; pages of a pool; 1 for VARLEN.
    pub batch: usize,
    /// Tokens of each.
    pub seq: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a head.
    pub dim: usize,
    /// Whether there is no batch index.
    pub varlen: bool,
}

impl Dims {
    fn sizes(&self) -> [usize; 4] {
        [self.batch, self.seq, self.heads, self.dim]
    }
}

impl fmt::Display for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { batch, seq, heads, dim, varlen } = self;
        if *varlen {
            write!(f, "(tokens = {seq}, heads = {heads}, dim = {dim})")
        } else {
            write!(f, "(batch = {batch}, seq = {seq}, heads = {heads}, dim = {dim})")
        }
    }
}

impl From<[usize; 4]> for Dims {
    fn from([batch, seq, heads, dim]: [usize; 4]) -> Self {
        Self { batch, seq, heads, dim, varlen: false }
    }
}

impl From<[usize; 3]> for Dims {
    fn from([seq, heads, dim]: [usize; 3]) -> Self {
        Self { batch: 1, seq, heads, dim, varlen: true }
    }
}

/// Elements from one sequence, head, token or row to the next, as in the header's `flashattn_tensor`.
/// The elements of the last index are contiguous.
///
/// A stride of zero repeats what it steps over, in inputs only. For VARLEN views `batch` is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Strides {
    pub batch: usize,
    pub head: usize,
    pub seq: usize,
}

impl Strides {
    /// Of (batch, seq, head, dim) without gaps.
    pub fn packed(dims: impl Into<Dims>) -> Self {
        let dims = dims.into();
        // Overflow: View refuses the dims, whatever the strides.
        let seq = dims.heads.saturating_mul(dims.dim);
        Self {
            batch: if dims.varlen { 0 } else { seq.saturating_mul(dims.seq) },
            head: dims.dim,
            seq,
        }
    }

    /// Of (batch, head, seq, dim) without gaps.
    pub fn bhsd(dims: impl Into<Dims>) -> Self {
        let dims = dims.into();
        let head = dims.seq.saturating_mul(dims.dim);
        Self {
            batch: if dims.varlen { 0 } else { head.saturating_mul(dims.heads) },
            head,
            seq: dims.dim,
        }
    }

    fn list(&self) -> [usize; 4] {
        [self.batch, self.seq, self.head, 1]
    }
}

impl fmt::Display for Strides {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "(batch: {}, seq: {}, head: {})", self.batch, self.seq, self.head)
    }
}

#[derive(Clone, Copy, Debug)]
struct Raw {
    address: u64,
    dims: Dims,
    strides: Strides,
    memory: Memory,
}

impl Raw {
    /// Checks that all elements lie within `len`.
    fn new(address: u64, len: usize, dims: Dims, strides: Strides) -> Result<Self> {
        let needed = reach(&dims.sizes(), &strides.list());
        if !needed.is_some_and(|n| n <= len) {
            let needed = needed.map_or("more than 2^64".to_string(), |n| n.to_string());
            let message = format!(
                "the slice holds {len} elements, but {dims} with strides {strides} needs {needed}; give a \
                 longer one, or correct sizes or strides"
            );
            return Err(invalid(Reason::SIZE, "", message));
        }
        Self::checked(address, dims, strides, Memory::Host)
    }

    fn checked(address: u64, dims: Dims, strides: Strides, memory: Memory) -> Result<Self> {
        for (stride, field) in [
            (strides.batch, "stride_batch"),
            (strides.head, "stride_head"),
            (strides.seq, "stride_seq"),
        ] {
            int64(stride, field)?;
        }
        if dims.varlen && strides.batch != 0 {
            let message = format!(
                "stride_batch = {}, but {dims} has no batch index; set it to 0",
                strides.batch
            );
            return Err(invalid(Reason::STRIDE, "stride_batch", message));
        }
        Ok(Self { address, dims, strides, memory })
    }

    /// Refuses strides with which two indices could share an element.
    fn check_apart(self) -> Result<Self> {
        let sizes = self.dims.sizes();
        let mut order = [3, 2, 1, 0];
        let list = self.strides.list();
        order.sort_by_key(|&d| list[d]);
        let mut filled = 1usize;
        for d in order.into_iter().filter(|&d| sizes[d] > 1) {
            if list[d] < filled && product(&sizes) != Some(0) {
                let message = format!(
                    "a stride of {} is below {filled}, the elements that one step passes, so that \
                     results would overlap in {} with strides {}; give larger strides",
                    list[d], self.dims, self.strides
                );
                return Err(invalid(Reason::STRIDE, "", message));
            }
            filled = filled.saturating_add(list[d].saturating_mul(sizes[d] - 1));
        }
        Ok(self)
    }

    fn heads(mut self, heads: Range<usize>, element: usize) -> Result<Self> {
        if heads.start > heads.end || heads.end > self.dims.heads {
            let message = format!(
                "heads {heads:?} are not all in {}; give a range within 0..{}",
                self.dims, self.dims.heads
            );
            return Err(invalid(Reason::SIZE, "", message));
        }
        let sizes = self.dims.sizes();
        self.dims.heads = heads.len();
        // Within the array, so that nothing overflows; an empty part keeps the address.
        if product(&self.dims.sizes()) != Some(0) && product(&sizes) != Some(0) {
            self.address += (heads.start * self.strides.head * element) as u64;
        }
        Ok(self)
    }

    fn tensor(&self, memory: Memory, field: &str) -> Result<flashattn_tensor> {
        self.memory.expect(memory, field)?;
        Ok(flashattn_tensor {
            data: self.address as *mut _,
            stride_batch: int64(self.strides.batch, field)?,
            stride_head: int64(self.strides.head, field)?,
            stride_seq: int64(self.strides.seq, field)?,
        })
    }
}

/// Refuses a packed slice that is not filled by its sizes.
fn check_packed(len: usize, dims: &Dims) -> Result<()> {
    let wanted = product(&dims.sizes());
    if wanted == Some(len) {
        return Ok(());
    }
    let wanted = wanted.map_or("more than 2^64".to_string(), |n| n.to_string());
    let message = format!(
        "the slice holds {len} elements, but {dims} are {wanted}; correct the sizes, or give the part of \
         the slice with `strided`"
    );
    Err(invalid(Reason::SIZE, "", message))
}

/// An array to read, in a slice or in a GPU's memory.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, T> {
    raw: Raw,
    _lifetime: PhantomData<&'a [T]>,
}

/// An array to write, in a slice or in a GPU's memory. No two of its elements share memory, and it
/// borrows them all: what is written cannot be read or written through anything else.
///
/// ```compile_fail,E0502
/// # use flashattn::{DescBuilder, Dtype, Inputs, View, ViewMut, Workspace};
/// let mut x = vec![0f32; 8];
/// let plan = DescBuilder::new(Dtype::F32, 1, 8).build()?;
/// let view = View::new(&x, [1, 1, 1, 8])?;
/// let in_place = ViewMut::new(&mut x, [1, 1, 1, 8])?; // x is borrowed by view
/// plan.forward(&Inputs::new(view, view, view), in_place, &mut Workspace::new())?;
/// # Ok::<(), flashattn::Error>(())
/// ```
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    raw: Raw,
    _lifetime: PhantomData<&'a mut [T]>,
}

impl<'a, T> View<'a, T> {
    /// A whole slice, packed as `dims` says.
    ///
    /// # Errors
    ///
    /// SIZE: the slice's length is not the product of the sizes.
    pub fn new(data: &'a [T], dims: impl Into<Dims>) -> Result<Self> {
        let dims = dims.into();
        check_packed(data.len(), &dims)?;
        Self::strided(data, dims, Strides::packed(dims))
    }

    /// Part of a slice, or one in another order: BHSD, packed QKV, a broadcast.
    ///
    /// # Errors
    ///
    /// SIZE: an element lies past the slice. STRIDE: a VARLEN array with a batch stride.
    pub fn strided(data: &'a [T], dims: impl Into<Dims>, strides: Strides) -> Result<Self> {
        let raw = Raw::new(data.as_ptr() as u64, data.len(), dims.into(), strides)?;
        Ok(Self { raw, _lifetime: PhantomData })
    }

    /// An array in a GPU's memory.
    ///
    /// # Errors
    ///
    /// STRIDE: a VARLEN array with a batch stride.
    ///
    /// # Safety
    ///
    /// All elements that `dims` and `strides` reach from `address` are initialised memory of the
    /// device of every plan that gets this, valid until the work enqueued with it is done.
    pub unsafe fn from_device_ptr(
        address: u64,
        dims: impl Into<Dims>,
        strides: Strides,
    ) -> Result<Self> {
        Ok(Self {
            raw: Raw::checked(address, dims.into(), strides, Memory::Device)?,
            _lifetime: PhantomData,
        })
    }

    /// Some of the heads: of a packed QKV array with heads q, k, v in turn, say.
    ///
    /// # Errors
    ///
    /// SIZE: there are not as many heads.
    pub fn heads(self, heads: Range<usize>) -> Result<Self> {
        Ok(Self { raw: self.raw.heads(heads, std::mem::size_of::<T>())?, _lifetime: PhantomData })
    }

    /// The sizes.
    pub fn dims(&self) -> Dims {
        self.raw.dims
    }

    /// The strides.
    pub fn strides(&self) -> Strides {
        self.raw.strides
    }

    /// The same memory, of whose elements the caller knows the type.
    pub(crate) fn cast<U>(self) -> View<'a, U> {
        View { raw: self.raw, _lifetime: PhantomData }
    }

    pub(crate) fn tensor(&self, memory: Memory, field: &str) -> Result<flashattn_tensor> {
        self.raw.tensor(memory, field)
    }
}

impl<'a, T> ViewMut<'a, T> {
    /// A whole slice, packed as `dims` says.
    ///
    /// # Errors
    ///
    /// SIZE: the slice's length is not the product of the sizes.
    pub fn new(data: &'a mut [T], dims: impl Into<Dims>) -> Result<Self> {
        let dims = dims.into();
        check_packed(data.len(), &dims)?;
        Self::strided(data, dims, Strides::packed(dims))
    }

    /// Part of a slice, or one in another order.
    ///
    /// # Errors
    ///
    /// SIZE: an element lies past the slice. STRIDE: elements would share memory.
    pub fn strided(data: &'a mut [T], dims: impl Into<Dims>, strides: Strides) -> Result<Self> {
        let raw = Raw::new(data.as_mut_ptr() as u64, data.len(), dims.into(), strides)?;
        Ok(Self { raw: raw.check_apart()?, _lifetime: PhantomData })
    }

    /// An array in a GPU's memory.
    ///
    /// # Errors
    ///
    /// STRIDE: elements would share memory.
    ///
    /// # Safety
    ///
    /// All elements that `dims` and `strides` reach from `address` are memory of the device of every
    /// plan that gets this, used by nothing else until the work enqueued with it is done.
    pub unsafe fn from_device_ptr(
        address: u64,
        dims: impl Into<Dims>,
        strides: Strides,
    ) -> Result<Self> {
        Ok(Self {
            raw: Raw::checked(address, dims.into(), strides, Memory::Device)?.check_apart()?,
            _lifetime: PhantomData,
        })
    }

    /// The heads before and from `at`, as two arrays to write at once.
    ///
    /// # Errors
    ///
    /// SIZE: there are not as many heads.
    pub fn split_heads(self, at: usize) -> Result<(Self, Self)> {
        let part = |heads| -> Result<Self> {
            Ok(Self {
                raw: self.raw.heads(heads, std::mem::size_of::<T>())?,
                _lifetime: PhantomData,
            })
        };
        // Disjoint: no two indices of a ViewMut share an element.
        Ok((part(0..at)?, part(at..self.raw.dims.heads)?))
    }

    /// The same array, borrowed for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut { raw: self.raw, _lifetime: PhantomData }
    }

    /// The same array, to read.
    pub fn as_view(&self) -> View<'_, T> {
        View { raw: self.raw, _lifetime: PhantomData }
    }

    /// The sizes.
    pub fn dims(&self) -> Dims {
        self.raw.dims
    }

    /// The strides.
    pub fn strides(&self) -> Strides {
        self.raw.strides
    }

    pub(crate) fn tensor(&mut self, memory: Memory, field: &str) -> Result<flashattn_tensor> {
        self.raw.tensor(memory, field)
    }
}
