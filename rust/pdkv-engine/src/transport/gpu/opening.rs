//! GPUs that this process has no memory on: it opens them for the sake of peers' memory, which takes seconds and some hundred megabytes there. So
//! that is for whoever runs the first transfer. One that could not be opened is left alone for some seconds and then tried beside the transfers, which
//! go other ways meanwhile.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pdkv_core::Result;
use pdkv_device::cuda::Gpu;

use crate::mover::Movers;

/// How long a failure is believed.
const AGAIN: Duration = Duration::from_secs(5);

/// Those that could not be opened, by their numbers.
#[derive(Clone, Default)]
pub(super) struct Openings(Arc<Mutex<BTreeMap<u32, Failure>>>);

struct Failure {
    reason: String,
    /// When to try again; `None` while somebody does.
    next: Option<Instant>,
}

impl Openings {
    fn book(&self) -> MutexGuard<'_, BTreeMap<u32, Failure>> {
        self.0.lock().expect("no holder panics")
    }

    /// Opens a GPU, unless it is open. Takes its time.
    ///
    /// # Errors
    /// As [`Gpu::open`].
    pub(super) fn open(&self, ordinal: u32) -> Result<Gpu> {
        let opened = Gpu::open(ordinal);
        let mut book = self.book();
        match &opened {
            Ok(_) => drop(book.remove(&ordinal)),
            Err(error) => {
                let reason = format!("GPU `{ordinal}` can't be used: {}", error.message());
                let next = Some(Instant::now() + AGAIN);
                book.insert(ordinal, Failure { reason, next });
            }
        }
        opened
    }

    /// Whether a transfer may count on it. Waits for nobody; when it is time, it has the GPU opened.
    ///
    /// # Errors
    /// Why it could not be opened.
    pub(super) fn may_open(&self, ordinal: u32, movers: &Movers) -> Result<(), String> {
        let (reason, due) = match self.book().get_mut(&ordinal) {
            None => return Ok(()),
            Some(failure) => {
                let due = failure.next.take_if(|next| *next <= Instant::now());
                (failure.reason.clone(), due)
            }
        };
        if let Some(next) = due {
            let again = Again {
                openings: self.clone(),
                ordinal,
                next,
            };
            // Without a thread for it, it is somebody else's again.
            let _ = movers.task(move || again.run());
        }
        Err(reason)
    }
}

/// That somebody tries again. Whoever went without an outcome leaves it to the next one.
struct Again {
    openings: Openings,
    ordinal: u32,
    next: Instant,
}

impl Again {
    fn run(self) {
        drop(self.openings.open(self.ordinal));
    }
}

impl Drop for Again {
    fn drop(&mut self) {
        if let Some(failure) = self.openings.book().get_mut(&self.ordinal) {
            failure.next.get_or_insert(self.next);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_panics_while_it_tries_again_leaves_it_to_the_next_one() {
        let (openings, ordinal, next) = (Openings::default(), 0, Instant::now());
        let reason = "it was busy".to_owned();
        openings.book().insert(ordinal, Failure { reason, next: None });
        let again = Again {
            openings: openings.clone(),
            ordinal,
            next,
        };
        let thread = std::thread::spawn(move || {
            let _again = again;
            panic!("as the test wants");
        });
        assert!(thread.join().is_err());
        assert_eq!(openings.book()[&ordinal].next, Some(next));
    }
}
