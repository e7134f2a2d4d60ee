//! GPUs that this process has no memory on: it opens them for the sake of peers' memory, which takes seconds and some hundred megabytes there; and the
//! driver itself, which a process may not have started. So that is for whoever runs the first transfer, on a thread where nobody is kept waiting. What
//! failed is left alone for some seconds and then tried beside the transfers, which go other ways meanwhile.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pdkv_core::{Error, Result};
use pdkv_device::cuda::Gpu;

use crate::mover::Movers;

/// How long a failure is believed.
const AGAIN: Duration = Duration::from_secs(5);

/// A name that no GPU has, to have the names asked for.
const NOBODY: [u8; 16] = [0; 16];

/// What is to be opened.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Thing {
    Driver,
    /// By its number.
    Gpu(u32),
}

/// What could not be opened.
#[derive(Clone, Default)]
pub(super) struct Openings(Arc<Mutex<Book>>);

#[derive(Default)]
struct Book {
    failures: BTreeMap<Thing, Failure>,
    /// Somebody starts the driver so that others know.
    starting: bool,
}

struct Failure {
    reason: String,
    /// When to try again; `None` while somebody does.
    next: Option<Instant>,
}

impl Openings {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().expect("no holder panics")
    }

    /// Opens a GPU, unless it is open. Takes its time.
    ///
    /// # Errors
    /// As [`Gpu::open`].
    pub(super) fn open(&self, ordinal: u32) -> Result<Gpu> {
        let opened = Gpu::open(ordinal);
        let say = |error: &Error| format!("GPU `{ordinal}` can't be used: {}", error.message());
        self.note(Thing::Gpu(ordinal), opened.as_ref().err().map(say));
        opened
    }

    /// Which GPU of this process has that name, if any. Takes its time where the driver is not started.
    ///
    /// # Errors
    /// As [`Gpu::number_of`].
    pub(super) fn number_of(&self, uuid: [u8; 16]) -> Result<Option<u32>> {
        let found = Gpu::number_of(uuid);
        self.note(
            Thing::Driver,
            found.as_ref().err().map(|error| error.message().to_owned()),
        );
        found
    }

    fn note(&self, thing: Thing, failure: Option<String>) {
        let mut book = self.book();
        match failure {
            None => drop(book.failures.remove(&thing)),
            Some(reason) => {
                let next = Some(Instant::now() + AGAIN);
                book.failures.insert(thing, Failure { reason, next });
            }
        }
    }

    fn try_again(&self, thing: Thing) {
        match thing {
            Thing::Driver => drop(self.number_of(NOBODY)),
            Thing::Gpu(ordinal) => drop(self.open(ordinal)),
        }
    }

    /// Whether a transfer may count on it. Waits for nobody; when it is time, it has the thing opened.
    ///
    /// # Errors
    /// Why it could not be opened.
    pub(super) fn may_open(&self, thing: Thing, movers: &Movers) -> Result<(), String> {
        let (reason, due) = match self.book().failures.get_mut(&thing) {
            None => return Ok(()),
            Some(failure) => {
                let due = failure.next.take_if(|next| *next <= Instant::now());
                (failure.reason.clone(), due)
            }
        };
        if let Some(next) = due {
            let openings = self.clone();
            let again = Again { openings, thing, next };
            // Without a thread for it, it is somebody else's again.
            let _ = movers.task(move || again.run());
        }
        Err(reason)
    }

    /// Has the driver started beside the transfers, once. Waits for nobody.
    pub(super) fn start_beside(&self, movers: &Movers) {
        if std::mem::replace(&mut self.book().starting, true) {
            return;
        }
        let starting = Starting(self.clone());
        // Without a thread now there may be one for the next transfer.
        let _ = movers.task(move || starting.0.try_again(Thing::Driver));
    }
}

/// That somebody tries again. Whoever went without an outcome leaves it to the next one.
struct Again {
    openings: Openings,
    thing: Thing,
    next: Instant,
}

impl Again {
    fn run(self) {
        self.openings.try_again(self.thing);
    }
}

impl Drop for Again {
    fn drop(&mut self) {
        if let Some(failure) = self.openings.book().failures.get_mut(&self.thing) {
            failure.next.get_or_insert(self.next);
        }
    }
}

/// That somebody starts the driver.
struct Starting(Openings);

impl Drop for Starting {
    fn drop(&mut self) {
        self.0.book().starting = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_panics_while_it_tries_again_leaves_it_to_the_next_one() {
        let (openings, thing, next) = (Openings::default(), Thing::Gpu(0), Instant::now());
        let reason = "it was busy".to_owned();
        openings.book().failures.insert(thing, Failure { reason, next: None });
        let again = Again {
            openings: openings.clone(),
            thing,
            next,
        };
        let thread = std::thread::spawn(move || {
            let _again = again;
            panic!("as the test wants");
        });
        assert!(thread.join().is_err());
        assert_eq!(openings.book().failures[&thing].next, Some(next));
    }
}
