//! The engine's monotonic clock, the one place where real time enters, and a flag to wait for.

use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// Time since the engine started, which is what every state machine in `pdkv-core` speaks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    start: Instant,
}

impl Clock {
    pub(crate) fn start() -> Self {
        Self { start: Instant::now() }
    }

    pub(crate) fn now(&self) -> Duration {
        self.start.elapsed()
    }
}

/// Set once, waited for by whoever needs it.
#[derive(Default)]
pub(crate) struct Flag {
    set: Mutex<bool>,
    changed: Condvar,
}

impl Flag {
    pub(crate) fn set(&self) {
        *self.set.lock().expect("no holder panics") = true;
        self.changed.notify_all();
    }

    /// Waits until it is set, for `limit` at most.
    pub(crate) fn wait(&self, limit: Duration) {
        let guard = self.set.lock().expect("no holder panics");
        drop(
            self.changed
                .wait_timeout_while(guard, limit, |set| !*set)
                .expect("no holder panics"),
        );
    }
}

/// As a number that an atomic holds.
pub(crate) fn nanos(at: Duration) -> u64 {
    u64::try_from(at.as_nanos()).unwrap_or(u64::MAX)
}
