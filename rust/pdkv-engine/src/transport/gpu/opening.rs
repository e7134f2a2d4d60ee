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
        let mut book = self.book();
        let Some(failure) = book.get_mut(&ordinal) else {
            return Ok(());
        };
        let reason = failure.reason.clone();
        if let Some(next) = failure.next.take_if(|next| *next <= Instant::now()) {
            let again = self.clone();
            if movers.task(move || drop(again.open(ordinal))).is_err() {
                failure.next = Some(next);
            }
        }
        Err(reason)
    }
}
