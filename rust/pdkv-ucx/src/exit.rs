//! What has to happen when the process exits, before UCX's own destructors run.
//!
//! They take its tables apart without asking whether threads are inside; so whoever has such threads says
//! here how to end them. Hooks run on `exit` and on the return of `main`, not when the process is killed.

use std::sync::{Mutex, Once, PoisonError};

use crate::{fork, guard};

static HOOKS: Mutex<Vec<fn()>> = Mutex::new(Vec::new());
static WATCH: Once = Once::new();

extern "C" fn exiting() {
    // A child has no thread but this one, and locks that nobody will open.
    if fork::forked() {
        return;
    }
    let hooks = std::mem::take(&mut *HOOKS.lock().unwrap_or_else(PoisonError::into_inner));
    for hook in hooks {
        guard::callback((), hook);
    }
}

/// Has `hook` called once before UCX is taken apart: it must end the threads that use UCX, and may take a
/// moment to wait for them. To be called after a [`Library`](crate::Library) was opened, since what is
/// registered later runs earlier; naming a hook twice does nothing.
pub fn before_exit(hook: fn()) {
    fork::watch();
    let mut hooks = HOOKS.lock().unwrap_or_else(PoisonError::into_inner);
    if !hooks.iter().any(|known| std::ptr::fn_addr_eq(*known, hook)) {
        hooks.push(hook);
    }
    drop(hooks);
    WATCH.call_once(|| {
        // SAFETY: the handler is a function of this library, which is never unloaded while UCX is used, and
        // it neither panics nor unwinds.
        unsafe { libc::atexit(exiting) };
    });
}
