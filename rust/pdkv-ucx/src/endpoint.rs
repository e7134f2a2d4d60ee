//! One connection of a worker to another: one-sided copies, messages, flush, close, and how it failed.

use std::cell::Cell;
use std::ffi::c_void;
use std::rc::Rc;
use std::sync::Arc;

use pdkv_core::{Error, ErrorKind, Result};

use crate::abi::constants::*;
use crate::abi::{Zeroed, ucp_callback, ucp_ep_h, ucp_ep_params_t, ucp_request_param_t, ucs_status_t};
use crate::library::Version;
use crate::memory::{Access, MemoryHandle};
use crate::remote::RemoteKey;
use crate::sealed::{self, Kind};
use crate::status::Posted;
use crate::tally::{Tally, TallyCore, operation_done};
use crate::worker::WorkerCore;
use crate::{guard, log, status};

/// What UCX does about a peer that goes away. Both ends of a connection should use the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorMode {
    /// It may not notice. Every lane is allowed; destroying the worker is the way out.
    None,
    /// It completes every operation with an error. Shared memory and kernel copies are not allowed then.
    Peer,
}

/// Which way a one-sided copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From local memory into the peer's.
    Put,
    /// From the peer's memory into local memory.
    Get,
}

/// A connection. It lives until it is closed or its worker is destroyed.
pub struct Endpoint {
    pub(crate) core: Rc<EpCore>,
    pub(crate) worker: Rc<WorkerCore>,
}

/// What the error callback writes to; `handle` is null once closed.
pub(crate) struct EpCore {
    handle: Cell<ucp_ep_h>,
    failure: Cell<ucs_status_t>,
    ready: Cell<bool>,
    free: unsafe extern "C" fn(*mut c_void),
}

impl EpCore {
    pub(crate) fn forget(&self) {
        self.handle.set(std::ptr::null_mut());
    }

    fn connected(&self, status: ucs_status_t) {
        if status >= 0 {
            self.ready.set(true);
        } else if self.failure.get() == 0 {
            self.failure.set(status);
        }
    }

    /// Whether the handshake is over, one way or the other.
    pub(crate) fn settled(&self) -> bool {
        self.ready.get() || self.handle.get().is_null()
    }
}

/// The callback of the flush that waits for the handshake.
unsafe extern "C" fn connected(request: *mut c_void, status: ucs_status_t, argument: *mut c_void) {
    // SAFETY: the core given with the flush, which the worker lists until it is destroyed.
    let core = unsafe { &*argument.cast_const().cast::<EpCore>() };
    guard::callback((), || core.connected(status));
    // SAFETY: the request that just completed, freed once.
    unsafe { (core.free)(request) };
}

unsafe extern "C" fn failed(argument: *mut c_void, _ep: ucp_ep_h, status: ucs_status_t) {
    // SAFETY: the core given at creation, which the worker lists until it is destroyed.
    let core = unsafe { &*argument.cast_const().cast::<EpCore>() };
    guard::callback((), || {
        if core.failure.get() == 0 {
            core.failure.set(status);
        }
    });
}

/// A flush under way. Old releases complete it with success although the endpoint failed meanwhile.
struct Flush {
    tally: Rc<TallyCore>,
    endpoint: Rc<EpCore>,
}

unsafe extern "C" fn flushed(request: *mut c_void, status: ucs_status_t, argument: *mut c_void) {
    // SAFETY: the count that `Endpoint::flush` leaked for this callback, taken back once.
    let flush = unsafe { Rc::from_raw(argument.cast_const().cast::<Flush>()) };
    let free = flush.tally.free();
    guard::callback((), || {
        let failure = flush.endpoint.failure.get();
        flush
            .tally
            .done(if status >= 0 && failure < 0 { failure } else { status });
        drop(flush);
    });
    // SAFETY: the request that just completed, freed once.
    unsafe { free(request) };
}

impl Endpoint {
    pub(crate) fn connect(worker: &Rc<WorkerCore>, address: &[u8], mode: ErrorMode) -> Result<Self> {
        let handle = worker.enter("connect")?;
        let address = judge(worker.library().version(), address)?;
        let core = Rc::new(EpCore {
            handle: Cell::new(std::ptr::null_mut()),
            failure: Cell::new(0),
            ready: Cell::new(false),
            free: worker.library().ucp().ucp_request_free,
        });
        worker.list_endpoint(&core);
        let mut params = ucp_ep_params_t::zeroed();
        params.field_mask =
            UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
        params.address = address.as_ptr().cast();
        params.err_mode = match mode {
            ErrorMode::None => UCP_ERR_HANDLING_MODE_NONE,
            ErrorMode::Peer => UCP_ERR_HANDLING_MODE_PEER,
        };
        params.err_handler.cb = Some(failed);
        params.err_handler.arg = Rc::as_ptr(&core).cast_mut().cast();
        let mut ep = std::ptr::null_mut();
        log::take_last();
        // SAFETY: a live worker; the address is whole by its checksum and padded; the callback's argument lives as
        // long as the worker, which lists it.
        let created = unsafe { (worker.library().ucp().ucp_ep_create)(handle, &raw const params, &raw mut ep) };
        status::check("connect", created).map_err(|error| error.with("peer_ucx", address.version))?;
        core.handle.set(ep);
        let mut param = ucp_request_param_t::zeroed();
        param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
        param.cb = ucp_callback { send: Some(connected) };
        param.user_data = Rc::as_ptr(&core).cast_mut().cast();
        // SAFETY: a live endpoint; the callback's argument is the core, as above.
        let flushed = unsafe { (worker.library().ucp().ucp_ep_flush_nbx)(ep, &raw const param) };
        match status::posted(flushed) {
            Posted::Request(_) => {}
            Posted::Done => core.connected(0),
            Posted::Failed(status) => core.connected(status),
        }
        Ok(Self {
            core,
            worker: Rc::clone(worker),
        })
    }

    /// Whether the handshake with the peer is complete. Both ends must be progressed until it is; what is posted
    /// before waits for it. A worker should not be destroyed before: see [`Library::has_assertions`].
    ///
    /// [`Library::has_assertions`]: crate::Library::has_assertions
    pub fn ready(&self) -> bool {
        self.core.ready.get()
    }

    /// How it failed, if UCX noticed. In mode `None` it may not.
    pub fn failure(&self) -> Option<Error> {
        let status = self.core.failure.get();
        (status != 0).then(|| status::error("connection over UCX", status))
    }

    /// Makes a key of the peer usable. `base` and `len` are the peer's address and length of the memory.
    ///
    /// # Errors
    /// `Handshake` for bytes that are no such key, or a range past the end of the address space.
    pub fn unpack(&self, key: &[u8], base: u64, len: u64) -> Result<RemoteKey> {
        let ep = self.enter("unpack a key")?;
        let key = sealed::open(Kind::Key, key)?;
        if base.checked_add(len).is_none() {
            return Err(Error::new(
                ErrorKind::Handshake,
                "unpack a key",
                format!("`{len}` bytes at `{base:#x}` pass the end of the address space"),
            ));
        }
        let mut handle = std::ptr::null_mut();
        log::take_last();
        // SAFETY: a live endpoint; the key is whole by its checksum and padded.
        let unpacked =
            unsafe { (self.worker.library().ucp().ucp_ep_rkey_unpack)(ep, key.as_ptr().cast(), &raw mut handle) };
        status::check("unpack a key", unpacked)?;
        Ok(RemoteKey::new(handle, &self.core, &self.worker, base, len))
    }

    /// Copies `len` bytes from local memory into the peer's. Completion in the tally means that the local bytes
    /// may change again; that they have arrived means a [`flush`](Self::flush) after it.
    ///
    /// # Errors
    /// `Region` for a range that isn't inside (nothing is posted or counted); what UCX says when it fails at once
    /// (which is counted).
    pub fn put(
        &self,
        local: &Arc<MemoryHandle>,
        local_offset: u64,
        remote: &RemoteKey,
        remote_offset: u64,
        len: u64,
        tally: &Tally,
    ) -> Result<()> {
        let span = Span {
            local_offset,
            remote_offset,
            len,
        };
        self.post(Direction::Put, local, remote, &[span], tally)
    }

    /// Copies `len` bytes from the peer's memory into local memory. Completion means that they are here.
    ///
    /// # Errors
    /// As for [`put`](Self::put).
    pub fn get(
        &self,
        local: &Arc<MemoryHandle>,
        local_offset: u64,
        remote: &RemoteKey,
        remote_offset: u64,
        len: u64,
        tally: &Tally,
    ) -> Result<()> {
        let span = Span {
            local_offset,
            remote_offset,
            len,
        };
        self.post(Direction::Get, local, remote, &[span], tally)
    }

    /// Posts one copy per span. It stops at the first that fails at once, which is counted in the tally.
    ///
    /// # Errors
    /// As for [`put`](Self::put); all spans are checked before the first is posted.
    pub fn post(
        &self,
        direction: Direction,
        local: &Arc<MemoryHandle>,
        remote: &RemoteKey,
        spans: &[Span],
        tally: &Tally,
    ) -> Result<()> {
        let (operation, access) = match direction {
            Direction::Put => ("put", Access::Read),
            Direction::Get => ("get", Access::Write),
        };
        let ep = self.enter(operation)?;
        self.same_worker(operation, tally)?;
        self.checked(operation, local, remote)?;
        for span in spans {
            local.address_of(operation, access, span.local_offset, span.len)?;
            remote.address_of(operation, span.remote_offset, span.len)?;
        }
        tally.hold(local);
        tally.hold_key(&remote.core);
        let key = remote.core.handle();
        let mut param = operation_param(tally);
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
        param.memh = local.handle();
        param.memory_type = local.memory_type();
        let ucp = self.worker.library().ucp();
        let last = spans.iter().rposition(|span| span.len > 0).unwrap_or(0);
        for (at, span) in spans.iter().enumerate().filter(|(_, span)| span.len > 0) {
            let local = local.address_of(operation, access, span.local_offset, span.len)?;
            let remote = remote.address_of(operation, span.remote_offset, span.len)?;
            // An adapter may collect what has this flag until something without it comes: the last one.
            if at < last {
                param.op_attr_mask |= UCP_OP_ATTR_FLAG_MULTI_SEND;
            } else {
                param.op_attr_mask &= !UCP_OP_ATTR_FLAG_MULTI_SEND;
            }
            let len = span.len as usize;
            tally.begin();
            let posted = match direction {
                // SAFETY: a live endpoint and a key unpacked on it; the local range lies in a region that the tally
                // keeps until the callback came, and the parameters name that tally.
                Direction::Put => unsafe { (ucp.ucp_put_nbx)(ep, local, len, remote, key, &raw const param) },
                // SAFETY: as above, and the region is writable.
                Direction::Get => unsafe { (ucp.ucp_get_nbx)(ep, local, len, remote, key, &raw const param) },
            };
            tally.posted(operation, posted)?;
        }
        Ok(())
    }

    /// Completes in the tally once everything posted before has arrived at the peer, or failed: a flush that
    /// succeeds proves nothing about the operations before it, which are counted each on its own.
    ///
    /// # Errors
    /// What UCX says when it fails at once (which is counted).
    pub fn flush(&self, tally: &Tally) -> Result<()> {
        let ep = self.enter("flush")?;
        self.same_worker("flush", tally)?;
        tally.list();
        let flush = Rc::new(Flush {
            tally: Rc::clone(&tally.core),
            endpoint: Rc::clone(&self.core),
        });
        let mut param = ucp_request_param_t::zeroed();
        param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
        param.cb = ucp_callback { send: Some(flushed) };
        param.user_data = Rc::into_raw(Rc::clone(&flush)).cast_mut().cast();
        tally.begin();
        // SAFETY: a live endpoint; the callback's argument is a count of the flush that only the callback takes back.
        let posted = unsafe { (self.worker.library().ucp().ucp_ep_flush_nbx)(ep, &raw const param) };
        if !matches!(status::posted(posted), Posted::Request(_)) {
            // SAFETY: the count leaked above, for which no callback comes.
            drop(unsafe { Rc::from_raw(param.user_data.cast_const().cast::<Flush>()) });
        }
        tally.posted("flush", posted)
    }

    /// Flushes and closes. The tally's worker must go on being progressed until it is idle.
    ///
    /// # Errors
    /// What UCX says when it fails at once (which is counted); the endpoint is closed all the same.
    pub fn close(self, tally: &Tally) -> Result<()> {
        let ep = self.enter("close")?;
        self.same_worker("close", tally)?;
        tally.list();
        let param = operation_param(tally);
        tally.begin();
        self.core.forget();
        // SAFETY: a live endpoint, which nobody finds any more; the parameters name a tally that the worker lists.
        let posted = unsafe { (self.worker.library().ucp().ucp_ep_close_nbx)(ep, &raw const param) };
        tally.posted("close", posted)
    }

    /// # Errors
    /// `Closed` when it or its worker is gone, `Unsupported` in a forked child.
    #[inline]
    pub(crate) fn enter(&self, operation: &'static str) -> Result<ucp_ep_h> {
        self.worker.enter(operation)?;
        let ep = self.core.handle.get();
        if ep.is_null() {
            return Err(Error::new(ErrorKind::Closed, operation, "the endpoint was closed"));
        }
        Ok(ep)
    }

    #[inline]
    pub(crate) fn same_worker(&self, operation: &'static str, tally: &Tally) -> Result<()> {
        if Rc::ptr_eq(&self.worker, &tally.worker) {
            Ok(())
        } else {
            Err(stranger(operation, "tally", "worker"))
        }
    }

    #[inline]
    pub(crate) fn checked(&self, operation: &'static str, local: &MemoryHandle, remote: &RemoteKey) -> Result<()> {
        if !local.context().same(self.worker.context()) {
            return Err(stranger(operation, "memory", "context"));
        }
        if !Rc::ptr_eq(&remote.core.endpoint, &self.core) || remote.core.handle().is_null() {
            return Err(stranger(operation, "key", "endpoint"));
        }
        Ok(())
    }
}

/// One range of a one-sided copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Where it begins in local memory.
    pub local_offset: u64,
    /// Where it begins in the peer's memory.
    pub remote_offset: u64,
    /// How many bytes it has.
    pub len: u64,
}

/// Opens the address of a peer's worker, if a worker of this release may be given it.
pub(crate) fn judge(ours: Version, address: &[u8]) -> Result<sealed::Opened> {
    let address = sealed::open(Kind::Address, address)?;
    known_form(&address)?;
    understood(ours, address.version)?;
    Ok(address)
}

/// Releases that were tried with each other and understand each other; others bring a connection up and then hang
/// in it, or end the process over it.
fn understood(ours: Version, theirs: Version) -> Result<()> {
    const NEW: Version = Version::new(1, 22, 0);
    let same = (ours.major, ours.minor) == (theirs.major, theirs.minor);
    if same || (ours >= NEW && theirs >= NEW) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Unsupported,
        "connect",
        format!("UCX {ours} and {theirs} don't understand each other"),
    )
    .with_hint(format!("use the same release at both ends, or {NEW} and newer at both")))
}

/// UCX ends the process over an address of a form it doesn't know; the form is the low half of the first byte.
fn known_form(address: &sealed::Opened) -> Result<()> {
    const NEWEST: u8 = 1;
    let form = address.first() & 0x0f;
    if form <= NEWEST {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Handshake,
        "connect",
        format!("the peer's worker address has form `{form}`, which UCX doesn't know up to now"),
    ))
}

#[cold]
pub(crate) fn stranger(operation: &'static str, what: &str, owner: &str) -> Error {
    Error::new(
        ErrorKind::Internal,
        operation,
        format!("the {what} belongs to another {owner}"),
    )
}

/// Parameters with the callback and argument of a tally.
#[inline]
pub(crate) fn operation_param(tally: &Tally) -> ucp_request_param_t {
    let mut param = ucp_request_param_t::zeroed();
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb = ucp_callback {
        send: Some(operation_done),
    };
    param.user_data = tally.argument();
    param
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_releases_that_were_tried_together_are_connected() {
        let release = |minor, release| Version::new(1, minor, release);
        for (one, two, fits) in [
            (release(13, 0), release(13, 1), true),
            (release(22, 0), release(23, 0), true),
            (release(22, 0), release(30, 0), true),
            (release(13, 1), release(22, 0), false),
            (release(13, 1), release(14, 0), false),
            (release(21, 0), release(22, 0), false),
        ] {
            assert_eq!(understood(one, two).is_ok(), fits, "{one} {two}");
            assert_eq!(understood(two, one).is_ok(), fits, "{two} {one}");
        }
    }
}
