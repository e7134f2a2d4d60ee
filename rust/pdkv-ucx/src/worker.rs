//! A worker: the thread's own set of queues and connections, and the one thing whose end is a fence.
//!
//! UCX stops touching a worker's memory when the worker is destroyed, in every error mode and whatever the
//! peer does. So destroying it is how a lost peer's operations are brought to an end; see `Worker::destroy`.

use std::cell::{Cell, RefCell};
use std::os::fd::BorrowedFd;
use std::rc::{Rc, Weak};

use pdkv_core::{Error, ErrorKind, Result};

use crate::abi::constants::*;
use crate::abi::{Zeroed, ucp_worker_attr_t, ucp_worker_h, ucp_worker_params_t};
use crate::context::Context;
use crate::endpoint::{Endpoint, EpCore, ErrorMode, judge};
use crate::inbox::{Inbox, InboxCore, InboxLimits};
use crate::library::Library;
use crate::remote::KeyCore;
use crate::sealed::{self, Kind};
use crate::tally::TallyCore;
use crate::{fork, log, room, status};

/// How many times in a row nothing must move before a destroyed worker's operations are taken to wait for the
/// peer, and how long they may go on moving.
pub(crate) const DRAIN_STILL: u32 = 1000;
const DRAIN_LIMIT: std::time::Duration = std::time::Duration::from_secs(10);

/// How long a destroyed worker waits for a handshake, on copies with assertions only.
const HANDSHAKE_GRACE: std::time::Duration = std::time::Duration::from_millis(50);

/// A worker. It and everything made from it belong to the thread that created it.
///
/// Drop order: held messages and idle keys, then the worker with all its endpoints, then what unfinished
/// operations were holding, then the context.
pub struct Worker {
    core: Rc<WorkerCore>,
}

/// What endpoints, keys, tallies and inboxes share. `handle` is null once the worker is destroyed.
pub(crate) struct WorkerCore {
    handle: Cell<ucp_worker_h>,
    event_fd: Cell<i32>,
    max_header: Cell<usize>,
    settled: Rc<Cell<bool>>,
    endpoints: RefCell<Vec<Rc<EpCore>>>,
    keys: RefCell<Vec<Weak<KeyCore>>>,
    tallies: RefCell<Vec<Rc<TallyCore>>>,
    inboxes: RefCell<Vec<Rc<InboxCore>>>,
    reserve: RefCell<Option<room::Reserve>>,
    context: Context,
}

impl Worker {
    /// Creates a worker for the calling thread.
    ///
    /// # Errors
    /// Whatever UCX says; `Unsupported` in a forked child.
    pub fn create(context: &Context) -> Result<Self> {
        fork::check("create a worker")?;
        room::check("create a worker")?;
        let reserve = room::Reserve::take("create a worker")?;
        let ucp = context.library().ucp();
        let mut params = ucp_worker_params_t::zeroed();
        params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_FLAGS;
        params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
        // Operations may be under way when a worker goes: that is its purpose here, not a leak.
        params.flags = UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK;
        let mut handle = std::ptr::null_mut();
        log::take_last();
        // SAFETY: a live context, a zeroed struct with the fields that its mask names, a place for the handle.
        let created = unsafe { (ucp.ucp_worker_create)(context.handle(), &raw const params, &raw mut handle) };
        status::check("create a worker", created)?;
        let worker = Self {
            core: Rc::new(WorkerCore {
                handle: Cell::new(handle),
                event_fd: Cell::new(-1),
                max_header: Cell::new(0),
                settled: Rc::new(Cell::new(false)),
                endpoints: RefCell::default(),
                keys: RefCell::default(),
                tallies: RefCell::default(),
                inboxes: RefCell::default(),
                reserve: RefCell::new(Some(reserve)),
                context: context.clone(),
            }),
        };
        let mut attributes = ucp_worker_attr_t::zeroed();
        attributes.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER;
        // SAFETY: a live worker, and a zeroed struct with a mask.
        let queried = unsafe { (ucp.ucp_worker_query)(handle, &raw mut attributes) };
        status::check("create a worker", queried)?;
        worker.core.max_header.set(attributes.max_am_header);
        let mut event_fd = -1;
        // SAFETY: a live worker of a context with wake-up, and a place for the descriptor, which stays UCX's.
        let got = unsafe { (ucp.ucp_worker_get_efd)(handle, &raw mut event_fd) };
        status::check("create a worker", got)?;
        worker.core.event_fd.set(event_fd);
        Ok(worker)
    }

    /// The address by which a peer's worker connects to this one, at most [`SEALED_MAX_BYTES`](crate::SEALED_MAX_BYTES).
    ///
    /// # Errors
    /// Whatever UCX says.
    pub fn address(&self) -> Result<Vec<u8>> {
        let handle = self.core.enter("read the worker's address")?;
        let ucp = self.core.library().ucp();
        let mut attributes = ucp_worker_attr_t::zeroed();
        attributes.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS;
        // SAFETY: a live worker, and a zeroed struct with a mask.
        let queried = unsafe { (ucp.ucp_worker_query)(handle, &raw mut attributes) };
        status::check("read the worker's address", queried)?;
        let (start, len) = (attributes.address.cast_const().cast::<u8>(), attributes.address_length);
        // SAFETY: on success UCX gave `len` bytes, untouched until they are released below.
        let bytes = unsafe { std::slice::from_raw_parts(start, len) };
        let sealed = sealed::seal(Kind::Address, self.core.library().version(), bytes);
        // SAFETY: the address that this worker gave, released once.
        unsafe { (ucp.ucp_worker_release_address)(handle, attributes.address) };
        sealed
    }

    /// Moves everything on: sends, receives, callbacks. True when something happened.
    pub fn progress(&self) -> bool {
        let handle = self.core.handle.get();
        if handle.is_null() || fork::forked() {
            return false;
        }
        // SAFETY: a live worker, in its thread (`Worker` is not `Send`), and not inside a callback: callbacks never
        // reach this function.
        let moved = unsafe { (self.core.library().ucp().ucp_worker_progress)(handle) };
        if self.core.settled.replace(false) {
            self.core.sweep();
        }
        moved != 0
    }

    /// Asks for the event descriptor to become readable at the next event. True: sleep on it; false: something
    /// is pending, call [`progress`](Self::progress) first.
    ///
    /// # Errors
    /// Whatever UCX says; the worker is of no more use then.
    pub fn arm(&self) -> Result<bool> {
        let handle = self.core.enter("arm the worker")?;
        log::take_last();
        // SAFETY: a live worker of a context with wake-up, in its thread.
        let armed = unsafe { (self.core.library().ucp().ucp_worker_arm)(handle) };
        if armed == UCS_ERR_BUSY {
            return Ok(false);
        }
        status::check("arm the worker", armed).map(|()| true)
    }

    /// The descriptor to sleep on after [`arm`](Self::arm). It is UCX's and closes with the worker.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: UCX's descriptor lives as long as the worker, which this borrow keeps from being destroyed
        // (`destroy` takes the worker by value).
        unsafe { BorrowedFd::borrow_raw(self.core.event_fd.get()) }
    }

    /// Whether [`connect`](Self::connect) would hand this address to UCX.
    ///
    /// # Errors
    /// `Handshake` for bytes that are no such address, `Unsupported` for one of a release that ours doesn't understand.
    pub fn check_address(&self, address: &[u8]) -> Result<()> {
        judge(self.core.library().version(), address).map(drop)
    }

    /// Makes an endpoint towards the worker of this address.
    ///
    /// # Errors
    /// `Handshake` for bytes that are no such address; `PeerUnreachable` when the two have no transport in common.
    pub fn connect(&self, address: &[u8], mode: ErrorMode) -> Result<Endpoint> {
        Endpoint::connect(&self.core, address, mode)
    }

    /// Takes the active messages of `id` into a queue. Messages of an id that nobody takes are dropped by UCX.
    ///
    /// # Errors
    /// Whatever UCX says.
    pub fn receive_messages(&self, id: u16, limits: InboxLimits) -> Result<Inbox> {
        Inbox::open(&self.core, id, limits)
    }

    /// The longest header that a message may have.
    pub fn max_header_bytes(&self) -> usize {
        self.core.max_header.get()
    }

    /// Ends everything: when this returns, UCX writes to none of this worker's memory and reads from none, and
    /// nothing holds it any more. Unfinished operations are counted as cancelled. The same happens on drop.
    pub fn destroy(self) {
        drop(self);
    }

    pub(crate) fn core(&self) -> &Rc<WorkerCore> {
        &self.core
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.core.destroy();
    }
}

impl WorkerCore {
    /// # Errors
    /// `Closed` when the worker is gone, `Unsupported` in a forked child.
    #[inline]
    pub(crate) fn enter(&self, operation: &'static str) -> Result<ucp_worker_h> {
        fork::check(operation)?;
        let handle = self.handle.get();
        if handle.is_null() {
            return Err(Error::new(ErrorKind::Closed, operation, "the worker was destroyed"));
        }
        Ok(handle)
    }

    pub(crate) fn alive(&self) -> bool {
        !self.handle.get().is_null() && !fork::forked()
    }

    pub(crate) fn library(&self) -> &Library {
        self.context.library()
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    pub(crate) fn settled(&self) -> Rc<Cell<bool>> {
        Rc::clone(&self.settled)
    }

    pub(crate) fn max_header(&self) -> usize {
        self.max_header.get()
    }

    pub(crate) fn list(&self, tally: &Rc<TallyCore>) {
        self.tallies.borrow_mut().push(Rc::clone(tally));
        // A tally whose operations all complete at once must leave the list, too.
        self.settled.set(true);
    }

    pub(crate) fn list_endpoint(&self, endpoint: &Rc<EpCore>) {
        self.endpoints.borrow_mut().push(Rc::clone(endpoint));
    }

    pub(crate) fn list_inbox(&self, inbox: &Rc<InboxCore>) {
        self.inboxes.borrow_mut().push(Rc::clone(inbox));
    }

    pub(crate) fn list_key(&self, key: &Rc<KeyCore>) {
        let mut keys = self.keys.borrow_mut();
        if keys.len() == keys.capacity() {
            keys.retain(|key| key.strong_count() > 0);
        }
        keys.push(Rc::downgrade(key));
    }

    /// Lets go of what the tallies that became idle were holding. Never called inside a callback.
    fn sweep(&self) {
        let mut idle = Vec::new();
        self.tallies.borrow_mut().retain(|tally| {
            let keep = !tally.idle();
            if !keep {
                idle.push(Rc::clone(tally));
            }
            keep
        });
        for tally in idle {
            tally.release();
        }
    }

    /// Lets operations end that need nobody for it. Copies by the kernel wait in a queue of the endpoint, and UCX
    /// ends the process when an endpoint goes whose queue isn't empty.
    fn drain(&self, handle: ucp_worker_h) {
        let busy = || self.tallies.borrow().iter().any(|tally| !tally.idle());
        let start = std::time::Instant::now();
        let mut still = 0;
        while still < DRAIN_STILL && busy() && start.elapsed() < DRAIN_LIMIT {
            // SAFETY: a live worker, in its thread and not inside a callback.
            let moved = unsafe { (self.library().ucp().ucp_worker_progress)(handle) };
            still = if moved == 0 { still + 1 } else { 0 };
        }
    }

    /// Whether destroying the worker can end the process: a copy built with assertions doesn't bear that a
    /// connection is still being made. The peer gets a moment to make it.
    fn may_abort(&self) -> bool {
        if !self.library().has_assertions() {
            return false;
        }
        let settled = || self.endpoints.borrow().iter().all(|endpoint| endpoint.settled());
        let start = std::time::Instant::now();
        while !settled() && start.elapsed() < HANDSHAKE_GRACE {
            // SAFETY: a live worker, in its thread and not inside a callback.
            unsafe { (self.library().ucp().ucp_worker_progress)(self.handle.get()) };
            std::thread::yield_now();
        }
        !settled()
    }

    fn destroy(&self) {
        let handle = self.handle.get();
        if handle.is_null() {
            return;
        }
        if fork::forked() {
            self.handle.set(std::ptr::null_mut());
            return;
        }
        // Some of UCX's transports open a socket while they are taken apart.
        self.reserve.take();
        // Closed, and kept: while UCX is driven or taken apart it may still call into them.
        for inbox in &*self.inboxes.borrow() {
            inbox.close();
        }
        self.drain(handle);
        self.sweep();
        let busy = self.tallies.borrow();
        for key in self.keys.take().iter().filter_map(Weak::upgrade) {
            // A key in use is left to the worker: UCX may look at it once more while it cancels.
            if busy.iter().any(|tally| tally.holds(&key)) {
                key.forget();
            } else {
                key.destroy();
            }
        }
        drop(busy);
        if self.may_abort() {
            // Left as it is: nobody progresses it any more, so nothing it holds is written or read again.
            tracing::warn!("a worker whose connection was never made is left behind: this UCX has assertions");
            std::mem::forget(self.context.clone());
            self.endpoints.take().into_iter().for_each(std::mem::forget);
            self.tallies.borrow().iter().cloned().for_each(std::mem::forget);
            self.inboxes.borrow().iter().cloned().for_each(std::mem::forget);
        } else {
            // SAFETY: created once and not destroyed before, in its thread; callbacks that come now find their
            // tallies, endpoints and messages, which are let go only below.
            unsafe { (self.library().ucp().ucp_worker_destroy)(handle) };
        }
        self.handle.set(std::ptr::null_mut());
        self.inboxes.take();
        for endpoint in self.endpoints.take() {
            endpoint.forget();
        }
        for tally in self.tallies.take() {
            tally.abandon();
        }
    }
}
