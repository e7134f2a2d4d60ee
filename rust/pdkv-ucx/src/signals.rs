//! What the process does on signals, written down before UCX is loaded and put back afterwards.
//!
//! The constructors of libucs take over SIGHUP (to wait for a debugger) and, in some builds, the fault
//! signals (to print a backtrace). A library must not do that to the program it serves.

use std::ffi::c_int;
use std::mem::MaybeUninit;

/// The environment variables by which a user asks for UCX's handlers; then they stay.
const WISHES: [&str; 3] = ["UCX_HANDLE_ERRORS", "UCX_ERROR_SIGNALS", "UCX_DEBUG_SIGNO"];

/// The dispositions at one moment.
pub(crate) struct Handlers(Vec<(c_int, libc::sigaction)>);

impl Handlers {
    /// Reads them all.
    pub(crate) fn read() -> Self {
        Self((1..=64).filter_map(|signal| Some((signal, current(signal)?))).collect())
    }

    /// Puts back those that changed, unless the user asked UCX for its handlers.
    pub(crate) fn restore(&self) {
        if WISHES.iter().any(|name| std::env::var_os(name).is_some()) {
            return;
        }
        for (signal, before) in &self.0 {
            let changed = current(*signal).is_some_and(|now| now.sa_sigaction != before.sa_sigaction);
            if changed {
                // SAFETY: a disposition that this very call of the kernel returned a moment ago.
                unsafe { libc::sigaction(*signal, before, std::ptr::null_mut()) };
            }
        }
    }
}

fn current(signal: c_int) -> Option<libc::sigaction> {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: asks only; the struct is ours and filled on success.
    let status = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    if status != 0 {
        return None;
    }
    // SAFETY: filled by the call above, and zeroed before it.
    Some(unsafe { action.assume_init() })
}
