//! A peer's memory as one endpoint reaches it: its key unpacked, its first address and its length.

use std::cell::Cell;
use std::rc::Rc;

use pdkv_core::Result;

use crate::abi::ucp_rkey_h;
use crate::endpoint::EpCore;
use crate::memory::outside;
use crate::worker::WorkerCore;

/// Memory of the peer. It is a promise of the peer's, not a fact: over emulated lanes UCX writes where it is
/// told, and only an adapter or the kernel checks.
pub struct RemoteKey {
    pub(crate) core: Rc<KeyCore>,
    base: u64,
    len: u64,
}

/// The unpacked key. Destroyed when neither the owner nor a tally holds it, or with its worker.
pub(crate) struct KeyCore {
    handle: Cell<ucp_rkey_h>,
    pub(crate) endpoint: Rc<EpCore>,
    worker: Rc<WorkerCore>,
}

impl RemoteKey {
    pub(crate) fn new(handle: ucp_rkey_h, endpoint: &Rc<EpCore>, worker: &Rc<WorkerCore>, base: u64, len: u64) -> Self {
        let core = Rc::new(KeyCore {
            handle: Cell::new(handle),
            endpoint: Rc::clone(endpoint),
            worker: Rc::clone(worker),
        });
        worker.list_key(&core);
        Self { core, base, len }
    }

    /// How many bytes the peer said it has.
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The peer's address of a checked range.
    #[inline]
    pub(crate) fn address_of(&self, operation: &'static str, offset: u64, len: u64) -> Result<u64> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(outside(operation, offset, len, self.len));
        }
        Ok(self.base + offset)
    }
}

impl KeyCore {
    #[inline]
    pub(crate) fn handle(&self) -> ucp_rkey_h {
        self.handle.get()
    }

    /// Destroys the key now; nothing may be under way with it.
    pub(crate) fn destroy(&self) {
        let handle = self.handle.replace(std::ptr::null_mut());
        if !handle.is_null() && self.worker.alive() {
            // SAFETY: unpacked once and taken just now; its worker and thus its endpoint's state are alive, and no
            // operation uses it, since tallies hold the core until their callbacks came.
            unsafe { (self.worker.library().ucp().ucp_rkey_destroy)(handle) };
        }
    }

    /// Forgets the key without a call: its worker goes while operations with it are under way.
    pub(crate) fn forget(&self) {
        self.handle.set(std::ptr::null_mut());
    }
}

impl Drop for KeyCore {
    fn drop(&mut self) {
        self.destroy();
    }
}
