//! Where UCX's log lines go: to `tracing`, under the target `ucx`, and never to the program's standard output.
//!
//! The last warning or error of a thread is kept, since UCX explains a failing call only there. A copy of
//! UCX that others had loaded keeps the logging they gave it.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_uint, c_void};

use crate::abi::Ucs;
use crate::abi::constants::*;
use crate::guard;

/// The longest line kept; UCX's own buffer is 2 KiB.
const LINE_BYTES: usize = 2048;

thread_local! {
    static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
}

unsafe extern "C" {
    // `ap` is a `va_list`. Both on x86-64 and on aarch64 a function that receives one has a pointer to it in
    // the argument's place (an array there, a struct passed by reference here), and so passes it on.
    fn vsnprintf(buffer: *mut c_char, size: usize, format: *const c_char, ap: *mut c_void) -> i32;
}

/// Routes the log of a library that this process loaded for itself.
pub(crate) fn route(ucs: &Ucs) {
    if let Some(push) = ucs.ucs_log_push_handler {
        // SAFETY: the handler has the type the library expects and lives in this binary for ever.
        unsafe { push(line) };
    }
}

/// Takes the last warning or error that UCX logged on this thread.
pub(crate) fn take_last() -> Option<String> {
    LAST.try_with(|last| last.borrow_mut().take()).ok().flatten()
}

unsafe extern "C" fn line(
    _file: *const c_char,
    _line: c_uint,
    _function: *const c_char,
    level: c_uint,
    _component: *const c_void,
    format: *const c_char,
    ap: *mut c_void,
) -> c_uint {
    let mut buffer = [0_u8; LINE_BYTES];
    // SAFETY: a buffer of that size, and the format and arguments that UCX gave for each other.
    unsafe { vsnprintf(buffer.as_mut_ptr().cast(), LINE_BYTES, format, ap) };
    guard::callback(UCS_LOG_FUNC_RC_STOP, || {
        let text = CStr::from_bytes_until_nul(&buffer)
            .map(CStr::to_string_lossy)
            .unwrap_or_default();
        emit(level, &text);
        // What is fatal ends the process in the next moment: let UCX say it too.
        if level == UCS_LOG_LEVEL_FATAL {
            UCS_LOG_FUNC_RC_CONTINUE
        } else {
            UCS_LOG_FUNC_RC_STOP
        }
    })
}

fn emit(level: u32, text: &str) {
    if level <= UCS_LOG_LEVEL_WARN {
        // UCX logs from destructors, too, when the thread's own things are gone.
        let _ = LAST.try_with(|last| *last.borrow_mut() = Some(text.to_owned()));
    }
    match level {
        UCS_LOG_LEVEL_FATAL | UCS_LOG_LEVEL_ERROR => tracing::error!(target: "ucx", "{text}"),
        UCS_LOG_LEVEL_WARN => tracing::warn!(target: "ucx", "{text}"),
        UCS_LOG_LEVEL_DIAG | UCS_LOG_LEVEL_INFO => tracing::info!(target: "ucx", "{text}"),
        UCS_LOG_LEVEL_DEBUG => tracing::debug!(target: "ucx", "{text}"),
        _ => tracing::trace!(target: "ucx", "{text}"),
    }
}
