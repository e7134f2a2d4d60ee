//! Handles on what this engine exports or offers.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

use pdkv_core::export::ExportState;
use pdkv_core::reference::Reference;
use pdkv_core::{Error, ErrorKind, Result};

use crate::shared::Shared;

/// The state of an export as last told by the protocol.
pub(crate) struct ExportWatch {
    state: Mutex<ExportState>,
    changed: Condvar,
}

impl ExportWatch {
    pub(crate) fn new(state: ExportState) -> Self {
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn set(&self, state: ExportState) {
        *self.state.lock().expect("no holder panics") = state;
        self.changed.notify_all();
    }

    fn get(&self) -> ExportState {
        *self.state.lock().expect("no holder panics")
    }

    fn wait(&self, timeout: Option<Duration>, ready: impl Fn(ExportState) -> bool) -> Option<ExportState> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = self.state.lock().expect("no holder panics");
        loop {
            if ready(*state) {
                return Some(*state);
            }
            let slice = deadline.map_or(Duration::from_secs(1), |at| {
                at.saturating_duration_since(Instant::now())
            });
            if slice.is_zero() {
                return None;
            }
            state = self.changed.wait_timeout(state, slice).expect("no holder panics").0;
        }
    }
}

/// Pinned blocks that named peers may read (an export) or write (an offer).
///
/// Dropping the handle changes nothing: the lease ends it.
#[derive(Clone)]
pub struct Export {
    reference: Arc<Reference>,
    watch: Arc<ExportWatch>,
    shared: Weak<Shared>,
}

impl Export {
    pub(crate) fn new(reference: Reference, watch: Arc<ExportWatch>, shared: &Arc<Shared>) -> Self {
        Self {
            reference: Arc::new(reference),
            watch,
            shared: Arc::downgrade(shared),
        }
    }

    /// What a peer needs to claim it.
    pub fn reference(&self) -> &Reference {
        &self.reference
    }

    /// Where it stands.
    pub fn state(&self) -> ExportState {
        self.watch.get()
    }

    fn engine(&self, operation: &'static str) -> Result<Arc<Shared>> {
        let closed = || Error::new(ErrorKind::Closed, operation, "the engine is closed");
        let shared = self.shared.upgrade().ok_or_else(closed)?;
        shared.check_process(operation).map(|()| shared)
    }

    /// Extends the lease to `lease` from now; returns what remains. Never shortens it.
    ///
    /// # Errors
    /// The reference's error when it has ended; `Closed`.
    pub fn renew(&self, lease: Duration) -> Result<Duration> {
        let shared = self.engine("renew")?;
        shared.drive(|state, now| state.node.renew(now, self.reference.export_id, lease))
    }

    /// Takes the blocks back. Running transfers are refused at their fence; for an offer, wait for
    /// [`quiesced`](Self::quiesced) before reusing the memory. Doing it twice is no error.
    ///
    /// # Errors
    /// `Closed`.
    pub fn release(&self) -> Result<()> {
        let shared = self.engine("release")?;
        shared.drive(|state, now| state.node.release(now, self.reference.export_id))
    }

    /// Blocks until it ended, in whatever way.
    ///
    /// # Errors
    /// `TransferTimeout` when `timeout` passed first, which changes nothing about it.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<ExportState> {
        let ended = self.watch.wait(timeout, ExportState::is_ended);
        ended.ok_or_else(|| self.not_ended(timeout.unwrap_or(Duration::MAX)))
    }

    /// The error of a wait that is over while this has not ended.
    pub fn not_ended(&self, waited: Duration) -> Error {
        let (id, state) = (self.reference.export_id, self.state().as_str());
        let text = format!("export `{id}` is still `{state}` after {waited:?}: its blocks are not to be reused");
        Error::new(ErrorKind::TransferTimeout, "wait", text).with_hint("its lease ends it; release() takes it back now")
    }

    /// Whether no peer can write into the blocks any more, so that they may be reused.
    pub fn quiesced(&self) -> bool {
        self.state().is_quiesced()
    }

    /// Blocks until quiesced; `false` when `timeout` passed first.
    pub fn wait_quiesced(&self, timeout: Option<Duration>) -> bool {
        self.watch.wait(timeout, ExportState::is_quiesced).is_some()
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Export({}, {})", self.reference.export_id, self.state().as_str())
    }
}
