//! The arrays of a structure of arguments, by the header's table.

use std::marker::PhantomData;

use flashattn_sys::table::{self, Arguments};

use crate::array::Raw;
use crate::error::{invalid, Result};
use crate::plan::Resolved;
use crate::Reason;

/// The arrays of a structure of arguments, by their place in the header's table.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Arrays<A> {
    list: [Option<Raw>; table::MOST],
    _of: PhantomData<fn(A)>,
}

impl<A: Arguments> Arrays<A> {
    fn place(name: &str) -> Option<usize> {
        A::ARRAYS.iter().position(|field| field.name == name)
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Raw> {
        self.list[Self::place(name).expect("a field of the header")].as_ref()
    }

    pub(crate) fn put(&mut self, name: &str, array: Option<Raw>) {
        self.list[Self::place(name).expect("a field of the header")] = array;
    }

    pub(crate) fn set(&mut self, index: usize, array: Raw) {
        self.list[index] = Some(array);
    }

    /// The rows of a page table, which may be longer than a call needs them, get a stride.
    pub(crate) fn stride_pages(&mut self, batch: usize) -> Result<()> {
        if let Some(table) = self.get("page_table") {
            let (_, stride) = table.rows(batch, "page_table")?;
            self.put("page_table", Some(table.with_row_stride(stride)));
        }
        Ok(())
    }

    /// The same arrays as those of another structure, which has fields of their names.
    pub(crate) fn of<B: Arguments>(&self, call: &str) -> Result<Arrays<B>> {
        let mut same = Arrays { list: Default::default(), _of: PhantomData };
        for (field, array) in A::ARRAYS.iter().zip(&self.list).filter(|(_, array)| array.is_some())
        {
            let Some(place) = Arrays::<B>::place(field.name) else {
                let message =
                    format!("{} is given, but {call} has no use for it; leave it out", field.name);
                return Err(invalid(Reason::NULL_POINTER, field.name, message));
            };
            same.list[place] = *array;
        }
        Ok(same)
    }

    /// Checks all arrays and writes them where the library finds them; the sizes are there already.
    pub(crate) fn lower(&self, plan: &Resolved, args: &mut A) -> Result<()> {
        let sizes = args.sizes(&plan.desc);
        for (field, array) in A::ARRAYS.iter().zip(&self.list) {
            if let Some(array) = array {
                let (data, strides) = array.lower(field, plan, &sizes)?;
                (field.set)(args, data, strides);
            }
        }
        Ok(())
    }
}

/// A method for each array of a role of the header.
macro_rules! methods {
    ($array:ident, $($entry:tt)*) => {
        $(crate::arrays::methods!(@ $array $entry);)*
    };
    (@ $array:ident { $index:literal, $name:ident, any, $doc:literal }) => {
        #[doc = $doc]
        pub fn $name<B: crate::Scalar>(mut self, $name: impl Into<$array<'a, B>>) -> Self {
            self.arrays.set($index, $name.into().typed());
            self
        }
    };
    (@ $array:ident { $index:literal, $name:ident, $type:tt, $doc:literal }) => {
        #[doc = $doc]
        pub fn $name(mut self, $name: impl Into<$array<'a, $type>>) -> Self {
            self.arrays.set($index, $name.into().raw());
            self
        }
    };
}
pub(crate) use methods;
