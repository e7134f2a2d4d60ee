//! Sending an active message: a header and a payload gathered from pieces of registered memory.

use std::sync::Arc;

use pdkv_core::{Error, ErrorKind, Result};

use crate::abi::constants::*;
use crate::abi::{Zeroed, ucp_callback, ucp_dt_iov_t, ucp_request_param_t};
use crate::endpoint::{Endpoint, stranger};
use crate::memory::{Access, MemoryHandle, Piece};
use crate::status::{self, Posted};
use crate::tally::{Message, Tally, message_sent};
use crate::worker::WorkerCore;

/// How the payload travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// With the message; the receiver's UCX holds it in buffers of its own until it is taken.
    Eager,
    /// Fetched when the receiver says where to.
    Rendezvous,
}

/// The most pieces of one message.
pub const MESSAGE_MAX_PIECES: usize = 65536;

impl Endpoint {
    /// Sends a header and the bytes of `pieces` as one message. Completion in the tally means that the pieces may
    /// change again. Messages of one endpoint arrive in the order they were sent.
    ///
    /// # Errors
    /// `Region` for a piece that isn't inside its memory, `Capacity` for a header or a list that is too long
    /// (nothing is posted or counted); what UCX says when it fails at once (which is counted).
    pub fn send_message(
        &self,
        id: u16,
        header: &[u8],
        pieces: &[Piece],
        delivery: Delivery,
        tally: &Tally,
    ) -> Result<()> {
        let ep = self.enter("send")?;
        self.same_worker("send", tally)?;
        if header.len() > self.worker.max_header() {
            return Err(Error::new(
                ErrorKind::Capacity,
                "send",
                format!(
                    "a header of `{}` bytes is longer than the `{}` that fit",
                    header.len(),
                    self.worker.max_header()
                ),
            ));
        }
        let mut message = tally.message();
        message.header.clear();
        message.header.extend_from_slice(header);
        gather("send", &self.worker, pieces, Access::Read, &mut message.iov)?;
        for piece in pieces {
            tally.hold_piece(&piece.memory);
        }
        tally.list();
        let mut param = message_param(pieces);
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
        param.flags = match delivery {
            Delivery::Eager => UCP_AM_SEND_FLAG_EAGER,
            Delivery::Rendezvous if !pieces.is_empty() => UCP_AM_SEND_FLAG_RNDV,
            Delivery::Rendezvous => 0,
        };
        param.cb = ucp_callback {
            send: Some(message_sent),
        };
        let (buffer, count) = buffer_of(&message.iov);
        let (head, head_len) = (message.header.as_ptr().cast(), message.header.len());
        message.tally = Some(std::rc::Rc::clone(&tally.core));
        let leaked = Box::into_raw(message);
        param.user_data = leaked.cast();
        tally.begin();
        let send = self.worker.library().ucp().ucp_am_send_nbx;
        // SAFETY: a live endpoint; header and list belong to the leaked message, the pieces to memory that the tally
        // keeps, all until the callback came.
        let posted = unsafe { send(ep, u32::from(id), head, head_len, buffer, count, &raw const param) };
        reclaim(posted, leaked);
        tally.posted("send", posted)
    }
}

/// The pieces as a list for UCX, each checked.
pub(crate) fn gather(
    operation: &'static str,
    worker: &WorkerCore,
    pieces: &[Piece],
    access: Access,
    iov: &mut Vec<ucp_dt_iov_t>,
) -> Result<()> {
    if pieces.len() > MESSAGE_MAX_PIECES {
        return Err(Error::new(
            ErrorKind::Capacity,
            operation,
            format!(
                "a message of `{}` pieces; `{MESSAGE_MAX_PIECES}` is the most",
                pieces.len()
            ),
        ));
    }
    iov.clear();
    for piece in pieces {
        if piece
            .memory
            .handle()
            .is_some_and(|handle| !handle.context().same(worker.context()))
        {
            return Err(stranger(operation, "memory", "context"));
        }
        let buffer = piece.address(operation, access)?;
        iov.push(ucp_dt_iov_t {
            buffer,
            length: piece.len as usize,
        });
    }
    Ok(())
}

/// Parameters that tell the datatype, and the memory handle if all pieces have the same.
pub(crate) fn message_param(pieces: &[Piece]) -> ucp_request_param_t {
    let mut param = ucp_request_param_t::zeroed();
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK
        | UCP_OP_ATTR_FIELD_USER_DATA
        | UCP_OP_ATTR_FIELD_DATATYPE
        | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    param.memory_type = UCS_MEMORY_TYPE_HOST;
    param.datatype = if pieces.len() == 1 {
        contiguous()
    } else {
        UCP_DATATYPE_IOV
    };
    if let Some(memory) = common(pieces) {
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
        param.memh = memory.handle();
    }
    param
}

fn common(pieces: &[Piece]) -> Option<&Arc<MemoryHandle>> {
    let first = &pieces.first()?.memory;
    pieces
        .iter()
        .all(|piece| piece.memory.same(first))
        .then(|| first.handle())?
}

/// One byte an element.
fn contiguous() -> u64 {
    (1 << UCP_DATATYPE_SHIFT) | UCP_DATATYPE_CONTIG
}

/// Buffer and count as UCX wants them: one piece is given as itself.
pub(crate) fn buffer_of(iov: &[ucp_dt_iov_t]) -> (*mut std::ffi::c_void, usize) {
    match iov {
        [one] => (one.buffer, one.length),
        list => (list.as_ptr().cast_mut().cast(), list.len()),
    }
}

/// Takes back a leaked message for which no callback will come.
pub(crate) fn reclaim(posted: crate::abi::ucs_status_ptr_t, leaked: *mut Message) {
    if !matches!(status::posted(posted), Posted::Request(_)) {
        // SAFETY: leaked by the caller a moment ago, and UCX is done with it.
        let mut message = unsafe { Box::from_raw(leaked) };
        if let Some(tally) = message.tally.take() {
            tally.recycle(message);
        }
    }
}
