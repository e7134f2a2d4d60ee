//! The plain loop of `ucp_put_nbx` or `ucp_get_nbx` over given spans, for a benchmark to hold pdkv against.
//!
//! Memory handles, a window of operations, one flush, and a callback that counts: what remains is UCX and the
//! machine. Nothing is merged, planned or checked inside the loop; every range is checked before its clock starts.

mod end;

use std::cell::Cell;
use std::ffi::c_void;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pdkv_core::{Error, ErrorKind, Result};

use crate::abi::constants::*;
use crate::abi::{Zeroed, ucp_callback, ucp_request_param_t, ucs_status_t};
use crate::memory::{Access, MemoryHandle};
use crate::status::{self, Posted};
use crate::worker::DRAIN_STILL;
use crate::{Direction, Endpoint, RemoteKey, Tally, Worker};

pub use end::{Job, LoopEnd, Peer};

const OPERATION: &str = "limit_ucx";
/// Nothing completed for this long: the peer is gone and UCX doesn't notice.
const STUCK: Duration = Duration::from_secs(20);

/// What the loop moves: equal blocks between pairs of offsets.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    /// Where each block begins in local memory.
    pub local: &'a [u64],
    /// Where it begins in the peer's.
    pub remote: &'a [u64],
    /// How long each is.
    pub bytes: u64,
}

/// What callbacks write to.
struct Count {
    done: Cell<usize>,
    failed: Cell<ucs_status_t>,
    free: unsafe extern "C" fn(*mut c_void),
}

unsafe extern "C" fn counted(request: *mut c_void, status: ucs_status_t, argument: *mut c_void) {
    // SAFETY: the count that `copy` gave, of which it leaks a holder rather than let it go while operations are under
    // way.
    let count = unsafe { &*argument.cast_const().cast::<Count>() };
    count.done.set(count.done.get() + 1);
    if status < 0 {
        count.failed.set(status);
    }
    // SAFETY: the request that just completed, freed once.
    unsafe { (count.free)(request) };
}

/// Copies blocks one by one, at most `window` of them under way, flushes once, and tells how long that took.
///
/// # Errors
/// `Region` when a block doesn't lie inside, `Config` for lists of unequal length or no window, and whatever UCX
/// says of an operation; `PeerLost` when nothing completes any more.
pub fn copy(
    worker: &Worker,
    endpoint: &Endpoint,
    direction: Direction,
    local: &Arc<MemoryHandle>,
    remote: &RemoteKey,
    blocks: Blocks<'_>,
    window: usize,
) -> Result<Duration> {
    check(direction, local, remote, blocks, window)?;
    let ep = endpoint.enter(OPERATION)?;
    endpoint.checked(OPERATION, local, remote)?;
    let ucp = worker.core().library().ucp();
    let count = Rc::new(Count {
        done: Cell::new(0),
        failed: Cell::new(UCS_OK),
        free: ucp.ucp_request_free,
    });
    // The loop is one operation of this tally: as long as it isn't over, the worker keeps memory and key.
    let tally = Tally::new(worker);
    tally.hold(local);
    tally.hold_key(&remote.core);
    tally.begin();
    let mut param = ucp_request_param_t::zeroed();
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK
        | UCP_OP_ATTR_FIELD_USER_DATA
        | UCP_OP_ATTR_FIELD_MEMH
        | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    param.cb = ucp_callback { send: Some(counted) };
    param.user_data = Rc::as_ptr(&count).cast_mut().cast();
    param.memh = local.handle();
    param.memory_type = local.memory_type();
    let (base, key, len) = (local.region().address(), remote.core.handle(), blocks.bytes as usize);
    let remote_base = remote.address_of(OPERATION, 0, 0)?;
    let mut run = Run {
        worker,
        tally,
        count,
        posted: 0,
    };
    let started = Instant::now();
    for (&here, &there) in blocks.local.iter().zip(blocks.remote) {
        let address = std::ptr::with_exposed_provenance_mut::<c_void>((base + here) as usize);
        let posted = match direction {
            // SAFETY: a live endpoint and a key of it; the range was checked against the region, which the tally
            // keeps until every operation has ended or the worker is gone.
            Direction::Put => unsafe {
                (ucp.ucp_put_nbx)(ep, address, len, remote_base + there, key, &raw const param)
            },
            // SAFETY: as above, and the region is writable.
            Direction::Get => unsafe {
                (ucp.ucp_get_nbx)(ep, address, len, remote_base + there, key, &raw const param)
            },
        };
        run.count(posted)?;
        if run.under_way() >= window {
            run.wait(window - 1)?;
        }
    }
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    // SAFETY: a live endpoint, and parameters that name a count which outlives the flush.
    let flushed = unsafe { (ucp.ucp_ep_flush_nbx)(ep, &raw const param) };
    run.count(flushed)?;
    run.wait(0)?;
    Ok(started.elapsed())
}

/// A loop under way.
struct Run<'a> {
    worker: &'a Worker,
    tally: Tally,
    count: Rc<Count>,
    posted: usize,
}

impl Run<'_> {
    fn under_way(&self) -> usize {
        self.posted - self.count.done.get()
    }

    fn count(&mut self, pointer: crate::abi::ucs_status_ptr_t) -> Result<()> {
        match status::posted(pointer) {
            Posted::Done => Ok(()),
            Posted::Request(_) => {
                self.posted += 1;
                Ok(())
            }
            Posted::Failed(status) => Err(status::error(OPERATION, status)),
        }
    }

    /// Progresses until at most `left` operations are under way.
    fn wait(&self, left: usize) -> Result<()> {
        let mut since: Option<Instant> = None;
        while self.under_way() > left {
            if self.worker.progress() {
                since = None;
            } else if since.get_or_insert_with(Instant::now).elapsed() > STUCK {
                let message = format!("`{}` operations did not complete", self.under_way());
                return Err(Error::new(ErrorKind::PeerLost, OPERATION, message));
            }
        }
        match self.count.failed.get() {
            UCS_OK => Ok(()),
            failed => Err(status::error(OPERATION, failed)),
        }
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        // What needs nobody ends now. What waits for a peer that is gone leaves its callbacks behind: the count stays
        // for them, and memory and key stay with the worker, whose tally stays busy.
        let mut still = 0;
        while self.under_way() > 0 && still < DRAIN_STILL {
            still = if self.worker.progress() { 0 } else { still + 1 };
        }
        if self.under_way() == 0 {
            self.tally.core.done(UCS_OK);
        } else {
            std::mem::forget(Rc::clone(&self.count));
        }
    }
}

fn check(
    direction: Direction,
    local: &MemoryHandle,
    remote: &RemoteKey,
    blocks: Blocks<'_>,
    window: usize,
) -> Result<()> {
    if blocks.local.len() != blocks.remote.len() {
        let message = format!(
            "`{}` blocks on one side, `{}` on the other",
            blocks.local.len(),
            blocks.remote.len()
        );
        return Err(Error::new(ErrorKind::Config, OPERATION, message));
    }
    if window == 0 {
        return Err(Error::new(
            ErrorKind::Config,
            OPERATION,
            "a window of `0` moves nothing",
        ));
    }
    let access = match direction {
        Direction::Put => Access::Read,
        Direction::Get => Access::Write,
    };
    for (&here, &there) in blocks.local.iter().zip(blocks.remote) {
        local.address_of(OPERATION, access, here, blocks.bytes)?;
        remote.address_of(OPERATION, there, blocks.bytes)?;
    }
    Ok(())
}
