//! The count of a set of operations: how many are under way, how many failed, and of what first.
//!
//! UCX reports each request's status to its own callback and nowhere else: a flush succeeds over failed puts.
//! So every request is counted here, and a set is done when `outstanding` is 0 and `failure` is `None`.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::rc::Rc;
use std::sync::Arc;

use pdkv_core::{Error, Result};

use crate::abi::constants::UCS_ERR_CANCELED;
use crate::abi::{ucp_dt_iov_t, ucs_status_ptr_t, ucs_status_t};
use crate::guard;
use crate::memory::{MemoryHandle, PieceMemory};
use crate::remote::KeyCore;
use crate::status::{self, Posted};
use crate::worker::{Worker, WorkerCore};

/// Counts operations of one worker. What they touch (memory, keys, headers) stays alive until their callbacks
/// came or the worker is gone, whether or not the tally itself does.
pub struct Tally {
    pub(crate) core: Rc<TallyCore>,
    pub(crate) worker: Rc<WorkerCore>,
}

/// What callbacks write to. They touch nothing but cells and the list of spent messages.
pub(crate) struct TallyCore {
    outstanding: Cell<u64>,
    failed: Cell<u64>,
    first: Cell<ucs_status_t>,
    listed: Cell<bool>,
    settled: Rc<Cell<bool>>,
    free: unsafe extern "C" fn(*mut c_void),
    memory: RefCell<Vec<PieceMemory>>,
    keys: RefCell<Vec<Rc<KeyCore>>>,
    #[expect(clippy::vec_box, reason = "the box is what is used again: its address goes to UCX")]
    spent: RefCell<Vec<Box<Message>>>,
}

/// What a message in flight needs besides its pages.
pub(crate) struct Message {
    pub(crate) tally: Option<Rc<TallyCore>>,
    pub(crate) header: Vec<u8>,
    pub(crate) iov: Vec<ucp_dt_iov_t>,
}

impl Tally {
    /// An empty count of operations of `worker`.
    pub fn new(worker: &Worker) -> Self {
        let worker = worker.core();
        Self {
            core: Rc::new(TallyCore {
                outstanding: Cell::new(0),
                failed: Cell::new(0),
                first: Cell::new(0),
                listed: Cell::new(false),
                settled: worker.settled(),
                free: worker.library().ucp().ucp_request_free,
                memory: RefCell::new(Vec::new()),
                keys: RefCell::new(Vec::new()),
                spent: RefCell::new(Vec::new()),
            }),
            worker: Rc::clone(worker),
        }
    }

    /// How many operations are under way.
    pub fn outstanding(&self) -> u64 {
        self.core.outstanding.get()
    }

    /// How many operations failed.
    pub fn failed(&self) -> u64 {
        self.core.failed.get()
    }

    /// The first failure, whatever came after it.
    pub fn failure(&self) -> Option<Error> {
        (self.failed() > 0)
            .then(|| status::error("transfer over UCX", self.core.first.get()).with("failed", self.failed()))
    }

    /// Counts an operation before it is posted: UCX may call back before it returns.
    #[inline]
    pub(crate) fn begin(&self) {
        self.core.outstanding.set(self.core.outstanding.get() + 1);
    }

    /// Corrects the count by the outcome of posting. `Err` when it failed at once, which is counted too.
    #[inline]
    pub(crate) fn posted(&self, operation: &'static str, pointer: ucs_status_ptr_t) -> Result<()> {
        match status::posted(pointer) {
            Posted::Request(_) => Ok(()),
            Posted::Done => {
                self.core.done(0);
                Ok(())
            }
            Posted::Failed(status) => {
                self.core.done(status);
                Err(status::error(operation, status))
            }
        }
    }

    /// What callbacks are given: valid while the worker lists the core, which it does until they came.
    #[inline]
    pub(crate) fn argument(&self) -> *mut c_void {
        Rc::as_ptr(&self.core).cast_mut().cast()
    }

    /// Keeps mapped memory alive for what is about to be posted.
    #[inline]
    pub(crate) fn hold(&self, memory: &Arc<MemoryHandle>) {
        let mut held = self.core.memory.borrow_mut();
        if !held
            .iter()
            .rev()
            .any(|one| one.handle().is_some_and(|one| Arc::ptr_eq(one, memory)))
        {
            held.push(PieceMemory::Mapped(Arc::clone(memory)));
        }
        drop(held);
        self.list();
    }

    /// Keeps the memory of a piece alive for what is about to be posted.
    #[inline]
    pub(crate) fn hold_piece(&self, memory: &PieceMemory) {
        let mut held = self.core.memory.borrow_mut();
        if !held.iter().rev().any(|one| one.same(memory)) {
            held.push(memory.clone());
        }
        drop(held);
        self.list();
    }

    /// Keeps a key alive for what is about to be posted.
    #[inline]
    pub(crate) fn hold_key(&self, key: &Rc<KeyCore>) {
        let mut held = self.core.keys.borrow_mut();
        if !held.iter().rev().any(|one| Rc::ptr_eq(one, key)) {
            held.push(Rc::clone(key));
        }
    }

    #[inline]
    pub(crate) fn list(&self) {
        if !self.core.listed.replace(true) {
            self.worker.list(&self.core);
        }
    }

    /// A message to fill, from those that are done if there is one.
    #[expect(clippy::unnecessary_box_returns, reason = "as for `spent`")]
    pub(crate) fn message(&self) -> Box<Message> {
        let spent = self.core.spent.borrow_mut().pop();
        spent.unwrap_or_else(|| {
            Box::new(Message {
                tally: None,
                header: Vec::new(),
                iov: Vec::new(),
            })
        })
    }
}

impl TallyCore {
    pub(crate) fn free(&self) -> unsafe extern "C" fn(*mut c_void) {
        self.free
    }

    fn fail(&self, status: ucs_status_t) {
        if self.failed.get() == 0 {
            self.first.set(status);
        }
        self.failed.set(self.failed.get() + 1);
    }

    #[inline]
    pub(crate) fn done(&self, status: ucs_status_t) {
        if status < 0 {
            self.fail(status);
        }
        let left = self.outstanding.get().saturating_sub(1);
        self.outstanding.set(left);
        if left == 0 {
            self.settled.set(true);
        }
    }

    /// Takes back a message that is done, for the next one.
    pub(crate) fn recycle(&self, message: Box<Message>) {
        self.spent.borrow_mut().push(message);
    }

    pub(crate) fn idle(&self) -> bool {
        self.outstanding.get() == 0
    }

    pub(crate) fn holds(&self, key: &KeyCore) -> bool {
        self.keys
            .borrow()
            .iter()
            .any(|held| std::ptr::eq(&raw const **held, key))
    }

    /// Lets go of what finished operations needed, and leaves the worker's list.
    pub(crate) fn release(&self) {
        self.listed.set(false);
        let memory = std::mem::take(&mut *self.memory.borrow_mut());
        let keys = std::mem::take(&mut *self.keys.borrow_mut());
        drop((memory, keys));
    }

    /// The worker is gone, and with it whatever was under way.
    pub(crate) fn abandon(&self) {
        for _ in 0..self.outstanding.get() {
            self.fail(UCS_ERR_CANCELED);
        }
        self.outstanding.set(0);
        self.release();
    }
}

/// The callback of puts, gets, flushes and closes.
pub(crate) unsafe extern "C" fn operation_done(request: *mut c_void, status: ucs_status_t, argument: *mut c_void) {
    // SAFETY: the argument is the core that `Tally::argument` gave, listed by the worker and so alive.
    let core = unsafe { &*argument.cast_const().cast::<TallyCore>() };
    guard::callback((), || core.done(status));
    // SAFETY: the request that just completed, freed once.
    unsafe { (core.free)(request) };
}

/// The callback of a sent message; the argument is the message, leaked when it was posted.
pub(crate) unsafe extern "C" fn message_sent(request: *mut c_void, status: ucs_status_t, argument: *mut c_void) {
    // SAFETY: the box that `Endpoint::send_message` leaked for this request, taken back once.
    let message = unsafe { Box::from_raw(argument.cast::<Message>()) };
    finish_message(request, status, message);
}

/// The callback of a received message; the argument is as for `message_sent`.
pub(crate) unsafe extern "C" fn message_received(
    request: *mut c_void,
    status: ucs_status_t,
    _length: usize,
    argument: *mut c_void,
) {
    // SAFETY: the box that `Incoming::receive` leaked for this request, taken back once.
    let message = unsafe { Box::from_raw(argument.cast::<Message>()) };
    finish_message(request, status, message);
}

fn finish_message(request: *mut c_void, status: ucs_status_t, mut message: Box<Message>) {
    let Some(core) = message.tally.take() else {
        return;
    };
    let free = core.free;
    guard::callback((), || {
        core.recycle(message);
        core.done(status);
        drop(core);
    });
    // SAFETY: the request that just completed, freed once.
    unsafe { free(request) };
}
