//! Many ranges in one call: UCX's scatter list, which some adapters take whole.
//!
//! From 1.23 on every lane has it, most of them as a loop inside UCX: as fast as ours over `cma`, a quarter slower
//! over `tcp`. Whether a lane takes lists by itself is asked of a put that is made for the purpose; where
//! `Probe::emulated` says no, `Endpoint::post` is the way.

use std::ffi::c_void;
use std::rc::Rc;
use std::sync::Arc;

use pdkv_core::{Error, ErrorKind, Result};

use crate::abi::sgl::*;
use crate::abi::{Zeroed, ucp_callback, ucp_mem_h, ucp_request_param_t, ucp_rkey_h, ucs_status_t};
use crate::endpoint::{Endpoint, Span, operation_param};
use crate::guard;
use crate::library::Version;
use crate::memory::{Access, MemoryHandle};
use crate::probe::Probe;
use crate::remote::RemoteKey;
use crate::status::{self, Posted};
use crate::tally::{Tally, TallyCore};

/// The first release whose transports carry lists out; in 1.22 the call exists and fails.
const SINCE: Version = Version::new(1, 23, 0);

/// The arrays of one list, which UCX reads until the callback.
struct List {
    tally: Option<Rc<TallyCore>>,
    buffers: Vec<*mut c_void>,
    lengths: Vec<usize>,
    memhs: Vec<ucp_mem_h>,
    addresses: Vec<u64>,
    keys: Vec<ucp_rkey_h>,
}

unsafe extern "C" fn list_done(request: *mut c_void, status: ucs_status_t, argument: *mut c_void) {
    // SAFETY: the box that `put_list` leaked for this request, taken back once.
    let mut list = unsafe { Box::from_raw(argument.cast::<List>()) };
    let Some(tally) = list.tally.take() else { return };
    let free = tally.free();
    guard::callback((), || {
        tally.done(status);
        drop((tally, list));
    });
    // SAFETY: the request that just completed, freed once.
    unsafe { free(request) };
}

impl Endpoint {
    /// Puts all spans by one call. It counts as one operation in the tally.
    ///
    /// # Errors
    /// `Unsupported` before UCX 1.23; otherwise as for [`put`](Self::put).
    pub fn put_list(&self, local: &Arc<MemoryHandle>, remote: &RemoteKey, spans: &[Span], tally: &Tally) -> Result<()> {
        let list = self.list(local, remote, spans, tally)?;
        if list.buffers.is_empty() {
            return Ok(());
        }
        let ep = self.enter("put a list")?;
        let (here, there, count) = (list.local(), list.remote(), list.buffers.len());
        let mut param = operation_param(tally);
        describe(&mut param, &there, count);
        param.cb = ucp_callback { send: Some(list_done) };
        let leaked = Box::into_raw(Box::new(List {
            tally: Some(Rc::clone(&tally.core)),
            ..list
        }));
        param.user_data = leaked.cast();
        tally.begin();
        let put = self.worker.library().ucp().ucp_put_nbx;
        // SAFETY: a live endpoint and a key of it; the arrays belong to the leaked list until the callback, and the
        // memory and the key to the tally. The two descriptors are copied by the call.
        let posted = unsafe {
            put(
                ep,
                (&raw const here).cast(),
                count,
                u64::MAX,
                std::ptr::null_mut(),
                &raw const param,
            )
        };
        if !matches!(status::posted(posted), Posted::Request(_)) {
            // SAFETY: leaked above, and UCX is done with it.
            drop(unsafe { Box::from_raw(leaked) });
        }
        tally.posted("put a list", posted)
    }

    /// Puts a list of one span and reads back how UCX does it, as [`probe_put`](Self::probe_put) does.
    ///
    /// # Errors
    /// As for [`put_list`](Self::put_list) and `probe_put`. The outcome in the tally counts, too: a lane may
    /// refuse a list only there.
    pub fn probe_list(
        &self,
        local: &Arc<MemoryHandle>,
        remote: &RemoteKey,
        span: Span,
        tally: &Tally,
    ) -> Result<Probe> {
        let list = self.list(local, remote, &[span], tally)?;
        let ep = self.enter("probe a list")?;
        let (here, there, count) = (list.local(), list.remote(), list.buffers.len());
        let put = self.worker.library().ucp().ucp_put_nbx;
        self.ask(tally, Some(Box::new(list)), |param| {
            describe(param, &there, count);
            // SAFETY: as in `put_list`; the arrays, which don't move with their list, are kept until the callback.
            unsafe {
                put(
                    ep,
                    (&raw const here).cast(),
                    count,
                    u64::MAX,
                    std::ptr::null_mut(),
                    &raw const *param,
                )
            }
        })
    }

    fn list(&self, local: &Arc<MemoryHandle>, remote: &RemoteKey, spans: &[Span], tally: &Tally) -> Result<List> {
        let operation = "put a list";
        self.enter(operation)?;
        self.same_worker(operation, tally)?;
        self.checked(operation, local, remote)?;
        let version = self.worker.library().version();
        if version < SINCE {
            let message = format!("UCX {version} has no transport that takes lists; {SINCE} is the first");
            return Err(Error::new(ErrorKind::Unsupported, operation, message));
        }
        let mut list = List {
            tally: None,
            buffers: Vec::with_capacity(spans.len()),
            lengths: Vec::with_capacity(spans.len()),
            memhs: vec![local.handle(); spans.len()],
            addresses: Vec::with_capacity(spans.len()),
            keys: vec![remote.core.handle(); spans.len()],
        };
        for span in spans.iter().filter(|span| span.len > 0) {
            list.buffers
                .push(local.address_of(operation, Access::Read, span.local_offset, span.len)?);
            list.addresses
                .push(remote.address_of(operation, span.remote_offset, span.len)?);
            list.lengths.push(span.len as usize);
        }
        tally.hold(local);
        tally.hold_key(&remote.core);
        Ok(list)
    }
}

fn describe(param: &mut ucp_request_param_t, there: &ucp_dt_remote_sgl_t, count: usize) {
    param.op_attr_mask |= crate::abi::constants::UCP_OP_ATTR_FIELD_DATATYPE
        | UCP_OP_ATTR_FIELD_REMOTE_DATATYPE
        | UCP_OP_ATTR_FIELD_REMOTE
        | UCP_OP_ATTR_FIELD_REMOTE_COUNT;
    param.datatype = UCP_DATATYPE_SGL;
    param.remote_datatype = UCP_DATATYPE_SGL;
    param.remote = (&raw const *there).cast();
    param.remote_count = count;
}

impl List {
    fn local(&self) -> ucp_dt_local_sgl_t {
        let mut local = ucp_dt_local_sgl_t::zeroed();
        local.field_mask =
            UCP_DT_LOCAL_SGL_FIELD_BUFFERS | UCP_DT_LOCAL_SGL_FIELD_LENGTHS | UCP_DT_LOCAL_SGL_FIELD_MEMHS;
        local.buffers = self.buffers.as_ptr();
        local.lengths = self.lengths.as_ptr();
        local.memhs = self.memhs.as_ptr();
        local
    }

    fn remote(&self) -> ucp_dt_remote_sgl_t {
        let mut remote = ucp_dt_remote_sgl_t::zeroed();
        remote.field_mask =
            UCP_DT_REMOTE_SGL_FIELD_REMOTE_ADDRS | UCP_DT_REMOTE_SGL_FIELD_LENGTHS | UCP_DT_REMOTE_SGL_FIELD_RKEYS;
        remote.remote_addrs = self.addresses.as_ptr();
        remote.lengths = self.lengths.as_ptr();
        remote.rkeys = self.keys.as_ptr();
        remote
    }
}
