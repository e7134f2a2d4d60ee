//! What UCX really does with a copy: asked of a put that is made for the purpose, and of the endpoint.

use std::any::Any;
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::rc::Rc;
use std::sync::Arc;

use pdkv_core::{Error, ErrorKind, Result};

use crate::abi::constants::transports::UCP_EP_ATTR_FIELD_TRANSPORTS;
use crate::abi::constants::*;
use crate::abi::{
    Zeroed, ucp_callback, ucp_ep_attr_t, ucp_request_attr_t, ucp_request_param_t, ucp_transport_entry_t,
    ucs_status_ptr_t, ucs_status_t,
};
use crate::endpoint::{Endpoint, operation_param};
use crate::guard;
use crate::memory::{Access, MemoryHandle};
use crate::print::printed;
use crate::remote::RemoteKey;
use crate::resource::{self, Resource};
use crate::status::{self, Posted};
use crate::symbols::string;
use crate::tally::{Tally, TallyCore};

const INFO_BYTES: usize = 512;
const MAX_LANES: usize = 64;

/// What a put ran over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// UCX's own description of the protocol.
    pub info: String,
    /// The transports that the description names; all of the endpoint's when it names none.
    pub transports: Vec<Resource>,
    /// Whether the description named them. Before 1.14 it is silent, and then a put over `posix` or `tcp` may be
    /// carried out by the peer's software even where `cma` is a lane: take nothing for granted.
    pub certain: bool,
    /// Whether UCX says that the peer's software does the work.
    pub emulated: bool,
}

/// A request that is to be asked before it is freed, whichever comes first: its callback or the answer.
struct Question {
    tally: Rc<TallyCore>,
    done: Cell<bool>,
    asked: Cell<bool>,
    #[expect(dead_code, reason = "what UCX reads until the callback; held for its drop")]
    keep: Option<Box<dyn Any>>,
}

unsafe extern "C" fn probe_done(request: *mut c_void, status: ucs_status_t, argument: *mut c_void) {
    // SAFETY: the count that `probe_put` leaked for this callback, taken back once.
    let question = unsafe { Rc::from_raw(argument.cast_const().cast::<Question>()) };
    let free = question.tally.free();
    let asked = question.asked.get();
    guard::callback((), || {
        question.done.set(true);
        question.tally.done(status);
        drop(question);
    });
    if asked {
        // SAFETY: completed and asked; freed once.
        unsafe { free(request) };
    }
}

impl Endpoint {
    /// The transports and devices of its lanes, once the connection is made; empty when UCX doesn't tell.
    pub fn resources(&self) -> Vec<Resource> {
        let Ok(ep) = self.enter("query") else {
            return Vec::new();
        };
        let ucp = self.worker.library().ucp();
        let mut entries: [ucp_transport_entry_t; MAX_LANES] = std::array::from_fn(|_| ucp_transport_entry_t::zeroed());
        let mut attributes = ucp_ep_attr_t::zeroed();
        attributes.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
        attributes.transports.entries = entries.as_mut_ptr();
        attributes.transports.num_entries = MAX_LANES as u32;
        attributes.transports.entry_size = size_of::<ucp_transport_entry_t>();
        // SAFETY: a live endpoint; the struct names an array of ours with its length. A library that doesn't know
        // the field ignores it, and the entries stay null.
        let queried = unsafe { (ucp.ucp_ep_query)(ep, &raw mut attributes) };
        let count = (attributes.transports.num_entries as usize).min(MAX_LANES);
        let mut found: Vec<Resource> = Vec::new();
        for entry in entries.iter().take(if queried == UCS_OK { count } else { 0 }) {
            if let (Some(transport), Some(device)) = (string(entry.transport_name), string(entry.device_name)) {
                let resource = Resource { transport, device };
                if !found.contains(&resource) {
                    found.push(resource);
                }
            }
        }
        if !found.is_empty() {
            return found;
        }
        // SAFETY: a live endpoint, and a stream that lives through the call.
        let print = printed(|stream| unsafe { (ucp.ucp_ep_print_info)(ep, stream) });
        resource::in_print(&print.unwrap_or_default())
    }

    /// Puts `len` bytes and reads back how UCX does it. The put is counted in the tally. Worth asking only after a
    /// first flush, since the lanes change while the connection is made.
    ///
    /// # Errors
    /// As for [`put`](Self::put); `Unsupported` when UCX gives no request to ask.
    pub fn probe_put(
        &self,
        local: &Arc<MemoryHandle>,
        local_offset: u64,
        remote: &RemoteKey,
        remote_offset: u64,
        len: u64,
        tally: &Tally,
    ) -> Result<Probe> {
        let ep = self.enter("probe")?;
        self.same_worker("probe", tally)?;
        self.checked("probe", local, remote)?;
        let from = local.address_of("probe", Access::Read, local_offset, len)?;
        let to = remote.address_of("probe", remote_offset, len)?;
        tally.hold(local);
        tally.hold_key(&remote.core);
        let (ucp, key) = (self.worker.library().ucp(), remote.core.handle());
        self.ask(tally, None, |param| {
            param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
            param.memh = local.handle();
            param.memory_type = local.memory_type();
            // SAFETY: as for `put`.
            unsafe { (ucp.ucp_put_nbx)(ep, from, len as usize, to, key, &raw const *param) }
        })
    }

    /// Gets `len` bytes and reads back how UCX does it, as [`probe_put`](Self::probe_put) does.
    ///
    /// # Errors
    /// As for [`get`](Self::get); `Unsupported` when UCX gives no request to ask.
    pub fn probe_get(
        &self,
        local: &Arc<MemoryHandle>,
        local_offset: u64,
        remote: &RemoteKey,
        remote_offset: u64,
        len: u64,
        tally: &Tally,
    ) -> Result<Probe> {
        let ep = self.enter("probe")?;
        self.same_worker("probe", tally)?;
        self.checked("probe", local, remote)?;
        let to = local.address_of("probe", Access::Write, local_offset, len)?;
        let from = remote.address_of("probe", remote_offset, len)?;
        tally.hold(local);
        tally.hold_key(&remote.core);
        let (ucp, key) = (self.worker.library().ucp(), remote.core.handle());
        self.ask(tally, None, |param| {
            param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
            param.memh = local.handle();
            param.memory_type = local.memory_type();
            // SAFETY: as for `get`.
            unsafe { (ucp.ucp_get_nbx)(ep, to, len as usize, from, key, &raw const *param) }
        })
    }

    /// Posts an operation that must not be freed before it was asked what it is.
    pub(crate) fn ask(
        &self,
        tally: &Tally,
        keep: Option<Box<dyn Any>>,
        post: impl FnOnce(&mut ucp_request_param_t) -> ucs_status_ptr_t,
    ) -> Result<Probe> {
        let ucp = self.worker.library().ucp();
        let question = Rc::new(Question {
            tally: Rc::clone(&tally.core),
            done: Cell::new(false),
            asked: Cell::new(false),
            keep,
        });
        let mut param = operation_param(tally);
        param.op_attr_mask |= UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
        param.cb = ucp_callback { send: Some(probe_done) };
        param.user_data = Rc::into_raw(Rc::clone(&question)).cast_mut().cast();
        tally.begin();
        // The callback's argument is a count of the question that only the callback takes back.
        let posted = post(&mut param);
        let Posted::Request(request) = status::posted(posted) else {
            // SAFETY: the count leaked above, for which no callback comes.
            drop(unsafe { Rc::from_raw(param.user_data.cast_const().cast::<Question>()) });
            tally.posted("probe", posted)?;
            return Err(Error::new(
                ErrorKind::Unsupported,
                "probe",
                "UCX completed the probe before it could be asked",
            ));
        };
        let mut text = [0 as c_char; INFO_BYTES];
        let mut attributes = ucp_request_attr_t::zeroed();
        attributes.field_mask = UCP_REQUEST_ATTR_FIELD_INFO_STRING | UCP_REQUEST_ATTR_FIELD_INFO_STRING_SIZE;
        attributes.debug_string = text.as_mut_ptr();
        attributes.debug_string_size = INFO_BYTES;
        // SAFETY: the request is not freed before it was asked: its callback waits for `asked`; the buffer is ours.
        let queried = unsafe { (ucp.ucp_request_query)(request, &raw mut attributes) };
        question.asked.set(true);
        if question.done.get() {
            // SAFETY: completed, and left to us by its callback; freed once.
            unsafe { (ucp.ucp_request_free)(request) };
        }
        status::check("probe", queried)?;
        text[INFO_BYTES - 1] = 0;
        // SAFETY: zero-terminated just above.
        let info = unsafe { CStr::from_ptr(text.as_ptr()) }
            .to_string_lossy()
            .trim()
            .to_owned();
        let lanes = self.resources();
        let named = named(&info, &lanes);
        Ok(Probe {
            certain: !named.is_empty(),
            emulated: info.contains("software emulation"),
            transports: if named.is_empty() { lanes } else { named },
            info,
        })
    }
}

/// Those of the lanes that the description names; none when it also names something that is no lane.
fn named(info: &str, lanes: &[Resource]) -> Vec<Resource> {
    let mut found: Vec<Resource> = Vec::new();
    for word in info.split(|c: char| c.is_whitespace() || "{},;|()".contains(c)) {
        // `MB/s` is the one word with a stroke that is no transport.
        let Some(resource) = Resource::parse(without_path(word)).filter(|_| word != "MB/s") else {
            continue;
        };
        if !lanes.contains(&resource) {
            return Vec::new();
        }
        if !found.contains(&resource) {
            found.push(resource);
        }
    }
    found
}

/// `rc_mlx5/mlx5_0:1/path0` without the number of the path, which UCX adds where a device has several.
fn without_path(word: &str) -> &str {
    match word.rsplit_once("/path") {
        Some((name, number)) if !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => word,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(info: &str) -> Vec<String> {
        let lanes = ["rc_mlx5/mlx5_0:1", "rc_mlx5/mlx5_1:1", "cma/memory"];
        let lanes: Vec<Resource> = lanes.iter().map(|lane| Resource::parse(lane).unwrap()).collect();
        named(info, &lanes).iter().map(Resource::to_string).collect()
    }

    #[test]
    fn a_description_names_lanes_with_and_without_paths() {
        let put = "{proto|cb|init} put from host memory length 64";
        let speed = "102.5 MB/s 0.60 us";
        assert_eq!(names(&format!("{put} zero-copy cma/memory {speed}")), ["cma/memory"]);
        assert_eq!(
            names(&format!("{put} zero-copy rc_mlx5/mlx5_0:1/path0 {speed}")),
            ["rc_mlx5/mlx5_0:1"]
        );
        let two = "zero-copy 50% on rc_mlx5/mlx5_0:1/path0 and 50% on rc_mlx5/mlx5_0:1/path1";
        assert_eq!(names(&format!("{put} {two} {speed}")), ["rc_mlx5/mlx5_0:1"]);
        let both = "zero-copy 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1";
        assert_eq!(
            names(&format!("{put} {both} {speed}")),
            ["rc_mlx5/mlx5_0:1", "rc_mlx5/mlx5_1:1"]
        );
    }

    #[test]
    fn a_word_that_is_no_lane_makes_the_rest_worthless() {
        assert!(names("put 50% on rc_mlx5/mlx5_0:1 and 50% on tcp/eth0 9.0 MB/s").is_empty());
        assert!(names("flags:0x1 <no debug info>").is_empty());
    }
}
