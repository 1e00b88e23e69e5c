//! The library as a whole: version, devices, log.

use std::ffi::{c_char, c_void, CStr};

use flashattn_sys as sys;

use crate::error::{check, int32, text, Result};
use crate::{Device, LogLevel};

/// The version of the library that runs: "0.1.0".
pub fn version() -> String {
    // SAFETY: a text that lives as long as the process.
    unsafe { text(sys::flashattn_version_string()) }
}

/// One line: version, compiler, kernel families and instruction sets of the library.
pub fn build_info() -> String {
    // SAFETY: a text that lives as long as the process.
    unsafe { text(sys::flashattn_build_info()) }
}

/// How many devices of a kind there are; 0 where the library or the machine has none.
///
/// # Errors
///
/// INVALID_ARGUMENT: unknown kind.
pub fn device_count(device: Device) -> Result<usize> {
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
    /// CPU: threads. GPU: streaming multiprocessors.
    pub units: i32,
    /// GPU: 90 for 9.0. CPU: 0.
    pub compute_capability: i32,
    /// Bytes of fast memory next to a unit.
    pub local_memory: i32,
    /// Bytes of memory.
    pub memory: i64,
}

/// Describes a device; they are counted from 0.
///
/// # Errors
///
/// INVALID_ARGUMENT, UNSUPPORTED: there is no such device.
pub fn device_info(device: Device, index: usize) -> Result<DeviceInfo> {
    let mut c = sys::flashattn_device_properties::default();
    let index = int32(index, "index")?;
    // SAFETY: struct_size is set; the texts live as long as the process.
    unsafe {
        check(sys::flashattn_device_info(device.0, index, &mut c))?;
        Ok(DeviceInfo {
            name: text(c.name),
            isa: text(c.isa),
            units: c.units,
            compute_capability: c.compute_capability,
            local_memory: c.local_memory,
            memory: c.memory,
        })
    }
}

/// Sends the library's log lines to a function, for the whole process; `None`: nowhere. It is called
/// from any thread that is inside a library call, and must not call the library.
///
/// # Errors
///
/// INVALID_ARGUMENT: unknown level.
pub fn set_log(level: LogLevel, sink: Option<fn(LogLevel, &str)>) -> Result<()> {
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
