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
        self.start_at(Instant::now());
    }

    fn start_at(&self, now: Instant) {
        let mut running = self.running();
        self.over.store(false, Ordering::Relaxed);
        *running = Some(Running {
            looked: now,
            waited: Duration::ZERO,
        });
    }

    /// It is ours again.
    pub fn stop(&self) {
        *self.running() = None;
    }

    /// Whoever waits looks now and then, and when he comes and goes. `wanted` says whether anybody else has waited since the last look, for that time
    /// alone counts. Ends the peer's time after `patience`.
    pub(super) fn look(&self, now: Instant, wanted: bool, patience: Duration) {
        if let Some(running) = self.running().as_mut() {
            let since = now.saturating_duration_since(running.looked).min(STEP);
            running.looked = running.looked.max(now);
            if !wanted {
                return;
            }
            running.waited += since;
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
        let (none, mut now) = (Duration::ZERO, Instant::now());
        clock.look(now, true, none);
        assert!(!clock.stopped(), "it does not run");
        clock.start_at(now);
        clock.stop();
        clock.look(now, true, none);
        assert!(!clock.stopped(), "it runs no more");
        clock.start_at(now);
        // However long nobody has looked.
        now += Duration::from_secs(100);
        clock.look(now, true, STEP * 3);
        assert!(!clock.stopped());
        for _ in 0..2 {
            assert!(!clock.stopped());
            now += STEP;
            clock.look(now, true, STEP * 3);
        }
        assert!(clock.stopped());
        clock.start_at(now);
        assert!(!clock.stopped(), "another wait");
    }

    #[test]
    fn time_in_which_nobody_waited_does_not_count() {
        let (clock, start) = (PeerClock::default(), Instant::now());
        let patience = Duration::from_millis(90);
        clock.start_at(start);
        // Somebody comes and goes at once, again and again.
        for seconds in 1..1000 {
            let now = start + Duration::from_secs(seconds);
            clock.look(now, false, patience);
            clock.look(now, true, patience);
        }
        assert!(!clock.stopped());
        let now = start + Duration::from_secs(1000);
        clock.look(now, false, patience);
        clock.look(now + patience / 2, true, patience);
        assert!(!clock.stopped());
        clock.look(now + patience, true, patience);
        assert!(clock.stopped());
    }
}
