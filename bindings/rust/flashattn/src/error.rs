//! What a refused or failed call says.

use std::ffi::{c_char, CStr};
use std::fmt;

use flashattn_sys as sys;

use crate::{Reason, Status};

/// The result of everything that can fail here.
pub type Result<T> = std::result::Result<T, Error>;

/// A call was refused or failed. It changed nothing: arguments are checked before anything is written.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Error {
    /// What kind of failure.
    pub status: Status,
    /// Why; [`Reason::NONE`] where there is nothing more to say.
    pub reason: Reason,
    /// The structure member it is about, as the C header names it: `dim_qk`, `inputs.q.stride_seq`.
    /// Empty when there is none.
    pub field: String,
    /// One sentence with field, value, limit, device and remedy.
    pub sentence: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

impl std::error::Error for Error {}

/// What the library would refuse if it could see it: lengths of slices, mostly.
pub(crate) fn invalid(reason: Reason, field: &str, sentence: impl Into<String>) -> Error {
    Error {
        status: Status::ERROR_INVALID_ARGUMENT,
        reason,
        field: field.to_string(),
        sentence: sentence.into(),
    }
}

/// A size of the caller as the header's 32-bit field.
pub(crate) fn int32(value: usize, field: &str) -> Result<i32> {
    i32::try_from(value).map_err(|_| {
        let sentence = format!("{field} = {value} is above 2^31 - 1, the range of its field");
        invalid(Reason::SIZE, field, sentence)
    })
}

/// A size of the caller as a 64-bit field.
pub(crate) fn int64(value: usize, field: &str) -> Result<i64> {
    i64::try_from(value).map_err(|_| {
        let sentence = format!("{field} = {value} is above 2^63 - 1, the range of its field");
        invalid(Reason::SIZE, field, sentence)
    })
}

/// The text behind a pointer of the library; empty for NULL.
///
/// # Safety
///
/// `text` is NULL or ends in a zero byte.
pub(crate) unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
}

/// The status of a call as a `Result`. To be asked on the thread of that call, right after it.
pub(crate) fn check(status: i32) -> Result<()> {
    let status = Status(status);
    if status == Status::OK {
        return Ok(());
    }
    let mut reason = 0;
    let mut field = std::ptr::null();
    // SAFETY: both are out-parameters; the texts live until this thread's next failing call.
    let (field, sentence) = unsafe {
        let sentence = sys::flashattn_last_error(&mut reason, &mut field);
        (text(field), text(sentence))
    };
    Err(Error { status, reason: Reason(reason), field, sentence })
}
