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
    /// The structure member it is about, as the C header names it: `dim_qk`, `q.stride_seq`. Empty
    /// when there is none.
    pub field: String,
    /// Field, value, limit, device and remedy, in words.
    pub message: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl Error {
    /// For bridges to other libraries' arrays: a refusal, INVALID_ARGUMENT, of what the library cannot
    /// see. The message names value, limit and remedy.
    pub fn invalid(reason: Reason, field: &str, message: impl Into<String>) -> Self {
        Self {
            status: Status::ERROR_INVALID_ARGUMENT,
            reason,
            field: field.to_string(),
            message: message.into(),
        }
    }
}

/// What the library would refuse if it could see it: lengths of slices, mostly.
pub(crate) fn invalid(reason: Reason, field: &str, message: impl Into<String>) -> Error {
    Error::invalid(reason, field, message)
}

/// A size of the caller as the header's 32-bit field.
pub(crate) fn int32(value: usize, field: &str) -> Result<i32> {
    i32::try_from(value).map_err(|_| {
        let message = format!("{field} = {value} is above 2^31 - 1, the range of its field");
        invalid(Reason::SIZE, field, message)
    })
}

/// A size of the caller as a 64-bit field.
pub(crate) fn int64(value: usize, field: &str) -> Result<i64> {
    i64::try_from(value).map_err(|_| {
        let message = format!("{field} = {value} is above 2^63 - 1, the range of its field");
        invalid(Reason::SIZE, field, message)
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

/// The text of an array of the library, up to its zero byte.
fn bounded(text: &[c_char]) -> String {
    let bytes: Vec<u8> = text.iter().take_while(|&&c| c != 0).map(|&c| c as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Runs a function of the library that fills in an error of the caller's.
pub(crate) fn check_with(call: impl FnOnce(*mut sys::flashattn_error) -> i32) -> Result<()> {
    let mut error = sys::flashattn_error::default();
    let status = Status(call(&mut error));
    if status == Status::OK {
        return Ok(());
    }
    let (reason, field, message) =
        (Reason(error.reason), bounded(&error.field), bounded(&error.message));
    Err(Error { status, reason, field, message })
}

/// The status of a function that takes no error of the caller's. To be asked on the thread of that
/// call, right after it.
pub(crate) fn check(status: i32) -> Result<()> {
    let status = Status(status);
    if status == Status::OK {
        return Ok(());
    }
    let mut reason = 0;
    let mut field = std::ptr::null();
    // SAFETY: both are out-parameters; the texts live until this thread's next failing call.
    let (field, message) = unsafe {
        let message = sys::flashattn_last_error(&mut reason, &mut field);
        (text(field), text(message))
    };
    Err(Error { status, reason: Reason(reason), field, message })
}
