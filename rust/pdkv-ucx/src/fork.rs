//! Whether this process is a fork of one that used UCX, in which nothing of UCX may be touched again.
//!
//! A child has the parent's queues, sockets and device mappings but none of its threads. The flag is set by
//! `pthread_atfork`; every entry asks it, and so does every drop.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use pdkv_core::{Error, ErrorKind, Result};

static FORKED: AtomicBool = AtomicBool::new(false);
static WATCH: Once = Once::new();

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Starts to watch; called by whatever first brings UCX state into the process.
pub(crate) fn watch() {
    WATCH.call_once(|| {
        // SAFETY: the child's handler only stores to an atomic, which is allowed after fork.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

/// True in a child of a process that had used UCX.
pub(crate) fn forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// # Errors
/// `Unsupported` in a child of a process that had used UCX.
#[inline]
pub(crate) fn check(operation: &'static str) -> Result<()> {
    if forked() { Err(refusal(operation)) } else { Ok(()) }
}

#[cold]
fn refusal(operation: &'static str) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        operation,
        "this process was forked from one that had used UCX, whose connections and memory can't be used by both",
    )
    .with_hint("start workers with `spawn` or `forkserver`, or fork before the first transfer over UCX")
}
