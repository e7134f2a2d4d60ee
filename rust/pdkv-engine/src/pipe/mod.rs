//! Pipes: a FIFO of items from one engine to another, each a tag and perhaps a tensor.
//!
//! A pipe is one more stream of a session, opened by the sender and accepted by name. Small items travel inside it;
//! for a large one the receiver names memory of its own, and the sender writes there with whatever way the session
//! has, straight from the tensor. What an item means is the application's affair, and so is a pipe back.
//!
//! The frames are `pdkv_core::pipe`'s. Here are the sender ([`sender`] and its thread in [`pump`]), the receiver
//! ([`receiver`], which reads in the thread that calls it), the memory it lands items in ([`landing`]), and what an
//! engine keeps of them ([`lobby`]).

mod buffer;
mod guest;
mod incoming;
mod input;
mod landing;
mod lobby;
mod pump;
mod queue;
mod receiver;
mod sender;
mod source;
mod upward;

use pdkv_core::{Error, ErrorKind};

pub use buffer::PipeBuffer;
pub(crate) use guest::{Seat, arrive};
pub(crate) use lobby::Pipes;
pub use receiver::{PipeItem, PipeReceiver};
pub use sender::{PipeSender, PipeTensor};

/// What has gone through one end of a pipe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PipeStats {
    /// Items, with and without tensors.
    pub items: u64,
    /// Bytes of tensors.
    pub bytes: u64,
    /// Bytes of them that travelled inside the stream.
    pub inline_bytes: u64,
    /// Bytes of them that went straight from the tensor into the receiver's memory.
    pub direct_bytes: u64,
    /// Bytes of them that were put together on the way, by pdkv or a library on its behalf.
    pub staged_bytes: u64,
}

/// The context pair of errors after a close: who closed.
const CLOSED_BY: &str = "closed_by";

/// This end was closed.
fn closed_here(operation: &'static str) -> Error {
    Error::new(ErrorKind::Closed, operation, "this end of the pipe is closed").with(CLOSED_BY, "here")
}

/// The other end was closed, in order.
fn closed_there(operation: &'static str, message: &str) -> Error {
    Error::new(ErrorKind::Closed, operation, message).with(CLOSED_BY, "peer")
}

/// The stream broke without a word.
fn broken(error: std::io::Error) -> Error {
    Error::new(ErrorKind::PeerLost, "pipe", "the pipe's stream broke").with_source(error)
}

/// The peer said something that makes no sense at this point.
fn misplaced(name: &str) -> Error {
    let text = format!("the other end of the pipe sent `{name}` at the wrong time");
    Error::new(ErrorKind::Integrity, "pipe", text)
}

#[cfg(test)]
mod tests;
