//! What a UCX status means here: which kind of error, what died with it, whether trying again can help.
//!
//! UCX groups its codes by the largest thing they kill; the last groups (link, endpoint) are read as such,
//! known or not.

use pdkv_core::{Error, ErrorKind, Result, Retry, Scope};

use crate::abi::constants::*;
use crate::abi::ucs_status_t;
use crate::log;

/// `Ok` for a status that is no failure.
///
/// # Errors
/// The status as an error.
pub(crate) fn check(operation: &'static str, status: ucs_status_t) -> Result<()> {
    if status >= 0 {
        Ok(())
    } else {
        Err(error(operation, status))
    }
}

/// The error of a failing status. What UCX logged while it failed is its cause.
pub(crate) fn error(operation: &'static str, status: ucs_status_t) -> Error {
    let (kind, scope, retry) = meaning(status);
    let mut message = format!("UCX says `{}` (status {status})", text(status));
    if let Some(line) = log::take_last() {
        message.push_str(": ");
        message.push_str(&line);
    }
    Error::new(kind, operation, message)
        .with_scope(scope)
        .with_retry(retry)
        .with("ucx_status", status)
}

fn meaning(status: ucs_status_t) -> (ErrorKind, Scope, Retry) {
    match status {
        UCS_ERR_NO_MEMORY | UCS_ERR_NO_RESOURCE | UCS_ERR_EXCEEDS_LIMIT | UCS_ERR_BUSY => {
            (ErrorKind::Capacity, Scope::Operation, Retry::Later)
        }
        UCS_ERR_INVALID_PARAM | UCS_ERR_OUT_OF_RANGE => (ErrorKind::Config, Scope::Operation, Retry::Never),
        UCS_ERR_INVALID_ADDR => (ErrorKind::Handshake, Scope::Endpoint, Retry::Never),
        // Nothing here cancels requests: UCX does, when a connection turns out not to carry what was asked of it.
        UCS_ERR_UNREACHABLE | UCS_ERR_REJECTED | UCS_ERR_CANCELED => {
            (ErrorKind::PeerUnreachable, Scope::Endpoint, Retry::Later)
        }
        UCS_ERR_UNSUPPORTED | UCS_ERR_NOT_IMPLEMENTED | UCS_ERR_NO_DEVICE | UCS_ERR_NO_ELEM => {
            (ErrorKind::Unsupported, Scope::Operation, Retry::Never)
        }
        UCS_ERR_MESSAGE_TRUNCATED => (ErrorKind::Transfer, Scope::Transfer, Retry::Never),
        UCS_ERR_IO_ERROR
        | UCS_ERR_TIMED_OUT
        | UCS_ERR_NOT_CONNECTED
        | UCS_ERR_CONNECTION_RESET
        | UCS_ERR_LAST_ENDPOINT_FAILURE..=UCS_ERR_FIRST_LINK_FAILURE => {
            (ErrorKind::PeerLost, Scope::Endpoint, Retry::Later)
        }
        _ => (ErrorKind::Transfer, Scope::Transfer, Retry::Later),
    }
}

/// UCX's own words, which no version has changed so far; a table spares a call through the library.
fn text(status: ucs_status_t) -> &'static str {
    match status {
        UCS_OK => "success",
        UCS_INPROGRESS => "operation in progress",
        UCS_ERR_NO_RESOURCE => "no resources are available to initiate the operation",
        UCS_ERR_IO_ERROR => "input/output error",
        UCS_ERR_NO_MEMORY => "out of memory",
        UCS_ERR_INVALID_PARAM => "invalid parameter",
        UCS_ERR_UNREACHABLE => "destination is unreachable",
        UCS_ERR_INVALID_ADDR => "address not valid",
        UCS_ERR_NOT_IMPLEMENTED => "function not implemented",
        UCS_ERR_MESSAGE_TRUNCATED => "message truncated",
        UCS_ERR_NO_ELEM => "no such element",
        UCS_ERR_NO_DEVICE => "no such device",
        UCS_ERR_BUSY => "device is busy",
        UCS_ERR_CANCELED => "request canceled",
        UCS_ERR_OUT_OF_RANGE => "index out of range",
        UCS_ERR_TIMED_OUT => "operation timed out",
        UCS_ERR_EXCEEDS_LIMIT => "user-defined limit was reached",
        UCS_ERR_UNSUPPORTED => "unsupported operation",
        UCS_ERR_REJECTED => "operation rejected by remote peer",
        UCS_ERR_NOT_CONNECTED => "endpoint is not connected",
        UCS_ERR_CONNECTION_RESET => "connection reset by remote peer",
        UCS_ERR_ENDPOINT_TIMEOUT => "endpoint timeout",
        UCS_ERR_LAST_LINK_FAILURE..=UCS_ERR_FIRST_LINK_FAILURE => "link failure",
        UCS_ERR_LAST_ENDPOINT_FAILURE..=UCS_ERR_FIRST_ENDPOINT_FAILURE => "endpoint failure",
        _ => "unknown error",
    }
}

/// What an operation returned instead of a status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Posted {
    /// Done; its callback isn't called.
    Done,
    /// Under way; the callback will be called, and the request must be freed.
    Request(*mut std::ffi::c_void),
    /// Not begun.
    Failed(ucs_status_t),
}

/// Tells the three outcomes apart that UCX packs into one pointer.
#[inline]
pub(crate) fn posted(pointer: crate::abi::ucs_status_ptr_t) -> Posted {
    const FIRST_ERROR: usize = (UCS_ERR_LAST as isize).cast_unsigned();
    match pointer.addr() {
        0 => Posted::Done,
        error if error >= FIRST_ERROR => Posted::Failed(error as ucs_status_t),
        _ => Posted::Request(pointer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pointer_is_done_an_error_or_a_request() {
        assert_eq!(posted(std::ptr::null_mut()), Posted::Done);
        for status in [-1_i8, -25, -80, -100] {
            let pointer = std::ptr::without_provenance_mut((status as isize).cast_unsigned());
            assert_eq!(posted(pointer), Posted::Failed(status));
        }
        let request = std::ptr::without_provenance_mut(0x7f00_1234_5000);
        assert_eq!(posted(request), Posted::Request(request));
    }

    #[test]
    fn every_failure_has_a_kind_and_says_its_number() {
        for status in i8::MIN..0 {
            let error = error("put", status);
            assert!(error.message().contains(&status.to_string()));
        }
        assert_eq!(error("put", -25).kind(), ErrorKind::PeerLost);
        assert_eq!(error("put", -25).scope(), Scope::Endpoint);
        assert_eq!(error("put", -45).kind(), ErrorKind::PeerLost);
        assert_eq!(
            error("put", -16).kind(),
            ErrorKind::PeerUnreachable,
            "nobody here cancelled it"
        );
        assert_eq!(error("map", -4).retry(), Retry::Later);
        assert_eq!(error("open", -22).kind(), ErrorKind::Unsupported);
        assert!(check("put", 0).is_ok() && check("put", 1).is_ok());
    }
}
