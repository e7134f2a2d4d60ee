//! Active messages as they arrive: a queue that the worker's callback fills and its thread empties.
//!
//! The callback only queues; what a message means and where its bytes belong is decided by who pops it. What
//! is popped and not received is given back to UCX.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::rc::Rc;

use pdkv_core::{Error, ErrorKind, Result};

use crate::abi::constants::*;
use crate::abi::{Zeroed, ucp_am_handler_param_t, ucp_am_recv_param_t, ucp_callback, ucs_status_t};
use crate::memory::{Access, Piece};
use crate::message::{buffer_of, gather, message_param, reclaim};
use crate::tally::{Tally, message_received};
use crate::worker::WorkerCore;
use crate::{guard, log, status};

/// What a peer may have waiting here before it is refused more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InboxLimits {
    /// How many messages.
    pub messages: usize,
    /// How many bytes of eager payload, which lie in UCX's buffers.
    pub eager_bytes: u64,
}

impl Default for InboxLimits {
    fn default() -> Self {
        Self {
            messages: 1024,
            eager_bytes: 64 << 20,
        }
    }
}

/// The messages of one id.
pub struct Inbox {
    core: Rc<InboxCore>,
    worker: Rc<WorkerCore>,
}

/// What the callback writes to. `held` is what UCX keeps for messages that were queued and not yet taken.
pub(crate) struct InboxCore {
    limits: InboxLimits,
    queue: RefCell<VecDeque<Arrived>>,
    held: RefCell<Vec<(u64, *mut c_void)>>,
    serial: Cell<u64>,
    eager_bytes: Cell<u64>,
    dropped: Cell<u64>,
    closed: Cell<bool>,
    release: unsafe extern "C" fn(crate::abi::ucp_worker_h, *mut c_void),
    worker: crate::abi::ucp_worker_h,
}

struct Arrived {
    header: Vec<u8>,
    len: u64,
    body: Body,
}

/// Where the payload is.
enum Body {
    /// There is none.
    Empty,
    /// Copied here, since UCX would not keep it.
    Copied(Vec<u8>),
    /// In UCX's buffer, kept under this number.
    Kept(u64),
    /// Still with the sender; the descriptor is kept under this number.
    Promised(u64),
}

/// A message that has arrived, or has been announced.
pub struct Incoming {
    /// What the sender put in front.
    pub header: Vec<u8>,
    len: u64,
    body: Body,
    core: Rc<InboxCore>,
    worker: Rc<WorkerCore>,
}

impl Inbox {
    pub(crate) fn open(worker: &Rc<WorkerCore>, id: u16, limits: InboxLimits) -> Result<Self> {
        let handle = worker.enter("receive messages")?;
        let core = Rc::new(InboxCore {
            limits,
            queue: RefCell::default(),
            held: RefCell::default(),
            serial: Cell::new(0),
            eager_bytes: Cell::new(0),
            dropped: Cell::new(0),
            closed: Cell::new(false),
            release: worker.library().ucp().ucp_am_data_release,
            worker: handle,
        });
        worker.list_inbox(&core);
        let mut param = ucp_am_handler_param_t::zeroed();
        param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID
            | UCP_AM_HANDLER_PARAM_FIELD_FLAGS
            | UCP_AM_HANDLER_PARAM_FIELD_CB
            | UCP_AM_HANDLER_PARAM_FIELD_ARG;
        param.id = u32::from(id);
        param.flags = UCP_AM_FLAG_WHOLE_MSG | UCP_AM_FLAG_PERSISTENT_DATA;
        param.cb = Some(arrived);
        param.arg = Rc::as_ptr(&core).cast_mut().cast();
        log::take_last();
        let set = worker.library().ucp().ucp_worker_set_am_recv_handler;
        // SAFETY: a live worker; the callback's argument lives as long as the worker, which lists it.
        let done = unsafe { set(handle, &raw const param) };
        status::check("receive messages", done)?;
        Ok(Self {
            core,
            worker: Rc::clone(worker),
        })
    }

    /// The oldest message.
    pub fn pop(&self) -> Option<Incoming> {
        let arrived = self.core.queue.borrow_mut().pop_front()?;
        Some(Incoming {
            header: arrived.header,
            len: arrived.len,
            body: arrived.body,
            core: Rc::clone(&self.core),
            worker: Rc::clone(&self.worker),
        })
    }

    /// How many messages were dropped because the limits were reached; anything but 0 means a peer that floods.
    pub fn dropped(&self) -> u64 {
        self.core.dropped.get()
    }
}

impl Incoming {
    /// How many bytes of payload it has.
    #[expect(
        clippy::len_without_is_empty,
        reason = "a message without payload is nothing special"
    )]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether its payload lies in a buffer of UCX's (or ours) and will be copied once more.
    pub fn staged(&self) -> bool {
        matches!(self.body, Body::Kept(_) | Body::Copied(_))
    }

    /// Scatters the payload over `pieces`, whose lengths must add up to the message's. Completion in the tally means
    /// that it is there.
    ///
    /// # Errors
    /// `Transfer` when the lengths differ, `Region` for a piece that isn't inside; then the message is dropped.
    pub fn receive(mut self, pieces: &[Piece], tally: &Tally) -> Result<()> {
        let worker = self.worker.enter("receive")?;
        if !Rc::ptr_eq(&self.worker, &tally.worker) {
            return Err(crate::endpoint::stranger("receive", "tally", "worker"));
        }
        let room: u64 = pieces.iter().map(|piece| piece.len).fold(0, u64::saturating_add);
        if room != self.len {
            return Err(Error::new(
                ErrorKind::Transfer,
                "receive",
                format!("a message of `{}` bytes for pieces of `{room}`", self.len),
            ));
        }
        let mut message = tally.message();
        gather("receive", &self.worker, pieces, Access::Write, &mut message.iov)?;
        let number = match &self.body {
            Body::Empty => return Ok(()),
            Body::Copied(bytes) => return scatter(bytes, pieces),
            Body::Kept(number) => {
                let Some(data) = self.core.look(*number) else {
                    return Err(gone());
                };
                // SAFETY: UCX keeps `len` bytes there until they are released, which drop does after this.
                let bytes = unsafe { std::slice::from_raw_parts(data.cast_const().cast::<u8>(), self.len as usize) };
                return scatter(bytes, pieces);
            }
            Body::Promised(number) => *number,
        };
        let Some(descriptor) = self.core.take(number) else {
            return Err(gone());
        };
        self.body = Body::Empty;
        for piece in pieces {
            tally.hold_piece(&piece.memory);
        }
        tally.list();
        let mut param = message_param(pieces);
        param.cb = ucp_callback {
            recv_am: Some(message_received),
        };
        let (buffer, count) = buffer_of(&message.iov);
        message.tally = Some(Rc::clone(&tally.core));
        let leaked = Box::into_raw(message);
        param.user_data = leaked.cast();
        tally.begin();
        let receive = self.worker.library().ucp().ucp_am_recv_data_nbx;
        // SAFETY: a live worker and a descriptor it gave, used once; the list belongs to the leaked message and the
        // pieces to writable memory that the tally keeps, until the callback came.
        let posted = unsafe { receive(worker, descriptor, buffer, count, &raw const param) };
        reclaim(posted, leaked);
        tally.posted("receive", posted)
    }
}

fn scatter(bytes: &[u8], pieces: &[Piece]) -> Result<()> {
    let mut at = 0;
    for piece in pieces {
        let end = at + piece.len as usize;
        piece.memory.region()?.write_at(piece.offset, &bytes[at..end])?;
        at = end;
    }
    Ok(())
}

#[cold]
fn gone() -> Error {
    Error::new(ErrorKind::Closed, "receive", "the worker was destroyed")
}

impl Drop for Incoming {
    fn drop(&mut self) {
        match self.body {
            Body::Kept(number) => {
                self.core
                    .eager_bytes
                    .set(self.core.eager_bytes.get().saturating_sub(self.len));
                self.core.give_back(number);
            }
            Body::Promised(number) => self.core.give_back(number),
            Body::Empty | Body::Copied(_) => {}
        }
    }
}

impl InboxCore {
    fn look(&self, number: u64) -> Option<*mut c_void> {
        self.held
            .borrow()
            .iter()
            .find(|(held, _)| *held == number)
            .map(|(_, data)| *data)
    }

    fn take(&self, number: u64) -> Option<*mut c_void> {
        let mut held = self.held.borrow_mut();
        let at = held.iter().position(|(held, _)| *held == number)?;
        Some(held.swap_remove(at).1)
    }

    fn give_back(&self, number: u64) {
        let data = self.take(number);
        if let Some(data) = data.filter(|_| !crate::fork::forked()) {
            // SAFETY: data that UCX kept for us, given back once; the worker is alive, since `close` empties `held`.
            unsafe { (self.release)(self.worker, data) };
        }
    }

    /// Gives everything back; called before the worker is destroyed.
    pub(crate) fn close(&self) {
        self.closed.set(true);
        self.queue.borrow_mut().clear();
        let held = std::mem::take(&mut *self.held.borrow_mut());
        for (_, data) in held {
            // SAFETY: as in `give_back`; the worker is about to go and has not gone.
            unsafe { (self.release)(self.worker, data) };
        }
    }

    fn accept(&self, header: &[u8], data: *mut c_void, len: usize, attributes: u64) -> ucs_status_t {
        let promised = attributes & UCP_AM_RECV_ATTR_FLAG_RNDV != 0;
        let staged = if promised { 0 } else { len as u64 };
        let full = self.queue.borrow().len() >= self.limits.messages
            || self.eager_bytes.get() + staged > self.limits.eager_bytes;
        if full || self.closed.get() {
            self.dropped.set(self.dropped.get() + 1);
            return UCS_OK;
        }
        let keep = promised || attributes & UCP_AM_RECV_ATTR_FLAG_DATA != 0;
        let body = if len == 0 {
            Body::Empty
        } else if keep {
            let number = self.serial.get();
            self.serial.set(number + 1);
            self.held.borrow_mut().push((number, data));
            self.eager_bytes.set(self.eager_bytes.get() + staged);
            if promised {
                Body::Promised(number)
            } else {
                Body::Kept(number)
            }
        } else {
            // SAFETY: UCX gave `len` bytes that live until the callback returns.
            Body::Copied(unsafe { std::slice::from_raw_parts(data.cast_const().cast::<u8>(), len) }.to_vec())
        };
        let status = if matches!(body, Body::Kept(_) | Body::Promised(_)) {
            UCS_INPROGRESS
        } else {
            UCS_OK
        };
        self.queue.borrow_mut().push_back(Arrived {
            header: header.to_vec(),
            len: len as u64,
            body,
        });
        status
    }
}

unsafe extern "C" fn arrived(
    argument: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const ucp_am_recv_param_t,
) -> ucs_status_t {
    // SAFETY: the core given with the handler, which the worker lists until it is destroyed.
    let core = unsafe { &*argument.cast_const().cast::<InboxCore>() };
    // SAFETY: UCX's struct, which lives until the callback returns.
    let attributes = unsafe { (*param).recv_attr };
    let header: &[u8] = if header.is_null() || header_length == 0 {
        &[]
    } else {
        // SAFETY: UCX gave that many bytes, which live until the callback returns.
        unsafe { std::slice::from_raw_parts(header.cast::<u8>(), header_length) }
    };
    guard::callback(UCS_OK, || core.accept(header, data, length, attributes))
}
