//! The library as a whole: version, devices, log.

use std::ffi::{c_char, c_void, CStr};

use flashattn_sys as sys;

use crate::error::{check, int32, text, Error, Result};
use crate::{Device, LogLevel, Reason, Status};

/// The version of the library that runs: "0.2.0".
pub fn version() -> String {
    // SAFETY: a text that lives as long as the process.
    unsafe { text(sys::flashattn_version_string()) }
}

/// One line: version, compiler, instruction sets and GPU architectures of the library.
pub fn build_info() -> String {
    // SAFETY: a text that lives as long as the process.
    unsafe { text(sys::flashattn_build_info()) }
}

/// Refuses a library that these crates are not made for. Asked before every first step: making a plan,
/// describing a device, switching on the log.
pub(crate) fn check_version() -> Result<()> {
    // SAFETY: takes nothing.
    compatible(unsafe { sys::flashattn_version() }, sys::HEADER_VERSION)
}

/// Up to version 1 a minor version may change the ABI; within one, structures only grow.
fn compatible(library: i32, header: i32) -> Result<()> {
    if library / 100 == header / 100 {
        return Ok(());
    }
    let dotted = |n: i32| format!("{}.{}.{}", n / 10000, n / 100 % 100, n % 100);
    let message = format!(
        "libflashattn {} is loaded, but this crate is made for {}; install the two together",
        dotted(library),
        dotted(header)
    );
    let (status, reason) = (Status::ERROR_VERSION, Reason::NONE);
    Err(Error { status, reason, field: String::new(), message })
}

/// How many devices of a kind there are; 0 where the library or the machine has none.
///
/// # Errors
///
/// INVALID_ARGUMENT: unknown kind. VERSION: a library of another version.
pub fn device_count(device: Device) -> Result<usize> {
    check_version()?;
    let mut count = 0;
    // SAFETY: an out-parameter.
    check(unsafe { sys::flashattn_device_count(device.0, &mut count) })?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// A device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// "AMD EPYC 9354", "NVIDIA H200".
    pub name: String,
    /// The best kernels the library has for it: "avx512_bf16", "sm90".
    pub isa: String,
    /// GPU: streaming multiprocessors. CPU: 0.
    pub multiprocessors: i32,
    /// CPU: threads that a plan uses unless told otherwise. GPU: 0.
    pub threads: i32,
    /// GPU: 90 for 9.0. CPU: 0.
    pub compute_capability: i32,
    /// GPU: bytes of shared memory that a CTA may use. CPU: 0.
    pub shared_memory: i32,
    /// Bytes of L2 cache. CPU: of a core.
    pub l2_cache: i32,
    /// Bytes of memory.
    pub memory: i64,
}

/// Describes a device; they are counted from 0.
///
/// # Errors
///
/// INVALID_ARGUMENT, UNSUPPORTED: there is no such device. VERSION: a library of another version.
pub fn device_info(device: Device, index: usize) -> Result<DeviceInfo> {
    check_version()?;
    let mut c = sys::flashattn_device_properties::default();
    let index = int32(index, "index")?;
    // SAFETY: struct_size is set; the texts live as long as the process.
    unsafe {
        check(sys::flashattn_device_info(device.0, index, &mut c))?;
        Ok(DeviceInfo {
            name: text(c.name),
            isa: text(c.isa),
            multiprocessors: c.multiprocessors,
            threads: c.threads,
            compute_capability: c.compute_capability,
            shared_memory: c.shared_memory,
            l2_cache: c.l2_cache,
            memory: c.memory,
        })
    }
}

/// Sends the library's log lines to a function, for the whole process; `None`: nowhere. It is called
/// from any thread that is inside a library call, and must not call the library.
///
/// # Errors
///
/// INVALID_ARGUMENT: unknown level. VERSION: a library of another version.
pub fn set_log(level: LogLevel, sink: Option<fn(LogLevel, &str)>) -> Result<()> {
    check_version()?;
    let call = sink.map(|_| forward_line as unsafe extern "C" fn(*mut c_void, i32, *const c_char));
    let user = sink.map_or(std::ptr::null_mut(), |sink| sink as *mut c_void);
    // SAFETY: forward_line turns user back into the function that it was.
    check(unsafe { sys::flashattn_set_log(level.0, call, user) })
}

unsafe extern "C" fn forward_line(user: *mut c_void, level: i32, message: *const c_char) {
    // SAFETY: set_log gave this very pointer; the message ends in a zero byte.
    let (sink, line) = unsafe {
        let sink = std::mem::transmute::<*mut c_void, fn(LogLevel, &str)>(user);
        (sink, CStr::from_ptr(message).to_string_lossy())
    };
    // A panic must not unwind into C.
    let _ = std::panic::catch_unwind(|| sink(LogLevel(level), &line));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_of_another_minor_version_are_refused() {
        assert!(check_version().is_ok());
        assert!(compatible(299, 200).is_ok() && compatible(200, 201).is_ok());
        for other in [0, 100, 199, 300, 10200] {
            let error = compatible(other, 200).unwrap_err();
            assert_eq!(error.status, Status::ERROR_VERSION);
            assert!(error.message.contains("install the two together"), "{error}");
        }
        assert!(compatible(10305, 200).unwrap_err().message.contains("libflashattn 1.3.5 is"));
    }
}
