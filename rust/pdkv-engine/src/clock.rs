//! The engine's monotonic clock: the one place where real time enters.

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
