//! System-call results as pdkv errors.

use pdkv_core::{Error, ErrorKind};
use rustix::io::Errno;

/// The error of the libc call that just failed on this thread.
pub(crate) fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// An error whose source is the system's own text.
pub(crate) fn os_error(kind: ErrorKind, operation: &'static str, message: impl Into<String>, errno: Errno) -> Error {
    Error::new(kind, operation, message).with_source(std::io::Error::from(errno))
}

/// Bytes in a page.
pub(crate) fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}
