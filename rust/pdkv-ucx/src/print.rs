//! What a C function prints, as a string: a stream into memory in place of a file.

use std::ffi::{c_char, c_void};

/// Calls `print` with a stream and returns what it wrote; `None` when the C library has no memory for one.
pub(crate) fn printed(print: impl FnOnce(*mut libc::FILE)) -> Option<String> {
    let mut buffer: *mut c_char = std::ptr::null_mut();
    let mut len = 0_usize;
    // SAFETY: both are ours and outlive the stream, which is closed below.
    let stream = unsafe { libc::open_memstream(&raw mut buffer, &raw mut len) };
    if stream.is_null() {
        return None;
    }
    print(stream);
    // SAFETY: the stream opened above, closed once; this completes `buffer` and `len`.
    unsafe { libc::fclose(stream) };
    if buffer.is_null() {
        return None;
    }
    // SAFETY: after the close `buffer` holds `len` bytes, which nobody else knows of.
    let bytes = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), len) };
    let text = String::from_utf8_lossy(bytes).into_owned();
    // SAFETY: allocated by the C library for us, and no longer referenced.
    unsafe { libc::free(buffer.cast::<c_void>()) };
    Some(text)
}
