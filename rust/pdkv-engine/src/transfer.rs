//! One transfer as its owner sees it: state, path, figures, and the three steps of an end
//! (requested, quiesced, released). The bytes are moved elsewhere (`mover.rs`); here they are only
//! waited for.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use pdkv_core::id::TransferId;
use pdkv_core::node::{Destination, Outcome};
use pdkv_core::{Error, ErrorKind, Result};

use crate::config::TransportKind;
use crate::reader::Reader;
use crate::shared::Shared;

/// Where a transfer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum TransferState {
    /// Waiting for the owner to grant the claim.
    Claiming = 0,
    /// Bytes are being moved.
    Moving = 1,
    /// All bytes are placed; the owner is asked whether they are still the named ones.
    Fencing = 2,
    /// The destination holds exactly the bytes that were named.
    Done = 3,
    /// It failed; see [`Transfer::error`].
    Failed = 4,
    /// It was cancelled by [`Transfer::cancel`].
    Cancelled = 5,
}

impl TransferState {
    /// The lowercase name shown to users.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Claiming => "claiming",
            Self::Moving => "moving",
            Self::Fencing => "fencing",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    fn from_u8(value: u8) -> Self {
        [
            Self::Claiming,
            Self::Moving,
            Self::Fencing,
            Self::Done,
            Self::Failed,
            Self::Cancelled,
        ][usize::from(value)]
    }
}

/// Which way the bytes went, and why not a better one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    /// The transport.
    pub transport: TransportKind,
    /// Whether the bytes go by remote direct memory access.
    pub rdma: bool,
    /// What it rides on, for example `2 streams over tcp`.
    pub detail: String,
    /// One line for every transport looked at, the chosen one first.
    pub reasons: Vec<String>,
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.transport.as_str())
    }
}

/// Figures of one transfer. Times are in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TransferStats {
    /// Payload bytes placed.
    pub bytes: u64,
    /// Contiguous copies after merging.
    pub runs: u64,
    /// Payload bytes that pdkv, or a library on its behalf, put together anywhere but in the pages of
    /// source and destination.
    pub staged_bytes: u64,
    /// Building the plan.
    pub plan_us: f64,
    /// The submitting call.
    pub post_us: f64,
    /// From the first byte requested to the last byte placed.
    pub wire_us: f64,
    /// From the last byte placed to the owner's word that they are valid.
    pub handover_us: f64,
}

/// What the engine keeps of a transfer.
pub(crate) struct TransferCore {
    id: AtomicU64,
    state: AtomicU8,
    quiesced: AtomicBool,
    /// Movers look at this between batches.
    pub(crate) stop: AtomicBool,
    /// Where a waiting caller may look for the owner's answers itself; once.
    reader: Mutex<Option<Weak<Reader>>>,
    /// The path, fixed at submission.
    pub(crate) path: Arc<Path>,
    inner: Mutex<Inner>,
    changed: Condvar,
}

struct Inner {
    outcome: Option<Outcome>,
    stats: TransferStats,
    placed_at: Option<Instant>,
}

impl TransferCore {
    pub(crate) fn new(path: Arc<Path>) -> Self {
        Self {
            id: AtomicU64::new(0),
            state: AtomicU8::new(TransferState::Claiming as u8),
            quiesced: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            reader: Mutex::new(None),
            path,
            inner: Mutex::new(Inner {
                outcome: None,
                stats: TransferStats::default(),
                placed_at: None,
            }),
            changed: Condvar::new(),
        }
    }

    /// A transfer that was finished inside the submitting call.
    pub(crate) fn finished(id: TransferId, path: Arc<Path>, stats: TransferStats) -> Self {
        let core = Self::new(path);
        core.set_id(id);
        core.state.store(TransferState::Done as u8, Ordering::Relaxed);
        core.quiesced.store(true, Ordering::Relaxed);
        let mut inner = core.lock();
        inner.outcome = Some(Outcome::Done { bytes: stats.bytes });
        inner.stats = stats;
        drop(inner);
        core
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no holder panics")
    }

    pub(crate) fn set_id(&self, id: TransferId) {
        self.id.store(id.0, Ordering::Relaxed);
    }

    pub(crate) fn set_reader(&self, reader: &Arc<Reader>) {
        *self.reader.lock().expect("no holder panics") = Some(Arc::downgrade(reader));
    }

    /// Reads the owner's answers in the calling thread for a moment, at the first wait.
    fn pump(&self, shared: &Arc<Shared>) {
        let reader = self.reader.lock().expect("no holder panics").take();
        if let Some(reader) = reader.and_then(|reader| reader.upgrade()) {
            let done = || self.ended() || self.stop.load(Ordering::Relaxed);
            reader.pump_until(shared, shared.config.spin, done);
        }
    }

    pub(crate) fn id(&self) -> TransferId {
        TransferId(self.id.load(Ordering::Relaxed))
    }

    pub(crate) fn state(&self) -> TransferState {
        TransferState::from_u8(self.state.load(Ordering::Acquire))
    }

    pub(crate) fn edit_stats(&self, edit: impl FnOnce(&mut TransferStats)) {
        edit(&mut self.lock().stats);
    }

    pub(crate) fn begin_moving(&self) {
        self.advance(TransferState::Claiming, TransferState::Moving);
    }

    /// The last byte is placed (or, for writes, sent and acknowledged).
    pub(crate) fn placed(&self) {
        self.lock().placed_at = Some(Instant::now());
        self.advance(TransferState::Moving, TransferState::Fencing);
    }

    /// Moves on only from where the caller believes it to be: a finished state is never left.
    fn advance(&self, from: TransferState, to: TransferState) {
        let _ = self
            .state
            .compare_exchange(from as u8, to as u8, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Ends the transfer; `false` when it had ended before, which stays as it was.
    pub(crate) fn finish(&self, outcome: Outcome) -> bool {
        let mut inner = self.lock();
        if inner.outcome.is_some() {
            return false;
        }
        let state = match &outcome {
            Outcome::Done { .. } => TransferState::Done,
            Outcome::Failed { .. } => TransferState::Failed,
            Outcome::Cancelled { .. } => TransferState::Cancelled,
        };
        if let Some(placed_at) = inner.placed_at {
            inner.stats.handover_us = placed_at.elapsed().as_secs_f64() * 1e6;
        }
        inner.outcome = Some(outcome);
        self.state.store(state as u8, Ordering::Release);
        drop(inner);
        self.changed.notify_all();
        true
    }

    pub(crate) fn set_quiesced(&self) {
        let guard = self.lock();
        self.quiesced.store(true, Ordering::Release);
        drop(guard);
        self.changed.notify_all();
    }

    fn wait_until(&self, timeout: Option<Duration>, ready: impl Fn(&Self) -> bool) -> bool {
        if ready(self) {
            return true;
        }
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut guard = self.lock();
        loop {
            if ready(self) {
                return true;
            }
            guard = match deadline {
                None => self.changed.wait(guard).expect("no holder panics"),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return false;
                    }
                    self.changed.wait_timeout(guard, left).expect("no holder panics").0
                }
            };
        }
    }

    /// Whether movers are to stop.
    pub(crate) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    pub(crate) fn ended(&self) -> bool {
        self.state() as u8 >= TransferState::Done as u8
    }
}

/// A posted transfer. Dropping the handle neither cancels nor waits: the engine owns the transfer
/// and ends it by its deadline.
#[derive(Clone)]
pub struct Transfer {
    core: Arc<TransferCore>,
    shared: Weak<Shared>,
}

impl Transfer {
    pub(crate) fn new(core: Arc<TransferCore>, shared: &Arc<Shared>) -> Self {
        Self {
            core,
            shared: Arc::downgrade(shared),
        }
    }

    /// The id, unique within the engine that started it.
    pub fn id(&self) -> TransferId {
        self.core.id()
    }

    /// Where it stands.
    pub fn state(&self) -> TransferState {
        self.core.state()
    }

    /// Which way the bytes go and why.
    pub fn path(&self) -> &Path {
        &self.core.path
    }

    /// The figures so far; final once the transfer ended.
    pub fn stats(&self) -> TransferStats {
        self.core.lock().stats
    }

    /// Whether it ended, in whatever way.
    pub fn poll(&self) -> bool {
        self.core.ended()
    }

    /// Blocks until the transfer ended or `timeout` passed.
    ///
    /// # Errors
    /// The transfer's own error; `TransferCancelled`; or `TransferTimeout` when it's still running
    /// after `timeout`, which changes nothing about it.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        if timeout != Some(Duration::ZERO)
            && !self.core.ended()
            && let Some(shared) = self.shared.upgrade()
        {
            shared.check_process("wait")?;
            self.core.pump(&shared);
        }
        if !self.core.wait_until(timeout, TransferCore::ended) {
            return Err(Error::new(
                ErrorKind::TransferTimeout,
                "wait",
                format!(
                    "transfer `{}` is still `{}` after {timeout:?}",
                    self.id(),
                    self.state().as_str()
                ),
            )
            .with_hint("it goes on until its own deadline; cancel() ends it"));
        }
        self.error().map_or(Ok(()), Err)
    }

    /// Asks the transfer to end. Its memory may be reused only once it is [`quiesced`](Self::quiesced).
    pub fn cancel(&self) {
        if !self.core.ended()
            && let Some(shared) = self.shared.upgrade()
        {
            shared.cancel(self.id());
        }
    }

    /// Whether nothing will touch the memory of this transfer any more.
    pub fn quiesced(&self) -> bool {
        self.core.quiesced.load(Ordering::Acquire)
    }

    /// Blocks until quiesced; `false` when `timeout` passed first.
    pub fn wait_quiesced(&self, timeout: Option<Duration>) -> bool {
        self.core
            .wait_until(timeout, |core| core.quiesced.load(Ordering::Acquire))
    }

    /// What the destination holds: `untouched`, `invalid` or `valid`; `pending` while it runs.
    pub fn destination(&self) -> &'static str {
        match &self.core.lock().outcome {
            None => "pending",
            Some(Outcome::Done { .. }) => "valid",
            Some(Outcome::Failed { destination, .. } | Outcome::Cancelled { destination }) => match destination {
                Destination::Untouched => "untouched",
                Destination::Invalid => "invalid",
                Destination::Valid => "valid",
            },
        }
    }

    /// Why it failed; `None` while it runs and after success.
    pub fn error(&self) -> Option<Error> {
        let inner = self.core.lock();
        match inner.outcome.as_ref()? {
            Outcome::Done { .. } => None,
            Outcome::Failed { error, .. } => Some(error.clone()),
            Outcome::Cancelled { .. } => Some(Error::new(
                ErrorKind::TransferCancelled,
                "transfer",
                format!("transfer `{}` was cancelled by its owner", self.id()),
            )),
        }
        .map(|error| error.with("path", self.core.path.transport.as_str()))
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Transfer({}, {}, {})",
            self.id(),
            self.state().as_str(),
            self.core.path
        )
    }
}
