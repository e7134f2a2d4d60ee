//! How long a peer has kept a stage waiting that others want.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::stream::Stop;

/// The most that one look counts: a process that was stopped, or had no processor, has not been kept waiting by anybody.
const STEP: Duration = Duration::from_millis(100);

/// Runs while it is the peer that a stage waits for, and somebody else for the stage.
#[derive(Debug, Default)]
pub struct PeerClock {
    running: Mutex<Option<Running>>,
    over: AtomicBool,
}

#[derive(Debug)]
struct Running {
    looked: Instant,
    waited: Duration,
}

impl PeerClock {
    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on it is the peer's time.
    pub fn start(&self) {
        let mut running = self.running();
        self.over.store(false, Ordering::Relaxed);
        *running = Some(Running {
            looked: Instant::now(),
            waited: Duration::ZERO,
        });
    }

    /// It is ours again.
    pub fn stop(&self) {
        *self.running() = None;
    }

    /// Somebody waits, and looks now and then. Ends the peer's time after `patience`.
    pub(super) fn look(&self, patience: Duration) {
        if let Some(running) = self.running().as_mut() {
            let now = Instant::now();
            running.waited += now.saturating_duration_since(running.looked).min(STEP);
            running.looked = now;
            if running.waited >= patience {
                self.over.store(true, Ordering::Relaxed);
            }
        }
    }
}

/// The peer's time is over.
impl Stop for PeerClock {
    fn stopped(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_looks_while_it_runs_count_and_each_counts_little() {
        let clock = PeerClock::default();
        let none = Duration::ZERO;
        clock.look(none);
        assert!(!clock.stopped(), "it does not run");
        clock.start();
        clock.stop();
        clock.look(none);
        assert!(!clock.stopped(), "it runs no more");
        clock.start();
        clock.look(Duration::from_secs(3600));
        assert!(!clock.stopped());
        // However long nobody has looked.
        clock.running().as_mut().unwrap().looked -= Duration::from_secs(100);
        clock.look(STEP * 3);
        assert!(!clock.stopped());
        for _ in 0..3 {
            clock.running().as_mut().unwrap().looked -= STEP;
            clock.look(STEP * 3);
        }
        assert!(clock.stopped());
        clock.start();
        assert!(!clock.stopped(), "another wait");
    }
}
